//! The small protocol that makes retiring a registration race-free against admitting work on it.
//!
//! Admission counts itself in *before* it checks the generation a last time; retiring changes the
//! generation *before* it looks at the count. With a full fence between the two steps on both sides
//! at least one of them sees the other: either the admission is refused, or the retirer sees it and
//! waits. A model check of all interleavings stands in `tests`.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Atomics behind the gate, so that a model checker can stand in for the real ones.
pub(crate) trait Atomics {
    /// A 64-bit word.
    type Word;
    /// A 32-bit count.
    type Count;

    fn word(value: u64) -> Self::Word;
    fn count() -> Self::Count;
    fn load_word(word: &Self::Word, ordering: Ordering) -> u64;
    fn store_word(word: &Self::Word, value: u64, ordering: Ordering);
    fn load_count(count: &Self::Count, ordering: Ordering) -> u32;
    fn increment(count: &Self::Count, ordering: Ordering);
    /// Returns the count before.
    fn decrement(count: &Self::Count, ordering: Ordering) -> u32;
    fn full_fence();
}

/// The machine's own atomics.
#[derive(Debug)]
pub(crate) struct Machine;

impl Atomics for Machine {
    type Word = AtomicU64;
    type Count = AtomicU32;

    fn word(value: u64) -> AtomicU64 {
        AtomicU64::new(value)
    }
    fn count() -> AtomicU32 {
        AtomicU32::new(0)
    }
    fn load_word(word: &AtomicU64, ordering: Ordering) -> u64 {
        word.load(ordering)
    }
    fn store_word(word: &AtomicU64, value: u64, ordering: Ordering) {
        word.store(value, ordering);
    }
    fn load_count(count: &AtomicU32, ordering: Ordering) -> u32 {
        count.load(ordering)
    }
    fn increment(count: &AtomicU32, ordering: Ordering) {
        count.fetch_add(1, ordering);
    }
    fn decrement(count: &AtomicU32, ordering: Ordering) -> u32 {
        count.fetch_sub(1, ordering)
    }
    fn full_fence() {
        std::sync::atomic::fence(Ordering::SeqCst);
    }
}

/// Low bit of the word: set while the slot may be used.
const LIVE: u64 = 1;

/// Generation and liveness of one registration slot, with the count of requests that use it.
#[derive(Debug)]
pub(crate) struct Gate<A: Atomics> {
    /// Generation shifted left by one, with [`LIVE`].
    word: A::Word,
    /// Requests admitted and not yet completed, plus admissions that are about to be refused.
    in_flight: A::Count,
}

impl<A: Atomics> Gate<A> {
    /// A closed gate.
    pub(crate) fn new(generation: u64) -> Self {
        Self { word: A::word(generation << 1), in_flight: A::count() }
    }

    /// Counts in one request that names `generation`, unless the slot is free, retired or of another one.
    /// After [`Entry::Admitted`] the caller must call [`Gate::leave`] once.
    pub(crate) fn enter(&self, generation: u64) -> Entry {
        // The shift would drop the top bit, and a forged generation would fit.
        if generation > u64::MAX >> 1 {
            return Entry::Stale;
        }
        let wanted = (generation << 1) | LIVE;
        // A stale request is turned away before it touches the count, so that a client that repeats
        // it cannot keep a retirer waiting. (publish) acquired here: what was stored before is seen.
        if A::load_word(&self.word, Ordering::Acquire) != wanted {
            return Entry::Stale;
        }
        A::increment(&self.in_flight, Ordering::Relaxed);
        // Against the fence in `retire`: the increment is seen there, or the new generation here.
        A::full_fence();
        if A::load_word(&self.word, Ordering::Acquire) == wanted {
            return Entry::Admitted;
        }
        match self.leave() {
            true => Entry::StaleAndLast,
            false => Entry::Stale,
        }
    }

    /// Ends one admitted request. True when the slot is retired and this was the last one: whoever
    /// waits for quiet must be told.
    pub(crate) fn leave(&self) -> bool {
        // (quiet) released here, acquired in `is_quiet`.
        if A::decrement(&self.in_flight, Ordering::Release) != 1 {
            return false;
        }
        // Against the fence in `retire`: the retirer sees the count at 0, or the retired word is seen here.
        A::full_fence();
        A::load_word(&self.word, Ordering::Relaxed) & LIVE == 0
    }

    /// Opens the gate at its generation. Only the table's writer calls it, on a closed and quiet gate.
    pub(crate) fn publish(&self) -> u64 {
        let word = A::load_word(&self.word, Ordering::Relaxed);
        // (publish) released here, acquired in `enter`.
        A::store_word(&self.word, word | LIVE, Ordering::Release);
        word >> 1
    }

    /// Closes the gate and moves to the next generation, which is returned. From here on no request
    /// of the old one is admitted; those that were are counted until they leave. Only the table's
    /// writer calls it, on an open gate.
    pub(crate) fn retire(&self) -> u64 {
        let next = (A::load_word(&self.word, Ordering::Relaxed) >> 1) + 1;
        A::store_word(&self.word, next << 1, Ordering::Release);
        A::full_fence();
        next
    }

    /// Whether no request is counted in.
    pub(crate) fn is_quiet(&self) -> bool {
        // (quiet) acquired here: what the last request did is seen.
        A::load_count(&self.in_flight, Ordering::Acquire) == 0
    }

    /// Whether requests may enter.
    pub(crate) fn is_live(&self) -> bool {
        A::load_word(&self.word, Ordering::Acquire) & LIVE != 0
    }

    /// Generation now.
    pub(crate) fn generation(&self) -> u64 {
        A::load_word(&self.word, Ordering::Acquire) >> 1
    }

    /// Requests counted in, for diagnosis.
    pub(crate) fn in_flight(&self) -> u32 {
        A::load_count(&self.in_flight, Ordering::Relaxed)
    }
}

/// What came of an attempt to enter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Entry {
    /// Counted in.
    Admitted,
    /// Refused.
    Stale,
    /// Refused, and the refusal's own count was the last on a retired slot: the waiter must be told.
    StaleAndLast,
}
