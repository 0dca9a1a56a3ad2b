//! What is refused, at which end, with which status; and that refused work moves nothing.

use std::sync::Arc;

use super::Fixture;
use super::rig::{
    End, MEMORY_BYTES, assert_status, config, everything, local_in, pair, pattern, register, remote_in, request,
};
use crate::{
    Access, LocalSpan, MemoryRegion, Opcode, PostError, ProtectionDomain, QueuePairState, QueuePairType, RemoteSpan,
    WorkRequest, WorkStatus,
};

/// Posts one request on a fresh pair, asserts that it fails so, that the queue pair is then in ERR, and that both
/// memories are what they were.
fn assert_fails(
    fixture: &dyn Fixture,
    what: &str,
    status: WorkStatus,
    make: impl FnOnce(&End<'_>, &mut End<'_>) -> (WorkRequest, Vec<Box<dyn MemoryRegion>>),
) {
    let (mut a, mut b) = pair(fixture);
    let size = usize::try_from(MEMORY_BYTES).expect("the memory of the suite is small");
    let (at_a, at_b) = (pattern(1, size), pattern(2, size));
    a.fill(0, &at_a);
    b.fill(0, &at_b);
    let (request, regions) = make(&a, &mut b);
    a.send(request);
    let completion = a.next();
    assert_eq!(completion.wr_id, request.wr_id, "{what}");
    assert_status(fixture, completion.status, status, what);
    a.expect_state(QueuePairState::Err);
    assert!(a.content(0, size) == at_a && b.content(0, size) == at_b, "{what} moved bytes");
    drop(regions);
}

fn other_domain(end: &End<'_>) -> Arc<dyn ProtectionDomain> {
    end.hca.alloc_pd().expect("a protection domain can be made")
}

/// Takes away the right that an operation needs.
type RemoveRight = fn(&mut Access);

/// Operations on one remote place, each with the right it needs there.
const REMOTE_OPERATIONS: [(Opcode, RemoveRight); 4] = [
    (Opcode::Write, |access| access.remote_write = false),
    (Opcode::WriteImm, |access| access.remote_write = false),
    (Opcode::Read, |access| access.remote_read = false),
    (Opcode::Flush, |access| access.remote_read = false),
];

pub(super) fn a_wrong_rkey_is_a_remote_access_error(fixture: &dyn Fixture) {
    for (opcode, _) in REMOTE_OPERATIONS {
        assert_fails(fixture, &format!("{opcode:?}"), WorkStatus::RemoteAccess, |a, b| {
            post_receive_for(opcode, b);
            let mut remote = b.remote(0);
            remote.rkey ^= 0x5a5a_5a5a;
            (request(3, opcode, a.local(0, 64), remote), vec![])
        });
    }
}

/// A write with immediate waits for a receive before anything else is looked at.
fn post_receive_for(opcode: Opcode, end: &mut End<'_>) {
    if opcode == Opcode::WriteImm {
        end.receive(99, LocalSpan::default());
    }
}

pub(super) fn a_wrong_lkey_is_a_local_protection_error(fixture: &dyn Fixture) {
    for opcode in [Opcode::Write, Opcode::Read] {
        assert_fails(fixture, &format!("{opcode:?}"), WorkStatus::LocalProtection, |a, b| {
            let mut local = a.local(0, 64);
            local.lkey ^= 0x5a5a_5a5a;
            (request(1, opcode, local, b.remote(0)), vec![])
        });
    }
}

pub(super) fn an_lkey_of_another_domain_is_refused(fixture: &dyn Fixture) {
    for opcode in [Opcode::Write, Opcode::Read] {
        assert_fails(fixture, &format!("{opcode:?}"), WorkStatus::LocalProtection, |a, b| {
            let foreign = register(&*other_domain(a), &a.memory, everything());
            (request(1, opcode, local_in(&*foreign, 0, 64), b.remote(0)), vec![foreign])
        });
    }
}

pub(super) fn an_rkey_of_another_domain_is_refused(fixture: &dyn Fixture) {
    for opcode in [Opcode::Write, Opcode::Read] {
        assert_fails(fixture, &format!("{opcode:?}"), WorkStatus::RemoteAccess, |a, b| {
            let foreign = register(&*other_domain(b), &b.memory, everything());
            (request(1, opcode, a.local(0, 64), remote_in(&*foreign, 0)), vec![foreign])
        });
    }
}

pub(super) fn remote_ranges_past_either_end_are_refused(fixture: &dyn Fixture) {
    let before = 0_u64.wrapping_sub(1);
    for (offset, len_bytes) in [(MEMORY_BYTES - 63, 64), (MEMORY_BYTES, 1), (before, 1), (before, 64), (1 << 40, 8)] {
        for opcode in [Opcode::Write, Opcode::Read] {
            let what = format!("{opcode:?} of {len_bytes} at {offset}");
            assert_fails(fixture, &what, WorkStatus::RemoteAccess, |a, b| {
                (request(1, opcode, a.local(0, len_bytes), b.remote(offset)), vec![])
            });
        }
    }
    let (mut a, b) = pair(fixture);
    a.send(request(1, Opcode::Write, a.local(0, 64), b.remote(MEMORY_BYTES - 64)));
    a.expect(1, WorkStatus::Success);
}

pub(super) fn remote_ranges_that_wrap_are_refused(fixture: &dyn Fixture) {
    for addr in [u64::MAX, u64::MAX - 8, u64::MAX - 63] {
        for opcode in [Opcode::Write, Opcode::Read] {
            assert_fails(fixture, &format!("{opcode:?} at {addr:#x}"), WorkStatus::RemoteAccess, |a, b| {
                let remote = RemoteSpan { addr, ..b.remote(0) };
                (request(1, opcode, a.local(0, 64), remote), vec![])
            });
        }
    }
}

pub(super) fn local_ranges_past_the_end_or_wrapping_are_refused(fixture: &dyn Fixture) {
    for opcode in [Opcode::Write, Opcode::Read] {
        let too_long = |a: &End<'_>| a.local(MEMORY_BYTES - 63, 64);
        let wrapping = |a: &End<'_>| LocalSpan { addr: u64::MAX - 31, ..a.local(0, 64) };
        assert_fails(fixture, &format!("{opcode:?}, too long"), WorkStatus::LocalProtection, |a, b| {
            (request(1, opcode, too_long(a), b.remote(0)), vec![])
        });
        assert_fails(fixture, &format!("{opcode:?}, wrapping"), WorkStatus::LocalProtection, |a, b| {
            (request(1, opcode, wrapping(a), b.remote(0)), vec![])
        });
    }
}

pub(super) fn each_operation_needs_its_remote_right(fixture: &dyn Fixture) {
    for (opcode, remove) in REMOTE_OPERATIONS {
        let mut access = everything();
        remove(&mut access);
        assert_fails(fixture, &format!("{opcode:?}"), WorkStatus::RemoteAccess, |a, b| {
            post_receive_for(opcode, b);
            let region = register(&*b.pd, &b.memory, access);
            (request(3, opcode, a.local(0, 64), remote_in(&*region, 0)), vec![region])
        });
    }
}

pub(super) fn a_remote_atomic_needs_its_right(fixture: &dyn Fixture) {
    for opcode in [Opcode::FetchAdd, Opcode::CompareSwap] {
        assert_fails(fixture, &format!("{opcode:?}"), WorkStatus::RemoteAccess, |a, b| {
            (request(1, opcode, a.local(0, 8), b.remote(0)), vec![])
        });
    }
}

pub(super) fn results_need_local_write(fixture: &dyn Fixture) {
    assert_fails(fixture, "read", WorkStatus::LocalProtection, |a, b| {
        let read_only = register(&*a.pd, &a.memory, Access { remote_read: true, ..Access::default() });
        (request(1, Opcode::Read, local_in(&*read_only, 0, 64), b.remote(0)), vec![read_only])
    });
}

pub(super) fn a_receive_needs_local_write(fixture: &dyn Fixture) {
    let (mut a, mut b) = pair(fixture);
    let read_only = register(&*b.pd, &b.memory, Access::default());
    b.receive(1, local_in(&*read_only, 0, 64));
    a.fill(0, &pattern(1, 64));
    a.send(request(2, Opcode::Send, a.local(0, 64), RemoteSpan::default()));
    b.expect(1, WorkStatus::LocalProtection);
    a.expect(2, WorkStatus::RemoteOperation);
    assert_eq!(b.content(0, 64), [0; 64]);
}

pub(super) fn a_misaligned_atomic_is_an_invalid_request(fixture: &dyn Fixture) {
    for opcode in [Opcode::FetchAdd, Opcode::CompareSwap] {
        for offset in [1, 4, 7] {
            let what = format!("{opcode:?} at {offset}");
            // Soft RoCE looks before it posts, hardware leaves it to the responder.
            if is_refused_at_once(fixture, opcode, offset) {
                continue;
            }
            assert_fails(fixture, &what, WorkStatus::RemoteInvalidRequest, |a, b| {
                let region = register(&*b.pd, &b.memory, Access { remote_atomic: true, ..everything() });
                (request(1, opcode, a.local(0, 8), remote_in(&*region, offset)), vec![region])
            });
        }
    }
}

fn is_refused_at_once(fixture: &dyn Fixture, opcode: Opcode, offset: u64) -> bool {
    let (mut a, b) = pair(fixture);
    let region = register(&*b.pd, &b.memory, Access { remote_atomic: true, ..everything() });
    let misaligned = request(1, opcode, a.local(0, 8), remote_in(&*region, offset));
    let Err(refused) = a.work.post_send(&[misaligned]) else { return false };
    assert_eq!(refused, (0, PostError::Unsupported));
    a.expect_nothing();
    assert_eq!(b.content(0, 16), [0; 16]);
    true
}

pub(super) fn nothing_reaches_memory_after_deregistration(fixture: &dyn Fixture) {
    for opcode in [Opcode::Write, Opcode::Read] {
        assert_fails(fixture, &format!("{opcode:?} there"), WorkStatus::RemoteAccess, |a, b| {
            let region = register(&*b.pd, &b.memory, everything());
            let remote = remote_in(&*region, 0);
            region.deregister().expect("a region can be deregistered");
            (request(1, opcode, a.local(0, 64), remote), vec![])
        });
        assert_fails(fixture, &format!("{opcode:?} here"), WorkStatus::LocalProtection, |a, b| {
            let region = register(&*a.pd, &a.memory, everything());
            let local = local_in(&*region, 0, 64);
            drop(region);
            (request(1, opcode, local, b.remote(0)), vec![])
        });
    }
}

pub(super) fn a_too_short_receive_fails_at_both_ends(fixture: &dyn Fixture) {
    let (mut a, mut b) = pair(fixture);
    for wr_id in 1..4 {
        let place = b.local(wr_id * 128, 63);
        b.receive(wr_id, place);
    }
    a.send(request(4, Opcode::Send, a.local(0, 64), RemoteSpan::default()));
    b.expect(1, WorkStatus::LocalLength);
    a.expect(4, WorkStatus::RemoteInvalidRequest);
    a.expect_state(QueuePairState::Err);
    b.expect_state(QueuePairState::Err);
    b.expect(2, WorkStatus::Flushed);
    b.expect(3, WorkStatus::Flushed);
}

pub(super) fn an_error_flushes_what_was_posted_behind_it(fixture: &dyn Fixture) {
    let (mut a, b) = pair(fixture);
    for wr_id in [50, 51] {
        let place = a.local(0, 64);
        a.receive(wr_id, place);
    }
    let before = request(1, Opcode::Write, a.local(0, 8), b.remote(0));
    let mut bad = request(2, Opcode::Write, a.local(0, 8), b.remote(0));
    bad.remote.rkey ^= 0x5a5a_5a5a;
    a.fill(64, &pattern(1, 8));
    let mut behind = request(3, Opcode::Write, a.local(64, 8), b.remote(4096));
    behind.signaled = false;
    let last = request(4, Opcode::Send, a.local(0, 8), RemoteSpan::default());
    a.work.post_send(&[before, bad, behind, last]).expect("a batch within the depth is taken");
    let mut sends = Vec::new();
    let mut receives = Vec::new();
    for _ in 0..6 {
        let completion = a.next();
        let list = if completion.wr_id < 50 { &mut sends } else { &mut receives };
        list.push((completion.wr_id, completion.status));
    }
    let flushed = WorkStatus::Flushed;
    assert_eq!(sends, [(1, WorkStatus::Success), (2, WorkStatus::RemoteAccess), (3, flushed), (4, flushed)]);
    assert_eq!(receives, [(50, flushed), (51, flushed)]);
    assert_eq!(b.content(4096, 8), [0; 8], "what is flushed was not executed");
}

pub(super) fn an_unsignaled_failure_is_reported(fixture: &dyn Fixture) {
    assert_fails(fixture, "unsignaled", WorkStatus::RemoteAccess, |a, b| {
        let mut bad = request(1, Opcode::Write, a.local(0, 8), b.remote(0));
        bad.remote.rkey ^= 0x5a5a_5a5a;
        bad.signaled = false;
        (bad, vec![])
    });
}

pub(super) fn a_peer_that_is_gone_is_a_retry_error(fixture: &dyn Fixture) {
    let (mut a, b) = pair(fixture);
    let remote = b.remote(0);
    let End { control, work, region, memory, .. } = b;
    drop((control, work));
    a.fill(0, &pattern(1, 64));
    a.send(request(1, Opcode::Write, a.local(0, 64), remote));
    a.expect(1, WorkStatus::RetryExceeded);
    a.expect_state(QueuePairState::Err);
    let mut content = [1; 64];
    fixture.read(std::os::fd::AsFd::as_fd(&memory), 0, &mut content);
    assert_eq!(content, [0; 64], "the region is there, the queue pair is not");
    drop(region);
}

pub(super) fn a_peer_that_is_not_connected_back_is_a_retry_error(fixture: &dyn Fixture) {
    let [hca_a, hca_b] = fixture.hcas();
    let mut a = End::new(fixture, &hca_a, &config(QueuePairType::Rc));
    let b = End::new(fixture, &hca_b, &config(QueuePairType::Rc));
    for end in [&a, &b] {
        end.control.to_init().expect("a fresh queue pair goes to INIT");
    }
    let at_b = b.control.endpoint().expect("a queue pair in INIT has an endpoint");
    a.control.connect(&at_b).expect("a queue pair in INIT connects");
    a.fill(0, &pattern(1, 64));
    a.send(request(1, Opcode::Write, a.local(0, 64), b.remote(0)));
    a.expect(1, WorkStatus::RetryExceeded);
    assert_eq!(b.content(0, 64), [0; 64]);
}
