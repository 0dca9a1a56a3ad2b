//! The words that readers and writers share, so that a model checker can stand in for the processor.

use std::sync::atomic::{AtomicU64, Ordering, compiler_fence, fence};

use rustix::thread::{MembarrierCommand, membarrier};

/// A shared 64-bit word.
pub(crate) trait Word {
    fn new(value: u64) -> Self;
    fn load(&self, order: Ordering) -> u64;
    fn store(&self, value: u64, order: Ordering);
    fn compare_exchange(&self, current: u64, new: u64, order: Ordering) -> bool;
    fn fence(order: Ordering);

    /// The frequent half of an asymmetric fence: with a [`Word::writer_fence`] of another thread it orders as two
    /// sequentially consistent fences would.
    fn reader_fence(kind: Fence);

    /// The rare half. `false` where the kernel refuses it: then nothing is ordered.
    #[must_use]
    fn writer_fence(kind: Fence) -> bool;
}

impl Word for AtomicU64 {
    fn new(value: u64) -> Self {
        Self::new(value)
    }

    #[inline]
    fn load(&self, order: Ordering) -> u64 {
        Self::load(self, order)
    }

    #[inline]
    fn store(&self, value: u64, order: Ordering) {
        Self::store(self, value, order);
    }

    #[inline]
    fn compare_exchange(&self, current: u64, new: u64, order: Ordering) -> bool {
        Self::compare_exchange(self, current, new, order, Ordering::Relaxed).is_ok()
    }

    #[inline]
    fn fence(order: Ordering) {
        fence(order);
    }

    #[inline]
    fn reader_fence(kind: Fence) {
        match kind {
            // The processor's part of it is the writers' (membarrier(2), "barrier()" pairing table).
            Fence::Asymmetric => compiler_fence(Ordering::SeqCst),
            Fence::Full => fence(Ordering::SeqCst),
            #[cfg(test)]
            Fence::Refused => {}
        }
    }

    fn writer_fence(kind: Fence) -> bool {
        match kind {
            // Registered for by `Fence::best`, after which only a sandbox that was set up since refuses it.
            Fence::Asymmetric => membarrier(MembarrierCommand::PrivateExpedited).is_ok(),
            Fence::Full => {
                fence(Ordering::SeqCst);
                true
            }
            #[cfg(test)]
            Fence::Refused => false,
        }
    }
}

/// How readers and writers fence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fence {
    /// The writers for both, by membarrier(2).
    Asymmetric,
    /// Each for itself.
    Full,
    /// By membarrier(2), which is refused.
    #[cfg(test)]
    Refused,
}

impl Fence {
    /// The best that this kernel gives: one before 4.14, or a sandbox, may know no membarrier(2).
    pub(crate) fn best() -> Self {
        match membarrier(MembarrierCommand::RegisterPrivateExpedited) {
            Ok(()) => Self::Asymmetric,
            Err(_) => Self::Full,
        }
    }
}
