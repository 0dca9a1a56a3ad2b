//! From the HCA's words to the ring's.

use gdrd_hal::{Opcode, WorkCompletion, WorkStatus};
use gdrd_ring::{CompletionOpcode, Queue, Status};

use super::ledger::Outcome;

/// A status of the HCA as the client reads it.
pub(crate) fn status_of(status: WorkStatus) -> Status {
    match status {
        WorkStatus::Success => Status::Success,
        WorkStatus::LocalLength => Status::LocLenErr,
        WorkStatus::LocalProtection => Status::LocProtErr,
        WorkStatus::LocalQueuePairOperation => Status::LocQpOpErr,
        WorkStatus::Flushed => Status::WrFlushErr,
        WorkStatus::RemoteInvalidRequest => Status::RemInvReqErr,
        WorkStatus::RemoteAccess => Status::RemAccessErr,
        WorkStatus::RemoteOperation => Status::RemOpErr,
        WorkStatus::RetryExceeded => Status::RetryExcErr,
        WorkStatus::ReceiverNotReady => Status::RnrRetryExcErr,
        WorkStatus::Fatal => Status::FatalErr,
        WorkStatus::Other(code) => other(code),
        _ => Status::GeneralErr,
    }
}

/// A number of the provider: never success, never one of gdrd's own.
fn other(code: u32) -> Status {
    match u8::try_from(code) {
        Ok(code @ 1..64) => Status::from_code(code),
        _ => Status::GeneralErr,
    }
}

/// What the client is told of a completion. Fields that verbs leaves undefined on failure are left out.
pub(crate) fn outcome_of(queue: Queue, completion: &WorkCompletion) -> Outcome {
    let status = status_of(completion.status);
    if status != Status::Success {
        return Outcome::failed(status, completion.vendor_error);
    }
    let moved = match completion.opcode {
        Opcode::Read | Opcode::FetchAdd | Opcode::CompareSwap => true,
        _ => queue == Queue::Receive,
    };
    Outcome {
        status,
        opcode: (completion.opcode == Opcode::RecvWriteImm).then_some(CompletionOpcode::RecvWriteImm),
        byte_len: if moved { completion.byte_len } else { 0 },
        imm: completion.imm.filter(|_| queue == Queue::Receive),
        vendor_error: 0,
    }
}
