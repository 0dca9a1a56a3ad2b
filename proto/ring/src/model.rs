//! The index protocol and both wake-up handshakes under loom, which runs every interleaving and
//! every value that the C11 memory model lets a load return (bounded by the preemptions below).
//! Slots are loom cells, so an access that the indices do not order is found as a data race.

use std::rc::Rc;
use std::sync::atomic::Ordering;

use loom::cell::Cell;
use loom::sync::atomic::{AtomicU32, fence};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

use crate::bell;
use crate::client::{COMPLETION_NAMES, SUBMISSION_NAMES};
use crate::cursor::{Consumer, Producer, Slots, Word};

/// Preemptions per run that are tried: seconds of work. 6 were tried by hand when this was written.
const PREEMPTIONS: usize = 4;

impl Word for Arc<AtomicU32> {
    fn load(&self, order: Ordering) -> u32 {
        AtomicU32::load(self, order)
    }

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

#[derive(Clone)]
struct Cells(Rc<Vec<Cell<u32>>>);

impl Slots for Cells {
    type Value = u32;

    fn read(&self, index: u32) -> u32 {
        self.0[index as usize % self.0.len()].get()
    }

    fn write(&self, index: u32, value: &u32) {
        self.0[index as usize % self.0.len()].set(*value);
    }
}

type Word32 = Arc<AtomicU32>;
type Pair = (Producer<Word32, Cells>, Consumer<Word32, Cells>);

fn word(value: u32) -> Word32 {
    Arc::new(AtomicU32::new(value))
}

fn ring(capacity: u32, start: u32) -> Pair {
    let slots = Cells(Rc::new((0..capacity).map(|_| Cell::new(0)).collect()));
    let (tail, head) = (word(start), word(start));
    let producer = Producer::new((tail.clone(), head.clone()), slots.clone(), SUBMISSION_NAMES, capacity, start);
    let consumer = Consumer::new((tail, head), slots, COMPLETION_NAMES, capacity, start);
    (producer, consumer)
}

fn check(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    // More where the environment of the test says so, which the builder has read.
    builder.preemption_bound = builder.preemption_bound.max(Some(PREEMPTIONS));
    builder.check(model);
}

/// An eventfd: counts, and wakes who waits.
#[derive(Default)]
struct Event {
    rung: Mutex<bool>,
    changed: Condvar,
}

impl Event {
    fn ring(&self) {
        *self.rung.lock().expect("no thread of a model panics") = true;
        self.changed.notify_one();
    }

    fn wait(&self) {
        let mut rung = self.rung.lock().expect("no thread of a model panics");
        while !*rung {
            rung = self.changed.wait(rung).expect("no thread of a model panics");
        }
        *rung = false;
    }
}

#[test]
fn entries_arrive_whole_in_order_and_slots_are_reused_only_after_they_were_read() {
    check(|| {
        const COUNT: u32 = 3;
        // The indices wrap during the run.
        let (mut producer, mut consumer) = ring(2, u32::MAX - 1);
        let writer = thread::spawn(move || {
            for value in 1..=COUNT {
                while !producer.has_room(1).expect("the consumer is honest") {
                    thread::yield_now();
                }
                producer.stage(&value);
                assert!(producer.publish());
            }
        });
        for expected in 1..=COUNT {
            let value = loop {
                match consumer.take().expect("the producer is honest") {
                    Some(value) => break value,
                    None => thread::yield_now(),
                }
            };
            assert_eq!(value, expected);
        }
        assert_eq!(consumer.take(), Ok(None));
        writer.join().expect("the writer ends");
    });
}

#[test]
fn a_batch_becomes_visible_whole() {
    check(|| {
        let (mut producer, mut consumer) = ring(2, 0);
        let writer = thread::spawn(move || {
            producer.stage(&1);
            producer.stage(&2);
            assert!(producer.publish());
        });
        if let Some(first) = consumer.take().expect("the producer is honest") {
            assert_eq!(first, 1);
            assert_eq!(consumer.take(), Ok(Some(2)));
        }
        writer.join().expect("the writer ends");
    });
}

#[test]
fn a_broker_that_goes_to_sleep_misses_no_submission() {
    check(|| {
        let (mut producer, mut consumer) = ring(2, 0);
        let sleeping = word(0);
        let event = Arc::new(Event::default());
        let (flag, bell_rope) = (sleeping.clone(), event.clone());
        let client = thread::spawn(move || {
            for value in 1..=2 {
                producer.stage(&value);
                if producer.publish() && bell::must_wake(&flag) {
                    bell_rope.ring();
                }
            }
        });
        // A lost wake-up is a deadlock, which loom reports.
        for expected in 1..=2 {
            loop {
                if let Some(value) = consumer.take().expect("the producer is honest") {
                    assert_eq!(value, expected);
                    break;
                }
                bell::announce(&sleeping);
                if consumer.has_next().expect("the producer is honest") {
                    bell::retract(&sleeping);
                } else {
                    event.wait();
                    bell::retract(&sleeping);
                }
            }
        }
        client.join().expect("the client ends");
    });
}

/// futex(2): compares under the kernel's lock, then sleeps.
struct Futex {
    word: Word32,
    queue: Mutex<()>,
    woken: Condvar,
}

impl Futex {
    fn wait(&self, expected: u32) {
        let queue = self.queue.lock().expect("no thread of a model panics");
        if AtomicU32::load(&self.word, Ordering::Relaxed) == expected {
            drop(self.woken.wait(queue).expect("no thread of a model panics"));
        }
    }

    fn wake(&self) {
        drop(self.queue.lock().expect("no thread of a model panics"));
        self.woken.notify_all();
    }
}

#[test]
fn a_client_that_waits_misses_no_completion() {
    waits(true);
}

/// As with tickets, which announce anew and never say that they are awake.
#[test]
fn a_client_that_leaves_its_announcement_standing_misses_no_completion() {
    waits(false);
}

fn waits(retracts: bool) {
    check(move || {
        let (mut producer, mut consumer) = ring(2, 0);
        let waiting = word(0);
        let futex = Arc::new(Futex { word: word(0), queue: Mutex::new(()), woken: Condvar::new() });
        let (flag, waker) = (waiting.clone(), futex.clone());
        let broker = thread::spawn(move || {
            for value in 1..=2 {
                producer.stage(&value);
                if producer.publish() && bell::raise(&flag, &waker.word) {
                    waker.wake();
                }
            }
        });
        for expected in 1..=2 {
            loop {
                let seen = bell::announce_wait(&waiting, &futex.word);
                let polled = consumer.take().expect("the producer is honest");
                if polled.is_none() {
                    futex.wait(seen);
                }
                if retracts {
                    bell::retract(&waiting);
                }
                if let Some(value) = polled {
                    assert_eq!(value, expected);
                    break;
                }
            }
        }
        broker.join().expect("the broker ends");
    });
}

/// The model finds what it is there to find: without the sleeper's fence a wake-up gets lost.
#[test]
#[should_panic(expected = "deadlock")]
fn the_model_catches_a_handshake_without_its_fence() {
    check(|| {
        let (mut producer, mut consumer) = ring(2, 0);
        let sleeping = word(0);
        let event = Arc::new(Event::default());
        let (flag, bell_rope) = (sleeping.clone(), event.clone());
        let client = thread::spawn(move || {
            producer.stage(&1);
            if producer.publish() && bell::must_wake(&flag) {
                bell_rope.ring();
            }
        });
        Word::swap(&sleeping, 1, Ordering::AcqRel);
        if !consumer.has_next().expect("the producer is honest") {
            event.wait();
        }
        client.join().expect("the client ends");
    });
}
