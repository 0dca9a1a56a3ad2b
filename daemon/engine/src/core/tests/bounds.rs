//! What one session can make the daemon remember, and do at once.

use super::rig::{MIB, Rig, config, ranges_of};
use crate::core::lease::MAX_OPENS;
use crate::core::{Answer, Effect, Input, Job, Seen};
use crate::ids::MemoryId;
use crate::registration::RegisterRequest;

/// All of some memory, in pieces of 2 MiB.
fn in_pieces(memory: MemoryId, len_bytes: u64) -> RegisterRequest {
    RegisterRequest { piece_bytes: 2 * MIB, ..ranges_of(memory, std::slice::from_ref(&(0..len_bytes))) }
}

#[test]
fn pieces_within_one_region_are_one_part() {
    let mut rig = Rig::new(&config());
    let session = rig.session(1);
    let memory = rig.adopt(session, 64 * MIB);
    rig.register(session, memory, std::slice::from_ref(&(0..64 * MIB)));
    let call = rig.ask_register(session, in_pieces(memory, 64 * MIB));
    let registration = rig.registered(call)[0];
    assert_eq!(rig.core.registrations[&registration].regions.len(), 1);
    assert_eq!(rig.core.sessions[&session].parts, 2);
    assert_eq!(rig.core.registered_range(registration).expect("it is there").0.parts.len(), 1);
}

#[test]
fn parts_of_a_sessions_registrations_are_bounded() {
    let mut config = config();
    config.cache.max_registrations_per_session = 5;
    config.limits.max_hcas_per_lease = 2;
    let mut rig = Rig::new(&config);
    let session = rig.session(1);
    let memory = rig.adopt(session, 12 * MIB);
    let call = rig.ask_register(session, in_pieces(memory, 12 * MIB));
    rig.settle();
    let first = rig.registered(call);
    let call = rig.ask_register(session, in_pieces(memory, 12 * MIB));
    let refused = rig.refused(call);
    assert_eq!(refused.reason(), "LIMIT_REGISTRATIONS");
    assert!(refused.to_string().contains("is 10; 6 are in use and 6 more"), "{refused}");
    rig.deregister(session, first);
    let call = rig.ask_register(session, in_pieces(memory, 12 * MIB));
    rig.registered(call);
}

#[test]
fn a_page_of_registrations_ends_after_so_many_parts() {
    let mut rig = Rig::new(&config());
    let session = rig.session(1);
    let memory = rig.adopt(session, 3000 * MIB);
    let mut effects = Vec::new();
    let mut registered = Vec::new();
    for _ in 0..3 {
        let call = rig.call();
        let request = in_pieces(memory, 3000 * MIB);
        // Not through the rig, which looks at everything after each input.
        rig.core.apply(Input::Register { call, session, request }, 0, &mut effects);
        while let Some(effect) = effects.pop() {
            match effect {
                Effect::Start(Job::RegisterRegion { region, .. }) => {
                    rig.core.apply(Input::RegionRegistered { region, result: Ok(0), cost_ns: 1 }, 0, &mut effects);
                }
                Effect::Answer { answer: Ok(Answer::Registered(ids)), .. } => registered.extend(ids),
                _ => {}
            }
        }
    }
    let first = rig.core.registration_page(&Seen::All, None, 0);
    let ids: Vec<_> = first.registrations.iter().map(|range| range.id).collect();
    assert_eq!((ids, first.next), (registered[..2].to_vec(), Some(registered[2])));
    let rest = rig.core.registration_page(&Seen::All, first.next, 0);
    assert_eq!((rest.registrations.len(), rest.registrations[0].parts.len(), rest.next), (1, 1500, None));
}

#[test]
fn a_session_opens_a_lease_so_often_until_it_releases_it() {
    let mut rig = Rig::journaling(&config());
    let session = rig.session(1);
    let lease = rig.acquire(session).info.id;
    rig.trace.clear();
    for _ in 1..MAX_OPENS {
        rig.open(session, lease).expect("it is held");
    }
    let recorded = |effect: &&String| effect.contains("Record(Lease");
    assert_eq!(rig.trace.iter().filter(recorded).count(), 0, "nothing changed that a later daemon must know");
    assert_eq!(rig.open(session, lease).expect_err("so often").reason(), "LIMIT_OPENS");
    let other = rig.session(1);
    rig.open(other, lease).expect("another session's are its own");
    rig.release(session, lease).expect("it is held");
    rig.open(session, lease).expect("it starts anew");
}
