//! A request as both sides speak of it, and its form in shared memory.

use zerocopy::transmute;

use crate::abi::{self, INLINE_MAX_BYTES, SUBMISSION_WORDS, SubmissionEntry};

bitflags::bitflags! {
    /// How a request is carried out and reported (`ibv_send_flags`, ibv_post_send(3)).
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub struct SubmissionFlags: u8 {
        /// Success is reported too; without it only failure is. Receives are always reported.
        const SIGNALED = abi::FLAG_SIGNALED;
        /// Starts only when earlier reads and atomics of this queue pair have ended.
        const FENCE = abi::FLAG_FENCE;
        /// Asks for a solicited event at the peer; sends and write-imm only.
        const SOLICITED = abi::FLAG_SOLICITED;
    }
}

/// Which of a queue pair's two queues a request is counted in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Queue {
    /// All but receives.
    Send,
    /// Receives.
    Receive,
}

/// Bytes of a registration of this tenant on the queue pair's HCA.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocalSpan {
    /// The tenant's index of the registration.
    pub slot: u32,
    /// Its generation as the client was lent it; another one ends the request as STALE.
    pub generation: u64,
    /// Offset in the registration, in bytes.
    pub offset: u64,
    /// Length in bytes. With 0 no registration is looked at, as with `num_sge` 0 in verbs.
    pub len_bytes: u32,
}

/// Bytes at the peer.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct RemoteSpan {
    /// The peer's access key. A capability, so `Debug` leaves it out.
    pub rkey: u32,
    /// The address that the peer gave: its registration's iova plus the offset.
    pub iova: u64,
}

impl std::fmt::Debug for RemoteSpan {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("RemoteSpan").field("iova", &self.iova).finish_non_exhaustive()
    }
}

/// A payload too long to travel in the entry. The caller's fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{len_bytes} bytes of inline payload, at most {INLINE_MAX_BYTES} fit; send them from a registration")]
pub struct InlineTooLong {
    /// Length asked for.
    pub len_bytes: usize,
}

/// Payload that travels in the entry: at most [`INLINE_MAX_BYTES`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InlineData {
    len: u8,
    bytes: [u8; INLINE_MAX_BYTES],
}

impl InlineData {
    /// A copy of `payload`.
    ///
    /// # Errors
    /// [`InlineTooLong`].
    pub fn new(payload: &[u8]) -> Result<Self, InlineTooLong> {
        let too_long = InlineTooLong { len_bytes: payload.len() };
        let mut bytes = [0; INLINE_MAX_BYTES];
        bytes.get_mut(..payload.len()).ok_or(too_long)?.copy_from_slice(payload);
        let len = u8::try_from(payload.len()).map_err(|_| too_long)?;
        Ok(Self { len, bytes })
    }

    /// The payload.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len).min(INLINE_MAX_BYTES)]
    }
}

/// Where outgoing bytes come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// A registration.
    Local(LocalSpan),
    /// The entry itself.
    Inline(InlineData),
}

/// What is to be done. `imm` is the number that the peer's completion shows; it crosses the wire
/// in network byte order, which is the backend's affair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// RDMA write; with `imm` it consumes a receive of the peer.
    Write {
        /// What to write.
        source: Source,
        /// Where to.
        remote: RemoteSpan,
        /// Immediate value for the peer.
        imm: Option<u32>,
    },
    /// RDMA read.
    Read {
        /// Where to.
        local: LocalSpan,
        /// What to read.
        remote: RemoteSpan,
    },
    /// Send, into a receive of the peer.
    Send {
        /// What to send.
        source: Source,
        /// Immediate value for the peer.
        imm: Option<u32>,
    },
    /// Receive of one send or write-imm.
    Recv {
        /// Where a send's payload goes; a write-imm leaves it alone.
        local: LocalSpan,
    },
    /// Atomic fetch and add of 8 bytes; the old value is written to `local`.
    FetchAdd {
        /// Where the old value goes, 8 bytes.
        local: LocalSpan,
        /// The number, 8-byte aligned.
        remote: RemoteSpan,
        /// What to add.
        add: u64,
    },
    /// Atomic compare and swap of 8 bytes; the old value is written to `local`.
    CompareSwap {
        /// Where the old value goes, 8 bytes.
        local: LocalSpan,
        /// The number, 8-byte aligned.
        remote: RemoteSpan,
        /// Swap only if the number is this.
        compare: u64,
        /// The new number.
        swap: u64,
    },
    /// Ends when earlier writes to the range are visible in the peer's memory.
    Flush {
        /// Start of the range.
        remote: RemoteSpan,
        /// Length of the range in bytes.
        len_bytes: u32,
    },
}

impl Operation {
    /// The queue that it is counted in.
    #[must_use]
    #[inline]
    pub fn queue(&self) -> Queue {
        match self {
            Operation::Recv { .. } => Queue::Receive,
            _ => Queue::Send,
        }
    }
}

/// One request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Submission {
    /// The caller's own number; comes back in the completion.
    pub wr_id: u64,
    /// How it is carried out and reported.
    pub flags: SubmissionFlags,
    /// What is to be done.
    pub operation: Operation,
}

/// Why an entry is refused. It ends that request alone, with status REFUSED.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// No such operation in this version.
    #[error("opcode {0} is unknown in ring version {version}", version = abi::RING_VERSION)]
    Opcode(u8),
    /// A flag that is unknown, or means nothing for this operation.
    #[error("flags {flags:#04x} are not allowed with opcode {opcode}")]
    Flags {
        /// Opcode of the entry.
        opcode: u8,
        /// Flags of the entry.
        flags: u8,
    },
    /// A payload longer than the entry.
    #[error("inline payload of {0} bytes, at most {INLINE_MAX_BYTES} fit")]
    InlineLength(u32),
    /// An atomic whose local span is not 8 bytes.
    #[error("an atomic works on 8 bytes, not {0}")]
    AtomicLength(u32),
    /// A reserved field that is not 0: a newer client means something by it.
    #[error("a reserved field of the entry is not 0")]
    Reserved,
}

const ATOMIC_BYTES: u32 = 8;

impl Submission {
    /// The entry for shared memory.
    ///
    /// # Errors
    /// [`Refusal`] where the broker would refuse it.
    pub fn encode(&self) -> Result<[u64; SUBMISSION_WORDS], Refusal> {
        let entry = self.entry();
        check_flags(&entry)?;
        check_atomic(&entry)?;
        Ok(transmute!(entry))
    }

    /// Checks a private copy of an entry. Ranges, keys and generations are the engine's to check.
    ///
    /// # Errors
    /// [`Refusal`].
    #[inline]
    pub fn decode(words: [u64; SUBMISSION_WORDS]) -> Result<Self, Refusal> {
        let entry: SubmissionEntry = transmute!(words);
        if entry.reserved0 != 0 || entry.reserved1 != 0 {
            return Err(Refusal::Reserved);
        }
        check_flags(&entry)?;
        check_atomic(&entry)?;
        Ok(Self {
            wr_id: entry.wr_id,
            flags: SubmissionFlags::from_bits_truncate(entry.flags),
            operation: operation_of(&entry)?,
        })
    }

    fn entry(&self) -> SubmissionEntry {
        let mut entry = SubmissionEntry {
            opcode: 0,
            flags: self.flags.bits(),
            reserved0: 0,
            imm: 0,
            wr_id: self.wr_id,
            local_slot: 0,
            len_bytes: 0,
            local_generation: 0,
            local_offset: 0,
            remote_rkey: 0,
            reserved1: 0,
            remote_iova: 0,
            operand: 0,
            swap: 0,
            inline: [0; INLINE_MAX_BYTES],
        };
        match self.operation {
            Operation::Write { source, remote, imm } => {
                entry.opcode = if imm.is_some() { abi::OP_WRITE_IMM } else { abi::OP_WRITE };
                entry.imm = imm.unwrap_or(0);
                entry.put_source(&source);
                entry.put_remote(remote);
            }
            Operation::Send { source, imm } => {
                entry.opcode = if imm.is_some() { abi::OP_SEND_IMM } else { abi::OP_SEND };
                entry.imm = imm.unwrap_or(0);
                entry.put_source(&source);
            }
            Operation::Read { local, remote } => {
                entry.opcode = abi::OP_READ;
                entry.put_local(local);
                entry.put_remote(remote);
            }
            Operation::Recv { local } => {
                entry.opcode = abi::OP_RECV;
                entry.put_local(local);
            }
            Operation::FetchAdd { local, remote, add } => {
                entry.opcode = abi::OP_FETCH_ADD;
                entry.operand = add;
                entry.put_local(local);
                entry.put_remote(remote);
            }
            Operation::CompareSwap { local, remote, compare, swap } => {
                entry.opcode = abi::OP_COMPARE_SWAP;
                entry.operand = compare;
                entry.swap = swap;
                entry.put_local(local);
                entry.put_remote(remote);
            }
            Operation::Flush { remote, len_bytes } => {
                entry.opcode = abi::OP_FLUSH;
                entry.len_bytes = len_bytes;
                entry.put_remote(remote);
            }
        }
        entry
    }
}

impl SubmissionEntry {
    fn put_local(&mut self, local: LocalSpan) {
        self.local_slot = local.slot;
        self.local_generation = local.generation;
        self.local_offset = local.offset;
        self.len_bytes = local.len_bytes;
    }

    fn put_remote(&mut self, remote: RemoteSpan) {
        self.remote_rkey = remote.rkey;
        self.remote_iova = remote.iova;
    }

    fn put_source(&mut self, source: &Source) {
        match source {
            Source::Local(local) => self.put_local(*local),
            Source::Inline(data) => {
                self.flags |= abi::FLAG_INLINE;
                self.len_bytes = u32::from(data.len);
                self.inline = data.bytes;
            }
        }
    }

    #[inline]
    fn local(&self) -> LocalSpan {
        LocalSpan {
            slot: self.local_slot,
            generation: self.local_generation,
            offset: self.local_offset,
            len_bytes: self.len_bytes,
        }
    }

    #[inline]
    fn remote(&self) -> RemoteSpan {
        RemoteSpan { rkey: self.remote_rkey, iova: self.remote_iova }
    }

    #[inline]
    fn source(&self) -> Result<Source, Refusal> {
        if self.flags & abi::FLAG_INLINE == 0 {
            return Ok(Source::Local(self.local()));
        }
        let payload = usize::try_from(self.len_bytes)
            .ok()
            .and_then(|len| self.inline.get(..len))
            .and_then(|payload| InlineData::new(payload).ok());
        payload.map(Source::Inline).ok_or(Refusal::InlineLength(self.len_bytes))
    }
}

#[inline]
fn operation_of(entry: &SubmissionEntry) -> Result<Operation, Refusal> {
    let remote = entry.remote();
    Ok(match entry.opcode {
        abi::OP_WRITE | abi::OP_WRITE_IMM => Operation::Write {
            source: entry.source()?,
            remote,
            imm: (entry.opcode == abi::OP_WRITE_IMM).then_some(entry.imm),
        },
        abi::OP_SEND | abi::OP_SEND_IMM => {
            Operation::Send { source: entry.source()?, imm: (entry.opcode == abi::OP_SEND_IMM).then_some(entry.imm) }
        }
        abi::OP_READ => Operation::Read { local: entry.local(), remote },
        abi::OP_RECV => Operation::Recv { local: entry.local() },
        abi::OP_FETCH_ADD => Operation::FetchAdd { local: entry.local(), remote, add: entry.operand },
        abi::OP_COMPARE_SWAP => {
            Operation::CompareSwap { local: entry.local(), remote, compare: entry.operand, swap: entry.swap }
        }
        abi::OP_FLUSH => Operation::Flush { remote, len_bytes: entry.len_bytes },
        unknown => return Err(Refusal::Opcode(unknown)),
    })
}

#[inline]
fn check_flags(entry: &SubmissionEntry) -> Result<(), Refusal> {
    use abi::{FLAG_FENCE, FLAG_INLINE, FLAG_SIGNALED, FLAG_SOLICITED};
    let allowed = match entry.opcode {
        abi::OP_WRITE => FLAG_SIGNALED | FLAG_FENCE | FLAG_INLINE,
        abi::OP_WRITE_IMM | abi::OP_SEND | abi::OP_SEND_IMM => {
            FLAG_SIGNALED | FLAG_FENCE | FLAG_INLINE | FLAG_SOLICITED
        }
        abi::OP_RECV => FLAG_SIGNALED,
        abi::OP_READ | abi::OP_FETCH_ADD | abi::OP_COMPARE_SWAP | abi::OP_FLUSH => FLAG_SIGNALED | FLAG_FENCE,
        unknown => return Err(Refusal::Opcode(unknown)),
    };
    match entry.flags & !allowed {
        0 => Ok(()),
        _ => Err(Refusal::Flags { opcode: entry.opcode, flags: entry.flags }),
    }
}

#[inline]
fn check_atomic(entry: &SubmissionEntry) -> Result<(), Refusal> {
    match entry.opcode {
        abi::OP_FETCH_ADD | abi::OP_COMPARE_SWAP if entry.len_bytes != ATOMIC_BYTES => {
            Err(Refusal::AtomicLength(entry.len_bytes))
        }
        _ => Ok(()),
    }
}
