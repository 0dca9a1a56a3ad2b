//! Registration slots of one tenant: what a ring entry's (slot, generation, offset, length) means.
//!
//! Owner of state: the engine publishes and retires slots, one writer at a time; broker threads read
//! without locks and count the requests they admit. It must not know rings, queue pairs or clients.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use gdrd_hal::Access;
use thiserror::Error;

use super::gate::{Entry, Gate, Machine};
use crate::ids::{Generation, SlotId};

/// Slots that a table may have at most; bounds its memory to 4 MiB.
pub const MAX_SLOTS: u32 = 65_536;
/// Slots of one lazily made part of a table: one page.
const CHUNK_SLOTS: usize = 64;
/// Generation of a slot that was never published. Ring entries of zeros name generation 0, so none fits.
const FIRST_GENERATION: u64 = 1;

/// The engine's index of an HCA.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HcaIndex(pub u16);

/// What a slot stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotEntry {
    /// The HCA that holds the registration.
    pub hca: HcaIndex,
    /// Its local key.
    pub lkey: u32,
    /// Wire address of its first byte.
    pub iova: u64,
    /// Its length, bytes.
    pub len_bytes: u64,
    /// Its rights.
    pub access: Access,
}

/// Why a slot could not be changed. A bug of the engine, never a client's doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SlotError {
    /// No such slot.
    #[error("slot {slot} is outside of the table of {capacity} slots")]
    NoSuchSlot {
        /// The slot.
        slot: SlotId,
        /// Slots of the table.
        capacity: u32,
    },
    /// The slot is published.
    #[error("slot {slot} is published; retire it first")]
    Published {
        /// The slot.
        slot: SlotId,
    },
    /// The slot is not published.
    #[error("slot {slot} is not published")]
    NotPublished {
        /// The slot.
        slot: SlotId,
    },
    /// Requests of its last generation still run.
    #[error("slot {slot} still has {in_flight} requests in flight; wait for quiesce first")]
    Busy {
        /// The slot.
        slot: SlotId,
        /// Requests counted in.
        in_flight: u32,
    },
}

/// Why a request may not use a slot. The client's doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SlotRefusal {
    /// Another generation, retired, or never published.
    Stale,
    /// Outside of the table.
    NoSuchSlot,
    /// Registered on another HCA.
    OtherHca,
    /// The range does not lie in the registration.
    Range,
    /// The registration lacks local write.
    Access,
}

/// Bytes of a registration that a request names.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted {
    pub(crate) slot: u32,
    pub(crate) generation: u64,
    pub(crate) offset: u64,
    pub(crate) len_bytes: u32,
    pub(crate) hca: HcaIndex,
    /// The HCA will write there: a read's or atomic's result, a receive.
    pub(crate) local_write: bool,
    /// Counted as a posted receive as well.
    pub(crate) receive: bool,
}

/// What an admitted request uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Admitted {
    pub(crate) lkey: u32,
    pub(crate) addr: u64,
}

type Done = Box<dyn FnOnce() + Send>;

/// One slot. Fields but the gate change only while the gate is closed and quiet.
#[derive(Debug)]
#[repr(align(64))]
struct Slot {
    gate: Gate<Machine>,
    receives: AtomicU32,
    /// Whether the gate was seen quiet since it was closed last.
    was_quiet: AtomicBool,
    /// lkey in the high half, HCA below it, bit 0 local write.
    key: AtomicU64,
    iova: AtomicU64,
    len_bytes: AtomicU64,
}

impl Slot {
    fn new(generation: u64) -> Self {
        Self {
            gate: Gate::new(generation),
            receives: AtomicU32::new(0),
            was_quiet: AtomicBool::new(true),
            key: AtomicU64::new(0),
            iova: AtomicU64::new(0),
            len_bytes: AtomicU64::new(0),
        }
    }

    /// Checks the request against the entry. The gate is entered, so the fields are stable; relaxed
    /// loads suffice after the gate's acquire.
    fn check(&self, wanted: &Wanted) -> Result<Admitted, SlotRefusal> {
        let key = Key::unpack(self.key.load(Ordering::Relaxed));
        if key.hca != wanted.hca {
            return Err(SlotRefusal::OtherHca);
        }
        let end = wanted.offset.checked_add(u64::from(wanted.len_bytes)).ok_or(SlotRefusal::Range)?;
        if end > self.len_bytes.load(Ordering::Relaxed) {
            return Err(SlotRefusal::Range);
        }
        if wanted.local_write && !key.local_write {
            return Err(SlotRefusal::Access);
        }
        // Cannot overflow: the region itself lies below 2^64, and the offset lies in it.
        let addr = self.iova.load(Ordering::Relaxed).wrapping_add(wanted.offset);
        Ok(Admitted { lkey: key.lkey, addr })
    }
}

/// The packed part of a slot that is read at once.
struct Key {
    lkey: u32,
    hca: HcaIndex,
    local_write: bool,
}

impl Key {
    fn pack(&self) -> u64 {
        u64::from(self.lkey) << 32 | u64::from(self.hca.0) << 16 | u64::from(self.local_write)
    }

    fn unpack(packed: u64) -> Self {
        let [lk0, lk1, lk2, lk3, h0, h1, _, flags] = packed.to_be_bytes();
        Self {
            lkey: u32::from_be_bytes([lk0, lk1, lk2, lk3]),
            hca: HcaIndex(u16::from_be_bytes([h0, h1])),
            local_write: flags & 1 != 0,
        }
    }
}

/// The registration slots of one tenant.
pub struct SlotTable {
    capacity: u32,
    chunks: Box<[OnceLock<Box<[Slot]>>]>,
    waiters: Mutex<BTreeMap<SlotId, Vec<Done>>>,
}

impl fmt::Debug for SlotTable {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("SlotTable").field("capacity", &self.capacity).finish_non_exhaustive()
    }
}

impl SlotTable {
    /// A table of `capacity` empty slots, at most [`MAX_SLOTS`]. Memory is taken as slots are published.
    #[must_use]
    pub fn new(capacity: u32) -> Self {
        let capacity = capacity.min(MAX_SLOTS);
        let chunks = (capacity as usize).div_ceil(CHUNK_SLOTS);
        Self {
            capacity,
            chunks: std::iter::repeat_with(OnceLock::new).take(chunks).collect(),
            waiters: Mutex::new(BTreeMap::new()),
        }
    }

    /// A table of `capacity` empty slots, of which the first are at these generations.
    #[must_use]
    pub fn restored(capacity: u32, generations: &[u64]) -> Self {
        let table = Self::new(capacity);
        for (cell, used) in table.chunks.iter().zip(generations.chunks(CHUNK_SLOTS)) {
            let unused = std::iter::repeat(&FIRST_GENERATION);
            cell.get_or_init(|| used.iter().chain(unused).take(CHUNK_SLOTS).map(|g| Slot::new(*g)).collect());
        }
        table
    }

    /// Slots there are.
    #[must_use]
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Opens `slot` with `entry` and returns the generation under which clients may name it: the one
    /// that [`SlotTable::retire`] returned last, 1 at first. One writer at a time.
    ///
    /// # Errors
    /// [`SlotError::NoSuchSlot`], [`SlotError::Published`], [`SlotError::Busy`].
    pub fn publish(&self, slot: SlotId, entry: SlotEntry) -> Result<Generation, SlotError> {
        let place = self.make(slot)?;
        if place.gate.is_live() {
            return Err(SlotError::Published { slot });
        }
        // A refused admission may count itself in for a moment on a slot that has been quiet; it reads
        // no field, so what counts is that the slot was quiet once since it was retired.
        if !place.was_quiet.load(Ordering::Acquire) && !place.gate.is_quiet() {
            return Err(SlotError::Busy { slot, in_flight: place.gate.in_flight() });
        }
        let key = Key { lkey: entry.lkey, hca: entry.hca, local_write: entry.access.local_write };
        place.key.store(key.pack(), Ordering::Relaxed);
        place.iova.store(entry.iova, Ordering::Relaxed);
        place.len_bytes.store(entry.len_bytes, Ordering::Relaxed);
        Ok(Generation(place.gate.publish()))
    }

    /// Closes `slot` and returns its next generation. Requests that name the old one complete as STALE
    /// from here on; those admitted before still run until [`SlotTable::quiesce`] says otherwise.
    ///
    /// # Errors
    /// [`SlotError::NoSuchSlot`], [`SlotError::NotPublished`].
    pub fn retire(&self, slot: SlotId) -> Result<Generation, SlotError> {
        let place = self.make(slot)?;
        if !place.gate.is_live() {
            return Err(SlotError::NotPublished { slot });
        }
        // Under the lock, so that a late look at the previous generation's end cannot pass for this one's.
        let _waiters = self.lock();
        place.was_quiet.store(false, Ordering::Relaxed);
        Ok(Generation(place.gate.retire()))
    }

    /// Calls `done` once no admitted request uses the retired `slot`: at once on the calling thread, or
    /// later on a broker thread, so it must neither block nor take long. A request that never completes
    /// is ended by [`super::Broker::flush_users`].
    ///
    /// # Errors
    /// [`SlotError::NoSuchSlot`]; [`SlotError::Published`] if it was not retired. `done` is dropped then.
    pub fn quiesce(&self, slot: SlotId, done: impl FnOnce() + Send + 'static) -> Result<(), SlotError> {
        let place = self.make(slot)?;
        if place.gate.is_live() {
            return Err(SlotError::Published { slot });
        }
        // Registered first: the last request to leave either finds the waiter, or is found gone here.
        self.lock().entry(slot).or_default().push(Box::new(done));
        self.tell_if_quiet(slot, place);
        Ok(())
    }

    /// Requests in flight on `slot`, receives among them; 0 for a slot that does not exist.
    #[must_use]
    pub fn in_flight(&self, slot: SlotId) -> u32 {
        self.place(slot).map_or(0, |place| place.gate.in_flight())
    }

    /// Receives posted on `slot` and not completed. A release with any is refused, since only the
    /// peer can end them.
    #[must_use]
    pub fn posted_receives(&self, slot: SlotId) -> u32 {
        self.place(slot).map_or(0, |place| place.receives.load(Ordering::Relaxed))
    }

    /// Generation of `slot` now; 1 for one never published.
    ///
    /// # Errors
    /// [`SlotError::NoSuchSlot`].
    pub fn generation(&self, slot: SlotId) -> Result<Generation, SlotError> {
        Ok(Generation(self.make(slot)?.gate.generation()))
    }

    /// Counts a request in and checks it. Lock-free. On success [`SlotTable::leave`] must follow once.
    pub(crate) fn admit(&self, wanted: &Wanted) -> Result<Admitted, SlotRefusal> {
        let slot = SlotId(wanted.slot);
        let place = match self.place(slot) {
            Some(place) => place,
            None if wanted.slot < self.capacity => return Err(SlotRefusal::Stale),
            None => return Err(SlotRefusal::NoSuchSlot),
        };
        match place.gate.enter(wanted.generation) {
            Entry::Admitted => {}
            Entry::Stale => return Err(SlotRefusal::Stale),
            Entry::StaleAndLast => {
                self.tell_if_quiet(slot, place);
                return Err(SlotRefusal::Stale);
            }
        }
        let checked = place.check(wanted);
        match checked {
            Ok(_) if wanted.receive => {
                place.receives.fetch_add(1, Ordering::Relaxed);
            }
            Ok(_) => {}
            Err(_) => self.leave_place(slot, place),
        }
        checked
    }

    /// Ends a request that [`SlotTable::admit`] counted in. Lock-free but for the last one on a
    /// retired slot, which tells the waiters.
    pub(crate) fn leave(&self, slot: u32, receive: bool) {
        let slot = SlotId(slot);
        let Some(place) = self.place(slot) else { return };
        if receive {
            place.receives.fetch_sub(1, Ordering::Relaxed);
        }
        self.leave_place(slot, place);
    }

    fn leave_place(&self, slot: SlotId, place: &Slot) {
        if place.gate.leave() {
            self.tell_if_quiet(slot, place);
        }
    }

    fn tell_if_quiet(&self, slot: SlotId, place: &Slot) {
        let waiters = {
            let mut waiters = self.lock();
            if !place.gate.is_quiet() {
                return;
            }
            place.was_quiet.store(true, Ordering::Release);
            waiters.remove(&slot)
        };
        for done in waiters.into_iter().flatten() {
            done();
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<SlotId, Vec<Done>>> {
        // Nothing under the lock can leave the map half changed.
        self.waiters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn place(&self, slot: SlotId) -> Option<&Slot> {
        let index = slot.0 as usize;
        if slot.0 >= self.capacity {
            return None;
        }
        self.chunks.get(index / CHUNK_SLOTS)?.get()?.get(index % CHUNK_SLOTS)
    }

    fn make(&self, slot: SlotId) -> Result<&Slot, SlotError> {
        let missing = SlotError::NoSuchSlot { slot, capacity: self.capacity };
        let index = slot.0 as usize;
        if slot.0 >= self.capacity {
            return Err(missing);
        }
        let chunk = self.chunks.get(index / CHUNK_SLOTS).ok_or(missing)?;
        let chunk =
            chunk.get_or_init(|| std::iter::repeat_with(|| Slot::new(FIRST_GENERATION)).take(CHUNK_SLOTS).collect());
        chunk.get(index % CHUNK_SLOTS).ok_or(missing)
    }
}
