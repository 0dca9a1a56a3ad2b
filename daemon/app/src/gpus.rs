//! The GPUs of this machine: what the driver says of them, and the pool of workers that lends their memory.
//!
//! NVML is asked by a short-lived process, so that the daemon itself never keeps a device file open.

use std::collections::BTreeMap;
use std::io::Read as _;
use std::os::linux::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use gdrd_cuda::{Launch, PoolConfig, ProcessLauncher, ServedGpu, WorkerPool};
use gdrd_hal::{DeviceNumber, GpuFact, GpuFacts, GpuHealth, GpuMemoryError, GpuUuid};
use gdrd_nvml::{GpuReport, Report};
use gdrd_topology::model::DriverFacts;
use gdrd_topology::source::SourceKind;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::retry_on_intr;

use crate::config::GpuKeys;
use crate::failure;
use crate::health::Health;
use crate::worker::Probe;

/// Where device nodes are.
const DEV: &str = "/dev";
/// There while the NVIDIA driver is loaded.
const DRIVER: &str = "/proc/driver/nvidia";
/// Longest report that is read: a GPU takes about 1 KiB.
const MAX_REPORT_BYTES: u64 = 1 << 20;
/// How old an answer may be: any user may have it asked for.
const FRESH: Duration = Duration::from_millis(500);
/// How long a probe may take. NVML wakes every GPU of the host, which takes seconds without persistence mode.
const PROBE_TIMEOUT: Duration = Duration::from_secs(60);

/// Asks the driver, and keeps its last answer.
#[derive(Debug)]
pub(crate) struct NvmlFacts {
    program: PathBuf,
    last: Mutex<Report>,
    /// When that was; held while the driver is asked, so that it is asked once for many.
    asked: Mutex<Asked>,
    /// Device nodes of its GPUs as they were when they were last looked at.
    nodes: Mutex<Vec<Option<DeviceNumber>>>,
    /// Uncorrected ECC errors by GPU, as they were counted when it was asked last.
    ecc_errors: Mutex<BTreeMap<String, u64>>,
    /// The answer when the daemon started.
    at_start: Report,
    /// What was heard in between.
    pub(crate) health: Arc<Health>,
}

/// When the driver was asked, and when it had answered.
#[derive(Debug, Clone, Copy)]
struct Asked {
    began: Instant,
    ended: Instant,
}

/// The GPUs that this machine has, with the workers to serve them.
#[derive(Debug)]
pub(crate) struct Gpus {
    pub(crate) facts: Arc<NvmlFacts>,
    pub(crate) pool: Result<Arc<WorkerPool>, String>,
}

/// Looks for a driver; starts no worker.
///
/// # Errors
/// Why there is none.
pub(crate) fn find(keys: &GpuKeys) -> anyhow::Result<Gpus> {
    let program = std::env::current_exe().context("find the program of the workers")?;
    let began = Instant::now();
    let Probe { nvml, cuda } = probe(&program)?;
    let asked = Asked { began, ended: Instant::now() };
    let report = nvml.map_err(anyhow::Error::msg)?;
    let served = |gpu: &gdrd_nvml::GpuReport| ServedGpu { uuid: GpuUuid(gpu.uuid.clone()), skipped: gpu.skip_reason() };
    let served: Vec<_> = report.gpus.iter().map(served).collect();
    for (gpu, reason) in served.iter().filter_map(|gpu| Some((&gpu.uuid, gpu.skipped.as_ref()?))) {
        tracing::warn!(%gpu, %reason, "a gpu is not served");
    }
    let health = Arc::new(Health::default());
    let pool = cuda.map(|()| {
        let pool = Arc::new(pool_of(served, &program, &health, keys));
        health.serve(Arc::downgrade(&pool));
        pool
    });
    Ok(Gpus { facts: Arc::new(NvmlFacts::new(program, report, asked, health)), pool })
}

fn pool_of(served: Vec<ServedGpu>, program: &Path, health: &Arc<Health>, keys: &GpuKeys) -> WorkerPool {
    let health = Arc::clone(health);
    let launcher: Arc<dyn Launch> = Arc::new(ProcessLauncher {
        program: program.to_owned(),
        arguments: ["worker", "serve", "--idle-s", &keys.worker_idle_s.to_string()].map(Into::into).to_vec(),
        host_arguments: vec!["--watch".into()],
        listener: Some(Arc::new(move |gpu, line| health.hear(gpu, line))),
    });
    let call_timeout = Duration::from_secs(keys.call_timeout_s);
    WorkerPool::new(served, &launcher, PoolConfig { call_timeout, ..PoolConfig::default() })
}

/// Runs the probe as a process of its own.
fn probe(program: &Path) -> anyhow::Result<Probe> {
    let mut child = Command::new(program)
        .args(["worker", "probe"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("start the process that asks nvml")?;
    let output = child.stdout.take().context("the probe has no output")?;
    let timeout = Timespec::try_from(PROBE_TIMEOUT).ok();
    // It writes once, at its end.
    let ready = retry_on_intr(|| poll(&mut [PollFd::new(&output, PollFlags::IN)], timeout.as_ref()));
    if !matches!(ready, Ok(1..)) {
        // It is ours and unreaped. Where it hangs in the driver it ends when that lets go, so nobody waits here.
        let _ = child.kill();
        let reaper = std::thread::Builder::new().name("reaper".to_owned());
        let _ = reaper.spawn(move || child.wait());
        bail!("nvml does not answer in {PROBE_TIMEOUT:?}; look for Xid messages in the kernel log");
    }
    let mut text = Vec::new();
    output.take(MAX_REPORT_BYTES).read_to_end(&mut text).context("read what nvml says")?;
    let status = child.wait().context("wait for the process that asks nvml")?;
    serde_json::from_slice(&text).with_context(|| format!("the process that asks nvml ended with {status}"))
}

impl NvmlFacts {
    fn new(program: PathBuf, report: Report, asked: Asked, health: Arc<Health>) -> Self {
        let nodes = Mutex::new(nodes_of(Path::new(DEV), minors(&report)));
        let ecc_errors = Mutex::new(ecc_errors(&report).collect());
        let (last, asked) = (Mutex::new(report.clone()), Mutex::new(asked));
        Self { program, last, asked, nodes, ecc_errors, at_start: report, health }
    }

    /// A report that is fresh, and when the driver was asked for it.
    fn ask(&self) -> anyhow::Result<(Report, Instant)> {
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        if asked.ended.elapsed() > FRESH || self.health.was_resumed_after(asked.began) {
            let began = Instant::now();
            let report = probe(&self.program)?.nvml.map_err(anyhow::Error::msg)?;
            *self.last.lock().unwrap_or_else(PoisonError::into_inner) = report;
            *asked = Asked { began, ended: Instant::now() };
        }
        Ok((self.report(), asked.began))
    }

    /// What the driver alone cannot tell: what the daemon heard and did.
    fn complete(&self, fact: &mut GpuFact, report: &Report, asked: Instant) {
        let gpu = report.gpus.iter().find(|gpu| gpu.uuid == fact.uuid.0);
        let remedy = gpu.and_then(|gpu| gpu.remedy.as_deref());
        let more =
            gpu.and_then(|gpu| self.new_ecc_errors(gpu)).map(|more| format!("{more} uncorrected ecc errors more"));
        let ill = more.or_else(|| remedy.map(|_| "the driver says that it does not work".to_owned()));
        if let Some(reason) = ill {
            self.health.found_ill(&fact.uuid, &reason);
        }
        if fact.health == GpuHealth::Healthy && remedy.is_none() {
            self.health.found_well(&fact.uuid, asked);
        }
        if let Some(heard) = self.health.lost(&fact.uuid) {
            let takes = remedy.map(|remedy| format!("; the driver says that it takes {remedy}")).unwrap_or_default();
            fact.health = GpuHealth::Lost(heard + &takes);
        }
        if let Some((memory, gpu)) = fact.memory.as_mut().zip(gpu) {
            memory.context_bytes = self.health.context_bytes(&fact.uuid, &gpu.processes);
            let at_start = self.at_start.gpus.iter().find(|gpu| gpu.uuid == fact.uuid.0).and_then(|gpu| gpu.bar1);
            if let Some((bar1, at_start)) = memory.bar1.as_mut().zip(at_start) {
                bar1.used_at_start_bytes = at_start.used_bytes;
            }
        }
    }

    /// Errors that the driver counted since it was asked before. A reset counts anew.
    fn new_ecc_errors(&self, gpu: &GpuReport) -> Option<u64> {
        let mut known = self.ecc_errors.lock().unwrap_or_else(PoisonError::into_inner);
        let now = gpu.uncorrected_ecc_errors?;
        let before = known.insert(gpu.uuid.clone(), now)?;
        now.checked_sub(before).filter(|more| *more > 0)
    }

    /// The GPUs that the driver told at the start and tells no more.
    fn missing(&self, report: &Report) -> Vec<GpuFact> {
        let known = |uuid: &str| report.gpus.iter().any(|gpu| gpu.uuid == uuid);
        let missing = self.at_start.gpus.iter().filter(|gpu| !known(&gpu.uuid)).filter_map(|gpu| gpu.fact(None));
        let lost = || GpuHealth::Lost("the driver tells of it no more".to_owned());
        missing.map(|fact| GpuFact { health: lost(), memory: None, ..fact }).collect()
    }

    /// Whether other device nodes are there than when the driver last told its GPUs. Does not ask the driver.
    pub(crate) fn have_nodes_changed(&self) -> bool {
        let now = nodes_of(Path::new(DEV), minors(&self.report()));
        *self.nodes.lock().unwrap_or_else(PoisonError::into_inner) != now
    }

    /// The last answer.
    pub(crate) fn report(&self) -> Report {
        self.last.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl GpuFacts for NvmlFacts {
    fn gpus(&self) -> Result<Vec<GpuFact>, GpuMemoryError> {
        let (report, asked) = self.ask().map_err(|error| GpuMemoryError::Driver {
            call: "nvml",
            uuid: "of this host".to_owned(),
            reason: failure::text_of(&error),
        })?;
        let mut facts = facts_of(&report);
        facts.extend(self.missing(&report));
        facts.iter_mut().for_each(|fact| self.complete(fact, &report, asked));
        *self.nodes.lock().unwrap_or_else(PoisonError::into_inner) = nodes_of(Path::new(DEV), minors(&report));
        Ok(facts)
    }
}

fn ecc_errors(report: &Report) -> impl Iterator<Item = (String, u64)> {
    report.gpus.iter().filter_map(|gpu| Some((gpu.uuid.clone(), gpu.uncorrected_ecc_errors?)))
}

/// The engine's view of a report.
pub(crate) fn facts_of(report: &Report) -> Vec<GpuFact> {
    let nodes = nodes_of(Path::new(DEV), minors(report));
    report.gpus.iter().zip(nodes).filter_map(|(gpu, node)| gpu.fact(node)).collect()
}

/// The device node of each GPU, where there is one.
fn nodes_of(dev: &Path, minors: impl Iterator<Item = Option<u32>>) -> Vec<Option<DeviceNumber>> {
    minors.map(|minor| device_number(dev, minor?)).collect()
}

fn minors(report: &Report) -> impl Iterator<Item = Option<u32>> {
    report.gpus.iter().map(|gpu| gpu.minor)
}

fn device_number(dev: &Path, minor: u32) -> Option<DeviceNumber> {
    let rdev = std::fs::metadata(dev.join(format!("nvidia{minor}"))).ok()?.st_rdev();
    Some(DeviceNumber { major: rustix::fs::major(rdev), minor: rustix::fs::minor(rdev) })
}

/// A report as the topology merges it, and what was heard since.
pub(crate) fn driver_facts(nvml: &NvmlFacts) -> DriverFacts {
    let mut facts = told(&nvml.report());
    facts.warnings.extend(nvml.health.warnings());
    facts
}

/// A report as the topology merges it.
pub(crate) fn told(report: &Report) -> DriverFacts {
    DriverFacts {
        source: SourceKind::Nvml,
        gpus: facts_of(report).iter().map(GpuFact::for_topology).collect(),
        warnings: report.warnings.clone(),
    }
}

/// What to say of a driver that was not there when this daemon started, and is now. A pool of its GPUs is made at the start.
pub(crate) fn came_later() -> Option<String> {
    driver_came(Path::new(DRIVER))
}

fn driver_came(driver: &Path) -> Option<String> {
    let came = "the nvidia driver was loaded after this daemon was started: restart it to serve the gpus";
    driver.exists().then(|| came.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_looked_at_where_they_are_each_time() {
        let dev = tempfile::tempdir().expect("a folder");
        let numbers = || -> Vec<Option<u32>> {
            let nodes = nodes_of(dev.path(), [Some(0), Some(1), None].into_iter());
            nodes.into_iter().map(|node| node.map(|node| node.minor)).collect()
        };
        assert_eq!(numbers(), [None; 3]);
        // Character devices that every system has: 1:3 and 1:5 (null(4)).
        for (target, minor) in [("/dev/null", 3), ("/dev/zero", 5)] {
            let node = dev.path().join("nvidia1");
            let _ = std::fs::remove_file(&node);
            std::os::unix::fs::symlink(target, node).expect("a link");
            assert_eq!(numbers(), [None, Some(minor), None]);
        }
    }

    #[test]
    fn a_driver_that_comes_later_is_told_with_the_remedy() {
        let folder = tempfile::tempdir().expect("a folder");
        assert_eq!(driver_came(&folder.path().join("absent")), None);
        assert!(driver_came(folder.path()).is_some_and(|told| told.contains("restart it")));
    }
}
