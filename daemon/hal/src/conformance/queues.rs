//! Completion queues and the room in work queues; ends of objects.

use std::os::fd::BorrowedFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::Fixture;
use super::rig::{DEPTH, End, config, connect, next_of, pair, pair_with, pattern, request, wait_for};
use crate::{
    CompletionQueue, HcaError, LocalSpan, Opcode, PostError, QueuePairConfig, QueuePairState, QueuePairType,
    ReceiveRequest, RemoteSpan, WorkCompletion, WorkStatus,
};

/// More than any provider makes of [`DEPTH`] by rounding up.
const FAR_BEYOND_DEPTH: u32 = DEPTH * 64;

pub(super) fn completion_queues_out_of_bounds_are_refused(fixture: &dyn Fixture) {
    let hca = &fixture.hcas()[0];
    for depth in [0, hca.capabilities().max_completions + 1, u32::MAX] {
        assert!(matches!(hca.create_cq(depth), Err(HcaError::Invalid { .. })), "depth {depth}");
    }
    let (one, other) = (hca.create_cq(1), hca.create_cq(1));
    let id = |cq: &Result<Box<dyn CompletionQueue>, _>| cq.as_ref().ok().map(|cq| cq.id());
    assert!(id(&one).is_some() && id(&one) != id(&other));
}

pub(super) fn an_unsignaled_success_is_silent(fixture: &dyn Fixture) {
    let (mut a, b) = pair(fixture);
    a.fill(0, &pattern(1, 8));
    for wr_id in 0..10 {
        let mut write = request(wr_id, Opcode::Write, a.local(0, 8), b.remote(wr_id * 8));
        write.signaled = wr_id == 9;
        a.send(write);
    }
    a.expect(9, WorkStatus::Success);
    a.expect_nothing();
    for wr_id in 0..10 {
        assert_eq!(b.content(wr_id * 8, 8), pattern(1, 8));
    }
}

pub(super) fn sends_fill_up_and_polling_makes_room(fixture: &dyn Fixture) {
    let (mut a, b) = pair(fixture);
    for round in 0..10 {
        for wr_id in 0..u64::from(DEPTH) {
            a.send(request(wr_id, Opcode::Write, a.local(0, 8), b.remote(0)));
        }
        for wr_id in 0..u64::from(DEPTH) {
            let completion = a.expect(wr_id, WorkStatus::Success);
            assert_eq!(completion.opcode, Opcode::Write, "round {round}");
        }
    }
}

pub(super) fn unsignaled_sends_alone_fill_the_queue(fixture: &dyn Fixture) {
    let (mut a, b) = pair(fixture);
    let mut write = request(1, Opcode::Write, a.local(0, 8), b.remote(0));
    write.signaled = false;
    let taken = (0..FAR_BEYOND_DEPTH).position(|_| match a.work.post_send(&[write]) {
        Ok(()) => false,
        Err(refused) => {
            assert_eq!(refused, (0, PostError::Full));
            true
        }
    });
    let taken = taken.expect("without completions to poll the queue fills up");
    assert!(taken >= DEPTH as usize, "{taken} taken");
    a.expect_nothing();
}

pub(super) fn receives_fill_up_and_polling_makes_room(fixture: &dyn Fixture) {
    let (mut a, mut b) = pair(fixture);
    let receive = |wr_id| ReceiveRequest { wr_id, local: LocalSpan::default() };
    let mut posted = 0;
    while b.work.post_recv(&[receive(posted)]).is_ok() {
        posted += 1;
        assert!(posted < u64::from(FAR_BEYOND_DEPTH), "receives never filled up");
    }
    assert_eq!(b.work.post_recv(&[receive(posted)]), Err((0, PostError::Full)));
    assert!(posted >= u64::from(DEPTH), "{posted} taken");
    a.send(request(1, Opcode::Send, LocalSpan::default(), RemoteSpan::default()));
    a.expect(1, WorkStatus::Success);
    b.expect(0, WorkStatus::Success);
    b.work.post_recv(&[receive(posted)]).expect("a polled completion makes room");
}

pub(super) fn a_batch_stops_at_the_first_refused_request(fixture: &dyn Fixture) {
    let (mut a, b) = pair(fixture);
    a.fill(0, &pattern(1, 8));
    let write = |wr_id| request(wr_id, Opcode::Write, a.local(0, 8), b.remote(wr_id * 8));
    let refused = request(2, Opcode::Recv, a.local(0, 8), b.remote(16));
    let batch = [write(0), write(1), refused, write(3)];
    assert_eq!(a.work.post_send(&batch), Err((2, PostError::Unsupported)));
    a.expect(0, WorkStatus::Success);
    a.expect(1, WorkStatus::Success);
    a.expect_nothing();
    assert_eq!(b.content(24, 8), [0; 8]);
}

pub(super) fn opcodes_of_completions_cannot_be_posted(fixture: &dyn Fixture) {
    let (mut a, b) = pair(fixture);
    for opcode in [Opcode::Recv, Opcode::RecvWriteImm] {
        let bad = request(1, opcode, a.local(0, 8), b.remote(0));
        assert_eq!(a.work.post_send(&[bad]), Err((0, PostError::Unsupported)));
    }
    a.expect_nothing();
}

pub(super) fn more_inline_bytes_than_asked_for_are_refused(fixture: &dyn Fixture) {
    let (mut a, b) = pair_with(fixture, &QueuePairConfig { inline_bytes: 0, ..config(QueuePairType::Rc) });
    let mut bad = request(1, Opcode::Write, a.local(0, 8), b.remote(0));
    for inline_len in [65, u8::MAX] {
        bad.inline_len = inline_len;
        assert_eq!(a.work.post_send(&[bad]), Err((0, PostError::Unsupported)), "{inline_len} bytes");
    }
    let mut read = request(1, Opcode::Read, a.local(0, 8), b.remote(0));
    read.inline_len = 8;
    assert_eq!(a.work.post_send(&[read]), Err((0, PostError::Unsupported)), "a read carries nothing");
    a.expect_nothing();
}

pub(super) fn an_overrun_completion_queue_is_dead(fixture: &dyn Fixture) {
    const SENDS: u32 = 1024;
    let [hca_a, hca_b] = fixture.hcas();
    let sends = SENDS.min(hca_a.capabilities().max_work_requests);
    let deep = QueuePairConfig { send_depth: sends, ..config(QueuePairType::Rc) };
    let cq = hca_a.create_cq(4).expect("a completion queue can be made");
    let mut a = End::with_cq(fixture, &hca_a, &deep, cq);
    let b = End::new(fixture, &hca_b, &deep);
    connect(&a, &b);
    for wr_id in 0..u64::from(sends) {
        let write = request(wr_id, Opcode::Write, a.local(0, 8), b.remote(0));
        // The queue pair may have noticed already.
        if a.work.post_send(&[write]).is_err() {
            break;
        }
    }
    a.expect_state(QueuePairState::Err);
    let error = wait_for("the error", || a.cq.poll(&mut [WorkCompletion::EMPTY]).err());
    assert!(matches!(error, HcaError::Gone { .. }), "{error}");
    assert!(a.cq.poll(&mut [WorkCompletion::EMPTY]).is_err(), "it stays dead");
    drop(a);
    let (mut c, d) = pair(fixture);
    c.send(request(1, Opcode::Write, c.local(0, 8), d.remote(0)));
    c.expect(1, WorkStatus::Success);
}

fn is_readable(fd: BorrowedFd<'_>, wait_seconds: i64) -> bool {
    let timeout = Timespec { tv_sec: wait_seconds, tv_nsec: 0 };
    let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
    poll(&mut fds, Some(&timeout)).expect("poll(2) works on an event fd") == 1
}

pub(super) fn an_event_comes_for_a_completion_after_arming(fixture: &dyn Fixture) {
    let (mut a, mut b) = pair(fixture);
    let fd_of = |end: &End<'_>| {
        let fd = end.cq.event_fd().expect("the case needs an event fd");
        fd.try_clone_to_owned().expect("the test process has a descriptor left")
    };
    let fd = fd_of(&b);
    let readable = |seconds| is_readable(std::os::fd::AsFd::as_fd(&fd), seconds);
    for round in 0..10 {
        let place = b.local(0, 64);
        b.receive(round, place);
        b.cq.arm().expect("a sound completion queue can be armed");
        assert!(!readable(0), "round {round}: arming takes back readiness");
        b.expect_nothing();
        a.send(request(round, Opcode::Send, LocalSpan::default(), RemoteSpan::default()));
        // The bound is a watchdog.
        assert!(readable(60), "round {round}: an event for the completion");
        b.expect(round, WorkStatus::Success);
        a.expect(round, WorkStatus::Success);
    }
}

pub(super) fn a_queue_pair_can_be_destroyed_with_work_posted(fixture: &dyn Fixture) {
    let (mut a, b) = pair(fixture);
    for wr_id in 0..10 {
        a.send(request(wr_id, Opcode::Send, a.local(0, 8), RemoteSpan::default()));
        let place = a.local(0, 64);
        a.receive(wr_id, place);
    }
    let End { control, work, region, mut cq, .. } = a;
    drop(work);
    assert!(control.state().is_ok(), "half of its owner is left");
    drop(control);
    region.deregister().expect("no queue pair holds a region");
    let mut out = [WorkCompletion::EMPTY; 32];
    // What was completed before the end may be there or not; nothing else comes, and nothing breaks.
    let count = cq.poll(&mut out).expect("the completion queue outlives its queue pairs");
    assert!(out[..count].iter().all(|completion| completion.status == WorkStatus::Flushed));
    drop(b);
}

pub(super) fn children_outlive_their_parents(fixture: &dyn Fixture) {
    let (a, mut b) = pair(fixture);
    let remote = b.remote(0);
    let local = a.local(0, 64);
    a.fill(0, &pattern(1, 64));
    let End { hca, pd, mut work, control, region, mut cq, memory, .. } = a;
    drop((hca, pd, memory, control));
    work.post_send(&[request(1, Opcode::Write, local, remote)]).expect("the work side alone keeps a queue pair");
    assert_eq!(next_of(&mut *cq).status, WorkStatus::Success);
    assert_eq!(b.content(0, 64), pattern(1, 64));
    drop(cq);
    // Completions go nowhere now; that is the owner's wish, not an overrun.
    work.post_send(&[request(2, Opcode::Write, local, remote)]).expect("the work side alone keeps a queue pair");
    drop(work);
    region.deregister().expect("a region outlives all else");
    b.expect_nothing();
}

pub(super) fn queue_pairs_share_a_completion_queue(fixture: &dyn Fixture) {
    let [hca_a, hca_b] = fixture.hcas();
    let mut a = End::new(fixture, &hca_a, &config(QueuePairType::Rc));
    let b = End::new(fixture, &hca_b, &config(QueuePairType::Rc));
    connect(&a, &b);
    let second = a.pd.create_queue_pair(a.cq.id(), &config(QueuePairType::Rc)).expect("a second queue pair");
    let c = End::new(fixture, &hca_b, &config(QueuePairType::Rc));
    for control in [&second.control, &c.control] {
        control.to_init().expect("a fresh queue pair goes to INIT");
    }
    let endpoint = |control: &dyn crate::QueuePair| control.endpoint().expect("a queue pair in INIT has an endpoint");
    second.control.connect(&endpoint(&*c.control)).expect("a queue pair in INIT connects");
    c.control.connect(&endpoint(&*second.control)).expect("a queue pair in INIT connects");
    let mut work = second.work;
    work.post_send(&[request(1, Opcode::Write, a.local(0, 8), c.remote(0))]).expect("it has room");
    a.send(request(2, Opcode::Write, a.local(0, 8), b.remote(0)));
    let mut seen = [a.next(), a.next()].map(|completion| (completion.wr_id, completion.qp_num));
    seen.sort_unstable();
    assert_eq!(seen, [(1, second.control.qp_num()), (2, a.control.qp_num())]);
    assert_ne!(second.control.qp_num(), a.control.qp_num());
}
