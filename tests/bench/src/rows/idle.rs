//! The idle daemon: wake-ups and resident memory as /proc shows them, right after its start and after many leases.

use std::time::Duration;

use anyhow::Context as _;
use gdrd_client::{AcquireOptions, ClientOptions, RuntimeDir};
use gdrd_harness::{Daemon, DaemonOptions};

use crate::frame::{Group, Measurement, Row, Sample, Start, Target, Turn};

/// How long an idle daemon is watched, seconds: longer than the shortest rescan that may be configured.
const WATCH_S: u32 = 35;
/// Time that the daemon may take to come to rest, seconds: its threads are still starting when it says that it serves.
const SETTLE_S: u64 = 2;
/// Leases held at once before the daemon is looked at again.
const LEASES: u32 = 4096;

pub(crate) const GROUP: Group = Group {
    rows: &[
        Row {
            id: "idle-wake-ups",
            what: "voluntary context switches of all threads in 35 s",
            against: "",
            unit: "",
            // One rescan every 30 s or more; the watchdog is systemd's to ask for.
            target: Target::AtMost(2.0),
        },
        Row {
            id: "idle-resident",
            what: "resident memory after start",
            against: "",
            unit: "MiB",
            target: Target::AtMost(20.0),
        },
        Row {
            id: "idle-resident-after",
            what: "resident memory after 4,096 leases held at once and released",
            against: "",
            unit: "MiB",
            target: Target::AtMost(20.0),
        },
    ],
    rounds: 1,
    start: |world| Ok(Start::Ready(Box::new(Idle { watch_s: world.scaled(WATCH_S), leases: world.scaled(LEASES) }))),
};

struct Idle {
    watch_s: u32,
    leases: u32,
}

impl Measurement for Idle {
    fn round(&mut self, _: Turn) -> anyhow::Result<Vec<Sample>> {
        let daemon = DaemonOptions::default().start();
        let resident = resident_mib(daemon.pid())?;
        let woken = self.wake_ups(&daemon)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(use_it(&daemon, self.leases))?;
        drop(runtime);
        // What is given back in the background is gone by then.
        let again = self.wake_ups(&daemon)?;
        eprintln!("  {again} wake-ups while what was leased is given back");
        Ok(vec![Sample::alone(woken), Sample::alone(resident), Sample::alone(resident_mib(daemon.pid())?)])
    }
}

impl Idle {
    fn wake_ups(&self, daemon: &Daemon) -> anyhow::Result<f64> {
        std::thread::sleep(Duration::from_secs(SETTLE_S));
        let before = switches(daemon.pid())?;
        std::thread::sleep(Duration::from_secs(self.watch_s.into()));
        let woken = switches(daemon.pid())?.saturating_sub(before);
        Ok(f64::from(u32::try_from(woken).unwrap_or(u32::MAX)))
    }
}

async fn use_it(daemon: &Daemon, leases: u32) -> anyhow::Result<()> {
    let client = ClientOptions::default().runtime_dir(RuntimeDir::new(daemon.runtime_dir())).connect().await?;
    let session = client.open_session("bench-idle").await?;
    let mut held = Vec::new();
    for _ in 0..leases {
        held.push(session.acquire(AcquireOptions::on_gpu("GPU0", 2 << 20)).await?);
    }
    for buffer in held {
        buffer.release().await?;
    }
    Ok(())
}

/// VmRSS of proc_pid_status(5), MiB.
pub(crate) fn resident_mib(pid: u32) -> anyhow::Result<f64> {
    let path = format!("/proc/{pid}/status");
    let status = std::fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
    let kib = field(&status, "VmRSS:").with_context(|| format!("{path} has no VmRSS"))?;
    Ok(f64::from(u32::try_from(kib).unwrap_or(u32::MAX)) / 1024.0)
}

/// Voluntary context switches of all threads that still run.
fn switches(pid: u32) -> anyhow::Result<u64> {
    let tasks = format!("/proc/{pid}/task");
    let mut sum = 0;
    for task in std::fs::read_dir(&tasks).with_context(|| format!("list {tasks}"))? {
        if let Ok(status) = std::fs::read_to_string(task?.path().join("status")) {
            sum += field(&status, "voluntary_ctxt_switches:").unwrap_or(0);
        }
    }
    Ok(sum)
}

fn field(status: &str, name: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}
