//! A sequence lock: readers write nothing, and look again when a writer was at work.
//!
//! The number is odd while a writer changes the data. Data words are atomics read and written relaxed; the pairs
//! that order them are labelled at both ends. (H. Boehm, "Can seqlocks get along with programming language memory
//! models?", MSPC 2012.)

use std::sync::atomic::Ordering;

use super::word::Word;

/// The number that tells a reader whether what it read is of one piece.
#[derive(Debug)]
pub(crate) struct Sequence<W>(W);

/// What a reader saw at its beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Seen(u64);

impl<W: Word> Sequence<W> {
    pub(crate) fn new() -> Self {
        Self(W::new(0))
    }

    /// Begins a read; `None` while a writer is at work.
    #[inline]
    pub(crate) fn begin(&self) -> Option<Seen> {
        // (publish) acquire: the data of the last writer is seen.
        let seen = self.0.load(Ordering::Acquire);
        seen.is_multiple_of(2).then_some(Seen(seen))
    }

    /// Whether everything read since `seen` is of one piece.
    #[inline]
    pub(crate) fn holds(&self, seen: Seen) -> bool {
        // (dirty) acquire fence: a data word that a later writer wrote brings that writer's odd number with it.
        W::fence(Ordering::Acquire);
        self.0.load(Ordering::Relaxed) == seen.0
    }

    /// Begins a write. One writer at a time: its caller holds the writers' lock.
    pub(crate) fn begin_write(&self) {
        let seen = self.0.load(Ordering::Relaxed);
        self.0.store(seen + 1, Ordering::Relaxed);
        // (dirty) release fence: whoever sees a data word of this writer sees the odd number.
        W::fence(Ordering::Release);
    }

    /// Ends a write.
    pub(crate) fn end_write(&self) {
        let seen = self.0.load(Ordering::Relaxed);
        // (publish) release.
        self.0.store(seen + 1, Ordering::Release);
    }
}
