//! The other processes of a check: this binary again, as `gdrd-device-test peer ROLE FOLDER GPU [BYTES]`.
//!
//! They speak lines on standard input and output, as a job's ranks would by their own means.

use std::io::{BufRead as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use gdrd_client::{
    AcquireOptions, AdoptOptions, Buffer, Endpoint, Gpu, Mapping, Operation, QueuePair, QueuePairOptions, RangeOf,
    RegisterOptions, RemoteBuffer, Source, Status, Stream, Submission, SubmissionFlags,
};

use gdrd_client_sys::{Allocation, ipc};

use crate::daemon::{one_thread, runtime, session};

pub(crate) const CHUNK_BYTES: usize = 4 << 20;
const PIECE_BYTES: u32 = 64 << 20;
/// What a holder fills its memory with.
const HELD: u8 = 0xee;
const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) fn run(arguments: &[String]) -> anyhow::Result<()> {
    let [role, folder, gpu, bytes] = arguments else { bail!("usage: peer ROLE FOLDER GPU BYTES, got {arguments:?}") };
    let (folder, bytes) = (Path::new(folder), bytes.parse()?);
    match role.as_str() {
        "maker" => return make(gpu, bytes),
        "ipc-maker" => return make_ipc(gpu, bytes),
        "first" => return one_thread()?.block_on(crate::bench::acquire_first(folder, gpu, bytes)),
        "exporter" => return export_both_ways(gpu, bytes),
        "memops" => return time_memory_operations(gpu, bytes),
        _ => {}
    }
    runtime()?.block_on(async {
        match role.as_str() {
            "holder" => hold(folder, gpu, bytes).await,
            "opener" => open(folder, gpu, bytes).await,
            "sender" => send(folder, gpu, bytes).await,
            "receiver" => receive(folder, gpu, bytes).await,
            "poster" => post_behind_work(folder, gpu, bytes).await,
            "freer" => crate::identity::look_up_freed(folder, gpu, bytes).await,
            "mapper" => crate::pairs::use_from(folder, gpu, bytes).await,
            role => bail!("no role {role}"),
        }
    })
}

pub(crate) fn say(line: &str) -> anyhow::Result<()> {
    println!("{line}");
    Ok(std::io::stdout().flush()?)
}

pub(crate) fn hear() -> anyhow::Result<String> {
    let mut line = String::new();
    ensure!(std::io::stdin().lock().read_line(&mut line)? > 0, "the other side is gone");
    Ok(line.trim().to_owned())
}

/// Leases, maps, writes, and stays until it is killed or told to end.
async fn hold(folder: &Path, gpu: &str, bytes: u64) -> anyhow::Result<()> {
    let session = session(folder).await?;
    let buffer = session.acquire(AcquireOptions::on_gpu(gpu, bytes)).await?;
    buffer.device_memory()?.fill(0, bytes, HELD)?;
    say("held")?;
    loop {
        match hear()?.as_str() {
            "check" => check_held(&buffer, bytes)?,
            "lease" => say(&buffer.lease_id().to_string())?,
            "restarted" => {
                session.restarted(0).await.context("the session did not go on")?;
                let was_current = buffer.is_current();
                buffer.refresh().await?;
                say(if !was_current && buffer.is_current() { "new keys" } else { "the keys are those of before" })?;
            }
            _ => return Ok(()),
        }
    }
}

/// Opens the lease of a holder, and looks whether it has its content.
async fn open(folder: &Path, gpu: &str, bytes: u64) -> anyhow::Result<()> {
    let opened = session(folder).await?.open_lease(hear()?.parse()?).await?;
    ensure!(opened.gpu_uuid() == gpu && opened.len_bytes() >= bytes, "{opened:?}");
    check_held(&opened, bytes)
}

fn check_held(buffer: &Buffer, bytes: u64) -> anyhow::Result<()> {
    let mut content = vec![0; usize::try_from(bytes)?];
    buffer.read_into(0, &mut content)?;
    say(if content.iter().all(|byte| *byte == HELD) { "right" } else { "the content changed" })
}

/// Makes and exports memory each time it is asked to, as a job without a daemon would.
fn make(gpu: &str, bytes: u64) -> anyhow::Result<()> {
    let gpu = Gpu::open(gpu)?;
    let mut kept = Vec::new();
    say("ready")?;
    while hear()? == "make" {
        let made = Mapping::create(&gpu, bytes)?;
        let memory = made.export_memory()?;
        say(&memory.as_raw_fd().to_string())?;
        // Until the other side is done with it; or to the end, so that the driver cannot hand the same memory out again.
        if hear()? == "keep" {
            kept.push((made, memory));
        }
    }
    Ok(())
}

/// Makes memory for CUDA IPC each time it is asked to, and keeps it.
fn make_ipc(gpu: &str, bytes: u64) -> anyhow::Result<()> {
    let gpu = Gpu::open(gpu)?;
    let mut kept = Vec::new();
    say("ready")?;
    while hear()? == "make" {
        let made = Allocation::new(&gpu, bytes)?;
        say(&ipc::handle(&made)?)?;
        hear()?;
        kept.push(made);
    }
    Ok(())
}

/// How long a memset of device memory takes to return, microseconds: as it is, and with copies and memsets synchronous.
/// In a process of its own, since the flag stays with the context.
fn time_memory_operations(gpu: &str, bytes: u64) -> anyhow::Result<()> {
    let gpu = Gpu::open(gpu)?;
    let memory = Mapping::create(&gpu, bytes)?;
    memory.fill(0, bytes, 1)?;
    for _ in 0..2 {
        let started = Instant::now();
        memory.queue_fill(0, bytes, 2)?;
        say(&started.elapsed().as_micros().to_string())?;
        memory.fill(0, bytes, 3)?;
        gpu.sync_memory_operations()?;
    }
    Ok(())
}

/// Posts from memory on which work is queued, from a lease and from memory of its own, and says what the far side has: after
/// a post that waits for nothing, one that does by itself, and one that names the stream.
async fn post_behind_work(folder: &Path, gpu: &str, bytes: u64) -> anyhow::Result<()> {
    let session = session(folder).await?;
    let lease = |bytes| session.acquire(AcquireOptions::on_gpu(gpu, bytes));
    let (leased, to) = (lease(bytes).await?, lease(bytes).await?);
    let queue_pair = session.create_queue_pair(QueuePairOptions::near_gpu(gpu)).await?;
    queue_pair.connect(queue_pair.endpoint()).await?;
    let remote = to.registration(queue_pair.hca())?.remote();
    let own = Gpu::open(gpu)?;
    let made = Allocation::new(&own, bytes)?;
    let adopted = session.adopt(AdoptOptions::cuda(&own, made.device_address(), bytes)?).await?;
    let ranges = vec![RangeOf::adopted(&adopted, 0, bytes), RangeOf::buffer(&leased, 0, bytes)];
    let ranges = session.register(ranges, RegisterOptions::new()).await?;
    let len = u32::try_from(bytes)?;
    let mut sources = vec![leased.registration(queue_pair.hca())?.span(0, len)?];
    for range in &ranges {
        sources.push(range.span(queue_pair.hca(), 0, len)?);
    }
    let mapping = leased.device_memory()?;
    let mut value = 0;
    for (at, span) in sources.into_iter().enumerate() {
        let is_adopted = at == 1;
        for how in 0..3 {
            value += 1;
            match is_adopted {
                true => made.queue_fill(0, bytes, value)?,
                false => mapping.queue_fill(0, bytes, value)?,
            }
            let write = Operation::Write { source: Source::Local(span), remote: remote.span(0, bytes)?, imm: None };
            match how {
                0 => {
                    let flags = SubmissionFlags::SIGNALED;
                    queue_pair.post_unordered(&[Submission { wr_id: 0, flags, operation: write }])?;
                }
                1 => queue_pair.post(0, write)?,
                _ => queue_pair.post_after(&leased, Stream::DEFAULT, 0, write)?,
            }
            let completion = queue_pair.poll_busy(PATIENCE)?.context("a write made no completion")?;
            ensure!(completion.status == Status::Success, "a write ended as {}", completion.status);
            let mut first = [0];
            to.read_into(0, &mut first)?;
            say(if first == [value] { "new" } else { "old" })?;
        }
    }
    Ok(())
}

/// Says which ways there are to export memory.
fn export_both_ways(gpu: &str, bytes: u64) -> anyhow::Result<()> {
    let gpu = Gpu::open(gpu)?;
    let made = Allocation::new(&gpu, bytes)?;
    gpu.export_dma_buf(made.device_address(), bytes)?;
    let by_pcie = gpu.export_dma_buf_by_pcie(made.device_address(), bytes)?;
    say(if by_pcie.is_some() { "two ways" } else { "one way" })
}

/// The content: one pattern, and in front of each chunk its number.
pub(crate) fn chunk(pattern: &mut [u8], number: u64) {
    if let Some(front) = pattern.get_mut(..8) {
        front.copy_from_slice(&number.to_le_bytes());
    }
}

pub(crate) fn pattern() -> Vec<u8> {
    (0..CHUNK_BYTES as u64).map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56).to_le_bytes()[0]).collect()
}

pub(crate) fn chunks(bytes: u64) -> impl Iterator<Item = (u64, u64)> {
    (0_u64..).zip((0..bytes).step_by(CHUNK_BYTES))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> anyhow::Result<Vec<u8>> {
    let digits = |at: usize| text.get(at..at + 2).and_then(|pair| u8::from_str_radix(pair, 16).ok());
    (0..text.len()).step_by(2).map(|at| digits(at).context("no hexadecimal digits")).collect()
}

/// Tells the other side where to reach us, and connects to it.
async fn connect(queue_pair: &QueuePair, buffer: &Buffer) -> anyhow::Result<RemoteBuffer> {
    let registration = buffer.registration(queue_pair.hca())?;
    say(&format!("{} {}", hex(&queue_pair.endpoint().to_bytes()), hex(&registration.remote().to_bytes())))?;
    let theirs = hear()?;
    let (endpoint, remote) = theirs.split_once(' ').context("no endpoint and buffer")?;
    queue_pair.connect(&Endpoint::from_bytes(&unhex(endpoint)?)?).await?;
    // Both must be connected before the first write.
    say("connected")?;
    ensure!(hear()? == "connected", "the other side did not connect");
    Ok(RemoteBuffer::from_bytes(&unhex(remote)?)?)
}

async fn send(folder: &Path, gpu: &str, bytes: u64) -> anyhow::Result<()> {
    let session = session(folder).await?;
    let buffer = session.acquire(AcquireOptions::on_gpu(gpu, bytes)).await?;
    let mut content = pattern();
    for (number, offset) in chunks(bytes) {
        chunk(&mut content, number);
        buffer.write_from(offset, &content)?;
    }
    let queue_pair = session.create_queue_pair(QueuePairOptions::near_gpu(gpu)).await?;
    let remote = connect(&queue_pair, &buffer).await?;
    let registration = buffer.registration(queue_pair.hca())?;
    for offset in (0..bytes).step_by(usize::try_from(PIECE_BYTES)?) {
        let len = u32::try_from((bytes - offset).min(PIECE_BYTES.into()))?;
        let source = Source::Local(registration.span(offset, len)?);
        let write = Operation::Write { source, remote: remote.span(offset, len.into())?, imm: None };
        queue_pair.post_after(&buffer, Stream::DEFAULT, offset, write)?;
        let completion = queue_pair.poll_busy(PATIENCE)?.context("a write made no completion")?;
        ensure!(completion.status == Status::Success, "a write ended as {}", completion.status);
    }
    say("written")?;
    hear().map(drop)
}

async fn receive(folder: &Path, gpu: &str, bytes: u64) -> anyhow::Result<()> {
    let session = session(folder).await?;
    let buffer = session.acquire(AcquireOptions::on_gpu(gpu, bytes)).await?;
    let queue_pair = session.create_queue_pair(QueuePairOptions::near_gpu(gpu)).await?;
    connect(&queue_pair, &buffer).await?;
    ensure!(hear()? == "written", "nothing was written");
    let (mut content, mut found) = (pattern(), vec![0; CHUNK_BYTES]);
    for (number, offset) in chunks(bytes) {
        chunk(&mut content, number);
        buffer.read_into(offset, &mut found)?;
        ensure!(found == content, "chunk {number} of {bytes} bytes differs");
    }
    say("every byte is right")
}
