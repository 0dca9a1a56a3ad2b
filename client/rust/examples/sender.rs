//! Lends a buffer on a GPU, fills it with random content, and writes it into a peer's buffer by RDMA.
//!
//! usage: sender SOCKET GPU BYTES
//!
//! SOCKET is where a receiver listens (see receiver.rs).

mod common;

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use common::{Channel, Greeting, fill_from_seed, sha256_of};
use gdrd_client::{
    AcquireOptions, Client, Endpoint, Operation, QueuePair, QueuePairOptions, RemoteBuffer, Source, Status,
};
use rand::TryRngCore as _;
use tokio::net::UnixStream;

/// Bytes of one write, and writes in flight: enough that the queue is never empty.
const PIECE_BYTES: u32 = 4 << 20;
const IN_FLIGHT: usize = 8;
const LATENCY_ROUNDS: u32 = 2000;
const PATIENCE: Duration = Duration::from_secs(30);

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let mut next = |what| arguments.next().with_context(|| format!("usage: sender SOCKET GPU BYTES: no {what}"));
    let (socket, gpu, bytes) = (next("SOCKET")?, next("GPU")?, next("BYTES")?.parse::<u64>()?);

    let session = Client::connect().await?.open_session("demo-sender").await?;
    let buffer = session.acquire(AcquireOptions::on_gpu(&gpu, bytes).label("demo-sender")).await?;
    let queue_pair = session.create_queue_pair(QueuePairOptions::near_gpu(&gpu)).await?;
    println!("leased {} MiB on {gpu}, registered with {}", buffer.len_bytes() >> 20, queue_pair.hca());

    let seed = rand::rngs::OsRng.try_next_u64().context("draw a seed from the system")?;
    fill_from_seed(&buffer, bytes, seed)?;
    println!("seed {seed:#018x}");
    println!("sha256 {}", sha256_of(buffer.reader(0, bytes)?)?);

    let mut channel = Channel::new(UnixStream::connect(&socket).await.with_context(|| format!("connect to {socket}"))?);
    let peer: Greeting = channel.receive().await?;
    let remote = RemoteBuffer::from_bytes(&peer.buffer)?;
    let registration = buffer.registration(queue_pair.hca())?;
    channel
        .send(&Greeting { endpoint: queue_pair.endpoint().to_bytes(), buffer: registration.remote().to_bytes() })
        .await?;
    queue_pair.connect(&Endpoint::from_bytes(&peer.endpoint)?).await?;
    channel.receive::<common::Ready>().await?;

    let write = |offset: u64, len: u32, imm| -> anyhow::Result<Operation> {
        let source = Source::Local(registration.span(offset, len)?);
        Ok(Operation::Write { source, remote: remote.span(offset, len.into())?, imm })
    };
    let latency = median_of(LATENCY_ROUNDS, || {
        queue_pair.post(0, write(0, 8, None)?)?;
        reap(&queue_pair)
    })?;

    // The first pass also makes the kernel provide the receiver's pages.
    let first = transfer(&queue_pair, bytes, &write)?;
    let second = transfer(&queue_pair, bytes, &write)?;
    println!("latency of an 8-byte write {:.2} us, median of {LATENCY_ROUNDS}", latency.as_secs_f64() * 1e6);
    let bandwidth = |time: Duration| Ok::<_, anyhow::Error>(gib(bytes)? / time.as_secs_f64());
    println!("bandwidth {:.2} GiB/s, and {:.2} GiB/s in a second pass", bandwidth(first)?, bandwidth(second)?);

    // Writes of one queue pair are placed in order, so this one says that all before it are there.
    queue_pair.post(1, write(0, 0, Some(1))?)?;
    reap(&queue_pair)?;
    println!("written");

    common::stay_until_told().await
}

/// Writes everything once, with a few writes in flight.
fn transfer(
    queue_pair: &QueuePair,
    bytes: u64,
    write: &impl Fn(u64, u32, Option<u32>) -> anyhow::Result<Operation>,
) -> anyhow::Result<Duration> {
    let start = Instant::now();
    let mut in_flight = 0;
    for offset in (0..bytes).step_by(PIECE_BYTES.try_into()?) {
        if in_flight == IN_FLIGHT {
            reap(queue_pair)?;
            in_flight -= 1;
        }
        let len = u32::try_from((bytes - offset).min(PIECE_BYTES.into()))?;
        queue_pair.post(offset, write(offset, len, None)?)?;
        in_flight += 1;
    }
    for _ in 0..in_flight {
        reap(queue_pair)?;
    }
    Ok(start.elapsed())
}

/// The next completion, which must be a success.
fn reap(queue_pair: &QueuePair) -> anyhow::Result<()> {
    let completion = queue_pair.poll_busy(PATIENCE)?.context("a write made no completion")?;
    ensure!(completion.status == Status::Success, "a write ended as {}", completion.status);
    Ok(())
}

fn median_of(rounds: u32, mut round: impl FnMut() -> anyhow::Result<()>) -> anyhow::Result<Duration> {
    let mut times = Vec::new();
    for _ in 0..rounds {
        let start = Instant::now();
        round()?;
        times.push(start.elapsed());
    }
    times.sort_unstable();
    times.get(times.len() / 2).copied().context("no rounds")
}

fn gib(bytes: u64) -> anyhow::Result<f64> {
    Ok(f64::from(u32::try_from(bytes / 1024).context("too many bytes to print")?) / f64::from(1 << 20))
}
