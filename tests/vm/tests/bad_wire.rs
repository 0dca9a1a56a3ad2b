//! Two guests on a wire that is slow and loses packets: what is written arrives, every byte. Node 1 writes, node 2 serves.
#![forbid(unsafe_code)]

mod common;

use common::peer::Peer;
use common::{Side, daemon};
use gdrd_harness::{Daemon, User};
use gdrd_vm::{NETDEV, node, run};

const BUFFER_BYTES: u64 = 2 << 20;

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

#[test]
fn a_lossy_and_slow_wire_delays_and_loses_nothing() {
    let mut peer = Peer::meet();
    let daemon = daemon();
    let (mut side, blob) = meet(&mut peer, &daemon, User::Own);
    if node() == 1 {
        run("tc", &["qdisc", "add", "dev", NETDEV, "root", "netem", "delay", "20ms", "loss", "3%"]);
    }
    moves(&mut peer, &mut side, &blob, 3);
    if node() == 1 {
        run("tc", &["qdisc", "del", "dev", NETDEV, "root"]);
    }
    drop(side);
    peer.trade("done");
    assert!(daemon.stop().success());
}
