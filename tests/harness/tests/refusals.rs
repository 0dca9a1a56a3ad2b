//! What a client does wrong ends at that client: a clear error, nothing lost for the other process, and the wrong-doer
//! can go on where its queue pair was not to blame.

mod common;

use common::{BUFFER_BYTES, Side, acquire, connected_pair, join, number, rows, text, write};
use gdrd_client::RefusalReason;
use gdrd_harness::script::{Command, Local, Remote, Work};
use gdrd_harness::{Daemon, Puppet};

/// Posts one write that the broker must refuse, and gives the detail.
fn refused(side: &mut Side, work: Work) -> Option<RefusalReason> {
    side.post(7, work);
    let completion = side.completion();
    assert_eq!(text(&completion["status"]), "REFUSED");
    RefusalReason::from_code(u32::try_from(number(&completion["detail"])).expect("a detail has 32 bits"))
}

fn works(from: &mut Side, to: &mut Side) {
    from.poke(0, "c0ffee");
    assert_eq!(from.status_of(1000, write(&to.blob, 0, 3)), "SUCCESS");
    assert_eq!(to.peek(0, 3), "c0ffee");
}

#[test]
fn local_mistakes_are_refused_one_by_one_and_the_queue_pair_goes_on() {
    let daemon = Daemon::start();
    let (mut from, mut to) = connected_pair(&daemon, ["GPU0", "GPU1"]);
    let past_the_end = write(&to.blob, BUFFER_BYTES - 4, 8);
    assert_eq!(refused(&mut from, past_the_end), Some(RefusalReason::Range));
    let at_the_end_of_numbers = Local::new("b", u64::MAX, 1);
    let work = Work::Write { local: at_the_end_of_numbers, remote: Remote::new(&to.blob, 0), imm: None };
    assert_eq!(refused(&mut from, work), Some(RefusalReason::Range));
    let no_slot = Local { slot: Some(u32::MAX), ..Local::new("b", 0, 8) };
    let work = Work::Write { local: no_slot, remote: Remote::new(&to.blob, 0), imm: None };
    assert_eq!(refused(&mut from, work), Some(RefusalReason::NoSuchSlot));
    works(&mut from, &mut to);
}

#[test]
fn a_stale_generation_completes_as_stale_and_the_queue_pair_goes_on() {
    let daemon = Daemon::start();
    let (mut from, mut to) = connected_pair(&daemon, ["GPU0", "GPU1"]);
    let old = acquire(&mut from.puppet, "old", "GPU0", BUFFER_BYTES);
    let hca = from.hca.clone();
    let registrations = old["registrations"].as_array().expect("a list of registrations");
    let own = registrations.iter().find(|own| own["hca"] == hca.as_str()).expect("one with the HCA of the queue pair");
    let slot = u32::try_from(number(&own["slot"])).expect("a slot has 32 bits");
    let generation = number(&own["generation"]);
    from.puppet.run(Command::Release { buffer: "old".into() });
    let local = Local { slot: Some(slot), generation: Some(generation), ..Local::new("gone", 0, 8) };
    let work = Work::Write { local, remote: Remote::new(&to.blob, 0), imm: None };
    assert_eq!(from.status_of(1, work), "STALE");
    works(&mut from, &mut to);
}

#[test]
fn the_generation_page_shows_a_release_of_another_process_without_a_call() {
    let daemon = Daemon::start();
    let mut owner = Puppet::connected(&daemon);
    let lease = number(&acquire(&mut owner, "b", "GPU0", BUFFER_BYTES)["lease_id"]);
    assert_eq!(owner.run(Command::IsCurrent { buffer: "b".into() }), true);
    // By its number, so that the handle stays.
    owner.run(Command::ReleaseLease { lease_id: lease, generation: 0 });
    assert_eq!(owner.run(Command::IsCurrent { buffer: "b".into() }), false);
}

#[test]
fn a_wrong_key_or_range_at_the_peer_fails_at_the_peer_alone() {
    let daemon = Daemon::start();
    let mistakes: [fn(&str) -> Remote; 2] =
        [|blob| Remote { rkey_flip: 0x0040_0000, ..Remote::new(blob, 0) }, |blob| Remote::new(blob, BUFFER_BYTES - 4)];
    for mistake in mistakes {
        let (mut from, mut to) = connected_pair(&daemon, ["GPU0", "GPU1"]);
        to.poke(BUFFER_BYTES - 4, "01020304");
        let before = to.digest();
        let work = Work::Write { local: Local::new("b", 0, 8), remote: mistake(&to.blob), imm: None };
        assert_eq!(from.status_of(1, work), "REM_ACCESS_ERR");
        assert_eq!(to.digest(), before, "nothing of it was written");
        // By the rules of verbs the requester's queue pair is in ERR now: what follows is flushed.
        assert_eq!(from.status_of(2, write(&to.blob, 0, 8)), "WR_FLUSH_ERR");
        // Both processes go on with new queue pairs.
        let mut again = (Side::with(from.puppet, "GPU2", BUFFER_BYTES), Side::with(to.puppet, "GPU3", BUFFER_BYTES));
        join(&mut again.0, &mut again.1);
        works(&mut again.0, &mut again.1);
    }
}

#[test]
fn a_released_buffer_is_out_of_the_peers_reach() {
    let daemon = Daemon::start();
    let (mut from, mut to) = connected_pair(&daemon, ["GPU0", "GPU1"]);
    assert_eq!(from.status_of(1, write(&to.blob, 0, 8)), "SUCCESS");
    to.puppet.run(Command::Release { buffer: "b".into() });
    // The reply says that the lease has ended; the registration goes in the background, and the scrub after it.
    gdrd_harness::wait_until("the NIC reaches the buffer no more", || {
        match from.status_of(2, write(&to.blob, 0, 8)).as_str() {
            "REM_ACCESS_ERR" => Ok(()),
            other => Err(other.to_owned()),
        }
    });
}

#[test]
fn leases_that_are_not_the_sessions_are_refused_with_a_reason() {
    let daemon = Daemon::start();
    let (mut holder, mut other) = (Puppet::connected(&daemon), Puppet::connected(&daemon));
    let lease = acquire(&mut holder, "b", "GPU0", BUFFER_BYTES);
    let lease_id = number(&lease["lease_id"]);
    let release = |lease_id, generation| Command::ReleaseLease { lease_id, generation };
    assert_eq!(other.refused(release(lease_id, 0)).reason, "LEASE_NOT_HELD");
    assert_eq!(other.refused(release(lease_id + 1000, 0)).reason, "LEASE_UNKNOWN");
    let generation = number(&lease["generation"]);
    assert_eq!(holder.refused(release(lease_id, generation + 1)).reason, "GENERATION_STALE");
    holder.run(release(lease_id, generation));
    assert_eq!(holder.refused(release(lease_id, generation)).reason, "LEASE_UNKNOWN");
    assert_eq!(other.refused(Command::Open { buffer: "x".into(), lease_id }).reason, "LEASE_UNKNOWN");
}

#[test]
fn what_the_host_does_not_have_is_named() {
    let daemon = Daemon::start();
    let mut puppet = Puppet::connected(&daemon);
    let acquire = |gpu: &str, size| Command::Acquire { buffer: "b".into(), gpu: gpu.into(), size, host: false };
    let unknown = puppet.refused(acquire("GPU99", BUFFER_BYTES));
    assert_eq!(unknown.reason, "GPU_UNKNOWN");
    assert!(unknown.message.contains("GPU99"), "{}", unknown.message);
    for size in [0, u64::MAX] {
        let refused = puppet.refused(acquire("GPU0", size));
        assert!(!refused.reason.is_empty() && refused.reason != "INTERNAL", "{size}: {refused:?}");
    }
    let queue_pair =
        |hca: &str| Command::QueuePair { queue_pair: "q".into(), gpu: String::new(), hca: hca.into(), depth: 0 };
    assert_eq!(puppet.refused(queue_pair("mlx5_99")).reason, "HCA_UNKNOWN");
    assert_eq!(rows(&puppet.run(Command::Leases)), 0);
}

#[test]
fn a_closed_session_refuses_everything_and_its_leases_are_gone() {
    let daemon = Daemon::start();
    let (mut from, _to) = connected_pair(&daemon, ["GPU0", "GPU1"]);
    from.puppet.run(Command::CloseSession);
    from.puppet.run(Command::SessionEnd);
    // The client knows at once, the daemon once it has read that.
    gdrd_harness::wait_until("the daemon to see the end", || match from.puppet.try_run(Command::Leases) {
        Err(_) => Ok(()),
        Ok(answer) => Err(answer),
    });
    let acquire = Command::Acquire { buffer: "x".into(), gpu: "GPU0".into(), size: BUFFER_BYTES, host: false };
    for command in [acquire, Command::Leases, Command::Release { buffer: "b".into() }] {
        let refused = from.puppet.refused(command.clone());
        assert!(!refused.reason.is_empty(), "{command:?}: {refused:?}");
    }
    let completion = from.puppet.refused(Command::Completion { queue_pair: "q".into() });
    assert!(!completion.message.is_empty());
    let mut observer = Puppet::connected(&daemon);
    gdrd_harness::wait_until("only the peer's lease is left", || match rows(&observer.run(Command::Leases)) {
        1 => Ok(()),
        others => Err(others),
    });
}

#[test]
fn a_daemon_that_dies_ends_the_session_with_a_typed_error_and_a_new_one_is_found() {
    let mut daemon = Daemon::start();
    let mut puppet = Puppet::connected(&daemon);
    acquire(&mut puppet, "b", "GPU0", BUFFER_BYTES);
    puppet.run(Command::Poke { buffer: "b".into(), offset: 0, bytes: "77".into() });
    daemon.kill();
    assert_eq!(puppet.run(Command::SessionEnd), "CONNECTION_LOST");
    assert_eq!(puppet.refused(Command::Leases).reason, "CONNECTION_LOST");
    // The mapping is the client's: it outlives the lease.
    assert_eq!(puppet.run(Command::Peek { buffer: "b".into(), offset: 0, len: 1 }), "77");
    daemon.start_again();
    puppet.run(Command::Connect { runtime_dir: daemon.runtime_dir_text() });
    acquire(&mut puppet, "c", "GPU0", BUFFER_BYTES);
}
