//! Every operation between two rings, over the simulated HCA.

use gdrd_hal::Access;
use gdrd_ring::{
    CompletionOpcode, InlineData, LocalSpan, Operation, RefusalReason, RemoteSpan, Source, Status, SubmissionFlags,
};

use super::world::{World, connect, recv, request, silent, write};

fn inline(payload: &[u8]) -> Source {
    Source::Inline(InlineData::new(payload).expect("short"))
}

#[test]
fn a_write_lands_in_the_peers_memory() {
    let world = World::new();
    let (mut left, right) = world.pair(1);
    left.buffer.write(100, b"from a registration");
    left.client.post(&request(7, write(left.buffer.local(100, 19), right.buffer.remote(5000))));
    let done = left.client.expect(7, Status::Success);
    assert_eq!((done.opcode, done.byte_len, done.imm), (CompletionOpcode::Write, 0, None));
    assert_eq!(done.qp_num, left.client.control().qp_num());
    assert_eq!(right.buffer.read(5000, 19), b"from a registration");
}

#[test]
fn inline_payload_travels_in_the_entry() {
    let world = World::new();
    let (mut left, mut right) = world.pair(1);
    let remote = right.buffer.remote(0);
    left.client.post(&request(1, Operation::Write { source: inline(b"written"), remote, imm: None }));
    left.client.expect(1, Status::Success);
    assert_eq!(right.buffer.read(0, 7), b"written");
    right.client.post(&request(2, recv(right.buffer.local(64, 56))));
    left.client.post(&request(3, Operation::Send { source: inline(&[9; 56]), imm: None }));
    left.client.expect(3, Status::Success);
    assert_eq!(right.client.expect(2, Status::Success).byte_len, 56);
    assert_eq!(right.buffer.read(64, 56), [9; 56]);
}

#[test]
fn sends_and_writes_with_immediate_end_receives_in_order() {
    let world = World::new();
    let (mut left, mut right) = world.pair(1);
    for wr_id in 0..3 {
        right.client.submit(&request(wr_id, recv(right.buffer.local(wr_id * 100, 100))));
    }
    right.client.flush();
    left.buffer.write(0, b"payload");
    let local = left.buffer.local(0, 7);
    left.client.submit(&silent(10, Operation::Send { source: Source::Local(local), imm: None }));
    left.client.submit(&silent(11, Operation::Send { source: Source::Local(local), imm: Some(77) }));
    let remote = right.buffer.remote(1000);
    left.client.submit(&request(12, Operation::Write { source: Source::Local(local), remote, imm: Some(78) }));
    left.client.flush();
    left.client.expect(12, Status::Success);
    let plain = right.client.expect(0, Status::Success);
    assert_eq!((plain.opcode, plain.byte_len, plain.imm), (CompletionOpcode::Recv, 7, None));
    let with_imm = right.client.expect(1, Status::Success);
    assert_eq!((with_imm.opcode, with_imm.imm), (CompletionOpcode::Recv, Some(77)));
    let written = right.client.expect(2, Status::Success);
    assert_eq!((written.opcode, written.imm), (CompletionOpcode::RecvWriteImm, Some(78)));
    assert_eq!(right.buffer.read(100, 7), b"payload");
    assert_eq!(right.buffer.read(1000, 7), b"payload");
    assert_eq!(right.tenant.slots.posted_receives(crate::SlotId(2)), 0);
}

#[test]
fn reads_and_atomics_bring_the_peers_bytes() {
    let world = World::new();
    let (mut left, right) = world.pair(1);
    right.buffer.write(0, &40_u64.to_ne_bytes());
    let remote = right.buffer.remote(0);
    left.client.submit(&request(1, Operation::Read { local: left.buffer.local(0, 8), remote }));
    left.client.submit(&request(2, Operation::FetchAdd { local: left.buffer.local(8, 8), remote, add: 2 }));
    let local = left.buffer.local(16, 8);
    left.client.submit(&request(3, Operation::CompareSwap { local, remote, compare: 42, swap: 1 << 40 }));
    let fence = SubmissionFlags::SIGNALED | SubmissionFlags::FENCE;
    let last = request(4, Operation::CompareSwap { local: left.buffer.local(24, 8), remote, compare: 0, swap: 5 });
    left.client.submit(&gdrd_ring::Submission { flags: fence, ..last });
    left.client.flush();
    for wr_id in 1..=4 {
        assert_eq!(left.client.expect(wr_id, Status::Success).byte_len, 8);
    }
    let old: Vec<_> = [40_u64, 40, 42, 1 << 40].iter().flat_map(|value| value.to_ne_bytes()).collect();
    assert_eq!(left.buffer.read(0, 32), old);
    assert_eq!(right.buffer.read(0, 8), (1_u64 << 40).to_ne_bytes(), "the last swap did not match");
}

#[test]
fn a_flush_completes_after_the_writes_before_it() {
    let world = World::new();
    let (mut left, right) = world.pair(1);
    left.client.submit(&silent(1, write(left.buffer.local(0, 4096), right.buffer.remote(0))));
    left.client.submit(&request(2, Operation::Flush { remote: right.buffer.remote(0), len_bytes: 4096 }));
    left.client.flush();
    assert_eq!(left.client.expect(2, Status::Success).opcode, CompletionOpcode::Flush);
}

#[test]
fn zero_length_requests_name_no_registration() {
    let world = World::new();
    let (mut left, mut right) = world.pair(1);
    let nowhere = LocalSpan { slot: 999_999, generation: 0, offset: 0, len_bytes: 0 };
    right.client.post(&request(1, recv(nowhere)));
    left.client.post(&request(2, Operation::Send { source: Source::Local(nowhere), imm: Some(3) }));
    left.client.expect(2, Status::Success);
    assert_eq!(right.client.expect(1, Status::Success).imm, Some(3));
}

#[test]
fn silent_successes_give_their_room_back_without_a_completion() {
    let world = World::new();
    let (mut left, right) = world.pair(1);
    let rounds = 50_u64;
    for round in 0..rounds {
        for step in 0..15 {
            let target = right.buffer.remote(step * 8);
            left.client.submit(&silent(step, write(left.buffer.local(0, 8), target)));
        }
        left.client.submit(&request(1000 + round, write(left.buffer.local(0, 8), right.buffer.remote(0))));
        left.client.flush();
        left.client.expect(1000 + round, Status::Success);
    }
    assert_eq!(left.tenant.slots.in_flight(crate::SlotId(1)), 0);
    let stats = world.broker.stats();
    assert_eq!(stats.queue_pairs[0].taken, rounds * 16);
}

#[test]
fn refused_requests_complete_after_those_posted_before_them_and_the_queue_pair_goes_on() {
    let world = World::new();
    let (mut left, right) = world.pair(1);
    let read_only = left.tenant.buffer_with(5, 4096, Access { remote_read: true, ..Access::default() });
    // Each request before a refused one is slow, so a refusal that did not wait would overtake.
    world.host.inject_text("completion on mlx5_0: delay 2ms").expect("a known rule");
    let good = left.buffer.local(0, 8);
    let remote = right.buffer.remote(0);
    let stale = LocalSpan { generation: left.buffer.generation + 1, ..good };
    let cases: [(Operation, Status, u32); 9] = [
        (write(stale, remote), Status::Stale, 0),
        (write(LocalSpan { slot: 64, ..good }, remote), Status::Refused, RefusalReason::NoSuchSlot.code()),
        (write(LocalSpan { offset: 65_529, ..good }, remote), Status::Refused, RefusalReason::Range.code()),
        (write(LocalSpan { offset: u64::MAX, ..good }, remote), Status::Refused, RefusalReason::Range.code()),
        (Operation::Read { local: read_only.local(0, 8), remote }, Status::Refused, RefusalReason::Access.code()),
        (
            Operation::FetchAdd { local: good, remote: right.buffer.remote(4), add: 1 },
            Status::Refused,
            RefusalReason::Misaligned.code(),
        ),
        (
            write(good, RemoteSpan { rkey: 1, iova: u64::MAX - 3 }),
            Status::Refused,
            RefusalReason::MessageTooLong.code(),
        ),
        (write(LocalSpan { slot: 63, ..good }, remote), Status::Stale, 0),
        (write(read_only.local(0, 8), remote), Status::Success, 0),
    ];
    for (round, (operation, status, detail)) in cases.into_iter().enumerate() {
        let base = round as u64 * 10;
        left.client.submit(&request(base, write(good, remote)));
        left.client.submit(&silent(base + 1, write(good, remote)));
        left.client.submit(&silent(base + 2, operation));
        left.client.submit(&request(base + 3, write(good, remote)));
        left.client.flush();
        left.client.expect(base, Status::Success);
        if status != Status::Success {
            assert_eq!(left.client.expect(base + 2, status).vendor_error, detail, "{operation:?}");
        }
        left.client.expect(base + 3, Status::Success);
    }
    assert_eq!(world.broker.stats().queue_pairs[0].refused, 8);
}

#[test]
fn a_slot_of_another_tenant_is_as_stale_as_one_never_lent() {
    let world = World::new();
    let (mut left, right) = world.pair(1);
    for local in [right.buffer.local(0, 8), LocalSpan { slot: 33, ..right.buffer.local(0, 8) }] {
        left.client.post(&request(1, write(local, right.buffer.remote(0))));
        assert_eq!(left.client.expect(1, Status::Stale).vendor_error, 0);
    }
}

#[test]
fn a_slot_of_another_hca_is_refused() {
    let world = World::new();
    let (mut left, right) = world.pair(1);
    let entry = crate::broker::SlotEntry {
        hca: crate::broker::HcaIndex(1),
        lkey: left.buffer.region.lkey(),
        iova: 0,
        len_bytes: 4096,
        access: Access::DATA,
    };
    let generation = left.tenant.slots.publish(crate::SlotId(9), entry).expect("free").0;
    let local = LocalSpan { slot: 9, generation, offset: 0, len_bytes: 8 };
    left.client.post(&request(1, write(local, right.buffer.remote(0))));
    assert_eq!(left.client.expect(1, Status::Refused).vendor_error, RefusalReason::OtherHca.code());
}

#[test]
fn sends_before_the_connection_are_refused_and_receives_are_taken() {
    let world = World::new();
    let (left, right) = (world.tenant(0), world.tenant(1));
    let (mut a, mut b) = (world.client(&left, 1), world.client(&right, 2));
    let (from, to) = (left.buffer(0, 4096), right.buffer(0, 4096));
    a.post(&request(1, write(from.local(0, 8), to.remote(0))));
    assert_eq!(a.expect(1, Status::Refused).vendor_error, RefusalReason::NotConnected.code());
    b.post(&request(2, recv(to.local(0, 8))));
    connect(&a, &b);
    a.post(&request(3, Operation::Send { source: Source::Local(from.local(0, 8)), imm: None }));
    a.expect(3, Status::Success);
    b.expect(2, Status::Success);
}
