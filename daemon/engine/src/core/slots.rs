//! Registration slots of a tenant: which are taken, and the generation of each.
//!
//! A slot's number is used again only by its tenant, and its generation only grows, so that an entry
//! that names an older registration never fits a newer one.

use crate::ids::{Generation, SlotId};

/// Generation of a slot that was never used; the broker's table starts there too.
const FIRST_GENERATION: u64 = 1;

#[derive(Debug, Clone)]
pub(crate) struct Slots {
    capacity: u32,
    /// Generation of each slot that was ever used.
    generations: Vec<u64>,
    /// Slots given back, the last first.
    free: Vec<SlotId>,
}

impl Slots {
    pub(crate) fn new(capacity: u32) -> Self {
        Self { capacity, generations: Vec::new(), free: Vec::new() }
    }

    /// All slots free, at these generations: those of an earlier daemon, ended.
    pub(crate) fn restored(capacity: u32, generations: Vec<u64>) -> Self {
        let used = u32::try_from(generations.len()).unwrap_or(u32::MAX);
        Self { capacity, generations, free: (0..used).rev().map(SlotId).collect() }
    }

    /// Slots taken.
    pub(crate) fn taken(&self) -> usize {
        self.generations.len() - self.free.len()
    }

    /// Slots that were ever taken.
    #[cfg(test)]
    pub(crate) fn ever_used(&self) -> usize {
        self.generations.len()
    }

    /// A free slot with its generation.
    pub(crate) fn take(&mut self) -> Option<(SlotId, Generation)> {
        if let Some(slot) = self.free.pop() {
            return Some((slot, self.generation(slot)));
        }
        let slot = u32::try_from(self.generations.len()).ok().filter(|slot| *slot < self.capacity)?;
        self.generations.push(FIRST_GENERATION);
        Some((SlotId(slot), Generation(FIRST_GENERATION)))
    }

    /// Ends the slot's generation; returns the next one.
    pub(crate) fn retire(&mut self, slot: SlotId) -> Generation {
        if let Some(generation) = self.generations.get_mut(slot.0 as usize) {
            *generation += 1;
        }
        self.generation(slot)
    }

    /// Gives a slot back.
    pub(crate) fn give_back(&mut self, slot: SlotId) {
        debug_assert!(!self.free.contains(&slot), "slot {slot} given back twice");
        self.free.push(slot);
    }

    fn generation(&self, slot: SlotId) -> Generation {
        Generation(self.generations.get(slot.0 as usize).copied().unwrap_or(FIRST_GENERATION))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_taken_again_has_a_later_generation() {
        let mut slots = Slots::new(2);
        let (slot, first) = slots.take().unwrap();
        slots.retire(slot);
        slots.give_back(slot);
        let (again, second) = slots.take().unwrap();
        assert_eq!(again, slot);
        assert!(second > first);
    }

    #[test]
    fn there_are_no_more_slots_than_the_capacity() {
        let mut slots = Slots::new(2);
        assert!(slots.take().is_some());
        assert!(slots.take().is_some());
        assert_eq!(slots.take(), None);
        assert_eq!(slots.taken(), 2);
    }
}
