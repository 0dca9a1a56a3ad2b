//! Memory regions: a mapped range, its keys and rights, and the wait that makes deregistration final.
//!
//! An operation holds the region by a strong reference while it copies. Deregistration forbids new ones and
//! waits for the last reference to go, so that nothing reaches the memory once it returns.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};

use gdrd_hal::{Access, HcaError, MemoryRegion};

use crate::bytes::Bytes;
use crate::fault::Call;
use crate::hca::HcaCore;
use crate::keys::{KeyKind, KeyTable};
use crate::sync::lock;

/// Tells the deregistering thread that the last operation has let go of a region.
#[derive(Debug, Default)]
struct Farewell {
    gone: Mutex<bool>,
    changed: Condvar,
}

impl Farewell {
    fn say(&self) {
        *lock(&self.gone) = true;
        self.changed.notify_all();
    }

    fn wait(&self) {
        let mut gone = lock(&self.gone);
        while !*gone {
            gone = self.changed.wait(gone).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

#[derive(Debug, Default)]
struct SaidAtTheEnd(Arc<Farewell>);

impl Drop for SaidAtTheEnd {
    fn drop(&mut self) {
        self.0.say();
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
    /// Where the range starts in `bytes`.
    pub(crate) offset: u64,
    pub(crate) bytes: Bytes,
    /// Set once deregistration has begun: no new operation may start.
    ended: AtomicBool,
    /// The last field: it is said when the memory is let go of.
    farewell: SaidAtTheEnd,
}

/// What a region is made from; the table adds the keys.
pub(crate) struct RegionSeed {
    pub(crate) pd_id: u64,
    pub(crate) iova: u64,
    pub(crate) len_bytes: u64,
    pub(crate) access: Access,
    pub(crate) offset: u64,
    pub(crate) bytes: Bytes,
}

impl Region {
    pub(crate) fn new(seed: RegionSeed, lkey: u32, rkey: u32) -> Self {
        let RegionSeed { pd_id, iova, len_bytes, access, offset, bytes } = seed;
        Self {
            lkey,
            rkey,
            pd_id,
            iova,
            len_bytes,
            access,
            offset,
            bytes,
            ended: AtomicBool::new(false),
            farewell: SaidAtTheEnd::default(),
        }
    }

    /// Whether an operation that holds the region may still use it.
    pub(crate) fn is_live(&self) -> bool {
        !self.ended.load(Ordering::Acquire)
    }

    /// Offset in the segment of `len_bytes` at wire address `addr`, if the region covers them all.
    pub(crate) fn locate(&self, addr: u64, len_bytes: u64) -> Option<u64> {
        let start = addr.checked_sub(self.iova)?;
        let end = start.checked_add(len_bytes)?;
        (end <= self.len_bytes).then(|| self.offset + start)
    }
}

/// The last region that a queue side used, so that most requests need no look into the table. It does not keep
/// the region: deregistration waits for strong references only.
#[derive(Debug, Default)]
pub(crate) struct RegionCache {
    key: u32,
    region: Weak<Region>,
}

impl RegionCache {
    /// The region that `key` names. While the caller holds it, it cannot be deregistered.
    pub(crate) fn find(&mut self, table: &KeyTable, kind: KeyKind, key: u32) -> Option<Arc<Region>> {
        let cached = if self.key == key { self.region.upgrade() } else { None };
        if let Some(region) = cached.filter(|region| region.is_live()) {
            return Some(region);
        }
        let region = table.find(kind, key).filter(|region| region.is_live())?;
        *self = Self { key, region: Arc::downgrade(&region) };
        Some(region)
    }
}

/// The owner's handle of a region; deregisters on drop.
pub(crate) struct RegionHandle {
    hca: Arc<HcaCore>,
    /// Taken by the drop alone.
    region: Option<Arc<Region>>,
    facts: RegionFacts,
}

/// What the owner may ask.
#[derive(Clone, Copy)]
struct RegionFacts {
    lkey: u32,
    rkey: u32,
    iova: u64,
    len_bytes: u64,
    access: Access,
}

impl RegionHandle {
    pub(crate) fn new(hca: Arc<HcaCore>, region: Arc<Region>) -> Self {
        let Region { lkey, rkey, iova, len_bytes, access, .. } = *region;
        Self { hca, region: Some(region), facts: RegionFacts { lkey, rkey, iova, len_bytes, access } }
    }
}

impl fmt::Debug for RegionHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Keys are capabilities and stay out of logs.
        f.debug_struct("RegionHandle").field("len_bytes", &self.facts.len_bytes).finish_non_exhaustive()
    }
}

impl MemoryRegion for RegionHandle {
    fn lkey(&self) -> u32 {
        self.facts.lkey
    }

    fn rkey(&self) -> u32 {
        self.facts.rkey
    }

    fn iova(&self) -> u64 {
        self.facts.iova
    }

    fn len_bytes(&self) -> u64 {
        self.facts.len_bytes
    }

    fn access(&self) -> Access {
        self.facts.access
    }

    fn deregister(self: Box<Self>) -> Result<(), HcaError> {
        // The region ends by the drop of `self`, whatever the script says the driver answers.
        self.hca.admit("ibv_dereg_mr", Call::Deregister)
    }
}

impl Drop for RegionHandle {
    /// Ends the region. From the return on, no operation reaches it; waits as long as the longest copy in flight.
    fn drop(&mut self) {
        let Some(region) = self.region.take() else { return };
        region.ended.store(true, Ordering::Release);
        self.hca.keys.remove(&region);
        let farewell = Arc::clone(&region.farewell.0);
        drop(region);
        farewell.wait();
    }
}
