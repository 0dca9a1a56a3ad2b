//! Lost devices.

use super::rig::{MIB, Rig, config, failure, on_hca, ranges_of, request};
use crate::core::{Answer, Change, Effect, FailureKind, Input};
use crate::lease::LeaseState;
use crate::registration::{MemoryRef, RangeRequest, RegisterRequest};

#[test]
fn a_lost_gpu_revokes_its_leases_and_keeps_their_memory_until_they_are_released() {
    let mut rig = Rig::new(&config());
    let session = rig.session(1);
    let grant = rig.acquire(session);
    rig.lose_gpu(0);
    assert_eq!(rig.core.lease_info(grant.info.id).expect("held on").state, LeaseState::Revoked);
    rig.settle();
    assert_eq!(rig.hardware.memory.len(), 1, "its mappings stay valid");
    assert!(rig.hardware.memory.values().all(|memory| memory.registered.is_empty()));
    rig.release(session, grant.info.id).expect("held");
    assert_eq!(rig.pending(), ["Free"]);
    rig.settle();
}

#[test]
fn a_lease_released_while_it_is_being_revoked_is_freed() {
    let mut rig = Rig::new(&config());
    let session = rig.session(1);
    let grant = rig.acquire(session);
    rig.lose_gpu(0);
    rig.release(session, grant.info.id).expect("held");
    rig.settle();
    assert!(rig.hardware.memory.is_empty());
}

#[test]
fn a_detached_lease_on_a_lost_gpu_ends() {
    let mut rig = Rig::new(&config());
    let session = rig.session(1);
    let lease = rig.acquire(session).info.id;
    rig.detach(session, lease, std::time::Duration::from_secs(60)).expect("held");
    rig.close(session);
    rig.lose_gpu(0);
    rig.settle();
    assert!(rig.core.is_empty());
}

#[test]
fn acquires_that_wait_on_a_lost_gpu_fail_and_later_ones_are_refused() {
    let mut rig = Rig::new(&config());
    let session = rig.session(1);
    let waiting = rig.ask(session, request("GPU0", MIB));
    let elsewhere = rig.ask(session, request("GPU1", MIB));
    rig.lose_gpu(0);
    assert_eq!(rig.refused(waiting).reason(), "DEVICE_LOST");
    let later = rig.ask(session, request("GPU0", MIB));
    assert_eq!(rig.refused(later).reason(), "DEVICE_LOST");
    rig.settle();
    rig.granted(elsewhere);
}

#[test]
fn a_job_that_finds_its_gpu_lost_loses_it_for_all() {
    let mut rig = Rig::new(&config());
    let session = rig.session(1);
    let held = rig.acquire(session);
    let call = rig.ask(session, request("GPU0", 2 * MIB));
    rig.finish(0, Some(failure(FailureKind::Lost)));
    assert_eq!(rig.refused(call).reason(), "DEVICE_LOST");
    assert_eq!(rig.core.lease_info(held.info.id).expect("held on").state, LeaseState::Revoked);
    rig.settle();
}

#[test]
fn a_lost_hca_takes_one_registration_and_rekeys_the_lease() {
    let mut rig = Rig::new(&config());
    rig.apply(crate::core::Input::Watched { watched: true });
    let session = rig.session(1);
    let grant = rig.acquire(session);
    rig.told();
    rig.lose_hca(1);
    let told = rig.told();
    let rekeyed = told.iter().find_map(|effect| match effect {
        Effect::Tell { change: Change::Rekeyed(info), .. } => Some(info),
        _ => None,
    });
    let rekeyed = rekeyed.expect("the lease is re-keyed");
    assert_eq!(rekeyed.registrations, grant.info.registrations[..1]);
    assert!(rekeyed.generation > grant.info.generation);
    assert_eq!(rig.pending(), ["Shed"]);
    rig.settle();
    // What lacks a registration is not lent again.
    rig.release(session, grant.info.id).expect("held");
    rig.settle();
    assert!(rig.hardware.memory.is_empty());
}

#[test]
fn a_lease_whose_only_hca_is_lost_is_revoked() {
    let mut rig = Rig::new(&config());
    let session = rig.session(1);
    let call = rig.ask(session, request("GPU1", MIB));
    rig.settle();
    let grant = rig.granted(call);
    rig.lose_hca(2);
    assert_eq!(rig.core.lease_info(grant.info.id).expect("held on").state, LeaseState::Revoked);
    rig.settle();
}

#[test]
fn ready_buffers_on_a_lost_hca_go() {
    let mut rig = Rig::new(&config());
    let session = rig.session(1);
    let grant = rig.acquire(session);
    rig.release(session, grant.info.id).expect("held");
    rig.settle();
    rig.lose_hca(0);
    rig.settle();
    assert!(rig.hardware.memory.is_empty());
}

#[test]
fn an_exhausted_hca_gives_up_idle_registrations_of_its_own_only() {
    let mut rig = Rig::new(&config());
    let session = rig.session(1);
    let near = rig.acquire(session);
    let call = rig.ask(session, request("GPU1", 2 * MIB));
    rig.settle();
    let far = rig.granted(call);
    rig.release(session, near.info.id).expect("held");
    rig.release(session, far.info.id).expect("held");
    rig.settle();
    let call = rig.ask(session, request("GPU1", 4 * MIB));
    rig.finish(0, None);
    rig.finish(0, Some(on_hca(FailureKind::Exhausted, 2)));
    assert_eq!(rig.pending(), ["Deregister"]);
    rig.settle();
    rig.granted(call);
    assert_eq!(rig.bytes("ready"), 2 * MIB, "the other hca's stay");
}

#[test]
fn a_region_made_while_its_hca_was_lost_ends_and_its_calls_fail() {
    let mut rig = Rig::new(&config());
    let session = rig.session(1);
    let memory = rig.adopt(session, MIB);
    let call = rig.ask_register(session, ranges_of(memory, std::slice::from_ref(&(0..MIB))));
    rig.lose_hca(0);
    rig.finish(0, None);
    assert_eq!(rig.refused(call).reason(), "DEVICE_LOST");
    assert_eq!(rig.pending(), ["QuiesceRegion"]);
    rig.settle();
    assert_eq!(rig.regions(), 0);
}

/// A lease with an idle region of all of it, with an HCA of its own.
fn with_region(rig: &mut Rig, session: crate::ids::SessionId) -> crate::ids::LeaseId {
    let lease = rig.acquire(session).info.id;
    let range = RangeRequest { memory: MemoryRef::Lease(lease), offset: 0, len_bytes: 2 * MIB };
    let request = ranges_of(crate::ids::MemoryId(0), &[]);
    let call =
        rig.ask_register(session, RegisterRequest { ranges: vec![range], hcas: vec!["mlx5_2".to_owned()], ..request });
    rig.settle();
    let registrations = rig.registered(call);
    rig.deregister(session, registrations);
    lease
}

#[test]
fn a_buffer_whose_region_cannot_be_ended_is_never_lent_again() {
    for held in [true, false] {
        let mut rig = Rig::new(&config());
        let session = rig.session(1);
        let lease = with_region(&mut rig, session);
        if held {
            rig.pass(config().cache.idle);
        } else {
            rig.release(session, lease).expect("held");
        }
        while rig.pending().first().is_some_and(|job| job != "DeregisterRegion") {
            rig.finish(0, None);
        }
        rig.finish(0, Some(on_hca(FailureKind::Driver, 2)));
        rig.settle();
        if held {
            rig.release(session, lease).expect("held");
            rig.settle();
        }
        assert!(rig.hardware.memory.is_empty(), "held {held}");
        // What counted on it gets another.
        rig.acquire(session);
    }
}

#[test]
fn a_caller_that_waits_for_a_tainted_buffer_to_return_gets_another() {
    let mut rig = Rig::new(&config());
    let session = rig.session(1);
    let lease = with_region(&mut rig, session);
    rig.release(session, lease).expect("held");
    let call = rig.ask(session, request("GPU0", 2 * MIB));
    while rig.pending().first().is_some_and(|job| job != "DeregisterRegion") {
        rig.finish(0, None);
    }
    rig.finish(0, Some(on_hca(FailureKind::Driver, 2)));
    rig.settle();
    rig.granted(call);
}

#[test]
fn memory_given_up_that_an_hca_may_still_reach_is_told_to_who_gives_it_up() {
    for (kind, told) in [(FailureKind::Driver, Some("DRIVER_FAILED")), (FailureKind::Lost, None)] {
        let mut rig = Rig::new(&config());
        let session = rig.session(1);
        let memory = rig.adopt(session, MIB);
        rig.register(session, memory, std::slice::from_ref(&(0..MIB)));
        let call = rig.call();
        rig.apply(Input::Disown { call, session, memory });
        rig.finish(0, None);
        rig.finish(0, Some(on_hca(kind, 0)));
        rig.settle();
        match told {
            Some(reason) => assert_eq!(rig.refused(call).reason(), reason),
            None => assert_eq!(rig.answer(call), Some(Ok(Answer::Done)), "an hca that is gone reaches nothing"),
        }
        assert!(rig.hardware.adopted.is_empty());
    }
}
