//! Receives that several queue pairs take from one queue.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::Fixture;
use super::rig::{
    DEPTH, End, MEMORY_BYTES, config, everything, local_in, next_of, pattern, register, request, wait_for,
};
use crate::{
    CompletionQueue, Hca, HcaError, HcaEvent, LocalSpan, MemoryRegion, Opcode, PostError, ProtectionDomain, QueuePair,
    QueuePairParts, QueuePairState, QueuePairType, ReceiveRequest, RemoteSpan, SharedReceiveQueue, WorkCompletion,
    WorkStatus,
};

/// Room of each receive.
const SLOT_BYTES: u64 = 1024;
/// More than any provider makes of [`DEPTH`] by rounding up.
const FAR_BEYOND_DEPTH: u64 = DEPTH as u64 * 64;

/// The end that shares.
struct Sharing<'f> {
    fixture: &'f dyn Fixture,
    hca: Arc<dyn Hca>,
    pd: Arc<dyn ProtectionDomain>,
    memory: OwnedFd,
    region: Box<dyn MemoryRegion>,
    cq: Box<dyn CompletionQueue>,
    srq: Box<dyn SharedReceiveQueue>,
}

impl<'f> Sharing<'f> {
    fn new(fixture: &'f dyn Fixture) -> Self {
        let [hca, _] = fixture.hcas();
        let cq = hca.create_cq(DEPTH * 4).expect("a completion queue of moderate depth can be made");
        let pd = hca.alloc_pd().expect("a protection domain can be made");
        let memory = fixture.host_memory(MEMORY_BYTES);
        let region = register(&*pd, &memory, everything());
        let srq = pd.create_shared_receive_queue(DEPTH).expect("a shared receive queue of moderate depth can be made");
        Self { fixture, hca, pd, memory, region, cq, srq }
    }

    /// A queue pair that shares, connected to an end of its own.
    fn queue_pair(&self) -> (QueuePairParts, End<'f>) {
        let [_, hca] = self.fixture.hcas();
        let peer = End::new(self.fixture, &hca, &config(QueuePairType::Rc));
        let ours = self.pd.create_queue_pair_on(self.cq.id(), self.srq.id(), &config(QueuePairType::Rc));
        let ours = ours.expect("a queue pair can share");
        for control in [&ours.control, &peer.control] {
            control.to_init().expect("a fresh queue pair goes to INIT");
        }
        let endpoint = |control: &dyn QueuePair| control.endpoint().expect("a queue pair in INIT has an endpoint");
        ours.control.connect(&endpoint(&*peer.control)).expect("a queue pair in INIT connects");
        peer.control.connect(&endpoint(&*ours.control)).expect("a queue pair in INIT connects");
        (ours, peer)
    }

    /// Posts receives with these ids, each with the place of its id.
    fn receive(&mut self, wr_ids: std::ops::Range<u64>) {
        let requests: Vec<_> = wr_ids
            .map(|wr_id| ReceiveRequest { wr_id, local: local_in(&*self.region, wr_id * SLOT_BYTES, 1024) })
            .collect();
        self.srq.post_recv(&requests).expect("a shared receive queue with room takes receives");
    }

    /// The next completion is of this receive, taken by this queue pair.
    fn expect(&mut self, wr_id: u64, by: &QueuePairParts) -> WorkCompletion {
        let completion = next_of(&mut *self.cq);
        assert_eq!((completion.wr_id, completion.qp_num), (wr_id, by.control.qp_num()), "{completion:?}");
        assert_eq!(completion.status, WorkStatus::Success);
        completion
    }

    fn content(&self, wr_id: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.fixture.read(std::os::fd::AsFd::as_fd(&self.memory), wr_id * SLOT_BYTES, &mut bytes);
        bytes
    }

    fn limit(&self) -> u32 {
        self.srq.limit().expect("the device is there")
    }

    fn expect_event(&self, wanted: &HcaEvent) {
        wait_for("the event", || self.hca.take_events().contains(wanted).then_some(()));
    }
}

/// Sends bytes that begin with this seed, and waits until they are there.
fn send(peer: &mut End<'_>, seed: u8, len_bytes: u32) {
    peer.fill(0, &pattern(seed, 1024));
    let local = peer.local(0, len_bytes);
    peer.send(request(u64::from(seed), Opcode::Send, local, RemoteSpan::default()));
    peer.expect(u64::from(seed), WorkStatus::Success);
}

pub(super) fn a_shared_receive_serves_whichever_queue_pair_a_message_comes_for(fixture: &dyn Fixture) {
    let mut sharing = Sharing::new(fixture);
    let (one, mut to_one) = sharing.queue_pair();
    let (other, mut to_other) = sharing.queue_pair();
    sharing.receive(10..14);
    send(&mut to_one, 1, 100);
    assert_eq!(sharing.expect(10, &one).byte_len, 100);
    send(&mut to_other, 2, 1024);
    assert_eq!(sharing.expect(11, &other).byte_len, 1024);
    send(&mut to_one, 3, 8);
    sharing.expect(12, &one);
    let mut write = request(4, Opcode::WriteImm, LocalSpan::default(), RemoteSpan::default());
    write.imm = 7;
    to_other.send(write);
    to_other.expect(4, WorkStatus::Success);
    let completion = sharing.expect(13, &other);
    assert_eq!((completion.opcode, completion.imm), (Opcode::RecvWriteImm, Some(7)));
    for (wr_id, seed, len) in [(10, 1, 100), (11, 2, 1024), (12, 3, 8)] {
        assert_eq!(sharing.content(wr_id, len), pattern(seed, len), "receive {wr_id}");
    }
}

pub(super) fn a_message_waits_for_a_shared_receive(fixture: &dyn Fixture) {
    let mut sharing = Sharing::new(fixture);
    let (one, mut to_one) = sharing.queue_pair();
    to_one.send(request(1, Opcode::Send, LocalSpan::default(), RemoteSpan::default()));
    to_one.expect_nothing();
    sharing.receive(5..6);
    sharing.expect(5, &one);
    to_one.expect(1, WorkStatus::Success);
}

pub(super) fn a_shared_receive_queue_fills_up_and_polling_makes_room(fixture: &dyn Fixture) {
    let mut sharing = Sharing::new(fixture);
    let (one, mut to_one) = sharing.queue_pair();
    let receive = |wr_id| ReceiveRequest { wr_id, local: LocalSpan::default() };
    let mut posted = 0;
    while sharing.srq.post_recv(&[receive(posted)]).is_ok() {
        posted += 1;
        assert!(posted < FAR_BEYOND_DEPTH, "receives never filled up");
    }
    assert_eq!(sharing.srq.post_recv(&[receive(posted)]), Err((0, PostError::Full)));
    assert!(posted >= u64::from(DEPTH), "{posted} taken");
    for round in 0..u64::from(DEPTH) * 2 {
        to_one.send(request(round, Opcode::Send, LocalSpan::default(), RemoteSpan::default()));
        to_one.expect(round, WorkStatus::Success);
        sharing.expect(round, &one);
        sharing.srq.post_recv(&[receive(posted + round)]).expect("a polled completion makes room");
    }
}

pub(super) fn a_shared_receive_queue_that_runs_low_says_so_once(fixture: &dyn Fixture) {
    let mut sharing = Sharing::new(fixture);
    let (one, mut to_one) = sharing.queue_pair();
    let srq = sharing.srq.id();
    sharing.receive(0..4);
    sharing.srq.set_limit(2).expect("a limit below the depth can be set");
    assert_eq!(sharing.limit(), 2);
    for wr_id in 0..4_u8 {
        send(&mut to_one, wr_id, 8);
        sharing.expect(u64::from(wr_id), &one);
        if wr_id == 2 {
            sharing.expect_event(&HcaEvent::SharedReceivesLow { srq });
            assert_eq!(sharing.limit(), 0, "it must be set again");
        }
    }
    assert!(!sharing.hca.take_events().contains(&HcaEvent::SharedReceivesLow { srq }));
}

pub(super) fn a_queue_pair_that_ends_leaves_shared_receives_to_the_others(fixture: &dyn Fixture) {
    let mut sharing = Sharing::new(fixture);
    let (one, to_one) = sharing.queue_pair();
    let (other, mut to_other) = sharing.queue_pair();
    sharing.receive(0..2);
    let qp_num = one.control.qp_num();
    one.control.to_error().expect("any queue pair goes to ERR");
    sharing.expect_event(&HcaEvent::LastSharedReceive { qp_num });
    assert_eq!(one.control.state().expect("the device is there"), QueuePairState::Err);
    drop((one, to_one));
    for wr_id in 0..2_u8 {
        send(&mut to_other, wr_id, 8);
        sharing.expect(u64::from(wr_id), &other);
    }
    let flushed = sharing.cq.poll(&mut [WorkCompletion::EMPTY]).expect("the completion queue is sound");
    assert_eq!(flushed, 0, "no receive was flushed");
}

pub(super) fn queue_pairs_keep_their_shared_receive_queue(fixture: &dyn Fixture) {
    let mut sharing = Sharing::new(fixture);
    let (one, mut to_one) = sharing.queue_pair();
    sharing.receive(0..1);
    let Sharing { pd, srq, mut cq, region, memory, .. } = sharing;
    let id = srq.id();
    drop(srq);
    let made = pd.create_queue_pair_on(cq.id(), id, &config(QueuePairType::Rc));
    assert!(matches!(made, Err(HcaError::Invalid { .. })), "nobody could post to it");
    drop(pd);
    send(&mut to_one, 1, 8);
    let completion = next_of(&mut *cq);
    assert_eq!((completion.wr_id, completion.qp_num), (0, one.control.qp_num()));
    drop(one);
    region.deregister().expect("a region outlives all else");
    drop(memory);
}

pub(super) fn shared_receive_queues_out_of_bounds_are_refused(fixture: &dyn Fixture) {
    let mut sharing = Sharing::new(fixture);
    let most = sharing.hca.capabilities().max_shared_receives;
    for depth in [0, most + 1, u32::MAX] {
        let made = sharing.pd.create_shared_receive_queue(depth).err();
        assert!(matches!(made, Some(HcaError::Invalid { .. })), "depth {depth}: {made:?}");
    }
    let limit = sharing.srq.set_limit(u32::MAX);
    assert!(matches!(limit, Err(HcaError::Invalid { .. })), "{limit:?}");
    let elsewhere = sharing.hca.alloc_pd().expect("a protection domain can be made");
    let made = elsewhere.create_queue_pair_on(sharing.cq.id(), sharing.srq.id(), &config(QueuePairType::Rc));
    assert!(matches!(made, Err(HcaError::Invalid { .. })), "a queue of another domain");
    let (mut one, _peer) = sharing.queue_pair();
    let receive = ReceiveRequest { wr_id: 1, local: LocalSpan::default() };
    assert_eq!(one.work.post_recv(&[receive]), Err((0, PostError::Unsupported)), "it has none of its own");
}

pub(super) fn shared_receives_are_refused_where_the_capability_says_so(fixture: &dyn Fixture) {
    let [hca, _] = fixture.hcas();
    let pd = hca.alloc_pd().expect("a protection domain can be made");
    let made = pd.create_shared_receive_queue(1).err();
    assert!(matches!(made, Some(HcaError::Unsupported { .. })), "{made:?}");
}
