//! One guest: what one tenant knows of another's memory is worth nothing to it, through queue pairs of the daemon or of
//! its own, and neither is what was released.
#![forbid(unsafe_code)]

mod common;

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;

use common::{Side, daemon, join, number, text};
use gdrd_hal::{
    Access, CompletionQueue, Endpoint, Gid, Hca, LinkLayer, LocalSpan, MemoryRegion, MemorySource, Opcode,
    ProtectionDomain, QueuePair, QueuePairConfig, QueuePairType, RemoteSpan, WorkCompletion, WorkQueue, WorkRequest,
    WorkStatus,
};
use gdrd_harness::script::{Command, Local, Remote, Work};
use gdrd_harness::{User, wait_until};
use gdrd_proto::v1;
use gdrd_vm::{HCA, host_memory, open_hca};
use prost::Message as _;

const BUFFER_BYTES: u64 = 2 << 20;
const ADOPTED_BYTES: u64 = 64 << 10;
const SECRET: &str = "5ec2e700";
const ALICE: User = User::Uid(1001);
const BOB: User = User::Uid(1002);

/// A queue pair of a process that opened the device itself, with memory of its own.
struct Raw {
    _hca: Arc<dyn Hca>,
    _pd: Arc<dyn ProtectionDomain>,
    _memory: OwnedFd,
    region: Box<dyn MemoryRegion>,
    cq: Box<dyn CompletionQueue>,
    control: Arc<dyn QueuePair>,
    work: Box<dyn WorkQueue>,
}

impl Raw {
    fn new() -> Self {
        let hca = open_hca();
        let pd = hca.alloc_pd().expect("a protection domain can be made");
        let memory = host_memory(4096);
        let source = MemorySource::Host { fd: memory.as_fd(), offset: 0, len_bytes: 4096 };
        let region = pd.register(source, Access::DATA, 0).expect("a page can be registered");
        let cq = hca.create_cq(16).expect("a completion queue can be made");
        let config =
            QueuePairConfig { qp_type: QueuePairType::Rc, send_depth: 4, recv_depth: 4, inline_bytes: 0, port_num: 1 };
        let parts = pd.create_queue_pair(cq.id(), &config).expect("a queue pair can be made");
        parts.control.to_init().expect("a fresh queue pair goes to INIT");
        Self { _hca: hca, _pd: pd, _memory: memory, region, cq, control: parts.control, work: parts.work }
    }

    fn endpoint(&self) -> Endpoint {
        self.control.endpoint().expect("the port has an address")
    }

    fn connect(&self, remote: &Endpoint) {
        self.control.connect(remote).expect("the other side is on this device");
    }

    fn status_of(&mut self, opcode: Opcode, remote: RemoteSpan) -> WorkStatus {
        let local = LocalSpan { lkey: self.region.lkey(), addr: self.region.iova(), len_bytes: 8 };
        let request = WorkRequest {
            wr_id: 1,
            opcode,
            signaled: true,
            fence: false,
            local,
            remote,
            imm: 0,
            operand: 1,
            compare: 0,
            inline_len: 0,
            inline: [0; gdrd_hal::MAX_INLINE_BYTES],
        };
        self.work.post_send(&[request]).expect("a connected queue pair takes a request");
        wait_until("its completion", || {
            let mut out = [WorkCompletion::EMPTY];
            if matches!(self.cq.poll(&mut out), Ok(1)) { Ok(out[0].status) } else { Err("none") }
        })
    }
}

/// The bytes that a puppet shows in hex.
fn bytes(hex: &str) -> Vec<u8> {
    let digit = |at| u8::from_str_radix(hex.get(at..at + 2).unwrap_or("none"), 16).expect("hex");
    (0..hex.len()).step_by(2).map(digit).collect()
}

/// Where a registration says that its memory is.
fn span(blob: &str) -> RemoteSpan {
    let told = v1::Registration::decode(&*bytes(blob)).expect("a registration");
    RemoteSpan { rkey: told.rkey, addr: told.iova }
}

/// An endpoint as the daemon writes it for peers.
fn shown(endpoint: &Endpoint) -> String {
    assert_eq!(endpoint.link_layer, LinkLayer::Ethernet);
    let message = v1::Endpoint {
        qp_num: endpoint.qp_num,
        port_num: endpoint.port_num.into(),
        gid: endpoint.gid.0.to_vec(),
        gid_index: endpoint.gid_index.into(),
        lid: endpoint.lid.into(),
        psn: endpoint.psn,
        mtu_bytes: endpoint.mtu_bytes,
        link_layer: "Ethernet".into(),
    };
    message.encode_to_vec().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn read(endpoint: &str) -> Endpoint {
    let told = v1::Endpoint::decode(&*bytes(endpoint)).expect("an endpoint");
    let small = |field: u32| u16::try_from(field).expect("the daemon wrote it");
    Endpoint {
        qp_num: told.qp_num,
        port_num: u8::try_from(told.port_num).expect("the daemon wrote it"),
        gid: Gid(told.gid.try_into().expect("16 bytes")),
        gid_index: small(told.gid_index),
        lid: small(told.lid),
        psn: told.psn,
        mtu_bytes: told.mtu_bytes,
        link_layer: LinkLayer::Ethernet,
    }
}

/// Another queue pair of the same process: a request that is refused ends the one that carried it.
fn replace_queue_pair(side: &mut Side) {
    side.puppet.run(Command::Destroy { queue_pair: "q".into() });
    let (queue_pair, gpu, hca) = ("q".into(), String::new(), HCA.into());
    side.endpoint = text(&side.puppet.run(Command::QueuePair { queue_pair, gpu, hca, depth: 8 })["endpoint"]);
}

/// All that a tenant with two processes can try with a key, each by a queue pair that does work before.
fn assert_worth_nothing(near: &mut Side, far: &mut Side, blob: &str) {
    let local = || Local::new("b", 0, 8);
    let remote = || Remote::new(blob, 0);
    let brokered = [
        Work::Write { local: local(), remote: remote(), imm: None },
        Work::Read { local: local(), remote: remote() },
        Work::FetchAdd { local: local(), remote: remote(), add: 1 },
        Work::CompareSwap { local: local(), remote: remote(), compare: 0, swap: 1 },
    ];
    for work in brokered {
        replace_queue_pair(near);
        replace_queue_pair(far);
        join(near, far);
        let own = Work::Write { local: local(), remote: Remote::new(&far.blob, 0), imm: None };
        assert_eq!(near.status_of(1, own), "SUCCESS");
        assert_eq!(near.status_of(2, work.clone()), "REM_ACCESS_ERR", "{work:?}");
    }
    for opcode in [Opcode::Write, Opcode::Read, Opcode::FetchAdd, Opcode::CompareSwap] {
        let mut raw = Raw::new();
        replace_queue_pair(far);
        far.connect_to(&shown(&raw.endpoint()));
        raw.connect(&read(&far.endpoint));
        assert_eq!(raw.status_of(opcode, span(&far.blob)), WorkStatus::Success, "to what is its own");
        assert_eq!(raw.status_of(opcode, span(blob)), WorkStatus::RemoteAccess, "{opcode:?} to the daemon");

        let (mut raw, other) = (Raw::new(), Raw::new());
        other.connect(&raw.endpoint());
        raw.connect(&other.endpoint());
        assert_eq!(raw.status_of(opcode, span(blob)), WorkStatus::RemoteAccess, "{opcode:?} without the daemon");
    }
}

#[test]
fn no_key_of_a_tenant_opens_anything_to_another_one() {
    let daemon = daemon();
    let [mut alice, mut near, mut far] = [ALICE, BOB, BOB].map(|user| Side::new(&daemon, user, BUFFER_BYTES));
    alice.poke(0, SECRET);
    alice.puppet.run(Command::Adopt { memory: "m".into(), size: ADOPTED_BYTES, gpu: String::new() });
    let range = Command::RegisterRange { memory: "m".into(), offset: 0, len: ADOPTED_BYTES, hca: HCA.into() };
    for blob in [alice.blob.clone(), text(&alice.puppet.run(range))] {
        assert_worth_nothing(&mut near, &mut far, &blob);
    }
    assert_eq!(alice.peek(0, 4), SECRET);
    let adopted = Command::PeekAdopted { memory: "m".into(), offset: 0, len: 8 };
    assert_eq!(alice.puppet.run(adopted), "00".repeat(8));
}

#[test]
fn a_key_of_what_was_released_opens_nothing_to_anyone() {
    let daemon = daemon();
    let [mut owner, mut near, mut far] = [ALICE; 3].map(|user| Side::new(&daemon, user, BUFFER_BYTES));
    let [mut bob, mut bobs_peer] = [BOB; 2].map(|user| Side::new(&daemon, user, BUFFER_BYTES));
    let stale = owner.blob.clone();
    owner.puppet.run(Command::Release { buffer: "b".into() });
    assert_worth_nothing(&mut near, &mut far, &stale);
    // The same memory, as likely as not, under a key of its own.
    let again = owner.puppet.run(Command::AcquireHost { buffer: "b".into(), hca: HCA.into(), size: BUFFER_BYTES });
    assert_ne!(number(&again["lease_id"]), owner.lease_id);
    let fresh = text(&owner.puppet.run(Command::Remote { buffer: "b".into(), hca: HCA.into() }));
    assert_ne!(span(&fresh).rkey, span(&stale).rkey);
    assert_worth_nothing(&mut near, &mut far, &stale);
    assert_worth_nothing(&mut bob, &mut bobs_peer, &stale);
    assert_eq!(owner.peek(0, 8), "00".repeat(8));
}
