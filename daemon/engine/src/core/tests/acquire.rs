//! Acquires: cold, warm, waiting, refused.

use std::collections::BTreeMap;

use super::rig::{MIB, Rig, config, failure, on_hca, request};
use crate::core::{Effect, FailureKind, Input, Job};
use crate::policy::Quota;

#[test]
fn a_cold_acquire_allocates_registers_publishes_and_answers_in_this_order() {
    let mut rig = Rig::new(&config());
    let session = rig.session(1);
    let call = rig.ask(session, request("GPU0", 2 * MIB));
    assert_eq!(rig.pending(), ["Allocate"]);
    rig.finish(0, None);
    assert_eq!(rig.pending(), ["Register"]);
    let before = rig.trace.len();
    rig.finish(0, None);
    let done: Vec<&str> = rig.trace[before..].iter().map(|e| e.split([' ', '(']).next().unwrap_or_default()).collect();
    assert_eq!(done, ["Publish", "Answer"]);
    assert_eq!(rig.granted(call).info.registrations.len(), 2);
}

#[test]
fn a_warm_acquire_starts_no_job() {
    let mut rig = Rig::new(&config());
    let session = rig.session(1);
    let first = rig.acquire(session);
    rig.release(session, first.info.id).expect("held");
    rig.settle();
    let call = rig.ask(session, request("GPU0", 2 * MIB));
    let second = rig.granted(call);
    assert!(rig.pending().is_empty());
    assert_eq!(second.allocation, first.allocation);
    assert!(second.info.generation > first.info.generation);
}

#[test]
fn the_buffer_released_last_is_lent_first() {
    let mut rig = Rig::new(&config());
    let session = rig.session(1);
    let grants: Vec<_> = (0..3).map(|_| rig.acquire(session)).collect();
    for grant in &grants {
        rig.release(session, grant.info.id).expect("held");
        rig.settle();
    }
    let lent: Vec<_> = (0..3).map(|_| rig.acquire(session).allocation).collect();
    assert_eq!(lent, grants.iter().rev().map(|grant| grant.allocation).collect::<Vec<_>>());
}

#[test]
fn an_acquire_at_a_dry_pool_waits_for_a_returning_buffer_instead_of_making_one() {
    let mut rig = Rig::new(&config());
    let session = rig.session(1);
    let first = rig.acquire(session);
    rig.release(session, first.info.id).expect("held");
    let call = rig.ask(session, request("GPU0", 2 * MIB));
    assert_eq!(rig.pending(), ["Quiesce"]);
    rig.settle();
    assert_eq!(rig.granted(call).allocation, first.allocation);
}

#[test]
fn waiting_acquires_are_served_in_the_order_they_came() {
    let mut rig = Rig::new(&config());
    let session = rig.session(1);
    let calls: Vec<_> = (0..3).map(|_| rig.ask(session, request("GPU0", 2 * MIB))).collect();
    rig.settle();
    let leases: Vec<_> = calls.into_iter().map(|call| rig.granted(call).info.id).collect();
    assert!(leases.is_sorted());
}

#[test]
fn buffers_are_made_ahead_once_a_class_is_used_and_come_from_clean_memory() {
    let mut config = config();
    config.pool.ready_target_per_class = 2;
    config.pool.clean_target_per_class = 1;
    let mut rig = Rig::new(&config);
    let session = rig.session(1);
    let _grant = rig.acquire(session);
    assert_eq!((rig.bytes("leased"), rig.bytes("ready"), rig.bytes("clean")), (2 * MIB, 4 * MIB, 2 * MIB));
    // Another tenant's first buffer is made of the clean one: no allocation is waited for.
    let other = rig.session(2);
    rig.ask(other, request("GPU0", 2 * MIB));
    assert_eq!(rig.pending()[0], "Register");
    rig.settle();
}

#[test]
fn buffers_are_not_made_ahead_beyond_what_can_be_kept() {
    let mut config = config();
    config.pool.ready_target_per_class = 4;
    config.pool.ready_max_per_class = 4;
    let mut rig = Rig::new(&config);
    let session = rig.session(1);
    let first = rig.acquire(session);
    for _ in 0..10 {
        let grant = rig.acquire(session);
        rig.release(session, grant.info.id).expect("held");
        rig.settle();
    }
    rig.release(session, first.info.id).expect("held");
    rig.settle();
    assert_eq!((rig.core.counters.allocations, rig.core.counters.frees), (4, 0));
}

#[test]
fn what_cannot_be_made_ahead_is_not_tried_again_at_once() {
    let mut config = config();
    config.pool.ready_target_per_class = 1;
    let mut rig = Rig::new(&config);
    let session = rig.session(1);
    let call = rig.ask(session, request("GPU0", 2 * MIB));
    assert_eq!(rig.pending(), ["Allocate", "Allocate"]);
    rig.finish(1, Some(failure(FailureKind::OutOfMemory)));
    rig.settle();
    let grant = rig.granted(call);
    rig.release(session, grant.info.id).expect("held");
    rig.settle();
    let grant = rig.acquire(session);
    assert!(rig.pending().is_empty());
    rig.pass(std::time::Duration::from_secs(2));
    rig.release(session, grant.info.id).expect("held");
    rig.settle();
    rig.ask(session, request("GPU0", 2 * MIB));
    assert_eq!(rig.pending(), ["Allocate"]);
}

#[test]
fn an_acquire_that_counted_on_a_buffer_made_ahead_gets_its_own_when_that_fails() {
    let mut config = config();
    config.pool.ready_target_per_class = 1;
    let mut rig = Rig::new(&config);
    let session = rig.session(1);
    rig.ask(session, request("GPU0", 2 * MIB));
    let second = rig.ask(session, request("GPU0", 2 * MIB));
    // One for each acquire, one ahead; the one ahead was started before the second acquire came.
    rig.finish(1, Some(failure(FailureKind::OutOfMemory)));
    rig.settle();
    rig.granted(second);
}

#[test]
fn a_partly_failed_registration_frees_the_memory_and_refuses_the_call() {
    let mut rig = Rig::new(&config());
    let session = rig.session(1);
    let call = rig.ask(session, request("GPU0", 2 * MIB));
    rig.finish(0, None);
    rig.finish(0, Some(on_hca(FailureKind::Driver, 1)));
    assert_eq!(rig.refused(call).reason(), "DRIVER_FAILED");
    assert_eq!(rig.pending(), ["Free"]);
    rig.settle();
    assert!(rig.hardware.memory.is_empty());
}

#[test]
fn a_full_gpu_gives_up_idle_buffers_and_is_asked_once_more() {
    let mut rig = Rig::new(&config());
    let (one, two) = (rig.session(1), rig.session(2));
    let idle = rig.acquire(one);
    rig.release(one, idle.info.id).expect("held");
    rig.settle();
    let call = rig.ask(two, request("GPU0", 2 * MIB));
    rig.finish(0, Some(failure(FailureKind::OutOfMemory)));
    // The idle one goes first; only then the allocation is tried again.
    assert_eq!(rig.pending(), ["Deregister"]);
    rig.finish(0, None);
    assert_eq!(rig.pending(), ["Free"]);
    rig.finish(0, None);
    assert_eq!(rig.pending(), ["Allocate"]);
    rig.finish(0, Some(failure(FailureKind::OutOfMemory)));
    assert_eq!(rig.refused(call).reason(), "GPU_OUT_OF_MEMORY");
    assert!(rig.pending().is_empty());
}

#[test]
fn nothing_is_given_up_for_buffers_made_ahead() {
    let mut config = config();
    config.pool.ready_target_per_class = 2;
    let mut rig = Rig::new(&config);
    let session = rig.session(1);
    let _grant = rig.acquire(session);
    assert_eq!(rig.bytes("ready"), 4 * MIB);
    let other = rig.session(2);
    rig.ask(other, request("GPU0", 2 * MIB));
    rig.finish(2, Some(failure(FailureKind::OutOfMemory)));
    assert_eq!(rig.bytes("ready"), 4 * MIB);
    rig.settle();
}

#[test]
fn acquires_within_the_quota_wait_for_the_tenants_own_idle_buffers_to_go() {
    let mut rig = Rig::new(&config());
    let quota = Quota { max_bytes: 4 * MIB, ..Quota::default() };
    let (session, _) = rig.open_session_with(1, quota).expect("it opens");
    let grants = [rig.acquire(session), rig.acquire(session)];
    for grant in &grants {
        rig.release(session, grant.info.id).expect("held");
    }
    rig.settle();
    assert_eq!(rig.bytes("ready"), 4 * MIB);
    let call = rig.ask(session, request("GPU0", 4 * MIB));
    assert_eq!(rig.pending(), ["Deregister", "Deregister"]);
    rig.settle();
    rig.granted(call);
    assert_eq!(rig.bytes("leased"), 4 * MIB);
}

#[test]
fn a_cancelled_acquire_gives_its_place_and_promise_back() {
    let mut rig = Rig::new(&config());
    let (session, _) = rig.open_session_with(1, Quota { max_bytes: 2 * MIB, ..Quota::default() }).expect("it opens");
    let call = rig.ask(session, request("GPU0", 2 * MIB));
    let refused = rig.ask(session, request("GPU0", 2 * MIB));
    assert_eq!(rig.refused(refused).reason(), "QUOTA_BYTES");
    rig.apply(Input::Cancel { call });
    assert_eq!(rig.refused(call).reason(), "CANCELLED");
    let next = rig.ask(session, request("GPU0", 2 * MIB));
    rig.settle();
    rig.granted(next);
}

#[test]
fn waiting_acquires_of_a_session_are_bounded() {
    let mut config = config();
    config.limits.max_waiting_acquires_per_session = 2;
    let mut rig = Rig::new(&config);
    let session = rig.session(1);
    let waiting = [rig.ask(session, request("GPU0", MIB)), rig.ask(session, request("GPU0", MIB))];
    let third = rig.ask(session, request("GPU0", MIB));
    assert_eq!(rig.refused(third).reason(), "LIMIT_WAITING_ACQUIRES");
    rig.settle();
    for call in waiting {
        rig.granted(call);
    }
}

#[test]
fn registration_follows_the_plan_in_force() {
    let mut rig = Rig::new(&config());
    let session = rig.session(1);
    let mut plan = super::rig::plan();
    plan.gpus[0].hcas = vec!["mlx5_2".to_owned(), "without_backend".to_owned()];
    rig.apply(Input::Plan { plan, unserved: BTreeMap::new() });
    let grant = rig.acquire(session);
    assert_eq!(grant.info.registrations.iter().map(|r| &*r.hca).collect::<Vec<_>>(), ["mlx5_2"]);
}

#[test]
fn a_gpu_without_an_hca_that_is_served_is_refused_with_the_reason() {
    let mut rig = Rig::new(&config());
    let session = rig.session(1);
    let mut plan = super::rig::plan();
    plan.gpus[0].hcas.clear();
    rig.apply(Input::Plan { plan, unserved: BTreeMap::new() });
    let call = rig.ask(session, request("GPU0", MIB));
    let refused = rig.refused(call);
    assert_eq!(refused.reason(), "HARDWARE_ABSENT");
    assert!(refused.to_string().contains("GPU0"));
}

#[test]
fn jobs_name_the_rights_of_the_request() {
    let mut rig = Rig::new(&config());
    let session = rig.session(1);
    let mut wanted = request("GPU0", MIB);
    wanted.signal = true;
    rig.ask(session, wanted);
    rig.finish(0, None);
    let registers = rig.hardware.pending.iter().any(|p| {
        matches!(p, super::hardware::Pending::Job(Job::Register { access, .. }) if !access.relaxed_ordering && access.remote_write)
    });
    assert!(registers);
    rig.settle();
    assert!(rig.told().iter().all(|effect| !matches!(effect, Effect::Tell { .. })), "nobody watches");
}

#[test]
fn an_acquire_that_waits_for_a_slot_of_a_lost_hca_gets_it() {
    let mut rig = Rig::new(&config());
    let quota = Quota { max_registrations: 2, ..Quota::default() };
    let (session, _) = rig.open_session_with(1, quota).expect("it opens");
    let lease = rig.acquire(session).info.id;
    rig.lose_hca(1);
    rig.release(session, lease).expect("held");
    while rig.pending().len() > 1 {
        rig.finish(1, None);
    }
    let mut wanted = request("GPU0", 2 * MIB);
    wanted.hcas = vec!["mlx5_0".to_owned(), "mlx5_2".to_owned()];
    let call = rig.ask(session, wanted);
    assert_eq!(rig.pending(), ["Shed"], "one of its two slots is not free yet");
    rig.settle();
    rig.granted(call);
}

#[test]
fn an_acquire_that_waits_for_the_room_of_a_starved_buffer_gets_it_when_that_is_given_up() {
    let mut rig = Rig::new(&config());
    let other = rig.session(2);
    let idle = rig.acquire(other).info.id;
    rig.release(other, idle).expect("held");
    rig.settle();
    let quota = Quota { max_bytes: 4 * MIB, ..Quota::default() };
    let (session, _) = rig.open_session_with(1, quota).expect("it opens");
    let starved = rig.ask(session, request("GPU0", 4 * MIB));
    rig.finish(0, Some(failure(FailureKind::OutOfMemory)));
    rig.apply(Input::Cancel { call: starved });
    let call = rig.ask(session, request("GPU1", 4 * MIB));
    assert_eq!(rig.pending(), ["Deregister"], "the quota has no room, and the other tenant's buffer is leaving");
    rig.lose_gpu(0);
    rig.settle();
    rig.granted(call);
}
