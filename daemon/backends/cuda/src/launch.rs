//! Starting workers, and knowing how they ended.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
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

    /// How it ended, waiting at most `patience` for that.
    fn ended(&self, patience: Duration) -> Option<WorkerExit>;
}

/// Starts workers.
pub trait Launch: Send + Sync {
    /// Starts the worker of `gpu` on its end of a SOCK_SEQPACKET pair.
    ///
    /// # Errors
    /// When none can be started.
    fn launch(&self, gpu: &GpuUuid, socket: OwnedFd) -> io::Result<Box<dyn WorkerHandle>>;
}

/// Workers as processes: `program arguments… --gpu UUID` with the socket as standard input.
#[derive(Debug, Clone)]
pub struct ProcessLauncher {
    /// Absolute path of the program.
    pub program: PathBuf,
    /// What comes before `--gpu`.
    pub arguments: Vec<OsString>,
}

impl Launch for ProcessLauncher {
    fn launch(&self, gpu: &GpuUuid, socket: OwnedFd) -> io::Result<Box<dyn WorkerHandle>> {
        let child = Command::new(&self.program)
            .args(&self.arguments)
            .args(["--gpu", &gpu.0])
            // One device: the worker opens no other's files, and a fault of another does not reach it.
            .env("CUDA_VISIBLE_DEVICES", &gpu.0)
            .stdin(Stdio::from(socket))
            .stdout(Stdio::null())
            .spawn()?;
        // Before the thread can reap it, so that the number is still its own.
        let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::empty())?;
        Ok(Box::new(Process { pidfd, exit: reap(child)? }))
    }
}

struct Process {
    pidfd: OwnedFd,
    exit: Receiver<io::Result<ExitStatus>>,
}

/// A thread that sleeps until the child ends, so that none stays a zombie.
fn reap(mut child: Child) -> io::Result<Receiver<io::Result<ExitStatus>>> {
    let (sender, receiver) = sync_channel(1);
    std::thread::Builder::new().name("gdrd-reaper".to_owned()).spawn(move || {
        // Refused when nobody wants to know any more.
        let _ = sender.send(child.wait());
    })?;
    Ok(receiver)
}

impl WorkerHandle for Process {
    fn kill(&self) {
        // ESRCH: it has ended.
        let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
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
