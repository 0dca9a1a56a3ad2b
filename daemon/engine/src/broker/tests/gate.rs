//! Model check of the gate: every interleaving that loom can tell apart.

use std::sync::atomic::Ordering;

use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use loom::thread;

use crate::broker::gate::{Atomics, Entry, Gate};

#[derive(Debug)]
struct Loom;

impl Atomics for Loom {
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
        loom::sync::atomic::fence(Ordering::SeqCst);
    }
}

/// What the HCA would touch while a request runs: true from deregistration on.
struct Registration {
    gone: AtomicBool,
}

/// One request as a broker thread runs it; returns whether a waiter must be told.
fn request(gate: &Gate<Loom>, registration: &Registration, generation: u64) -> bool {
    match gate.enter(generation) {
        Entry::Admitted => {
            assert!(!registration.gone.load(Ordering::Relaxed), "an admitted request met a deregistered range");
            gate.leave()
        }
        Entry::Stale => false,
        Entry::StaleAndLast => true,
    }
}

#[test]
fn no_admitted_request_meets_a_registration_that_quiet_retiring_took_away() {
    loom::model(|| {
        let gate = Arc::new(Gate::<Loom>::new(1));
        let generation = gate.publish();
        let registration = Arc::new(Registration { gone: AtomicBool::new(false) });
        let broker = {
            let (gate, registration) = (Arc::clone(&gate), Arc::clone(&registration));
            thread::spawn(move || request(&gate, &registration, generation))
        };
        assert_eq!(gate.retire(), 2);
        let quiet = gate.is_quiet();
        if quiet {
            registration.gone.store(true, Ordering::Relaxed);
        }
        let told = broker.join().expect("the broker thread ends");
        // Either the retirer saw quiet itself, or the request that it saw says when it leaves.
        assert!(quiet || told, "nobody tells the waiter");
    });
}

#[test]
fn of_two_brokers_that_leave_a_retired_slot_one_tells_the_waiter() {
    let mut model = loom::model::Builder::new();
    // More where the environment of the test says so, which the builder has read.
    model.preemption_bound = model.preemption_bound.max(Some(3));
    model.check(|| {
        let gate = Arc::new(Gate::<Loom>::new(1));
        let generation = gate.publish();
        let registration = Arc::new(Registration { gone: AtomicBool::new(false) });
        let brokers: Vec<_> = (0..2)
            .map(|_| {
                let (gate, registration) = (Arc::clone(&gate), Arc::clone(&registration));
                thread::spawn(move || request(&gate, &registration, generation))
            })
            .collect();
        gate.retire();
        let quiet = gate.is_quiet();
        if quiet {
            registration.gone.store(true, Ordering::Relaxed);
        }
        let told = brokers.into_iter().filter(|_| true).map(|broker| broker.join().expect("ends")).filter(|told| *told);
        assert!(quiet || told.count() >= 1, "nobody tells the waiter");
    });
}
