//! Random inputs, with jobs that end in any order and fail at any point.

use std::time::Duration;

use gdrd_hal::Access;
use proptest::prelude::*;

use super::rig::{MIB, Rig, config, failure, on_hca, request};
use crate::config::EngineConfig;
use crate::core::{Answer, FailureKind, GrantId, Input};
use crate::ids::{LeaseId, MemoryId, QueuePairId, RegistrationId, SessionId};
use crate::lease::MemoryPlace;
use crate::policy::Quota;
use crate::registration::{AdoptedKind, MemoryRef, Merging, RangeRequest, RegisterRequest};

/// One step: what, and two choices.
pub(super) type Step = (u8, u16, u16);

#[derive(Default)]
pub(super) struct Known {
    sessions: Vec<SessionId>,
    leases: Vec<LeaseId>,
    calls: Vec<crate::core::CallId>,
    queue_pairs: Vec<QueuePairId>,
    grants: Vec<(SessionId, LeaseId, GrantId)>,
    memories: Vec<MemoryId>,
    ranges: Vec<RegistrationId>,
}

fn pick<T: Copy>(from: &[T], choice: u16) -> Option<T> {
    from.get(usize::from(choice) % from.len().max(1)).copied()
}

fn run(steps: &[Step], ahead: bool) -> Rig {
    let mut rig = Rig::new(&tight(ahead));
    let mut known = Known::default();
    go_on(&mut rig, &mut known, steps);
    finish(&mut rig, &known);
    rig
}

/// Bounds that a few steps reach.
pub(super) fn tight(ahead: bool) -> EngineConfig {
    let mut config = config();
    config.limits.registration_slots = 16;
    config.limits.max_waiting_acquires_per_session = 3;
    config.limits.max_sessions = 6;
    config.pool.ready_max_per_class = 3;
    config.cache.max_regions = 6;
    config.cache.max_idle_regions = 3;
    config.cache.max_idle_bytes = MIB;
    config.cache.merge_gap_bytes = 0x1_0000;
    config.cache.bar1_bytes = Some(9 * MIB);
    config.cache.max_memories_per_session = 3;
    config.cache.max_registrations_per_session = 8;
    if ahead {
        config.pool.ready_target_per_class = 2;
        config.pool.clean_target_per_class = 2;
        config.pool.clean_max_bytes = 12 * MIB;
    }
    config
}

pub(super) fn go_on(rig: &mut Rig, known: &mut Known, steps: &[Step]) {
    for step in steps {
        take(rig, known, *step);
        collect(rig, known);
    }
}

fn take(rig: &mut Rig, known: &mut Known, (what, a, b): Step) {
    let session = pick(&known.sessions, a);
    match (what % 32, session) {
        (0, _) | (_, None) => {
            let quota = Quota { max_bytes: 24 * MIB, max_registrations: 14, max_queue_pairs: 3, max_sessions: 4 };
            if let Ok((session, _)) = rig.open_session_with(u32::from(a % 3), quota) {
                known.sessions.push(session);
            }
        }
        (1, Some(session)) => rig.close(session),
        (2..=5, Some(session)) => {
            let sizes = [MIB, 2 * MIB, 3 * MIB, 8 * MIB];
            let mut wanted = request(["GPU0", "GPU1"][usize::from(b) % 2], sizes[usize::from(b / 2) % 4]);
            if b % 7 == 0 {
                wanted.hcas = vec!["mlx5_2".to_owned()];
            }
            if b % 11 == 0 {
                wanted.place = MemoryPlace::Host { near_gpu: Some("GPU0".to_owned()) };
            }
            wanted.signal = b % 13 == 0;
            let call = rig.ask(session, wanted);
            known.calls.push(call);
        }
        (6..=7, Some(session)) => {
            if let Some(lease) = pick(&known.leases, b) {
                let _ = rig.release(session, lease);
            }
        }
        (8, Some(session)) => {
            if let Some(lease) = pick(&known.leases, b) {
                let _ = rig.open(session, lease);
            }
        }
        (9, Some(session)) => {
            if let Some(lease) = pick(&known.leases, b) {
                let _ = rig.detach(session, lease, Duration::from_secs(u64::from(b)));
            }
        }
        (10, Some(session)) => {
            let call = rig.create_queue_pair(session);
            known.calls.push(call);
        }
        (11, Some(session)) => {
            if let Some(queue_pair) = pick(&known.queue_pairs, b) {
                let call = rig.call();
                rig.apply(Input::DestroyQueuePair { call, session, queue_pair });
            }
        }
        (12, _) => {
            if let Some(call) = pick(&known.calls, b) {
                rig.apply(Input::Cancel { call });
            }
        }
        (13, _) => rig.pass(Duration::from_millis(u64::from(b) * 37)),
        (14, _) if b % 24 == 0 => lose(rig, a, b / 24),
        (14, _) => undo(rig, known, b),
        (15, _) => rig.apply(Input::Watched { watched: b % 2 == 0 }),
        (26..=30, Some(session)) => use_cache(rig, known, session, (what % 32, a, b)),
        _ => end_one(rig, a, b),
    }
}

fn use_cache(rig: &mut Rig, known: &mut Known, session: SessionId, (what, a, b): Step) {
    match what {
        26 => {
            let kind = [AdoptedKind::Memfd, AdoptedKind::DmaBuf][usize::from(b) % 2];
            known.memories.extend(rig.try_adopt(session, kind, MIB * u64::from(1 + b % 3)));
        }
        27..=28 => register(rig, known, session, b),
        29 => {
            let ids = pick(&known.ranges, b).into_iter().chain(pick(&known.ranges, a)).collect();
            rig.deregister(session, ids);
        }
        30 => {
            if let Some(memory) = pick(&known.memories, b) {
                let call = rig.call();
                rig.apply(Input::Disown { call, session, memory });
            }
        }
        _ => {}
    }
}

fn register(rig: &mut Rig, known: &mut Known, session: SessionId, b: u16) {
    let memory = match b % 3 {
        0 => pick(&known.leases, b / 3).map(MemoryRef::Lease),
        _ => pick(&known.memories, b / 3).map(MemoryRef::Adopted),
    };
    let Some(memory) = memory else { return };
    let range = |place: u16, len: u16| RangeRequest {
        memory,
        offset: u64::from(place % 13) * 0x1_4000,
        len_bytes: 1 + u64::from(len % 7) * 0x1_1000,
    };
    let request = RegisterRequest {
        ranges: vec![range(b, b / 5), range(b / 7, b / 11)],
        access: Access { relaxed_ordering: b.is_multiple_of(4), ..Access::DATA },
        hcas: if b.is_multiple_of(5) { vec!["mlx5_0".to_owned()] } else { Vec::new() },
        merging: if b.is_multiple_of(2) { Merging::Near } else { Merging::None },
        piece_bytes: if b.is_multiple_of(17) { 2 * MIB } else { 0 },
    };
    let call = rig.ask_register(session, request);
    known.calls.push(call);
}

fn lose(rig: &mut Rig, a: u16, b: u16) {
    match a % 4 {
        0 => rig.lose_gpu(b % 2),
        1 => rig.lose_hca(b % 3),
        2 => rig.apply(Input::GpuHealthy { gpu: crate::core::GpuIndex(b % 2) }),
        _ => rig.apply(Input::PortDown { hca: crate::core::HcaIndex(b % 3), port_num: 1 }),
    }
}

fn undo(rig: &mut Rig, known: &Known, b: u16) {
    if let Some((session, lease, grant)) = pick(&known.grants, b) {
        rig.apply(Input::Undo { session, lease, grant });
    }
}

/// One pending job ends, seven times in eight well.
fn end_one(rig: &mut Rig, a: u16, b: u16) {
    let count = rig.hardware.pending.len();
    if count == 0 || rig.fuse == Some(0) {
        return;
    }
    let failed = match b % 64 {
        0..=2 => Some(failure(FailureKind::OutOfMemory)),
        3 => Some(on_hca(FailureKind::Exhausted, a % 3)),
        4 => Some(failure(FailureKind::Driver)),
        5 => Some(on_hca(FailureKind::Invalid, a % 3)),
        6 if a.is_multiple_of(8) => Some(failure(FailureKind::Lost)),
        7 if a.is_multiple_of(8) => Some(on_hca(FailureKind::Lost, a % 3)),
        _ => None,
    };
    rig.finish(usize::from(a) % count, failed);
}

fn collect(rig: &mut Rig, known: &mut Known) {
    for (_, answer) in std::mem::take(&mut rig.hardware.answers) {
        match answer {
            Ok(Answer::Granted(grant)) => {
                known.leases.push(grant.info.id);
                known.grants.push((grant.session, grant.info.id, grant.grant));
            }
            Ok(Answer::QueuePair(queue_pair)) => known.queue_pairs.push(queue_pair),
            Ok(Answer::Registered(ranges)) => known.ranges.extend(ranges),
            _ => {}
        }
    }
    rig.hardware.told.clear();
}

/// Every session closes and everything pending ends well.
pub(super) fn finish(rig: &mut Rig, known: &Known) {
    for session in &known.sessions {
        rig.close(*session);
    }
    rig.settle();
    rig.pass(Duration::from_secs(100 * 3600));
    rig.settle();
    assert!(rig.core.leases.is_empty(), "leases are left: {:?}", rig.core.leases);
    assert!(rig.core.sessions.is_empty() && rig.core.queue_pairs.is_empty() && rig.core.tenants.is_empty());
    assert!(rig.hardware.queue_pairs.is_empty());
    assert!(rig.hardware.adopted.is_empty() && rig.hardware.regions.is_empty(), "adopted memory or a region is left");
    assert!(rig.hardware.memory.values().all(|memory| memory.registered.is_empty()), "a registration is left");
    rig.apply(Input::Shutdown);
    rig.settle();
    assert!(rig.core.is_empty());
    assert!(rig.hardware.memory.is_empty(), "memory is left: {:?}", rig.hardware.memory);
    assert_eq!(rig.core.next_deadline(), None, "a deadline is left");
}

pub(super) fn steps() -> impl Strategy<Value = Vec<Step>> {
    proptest::collection::vec(any::<Step>(), 20..200)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_sequence_keeps_the_invariants_and_leaves_nothing(steps in steps()) {
        run(&steps, false);
    }

    #[test]
    fn any_sequence_with_buffers_made_ahead_keeps_the_invariants(steps in steps()) {
        run(&steps, true);
    }

    #[test]
    fn equal_inputs_have_equal_effects(steps in proptest::collection::vec(any::<Step>(), 1..60)) {
        prop_assert_eq!(run(&steps, true).trace, run(&steps, true).trace);
    }
}
