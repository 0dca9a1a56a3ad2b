//! One guest: a real daemon on soft RoCE lends host buffers and queue pairs to real processes; what it holds in the
//! kernel goes with it; ports and addresses change under it.
#![forbid(unsafe_code)]

mod common;

use std::os::fd::AsFd;

use common::{Side, daemon, join};
use gdrd_hal::{Access, GidType, Hca, HcaError, HcaEvent, MemorySource, PortState, QueuePairConfig, QueuePairType};
use gdrd_harness::script::{Command, Local, Remote, Work};
use gdrd_harness::{PATIENCE, User, wait_until};
use gdrd_verbs::Options;
use gdrd_vm::{HCA, NETDEV, host_memory, ip, kernel_holds, open_hca, open_hca_with, run};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

const BUFFER_BYTES: u64 = 4 << 20;
const ALICE: User = User::Uid(1001);
const BOB: User = User::Uid(1002);

/// Two connected client processes of one user.
fn connected_pair(daemon: &gdrd_harness::Daemon, user: User) -> (Side, Side) {
    let mut sides = (Side::new(daemon, user, BUFFER_BYTES), Side::new(daemon, user, BUFFER_BYTES));
    join(&mut sides.0, &mut sides.1);
    sides
}

#[test]
fn two_processes_move_content_over_queue_pairs_of_the_daemon() {
    let daemon = daemon();
    let (mut near, mut far) = connected_pair(&daemon, User::Own);
    near.fill(41);
    assert_ne!(near.digest(), far.digest());
    near.write_all_to(&far.blob);
    assert_eq!(near.digest(), far.digest());
}

#[test]
fn every_operation_does_what_its_verb_says() {
    let daemon = daemon();
    let (mut near, mut far) = connected_pair(&daemon, User::Own);
    far.poke(4096, "0102030405060708");
    let read = Work::Read { local: Local::new("b", 64, 8), remote: Remote::new(&far.blob, 4096) };
    assert_eq!(near.status_of(1, read), "SUCCESS");
    assert_eq!(near.peek(64, 8), "0102030405060708");
    let inline = Work::WriteInline { payload: "cafe".into(), remote: Remote::new(&far.blob, 100), imm: None };
    assert_eq!(near.status_of(2, inline), "SUCCESS");
    assert_eq!(far.peek(100, 2), "cafe");
    far.post(10, vec![Work::Recv { local: Local::new("b", 8192, 64) }, Work::Recv { local: Local::new("b", 0, 0) }]);
    assert_eq!(near.status_of(3, Work::SendInline { payload: "ee".into(), imm: Some(77) }), "SUCCESS");
    let received = far.completion();
    assert_eq!((&received["wr_id"], &received["imm"], &received["bytes"]), (&10.into(), &77.into(), &1.into()));
    let write = Work::Write { local: Local::new("b", 64, 8), remote: Remote::new(&far.blob, 512), imm: Some(5) };
    assert_eq!(near.status_of(4, write), "SUCCESS");
    assert_eq!(far.completion()["imm"], 5);
    assert_eq!(far.peek(512, 8), "0102030405060708");
    far.poke(1024, "2800000000000000");
    let add = Work::FetchAdd { local: Local::new("b", 2048, 8), remote: Remote::new(&far.blob, 1024), add: 2 };
    assert_eq!(near.status_of(5, add), "SUCCESS");
    assert_eq!((near.peek(2048, 1), far.peek(1024, 1)), ("28".to_owned(), "2a".to_owned()));
    let remote = Remote::new(&far.blob, 1024);
    let swap = Work::CompareSwap { local: Local::new("b", 2048, 8), remote, compare: 42, swap: 7 };
    assert_eq!(near.status_of(6, swap), "SUCCESS");
    assert_eq!(far.peek(1024, 1), "07");
    assert_eq!(near.status_of(7, Work::Flush { remote: Remote::new(&far.blob, 0), len: 64 }), "SUCCESS");
}

#[test]
fn keys_of_another_tenant_and_of_a_released_lease_reach_nothing() {
    let daemon = daemon();
    let (mut alice, mut peer) = connected_pair(&daemon, ALICE);
    alice.poke(0, "11");
    let write = |blob: &str| Work::Write { local: Local::new("b", 0, 1), remote: Remote::new(blob, 0), imm: None };
    assert_eq!(alice.status_of(1, write(&peer.blob.clone())), "SUCCESS");
    assert_eq!(peer.peek(0, 1), "11");

    let (mut bob, _bobs_peer) = connected_pair(&daemon, BOB);
    bob.poke(0, "66");
    assert_eq!(bob.status_of(2, write(&peer.blob.clone())), "REM_ACCESS_ERR");
    assert_eq!(peer.peek(0, 1), "11", "the key of a tenant is worth nothing through another's queue pair");

    peer.puppet.run(Command::ReleaseAndKeep { buffer: "b".into(), kept: "old".into() });
    // The daemon answers once it lets no request in, and ends the regions and scrubs after that.
    gdrd_harness::wait_until("the key of what was released is worth nothing", || {
        let status = alice.status_of(3, write(&peer.blob.clone()));
        if status == "REM_ACCESS_ERR" { Ok(()) } else { Err(status) }
    });
    gdrd_harness::wait_until("what was released is zero", || {
        let left = peer.puppet.run(Command::CountKept { kept: "old".into() });
        if left == 0 { Ok(()) } else { Err(left) }
    });
}

#[test]
fn a_killed_client_and_a_stopped_daemon_leave_nothing_in_the_kernel() {
    let regions_before = kernel_holds(HCA, "mr");
    let queue_pairs_before = kernel_holds(HCA, "qp");
    let daemon = daemon();
    let (near, mut far) = connected_pair(&daemon, User::Own);
    assert!(kernel_holds(HCA, "mr") > regions_before && kernel_holds(HCA, "qp") >= queue_pairs_before + 2);
    let lost = near.lease_id;
    near.puppet.kill();
    gdrd_harness::wait_until("the lease of the killed client to end", || {
        let leases = far.puppet.run(Command::Leases);
        let is_gone = leases.as_array().is_some_and(|rows| rows.iter().all(|row| row["id"] != lost));
        if is_gone { Ok(()) } else { Err(leases) }
    });
    drop(far);
    assert!(daemon.stop().success());
    assert_eq!((kernel_holds(HCA, "mr"), kernel_holds(HCA, "qp")), (regions_before, queue_pairs_before));
    assert_eq!(kernel_holds(HCA, "ctx"), 0, "no context is left open");
}

/// Waits for an event of the device.
fn await_event(hca: &dyn Hca, wanted: &HcaEvent) {
    let fd = hca.event_fd().expect("verbs has events");
    let patience = Timespec { tv_sec: i64::try_from(PATIENCE.as_secs()).unwrap_or(i64::MAX), tv_nsec: 0 };
    loop {
        let events = hca.take_events();
        if events.contains(wanted) {
            return;
        }
        let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
        assert_eq!(poll(&mut fds, Some(&patience)), Ok(1), "{wanted:?} did not come, {events:?} did");
    }
}

#[test]
fn a_new_address_is_an_event_and_a_row_that_changed_is_not_used() {
    let hca = open_hca();
    hca.take_events();
    ip(&["addr", "add", "10.99.0.1/24", "dev", NETDEV]);
    await_event(&*hca, &HcaEvent::GidChange { port_num: 1 });
    let gids = || hca.ports().expect("the device is there")[0].gids.clone();
    let added = gids().into_iter().find(|row| row.gid.0[12..] == [10, 99, 0, 1]).expect("the table has the address");
    assert_eq!(added.gid_type, GidType::RoceV2);

    let chosen = open_hca_with(&Options { gid_index: Some(added.gid_index), ..Options::default() });
    let queue_pair = in_init(&*chosen);
    let endpoint = queue_pair.control.endpoint().expect("the row is filled");
    assert_eq!((endpoint.gid, endpoint.gid_index), (added.gid, added.gid_index));
    ip(&["addr", "del", "10.99.0.1/24", "dev", NETDEV]);
    await_event(&*hca, &HcaEvent::GidChange { port_num: 1 });
    gdrd_harness::wait_until("the row to empty", || {
        let left = gids();
        if left.iter().any(|row| row.gid == added.gid) { Err(left) } else { Ok(()) }
    });
    let refused = queue_pair.control.connect(&endpoint);
    assert!(matches!(&refused, Err(HcaError::Invalid { reason, .. }) if reason.contains("changed")), "{refused:?}");
    let empty_row = in_init(&*chosen).control.endpoint();
    assert!(matches!(&empty_row, Err(HcaError::Invalid { reason, .. }) if reason.contains("row")), "{empty_row:?}");
}

fn in_init(hca: &dyn Hca) -> gdrd_hal::QueuePairParts {
    let pd = hca.alloc_pd().expect("a protection domain can be made");
    let cq = hca.create_cq(16).expect("a completion queue can be made");
    let config =
        QueuePairConfig { qp_type: QueuePairType::Rc, send_depth: 4, recv_depth: 4, inline_bytes: 0, port_num: 1 };
    let parts = pd.create_queue_pair(cq.id(), &config).expect("a queue pair can be made");
    parts.control.to_init().expect("a fresh queue pair goes to INIT");
    parts
}

#[test]
fn a_cable_pulled_and_put_back_is_told_with_its_port() {
    let hca = open_hca();
    hca.take_events();
    ip(&["link", "set", NETDEV, "down"]);
    await_event(&*hca, &HcaEvent::PortDown { port_num: 1 });
    assert_ne!(hca.ports().expect("the device is there")[0].state, PortState::Active);
    ip(&["link", "set", NETDEV, "up"]);
    await_event(&*hca, &HcaEvent::PortActive { port_num: 1 });
    assert_eq!(hca.ports().expect("the device is there")[0].state, PortState::Active);
}

#[test]
fn a_probe_proves_host_memory_by_a_loopback_with_checked_content() {
    let daemon = daemon();
    let told = run("gdrctl", &["--runtime-dir", &daemon.runtime_dir_text(), "probe", "--format", "json"]);
    let told: serde_json::Value = serde_json::from_str(&told).expect("a document");
    let pair = &told["pairs"][0];
    assert_eq!((&pair["nic"], &pair["port_num"], &pair["state"]), (&HCA.into(), &1.into(), &"proven".into()), "{told}");
    assert!(pair["gpu"].is_null() && pair["gbps"].as_f64() > Some(0.0) && pair["latency_us"].as_f64() > Some(0.0));
}

#[test]
fn what_was_probed_is_in_doubt_while_the_cable_is_out_and_proven_again_after() {
    let daemon = daemon();
    let probe = |known: &[&str]| -> serde_json::Value {
        let folder = daemon.runtime_dir_text();
        let told = run("gdrctl", &[&["--runtime-dir", &folder, "probe", "--format", "json"], known].concat());
        let told: serde_json::Value = serde_json::from_str(&told).expect("a document");
        told["pairs"][0].clone()
    };
    let await_state = |state: &str| {
        wait_until(state, || match probe(&["--known"]) {
            pair if pair["state"] == state => Ok(()),
            pair => Err(pair.to_string()),
        });
    };
    assert_eq!(probe(&[])["state"], "proven");
    ip(&["link", "set", NETDEV, "down"]);
    await_state("not-tried");
    ip(&["link", "set", NETDEV, "up"]);
    await_state("proven");
}

#[test]
fn soft_roce_refuses_dma_bufs_with_the_reason() {
    let hca = open_hca();
    assert!(!hca.capabilities().dma_buf);
    let pd = hca.alloc_pd().expect("a protection domain can be made");
    let memory = host_memory(4096);
    let source = MemorySource::DmaBuf { fd: memory.as_fd(), offset: 0, len_bytes: 4096 };
    let error = pd.register(source, Access::DATA, 0).err().map(|error| error.to_string()).unwrap_or_default();
    assert!(error.contains("ibv_reg_dmabuf_mr") && error.contains("os error 95"), "{error}");
}

#[test]
fn soft_roce_has_no_contexts_to_hand_out_and_says_so() {
    let hca = open_hca();
    assert!(!hca.capabilities().direct, "only mlx5 imports contexts");
    let refused = hca.open_direct().err().map(|error| error.to_string()).unwrap_or_default();
    assert!(refused.contains("cannot import"), "{refused}");
}
