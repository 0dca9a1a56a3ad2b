//! Completion queues of one HCA, one for each broker thread, and who may use how many of their entries.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gdrd_hal::{CompletionQueue, CqId, Hca};

use super::cold::Cold;
use super::command::{Command, Inbox};
use super::error::BrokerError;
use super::slots::HcaIndex;

/// The books of one completion queue, shared by the engine's threads and the broker thread.
pub(crate) struct CqShare {
    pub(crate) id: CqId,
    pub(crate) thread: usize,
    /// Of that thread.
    inbox: Arc<Inbox>,
    capacity: u32,
    reserved: AtomicU32,
    failed: AtomicBool,
}

impl CqShare {
    /// Entries promised to queue pairs.
    pub(crate) fn reserved(&self) -> u32 {
        // (leaving) the thread sets `failed` and then looks here; `give_back` does both the other way round.
        self.reserved.load(Ordering::SeqCst)
    }

    pub(crate) fn set_failed(&self) {
        self.failed.store(true, Ordering::SeqCst);
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::SeqCst)
    }

    fn free(&self) -> u32 {
        self.capacity.saturating_sub(self.reserved())
    }

    fn try_reserve(&self, entries: u32) -> bool {
        let add = |reserved: u32| reserved.checked_add(entries).filter(|sum| *sum <= self.capacity);
        self.reserved.fetch_update(Ordering::AcqRel, Ordering::Acquire, add).is_ok()
    }

    fn give_back(&self, entries: u32) {
        let before = self.reserved.fetch_sub(entries, Ordering::SeqCst);
        if before == entries && self.has_failed() {
            // The thread may sleep, and nothing else would wake it for a device that is gone. One that has stopped
            // has let go of its queues.
            let _ = self.inbox.send(Command::CqUnused);
        }
    }
}

impl std::fmt::Debug for CqShare {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("CqShare").field("id", &self.id).field("thread", &self.thread).finish_non_exhaustive()
    }
}

/// A completion queue on its way to its broker thread.
pub(crate) struct CqSetup {
    pub(crate) queue: Box<dyn CompletionQueue>,
    pub(crate) share: Arc<CqShare>,
    pub(crate) hca: HcaIndex,
    pub(crate) cold: Cold,
    /// See [`gdrd_hal::HcaCapabilities`].
    pub(crate) software: bool,
}

/// A completion queue on its broker thread.
pub(crate) struct Cq {
    pub(crate) queue: Box<dyn CompletionQueue>,
    pub(crate) share: Arc<CqShare>,
    pub(crate) hca: HcaIndex,
    pub(crate) cold: Cold,
    /// Destroyed once nothing uses it: it failed or its HCA went away.
    pub(crate) leaving: bool,
    software: bool,
}

impl Cq {
    pub(crate) fn new(setup: CqSetup) -> Self {
        let CqSetup { queue, share, hca, cold, software } = setup;
        Self { queue, share, hca, cold, leaving: false, software }
    }

    /// Whether anything can complete on it.
    #[inline]
    pub(crate) fn is_in_use(&self) -> bool {
        self.share.reserved() != 0 && !self.share.has_failed()
    }

    /// Whether threads of the kernel must run before anything completes on it.
    pub(crate) fn needs_the_cpu(&self) -> bool {
        self.software && self.is_in_use()
    }

    pub(crate) fn may_go(&self) -> bool {
        self.leaving && self.share.reserved() == 0
    }
}

/// Room for one queue pair on a completion queue; given back on drop.
#[derive(Debug)]
pub struct Reservation {
    pub(crate) share: Arc<CqShare>,
    pub(crate) hca: HcaIndex,
    pub(crate) entries: u32,
    pub(crate) cold: Cold,
}

impl Reservation {
    /// The completion queue to create the queue pair on.
    #[must_use]
    pub fn cq(&self) -> CqId {
        self.share.id
    }

    /// Room reserved: the sum of both depths.
    #[must_use]
    pub fn entries(&self) -> u32 {
        self.entries
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.share.give_back(self.entries);
    }
}

/// One HCA as the broker knows it.
pub(crate) struct HcaShare {
    hca: HcaIndex,
    cold: Cold,
    /// By thread. Locked while one is made.
    queues: Mutex<Vec<Option<Arc<CqShare>>>>,
    /// Set before the threads are told.
    forgotten: AtomicBool,
}

impl HcaShare {
    pub(crate) fn new(hca: HcaIndex, cold: Cold, threads: usize) -> Self {
        Self { hca, cold, queues: Mutex::new(vec![None; threads]), forgotten: AtomicBool::new(false) }
    }

    /// To be called before the threads are told to forget the HCA.
    pub(crate) fn forget(&self) {
        self.forgotten.store(true, Ordering::SeqCst);
    }

    /// Room for `entries` on the first of `threads`, each with its mailbox, that has it. A new completion queue is sent
    /// there. May block on the driver.
    pub(crate) fn reserve(
        &self,
        device: &dyn Hca,
        threads: &[(usize, &Arc<Inbox>)],
        entries: u32,
        cq_entries: u32,
    ) -> Result<Reservation, BrokerError> {
        let capacity = cq_entries.min(device.capabilities().max_completions);
        let mut queues = self.lock();
        let mut free = 0;
        for &(thread, inbox) in threads {
            let Some(place) = queues.get_mut(thread) else { continue };
            let share = match place {
                Some(share) if !share.has_failed() => Arc::clone(share),
                _ if entries > capacity => {
                    free = free.max(capacity);
                    continue;
                }
                _ => {
                    let setup = self.make(device, thread, inbox, capacity)?;
                    let share = Arc::clone(&setup.share);
                    inbox.send(Command::AddCq(setup)).map_err(|_| BrokerError::ShutDown)?;
                    if self.forgotten.load(Ordering::SeqCst) {
                        // The thread may have been told before it knew of this queue.
                        let _ = inbox.send(Command::ForgetHca(self.hca));
                        return Err(BrokerError::Gone { hca: device.name().to_owned() });
                    }
                    *place = Some(Arc::clone(&share));
                    share
                }
            };
            if share.try_reserve(entries) {
                return Ok(Reservation { share, hca: self.hca, entries, cold: self.cold.clone() });
            }
            free = free.max(share.free());
        }
        Err(BrokerError::Exhausted { hca: device.name().to_owned(), wanted: entries, free })
    }

    fn make(&self, device: &dyn Hca, thread: usize, inbox: &Arc<Inbox>, capacity: u32) -> Result<CqSetup, BrokerError> {
        let refused = |source| BrokerError::CompletionQueue { hca: device.name().to_owned(), source };
        let queue = device.create_cq(capacity).map_err(refused)?;
        let software = device.capabilities().software;
        let share = Arc::new(CqShare {
            id: queue.id(),
            thread,
            inbox: Arc::clone(inbox),
            capacity,
            reserved: AtomicU32::new(0),
            failed: AtomicBool::new(false),
        });
        Ok(CqSetup { queue, share, hca: self.hca, cold: self.cold.clone(), software })
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Option<Arc<CqShare>>>> {
        // Each change is one store, so a panic elsewhere leaves it whole.
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
