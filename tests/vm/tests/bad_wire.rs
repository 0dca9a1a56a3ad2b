//! Two guests whose wire and hosts fail: a slow wire that loses packets, a cable pulled, addresses that come and go, a
//! frozen host, a killed client, at last a killed host, each in mid-transfer. What was posted ends in order, with success or
//! with the transport's error; whoever has nothing under way notices nothing, and the kernel holds nothing afterwards.
//! Node 1 writes and does all harm, to itself and, by its monitor, to node 2, which serves.
#![forbid(unsafe_code)]

mod common;

use common::peer::Peer;
use common::{CHUNK_BYTES, ENDLESS, FIRM, PATIENT, Side, daemon_with, number, text};
use gdrd_harness::script::{Command, Local, Remote, Work};
use gdrd_harness::{Daemon, Puppet, User, wait_until};
use gdrd_vm::monitor::Monitor;
use gdrd_vm::{HCA, NETDEV, ip, kernel_holds, node, run};

const BUFFER_BYTES: u64 = 2 << 20;
/// Writes under way at once, of one queue of requests.
const WRITES: u64 = 96;
/// Minutes of writing.
const MAX_WRITES: u64 = 1 << 14;
const TENANTS: [User; 2] = [User::Uid(1001), User::Uid(1002)];
const ADDRESS: &str = "10.77.0.1/24";

/// What the kernel holds for programs.
fn held() -> [u64; 4] {
    ["ctx", "pd", "qp", "mr"].map(|kind| kernel_holds(HCA, kind))
}

/// A connected side of a user, and the peer's registration.
fn meet(peer: &mut Peer, daemon: &Daemon, user: User) -> (Side, String) {
    let mut side = Side::new(daemon, user, BUFFER_BYTES);
    let endpoint = peer.trade(&side.endpoint.clone());
    side.connect_to(&endpoint);
    let blob = peer.trade(&side.blob.clone());
    peer.trade("connected");
    (side, blob)
}

/// Moves the whole buffer and checks it at the far end.
fn moves(peer: &mut Peer, side: &mut Side, blob: &str, seed: u64) {
    if node() == 1 {
        side.fill(seed);
        side.write_all_to(blob);
        peer.tell("written");
        assert_eq!(peer.hear(), side.digest());
    } else {
        assert_eq!(peer.hear(), "written");
        let digest = side.digest();
        peer.tell(&digest);
    }
}

/// Writes one chunk of the buffer after the other, over and over.
fn write(blob: &str, wr_id: u64) -> Work {
    let offset = wr_id * u64::from(CHUNK_BYTES) % BUFFER_BYTES;
    Work::Write { local: Local::new("b", offset, CHUNK_BYTES), remote: Remote::new(blob, offset), imm: None }
}

/// Begins to write, and does not wait for any of it.
fn start_writing(side: &mut Side, blob: &str) {
    side.post(0, (0..WRITES).map(|wr_id| write(blob, wr_id)).collect());
}

/// What a request tells whose peer does not answer.
const UNANSWERED: &str = "RETRY_EXC_ERR";
const FLUSHED: &str = "WR_FLUSH_ERR";

/// Goes on writing until the fault is met, however long that takes. All ends in the order of the posts: with success, then the
/// first that met the fault tells it, the rest are flushed.
fn assert_writing_is_ended_by_the_fault(side: &mut Side, blob: &str, told_as: &[&str]) {
    let next = |side: &mut Side, wr_id| {
        let completion = side.completion();
        assert_eq!(number(&completion["wr_id"]), wr_id, "in order");
        text(&completion["status"])
    };
    let mut wr_id = 0;
    let told = loop {
        let status = next(side, wr_id);
        wr_id += 1;
        if status != "SUCCESS" {
            break status;
        }
        assert!(wr_id < MAX_WRITES, "no fault was met");
        side.post(wr_id + WRITES - 1, vec![write(blob, wr_id + WRITES - 1)]);
    };
    assert!(told_as.contains(&told.as_str()), "{told}");
    let rest: Vec<String> = (wr_id..wr_id + WRITES - 1).map(|wr_id| next(side, wr_id)).collect();
    assert!(rest.iter().all(|status| status == FLUSHED), "{rest:?}");
}

fn await_active_port() {
    wait_until("the port is up", || {
        let state = std::fs::read_to_string(format!("/sys/class/infiniband/{HCA}/ports/1/state"));
        if state.as_ref().is_ok_and(|state| state.contains("ACTIVE")) { Ok(()) } else { Err(state) }
    });
}

/// Node 1 writes into a fault that lasts until all of it has ended; then the tenant without traffic goes on where it was,
/// and the other one with a new queue pair.
fn outlives(begin: impl Fn(), end: impl Fn()) {
    let before = held();
    let mut peer = Peer::meet();
    let daemon = daemon_with(FIRM);
    let mut sides = TENANTS.map(|user| meet(&mut peer, &daemon, user));
    if node() == 1 {
        let [(side, blob), _] = &mut sides;
        start_writing(side, blob);
        begin();
        // rxe that finds no route once the link is down moves a queue pair to ERR itself, and flushes the request that told it.
        assert_writing_is_ended_by_the_fault(side, blob, &[UNANSWERED, FLUSHED]);
        end();
        await_active_port();
        peer.trade("over");
    } else {
        assert_eq!(peer.hear(), "over");
        await_active_port();
        peer.tell("over");
    }
    let [_, (side, blob)] = &mut sides;
    moves(&mut peer, side, &blob.clone(), 11);
    drop(sides);
    let (mut again, blob) = meet(&mut peer, &daemon, TENANTS[0]);
    moves(&mut peer, &mut again, &blob, 12);
    drop(again);
    peer.trade("done");
    assert!(daemon.stop().success());
    assert_eq!(held(), before);
}

#[test]
fn a_cable_pulled_in_mid_transfer_ends_it_and_put_back_carries_again() {
    outlives(|| Monitor::own().command("set_link nic off"), || Monitor::own().command("set_link nic on"));
}

#[test]
fn a_frozen_host_ends_what_is_sent_to_it_and_serves_again_once_it_goes_on() {
    // A stopped emulator takes no frames and so stalls the one that sends to it; what no host takes, a NIC drops.
    let freeze = |monitor: &mut Monitor| ["set_link wire off", "stop"].map(|command| monitor.command(command));
    let thaw = |monitor: &mut Monitor| ["set_link wire on", "cont"].map(|command| monitor.command(command));
    outlives(|| _ = freeze(&mut Monitor::of_peer()), || _ = thaw(&mut Monitor::of_peer()));
}

#[test]
fn addresses_come_and_go_and_end_only_the_queue_pairs_that_use_them() {
    let before = held();
    let mut peer = Peer::meet();
    let daemon = daemon_with(PATIENT);
    let address = |verb: &str, address: &str| ip(&["addr", verb, address, "dev", NETDEV]);
    let (mut side, blob) = meet(&mut peer, &daemon, TENANTS[0]);
    if node() == 1 {
        start_writing(&mut side, &blob);
        address("add", "10.99.0.1/24");
        address("add", "fd77::1/64");
        address("del", "10.99.0.1/24");
        assert!((0..WRITES).all(|_| text(&side.completion()["status"]) == "SUCCESS"), "its own row is as it was");

        start_writing(&mut side, &blob);
        address("del", ADDRESS);
        // rxe moves a queue pair without a source address to ERR itself, and flushes the request that told it too.
        assert_writing_is_ended_by_the_fault(&mut side, &blob, &[UNANSWERED, FLUSHED]);
        address("add", ADDRESS);
    }
    peer.trade("over");
    drop(side);
    // A table with holes in it.
    let (mut again, blob) = meet(&mut peer, &daemon, TENANTS[0]);
    moves(&mut peer, &mut again, &blob, 12);
    if node() == 1 {
        address("del", "fd77::1/64");
    }
    drop(again);
    peer.trade("done");
    assert!(daemon.stop().success());
    assert_eq!(held(), before);
}

#[test]
fn a_client_killed_in_mid_write_leaves_nothing_and_disturbs_nobody() {
    let before = held();
    let mut peer = Peer::meet();
    let daemon = daemon_with(FIRM);
    let [(mut killed, blob), (mut other, other_blob)] = TENANTS.map(|user| meet(&mut peer, &daemon, user));
    let mut root = Puppet::connected(&daemon);
    let held_by_both = held();
    if node() == 1 {
        start_writing(&mut killed, &blob);
        killed.puppet.kill();
        wait_until("the lease of the killed client ends", || {
            let leases = root.run(Command::Leases);
            if leases.as_array().is_some_and(|rows| rows.len() == 1) { Ok(()) } else { Err(leases) }
        });
        wait_until("its queue pair and its regions go", || {
            let held = held();
            if held.iter().zip(held_by_both).all(|(now, before)| *now <= before) && held[2] < held_by_both[2] {
                Ok(())
            } else {
                Err(held)
            }
        });
    } else {
        // Its peer is not killed: the one that serves keeps what is its own.
        drop(killed);
    }
    moves(&mut peer, &mut other, &other_blob, 13);
    drop((other, root));
    peer.trade("done");
    assert!(daemon.stop().success());
    assert_eq!(held(), before);
}

/// A wire that delays and loses packets of this guest, until it is dropped.
struct BadWire;

impl BadWire {
    fn new() -> Self {
        run("tc", &["qdisc", "add", "dev", NETDEV, "root", "netem", "delay", "20ms", "loss", "3%"]);
        Self
    }

    /// Packets that it has lost so far (`dropped N` of tc-netem(8)'s statistics).
    fn lost(&self) -> u64 {
        let told = run("tc", &["-s", "qdisc", "show", "dev", NETDEV]);
        let dropped = told.split_once("dropped ").and_then(|(_, rest)| rest.split([',', ' ']).next()?.parse().ok());
        dropped.unwrap_or_else(|| unreachable!("no count in {told:?}"))
    }
}

impl Drop for BadWire {
    fn drop(&mut self) {
        // Not `run`: a test that has failed already must not leave this to the next.
        let gone = std::process::Command::new("tc").args(["qdisc", "del", "dev", NETDEV, "root"]).status();
        assert!(gone.is_ok_and(|status| status.success()) || std::thread::panicking());
    }
}

#[test]
fn a_lossy_and_slow_wire_delays_and_loses_nothing() {
    let before = held();
    let mut peer = Peer::meet();
    // rxe counts each lost packet of a long message as a try (docs/hardware.md): any number may be in a row.
    let daemon = daemon_with(ENDLESS);
    let (mut side, blob) = meet(&mut peer, &daemon, User::Own);
    let wire = (node() == 1).then(BadWire::new);
    moves(&mut peer, &mut side, &blob, 3);
    assert!(wire.as_ref().is_none_or(|wire| wire.lost() > 0), "some of its 512 packets");
    drop(wire);
    drop(side);
    peer.trade("done");
    assert!(daemon.stop().success());
    assert_eq!(held(), before);
}

/// The last one, by name: there is no peer after it.
#[test]
fn then_a_killed_host_ends_what_is_sent_to_it_and_leaves_nothing() {
    let before = held();
    let mut peer = Peer::meet();
    let daemon = daemon_with(FIRM);
    let (mut side, blob) = meet(&mut peer, &daemon, User::Own);
    if node() == 2 {
        // Until the end of the machine.
        unreachable!("told {:?} by a peer that should have ended this guest", peer.hear());
    }
    start_writing(&mut side, &blob);
    Monitor::of_peer().last_command("quit");
    assert_writing_is_ended_by_the_fault(&mut side, &blob, &[UNANSWERED]);
    drop(side);
    assert!(daemon.stop().success());
    assert_eq!(held(), before);
}
