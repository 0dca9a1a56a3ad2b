//! A real daemon in a folder of its own.

use std::fs::{File, Permissions};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tempfile::TempDir;

use crate::footprint::Footprint;
use crate::lines::readable;
use crate::process::{Process, kill_pid, wait_until};
use crate::{PATIENCE, binary, fail};

/// What to start.
#[derive(Debug, Clone)]
pub struct DaemonOptions {
    /// `None` for this machine's own hardware.
    profile: Option<String>,
    config: Option<String>,
    kept: bool,
    fault_script: Option<String>,
    library_path: Option<PathBuf>,
}

impl Default for DaemonOptions {
    fn default() -> Self {
        Self { profile: Some("dgx-a100".into()), config: None, fault_script: None, library_path: None, kept: false }
    }
}

impl DaemonOptions {
    /// Simulates this host profile; `dgx-a100` by default.
    #[must_use]
    pub fn profile(mut self, profile: &str) -> Self {
        self.profile = Some(profile.into());
        self
    }

    /// Serves the hardware of this machine instead of a simulated host.
    #[must_use]
    pub fn hardware(mut self) -> Self {
        self.profile = None;
        self
    }

    /// Text of the configuration file.
    #[must_use]
    pub fn config(mut self, text: &str) -> Self {
        self.config = Some(text.into());
        self
    }

    /// Finds libraries in this folder first (ld.so(8), LD_LIBRARY_PATH).
    #[must_use]
    pub fn library_path(mut self, folder: &Path) -> Self {
        self.library_path = Some(folder.into());
        self
    }

    /// Under `gdrd keeper`, which keeps its descriptors and starts it again when it dies.
    #[must_use]
    pub fn kept(mut self) -> Self {
        self.kept = true;
        self
    }

    /// Text of the fault script of the simulated host.
    #[must_use]
    pub fn fault_script(mut self, text: &str) -> Self {
        self.fault_script = Some(text.into());
        self
    }

    /// Starts it and waits until it says that it serves.
    ///
    /// # Panics
    /// When it does not.
    #[must_use]
    pub fn start(self) -> Daemon {
        let folder = tempfile::tempdir().expect("make a folder for a daemon");
        // Clients of other users must be able to enter it.
        std::fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).expect("open the daemon's folder");
        let process = self.spawn(folder.path());
        Daemon { process, options: self, folder }
    }

    /// The configuration, by which whoever runs the tests administers, as root does by default.
    fn administered(&self) -> Option<String> {
        let own = rustix::process::geteuid();
        if own.is_root() {
            return self.config.clone();
        }
        let text = self.config.as_deref().unwrap_or_default();
        Some(format!("{text}\n[policy]\nadmins = [\"uid:0\", \"uid:{}\"]\n", own.as_raw()))
    }

    /// Starts a process in `folder` and waits until it serves.
    fn spawn(&self, folder: &Path) -> Process {
        let notify_path = folder.join("notify");
        // That of a daemon before in the same folder.
        let _ = std::fs::remove_file(&notify_path);
        let notify = UnixDatagram::bind(&notify_path).expect("bind the notify socket");
        let log = File::options().create(true).append(true).open(folder.join(LOG)).expect("open the daemon's log");
        let mut command = Command::new(binary("gdrd"));
        if self.kept {
            command.args(["keeper", "--"]);
        }
        if let Some(profile) = &self.profile {
            command.args(["--sim", profile]);
        }
        command.arg("--runtime-dir").arg(folder.join(RUN));
        if let Some(text) = self.administered() {
            let path = folder.join("gdrd.toml");
            std::fs::write(&path, text).expect("write the daemon's configuration");
            command.arg("--config").arg(path);
        }
        if let Some(text) = &self.fault_script {
            let path = folder.join("faults");
            std::fs::write(&path, text).expect("write the fault script");
            command.arg("--fault-script").arg(path);
        }
        if let Some(folder) = &self.library_path {
            command.env("LD_LIBRARY_PATH", folder);
        }
        command.env("NOTIFY_SOCKET", &notify_path).env_remove("LISTEN_FDS");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let child = command.spawn().unwrap_or_else(|error| fail(format_args!("start gdrd: {error}")));
        let process = Process::new(child, "gdrd");
        await_ready(&process, notify, folder);
        process
    }
}

const RUN: &str = "run";
const LOG: &str = "log";

/// A running daemon. Killed when dropped; its log goes to the test's output when the test fails.
#[derive(Debug)]
pub struct Daemon {
    process: Process,
    options: DaemonOptions,
    folder: TempDir,
}

impl Daemon {
    /// Starts one with the default options.
    #[must_use]
    pub fn start() -> Self {
        DaemonOptions::default().start()
    }

    /// Its process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Folder of its sockets.
    #[must_use]
    pub fn runtime_dir(&self) -> PathBuf {
        self.folder.path().join(RUN)
    }

    /// Folder of its sockets, for commands to puppets.
    #[must_use]
    pub fn runtime_dir_text(&self) -> String {
        self.runtime_dir().to_string_lossy().into_owned()
    }

    /// What `/proc` shows of it now.
    ///
    /// # Panics
    /// When it is gone.
    #[must_use]
    pub fn footprint(&self) -> Footprint {
        let seen = Footprint::of(self.pid());
        seen.unwrap_or_else(|error| fail(format_args!("look at gdrd {}: {error}\n{}", self.pid(), self.log())))
    }

    /// What it has logged.
    #[must_use]
    pub fn log(&self) -> String {
        log_in(self.folder.path())
    }

    /// Asks it to stop, and waits until it has.
    pub fn stop(mut self) -> ExitStatus {
        self.process.signal(Signal::TERM);
        self.process.wait()
    }

    /// The daemon's own process: under a keeper another than [`Daemon::pid`].
    ///
    /// # Panics
    /// When it has not written its pid.
    #[must_use]
    pub fn daemon_pid(&self) -> u32 {
        let read = || std::fs::read_to_string(self.runtime_dir().join("gdrd.lock")).unwrap_or_default();
        // Empty for a moment while a daemon writes it.
        wait_until("the daemon has written its pid", || read().trim().parse())
    }

    /// Kills a kept daemon without a word. The keeper starts it again, with whatever was done to its files by `meanwhile`,
    /// which runs while the keeper stands still.
    pub fn kill_kept(&self, meanwhile: impl FnOnce(&Path)) {
        let before = self.daemon_pid();
        self.process.signal(Signal::STOP);
        kill_pid(before);
        meanwhile(&self.runtime_dir());
        self.process.signal(Signal::CONT);
        self.await_another(before);
    }

    /// Has the keeper start a kept daemon anew, as `systemctl restart` does.
    pub fn restart_kept(&self) {
        let before = self.daemon_pid();
        self.process.signal(Signal::HUP);
        self.await_another(before);
    }

    fn await_another(&self, before: u32) {
        wait_until("the keeper has started another daemon", || match self.daemon_pid() {
            pid if pid == before => Err(pid),
            _ => Ok(()),
        });
        wait_until("it listens", || UnixStream::connect(self.runtime_dir().join("gdrd.sock")).map(drop));
    }

    /// Kills it without a word, and leaves its folder.
    pub fn kill(&mut self) {
        self.process.signal(Signal::KILL);
        self.process.wait();
    }

    /// Starts it again in the same folder, after [`Daemon::kill`].
    pub fn start_again(&mut self) {
        self.process = self.options.spawn(self.folder.path());
    }
}

fn log_in(folder: &Path) -> String {
    std::fs::read_to_string(folder.join(LOG)).unwrap_or_default()
}

/// sd_notify(3): the daemon sends READY=1 when it serves.
fn await_ready(process: &Process, notify: UnixDatagram, folder: &Path) {
    let deadline = Instant::now() + PATIENCE;
    let notify = OwnedFd::from(notify);
    loop {
        // The pidfd would need a second poll; a daemon that has died is seen within a second.
        let soon = deadline.min(Instant::now() + Duration::from_secs(1));
        if readable(&notify, soon).unwrap_or(false) {
            let mut message = [0; 4096];
            let got = rustix::io::read(&notify, &mut message).unwrap_or(0);
            let text = String::from_utf8_lossy(message.get(..got).unwrap_or_default()).into_owned();
            if text.lines().any(|line| line == "READY=1") {
                return;
            }
        }
        if process.has_ended() || Instant::now() > deadline {
            fail(format_args!("gdrd did not become ready:\n{}", log_in(folder)));
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- log of gdrd {}\n{}---", self.pid(), self.log());
        }
    }
}
