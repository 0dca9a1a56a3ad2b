//! Send side: admission, order, waiting, completion.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use gdrd_hal::{
    AtomicScope, MAX_INLINE_BYTES, Opcode, PostError, QueuePairState, QueuePairType, WorkRequest, WorkStatus,
};

use super::attempt::Attempt;
use super::{Aftermath, QueuePairCore, Reason, SendSide, Wait};
use crate::completion::Frees;
use crate::sync::lock;

impl QueuePairCore {
    /// ibv_post_send(3): takes requests up to the first that is refused, and executes what can be executed.
    pub(super) fn post_send(self: &Arc<Self>, requests: &[WorkRequest]) -> Result<(), (usize, PostError)> {
        let mut after = Aftermath::default();
        let result = self.take_sends(requests, &mut after);
        after.run(&self.hca);
        result
    }

    fn take_sends(self: &Arc<Self>, requests: &[WorkRequest], after: &mut Aftermath) -> Result<(), (usize, PostError)> {
        let mut send = lock(&self.send);
        for (index, request) in requests.iter().enumerate() {
            self.admit(&send, request).map_err(|error| (index, error))?;
            send.posted += 1;
            if !send.pending.is_empty() || !self.is_rts() {
                send.pending.push_back(*request);
                self.run_pending(&mut send, after);
                continue;
            }
            // The usual way, without a stop in the queue.
            match self.attempt(&mut send, request, after) {
                Attempt::Done(result) => self.finish(&mut send, request, result),
                Attempt::Wait(reason) => {
                    send.pending.push_back(*request);
                    if self.wait(&mut send, reason).is_some() {
                        self.run_pending(&mut send, after);
                    }
                }
            }
        }
        Ok(())
    }

    fn admit(&self, send: &SendSide, request: &WorkRequest) -> Result<(), PostError> {
        if self.hca.is_gone() {
            return Err(PostError::Gone);
        }
        match self.state() {
            Some(QueuePairState::Rts | QueuePairState::Sqe | QueuePairState::Err) => {}
            _ => return Err(PostError::BadState),
        }
        if send.posted - self.credits.sends.load(Ordering::Acquire) >= u64::from(self.config.send_depth) {
            return Err(PostError::Full);
        }
        match self.can_express(request) {
            true => Ok(()),
            false => Err(PostError::Unsupported),
        }
    }

    fn can_express(&self, request: &WorkRequest) -> bool {
        let is_datagram = self.config.qp_type == QueuePairType::Ud;
        let opcode_fits = match request.opcode {
            Opcode::Send | Opcode::SendImm => true,
            Opcode::Write | Opcode::WriteImm | Opcode::Read | Opcode::Flush => !is_datagram,
            Opcode::FetchAdd | Opcode::CompareSwap => {
                !is_datagram && self.hca.capabilities.atomics != AtomicScope::None
            }
            _ => false,
        };
        let inline = usize::from(request.inline_len);
        let can_inline = matches!(request.opcode, Opcode::Send | Opcode::SendImm | Opcode::Write | Opcode::WriteImm);
        let inline_fits =
            inline <= MAX_INLINE_BYTES && u32::from(request.inline_len) <= self.config.inline_bytes && can_inline;
        opcode_fits && (inline == 0 || inline_fits)
    }

    /// Executes waiting sends from the head as far as they go.
    pub(super) fn run_pending(self: &Arc<Self>, send: &mut SendSide, after: &mut Aftermath) {
        while let Some(request) = send.pending.front().copied() {
            if !self.is_rts() {
                return self.flush_pending(send);
            }
            let result = match self.attempt(send, &request, after) {
                Attempt::Done(result) => result,
                Attempt::Wait(reason) => match self.wait(send, reason) {
                    None => return,
                    Some(status) => Err(status),
                },
            };
            send.pending.pop_front();
            send.wait = None;
            self.finish(send, &request, result);
        }
    }

    /// Keeps the head waiting; the status that it ends with once that took too long.
    fn wait(self: &Arc<Self>, send: &mut SendSide, reason: Reason) -> Option<WorkStatus> {
        let timing = &self.hca.fabric.timing;
        let (limit, status) = match reason {
            Reason::NoAnswer => (Some(timing.retry_exceeded), WorkStatus::RetryExceeded),
            Reason::NotReady => (timing.receiver_not_ready, WorkStatus::ReceiverNotReady),
        };
        let wait = match send.wait {
            Some(wait) if wait.reason == reason => wait,
            _ => Wait { reason, until: limit.and_then(|limit| Instant::now().checked_add(limit)) },
        };
        send.wait = Some(wait);
        let until = wait.until?;
        if until <= Instant::now() {
            return Some(status);
        }
        if !send.timed {
            send.timed = true;
            let weak = Arc::downgrade(self);
            self.hca.fabric.timer.schedule(until, weak);
        }
        None
    }

    /// Completes one executed send. A failure puts the queue pair in error and flushes the rest.
    fn finish(self: &Arc<Self>, send: &mut SendSide, request: &WorkRequest, result: Result<u32, WorkStatus>) {
        send.executed += 1;
        self.hca.count_op();
        match result {
            Ok(byte_len) if request.signaled => {
                let mut completion = self.completion(request.wr_id, request.opcode, WorkStatus::Success);
                completion.byte_len = byte_len;
                self.complete(completion, Frees::Sends(send.executed));
            }
            Ok(_) => {}
            Err(status) => {
                let completion = self.completion(request.wr_id, request.opcode, status);
                self.complete(completion, Frees::Sends(send.executed));
                self.fail_sends(send);
            }
        }
    }

    /// A datagram's send queue fails alone (SQE); a connection fails whole.
    fn fail_sends(self: &Arc<Self>, send: &mut SendSide) {
        if self.config.qp_type == QueuePairType::Ud {
            self.step(QueuePairState::Rts, QueuePairState::Sqe);
            self.flush_pending(send);
        } else {
            self.set_error();
            self.flush_pending(send);
            self.flush_receives();
        }
    }

    /// Completes all posted sends as flushed, in order.
    pub(super) fn flush_sends(self: &Arc<Self>) {
        self.flush_pending(&mut lock(&self.send));
    }

    fn flush_pending(self: &Arc<Self>, send: &mut SendSide) {
        send.wait = None;
        while let Some(request) = send.pending.pop_front() {
            send.executed += 1;
            let completion = self.completion(request.wr_id, request.opcode, WorkStatus::Flushed);
            self.complete(completion, Frees::Sends(send.executed));
        }
    }
}
