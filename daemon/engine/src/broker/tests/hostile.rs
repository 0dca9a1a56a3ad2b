//! Clients that break the rules: nothing happens to their neighbours, or to the daemon.

use std::sync::atomic::Ordering;

use gdrd_ring::{Completion, Status, abi};
use gdrd_ring::{InlineData, Operation, Source};
use rand::rngs::StdRng;
use rand::{Rng, RngCore, SeedableRng};

use super::world::{Buffer, Client, DEPTH, PATIENCE, Side, World, recv, request, write};
use crate::SlotId;
use crate::broker::BrokerEvent;

const CAPACITY: u32 = 2 * DEPTH;
const ENTRY_BYTES: usize = 8 * abi::SUBMISSION_WORDS;

/// A client that writes its segment itself.
struct Raw {
    client: Client,
    tail: u32,
}

impl Raw {
    fn new(client: Client) -> Self {
        Self { client, tail: 0 }
    }

    fn word(&self, offset: u64) -> &std::sync::atomic::AtomicU32 {
        self.client.ring.segment().atomic_u32(offset).expect("in range")
    }

    fn taken(&self) -> u32 {
        self.word(abi::SUBMISSION_HEAD).load(Ordering::Acquire)
    }

    fn put(&mut self, entry: &[u8; ENTRY_BYTES]) {
        let slot = u64::from(self.tail % CAPACITY);
        let offset = abi::RINGS_OFFSET + slot * ENTRY_BYTES as u64;
        self.client.ring.segment().write_from(offset, entry).expect("in range");
        self.tail = self.tail.wrapping_add(1);
    }

    fn publish(&self) {
        self.word(abi::SUBMISSION_TAIL).store(self.tail, Ordering::Release);
        self.client.knock();
    }
}

fn bytes_of(words: [u64; abi::SUBMISSION_WORDS]) -> [u8; ENTRY_BYTES] {
    let mut bytes = [0; ENTRY_BYTES];
    for (chunk, word) in bytes.chunks_exact_mut(8).zip(words) {
        chunk.copy_from_slice(&word.to_ne_bytes());
    }
    bytes
}

/// One checked write of the neighbours.
fn neighbours_work(left: &mut Side, right: &Side, round: u64) {
    let payload = round.to_ne_bytes();
    let source = Source::Inline(InlineData::new(&payload).expect("short"));
    let operation = Operation::Write { source, remote: right.buffer.remote(64), imm: None };
    left.client.post(&request(round, operation));
    left.client.expect(round, Status::Success);
    assert_eq!(right.buffer.read(64, 8), payload);
}

/// An entry that is garbage all over, or an honest one with some of its bytes changed.
fn entry(random: &mut StdRng, own: &Buffer, peer: &Buffer) -> [u8; ENTRY_BYTES] {
    let local = own.local(random.random_range(0..70_000), random.random_range(0..200));
    let remote = peer.remote(random.random_range(0..70_000));
    let honest = match random.random_range(0..5) {
        0 => write(local, remote),
        1 => recv(local),
        2 => Operation::Read { local, remote },
        3 => Operation::Send { source: Source::Local(local), imm: Some(random.random()) },
        _ => Operation::Flush { remote, len_bytes: random.random() },
    };
    let mut bytes = bytes_of(request(random.random(), honest).encode().expect("well formed"));
    match random.random_range(0..3) {
        0 => random.fill_bytes(&mut bytes),
        1 => {
            for _ in 0..random.random_range(1..4) {
                let at = random.random_range(0..bytes.len());
                bytes[at] = random.random();
            }
        }
        _ => {}
    }
    bytes
}

/// Attacks until the broker ends the ring or `steps` are over; whether it ended the ring.
fn attack(random: &mut StdRng, world: &World, seed: u64, steps: u32, neighbours: &mut (Side, Side)) -> bool {
    let id = 1000 + 2 * seed;
    let (attacker, peer) = world.pair(id);
    let mut raw = Raw::new(attacker.client);
    let own = (attacker.tenant, attacker.buffer);
    for step in 0..steps {
        for _ in 0..random.random_range(0..CAPACITY) {
            raw.put(&entry(random, &own.1, &peer.buffer));
        }
        match random.random_range(0..10) {
            0 => raw.word(abi::SUBMISSION_TAIL).store(random.random(), Ordering::Release),
            1 => raw.word(abi::COMPLETION_HEAD).store(random.random(), Ordering::Release),
            2 => {
                let offset = random.random_range(0..abi::RINGS_OFFSET / 4) * 4;
                raw.word(offset).store(random.random(), Ordering::Release);
            }
            _ => {
                // What an honest client may publish, all completions read.
                let read = raw.word(abi::COMPLETION_TAIL).load(Ordering::Acquire);
                raw.word(abi::COMPLETION_HEAD).store(read, Ordering::Release);
                raw.tail = raw.tail.min(raw.taken().saturating_add(CAPACITY));
                raw.publish();
            }
        }
        raw.client.knock();
        neighbours_work(&mut neighbours.0, &neighbours.1, u64::from(step));
    }
    for ended in [raw.client.id, peer.client.id] {
        world.detach(ended);
    }
    assert_eq!(own.0.slots.in_flight(SlotId(own.1.slot)), 0, "seed {seed}");
    assert_eq!(peer.tenant.slots.in_flight(SlotId(peer.buffer.slot)), 0, "seed {seed}");
    let is_ours = |event: BrokerEvent| matches!(event, BrokerEvent::RingCorrupt { id, .. } if id == raw.client.id);
    world.events.try_iter().any(is_ours)
}

#[test]
fn garbage_in_a_ring_ends_at_most_its_own_queue_pair() {
    let world = World::new();
    let mut neighbours = world.pair(1);
    let mut ended = 0;
    for seed in 0..60 {
        let mut random = StdRng::seed_from_u64(seed);
        ended += u32::from(attack(&mut random, &world, seed, 20, &mut neighbours));
    }
    assert!(ended > 10, "the attacks should reach impossible indices, {ended} did");
    assert!(ended < 60, "the attacks should also reach the checks behind the indices, {ended} ended at once");
    neighbours_work(&mut neighbours.0, &neighbours.1, 1);
}

#[test]
fn an_impossible_index_closes_the_ring_and_tells_the_engine() {
    let world = World::new();
    let (mut left, right) = world.pair(1);
    let tenant = world.tenant(0);
    let mut raw = Raw::new(world.client(&tenant, 9));
    raw.tail = CAPACITY + 1;
    raw.publish();
    match world.events.recv_timeout(PATIENCE).expect("told") {
        BrokerEvent::RingCorrupt { id, corrupt } => assert_eq!((id, corrupt.found), (raw.client.id, CAPACITY + 1)),
        other => panic!("{other:?}"),
    }
    assert_eq!(raw.word(abi::STATE).load(Ordering::Acquire), abi::STATE_CORRUPT);
    neighbours_work(&mut left, &right, 1);
    world.detach(raw.client.id);
}

#[test]
fn a_client_that_never_reads_its_completions_waits_alone_and_loses_nothing() {
    let world = World::new();
    let (mut left, right) = world.pair(1);
    let (attacker, peer) = world.pair(100);
    let mut raw = Raw::new(attacker.client);
    let total = 5 * CAPACITY;
    let entry_of = |number: u32| {
        let operation = write(attacker.buffer.local(0, 8), peer.buffer.remote(0));
        bytes_of(request(u64::from(number), operation).encode().expect("well formed"))
    };
    let mut offered = 0;
    let mut offer = |raw: &mut Raw| {
        while offered < total && raw.tail.wrapping_sub(raw.taken()) < CAPACITY {
            raw.put(&entry_of(offered));
            offered += 1;
        }
        raw.publish();
    };
    offer(&mut raw);
    // One more may be copied out and held back.
    while raw.taken() < CAPACITY {
        std::thread::yield_now();
    }
    for round in 0..100 {
        offer(&mut raw);
        neighbours_work(&mut left, &right, round);
    }
    assert!(raw.taken() <= CAPACITY + 1, "{} taken without room for their completions", raw.taken());
    let mut next = 0;
    while next < total {
        while let Some(Completion { wr_id, status, .. }) = raw.client.ring.poll().expect("sound") {
            assert_eq!((wr_id, status), (u64::from(next), Status::Success));
            next += 1;
        }
        offer(&mut raw);
    }
}

#[test]
fn a_doorbell_that_would_block_its_writer_is_nothing_to_the_broker() {
    let world = World::new();
    let (mut left, right) = world.pair(1);
    // An eventfd at its maximum blocks every writer, one at zero every reader (eventfd(2)).
    rustix::io::write(&left.client.doorbell, &(u64::MAX - 1).to_ne_bytes()).expect("the first write fits");
    for wr_id in 0..100 {
        let mut count = [0; 8];
        if wr_id % 2 == 1 {
            rustix::io::read(&left.client.doorbell, &mut count).expect("readable");
            left.client.knock();
        }
        left.client.submit(&request(wr_id, write(left.buffer.local(0, 8), right.buffer.remote(0))));
        if left.client.ring.flush() == gdrd_ring::Wake::Needed {
            // At its maximum the client cannot knock either, but by draining it first.
            rustix::io::read(&left.client.doorbell, &mut count).expect("readable");
            left.client.knock();
        }
        left.client.expect(wr_id, Status::Success);
    }
}
