//! What a client has posted and not seen end, so that each request can be ended when its broker is gone for good.
//!
//! Owner of state: the client's ring alone. Bounded by the depths of the queues; it allocates at open and never after.

use std::collections::VecDeque;

use crate::completion::{Completion, CompletionOpcode, Status};
use crate::geometry::Geometry;
use crate::submission::{Queue, Submission};

#[derive(Debug)]
pub(crate) struct Unanswered {
    sends: VecDeque<(u64, CompletionOpcode)>,
    receives: VecDeque<(u64, CompletionOpcode)>,
}

impl Unanswered {
    pub(crate) fn new(geometry: Geometry) -> Self {
        let room = |depth: u32| VecDeque::with_capacity(depth as usize);
        Self { sends: room(geometry.sq_depth()), receives: room(geometry.rq_depth()) }
    }

    pub(crate) fn posted(&mut self, submission: &Submission) {
        let entry = (submission.wr_id, CompletionOpcode::of(&submission.operation));
        match submission.operation.queue() {
            Queue::Send => self.sends.push_back(entry),
            Queue::Receive => self.receives.push_back(entry),
        }
    }

    /// `count` requests of the queue have ended, the oldest first. More than there are is the broker's lie, and harmless.
    pub(crate) fn ended(&mut self, queue: Queue, count: u32) {
        let list = match queue {
            Queue::Send => &mut self.sends,
            Queue::Receive => &mut self.receives,
        };
        let count = (count as usize).min(list.len());
        list.drain(..count);
    }

    /// Ends the oldest request as one whose outcome nobody knows: sends first, then receives.
    pub(crate) fn give_up_one(&mut self) -> Option<Completion> {
        let (wr_id, opcode) = self.sends.pop_front().or_else(|| self.receives.pop_front())?;
        Some(Completion::new(wr_id, opcode, Status::OutcomeUnknown, 0))
    }
}
