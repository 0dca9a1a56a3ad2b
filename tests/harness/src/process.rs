//! A child process that is ended and reaped when its owner goes, and waits on conditions.

use std::os::fd::OwnedFd;
use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open, pidfd_send_signal};

use crate::lines::readable;
use crate::{PATIENCE, fail};

/// Pause between two looks at a condition that has no event, such as `/proc` of another process.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// A child with its pidfd.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    pidfd: OwnedFd,
    what: String,
}

impl Process {
    pub(crate) fn new(child: Child, what: impl Into<String>) -> Self {
        let what = what.into();
        let pid = pid_of(child.id());
        // Not reaped before `wait`, so the number is still the child's.
        let pidfd =
            pidfd_open(pid, PidfdFlags::empty()).unwrap_or_else(|errno| fail(format_args!("pidfd of {what}: {errno}")));
        Self { child, pidfd, what }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    pub(crate) fn signal(&self, signal: Signal) {
        // ESRCH: it has ended by itself.
        let _ = pidfd_send_signal(&self.pidfd, signal);
    }

    /// Waits for the end.
    pub(crate) fn wait(&mut self) -> ExitStatus {
        let ended = readable(&self.pidfd, Instant::now() + PATIENCE).unwrap_or(false);
        if !ended {
            self.signal(Signal::KILL);
        }
        let status = self.child.wait().unwrap_or_else(|error| fail(format_args!("wait for {}: {error}", self.what)));
        assert!(ended, "{} did not end within {PATIENCE:?}", self.what);
        status
    }

    pub(crate) fn has_ended(&self) -> bool {
        readable(&self.pidfd, Instant::now()).unwrap_or(true)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
        let _ = self.child.wait();
    }
}

fn pid_of(pid: u32) -> Pid {
    i32::try_from(pid).ok().and_then(Pid::from_raw).unwrap_or_else(|| fail(format_args!("pid {pid} of a child")))
}

/// Kills a process that is no child of this one, such as the child of a puppet.
///
/// # Panics
/// When there is no such process.
pub fn kill_pid(pid: u32) {
    kill_process(pid_of(pid), Signal::KILL).unwrap_or_else(|errno| fail(format_args!("kill {pid}: {errno}")));
}

/// Looks at a condition that has no event until it gives a value.
///
/// # Panics
/// After [`PATIENCE`], with what was last seen.
pub fn wait_until<T, W: std::fmt::Debug>(what: &str, mut condition: impl FnMut() -> Result<T, W>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match condition() {
            Ok(value) => return value,
            Err(seen) => assert!(Instant::now() < deadline, "not within {PATIENCE:?}: {what}; last seen: {seen:?}"),
        }
        std::thread::park_timeout(LOOK_AGAIN);
    }
}
