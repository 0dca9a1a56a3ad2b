//! What operations do when all is well.

use std::os::fd::AsFd;

use super::Fixture;
use super::rig::{
    End, MEMORY_BYTES, config, everything, inline, pair, pair_with, pattern, register, remote_in, request, wait_for,
};
use crate::{
    Access, LocalSpan, MemoryRegion, MemorySource, Opcode, PostError, QueuePairConfig, QueuePairType, RemoteSpan,
    WorkCompletion, WorkRequest, WorkStatus,
};

pub(super) fn a_write_lands_where_it_says_and_nowhere_else(fixture: &dyn Fixture) {
    let (mut a, mut b) = pair(fixture);
    a.fill(100, &pattern(3, 200));
    a.send(request(9, Opcode::Write, a.local(100, 200), b.remote(5000)));
    let completion = a.expect(9, WorkStatus::Success);
    assert_eq!(completion.opcode, Opcode::Write);
    let content = b.content(0, 10_000);
    assert_eq!(content[5000..5200], pattern(3, 200));
    assert!(content[..5000].iter().chain(&content[5200..]).all(|byte| *byte == 0));
    b.expect_nothing();
}

pub(super) fn writes_of_all_sizes_and_offsets_land(fixture: &dyn Fixture) {
    let (mut a, b) = pair(fixture);
    for (wr_id, len) in (1..40).chain([63, 64, 65, 127, 128, 129, 255, 1023, 1024, 1025, 4095, 4097, 9000]).enumerate()
    {
        let (from, to) = (wr_id as u64 % 13, 4096 - wr_id as u64 % 9);
        let bytes = pattern(wr_id.to_le_bytes()[0], len);
        a.fill(from, &bytes);
        b.fill(to - 1, &vec![0; len + 2]);
        let len_bytes = u32::try_from(len).expect("lengths here are short");
        a.send(request(wr_id as u64, Opcode::Write, a.local(from, len_bytes), b.remote(to)));
        a.expect(wr_id as u64, WorkStatus::Success);
        let content = b.content(to - 1, len + 2);
        assert_eq!(content[1..=len], bytes, "{len} bytes from {from} to {to}");
        assert_eq!((content[0], content[len + 1]), (0, 0), "around {len} bytes at {to}");
    }
}

pub(super) fn a_large_write_lands_whole(fixture: &dyn Fixture) {
    let (mut a, b) = pair(fixture);
    let len = usize::try_from(MEMORY_BYTES).expect("the memory of the suite is small");
    let bytes = pattern(77, len);
    a.fill(0, &bytes);
    let len_bytes = u32::try_from(len).expect("the memory of the suite is small");
    a.send(request(1, Opcode::Write, a.local(0, len_bytes), b.remote(0)));
    a.expect(1, WorkStatus::Success);
    assert!(b.content(0, len) == bytes);
}

pub(super) fn an_inline_write_needs_no_lkey(fixture: &dyn Fixture) {
    let inline_bytes = fixture.hcas()[0].capabilities().max_inline_bytes;
    let (mut a, mut b) = pair_with(fixture, &QueuePairConfig { inline_bytes, ..config(QueuePairType::Rc) });
    for len in [1, 7, 8, 31, 64].into_iter().filter(|len| *len <= inline_bytes) {
        let payload = pattern(5, usize::try_from(len).expect("inline payloads are short"));
        let nowhere = LocalSpan { lkey: 0, addr: u64::MAX, len_bytes: u32::MAX };
        a.send(inline(request(1, Opcode::Write, nowhere, b.remote(32)), &payload));
        a.expect(1, WorkStatus::Success);
        assert_eq!(b.content(32, payload.len()), payload);
        let place = b.local(2048, 64);
        b.receive(2, place);
        a.send(inline(request(3, Opcode::Send, nowhere, b.remote(0)), &payload));
        a.expect(3, WorkStatus::Success);
        assert_eq!(b.expect(2, WorkStatus::Success).byte_len, len);
        assert_eq!(b.content(2048, payload.len()), payload);
    }
}

pub(super) fn a_read_fetches(fixture: &dyn Fixture) {
    let (mut a, mut b) = pair(fixture);
    b.fill(3000, &pattern(8, 5000));
    a.send(request(4, Opcode::Read, a.local(1, 5000), b.remote(3000)));
    let completion = a.expect(4, WorkStatus::Success);
    assert_eq!((completion.opcode, completion.byte_len), (Opcode::Read, 5000));
    assert_eq!(a.content(1, 5000), pattern(8, 5000));
    assert_eq!(a.content(5001, 1), [0]);
    b.expect_nothing();
}

pub(super) fn a_send_lands_in_the_first_receive(fixture: &dyn Fixture) {
    let (mut a, mut b) = pair(fixture);
    for (wr_id, offset) in [(1, 8192), (2, 4096)] {
        let place = b.local(offset, 512);
        b.receive(wr_id, place);
    }
    a.fill(0, &pattern(2, 300));
    a.send(request(3, Opcode::Send, a.local(0, 300), RemoteSpan::default()));
    a.expect(3, WorkStatus::Success);
    let received = b.expect(1, WorkStatus::Success);
    assert_eq!((received.opcode, received.byte_len, received.imm), (Opcode::Recv, 300, None));
    assert_eq!(b.content(8192, 300), pattern(2, 300));
    assert_eq!(b.content(8492, 212), [0; 212]);
    assert_eq!(b.content(4096, 512), [0; 512]);
    b.expect_nothing();
}

pub(super) fn messages_arrive_in_the_order_of_posting(fixture: &dyn Fixture) {
    let (mut a, mut b) = pair(fixture);
    for round in 0..20_u64 {
        for index in 0..16 {
            let place = b.local(index * 64, 64);
            b.receive(index, place);
            a.fill(index * 64, &(round * 16 + index).to_le_bytes());
        }
        let local = |index| a.local(index * 64, 8);
        let batch: Vec<_> =
            (0..16).map(|index| request(index, Opcode::Send, local(index), RemoteSpan::default())).collect();
        a.work.post_send(&batch).expect("a batch within the depth is taken");
        for index in 0..16 {
            a.expect(index, WorkStatus::Success);
            b.expect(index, WorkStatus::Success);
            assert_eq!(b.content(index * 64, 8), (round * 16 + index).to_le_bytes());
        }
    }
}

pub(super) fn immediate_data_arrives_with_a_send(fixture: &dyn Fixture) {
    let (mut a, mut b) = pair(fixture);
    let place = b.local(0, 64);
    b.receive(1, place);
    let mut send = request(2, Opcode::SendImm, a.local(0, 8), RemoteSpan::default());
    send.imm = 0x0102_0304;
    a.send(send);
    a.expect(2, WorkStatus::Success);
    let received = b.expect(1, WorkStatus::Success);
    assert_eq!((received.opcode, received.imm, received.byte_len), (Opcode::Recv, Some(0x0102_0304), 8));
}

pub(super) fn a_write_with_immediate_consumes_a_receive(fixture: &dyn Fixture) {
    let (mut a, mut b) = pair(fixture);
    let place = b.local(0, 64);
    b.receive(1, place);
    a.fill(0, &pattern(6, 100));
    let mut write = request(2, Opcode::WriteImm, a.local(0, 100), b.remote(9000));
    write.imm = u32::MAX;
    a.send(write);
    a.expect(2, WorkStatus::Success);
    let received = b.expect(1, WorkStatus::Success);
    assert_eq!((received.opcode, received.imm, received.byte_len), (Opcode::RecvWriteImm, Some(u32::MAX), 100));
    assert_eq!(b.content(9000, 100), pattern(6, 100));
    assert_eq!(b.content(0, 64), [0; 64], "the receive's own place is left alone");
}

pub(super) fn a_write_is_visible_before_a_later_message_arrives(fixture: &dyn Fixture) {
    let (mut a, mut b) = pair(fixture);
    for round in 0..50_u8 {
        let place = b.local(0, 64);
        b.receive(1, place);
        a.fill(1024, &pattern(round, 6000));
        let mut write = request(2, Opcode::Write, a.local(1024, 6000), b.remote(1024));
        write.signaled = false;
        let message = short_send(&a);
        a.work.post_send(&[write, message]).expect("a batch within the depth is taken");
        b.expect(1, WorkStatus::Success);
        assert!(b.content(1024, 6000) == pattern(round, 6000), "round {round}");
        a.expect(3, WorkStatus::Success);
    }
}

fn short_send(a: &End<'_>) -> WorkRequest {
    request(3, Opcode::Send, a.local(0, 8), RemoteSpan::default())
}

pub(super) fn a_flush_completes_after_earlier_writes(fixture: &dyn Fixture) {
    let (mut a, b) = pair(fixture);
    a.fill(0, &pattern(4, 4096));
    let mut write = request(1, Opcode::Write, a.local(0, 4096), b.remote(4096));
    write.signaled = false;
    let flush = request(2, Opcode::Flush, a.local(8192, 8), b.remote(4096));
    a.work.post_send(&[write, flush]).expect("a batch within the depth is taken");
    assert_eq!(a.expect(2, WorkStatus::Success).opcode, Opcode::Flush);
    assert!(b.content(4096, 4096) == pattern(4, 4096));
}

pub(super) fn empty_messages_arrive(fixture: &dyn Fixture) {
    let (mut a, mut b) = pair(fixture);
    let nothing = LocalSpan::default();
    b.receive(1, nothing);
    let place = b.local(0, 64);
    b.receive(2, place);
    a.send(request(3, Opcode::Send, nothing, RemoteSpan::default()));
    a.send(request(4, Opcode::Send, nothing, RemoteSpan::default()));
    // A write of no bytes names no memory.
    a.send(request(5, Opcode::Write, nothing, RemoteSpan::default()));
    for wr_id in 3..6 {
        a.expect(wr_id, WorkStatus::Success);
    }
    for wr_id in 1..3 {
        assert_eq!(b.expect(wr_id, WorkStatus::Success).byte_len, 0);
    }
}

pub(super) fn a_message_waits_for_a_receive(fixture: &dyn Fixture) {
    let (mut a, mut b) = pair(fixture);
    a.fill(0, &pattern(1, 64));
    a.send(request(1, Opcode::Send, a.local(0, 64), RemoteSpan::default()));
    a.send(request(2, Opcode::Write, a.local(0, 64), b.remote(1024)));
    a.expect_nothing();
    b.expect_nothing();
    assert_eq!(b.content(1024, 64), [0; 64], "a write does not overtake the message before it");
    let place = b.local(0, 64);
    b.receive(3, place);
    b.expect(3, WorkStatus::Success);
    a.expect(1, WorkStatus::Success);
    a.expect(2, WorkStatus::Success);
    assert_eq!(b.content(0, 64), pattern(1, 64));
    assert_eq!(b.content(1024, 64), pattern(1, 64));
}

/// A region of `end` that peers may use for atomics.
fn atomic_region(end: &End<'_>) -> Box<dyn MemoryRegion> {
    register(&*end.pd, &end.memory, Access { remote_atomic: true, ..everything() })
}

fn u64_at(end: &End<'_>, offset: u64) -> u64 {
    u64::from_ne_bytes(end.content(offset, 8).try_into().expect("eight bytes were asked for"))
}

pub(super) fn fetch_add_returns_the_old_value_and_adds(fixture: &dyn Fixture) {
    let (mut a, b) = pair(fixture);
    let target = atomic_region(&b);
    b.fill(64, &(u64::MAX - 1).to_ne_bytes());
    for (wr_id, old) in [(1, u64::MAX - 1), (2, 1), (3, 4)] {
        let mut add = request(wr_id, Opcode::FetchAdd, a.local(wr_id * 8, 8), remote_in(&*target, 64));
        add.operand = 3;
        a.send(add);
        let completion = a.expect(wr_id, WorkStatus::Success);
        assert_eq!((completion.opcode, completion.byte_len), (Opcode::FetchAdd, 8));
        assert_eq!(u64_at(&a, wr_id * 8), old);
    }
    assert_eq!(u64_at(&b, 64), 7);
    assert_eq!((u64_at(&b, 56), u64_at(&b, 72)), (0, 0));
}

pub(super) fn compare_swap_stores_only_on_equality(fixture: &dyn Fixture) {
    let (mut a, b) = pair(fixture);
    let target = atomic_region(&b);
    b.fill(128, &10_u64.to_ne_bytes());
    for (wr_id, compare, operand, old, new) in [(1, 10, 20, 10, 20), (2, 10, 30, 20, 20), (3, 20, 0, 20, 0)] {
        let mut swap = request(wr_id, Opcode::CompareSwap, a.local(0, 8), remote_in(&*target, 128));
        (swap.compare, swap.operand) = (compare, operand);
        a.send(swap);
        assert_eq!(a.expect(wr_id, WorkStatus::Success).opcode, Opcode::CompareSwap);
        assert_eq!(u64_at(&a, 0), old);
        assert_eq!(u64_at(&b, 128), new);
    }
}

pub(super) fn atomics_are_refused_where_the_capability_says_so(fixture: &dyn Fixture) {
    let (mut a, b) = pair(fixture);
    for opcode in [Opcode::FetchAdd, Opcode::CompareSwap] {
        let atomic = request(1, opcode, a.local(0, 8), b.remote(0));
        assert_eq!(a.work.post_send(&[atomic]), Err((0, PostError::Unsupported)));
    }
    a.expect_nothing();
}

/// One end that sends and receives numbered messages.
struct Talker<'f> {
    end: End<'f>,
    sent: u64,
    completed: u64,
    received: u64,
}

const MESSAGES: u64 = 500;
const RECEIVES: u64 = 32;

impl<'f> Talker<'f> {
    fn new(mut end: End<'f>) -> Self {
        for wr_id in 0..RECEIVES {
            let place = end.local(wr_id * 64, 64);
            end.receive(wr_id, place);
        }
        Self { end, sent: 0, completed: 0, received: 0 }
    }

    /// Sends one message if there is room, takes what has completed, and says whether all is done.
    fn step(&mut self) -> bool {
        if self.sent < MESSAGES && self.sent - self.completed < 16 {
            let local = self.end.local(4096, 8);
            self.end.send(request(1000 + self.sent, Opcode::Send, local, RemoteSpan::default()));
            self.sent += 1;
        }
        let mut out = [WorkCompletion::EMPTY; 8];
        let count = self.end.cq.poll(&mut out).expect("the completion queue is sound");
        for completion in &out[..count] {
            assert_eq!(completion.status, WorkStatus::Success);
            if completion.opcode == Opcode::Recv {
                assert_eq!(completion.wr_id, self.received % RECEIVES);
                self.received += 1;
                let place = self.end.local(completion.wr_id * 64, 64);
                self.end.receive(completion.wr_id, place);
            } else {
                assert_eq!(completion.wr_id, 1000 + self.completed);
                self.completed += 1;
            }
        }
        self.completed == MESSAGES && self.received == MESSAGES
    }
}

pub(super) fn both_ends_send_at_once(fixture: &dyn Fixture) {
    let (a, b) = pair(fixture);
    let (mut a, mut b) = (Talker::new(a), Talker::new(b));
    wait_for("all messages", || {
        let done = [a.step(), b.step()];
        (done == [true, true]).then_some(())
    });
}

pub(super) fn a_queue_pair_can_be_its_own_peer(fixture: &dyn Fixture) {
    let mut end = End::new(fixture, &fixture.hcas()[0], &config(QueuePairType::Rc));
    end.control.to_init().expect("a fresh queue pair goes to INIT");
    let at = end.control.endpoint().expect("a queue pair in INIT has an endpoint");
    end.control.connect(&at).expect("a queue pair in INIT connects");
    end.fill(0, &pattern(1, 64));
    end.send(request(1, Opcode::Write, end.local(0, 64), end.remote(4096)));
    end.expect(1, WorkStatus::Success);
    assert_eq!(end.content(4096, 64), pattern(1, 64));
}

/// GPU memory of one granule with a region of `end` over its dma-buf.
fn gpu_region(end: &End<'_>) -> (Box<dyn crate::GpuAllocation>, Box<dyn MemoryRegion>) {
    let (memory, gpu) = end.fixture.gpu().expect("the case needs a gpu");
    let len_bytes = memory.capabilities().granularity_bytes;
    let allocation = memory.allocate(&gpu, len_bytes).expect("the fixture's gpu has memory");
    let fd = allocation.dma_buf_fd().expect("the case needs dma-bufs");
    let source = MemorySource::DmaBuf { fd, offset: 0, len_bytes };
    let region = end.pd.register(source, everything(), 0).expect("the case needs dma-buf registration");
    (allocation, region)
}

pub(super) fn gpu_memory_is_written_and_read_as_dma_buf(fixture: &dyn Fixture) {
    let (mut a, b) = pair(fixture);
    let (allocation, region) = gpu_region(&b);
    a.fill(0, &pattern(9, 8192));
    let end = region.len_bytes() - 8192;
    a.send(request(1, Opcode::Write, a.local(0, 8192), remote_in(&*region, end)));
    a.expect(1, WorkStatus::Success);
    let mut landed = vec![0; 8192];
    fixture.read(allocation.memory_fd(), end, &mut landed);
    assert!(landed == pattern(9, 8192));
    fixture.write(allocation.memory_fd(), 0, &pattern(10, 4096));
    a.send(request(2, Opcode::Read, a.local(16_384, 4096), remote_in(&*region, 0)));
    a.expect(2, WorkStatus::Success);
    assert!(a.content(16_384, 4096) == pattern(10, 4096));
}

pub(super) fn a_region_keeps_gpu_memory_reachable_after_its_allocation(fixture: &dyn Fixture) {
    let (mut a, b) = pair(fixture);
    let (allocation, region) = gpu_region(&b);
    let kept = allocation.memory_fd().try_clone_to_owned().expect("the test process has a descriptor left");
    drop(allocation);
    a.fill(0, &pattern(9, 64));
    a.send(request(1, Opcode::Write, a.local(0, 64), remote_in(&*region, 64)));
    a.expect(1, WorkStatus::Success);
    let mut landed = [0; 64];
    fixture.read(kept.as_fd(), 64, &mut landed);
    assert_eq!(landed[..], pattern(9, 64));
}
