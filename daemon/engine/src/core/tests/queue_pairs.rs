//! Queue pairs by inputs and effects.

use gdrd_hal::{Endpoint, Gid, LinkLayer};

use super::rig::{Rig, config, on_hca};
use crate::core::{Answer, Effect, FailureKind, Input};
use crate::error::ErrorKind;
use crate::ids::{QueuePairId, SessionId};
use crate::session::SessionEvent;

/// The far end of a connection.
pub(crate) fn remote() -> Endpoint {
    Endpoint {
        qp_num: 7,
        port_num: 1,
        gid: Gid([1; 16]),
        gid_index: 3,
        lid: 0,
        psn: 0,
        mtu_bytes: 4096,
        link_layer: LinkLayer::Ethernet,
    }
}

fn connect(rig: &mut Rig, session: SessionId, queue_pair: QueuePairId) -> crate::core::CallId {
    let call = rig.call();
    rig.apply(Input::ConnectQueuePair { call, session, queue_pair, remote: remote() });
    call
}

#[test]
fn a_failed_creation_is_answered_and_leaves_nothing() {
    let mut rig = Rig::new(&config());
    let session = rig.session(1);
    let call = rig.create_queue_pair(session);
    rig.finish(0, Some(on_hca(FailureKind::Exhausted, 0)));
    assert_eq!(rig.refused(call).reason(), "HCA_EXHAUSTED");
    rig.close(session);
    assert!(rig.core.is_empty());
}

#[test]
fn an_argument_that_only_the_driver_refuses_is_the_callers_fault() {
    let mut rig = Rig::new(&config());
    let session = rig.session(1);
    let queue_pair = rig.queue_pair(session);
    let call = connect(&mut rig, session, queue_pair);
    rig.finish(0, Some(on_hca(FailureKind::Invalid, 0)));
    assert_eq!(rig.refused(call).reason(), "BAD_ARGUMENT");
    let call = connect(&mut rig, session, queue_pair);
    rig.finish(0, None);
    assert_eq!(rig.answer(call), Some(Ok(Answer::Done)));
}

#[test]
fn a_peer_that_does_not_answer_yet_can_be_connected_to_later() {
    let mut rig = Rig::new(&config());
    let session = rig.session(1);
    let queue_pair = rig.queue_pair(session);
    let call = connect(&mut rig, session, queue_pair);
    rig.finish(0, Some(on_hca(FailureKind::Unreachable, 0)));
    let error = rig.refused(call);
    assert_eq!((error.reason(), error.kind()), ("PEER_UNREACHABLE", ErrorKind::Unavailable));
    let call = connect(&mut rig, session, queue_pair);
    rig.finish(0, None);
    assert_eq!(rig.answer(call), Some(Ok(Answer::Done)));
}

#[test]
fn a_queue_pair_is_connected_once_at_a_time() {
    let mut rig = Rig::new(&config());
    let session = rig.session(1);
    let queue_pair = rig.queue_pair(session);
    let first = connect(&mut rig, session, queue_pair);
    let second = connect(&mut rig, session, queue_pair);
    assert_eq!(rig.refused(second).reason(), "QUEUE_PAIR_STATE");
    rig.settle();
    assert_eq!(rig.answer(first), Some(Ok(Answer::Done)));
}

#[test]
fn a_queue_pair_destroyed_while_it_connects_ends_after_that() {
    let mut rig = Rig::new(&config());
    let session = rig.session(1);
    let queue_pair = rig.queue_pair(session);
    let connecting = connect(&mut rig, session, queue_pair);
    let call = rig.call();
    rig.apply(Input::DestroyQueuePair { call, session, queue_pair });
    assert_eq!(rig.refused(connecting).reason(), "CANCELLED");
    assert_eq!(rig.pending(), ["ConnectQueuePair"]);
    rig.finish(0, None);
    assert_eq!(rig.pending(), ["DestroyQueuePair"]);
    rig.finish(0, None);
    assert_eq!(rig.answer(call), Some(Ok(Answer::Done)));
}

#[test]
fn a_cancelled_creation_is_destroyed_when_it_is_there() {
    let mut rig = Rig::new(&config());
    let session = rig.session(1);
    let call = rig.create_queue_pair(session);
    rig.apply(Input::Cancel { call });
    rig.finish(0, None);
    assert_eq!(rig.pending(), ["DestroyQueuePair"]);
    rig.settle();
    assert!(rig.hardware.queue_pairs.is_empty());
}

#[test]
fn a_failure_is_told_to_the_session_once() {
    let mut rig = Rig::new(&config());
    let session = rig.session(1);
    let queue_pair = rig.queue_pair(session);
    for _ in 0..2 {
        rig.apply(Input::QueuePairFailed { queue_pair, message: "by the test".to_owned() });
    }
    let told = rig.told();
    assert!(matches!(told.as_slice(), [Effect::TellSession { event: SessionEvent::QueuePairFailed { .. }, .. }]));
    let call = connect(&mut rig, session, queue_pair);
    assert_eq!(rig.refused(call).reason(), "QUEUE_PAIR_STATE");
}

#[test]
fn a_lost_hca_fails_its_queue_pairs() {
    let mut rig = Rig::new(&config());
    let session = rig.session(1);
    rig.queue_pair(session);
    rig.told();
    rig.lose_hca(0);
    let told = rig.told();
    assert!(told.iter().any(|e| matches!(e, Effect::TellSession { event: SessionEvent::QueuePairFailed { .. }, .. })));
    let call = rig.create_queue_pair(session);
    assert_eq!(rig.refused(call).reason(), "DEVICE_LOST");
    rig.close(session);
    rig.settle();
    assert!(rig.core.is_empty());
}

#[test]
fn a_queue_pair_that_fails_while_it_is_made_is_refused_and_destroyed() {
    for (by_hca, reason) in [(true, "DEVICE_LOST"), (false, "DRIVER_FAILED")] {
        let mut rig = Rig::new(&config());
        let session = rig.session(1);
        let call = rig.create_queue_pair(session);
        let queue_pair = *rig.core.queue_pairs.keys().next().expect("it is being made");
        match by_hca {
            true => rig.lose_hca(0),
            false => rig.apply(Input::QueuePairFailed { queue_pair, message: "by the test".to_owned() }),
        }
        rig.finish(0, None);
        assert_eq!(rig.refused(call).reason(), reason);
        let told = rig.told();
        let unknown = |e: &Effect| matches!(e, Effect::TellSession { .. });
        assert!(!told.iter().any(unknown), "its client was never told of it: {told:?}");
        assert_eq!(rig.pending(), ["DestroyQueuePair"]);
        rig.settle();
        assert!(rig.core.queue_pairs.is_empty());
    }
}

#[test]
fn foreign_queue_pairs_are_unknown() {
    let mut rig = Rig::new(&config());
    let (one, two) = (rig.session(1), rig.session(2));
    let queue_pair = rig.queue_pair(one);
    let foreign = connect(&mut rig, two, queue_pair);
    let never = connect(&mut rig, two, QueuePairId(u64::MAX));
    let (foreign, never) = (rig.refused(foreign), rig.refused(never));
    assert_eq!(foreign.to_string(), never.to_string().replace(&u64::MAX.to_string(), &queue_pair.to_string()));
}
