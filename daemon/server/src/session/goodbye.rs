//! Why a session ends, as its client is told: a stable reason and a sentence.

use std::time::Duration;

use gdrd_engine::EngineError;
use gdrd_proto::v1;
use thiserror::Error;

use crate::admission::Full;
use crate::peer::PeerError;

/// Why the daemon ends a connection to the session socket. Reasons are in docs/errors.md.
#[derive(Debug, Error)]
pub(crate) enum SessionEnd {
    /// The client closed it, or shut it down.
    #[error("the client closed the session")]
    Closed,
    /// The process that opened it has ended, whoever else holds the socket.
    #[error("the process that opened the session has ended")]
    ProcessEnded,
    /// No hello in time.
    #[error("no hello within {} ms of connecting", .0.as_millis())]
    HelloTimeout(Duration),
    /// The first message was none, or a later one was.
    #[error("{0}")]
    Protocol(&'static str),
    /// No message of the protocol.
    #[error("packet is no ClientMessage of gdrd.v1: {0}")]
    Malformed(String),
    /// Longer than the protocol allows.
    #[error("packet is longer than {limit_bytes} bytes")]
    PacketTooLong {
        /// What is accepted, bytes.
        limit_bytes: usize,
    },
    /// fds on a message that takes none.
    #[error("fds came with a message that takes none; only ProveGpus and Adopt take some")]
    UnexpectedFds,
    /// More fds than are taken (MSG_CTRUNC).
    #[error("more than {limit} fds came with one message; send them in several")]
    TooManyFds {
        /// Most that are taken.
        limit: usize,
    },
    /// Another API, ring or generation page.
    #[error("{0}")]
    Version(String),
    /// The client does not read, or does not acknowledge.
    #[error("the client does not take its deliveries: {0}")]
    SlowReader(String),
    /// Looking at the fds of a proof took too long.
    #[error("looking at the fds of a proof took more than {} ms", .0.as_millis())]
    ProofTimeout(Duration),
    /// fds of too many proofs of this user are looked at.
    #[error("too many proofs or adoptions of uid {uid} wait to be looked at; see that its fds answer, and try again")]
    TooManyProofs {
        /// The user.
        uid: u32,
    },
    /// Too many connections of this user, or of all.
    #[error("{}", .0.describe("session"))]
    TooManyConnections(Full),
    /// The peer cannot be told.
    #[error(transparent)]
    Peer(#[from] PeerError),
    /// The engine refused.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The engine ended the session.
    #[error("{message}")]
    ByEngine {
        /// Stable reason.
        reason: &'static str,
        /// For people.
        message: String,
    },
    /// The daemon stops.
    #[error("the daemon is shutting down")]
    ShuttingDown,
    /// The socket failed.
    #[error("session socket: {0}")]
    Socket(#[from] std::io::Error),
}

impl SessionEnd {
    /// Stable name for programs, as listed in docs/errors.md.
    #[must_use]
    pub(crate) fn reason(&self) -> &'static str {
        match self {
            Self::Closed => "SESSION_CLOSED",
            Self::ProcessEnded => "PROCESS_ENDED",
            Self::HelloTimeout(_) => "HELLO_TIMEOUT",
            Self::Protocol(_) => "PROTOCOL_VIOLATED",
            Self::Malformed(_) => "PACKET_MALFORMED",
            Self::PacketTooLong { .. } => "PACKET_TOO_LONG",
            Self::UnexpectedFds => "FDS_UNEXPECTED",
            Self::TooManyFds { .. } => "FDS_TOO_MANY",
            Self::Version(_) => "VERSION_MISMATCH",
            Self::SlowReader(_) => "SLOW_READER",
            Self::ProofTimeout(_) => "PROOF_TIMEOUT",
            Self::TooManyProofs { .. } => "PROOFS_EXHAUSTED",
            Self::TooManyConnections(_) => "CONNECTIONS_EXHAUSTED",
            Self::Peer(error) if error.is_for_want_of_descriptors() => "OUT_OF_DESCRIPTORS",
            Self::Peer(_) => "PEER_UNKNOWN",
            Self::Engine(error) => error.reason(),
            Self::ByEngine { reason, .. } => reason,
            Self::ShuttingDown => "SHUTTING_DOWN",
            Self::Socket(_) => "SOCKET_FAILED",
        }
    }

    pub(super) fn to_message(&self) -> v1::DaemonMessage {
        let goodbye = v1::Goodbye { reason: self.reason().to_owned(), message: self.to_string() };
        v1::DaemonMessage { message: Some(v1::daemon_message::Message::Goodbye(goodbye)) }
    }
}
