//! From a ring entry to a work request: what a queue pair may be asked for, checked once, on a copy.

use gdrd_hal::{
    AtomicScope, HcaCapabilities, LocalSpan, MAX_INLINE_BYTES, Opcode, QueuePairConfig, QueuePairType, ReceiveRequest,
    RemoteSpan, WorkRequest,
};
use gdrd_ring::{self as ring, Operation, RefusalReason, Source, Submission, SubmissionFlags};

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

/// A request that passed, with the slot that it was counted in on.
#[derive(Debug)]
pub(crate) enum Prepared {
    Send(WorkRequest, u32),
    Receive(ReceiveRequest, u32),
}

/// A send without operands, its `wr_id` still to be set.
fn blank(opcode: Opcode) -> WorkRequest {
    WorkRequest {
        wr_id: 0,
        opcode,
        // Every request is signalled to the HCA, whatever the client asked for: so a lease's last
        // silent write is known to have ended without waiting for a request after it.
        signaled: true,
        fence: false,
        local: LocalSpan::default(),
        remote: RemoteSpan::default(),
        imm: 0,
        operand: 0,
        compare: 0,
        inline_len: 0,
        inline: [0; MAX_INLINE_BYTES],
    }
}

impl Checker<'_> {
    /// Checks `submission` and counts it in on its slot. After `Ok` with a slot other than [`NO_SLOT`],
    /// [`SlotTable::leave`] must follow once.
    pub(crate) fn prepare(&self, submission: &Submission) -> Result<Prepared, Refused> {
        if let Operation::Recv { local } = &submission.operation {
            let (local, slot) = self.local(local, true, true)?;
            return Ok(Prepared::Receive(ReceiveRequest { wr_id: 0, local }, slot));
        }
        let (mut request, slot) = self.send(&submission.operation)?;
        request.fence = submission.flags.contains(SubmissionFlags::FENCE);
        Ok(Prepared::Send(request, slot))
    }

    fn send(&self, operation: &Operation) -> Result<(WorkRequest, u32), Refused> {
        self.check_type(operation)?;
        match *operation {
            Operation::Write { ref source, remote, imm } => {
                let opcode = if imm.is_some() { Opcode::WriteImm } else { Opcode::Write };
                let request = WorkRequest { imm: imm.unwrap_or(0), ..blank(opcode) };
                self.outgoing(WorkRequest { remote: span(remote), ..request }, source)
            }
            Operation::Send { ref source, imm } => {
                let opcode = if imm.is_some() { Opcode::SendImm } else { Opcode::Send };
                self.outgoing(WorkRequest { imm: imm.unwrap_or(0), ..blank(opcode) }, source)
            }
            Operation::Read { ref local, remote } => {
                check_remote(remote.iova, local.len_bytes)?;
                let (local, slot) = self.local(local, true, false)?;
                Ok((WorkRequest { local, remote: span(remote), ..blank(Opcode::Read) }, slot))
            }
            Operation::FetchAdd { ref local, remote, add } => {
                let request = WorkRequest { operand: add, ..blank(Opcode::FetchAdd) };
                self.atomic(request, local, remote)
            }
            Operation::CompareSwap { ref local, remote, compare, swap } => {
                let request = WorkRequest { operand: swap, compare, ..blank(Opcode::CompareSwap) };
                self.atomic(request, local, remote)
            }
            Operation::Flush { remote, len_bytes } => {
                check_remote(remote.iova, len_bytes)?;
                let landing = self.landing.ok_or(RefusalReason::Unsupported)?;
                let local = landing.span();
                Ok((WorkRequest { local, remote: span(remote), ..blank(Opcode::Flush) }, NO_SLOT))
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

    fn outgoing(&self, mut request: WorkRequest, source: &Source) -> Result<(WorkRequest, u32), Refused> {
        match source {
            Source::Local(local) => {
                check_remote(request.remote.addr, local.len_bytes)?;
                let (local, slot) = self.local(local, false, false)?;
                Ok((WorkRequest { local, ..request }, slot))
            }
            Source::Inline(data) => {
                let payload = data.as_slice();
                let too_long = RefusalReason::InlineTooLong;
                let len = u8::try_from(payload.len()).map_err(|_| too_long)?;
                if u32::from(len) > self.limits.max_inline_bytes {
                    return Err(too_long.into());
                }
                check_remote(request.remote.addr, u32::from(len))?;
                request.inline.get_mut(..payload.len()).ok_or(too_long)?.copy_from_slice(payload);
                request.inline_len = len;
                Ok((request, NO_SLOT))
            }
        }
    }

    fn atomic(
        &self,
        request: WorkRequest,
        local: &ring::LocalSpan,
        remote: ring::RemoteSpan,
    ) -> Result<(WorkRequest, u32), Refused> {
        if !self.limits.atomics {
            return Err(RefusalReason::Unsupported.into());
        }
        if !remote.iova.is_multiple_of(ATOMIC_ALIGNMENT) {
            return Err(RefusalReason::Misaligned.into());
        }
        check_remote(remote.iova, local.len_bytes)?;
        let (local, slot) = self.local(local, true, false)?;
        Ok((WorkRequest { local, remote: span(remote), ..request }, slot))
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
