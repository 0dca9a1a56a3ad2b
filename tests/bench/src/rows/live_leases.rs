//! Whether acquiring gets slower with what is already lent: 10,000 live leases against 10.

use std::time::Instant;

use gdrd_client::{AcquireOptions, Buffer, ClientOptions, RuntimeDir, Session};
use gdrd_harness::{Daemon, DaemonOptions};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::runtime::{Builder, Runtime};

use crate::frame::{Group, Measurement, Row, Sample, Start, Target, Turn, World};
use crate::sample::{median, us};

const MANY: u32 = 10_000;
const FEW: u32 = 10;
const BUFFER_BYTES: u64 = 2 << 20;
const ACQUIRES: u32 = 1000;
const WARM_UP: u32 = 100;

/// Room for all leases in one session; memory of simulated GPUs that nobody touches takes none of the host's.
const CONFIG: &str = r#"
[limits]
max_leases_per_session = 32768
registration_slots = 65536

[[policy.lease]]
who = "daemon"
max_bytes = 1_000_000_000_000
max_registrations = 65536
"#;

pub(crate) const GROUP: Group = Group {
    rows: &[Row {
        id: "live-leases",
        what: "acquire of 2 MiB with 10,000 live leases, p50",
        against: "with 10 live leases",
        unit: "µs",
        target: Target::AtMostTimes(1.2),
    }],
    rounds: 9,
    start: |world| match raise_descriptors() {
        Ok(()) => Ok(Start::Ready(Box::new(LiveLeases::start(world)?))),
        Err(errno) => Ok(Start::Absent(format!("RLIMIT_NOFILE of {DESCRIPTORS}: {errno}"))),
    },
};

/// Three a lease, and a share that the daemon keeps back for those who connect.
const DESCRIPTORS: u64 = 65_536;

/// Daemons inherit it.
fn raise_descriptors() -> Result<(), rustix::io::Errno> {
    let limit = getrlimit(Resource::Nofile);
    let maximum = limit.maximum.map(|most| most.max(DESCRIPTORS));
    setrlimit(Resource::Nofile, Rlimit { current: Some(DESCRIPTORS), maximum })
}

struct LiveLeases {
    count: u32,
    many: Holder,
    few: Holder,
    runtime: Runtime,
}

impl LiveLeases {
    fn start(world: &World) -> anyhow::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let (many, few) = runtime
            .block_on(async { anyhow::Ok((Holder::start(world.scaled(MANY)).await?, Holder::start(FEW).await?)) })?;
        Ok(Self { count: world.scaled(ACQUIRES), many, few, runtime })
    }
}

impl Measurement for LiveLeases {
    fn round(&mut self, turn: Turn) -> anyhow::Result<Vec<Sample>> {
        let Self { count, many, few, runtime } = self;
        let (many, few) = turn.both(
            &mut *runtime,
            |runtime| runtime.block_on(many.time_acquires(*count)),
            |runtime| runtime.block_on(few.time_acquires(*count)),
        )?;
        Ok(vec![Sample::against(many, few)])
    }
}

/// A daemon of which one session holds some leases.
struct Holder {
    session: Session,
    _held: Vec<Buffer>,
    _daemon: Daemon,
}

impl Holder {
    async fn start(leases: u32) -> anyhow::Result<Self> {
        let daemon = DaemonOptions::default().config(CONFIG).start();
        let dir = RuntimeDir::new(daemon.runtime_dir());
        let client = ClientOptions::default().runtime_dir(dir).connect().await?;
        let session = client.open_session("bench-live").await?;
        let mut held = Vec::new();
        for lease in 0..leases {
            // Spread over the GPUs: no one of them has room for all.
            let gpu = format!("GPU{}", lease % 8);
            held.push(session.acquire(AcquireOptions::on_gpu(gpu, BUFFER_BYTES)).await?);
        }
        Ok(Self { session, _held: held, _daemon: daemon })
    }

    async fn time_acquires(&self, count: u32) -> anyhow::Result<f64> {
        let mut times = Vec::new();
        for round in 0..WARM_UP + count {
            let start = Instant::now();
            let buffer = self.session.acquire(AcquireOptions::on_gpu("GPU0", BUFFER_BYTES)).await?;
            if round >= WARM_UP {
                times.push(start.elapsed());
            }
            buffer.release().await?;
        }
        Ok(us(median(times)))
    }
}
