//! Who is at the other end of a unix socket: uid, gid, groups, and the cgroup scope of its process.
//!
//! Role: facts only, read from the kernel; what they permit is the engine's policy. Owns the peer's pidfd, which
//! outlives a reused pid: whatever is read from `/proc/PID` is believed only if the pidfd says afterwards that the
//! process still runs. Must not know: sessions, leases, gRPC.

mod cgroup;
mod proc_status;

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;

use gdrd_engine::{Engine, Viewer};
use nix::errno::Errno;
use nix::sys::socket::{getsockopt, sockopt};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::retry_on_intr;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use thiserror::Error;

pub use cgroup::{CgroupError, MAX_CGROUP_TEXT_BYTES, MAX_SCOPE_BYTES, Scope, scope_of};
use proc_status::ProcStatus;

/// Longest `/proc/PID/status` accepted: the kernel allows 65,536 groups of at most 11 bytes.
const MAX_STATUS_TEXT_BYTES: usize = 1024 * 1024;

/// The uid that stands for all unmapped ones unless `/proc/sys/kernel/overflowuid` says otherwise.
const OVERFLOW_UID: u32 = 65_534;

/// What `SO_PEERCRED` says: the peer as it was when it connected, in the daemon's namespaces (unix(7)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Credentials {
    /// Effective uid; the overflow uid when it has no mapping here.
    pub uid: u32,
    /// Effective gid.
    pub gid: u32,
    /// Process id; 0 when the process is outside the daemon's pid namespace.
    pub pid: i32,
}

impl Credentials {
    /// Reads them from a connected socket.
    ///
    /// # Errors
    /// `Socket`.
    pub fn of(socket: BorrowedFd<'_>) -> Result<Self, PeerError> {
        let found = getsockopt(&socket, sockopt::PeerCredentials).map_err(PeerError::Socket)?;
        // The engine knows opaque peers by one number, whatever this host's sysctl says.
        let uid = if found.uid() == overflow_uid() { OVERFLOW_UID } else { found.uid() };
        Ok(Self { uid, gid: found.gid(), pid: found.pid() })
    }
}

/// A peer whose process was looked at.
#[derive(Debug)]
pub struct Peer {
    /// Its credentials.
    pub credentials: Credentials,
    /// Its groups, the primary one among them, sorted.
    pub groups: Vec<u32>,
    /// Its cgroup scope as text; empty for a process outside the daemon's pid namespace.
    pub scope: String,
    /// Readable once the process has ended; `None` for a process outside the daemon's pid namespace.
    pub pidfd: Option<OwnedFd>,
}

/// Why a peer was refused.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PeerError {
    /// The socket does not say who its peer is.
    #[error("peer credentials of the socket: {0}")]
    Socket(Errno),
    /// The process ended while it was looked at, or was another one by then.
    #[error("peer process {pid} ended while it connected")]
    Gone {
        /// Its pid.
        pid: i32,
    },
    /// The process runs, but `/proc` does not show it.
    #[error("peer process {pid} is hidden from the daemon; mount /proc without hidepid, or with a gid= that it is in")]
    Hidden {
        /// Its pid.
        pid: i32,
    },
    /// A file of `/proc/PID` could not be read.
    #[error("{path} of the peer: {source}")]
    Proc {
        /// The file.
        path: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// A file of `/proc/PID` is longer than the kernel writes; a cut one could name another group.
    #[error("{path} of the peer has more than {limit_bytes} bytes")]
    ProcTooLong {
        /// The file.
        path: String,
        /// What is accepted, bytes.
        limit_bytes: usize,
    },
    /// The cgroup names no scope.
    #[error("cgroup of peer process {pid}: {source}")]
    Cgroup {
        /// Its pid.
        pid: i32,
        /// Why.
        source: CgroupError,
    },
}

impl PeerError {
    /// Whether the daemon, or the host, has no descriptor left to look at the peer with.
    pub(crate) fn is_for_want_of_descriptors(&self) -> bool {
        let errno = match self {
            Self::Socket(errno) => Some(*errno),
            Self::Proc { source, .. } => source.raw_os_error().map(Errno::from_raw),
            _ => None,
        };
        matches!(errno, Some(Errno::EMFILE | Errno::ENFILE))
    }
}

impl Peer {
    /// Looks at the process behind a connected socket. Reads a few files of `/proc`; never waits.
    ///
    /// # Errors
    /// Any of [`PeerError`].
    pub fn of(socket: BorrowedFd<'_>) -> Result<Self, PeerError> {
        let credentials = Credentials::of(socket)?;
        let Some(pid) = Pid::from_raw(credentials.pid) else {
            return Ok(Self { credentials, groups: vec![credentials.gid], scope: String::new(), pidfd: None });
        };
        let pidfd = open_pidfd(socket, pid, &credentials)?;
        let read = |name, limit_bytes| {
            read_proc(credentials.pid, name, limit_bytes).map_err(|error| hidden_if_running(error, pidfd.as_fd()))
        };
        let status = ProcStatus::parse(&read("status", MAX_STATUS_TEXT_BYTES)?);
        let cgroup = read("cgroup", MAX_CGROUP_TEXT_BYTES)?;
        // The second check: a pid is not reused before its process ended, and an ended process is a readable pidfd.
        if has_ended(pidfd.as_fd()) {
            return Err(PeerError::Gone { pid: credentials.pid });
        }
        let scope = scope_of(&cgroup).map_err(|source| PeerError::Cgroup { pid: credentials.pid, source })?;
        let mut groups = status.groups;
        groups.push(credentials.gid);
        groups.sort_unstable();
        groups.dedup();
        Ok(Self { credentials, groups, scope: scope.to_string(), pidfd: Some(pidfd) })
    }
}

/// Whether the peer of a connected socket administers this host.
pub(crate) fn is_admin(engine: &Engine, socket: BorrowedFd<'_>) -> bool {
    let is_admin = |peer: &Peer| engine.require_admin(&Viewer::Peer(peer.into()), "such a connection").is_ok();
    Peer::of(socket).is_ok_and(|peer| is_admin(&peer))
}

impl From<&Peer> for gdrd_engine::Peer {
    fn from(peer: &Peer) -> Self {
        let Credentials { uid, gid, pid } = peer.credentials;
        Self { uid, gid, groups: peer.groups.clone(), pid, scope: peer.scope.clone() }
    }
}

/// SO_PEERPIDFD names the very process (Linux 6.5). Older kernels have only its number, which may be another
/// process by now: then its uid must still be the peer's.
fn open_pidfd(socket: BorrowedFd<'_>, pid: Pid, credentials: &Credentials) -> Result<OwnedFd, PeerError> {
    let gone = || PeerError::Gone { pid: credentials.pid };
    match getsockopt(&socket, sockopt::PeerPidfd) {
        Ok(pidfd) => Ok(pidfd),
        Err(Errno::ENOPROTOOPT) => {
            let pidfd =
                pidfd_open(pid, PidfdFlags::empty()).map_err(|error| match Errno::from_raw(error.raw_os_error()) {
                    errno @ (Errno::EMFILE | Errno::ENFILE) => PeerError::Socket(errno),
                    _ => gone(),
                })?;
            let status = ProcStatus::parse(&read_proc(credentials.pid, "status", MAX_STATUS_TEXT_BYTES)?);
            if status.effective_uid == Some(credentials.uid) { Ok(pidfd) } else { Err(gone()) }
        }
        Err(Errno::ESRCH | Errno::EINVAL | Errno::ENODATA) => Err(gone()),
        Err(errno) => Err(PeerError::Socket(errno)),
    }
}

/// Files that are missing although the process runs are kept from us (hidepid= of proc(5)).
fn hidden_if_running(error: PeerError, pidfd: BorrowedFd<'_>) -> PeerError {
    match error {
        PeerError::Gone { pid } if !has_ended(pidfd) => PeerError::Hidden { pid },
        other => other,
    }
}

/// Whether the process of a pidfd has ended (pidfd_open(2): it polls readable then).
fn has_ended(pidfd: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::new(&pidfd, PollFlags::IN)];
    // An error of poll on a valid fd cannot be read as "still running".
    retry_on_intr(|| poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))).map_or(true, |ready| ready > 0)
}

fn read_proc(pid: i32, name: &str, limit_bytes: usize) -> Result<String, PeerError> {
    let path = format!("/proc/{pid}/{name}");
    let mut bytes = Vec::new();
    // One byte more than is accepted, so that a longer text is seen as such.
    let limit = u64::try_from(limit_bytes).map_or(u64::MAX, |limit| limit.saturating_add(1));
    let read = File::open(&path).and_then(|file| file.take(limit).read_to_end(&mut bytes));
    match read {
        Ok(len_bytes) if len_bytes > limit_bytes => Err(PeerError::ProcTooLong { path, limit_bytes }),
        Ok(_) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
        Err(error) if matches!(Errno::from_raw(error.raw_os_error().unwrap_or(0)), Errno::ENOENT | Errno::ESRCH) => {
            Err(PeerError::Gone { pid })
        }
        Err(source) => Err(PeerError::Proc { path, source }),
    }
}

fn overflow_uid() -> u32 {
    static FOUND: OnceLock<u32> = OnceLock::new();
    *FOUND.get_or_init(|| {
        let text = std::fs::read_to_string("/proc/sys/kernel/overflowuid").unwrap_or_default();
        text.trim().parse().unwrap_or(OVERFLOW_UID)
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn peer_of_a_socket_pair_is_this_process() {
        let (ours, _theirs) = UnixStream::pair().expect("a socket pair");
        let peer = Peer::of(ours.as_fd()).expect("this process lives");
        assert_eq!(peer.credentials.uid, rustix::process::geteuid().as_raw());
        assert_eq!(peer.credentials.pid, rustix::process::getpid().as_raw_nonzero().get());
        assert!(peer.groups.contains(&rustix::process::getegid().as_raw()));
        assert!(!peer.scope.is_empty());
        assert!(!has_ended(peer.pidfd.expect("a process of this namespace").as_fd()));
    }

    #[test]
    fn want_of_descriptors_is_told_from_what_is_wrong_with_the_peer() {
        let proc = |errno| PeerError::Proc { path: "status".to_owned(), source: io::Error::from_raw_os_error(errno) };
        let wants = [PeerError::Socket(Errno::EMFILE), PeerError::Socket(Errno::ENFILE), proc(24), proc(23)];
        for error in wants {
            assert!(error.is_for_want_of_descriptors(), "{error}");
        }
        assert!(
            !PeerError::Socket(Errno::EINVAL).is_for_want_of_descriptors() && !proc(13).is_for_want_of_descriptors()
        );
    }

    #[test]
    fn ended_process_is_seen_through_its_pidfd() {
        let mut child = std::process::Command::new("true").spawn().expect("true runs");
        let pid = Pid::from_raw(i32::try_from(child.id()).expect("a pid")).expect("not zero");
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).expect("not reaped yet");
        child.wait().expect("it ends");
        assert!(has_ended(pidfd.as_fd()));
        assert!(matches!(hidden_if_running(PeerError::Gone { pid: 7 }, pidfd.as_fd()), PeerError::Gone { pid: 7 }));
    }

    #[test]
    fn running_process_without_files_is_hidden() {
        let own = pidfd_open(rustix::process::getpid(), PidfdFlags::empty()).expect("this process");
        assert!(matches!(hidden_if_running(PeerError::Gone { pid: 7 }, own.as_fd()), PeerError::Hidden { pid: 7 }));
    }

    #[test]
    fn file_of_an_ended_process_is_gone() {
        let mut child = std::process::Command::new("true").spawn().expect("true runs");
        let pid = i32::try_from(child.id()).expect("a pid");
        child.wait().expect("it ends");
        assert!(matches!(read_proc(pid, "cgroup", MAX_CGROUP_TEXT_BYTES), Err(PeerError::Gone { .. })));
    }
}
