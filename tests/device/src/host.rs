//! The machine: its GPUs that are served, and what others see of them.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use gdrd_client::Gpu;
use gdrd_cuda::{Launch, PoolConfig, ProcessLauncher, ServedGpu, WorkerPool};
use gdrd_hal::GpuUuid;
use gdrd_nvml::{GpuReport, Report};

/// A hang ends a check here.
const WATCHDOG: Duration = Duration::from_secs(60);

/// What the checks need to know.
#[derive(Debug)]
pub(crate) struct Host {
    pub(crate) report: Report,
    /// The first that is served: most checks need one only.
    pub(crate) gpu: GpuReport,
    /// All that are served.
    pub(crate) gpus: Vec<GpuReport>,
    /// The daemon's binary.
    pub(crate) daemon: PathBuf,
    /// Where the daemon looks for GPUs instead of /sys.
    pub(crate) sysfs_root: Option<PathBuf>,
    /// This process' own context, so that it is in every figure of used memory.
    pub(crate) own: Arc<Gpu>,
}

impl Host {
    /// `daemon` unless it is beside this binary; `sysfs_root` where the driver is not real.
    pub(crate) fn find(daemon: Option<PathBuf>, sysfs_root: Option<PathBuf>) -> anyhow::Result<Self> {
        let report = gdrd_nvml::read()?;
        let gpus: Vec<_> = report.gpus.iter().filter(|gpu| gpu.skip_reason().is_none()).cloned().collect();
        let gpu = gpus.first().cloned().context("there is no gpu that can be served")?;
        let own = std::env::current_exe()?;
        let beside = || own.parent().map(|folder| folder.join("gdrd"));
        let daemon = daemon.or_else(beside).filter(|path| path.exists());
        let daemon = daemon.with_context(|| format!("there is no gdrd beside {}", own.display()))?;
        let own = Gpu::open(&gpu.uuid)?;
        Ok(Self { report, gpu, gpus, daemon, sysfs_root, own })
    }

    pub(crate) fn uuid(&self) -> GpuUuid {
        GpuUuid(self.gpu.uuid.clone())
    }

    pub(crate) fn describe(&self) -> String {
        self.gpus.iter().map(|gpu| self.describe_gpu(gpu)).collect::<Vec<_>>().join("\n")
    }

    fn describe_gpu(&self, gpu: &GpuReport) -> String {
        let report = &self.report;
        format!(
            "{} at {}, driver {}, {} MiB, bar1 {:?}, mig {:?}, pcie {:?} of {:?}, nvlinks {:?}",
            gpu.product,
            gpu.bdf,
            report.driver_version,
            gpu.memory.map_or(0, |memory| memory.total_bytes >> 20),
            gpu.bar1,
            gpu.mig,
            gpu.pcie_now,
            gpu.pcie_best,
            gpu.nvlinks
        )
    }

    /// How a file of measurements begins.
    pub(crate) fn heading(&self) -> String {
        let run = |program: &str, arguments: &[&str]| {
            let output = Command::new(program).args(arguments).output().ok();
            let text = output.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
            text.filter(|text| !text.is_empty()).unwrap_or_else(|| "unknown".to_owned())
        };
        let commit = std::env::var("GDRD_COMMIT").unwrap_or_else(|_| run("git", &["rev-parse", "--short", "HEAD"]));
        format!(
            "# {}\n\nWritten by `make device-test`: {}, driver {}, kernel {}, commit {commit}.\n\
             The HCAs are simulated ones that copy on the GPU: there is no NIC. Fake only: MIG, exclusive and prohibited\n\
             mode, Xid and ECC errors, lost GPUs; those paths are seen in `make test` and were not entered here.\n\n",
            self.product(),
            run("date", &["-u", "+%F"]),
            self.report.driver_version,
            kernel(&run("uname", &["-r"])),
        )
    }

    /// Its GPUs in words.
    fn product(&self) -> String {
        match self.gpus.len() {
            1 => self.gpu.product.clone(),
            count => format!("{count} × {}", self.gpu.product),
        }
    }

    /// A pool of workers of the daemon's binary.
    pub(crate) fn pool(&self, idle_s: u64) -> WorkerPool {
        let arguments = ["worker", "serve", "--idle-s", &idle_s.to_string()].map(Into::into).to_vec();
        let launcher: Arc<dyn Launch> = Arc::new(ProcessLauncher::new(self.daemon.clone(), arguments));
        let served = vec![ServedGpu { uuid: self.uuid(), skipped: None }];
        WorkerPool::new(served, &launcher, PoolConfig::default())
    }

    /// Memory in use as nvidia-smi shows it, MiB.
    pub(crate) fn used_mib(&self) -> anyhow::Result<u64> {
        self.used_mib_of(&self.gpu)
    }

    /// The same of any GPU.
    pub(crate) fn used_mib_of(&self, gpu: &GpuReport) -> anyhow::Result<u64> {
        let query = ["--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", &gpu.uuid];
        let output = Command::new("nvidia-smi").args(query).output().context("run nvidia-smi")?;
        let text = String::from_utf8_lossy(&output.stdout);
        text.trim().parse().with_context(|| format!("nvidia-smi says {text:?}"))
    }

    /// Waits until at most so much is used.
    pub(crate) fn wait_for_used_mib(&self, at_most: u64) -> anyhow::Result<()> {
        self.wait_for_used_mib_of(&self.gpu, at_most)
    }

    /// The same of any GPU.
    pub(crate) fn wait_for_used_mib_of(&self, gpu: &GpuReport, at_most: u64) -> anyhow::Result<()> {
        wait_for("gpu memory to come back", || Ok(self.used_mib_of(gpu)? <= at_most)).with_context(|| {
            format!("{} MiB of {} are in use, {at_most} may be", self.used_mib_of(gpu).unwrap_or_default(), gpu.uuid)
        })
    }
}

/// Version of a kernel by its first two numbers: what follows is a distribution's own.
fn kernel(release: &str) -> String {
    release.splitn(3, '.').take(2).collect::<Vec<_>>().join(".")
}

/// Looks again and again until `look` says yes.
pub(crate) fn wait_for(what: &str, mut look: impl FnMut() -> anyhow::Result<bool>) -> anyhow::Result<()> {
    let since = Instant::now();
    while !look()? {
        ensure!(since.elapsed() < WATCHDOG, "waited {WATCHDOG:?} for {what}");
        std::thread::yield_now();
    }
    Ok(())
}

/// Workers among the descendants of a process.
pub(crate) fn workers_of(parent: u32) -> anyhow::Result<Vec<u32>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        // pid (name) state ppid …; the name may hold anything, so what counts comes after its last bracket.
        let mut fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
        let (state, of) = (fields.next(), fields.next().and_then(|ppid| ppid.parse().ok()));
        let command = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let is_worker = command.split(|byte| *byte == 0).any(|word| word == b"serve");
        if of == Some(parent) && state != Some("Z") && is_worker {
            found.push(pid);
        }
    }
    Ok(found)
}

/// Files of the driver that a process has open.
pub(crate) fn driver_files_of(pid: u32) -> anyhow::Result<Vec<PathBuf>> {
    let folder = format!("/proc/{pid}/fd");
    let links = std::fs::read_dir(&folder).with_context(|| folder.clone())?;
    let links = links.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
    Ok(links.filter(|link| link.starts_with("/dev") && name_of(link).starts_with("nvidia")).collect())
}

/// Name of a device file.
pub(crate) fn name_of(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}
