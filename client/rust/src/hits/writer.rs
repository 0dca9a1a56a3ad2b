//! The writers' half of a hit cache, under its lock.
//!
//! No entry that can be found lies within another: so the one with the greatest start up to an address is the only one
//! that can cover a range there, and ends ascend as starts do.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use super::tree::{Plain, Record};
use super::{HitCache, Region};

/// An entry of one cache. It names that entry for ever, and never another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EntryId {
    serial: u64,
    index: u32,
}

/// A region that was added.
#[derive(Debug)]
#[must_use = "payloads that parted are dropped with it"]
pub struct Inserted<T> {
    /// The entry.
    pub entry: EntryId,
    /// Payloads of entries that parted for it and that nobody holds.
    pub parted: Vec<T>,
}

/// Why a region was not added; the payload comes back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NotInserted<T> {
    /// A region that is there covers it.
    Covered(T),
    /// It has no bytes, or passes the end of the address space.
    NoRange(T),
    /// The cache has room for none.
    NoRoom(T),
    /// This process is a forked child of the one whose cache it is.
    Forked(T),
}

/// One place of the table of entries.
#[derive(Debug)]
struct Place<T> {
    serial: u64,
    /// Start of its region, while it can be found.
    linked: Option<u64>,
    /// `None` for a place that is free.
    payload: Option<T>,
}

#[derive(Debug)]
pub(super) struct Writer<T> {
    plain: Plain,
    places: Vec<Place<T>>,
    free: Vec<u32>,
    /// Entries that have parted and may be pinned.
    parted: Vec<u32>,
    /// Entries that can be found, the oldest first.
    by_age: BTreeMap<u64, u32>,
    /// Pins for which there was no word.
    pins: BTreeMap<u32, u32>,
    max_regions: usize,
    last_serial: u64,
}

impl<T> Writer<T> {
    pub(super) fn new(max_regions: u32) -> Self {
        Self {
            plain: Plain::default(),
            places: Vec::new(),
            free: Vec::new(),
            parted: Vec::new(),
            by_age: BTreeMap::new(),
            pins: BTreeMap::new(),
            max_regions: max_regions as usize,
            last_serial: 0,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.by_age.len()
    }

    pub(super) fn find(&self, address: u64) -> Option<Record> {
        self.plain.find(address)
    }

    pub(super) fn insert(
        &mut self,
        cache: &HitCache<T>,
        region: Region,
        payload: T,
    ) -> Result<Inserted<T>, NotInserted<T>> {
        let Some(end) = region.address.checked_add(region.len_bytes).filter(|_| region.len_bytes > 0) else {
            return Err(NotInserted::NoRange(payload));
        };
        if self.max_regions == 0 {
            return Err(NotInserted::NoRoom(payload));
        }
        cache.sequence.begin_write();
        let covers = |record: &Record| record.start.saturating_add(record.len_bytes) >= end;
        while let Some(covering) = self.plain.find(region.address).filter(covers) {
            let is_current = cache.page.current(covering.slot) == Some(covering.generation);
            if is_current && covering.identity == region.identity {
                cache.sequence.end_write();
                return Err(NotInserted::Covered(payload));
            }
            // Ended by the daemon, or of memory that was there before: it gives way, and another that covers the region
            // may show.
            self.unlink(cache, covering.entry);
        }
        let entry = self.new_entry(region.address, payload);
        while let Some(within) = self.plain.find_from(region.address) {
            if within.start.saturating_add(within.len_bytes) > end {
                break;
            }
            self.unlink(cache, within.entry);
        }
        if self.by_age.len() >= self.max_regions
            && let Some(oldest) = self.by_age.values().next().copied()
        {
            self.unlink(cache, oldest);
        }
        self.by_age.insert(entry.serial, entry.index);
        let record = Record {
            start: region.address,
            len_bytes: region.len_bytes,
            generation: region.generation,
            slot_offset: region.slot_offset,
            slot: region.slot,
            entry: entry.index,
            identity: region.identity,
        };
        self.plain.insert(&cache.tree, record);
        cache.sequence.end_write();
        Ok(Inserted { entry, parted: self.sweep(cache) })
    }

    fn new_entry(&mut self, start: u64, payload: T) -> EntryId {
        self.last_serial += 1;
        let place = Place { serial: self.last_serial, linked: Some(start), payload: Some(payload) };
        let index = match self.free.pop() {
            Some(index) => {
                if let Some(free) = self.places.get_mut(index as usize) {
                    *free = place;
                }
                index
            }
            None => {
                self.places.push(place);
                // Places are bounded by `max_regions` and the pins, both far below 2^32.
                u32::try_from(self.places.len() - 1).unwrap_or(u32::MAX)
            }
        };
        EntryId { serial: self.last_serial, index }
    }

    /// Takes an entry out of the tree. A write has begun.
    fn unlink(&mut self, cache: &HitCache<T>, index: u32) {
        let Some(place) = self.places.get_mut(index as usize) else { return };
        let Some(start) = place.linked.take() else { return };
        self.by_age.remove(&place.serial);
        self.plain.remove(&cache.tree, start);
        self.parted.push(index);
    }

    pub(super) fn remove(&mut self, cache: &HitCache<T>, entry: EntryId) -> Vec<T> {
        let place = self.places.get(entry.index as usize);
        if place.is_some_and(|place| place.serial == entry.serial && place.linked.is_some()) {
            cache.sequence.begin_write();
            self.unlink(cache, entry.index);
            cache.sequence.end_write();
        }
        self.sweep(cache)
    }

    pub(super) fn remove_within(&mut self, cache: &HitCache<T>, address: u64, len_bytes: u64) -> Vec<T> {
        let end = address.saturating_add(len_bytes);
        cache.sequence.begin_write();
        // Those before may reach in; ends ascend as starts do, so the first that does not is followed by none.
        let reaches = |before: &Record| before.start.saturating_add(before.len_bytes) > address;
        while let Some(before) = self.plain.find(address).filter(reaches) {
            self.unlink(cache, before.entry);
        }
        while let Some(within) = self.plain.find_from(address).filter(|within| within.start < end) {
            self.unlink(cache, within.entry);
        }
        cache.sequence.end_write();
        self.sweep(cache)
    }

    /// Takes the payloads of parted entries that nobody holds, in the order in which they parted.
    pub(super) fn sweep(&mut self, cache: &HitCache<T>) -> Vec<T> {
        if self.parted.is_empty() {
            return Vec::new();
        }
        // (part) before the look at the pins: who gives one back after that look sees it.
        cache.parted.store(self.parted.len() as u64, Ordering::Relaxed);
        // (pin)
        if !cache.pins.fence() {
            return Vec::new();
        }
        let mut free = Vec::new();
        let (places, free_list, pins) = (&mut self.places, &mut self.free, &self.pins);
        self.parted.retain(|index| {
            if pins.contains_key(index) || cache.pins.is_pinned(*index) {
                return true;
            }
            free.extend(places.get_mut(*index as usize).and_then(|place| place.payload.take()));
            free_list.push(*index);
            false
        });
        cache.parted.store(self.parted.len() as u64, Ordering::Relaxed);
        free
    }

    pub(super) fn pin(&mut self, index: u32) {
        *self.pins.entry(index).or_default() += 1;
    }

    pub(super) fn unpin(&mut self, index: u32) {
        if let Some(count) = self.pins.get_mut(&index) {
            *count -= 1;
            if *count == 0 {
                self.pins.remove(&index);
            }
        }
    }

    pub(super) fn id_of(&self, index: u32) -> Option<EntryId> {
        self.places.get(index as usize).map(|place| EntryId { serial: place.serial, index })
    }

    pub(super) fn payload(&self, index: u32) -> Option<T>
    where
        T: Clone,
    {
        self.places.get(index as usize)?.payload.clone()
    }

    #[cfg(test)]
    pub(super) fn places_made(&self) -> usize {
        self.places.len()
    }

    #[cfg(test)]
    pub(super) fn leaves_made(&self) -> usize {
        self.plain.leaves_made()
    }
}
