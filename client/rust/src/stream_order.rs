//! Which registrations are of GPU memory, and by which GPUs this process may be writing it: a post that sends from such
//! memory waits for that work first.
//!
//! Owner of state: a session's memory, by name. A look at a span of other memory is one load; only spans of GPU memory
//! meet the lock. A mark is good for one generation of its slot, so nothing has to be taken back when a slot is lent anew.
//!
//! It must not know rings, nor how memory is mapped.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use gdrd_client_sys::Gpu;
use gdrd_ring::{LocalSpan, Operation, Source};

use crate::registered::MemoryName;

/// GPU memory that the session has.
#[derive(Debug, Default)]
struct Known {
    /// Handles of it.
    holders: usize,
    /// GPUs with a mapping of it in this process; one whose last mapping is gone has no work on it.
    gpus: Vec<Weak<Gpu>>,
    slots: Vec<u32>,
}

#[derive(Debug, Default)]
struct State {
    memories: HashMap<MemoryName, Known>,
    slots: HashMap<u32, MemoryName>,
}

/// Slots of GPU memory.
#[derive(Debug, Default)]
pub(crate) struct GpuSlots {
    /// By slot, the generation under which it is one; made with the first.
    marks: OnceLock<Box<[AtomicU64]>>,
    state: Mutex<State>,
}

impl GpuSlots {
    /// One more handle of memory that is on a GPU.
    pub(crate) fn hold(&self, memory: MemoryName) {
        self.lock().memories.entry(memory).or_default().holders += 1;
    }

    /// One handle less.
    pub(crate) fn part(&self, memory: MemoryName) {
        let mut state = self.lock();
        let Some(known) = state.memories.get_mut(&memory) else { return };
        known.holders = known.holders.saturating_sub(1);
        if known.holders == 0 {
            let slots = state.memories.remove(&memory).map(|known| known.slots).unwrap_or_default();
            for slot in slots {
                if state.slots.get(&slot) == Some(&memory) {
                    state.slots.remove(&slot);
                }
            }
        }
    }

    /// This process has it mapped for a GPU.
    pub(crate) fn mapped(&self, memory: MemoryName, gpu: &Arc<Gpu>) {
        if let Some(known) = self.lock().memories.get_mut(&memory) {
            known.gpus.retain(|other| other.strong_count() > 0 && !std::ptr::eq(other.as_ptr(), Arc::as_ptr(gpu)));
            known.gpus.push(Arc::downgrade(gpu));
        }
    }

    /// Registrations of memory, as slot and generation, in a page of so many slots. Nothing for memory that is on no GPU.
    pub(crate) fn registered(
        &self,
        memory: MemoryName,
        registrations: impl Iterator<Item = (u32, u64)>,
        page_slots: u32,
    ) {
        let mut state = self.lock();
        if !state.memories.contains_key(&memory) {
            return;
        }
        let marks = self.marks.get_or_init(|| (0..page_slots).map(|_| AtomicU64::new(0)).collect());
        for (slot, generation) in registrations {
            if state.slots.insert(slot, memory) != Some(memory) {
                state.memories.entry(memory).or_default().slots.push(slot);
            }
            if let Some(mark) = usize::try_from(slot).ok().and_then(|slot| marks.get(slot)) {
                // (mark) release: who sees it sees what is known of the memory, under the lock.
                mark.store(generation, Ordering::Release);
            }
        }
    }

    /// GPUs whose work a request must wait for: those that have what it sends from mapped here. Without a lock or an
    /// allocation for requests that send from no GPU memory.
    #[inline]
    pub(crate) fn to_wait_for(&self, operation: &Operation) -> Vec<Arc<Gpu>> {
        let Some(span) = sent(operation).filter(|span| self.is_gpu(span)) else { return Vec::new() };
        let state = self.lock();
        let known = state.slots.get(&span.slot).and_then(|memory| state.memories.get(memory));
        known.into_iter().flat_map(|known| known.gpus.iter().filter_map(Weak::upgrade)).collect()
    }

    #[inline]
    fn is_gpu(&self, span: &LocalSpan) -> bool {
        let mark = self.marks.get().and_then(|marks| marks.get(usize::try_from(span.slot).ok()?));
        // (mark) acquire.
        mark.is_some_and(|mark| mark.load(Ordering::Acquire) == span.generation)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // What a panic elsewhere could leave half done costs a wait at most.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a request sends from memory.
fn sent(operation: &Operation) -> Option<&LocalSpan> {
    match operation {
        Operation::Write { source: Source::Local(span), .. } | Operation::Send { source: Source::Local(span), .. } => {
            Some(span)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLOTS: u32 = 8;
    const LEASE: MemoryName = MemoryName::Lease(1);

    fn span(slot: u32, generation: u64) -> LocalSpan {
        LocalSpan { slot, generation, offset: 0, len_bytes: 8 }
    }

    #[test]
    fn a_slot_is_of_gpu_memory_under_the_generation_that_was_told_and_no_other() {
        let slots = GpuSlots::default();
        slots.registered(LEASE, [(3, 5)].into_iter(), SLOTS);
        assert!(!slots.is_gpu(&span(3, 5)), "host memory");
        slots.hold(LEASE);
        slots.registered(LEASE, [(3, 5), (99, 1)].into_iter(), SLOTS);
        assert!(slots.is_gpu(&span(3, 5)));
        assert!([(3, 6), (4, 5), (99, 1), (u32::MAX, 5)].iter().all(|(slot, at)| !slots.is_gpu(&span(*slot, *at))));
    }

    #[test]
    fn what_is_known_of_memory_ends_with_its_last_handle() {
        let slots = GpuSlots::default();
        let other = MemoryName::Adopted(1);
        for memory in [LEASE, LEASE, other] {
            slots.hold(memory);
        }
        for generation in 1..4 {
            slots.registered(LEASE, [(0, generation), (1, 1)].into_iter(), SLOTS);
        }
        // The slot is lent anew.
        slots.registered(other, [(1, 2)].into_iter(), SLOTS);
        slots.part(LEASE);
        assert_eq!(slots.lock().memories[&LEASE].slots, [0, 1]);
        slots.part(LEASE);
        slots.part(LEASE);
        assert_eq!(slots.lock().slots, HashMap::from([(1, other)]));
        assert!(!slots.lock().memories.contains_key(&LEASE));
    }

    #[test]
    fn requests_that_send_are_those_that_wait() {
        let remote = gdrd_ring::RemoteSpan { rkey: 1, iova: 0 };
        let source = Source::Local(span(0, 1));
        assert!(sent(&Operation::Write { source, remote, imm: None }).is_some());
        assert!(sent(&Operation::Send { source, imm: None }).is_some());
        assert!(sent(&Operation::Read { local: span(0, 1), remote }).is_none());
        assert!(sent(&Operation::Recv { local: span(0, 1) }).is_none());
    }
}
