//! The hit cache: from an address of this process to the registration that covers it, without a system call.
//!
//! Readers take no lock and write no cache line that another thread reads: they search under a sequence number, pin
//! what they found on a line of their own, and check the number once more. Writers (insert, remove) take a lock. Memory
//! that can be freed behind the cache's back has an identity, which is asked for at each hit. A removed entry that is
//! pinned parts from the cache at once, so that nobody finds it again, and its payload is dropped by the last [`Hit`] on it.
//!
//! Owner of state: the writers' half, under the lock, is the truth; readers see a copy of it in atomic words.
//!
//! It must not know what a payload is, how registrations are made, or what is behind an address.

mod pins;
mod sequence;
mod tree;
mod word;
mod writer;

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gdrd_ring::GenerationReader;
use gdrd_shm::{ForkMark, ShmError};

use pins::Pins;
use sequence::Sequence;
use tree::{Record, Tree};
use word::Fence;
use writer::Writer;
pub use writer::{EntryId, Inserted, NotInserted};

/// How often a reader looks again while writers are at work, before it waits for them.
const LOOKS: u32 = 64;

/// A range of this process's memory and the registration that covers it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// Address of the first byte.
    pub address: u64,
    /// Length, bytes, at least 1.
    pub len_bytes: u64,
    /// Slot of the registration.
    pub slot: u32,
    /// Generation of that slot under which the registration is good.
    pub generation: u64,
    /// Where the range starts in the slot's registration, bytes.
    pub slot_offset: u64,
    /// Number of the allocation that the range is of, where [`HitCache::identified_by`] says how to ask for it: the region
    /// is found only while that is what is at the address. 0 for memory whose end the caller tells.
    pub identity: u64,
}

/// Number of the allocation that has an address now, never 0; `None` when none has.
pub type Identify = fn(address: u64) -> Option<u64>;

/// Registrations of one HCA and one set of rights, by address. Shared by threads. In a forked child it is empty: the
/// session that the registrations belong to is the parent's.
pub struct HitCache<T> {
    sequence: Sequence<AtomicU64>,
    /// Entries that have parted and are still pinned.
    parted: AtomicU64,
    tree: Tree<AtomicU64>,
    pins: Pins<AtomicU64>,
    mark: ForkMark,
    page: Arc<GenerationReader>,
    identify: Identify,
    writer: Mutex<Writer<T>>,
}

impl<T> fmt::Debug for HitCache<T> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("HitCache").field("regions", &self.len()).finish_non_exhaustive()
    }
}

impl<T> HitCache<T> {
    /// An empty cache of at most `max_regions`, which believes `page` about generations.
    ///
    /// # Errors
    /// [`ShmError::Kernel`] when the kernel has no page for its fork mark.
    pub fn new(page: Arc<GenerationReader>, max_regions: u32) -> Result<Self, ShmError> {
        Ok(Self {
            sequence: Sequence::new(),
            parted: AtomicU64::new(0),
            tree: Tree::new(max_regions as usize),
            pins: Pins::new(Fence::best()),
            mark: ForkMark::new()?,
            page,
            identify: |_| None,
            writer: Mutex::new(Writer::new(max_regions)),
        })
    }

    /// How the identity of what is at an address is asked for; without it, no region that has one is found.
    #[must_use]
    pub fn identified_by(self, identify: Identify) -> Self {
        Self { identify, ..self }
    }

    /// The registration that covers `len_bytes` at `address`, pinned until the hit is dropped; `None` when there is
    /// none, or the daemon has ended it, or its memory was freed. No system call, no lock, no allocation, but those of
    /// [`HitCache::identified_by`] where the region has an identity.
    #[must_use]
    #[inline]
    pub fn get(&self, address: u64, len_bytes: u64) -> Option<Hit<'_, T>> {
        if !self.mark.is_ours() {
            return None;
        }
        for _ in 0..LOOKS {
            let Some(seen) = self.sequence.begin() else {
                std::hint::spin_loop();
                continue;
            };
            let Some(record) = self.tree.find(address).filter(|record| covers(record, address, len_bytes)) else {
                if self.sequence.holds(seen) {
                    return None;
                }
                continue;
            };
            let Some(pin) = self.pins.pin(record.entry) else { break };
            let hit = Hit { cache: self, pin: Some(pin), record, address, len_bytes };
            if self.sequence.holds(seen) {
                return hit.if_current();
            }
            // Dropped: it may have pinned something else by now.
        }
        self.get_locked(address, len_bytes)
    }

    /// The same while writers hardly pause, or all pins are taken.
    #[cold]
    fn get_locked(&self, address: u64, len_bytes: u64) -> Option<Hit<'_, T>> {
        let mut writer = self.writer();
        let record = writer.find(address).filter(|record| covers(record, address, len_bytes))?;
        let pin = self.pins.pin(record.entry);
        if pin.is_none() {
            writer.pin(record.entry);
        }
        drop(writer);
        Hit { cache: self, pin, record, address, len_bytes }.if_current()
    }

    /// Adds a region with what must live as long as somebody may find or hold it. Regions that lie within it part, as
    /// does the oldest when the cache is full; those of their payloads that nobody holds are in the answer. Drop them
    /// without a lock of yours held.
    ///
    /// # Errors
    /// [`NotInserted`], with the payload: a region that is there covers it, it is no range, or this is a forked child.
    pub fn insert(&self, region: Region, payload: T) -> Result<Inserted<T>, NotInserted<T>> {
        if !self.mark.is_ours() {
            return Err(NotInserted::Forked(payload));
        }
        self.writer().insert(self, region, payload)
    }

    /// Takes an entry out: nobody finds it from here on. Returns the payloads of parted entries that nobody holds, this
    /// one's among them; while a hit holds it, the last one drops it. Drop them without a lock of yours held.
    pub fn remove(&self, entry: EntryId) -> Vec<T> {
        if self.mark.is_ours() { self.writer().remove(self, entry) } else { Vec::new() }
    }

    /// Takes out every entry that has a byte within `len_bytes` at `address`, as [`HitCache::remove`] does.
    pub fn remove_within(&self, address: u64, len_bytes: u64) -> Vec<T> {
        if self.mark.is_ours() { self.writer().remove_within(self, address, len_bytes) } else { Vec::new() }
    }

    /// Regions that can be found.
    #[must_use]
    pub fn len(&self) -> usize {
        if self.mark.is_ours() { self.writer().len() } else { 0 }
    }

    /// Whether none can be found.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Payloads of entries that have parted and that nobody holds any more.
    #[cold]
    fn sweep(&self) {
        let free = self.writer().sweep(self);
        drop(free);
    }

    fn writer(&self) -> MutexGuard<'_, Writer<T>> {
        // No payload is dropped and nothing of the caller's runs under the lock.
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[inline]
fn covers(record: &Record, address: u64, len_bytes: u64) -> bool {
    let at = address.wrapping_sub(record.start);
    len_bytes <= record.len_bytes && at <= record.len_bytes - len_bytes
}

/// A registration in use. While it lives, its entry's payload does: the registration is not given back.
pub struct Hit<'a, T> {
    cache: &'a HitCache<T>,
    pin: Option<&'a AtomicU64>,
    record: Record,
    address: u64,
    len_bytes: u64,
}

impl<T> fmt::Debug for Hit<'_, T> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Hit").field("slot", &self.slot()).field("offset", &self.offset()).finish_non_exhaustive()
    }
}

impl<T> Hit<'_, T> {
    #[inline]
    fn if_current(self) -> Option<Self> {
        if self.cache.page.current(self.record.slot) != Some(self.record.generation) {
            return None;
        }
        if self.record.identity == 0 { Some(self) } else { self.if_same_memory() }
    }

    /// The hit, if its memory is what is at the address now; else its entry parts.
    #[inline(never)]
    fn if_same_memory(self) -> Option<Self> {
        if (self.cache.identify)(self.address) == Some(self.record.identity) {
            return Some(self);
        }
        let (cache, entry) = (self.cache, self.entry());
        drop(self);
        entry.into_iter().for_each(|entry| drop(cache.remove(entry)));
        None
    }

    /// Slot of the registration.
    #[must_use]
    #[inline]
    pub fn slot(&self) -> u32 {
        self.record.slot
    }

    /// Generation of that slot.
    #[must_use]
    #[inline]
    pub fn generation(&self) -> u64 {
        self.record.generation
    }

    /// Where the range asked for starts in the slot's registration, bytes.
    #[must_use]
    #[inline]
    pub fn offset(&self) -> u64 {
        self.record.slot_offset + (self.address - self.record.start)
    }

    /// Length asked for, bytes.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// The entry.
    #[must_use]
    pub fn entry(&self) -> Option<EntryId> {
        self.cache.writer().id_of(self.record.entry)
    }

    /// The entry's payload. Takes the writers' lock.
    #[must_use]
    pub fn payload(&self) -> Option<T>
    where
        T: Clone,
    {
        self.cache.writer().payload(self.record.entry)
    }
}

impl<T> Drop for Hit<'_, T> {
    #[inline]
    fn drop(&mut self) {
        match self.pin {
            Some(pin) => self.cache.pins.unpin(pin),
            None if self.cache.mark.is_ours() => self.cache.writer().unpin(self.record.entry),
            None => return,
        }
        // (part) After the pin was given back.
        if self.cache.parted.load(Ordering::Relaxed) > 0 && self.cache.mark.is_ours() {
            self.cache.sweep();
        }
    }
}
