//! The protocol between a reader and the writers under loom: a hit is of one piece, its payload lives while it is
//! pinned, and a payload that parted is always dropped, by the writer or by the last reader.
//!
//! Loom knows no membarrier(2): both halves of the asymmetric fence stand for the full fences that they amount to. Its
//! threads are one thread to `thread_local`, so they share a line, by exchange as threads beyond the own lines do.

use std::sync::atomic::Ordering;

use loom::cell::Cell;
use loom::sync::atomic::{AtomicU64, fence};
use loom::sync::{Arc, Mutex};
use loom::thread;

use super::pins::Pins;
use super::sequence::Sequence;
use super::word::{Fence, Word};

/// Preemptions per run that are tried: a second of work. 3 were tried by hand when this was written.
const PREEMPTIONS: usize = 2;
const ENTRY: u32 = 0;
const DROPPED: u32 = 99;

impl Word for AtomicU64 {
    fn new(value: u64) -> Self {
        Self::new(value)
    }

    fn load(&self, order: Ordering) -> u64 {
        Self::load(self, order)
    }

    fn store(&self, value: u64, order: Ordering) {
        Self::store(self, value, order);
    }

    fn compare_exchange(&self, current: u64, new: u64, order: Ordering) -> bool {
        Self::compare_exchange(self, current, new, order, Ordering::Relaxed).is_ok()
    }

    fn fence(order: Ordering) {
        fence(order);
    }

    fn reader_fence(_: Fence) {
        fence(Ordering::SeqCst);
    }

    fn writer_fence(_: Fence) -> bool {
        fence(Ordering::SeqCst);
        true
    }
}

/// A cache of one entry: two words that readers see, and a payload that loom watches for races.
struct Cache {
    sequence: Sequence<AtomicU64>,
    words: [AtomicU64; 2],
    pins: Pins<AtomicU64>,
    parted: AtomicU64,
    writer: Mutex<bool>,
    payload: Cell<u32>,
}

impl Cache {
    fn new(own: usize, shared: usize) -> Self {
        Self {
            sequence: Sequence::new(),
            words: [AtomicU64::new(1), AtomicU64::new(1)],
            pins: Pins::with_lines(Fence::Full, own, shared),
            parted: AtomicU64::new(0),
            writer: Mutex::new(false),
            payload: Cell::new(7),
        }
    }

    fn write(&self, value: u64) {
        self.sequence.begin_write();
        self.words.iter().for_each(|word| word.store(value, Ordering::Relaxed));
        self.sequence.end_write();
    }

    /// Takes the entry out, as `Writer::remove` does.
    fn remove(&self) {
        let mut has_parted = self.writer.lock().unwrap();
        self.write(0);
        *has_parted = true;
        self.sweep_locked(&mut has_parted);
    }

    fn sweep_locked(&self, has_parted: &mut bool) {
        self.parted.store(u64::from(*has_parted), Ordering::Relaxed);
        assert!(self.pins.fence());
        if *has_parted && !self.pins.is_pinned(ENTRY) {
            *has_parted = false;
            self.payload.set(DROPPED);
        }
        self.parted.store(u64::from(*has_parted), Ordering::Relaxed);
    }

    /// Looks the entry up once, as `HitCache::get` does; true if it was a hit.
    fn look(&self) -> bool {
        let Some(seen) = self.sequence.begin() else { return false };
        let [first, second] = &self.words;
        let (first, second) = (first.load(Ordering::Relaxed), second.load(Ordering::Relaxed));
        if first == 0 {
            return false;
        }
        let pin = self.pins.pin(ENTRY).unwrap();
        let holds = self.sequence.holds(seen);
        if holds {
            assert_eq!(first, second, "a hit of two pieces");
            assert_eq!(self.payload.get(), 7, "a hit without its payload");
        }
        self.pins.unpin(pin);
        if self.parted.load(Ordering::Relaxed) > 0 {
            let mut has_parted = self.writer.lock().unwrap();
            self.sweep_locked(&mut has_parted);
        }
        holds
    }
}

fn check(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    // More where the environment of the test says so, which the builder has read.
    builder.preemption_bound = builder.preemption_bound.max(Some(PREEMPTIONS));
    builder.check(model);
}

#[test]
fn a_payload_outlives_every_hit_and_is_dropped_once_removed() {
    check(|| {
        let cache = Arc::new(Cache::new(0, 1));
        let reader = Arc::clone(&cache);
        let reader = thread::spawn(move || reader.look());
        cache.remove();
        reader.join().unwrap();
        assert_eq!(cache.payload.get(), DROPPED, "nobody dropped the payload");
    });
}

#[test]
fn two_readers_and_a_removal_leave_no_payload_behind() {
    check(|| {
        let cache = Arc::new(Cache::new(0, 1));
        let readers = [Arc::clone(&cache), Arc::clone(&cache)];
        let readers = readers.map(|cache| thread::spawn(move || cache.look()));
        cache.remove();
        for reader in readers {
            reader.join().unwrap();
        }
        assert_eq!(cache.payload.get(), DROPPED, "nobody dropped the payload");
    });
}

#[test]
fn a_hit_during_a_change_is_of_one_piece() {
    check(|| {
        let cache = Arc::new(Cache::new(0, 1));
        let reader = Arc::clone(&cache);
        let reader = thread::spawn(move || {
            reader.look();
            reader.look()
        });
        let lock = cache.writer.lock().unwrap();
        cache.write(2);
        cache.write(3);
        drop(lock);
        reader.join().unwrap();
    });
}
