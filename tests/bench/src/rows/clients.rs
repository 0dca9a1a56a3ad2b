//! 64 blocking clients that acquire and release, each with a connection and a session of its own, against one.

use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use gdrd_client::{AcquireOptions, ClientOptions, RuntimeDir, Session};
use gdrd_harness::Daemon;
use tokio::runtime::{Builder, Runtime};

use crate::frame::{Group, Measurement, Row, Sample, Start, Target, Turn};
use crate::sample::{percentile, us};

const CLIENTS: usize = 64;
const BUFFER_BYTES: u64 = 2 << 20;
/// Milliseconds of each side of a round.
const SPAN_MS: u32 = 2000;

pub(crate) const GROUP: Group = Group {
    rows: &[
        Row {
            id: "clients-64",
            what: "rounds of acquire + release a second of 64 blocking clients together",
            against: "of one client",
            unit: "/s",
            target: Target::AtLeastTimes(1.0),
        },
        Row {
            id: "clients-64-tail",
            what: "p99 of a round of acquire + release with 64 clients",
            against: "its p50",
            unit: "µs",
            target: Target::AtMostTimes(5.0),
        },
    ],
    rounds: 5,
    start: |world| {
        let span = Duration::from_millis(world.scaled(SPAN_MS).into());
        Ok(Start::Ready(Box::new(Clients { span, daemon: Daemon::start() })))
    },
};

struct Clients {
    span: Duration,
    daemon: Daemon,
}

impl Measurement for Clients {
    fn round(&mut self, turn: Turn) -> anyhow::Result<Vec<Sample>> {
        let span = self.span;
        let mut dir = self.daemon.runtime_dir();
        let run = |clients| move |dir: &mut PathBuf| together(dir, clients, span);
        let (mut many, one) = turn.both(&mut dir, run(CLIENTS), run(1))?;
        let rate = |times: &[Duration]| f64::from(u32::try_from(times.len()).unwrap_or(u32::MAX)) / span.as_secs_f64();
        let rates = Sample::against(rate(&many), rate(&one));
        let tail = Sample::against(us(percentile(&mut many, 99)), us(percentile(&mut many, 50)));
        Ok(vec![rates, tail])
    }
}

/// Times of the rounds that so many clients make within `span`.
fn together(dir: &Path, clients: usize, span: Duration) -> anyhow::Result<Vec<Duration>> {
    let connected = Barrier::new(clients + 1);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let client = || {
            let opened = Connected::open(dir);
            connected.wait();
            opened?.rounds(&stop)
        };
        let running: Vec<_> = (0..clients).map(|_| scope.spawn(client)).collect();
        connected.wait();
        std::thread::sleep(span);
        stop.store(true, Ordering::Relaxed);
        let mut times = Vec::new();
        for client in running {
            times.extend(client.join().map_err(|_| anyhow::anyhow!("a client panicked"))??);
        }
        Ok(times)
    })
}

/// A client that blocks its thread in each call, as a job's process does.
struct Connected {
    session: Session,
    runtime: Runtime,
}

impl Connected {
    fn open(dir: &Path) -> anyhow::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let session = runtime.block_on(async {
            let client = ClientOptions::default().runtime_dir(RuntimeDir::new(dir)).connect().await?;
            let session = client.open_session("bench-clients").await?;
            // The first may be cold.
            session.acquire(AcquireOptions::on_gpu("GPU0", BUFFER_BYTES)).await?.release().await?;
            anyhow::Ok(session)
        })?;
        Ok(Self { session, runtime })
    }

    fn rounds(&self, stop: &AtomicBool) -> anyhow::Result<Vec<Duration>> {
        self.runtime.block_on(async {
            let mut times = Vec::new();
            while !stop.load(Ordering::Relaxed) {
                let start = Instant::now();
                let buffer = self.session.acquire(AcquireOptions::on_gpu("GPU0", BUFFER_BYTES)).await?;
                buffer.release().await?;
                times.push(start.elapsed());
            }
            Ok(times)
        })
    }
}
