//! Watches: the full state first, then every change, and a topology watch that outlives its daemon.

mod common;

use common::{BUFFER_BYTES, acquire, number};
use gdrd_harness::script::Command;
use gdrd_harness::{Daemon, DaemonOptions, Puppet};
use serde_json::{Value, json};

fn next(puppet: &mut Puppet) -> Value {
    puppet.run(Command::NextLeaseEvent)
}

#[test]
fn a_lease_watch_gives_the_state_then_what_happens_in_other_processes() {
    let daemon = Daemon::start();
    let (mut watcher, mut actor) = (Puppet::connected(&daemon), Puppet::connected(&daemon));
    let before = number(&acquire(&mut actor, "before", "GPU0", BUFFER_BYTES)["lease_id"]);
    watcher.run(Command::WatchLeases);
    assert_eq!(next(&mut watcher), json!(["present", before]));
    assert_eq!(next(&mut watcher), json!(["synced", 0]));
    let after = number(&acquire(&mut actor, "after", "GPU1", BUFFER_BYTES)["lease_id"]);
    assert_eq!(next(&mut watcher), json!(["acquired", after]));
    actor.run(Command::Release { buffer: "before".into() });
    assert_eq!(next(&mut watcher), json!(["released", before]));
    actor.kill();
    assert_eq!(next(&mut watcher), json!(["released", after]));
}

/// Events up to the end of a full state, without what is being registered again meanwhile.
fn state(puppet: &mut Puppet) -> Vec<Value> {
    let mut events = Vec::new();
    loop {
        let event = next(puppet);
        let is_last = event[0] == "synced";
        if event[0] != "rekeyed" {
            events.push(event);
        }
        if is_last {
            return events;
        }
    }
}

#[test]
fn a_lease_watch_outlives_its_daemon_and_tells_where_it_starts_anew() {
    let daemon = DaemonOptions::default().kept().start();
    let (mut watcher, mut actor) = (Puppet::connected(&daemon), Puppet::connected(&daemon));
    let lease = number(&acquire(&mut actor, "before", "GPU0", BUFFER_BYTES)["lease_id"]);
    watcher.run(Command::WatchLeases);
    assert_eq!(state(&mut watcher), [json!(["present", lease]), json!(["synced", 0])]);
    for restarts in 1..=2 {
        // One is waited for while the daemon dies, as most are.
        watcher.begin(&Command::NextLeaseEvent);
        daemon.kill_kept(|_| ());
        let first = watcher.answer(&Command::NextLeaseEvent).expect("the session goes on");
        assert_eq!(first, json!(["resync", 0]));
        assert_eq!(state(&mut watcher), [json!(["present", lease]), json!(["synced", 0])], "restart {restarts}");
    }
    actor.run(Command::Release { buffer: "before".into() });
    let mut event = next(&mut watcher);
    while event[0] == "rekeyed" {
        event = next(&mut watcher);
    }
    assert_eq!(event, json!(["released", lease]));
}

#[test]
fn a_topology_watch_finds_the_daemon_again_after_it_died() {
    let mut daemon = Daemon::start();
    let mut watcher = Puppet::connected(&daemon);
    let first = watcher.run(Command::NextTopology);
    daemon.kill();
    watcher.begin(&Command::NextTopology);
    daemon.start_again();
    let again = watcher.answer(&Command::NextTopology).expect("the daemon is back");
    assert_eq!(first, again, "a restarted daemon counts anew");
}
