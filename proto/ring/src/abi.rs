//! The layout of a ring segment, version [`RING_VERSION`]: what C and other processes rely on.
//!
//! All fields are in host byte order: both sides run on one host. Each word that one side writes
//! and the other polls has 128 bytes of its own, since x86 prefetchers fetch lines in pairs.
//!
//! | offset | written by | what |
//! |---|---|---|
//! | 0 | broker, once | [`Header`] |
//! | [`SUBMISSION_TAIL`] | client | submissions published, counted freely modulo 2^32 |
//! | [`SUBMISSION_HEAD`] | broker | submissions copied out |
//! | [`COMPLETION_TAIL`] | broker | completions published |
//! | [`COMPLETION_HEAD`] | client | completions copied out |
//! | [`BROKER_SLEEPING`] | both | 1: ring the eventfd; the client that does sets it to 0 |
//! | [`CLIENT_WAITING`] | both | 1: wake [`WAKE_COUNT`]; the broker that does sets it to 0 |
//! | [`WAKE_COUNT`] | both | futex word, counts wakes (a publish wakes at most 16 sleepers, the close all); the client adds to it to end its own waits |
//! | [`STATE`] | broker | [`STATE_OPEN`], or why no more is taken |
//! | `submission_offset` | client | [`SubmissionEntry`] × `submission_capacity` |
//! | `completion_offset` | broker | [`CompletionEntry`] × `completion_capacity` |

use std::fmt;
use std::mem::{align_of, offset_of, size_of};

use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Version of this layout and protocol; a client refuses a ring of any other.
pub const RING_VERSION: u32 = 1;
/// First eight bytes of a ring segment, `gdrdring` in memory order on a little-endian host.
pub const RING_MAGIC: u64 = u64::from_le_bytes(*b"gdrdring");

/// Offset of the submission tail, u32.
pub const SUBMISSION_TAIL: u64 = 0x080;
/// Offset of the submission head, u32.
pub const SUBMISSION_HEAD: u64 = 0x100;
/// Offset of the completion tail, u32.
pub const COMPLETION_TAIL: u64 = 0x180;
/// Offset of the completion head, u32.
pub const COMPLETION_HEAD: u64 = 0x200;
/// Offset of the broker's sleeping flag, u32.
pub const BROKER_SLEEPING: u64 = 0x280;
/// Offset of the client's waiting flag, u32.
pub const CLIENT_WAITING: u64 = 0x300;
/// Offset of the futex word, u32.
pub const WAKE_COUNT: u64 = 0x380;
/// Offset of the state word, u32.
pub const STATE: u64 = 0x400;
/// Where the first ring starts; the header page is padded to here.
pub const RINGS_OFFSET: u64 = 0x1000;

/// State: submissions are taken.
pub const STATE_OPEN: u32 = 0;
/// State: the queue pair ended; what was published can still be polled.
pub const STATE_CLOSED: u32 = 1;
/// State: the broker found an impossible index and ended this ring.
pub const STATE_CORRUPT: u32 = 2;
/// State: the daemon that served the ring is gone. What it published can still be polled; the rest has no known outcome.
pub const STATE_LOST: u32 = 3;

/// Double words in a [`SubmissionEntry`].
pub const SUBMISSION_WORDS: usize = 16;
/// Double words in a [`CompletionEntry`].
pub const COMPLETION_WORDS: usize = 4;
/// Longest payload that travels in the entry itself.
pub const INLINE_MAX_BYTES: usize = 56;

/// Start of the segment. Written once by the broker before the descriptor is sent; read once by
/// the client at open. The broker never reads it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub struct Header {
    /// [`RING_MAGIC`].
    pub magic: u64,
    /// [`RING_VERSION`].
    pub version: u32,
    /// Send-queue requests that may be outstanding.
    pub sq_depth: u32,
    /// Receives that may be outstanding.
    pub rq_depth: u32,
    /// Submission entries, a power of two.
    pub submission_capacity: u32,
    /// Completion entries, a power of two.
    pub completion_capacity: u32,
    /// 0.
    pub reserved: u32,
    /// Offset of the submission entries in the segment.
    pub submission_offset: u64,
    /// Offset of the completion entries in the segment.
    pub completion_offset: u64,
}

/// One request, as the client writes it. Reserved fields are 0, else the request is refused; fields that the operation
/// does not use are ignored.
#[derive(Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub struct SubmissionEntry {
    /// One of `OP_*`.
    pub opcode: u8,
    /// Of `FLAG_*`.
    pub flags: u8,
    /// 0.
    pub reserved0: u16,
    /// Immediate value, for `OP_WRITE_IMM` and `OP_SEND_IMM`.
    pub imm: u32,
    /// Returned in the completion.
    pub wr_id: u64,
    /// Registration slot of the local bytes.
    pub local_slot: u32,
    /// Length in bytes: of the local span, of the inline payload, or to flush.
    pub len_bytes: u32,
    /// Generation that the client saw when it was lent the registration.
    pub local_generation: u64,
    /// Offset of the local bytes in the registration.
    pub local_offset: u64,
    /// Remote access key. A capability: never logged.
    pub remote_rkey: u32,
    /// 0.
    pub reserved1: u32,
    /// Remote address as the peer gave it: its registration's iova plus the offset.
    pub remote_iova: u64,
    /// Value to add, or to compare with.
    pub operand: u64,
    /// Value to swap in.
    pub swap: u64,
    /// Payload with `FLAG_INLINE`, the first `len_bytes` of it.
    pub inline: [u8; INLINE_MAX_BYTES],
}

impl fmt::Debug for SubmissionEntry {
    /// Without the remote key, which no log may show.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("SubmissionEntry")
            .field("opcode", &self.opcode)
            .field("flags", &self.flags)
            .field("wr_id", &self.wr_id)
            .field("len_bytes", &self.len_bytes)
            .finish_non_exhaustive()
    }
}

/// RDMA write.
pub const OP_WRITE: u8 = 1;
/// RDMA write that consumes a receive at the peer and hands it an immediate value.
pub const OP_WRITE_IMM: u8 = 2;
/// RDMA read.
pub const OP_READ: u8 = 3;
/// Send.
pub const OP_SEND: u8 = 4;
/// Send with an immediate value.
pub const OP_SEND_IMM: u8 = 5;
/// Receive.
pub const OP_RECV: u8 = 6;
/// Atomic fetch and add of 8 bytes.
pub const OP_FETCH_ADD: u8 = 7;
/// Atomic compare and swap of 8 bytes.
pub const OP_COMPARE_SWAP: u8 = 8;
/// Flush: completes when earlier writes to the range are visible to the peer's memory.
pub const OP_FLUSH: u8 = 9;
/// In completions only: a receive that a write-imm of the peer ended.
pub const OP_RECV_WRITE_IMM: u8 = 0x80 | OP_RECV;

/// Success is reported too, not only failure.
pub const FLAG_SIGNALED: u8 = 1;
/// The payload is in the entry; no local registration is named.
pub const FLAG_INLINE: u8 = 2;
/// Starts only when earlier reads and atomics of this queue pair have ended.
pub const FLAG_FENCE: u8 = 4;
/// Asks for a solicited event at the peer.
pub const FLAG_SOLICITED: u8 = 8;

/// One outcome, as the broker writes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub struct CompletionEntry {
    /// As submitted.
    pub wr_id: u64,
    /// `enum ibv_wc_status` (infiniband/verbs.h), or 64 and up for gdrd's own.
    pub status: u8,
    /// One of `OP_*`, 0 of a refused entry whose opcode is unknown.
    pub opcode: u8,
    /// Of `COMPLETION_FLAG_*`.
    pub flags: u16,
    /// Bytes moved, for receives, reads and atomics that succeeded.
    pub byte_len: u32,
    /// Immediate value, with [`COMPLETION_FLAG_IMM`].
    pub imm: u32,
    /// Queue pair at this host.
    pub qp_num: u32,
    /// Send-queue requests ended so far, unsignalled ones included, modulo 2^32.
    pub sq_retired: u32,
    /// What the provider adds to a failure (`ibv_wc.vendor_err`); with status 66 why gdrd refused
    /// the request (`RefusalReason`); else 0.
    pub vendor_error: u32,
}

/// `imm` is valid.
pub const COMPLETION_FLAG_IMM: u16 = 1;

const _: () = {
    assert!(size_of::<Header>() == 48 && align_of::<Header>() == 8);
    assert!(size_of::<SubmissionEntry>() == SUBMISSION_WORDS * 8);
    assert!(size_of::<CompletionEntry>() == COMPLETION_WORDS * 8);
    // All that an operation without inline payload needs lies in the first cache line.
    assert!(offset_of!(SubmissionEntry, operand) + 8 == 64);
    assert!(size_of::<Header>() as u64 <= SUBMISSION_TAIL);
    assert!(STATE + 128 <= RINGS_OFFSET);
};
