//! From a ring entry to a work request: what a queue pair may be asked for, checked once, on a copy.

use gdrd_hal::{
    AtomicScope, HcaCapabilities, LocalSpan, MAX_INLINE_BYTES, Opcode, QueuePairConfig, QueuePairType, ReceiveRequest,
    RemoteSpan, WorkRequest,
};
use gdrd_ring::{self as ring, Operation, RefusalReason, Source, Submission, SubmissionFlags, Submitted};

use super::landing::FlushLanding;
use super::ledger::NO_SLOT;
use super::refusal::Refused;
use super::slots::{HcaIndex, SlotTable, Wanted};

/// Remote addresses of atomics are multiples of this (InfiniBand 9.4.5.1).
const ATOMIC_ALIGNMENT: u64 = 8;

/// What a queue pair and its HCA can carry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueuePairLimits {
    /// Type.
    pub qp_type: QueuePairType,
    /// Longest inline payload, bytes.
    pub max_inline_bytes: u32,
    /// Longest message, bytes.
    pub max_message_bytes: u64,
    /// Whether fetch-add and compare-swap exist.
    pub atomics: bool,
}

impl QueuePairLimits {
    /// Limits of a queue pair made with `config` on an HCA of `capabilities`.
    #[must_use]
    pub fn new(capabilities: &HcaCapabilities, config: &QueuePairConfig) -> Self {
        Self {
            qp_type: config.qp_type,
            max_inline_bytes: config.inline_bytes.min(capabilities.max_inline_bytes),
            max_message_bytes: capabilities.max_message_bytes,
            atomics: capabilities.atomics != AtomicScope::None,
        }
    }
}

/// Against what requests of one queue pair are checked.
#[derive(Debug)]
pub(crate) struct Checker<'a> {
    pub(crate) slots: &'a SlotTable,
    pub(crate) hca: HcaIndex,
    pub(crate) limits: &'a QueuePairLimits,
    pub(crate) landing: Option<&'a FlushLanding>,
}

/// A send without operands.
///
/// Every request is signalled to the HCA, whatever the client asked for: so a lease's last silent write is known to have
/// ended without waiting for a request after it.
pub(crate) const BLANK: WorkRequest = WorkRequest {
    wr_id: 0,
    opcode: Opcode::Send,
    signaled: true,
    fence: false,
    local: LocalSpan { addr: 0, len_bytes: 0, lkey: 0 },
    remote: RemoteSpan { addr: 0, rkey: 0 },
    imm: 0,
    operand: 0,
    compare: 0,
    inline_len: 0,
    inline: [0; MAX_INLINE_BYTES],
};

impl Checker<'_> {
    /// Checks a receive and counts it in on its slot. After `Ok` with a slot other than [`NO_SLOT`], [`SlotTable::leave`]
    /// must follow once.
    pub(crate) fn receive(&self, local: &ring::LocalSpan) -> Result<(ReceiveRequest, u32), Refused> {
        let (local, slot) = self.local(local, true, true)?;
        Ok((ReceiveRequest { wr_id: 0, local }, slot))
    }

    /// The same of anything else, written into a blank request: it is long, and so made where it is posted from.
    pub(crate) fn send(&self, submission: &Submission, into: &mut WorkRequest) -> Result<u32, Refused> {
        let operation = &submission.operation;
        self.check_type(operation)?;
        into.fence = submission.flags.contains(SubmissionFlags::FENCE);
        match operation {
            Operation::Write { source, remote, imm } => {
                into.opcode = if imm.is_some() { Opcode::WriteImm } else { Opcode::Write };
                into.imm = imm.unwrap_or(0);
                into.remote = span(*remote);
                self.outgoing(source, into)
            }
            Operation::Send { source, imm } => {
                into.opcode = if imm.is_some() { Opcode::SendImm } else { Opcode::Send };
                into.imm = imm.unwrap_or(0);
                self.outgoing(source, into)
            }
            Operation::Read { local, remote } => {
                check_remote(remote.iova, local.len_bytes)?;
                into.opcode = Opcode::Read;
                into.remote = span(*remote);
                self.place(local, true, into)
            }
            Operation::FetchAdd { local, remote, add } => {
                into.opcode = Opcode::FetchAdd;
                into.operand = *add;
                self.atomic(local, *remote, into)
            }
            Operation::CompareSwap { local, remote, compare, swap } => {
                into.opcode = Opcode::CompareSwap;
                (into.operand, into.compare) = (*swap, *compare);
                self.atomic(local, *remote, into)
            }
            Operation::Flush { remote, len_bytes } => {
                check_remote(remote.iova, *len_bytes)?;
                let landing = self.landing.ok_or(RefusalReason::Unsupported)?;
                into.opcode = Opcode::Flush;
                (into.local, into.remote) = (landing.span(), span(*remote));
                Ok(NO_SLOT)
            }
            Operation::Recv { .. } => Err(RefusalReason::Malformed.into()),
        }
    }

    /// UD carries sends only (ibv_post_send(3), table of transports).
    fn check_type(&self, operation: &Operation) -> Result<(), Refused> {
        match (self.limits.qp_type, operation) {
            (QueuePairType::Rc, _) | (_, Operation::Send { .. }) => Ok(()),
            _ => Err(RefusalReason::Unsupported.into()),
        }
    }

    fn outgoing(&self, source: &Source, into: &mut WorkRequest) -> Result<u32, Refused> {
        match source {
            Source::Local(local) => {
                check_remote(into.remote.addr, local.len_bytes)?;
                self.place(local, false, into)
            }
            Source::Inline(data) => {
                let payload = data.as_slice();
                let too_long = RefusalReason::InlineTooLong;
                let len = u8::try_from(payload.len()).map_err(|_| too_long)?;
                if u32::from(len) > self.limits.max_inline_bytes {
                    return Err(too_long.into());
                }
                check_remote(into.remote.addr, u32::from(len))?;
                into.inline.get_mut(..payload.len()).ok_or(too_long)?.copy_from_slice(payload);
                into.inline_len = len;
                Ok(NO_SLOT)
            }
        }
    }

    fn atomic(
        &self,
        local: &ring::LocalSpan,
        remote: ring::RemoteSpan,
        into: &mut WorkRequest,
    ) -> Result<u32, Refused> {
        if !self.limits.atomics {
            return Err(RefusalReason::Unsupported.into());
        }
        if !remote.iova.is_multiple_of(ATOMIC_ALIGNMENT) {
            return Err(RefusalReason::Misaligned.into());
        }
        check_remote(remote.iova, local.len_bytes)?;
        into.remote = span(remote);
        self.place(local, true, into)
    }

    fn place(&self, local: &ring::LocalSpan, local_write: bool, into: &mut WorkRequest) -> Result<u32, Refused> {
        let (local, slot) = self.local(local, local_write, false)?;
        into.local = local;
        Ok(slot)
    }

    /// The last check of each request, since it counts it in.
    fn local(&self, local: &ring::LocalSpan, local_write: bool, receive: bool) -> Result<(LocalSpan, u32), Refused> {
        if local.len_bytes == 0 {
            // As `num_sge` 0 in verbs: no memory, so no registration.
            return Ok((LocalSpan::default(), NO_SLOT));
        }
        if u64::from(local.len_bytes) > self.limits.max_message_bytes {
            return Err(RefusalReason::MessageTooLong.into());
        }
        let admitted = self.slots.admit(&Wanted {
            slot: local.slot,
            generation: local.generation,
            offset: local.offset,
            len_bytes: local.len_bytes,
            hca: self.hca,
            local_write,
            receive,
        })?;
        Ok((LocalSpan { lkey: admitted.lkey, addr: admitted.addr, len_bytes: local.len_bytes }, local.slot))
    }
}

/// The peer's key and range are the peer's to check, but no range wraps around the address space.
fn check_remote(iova: u64, len_bytes: u32) -> Result<(), Refused> {
    match iova.checked_add(u64::from(len_bytes)) {
        Some(_) => Ok(()),
        None => Err(RefusalReason::MessageTooLong.into()),
    }
}

fn span(remote: ring::RemoteSpan) -> RemoteSpan {
    RemoteSpan { rkey: remote.rkey, addr: remote.iova }
}

/// Bytes that a request has the HCA move. A posted receive moves none: what lands in it is its sender's to pay for.
pub(crate) fn payload_bytes(submitted: &Submitted) -> u64 {
    let Submitted::Request(submission) = submitted else { return 0 };
    match &submission.operation {
        Operation::Write { source: Source::Local(local), .. }
        | Operation::Send { source: Source::Local(local), .. }
        | Operation::Read { local, .. }
        | Operation::FetchAdd { local, .. }
        | Operation::CompareSwap { local, .. } => local.len_bytes.into(),
        Operation::Write { source: Source::Inline(data), .. }
        | Operation::Send { source: Source::Inline(data), .. } => u64::try_from(data.as_slice().len()).unwrap_or(0),
        Operation::Recv { .. } | Operation::Flush { .. } => 0,
    }
}
