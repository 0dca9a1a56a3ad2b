//! A daemon with simulated HCAs over the real GPU.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::Context as _;
use gdrd_client::{Client, ClientOptions, RuntimeDir, Session};
use tempfile::TempDir;
use tokio::runtime::Runtime;

use crate::host::{Host, wait_for};

/// Pools shrink and workers end after a second, so that memory can be seen to come back.
pub(crate) const CONFIG: &str =
    "[pool]\nidle_s = 1\nheadroom_bytes = 0\n[gpu]\nworker_idle_s = 1\n[topology]\nrescan_interval_s = 0\n";

/// A running daemon; killed on drop.
#[derive(Debug)]
pub(crate) struct Daemon {
    child: Child,
    folder: TempDir,
}

impl Daemon {
    pub(crate) fn start(host: &Host, config: &str) -> anyhow::Result<Self> {
        Self::start_as(host, config, &[])
    }

    /// Under `gdrd keeper`, which starts it again when it dies.
    pub(crate) fn start_kept(host: &Host, config: &str) -> anyhow::Result<Self> {
        Self::start_as(host, config, &["keeper", "--"])
    }

    fn start_as(host: &Host, config: &str, before: &[&str]) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        let file = folder.path().join("gdrd.toml");
        let mut root = Vec::new();
        let mut proof = "";
        if let Some(sysfs_root) = &host.sysfs_root {
            root.extend(["--sysfs-root".as_ref(), sysfs_root.as_os_str()]);
            proof = "gpu_proof = \"none\"\n";
        }
        // Whoever runs the checks drains and resumes.
        let own = rustix::process::geteuid().as_raw();
        std::fs::write(&file, format!("{proof}{config}\n[policy]\nadmins = [\"uid:{own}\"]\n"))?;
        let child = Command::new(&host.daemon)
            .args(before)
            .args(root)
            .args(["--sim-hca", "2", "--log", "warn", "--config"])
            .arg(&file)
            .arg("--runtime-dir")
            .arg(folder.path().join("run"))
            .stdin(Stdio::null())
            .spawn()
            .context("start gdrd")?;
        let mut daemon = Self { child, folder };
        let runtime = runtime()?;
        wait_for("the daemon", || {
            if let Some(status) = daemon.child.try_wait()? {
                anyhow::bail!("gdrd ended: {status}");
            }
            Ok(runtime.block_on(connect(&daemon.runtime_dir())).is_ok())
        })?;
        Ok(daemon)
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The daemon itself: under a keeper another process than [`Daemon::pid`].
    pub(crate) fn daemon_pid(&self) -> Option<u32> {
        std::fs::read_to_string(self.runtime_dir().join("gdrd.lock")).ok()?.trim().parse().ok()
    }

    pub(crate) fn runtime_dir(&self) -> std::path::PathBuf {
        self.folder.path().join("run")
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // It may have ended; then there is nothing to kill, and wait(2) still reaps it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A runtime for the client.
pub(crate) fn runtime() -> anyhow::Result<Runtime> {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().context("start a runtime")
}

/// The same on this thread alone, where a call's time counts: another thread's wake-up would cost as much.
pub(crate) fn one_thread() -> anyhow::Result<Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build().context("start a runtime")
}

/// Connects to the daemon of a folder.
pub(crate) async fn connect(folder: &Path) -> anyhow::Result<Client> {
    Ok(ClientOptions::default().runtime_dir(RuntimeDir::new(folder)).connect().await?)
}

/// A session that has proven its right to every GPU that this process can open.
pub(crate) async fn session(folder: &Path) -> anyhow::Result<Session> {
    use std::os::fd::AsFd as _;
    let session = connect(folder).await?.open_session("device-test").await?;
    let nodes: Vec<_> = (0..16).filter_map(|minor| std::fs::File::open(format!("/dev/nvidia{minor}")).ok()).collect();
    let nodes: Vec<_> = nodes.iter().map(|node| node.as_fd()).collect();
    if !nodes.is_empty() {
        session.prove_gpus(&nodes).await?;
    }
    Ok(session)
}
