//! Registering and deregistering one range again and again, through the whole stack, with nothing kept in between: whether it
//! gets slower, and whether the daemon grows (ai-dynamo/nixl#1392).

use std::os::fd::OwnedFd;
use std::time::Instant;

use gdrd_client::{AdoptOptions, AdoptedMemory, ClientOptions, RangeOf, RegisterOptions, RuntimeDir, Session};
use gdrd_harness::{Daemon, DaemonOptions};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use tokio::runtime::{Builder, Runtime};

use super::idle::resident_mib;
use crate::frame::{Group, Measurement, Row, Sample, Start, Target, Turn};
use crate::sample::{median, us};

const ROUNDS: u32 = 100_000;
/// Each reaches a place that the round before did not.
const PLACES: u32 = 64;
const RANGE_BYTES: u64 = 64 << 10;
/// No region outlives its last registration.
const CONFIG: &str = "[cache]\nmax_idle_regions = 0\n";

pub(crate) const GROUP: Group = Group {
    rows: &[
        Row {
            id: "register-rounds",
            what: "register + deregister of 64 KiB, the last tenth of 100,000 rounds, p50",
            against: "the first tenth",
            unit: "µs",
            target: Target::AtMostTimes(1.2),
        },
        Row {
            id: "register-rounds-growth",
            what: "growth of the daemon's resident memory from the first tenth to the last",
            against: "",
            unit: "MiB",
            target: Target::AtMost(1.0),
        },
    ],
    rounds: 3,
    start: |world| Ok(Start::Ready(Box::new(Rounds::make(world.scaled(ROUNDS))?))),
};

struct Rounds {
    count: u32,
    memory: AdoptedMemory,
    session: Session,
    runtime: Runtime,
    daemon: Daemon,
}

impl Rounds {
    fn make(count: u32) -> anyhow::Result<Self> {
        let daemon = DaemonOptions::default().config(CONFIG).start();
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let (session, memory) = runtime.block_on(async {
            let dir = RuntimeDir::new(daemon.runtime_dir());
            let client = ClientOptions::default().runtime_dir(dir).connect().await?;
            let session = client.open_session("bench-rounds").await?;
            let memory = session.adopt(AdoptOptions::memfd(memfd()?).near("GPU0")).await?;
            anyhow::Ok((session, memory))
        })?;
        Ok(Self { count, memory, session, runtime, daemon })
    }

    /// Microseconds of a round, the median of so many.
    fn time(&self, rounds: u32) -> anyhow::Result<f64> {
        let mut times = Vec::new();
        for round in 0..rounds {
            let range = RangeOf::adopted(&self.memory, u64::from(round % PLACES) * RANGE_BYTES, RANGE_BYTES);
            let start = Instant::now();
            let registered = self.session.register(vec![range], RegisterOptions::new());
            let registered = self.runtime.block_on(registered)?;
            self.runtime.block_on(self.session.deregister_all(registered))?;
            times.push(start.elapsed());
        }
        Ok(us(median(times)))
    }
}

fn memfd() -> anyhow::Result<OwnedFd> {
    let fd = memfd_create("bench", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&fd, u64::from(PLACES) * RANGE_BYTES)?;
    Ok(fd)
}

impl Measurement for Rounds {
    fn round(&mut self, _: Turn) -> anyhow::Result<Vec<Sample>> {
        let tenth = self.count.div_ceil(10);
        let first = self.time(tenth)?;
        let before = resident_mib(self.daemon.pid())?;
        self.time(self.count - 2 * tenth.min(self.count / 2))?;
        let last = self.time(tenth)?;
        let growth = resident_mib(self.daemon.pid())? - before;
        Ok(vec![Sample::against(last, first), Sample::alone(growth)])
    }
}
