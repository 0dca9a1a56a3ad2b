//! Queue pairs. Work executes on the thread that posts it, straight into the peer's memory.
//!
//! Owner of state: `QueuePairCore`. Its send side belongs to the requester, its receive side to the
//! responder, each behind its own lock. Lock order: a send side, then any one receive side, then a
//! completion queue; no thread holds two send sides, or two receive sides, at once. What must reach
//! another send side (a peer that fell into error, a link that came back) waits in [`Aftermath`]
//! until all locks are released.

mod attempt;
mod control;
mod datagram;
mod respond;
mod send;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Instant;

use gdrd_hal::{
    Endpoint, HcaEvent, Opcode, QueuePairConfig, QueuePairState, ReceiveRequest, WorkCompletion, WorkRequest,
    WorkStatus,
};

use crate::completion::{CqCore, Entry, Frees};
use crate::hca::HcaCore;
use crate::region::RegionCache;
use crate::sync::lock;
use crate::timer::Due;

pub(crate) use control::{CREATE, create};

/// Number of the state that a queue pair has once its owner dropped it; the others are verbs' states.
const DESTROYED: u8 = u8::MAX;

/// The other end, fixed at the step to RTR.
struct Connection {
    remote: Endpoint,
    /// `None`: nobody on this fabric has the LID.
    hca: Option<Arc<HcaCore>>,
    /// Epochs of both GID tables at that time.
    local_epoch: u32,
    remote_epoch: u32,
    path_mtu_bytes: u32,
}

/// Why the head of a send queue waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reason {
    /// Nobody acknowledges: link down, peer not connected to us, in error or gone.
    NoAnswer,
    /// The peer has no receive.
    NotReady,
}

#[derive(Debug, Clone, Copy)]
struct Wait {
    reason: Reason,
    /// When it ends in an error; `None`: never.
    until: Option<Instant>,
}

#[derive(Default)]
struct SendSide {
    /// Sends taken and executed since creation.
    posted: u64,
    executed: u64,
    /// Posted and not executed: the head waits, the others stand behind it.
    pending: VecDeque<WorkRequest>,
    wait: Option<Wait>,
    /// A deadline of ours lies with the timer.
    timed: bool,
    /// Cache of the connection's other end.
    peer: Option<Arc<QueuePairCore>>,
    /// Caches of the regions used last: ours, and the peer's.
    local: RegionCache,
    remote: RegionCache,
}

#[derive(Default)]
struct ReceiveSide {
    posted: u64,
    queue: VecDeque<ReceiveRequest>,
    /// The requester whose message waits for the next receive.
    waiter: Option<Weak<QueuePairCore>>,
    /// Cache of the region used last.
    local: RegionCache,
}

/// A queue pair as the fabric sees it.
pub(crate) struct QueuePairCore {
    qp_num: u32,
    hca: Arc<HcaCore>,
    pd_id: u64,
    cq: Arc<CqCore>,
    config: QueuePairConfig,
    /// Our first packet sequence number: who connects must know it.
    psn: u32,
    state: AtomicU8,
    connection: OnceLock<Connection>,
    send: Mutex<SendSide>,
    receive: Mutex<ReceiveSide>,
    credits: Arc<Credits>,
    /// Our place in the completion queue's list.
    cq_slot: usize,
}

/// Work queue slots given back by polling, since creation.
#[derive(Debug, Default)]
pub(crate) struct Credits {
    sends: AtomicU64,
    receives: AtomicU64,
}

impl Credits {
    pub(crate) fn give_back(&self, frees: Frees) {
        match frees {
            Frees::Sends(count) => self.sends.store(count, Ordering::Release),
            // One owner polls, so nobody else adds.
            Frees::Receive => self.receives.store(self.receives.load(Ordering::Relaxed) + 1, Ordering::Release),
        }
    }
}

/// What is left to do once all locks are released.
#[derive(Default)]
struct Aftermath {
    /// A responder that went into error: its own sends are to be flushed.
    failed: Option<Arc<QueuePairCore>>,
    /// Something came back: waiting work may go on.
    kick: bool,
}

impl Aftermath {
    fn run(self, hca: &HcaCore) {
        if let Some(failed) = self.failed {
            failed.flush_sends();
        }
        if self.kick {
            hca.fabric.kick();
        }
    }
}

fn state_number(state: QueuePairState) -> u8 {
    match state {
        QueuePairState::Reset => 0,
        QueuePairState::Init => 1,
        QueuePairState::Rtr => 2,
        QueuePairState::Rts => 3,
        QueuePairState::Sqd => 4,
        QueuePairState::Sqe => 5,
        _ => 6,
    }
}

impl QueuePairCore {
    /// `None`: destroyed.
    fn state(&self) -> Option<QueuePairState> {
        match self.state.load(Ordering::Acquire) {
            0 => Some(QueuePairState::Reset),
            1 => Some(QueuePairState::Init),
            2 => Some(QueuePairState::Rtr),
            3 => Some(QueuePairState::Rts),
            4 => Some(QueuePairState::Sqd),
            5 => Some(QueuePairState::Sqe),
            DESTROYED => None,
            _ => Some(QueuePairState::Err),
        }
    }

    fn is_rts(&self) -> bool {
        self.state() == Some(QueuePairState::Rts)
    }

    /// One step of the state machine; false when the queue pair is not in `from` any more.
    fn step(&self, from: QueuePairState, to: QueuePairState) -> bool {
        let (from, to) = (state_number(from), state_number(to));
        self.state.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// To ERR from any state but destroyed; false when it was there.
    fn set_error(&self) -> bool {
        let error = state_number(QueuePairState::Err);
        let changed = self.state.fetch_update(Ordering::AcqRel, Ordering::Acquire, |state| {
            (state != DESTROYED && state != error).then_some(error)
        });
        changed.is_ok()
    }

    /// The completion queue is dead: nothing can complete here any more. Takes no lock of the queue pair.
    pub(crate) fn die_of_completion_queue(&self) {
        if self.set_error() {
            self.hca.raise(HcaEvent::QueuePairFatal { qp_num: self.qp_num });
        }
    }

    /// Tries waiting work again. Takes the send side.
    pub(crate) fn progress(self: &Arc<Self>) {
        let mut after = Aftermath::default();
        self.run_pending(&mut lock(&self.send), &mut after);
        after.run(&self.hca);
    }

    fn complete(&self, completion: WorkCompletion, frees: Frees) {
        self.cq.push(Entry { completion, slot: self.cq_slot, frees });
    }

    fn completion(&self, wr_id: u64, opcode: Opcode, status: WorkStatus) -> WorkCompletion {
        WorkCompletion { wr_id, status, opcode, qp_num: self.qp_num, ..WorkCompletion::EMPTY }
    }
}

impl Due for QueuePairCore {
    fn due(self: Arc<Self>) {
        lock(&self.send).timed = false;
        self.progress();
    }
}
