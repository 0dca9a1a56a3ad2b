//! Errors of the client. The daemon's own refusals keep their stable reason string.

use std::error::Error;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use crate::calls::CallContext;

/// Why a call did not succeed. A refusal by the daemon, an absent daemon, an ended session and a daemon that breaks
/// the protocol are different variants, since the caller does different things about them.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// No runtime folder holds the daemon's sockets.
    #[error(
        "no gdrd found: {} holds no gdrd.sock; start the daemon, or set GDRD_RUNTIME_DIR to its runtime folder",
        looked_in.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(" and ")
    )]
    NoDaemon {
        /// Folders looked in, in order.
        looked_in: Vec<PathBuf>,
    },
    /// Nobody listens on the socket.
    #[error("gdrd does not answer on {}; is the daemon running?", path.display())]
    Unreachable {
        /// Socket tried.
        path: PathBuf,
        /// What the connection said.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// The mode of the socket or of a folder above it keeps this user out.
    #[error("this user may not connect to {}; see the modes of socket and folder (SOCKET_NOT_PERMITTED)", path.display())]
    NotPermitted {
        /// Socket tried.
        path: PathBuf,
        /// What the connection said.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// Somebody listens, and the connection broke before there was an answer: the daemon ended or was started again.
    #[error("the connection to gdrd on {} broke before it answered", path.display())]
    ConnectionLost {
        /// The socket.
        path: PathBuf,
        /// What the connection said.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// Client and daemon speak different versions.
    #[error("the daemon speaks {what} version {daemon}, this client speaks {client}; upgrade {}", older(*daemon, *client))]
    Version {
        /// Which of the exchanged versions differs: API, ring or generation page.
        what: &'static str,
        /// The daemon's.
        daemon: u32,
        /// Ours.
        client: u32,
    },
    /// The daemon refused the call.
    #[error("{call} was refused: {message}{}", bracketed(reason))]
    Refused {
        /// Call, as the proto names it.
        call: &'static str,
        /// gRPC code.
        code: tonic::Code,
        /// Stable reason string of docs/errors.md; empty when the daemon gave none.
        reason: String,
        /// The daemon's message.
        message: String,
    },
    /// The call did not end in time. Its outcome is unknown.
    #[error("{call} had no answer within {deadline:?}")]
    Deadline {
        /// Call, as the proto names it.
        call: &'static str,
        /// How long was waited.
        deadline: Duration,
    },
    /// The daemon would not open a session.
    #[error("the daemon refused a session: {message}{}", bracketed(reason))]
    SessionRefused {
        /// Stable reason string.
        reason: String,
        /// The daemon's message.
        message: String,
    },
    /// Memory was not adopted.
    #[error("memory was not adopted: {message}{}", bracketed(reason))]
    NotAdopted {
        /// Stable reason string, as in docs/errors.md.
        reason: String,
        /// What the daemon said, with the alternative.
        message: String,
    },
    /// The session is over, and with it every lease and queue pair it held. Open a new one.
    #[error("the session has ended: {message}{}", bracketed(reason))]
    SessionEnded {
        /// Stable reason string of the daemon, or `CONNECTION_LOST`, or `CLOSED_BY_CLIENT`.
        reason: String,
        /// What happened.
        message: String,
    },
    /// The daemon sent what gdrd.v1 does not allow; a bug of one side.
    #[error("the daemon broke the protocol: {what}")]
    Protocol {
        /// What was wrong.
        what: String,
    },
    /// A value that the caller passed cannot be used.
    #[error("{what}")]
    InvalidArgument {
        /// Which value and why.
        what: String,
    },
    /// The memory of the buffer cannot be mapped by this client.
    #[error("memory of kind {kind} cannot be mapped here; use Buffer::try_clone_fd and import it")]
    NotMappable {
        /// The daemon's word for it.
        kind: String,
    },
    /// Memory of a CUDA GPU: no driver in this process, a GPU that it is not shown, or a call that the driver refused.
    #[error("memory of a gpu")]
    Cuda(#[from] gdrd_client_sys::CudaError),
    /// Shared memory: a range outside the buffer, or a mapping that the kernel refused.
    #[error(transparent)]
    Memory(#[from] gdrd_shm::ShmError),
    /// A ring or generation page of the daemon that this client cannot use.
    #[error(transparent)]
    Open(#[from] gdrd_ring::OpenError),
    /// A request that was not posted: the queue is full, the queue pair has ended, or the request is malformed.
    #[error(transparent)]
    Submit(#[from] gdrd_ring::SubmitError),
    /// The queue pair went into error by itself; requests without a completion have an unknown outcome.
    #[error("queue pair {queue_pair_id} has failed: {message}; destroy it and make another one")]
    QueuePairFailed {
        /// The queue pair's number at the daemon.
        queue_pair_id: u64,
        /// The daemon's message.
        message: String,
    },
    /// The queue pair has ended, or its ring was broken.
    #[error(transparent)]
    Ring(#[from] gdrd_ring::RingError),
    /// A system call of the client itself.
    #[error("{what}")]
    Io {
        /// What was attempted, on which object.
        what: String,
        /// What the kernel answered.
        #[source]
        source: std::io::Error,
    },
}

impl ClientError {
    /// The daemon's stable reason string, where it gave one.
    #[must_use]
    pub fn reason(&self) -> Option<&str> {
        match self {
            Self::Refused { reason, .. }
            | Self::SessionRefused { reason, .. }
            | Self::NotAdopted { reason, .. }
            | Self::SessionEnded { reason, .. }
                if !reason.is_empty() =>
            {
                Some(reason)
            }
            Self::NotPermitted { .. } => Some("SOCKET_NOT_PERMITTED"),
            _ => None,
        }
    }

    /// Whether no daemon was reached: starting one may help.
    #[must_use]
    pub fn is_unreachable(&self) -> bool {
        matches!(self, Self::NoDaemon { .. } | Self::Unreachable { .. })
    }

    /// Whether no answer came because there was no connection, or no more: with another one the same call may have one.
    pub(crate) fn is_lost_connection(&self) -> bool {
        matches!(self, Self::Unreachable { .. } | Self::ConnectionLost { .. })
    }

    /// What it means that a connection to the socket of `context` could not be made for `call`, or broke.
    pub(crate) fn of_connection(
        context: &CallContext,
        call: &'static str,
        source: Box<dyn Error + Send + Sync>,
    ) -> Self {
        use io::ErrorKind::{ConnectionRefused, NotFound, PermissionDenied, TimedOut, WouldBlock};
        let path = context.socket.clone();
        let mut cause: Option<&(dyn Error + 'static)> = Some(&*source);
        while let Some(other) = cause.filter(|cause| !cause.is::<io::Error>()) {
            cause = other.source();
        }
        let Some(cause) = cause.and_then(|cause| cause.downcast_ref::<io::Error>()) else {
            return Self::ConnectionLost { path, source };
        };
        match (cause.kind(), cause.raw_os_error()) {
            (NotFound | ConnectionRefused, _) => Self::Unreachable { path, source },
            (PermissionDenied, _) => Self::NotPermitted { path, source },
            // The daemon takes no more connections for now (connect(2), EAGAIN).
            (WouldBlock | TimedOut, _) => Self::Deadline { call, deadline: context.deadline },
            (kind, Some(errno)) if !is_broken(kind) => {
                Self::io(format!("connect to {}", path.display()), io::Error::from_raw_os_error(errno))
            }
            _ => Self::ConnectionLost { path, source },
        }
    }

    /// Whether a socket had no other end any more.
    pub(crate) fn is_lost_socket(&self) -> bool {
        matches!(self, Self::Io { source, .. } if is_broken(source.kind()))
    }

    pub(crate) fn protocol(what: impl Into<String>) -> Self {
        Self::Protocol { what: what.into() }
    }

    pub(crate) fn io(what: impl Into<String>, source: impl Into<std::io::Error>) -> Self {
        Self::Io { what: what.into(), source: source.into() }
    }
}

/// Whether the other end of a connection has gone.
fn is_broken(kind: io::ErrorKind) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, NotConnected};
    matches!(kind, BrokenPipe | ConnectionReset | NotConnected)
}

fn older(daemon: u32, client: u32) -> &'static str {
    if daemon < client { "the daemon" } else { "this client" }
}

fn bracketed(reason: &str) -> String {
    if reason.is_empty() { String::new() } else { format!(" ({reason})") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_mismatch_names_both_and_what_to_upgrade() {
        let text = ClientError::Version { what: "ring", daemon: 1, client: 2 }.to_string();
        assert_eq!(text, "the daemon speaks ring version 1, this client speaks 2; upgrade the daemon");
        let text = ClientError::Version { what: "API", daemon: 3, client: 2 }.to_string();
        assert!(text.ends_with("upgrade this client"), "{text}");
    }

    #[test]
    fn an_absent_daemon_names_every_folder_looked_in() {
        let text = ClientError::NoDaemon { looked_in: vec!["/a".into(), "/b".into()] }.to_string();
        assert!(text.contains("/a and /b holds no gdrd.sock"), "{text}");
    }

    #[test]
    fn a_connection_fails_as_its_innermost_cause_says() {
        use rustix::io::Errno;
        let context = CallContext { deadline: Duration::from_secs(3), socket: "/x".into() };
        let of = |errno: Errno| {
            let inner = io::Error::from(errno);
            ClientError::of_connection(&context, "Host.Status", Box::new(tonic::Status::from_error(Box::new(inner))))
        };
        for errno in [Errno::NOENT, Errno::CONNREFUSED] {
            assert!(of(errno).is_unreachable(), "{errno}");
        }
        assert_eq!(of(Errno::ACCESS).reason(), Some("SOCKET_NOT_PERMITTED"));
        for errno in [Errno::CONNRESET, Errno::PIPE, Errno::NOTCONN] {
            let lost = of(errno);
            assert!(lost.is_lost_connection() && !lost.is_unreachable(), "{lost}");
        }
        for errno in [Errno::AGAIN, Errno::TIMEDOUT] {
            let late = of(errno);
            assert!(matches!(late, ClientError::Deadline { call: "Host.Status", .. }), "{late}");
        }
        for errno in [Errno::MFILE, Errno::NOTDIR, Errno::LOOP] {
            let own = of(errno);
            assert!(
                matches!(&own, ClientError::Io { what, source } if what == "connect to /x"
                && source.raw_os_error() == Some(errno.raw_os_error())),
                "{own:?}"
            );
        }
    }

    #[test]
    fn reasons_come_through_only_where_the_daemon_gave_one() {
        let refused = |reason: &str| ClientError::Refused {
            call: "Buffers.Acquire",
            code: tonic::Code::NotFound,
            reason: reason.into(),
            message: "no such gpu".into(),
        };
        assert_eq!(refused("GPU_UNKNOWN").reason(), Some("GPU_UNKNOWN"));
        assert_eq!(refused("").reason(), None);
        assert_eq!(refused("X").to_string(), "Buffers.Acquire was refused: no such gpu (X)");
    }
}
