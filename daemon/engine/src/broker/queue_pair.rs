//! One queue pair on its broker thread: ring, books, and the HCA's side.
//!
//! The books decide what the client hears and when; the ring only carries it. Once the queue pair
//! has failed, requests are taken and end as flushed without reaching the HCA.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use gdrd_hal::{PostError, QueuePairParts, ReceiveRequest, WorkCompletion, WorkRequest};
use gdrd_ring::{
    BrokerRing, CompletionOpcode, Corrupt, Operation, Queue, RefusalReason, Status, Submission, Submitted,
};

use super::cold::{Cold, Destroyed, Ended, Held, Job};
use super::command::Inbox;
use super::hca::Reservation;
use super::landing::FlushLanding;
use super::ledger::{Ledger, NO_SLOT, Outcome, Record};
use super::refusal::Refused;
use super::registry::Registry;
use super::request::{BLANK, Checker, QueuePairLimits, payload_bytes};
use super::schedule::{Allowance, BATCH, Spent};
use super::share::Share;
use super::slots::SlotTable;
use super::stats::QueuePairCounters;
use super::status::outcome_of;
use super::tag::Tag;
use crate::ids::QueuePairId;

/// Buffers that the queue pairs of a thread use in turn.
#[derive(Debug)]
pub(crate) struct Scratch {
    sends: Vec<WorkRequest>,
    receives: Vec<ReceiveRequest>,
}

impl Scratch {
    pub(crate) fn new() -> Self {
        Self { sends: Vec::with_capacity(BATCH as usize), receives: Vec::with_capacity(BATCH as usize) }
    }
}

/// What came of a queue pair's turn.
#[derive(Debug, Default)]
pub(crate) struct Turn {
    /// What was taken.
    pub(crate) spent: Spent,
    /// The client broke the protocol.
    pub(crate) corrupt: Option<Corrupt>,
    /// First failure of the queue pair.
    pub(crate) failure: Option<Status>,
}

/// One queue pair.
pub(crate) struct QueuePair {
    pub(crate) id: QueuePairId,
    pub(crate) tag: Tag,
    pub(crate) doorbell: OwnedFd,
    pub(crate) slots: Arc<SlotTable>,
    pub(crate) share: Arc<Share>,
    pub(crate) reservation: Reservation,
    qp_num: u32,
    limits: QueuePairLimits,
    landing: Option<Arc<FlushLanding>>,
    /// `None` once it was closed as corrupt.
    ring: Option<BrokerRing>,
    /// `None` once the HCA's side was given up.
    parts: Option<QueuePairParts>,
    sends: Ledger,
    receives: Ledger,
    /// Whether the HCA ever took a send, so the queue pair has been connected.
    was_connected: bool,
    failed: bool,
    /// Set once the queue pair is on its way to ERR: when to give up what has not flushed.
    deadline: Option<Instant>,
    /// To be ended once all posted work has.
    closing: bool,
    /// Completions lie in the ring that the client cannot see yet.
    pub(crate) staged: bool,
    counters: Arc<QueuePairCounters>,
    cold: Cold,
}

/// What a queue pair is made of.
pub(crate) struct Pieces {
    pub(crate) id: QueuePairId,
    pub(crate) ring: BrokerRing,
    pub(crate) doorbell: OwnedFd,
    pub(crate) parts: QueuePairParts,
    pub(crate) slots: Arc<SlotTable>,
    pub(crate) share: Arc<Share>,
    pub(crate) limits: QueuePairLimits,
    pub(crate) landing: Option<Arc<FlushLanding>>,
    pub(crate) reservation: Reservation,
    pub(crate) counters: Arc<QueuePairCounters>,
}

impl QueuePair {
    /// Books and all else are made here, on the caller's thread; the broker thread allocates nothing.
    pub(crate) fn new(pieces: Pieces) -> Self {
        let Pieces { id, ring, doorbell, parts, slots, share, limits, landing, reservation, counters } = pieces;
        let geometry = ring.geometry();
        Self {
            id,
            tag: Tag::new(0, 0),
            qp_num: parts.control.qp_num(),
            sends: Ledger::new(geometry.sq_depth()),
            receives: Ledger::new(geometry.rq_depth()),
            ring: Some(ring),
            parts: Some(parts),
            was_connected: false,
            failed: false,
            deadline: None,
            closing: false,
            staged: false,
            cold: reservation.cold.clone(),
            doorbell,
            slots,
            share,
            limits,
            landing,
            reservation,
            counters,
        }
    }

    /// Takes requests within the allowance, posts those that pass, and shows the client what has ended.
    pub(crate) fn turn(&mut self, scratch: &mut Scratch, allowance: Allowance) -> Turn {
        let mut turn = Turn::default();
        if self.closing {
            return turn;
        }
        self.take(scratch, allowance, &mut turn);
        if turn.spent.requests > 0 {
            self.counters.taken.add(turn.spent.requests.into());
            self.post_receives(&scratch.receives, &mut turn);
            self.post_sends(&scratch.sends, &mut turn);
            self.emit();
            self.publish();
        }
        turn
    }

    fn take(&mut self, scratch: &mut Scratch, allowance: Allowance, turn: &mut Turn) {
        scratch.sends.clear();
        scratch.receives.clear();
        let most = allowance.requests.min(BATCH);
        while turn.spent.requests < most
            && turn.spent.cost_bytes() < allowance.cost_bytes
            && turn.spent.payload_bytes < allowance.payload_bytes
        {
            let Some(ring) = &mut self.ring else { break };
            match ring.take() {
                Ok(Some(submitted)) => {
                    turn.spent.requests += 1;
                    turn.spent.payload_bytes += payload_bytes(&submitted);
                    self.enter(&submitted, scratch);
                }
                Ok(None) => break,
                Err(corrupt) => {
                    turn.corrupt = Some(corrupt);
                    break;
                }
            }
        }
    }

    /// Enters a request in the books, and in the batch to post if it passes.
    fn enter(&mut self, submitted: &Submitted, scratch: &mut Scratch) {
        match submitted {
            Submitted::Refused { wr_id, opcode, .. } => {
                self.refuse(*wr_id, *opcode, RefusalReason::Malformed.into());
            }
            Submitted::Request(submission) if self.failed => {
                let outcome = Outcome::failed(Status::WrFlushErr, 0);
                self.push(Record::of(submission, NO_SLOT, Some(outcome)));
                self.counters.failed.add(1);
            }
            Submitted::Request(submission) => {
                let checker = Checker {
                    slots: &self.slots,
                    hca: self.reservation.hca,
                    limits: &self.limits,
                    landing: self.landing.as_deref(),
                };
                let refused = match &submission.operation {
                    Operation::Recv { local } => match checker.receive(local) {
                        Ok((request, slot)) => return self.enter_receive(submission, request, slot, scratch),
                        Err(refused) => refused,
                    },
                    _ => {
                        let at = scratch.sends.len();
                        scratch.sends.push(BLANK);
                        let Some(request) = scratch.sends.last_mut() else { return };
                        match checker.send(submission, request) {
                            Ok(slot) => return self.enter_send(submission, slot, at, scratch),
                            Err(refused) => {
                                scratch.sends.truncate(at);
                                refused
                            }
                        }
                    }
                };
                self.refuse(submission.wr_id, CompletionOpcode::of(&submission.operation), refused);
            }
        }
    }

    /// Enters the send at a place of the batch in the books.
    fn enter_send(&mut self, submission: &Submission, slot: u32, at: usize, scratch: &mut Scratch) {
        match self.push(Record::of(submission, slot, None)) {
            Some(position) => {
                let wr_id = self.tag.wr_id(Queue::Send, position);
                scratch.sends.iter_mut().skip(at).for_each(|request| request.wr_id = wr_id);
            }
            None => scratch.sends.truncate(at),
        }
    }

    fn enter_receive(&mut self, submission: &Submission, request: ReceiveRequest, slot: u32, scratch: &mut Scratch) {
        if let Some(position) = self.push(Record::of(submission, slot, None)) {
            let wr_id = self.tag.wr_id(Queue::Receive, position);
            scratch.receives.push(ReceiveRequest { wr_id, ..request });
        }
    }

    fn refuse(&mut self, wr_id: u64, opcode: CompletionOpcode, refused: Refused) {
        let outcome = Outcome::failed(refused.status(), refused.detail());
        self.push(Record { wr_id, opcode, signaled: true, slot: NO_SLOT, outcome: Some(outcome) });
        self.counters.refused.add(1);
    }

    /// The ring admits no more than the books hold, so there always is a position.
    fn push(&mut self, record: Record) -> Option<u32> {
        let queue = record.opcode.queue();
        let position = self.ledger(queue).push(record);
        debug_assert!(position.is_some(), "the ring admitted more than its depth");
        if position.is_none() && record.slot != NO_SLOT {
            self.slots.leave(record.slot, queue == Queue::Receive);
        }
        position
    }

    fn post_receives(&mut self, requests: &[ReceiveRequest], turn: &mut Turn) {
        let mut rest = requests;
        while !rest.is_empty() {
            let Some(parts) = &mut self.parts else { break };
            let Err((taken, why)) = parts.work.post_recv(rest) else { break };
            let Some((refused, after)) = rest.get(taken..).and_then(<[_]>::split_first) else { break };
            self.not_posted(refused.wr_id, why, turn);
            rest = after;
        }
    }

    fn post_sends(&mut self, requests: &[WorkRequest], turn: &mut Turn) {
        let mut rest = requests;
        while !rest.is_empty() {
            let Some(parts) = &mut self.parts else { break };
            let Err((taken, why)) = parts.work.post_send(rest) else {
                self.was_connected = true;
                break;
            };
            self.was_connected |= taken > 0;
            let Some((refused, after)) = rest.get(taken..).and_then(<[_]>::split_first) else { break };
            self.not_posted(refused.wr_id, why, turn);
            rest = after;
        }
    }

    /// The provider would not take a request that passed our checks.
    fn not_posted(&mut self, wr_id: u64, why: PostError, turn: &mut Turn) {
        let (_, queue, position) = Tag::decode(wr_id);
        let refused = |reason: RefusalReason| Outcome::failed(Status::Refused, reason.code());
        let outcome = match why {
            PostError::BadState if queue == Queue::Send && !self.was_connected && !self.failed => {
                refused(RefusalReason::NotConnected)
            }
            PostError::BadState => Outcome::failed(Status::WrFlushErr, 0),
            PostError::Unsupported => refused(RefusalReason::Unsupported),
            PostError::Gone => Outcome::failed(Status::FatalErr, 0),
            _ => refused(RefusalReason::Provider),
        };
        if outcome.status != Status::Refused {
            self.note_failure(outcome.status, &mut turn.failure);
        }
        self.settle(queue, position, outcome);
    }

    /// A completion of the HCA. False if it fits no posted request.
    pub(crate) fn completed(
        &mut self,
        queue: Queue,
        position: u32,
        completion: &WorkCompletion,
        failure: &mut Option<Status>,
    ) -> bool {
        let outcome = outcome_of(queue, completion);
        if !self.settle(queue, position, outcome) {
            return false;
        }
        if outcome.status != Status::Success {
            self.note_failure(outcome.status, failure);
        }
        self.emit();
        true
    }

    fn note_failure(&mut self, status: Status, failure: &mut Option<Status>) {
        if !self.failed {
            self.failed = true;
            *failure = Some(status);
        }
    }

    fn settle(&mut self, queue: Queue, position: u32, outcome: Outcome) -> bool {
        let Some(slot) = self.ledger(queue).settle(position, outcome) else {
            return false;
        };
        match outcome.status {
            Status::Success => self.counters.completed.add(1),
            Status::Refused => self.counters.refused.add(1),
            _ => self.counters.failed.add(1),
        }
        // Last, since it may tell a waiter, who then finds all else done.
        if slot != NO_SLOT {
            self.slots.leave(slot, queue == Queue::Receive);
        }
        true
    }

    fn ledger(&mut self, queue: Queue) -> &mut Ledger {
        match queue {
            Queue::Send => &mut self.sends,
            Queue::Receive => &mut self.receives,
        }
    }

    /// Hands what has ended to the ring, each queue in its own order.
    fn emit(&mut self) {
        let qp_num = self.qp_num;
        for (queue, ledger) in [(Queue::Send, &mut self.sends), (Queue::Receive, &mut self.receives)] {
            while let Some((record, outcome)) = ledger.pop_ended() {
                let Some(ring) = &mut self.ring else { continue };
                let silent = queue == Queue::Send && !record.signaled && outcome.status == Status::Success;
                let ended = if silent {
                    ring.retire(queue)
                } else {
                    self.staged = true;
                    ring.complete(&record.completion(&outcome, qp_num))
                };
                debug_assert!(ended.is_ok(), "the books hold what the ring has outstanding");
            }
        }
    }

    /// Makes completions visible. One futex wake if the client sleeps.
    pub(crate) fn publish(&mut self) {
        if !std::mem::take(&mut self.staged) {
            return;
        }
        // The completions are visible even if the kernel refused the wake, which it never does for a
        // word that is mapped.
        if let Some(Ok(true)) = self.ring.as_mut().map(BrokerRing::publish) {
            self.counters.wakes.add(1);
        }
    }

    /// Before the thread sleeps; false if there is something to take.
    pub(crate) fn prepare_sleep(&mut self) -> Result<bool, Corrupt> {
        match &mut self.ring {
            Some(ring) if !self.closing => ring.prepare_sleep(),
            _ => Ok(true),
        }
    }

    /// After the thread slept.
    pub(crate) fn finish_sleep(&mut self) {
        if let Some(ring) = &mut self.ring {
            ring.finish_sleep();
        }
    }

    /// Starts the way to ERR; what is posted has until `deadline` to flush. False if it was on its way.
    pub(crate) fn stop(&mut self, deadline: Instant, inbox: &Arc<Inbox>) -> bool {
        self.failed = true;
        if self.deadline.is_some() {
            return false;
        }
        self.deadline = Some(deadline);
        if let Some(parts) = &self.parts {
            self.cold.send(Job::ToError(Arc::clone(&parts.control), self.id, Arc::clone(inbox)));
        }
        true
    }

    /// Gives up the HCA's side: what is posted ends as `status` for the client, and holds its slots
    /// until the queue pair is destroyed.
    pub(crate) fn abandon(&mut self, status: Status) {
        let held = self.give_up(status);
        if let Some(parts) = self.parts.take() {
            self.cold.send(Job::Destroy(Box::new(Destroyed { parts, held, landing: self.landing.take() })));
        }
        self.publish();
    }

    fn give_up(&mut self, status: Status) -> Held {
        let mut slots = Vec::new();
        let outcome = Outcome::failed(status, 0);
        for (receive, ledger) in [(false, &mut self.sends), (true, &mut self.receives)] {
            for position in ledger.positions() {
                let Some(slot) = ledger.settle(position, outcome) else { continue };
                self.counters.failed.add(1);
                if slot != NO_SLOT {
                    slots.push((slot, receive));
                }
            }
        }
        self.emit();
        Held { table: Arc::clone(&self.slots), slots }
    }

    /// The client broke the protocol: its ring is closed for good.
    pub(crate) fn close_ring(&mut self) {
        self.publish();
        if let Some(Err(reason)) = self.ring.take().map(BrokerRing::close) {
            tracing::warn!(queue_pair = %self.id, %reason, "client of a corrupt ring was not woken");
        }
    }

    /// No more is taken; the queue pair ends once posted work has.
    pub(crate) fn close(&mut self) {
        self.closing = true;
    }

    /// Whether all that keeps a closing queue pair has ended.
    pub(crate) fn may_end(&self) -> bool {
        self.closing && !self.has_posted()
    }

    /// Whether the HCA has work of it.
    pub(crate) fn has_posted(&self) -> bool {
        self.sends.open() + self.receives.open() > 0
    }

    /// When posted work that has not flushed is given up.
    pub(crate) fn drain_deadline(&self) -> Option<Instant> {
        self.deadline.filter(|_| self.has_posted())
    }

    /// Whether posted work, or posted receives alone, use `slot` of `table`.
    pub(crate) fn uses(&self, table: &Arc<SlotTable>, slot: u32, receives_only: bool) -> bool {
        Arc::ptr_eq(&self.slots, table) && (self.receives.uses(slot) || (!receives_only && self.sends.uses(slot)))
    }

    /// Leaves the thread; its end is finished where blocking is allowed.
    pub(crate) fn end(mut self, registry: Arc<Registry>) {
        let held = self.give_up(Status::WrFlushErr);
        self.publish();
        let Self { id, doorbell, reservation, ring, parts, cold, landing, .. } = self;
        let hardware = parts.map(|parts| Destroyed { parts, held, landing });
        cold.send(Job::End(Box::new(Ended { id, hardware, ring, doorbell, reservation, registry })));
    }
}
