//! Two tenants are two real users. What one releases, the other never sees; what one has, the other cannot even ask for.

mod common;

use std::collections::BTreeSet;

use common::{BUFFER_BYTES, Side, acquire, number, rows, text, write};
use gdrd_harness::script::Command;
use gdrd_harness::{Daemon, DaemonOptions, Puppet, User, as_root_of_a_user_namespace};

const ALICE: User = User::Uid(1001);
const BOB: User = User::Uid(1002);

/// A daemon that lets everyone lease.
fn open_daemon() -> Daemon {
    DaemonOptions::default().config("[[policy.lease]]\nwho = \"anyone\"\n").start()
}

#[test]
fn a_kept_descriptor_and_mapping_never_show_another_tenants_bytes() {
    as_root_of_a_user_namespace("a_kept_descriptor_and_mapping_never_show_another_tenants_bytes", || {
        let daemon = open_daemon();
        let mut alice = Puppet::connected_as(&daemon, ALICE);
        let mut bob = Puppet::connected_as(&daemon, BOB);
        assert_eq!((alice.run(Command::WhoAmI), bob.run(Command::WhoAmI)), (1001.into(), 1002.into()));
        // More than one buffer, so that the pools have something to mix up.
        for index in 0..4 {
            let name = format!("a{index}");
            acquire(&mut alice, &name, "GPU0", BUFFER_BYTES);
            alice.run(Command::Fill { buffer: name.clone(), seed: index });
            alice.run(Command::ReleaseAndKeep { buffer: name.clone(), kept: name });
        }
        let mut digests = BTreeSet::new();
        for index in 0..8 {
            let name = format!("b{index}");
            acquire(&mut bob, &name, "GPU0", BUFFER_BYTES);
            let clean = Command::Digest { buffer: name.clone(), offset: 0, len: BUFFER_BYTES };
            digests.insert(text(&bob.run(clean)));
            bob.run(Command::Fill { buffer: name, seed: 1000 + index });
        }
        // Every buffer of Bob's came as zeros: one digest for all.
        assert_eq!(digests.len(), 1);
        for index in 0..4 {
            let seen = alice.run(Command::CountKept { kept: format!("a{index}") });
            assert_eq!(seen, 0, "what Alice kept was scrubbed, and nobody else's bytes came into it");
            let both = alice.run(Command::DigestKept { kept: format!("a{index}") });
            assert_eq!(both[0], both[1], "the old mapping and a new one of the kept descriptor show the same");
            assert_eq!(digests.first().cloned(), Some(text(&both[0])));
        }
        // Alice writes through what she kept: none of it reaches Bob.
        let of_bob = Command::Digest { buffer: "b0".into(), offset: 0, len: BUFFER_BYTES };
        let before = bob.run(of_bob.clone());
        for index in 0..4 {
            alice.run(Command::FillKept { kept: format!("a{index}"), seed: 7 });
        }
        assert_eq!(bob.run(of_bob), before);
        // And what Alice scribbled there is not what she is lent next.
        acquire(&mut bob, "late", "GPU0", BUFFER_BYTES);
        let late = bob.run(Command::Digest { buffer: "late".into(), offset: 0, len: BUFFER_BYTES });
        assert_eq!(digests.first().cloned(), Some(text(&late)));
    });
}

#[test]
fn another_tenants_lease_looks_like_one_that_never_was() {
    as_root_of_a_user_namespace("another_tenants_lease_looks_like_one_that_never_was", || {
        let daemon = open_daemon();
        let mut alice = Side::new_as(&daemon, ALICE, "GPU0");
        let mut bob = Side::new_as(&daemon, BOB, "GPU0");
        let lease_id = number(&alice.lease["lease_id"]);
        for command in [
            |lease_id| Command::Open { buffer: "x".into(), lease_id },
            |lease_id| Command::ReleaseLease { lease_id, generation: 0 },
        ] {
            let foreign = bob.puppet.refused(command(lease_id));
            let unknown = bob.puppet.refused(command(lease_id + 1_000_000));
            assert_eq!(foreign.reason, unknown.reason);
            let without_number = |message: &str, id: u64| message.replace(&id.to_string(), "N");
            assert_eq!(
                without_number(&foreign.message, lease_id),
                without_number(&unknown.message, lease_id + 1_000_000)
            );
        }
        assert_eq!(rows(&bob.puppet.run(Command::Leases)), 1);
        assert_eq!(rows(&bob.puppet.run(Command::QueuePairs)), 1);
        assert_eq!(rows(&alice.puppet.run(Command::Leases)), 1);
        // Root sees both.
        let mut root = Puppet::connected(&daemon);
        assert_eq!(rows(&root.run(Command::Leases)), 2);
        assert_eq!(rows(&root.run(Command::QueuePairs)), 2);
    });
}

#[test]
fn tenants_write_to_each_other_only_with_the_key_they_were_given() {
    as_root_of_a_user_namespace("tenants_write_to_each_other_only_with_the_key_they_were_given", || {
        let daemon = open_daemon();
        let mut alice = Side::new_as(&daemon, ALICE, "GPU0");
        let mut bob = Side::new_as(&daemon, BOB, "GPU1");
        common::join(&mut alice, &mut bob);
        // A job may span users: who has the registration may write, as with any HCA.
        alice.poke(0, "abcd");
        assert_eq!(alice.status_of(1, write(&bob.blob, 0, 2)), "SUCCESS");
        assert_eq!(bob.peek(0, 2), "abcd");
        // A slot is an index of one's own tenant: Bob's means nothing in Alice's ring.
        let mut local = gdrd_harness::script::Local::new("b", 0, 8);
        local.slot = Some(3000);
        let remote = gdrd_harness::script::Remote::new(&bob.blob, 0);
        let work = gdrd_harness::script::Work::Write { local, remote, imm: None };
        assert_eq!(alice.status_of(2, work), "STALE");
        assert_eq!(alice.status_of(3, write(&bob.blob, 0, 2)), "SUCCESS");
    });
}

#[test]
fn without_a_rule_a_user_sees_topology_and_leases_nothing() {
    as_root_of_a_user_namespace("without_a_rule_a_user_sees_topology_and_leases_nothing", || {
        let daemon = Daemon::start();
        let mut stranger = Puppet::start_as(ALICE);
        let refused = match stranger.try_run(Command::Connect { runtime_dir: daemon.runtime_dir_text() }) {
            Ok(_) => stranger.refused(Command::Acquire {
                buffer: "b".into(),
                gpu: "GPU0".into(),
                size: BUFFER_BYTES,
                host: false,
            }),
            Err(refused) => refused,
        };
        assert_eq!(refused.reason, "LEASE_NOT_ALLOWED", "{refused:?}");
        assert!(refused.message.contains("1001"), "the message names the user: {}", refused.message);
        let plan = stranger.run(Command::Topology { runtime_dir: daemon.runtime_dir_text() });
        assert_eq!(number(&plan["gpus"]), 8);
    });
}
