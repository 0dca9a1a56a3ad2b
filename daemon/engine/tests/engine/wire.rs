//! Clients that speak to the engine's queue pairs by real rings.

use std::os::fd::OwnedFd;

use gdrd_engine::{LeaseInfo, QueuePairInfo, QueuePairRequest, QueuePairType, SessionId};
use gdrd_ring::{
    ClientRing, Completion, LocalSpan, Operation, RemoteSpan, Source, Status, Submission, SubmissionFlags, Wake,
};

use crate::world::{PATIENCE, World};

/// One queue pair as its client has it.
pub(crate) struct Client {
    pub(crate) info: QueuePairInfo,
    pub(crate) ring: ClientRing,
    doorbell: OwnedFd,
}

pub(crate) fn wanted(hca: &str) -> QueuePairRequest {
    QueuePairRequest {
        hca: hca.to_owned(),
        gpu: String::new(),
        port_num: 0,
        qp_type: QueuePairType::Rc,
        send_depth: 16,
        recv_depth: 16,
    }
}

impl Client {
    pub(crate) fn new(world: &World, session: SessionId, hca: &str) -> Self {
        let grant = world.engine.create_queue_pair(session, wanted(hca)).wait().expect("a queue pair");
        let (info, ring, doorbell) = grant.keep();
        Self { info, ring: ClientRing::open(ring).expect("our own ring"), doorbell }
    }

    /// Connects two.
    pub(crate) fn connect(world: &World, a: (SessionId, &Self), b: (SessionId, &Self)) {
        for ((session, near), far) in [(a, b.1), (b, a.1)] {
            let connected = world.engine.connect_queue_pair(session, near.info.id, far.info.endpoint.clone());
            connected.wait().expect("reachable");
        }
    }

    pub(crate) fn post(&mut self, wr_id: u64, operation: Operation) {
        self.ring.submit(&Submission { wr_id, flags: SubmissionFlags::SIGNALED, operation }).expect("room");
        if self.ring.flush() == Wake::Needed {
            rustix::io::write(&self.doorbell, &1_u64.to_ne_bytes()).expect("an eventfd takes 1");
        }
    }

    pub(crate) fn next(&mut self) -> Completion {
        self.ring.wait(Some(PATIENCE)).expect("open").expect("a completion comes")
    }

    /// The next completion, which must be of `wr_id` with `status`.
    pub(crate) fn expect(&mut self, wr_id: u64, status: Status) {
        let completion = self.next();
        assert_eq!((completion.wr_id, completion.status), (wr_id, status), "{completion:?}");
    }
}

/// A span of a lease on an HCA.
pub(crate) fn local(lease: &LeaseInfo, hca: &str, offset: u64, len_bytes: u32) -> LocalSpan {
    let registration = lease.registrations.iter().find(|r| &*r.hca == hca).expect("registered there");
    LocalSpan { slot: registration.slot.0, generation: registration.generation.0, offset, len_bytes }
}

/// What a peer names.
pub(crate) fn remote(lease: &LeaseInfo, hca: &str, offset: u64) -> RemoteSpan {
    let registration = lease.registrations.iter().find(|r| &*r.hca == hca).expect("registered there");
    RemoteSpan { rkey: registration.rkey.0, iova: registration.iova + offset }
}

pub(crate) fn write(local: LocalSpan, remote: RemoteSpan) -> Operation {
    Operation::Write { source: Source::Local(local), remote, imm: None }
}
