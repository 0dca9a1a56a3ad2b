//! Acquire and release of 2 MiB back to back, with deregistration, scrub and new registration behind each, against two
//! empty calls of a bare tonic server.

use std::path::Path;
use std::time::Instant;

use anyhow::Context as _;
use gdrd_client::{AcquireOptions, ClientOptions, RuntimeDir, Session};
use gdrd_harness::Daemon;
use tempfile::TempDir;
use tokio::net::UnixListener;
use tokio::runtime::{Builder, Runtime};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint, Server};

use crate::frame::{Group, Measurement, Row, Sample, Start, Target, Turn};
use crate::other::{Other, PATIENCE, Running};
use crate::sample::{median, us};

const BUFFER_BYTES: u64 = 2 << 20;
/// Buffers that are ready when the rounds begin.
const POOL: usize = 64;
/// In five rounds of the frame, 10,000 in all.
const ROUNDS: u32 = 2000;
const WARM_UP: u32 = 50;

const WHAT_STANDS_AGAINST: &str = "two empty unary calls of a bare tonic server, same client runtime";

pub(crate) const GROUP: Group = Group {
    rows: &[
        Row {
            id: "lease-round",
            what: "acquire + release of 2 MiB, pool of 64, buffers that nobody wrote to",
            against: WHAT_STANDS_AGAINST,
            unit: "µs",
            target: Target::AtMostTimes(1.25),
        },
        Row {
            id: "lease-round-written",
            what: "the same, every page of the pool written before, so that each scrub zeroes 2 MiB",
            against: WHAT_STANDS_AGAINST,
            unit: "µs",
            target: Target::AtMostTimes(1.25),
        },
    ],
    rounds: 5,
    start: |world| Ok(Start::Ready(Box::new(Rounds::start(world.scaled(ROUNDS))?))),
};

struct Rounds {
    count: u32,
    // Ended before the runtime that drives them.
    session: Session,
    channel: Channel,
    runtime: Runtime,
    _server: BareServer,
    _daemon: Daemon,
}

impl Rounds {
    fn start(count: u32) -> anyhow::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let daemon = Daemon::start();
        let server = BareServer::start()?;
        let (session, channel) = runtime.block_on(async {
            let dir = RuntimeDir::new(daemon.runtime_dir());
            let client = ClientOptions::default().runtime_dir(dir).connect().await?;
            anyhow::Ok((client.open_session("bench-lease").await?, server.channel()?))
        })?;
        Ok(Self { count, session, channel, runtime, _server: server, _daemon: daemon })
    }
}

impl Measurement for Rounds {
    fn round(&mut self, turn: Turn) -> anyhow::Result<Vec<Sample>> {
        let Self { count, session, channel, runtime, .. } = self;
        let mut samples = Vec::new();
        for write in [false, true] {
            runtime.block_on(fill_pool(session, write))?;
            let (ours, peer) = turn.both(
                &mut *runtime,
                |runtime| runtime.block_on(time_rounds(session, *count)),
                |runtime| runtime.block_on(time_two_calls(channel, *count)),
            )?;
            samples.push(Sample::against(ours, peer));
        }
        Ok(samples)
    }
}

/// As many buffers as the pool keeps, acquired at once and released at once. Written whole, they have pages that each
/// scrub must zero: a simulated GPU has no memory to scrub behind pages that nobody touched.
async fn fill_pool(session: &Session, write: bool) -> anyhow::Result<()> {
    let content = vec![0x5a; usize::try_from(BUFFER_BYTES)?];
    let mut buffers = Vec::with_capacity(POOL);
    for _ in 0..POOL {
        let buffer = session.acquire(AcquireOptions::on_gpu("GPU0", BUFFER_BYTES)).await?;
        if write {
            buffer.write_from(0, &content)?;
        }
        buffers.push(buffer);
    }
    for buffer in buffers {
        buffer.release().await?;
    }
    Ok(())
}

async fn time_rounds(session: &Session, count: u32) -> anyhow::Result<f64> {
    let mut times = Vec::new();
    for round in 0..WARM_UP + count {
        let start = Instant::now();
        let buffer = session.acquire(AcquireOptions::on_gpu("GPU0", BUFFER_BYTES)).await?;
        buffer.release().await?;
        if round >= WARM_UP {
            times.push(start.elapsed());
        }
    }
    Ok(us(median(times)))
}

async fn time_two_calls(channel: &Channel, count: u32) -> anyhow::Result<f64> {
    let mut times = Vec::new();
    for round in 0..WARM_UP + count {
        let start = Instant::now();
        empty_call(channel).await?;
        empty_call(channel).await?;
        if round >= WARM_UP {
            times.push(start.elapsed());
        }
    }
    Ok(us(median(times)))
}

/// Health.Check with an empty message either way (grpc/health/v1/health.proto; the reply's one field is skipped).
async fn empty_call(channel: &Channel) -> anyhow::Result<()> {
    let mut grpc = tonic::client::Grpc::new(channel.clone());
    grpc.ready().await.context("the bare server is ready")?;
    let codec = tonic_prost::ProstCodec::<(), ()>::default();
    let path = PathAndQuery::from_static("/grpc.health.v1.Health/Check");
    grpc.unary(tonic::Request::new(()), path, codec).await.context("an empty call")?;
    Ok(())
}

/// A bare tonic server in a process of its own, as a daemon is.
struct BareServer {
    _process: Running,
    folder: TempDir,
}

const SOCKET: &str = "bare.sock";

impl BareServer {
    fn start() -> anyhow::Result<Self> {
        let folder = tempfile::tempdir().context("make a folder for the bare server")?;
        let socket = folder.path().join(SOCKET);
        let mut process = Running::start(&Other::Tonic { socket: socket.clone() }, None)?;
        let deadline = Instant::now() + PATIENCE;
        while !socket.exists() {
            anyhow::ensure!(!process.has_ended() && Instant::now() < deadline, "the bare server did not start");
            std::thread::yield_now();
        }
        Ok(Self { _process: process, folder })
    }

    fn channel(&self) -> anyhow::Result<Channel> {
        let uri = format!("unix:{}", self.folder.path().join(SOCKET).display());
        Ok(Endpoint::from_shared(uri)?.connect_lazy())
    }
}

/// Serves empty calls until it is killed.
pub(crate) fn bare_server(socket: &Path) -> anyhow::Result<()> {
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        let (_reporter, health) = tonic_health::server::health_reporter();
        let incoming = UnixListenerStream::new(UnixListener::bind(socket).context("bind the bare server's socket")?);
        Server::builder().add_service(health).serve_with_incoming(incoming).await.context("serve empty calls")
    })
}
