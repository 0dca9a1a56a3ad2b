//! Watches: the full state first, then every change, and a topology watch that outlives its daemon.

mod common;

use common::{BUFFER_BYTES, acquire, number};
use gdrd_harness::script::Command;
use gdrd_harness::{Daemon, Puppet};
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
