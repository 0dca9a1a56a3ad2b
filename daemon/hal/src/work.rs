//! Work requests and completions (`struct ibv_send_wr`, `struct ibv_recv_wr`, `struct ibv_wc`), with one SGE each.

/// Longest inline payload that a [`WorkRequest`] can carry, bytes; equal to the ring entry's.
pub const MAX_INLINE_BYTES: usize = 64;

/// Operations of a send queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Opcode {
    /// RDMA write.
    Write,
    /// RDMA write that consumes a receive and delivers `imm`.
    WriteImm,
    /// RDMA read.
    Read,
    /// Send.
    Send,
    /// Send that delivers `imm`.
    SendImm,
    /// Adds `operand` to the remote u64; the old value lands in the local span.
    FetchAdd,
    /// Stores `operand` in the remote u64 if it equals `compare`; the old value lands in the local span.
    CompareSwap,
    /// Completes once earlier writes of this queue pair are visible at the remote memory
    /// (the FLUSH verb, or a read after the writes). `remote` names readable memory of the peer, `local` at
    /// least one byte where a provider without the verb lands its read; their content after it is unspecified.
    Flush,
    /// A receive (only in completions).
    Recv,
    /// A receive consumed by a write with immediate (only in completions).
    RecvWriteImm,
}

/// Local memory of a request: an lkey and a wire address in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LocalSpan {
    /// Key of the memory region.
    pub lkey: u32,
    /// Address: iova of the region plus offset.
    pub addr: u64,
    /// Length, bytes.
    pub len_bytes: u32,
}

/// Remote memory of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RemoteSpan {
    /// Key given by the peer.
    pub rkey: u32,
    /// Address given by the peer plus offset.
    pub addr: u64,
}

/// One request of a send queue.
#[derive(Debug, Clone, Copy)]
pub struct WorkRequest {
    /// Returned in the completion.
    pub wr_id: u64,
    /// Operation.
    pub opcode: Opcode,
    /// Whether success makes a completion; failure always does.
    pub signaled: bool,
    /// Whether it waits for earlier reads and atomics of the queue pair (IBV_SEND_FENCE).
    pub fence: bool,
    /// Local memory; ignored when `inline_len` is not 0.
    pub local: LocalSpan,
    /// Remote memory; ignored by sends.
    pub remote: RemoteSpan,
    /// Immediate data, host order.
    pub imm: u32,
    /// Addend or new value of atomics.
    pub operand: u64,
    /// Expected value of compare-swap.
    pub compare: u64,
    /// Payload bytes taken from `inline` instead of `local`; 0 for none.
    pub inline_len: u8,
    /// Inline payload.
    pub inline: [u8; MAX_INLINE_BYTES],
}

/// One receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReceiveRequest {
    /// Returned in the completion.
    pub wr_id: u64,
    /// Where the message lands.
    pub local: LocalSpan,
}

/// Result of a request (`enum ibv_wc_status`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum WorkStatus {
    /// Done.
    Success,
    /// A receive buffer was too short (IBV_WC_LOC_LEN_ERR).
    LocalLength,
    /// Bad lkey, range or access of local memory (IBV_WC_LOC_PROT_ERR).
    LocalProtection,
    /// The request is malformed for this queue pair (IBV_WC_LOC_QP_OP_ERR).
    LocalQueuePairOperation,
    /// Flushed: the queue pair is in error (IBV_WC_WR_FLUSH_ERR).
    Flushed,
    /// The responder refused the request (IBV_WC_REM_INV_REQ_ERR).
    RemoteInvalidRequest,
    /// Bad rkey, range or right at the responder (IBV_WC_REM_ACCESS_ERR).
    RemoteAccess,
    /// The responder failed (IBV_WC_REM_OP_ERR).
    RemoteOperation,
    /// The peer never answered (IBV_WC_RETRY_EXC_ERR).
    RetryExceeded,
    /// The peer had no receive posted (IBV_WC_RNR_RETRY_EXC_ERR).
    ReceiverNotReady,
    /// The device is fatal (IBV_WC_FATAL_ERR).
    Fatal,
    /// Any other status, with its number.
    Other(u32),
}

/// One completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkCompletion {
    /// From the request.
    pub wr_id: u64,
    /// Result. On anything but success only `wr_id`, `status`, `qp_num` and `vendor_error` mean something.
    pub status: WorkStatus,
    /// Operation.
    pub opcode: Opcode,
    /// Bytes received, or of the read or atomic.
    pub byte_len: u32,
    /// Immediate data where the opcode delivers it.
    pub imm: Option<u32>,
    /// Queue pair.
    pub qp_num: u32,
    /// Vendor's own code.
    pub vendor_error: u32,
}

impl WorkCompletion {
    /// Filler for the buffers that [`crate::CompletionQueue::poll`] writes into.
    pub const EMPTY: Self = Self {
        wr_id: 0,
        status: WorkStatus::Success,
        opcode: Opcode::Write,
        byte_len: 0,
        imm: None,
        qp_num: 0,
        vendor_error: 0,
    };
}
