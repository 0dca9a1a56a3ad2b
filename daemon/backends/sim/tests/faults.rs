//! What faults do to calls, connections and GPUs.
#![forbid(unsafe_code)]

mod support;

use std::time::{Duration, Instant};

use gdrd_hal::{
    Access, Gid, GpuHealth, GpuMemoryError, HcaError, HcaEvent, PortState, PostError, QueuePairState, WorkCompletion,
    WorkStatus,
};
use gdrd_sim::{GRANULARITY_BYTES, SimHost, SimOptions, Timing};
use support::{FOREVER, connect, ends, host_with, is_readable, memory, pair, patient_host, register, source, spec};

const SUCCESS: WorkStatus = WorkStatus::Success;

/// A host that gives up on silent peers at once.
fn impatient_host() -> SimHost {
    host_with(Timing { retry_exceeded: Duration::from_millis(1), receiver_not_ready: None })
}

#[test]
fn registrations_fail_as_often_as_the_script_says() {
    let host = patient_host();
    host.inject_text("register on mlx5_0 after 1: fail enomem times 2").unwrap();
    let hcas = host.hcas();
    let memory = memory();
    let results = |index: usize| {
        let pd = hcas[index].alloc_pd().unwrap();
        (0..4).map(|_| pd.register(source(&memory), Access::DATA, 0).map(drop)).collect::<Vec<_>>()
    };
    assert!(results(1).iter().all(Result::is_ok), "another hca");
    let results = results(0);
    assert!(results[0].is_ok() && results[3].is_ok());
    for failed in &results[1..3] {
        assert!(matches!(failed, Err(HcaError::Exhausted { .. })), "{failed:?}");
    }
}

#[test]
fn errnos_become_the_errors_that_a_driver_would_give() {
    let host = patient_host();
    let pd = host.hcas()[0].alloc_pd().unwrap();
    let memory = memory();
    let fail_with = |errno: &str| {
        host.inject_text(&format!("register: fail {errno} times 1")).unwrap();
        pd.register(source(&memory), Access::DATA, 0).map(drop).unwrap_err()
    };
    assert!(matches!(fail_with("einval"), HcaError::Invalid { .. }));
    assert!(matches!(fail_with("eopnotsupp"), HcaError::Unsupported { .. }));
    assert!(matches!(fail_with("eio"), HcaError::Driver { errno: 5, .. }));
}

#[test]
fn one_failed_call_leaves_the_device_there_and_one_that_finds_it_gone_does_not() {
    let host = patient_host();
    let hca = &host.hcas()[0];
    host.inject_text("alloc-pd on mlx5_0: fail eio times 1").unwrap();
    assert!(matches!(hca.alloc_pd().map(drop), Err(HcaError::Driver { errno: 5, .. })));
    assert!(hca.alloc_pd().is_ok());
    host.inject_text("alloc-pd on mlx5_0: fail enodev times 1").unwrap();
    assert!(matches!(hca.alloc_pd().map(drop), Err(HcaError::Gone { .. })));
    assert_eq!(hca.take_events(), [HcaEvent::DeviceFatal]);
    assert!(matches!(hca.alloc_pd().map(drop), Err(HcaError::Gone { .. })));
}

#[test]
fn every_call_on_an_hca_can_fail() {
    let host = patient_host();
    let fail = |call: &str| host.inject_text(&format!("{call}: fail eio times 1")).unwrap();
    let is_driver = |error: HcaError| matches!(error, HcaError::Driver { errno: 5, .. });
    let hca = &host.hcas()[0];
    fail("alloc-pd");
    assert!(is_driver(hca.alloc_pd().map(drop).unwrap_err()));
    fail("create-cq");
    assert!(is_driver(hca.create_cq(1).map(drop).unwrap_err()));
    let (a, b) = ends(&host);
    fail("create-qp");
    let config = gdrd_hal::QueuePairConfig {
        qp_type: gdrd_hal::QueuePairType::Rc,
        send_depth: 1,
        recv_depth: 1,
        inline_bytes: 0,
        port_num: 1,
    };
    assert!(is_driver(a.pd.create_queue_pair(a.cq.id(), &config).map(drop).unwrap_err()));
    fail("connect");
    let at_b = b.control.endpoint().unwrap();
    assert!(is_driver(a.control.connect(&at_b).unwrap_err()));
    assert_eq!(a.control.state().unwrap(), QueuePairState::Init);
    connect(&a, &b);
}

#[test]
fn a_failed_deregistration_still_ends_the_region() {
    let host = patient_host();
    let (mut a, b) = pair(&host);
    host.inject_text("deregister on mlx5_1: fail eio times 1").unwrap();
    let write = a.write(1, &b, 0, 8);
    assert!(matches!(b.region.deregister(), Err(HcaError::Driver { .. })));
    a.send(write);
    assert_eq!(a.next(), (1, WorkStatus::RemoteAccess));
}

#[test]
fn a_slow_registration_takes_its_time() {
    let host = patient_host();
    host.inject_text("register: delay 20ms times 1").unwrap();
    let pd = host.hcas()[0].alloc_pd().unwrap();
    let memory = memory();
    let started = Instant::now();
    drop(register(&*pd, &memory));
    assert!(started.elapsed() >= Duration::from_millis(20));
}

#[test]
fn calls_hang_until_their_device_goes_on() {
    let host = patient_host();
    host.inject_text("register on mlx5_0: hang\nallocate on GPU0: hang times 1").unwrap();
    let (hca, other) = (host.hcas()[0].clone(), host.hcas()[1].clone());
    let memory = memory();
    let gpu = host.gpu_facts().gpus().unwrap().swap_remove(0).uuid;
    let (told, tell) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let memory = &memory;
        for (what, hca) in [("hung", hca), ("other", other)] {
            let told = told.clone();
            scope.spawn(move || {
                drop(register(&*hca.alloc_pd().unwrap(), memory));
                told.send(what).unwrap();
            });
        }
        let allocating = scope.spawn(|| host.gpu_memory().allocate(&gpu, GRANULARITY_BYTES).is_ok());
        assert_eq!(tell.recv(), Ok("other"));
        host.inject_text("hca mlx5_0: go-on").unwrap();
        assert_eq!(tell.recv(), Ok("hung"));
        host.inject_text("gpu GPU0: go-on").unwrap();
        assert!(allocating.join().unwrap());
    });
    drop(register(&*host.hcas()[0].alloc_pd().unwrap(), &memory));
}

#[test]
fn work_waits_while_the_link_is_down_and_goes_on_in_order() {
    let host = patient_host();
    let (mut a, mut b) = pair(&host);
    host.inject_text("at 3 ops on mlx5_0: link-down port 1").unwrap();
    b.receive(50);
    for wr_id in 0..6 {
        a.fill(0, &[wr_id + 1]);
        let write = a.write(u64::from(wr_id), &b, u64::from(wr_id), 1);
        a.send(write);
    }
    a.send(a.message(6));
    assert_eq!(a.completed(), [(0, SUCCESS), (1, SUCCESS), (2, SUCCESS)]);
    assert_eq!(b.content(0, 6), [1, 2, 3, 0, 0, 0]);
    assert_eq!(b.completed(), []);
    assert_eq!(a.hca.take_events(), [HcaEvent::PortDown { port_num: 1 }]);
    assert_eq!(a.hca.ports().unwrap()[0].state, PortState::Down);
    host.inject_text("hca mlx5_0: link-up port 1").unwrap();
    assert_eq!(a.completed(), [(3, SUCCESS), (4, SUCCESS), (5, SUCCESS), (6, SUCCESS)]);
    // The payload is fetched when a request is executed, so all three carry the last byte.
    assert_eq!(b.content(0, 6), [1, 2, 3, 6, 6, 6]);
    assert_eq!(b.completed(), [(50, SUCCESS)]);
    assert_eq!(a.hca.take_events(), [HcaEvent::PortActive { port_num: 1 }]);
}

#[test]
fn a_link_that_stays_down_ends_in_retry_errors_that_wake_a_sleeper() {
    let host = impatient_host();
    let (mut a, b) = pair(&host);
    host.inject_text("hca mlx5_1: link-down port 1").unwrap();
    a.cq.arm().unwrap();
    for wr_id in 0..3 {
        let write = a.write(wr_id, &b, 0, 8);
        a.send(write);
    }
    a.sleep_for_event();
    assert_eq!(a.next(), (0, WorkStatus::RetryExceeded));
    assert_eq!([a.next(), a.next()], [(1, WorkStatus::Flushed), (2, WorkStatus::Flushed)]);
    assert_eq!(a.control.state().unwrap(), QueuePairState::Err);
    assert_eq!(b.control.state().unwrap(), QueuePairState::Rts, "the peer has not noticed");
}

#[test]
fn a_message_without_a_receive_can_be_given_up() {
    let host = host_with(Timing { retry_exceeded: FOREVER, receiver_not_ready: Some(Duration::from_millis(1)) });
    let (mut a, b) = pair(&host);
    a.cq.arm().unwrap();
    a.send(a.message(1));
    a.sleep_for_event();
    assert_eq!(a.next(), (1, WorkStatus::ReceiverNotReady));
    drop(b);
}

#[test]
fn a_late_receive_lets_a_sleeping_requester_go_on() {
    let host = patient_host();
    let (mut a, mut b) = pair(&host);
    a.cq.arm().unwrap();
    a.send(a.message(1));
    let poster = std::thread::spawn(move || {
        b.receive(2);
        b
    });
    a.sleep_for_event();
    assert_eq!(a.next(), (1, SUCCESS));
    let mut b = poster.join().unwrap();
    assert_eq!(b.next(), (2, SUCCESS));
}

#[test]
fn work_sent_before_the_peer_connects_goes_through_once_it_does() {
    let host = patient_host();
    let (mut a, b) = ends(&host);
    connect(&a, &b);
    a.fill(0, b"early");
    let write = a.write(1, &b, 0, 5);
    a.send(write);
    assert_eq!(a.completed(), []);
    connect(&b, &a);
    assert_eq!(a.completed(), [(1, SUCCESS)]);
    assert_eq!(b.content(0, 5), b"early");
}

#[test]
fn nobody_at_an_address_is_told_at_connect_on_ethernet() {
    let host = patient_host();
    let (a, b) = ends(&host);
    let mut at = b.control.endpoint().unwrap();
    at.gid = Gid([0xfe, 0x80, 0, 0, 0, 0, 0, 0, 9, 9, 9, 9, 9, 9, 9, 9]);
    let error = a.control.connect(&at).unwrap_err();
    assert!(matches!(error, HcaError::Unreachable { .. }), "{error}");
    assert!(error.to_string().contains("gid"), "{error}");
}

#[test]
fn changed_gids_break_old_connections_and_serve_new_ones() {
    let host = impatient_host();
    let (mut a, b) = pair(&host);
    let old = b.control.endpoint().unwrap();
    host.inject_text("hca mlx5_1: gid-change port 1").unwrap();
    assert_eq!(b.hca.take_events(), [HcaEvent::GidChange { port_num: 1 }]);
    let write = a.write(1, &b, 0, 8);
    a.send(write);
    assert_eq!(a.next(), (1, WorkStatus::RetryExceeded));
    let (mut c, d) = pair(&host);
    assert_ne!(d.control.endpoint().unwrap().gid, old.gid);
    let write = c.write(2, &d, 0, 8);
    c.send(write);
    assert_eq!(c.next(), (2, SUCCESS));
}

#[test]
fn a_fatal_device_refuses_everything_and_its_peers_get_no_answer() {
    let host = impatient_host();
    let (mut a, mut b) = pair(&host);
    let memory = memory();
    host.inject_text("hca mlx5_0: fatal").unwrap();
    assert!(is_readable(a.hca.event_fd().unwrap(), 0));
    assert_eq!(a.hca.take_events(), [HcaEvent::DeviceFatal]);
    assert!(!is_readable(a.hca.event_fd().unwrap(), 0));
    let is_gone = |error: HcaError| matches!(error, HcaError::Gone { .. });
    assert!(is_gone(a.hca.ports().unwrap_err()));
    assert!(is_gone(a.hca.create_cq(1).map(drop).unwrap_err()));
    assert!(is_gone(a.pd.register(source(&memory), Access::DATA, 0).map(drop).unwrap_err()));
    assert!(is_gone(a.control.to_error().unwrap_err()));
    assert!(is_gone(a.cq.arm().unwrap_err()));
    assert!(is_gone(a.cq.poll(&mut [WorkCompletion::EMPTY]).unwrap_err()));
    let write = a.write(1, &b, 0, 8);
    assert_eq!(a.work.post_send(&[write]), Err((0, PostError::Gone)));
    assert_eq!(a.work.post_recv(&[]), Ok(()));
    let write = b.write(2, &a, 0, 8);
    b.send(write);
    assert_eq!(b.next(), (2, WorkStatus::RetryExceeded));
    assert!(is_gone(a.region.deregister().unwrap_err()));
}

#[test]
fn a_device_that_dies_wakes_who_sleeps_on_its_queues() {
    let host = patient_host();
    let (mut a, _b) = pair(&host);
    a.cq.arm().unwrap();
    let killer = host.clone();
    let kill = std::thread::spawn(move || killer.inject_text("hca mlx5_0: fatal").unwrap());
    a.sleep_for_event();
    kill.join().unwrap();
    assert!(matches!(a.cq.poll(&mut [WorkCompletion::EMPTY]), Err(HcaError::Gone { .. })));
}

#[test]
fn work_that_waits_on_a_device_dies_with_it() {
    let host = patient_host();
    let (mut a, mut b) = pair(&host);
    a.fill(0, &[0xff; 8]);
    a.send(a.message(1));
    host.inject_text("hca mlx5_0: fatal").unwrap();
    b.receive(2);
    assert_eq!(b.completed(), [], "a dead device sends nothing");
    assert_eq!(b.content(4096, 8), [0; 8]);
}

#[test]
fn slow_completions_come_later_in_order_and_wake_a_sleeper() {
    let host = patient_host();
    let (mut a, b) = pair(&host);
    host.inject_text("completion on mlx5_0: delay 10ms times 1").unwrap();
    a.cq.arm().unwrap();
    let started = Instant::now();
    for wr_id in 0..3 {
        let write = a.write(wr_id, &b, 0, 8);
        a.send(write);
    }
    a.sleep_for_event();
    assert_eq!([a.next(), a.next(), a.next()], [(0, SUCCESS), (1, SUCCESS), (2, SUCCESS)]);
    assert!(started.elapsed() >= Duration::from_millis(10));
    let write = a.write(3, &b, 0, 8);
    a.send(write);
    assert_eq!(a.completed(), [(3, SUCCESS)], "the rule is used up");
}

#[test]
fn completions_held_back_take_room_in_their_queue() {
    let host = patient_host();
    let hcas = host.hcas();
    host.inject_text("completion on mlx5_0: delay 60s").unwrap();
    let (mut a, b) = pair(&host);
    // The queue pair takes 64 sends until completions are polled; the queue has room for all.
    for wr_id in 0..64 {
        let write = a.write(wr_id, &b, 0, 8);
        a.send(write);
    }
    let write = a.write(64, &b, 0, 8);
    assert_eq!(a.work.post_send(&[write]), Err((0, PostError::Full)));
    assert_eq!(a.completed(), []);
    drop((a, hcas));
}

#[test]
fn a_lost_gpu_serves_nothing_until_it_is_back() {
    let host = patient_host();
    let memory = host.gpu_memory();
    let uuid = spec().gpus[0].uuid.clone();
    let other = spec().gpus[1].uuid.clone();
    let allocation = memory.allocate(&uuid, GRANULARITY_BYTES).unwrap();
    host.inject_text("gpu GPU0: lost").unwrap();
    let is_lost = |error: GpuMemoryError| matches!(error, GpuMemoryError::Lost { .. });
    assert!(is_lost(memory.allocate(&uuid, GRANULARITY_BYTES).map(drop).unwrap_err()));
    assert!(is_lost(memory.usage(&uuid).map(drop).unwrap_err()));
    assert!(is_lost(allocation.scrub().unwrap_err()));
    assert!(memory.allocate(&other, GRANULARITY_BYTES).is_ok());
    let health = || host.gpu_facts().gpus().unwrap().remove(0).health;
    assert!(matches!(health(), GpuHealth::Lost(reason) if reason.contains("bus")));
    host.inject_text(&format!("gpu {}: healthy", uuid.0)).unwrap();
    assert_eq!(health(), GpuHealth::Healthy);
    allocation.scrub().unwrap();
}

#[test]
fn a_gpu_can_be_lost_by_counted_work() {
    let host = patient_host();
    let (mut a, b) = pair(&host);
    host.inject_text("at 2 ops on mlx5_0: gpu GPU1 lost").unwrap();
    let health = || host.gpu_facts().gpus().unwrap().remove(1).health;
    for wr_id in 0..3 {
        assert_eq!(health(), GpuHealth::Healthy);
        let write = a.write(wr_id, &b, 0, 8);
        a.send(write);
    }
    assert!(matches!(health(), GpuHealth::Lost(_)));
}

#[test]
fn allocations_and_scrubs_fail_as_the_script_says() {
    let host = patient_host();
    let memory = host.gpu_memory();
    let uuid = spec().gpus[0].uuid.clone();
    let allocation = memory.allocate(&uuid, GRANULARITY_BYTES).unwrap();
    host.inject_text("allocate on GPU0: fail enomem times 1\nscrub on GPU0: fail eio times 1").unwrap();
    let refused = memory.allocate(&uuid, GRANULARITY_BYTES).map(drop).unwrap_err();
    assert!(matches!(refused, GpuMemoryError::OutOfMemory { len_bytes: GRANULARITY_BYTES, .. }), "{refused}");
    assert!(memory.allocate(&uuid, GRANULARITY_BYTES).is_ok());
    assert!(matches!(allocation.scrub(), Err(GpuMemoryError::Driver { call: "scrub", .. })));
    allocation.scrub().unwrap();
}

#[test]
fn faults_can_be_there_from_the_start() {
    let faults = "gpu GPU0: lost\nregister: fail enomem times 1".parse().unwrap();
    let host = SimHost::with_options(spec(), SimOptions { faults, ..SimOptions::default() }).unwrap();
    assert!(matches!(host.gpu_facts().gpus().unwrap()[0].health, GpuHealth::Lost(_)));
    let bad = SimOptions { faults: "gpu GPU7: lost".parse().unwrap(), ..SimOptions::default() };
    assert!(SimHost::with_options(spec(), bad).is_err());
}

#[test]
fn a_responder_that_refuses_goes_into_error_with_an_event() {
    let host = patient_host();
    let (mut a, mut b) = pair(&host);
    b.receive(9);
    let mut write = a.write(1, &b, 0, 8);
    write.remote.rkey ^= 1;
    a.send(write);
    assert_eq!(a.next(), (1, WorkStatus::RemoteAccess));
    assert_eq!(b.control.state().unwrap(), QueuePairState::Err);
    assert_eq!(b.completed(), [(9, WorkStatus::Flushed)]);
    assert_eq!(b.hca.take_events(), [HcaEvent::QueuePairFatal { qp_num: b.control.qp_num() }]);
}

#[test]
fn a_responder_that_falls_into_error_flushes_its_own_waiting_sends() {
    let host = patient_host();
    let (mut a, mut b) = pair(&host);
    b.send(b.message(7));
    assert_eq!(b.completed(), []);
    let mut write = a.write(1, &b, 0, 8);
    write.remote.rkey ^= 1;
    a.send(write);
    assert_eq!(b.completed(), [(7, WorkStatus::Flushed)]);
}

#[test]
fn the_timer_ends_with_its_host() {
    let host = host_with(Timing { retry_exceeded: FOREVER, receiver_not_ready: None });
    let (mut a, b) = pair(&host);
    host.inject_text("hca mlx5_1: link-down port 1").unwrap();
    let write = a.write(1, &b, 0, 8);
    a.send(write);
    // Joins the timer thread, which has an hour to wait.
    drop((host, a, b));
}

#[test]
fn an_infiniband_port_has_no_lid_before_it_was_active() {
    let mut spec = spec();
    for (lid, hca) in (7..).zip(&mut spec.hcas) {
        hca.ports[0].link_layer = gdrd_hal::LinkLayer::InfiniBand;
        hca.ports[0].lid = lid;
    }
    spec.hcas[1].ports[0].state = PortState::Init;
    let host = SimHost::new(spec).unwrap();
    let (mut a, b) = ends(&host);
    assert!(matches!(b.control.endpoint(), Err(HcaError::Invalid { .. })));
    let port = |end: &support::End| end.hca.ports().unwrap().remove(0);
    assert_eq!((port(&b).state, port(&b).lid), (PortState::Init, 0));
    host.inject_text("hca mlx5_1: link-up port 1").unwrap();
    assert_eq!((port(&b).state, port(&b).lid), (PortState::Active, 8));
    let at_b = b.control.endpoint().unwrap();
    assert_eq!((at_b.lid, at_b.gid), (8, Gid::default()), "LIDs address, GIDs do not");
    connect(&a, &b);
    connect(&b, &a);
    let write = a.write(1, &b, 0, 8);
    a.send(write);
    assert_eq!(a.next(), (1, SUCCESS));
}

#[test]
fn nobody_at_a_lid_is_told_by_silence_only() {
    let mut spec = spec();
    for (lid, hca) in (7..).zip(&mut spec.hcas) {
        hca.ports[0].link_layer = gdrd_hal::LinkLayer::InfiniBand;
        hca.ports[0].lid = lid;
    }
    let timing = Timing { retry_exceeded: Duration::from_millis(1), receiver_not_ready: None };
    let host = SimHost::with_options(spec, SimOptions { timing, ..SimOptions::default() }).unwrap();
    let (mut a, b) = ends(&host);
    let mut at = b.control.endpoint().unwrap();
    at.lid = 99;
    a.control.connect(&at).unwrap();
    let write = a.write(1, &b, 0, 8);
    a.send(write);
    assert_eq!(a.next(), (1, WorkStatus::RetryExceeded));
}
