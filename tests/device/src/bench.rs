//! Costs on this GPU, and of what a job would do itself in the same run.

use std::fmt::Write as _;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use gdrd_client::{AcquireOptions, Client, Gpu, Mapping, Session};
use gdrd_client_sys::ipc::OpenedIpc;
use gdrd_hal::GpuMemory as _;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use crate::daemon::{Daemon, connect, one_thread, session};
use crate::host::Host;
use crate::leases::Peer;
use crate::peers::{hear, say};

const MIB: u64 = 1 << 20;
const ROUNDS: usize = 25;
/// Processes, each of which takes as long as a context of CUDA to start.
const FIRST_ROUNDS: usize = 5;
/// A hang ends the measurement here.
const SETTLING: Duration = Duration::from_secs(30);
/// Sizes, and how many times faster than a fresh allocation a warm lease must be.
const SIZES: [(u64, f64); 5] =
    [(2 * MIB, 4.0), (16 * MIB, 4.0), (128 * MIB, 4.0), (1024 * MIB, 4.0), (16384 * MIB, 2.5)];
/// Most memory that fresh allocations of one size take together.
const FRESH_BYTES: u64 = 96 << 30;
/// Largest size of the rule that time does not grow with size.
const FLAT_UP_TO: u64 = 1024 * MIB;
const MOST_GROWTH: f64 = 2.0;
const LEAST_SCRUB_SHARE: f64 = 0.8;
/// One ready buffer of each size, and room for it.
const CONFIG: &str = "[limits]\nmax_lease_bytes = 34_359_738_368\n[pool]\nready_target_per_class = 1\n\
    ready_max_bytes_per_class = 68_719_476_736\nclean_max_bytes = 0\nclean_target_per_class = 0\nheadroom_bytes = 0\n\
    [gpu]\nworker_idle_s = 600\n[[policy.lease]]\nwho = \"daemon\"\nmax_bytes = 137_438_953_472\n";

/// What the first table shows.
const HEADER: &str = "\
Time to a usable pointer in the client, microseconds p50 (and p99 of *warm*), of 25 rounds, or as many as memory has room
for. Each way but *warm* makes the memory in one process and maps it in another; what was made is kept to the end, so that the
driver cannot hand out again what it just took back.

- *warm*: an acquire from a running daemon with a ready buffer (RDMA-capable, zeroed, exported, registered) whose memory this
  session had before and keeps mapped, 4 GiB of it by default; what is longer is imported and mapped again.
- *first*: the same for memory that neither the session nor its process has had, the acquire, then import and map: by 5 other
  processes, which have imported something else before.
- *fresh*: the same kind of memory made for this one use: RDMA-capable and verified so, zeroed, exported as memory and as dma-buf,
  then imported and mapped. This is what the verdict compares with; how *warm* compares with *plain* is said beside it.
- *again*: *fresh* where the round before gave its memory back first, as in a loop. Giving it back is not counted.
- *plain*: less than a lease has: made, mapped and exported as memory alone, not zeroed, then imported and mapped.
- *cuIpc*: cuMemAlloc and its IPC handle, opened in the other process. No NIC can be given such memory by a descriptor.

| size MiB | warm | warm p99 | of it acquire | first | fresh | again | plain | cuIpc | fresh / warm | fresh / first | again / warm | plain / warm |
|---|---|---|---|---|---|---|---|---|---|---|---|---|
";

/// Times of one way to a usable pointer.
struct Times(Vec<Duration>);

impl Times {
    /// Each, microseconds.
    fn all(&self) -> String {
        self.0.iter().map(|time| format!("{:.0}", time.as_secs_f64() * 1e6)).collect::<Vec<_>>().join(" ")
    }

    fn at(&self, share: f64) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        let last = sorted.len().saturating_sub(1);
        let place = (0..=last).find(|place| {
            f64::from(u32::try_from(*place).unwrap_or(0)) >= share * f64::from(u32::try_from(last).unwrap_or(0))
        });
        sorted.get(place.unwrap_or(last)).map_or(0.0, |time| time.as_secs_f64() * 1e6)
    }
}

/// The table, and what it proves or disproves.
pub(crate) fn run(host: &Host) -> anyhow::Result<(String, Vec<(String, bool)>)> {
    let mut table = String::new();
    let mut verdicts = Vec::new();
    table.push_str(HEADER);
    let daemon = Daemon::start(host, CONFIG)?;
    let runtime = one_thread()?;
    let client = runtime.block_on(connect(&daemon.runtime_dir()))?;
    let session = runtime.block_on(session(&daemon.runtime_dir()))?;
    let (mut flat, mut raw) = (Vec::new(), String::new());
    for (bytes, factor) in SIZES {
        let (plain, ipc) = (made(host, "maker", bytes)?, made(host, "ipc-maker", bytes)?);
        let (fresh, again) = (fresh(host, bytes, true)?, fresh(host, bytes, false)?);
        let (warm, acquire) =
            runtime.block_on(warm(host, &client, &session, bytes)).with_context(|| format!("{bytes} bytes"))?;
        let first = runtime.block_on(first(host, &daemon, &client, bytes)).with_context(|| format!("{bytes} bytes"))?;
        let ways = [&warm, &acquire, &first, &fresh, &again, &plain, &ipc];
        for (name, times) in ["warm", "acquire", "first", "fresh", "again", "plain", "cuIpc"].iter().zip(ways) {
            writeln!(raw, "{} {name}: {}", bytes / MIB, times.all())?;
        }
        let [w50, f50, g50, p50, i50] = [&warm, &fresh, &again, &plain, &ipc].map(|times| times.at(0.5));
        let (w99, a50, n50) = (warm.at(0.99), acquire.at(0.5), first.at(0.5));
        writeln!(
            table,
            "| {} | {w50:.0} | {w99:.0} | {a50:.0} | {n50:.0} | {f50:.0} | {g50:.0} | {p50:.0} | {i50:.0} | {:.1} | {:.1} | {:.1} | {:.1} |",
            bytes / MIB,
            f50 / w50,
            f50 / n50,
            g50 / w50,
            p50 / w50
        )?;
        let (ratio, of_plain) = (f50 / w50, p50 / w50);
        let than_plain = format!("{of_plain:.1} times faster than memory without zeroes and dma-buf");
        verdicts.push((
            format!("warm {} MiB: {ratio:.1} times faster than fresh, {factor} asked; {than_plain}", bytes / MIB),
            ratio >= factor,
        ));
        if bytes <= FLAT_UP_TO {
            flat.push(w50);
        }
    }
    let empty = runtime.block_on(empty_calls(&client))?;
    writeln!(
        table,
        "\nAn empty gRPC call to the same daemon takes {:.0} us p50: of an acquire, the rest is gdrd's.",
        empty.at(0.5)
    )?;
    writeln!(
        table,
        "\nA hit in the client's cache of registrations of adopted memory asks whose the address is (BUFFER_ID): {:.0} ns.",
        crate::identity::cost_ns(&host.own)?
    )?;
    let growth = flat.iter().copied().fold(0.0, f64::max) / flat.iter().copied().fold(f64::MAX, f64::min);
    verdicts
        .push((format!("warm time grows by {growth:.2} up to 1 GiB, {MOST_GROWTH} allowed"), growth <= MOST_GROWTH));
    drop((session, daemon));
    let share = scrubs(host, &mut table)?;
    verdicts
        .push((format!("scrub at {share:.2} of cuMemsetD8, {LEAST_SCRUB_SHARE} asked"), share >= LEAST_SCRUB_SHARE));
    starts(host, &mut table)?;
    steps(host, &mut table)?;
    writeln!(
        table,
        "\nEvery time of the first table, in the order in which it was taken, by size in MiB:\n\n```\n{raw}```"
    )?;
    Ok((table, verdicts))
}

/// Rounds for which memory has room when nothing is given back.
fn rounds(bytes: u64) -> usize {
    ROUNDS.min(usize::try_from(FRESH_BYTES / bytes).unwrap_or(ROUNDS))
}

/// What a job does without a daemon: one process makes and exports, another imports. A descriptor goes over by
/// pidfd_getfd(2), which costs no more than a message on a socket.
fn made(host: &Host, role: &str, bytes: u64) -> anyhow::Result<Times> {
    let mut maker = Peer::start(role, Path::new("-"), &host.gpu.uuid, bytes)?;
    maker.hear()?;
    let pidfd = pidfd_open(Pid::from_child(&maker.child), PidfdFlags::empty())?;
    let mut times = Vec::new();
    for _ in 0..rounds(bytes) {
        let started = Instant::now();
        maker.say("make")?;
        let told = maker.hear()?;
        if role == "maker" {
            let memory = pidfd_getfd(&pidfd, told.parse()?, PidfdGetfdFlags::empty())?;
            let mapped = Mapping::import(&host.own, memory.as_fd(), bytes)?;
            times.push(started.elapsed());
            drop(mapped);
        } else {
            let opened = OpenedIpc::open(&host.own, &told)?;
            times.push(started.elapsed());
            drop(opened);
        }
        maker.say("keep")?;
    }
    maker.say("end")?;
    Ok(Times(times))
}

/// Memory of the kind that a lease has, made for one use by a worker process, then imported and mapped here.
fn fresh(host: &Host, bytes: u64, is_kept: bool) -> anyhow::Result<Times> {
    let pool = host.pool(600);
    pool.usage(&host.uuid())?;
    let (mut times, mut kept) = (Vec::new(), Vec::new());
    for _ in 0..rounds(bytes) {
        let started = Instant::now();
        let memory = pool.allocate(&host.uuid(), bytes)?;
        let mapped = Mapping::import(&host.own, memory.memory_fd(), bytes)?;
        times.push(started.elapsed());
        ensure!(memory.dma_buf_fd().is_some(), "the memory has no dma-buf");
        drop(mapped);
        if is_kept {
            kept.push(memory);
        }
    }
    Ok(Times(times))
}

/// What a call costs that does nothing at either end.
async fn empty_calls(client: &Client) -> anyhow::Result<Times> {
    let mut times = Vec::new();
    for _ in 0..4 * ROUNDS {
        let started = Instant::now();
        client.ping().await?;
        times.push(started.elapsed());
    }
    Ok(Times(times))
}

/// Whole rounds, and of them the acquires.
async fn warm(host: &Host, client: &Client, session: &Session, bytes: u64) -> anyhow::Result<(Times, Times)> {
    let (mut times, mut acquires) = (Vec::new(), Vec::new());
    let options = || AcquireOptions::on_gpu(&host.gpu.uuid, bytes);
    // Cold ones: the class is used, and ready buffers are made behind them.
    for _ in 0..2 {
        let buffer = session.acquire(options()).await?;
        buffer.device_memory()?;
        buffer.release().await?;
        settled(client).await?;
    }
    for _ in 0..ROUNDS {
        let started = Instant::now();
        let buffer = session.acquire(options()).await?;
        let acquired = started.elapsed();
        let address = buffer.device_memory()?.device_address();
        times.push(started.elapsed());
        acquires.push(acquired);
        ensure!(address != 0, "the buffer is mapped nowhere");
        buffer.release().await?;
        settled(client).await?;
    }
    Ok((Times(times), Times(acquires)))
}

/// A warm acquire and the mapping of what it gave, by processes each of which has had nothing from the daemon.
async fn first(host: &Host, daemon: &Daemon, client: &Client, bytes: u64) -> anyhow::Result<Times> {
    let mut times = Vec::new();
    for _ in 0..FIRST_ROUNDS {
        let mut peer = Peer::start("first", &daemon.runtime_dir(), &host.gpu.uuid, bytes)?;
        times.push(Duration::from_nanos(peer.hear()?.parse()?));
        peer.say("end")?;
        ensure!(peer.hear()? == "released", "the lease was not released");
        settled(client).await?;
    }
    Ok(Times(times))
}

/// The other process of it.
pub(crate) async fn acquire_first(folder: &Path, gpu: &str, bytes: u64) -> anyhow::Result<()> {
    let session = session(folder).await?;
    // A driver's first import takes longer, whatever it imports.
    let own = Gpu::open(gpu)?;
    let made = Mapping::create(&own, 2 * MIB)?;
    drop(Mapping::import(&own, made.export_memory()?.as_fd(), 2 * MIB)?);
    let started = Instant::now();
    let buffer = session.acquire(AcquireOptions::on_gpu(gpu, bytes)).await?;
    let address = buffer.device_memory()?.device_address();
    let time = started.elapsed();
    ensure!(address != 0, "the buffer is mapped nowhere");
    say(&time.as_nanos().to_string())?;
    hear()?;
    buffer.release().await?;
    say("released")
}

/// Returns when what was released is scrubbed, registered and ready again.
async fn settled(client: &Client) -> anyhow::Result<()> {
    let since = Instant::now();
    loop {
        let stats = client.stats().await?;
        let in_state = |state: &str| {
            let of = |stat: &&gdrd_client::v1::Stat| {
                stat.name == "gdrd_buffer_bytes" && stat.labels.get("state").is_some_and(|word| word == state)
            };
            stats.iter().filter(of).map(|stat| stat.value).sum::<f64>()
        };
        if in_state("changing") == 0.0 && in_state("ready") > 0.0 {
            return Ok(());
        }
        ensure!(since.elapsed() < SETTLING, "buffers are still changing after {SETTLING:?}");
    }
}

/// Bandwidth of scrubs through the worker, and of cuMemsetD8 in this process; the least share of the two.
fn scrubs(host: &Host, table: &mut String) -> anyhow::Result<f64> {
    writeln!(
        table,
        "\nZeroing, GB/s, best of {ROUNDS}: by the worker, its socket included, and by cuMemsetD8 here.\n"
    )?;
    writeln!(table, "| size MiB | scrub | cuMemsetD8 | share |\n|---|---|---|---|")?;
    let pool = host.pool(600);
    let mut least = f64::MAX;
    for bytes in [1024 * MIB, 16384 * MIB] {
        let memory = pool.allocate(&host.uuid(), bytes)?;
        let mapping = Mapping::import(&host.own, memory.memory_fd(), bytes)?;
        let rate =
            |best: Duration| f64::from(u32::try_from(bytes / MIB).unwrap_or(0)) * 1.048_576e-3 / best.as_secs_f64();
        let scrub = rate(best(|| Ok(memory.scrub()?))?);
        let memset = rate(best(|| Ok(mapping.fill(0, bytes, 0)?))?);
        writeln!(table, "| {} | {scrub:.0} | {memset:.0} | {:.2} |", bytes / MIB, scrub / memset)?;
        least = least.min(scrub / memset);
    }
    Ok(least)
}

fn best(mut call: impl FnMut() -> anyhow::Result<()>) -> anyhow::Result<Duration> {
    let mut best = Duration::MAX;
    for _ in 0..ROUNDS {
        let started = Instant::now();
        call()?;
        best = best.min(started.elapsed());
    }
    Ok(best)
}

/// Each step of what a job does itself, in this process.
fn steps(host: &Host, table: &mut String) -> anyhow::Result<()> {
    writeln!(
        table,
        "\nThe steps of a job that makes its own, microseconds p50 of {ROUNDS}: cuMemCreate, reserved, mapped and opened; exported as \
         memory, and as dma-buf; imported, reserved, mapped and opened again.\n"
    )?;
    writeln!(
        table,
        "| size MiB | create and map | export memory | export dma-buf | import and map |\n|---|---|---|---|---|"
    )?;
    for (bytes, _) in SIZES {
        let mut times: [Vec<Duration>; 4] = Default::default();
        for _ in 0..ROUNDS {
            let [create, export, dma_buf, import] = &mut times;
            let made = timed(create, || Ok(Mapping::create(&host.own, bytes)?))?;
            let memory = timed(export, || Ok(made.export_memory()?))?;
            drop(timed(dma_buf, || Ok(made.export_dma_buf()?))?);
            drop(timed(import, || Ok(Mapping::import(&host.own, memory.as_fd(), bytes)?))?);
        }
        let [create, export, dma_buf, import] = times.map(|times| Times(times).at(0.5));
        writeln!(table, "| {} | {create:.0} | {export:.0} | {dma_buf:.0} | {import:.0} |", bytes / MIB)?;
    }
    Ok(())
}

fn timed<T>(times: &mut Vec<Duration>, call: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<T> {
    let started = Instant::now();
    let done = call()?;
    times.push(started.elapsed());
    Ok(done)
}

/// What a worker costs, and what one allocation costs in it.
fn starts(host: &Host, table: &mut String) -> anyhow::Result<()> {
    let before = host.used_mib()?;
    let pool = host.pool(600);
    let started = Instant::now();
    pool.usage(&host.uuid())?;
    let start = started.elapsed();
    let context = host.used_mib()?.saturating_sub(before);
    writeln!(table, "\nA worker starts in {:.0} ms and takes {context} MiB of GPU memory.", start.as_secs_f64() * 1e3)?;
    writeln!(table, "An allocation in it, made, zeroed and exported twice (memory and dma-buf), microseconds p50:\n")?;
    writeln!(table, "| size MiB | allocate | give back |\n|---|---|---|")?;
    for (bytes, _) in SIZES {
        let (mut made, mut given) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            let started = Instant::now();
            let memory = pool.allocate(&host.uuid(), bytes)?;
            made.push(started.elapsed());
            let started = Instant::now();
            drop(memory);
            given.push(started.elapsed());
        }
        writeln!(table, "| {} | {:.0} | {:.0} |", bytes / MIB, Times(made).at(0.5), Times(given).at(0.5))?;
    }
    Ok(())
}
