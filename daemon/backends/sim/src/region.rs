//! Memory regions: a mapped range, its keys and rights, and the wait that makes deregistration final.

use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use gdrd_hal::{Access, HcaError, MemoryRegion};
use gdrd_shm::Segment;

use crate::fault::Call;
use crate::hca::HcaCore;
use crate::sync::lock;

/// Set in [`Pins::count`] once the region is deregistered.
const DEAD: u32 = 1 << 31;

/// Operations that reach a region right now. Pinning never blocks; ending waits for the last one.
#[derive(Debug, Default)]
struct Pins {
    count: AtomicU32,
    gate: Mutex<()>,
    idle: Condvar,
}

impl Pins {
    fn pin(&self) -> bool {
        // Acquire pairs with the release of `end`: who still sees a live region may use it.
        let alive = self.count.fetch_add(1, Ordering::Acquire) & DEAD == 0;
        if !alive {
            self.unpin();
        }
        alive
    }

    fn unpin(&self) {
        // Release: the copy made under this pin happens before `end` returns.
        if self.count.fetch_sub(1, Ordering::Release) == DEAD | 1 {
            let _gate = lock(&self.gate);
            self.idle.notify_all();
        }
    }

    /// From the return on, no operation reaches the region. Waits as long as the longest copy in flight.
    fn end(&self) {
        self.count.fetch_or(DEAD, Ordering::AcqRel);
        let mut gate = lock(&self.gate);
        while self.count.load(Ordering::Acquire) != DEAD {
            gate = self.idle.wait(gate).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
    }
}

/// A registered range, as operations see it.
pub(crate) struct Region {
    pub(crate) lkey: u32,
    pub(crate) rkey: u32,
    pub(crate) pd_id: u64,
    pub(crate) iova: u64,
    pub(crate) len_bytes: u64,
    pub(crate) access: Access,
    /// Where the range starts in `segment`.
    pub(crate) offset: u64,
    pub(crate) segment: Segment,
    pins: Pins,
}

/// What a region is made from; the table adds the keys.
pub(crate) struct RegionSeed {
    pub(crate) pd_id: u64,
    pub(crate) iova: u64,
    pub(crate) len_bytes: u64,
    pub(crate) access: Access,
    pub(crate) offset: u64,
    pub(crate) segment: Segment,
}

impl Region {
    pub(crate) fn new(seed: RegionSeed, lkey: u32, rkey: u32) -> Self {
        let RegionSeed { pd_id, iova, len_bytes, access, offset, segment } = seed;
        Self { lkey, rkey, pd_id, iova, len_bytes, access, offset, segment, pins: Pins::default() }
    }

    /// Holds off deregistration; `None` once it has begun.
    pub(crate) fn pin(self: Arc<Self>) -> Option<Pinned> {
        self.pins.pin().then_some(Pinned(self))
    }

    /// Offset in the segment of `len_bytes` at wire address `addr`, if the region covers them all.
    pub(crate) fn locate(&self, addr: u64, len_bytes: u64) -> Option<u64> {
        let start = addr.checked_sub(self.iova)?;
        let end = start.checked_add(len_bytes)?;
        (end <= self.len_bytes).then(|| self.offset + start)
    }
}

/// A region that cannot be deregistered while this lives.
pub(crate) struct Pinned(Arc<Region>);

impl std::ops::Deref for Pinned {
    type Target = Region;

    fn deref(&self) -> &Region {
        &self.0
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.0.pins.unpin();
    }
}

/// The owner's handle of a region; deregisters on drop.
pub(crate) struct RegionHandle {
    pub(crate) hca: Arc<HcaCore>,
    pub(crate) region: Arc<Region>,
}

impl fmt::Debug for RegionHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Keys are capabilities and stay out of logs.
        f.debug_struct("RegionHandle").field("len_bytes", &self.region.len_bytes).finish_non_exhaustive()
    }
}

impl MemoryRegion for RegionHandle {
    fn lkey(&self) -> u32 {
        self.region.lkey
    }

    fn rkey(&self) -> u32 {
        self.region.rkey
    }

    fn iova(&self) -> u64 {
        self.region.iova
    }

    fn len_bytes(&self) -> u64 {
        self.region.len_bytes
    }

    fn access(&self) -> Access {
        self.region.access
    }

    fn deregister(self: Box<Self>) -> Result<(), HcaError> {
        // The region ends by the drop of `self`, whatever the script says the driver answers.
        self.hca.admit("ibv_dereg_mr", Call::Deregister)
    }
}

impl Drop for RegionHandle {
    fn drop(&mut self) {
        self.hca.keys.remove(&self.region);
        self.region.pins.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ending_waits_for_the_last_pin_and_refuses_later_ones() {
        let pins = Arc::new(Pins::default());
        assert!(pins.pin());
        let ender = Arc::clone(&pins);
        let ended = std::thread::spawn(move || ender.end());
        while pins.count.load(Ordering::Acquire) & DEAD == 0 {
            std::thread::yield_now();
        }
        assert!(!pins.pin(), "a region that is going takes no new operation");
        assert!(!ended.is_finished(), "the first operation is still in it");
        pins.unpin();
        ended.join().expect("the ending thread does not panic");
    }
}
