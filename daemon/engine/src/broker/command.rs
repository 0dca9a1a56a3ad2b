//! How the engine's threads speak to a broker thread: a mailbox that costs the busy path one load.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::event::{EventfdFlags, eventfd};

use super::error::BrokerError;
use super::hca::CqSetup;
use super::queue_pair::QueuePair;
use super::slots::{HcaIndex, SlotTable};
use crate::ids::{QueuePairId, SlotId};
use crate::pulse::Beat;

/// What a broker thread is told.
pub(crate) enum Command {
    /// Serve this completion queue.
    AddCq(CqSetup),
    /// Let go of this HCA's completion queues once nothing uses them.
    ForgetHca(HcaIndex),
    /// A completion queue that failed has lost its last queue pair.
    CqUnused,
    /// Serve this queue pair.
    Attach(Box<QueuePair>),
    /// End this queue pair.
    Detach(QueuePairId),
    /// Move this queue pair to ERR, and go on serving it.
    Fail(QueuePairId),
    /// Move to ERR all that have work in flight on the slot.
    FlushUsers(Arc<SlotTable>, SlotId),
    /// Name all that have receives posted on the slot.
    ReceiveUsers(Arc<SlotTable>, SlotId, Arc<Gather>),
    /// Show that the thread goes on.
    Pulse(Beat),
    /// The driver would not take the queue pair to ERR.
    StopRefused(QueuePairId),
    /// End all queue pairs and the thread.
    Stop,
}

/// Collects one answer from every thread; the last one to let go of it replies.
pub(crate) struct Gather {
    ids: Mutex<Vec<QueuePairId>>,
    reply: Option<Box<dyn FnOnce(Vec<QueuePairId>) + Send + Sync>>,
}

impl Gather {
    pub(crate) fn new(reply: impl FnOnce(Vec<QueuePairId>) + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Self { ids: Mutex::new(Vec::new()), reply: Some(Box::new(reply)) })
    }

    pub(crate) fn add(&self, id: QueuePairId) {
        self.ids.lock().unwrap_or_else(PoisonError::into_inner).push(id);
    }
}

impl Drop for Gather {
    fn drop(&mut self) {
        let mut ids = std::mem::take(self.ids.get_mut().unwrap_or_else(PoisonError::into_inner));
        ids.sort_unstable();
        if let Some(reply) = self.reply.take() {
            reply(ids);
        }
    }
}

#[derive(Default)]
struct Letters {
    commands: VecDeque<Command>,
    closed: bool,
}

/// The mailbox of one broker thread.
pub(crate) struct Inbox {
    letters: Mutex<Letters>,
    /// Whether there may be letters: what the busy path looks at.
    pending: AtomicBool,
    /// Private to the daemon, so writing it cannot be made to block; watched edge-triggered, never read.
    wake: OwnedFd,
}

impl Inbox {
    pub(crate) fn new() -> Result<Self, BrokerError> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|source| BrokerError::System { call: "eventfd", source: source.into() })?;
        Ok(Self { letters: Mutex::default(), pending: AtomicBool::new(false), wake })
    }

    /// Sends a command; gives it back when the thread has ended.
    pub(crate) fn send(&self, command: Command) -> Result<(), Command> {
        {
            let mut letters = self.lock();
            if letters.closed {
                return Err(command);
            }
            letters.commands.push_back(command);
        }
        // (letters) released here, acquired in `take`.
        self.pending.store(true, Ordering::Release);
        // EAGAIN alone is possible, and means that the counter, hence the edge, is there already.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
        Ok(())
    }

    /// All commands since the last call, empty at the cost of one load when there are none.
    #[inline]
    pub(crate) fn take(&self) -> VecDeque<Command> {
        // (letters) acquire.
        if !self.pending.load(Ordering::Acquire) {
            return VecDeque::new();
        }
        self.pending.store(false, Ordering::Relaxed);
        std::mem::take(&mut self.lock().commands)
    }

    /// Takes no more; the commands that are left.
    pub(crate) fn close(&self) -> VecDeque<Command> {
        let mut letters = self.lock();
        letters.closed = true;
        std::mem::take(&mut letters.commands)
    }

    fn lock(&self) -> MutexGuard<'_, Letters> {
        // Each change is one call on the queue, so a panic elsewhere leaves it whole.
        self.letters.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AsFd for Inbox {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}
