//! `kill -9` of the daemon under `gdrd keeper`, with clients that live on: memory, content, leases and sessions stay; keys
//! do not. In simulation; the same on a GPU is a check of `make device-test`.

mod common;

use std::path::Path;

use common::{BUFFER_BYTES, Side, acquire, connected_pair, make_queue_pair, number, rows, text, write};
use gdrd_harness::script::{Command, Local, Work};
use gdrd_harness::{Daemon, DaemonOptions, Puppet, wait_until};
use serde_json::Value;

const JOURNAL: &str = "gdrd.journal";

fn kept() -> Daemon {
    DaemonOptions::default().kept().start()
}

fn untouched(_: &Path) {}

/// The daemon has died and come back so often, and the client has heard of it.
fn await_restarts(puppet: &mut Puppet, restarts: u64) {
    assert_eq!(number(&puppet.run(Command::AwaitRestart { restarts })), restarts);
}

fn leases(puppet: &mut Puppet) -> usize {
    rows(&puppet.run(Command::Leases))
}

fn registrations(lease: &Value) -> Vec<(String, u64, u64)> {
    let list = lease["registrations"].as_array().expect("a list");
    list.iter().map(|r| (text(&r["hca"]), number(&r["slot"]), number(&r["generation"]))).collect()
}

#[test]
fn a_runtime_folder_that_was_emptied_costs_no_lease() {
    let daemon = kept();
    let mut puppet = Puppet::connected(&daemon);
    acquire(&mut puppet, "b", "GPU0", BUFFER_BYTES);
    let folder = daemon.runtime_dir();
    let names = ["gdrd.lock", JOURNAL, "gdrd.sock", "session.sock"];
    for name in names {
        std::fs::remove_file(folder.join(name)).expect("it is there");
    }
    wait_until("all is back", || match names.into_iter().find(|name| !folder.join(name).exists()) {
        Some(missing) => Err(missing),
        None => Ok(()),
    });
    daemon.kill_kept(untouched);
    await_restarts(&mut puppet, 1);
    assert_eq!(leases(&mut puppet), 1);
}

#[test]
fn a_killed_daemon_comes_back_with_every_lease_and_its_content() {
    let daemon = kept();
    let (mut a, mut b) = connected_pair(&daemon, ["GPU0", "GPU1"]);
    a.puppet.run(Command::Fill { buffer: "b".into(), seed: 7 });
    acquire(&mut b.puppet, "second", "GPU1", 4 << 20);
    b.puppet.run(Command::Fill { buffer: "second".into(), seed: 8 });
    let (content, before) = (a.digest(), registrations(&a.lease));
    for round in 1..=3 {
        daemon.kill_kept(untouched);
        await_restarts(&mut a.puppet, round);
        await_restarts(&mut b.puppet, round);
        assert_eq!(a.digest(), content, "round {round}");
        assert_eq!(leases(&mut a.puppet), 3, "round {round}");
    }
    // What peers were told is void; memory registered anew is reached under new generations.
    assert_eq!(a.puppet.run(Command::IsCurrent { buffer: "b".into() }), false);
    let after = registrations(&a.puppet.run(Command::Refresh { buffer: "b".into() }));
    assert_eq!(a.puppet.run(Command::IsCurrent { buffer: "b".into() }), true);
    assert_eq!(after.len(), before.len());
    for ((hca, slot, generation), (hca_after, slot_after, generation_after)) in before.iter().zip(&after) {
        assert_eq!(hca, hca_after);
        assert!(slot != slot_after || generation < generation_after);
    }
    // New queue pairs move the kept bytes.
    b.puppet.run(Command::Refresh { buffer: "b".into() });
    a = Side::again(a, "GPU0");
    b = Side::again(b, "GPU1");
    common::join(&mut a, &mut b);
    let whole = u32::try_from(BUFFER_BYTES).expect("a buffer fits a request");
    assert_eq!(a.status_of(1, write(&b.blob, 0, whole)), "SUCCESS");
    assert_eq!(b.digest(), content);
    // Acquire and release go on, and what was acquired before can be released.
    a.puppet.run(Command::Release { buffer: "b".into() });
    b.puppet.run(Command::Release { buffer: "second".into() });
    acquire(&mut a.puppet, "new", "GPU0", BUFFER_BYTES);
    wait_until("two leases are left", || match leases(&mut b.puppet) {
        2 => Ok(()),
        count => Err(count),
    });
    assert!(daemon.stop().success());
}

#[test]
fn a_daemon_that_is_restarted_leaves_every_session_and_its_memory_to_the_next() {
    let daemon = kept();
    let mut client = Puppet::connected(&daemon);
    acquire(&mut client, "b", "GPU0", BUFFER_BYTES);
    client.run(Command::Fill { buffer: "b".into(), seed: 7 });
    let digest = || Command::Digest { buffer: "b".into(), offset: 0, len: BUFFER_BYTES };
    let content = client.run(digest());
    for round in 1..=2 {
        daemon.restart_kept();
        await_restarts(&mut client, round);
        assert_eq!(client.run(digest()), content, "round {round}");
        assert_eq!(leases(&mut client), 1, "round {round}");
    }
    client.run(Command::Release { buffer: "b".into() });
    acquire(&mut client, "another", "GPU0", BUFFER_BYTES);
    assert!(daemon.stop().success(), "a daemon whose keeper ends gives back what there is");
}

#[test]
fn calls_made_while_there_is_no_daemon_are_answered_by_the_next() {
    let daemon = kept();
    let mut puppet = Puppet::connected(&daemon);
    acquire(&mut puppet, "b", "GPU0", BUFFER_BYTES);
    let call = Command::Acquire { buffer: "c".into(), gpu: "GPU0".into(), size: BUFFER_BYTES, host: false };
    daemon.kill_kept(|_| puppet.begin(&call));
    let lease = puppet.answer(&call).expect("the next daemon answers");
    assert!(number(&lease["lease_id"]) > 0);
    assert_eq!(leases(&mut puppet), 2, "no lease of a lost answer is left");
    puppet.run(Command::Release { buffer: "b".into() });
    puppet.run(Command::Release { buffer: "c".into() });
    assert_eq!(leases(&mut puppet), 0);
}

#[test]
fn requests_of_a_killed_daemon_end_with_an_unknown_outcome() {
    let daemon = kept();
    let (mut a, _b) = connected_pair(&daemon, ["GPU0", "GPU1"]);
    for wr_id in 0..3 {
        a.post(wr_id, Work::Recv { local: Local::new("b", 0, 64) });
    }
    let completion = Command::Completion { queue_pair: "q".into() };
    a.puppet.begin(&completion);
    daemon.kill_kept(untouched);
    let first = a.puppet.answer(&completion).expect("it ends");
    assert_eq!((number(&first["wr_id"]), text(&first["status"])), (0, "OUTCOME_UNKNOWN".to_owned()));
    for wr_id in 1..3 {
        let completion = a.completion();
        assert_eq!((number(&completion["wr_id"]), text(&completion["status"])), (wr_id, "OUTCOME_UNKNOWN".to_owned()));
    }
    await_restarts(&mut a.puppet, 1);
    let queue_pairs = a.puppet.run(Command::QueuePairs);
    assert_eq!(rows(&queue_pairs), 2);
    assert_eq!(text(&queue_pairs[0]["state"]), "ERR");
    let failed = format!("{:?}", a.puppet.refused(completion));
    assert!(failed.contains("started again"), "{failed}");
    a.puppet.run(Command::Destroy { queue_pair: "q".into() });
    make_queue_pair(&mut a.puppet, "q", "GPU0", 0);
}

#[test]
fn a_client_that_dies_while_there_is_no_daemon_leaves_nothing() {
    let daemon = kept();
    let mut survivor = Puppet::connected(&daemon);
    let mut victim = Puppet::connected(&daemon);
    acquire(&mut victim, "b", "GPU0", BUFFER_BYTES);
    let other = acquire(&mut victim, "shared", "GPU1", BUFFER_BYTES);
    survivor.run(Command::Open { buffer: "shared".into(), lease_id: number(&other["lease_id"]) });
    daemon.kill_kept(|_| victim.kill());
    await_restarts(&mut survivor, 1);
    wait_until("the victim's lease is gone and the shared one is not", || {
        let leases = survivor.run(Command::Leases);
        if rows(&leases) == 1 && number(&leases[0]["holders"]) == 1 { Ok(()) } else { Err(leases) }
    });
    survivor.run(Command::Release { buffer: "shared".into() });
}

#[test]
fn a_detached_lease_is_opened_again_after_its_session_and_its_daemon_have_ended() {
    let daemon = kept();
    let mut owner = Puppet::connected(&daemon);
    let lease = acquire(&mut owner, "b", "GPU0", BUFFER_BYTES);
    owner.run(Command::Fill { buffer: "b".into(), seed: 3 });
    let digest = Command::Digest { buffer: "b".into(), offset: 0, len: BUFFER_BYTES };
    let content = owner.run(digest.clone());
    owner.run(Command::Detach { buffer: "b".into(), ttl_ms: 600_000 });
    owner.kill();
    let mut heir = Puppet::connected(&daemon);
    wait_until("the owner's session has ended", || {
        let leases = heir.run(Command::Leases);
        if leases[0]["detached"] == true { Ok(()) } else { Err(leases) }
    });
    daemon.kill_kept(untouched);
    await_restarts(&mut heir, 1);
    heir.run(Command::Open { buffer: "b".into(), lease_id: number(&lease["lease_id"]) });
    assert_eq!(heir.run(digest), content);
}

#[test]
fn a_journal_that_is_not_believed_gives_a_clean_start() {
    let daemon = kept();
    let mut puppet = Puppet::connected(&daemon);
    acquire(&mut puppet, "b", "GPU0", BUFFER_BYTES);
    puppet.run(Command::Fill { buffer: "b".into(), seed: 5 });
    daemon.kill_kept(|folder| {
        let path = folder.join(JOURNAL);
        let mut bytes = std::fs::read(&path).expect("there is a journal");
        let middle = bytes.len() / 2;
        bytes[middle] ^= 0x10;
        std::fs::write(&path, bytes).expect("it is ours");
    });
    assert_eq!(text(&puppet.run(Command::SessionEnd)), "CONNECTION_LOST");
    let mut fresh = Puppet::connected(&daemon);
    assert_eq!(leases(&mut fresh), 0);
    acquire(&mut fresh, "b", "GPU0", BUFFER_BYTES);
    assert_eq!(text(&fresh.run(Command::Peek { buffer: "b".into(), offset: 0, len: 16 })), "00".repeat(16));
    assert!(daemon.log().contains("the journal is not believed"), "{}", daemon.log());
}

#[test]
fn a_cut_journal_lends_no_memory_to_others() {
    let daemon = kept();
    let mut puppet = Puppet::connected(&daemon);
    acquire(&mut puppet, "b", "GPU0", BUFFER_BYTES);
    acquire(&mut puppet, "c", "GPU1", BUFFER_BYTES);
    // Everything after the session itself is gone.
    daemon.kill_kept(|folder| {
        let path = folder.join(JOURNAL);
        let bytes = std::fs::read(&path).expect("there is a journal");
        let text = String::from_utf8_lossy(&bytes);
        let lease = text.find("{\"lease\"").expect("a lease is written down");
        std::fs::write(&path, &bytes[..lease.min(bytes.len())]).expect("it is ours");
    });
    await_restarts(&mut puppet, 1);
    assert_eq!(leases(&mut puppet), 0, "the journal had none");
    assert!(daemon.log().contains("kept descriptors that no lease or session has"), "{}", daemon.log());
    acquire(&mut puppet, "d", "GPU0", BUFFER_BYTES);
    assert_eq!(text(&puppet.run(Command::Peek { buffer: "d".into(), offset: 0, len: 16 })), "00".repeat(16));
}

#[test]
fn a_daemon_that_stops_when_asked_leaves_no_session() {
    let daemon = kept();
    let mut puppet = Puppet::connected(&daemon);
    acquire(&mut puppet, "b", "GPU0", BUFFER_BYTES);
    assert!(daemon.stop().success());
    assert_eq!(text(&puppet.run(Command::SessionEnd)), "SHUTTING_DOWN");
}
