//! The index protocol of one ring with one producer and one consumer, in two processes that do not
//! trust each other.
//!
//! Indices run freely modulo 2^32 and are masked only where a slot is touched, so full and empty
//! differ. Each side keeps its own index and its last view of the other's in private memory, and
//! reads the other's word only when that view says full or empty: a cache line moves at most once a
//! batch. What it reads is checked against what an honest peer can publish.
//!
//! Generic over words and slots, so that the model checker runs this very code (`model.rs`).
//!
//! Ordering, by label:
//! - (tail) the producer's release store publishes the slots written before it; the consumer's
//!   acquire load sees them.
//! - (head) the consumer's release store gives the slots read before it back; the producer's
//!   acquire load makes sure that they are overwritten only after.

use std::sync::atomic::{AtomicU32, Ordering, fence};

use gdrd_shm::{SharedSlots, SharedU32};

use crate::error::Corrupt;

/// A word that both sides can reach.
pub(crate) trait Word {
    fn load(&self, order: Ordering) -> u32;
    fn store(&self, value: u32, order: Ordering);
    fn swap(&self, value: u32, order: Ordering) -> u32;
    fn fetch_add(&self, value: u32, order: Ordering) -> u32;
    /// A sequentially consistent fence of the memory model that the word lives in.
    fn full_fence();
}

impl Word for SharedU32 {
    #[inline]
    fn load(&self, order: Ordering) -> u32 {
        AtomicU32::load(self, order)
    }

    #[inline]
    fn store(&self, value: u32, order: Ordering) {
        AtomicU32::store(self, value, order);
    }

    fn swap(&self, value: u32, order: Ordering) -> u32 {
        AtomicU32::swap(self, value, order)
    }

    fn fetch_add(&self, value: u32, order: Ordering) -> u32 {
        AtomicU32::fetch_add(self, value, order)
    }

    fn full_fence() {
        fence(Ordering::SeqCst);
    }
}

/// The array of slots that both sides can reach; any index is valid.
pub(crate) trait Slots {
    type Value;
    fn read(&self, index: u32) -> Self::Value;
    fn write(&self, index: u32, value: &Self::Value);
}

impl<const WORDS: usize> Slots for SharedSlots<WORDS> {
    type Value = [u64; WORDS];

    #[inline]
    fn read(&self, index: u32) -> Self::Value {
        SharedSlots::read(self, index)
    }

    #[inline]
    fn write(&self, index: u32, value: &Self::Value) {
        SharedSlots::write(self, index, value);
    }
}

/// Names of a ring's indices, for errors.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Names {
    pub(crate) tail: &'static str,
    pub(crate) head: &'static str,
}

/// The writing side.
#[derive(Debug)]
pub(crate) struct Producer<W, S> {
    tail_word: W,
    head_word: W,
    slots: S,
    names: Names,
    capacity: u32,
    /// Next slot to write; those from `published` on are not visible yet.
    tail: u32,
    published: u32,
    /// Last head seen.
    head: u32,
}

impl<W: Word, S: Slots> Producer<W, S> {
    /// The producer of a ring that nobody has used since both words were `start`.
    pub(crate) fn new(words: (W, W), slots: S, names: Names, capacity: u32, start: u32) -> Self {
        let (tail_word, head_word) = words;
        Self { tail_word, head_word, slots, names, capacity, tail: start, published: start, head: start }
    }

    /// Slots written and not yet given back, as far as this side has looked.
    #[inline]
    pub(crate) fn occupied(&self) -> u32 {
        self.tail.wrapping_sub(self.head)
    }

    /// Whether at least `wanted` slots are free; looks at the peer's head only if the last view of
    /// it says no.
    #[inline]
    pub(crate) fn has_room(&mut self, wanted: u32) -> Result<bool, Corrupt> {
        if self.fits(wanted) {
            return Ok(true);
        }
        // (head) acquire.
        let head = self.head_word.load(Ordering::Acquire);
        // The consumer can have read only what was published.
        let span = self.published.wrapping_sub(self.head);
        if head.wrapping_sub(self.head) > span {
            return Err(Corrupt { index: self.names.head, found: head, least: self.head, most: self.published });
        }
        self.head = head;
        Ok(self.fits(wanted))
    }

    #[inline]
    fn fits(&self, wanted: u32) -> bool {
        u64::from(self.occupied()) + u64::from(wanted) <= u64::from(self.capacity)
    }

    /// Writes the next slot, invisible until [`Producer::publish`]. The caller has made sure of
    /// room.
    #[inline]
    pub(crate) fn stage(&mut self, value: &S::Value) {
        debug_assert!(self.occupied() < self.capacity, "room was asked for");
        self.slots.write(self.tail, value);
        self.tail = self.tail.wrapping_add(1);
    }

    /// Makes all that is staged visible; false if nothing was.
    pub(crate) fn publish(&mut self) -> bool {
        if self.published == self.tail {
            return false;
        }
        // (tail) release.
        self.tail_word.store(self.tail, Ordering::Release);
        self.published = self.tail;
        true
    }
}

/// The reading side.
#[derive(Debug)]
pub(crate) struct Consumer<W, S> {
    tail_word: W,
    head_word: W,
    slots: S,
    names: Names,
    capacity: u32,
    /// Next slot to read.
    head: u32,
    /// Last tail seen.
    tail: u32,
}

impl<W: Word, S: Slots> Consumer<W, S> {
    /// The consumer of a ring that nobody has used since both words were `start`.
    pub(crate) fn new(words: (W, W), slots: S, names: Names, capacity: u32, start: u32) -> Self {
        let (tail_word, head_word) = words;
        Self { tail_word, head_word, slots, names, capacity, head: start, tail: start }
    }

    /// Whether there is a slot to read; looks at the peer's tail only if the last view of it is
    /// used up.
    #[inline]
    pub(crate) fn has_next(&mut self) -> Result<bool, Corrupt> {
        if self.head != self.tail {
            return Ok(true);
        }
        // (tail) acquire.
        let tail = self.tail_word.load(Ordering::Acquire);
        // All seen before has been read, so the least is `head` and the most is one lap more.
        if tail.wrapping_sub(self.head) > self.capacity {
            return Err(Corrupt {
                index: self.names.tail,
                found: tail,
                least: self.head,
                most: self.head.wrapping_add(self.capacity),
            });
        }
        self.tail = tail;
        Ok(self.head != self.tail)
    }

    /// Copies the next slot out, once, and gives it back.
    #[inline]
    pub(crate) fn take(&mut self) -> Result<Option<S::Value>, Corrupt> {
        if !self.has_next()? {
            return Ok(None);
        }
        let value = self.slots.read(self.head);
        self.head = self.head.wrapping_add(1);
        // (head) release. At every slot: the producer looks only when it finds the ring full.
        self.head_word.store(self.head, Ordering::Release);
        Ok(Some(value))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use gdrd_shm::Segment;

    use super::*;

    const NAMES: Names = Names { tail: "tail", head: "head" };
    const CAPACITY: u32 = 4;
    const TAIL: u64 = 0;
    const HEAD: u64 = 128;
    const SLOTS: u64 = 256;

    type Shared = SharedSlots<1>;

    struct Ring {
        segment: Arc<Segment>,
        producer: Producer<SharedU32, Shared>,
        consumer: Consumer<SharedU32, Shared>,
    }

    fn ring(start: u32) -> Ring {
        let segment = Arc::new(Segment::create("gdrd-test", 4096).unwrap());
        let words = || (SharedU32::new(&segment, TAIL).unwrap(), SharedU32::new(&segment, HEAD).unwrap());
        let slots = || SharedSlots::new(&segment, SLOTS, CAPACITY).unwrap();
        let (tail, head) = words();
        Word::store(&tail, start, Ordering::Relaxed);
        Word::store(&head, start, Ordering::Relaxed);
        let producer = Producer::new(words(), slots(), NAMES, CAPACITY, start);
        let consumer = Consumer::new(words(), slots(), NAMES, CAPACITY, start);
        Ring { segment, producer, consumer }
    }

    fn forge(ring: &Ring, offset: u64, value: u32) {
        ring.segment.atomic_u32(offset).unwrap().store(value, Ordering::Release);
    }

    #[test]
    fn indices_wrap_without_losing_an_entry() {
        let mut ring = ring(u32::MAX - 5);
        let mut expected = 0;
        let mut sent = 0;
        while expected < 40 {
            while ring.producer.has_room(1).unwrap() {
                ring.producer.stage(&[sent]);
                sent += 1;
            }
            assert!(ring.producer.publish());
            assert!(!ring.producer.publish(), "nothing new");
            assert_eq!(ring.producer.occupied(), CAPACITY);
            for _ in 0..3 {
                assert_eq!(ring.consumer.take(), Ok(Some([expected])));
                expected += 1;
            }
        }
    }

    #[test]
    fn room_counts_what_is_wanted_at_once() {
        let mut ring = ring(u32::MAX);
        ring.producer.stage(&[1]);
        assert_eq!(ring.producer.has_room(3), Ok(true));
        assert_eq!(ring.producer.has_room(4), Ok(false));
        assert_eq!(ring.producer.has_room(u32::MAX), Ok(false));
    }

    #[test]
    fn only_a_tail_within_one_lap_is_believed() {
        for start in [0, 7, u32::MAX - 1] {
            for ahead in (0..=CAPACITY + 2).chain([u32::MAX, u32::MAX / 2, u32::MAX / 2 + 1, u32::MAX - CAPACITY]) {
                let mut ring = ring(start);
                let tail = start.wrapping_add(ahead);
                forge(&ring, TAIL, tail);
                let found = ring.consumer.has_next();
                match ahead <= CAPACITY {
                    true => assert_eq!(found, Ok(ahead > 0)),
                    false => assert_eq!(
                        found,
                        Err(Corrupt { index: "tail", found: tail, least: start, most: start.wrapping_add(CAPACITY) })
                    ),
                }
            }
        }
    }

    #[test]
    fn a_tail_that_falls_back_is_found_before_anything_is_read_twice() {
        let mut ring = ring(0);
        forge(&ring, TAIL, 2);
        assert!(ring.consumer.take().unwrap().is_some());
        forge(&ring, TAIL, 1);
        assert!(ring.consumer.take().unwrap().is_some(), "seen before the fall");
        assert_eq!(ring.consumer.take().unwrap_err().index, "tail");
    }

    #[test]
    fn only_a_head_between_the_last_one_and_the_published_tail_is_believed() {
        for start in [0, u32::MAX - 1] {
            for ahead in [0, 1, 2, 3, 4, 5, u32::MAX, 1 << 31] {
                let mut ring = ring(start);
                ring.producer.stage(&[0]);
                ring.producer.stage(&[0]);
                ring.producer.publish();
                ring.producer.stage(&[0]);
                let head = start.wrapping_add(ahead);
                forge(&ring, HEAD, head);
                match ahead <= 2 {
                    true => assert_eq!(ring.producer.has_room(2), Ok(ahead > 0)),
                    false => assert_eq!(ring.producer.has_room(2).unwrap_err().found, head),
                }
            }
        }
    }
}
