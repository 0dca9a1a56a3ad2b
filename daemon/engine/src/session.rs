//! Sessions as the server sees them.

use std::os::fd::OwnedFd;

use futures_channel::mpsc;

use crate::ids::{QueuePairId, SessionId, Token};
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
