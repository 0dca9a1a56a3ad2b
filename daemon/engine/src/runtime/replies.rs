//! Answers on their way to callers, and the objects that are put into them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use futures_channel::oneshot;

use super::{Runtime, lock};
use crate::call::Undo;
use crate::core::{Answer, CallId, Grant, Input, TenantId};
use crate::error::EngineError;
use crate::ids::{MemoryId, QueuePairId, SessionId};
use crate::lease::LeaseGrant;
use crate::queue_pair::QueuePairGrant;
use crate::registration::RegistrationGrant;

/// An answer with its objects.
#[derive(Debug)]
pub(crate) enum Answered {
    Done,
    Session(SessionId, TenantId),
    Lease(LeaseGrant),
    QueuePair(QueuePairGrant),
    Adopted(MemoryId),
    Registered(RegistrationGrant),
    Deregistered(u64),
}

/// Where the answer to a call goes.
pub(crate) type Replier = oneshot::Sender<Result<Answered, EngineError>>;

/// Calls that are not answered yet.
#[derive(Debug, Default)]
pub(super) struct Replies {
    waiting: Mutex<BTreeMap<CallId, Replier>>,
}

impl Replies {
    pub(super) fn wait(&self, call: CallId, replier: Replier) {
        lock(&self.waiting).insert(call, replier);
    }

    /// Hands over an answer. One that the caller does not take any more is dropped, and a grant in it taken back.
    pub(super) fn answer(&self, call: CallId, answer: Result<Answered, EngineError>) {
        let replier = lock(&self.waiting).remove(&call);
        if let Some(replier) = replier {
            drop(replier.send(answer));
        }
    }

    /// Forgets a call; true if it was not answered yet.
    pub(super) fn forget(&self, call: CallId) -> bool {
        lock(&self.waiting).remove(&call).is_some()
    }

    /// Whatever waits learns that the engine has ended.
    pub(super) fn end(&self) {
        let waiting = std::mem::take(&mut *lock(&self.waiting));
        drop(waiting);
    }
}

impl Runtime {
    /// Puts the objects into an answer.
    pub(super) fn answered(self: &Arc<Self>, answer: Result<Answer, EngineError>) -> Result<Answered, EngineError> {
        match answer? {
            Answer::Done => Ok(Answered::Done),
            Answer::Session(session, tenant) => Ok(Answered::Session(session, tenant)),
            Answer::Granted(grant) => self.lease_grant(*grant).map(Answered::Lease),
            Answer::Adopted(memory) => Ok(Answered::Adopted(memory)),
            Answer::Registered(registrations) => self.registration_grant(registrations).map(Answered::Registered),
            Answer::Deregistered(count) => Ok(Answered::Deregistered(count)),
            Answer::QueuePair(queue_pair) => self.queue_pair_grant(queue_pair).map(Answered::QueuePair),
        }
    }

    fn lease_grant(self: &Arc<Self>, grant: Grant) -> Result<LeaseGrant, EngineError> {
        let Grant { grant, session, allocation, mut info } = grant;
        let (runtime, lease) = (Arc::clone(self), info.id);
        // From here on, whatever goes wrong takes the hold back.
        let undo = Undo::new(move || runtime.input(Input::Undo { session, lease, grant }));
        let memory = self
            .objects
            .memory(allocation)
            .ok_or_else(|| EngineError::Internal { problem: format!("lease {lease} has no memory") })?;
        memory.fill_keys(&mut info.registrations);
        let fd = memory.fd().try_clone_to_owned();
        let memory = fd.map_err(|error| EngineError::OutOfDescriptors { problem: error.to_string() })?;
        Ok(LeaseGrant { info, memory, undo })
    }

    fn queue_pair_grant(self: &Arc<Self>, id: QueuePairId) -> Result<QueuePairGrant, EngineError> {
        let runtime = Arc::clone(self);
        let undo = Undo::new(move || runtime.input(Input::UndoQueuePair { queue_pair: id }));
        let taken = self.objects.with_queue_pair(id, |q| q.fds.take().map(|fds| (q.info.clone(), fds)));
        let Some(Some((info, (ring, doorbell)))) = taken else {
            return Err(EngineError::Internal { problem: format!("queue pair {id} has no ring") });
        };
        Ok(QueuePairGrant { info, ring, doorbell, undo })
    }

    /// Gives up a call whose caller is gone.
    pub(crate) fn cancel(self: &Arc<Self>, call: CallId) {
        if self.replies.forget(call) {
            self.input(Input::Cancel { call });
        }
    }
}
