//! A client that does its worst ends its own ring at most: no panic, no hang, no more than its depths.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "helpers of tests, whose failures name the line")]

mod driver;

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use driver::{Seen, drive};
use gdrd_ring::{BrokerRing, Completion, CompletionOpcode, Geometry, Queue, Status, Submitted, abi};
use gdrd_shm::{Access, Segment};
use proptest::prelude::*;

/// Corpus of the fuzz target, from the folder of this crate.
const CORPUS: &str = "../../tests/fuzz/corpus/ring";

#[test]
fn every_saved_input_of_the_fuzz_target_passes() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(CORPUS);
    let mut total = Seen::default();
    let mut files = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let seen = drive(&std::fs::read(entry.unwrap().path()).unwrap());
        total.requests += seen.requests;
        total.refused += seen.refused;
        total.corrupt |= seen.corrupt;
        files += 1;
    }
    assert!(files >= 6, "the corpus is there");
    assert!(total.requests > 0 && total.refused > 0 && total.corrupt, "it reaches all three ends: {total:?}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_string_of_hostile_steps_breaks_the_broker(data in prop::collection::vec(any::<u8>(), 0..1024)) {
        drive(&data);
    }

    /// Steps without forged indices go deeper, since those end the ring.
    #[test]
    fn no_string_of_garbage_entries_breaks_the_broker(
        steps in prop::collection::vec((2..10_u8, any::<[u8; 3]>()), 0..512),
    ) {
        let mut data = vec![7, 7];
        for (step, [slot, opcode, flags]) in steps {
            data.push(step);
            if step == 2 {
                data.extend([slot, opcode, flags]);
            }
        }
        drive(&data);
    }
}

/// xorshift64*, Vigna 2016: any generator would do.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
}

#[test]
fn a_client_that_scribbles_over_the_whole_segment_meanwhile_ends_its_ring_only() {
    const RINGS: usize = 50;
    const TAKES: usize = 20_000;
    const SCRIBBLES: usize = 2_000;
    let geometry = Geometry::new(8, 8).unwrap();
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let (mut ended, mut taken) = (0, 0);
    for ring in 0..RINGS {
        let mut broker = BrokerRing::create(geometry).unwrap();
        let client = Segment::map(broker.fd().try_clone_to_owned().unwrap(), Access::ReadWrite).unwrap();
        let stop = AtomicBool::new(false);
        let scribbles = AtomicUsize::new(0);
        let seed = random.next();
        thread::scope(|scope| {
            // However this side ends: a scope waits for its threads, also for one that nobody has told to stop.
            let _stopped = StopOnDrop(&stop);
            scope.spawn(|| scribble(&client, Random(seed), &stop, &scribbles));
            let mut alive = true;
            // However the two are scheduled, both have had their turns.
            while alive && scribbles.load(Ordering::Relaxed) < SCRIBBLES {
                let (requests, open) = consume(&mut broker, TAKES);
                taken += requests;
                alive = open;
            }
            ended += usize::from(!alive);
        });
        // Whether garbage made an impossible index while the broker looked is chance; this one is certain.
        if ended <= ring {
            let head = client.load_u32(abi::COMPLETION_TAIL).unwrap();
            client.write_from(abi::COMPLETION_HEAD, &head.to_ne_bytes()).unwrap();
            let tail = client.load_u32(abi::SUBMISSION_HEAD).unwrap().wrapping_add(1 << 30);
            client.write_from(abi::SUBMISSION_TAIL, &tail.to_ne_bytes()).unwrap();
            ended += usize::from(!consume(&mut broker, TAKES).1);
        }
        assert!(broker.outstanding(Queue::Send) <= 8 && broker.outstanding(Queue::Receive) <= 8);
        broker.close().unwrap();
    }
    assert_eq!(ended, RINGS, "an impossible index ends every ring");
    assert!(taken > RINGS, "some is not: {taken}");
}

/// Sets a flag at the end of its scope, also when that is a panic.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn a_broker_side_that_panics_does_not_leave_the_scribbler_running() {
    let broker = BrokerRing::create(Geometry::new(8, 8).unwrap()).unwrap();
    let client = Segment::map(broker.fd().try_clone_to_owned().unwrap(), Access::ReadWrite).unwrap();
    let (stop, scribbles) = (AtomicBool::new(false), AtomicUsize::new(0));
    let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        thread::scope(|scope| {
            let _stopped = StopOnDrop(&stop);
            scope.spawn(|| scribble(&client, Random(1), &stop, &scribbles));
            panic!("as a failed assertion would");
        })
    }));
    assert!(ended.is_err() && stop.load(Ordering::Relaxed));
}

/// Plausible tails and heads among the garbage, so that not every ring ends at its first look.
fn scribble(client: &Segment, mut random: Random, stop: &AtomicBool, scribbles: &AtomicUsize) {
    while !stop.load(Ordering::Relaxed) {
        scribbles.fetch_add(1, Ordering::Relaxed);
        let value = random.next();
        let place = random.next() % (client.len_bytes() / 8) * 8;
        if place < abi::RINGS_OFFSET {
            let step = u32::try_from(value % 4).unwrap();
            let tail = client.load_u32(abi::SUBMISSION_HEAD).unwrap().wrapping_add(step);
            client.write_from(abi::SUBMISSION_TAIL, &tail.to_ne_bytes()).unwrap();
            let head = client.load_u32(abi::COMPLETION_TAIL).unwrap();
            client.write_from(abi::COMPLETION_HEAD, &head.to_ne_bytes()).unwrap();
        }
        if place >= abi::RINGS_OFFSET || value.is_multiple_of(256) {
            client.write_from(place, &value.to_ne_bytes()).unwrap();
        }
    }
}

/// A broker's loop of bounded length: how many entries it took, and whether the ring is still open.
fn consume(broker: &mut BrokerRing, takes: usize) -> (usize, bool) {
    let mut taken = 0;
    for _ in 0..takes {
        match broker.take() {
            Err(_) => return (taken, false),
            Ok(None) => {}
            Ok(Some(submitted)) => {
                taken += 1;
                let (wr_id, opcode) = match submitted {
                    Submitted::Request(request) => (request.wr_id, CompletionOpcode::of(&request.operation)),
                    Submitted::Refused { wr_id, opcode, .. } => (wr_id, opcode),
                };
                broker.complete(&Completion::new(wr_id, opcode, Status::Success, 1)).unwrap();
                broker.publish().unwrap();
            }
        }
    }
    (taken, true)
}

#[test]
fn a_refused_entry_completes_in_the_queue_that_its_opcode_names() {
    for opcode in 0..=u8::MAX {
        let mut broker = BrokerRing::create(Geometry::new(1, 1).unwrap()).unwrap();
        let client = Segment::map(broker.fd().try_clone_to_owned().unwrap(), Access::ReadWrite).unwrap();
        // A reserved field is set, so that every opcode is refused.
        client.write_from(abi::RINGS_OFFSET, &[opcode, 0, 1]).unwrap();
        client.write_from(abi::SUBMISSION_TAIL, &1_u32.to_ne_bytes()).unwrap();
        let Some(Submitted::Refused { opcode: completed, .. }) = broker.take().unwrap() else {
            panic!("opcode {opcode} was taken")
        };
        let queue = if opcode == abi::OP_RECV { Queue::Receive } else { Queue::Send };
        assert_eq!(completed.queue(), queue);
        assert_eq!(broker.outstanding(queue), 1);
    }
}

#[test]
fn a_client_that_overruns_its_depth_waits_for_itself() {
    let mut broker = BrokerRing::create(Geometry::new(2, 2).unwrap()).unwrap();
    let client = Segment::map(broker.fd().try_clone_to_owned().unwrap(), Access::ReadWrite).unwrap();
    for slot in 0..4 {
        client.write_from(abi::RINGS_OFFSET + slot * 128, &[abi::OP_WRITE]).unwrap();
    }
    client.write_from(abi::SUBMISSION_TAIL, &4_u32.to_ne_bytes()).unwrap();
    assert!(broker.take().unwrap().is_some());
    assert!(broker.take().unwrap().is_some());
    assert_eq!(broker.take(), Ok(None), "two of two are outstanding");
    assert_eq!(broker.prepare_sleep(), Ok(true), "that is no reason to stay awake");
    broker.finish_sleep();
    broker.retire(Queue::Send).unwrap();
    assert_eq!(broker.prepare_sleep(), Ok(false));
    assert!(broker.take().unwrap().is_some());
}

#[test]
fn a_client_that_never_polls_gets_as_many_completions_as_there_are_slots() {
    let mut broker = BrokerRing::create(Geometry::new(2, 2).unwrap()).unwrap();
    let client = Segment::map(broker.fd().try_clone_to_owned().unwrap(), Access::ReadWrite).unwrap();
    for slot in 0..4 {
        client.write_from(abi::RINGS_OFFSET + slot * 128, &[abi::OP_WRITE]).unwrap();
    }
    let serve = |broker: &mut BrokerRing, tail: u32| {
        client.write_from(abi::SUBMISSION_TAIL, &tail.to_ne_bytes()).unwrap();
        let mut served = 0;
        while broker.take().unwrap().is_some() {
            broker.complete(&Completion::new(0, CompletionOpcode::Write, Status::Success, 1)).unwrap();
            broker.publish().unwrap();
            served += 1;
        }
        served
    };
    let served: Vec<i32> = (1..=8).map(|tail| serve(&mut broker, tail)).collect();
    assert_eq!(served, [1, 1, 1, 1, 0, 0, 0, 0], "the completion ring has four slots");
    client.write_from(abi::COMPLETION_HEAD, &3_u32.to_ne_bytes()).unwrap();
    assert_eq!(serve(&mut broker, 8), 3, "three were polled");
}
