//! The session socket: a client's lifeline and the way of its fds.
//!
//! Role: accepts connections, shakes hands, and keeps one task a session until its socket, its process, the engine or
//! the daemon ends it. Owns the table session -> channel that gRPC calls deliver through. What a session may do is
//! the engine's to say, and how a call is put to it `leases`'. Must not know: gRPC.

mod adoption;
mod calls;
mod channel;
mod goodbye;
mod listener;
mod packet;
mod proof;
mod task;
pub(crate) mod version;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use gdrd_engine::{EngineError, SessionId};

pub(crate) use channel::Parcel;
pub(crate) use listener::Listener;

use channel::Channel;

/// Channels of the open sessions.
#[derive(Debug, Clone, Default)]
pub(crate) struct Sessions {
    channels: Arc<Mutex<HashMap<SessionId, Arc<Channel>>>>,
}

impl Sessions {
    fn insert(&self, session: SessionId, channel: Arc<Channel>) {
        self.channels.lock().unwrap_or_else(PoisonError::into_inner).insert(session, channel);
    }

    fn remove(&self, session: SessionId) {
        self.channels.lock().unwrap_or_else(PoisonError::into_inner).remove(&session);
    }

    /// Sends fds to a session; gives the number of their delivery.
    ///
    /// # Errors
    /// `SessionEnded`; the fds are closed, and with the session the engine takes back what they were for.
    pub(crate) fn deliver(&self, session: SessionId, parcel: Parcel) -> Result<u64, EngineError> {
        let channel = self.channels.lock().unwrap_or_else(PoisonError::into_inner).get(&session).map(Arc::clone);
        let channel = channel.ok_or(EngineError::SessionEnded)?;
        channel.deliver(parcel).map_err(|_| EngineError::SessionEnded)
    }
}
