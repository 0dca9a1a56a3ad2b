//! Shared by the tests of the ring: both sides in one process, and short ways to make requests.
#![allow(dead_code, reason = "each test binary uses a part")]

use gdrd_ring::{
    BrokerRing, ClientRing, Completion, CompletionOpcode, Geometry, LocalSpan, Operation, RemoteSpan, Source, Status,
    Submission, SubmissionFlags, Submitted,
};

pub(crate) const QP_NUM: u32 = 77;

pub(crate) fn pair(sq_depth: u32, rq_depth: u32) -> (ClientRing, BrokerRing) {
    let geometry = Geometry::new(sq_depth, rq_depth).expect("a test's depths are allowed");
    let broker = BrokerRing::create(geometry).expect("a small segment can be made");
    let fd = broker.fd().try_clone_to_owned().expect("a descriptor is left");
    (ClientRing::open(fd).expect("the broker's ring is one"), broker)
}

pub(crate) fn local(len_bytes: u32) -> LocalSpan {
    LocalSpan { slot: 3, generation: 9, offset: 4096, len_bytes }
}

pub(crate) fn remote() -> RemoteSpan {
    RemoteSpan { rkey: 0x1234_5678, iova: 0xdead_0000_0000 }
}

pub(crate) fn write(wr_id: u64, flags: SubmissionFlags) -> Submission {
    let operation = Operation::Write { source: Source::Local(local(8)), remote: remote(), imm: None };
    Submission { wr_id, flags, operation }
}

pub(crate) fn signaled(wr_id: u64) -> Submission {
    write(wr_id, SubmissionFlags::SIGNALED)
}

pub(crate) fn recv(wr_id: u64) -> Submission {
    Submission { wr_id, flags: SubmissionFlags::SIGNALED, operation: Operation::Recv { local: local(64) } }
}

/// The request that the broker must find next.
pub(crate) fn taken(broker: &mut BrokerRing) -> Submission {
    let found = broker.take().expect("the client is honest");
    let Some(Submitted::Request(submission)) = found else { unreachable!("a request was expected, not {found:?}") };
    submission
}

pub(crate) fn success(submission: &Submission) -> Completion {
    Completion::new(submission.wr_id, CompletionOpcode::of(&submission.operation), Status::Success, QP_NUM)
}

/// Takes the next request and ends it with success, visibly.
pub(crate) fn serve_one(broker: &mut BrokerRing) {
    let submission = taken(broker);
    broker.complete(&success(&submission)).expect("it was taken");
    broker.publish().expect("nobody waits");
}
