//! Clients that break the rules: in the ring's shared memory and on the session socket. The guilty one alone pays, the
//! daemon lives, holds no more than before, and serves everyone else.

mod common;

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use common::{BUFFER_BYTES, Side, connected_pair, rows, write};
use gdrd_harness::script::Command;
use gdrd_harness::{Daemon, DaemonOptions, Puppet, wait_until};
use gdrd_proto::v1::{ClientMessage, DaemonMessage, Hello, ProveGpus, Versions, client_message, daemon_message};
use prost::Message as _;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags,
    SocketType,
};

/// Offsets of the ring's layout (gdrd_ring::abi), as any hostile client knows them.
const SUBMISSION_TAIL: u64 = 0x080;
const COMPLETION_HEAD: u64 = 0x200;
const ENTRIES: u64 = 0x1000;
const ENTRY_BYTES: u64 = 128;

fn scribble(side: &mut Side, offset: u64, bytes: &[u8]) {
    let bytes = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    side.puppet.run(Command::ScribbleRing { queue_pair: "q".into(), offset, bytes });
}

fn works(from: &mut Side, to: &mut Side) {
    let mark = format!("{:08x}", rand::random::<u32>());
    from.poke(0, &mark);
    assert_eq!(from.status_of(1, write(&to.blob, 0, 4)), "SUCCESS");
    assert_eq!(to.peek(0, 4), mark);
}

#[test]
fn impossible_ring_indices_end_that_queue_pair_and_no_other() {
    let daemon = Daemon::start();
    let (mut good, mut good_peer) = connected_pair(&daemon, ["GPU2", "GPU3"]);
    for index in [SUBMISSION_TAIL, COMPLETION_HEAD] {
        let (mut bad, bad_peer) = connected_pair(&daemon, ["GPU0", "GPU1"]);
        scribble(&mut bad, index, &0x8000_0000_u32.to_ne_bytes());
        // The next post wakes the broker, which then sees what the index became. The post may itself be refused.
        let post = Command::Flood { queue_pair: "q".into(), work: write(&bad_peer.blob, 0, 8) };
        let _ = bad.puppet.try_run(post);
        let ended = bad.puppet.try_run(Command::Completion { queue_pair: "q".into() });
        if let Err(failed) = &ended {
            assert!(failed.message.contains("queue pair") || failed.message.contains("ring"), "{}", failed.message);
        }
        works(&mut good, &mut good_peer);
        // The session of the guilty one goes on, without that queue pair.
        bad.puppet.run(Command::Destroy { queue_pair: "q".into() });
        assert!(rows(&bad.puppet.run(Command::Leases)) > 0);
    }
}

#[test]
fn random_bytes_in_submission_entries_harm_nobody_else() {
    let daemon = Daemon::start();
    let (mut good, mut good_peer) = connected_pair(&daemon, ["GPU2", "GPU3"]);
    let seed = rand::random();
    println!("seed {seed}");
    let mut random = StdRng::seed_from_u64(seed);
    for _ in 0..20 {
        let (mut bad, bad_peer) = connected_pair(&daemon, ["GPU0", "GPU1"]);
        for _ in 0..10 {
            let mut entry = [0; 32];
            random.fill(&mut entry);
            let place = ENTRIES + random.random_range(0..64) * ENTRY_BYTES + random.random_range(0..3) * 32;
            // Posted first, overwritten while the broker may be reading it: a race that only a copy survives.
            let post = Command::Flood { queue_pair: "q".into(), work: write(&bad_peer.blob, 0, 8) };
            let _ = bad.puppet.try_run(post);
            scribble(&mut bad, place, &entry);
            let _ = bad.puppet.try_run(Command::CompletionBusy { queue_pair: "q".into() });
        }
        works(&mut good, &mut good_peer);
        bad.puppet.kill();
    }
    assert!(daemon.stop().success());
}

/// A session socket without the client library's good manners.
fn raw_session(daemon: &Daemon) -> OwnedFd {
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
        .expect("socket");
    let path = daemon.runtime_dir().join("session.sock");
    rustix::net::connect(&socket, &SocketAddrUnix::new(path).expect("a short path")).expect("connect");
    socket
}

fn hello() -> client_message::Message {
    let versions = Some(Versions { api: 1, ring: 1, generation_page: 1 });
    client_message::Message::Hello(Hello { versions, client_name: "raw".into() })
}

fn send(socket: &OwnedFd, message: client_message::Message) {
    let packet = ClientMessage { message: Some(message) }.encode_to_vec();
    rustix::net::send(socket, &packet, SendFlags::NOSIGNAL).expect("send");
}

/// Reads to the end, and gives the reason of the goodbye.
fn goodbye(socket: &OwnedFd) -> Option<String> {
    let mut reason = None;
    let mut packet = [0; 8192];
    while let Ok((got, _)) = rustix::net::recv(socket, &mut packet[..], RecvFlags::empty())
        && got > 0
    {
        let message = DaemonMessage::decode(&packet[..got]).expect("the daemon sends its own messages");
        if let Some(daemon_message::Message::Goodbye(goodbye)) = message.message {
            reason = Some(goodbye.reason);
        }
    }
    reason
}

type Misuse = (&'static str, fn(&OwnedFd));

#[test]
fn every_misuse_of_the_session_socket_ends_that_session_with_its_reason() {
    let daemon = without_pools();
    let (mut good, mut good_peer) = connected_pair(&daemon, ["GPU2", "GPU3"]);
    let before = settled_fds(&daemon);
    let misuses: [Misuse; 5] = [
        ("PACKET_MALFORMED", |socket| {
            rustix::net::send(socket, &[0xff; 40], SendFlags::NOSIGNAL).expect("send");
        }),
        ("PACKET_TOO_LONG", |socket| {
            rustix::net::send(socket, &vec![0; 100_000], SendFlags::NOSIGNAL).expect("send");
        }),
        ("PROTOCOL_VIOLATED", |socket| {
            send(socket, hello());
            send(socket, hello());
        }),
        ("VERSION_MISMATCH", |socket| {
            let versions = Some(Versions { api: 99, ring: 1, generation_page: 1 });
            send(socket, client_message::Message::Hello(Hello { versions, client_name: String::new() }));
        }),
        ("FDS_UNEXPECTED", |socket| {
            send_with_fds(socket, hello(), &[std::io::stdin().as_fd()]).expect("sendmsg");
        }),
    ];
    for (reason, misuse) in misuses {
        let socket = raw_session(&daemon);
        misuse(&socket);
        assert_eq!(goodbye(&socket).as_deref(), Some(reason));
        works(&mut good, &mut good_peer);
    }
    back_to(&daemon, before);
}

fn send_with_fds(socket: &OwnedFd, message: client_message::Message, fds: &[BorrowedFd<'_>]) -> rustix::io::Result<()> {
    let packet = ClientMessage { message: Some(message) }.encode_to_vec();
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    let packet = [std::io::IoSlice::new(&packet)];
    rustix::net::sendmsg(socket, &packet, &mut control, SendFlags::NOSIGNAL).map(drop)
}

#[test]
fn floods_of_descriptors_and_of_silent_connections_leave_nothing_behind() {
    let daemon = without_pools();
    let (mut good, mut good_peer) = connected_pair(&daemon, ["GPU2", "GPU3"]);
    let before = settled_fds(&daemon);
    let null = std::fs::File::open("/dev/null").expect("/dev/null");
    let fds = vec![null.as_fd(); 253];
    let mut sockets = Vec::new();
    for _ in 0..20 {
        let socket = raw_session(&daemon);
        send(&socket, hello());
        for request_id in 0..4 {
            // The daemon may have had enough of this one already, which is its right.
            let _ = send_with_fds(&socket, client_message::Message::ProveGpus(ProveGpus { request_id }), &fds);
        }
        sockets.push(socket);
    }
    // These say nothing at all.
    sockets.extend((0..50).map(|_| raw_session(&daemon)));
    works(&mut good, &mut good_peer);
    drop(sockets);
    back_to(&daemon, before);
    works(&mut good, &mut good_peer);
}

#[test]
fn a_client_that_never_reads_cannot_hold_up_the_others() {
    let daemon = Daemon::start();
    let (mut good, mut good_peer) = connected_pair(&daemon, ["GPU2", "GPU3"]);
    let mut deaf = Side::new(&daemon, "GPU0");
    deaf.connect_to(&good.endpoint.clone());
    // It posts until its queue is full and polls nothing: no completion of it has anywhere else to go.
    deaf.puppet.run(Command::Flood { queue_pair: "q".into(), work: write(&deaf.blob.clone(), 0, 64) });
    // Acquires whose replies and descriptors it never takes.
    for _ in 0..8 {
        deaf.puppet.run(Command::StartAcquire { gpu: "GPU0".into(), size: BUFFER_BYTES });
    }
    for _ in 0..20 {
        works(&mut good, &mut good_peer);
    }
    let mut newcomer = Puppet::connected(&daemon);
    common::acquire(&mut newcomer, "b", "GPU0", BUFFER_BYTES);
    newcomer.run(Command::Release { buffer: "b".into() });
    deaf.puppet.kill();
    wait_until("what the deaf one was lent comes back", || match rows(&newcomer.run(Command::Leases)) {
        2 => Ok(()),
        others => Err(others),
    });
}

/// A daemon that makes no buffer ahead, whose descriptors are thus of its clients alone.
fn without_pools() -> Daemon {
    DaemonOptions::default().config("[pool]\nready_target_per_class = 0\nclean_target_per_class = 0\n").start()
}

/// Descriptors of the daemon once they stop changing.
fn settled_fds(daemon: &Daemon) -> usize {
    let mut last = 0;
    wait_until("the daemon's descriptors settle", || {
        let now = daemon.footprint().fd_count();
        if std::mem::replace(&mut last, now) == now { Ok(now) } else { Err(now) }
    })
}

fn back_to(daemon: &Daemon, before: usize) {
    wait_until("the daemon holds as many descriptors as before", || {
        let footprint = daemon.footprint();
        if footprint.fd_count() == before { Ok(()) } else { Err((footprint, before)) }
    });
}
