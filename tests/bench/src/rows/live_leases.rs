//! Whether acquiring gets slower with what is already lent: 10,000 live leases, or as many as this process and the daemon may
//! have descriptors for, against 10.
//!
//! Which CPUs the scheduler gives to client and daemon makes a factor of two, and it chooses anew all the time. Here both have one
//! and what nobody waits for has the others, so that only what grows with the leases is measured.

use std::time::Instant;

use anyhow::Context as _;
use gdrd_client::{AcquireOptions, Buffer, ClientOptions, RuntimeDir, Session};
use gdrd_harness::{Daemon, DaemonOptions};
use rustix::process::{Pid, Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use tokio::runtime::{Builder, Runtime};

use crate::frame::{Group, Measurement, Row, Sample, Start, Target, Turn, World};
use crate::other::PATIENCE;
use crate::sample::{median, us};

const MANY: u32 = 10_000;
const FEW: u32 = 10;
const BUFFER_BYTES: u64 = 2 << 20;
const ACQUIRES: u32 = 1000;
const WARM_UP: u32 = 100;

/// Room for all leases in one session, and small pools, whose buffers have descriptors too; memory of simulated GPUs that nobody touches takes none of the host's.
const CONFIG: &str = r#"
[limits]
max_leases_per_session = 32768
registration_slots = 32768

[pool]
ready_max_per_class = 16

[[policy.lease]]
who = "daemon"
max_bytes = 1_000_000_000_000
max_registrations = 65536
"#;

pub(crate) const GROUP: Group = Group {
    rows: &[
        Row {
            id: "live-leases",
            what: "acquire of 2 MiB with 10,000 live leases, or what RLIMIT_NOFILE allows, p50",
            against: "with 10 live leases",
            unit: "µs",
            target: Target::AtMostTimes(1.2),
        },
        Row {
            id: "live-leases-held",
            what: "live leases of that row",
            against: "",
            unit: "",
            target: Target::AtLeast(10_000.0),
        },
    ],
    rounds: 9,
    start: |world| {
        raise_descriptors()?;
        Ok(Start::Ready(Box::new(LiveLeases::start(world)?)))
    },
};

/// Enough for all: three a lease, and a share that the daemon keeps back for those who connect.
const DESCRIPTORS: u64 = 65_536;

/// Daemons inherit it. Where this user may not go beyond the hard limit, up to that.
fn raise_descriptors() -> Result<(), rustix::io::Errno> {
    let limit = getrlimit(Resource::Nofile);
    let maximum = limit.maximum.map(|most| most.max(DESCRIPTORS));
    let wanted = setrlimit(Resource::Nofile, Rlimit { current: Some(DESCRIPTORS), maximum });
    wanted.or_else(|_| setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum }))
}

struct LiveLeases {
    count: u32,
    many: Holder,
    few: Holder,
    runtime: Runtime,
    held: f64,
}

impl LiveLeases {
    fn start(world: &World) -> anyhow::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let (many, few) = runtime
            .block_on(async { anyhow::Ok((Holder::start(world.scaled(MANY)).await?, Holder::start(FEW).await?)) })?;
        let held = f64::from(u32::try_from(many.held.len())?);
        Ok(Self { count: world.scaled(ACQUIRES), many, few, runtime, held })
    }
}

impl Measurement for LiveLeases {
    fn round(&mut self, turn: Turn) -> anyhow::Result<Vec<Sample>> {
        let Self { count, many, few, runtime, .. } = self;
        let before = sched_getaffinity(None).context("ask for the CPUs of this thread")?;
        place(&[many.daemon.pid(), few.daemon.pid()], before)?;
        let (many, few) = turn.both(
            &mut *runtime,
            |runtime| runtime.block_on(many.time_acquires(*count)),
            |runtime| runtime.block_on(few.time_acquires(*count)),
        )?;
        // Rows after this one run on all.
        sched_setaffinity(None, &before).context("place this thread")?;
        Ok(vec![Sample::against(many, few), Sample::alone(self.held)])
    }
}

/// A daemon of which one session holds some leases.
struct Holder {
    session: Session,
    held: Vec<Buffer>,
    daemon: Daemon,
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
            match session.acquire(AcquireOptions::on_gpu(gpu, BUFFER_BYTES)).await {
                Ok(buffer) => held.push(buffer),
                Err(error) if error.reason() == Some("LIMIT_DESCRIPTORS") => break,
                Err(error) => return Err(error.into()),
            }
        }
        if held.len() < leases as usize {
            // Room for what is acquired beside them, and for what the daemon makes ahead.
            for buffer in held.split_off(held.len() - held.len() / 10) {
                buffer.release().await?;
            }
            wait_for_room(&session).await?;
        }
        Ok(Self { session, held, daemon })
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

/// Threads of a daemon that a call goes through: the one that it starts with, and those of its server.
const ANSWERING: [&str; 2] = ["gdrd", "gdrd-server"];

/// Puts this thread and those of the daemons that answer on one CPU, and the daemons' other threads on the rest. Threads that come
/// later are where those are that started them. `allowed` are the CPUs of this thread.
fn place(daemons: &[u32], allowed: CpuSet) -> anyhow::Result<()> {
    let mut rest = allowed;
    let first = (0..CpuSet::MAX_CPU).find(|cpu| rest.is_set(*cpu)).context("no CPU is allowed")?;
    if rest.count() < 2 {
        return Ok(());
    }
    rest.unset(first);
    let mut one = CpuSet::new();
    one.set(first);
    sched_setaffinity(None, &one).context("place this thread")?;
    for daemon in daemons {
        let tasks = format!("/proc/{daemon}/task");
        for task in std::fs::read_dir(&tasks).with_context(|| format!("list {tasks}"))? {
            let task = task?;
            let name = std::fs::read_to_string(task.path().join("comm"));
            let tid = task.file_name().to_str().and_then(|tid| tid.parse().ok()).and_then(Pid::from_raw);
            // A thread may have ended since.
            let (Ok(name), Some(tid)) = (name, tid) else { continue };
            let set = if ANSWERING.contains(&name.trim()) { &one } else { &rest };
            let _ = sched_setaffinity(Some(tid), set);
        }
    }
    Ok(())
}

/// What was released and finds no place in the pool is given back in the background, and has descriptors until then.
async fn wait_for_room(session: &Session) -> anyhow::Result<()> {
    let since = Instant::now();
    loop {
        match session.acquire(AcquireOptions::on_gpu("GPU0", BUFFER_BYTES)).await {
            Ok(buffer) => return Ok(buffer.release().await?),
            Err(error) if error.reason() == Some("LIMIT_DESCRIPTORS") && since.elapsed() < PATIENCE => {}
            Err(error) => return Err(error.into()),
        }
    }
}
