//! Watching leases.

use std::time::Duration;

use gdrd_engine::{LeaseEvent, LeaseEventKind, Viewer};

use crate::world::{World, config, next, peer};

fn name(event: &LeaseEvent) -> &'static str {
    match &event.kind {
        LeaseEventKind::Present(_) => "present",
        LeaseEventKind::Synced => "synced",
        LeaseEventKind::Acquired(_) => "acquired",
        LeaseEventKind::Released { .. } => "released",
        LeaseEventKind::Revoked { .. } => "revoked",
        LeaseEventKind::Rekeyed(_) => "rekeyed",
        LeaseEventKind::NicDown { .. } => "nic down",
        LeaseEventKind::Resync => "resync",
        _ => "other",
    }
}

pub(crate) fn names(events: &mut futures_channel::mpsc::Receiver<LeaseEvent>) -> Vec<&'static str> {
    std::iter::from_fn(|| next(events)).map(|event| name(&event)).collect()
}

#[test]
fn a_watch_tells_the_full_state_and_then_numbered_events_of_the_tenant() {
    let world = World::new();
    let (one, two) = (world.session(1), world.session(2));
    let lease = world.lease(one);
    let mut events = world.watch(1);
    world.release(one, lease);
    let _foreign = world.lease(two);
    let second = world.lease(one);
    let told: Vec<_> = std::iter::from_fn(|| next(&mut events)).collect();
    assert_eq!(told.iter().map(name).collect::<Vec<_>>(), ["present", "synced", "released", "acquired"]);
    assert_eq!(told.iter().map(|event| event.sequence).collect::<Vec<_>>(), [1, 2, 3, 4]);
    assert!(matches!(&told[3].kind, LeaseEventKind::Acquired(info) if info.id == second
        && info.registrations.iter().all(|r| r.rkey.0 == 0)));
}

#[test]
fn an_administrator_watches_every_tenant() {
    let world = World::new();
    let mut events = world.watch(0);
    let _leases = (world.lease(world.session(1)), world.lease(world.session(2)));
    assert_eq!(names(&mut events), ["synced", "acquired", "acquired"]);
}

#[test]
fn a_watcher_that_does_not_read_is_told_to_start_again_and_holds_nobody_up() {
    let mut config = config();
    config.limits.watch_queue = 4;
    let world = World::with(config);
    let mut events = world.watch(1);
    let session = world.session(1);
    for _ in 0..20 {
        let lease = world.lease(session);
        world.release(session, lease);
    }
    let told = names(&mut events);
    assert_eq!(told.last(), Some(&"resync"));
    assert!(told.len() <= 8, "{told:?}");
    let mut again = world.watch(1);
    let _lease = world.lease(session);
    assert_eq!(names(&mut again), ["synced", "acquired"]);
}

#[test]
fn watches_are_bounded_and_ended_ones_do_not_count() {
    let mut config = config();
    config.limits.max_watches = 2;
    let world = World::with(config);
    let first = world.watch(1);
    let _second = world.watch(1);
    let refused = world.engine.watch_leases(&Viewer::Peer(peer(1))).expect_err("two are the limit");
    assert_eq!(refused.reason(), "LIMIT_WATCHES");
    drop(first);
    assert!(world.engine.watch_leases(&Viewer::Peer(peer(1))).is_ok());
}

#[test]
fn one_user_cannot_have_all_watches() {
    let mut config = config();
    config.limits.max_watches = 24;
    let world = World::with(config);
    let watches: Vec<_> = (0..3).map(|_| world.watch(1)).collect();
    let refused = world.engine.watch_leases(&Viewer::Peer(peer(1))).expect_err("an eighth is the limit");
    assert_eq!(refused.reason(), "LIMIT_WATCHES");
    assert!(refused.to_string().contains("your user"), "{refused}");
    assert!(world.engine.watch_leases(&Viewer::Peer(peer(2))).is_ok(), "others are served");
    drop(watches);
}

#[test]
fn a_lease_whose_time_is_over_is_told_as_released() {
    let world = World::new();
    let session = world.session(1);
    let lease = world.lease(session);
    let mut events = world.watch(1);
    world.engine.detach(session, lease, Duration::from_millis(1)).expect("held");
    world.engine.close_session(session, "test");
    world.until("the time to live to end", || world.stat("gdrd_leases") == 0);
    let told: Vec<_> = std::iter::from_fn(|| next(&mut events)).collect();
    let last = &told.last().expect("events").kind;
    assert!(matches!(last, LeaseEventKind::Released { reason: "TTL_EXPIRED", .. }), "{last:?}");
}
