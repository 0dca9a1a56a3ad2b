//! Broker threads and clients that sleep between bursts: no wake-up is lost on either side.

use std::time::{Duration, Instant};

use gdrd_ring::{Operation, Source, Status};
use gdrd_sim::Provider;

use super::world::{DEPTH, PATIENCE, Side, World, recv, request, silent, write};
use crate::broker::Config;

/// A broker that sleeps whenever a look finds nothing.
fn drowsy() -> World {
    World::with(Config { spin: Duration::ZERO, ..Config::default() })
}

fn burst(left: &mut Side, right: &mut Side, round: u64) {
    let count = 1 + round % u64::from(DEPTH);
    for wr_id in 0..count {
        right.client.submit(&request(wr_id, recv(right.buffer.local(8 * wr_id, 8))));
    }
    right.client.flush();
    for wr_id in 0..count {
        left.buffer.write(8 * wr_id, &(round + wr_id).to_ne_bytes());
        let source = Source::Local(left.buffer.local(8 * wr_id, 8));
        let send = Operation::Send { source, imm: None };
        let last = wr_id + 1 == count;
        left.client.submit(&if last { request(wr_id, send) } else { silent(wr_id, send) });
        if wr_id % 3 == 0 {
            left.client.flush();
        }
    }
    left.client.flush();
    for wr_id in 0..count {
        right.client.expect(wr_id, Status::Success);
        assert_eq!(right.buffer.read(8 * wr_id, 8), (round + wr_id).to_ne_bytes());
    }
    left.client.expect(count - 1, Status::Success);
}

#[test]
fn alternating_idleness_and_bursts_loses_no_wake_up() {
    let world = drowsy();
    let (mut left, mut right) = world.pair(1);
    let before = world.broker.stats().threads[0].sleeps;
    for round in 0..3000 {
        burst(&mut left, &mut right, round);
    }
    assert!(world.broker.stats().threads[0].sleeps > before, "the broker never slept");
}

#[test]
fn clients_on_threads_of_their_own_are_all_served_by_a_drowsy_broker() {
    let world = drowsy();
    std::thread::scope(|scope| {
        for client in 0..3 {
            let (mut left, mut right) = world.pair(10 * (client + 1));
            scope.spawn(move || {
                for round in 0..500 {
                    burst(&mut left, &mut right, round + client);
                }
            });
        }
    });
}

#[test]
fn completions_that_come_while_all_sleep_wake_broker_and_client() {
    let world = drowsy();
    let (mut left, right) = world.pair(1);
    world.host.inject_text("completion on mlx5_0: delay 1ms").expect("a known rule");
    for wr_id in 0..50 {
        left.client.post(&request(wr_id, write(left.buffer.local(0, 8), right.buffer.remote(0))));
        left.client.expect(wr_id, Status::Success);
    }
}

#[test]
fn a_thread_that_spins_leaves_its_cpu_to_a_software_hca_and_not_to_others() {
    let never_sleeps = || Config { spin: Duration::MAX, ..Config::default() };
    for (provider, gives_way) in [(Provider::Rxe, true), (Provider::Mlx5, false)] {
        let world = World::of(provider, never_sleeps());
        let (mut left, mut right) = world.pair(1);
        let yields = || world.broker.stats().threads[0].yields;
        for round in 0..100 {
            burst(&mut left, &mut right, round);
        }
        let began = Instant::now();
        while gives_way && yields() == 0 {
            assert!(began.elapsed() < PATIENCE, "it never gave way");
        }
        assert_eq!(yields() > 0, gives_way, "{provider:?}");
    }
}

#[test]
fn an_idle_broker_makes_no_wake_ups_even_with_receives_posted() {
    let idle = World::new();
    let (mut left, mut right) = idle.pair(1);
    burst(&mut left, &mut right, 15);
    left.client.post(&request(1, recv(left.buffer.local(0, 8))));
    let sleeps = || idle.broker.stats().threads[0].sleeps;
    let busy = World::new();
    let (mut a, mut b) = busy.pair(1);
    // The first rounds may still see it come to rest.
    let came_to_rest = (0..10).any(|_| {
        let before = sleeps();
        for round in 0..200 {
            burst(&mut a, &mut b, round);
        }
        before == sleeps()
    });
    assert!(came_to_rest, "the idle broker woke {} times", sleeps());
}

#[test]
fn queue_pairs_spread_over_threads_and_each_is_served() {
    let threads = vec![crate::broker::Placement::default(); 2];
    let world = World::with(Config { threads, spin: Duration::ZERO, ..Config::default() });
    let mut pairs: Vec<_> = (0..4).map(|pair| world.pair(10 * (pair + 1))).collect();
    for round in 0..100 {
        for (left, right) in &mut pairs {
            burst(left, right, round);
        }
    }
    let stats = world.broker.stats();
    assert_eq!(stats.threads.iter().map(|thread| thread.queue_pairs).collect::<Vec<_>>(), [4, 4]);
}
