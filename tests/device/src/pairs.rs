//! Every ordered pair of GPUs: memory leased on one and used from the other by another process, what that carries, and
//! whether path advice says so.

use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use gdrd_client::v1::advise_path_request::To;
use gdrd_client::v1::{AdvisePathRequest, AdvisePathResponse};
use gdrd_client::{AcquireOptions, BounceBuffer, Buffer, Client, Gpu, Mapping, Session};
use gdrd_nvml::GpuReport;

use crate::Check;
use crate::daemon::{CONFIG, Daemon, connect, runtime, session};
use crate::host::Host;
use crate::leases::Peer;
use crate::peers::{CHUNK_BYTES, chunk, chunks, hear, pattern, say};

const MIB: u64 = 1 << 20;
/// What is checked byte by byte.
const CHECKED_BYTES: u64 = 256 * MIB;
/// What is moved for its speed.
const MEASURED_BYTES: u64 = 1024 * MIB;
const BANDWIDTH_ROUNDS: usize = 10;
const LATENCY_ROUNDS: usize = 500;
/// What latency is measured with.
const WORD_BYTES: u64 = 8;
/// How far an estimate may be from what is measured, as a share of it.
const TOLERANCE: f64 = 0.25;
/// Marks what the far GPU writes.
const ANSWER: u64 = 1 << 63;

const HEADER: &str = "\
Pairs of GPUs: memory leased on one, mapped by another process for the other, which reads and writes it. GB/s of 1 GiB, best
of 10, and microseconds of 8 bytes, p50 of 500, both with the call that starts it and waits for it. *staged*: the same through
pinned host memory, in pieces of 8 MiB that come and go at the same time.

| leased on | used from | way | read GB/s | advised | write GB/s | advised | read µs | write µs | staged read GB/s | advised | staged write GB/s | staged read µs | staged write µs |
|---|---|---|---|---|---|---|---|---|---|---|---|---|---|
";

pub(crate) fn checks(host: &Host) -> Vec<Check> {
    if host.gpus.len() < 2 {
        return Vec::new();
    }
    let check = |name: &str, check: fn(&Host) -> anyhow::Result<()>| -> Check { (name.to_owned(), Box::new(check)) };
    vec![
        check("memory leased on one gpu is read and written from another, every byte right", all_pairs_are_right),
        check("a mapping opened to a peer is used from it in one process", opened_mappings_are_right),
        check("memory goes from one gpu to another through host memory", bounced_memory_is_right),
    ]
}

/// Why none of them is run.
pub(crate) fn skipped(host: &Host) -> Option<String> {
    let reason = "there is one gpu here that is served, and a pair needs two";
    (host.gpus.len() < 2).then(|| format!("memory of one gpu used from another, and its table: {reason}"))
}

/// Each ordered pair.
fn pairs(host: &Host) -> impl Iterator<Item = (&GpuReport, &GpuReport)> {
    let all = host.gpus.iter().flat_map(|from| host.gpus.iter().map(move |to| (from, to)));
    all.filter(|(from, to)| from.uuid != to.uuid)
}

fn all_pairs_are_right(host: &Host) -> anyhow::Result<()> {
    let daemon = Daemon::start(host, CONFIG)?;
    let runtime = runtime()?;
    let session = runtime.block_on(session(&daemon.runtime_dir()))?;
    for (on, from) in pairs(host) {
        let buffer = runtime.block_on(session.acquire(AcquireOptions::on_gpu(&on.uuid, CHECKED_BYTES)))?;
        fill(buffer.device_memory()?, CHECKED_BYTES, 0)?;
        let mut peer = Peer::start("mapper", &daemon.runtime_dir(), &from.uuid, CHECKED_BYTES)?;
        peer.say(&buffer.lease_id().to_string())?;
        let heard = peer.hear().with_context(|| format!("{} used from {}", on.bdf, from.bdf))?;
        ensure!(heard == "read", "{heard}");
        let heard = peer.hear()?;
        ensure!(heard == "written", "{heard}");
        verify(buffer.device_memory()?, CHECKED_BYTES, ANSWER)
            .with_context(|| format!("{} written from {}", on.bdf, from.bdf))?;
        peer.say("end")?;
    }
    Ok(())
}

fn opened_mappings_are_right(host: &Host) -> anyhow::Result<()> {
    let daemon = Daemon::start(host, CONFIG)?;
    let runtime = runtime()?;
    let session = runtime.block_on(session(&daemon.runtime_dir()))?;
    for (on, from) in pairs(host) {
        let theirs = runtime.block_on(session.acquire(AcquireOptions::on_gpu(&on.uuid, 16 * MIB)))?;
        let own = runtime.block_on(session.acquire(AcquireOptions::on_gpu(&from.uuid, 16 * MIB)))?;
        let (theirs, own) = (theirs.device_memory()?, own.device_memory()?);
        fill(theirs, 16 * MIB, 0)?;
        theirs.allow(&[theirs.gpu(), own.gpu()])?;
        own.gpu().copy((theirs, 0), (own, 0), 16 * MIB)?;
        verify(own, 16 * MIB, 0).with_context(|| format!("{} opened to {}", on.bdf, from.bdf))?;
    }
    Ok(())
}

fn bounced_memory_is_right(host: &Host) -> anyhow::Result<()> {
    for (on, from) in pairs(host) {
        let (on, from) = (Gpu::open(&on.uuid)?, Gpu::open(&from.uuid)?);
        let (theirs, own) = (Mapping::create(&on, CHECKED_BYTES)?, Mapping::create(&from, CHECKED_BYTES)?);
        fill(&theirs, CHECKED_BYTES, 0)?;
        BounceBuffer::new(&from)?.copy((&theirs, 0), (&own, 0), CHECKED_BYTES)?;
        verify(&own, CHECKED_BYTES, 0).with_context(|| format!("from {} to {}", on.uuid(), from.uuid()))?;
    }
    Ok(())
}

fn fill(memory: &Mapping, bytes: u64, mark: u64) -> anyhow::Result<()> {
    let mut content = pattern();
    for (number, offset) in chunks(bytes) {
        chunk(&mut content, number | mark);
        memory.write_from(offset, &content)?;
    }
    Ok(())
}

fn verify(memory: &Mapping, bytes: u64, mark: u64) -> anyhow::Result<()> {
    let (mut content, mut found) = (pattern(), vec![0; CHUNK_BYTES]);
    for (number, offset) in chunks(bytes) {
        chunk(&mut content, number | mark);
        memory.read_into(offset, &mut found)?;
        ensure!(found == content, "chunk {number} of {bytes} bytes differs");
    }
    Ok(())
}

/// Memory of a lease on another GPU, and of an own one here.
struct Pair {
    gpu: Arc<Gpu>,
    lease: Buffer,
    theirs: Mapping,
    own: Buffer,
}

impl Pair {
    async fn open(session: &Session, lease_id: u64, gpu: &str, bytes: u64) -> anyhow::Result<Self> {
        let lease = session.open_lease(lease_id).await.context("open the lease")?;
        let gpu = Gpu::open(gpu)?;
        let theirs = lease.device_memory_on(&gpu).context("map it for another gpu")?;
        let own = session.acquire(AcquireOptions::on_gpu(gpu.uuid(), bytes)).await?;
        Ok(Self { gpu, lease, theirs, own })
    }

    fn read(&self, bytes: u64) -> anyhow::Result<()> {
        Ok(self.gpu.copy((&self.theirs, 0), (self.own.device_memory()?, 0), bytes)?)
    }

    fn write(&self, bytes: u64) -> anyhow::Result<()> {
        Ok(self.gpu.copy((self.own.device_memory()?, 0), (&self.theirs, 0), bytes)?)
    }
}

/// The other process: uses a lease from its own GPU, then measures it when asked to.
pub(crate) async fn use_from(folder: &Path, gpu: &str, bytes: u64) -> anyhow::Result<()> {
    let session = session(folder).await?;
    let pair = Pair::open(&session, hear()?.parse()?, gpu, bytes).await?;
    let own = pair.own.device_memory()?;
    pair.read(bytes)?;
    verify(own, bytes, 0).context("what was read")?;
    say("read")?;
    fill(own, bytes, ANSWER)?;
    pair.write(bytes)?;
    say("written")?;
    if hear()? == "measure" {
        say(&figures(&pair, bytes)?.iter().map(|figure| format!("{figure:.3}")).collect::<Vec<_>>().join(" "))?;
        hear()?;
    }
    Ok(())
}

/// Read and write: GB/s, then microseconds; and the same four staged.
fn figures(pair: &Pair, bytes: u64) -> anyhow::Result<[f64; 8]> {
    let mut figures = [0.0; 8];
    let mut bounce = BounceBuffer::new(&pair.gpu)?;
    let (near, far) = (pair.own.device_memory()?, pair.lease.device_memory()?);
    figures[0] = bandwidth(bytes, || pair.read(bytes))?;
    figures[1] = bandwidth(bytes, || pair.write(bytes))?;
    figures[2] = latency(|| pair.read(WORD_BYTES))?;
    figures[3] = latency(|| pair.write(WORD_BYTES))?;
    fill(far, bytes, 0)?;
    figures[4] = bandwidth(bytes, || Ok(bounce.copy((far, 0), (near, 0), bytes)?))?;
    verify(near, bytes, 0).context("what was staged")?;
    figures[5] = bandwidth(bytes, || Ok(bounce.copy((near, 0), (far, 0), bytes)?))?;
    figures[6] = latency(|| Ok(bounce.copy((far, 0), (near, 0), WORD_BYTES)?))?;
    figures[7] = latency(|| Ok(bounce.copy((near, 0), (far, 0), WORD_BYTES)?))?;
    Ok(figures)
}

fn timed(rounds: usize, mut call: impl FnMut() -> anyhow::Result<()>) -> anyhow::Result<Vec<Duration>> {
    let mut times = Vec::with_capacity(rounds);
    for _ in 0..rounds {
        let started = Instant::now();
        call()?;
        times.push(started.elapsed());
    }
    times.sort_unstable();
    Ok(times)
}

/// GB/s of the best round.
fn bandwidth(bytes: u64, call: impl FnMut() -> anyhow::Result<()>) -> anyhow::Result<f64> {
    let best = timed(BANDWIDTH_ROUNDS, call)?.first().copied().context("no round")?;
    Ok(f64::from(u32::try_from(bytes / MIB)?) * 1.048_576e-3 / best.as_secs_f64())
}

/// Microseconds of the middle round.
fn latency(call: impl FnMut() -> anyhow::Result<()>) -> anyhow::Result<f64> {
    let times = timed(LATENCY_ROUNDS, call)?;
    Ok(times.get(times.len() / 2).context("no round")?.as_secs_f64() * 1e6)
}

async fn advice(client: &Client, from: &GpuReport, to: &GpuReport) -> anyhow::Result<AdvisePathResponse> {
    let to = Some(To::Gpu(to.uuid.clone()));
    Ok(client.advise_path(AdvisePathRequest { from: from.uuid.clone(), to }).await?)
}

/// The table, and whether advice fits it; nothing with one GPU.
pub(crate) fn run(host: &Host) -> anyhow::Result<(String, Vec<(String, bool)>)> {
    let mut verdicts = Vec::new();
    if host.gpus.len() < 2 {
        return Ok((String::new(), verdicts));
    }
    let mut table = HEADER.to_owned();
    let daemon = Daemon::start(host, CONFIG)?;
    let runtime = runtime()?;
    let client = runtime.block_on(connect(&daemon.runtime_dir()))?;
    let session = runtime.block_on(session(&daemon.runtime_dir()))?;
    for (on, from) in pairs(host) {
        let (there, back) = runtime.block_on(async {
            Ok::<_, anyhow::Error>((advice(&client, on, from).await?, advice(&client, from, on).await?))
        })?;
        let buffer = runtime.block_on(session.acquire(AcquireOptions::on_gpu(&on.uuid, MEASURED_BYTES)))?;
        fill(buffer.device_memory()?, MEASURED_BYTES, 0)?;
        let mut peer = Peer::start("mapper", &daemon.runtime_dir(), &from.uuid, MEASURED_BYTES)?;
        peer.say(&buffer.lease_id().to_string())?;
        ensure!(peer.hear()? == "read" && peer.hear()? == "written", "the pair does not work");
        peer.say("measure")?;
        let figures: Result<Vec<f64>, _> = peer.hear()?.split(' ').map(str::parse).collect();
        let figures = figures?;
        peer.say("end")?;
        let [read, write, read_us, write_us, staged_read, staged_write, staged_read_us, staged_write_us] = figures[..]
        else {
            anyhow::bail!("{} figures", figures.len())
        };
        let gb = |gbps: Option<f64>| gbps.unwrap_or_default() / 8.0;
        let staged = |advice: &AdvisePathResponse| gb(advice.fallback.as_ref().and_then(|way| way.gbps));
        let names = format!("{} to {}", there.from, there.to);
        writeln!(
            table,
            "| {} | {} | {} | {read:.0} | {:.0} | {write:.0} | {:.0} | {read_us:.1} | {write_us:.1} | {staged_read:.1} | \
             {:.1} | {staged_write:.1} | {staged_read_us:.1} | {staged_write_us:.1} |",
            there.from,
            there.to,
            there.kind,
            gb(there.gbps),
            gb(back.gbps),
            staged(&there),
        )?;
        for (what, advised, measured) in [
            ("read", gb(there.gbps), read),
            ("write", gb(back.gbps), write),
            ("staged read", staged(&there), staged_read),
            ("staged write", staged(&back), staged_write),
        ] {
            let holds = (advised - measured).abs() <= TOLERANCE * measured;
            verdicts.push((format!("{names}, {what}: {advised:.1} GB/s advised, {measured:.1} measured"), holds));
        }
    }
    table.push('\n');
    Ok((table, verdicts))
}
