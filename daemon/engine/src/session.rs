//! Sessions as the server sees them.

use std::os::fd::OwnedFd;

use futures_channel::mpsc;

use crate::ids::{LeaseId, QueuePairId, SessionId, Token};
use crate::peer::Peer;

/// A session just opened. The server closes it when its socket ends or its peer's pidfd becomes readable.
#[derive(Debug)]
pub struct SessionOpened {
    /// Identity.
    pub session: SessionId,
    /// What proves it on gRPC.
    pub token: Token,
    /// The tenant's generation page, to be mapped read-only.
    pub generation_page: OwnedFd,
    /// What the engine has to tell the client. Ends when the session is closed.
    pub events: mpsc::Receiver<SessionEvent>,
}

/// A session of an earlier daemon that goes on. The server reads its peer from the socket again and calls
/// [`crate::Engine::resume_session`], or closes it.
#[derive(Debug)]
pub struct SessionResumed {
    /// Identity, as before.
    pub session: SessionId,
    /// Its socket.
    pub socket: OwnedFd,
    /// Leases that it holds, as far as the daemon before knew: its client may have given up on the newest ones.
    pub leases: Vec<LeaseId>,
    /// Its queue pairs, all of them in ERR.
    pub queue_pairs: Vec<QueuePairId>,
    /// No delivery of the daemon before had a greater number.
    pub last_delivery: u64,
    /// As [`SessionOpened::events`].
    pub events: mpsc::Receiver<SessionEvent>,
}

/// News for one session.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum SessionEvent {
    /// The engine ended the session; say goodbye and close its socket.
    Ended {
        /// Stable reason.
        reason: &'static str,
        /// For people.
        message: String,
    },
    /// Memory that the session was lent is being freed: [`crate::Engine::memory_gone`] says which.
    MemoryGone,
    /// A queue pair went into error by itself.
    QueuePairFailed {
        /// Which.
        queue_pair: QueuePairId,
        /// What happened.
        message: String,
    },
}

/// Who looks at a list: sees its own tenant's, or everything as an administrator.
#[derive(Debug, Clone)]
pub enum Viewer {
    /// By its session.
    Session(SessionId),
    /// By its credentials, without a session.
    Peer(Peer),
}
