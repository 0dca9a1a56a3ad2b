//! The registration cache: what others have reported of theirs, each with what must happen here.
#![allow(clippy::single_range_in_vec_init, reason = "one range to register is a list of one range")]

use std::time::Duration;

use gdrd_hal::Access;

use super::rig::{MIB, Rig, config, on_hca, ranges_of};
use crate::config::EngineConfig;
use crate::core::{Answer, FailureKind, Input, Job};
use crate::error::EngineError;
use crate::ids::MemoryId;
use crate::policy::Quota;
use crate::registration::{AdoptedKind, MemoryRef, Merging, RegisterRequest};

fn rig() -> Rig {
    Rig::new(&config())
}

fn with(change: impl FnOnce(&mut EngineConfig)) -> Rig {
    let mut config = config();
    change(&mut config);
    Rig::new(&config)
}

fn near(request: RegisterRequest) -> RegisterRequest {
    RegisterRequest { merging: Merging::Near, ..request }
}

fn disown(rig: &mut Rig, session: crate::ids::SessionId, memory: MemoryId) -> crate::core::CallId {
    let call = rig.call();
    rig.apply(Input::Disown { call, session, memory });
    call
}

#[test]
fn a_range_within_a_registered_one_is_a_hit() {
    let mut rig = rig();
    let session = rig.session(1);
    let memory = rig.adopt(session, 16 * MIB);
    rig.register(session, memory, &[0..8 * MIB]);
    let call = rig.ask_register(session, ranges_of(memory, &[MIB..2 * MIB]));
    assert_eq!(rig.pending(), Vec::<String>::new(), "no driver call");
    let registrations = rig.registered(call);
    let (range, _) = rig.core.registered_range(registrations[0]).unwrap();
    let part = &range.parts[0];
    assert_eq!((part.offset, part.slot_offset, part.registration.iova), (0, MIB, MIB));
    assert_eq!((rig.figure("gdrd_cache_asked_total"), rig.figure("gdrd_cache_misses_total")), (2, 1));
}

#[test]
fn memory_adopted_again_is_other_memory() {
    // openucx/ucx#4269, openucx/ucx#5910, openucx/ucx#11723, NCCL's reg.cc: a new allocation at the address of a freed
    // one, or another descriptor for a range that is known. There are no addresses and no descriptors here:
    // what is adopted anew has a new number.
    let mut rig = rig();
    let session = rig.session(1);
    let first = rig.adopt(session, MIB);
    rig.register(session, first, &[0..MIB]);
    disown(&mut rig, session, first);
    rig.settle();
    let second = rig.adopt(session, MIB);
    assert_ne!(first, second);
    rig.register(session, second, &[0..MIB]);
    assert_eq!(rig.figure("gdrd_cache_misses_total"), 2);
    let call = rig.ask_register(session, ranges_of(first, &[0..MIB]));
    assert_eq!(rig.refused(call), EngineError::UnknownMemory { memory: first.0 });
}

#[test]
fn freed_memory_leaves_no_region_behind_whoever_holds_one() {
    // ofiwg/libfabric#8081, NVIDIA/cuDecomp#47, open-mpi/ompi#11125.
    let mut rig = rig();
    let session = rig.session(1);
    let memory = rig.adopt(session, 1024 * MIB);
    let held = rig.register(session, memory, &[0..512 * MIB]);
    let idle = rig.register(session, memory, &[512 * MIB..1024 * MIB]);
    rig.deregister(session, idle);
    assert_eq!(rig.figure("gdrd_cache_idle_bytes"), 512 * MIB);
    let call = disown(&mut rig, session, memory);
    assert_eq!(rig.answer(call), None, "answered only once no hca reaches it");
    rig.settle();
    assert_eq!(rig.answer(call), Some(Ok(Answer::Done)));
    assert_eq!((rig.regions(), rig.figure("gdrd_adopted_bytes")), (0, 0));
    // meta-pytorch/torchcomms#1356, Mellanox/nv_peer_memory#14: what is gone already is done.
    assert_eq!(rig.deregister(session, held), 0);
}

#[test]
fn free_and_deregister_in_either_order_leave_nothing() {
    // Mellanox/nv_peer_memory#53, #92, #120: the two race.
    for (first, rounds) in [(true, 5_000), (false, 5_000)] {
        let mut rig = rig();
        let session = rig.session(1);
        for round in 0..rounds {
            let memory = rig.adopt(session, MIB);
            let registrations = rig.register(session, memory, &[0..MIB]);
            if first {
                disown(&mut rig, session, memory);
                rig.finish(0, None);
                rig.deregister(session, registrations);
            } else {
                rig.deregister(session, registrations);
                disown(&mut rig, session, memory);
            }
            rig.settle();
            assert_eq!((rig.regions(), rig.hardware.adopted.len()), (0, 0), "round {round}");
            rig.hardware.answers.clear();
        }
    }
}

#[test]
fn idle_regions_give_way_when_the_hca_is_full() {
    // ofiwg/libfabric#6663, ofiwg/libfabric#9739, aws/aws-ofi-nccl#70: ENOMEM while idle regions could be dropped.
    let mut rig = rig();
    let session = rig.session(1);
    let memory = rig.adopt(session, 64 * MIB);
    for index in 0..4 {
        let registrations = rig.register(session, memory, &[index * MIB..(index + 1) * MIB]);
        rig.deregister(session, registrations);
    }
    let call = rig.ask_register(session, ranges_of(memory, &[8 * MIB..9 * MIB]));
    rig.finish(0, Some(on_hca(FailureKind::Exhausted, 0)));
    rig.settle();
    assert_eq!(rig.registered(call).len(), 1);
    assert_eq!((rig.regions(), rig.figure("gdrd_cache_evicted_total")), (1, 4));
}

#[test]
fn a_full_hca_without_idle_regions_is_told_and_nothing_is_half_made() {
    let mut rig = rig();
    let session = rig.session(1);
    let memory = rig.adopt(session, 64 * MIB);
    let held = rig.register(session, memory, &[0..MIB]);
    let call = rig.ask_register(session, ranges_of(memory, &[2 * MIB..3 * MIB, 0..MIB, 4 * MIB..5 * MIB]));
    rig.finish(0, None);
    rig.finish(0, Some(on_hca(FailureKind::Exhausted, 0)));
    let error = rig.refused(call);
    assert_eq!(error.reason(), "HCA_EXHAUSTED");
    rig.settle();
    let kept = [held[0]].iter().filter(|id| rig.core.registered_range(**id).is_some()).count();
    assert_eq!((kept, rig.core.registrations.len()), (1, 1), "the failed call holds nothing");
}

#[test]
fn another_tenants_idle_regions_give_way_too() {
    let mut rig = rig();
    let (one, other) = (rig.session(1), rig.session(2));
    let (ours, theirs) = (rig.adopt(one, MIB), rig.adopt(other, MIB));
    let registrations = rig.register(other, theirs, &[0..MIB]);
    rig.deregister(other, registrations);
    let call = rig.ask_register(one, ranges_of(ours, &[0..MIB]));
    rig.finish(0, Some(on_hca(FailureKind::Exhausted, 0)));
    rig.settle();
    assert_eq!(rig.registered(call).len(), 1);
}

#[test]
fn the_cache_is_bounded_by_count_and_bytes_the_longest_unused_going_first() {
    // openucx/ucx#6264, openucx/ucx#9259: ten times as many distinct regions as there is room for.
    let mut rig = with(|config| {
        config.cache.max_idle_regions = 8;
        config.cache.max_idle_bytes = 4 * MIB;
    });
    let session = rig.session(1);
    let memory = rig.adopt(session, 1024 * MIB);
    for index in 0..80 {
        let registrations = rig.register(session, memory, &[index * MIB..(index + 1) * MIB]);
        rig.deregister(session, registrations);
        rig.settle();
        assert!(rig.regions() <= 4, "{index}");
    }
    let call = rig.ask_register(session, ranges_of(memory, &[79 * MIB..80 * MIB]));
    assert_eq!(rig.pending(), Vec::<String>::new(), "the last used is still there");
    rig.registered(call);
}

#[test]
fn a_held_region_is_never_evicted() {
    let mut rig = with(|config| config.cache.max_regions = 4);
    let session = rig.session(1);
    let memory = rig.adopt(session, 64 * MIB);
    let held = rig.register(session, memory, &[0..MIB, 2 * MIB..3 * MIB, 4 * MIB..5 * MIB]);
    for index in 10..30 {
        let registrations = rig.register(session, memory, &[index * 2 * MIB..(index * 2 + 1) * MIB]);
        rig.deregister(session, registrations);
    }
    let alive = held.iter().filter(|id| rig.core.registered_range(**id).is_some_and(|(r, _)| r.parts.len() == 1));
    assert_eq!(alive.count(), 3);
    let call = rig.ask_register(session, ranges_of(memory, &[6 * MIB..7 * MIB, 8 * MIB..9 * MIB]));
    assert_eq!(rig.refused(call).reason(), "LIMIT_REGIONS");
}

#[test]
fn what_a_call_asks_for_does_not_give_way_to_it() {
    let mut rig = with(|config| config.cache.max_regions = 2);
    let session = rig.session(1);
    let memory = rig.adopt(session, 64 * MIB);
    let oldest = rig.register(session, memory, &[0..MIB]);
    rig.deregister(session, oldest);
    let newer = rig.register(session, memory, &[2 * MIB..3 * MIB]);
    rig.deregister(session, newer);
    let registrations = rig.register(session, memory, &[0..MIB, 4 * MIB..5 * MIB]);
    assert_eq!((registrations.len(), rig.figure("gdrd_cache_misses_total")), (2, 3));
}

#[test]
fn an_evicted_region_first_lets_its_requests_end() {
    let mut rig = with(|config| config.cache.max_regions = 1);
    let session = rig.session(1);
    let memory = rig.adopt(session, 64 * MIB);
    let registrations = rig.register(session, memory, &[0..MIB]);
    rig.deregister(session, registrations);
    let call = rig.ask_register(session, ranges_of(memory, &[2 * MIB..3 * MIB]));
    // The stand-in hardware fails the test where a region is deregistered before it is quiet.
    assert_eq!(rig.pending(), ["QuiesceRegion"]);
    rig.pass(config().timeouts.drain);
    assert_eq!(rig.hardware.flushed.len(), 1, "requests that do not end are flushed");
    rig.settle();
    rig.registered(call);
}

#[test]
fn idle_regions_are_dropped_after_a_while() {
    // NVIDIA/cuDecomp#47: an idle registration must not pin memory for ever.
    let mut rig = rig();
    let session = rig.session(1);
    let memory = rig.adopt(session, 64 * MIB);
    let registrations = rig.register(session, memory, &[0..MIB]);
    rig.deregister(session, registrations);
    rig.pass(Duration::from_secs(59));
    assert_eq!(rig.regions(), 1);
    rig.pass(Duration::from_secs(2));
    rig.settle();
    assert_eq!((rig.regions(), rig.core.next_deadline()), (0, None));
}

#[test]
fn neighbours_share_a_region_and_other_rights_never_do() {
    // openucx/ucx#11553.
    let mut rig = rig();
    let session = rig.session(1);
    let memory = rig.adopt(session, 512 * MIB);
    let ranges = [0..MIB, 3 * MIB..4 * MIB, 2 * MIB..3 * MIB, 300 * MIB..301 * MIB];
    let call = rig.ask_register(session, near(ranges_of(memory, &ranges)));
    rig.settle();
    let registrations = rig.registered(call);
    let part = |rig: &Rig, id| rig.core.registered_range(id).unwrap().0.parts[0].clone();
    let slots: Vec<_> = registrations.iter().map(|id| part(&rig, *id).registration.slot).collect();
    assert!(slots[0] == slots[1] && slots[1] == slots[2] && slots[2] != slots[3], "{slots:?}");
    assert_eq!(part(&rig, registrations[1]).slot_offset, 3 * MIB);
    let strict =
        RegisterRequest { access: Access { relaxed_ordering: false, ..Access::DATA }, ..ranges_of(memory, &[0..MIB]) };
    let call = rig.ask_register(session, strict);
    rig.settle();
    let other = rig.registered(call);
    assert_ne!(part(&rig, other[0]).registration.slot, slots[0]);
}

#[test]
fn a_region_is_never_wider_than_the_memory() {
    let mut rig = rig();
    let session = rig.session(1);
    let memory = rig.try_adopt(session, AdoptedKind::DmaBuf, MIB + 4096).unwrap();
    let call = rig.ask_register(session, near(ranges_of(memory, &[5..6, MIB..MIB + 4096])));
    rig.settle();
    rig.registered(call);
    let widest = rig.core.regions.iter().map(|(_, region)| region.range.clone()).max_by_key(|range| range.end);
    assert_eq!(widest, Some(0..MIB + 4096));
    let call = rig.ask_register(session, ranges_of(memory, &[MIB..MIB + 4097]));
    assert_eq!(rig.refused(call).reason(), "BAD_ARGUMENT");
}

#[test]
fn pieces_are_regions_of_their_own() {
    // uccl-project/uccl#761: a translating IOMMU refuses long regions, pieces of 1 GiB work.
    let mut rig = rig();
    let session = rig.session(1);
    let memory = rig.adopt(session, 8 * 1024 * MIB);
    let request = RegisterRequest { piece_bytes: 1024 * MIB, ..ranges_of(memory, &[512 * MIB..2560 * MIB]) };
    let call = rig.ask_register(session, near(request));
    rig.settle();
    let registrations = rig.registered(call);
    let (range, _) = rig.core.registered_range(registrations[0]).unwrap();
    let parts: Vec<_> = range.parts.iter().map(|p| (p.offset / MIB, p.registration.len_bytes / MIB)).collect();
    assert_eq!(parts, [(0, 512), (512, 1024), (1536, 512)]);
}

#[test]
fn bar1_is_counted_once_a_dma_buf_and_refused_early_with_numbers() {
    // Mellanox/nv_peer_memory#101, NVIDIA/gdrcopy#193: a BAR1 of 256 MiB and a registration of 500 MB.
    let mut rig = with(|config| config.cache.bar1_bytes = Some(256 * MIB));
    let session = rig.session(1);
    let large = rig.try_adopt(session, AdoptedKind::DmaBuf, 500 * MIB).unwrap();
    let call = rig.ask_register(session, ranges_of(large, &[0..MIB]));
    let message = rig.refused(call).to_string();
    assert!(message.contains("268435456") && message.contains("524288000"), "{message}");
    assert_eq!(rig.pending(), Vec::<String>::new());
    let small = rig.try_adopt(session, AdoptedKind::DmaBuf, 200 * MIB).unwrap();
    for index in 0..4 {
        rig.register(session, small, &[index * MIB..(index + 1) * MIB]);
    }
    let other = rig.try_adopt(session, AdoptedKind::DmaBuf, 100 * MIB).unwrap();
    let call = rig.ask_register(session, ranges_of(other, &[0..MIB]));
    assert_eq!(rig.refused(call).reason(), "BAR1_EXHAUSTED");
    let host = rig.adopt(session, 500 * MIB);
    rig.register(session, host, &[0..500 * MIB]);
}

#[test]
fn idle_regions_let_bar1_go_for_others() {
    let mut rig = with(|config| config.cache.bar1_bytes = Some(256 * MIB));
    let session = rig.session(1);
    let idle = rig.try_adopt(session, AdoptedKind::DmaBuf, 200 * MIB).unwrap();
    let registrations = rig.register(session, idle, &[0..MIB]);
    rig.deregister(session, registrations);
    let other = rig.try_adopt(session, AdoptedKind::DmaBuf, 100 * MIB).unwrap();
    let call = rig.ask_register(session, ranges_of(other, &[0..MIB]));
    rig.settle();
    rig.registered(call);
    assert_eq!(rig.regions(), 1);
}

#[test]
fn adopted_bytes_count_in_the_quota() {
    let mut rig = rig();
    let quota = Quota { max_bytes: 8 * MIB, ..Quota::default() };
    let (session, _) = rig.open_session_with(1, quota).unwrap();
    rig.acquire(session);
    assert_eq!(rig.try_adopt(session, AdoptedKind::Memfd, 7 * MIB).unwrap_err().reason(), "QUOTA_BYTES");
    let memory = rig.adopt(session, 6 * MIB);
    let call = rig.ask(session, super::rig::request("GPU0", 2 * MIB));
    assert_eq!(rig.refused(call).reason(), "QUOTA_BYTES");
    disown(&mut rig, session, memory);
    rig.settle();
    rig.acquire(session);
}

#[test]
fn memory_given_up_twice_is_gone_for_both_callers_at_once() {
    // A client that saw that the memory was freed gives it up, and so does its owner.
    let mut rig = rig();
    let session = rig.session(1);
    let memory = rig.adopt(session, MIB);
    rig.register(session, memory, &[0..MIB]);
    let calls = [disown(&mut rig, session, memory), disown(&mut rig, session, memory)];
    assert_eq!(calls.map(|call| rig.answer(call)), [None, None], "an hca still reaches it");
    rig.settle();
    assert_eq!(calls.map(|call| rig.answer(call)), [Some(Ok(Answer::Done)), Some(Ok(Answer::Done))]);
    let late = disown(&mut rig, session, memory);
    assert_eq!(rig.refused(late), EngineError::UnknownMemory { memory: memory.0 });
}

#[test]
fn another_tenants_memory_is_as_unknown_as_none() {
    let mut rig = rig();
    let (one, other) = (rig.session(1), rig.session(2));
    let memory = rig.adopt(one, MIB);
    let registrations = rig.register(one, memory, &[0..MIB]);
    let call = rig.ask_register(other, ranges_of(memory, &[0..MIB]));
    assert_eq!(rig.refused(call), EngineError::UnknownMemory { memory: memory.0 });
    let call = disown(&mut rig, other, memory);
    assert_eq!(rig.refused(call), EngineError::UnknownMemory { memory: memory.0 });
    assert_eq!(rig.deregister(other, registrations.clone()), 0);
    assert!(rig.core.seen_range(other, registrations[0]).is_err());
    assert!(rig.core.seen_range(one, registrations[0]).is_ok());
}

#[test]
fn the_end_of_a_session_ends_its_memory_in_mid_call() {
    let mut rig = rig();
    let session = rig.session(1);
    let memory = rig.adopt(session, 64 * MIB);
    rig.register(session, memory, &[0..MIB]);
    let call = rig.ask_register(session, ranges_of(memory, &[2 * MIB..3 * MIB]));
    rig.close(session);
    rig.settle();
    assert_eq!(rig.refused(call), EngineError::SessionEnded);
    assert_eq!((rig.regions(), rig.hardware.adopted.len()), (0, 0));
}

#[test]
fn ranges_of_a_lease_end_before_its_memory_is_scrubbed() {
    let mut rig = rig();
    let session = rig.session(1);
    let grant = rig.acquire(session);
    let request = RegisterRequest {
        ranges: vec![crate::registration::RangeRequest {
            memory: MemoryRef::Lease(grant.info.id),
            offset: 0,
            len_bytes: MIB,
        }],
        access: Access { relaxed_ordering: false, ..Access::DATA },
        hcas: vec!["mlx5_2".to_owned()],
        merging: Merging::Near,
        piece_bytes: 0,
    };
    let call = rig.ask_register(session, request);
    rig.settle();
    rig.registered(call);
    rig.release(session, grant.info.id).unwrap();
    // The stand-in hardware fails the test where memory is scrubbed while a region of it is left.
    rig.settle();
    assert_eq!((rig.regions(), rig.core.registrations.len()), (0, 0));
}

#[test]
fn a_caller_that_goes_away_leaves_nothing_held() {
    let mut rig = rig();
    let session = rig.session(1);
    let memory = rig.adopt(session, MIB);
    let call = rig.ask_register(session, ranges_of(memory, &[0..MIB]));
    rig.apply(Input::Cancel { call });
    rig.settle();
    assert_eq!((rig.answer(call), rig.core.registrations.len()), (None, 0));
    assert_eq!(rig.regions(), 1, "what was made anyway lies idle");
}

#[test]
fn two_calls_for_one_range_make_one_region() {
    let mut rig = rig();
    let session = rig.session(1);
    let memory = rig.adopt(session, MIB);
    let first = rig.ask_register(session, ranges_of(memory, &[0..MIB]));
    let second = rig.ask_register(session, ranges_of(memory, &[0..MIB]));
    let registers =
        |job: &super::hardware::Pending| matches!(job, super::hardware::Pending::Job(Job::RegisterRegion { .. }));
    assert_eq!(rig.hardware.pending.iter().filter(|job| registers(job)).count(), 1);
    rig.settle();
    let (first, second) = (rig.registered(first), rig.registered(second));
    rig.deregister(session, first);
    assert!(rig.core.registered_range(second[0]).is_some_and(|(range, _)| range.parts.len() == 1));
}

#[test]
fn a_lost_hca_takes_its_regions_with_it() {
    let mut rig = rig();
    let session = rig.session(1);
    let memory = rig.adopt(session, MIB);
    let both = RegisterRequest { hcas: vec!["mlx5_0".to_owned(), "mlx5_1".to_owned()], ..ranges_of(memory, &[0..MIB]) };
    let call = rig.ask_register(session, both);
    rig.settle();
    let registrations = rig.registered(call);
    rig.lose_hca(0);
    rig.settle();
    let (range, _) = rig.core.registered_range(registrations[0]).unwrap();
    assert_eq!(range.parts.iter().map(|part| &*part.registration.hca).collect::<Vec<_>>(), ["mlx5_1"]);
    let call = rig.ask_register(session, ranges_of(memory, &[0..MIB]));
    assert_eq!(rig.refused(call).reason(), "DEVICE_LOST");
}

#[test]
fn a_hundred_thousand_rounds_grow_nothing() {
    // ai-dynamo/nixl#1392: 10,000 views registered and deregistered again and again slow down until they stall.
    let mut rig = with(|config| config.cache.max_idle_regions = 0);
    let session = rig.session(1);
    let memory = rig.adopt(session, 64 * MIB);
    let mut effects = Vec::new();
    let mut drivers = 0;
    for round in 0..100_000_u64 {
        let call = rig.call();
        let start = round % 60 * MIB;
        let request = ranges_of(memory, &[start..start + MIB]);
        rig.core.apply(Input::Register { call, session, request }, round, &mut effects);
        while let Some(effect) = effects.pop() {
            let input = match effect {
                crate::core::Effect::Start(Job::RegisterRegion { region, .. }) => {
                    drivers += 1;
                    Input::RegionRegistered { region, result: Ok(0), cost_ns: 1 }
                }
                crate::core::Effect::QuiesceRegion { region, .. } => Input::RegionQuiesced { region },
                crate::core::Effect::Start(Job::DeregisterRegion { region }) => {
                    Input::RegionDeregistered { region, result: Ok(()) }
                }
                crate::core::Effect::Answer { answer: Ok(Answer::Registered(registrations)), .. } => {
                    let call = rig.call();
                    Input::Deregister { call, session, registrations }
                }
                _ => continue,
            };
            rig.core.apply(input, round, &mut effects);
        }
        assert_eq!((rig.core.regions.len(), rig.core.registrations.len()), (0, 0));
        assert!(rig.core.deadlines.len() <= 1, "one look at what may have been idle for long");
    }
    assert_eq!(drivers, 100_000);
    let tenant = rig.core.tenants.values().next().unwrap();
    assert_eq!((tenant.slots.ever_used(), tenant.regions, tenant.cached_slots), (1, 0, 0));
}
