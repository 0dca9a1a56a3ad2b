//! The daemon dies after any effect, and the next one takes up what is left: no lease of a living client is lost, no
//! memory crosses tenants (the stand-in hardware checks that), nothing is leaked.

use std::collections::BTreeSet;
use std::time::Duration;

use proptest::prelude::*;

use super::random::{Known, Step, finish, go_on, steps, tight};
use super::rig::{MIB, Rig, config, failure, request};
use crate::core::{Effect, FailureKind, Input};
use crate::ids::{LeaseId, SessionId};

/// What living clients have is there.
fn assert_nothing_lost(rig: &Rig) {
    for (session, lease) in &rig.hardware.held {
        assert!(rig.core.sessions.contains_key(session), "session {session} of a living client is lost");
        let holders = rig.core.leases.get(lease).map(|lease| lease.holders.contains(*session));
        assert_eq!(holders, Some(true), "lease {lease} of session {session} is lost");
    }
    let sessions: BTreeSet<SessionId> = rig.core.sessions.keys().copied().collect();
    assert!(sessions.is_subset(&rig.hardware.connected), "a session without a client goes on");
}

/// The daemon dies after so many effects, comes back, and goes on with other steps to the end.
fn crash(before: &[Step], fuse: usize, after: &[Step], ahead: bool) {
    let mut rig = Rig::journaling(&tight(ahead));
    let mut known = Known::default();
    rig.fuse = Some(fuse);
    go_on(&mut rig, &mut known, before);
    let mut rig = rig.restart();
    assert_nothing_lost(&rig);
    rig.settle();
    assert_nothing_lost(&rig);
    go_on(&mut rig, &mut known, after);
    // A second death, between two inputs.
    let mut rig = rig.restart();
    assert_nothing_lost(&rig);
    finish(&mut rig, &known);
    assert!(rig.hardware.journal.is_empty(), "the journal remembers what is gone: {:?}", rig.hardware.journal);
    assert!(rig.core.names().is_empty() && rig.hardware.kept.is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 192, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_death_at_any_effect_loses_and_leaks_nothing(
        before in steps(), fuse in 0_usize..400, after in proptest::collection::vec(any::<Step>(), 0..60), ahead: bool,
    ) {
        crash(&before, fuse, &after, ahead);
    }
}

/// Two sessions of a tenant and one of another, with every kind of change of a lease.
fn scenario(rig: &mut Rig) {
    let one = rig.open_session_with(1, Default::default());
    let other = rig.open_session_with(1, Default::default());
    let foreign = rig.open_session_with(2, Default::default());
    let (Ok((one, _)), Ok((other, _)), Ok((foreign, _))) = (one, other, foreign) else { return };
    for session in [one, one, foreign] {
        rig.ask(session, request("GPU0", 2 * MIB));
        settle(rig);
    }
    let leases: Vec<LeaseId> = rig.core.leases.iter().map(|(id, _)| *id).collect();
    for lease in &leases {
        let _ = rig.open(other, *lease);
    }
    if let Some(first) = leases.first() {
        let _ = rig.detach(one, *first, Duration::from_secs(5));
        let _ = rig.release(other, *first);
    }
    rig.create_queue_pair(one);
    settle(rig);
    rig.close(one);
    settle(rig);
    if let Some(last) = leases.get(1) {
        let _ = rig.release(other, *last);
    }
    settle(rig);
    rig.pass(Duration::from_secs(6));
    settle(rig);
}

fn settle(rig: &mut Rig) {
    while !rig.hardware.pending.is_empty() && rig.fuse != Some(0) {
        rig.finish(0, None);
    }
}

#[test]
fn every_prefix_of_the_effects_of_a_scenario_can_be_taken_up() {
    for fuse in 0.. {
        let mut rig = Rig::journaling(&config());
        rig.fuse = Some(fuse);
        scenario(&mut rig);
        let whole = rig.fuse != Some(0);
        let mut rig = rig.restart();
        assert_nothing_lost(&rig);
        rig.settle();
        assert_nothing_lost(&rig);
        for session in rig.hardware.connected.clone() {
            rig.close(session);
        }
        rig.settle();
        rig.pass(Duration::from_secs(10));
        rig.settle();
        assert!(rig.core.leases.is_empty() && rig.core.tenants.is_empty());
        if whole {
            assert!(fuse > 50, "the scenario has {fuse} effects");
            return;
        }
    }
}

/// One session with one lease, before and after a death.
fn resumed() -> (Rig, SessionId, LeaseId) {
    let mut rig = Rig::journaling(&config());
    let session = rig.session(1);
    let lease = rig.acquire(session).info.id;
    (rig, session, lease)
}

#[test]
fn registrations_come_back_under_later_generations_and_are_announced() {
    let (rig, session, lease) = resumed();
    let before = rig.core.lease_info(lease).expect("it is there");
    let mut rig = rig.restart();
    rig.apply(Input::Watched { watched: true });
    rig.settle();
    let after = rig.core.lease_info(lease).expect("it is still there");
    assert!(after.generation > before.generation);
    for (before, after) in before.registrations.iter().zip(&after.registrations) {
        assert_eq!(before.hca, after.hca);
        assert!(before.slot != after.slot || before.generation < after.generation, "a stale entry would fit");
    }
    assert_eq!(after.registrations.len(), before.registrations.len());
    let rekeyed = |effect: &Effect| matches!(effect, Effect::Tell { change: crate::core::Change::Rekeyed(info), .. } if info.id == lease);
    assert!(rig.told().iter().any(rekeyed));
    rig.release(session, lease).expect("it is the session's");
}

#[test]
fn a_lease_that_cannot_be_registered_again_lives_on_for_its_mappings() {
    let (rig, session, lease) = resumed();
    let mut rig = rig.restart();
    assert!(rig.core.is_remaking());
    rig.finish(0, Some(failure(FailureKind::Driver)));
    assert!(!rig.core.is_remaking());
    assert!(rig.core.leases[&lease].is_revoked());
    rig.release(session, lease).expect("it is the session's");
    rig.settle();
    assert!(rig.hardware.memory.is_empty());
}

#[test]
fn a_lease_released_while_it_is_remade_is_freed() {
    let (rig, session, lease) = resumed();
    let mut rig = rig.restart();
    rig.release(session, lease).expect("it is the session's");
    rig.settle();
    assert!(rig.core.leases.is_empty() && rig.hardware.memory.is_empty());
}

#[test]
fn a_gpu_lost_while_leases_are_remade_revokes_them() {
    let (rig, _, lease) = resumed();
    let mut rig = rig.restart();
    rig.lose_gpu(0);
    rig.settle();
    assert!(rig.core.leases[&lease].is_revoked());
}

#[test]
fn a_session_whose_client_died_meanwhile_ends() {
    let (mut rig, session, _) = resumed();
    rig.hardware.connected.clear();
    rig.hardware.held.clear();
    let mut rig = rig.restart();
    rig.settle();
    assert!(!rig.core.sessions.contains_key(&session));
    assert!(rig.core.leases.is_empty() && rig.hardware.memory.is_empty() && rig.core.tenants.is_empty());
}

#[test]
fn a_detached_lease_lives_for_the_rest_of_its_time() {
    let (mut rig, session, lease) = resumed();
    rig.detach(session, lease, Duration::from_secs(10)).expect("it is held");
    rig.close(session);
    rig.pass(Duration::from_secs(4));
    let mut rig = rig.restart();
    rig.settle();
    rig.pass(Duration::from_secs(5));
    assert!(rig.core.leases.contains_key(&lease));
    rig.pass(Duration::from_secs(2));
    assert!(!rig.core.leases.contains_key(&lease));
}

#[test]
fn numbers_are_never_given_twice() {
    let (rig, session, lease) = resumed();
    let last = rig.core.last_number;
    let mut rig = rig.restart();
    rig.settle();
    let next = rig.acquire(session).info.id;
    assert!(next.0 > last && next > lease);
}

#[test]
fn numbers_are_never_given_twice_by_daemons_that_die_at_once() {
    let mut rig = Rig::journaling(&config());
    let (_, one) = rig.open_session_with(1, Default::default()).expect("it opens");
    let last = rig.core.last_number;
    let mut rig = rig.restart().restart();
    assert!(rig.core.last_number >= last, "{} was given before", rig.core.last_number + 1);
    let (_, other) = rig.open_session_with(2, Default::default()).expect("it opens");
    assert_ne!(one, other, "two users are one tenant");
}

#[test]
fn an_hca_lost_while_leases_are_remade_revokes_them() {
    let (rig, _, lease) = resumed();
    let mut rig = rig.restart();
    rig.lose_hca(1);
    assert!(rig.core.leases[&lease].is_revoked());
    rig.settle();
    assert!(rig.hardware.memory.values().all(|memory| memory.registered.is_empty()));
}

#[test]
fn a_lease_that_had_lost_an_hca_goes_on_with_what_it_has_left() {
    let (mut rig, session, lease) = resumed();
    rig.lose_hca(1);
    rig.settle();
    let mut rig = rig.restart_with(&["mlx5_0", "mlx5_2"]);
    rig.settle();
    let info = rig.core.lease_info(lease).expect("it is there");
    assert!(!rig.core.leases[&lease].is_revoked(), "{:?}", rig.core.leases[&lease]);
    assert_eq!(info.registrations.iter().map(|r| &*r.hca).collect::<Vec<_>>(), ["mlx5_0"]);
    rig.release(session, lease).expect("it is the session's");
    rig.settle();
}

#[test]
fn a_detached_lease_that_is_revoked_by_a_restart_ends() {
    for (hcas, failed) in [(&["mlx5_0", "mlx5_1"][..], true), (&["mlx5_0"], false)] {
        let (mut rig, session, lease) = resumed();
        rig.detach(session, lease, Duration::from_secs(10)).expect("it is held");
        rig.close(session);
        let mut rig = rig.restart_with(hcas);
        if failed {
            rig.finish(0, Some(failure(FailureKind::Driver)));
        }
        assert!(rig.core.leases.is_empty(), "nobody has any use of it");
        rig.settle();
        assert!(rig.hardware.memory.is_empty());
    }
}

#[test]
fn queue_pairs_come_back_in_error_and_can_be_destroyed() {
    let (mut rig, session, _) = resumed();
    let queue_pair = rig.queue_pair(session);
    let mut rig = rig.restart();
    rig.settle();
    let (listed, _) = rig.core.queue_pair_page(&crate::core::Seen::All, None, 0);
    assert_eq!(listed, [(queue_pair, gdrd_hal::QueuePairState::Err)]);
    let call = rig.call();
    rig.apply(Input::DestroyQueuePair { call, session, queue_pair });
    rig.settle();
    assert!(rig.answer(call).expect("it is answered").is_ok());
    assert!(rig.core.queue_pairs.is_empty() && rig.hardware.journal.queue_pairs.is_empty());
}
