//! What calls for a session need of it, for those too that must not keep it alive. Only the session's own drop ends it.

use std::sync::Arc;

use gdrd_shm::ForkMark;
use tokio::sync::watch;
use tonic::Status;
use tonic::transport::Channel;

use super::SessionEnd;
use crate::calls::{CallContext, Token};
use crate::error::ClientError;

/// A session's token, the way to its daemon, and what the session's reader tells of both.
#[derive(Debug, Clone)]
pub(crate) struct Lifeline {
    pub(super) mark: Arc<ForkMark>,
    pub(super) token: Token,
    pub(super) channel: Channel,
    pub(super) context: CallContext,
    /// Its sender is the reader's, which goes with the last clone of the session.
    pub(super) end: watch::Receiver<Option<SessionEnd>>,
    /// How often the daemon was started again and took the session up.
    pub(super) resumed: watch::Receiver<u64>,
}

impl Lifeline {
    pub(crate) fn channel(&self) -> Channel {
        self.channel.clone()
    }

    #[cfg(test)]
    pub(crate) fn set_channel(&mut self, channel: Channel) {
        self.channel = channel;
    }

    pub(crate) fn token(&self) -> &Token {
        &self.token
    }

    pub(crate) fn context(&self) -> &CallContext {
        &self.context
    }

    /// How the session ended, where it did.
    pub(super) fn end(&self) -> Option<SessionEnd> {
        self.end.borrow().clone()
    }

    /// Whether the session is over, or its last clone was dropped.
    pub(crate) fn is_over(&self) -> bool {
        self.end.borrow().is_some() || self.end.has_changed().is_err()
    }

    /// Waits until the session is over, and says how. Cancel-safe.
    pub(crate) async fn ended(&self) -> SessionEnd {
        let mut end = self.end.clone();
        let ended = end.wait_for(Option::is_some).await.ok().and_then(|end| end.clone());
        ended.unwrap_or_else(SessionEnd::closed_by_client)
    }

    pub(super) fn restarts(&self) -> u64 {
        *self.resumed.borrow()
    }

    /// Waits until the daemon was started again more than `seen` times; `None` when the session ends first. Cancel-safe.
    pub(super) async fn restarted(&self, seen: u64) -> Option<u64> {
        let mut resumed = self.resumed.clone();
        resumed.wait_for(|count| *count > seen).await.ok().map(|count| *count)
    }

    /// # Errors
    /// [`ClientError::InvalidArgument`] in a forked child: rings and leases are the parent's, and so is the runtime that
    /// would make a call.
    pub(super) fn check_ours(&self) -> Result<(), ClientError> {
        if self.mark.is_ours() {
            return Ok(());
        }
        Err(ClientError::InvalidArgument {
            what: "this process was forked from the session's; open a session of its own".to_owned(),
        })
    }

    /// What a failed call means; after the end of the session that is the reason, whatever the call said.
    pub(crate) fn error(&self, call: &'static str, status: Status) -> ClientError {
        match self.end() {
            Some(end) => end.into(),
            None => self.context.error(call, status),
        }
    }

    /// Makes a call. Where the connection to the daemon breaks it is made again: at once, since the connection may have
    /// been to a daemon before this one, and once more when the daemon has taken the session up. What calls without an
    /// answer were lent is given back then, so that a second call takes nothing twice.
    pub(crate) async fn across_restarts<T, F: Future<Output = Result<T, ClientError>>>(
        &self,
        call: impl Fn() -> F,
    ) -> Result<T, ClientError> {
        self.check_ours()?;
        let seen = self.restarts();
        let until = tokio::time::Instant::now() + self.context.deadline;
        match call().await {
            Err(error) if error.is_lost_connection() && self.end().is_none() => {}
            answer => return answer,
        }
        let broken = match call().await {
            Err(error) if error.is_lost_connection() => error,
            answer => return answer,
        };
        match tokio::time::timeout_at(until, self.restarted(seen)).await {
            Ok(Some(_)) => call().await,
            Ok(None) => Err(self.ended().await.into()),
            Err(_) => Err(broken),
        }
    }
}
