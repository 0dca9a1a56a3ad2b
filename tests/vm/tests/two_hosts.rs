//! Two guests on one wire, a daemon on each: the job exchanges endpoints by its own means (here TCP), and content goes
//! over RDMA. Both guests run this program; node 1 asks, node 2 serves.
#![forbid(unsafe_code)]

mod common;

use common::peer::Peer;
use common::perftest::{Perftest, print_ratio};
use common::{PATIENT, Side, daemon_with, number, text};
use gdrd_harness::script::{Command, Local, Remote, Work};
use gdrd_harness::{Puppet, User};
use gdrd_vm::node;

const BUFFER_BYTES: u64 = 64 << 20;
const SEED: u64 = 90_125;
const SMALL_BYTES: u64 = 2 << 20;
/// Where the word of the atomics is, and what is in it before and after them.
const WORD: u64 = 8192;
const WORD_BEFORE: u64 = 7;
const WORD_AFTER: u64 = 2;
const TENANTS: [User; 2] = [User::Uid(1001), User::Uid(1002)];

#[test]
fn two_daemons_move_a_buffer_between_two_hosts() {
    let mut peer = Peer::meet();
    let daemon = daemon_with(PATIENT);
    let mut side = Side::new(&daemon, User::Own, BUFFER_BYTES);
    let endpoint = peer.trade(&side.endpoint.clone());
    let blob = peer.trade(&side.blob.clone());
    side.connect_to(&endpoint);
    if node() == 1 {
        ask(&mut peer, &mut side, &blob)
    } else {
        serve(&mut peer, &mut side)
    }
    drop(side);
    // Neither guest leaves while the other still needs its answers.
    peer.trade("done");
    assert!(daemon.stop().success());
}

#[test]
fn a_killed_client_is_told_to_its_peer_and_another_tenant_goes_on() {
    let mut peer = Peer::meet();
    let daemon = daemon_with(PATIENT);
    let mut sides = TENANTS.map(|user| Side::new(&daemon, user, SMALL_BYTES));
    let blobs = sides.each_mut().map(|side| {
        let endpoint = peer.trade(&side.endpoint.clone());
        side.connect_to(&endpoint);
        peer.trade(&side.blob.clone())
    });
    peer.trade("connected");
    let write = |blob: &str| Work::Write { local: Local::new("b", 0, 64), remote: Remote::new(blob, 0), imm: None };
    let [mut lonely, mut lucky] = sides;
    if node() == 2 {
        lonely.puppet.kill();
        let mut root = Puppet::connected(&daemon);
        gdrd_harness::wait_until("the lease of the killed client ends", || {
            let leases = root.run(Command::Leases);
            if leases.as_array().is_some_and(|rows| rows.len() == 1) { Ok(()) } else { Err(leases) }
        });
        peer.tell("killed");
        assert_eq!(peer.hear(), "told");
        assert_eq!(lucky.peek(0, 4), "0badcafe");
    } else {
        assert_eq!(peer.hear(), "killed");
        assert_eq!(lonely.status_of(1, write(&blobs[0])), "RETRY_EXC_ERR");
        lucky.poke(0, "0badcafe");
        assert_eq!(lucky.status_of(1, write(&blobs[1])), "SUCCESS");
        peer.tell("told");
    }
    peer.trade("done");
    assert!(daemon.stop().success());
}

/// Receives of datagrams begin with room for a route header, filled or not.
const GRH_BYTES: u64 = 40;

#[test]
fn datagrams_reach_the_other_host_and_none_that_has_no_receive() {
    let mut peer = Peer::meet();
    let daemon = daemon_with(PATIENT);
    let mut side = Side::new(&daemon, User::Own, SMALL_BYTES);
    let make = Command::DatagramQueuePair { queue_pair: "d".into(), hca: gdrd_vm::HCA.into() };
    let endpoint = peer.trade(&text(&side.puppet.run(make)["endpoint"]));
    side.puppet.run(Command::ConnectQueuePair { queue_pair: "d".into(), endpoint });
    peer.trade("connected");
    let post = |work| Command::Post { queue_pair: "d".into(), work, first_wr_id: 1, only_last_signaled: false };
    let completion = || Command::Completion { queue_pair: "d".into() };
    let send = |payload: &str| Work::SendInline { payload: payload.into(), imm: Some(7) };
    if node() == 1 {
        side.puppet.run(post(vec![send("dead")]));
        assert_eq!(side.puppet.run(completion())["status"], "SUCCESS", "sent, and dropped over there");
        peer.tell("sent");
        assert_eq!(peer.hear(), "posted");
        side.puppet.run(post(vec![send("cafe")]));
        assert_eq!(side.puppet.run(completion())["status"], "SUCCESS");
    } else {
        assert_eq!(peer.hear(), "sent");
        side.puppet.run(post(vec![Work::Recv { local: Local::new("b", 0, 4096) }]));
        peer.tell("posted");
        let received = side.puppet.run(completion());
        assert_eq!((&received["status"], &received["imm"]), (&"SUCCESS".into(), &7.into()));
        assert_eq!(number(&received["bytes"]), GRH_BYTES + 2);
        assert_eq!(side.peek(GRH_BYTES, 2), "cafe");
    }
    peer.trade("done");
    drop(side);
    assert!(daemon.stop().success());
}

/// Figures of emulated machines: only their ratios say something, and nothing is asserted of them.
#[test]
fn perftest_runs_beside_it_as_the_reference() {
    let mut peer = Peer::meet();
    let daemon = daemon_with(PATIENT);
    let mut side = Side::new(&daemon, User::Own, SMALL_BYTES);
    let endpoint = peer.trade(&side.endpoint.clone());
    side.connect_to(&endpoint);
    let blob = peer.trade(&side.blob.clone());
    peer.trade("connected");
    let mut time = |len, rounds, window| {
        let work = Work::Write { local: Local::new("b", 0, len), remote: Remote::new(&blob, 0), imm: None };
        // Asleep, since one CPU is to serve all of this guest.
        let command = Command::TimeWork { queue_pair: "q".into(), work, rounds, window, polling: false };
        let timed = side.puppet.run(command);
        (number(&timed["total_ns"]), number(&timed["median_ns"]))
    };
    for test in [Perftest::BANDWIDTH, Perftest::LATENCY] {
        if node() == 2 {
            test.serve(&mut peer);
            assert_eq!(peer.hear(), "timed");
            continue;
        }
        let reference = test.ask(&mut peer, "10.77.0.2");
        let (total_ns, median_ns) = time(test.len_bytes, test.rounds, test.window);
        peer.tell("timed");
        print_ratio(&test, reference, total_ns, median_ns);
    }
    peer.trade("done");
    drop(side);
    assert!(daemon.stop().success());
}

fn ask(peer: &mut Peer, side: &mut Side, blob: &str) {
    assert_eq!(peer.hear(), "connected");
    side.fill(SEED);
    side.write_all_to(blob);
    peer.tell("written");
    assert_eq!(peer.hear(), side.digest(), "what the other host reads in its memory");

    peer.tell("change");
    assert_eq!(peer.hear(), "changed");
    let read = Work::Read { local: Local::new("b", 0, 8), remote: Remote::new(blob, 4096) };
    assert_eq!(side.status_of(1000, read), "SUCCESS");
    assert_eq!(side.peek(0, 8), "1122334455667788");
    atomics(side, blob);
    assert_eq!(side.status_of(1001, Work::Send { local: Local::new("b", 0, 8), imm: Some(9) }), "SUCCESS");
}

/// Atomics on a word of the other host: each brings back what was there before it.
fn atomics(side: &mut Side, blob: &str) {
    let local = || Local::new("b", 64, 8);
    let remote = || Remote::new(blob, WORD);
    let add = |add| Work::FetchAdd { local: local(), remote: remote(), add };
    let swap = |compare, swap| Work::CompareSwap { local: local(), remote: remote(), compare, swap };
    // With what each finds; the other host looks at what is left.
    let steps = [
        (add(5), WORD_BEFORE),
        (swap(12, 0x1122_3344_5566_7788), 12),
        // It is not there any more: nothing is swapped.
        (swap(12, 1), 0x1122_3344_5566_7788),
        (swap(0x1122_3344_5566_7788, u64::MAX - 1), 0x1122_3344_5566_7788),
        // Beyond the largest number it begins at zero again.
        (add(4), u64::MAX - 1),
    ];
    for (wr_id, (work, found)) in (2000..).zip(steps) {
        assert_eq!(side.status_of(wr_id, work.clone()), "SUCCESS", "{work:?}");
        assert_eq!(side.peek(64, 8), hex_of(found), "{work:?}");
    }
}

/// A word as it lies in memory.
fn hex_of(word: u64) -> String {
    word.to_le_bytes().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn serve(peer: &mut Peer, side: &mut Side) {
    side.post(1, vec![Work::Recv { local: Local::new("b", 16_384, 64) }]);
    peer.tell("connected");
    assert_eq!(peer.hear(), "written");
    let digest = side.digest();
    peer.tell(&digest);

    assert_eq!(peer.hear(), "change");
    side.poke(4096, "1122334455667788");
    side.poke(WORD, &hex_of(WORD_BEFORE));
    peer.tell("changed");
    let received = side.completion();
    assert_eq!((&received["wr_id"], &received["imm"], &received["bytes"]), (&1.into(), &9.into(), &8.into()));
    assert_eq!(side.peek(16_384, 8), "1122334455667788");
    assert_eq!(side.peek(WORD, 8), hex_of(WORD_AFTER), "what the other host's atomics left");
}
