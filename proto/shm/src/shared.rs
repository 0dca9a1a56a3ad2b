//! Views that were checked once and keep their segment alive: what hot paths hold.

use std::fmt;
use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64};

use crate::error::ShmError;
use crate::segment::Segment;

macro_rules! shared_word {
    ($name:ident, $atomic:ty, $getter:ident, $what:literal) => {
        #[doc = concat!("A ", $what, " in a writable segment, kept alive by this handle.")]
        pub struct $name {
            word: NonNull<$atomic>,
            _segment: Arc<Segment>,
        }

        impl $name {
            #[doc = concat!("The ", $what, " at `offset`.")]
            ///
            /// # Errors
            #[doc = concat!("As [`Segment::", stringify!($getter), "`].")]
            pub fn new(segment: &Arc<Segment>, offset: u64) -> Result<Self, ShmError> {
                Ok(Self { word: NonNull::from(segment.$getter(offset)?), _segment: Arc::clone(segment) })
            }
        }

        impl Deref for $name {
            type Target = $atomic;

            #[inline]
            fn deref(&self) -> &$atomic {
                // SAFETY: made from a valid reference into the mapping, which lives as long as the
                // segment that this handle keeps; atomics allow shared mutation.
                unsafe { self.word.as_ref() }
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                (**self).fmt(out)
            }
        }

        // SAFETY: the atomic may be used from any thread, and so may the segment behind it.
        unsafe impl Send for $name {}
        // SAFETY: as for Send; sharing gives out only `&` to the atomic.
        unsafe impl Sync for $name {}
    };
}

shared_word!(SharedU32, AtomicU32, atomic_u32, "word");
shared_word!(SharedU64, AtomicU64, atomic_u64, "double word");

/// An array of `count` slots of `WORDS` double words each in a writable segment. Indices run freely
/// and are masked, so no index of a peer can leave the array.
pub struct SharedSlots<const WORDS: usize> {
    base: NonNull<u64>,
    mask: u32,
    _segment: Arc<Segment>,
}

impl<const WORDS: usize> SharedSlots<WORDS> {
    /// The array at `offset`; `count` must be a power of two.
    ///
    /// # Errors
    /// [`ShmError::SlotCount`], [`ShmError::Misaligned`] (8 bytes), [`ShmError::OutOfRange`],
    /// [`ShmError::ReadOnly`].
    pub fn new(segment: &Arc<Segment>, offset: u64, count: u32) -> Result<Self, ShmError> {
        if !count.is_power_of_two() {
            return Err(ShmError::SlotCount { count });
        }
        segment.check_aligned(offset, 8)?;
        let len_bytes = u64::from(count) * (WORDS as u64) * 8;
        let base = segment.pointer_mut(offset, len_bytes)?.cast::<u64>();
        let base = NonNull::new(base).ok_or(ShmError::ReadOnly)?;
        Ok(Self { base, mask: count - 1, _segment: Arc::clone(segment) })
    }

    /// Copies slot `index` modulo the count out of shared memory, each word read exactly once.
    #[must_use]
    #[inline]
    pub fn read(&self, index: u32) -> [u64; WORDS] {
        let slot = self.slot(index);
        std::array::from_fn(|word| {
            // SAFETY: the masked slot lies in the range that `new` checked, word < WORDS; aligned,
            // since base and slot size are multiples of 8; the segment keeps the mapping. Volatile
            // so that the compiler neither repeats nor splits the load under a hostile writer.
            unsafe { slot.wrapping_add(word).read_volatile() }
        })
    }

    /// Copies `words` into slot `index` modulo the count.
    #[inline]
    pub fn write(&self, index: u32, words: &[u64; WORDS]) {
        let slot = self.slot(index);
        for (word, value) in words.iter().enumerate() {
            // SAFETY: as in `read`; `new` checked that the mapping is writable.
            unsafe { slot.wrapping_add(word).write_volatile(*value) };
        }
    }

    #[inline]
    fn slot(&self, index: u32) -> *mut u64 {
        let slot = (index & self.mask) as usize;
        self.base.as_ptr().wrapping_add(slot * WORDS)
    }
}

impl<const WORDS: usize> fmt::Debug for SharedSlots<WORDS> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("SharedSlots").field("words", &WORDS).field("mask", &self.mask).finish_non_exhaustive()
    }
}

// SAFETY: a view of a segment that may be used from any thread; accesses are volatile words.
unsafe impl<const WORDS: usize> Send for SharedSlots<WORDS> {}
