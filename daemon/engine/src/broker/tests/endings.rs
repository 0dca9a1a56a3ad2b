//! How queue pairs, registrations and HCAs end while there is work.

use std::sync::Arc;
use std::sync::mpsc::channel;

use gdrd_hal::QueuePairState;
use gdrd_ring::{Operation, RingError, Source, Status};

use super::world::{DEPTH, PATIENCE, Side, World, connect, recv, request, silent, write};
use crate::broker::{BrokerError, BrokerEvent, Config, HcaIndex};
use crate::{QueuePairId, SlotId};

/// Waits until nothing posted uses the slot of `side`'s buffer.
fn quiesce(side: &Side) {
    let slot = SlotId(side.buffer.slot);
    side.tenant.slots.retire(slot).expect("published");
    let (tell, told) = channel();
    side.tenant.slots.quiesce(slot, move || tell.send(()).expect("waited for")).expect("retired");
    told.recv_timeout(PATIENCE).expect("quiet");
}

#[test]
fn a_failed_request_flushes_what_is_behind_it_in_order_and_all_that_comes_later() {
    let world = World::new();
    let (mut left, right) = world.pair(1);
    left.client.post(&request(100, recv(left.buffer.local(0, 8))));
    let local = left.buffer.local(0, 8);
    left.client.submit(&silent(1, write(local, right.buffer.remote(0))));
    let mut forged = right.buffer.remote(0);
    forged.rkey ^= 0x5555;
    left.client.submit(&silent(2, write(local, forged)));
    left.client.submit(&silent(3, write(local, right.buffer.remote(0))));
    left.client.submit(&request(4, write(local, right.buffer.remote(0))));
    left.client.flush();
    left.client.post(&request(5, write(local, right.buffer.remote(0))));
    let mut sends = Vec::new();
    let mut receives = Vec::new();
    for _ in 0..5 {
        let done = left.client.next();
        match done.wr_id {
            100 => receives.push(done.status),
            wr_id => sends.push((wr_id, done.status)),
        }
    }
    let flushed = Status::WrFlushErr;
    assert_eq!(sends, [(2, Status::RemAccessErr), (3, flushed), (4, flushed), (5, flushed)]);
    assert_eq!(receives, [flushed]);
    left.client.post(&request(6, recv(local)));
    left.client.expect(6, flushed);
    let event = world.events.recv_timeout(PATIENCE).expect("told");
    assert!(matches!(event, BrokerEvent::QueuePairFailed { id: QueuePairId(1), status: Status::RemAccessErr }));
    assert_eq!(left.tenant.slots.in_flight(SlotId(1)), 0);
}

#[test]
fn a_link_that_goes_down_ends_its_queue_pair_and_no_other() {
    let world = World::new();
    let (mut left, right) = world.pair(1);
    let neighbour = world.tenant(1);
    let (mut a, b) = (world.client(&neighbour, 10), world.client(&neighbour, 11));
    connect(&a, &b);
    let buffer = neighbour.buffer(0, 4096);
    world.host.inject_text("hca mlx5_0: link-down port 1").expect("a known rule");
    left.client.post(&request(1, write(left.buffer.local(0, 8), right.buffer.remote(0))));
    for wr_id in 0..100 {
        a.post(&request(wr_id, write(buffer.local(0, 8), buffer.remote(8))));
        a.expect(wr_id, Status::Success);
    }
    left.client.expect(1, Status::RetryExcErr);
    let event = world.events.recv_timeout(PATIENCE).expect("told");
    assert!(matches!(event, BrokerEvent::QueuePairFailed { id: QueuePairId(1), .. }));
    assert!(world.events.try_recv().is_err());
}

#[test]
fn detaching_with_work_in_flight_flushes_it_destroys_the_queue_pair_and_closes_the_ring() {
    let world = World::new();
    let (mut left, right) = world.pair(1);
    world.host.inject_text("hca mlx5_1: link-down port 1").expect("a known rule");
    for wr_id in 0..u64::from(DEPTH) {
        left.client.submit(&silent(wr_id, write(left.buffer.local(0, 8), right.buffer.remote(0))));
        left.client.submit(&request(100 + wr_id, recv(left.buffer.local(0, 8))));
    }
    left.client.flush();
    world.detach(left.client.id);
    assert!(left.client.is_destroyed());
    assert_eq!(left.tenant.slots.in_flight(SlotId(1)), 0);
    assert_eq!(left.tenant.slots.posted_receives(SlotId(1)), 0);
    while let Ok(Some(done)) = left.client.ring.wait(Some(PATIENCE)) {
        assert_ne!(done.status, Status::Success);
    }
    assert_eq!(left.client.ring.wait(Some(PATIENCE)), Err(RingError::Closed));
    assert_eq!(world.broker.stats().queue_pairs.len(), 1);
    world.detach(left.client.id);
}

#[test]
fn detaching_during_bursts_leaves_nothing_counted() {
    let world = World::new();
    for round in 0..40 {
        let id = 10 * (round + 1);
        let (mut left, mut right) = world.pair(id);
        let mut posted = 0;
        // Bursts of every length up to the depth, ended wherever the broker happens to be.
        for wr_id in 0..u64::from(DEPTH).min(round + 1) {
            right.client.submit(&request(wr_id, recv(right.buffer.local(0, 64))));
            let source = Source::Local(left.buffer.local(0, 64));
            left.client.submit(&request(wr_id, Operation::Send { source, imm: None }));
            posted += 1;
        }
        right.client.flush();
        left.client.flush();
        world.detach(left.client.id);
        world.detach(right.client.id);
        assert_eq!(left.tenant.slots.in_flight(SlotId(1)) + right.tenant.slots.in_flight(SlotId(2)), 0);
        for client in [&mut left.client, &mut right.client] {
            let mut ended = 0;
            while let Ok(Some(_)) = client.ring.wait(Some(PATIENCE)) {
                ended += 1;
            }
            assert!(ended <= posted, "{ended} completions for {posted} requests");
            assert!(client.is_destroyed());
        }
    }
    assert!(world.broker.stats().queue_pairs.is_empty());
}

#[test]
fn two_callers_that_detach_one_queue_pair_are_both_told_after_its_end() {
    let world = World::new();
    let (left, _right) = world.pair(1);
    let (tell, told) = channel();
    for _ in 0..2 {
        let tell = tell.clone();
        world.broker.detach(left.client.id, move || tell.send(()).expect("waited for"));
    }
    for _ in 0..2 {
        told.recv_timeout(PATIENCE).expect("told");
        assert!(left.client.is_destroyed());
    }
}

#[test]
fn releasing_a_slot_waits_for_slow_completions_and_ends_no_queue_pair() {
    let world = World::new();
    let (mut left, right) = world.pair(1);
    world.host.inject_text("completion on mlx5_0: delay 5ms times 1").expect("a known rule");
    left.client.post(&silent(1, write(left.buffer.local(0, 8), right.buffer.remote(0))));
    while world.broker.stats().queue_pairs[0].taken == 0 {
        std::thread::yield_now();
    }
    quiesce(&left);
    assert_eq!(world.broker.stats().queue_pairs[0].completed, 1, "quiet before the completion");
    left.client.post(&request(2, write(left.buffer.local(0, 8), right.buffer.remote(0))));
    left.client.expect(2, Status::Stale);
    let fresh = left.tenant.buffer(3, 4096);
    left.client.post(&request(3, write(fresh.local(0, 8), right.buffer.remote(0))));
    left.client.expect(3, Status::Success);
    assert!(world.events.try_recv().is_err());
}

#[test]
fn a_release_that_waits_for_receives_names_their_queue_pairs_and_can_end_them() {
    let world = World::new();
    let (mut left, _right) = world.pair(1);
    let mut second = world.client(&left.tenant, 7);
    let idle = world.client(&left.tenant, 8);
    left.client.post(&request(1, recv(left.buffer.local(0, 8))));
    second.post(&request(2, recv(left.buffer.local(8, 8))));
    let slot = SlotId(left.buffer.slot);
    while left.tenant.slots.posted_receives(slot) < 2 {
        std::thread::yield_now();
    }
    let (tell, told) = channel();
    world.broker.receive_users(&left.tenant.slots, slot, move |ids| tell.send(ids).expect("waited for"));
    assert_eq!(told.recv_timeout(PATIENCE), Ok(vec![QueuePairId(1), QueuePairId(7)]));
    left.tenant.slots.retire(slot).expect("published");
    let (tell, told) = channel();
    left.tenant.slots.quiesce(slot, move || tell.send(()).expect("waited for")).expect("retired");
    world.broker.flush_users(&left.tenant.slots, slot);
    told.recv_timeout(PATIENCE).expect("quiet");
    left.client.expect(1, Status::WrFlushErr);
    second.expect(2, Status::WrFlushErr);
    assert_eq!(idle.control().state().expect("present"), QueuePairState::Init);
}

#[test]
fn an_hca_that_dies_ends_all_work_as_fatal_and_its_queue_pairs_can_be_detached() {
    let world = World::new();
    let (mut left, mut right) = world.pair(1);
    let neighbour = world.tenant(1);
    let (mut a, b) = (world.client(&neighbour, 10), world.client(&neighbour, 11));
    connect(&a, &b);
    let buffer = neighbour.buffer(0, 4096);
    left.client.post(&request(1, recv(left.buffer.local(0, 8))));
    right.client.post(&request(2, recv(right.buffer.local(0, 8))));
    while left.tenant.slots.posted_receives(SlotId(1)) == 0 {
        std::thread::yield_now();
    }
    world.host.inject_text("hca mlx5_0: fatal").expect("a known rule");
    left.client.post(&request(3, write(left.buffer.local(0, 8), right.buffer.remote(0))));
    let mut ended: Vec<_> = (0..2).map(|_| left.client.next()).map(|done| (done.wr_id, done.status)).collect();
    ended.sort_by_key(|(wr_id, _)| *wr_id);
    assert_eq!(ended.iter().map(|(wr_id, _)| *wr_id).collect::<Vec<_>>(), [1, 3]);
    assert_eq!(ended[0].1, Status::FatalErr);
    assert_ne!(ended[1].1, Status::Success);
    let mut told = Vec::new();
    while !matches!(told.last(), Some(BrokerEvent::CompletionQueueFailed { .. })) {
        told.push(world.events.recv_timeout(PATIENCE).expect("told"));
    }
    match told.last() {
        Some(BrokerEvent::CompletionQueueFailed { hca: HcaIndex(0), queue_pairs, .. }) => {
            assert_eq!(*queue_pairs, [QueuePairId(1)]);
        }
        other => panic!("{other:?}"),
    }
    world.detach(left.client.id);
    assert_eq!(left.tenant.slots.in_flight(SlotId(1)), 0);
    a.post(&request(9, write(buffer.local(0, 8), buffer.remote(8))));
    a.expect(9, Status::Success);
    world.broker.forget_hca(HcaIndex(0));
}

#[test]
fn completion_queue_entries_are_promised_once_and_come_back() {
    let world = World::with(Config { cq_entries: 2 * DEPTH, ..Config::default() });
    let tenant = world.tenant(0);
    let first = world.client(&tenant, 1);
    let geometry = gdrd_ring::Geometry::new(1, 0).expect("small");
    let refused = world.broker.reserve(HcaIndex(0), &*world.hcas[0], geometry, None);
    assert!(matches!(refused, Err(BrokerError::Exhausted { wanted: 1, free: 0, .. })));
    world.detach(first.id);
    drop(world.client(&tenant, 2));
}

#[test]
fn shutting_down_ends_everything_and_later_calls_say_so() {
    let world = World::new();
    let (mut left, _right) = world.pair(1);
    left.client.post(&request(1, recv(left.buffer.local(0, 8))));
    let waits = Arc::clone(&left.tenant.slots);
    world.broker.shutdown(true);
    left.client.expect(1, Status::WrFlushErr);
    assert_eq!(left.client.ring.wait(Some(PATIENCE)), Err(RingError::Closed));
    assert!(left.client.is_destroyed());
    assert_eq!(waits.in_flight(SlotId(1)), 0);
    let geometry = gdrd_ring::Geometry::new(1, 0).expect("small");
    let refused = world.broker.reserve(HcaIndex(1), &*world.hcas[1], geometry, None);
    assert!(matches!(refused, Err(BrokerError::ShutDown)));
    world.detach(left.client.id);
}
