//! Sessions: who may open one, what proves it, and what its end takes with it.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use gdrd_engine::{
    DeviceNumber, Engine, EngineConfig, ErrorKind, GpuProof, Hardware, Policy, Prewarm, Quota, Rule, Subject, Token,
    Traffic, Viewer,
};
use gdrd_hal::{GpuFact, GpuFacts, GpuMemoryError};

use crate::world::{MIB, World, config, hardware, peer, plan, request};

#[test]
fn a_token_proves_its_session_for_its_user_only_and_dies_with_it() {
    let world = World::new();
    let opened = world.open_session(1);
    assert_eq!(world.engine.session_of_token(&opened.token, 1), Ok(opened.session));
    let wrong = world.engine.session_of_token(&opened.token, 2).expect_err("another user");
    assert_eq!((wrong.kind(), wrong.reason()), (ErrorKind::Unauthenticated, "SESSION_TOKEN_INVALID"));
    let mut forged = *opened.token.as_bytes();
    forged[31] ^= 1;
    assert!(world.engine.session_of_token(&Token::new(forged), 1).is_err());
    world.engine.close_session(opened.session, "test");
    assert!(world.engine.session_of_token(&opened.token, 1).is_err());
    assert_eq!(world.try_acquire(opened.session, request("GPU0", MIB)).expect_err("ended").reason(), "SESSION_ENDED");
}

#[test]
fn only_those_that_a_rule_names_may_open_a_session() {
    let world = World::with(EngineConfig { policy: Policy::new(0, Some(500), None), ..config() });
    assert_eq!(world.engine.open_session(peer(1), "test").expect_err("no rule").reason(), "LEASE_NOT_ALLOWED");
    let mut member = peer(1);
    member.groups.push(500);
    assert!(world.engine.open_session(member, "test").is_ok());
    let nobody = world.engine.open_session(peer(65_534), "test").expect_err("opaque");
    assert_eq!(nobody.reason(), "PEER_OPAQUE");
}

#[test]
fn long_names_are_refused() {
    let world = World::new();
    let refused = world.engine.open_session(peer(1), &"x".repeat(65)).expect_err("too long");
    assert_eq!(refused.kind(), ErrorKind::InvalidArgument);
    let mut wanted = request("GPU0", MIB);
    wanted.label = "x".repeat(65);
    assert_eq!(world.try_acquire(world.session(1), wanted).expect_err("too long").reason(), "BAD_ARGUMENT");
}

#[test]
fn sessions_of_a_tenant_and_of_the_daemon_are_bounded() {
    let mut config = config();
    config.limits.max_sessions = 3;
    config.policy.leases[0].quota.max_sessions = 2;
    let world = World::with(config);
    let first = world.session(1);
    world.session(1);
    assert_eq!(world.engine.open_session(peer(1), "t").expect_err("quota").reason(), "QUOTA_SESSIONS");
    world.session(2);
    assert_eq!(world.engine.open_session(peer(3), "t").expect_err("limit").reason(), "LIMIT_SESSIONS");
    world.engine.close_session(first, "test");
    assert!(world.engine.open_session(peer(1), "t").is_ok());
}

#[test]
fn a_gpu_must_be_proven_where_the_configuration_asks_for_it() {
    let world = World::with(EngineConfig { gpu_proof: GpuProof::DeviceNode, ..config() });
    let session = world.session(1);
    let unproven = world.try_acquire(session, request("GPU0", MIB)).expect_err("not proven");
    assert_eq!((unproven.kind(), unproven.reason()), (ErrorKind::PermissionDenied, "GPU_NOT_PROVEN"));
    let strange = DeviceNumber { major: 1, minor: 3 };
    let gpu0 = DeviceNumber { major: 195, minor: 0 };
    assert_eq!(world.engine.prove_gpus(session, &[gpu0, strange]).expect_err("no gpu").reason(), "DEVICE_NOT_A_GPU");
    assert!(world.try_acquire(session, request("GPU0", MIB)).is_err(), "a refused proof proves nothing");
    let proven = world.engine.prove_gpus(session, &[gpu0]).expect("a gpu");
    assert_eq!(proven.iter().map(|uuid| uuid.0.as_str()).collect::<Vec<_>>(), ["GPU-0"]);
    let lease = world.lease(session);
    assert_eq!(world.try_acquire(session, request("GPU1", MIB)).expect_err("the other").reason(), "GPU_NOT_PROVEN");
    // A second session of the tenant proves for itself.
    let second = world.session(1);
    assert_eq!(world.engine.open(second, lease).expect_err("not proven").reason(), "GPU_NOT_PROVEN");
    world.engine.prove_gpus(second, &[gpu0]).expect("a gpu");
    assert!(world.engine.open(second, lease).is_ok());
}

/// Facts of a simulated host whose GPU0 has a node only when the test says so.
struct LateNode(Arc<dyn GpuFacts>, Mutex<Option<gdrd_hal::DeviceNumber>>);

impl GpuFacts for LateNode {
    fn gpus(&self) -> Result<Vec<GpuFact>, GpuMemoryError> {
        let mut facts = self.0.gpus()?;
        facts[0].device_node = *self.1.lock().expect("no test panics under the lock");
        Ok(facts)
    }
}

#[test]
fn a_device_node_that_comes_or_is_made_again_counts_once_the_driver_was_asked_again() {
    let sim = World::new().sim;
    let facts = Arc::new(LateNode(sim.gpu_facts(), Mutex::default()));
    let config = EngineConfig { gpu_proof: GpuProof::DeviceNode, ..config() };
    let hardware = Hardware { gpu_facts: Some(Arc::<LateNode>::clone(&facts)), ..hardware(&sim, plan()) };
    let world = World { engine: Engine::start(config, hardware).expect("the engine starts"), sim };
    let session = world.session(1);
    let refused = world.try_acquire(session, request("GPU0", MIB)).expect_err("nothing to prove it by");
    assert_eq!(refused.reason(), "GPU_WITHOUT_NODE");
    for (minor, other) in [(0, 7), (7, 0)] {
        let (node, other) = (DeviceNumber { major: 195, minor }, DeviceNumber { major: 195, minor: other });
        let made = gdrd_hal::DeviceNumber { major: 195, minor };
        *facts.1.lock().expect("no test panics under the lock") = Some(made);
        world.engine.refresh_gpus();
        let session = world.session(1);
        assert_eq!(world.engine.prove_gpus(session, &[other]).expect_err("no gpu").reason(), "DEVICE_NOT_A_GPU");
        world.engine.prove_gpus(session, &[node]).expect("a gpu");
        world.acquire(session);
    }
}

#[test]
fn a_grant_that_is_not_kept_is_taken_back() {
    let world = World::new();
    let session = world.session(1);
    let grant = world.acquire(session);
    assert_eq!(world.stat("gdrd_leases"), 1);
    drop(grant);
    assert_eq!(world.stat("gdrd_leases"), 0);
    let lease = world.lease(session);
    let second = world.session(1);
    drop(world.engine.open(second, lease).expect("the same tenant"));
    let listed = world.engine.list_leases(&Viewer::Session(session), None, 0).expect("a list").leases;
    assert_eq!(listed[0].holders, 1);
}

#[test]
fn an_acquire_that_nobody_waits_for_any_more_leaves_no_lease() {
    let world = World::new();
    let session = world.session(1);
    world.sim.inject_text("register on mlx5_0: hang").expect("a script");
    drop(world.engine.acquire(session, request("GPU0", MIB)));
    world.sim.inject_text("hca mlx5_0: go-on").expect("a script");
    world.settle();
    assert_eq!(world.stat("gdrd_leases"), 0);
    // What was made for it is ready for the next.
    let _grant = world.acquire(session);
    assert_eq!(world.stat("gdrd_acquires_warm_total"), 1);
}

#[test]
fn the_end_of_a_session_takes_its_waiting_acquires_and_leases_with_it() {
    let world = World::new();
    let (session, other) = (world.session(1), world.session(2));
    let _held = world.acquire(session).keep();
    world.sim.inject_text("allocate on GPU0: hang").expect("a script");
    let waiting: Vec<_> = (0..3).map(|_| world.engine.acquire(session, request("GPU0", MIB))).collect();
    world.engine.close_session(session, "test");
    for call in waiting {
        assert_eq!(call.wait().expect_err("ended").reason(), "SESSION_ENDED");
    }
    world.sim.inject_text("gpu GPU0: go-on").expect("a script");
    world.until("the tenant to go", || world.stat("gdrd_tenants") == 1);
    assert_eq!((world.gpu_used(0), world.stat("gdrd_leases")), (0, 0));
    world.engine.close_session(other, "test");
    assert_eq!(world.stat("gdrd_tenants"), 0);
    // Closing twice, or what never was, does nothing.
    world.engine.close_session(session, "test");
}

#[test]
fn a_detached_lease_outlives_its_session_until_it_is_opened_or_its_time_is_over() {
    let world = World::new();
    let session = world.session(1);
    let lease = world.lease(session);
    let too_long = world.engine.detach(session, lease, Duration::from_secs(25 * 3600));
    assert_eq!(too_long.expect_err("above the limit").reason(), "BAD_ARGUMENT");
    world.engine.detach(session, lease, Duration::from_secs(3600)).expect("held");
    world.engine.close_session(session, "test");
    let listed = world.engine.list_leases(&Viewer::Peer(peer(1)), None, 0).expect("a list").leases;
    assert_eq!((listed[0].id, listed[0].holders), (lease, 0));
    assert!(listed[0].ttl.is_some_and(|ttl| !ttl.is_zero() && ttl <= Duration::from_secs(3600)));
    let next = world.session(1);
    let opened = world.engine.open(next, lease).expect("the same tenant").keep().0;
    assert_eq!((opened.ttl, opened.holders), (None, 1));
    world.engine.detach(next, lease, Duration::from_millis(1)).expect("held");
    world.engine.close_session(next, "test");
    world.until("the time to live to end", || world.stat("gdrd_leases") == 0);
    world.until("the memory to go", || world.gpu_used(0) == 0);
}

#[test]
fn quotas_and_limits_refuse_what_is_beyond_and_name_themselves() {
    let mut config = config();
    config.policy.leases[0].quota = Quota { max_bytes: 8 * MIB, max_registrations: 6, ..Quota::default() };
    config.limits.max_leases_per_session = 3;
    let world = World::with(config);
    let session = world.session(1);
    let refused = |size, gpu| world.try_acquire(session, request(gpu, size)).expect_err("too much");
    assert_eq!(refused(16 * MIB, "GPU0").reason(), "QUOTA_BYTES");
    let first = world.lease(session);
    let _second = world.lease(session);
    assert_eq!(refused(8 * MIB, "GPU0").reason(), "QUOTA_BYTES");
    let (_third, _) = world.try_acquire(session, request("GPU1", MIB)).expect("room").keep();
    assert_eq!(refused(MIB, "GPU1").reason(), "LIMIT_LEASES");
    let other = world.session(1);
    assert_eq!(world.try_acquire(other, request("GPU0", MIB)).expect_err("five").reason(), "QUOTA_REGISTRATIONS");
    world.release(session, first);
    assert!(world.try_acquire(other, request("GPU0", MIB)).is_ok());
}

#[test]
fn idle_buffers_make_room_for_another_size_within_the_quota() {
    let mut config = config();
    config.policy.leases[0].quota.max_bytes = 8 * MIB;
    let world = World::with(config);
    let session = world.session(1);
    let leases: Vec<_> = (0..4).map(|_| world.lease(session)).collect();
    leases.into_iter().for_each(|lease| world.release(session, lease));
    world.settle();
    assert_eq!(world.bytes("ready"), 8 * MIB);
    let (info, _) = world.try_acquire(session, request("GPU0", 8 * MIB)).expect("the pool gives way").keep();
    assert_eq!(info.size_bytes, 8 * MIB);
    assert_eq!(world.gpu_used(0), 8 * MIB);
}

#[test]
fn tenants_that_the_configuration_names_find_their_buffers_ready() {
    let rule = Rule {
        subject: Subject::Uid(1),
        quota: Quota::default(),
        traffic: Traffic::default(),
        prewarm: vec![Prewarm { gpu: "GPU0".to_owned(), size_bytes: MIB, count: 3 }],
    };
    let world = World::with(EngineConfig { policy: Policy { leases: vec![rule], admins: vec![] }, ..config() });
    let session = world.session(1);
    world.until("the buffers to be ready", || world.bytes("ready") == 6 * MIB);
    let _grant = world.acquire(session);
    assert_eq!(world.stat("gdrd_acquires_cold_total"), 0);
}

#[test]
fn sizes_out_of_range_and_unknown_devices_are_refused() {
    let world = World::new();
    let session = world.session(1);
    for size in [0, u64::MAX, (16 << 30) + 1] {
        let refused = world.try_acquire(session, request("GPU0", size)).expect_err("out of range");
        assert_eq!(refused.kind(), ErrorKind::InvalidArgument);
    }
    assert_eq!(world.try_acquire(session, request("GPU9", MIB)).expect_err("unknown").reason(), "GPU_UNKNOWN");
    let mut wanted = request("GPU0", MIB);
    wanted.hcas = vec!["mlx5_9".to_owned()];
    assert_eq!(world.try_acquire(session, wanted).expect_err("unknown").reason(), "HCA_UNKNOWN");
    for name in ["GPU-0", "0000:00:00.0"] {
        assert!(world.try_acquire(session, request(name, MIB)).is_ok(), "{name}");
    }
}

#[test]
fn lists_come_in_pages_and_show_only_the_tenants_own_to_all_but_administrators() {
    let world = World::new();
    let (one, two) = (world.session(1), world.session(2));
    let mine: Vec<_> = (0..5).map(|_| world.lease(one)).collect();
    let theirs = world.lease(two);
    let first = world.engine.list_leases(&Viewer::Session(one), None, 2).expect("a page");
    assert_eq!(first.leases.iter().map(|lease| lease.id).collect::<Vec<_>>(), mine[..2]);
    let rest = world.engine.list_leases(&Viewer::Session(one), first.next, 0).expect("a page");
    assert_eq!(rest.leases.iter().map(|lease| lease.id).collect::<Vec<_>>(), mine[2..]);
    assert_eq!(rest.next, None);
    assert!(rest.leases.iter().flat_map(|lease| &lease.registrations).all(|r| r.rkey.0 == 0), "lists show no keys");
    let all = world.engine.list_leases(&Viewer::Peer(peer(0)), None, 0).expect("a page").leases;
    assert!(all.iter().any(|lease| lease.id == theirs) && all.len() == 6);
}

#[test]
fn shutting_down_ends_everything_and_refuses_what_comes_later() {
    let world = World::new();
    let mut opened = world.open_session(1);
    let _held = world.acquire(opened.session).keep();
    world.engine.shutdown();
    assert_eq!(world.gpu_used(0), 0);
    let told = crate::world::next(&mut opened.events);
    assert!(matches!(told, Some(gdrd_engine::SessionEvent::Ended { reason: "SHUTTING_DOWN", .. })), "{told:?}");
    assert_eq!(world.engine.open_session(peer(1), "t").expect_err("down").reason(), "SHUTTING_DOWN");
    assert!(world.try_acquire(opened.session, request("GPU0", MIB)).is_err());
    world.engine.shutdown();
}

#[test]
fn one_tenant_cannot_take_the_descriptors_that_others_need_to_connect() {
    let mut config = config();
    config.limits.max_descriptors = 12;
    let world = World::with(config);
    let hog = world.session(1);
    let mut wanted = request("GPU0", MIB);
    wanted.label = "hog".into();
    let tries: Vec<_> = (0..8).map(|_| world.try_acquire(hog, wanted.clone())).collect();
    let refused = tries.into_iter().find_map(Result::err).expect("a limit");
    assert_eq!(refused.reason(), "LIMIT_DESCRIPTORS");
    assert_eq!(refused.kind(), ErrorKind::ResourceExhausted);
}

#[test]
fn what_is_ready_is_lent_at_the_limit_of_descriptors_and_nothing_is_made_ahead_beyond_it() {
    let mut config = config();
    config.limits.max_descriptors = 20;
    config.pool.ready_target_per_class = 2;
    let world = World::with(config);
    let session = world.session(1);
    let mut held = Vec::new();
    let refused = loop {
        match world.try_acquire(session, request("GPU0", MIB)) {
            Ok(call) => held.push(call.keep().0),
            Err(refused) => break refused,
        }
        world.settle();
        assert!(held.len() < 20, "the limit holds");
    };
    assert_eq!(refused.reason(), "LIMIT_DESCRIPTORS");
}

#[test]
fn a_buffer_that_is_ready_is_lent_at_the_limit_of_descriptors() {
    let mut config = config();
    config.limits.max_descriptors = 6;
    let world = World::with(config);
    let session = world.session(1);
    let lease = world.lease(session);
    let refused = world.try_acquire(session, request("GPU0", 2 * MIB)).expect_err("it takes descriptors");
    assert_eq!(refused.reason(), "LIMIT_DESCRIPTORS");
    world.release(session, lease);
    world.settle();
    world.acquire(session);
}
