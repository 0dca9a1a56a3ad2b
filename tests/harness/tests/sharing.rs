//! Leases with more than one holder, and leases without any: opened by a second session, detached, timed out.

mod common;

use common::{BUFFER_BYTES, acquire, number, rows};
use gdrd_client::{AcquireOptions, ClientOptions, RuntimeDir};
use gdrd_harness::script::Command;
use gdrd_harness::{Daemon, Puppet, wait_until};
use serde_json::Value;

fn open(puppet: &mut Puppet, lease_id: u64) -> Value {
    puppet.run(Command::Open { buffer: "b".into(), lease_id })
}

fn only_lease(puppet: &mut Puppet) -> Value {
    let leases = puppet.run(Command::Leases);
    assert_eq!(rows(&leases), 1, "{leases}");
    leases[0].clone()
}

fn none_left(puppet: &mut Puppet) {
    wait_until("no lease is left", || match rows(&puppet.run(Command::Leases)) {
        0 => Ok(()),
        left => Err(left),
    });
}

#[test]
fn a_second_process_of_the_tenant_shares_memory_and_the_lease_lives_with_its_last_holder() {
    let daemon = Daemon::start();
    let (mut first, mut second) = (Puppet::connected(&daemon), Puppet::connected(&daemon));
    let lease_id = number(&acquire(&mut first, "b", "GPU0", BUFFER_BYTES)["lease_id"]);
    let opened = open(&mut second, lease_id);
    assert_eq!(number(&opened["lease_id"]), lease_id);
    assert_eq!(number(&only_lease(&mut second)["holders"]), 2);
    first.run(Command::Poke { buffer: "b".into(), offset: 9, bytes: "5a".into() });
    assert_eq!(second.run(Command::Peek { buffer: "b".into(), offset: 9, len: 1 }), "5a");
    first.run(Command::Release { buffer: "b".into() });
    assert_eq!(number(&only_lease(&mut second)["holders"]), 1);
    assert_eq!(second.run(Command::IsCurrent { buffer: "b".into() }), true);
    assert_eq!(second.run(Command::Peek { buffer: "b".into(), offset: 9, len: 1 }), "5a");
    second.run(Command::Release { buffer: "b".into() });
    none_left(&mut first);
}

#[test]
fn the_lease_of_a_killed_holder_goes_on_with_the_other() {
    let daemon = Daemon::start();
    let (mut first, mut second) = (Puppet::connected(&daemon), Puppet::connected(&daemon));
    let lease_id = number(&acquire(&mut first, "b", "GPU0", BUFFER_BYTES)["lease_id"]);
    open(&mut second, lease_id);
    first.kill();
    wait_until("one holder is left", || match number(&only_lease(&mut second)["holders"]) {
        1 => Ok(()),
        holders => Err(holders),
    });
    assert_eq!(second.run(Command::IsCurrent { buffer: "b".into() }), true);
    second.kill();
    none_left(&mut Puppet::connected(&daemon));
}

#[test]
fn a_detached_lease_outlives_its_process_keeps_its_content_and_is_opened_by_number() {
    let daemon = Daemon::start();
    let mut first = Puppet::connected(&daemon);
    let lease_id = number(&acquire(&mut first, "b", "GPU0", BUFFER_BYTES)["lease_id"]);
    first.run(Command::Fill { buffer: "b".into(), seed: 3 });
    let digest = Command::Digest { buffer: "b".into(), offset: 0, len: BUFFER_BYTES };
    let content = first.run(digest.clone());
    first.run(Command::Detach { buffer: "b".into(), ttl_ms: 3_600_000 });
    first.kill();
    let mut second = Puppet::connected(&daemon);
    assert_eq!(only_lease(&mut second)["detached"], true);
    open(&mut second, lease_id);
    assert_eq!(only_lease(&mut second)["detached"], false);
    assert_eq!(second.run(digest), content);
    second.run(Command::Release { buffer: "b".into() });
    none_left(&mut second);
}

#[test]
fn a_detached_lease_ends_with_its_time_to_live() {
    let daemon = Daemon::start();
    let mut observer = Puppet::connected(&daemon);
    let mut puppet = Puppet::connected(&daemon);
    let lease_id = number(&acquire(&mut puppet, "b", "GPU0", BUFFER_BYTES)["lease_id"]);
    puppet.run(Command::Detach { buffer: "b".into(), ttl_ms: 200 });
    assert_eq!(only_lease(&mut observer)["detached"], false, "its session still holds it");
    puppet.kill();
    none_left(&mut observer);
    let refused = observer.refused(Command::Open { buffer: "b".into(), lease_id });
    assert_eq!(refused.reason, "LEASE_UNKNOWN");
}

#[test]
fn a_release_ends_a_detached_lease_at_once() {
    let daemon = Daemon::start();
    let mut puppet = Puppet::connected(&daemon);
    acquire(&mut puppet, "b", "GPU0", BUFFER_BYTES);
    puppet.run(Command::Detach { buffer: "b".into(), ttl_ms: 3_600_000 });
    puppet.run(Command::Release { buffer: "b".into() });
    none_left(&mut puppet);
}

#[test]
fn a_time_to_live_beyond_the_bound_is_refused_and_the_hold_is_kept() {
    let daemon = Daemon::start();
    let mut puppet = Puppet::connected(&daemon);
    let lease_id = number(&acquire(&mut puppet, "b", "GPU0", BUFFER_BYTES)["lease_id"]);
    let refused = puppet.refused(Command::Detach { buffer: "b".into(), ttl_ms: 365 * 86_400_000 });
    assert_eq!(refused.reason, "BAD_ARGUMENT", "{refused:?}");
    assert!(refused.message.contains("ttl"), "{}", refused.message);
    assert_eq!(number(&only_lease(&mut puppet)["id"]), lease_id);
    puppet.run(Command::Release { buffer: "b".into() });
    none_left(&mut puppet);
}

#[tokio::test]
async fn a_lease_that_a_session_opens_again_is_held_until_its_last_handle_goes() {
    let daemon = Daemon::start();
    let options = ClientOptions::default().runtime_dir(RuntimeDir::new(daemon.runtime_dir()));
    let client = options.connect().await.expect("the daemon is there");
    let session = client.open_session("twice").await.expect("a session");
    let first = session.acquire(AcquireOptions::on_gpu("GPU0", BUFFER_BYTES)).await.expect("a buffer");
    let (second, third) = (
        session.open_lease(first.lease_id()).await.expect("one more handle"),
        session.open_lease(first.lease_id()).await.expect("one more handle"),
    );
    let address = second.memory().expect("memory of a simulated gpu").address();
    first.memory().expect("memory of a simulated gpu");
    first.write_from(9, b"kept").expect("it is mapped");
    session.registration_or_register(address, 64).await.expect("it is registered");
    first.release().await.expect("it is held");
    drop(third);
    assert_eq!(session.leases().await.expect("a list").len(), 1);
    assert!(session.registration(address, 64).is_some(), "of the other mapping");
    assert!(second.is_current());
    let mut content = [0; 4];
    second.read_into(9, &mut content).expect("it is mapped");
    assert_eq!(&content, b"kept");
    second.release().await.expect("it is held");
    assert!(session.leases().await.expect("a list").is_empty());
}
