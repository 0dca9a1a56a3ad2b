//! The books of one queue: what was admitted, in order, and how each ended.
//!
//! Requests may end out of order (a refused one ends at once), but leave strictly in order of
//! admission, so the client sees its completions in the order of its posts.

use gdrd_ring::{Completion, CompletionOpcode, Status, Submission, SubmissionFlags};

/// No registration slot is used: inline payload, no payload, refused.
pub(crate) const NO_SLOT: u32 = u32::MAX;

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub(crate) status: Status,
    /// Another opcode than the request's: a receive that a write with immediate ended.
    pub(crate) opcode: Option<CompletionOpcode>,
    pub(crate) byte_len: u32,
    pub(crate) imm: Option<u32>,
    pub(crate) vendor_error: u32,
}

impl Outcome {
    pub(crate) fn failed(status: Status, vendor_error: u32) -> Self {
        Self { status, opcode: None, byte_len: 0, imm: None, vendor_error }
    }
}

/// One admitted request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Record {
    /// The client's number.
    pub(crate) wr_id: u64,
    pub(crate) opcode: CompletionOpcode,
    /// The client wants to hear of success.
    pub(crate) signaled: bool,
    /// Registration slot counted in, or [`NO_SLOT`].
    pub(crate) slot: u32,
    /// How it ended; `None` while the HCA has it.
    pub(crate) outcome: Option<Outcome>,
}

impl Record {
    pub(crate) fn of(submission: &Submission, slot: u32, outcome: Option<Outcome>) -> Self {
        Self {
            wr_id: submission.wr_id,
            opcode: CompletionOpcode::of(&submission.operation),
            signaled: submission.flags.contains(SubmissionFlags::SIGNALED),
            slot,
            outcome,
        }
    }

    /// What the client is told of it.
    pub(crate) fn completion(&self, outcome: &Outcome, qp_num: u32) -> Completion {
        Completion {
            wr_id: self.wr_id,
            status: outcome.status,
            opcode: outcome.opcode.unwrap_or(self.opcode),
            byte_len: outcome.byte_len,
            imm: outcome.imm,
            qp_num,
            vendor_error: outcome.vendor_error,
        }
    }
}

/// A bounded queue of records by position.
#[derive(Debug)]
pub(crate) struct Ledger {
    records: Box<[Record]>,
    mask: u32,
    head: u32,
    tail: u32,
    /// Records without outcome.
    open: u32,
}

impl Ledger {
    /// Books for at most `depth` requests.
    pub(crate) fn new(depth: u32) -> Self {
        let capacity = depth.max(1).next_power_of_two();
        let empty =
            Record { wr_id: 0, opcode: CompletionOpcode::Unknown, signaled: false, slot: NO_SLOT, outcome: None };
        Self { records: vec![empty; capacity as usize].into(), mask: capacity - 1, head: 0, tail: 0, open: 0 }
    }

    /// Enters a request and returns its position; `None` when full, which the ring's depth rules out.
    pub(crate) fn push(&mut self, record: Record) -> Option<u32> {
        if self.tail.wrapping_sub(self.head) > self.mask {
            return None;
        }
        let position = self.tail;
        self.open += u32::from(record.outcome.is_none());
        *self.records.get_mut((position & self.mask) as usize)? = record;
        self.tail = self.tail.wrapping_add(1);
        Some(position)
    }

    /// Notes how the request at `position` ended and returns the slot that it used. `None` for a
    /// position that is not open: then nothing is noted.
    pub(crate) fn settle(&mut self, position: u32, outcome: Outcome) -> Option<u32> {
        if position.wrapping_sub(self.head) >= self.tail.wrapping_sub(self.head) {
            return None;
        }
        let record = self.records.get_mut((position & self.mask) as usize)?;
        if record.outcome.is_some() {
            return None;
        }
        record.outcome = Some(outcome);
        self.open -= 1;
        Some(std::mem::replace(&mut record.slot, NO_SLOT))
    }

    /// The oldest request, if it has ended; it leaves the books.
    pub(crate) fn pop_ended(&mut self) -> Option<(Record, Outcome)> {
        if self.head == self.tail {
            return None;
        }
        let record = *self.records.get((self.head & self.mask) as usize)?;
        let outcome = record.outcome?;
        self.head = self.head.wrapping_add(1);
        Some((record, outcome))
    }

    /// Requests that the HCA has.
    pub(crate) fn open(&self) -> u32 {
        self.open
    }

    /// Positions in the books, oldest first.
    pub(crate) fn positions(&self) -> impl Iterator<Item = u32> + use<> {
        let (head, count) = (self.head, self.tail.wrapping_sub(self.head));
        (0..count).map(move |step| head.wrapping_add(step))
    }

    /// Whether a request that the HCA has uses `slot`.
    pub(crate) fn uses(&self, slot: u32) -> bool {
        self.positions()
            .filter_map(|position| self.records.get((position & self.mask) as usize))
            .any(|record| record.outcome.is_none() && record.slot == slot)
    }
}
