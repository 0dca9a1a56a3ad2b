//! Starting workers, and knowing how they ended.

use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, Read as _};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::Duration;

use gdrd_hal::GpuUuid;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// How a worker ended, for people (`signal: 9 (SIGKILL)`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerExit(pub String);

/// A started worker.
pub trait WorkerHandle: Send {
    /// Ends it at once; nothing when it has ended.
    fn kill(&self);

    /// Its process, where it is one.
    fn pid(&self) -> Option<u32> {
        None
    }

    /// How it ended, waiting at most `patience` for that.
    fn ended(&self, patience: Duration) -> Option<WorkerExit>;
}

/// Whose device files a worker may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// Those of every GPU: it may load libraries that open them all, as NVML does.
    Host,
    /// Those of its own GPU only: another one is drained.
    OwnGpu,
}

/// Starts workers.
pub trait Launch: Send + Sync {
    /// Starts the worker of `gpu` on its end of a SOCK_SEQPACKET pair.
    ///
    /// # Errors
    /// When none can be started.
    fn launch(&self, gpu: &GpuUuid, scope: Scope, socket: OwnedFd) -> io::Result<Box<dyn WorkerHandle>>;
}

/// Hears each line that the worker of a GPU prints. Called on a thread of that worker.
pub type Listener = Arc<dyn Fn(&GpuUuid, &str) + Send + Sync>;

/// Longest line that is heard; more is cut off.
const MAX_LINE_BYTES: u64 = 4096;

/// Workers as processes: `program arguments… [host_arguments…] --gpu UUID` with the socket as standard input.
#[derive(Clone)]
pub struct ProcessLauncher {
    /// Absolute path of the program.
    pub program: PathBuf,
    /// What comes first.
    pub arguments: Vec<OsString>,
    /// What follows in [`Scope::Host`].
    pub host_arguments: Vec<OsString>,
    /// Who hears what workers print; `None` for nobody.
    pub listener: Option<Listener>,
}

impl ProcessLauncher {
    /// Workers that hold nothing of other GPUs, and that nobody listens to.
    #[must_use]
    pub fn new(program: PathBuf, arguments: Vec<OsString>) -> Self {
        Self { program, arguments, host_arguments: Vec::new(), listener: None }
    }
}

impl std::fmt::Debug for ProcessLauncher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ProcessLauncher").field("program", &self.program).finish_non_exhaustive()
    }
}

impl Launch for ProcessLauncher {
    fn launch(&self, gpu: &GpuUuid, scope: Scope, socket: OwnedFd) -> io::Result<Box<dyn WorkerHandle>> {
        let more: &[OsString] = if scope == Scope::Host { &self.host_arguments } else { &[] };
        let child = Command::new(&self.program)
            .args(&self.arguments)
            .args(more)
            .args(["--gpu", &gpu.0])
            // One device: the worker opens no other's files, and a fault of another does not reach it.
            .env("CUDA_VISIBLE_DEVICES", &gpu.0)
            .stdin(Stdio::from(socket))
            .stdout(if self.listener.is_some() { Stdio::piped() } else { Stdio::null() })
            .spawn()?;
        let pid = child.id();
        // Before the thread can reap it, so that the number is still its own.
        let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::empty());
        let child = Unreaped(Some(child));
        let listener = self.listener.clone().map(|listener| (listener, gpu.clone()));
        Ok(Box::new(Process { pid, pidfd: pidfd?, exit: reap(child, listener)? }))
    }
}

/// A child for whose end nobody waits yet: dropped, it is killed and waited for, so that it stays no zombie.
struct Unreaped(Option<Child>);

impl Drop for Unreaped {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            // Both fail for a child that is none any more only.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

struct Process {
    pid: u32,
    pidfd: OwnedFd,
    exit: Receiver<io::Result<ExitStatus>>,
}

/// A thread that sleeps until the child prints or ends, so that none stays a zombie.
fn reap(mut child: Unreaped, listener: Option<(Listener, GpuUuid)>) -> io::Result<Receiver<io::Result<ExitStatus>>> {
    let (sender, receiver) = sync_channel(1);
    std::thread::Builder::new().name("gdrd-reaper".to_owned()).spawn(move || {
        let Some(mut child) = child.0.take() else { return };
        if let Some(((listener, gpu), output)) = listener.zip(child.stdout.take()) {
            let mut lines = BufReader::new(output);
            while let Some(line) = next_line(&mut lines) {
                listener(&gpu, &line);
            }
        }
        // Refused when nobody wants to know any more.
        let _ = sender.send(child.wait());
    })?;
    Ok(receiver)
}

/// The next line without its end; `None` at the end of the stream, or where it holds something else than text.
fn next_line(lines: &mut impl BufRead) -> Option<String> {
    let mut line = String::new();
    let read = lines.by_ref().take(MAX_LINE_BYTES).read_line(&mut line).ok()?;
    (read > 0).then(|| line.trim_end().to_owned())
}

impl WorkerHandle for Process {
    fn kill(&self) {
        // ESRCH: it has ended.
        let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
    }

    fn pid(&self) -> Option<u32> {
        Some(self.pid)
    }

    fn ended(&self, patience: Duration) -> Option<WorkerExit> {
        match self.exit.recv_timeout(patience) {
            Ok(Ok(status)) => Some(WorkerExit(status.to_string())),
            Ok(Err(error)) => Some(WorkerExit(format!("it cannot be waited for: {error}"))),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => Some(WorkerExit("it was waited for before".to_owned())),
        }
    }
}
