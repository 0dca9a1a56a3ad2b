//! How leases and sessions end, and in which order.

use std::time::Duration;

use super::rig::{MIB, Rig, config, failure, request};
use crate::core::{Change, Effect, FailureKind, Input};
use crate::ids::{Generation, QueuePairId};

#[test]
fn a_release_retires_quiesces_deregisters_scrubs_and_registers_in_this_order() {
    let mut rig = Rig::new(&config());
    let session = rig.session(1);
    let grant = rig.acquire(session);
    let before = rig.trace.len();
    rig.release(session, grant.info.id).expect("held");
    let done: Vec<&str> = rig.trace[before..].iter().map(|e| e.split([' ', '(']).next().unwrap_or_default()).collect();
    assert_eq!(done, ["Answer", "Retire", "Quiesce"]);
    for job in ["Quiesce", "Deregister", "Scrub", "Register"] {
        assert_eq!(rig.pending(), [job]);
        rig.finish(0, None);
    }
    assert_eq!(rig.bytes("ready"), 2 * MIB);
}

#[test]
fn a_lease_ends_with_its_last_holder() {
    let mut rig = Rig::new(&config());
    let (one, two) = (rig.session(1), rig.session(1));
    let lease = rig.acquire(one).info.id;
    assert_eq!(rig.open(two, lease).expect("the same tenant").info.holders, 2);
    rig.release(one, lease).expect("held");
    assert!(rig.pending().is_empty());
    assert_eq!(rig.release(one, lease).expect_err("not any more").reason(), "LEASE_NOT_HELD");
    rig.close(two);
    assert_eq!(rig.pending(), ["Quiesce"]);
}

#[test]
fn a_stale_generation_releases_nothing() {
    let mut rig = Rig::new(&config());
    let session = rig.session(1);
    let grant = rig.acquire(session);
    let (lease, call) = (grant.info.id, rig.call());
    let generation = Some(Generation(grant.info.generation.0 - 1));
    rig.apply(Input::Release { call, session, lease, generation, receives: None });
    assert_eq!(rig.refused(call).reason(), "GENERATION_STALE");
    assert!(rig.pending().is_empty());
}

#[test]
fn posted_receives_hold_up_only_the_last_holders_release() {
    let mut rig = Rig::new(&config());
    let (one, two) = (rig.session(1), rig.session(1));
    let lease = rig.acquire(one).info.id;
    rig.open(two, lease).expect("the same tenant");
    let receives = Some(QueuePairId(77));
    let mut release = |session| {
        let call = rig.call();
        rig.apply(Input::Release { call, session, lease, generation: None, receives });
        rig.answer(call).expect("answered at once")
    };
    assert!(release(one).is_ok());
    let refused = release(two).expect_err("receives are posted");
    assert!(refused.to_string().contains("queue pair 77"));
}

#[test]
fn requests_that_do_not_end_are_flushed_when_the_drain_is_over() {
    let mut rig = Rig::new(&config());
    let session = rig.session(1);
    let grant = rig.acquire(session);
    rig.release(session, grant.info.id).expect("held");
    rig.pass(Duration::from_millis(1999));
    assert!(rig.hardware.flushed.is_empty());
    rig.pass(Duration::from_millis(1));
    assert_eq!(rig.hardware.flushed, grant.info.registrations.iter().map(|r| r.slot).collect::<Vec<_>>());
    rig.settle();
    assert_eq!(rig.bytes("ready"), 2 * MIB);
}

#[test]
fn those_who_were_lent_memory_are_told_once_when_it_is_freed() {
    let mut rig = Rig::new(&config());
    let (one, two, other) = (rig.session(1), rig.session(1), rig.session(1));
    let grant = rig.acquire(one);
    rig.open(two, grant.info.id).expect("the same tenant");
    rig.acquire(other);
    for session in [one, two] {
        rig.release(session, grant.info.id).expect("held");
    }
    rig.settle();
    let told = |rig: &Rig| {
        let gone = |effect: &&String| effect.starts_with("MemoryGone");
        rig.trace.iter().filter(gone).cloned().collect::<Vec<_>>()
    };
    assert!(told(&rig).is_empty(), "it waits in the pool, to be lent again");
    rig.lose_gpu(0);
    rig.settle();
    let of = |session| format!("{:?}", Effect::MemoryGone { session, allocation: grant.allocation });
    let first: Vec<String> = told(&rig).into_iter().filter(|told| *told == of(one) || *told == of(two)).collect();
    assert_eq!(first, [of(one), of(two)]);
    assert!(!told(&rig).contains(&of(other)), "it was lent another");
    let again = rig.session(1);
    assert!(!told(&rig).iter().any(|told| *told == of(again)));
}

#[test]
fn a_quiet_release_leaves_no_deadline_of_its_own() {
    let mut rig = Rig::new(&config());
    let session = rig.session(1);
    let grant = rig.acquire(session);
    let before = rig.core.next_deadline();
    rig.release(session, grant.info.id).expect("held");
    assert!(rig.core.next_deadline() < before);
    rig.settle();
    assert_eq!(rig.core.next_deadline(), before);
}

#[test]
fn the_queue_pairs_of_a_session_end_before_its_buffers() {
    let mut rig = Rig::new(&config());
    let session = rig.session(1);
    let _grant = rig.acquire(session);
    rig.queue_pair(session);
    rig.queue_pair(session);
    rig.close(session);
    assert_eq!(rig.pending(), ["DestroyQueuePair", "DestroyQueuePair"]);
    assert_ne!(rig.hardware.live_slots(crate::core::TenantId(1)), 0, "slots stay open while queue pairs use them");
    rig.finish(0, None);
    assert_eq!(rig.pending(), ["DestroyQueuePair"]);
    rig.finish(0, None);
    assert_eq!(rig.pending(), ["Quiesce"]);
    rig.settle();
    assert!(rig.core.is_empty());
}

#[test]
fn the_last_session_takes_the_ready_pool_with_it_wherever_buffers_are() {
    // Each stage of a returning buffer, and of one being made.
    for stage in 0..6 {
        let mut rig = Rig::new(&config());
        let session = rig.session(1);
        let grant = rig.acquire(session);
        rig.release(session, grant.info.id).expect("held");
        for _ in 0..stage {
            if !rig.hardware.pending.is_empty() {
                rig.finish(0, None);
            }
        }
        rig.ask(session, request("GPU1", MIB));
        rig.close(session);
        rig.settle();
        assert!(rig.core.is_empty() && rig.hardware.memory.is_empty(), "stage {stage}");
    }
}

#[test]
fn a_tenant_that_comes_back_while_its_buffers_go_is_served() {
    let mut rig = Rig::new(&config());
    let session = rig.session(1);
    let _grant = rig.acquire(session);
    rig.close(session);
    let again = rig.session(1);
    let call = rig.ask(again, request("GPU0", 2 * MIB));
    rig.settle();
    rig.granted(call);
}

#[test]
fn a_detached_lease_ends_when_its_time_is_over() {
    let mut rig = Rig::new(&config());
    let session = rig.session(1);
    let lease = rig.acquire(session).info.id;
    rig.detach(session, lease, Duration::from_secs(10)).expect("held");
    rig.close(session);
    rig.settle();
    rig.pass(Duration::from_secs(9));
    assert_eq!(rig.core.lease_info(lease).expect("alive").ttl, Some(Duration::from_secs(1)));
    rig.pass(Duration::from_secs(1));
    assert!(rig.core.lease_info(lease).is_none());
    rig.settle();
    assert!(rig.core.is_empty());
}

#[test]
fn opening_a_detached_lease_ends_its_time_to_live() {
    let mut rig = Rig::new(&config());
    let session = rig.session(1);
    let lease = rig.acquire(session).info.id;
    rig.detach(session, lease, Duration::from_secs(10)).expect("held");
    rig.close(session);
    let next = rig.session(1);
    rig.open(next, lease).expect("the same tenant");
    rig.pass(Duration::from_secs(100));
    assert!(rig.core.lease_info(lease).is_some());
    rig.close(next);
    assert!(rig.core.lease_info(lease).is_none());
}

#[test]
fn a_released_lease_does_not_live_on_though_it_was_detached() {
    let mut rig = Rig::new(&config());
    let session = rig.session(1);
    let lease = rig.acquire(session).info.id;
    rig.detach(session, lease, Duration::from_secs(10)).expect("held");
    rig.release(session, lease).expect("held");
    assert!(rig.core.lease_info(lease).is_none());
}

#[test]
fn an_undone_grant_takes_back_only_its_own_hold() {
    let mut rig = Rig::new(&config());
    let session = rig.session(1);
    let first = rig.acquire(session);
    let lease = first.info.id;
    let second = rig.open(session, lease).expect("held already");
    assert_eq!(second.info.holders, 1);
    rig.apply(Input::Undo { session, lease, grant: second.grant });
    assert!(rig.core.lease_info(lease).is_some());
    rig.apply(Input::Undo { session, lease, grant: second.grant });
    assert!(rig.core.lease_info(lease).is_some(), "undone once only");
    rig.apply(Input::Undo { session, lease, grant: first.grant });
    assert!(rig.core.lease_info(lease).is_none());
}

#[test]
fn memory_that_cannot_be_zeroed_is_freed() {
    let mut rig = Rig::new(&config());
    let session = rig.session(1);
    let grant = rig.acquire(session);
    rig.release(session, grant.info.id).expect("held");
    rig.finish(0, None);
    rig.finish(0, None);
    rig.finish(0, Some(failure(FailureKind::Driver)));
    assert_eq!(rig.pending(), ["Free"]);
    rig.settle();
}

#[test]
fn pools_shrink_to_nothing_when_they_are_idle() {
    let mut config = config();
    config.pool.ready_target_per_class = 2;
    config.pool.clean_target_per_class = 2;
    let mut rig = Rig::new(&config);
    let session = rig.session(1);
    let grant = rig.acquire(session);
    rig.release(session, grant.info.id).expect("held");
    rig.settle();
    assert_ne!(rig.bytes("ready") + rig.bytes("clean"), 0);
    rig.pass(config.pool.idle);
    rig.settle();
    assert!(rig.hardware.memory.is_empty());
    assert_eq!(rig.core.next_deadline(), None, "an idle engine wakes for nothing");
}

#[test]
fn watchers_are_told_of_each_change() {
    let mut rig = Rig::new(&config());
    rig.apply(Input::Watched { watched: true });
    let session = rig.session(1);
    let lease = rig.acquire(session).info.id;
    rig.release(session, lease).expect("held");
    let told = rig.told();
    let [
        Effect::Tell { change: Change::Acquired(info), .. },
        Effect::Tell { change: Change::Released { lease: ended, reason, .. }, .. },
    ] = told.as_slice()
    else {
        panic!("{told:?}")
    };
    assert_eq!((info.id, *ended, *reason), (lease, lease, "RELEASED"));
}
