//! UD: no connection, no acknowledgement, room for a route header.

use super::Fixture;
use super::rig::{End, config, pair_with, pattern, request};
use crate::{GRH_BYTES, Opcode, PostError, QueuePairState, QueuePairType, RemoteSpan, WorkStatus};

fn pair(fixture: &dyn Fixture) -> (End<'_>, End<'_>) {
    pair_with(fixture, &config(QueuePairType::Ud))
}

fn datagram(end: &End<'_>, wr_id: u64, len_bytes: u32) -> crate::WorkRequest {
    request(wr_id, Opcode::Send, end.local(0, len_bytes), RemoteSpan::default())
}

pub(super) fn a_datagram_lands_behind_room_for_the_route_header(fixture: &dyn Fixture) {
    let (mut a, mut b) = pair(fixture);
    a.fill(0, &pattern(1, 200));
    let place = b.local(4096, GRH_BYTES + 200);
    b.receive(1, place);
    a.send(datagram(&a, 2, 200));
    a.expect(2, WorkStatus::Success);
    let received = b.expect(1, WorkStatus::Success);
    assert_eq!((received.opcode, received.byte_len), (Opcode::Recv, GRH_BYTES + 200));
    assert_eq!(b.content(4096 + u64::from(GRH_BYTES), 200), pattern(1, 200));
    assert_eq!(b.content(4096 + u64::from(GRH_BYTES) + 200, 64), [0; 64]);
}

pub(super) fn a_datagram_without_a_receive_is_dropped(fixture: &dyn Fixture) {
    let (mut a, mut b) = pair(fixture);
    a.fill(0, &pattern(1, 8));
    a.send(datagram(&a, 1, 8));
    a.expect(1, WorkStatus::Success);
    let place = b.local(0, GRH_BYTES + 64);
    b.receive(2, place);
    b.expect_nothing();
    a.fill(0, &pattern(2, 8));
    a.send(datagram(&a, 3, 8));
    a.expect(3, WorkStatus::Success);
    b.expect(2, WorkStatus::Success);
    assert_eq!(b.content(u64::from(GRH_BYTES), 8), pattern(2, 8), "the later one, not the dropped one");
}

pub(super) fn a_datagram_longer_than_the_mtu_is_not_delivered(fixture: &dyn Fixture) {
    let (mut a, mut b) = pair(fixture);
    let mtu_bytes = a.hca.ports().expect("the device is there")[0].mtu_bytes;
    let place = b.local(0, GRH_BYTES + 2 * mtu_bytes);
    b.receive(1, place);
    a.send(datagram(&a, 2, mtu_bytes + 1));
    // mlx5 reports it, rxe swallows it as the specification asks; nobody sends it.
    let completion = a.next();
    let known = [WorkStatus::Success, WorkStatus::LocalLength];
    assert!(known.contains(&completion.status), "{completion:?}");
    b.expect_nothing();
    let (mut c, mut d) = pair(fixture);
    let place = d.local(0, GRH_BYTES + mtu_bytes);
    d.receive(1, place);
    c.send(datagram(&c, 2, mtu_bytes));
    c.expect(2, WorkStatus::Success);
    assert_eq!(d.expect(1, WorkStatus::Success).byte_len, GRH_BYTES + mtu_bytes);
}

pub(super) fn datagram_queue_pairs_take_sends_only(fixture: &dyn Fixture) {
    let (mut a, b) = pair(fixture);
    for opcode in [Opcode::Write, Opcode::WriteImm, Opcode::Read, Opcode::Flush, Opcode::FetchAdd, Opcode::CompareSwap]
    {
        let bad = request(1, opcode, a.local(0, 8), b.remote(0));
        assert_eq!(a.work.post_send(&[bad]), Err((0, PostError::Unsupported)), "{opcode:?}");
    }
    a.expect_nothing();
    a.expect_state(QueuePairState::Rts);
}
