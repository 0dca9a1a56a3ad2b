//! Completion queues of one HCA, one for each broker thread, and who may use how many of their entries.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gdrd_hal::{CompletionQueue, CqId, Hca};

use super::cold::Cold;
use super::error::BrokerError;
use super::slots::HcaIndex;

/// The books of one completion queue, shared by the engine's threads and the broker thread.
#[derive(Debug)]
pub(crate) struct CqShare {
    pub(crate) id: CqId,
    pub(crate) thread: usize,
    capacity: u32,
    reserved: AtomicU32,
    failed: AtomicBool,
}

impl CqShare {
    /// Entries promised to queue pairs.
    pub(crate) fn reserved(&self) -> u32 {
        self.reserved.load(Ordering::Acquire)
    }

    pub(crate) fn set_failed(&self) {
        self.failed.store(true, Ordering::Release);
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    fn free(&self) -> u32 {
        self.capacity.saturating_sub(self.reserved())
    }

    fn try_reserve(&self, entries: u32) -> bool {
        let add = |reserved: u32| reserved.checked_add(entries).filter(|sum| *sum <= self.capacity);
        self.reserved.fetch_update(Ordering::AcqRel, Ordering::Acquire, add).is_ok()
    }

    fn give_back(&self, entries: u32) {
        self.reserved.fetch_sub(entries, Ordering::AcqRel);
    }
}

/// A completion queue on its way to its broker thread.
pub(crate) struct CqSetup {
    pub(crate) queue: Box<dyn CompletionQueue>,
    pub(crate) share: Arc<CqShare>,
    pub(crate) hca: HcaIndex,
    pub(crate) cold: Cold,
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
    /// By thread.
    queues: Mutex<Vec<Option<Arc<CqShare>>>>,
}

impl HcaShare {
    pub(crate) fn new(hca: HcaIndex, cold: Cold, threads: usize) -> Self {
        Self { hca, cold, queues: Mutex::new(vec![None; threads]) }
    }

    /// Room for `entries` on the first of `threads` that has it. A new completion queue goes to `add`.
    /// May block on the driver.
    pub(crate) fn reserve(
        &self,
        device: &dyn Hca,
        threads: &[usize],
        entries: u32,
        cq_entries: u32,
        add: &dyn Fn(usize, CqSetup) -> Result<(), BrokerError>,
    ) -> Result<Reservation, BrokerError> {
        let capacity = cq_entries.min(device.capabilities().max_completions);
        let mut queues = self.lock();
        let mut free = 0;
        for &thread in threads {
            let Some(place) = queues.get_mut(thread) else { continue };
            let share = match place {
                Some(share) if !share.has_failed() => Arc::clone(share),
                _ if entries > capacity => {
                    free = free.max(capacity);
                    continue;
                }
                _ => {
                    let setup = self.make(device, thread, capacity)?;
                    let share = Arc::clone(&setup.share);
                    add(thread, setup)?;
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

    fn make(&self, device: &dyn Hca, thread: usize, capacity: u32) -> Result<CqSetup, BrokerError> {
        let refused = |source| BrokerError::CompletionQueue { hca: device.name().to_owned(), source };
        let queue = device.create_cq(capacity).map_err(refused)?;
        let share = Arc::new(CqShare {
            id: queue.id(),
            thread,
            capacity,
            reserved: AtomicU32::new(0),
            failed: AtomicBool::new(false),
        });
        Ok(CqSetup { queue, share, hca: self.hca, cold: self.cold.clone() })
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Option<Arc<CqShare>>>> {
        // Each change is one store, so a panic elsewhere leaves it whole.
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
