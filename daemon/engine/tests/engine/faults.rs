//! Devices and calls that fail: nothing half-made, nothing lost, the guilty call refused.

use std::sync::Arc;
use std::time::Duration;

use gdrd_engine::{
    AcquireRequest, EngineConfig, ErrorKind, LeaseEventKind, LeaseState, MemoryPlace, ProbeOutcome, Probed,
    QueuePairRequest, QueuePairType, Timeouts, UnderWay, Viewer,
};
use gdrd_ring::{Operation, Status};
use gdrd_sim::{SimHost, SimSpec};

use crate::watches::names;
use crate::wire::{Client, local};
use crate::world::{GPU_BYTES, MIB, World, config, hca, next, peer, request};

#[test]
fn a_registration_that_fails_on_one_hca_leaves_nothing_half_made() {
    let world = World::new();
    let session = world.session(1);
    world.sim.inject_text("register on mlx5_1: fail eio times 1").expect("a script");
    let refused = world.try_acquire(session, request("GPU0", MIB)).expect_err("the driver fails");
    assert_eq!((refused.kind(), refused.reason()), (ErrorKind::Unavailable, "DRIVER_FAILED"));
    world.until("the memory to go", || world.gpu_used(0) == 0);
    assert_eq!((world.stat("gdrd_registrations"), world.stat("gdrd_leases")), (0, 0));
    // The next one works.
    let _grant = world.acquire(session);
}

#[test]
fn a_lack_of_descriptors_is_no_lack_of_gpu_memory() {
    let world = World::new();
    let session = world.session(1);
    world.sim.inject_text("allocate: fail emfile times 1").expect("a script");
    let refused = world.try_acquire(session, request("GPU0", MIB)).expect_err("none is left");
    assert_eq!((refused.kind(), refused.reason()), (ErrorKind::ResourceExhausted, "OUT_OF_DESCRIPTORS"));
    assert!(refused.to_string().contains("RLIMIT_NOFILE"), "{refused}");
    world.acquire(session);
}

#[test]
fn a_queue_pair_on_an_hca_without_an_active_port_is_refused_for_the_port() {
    let world = World::new();
    let session = world.session(1);
    world.sim.inject_text("hca mlx5_2: link-down port 1").expect("a script");
    let wanted = QueuePairRequest {
        hca: "mlx5_2".to_owned(),
        gpu: String::new(),
        port_num: 0,
        qp_type: QueuePairType::Rc,
        send_depth: 0,
        recv_depth: 0,
    };
    let refused = world.engine.create_queue_pair(session, wanted).wait().expect_err("no port");
    assert_eq!((refused.kind(), refused.reason()), (ErrorKind::Unavailable, "PORTS_DOWN"), "{refused}");
}

#[test]
fn a_session_that_ends_while_a_registration_is_slow_leaves_nothing() {
    let world = World::new();
    let session = world.session(1);
    world.sim.inject_text("register on mlx5_0: hang").expect("a script");
    let call = world.engine.acquire(session, request("GPU0", MIB));
    world.engine.close_session(session, "test");
    assert_eq!(call.wait().expect_err("ended").reason(), "SESSION_ENDED");
    world.sim.inject_text("hca mlx5_0: go-on").expect("a script");
    world.until("everything to go", || world.gpu_used(0) == 0 && world.stat("gdrd_tenants") == 0);
}

#[test]
fn a_slow_hca_does_not_hold_up_another() {
    let world = World::new();
    let session = world.session(1);
    world.sim.inject_text("register on mlx5_0: hang").expect("a script");
    let slow: Vec<_> = (0..4).map(|_| world.engine.acquire(session, request("GPU0", MIB))).collect();
    let quick = world.try_acquire(session, request("GPU1", MIB)).expect("another gpu and hca");
    drop((quick, slow));
    world.sim.inject_text("hca mlx5_0: go-on").expect("a script");
}

#[test]
fn a_full_gpu_takes_back_idle_buffers_and_tries_once_more() {
    let world = World::new();
    let (idle, wanting) = (world.session(1), world.session(2));
    let leases: Vec<_> = (0..GPU_BYTES / (2 * MIB)).map(|_| world.lease(idle)).collect();
    leases.into_iter().for_each(|lease| world.release(idle, lease));
    world.settle();
    assert_eq!(world.gpu_used(0), GPU_BYTES);
    let (_held, _) = world.try_acquire(wanting, request("GPU0", 32 * MIB)).expect("idle buffers go").keep();
    assert_eq!(world.stat("gdrd_idle_dropped_total"), 16);
    let full = world.try_acquire(wanting, request("GPU0", 64 * MIB)).expect_err("half of it is held");
    assert_eq!((full.kind(), full.reason()), (ErrorKind::ResourceExhausted, "GPU_OUT_OF_MEMORY"));
}

#[test]
fn a_full_hca_takes_back_idle_registrations_and_tries_once_more() {
    let world = World::new();
    let session = world.session(1);
    let lease = world.lease(session);
    world.release(session, lease);
    world.settle();
    world.sim.inject_text("register on mlx5_0: fail enomem times 1").expect("a script");
    let mut wanted = request("GPU0", 4 * MIB);
    wanted.hcas = vec!["mlx5_0".to_owned()];
    let _grant = world.try_acquire(session, wanted.clone()).expect("the idle one goes").keep();
    assert_eq!((world.bytes("ready"), world.stat("gdrd_idle_dropped_total")), (0, 1));
    world.sim.inject_text("register on mlx5_0: fail enomem times 2").expect("a script");
    let refused = world.try_acquire(session, wanted).expect_err("nothing idle is left");
    assert_eq!(refused.reason(), "HCA_EXHAUSTED");
}

#[test]
fn a_buffer_that_cannot_be_zeroed_or_deregistered_is_never_lent_again() {
    for fault in ["scrub on GPU0: fail eio times 1", "deregister on mlx5_0: fail eio times 1"] {
        let world = World::new();
        let session = world.session(1);
        let lease = world.lease(session);
        world.sim.inject_text(fault).expect("a script");
        world.release(session, lease);
        world.until("the memory to go", || world.gpu_used(0) == 0);
        let _grant = world.acquire(session);
        assert_eq!(world.stat("gdrd_acquires_warm_total"), 0, "{fault}");
    }
}

#[test]
fn buffers_made_ahead_leave_the_headroom_free() {
    let mut config = config();
    config.pool.ready_target_per_class = 8;
    config.pool.headroom_bytes = GPU_BYTES - 6 * MIB;
    let world = World::with(config);
    let session = world.session(1);
    let _grant = world.acquire(session);
    world.settle();
    assert_eq!(world.gpu_used(0), 6 * MIB);
    // What somebody waits for may use it.
    let _large = world.try_acquire(session, request("GPU0", 32 * MIB)).expect("memory is there");
}

#[test]
fn headroom_as_a_share_counts_where_it_is_the_greater() {
    let mut config = config();
    config.pool.ready_target_per_class = 8;
    config.pool.headroom_percent = 100;
    let world = World::with(config);
    let session = world.session(1);
    let _grant = world.acquire(session);
    world.settle();
    assert_eq!(world.gpu_used(0), 2 * MIB, "nothing is made ahead");
}

#[test]
fn memory_of_each_gpu_adds_up_and_out_of_memory_names_its_holders() {
    let world = World::new();
    let (near, far) = (world.session(1), world.session(2));
    let (_mine, _) = world.try_acquire(near, request("GPU0", 4 * MIB)).expect("a buffer").keep();
    let (_theirs, _) = world.try_acquire(far, request("GPU0", 8 * MIB)).expect("a buffer").keep();
    world.settle();
    for gpu in world.engine.gpu_memory() {
        let driver = gpu.driver.expect("the simulated driver tells");
        assert_eq!(gpu.buffers.sum() + gpu.others_bytes().unwrap(), driver.used_bytes, "{gpu:?}");
        assert_eq!(gpu.others_bytes(), Some(0));
        assert_eq!(gpu.buffers.leased, if gpu.name == "GPU0" { 12 * MIB } else { 0 });
    }
    let error = world.try_acquire(near, request("GPU0", GPU_BYTES)).expect_err("there is less").to_string();
    let (own, others) = (format!("this tenant hold {} bytes", 4 * MIB), format!("of others {}", 8 * MIB));
    assert!(error.contains(&own) && error.contains(&others) && error.contains("bytes free"), "{error}");
}

#[test]
fn a_lost_gpu_revokes_its_leases_and_fails_its_acquires_only() {
    let world = World::new();
    let session = world.session(1);
    let lease = world.lease(session);
    let (other, _) = world.try_acquire(session, request("GPU1", MIB)).expect("a buffer").keep();
    let mut events = world.watch(1);
    world.sim.inject_text("gpu GPU0: lost").expect("a script");
    world.engine.refresh_gpus();
    let lost = world.try_acquire(session, request("GPU0", MIB)).expect_err("lost");
    assert_eq!((lost.kind(), lost.reason()), (ErrorKind::Unavailable, "DEVICE_LOST"));
    assert_eq!(names(&mut events), ["present", "present", "synced", "revoked"]);
    let listed = world.engine.list_leases(&Viewer::Session(session), None, 0).expect("a list").leases;
    assert_eq!(listed.iter().map(|l| l.state).collect::<Vec<_>>(), [LeaseState::Revoked, LeaseState::Held]);
    assert!(listed[0].registrations.is_empty() && listed[1].registrations == hidden(&other.registrations));
    assert_eq!(world.engine.open(session, lease).expect_err("revoked").reason(), "LEASE_REVOKED");
    // A revoked lease lives on for its mappings until it is released.
    world.release(session, lease);
    world.settle();
    let _works = world.try_acquire(session, request("GPU1", MIB)).expect("another gpu");
    world.sim.inject_text("gpu GPU0: healthy").expect("a script");
    world.engine.refresh_gpus();
    let _again = world.acquire(session);
}

#[test]
fn a_drained_gpu_revokes_its_leases_and_serves_again_once_resumed() {
    let world = World::new();
    let session = world.session(1);
    let lease = world.lease(session);
    let refused = world.engine.drain_gpus(&Viewer::Peer(peer(1)), "GPU0").expect_err("no administrator");
    assert_eq!(refused.reason(), "ADMIN_REQUIRED");
    let admin = Viewer::Peer(peer(0));
    let drained = world.engine.drain_gpus(&admin, "GPU0").expect("an administrator drains");
    assert!(drained.under_way.is_empty());
    assert_eq!((drained.uuids.len(), world.stat("gdrd_gpus_out_of_use")), (1, 1));
    // The driver says that it is healthy, and it is; only it is not ours at present.
    world.engine.refresh_gpus();
    let lost = world.try_acquire(session, request("GPU0", MIB)).expect_err("drained");
    assert!(lost.to_string().contains("drained by an administrator"), "{lost}");
    assert_eq!(world.engine.open(session, lease).expect_err("revoked").reason(), "LEASE_REVOKED");
    world.release(session, lease);
    world.settle();
    assert_eq!(world.gpu_used(0), 0);
    let _elsewhere = world.try_acquire(session, request("GPU1", MIB)).expect("another gpu");
    assert_eq!(world.engine.resume_gpus(&admin, "").expect("an administrator resumes"), drained.uuids);
    assert_eq!(world.stat("gdrd_gpus_out_of_use"), 0);
    let _again = world.acquire(session);
    assert!(world.engine.drain_gpus(&admin, "GPU77").is_err());
}

#[test]
fn a_drain_waits_for_calls_and_tells_which_are_still_under_way() {
    let config = config();
    let timeouts = Timeouts { let_go: Duration::from_millis(20), ..config.timeouts };
    let world = World::with(EngineConfig { timeouts, ..config });
    let session = world.session(1);
    let lease = world.lease(session);
    let admin = Viewer::Peer(peer(0));
    world.sim.inject_text("allocate on GPU0: hang").expect("a script");
    let pending = world.engine.acquire(session, request("GPU0", 2 * MIB));
    let drained = world.engine.drain_gpus(&admin, "GPU0").expect("an administrator drains");
    let under_way = |call| UnderWay { uuid: drained.uuids[0].clone(), call, buffers: 1 };
    assert_eq!(drained.under_way, [under_way("allocate")]);
    let refused = pending.wait().expect_err("answered at once, though its call hangs");
    assert!(refused.to_string().starts_with("gpu GPU-0 was drained by an administrator; 'gdrctl drain"), "{refused}");
    // Asked again it waits as well.
    assert_eq!(world.engine.drain_gpus(&admin, "GPU0").expect("it stays").under_way, [under_way("allocate")]);
    world.sim.inject_text("gpu GPU0: go-on").expect("a script");
    world.until("the call to end", || world.engine.drain_gpus(&admin, "GPU0").expect("it stays").under_way.is_empty());
    world.release(session, lease);
}

fn hidden(registrations: &[gdrd_engine::RegistrationInfo]) -> Vec<gdrd_engine::RegistrationInfo> {
    let hide = |r: &gdrd_engine::RegistrationInfo| gdrd_engine::RegistrationInfo {
        rkey: gdrd_engine::RemoteKey(0),
        ..r.clone()
    };
    registrations.iter().map(hide).collect()
}

#[test]
fn a_gpu_found_lost_by_a_call_is_lost_for_all() {
    let world = World::new();
    let session = world.session(1);
    let lease = world.lease(session);
    world.sim.inject_text("gpu GPU0: lost").expect("a script");
    let lost = world.try_acquire(session, request("GPU0", MIB)).expect_err("lost");
    assert_eq!(lost.reason(), "DEVICE_LOST");
    assert_eq!(world.engine.open(session, lease).expect_err("revoked").reason(), "LEASE_REVOKED");
}

#[test]
fn a_lost_hca_takes_its_registrations_and_leaves_the_others() {
    let world = World::new();
    let session = world.session(1);
    let (two, _) = world.acquire(session).keep();
    let (one, _) = world.try_acquire(session, request("GPU1", MIB)).expect("a buffer").keep();
    let mut events = world.watch(1);
    names(&mut events);
    world.sim.inject_text("hca mlx5_0: fatal").expect("a script");
    world.until("the hca to be missed", || world.stat("gdrd_hcas_lost_total") == 1);
    let told: Vec<_> = std::iter::from_fn(|| next(&mut events)).map(|event| event.kind).collect();
    assert!(matches!(&told[0], LeaseEventKind::NicDown { hca, port_num: 0 } if &**hca == "mlx5_0"), "{told:?}");
    let LeaseEventKind::Rekeyed(rekeyed) = &told[1] else { panic!("{told:?}") };
    assert_eq!(rekeyed.id, two.id);
    assert!(rekeyed.generation > two.generation);
    assert_eq!(rekeyed.registrations, two.registrations[1..], "the tenant is told its keys");
    assert_eq!(told.len(), 2);
    let stale = world.engine.release(session, two.id, Some(two.generation)).expect_err("it was re-keyed");
    assert_eq!((stale.kind(), stale.reason()), (ErrorKind::Aborted, "GENERATION_STALE"));
    world.engine.release(session, two.id, Some(rekeyed.generation)).expect("the new generation");
    let refused = world.try_acquire(session, request("GPU0", MIB)).expect_err("one of its hcas is gone");
    assert_eq!(refused.reason(), "DEVICE_LOST");
    let mut wanted = request("GPU0", MIB);
    wanted.hcas = vec!["mlx5_1".to_owned()];
    let _works = world.try_acquire(session, wanted).expect("the other hca");
    world.release(session, one.id);
    world.engine.close_session(session, "test");
    world.until("everything to go", || world.stat("gdrd_tenants") == 0);
}

#[test]
fn an_hca_that_comes_back_is_a_new_device_and_serves_without_a_restart() {
    let world = World::new();
    let session = world.session(1);
    let near_gpu1 =
        || AcquireRequest { place: MemoryPlace::Host { near_gpu: Some("GPU1".into()) }, ..request("", MIB) };
    let mut host = world.sim.clone();
    for life in 1..=3 {
        let (lease, _) = world.try_acquire(session, near_gpu1()).expect("the device serves").keep();
        let mut posted = Client::new(&world, session, "mlx5_2");
        posted.post(1, Operation::Recv { local: local(&lease, "mlx5_2", 0, 8) });
        host.inject_text("hca mlx5_2: fatal").expect("a script");
        world.until("the hca to be missed", || world.stat("gdrd_hcas_lost_total") == life);
        // The release of what it may write to can come first, or even before the broker takes the request.
        let status = posted.next().status;
        assert!(matches!(status, Status::FatalErr | Status::WrFlushErr | Status::Stale), "{status}");
        assert_eq!(world.try_acquire(session, near_gpu1()).expect_err("gone").reason(), "DEVICE_LOST");

        host = SimHost::new(SimSpec { gpus: Vec::new(), hcas: vec![hca(2)] }).expect("the device is sound");
        let device = host.hcas().pop().expect("it has one");
        let handle = Arc::downgrade(&device);
        assert!(world.engine.add_hca(device));
        assert!(!world.engine.add_hca(host.hcas().pop().expect("it has one")), "one of its name is served");
        assert_eq!(world.engine.hca_names().len(), 3);
        assert_eq!(world.engine.open(session, lease.id).expect_err("lost for good").reason(), "LEASE_REVOKED");
        if life == 3 {
            host.inject_text("hca mlx5_2: fatal").expect("a script");
            world.until("the engine to let go of the device", || handle.upgrade().is_none());
        }
    }
    world.engine.close_session(session, "test");
    world.until("everything to go", || world.stat("gdrd_tenants") == 0);
}

#[test]
fn a_probe_tells_proven_from_failed_and_leaves_nothing() {
    let world = World::new();
    let admin = Viewer::Peer(peer(0));
    let refused = world.engine.probe(&Viewer::Peer(peer(1)), "", "").expect_err("no administrator");
    assert_eq!(refused.reason(), "ADMIN_REQUIRED");
    let all = world.engine.probe(&admin, "", "").expect("an administrator");
    assert!(all.iter().all(|probed| matches!(probed.outcome, ProbeOutcome::Proven(_))), "{all:?}");
    // A host buffer with each of three, GPU0 with its two, GPU1 with its one.
    assert_eq!(all.len(), 6);
    world.engine.drain_gpus(&admin, "GPU1").expect("an administrator");
    let drained = world.engine.probe(&admin, "GPU1", "mlx5_2").expect("an administrator");
    assert!(matches!(&drained[..], [Probed { outcome: ProbeOutcome::NotTried(_), .. }]), "{drained:?}");
    world.engine.resume_gpus(&admin, "GPU1").expect("an administrator");
    world.sim.inject_text("register on mlx5_2: fail eio times 1").expect("a script");
    let failed = world.engine.probe(&admin, "GPU1", "mlx5_2").expect("an administrator");
    assert!(matches!(&failed[..], [Probed { outcome: ProbeOutcome::Failed(_), .. }]), "{failed:?}");
    assert_eq!(world.engine.probe(&admin, "GPU9", "").expect_err("unknown").reason(), "GPU_UNKNOWN");
    assert_eq!(world.engine.probe(&admin, "", "mlx5_9").expect_err("unknown").reason(), "HCA_UNKNOWN");
    assert_eq!((world.gpu_used(0), world.gpu_used(1)), (0, 0));
}

#[test]
fn a_port_that_goes_down_is_told_to_every_watcher() {
    let world = World::new();
    let (mut one, mut two) = (world.watch(1), world.watch(2));
    world.sim.inject_text("hca mlx5_1: link-down port 1").expect("a script");
    let mut told = Vec::new();
    for events in [&mut one, &mut two] {
        let start = std::time::Instant::now();
        let down = loop {
            match next(events).map(|event| event.kind) {
                Some(LeaseEventKind::NicDown { hca, port_num }) => break (hca, port_num),
                _ => assert!(start.elapsed() < crate::world::PATIENCE),
            }
        };
        told.push(down);
    }
    assert!(told.iter().all(|(hca, port_num)| &**hca == "mlx5_1" && *port_num == 1));
}

#[test]
fn an_idle_engine_has_no_deadline_once_its_pools_have_aged() {
    let mut config = config();
    config.pool.ready_target_per_class = 2;
    config.pool.clean_target_per_class = 2;
    config.pool.idle = std::time::Duration::from_millis(1);
    let world = World::with(config);
    let session = world.session(1);
    let lease = world.lease(session);
    world.release(session, lease);
    world.until("the pools to shrink to nothing", || world.gpu_used(0) == 0);
    let listed = world.engine.list_leases(&Viewer::Peer(peer(1)), None, 0).expect("a list");
    assert!(listed.leases.is_empty());
}
