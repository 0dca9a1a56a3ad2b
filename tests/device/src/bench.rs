//! Costs on this GPU, and of what a job would do itself in the same run.

use std::fmt::Write as _;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use gdrd_client::{AcquireOptions, Client, Mapping, Session};
use gdrd_hal::GpuMemory as _;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use crate::daemon::{Daemon, connect, runtime, session};
use crate::host::Host;
use crate::leases::Peer;

const MIB: u64 = 1 << 20;
const ROUNDS: usize = 25;
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
    [gpu]\nworker_idle_s = 600\n[[policy.lease]]\nwho = \"uid:0\"\nmax_bytes = 137_438_953_472\n";

/// What the first table shows.
const HEADER: &str = "\
Time to a usable pointer in the client, microseconds, of 25 rounds, or as many as memory has room for.

- *fresh*: what a job does itself: one process makes, maps and exports, another imports and maps. Not zeroed.
- *recycled*: the same in a loop that frees each time, so that the driver may hand out what it just took back.
- *warm*: an acquire from a running daemon with a ready buffer, zeroed, then import and map.

| size MiB | fresh p50 | fresh p99 | recycled p50 | warm p50 | warm p99 | of it acquire p50 | fresh / warm |
|---|---|---|---|---|---|---|---|
";

/// Times of one way to a usable pointer.
struct Times(Vec<Duration>);

impl Times {
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
    let runtime = runtime()?;
    let client = runtime.block_on(connect(&daemon.runtime_dir()))?;
    let session = runtime.block_on(session(&daemon.runtime_dir()))?;
    let mut flat = Vec::new();
    for (bytes, factor) in SIZES {
        let (fresh, again) = (made(host, bytes, true)?, made(host, bytes, false)?);
        let (warm, acquire) =
            runtime.block_on(warm(host, &client, &session, bytes)).with_context(|| format!("{bytes} bytes"))?;
        let ratio = fresh.at(0.5) / warm.at(0.5);
        let (r50, f50, f99, w50, w99, a50) =
            (again.at(0.5), fresh.at(0.5), fresh.at(0.99), warm.at(0.5), warm.at(0.99), acquire.at(0.5));
        writeln!(
            table,
            "| {} | {f50:.0} | {f99:.0} | {r50:.0} | {w50:.0} | {w99:.0} | {a50:.0} | {ratio:.1} |",
            bytes / MIB
        )?;
        verdicts.push((
            format!("warm {} MiB: {ratio:.1} times faster than fresh, {factor} asked", bytes / MIB),
            ratio >= factor,
        ));
        if bytes <= FLAT_UP_TO {
            flat.push(w50);
        }
    }
    let growth = flat.iter().copied().fold(0.0, f64::max) / flat.iter().copied().fold(f64::MAX, f64::min);
    verdicts
        .push((format!("warm time grows by {growth:.2} up to 1 GiB, {MOST_GROWTH} allowed"), growth <= MOST_GROWTH));
    drop((session, daemon));
    let share = scrubs(host, &mut table)?;
    verdicts
        .push((format!("scrub at {share:.2} of cuMemsetD8, {LEAST_SCRUB_SHARE} asked"), share >= LEAST_SCRUB_SHARE));
    starts(host, &mut table)?;
    Ok((table, verdicts))
}

/// What a job does without a daemon: one process makes and exports, another imports. The descriptor goes over by
/// pidfd_getfd(2), which costs no more than a message on a socket.
///
/// Fresh memory is kept to the end, so that each round gets other; else the driver may hand out again what was freed.
fn made(host: &Host, bytes: u64, is_fresh: bool) -> anyhow::Result<Times> {
    let mut maker = Peer::start("maker", Path::new("-"), &host.gpu.uuid, bytes)?;
    maker.hear()?;
    let pidfd = pidfd_open(Pid::from_child(&maker.child), PidfdFlags::empty())?;
    let mut times = Vec::new();
    let room = usize::try_from(FRESH_BYTES / bytes).unwrap_or(ROUNDS);
    for _ in 0..if is_fresh { ROUNDS.min(room) } else { ROUNDS } {
        let started = Instant::now();
        maker.say("make")?;
        let number: i32 = maker.hear()?.parse()?;
        let memory = pidfd_getfd(&pidfd, number, PidfdGetfdFlags::empty())?;
        let mapped = Mapping::import(&host.own, memory.as_fd(), bytes)?;
        times.push(started.elapsed());
        drop((mapped, memory));
        maker.say(if is_fresh { "keep" } else { "done" })?;
    }
    maker.say("end")?;
    Ok(Times(times))
}

async fn warm(host: &Host, client: &Client, session: &Session, bytes: u64) -> anyhow::Result<(Times, Times)> {
    let (mut times, mut acquires) = (Vec::new(), Vec::new());
    let options = || AcquireOptions::on_gpu(&host.gpu.uuid, bytes);
    // Cold ones: the class is used, and ready buffers are made behind them.
    for _ in 0..2 {
        session.acquire(options()).await?.release().await?;
        settled(client).await?;
    }
    for _ in 0..ROUNDS {
        let started = Instant::now();
        let buffer = session.acquire(options()).await?;
        acquires.push(started.elapsed());
        let mapped = Mapping::import(&host.own, buffer.try_clone_fd()?.as_fd(), bytes)?;
        times.push(started.elapsed());
        drop(mapped);
        buffer.release().await?;
        settled(client).await?;
    }
    Ok((Times(times), Times(acquires)))
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
