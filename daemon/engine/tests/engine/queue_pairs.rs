//! Queue pairs over leases: bytes that move, and what ends with what.

use std::time::Duration;

use gdrd_engine::{
    AcquireRequest, ErrorKind, MemoryPlace, ProbeOutcome, QueuePairRequest, QueuePairState, QueuePairType,
    SessionEvent, Viewer,
};
use gdrd_ring::{Operation, Source, Status};
use gdrd_sim::{Provider, SimHca};

use crate::wire::{Client, local, remote, wanted, write};
use crate::world::{MIB, World, config, hca, next, peer, read, request};

/// A tenant with 2 MiB on GPU0, and another with 2 MiB on GPU1, connected from mlx5_0 to mlx5_2.
struct Pair {
    world: World,
    near: Side,
    far: Side,
}

struct Side {
    session: gdrd_engine::SessionId,
    lease: gdrd_engine::LeaseInfo,
    memory: std::os::fd::OwnedFd,
    client: Client,
}

fn side(world: &World, uid: u32, gpu: &str, hca: &str) -> Side {
    let session = world.session(uid);
    let (lease, memory) = world.try_acquire(session, request(gpu, 2 * MIB)).expect("a buffer").keep();
    Side { session, lease, memory, client: Client::new(world, session, hca) }
}

fn pair_with(config: gdrd_engine::EngineConfig) -> Pair {
    let world = World::with(config);
    let (near, far) = (side(&world, 1, "GPU0", "mlx5_0"), side(&world, 2, "GPU1", "mlx5_2"));
    Client::connect(&world, (near.session, &near.client), (far.session, &far.client));
    Pair { world, near, far }
}

fn pair() -> Pair {
    pair_with(config())
}

#[test]
fn a_write_moves_bytes_between_leases_of_two_tenants() {
    let Pair { world: _world, mut near, far } = pair();
    let bytes: Vec<u8> = (0..=255).cycle().take(64 << 10).collect();
    crate::world::write(&near.memory, 4096, &bytes);
    near.client.post(1, write(local(&near.lease, "mlx5_0", 4096, 64 << 10), remote(&far.lease, "mlx5_2", 8192)));
    near.client.expect(1, Status::Success);
    assert_eq!(read(&far.memory, 128 << 10)[8192..8192 + bytes.len()], bytes);
}

#[test]
fn the_rate_of_a_rule_holds_its_tenant_back_and_loses_nothing() {
    let mut config = config();
    config.policy.leases[0].traffic.operations_per_s = 200;
    let Pair { world, mut near, far } = pair_with(config);
    // The rate has room for two at once, so most of these wait in the ring.
    for wr_id in 0..10 {
        near.client.post(wr_id, write(local(&near.lease, "mlx5_0", 0, 64), remote(&far.lease, "mlx5_2", 0)));
    }
    for wr_id in 0..10 {
        near.client.expect(wr_id, Status::Success);
    }
    assert!(world.stat("gdrd_broker_throttled_total") > 0);
}

#[test]
fn a_stale_slot_completes_as_stale_and_the_queue_pair_lives_on() {
    let Pair { world, mut near, far } = pair();
    let old = near.lease.clone();
    world.release(near.session, old.id);
    near.client.post(1, write(local(&old, "mlx5_0", 0, 64), remote(&far.lease, "mlx5_2", 0)));
    near.client.expect(1, Status::Stale);
    world.settle();
    // The pool lends the same memory and slot again: the old generation stays stale.
    let (lease, _memory) = world.acquire(near.session).keep();
    assert_eq!(lease.registrations[0].slot, old.registrations[0].slot);
    near.client.post(2, write(local(&old, "mlx5_0", 0, 64), remote(&far.lease, "mlx5_2", 0)));
    near.client.expect(2, Status::Stale);
    near.client.post(3, write(local(&lease, "mlx5_0", 0, 64), remote(&far.lease, "mlx5_2", 0)));
    near.client.expect(3, Status::Success);
}

#[test]
fn a_ready_buffer_that_nobody_holds_cannot_be_named() {
    let mut config = config();
    config.pool.ready_target_per_class = 4;
    let Pair { world, mut near, far } = pair_with(config);
    world.settle();
    let held = near.lease.registrations[0].slot.0;
    for slot in (0..10).filter(|slot| *slot != held) {
        for generation in 0..3 {
            let mut span = local(&near.lease, "mlx5_0", 0, 64);
            span.slot = slot;
            span.generation = generation;
            near.client.post(7, write(span, remote(&far.lease, "mlx5_2", 0)));
            assert!(matches!(near.client.next().status, Status::Stale | Status::Refused));
        }
    }
}

#[test]
fn a_peer_cannot_write_to_a_released_buffer() {
    let Pair { world, mut near, far } = pair();
    let target = remote(&far.lease, "mlx5_2", 0);
    world.release(far.session, far.lease.id);
    world.settle();
    near.client.post(1, write(local(&near.lease, "mlx5_0", 0, 64), target));
    near.client.expect(1, Status::RemAccessErr);
}

#[test]
fn a_release_with_posted_receives_is_refused_and_names_the_queue_pair() {
    let Pair { world, mut near, mut far } = pair();
    far.client.post(1, Operation::Recv { local: local(&far.lease, "mlx5_2", 0, 4096) });
    // The receive is taken by the broker when a later request has completed.
    let mut bad = local(&far.lease, "mlx5_2", 0, 8);
    bad.generation = 0;
    far.client.post(2, write(bad, remote(&near.lease, "mlx5_0", 0)));
    far.client.expect(2, Status::Stale);
    let refused = world.engine.release(far.session, far.lease.id, None).expect_err("a receive is posted");
    assert_eq!((refused.kind(), refused.reason()), (ErrorKind::FailedPrecondition, "RECEIVES_POSTED"));
    assert!(refused.to_string().contains(&format!("queue pair {}", far.client.info.id)), "{refused}");
    near.client.post(1, Operation::Send { source: Source::Local(local(&near.lease, "mlx5_0", 0, 64)), imm: Some(3) });
    far.client.expect(1, Status::Success);
    near.client.expect(1, Status::Success);
    world.engine.release(far.session, far.lease.id, None).expect("the receive is done");
}

#[test]
fn the_end_of_a_session_flushes_posted_receives_and_gives_everything_back() {
    let Pair { world, near, mut far } = pair();
    far.client.post(1, Operation::Recv { local: local(&far.lease, "mlx5_2", 0, 4096) });
    world.engine.close_session(far.session, "test");
    world.until("the tenant to go", || world.stat("gdrd_tenants") == 1);
    assert_eq!(world.gpu_used(1), 0);
    assert_eq!(world.stat("gdrd_queue_pairs"), 1);
    world.engine.close_session(near.session, "test");
    world.until("the other to go", || world.stat("gdrd_tenants") == 0);
}

#[test]
fn a_send_that_nobody_receives_delays_a_release_only_by_the_drain() {
    let mut config = config();
    config.timeouts.drain = Duration::from_millis(20);
    let Pair { world, mut near, .. } = pair_with(config);
    near.client.post(1, Operation::Send { source: Source::Local(local(&near.lease, "mlx5_0", 0, 64)), imm: None });
    world.until("the send to be taken", || world.stat("gdrd_requests_taken_total") > 0);
    world.release(near.session, near.lease.id);
    near.client.expect(1, Status::WrFlushErr);
    world.settle();
    assert_eq!(world.stat("gdrd_drains_overdue_total"), 1);
    let again = world.acquire(near.session).keep().0;
    assert_eq!(again.registrations[0].slot, near.lease.registrations[0].slot);
    world.engine.close_session(near.session, "test");
}

#[test]
fn queue_pairs_are_listed_connected_once_and_destroyed() {
    let Pair { world, near, far } = pair();
    let listed = |uid| world.engine.list_queue_pairs(&Viewer::Peer(peer(uid)), None, 0).expect("a list").queue_pairs;
    let mine = listed(1);
    assert_eq!(mine.len(), 1);
    assert_eq!((mine[0].id, mine[0].state), (near.client.info.id, QueuePairState::Rts));
    assert_eq!(listed(0).len(), 2);
    let again = world.engine.connect_queue_pair(near.session, near.client.info.id, far.client.info.endpoint.clone());
    assert_eq!(again.wait().expect_err("connected").reason(), "QUEUE_PAIR_STATE");
    let foreign = world.engine.destroy_queue_pair(near.session, far.client.info.id).wait().expect_err("not theirs");
    assert_eq!(foreign.reason(), "QUEUE_PAIR_UNKNOWN");
    world.engine.destroy_queue_pair(near.session, near.client.info.id).wait().expect("ours");
    assert!(listed(1).is_empty() && near.client.ring.is_closed());
    let gone = world.engine.destroy_queue_pair(near.session, near.client.info.id).wait().expect_err("gone");
    assert_eq!(gone.reason(), "QUEUE_PAIR_UNKNOWN");
}

#[test]
fn a_queue_pair_that_fails_is_told_to_its_session() {
    let world = World::new();
    let mut opened = world.open_session(1);
    let session = opened.session;
    let (lease, _memory) = world.acquire(session).keep();
    let mut near = Client::new(&world, session, "mlx5_0");
    let far = side(&world, 2, "GPU1", "mlx5_2");
    Client::connect(&world, (session, &near), (far.session, &far.client));
    let mut bad = remote(&far.lease, "mlx5_2", 0);
    bad.rkey ^= 0x00ff_ff00;
    near.post(1, write(local(&lease, "mlx5_0", 0, 64), bad));
    near.expect(1, Status::RemAccessErr);
    let told = std::cell::RefCell::new(None);
    world.until("the failure to be told", || {
        *told.borrow_mut() = next(&mut opened.events);
        told.borrow().is_some()
    });
    let told = told.into_inner();
    assert!(matches!(&told, Some(SessionEvent::QueuePairFailed { queue_pair, .. }) if *queue_pair == near.info.id));
}

#[test]
fn a_queue_pair_whose_address_leaves_the_table_fails_with_that_reason_and_others_go_on() {
    let world = World::new();
    let mut opened = world.open_session(1);
    let (session, far) = (opened.session, side(&world, 2, "GPU1", "mlx5_2"));
    let mut moved = Client::new(&world, session, "mlx5_0");
    Client::connect(&world, (session, &moved), (far.session, &far.client));
    let mut stays = Client::new(&world, session, "mlx5_1");
    let peer = Client::new(&world, far.session, "mlx5_2");
    Client::connect(&world, (session, &stays), (far.session, &peer));
    let (lease, _) = world.acquire(session).keep();
    // It only waits for its peer.
    moved.post(1, Operation::Recv { local: local(&lease, "mlx5_0", 0, 8) });
    world.sim.inject_text("hca mlx5_0: gid-change port 1").expect("a script");
    moved.expect(1, Status::WrFlushErr);
    let mut told = None;
    world.until("the failure to be told", || {
        told = told.take().or_else(|| next(&mut opened.events));
        told.is_some()
    });
    let Some(SessionEvent::QueuePairFailed { queue_pair, message }) = told else { panic!("{told:?}") };
    assert_eq!(queue_pair, moved.info.id);
    assert!(message.contains("row 3") && message.contains("mlx5_0 port 1"), "{message}");
    stays.post(2, write(local(&lease, "mlx5_1", 0, 8), remote(&far.lease, "mlx5_2", 0)));
    stays.expect(2, Status::Success);
}

#[test]
fn queue_pairs_are_bounded_by_session_and_tenant() {
    let mut config = config();
    config.limits.max_queue_pairs_per_session = 2;
    config.policy.leases[0].quota.max_queue_pairs = 3;
    let world = World::with(config);
    let (one, two) = (world.session(1), world.session(1));
    let _some = (Client::new(&world, one, "mlx5_0"), Client::new(&world, one, "mlx5_1"));
    let refused = |session| world.engine.create_queue_pair(session, wanted("mlx5_0")).wait().expect_err("too many");
    assert_eq!(refused(one).reason(), "LIMIT_QUEUE_PAIRS");
    let third = Client::new(&world, two, "mlx5_0");
    assert_eq!(refused(two).reason(), "QUOTA_QUEUE_PAIRS");
    world.engine.destroy_queue_pair(two, third.info.id).wait().expect("ours");
    let _again = Client::new(&world, two, "mlx5_0");
}

#[test]
fn a_queue_pair_that_nobody_takes_is_destroyed() {
    let world = World::new();
    let session = world.session(1);
    drop(world.engine.create_queue_pair(session, wanted("mlx5_0")).wait().expect("a queue pair"));
    world.until("it to go", || world.stat("gdrd_queue_pairs") == 0);
    world.sim.inject_text("create-qp: delay 20ms times 1").expect("a script");
    drop(world.engine.create_queue_pair(session, wanted("mlx5_0")));
    world.until("it to go", || world.stat("gdrd_queue_pairs") == 0);
    world.sim.inject_text("create-qp: fail enomem times 1").expect("a script");
    let refused = world.engine.create_queue_pair(session, wanted("mlx5_0")).wait().expect_err("the hca is full");
    assert_eq!(refused.kind(), ErrorKind::ResourceExhausted);
}

#[test]
fn a_session_that_ends_while_its_queue_pair_is_made_or_connected_leaves_nothing() {
    let world = World::new();
    let go_on = || world.sim.inject_text("hca mlx5_0: go-on").expect("a script");
    for script in ["create-qp on mlx5_0: hang", "create-qp: fail eio times 1"] {
        let session = world.session(1);
        world.sim.inject_text(script).expect("a script");
        let call = world.engine.create_queue_pair(session, wanted("mlx5_0"));
        world.engine.close_session(session, "test");
        assert!(call.wait().is_err());
        go_on();
        world.until("everything to go", || world.stat("gdrd_tenants") == 0);
    }
    let session = world.session(1);
    let client = Client::new(&world, session, "mlx5_0");
    world.sim.inject_text("connect on mlx5_0: hang").expect("a script");
    let call = world.engine.connect_queue_pair(session, client.info.id, client.info.endpoint.clone());
    world.engine.close_session(session, "test");
    assert!(call.wait().is_err());
    go_on();
    world.until("everything to go", || world.stat("gdrd_tenants") == 0);
    assert!(client.ring.is_closed());
}

#[test]
fn a_bad_endpoint_is_the_callers_fault_and_another_may_follow() {
    let Pair { world, near, .. } = pair();
    let client = Client::new(&world, near.session, "mlx5_0");
    let mut remote = client.info.endpoint.clone();
    remote.mtu_bytes = 777;
    let refused =
        world.engine.connect_queue_pair(near.session, client.info.id, remote).wait().expect_err("no such mtu");
    assert_eq!(refused.kind(), ErrorKind::InvalidArgument);
    let itself = client.info.endpoint.clone();
    world.engine.connect_queue_pair(near.session, client.info.id, itself).wait().expect("reachable");
}

#[test]
fn depths_and_devices_out_of_range_are_refused() {
    let world = World::new();
    let session = world.session(1);
    let refused = |change: &dyn Fn(&mut gdrd_engine::QueuePairRequest)| {
        let mut wanted = wanted("mlx5_0");
        change(&mut wanted);
        world.engine.create_queue_pair(session, wanted).wait().expect_err("out of range").reason()
    };
    assert_eq!(refused(&|w| w.send_depth = 1 << 20), "BAD_ARGUMENT");
    assert_eq!(refused(&|w| w.hca = "mlx5_9".to_owned()), "HCA_UNKNOWN");
    assert_eq!(refused(&|w| w.hca = String::new()), "BAD_ARGUMENT");
    assert_eq!(refused(&|w| w.port_num = 9), "BAD_ARGUMENT");
    let mut near_gpu = wanted("");
    near_gpu.gpu = "GPU1".to_owned();
    let (info, ..) = world.engine.create_queue_pair(session, near_gpu).wait().expect("a queue pair").keep();
    assert_eq!(&*info.hca, "mlx5_2");
}

#[test]
fn providers_that_cannot_connect_refuse_queue_pairs_with_the_reason_and_lend_buffers_all_the_same() {
    for (provider, reason) in [(Provider::Siw, "rdma_cm"), (Provider::Efa, "no RC")] {
        let capabilities = provider.capabilities();
        let hcas = (0..3).map(|index| SimHca { capabilities: capabilities.clone(), ..hca(index) });
        let world = World::over(config(), hcas.collect());
        let session = world.session(1);
        for qp_type in [QueuePairType::Rc, QueuePairType::Ud] {
            let wanted = QueuePairRequest { qp_type, ..wanted("mlx5_0") };
            let refused = world.engine.create_queue_pair(session, wanted).wait().expect_err("it cannot");
            assert_eq!((refused.reason(), refused.kind()), ("UNSUPPORTED", ErrorKind::Unavailable), "{refused}");
            assert!(refused.to_string().contains(reason), "{refused}");
        }
        let near_gpu = request("GPU0", 2 * MIB);
        let on_host = AcquireRequest { place: MemoryPlace::Host { near_gpu: Some("GPU0".to_owned()) }, ..near_gpu };
        let (lease, _) = world.try_acquire(session, on_host).expect("host memory").keep();
        assert!(lease.registrations.iter().all(|registration| !registration.access.remote_atomic));
        let probed = world.engine.probe_again("", "mlx5_0").expect("known");
        assert!(matches!(&probed[0].outcome, ProbeOutcome::NotTried(why) if why.contains(reason)), "{probed:?}");
    }
}
