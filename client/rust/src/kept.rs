//! Mappings of released buffers, kept for the next lease of the same memory: importing and mapping GPU memory takes
//! longer than a warm acquire.
//!
//! A tenant's memory is lent again inside the tenant only, so a mapping that stays shows no one anything that a
//! descriptor would not. It does keep a GPU's memory from being free. So what is kept is bounded, and is dropped when the
//! daemon tells that it frees the memory.
//!
//! Owner of state: a session. Mappings are dropped outside of the lock, since unmapping may wait for a driver.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

use gdrd_client_sys::Mapping;
use gdrd_shm::Segment;

/// Most mappings of one session: those of host memory take a descriptor each.
const MOST: usize = 64;

/// A mapping of a buffer's memory.
#[derive(Debug)]
pub(crate) enum Kept {
    Host(Segment),
    Device(Mapping),
}

impl Kept {
    fn len_bytes(&self) -> u64 {
        match self {
            Self::Host(segment) => segment.len_bytes(),
            Self::Device(mapping) => mapping.len_bytes(),
        }
    }
}

#[derive(Debug, Default)]
struct State {
    ended: bool,
    bytes: u64,
    /// Grows with each mapping put in.
    turn: u64,
    /// By allocation; with the turn in which it came.
    mappings: HashMap<u64, (u64, Kept)>,
    /// Allocations by turn: the first goes first.
    order: BTreeMap<u64, u64>,
}

impl State {
    fn remove(&mut self, allocation: u64) -> Option<Kept> {
        let (turn, kept) = self.mappings.remove(&allocation)?;
        self.order.remove(&turn);
        self.bytes -= kept.len_bytes();
        Some(kept)
    }

    fn oldest(&self) -> Option<u64> {
        self.order.first_key_value().map(|(_, allocation)| *allocation)
    }
}

/// Mappings of one session.
#[derive(Debug)]
pub(crate) struct KeptMappings {
    max_bytes: u64,
    state: Mutex<State>,
}

impl KeptMappings {
    pub(crate) fn new(max_bytes: u64) -> Self {
        Self { max_bytes, state: Mutex::default() }
    }

    /// The mapping of this allocation, if there is one.
    pub(crate) fn take(&self, allocation: u64) -> Option<Kept> {
        self.lock().remove(allocation)
    }

    /// Keeps a mapping, and drops those that came first where it is too much; or drops it. To be called before the lease
    /// is released: after it the daemon may tell that the memory is gone.
    pub(crate) fn put(&self, allocation: u64, kept: Kept) {
        let mut dropped = Vec::new();
        let mut state = self.lock();
        let len_bytes = kept.len_bytes();
        let is_there = state.mappings.contains_key(&allocation);
        if state.ended || is_there || allocation == 0 || len_bytes > self.max_bytes {
            dropped.push(kept);
        } else {
            state.turn += 1;
            let turn = state.turn;
            state.bytes += len_bytes;
            state.order.insert(turn, allocation);
            state.mappings.insert(allocation, (turn, kept));
            while state.bytes > self.max_bytes || state.mappings.len() > MOST {
                let Some(oldest) = state.oldest() else { break };
                dropped.extend(state.remove(oldest));
            }
        }
        drop(state);
        drop(dropped);
    }

    /// Takes out mappings of memory that is gone. They are the caller's to drop, where that may block.
    #[must_use]
    pub(crate) fn forget(&self, allocations: &[u64]) -> Vec<Kept> {
        let mut state = self.lock();
        allocations.iter().filter_map(|allocation| state.remove(*allocation)).collect()
    }

    /// Takes out all.
    #[must_use]
    pub(crate) fn forget_all(&self) -> Vec<Kept> {
        let mut state = self.lock();
        let (ended, turn) = (state.ended, state.turn);
        let all = std::mem::replace(&mut *state, State { ended, turn, ..State::default() });
        all.mappings.into_values().map(|(_, kept)| kept).collect()
    }

    /// The session is over: nothing is kept any more.
    #[must_use]
    pub(crate) fn end(&self) -> Vec<Kept> {
        self.lock().ended = true;
        self.forget_all()
    }

    /// Memory that is kept mapped, bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.lock().bytes
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No holder of this lock can panic between two changes that belong together.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = 4096;

    fn mapped(pages: u64) -> (u64, Kept) {
        let segment = Segment::create("kept", pages * PAGE).unwrap();
        (segment.address(), Kept::Host(segment))
    }

    fn address(kept: Option<Kept>) -> Option<u64> {
        match kept? {
            Kept::Host(segment) => Some(segment.address()),
            Kept::Device(_) => None,
        }
    }

    #[test]
    fn a_mapping_comes_back_once_for_its_own_memory() {
        let kept = KeptMappings::new(100 * PAGE);
        let (at, segment) = mapped(1);
        kept.put(7, segment);
        assert!(kept.take(8).is_none());
        assert_eq!(address(kept.take(7)), Some(at));
        assert!(kept.take(7).is_none());
        assert_eq!(kept.bytes(), 0);
    }

    #[test]
    fn what_is_kept_is_bounded_by_bytes_and_number_and_the_first_goes_first() {
        let kept = KeptMappings::new(3 * PAGE);
        for allocation in 1..=3 {
            kept.put(allocation, mapped(1).1);
        }
        kept.put(4, mapped(2).1);
        assert_eq!(kept.bytes(), 3 * PAGE);
        assert!(kept.take(1).is_none() && kept.take(2).is_none());
        assert!(kept.take(3).is_some() && kept.take(4).is_some());
        kept.put(5, mapped(4).1);
        assert!(kept.take(5).is_none(), "longer than everything that may be kept");
        let many = KeptMappings::new(u64::MAX);
        (1..=MOST as u64 + 1).for_each(|allocation| many.put(allocation, mapped(1).1));
        assert!(many.take(1).is_none() && many.take(2).is_some());
    }

    #[test]
    fn memory_that_is_gone_is_not_kept_and_nothing_is_after_the_end() {
        let kept = KeptMappings::new(100 * PAGE);
        (1..=3).for_each(|allocation| kept.put(allocation, mapped(1).1));
        assert_eq!(kept.forget(&[1, 9]).len(), 1);
        assert_eq!(kept.forget_all().len(), 2);
        kept.put(4, mapped(1).1);
        assert_eq!(kept.end().len(), 1);
        kept.put(5, mapped(1).1);
        assert_eq!(kept.bytes(), 0);
        assert!(kept.take(5).is_none());
    }

    #[test]
    fn a_second_mapping_of_the_same_memory_and_one_of_unknown_memory_are_dropped() {
        let kept = KeptMappings::new(100 * PAGE);
        let (at, first) = mapped(1);
        kept.put(1, first);
        kept.put(1, mapped(1).1);
        kept.put(0, mapped(1).1);
        assert_eq!(kept.bytes(), PAGE);
        assert_eq!(address(kept.take(1)), Some(at));
    }
}
