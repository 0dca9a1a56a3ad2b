//! Counters. Each has one writer, its broker thread, so a plain store suffices and readers never wait.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::ids::QueuePairId;

/// A count with one writer.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, count: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(count), Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Of one queue pair.
#[derive(Debug, Default)]
pub(crate) struct QueuePairCounters {
    pub(crate) taken: Counter,
    pub(crate) refused: Counter,
    pub(crate) completed: Counter,
    pub(crate) failed: Counter,
    pub(crate) wakes: Counter,
}

impl QueuePairCounters {
    pub(crate) fn read(&self, id: QueuePairId) -> QueuePairStats {
        QueuePairStats {
            id,
            taken: self.taken.get(),
            refused: self.refused.get(),
            completed: self.completed.get(),
            failed: self.failed.get(),
            wakes: self.wakes.get(),
        }
    }
}

/// Of one broker thread.
#[derive(Debug, Default)]
pub(crate) struct ThreadCounters {
    pub(crate) sleeps: Counter,
    pub(crate) yields: Counter,
    pub(crate) unexpected: Counter,
    pub(crate) throttled: Counter,
}

impl ThreadCounters {
    pub(crate) fn read(&self, queue_pairs: usize) -> ThreadStats {
        ThreadStats {
            queue_pairs,
            sleeps: self.sleeps.get(),
            yields: self.yields.get(),
            unexpected: self.unexpected.get(),
            throttled: self.throttled.get(),
        }
    }
}

/// What one queue pair has done since it was attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueuePairStats {
    /// The queue pair.
    pub id: QueuePairId,
    /// Requests taken out of the ring, receives included.
    pub taken: u64,
    /// Of those, refused before they reached the HCA: stale, malformed, out of range.
    pub refused: u64,
    /// Requests that ended with success at the HCA.
    pub completed: u64,
    /// Requests that the HCA ended with a failure, flushed ones included.
    pub failed: u64,
    /// Times a sleeping client was woken.
    pub wakes: u64,
}

/// What one broker thread has done since start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ThreadStats {
    /// Queue pairs it serves now.
    pub queue_pairs: usize,
    /// Times it slept.
    pub sleeps: u64,
    /// Times it let the kernel's threads of a software HCA have its CPU.
    pub yields: u64,
    /// Completions that fit no posted request: those of destroyed queue pairs, or a fault of the provider.
    pub unexpected: u64,
    /// Times a tenant began to wait for its rate.
    pub throttled: u64,
}

/// All counters of the broker at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BrokerStats {
    /// By thread.
    pub threads: Vec<ThreadStats>,
    /// By queue pair, in order of id.
    pub queue_pairs: Vec<QueuePairStats>,
}
