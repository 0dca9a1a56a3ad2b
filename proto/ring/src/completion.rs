//! An outcome as both sides speak of it, and its form in shared memory.

use zerocopy::transmute;

use crate::abi::{self, COMPLETION_WORDS, CompletionEntry};
use crate::submission::{Operation, Queue};

macro_rules! statuses {
    ($($(#[$doc:meta])* $variant:ident = $code:literal, $name:literal;)*) => {
        /// How a request ended: `enum ibv_wc_status` (infiniband/verbs.h) by number, and gdrd's
        /// own from 64 up.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Status {
            $($(#[$doc])* $variant,)*
            /// A code that this version has no name for.
            Other(u8),
        }

        impl Status {
            /// Every status with a name.
            pub const NAMED: &'static [Status] = &[$(Status::$variant),*];

            /// The number in the completion entry.
            #[must_use]
            pub const fn code(self) -> u8 {
                match self {
                    $(Status::$variant => $code,)*
                    Status::Other(code) => code,
                }
            }

            /// The status of a number.
            #[must_use]
            pub const fn from_code(code: u8) -> Self {
                match code {
                    $($code => Status::$variant,)*
                    other => Status::Other(other),
                }
            }

            /// The name without `IBV_WC_`, as logs and the CLI print it; `OTHER` without one.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Status::$variant => $name,)*
                    Status::Other(_) => "OTHER",
                }
            }
        }
    };
}

statuses! {
    /// Done.
    Success = 0, "SUCCESS";
    /// The local span is too short for what came, or too long for the port.
    LocLenErr = 1, "LOC_LEN_ERR";
    /// The queue pair cannot do this.
    LocQpOpErr = 2, "LOC_QP_OP_ERR";
    /// Local end-to-end context (RD only).
    LocEecOpErr = 3, "LOC_EEC_OP_ERR";
    /// The local span is not registered for this.
    LocProtErr = 4, "LOC_PROT_ERR";
    /// Not begun: the queue pair was in, or went to, the error state.
    WrFlushErr = 5, "WR_FLUSH_ERR";
    /// Memory window bind.
    MwBindErr = 6, "MW_BIND_ERR";
    /// The peer answered what was not asked.
    BadRespErr = 7, "BAD_RESP_ERR";
    /// A write of the peer met a local protection.
    LocAccessErr = 8, "LOC_ACCESS_ERR";
    /// The peer found the request invalid, such as a send longer than its receive.
    RemInvReqErr = 9, "REM_INV_REQ_ERR";
    /// The peer's key, range or access rights refused it.
    RemAccessErr = 10, "REM_ACCESS_ERR";
    /// The peer could not complete it.
    RemOpErr = 11, "REM_OP_ERR";
    /// No answer within the transport retries.
    RetryExcErr = 12, "RETRY_EXC_ERR";
    /// The peer had no receive posted within the RNR retries.
    RnrRetryExcErr = 13, "RNR_RETRY_EXC_ERR";
    /// RD domain violation.
    LocRddViolErr = 14, "LOC_RDD_VIOL_ERR";
    /// Invalid RD request at the peer.
    RemInvRdReqErr = 15, "REM_INV_RD_REQ_ERR";
    /// The peer aborted.
    RemAbortErr = 16, "REM_ABORT_ERR";
    /// Invalid end-to-end context number.
    InvEecnErr = 17, "INV_EECN_ERR";
    /// Invalid end-to-end context state.
    InvEecStateErr = 18, "INV_EEC_STATE_ERR";
    /// The HCA failed.
    FatalErr = 19, "FATAL_ERR";
    /// A response came too late.
    RespTimeoutErr = 20, "RESP_TIMEOUT_ERR";
    /// Anything else.
    GeneralErr = 21, "GENERAL_ERR";
    /// Tag matching.
    TmErr = 22, "TM_ERR";
    /// Tag-matching rendezvous.
    TmRndvIncomplete = 23, "TM_RNDV_INCOMPLETE";
    /// gdrd: the registration slot is at another generation. Nothing was done; the queue pair goes
    /// on.
    Stale = 64, "STALE";
    /// gdrd: the daemon restarted meanwhile; whether it was done is not known.
    OutcomeUnknown = 65, "OUTCOME_UNKNOWN";
    /// gdrd: the entry was malformed, or names a slot or range that is not the client's. Nothing
    /// was done; the queue pair goes on.
    Refused = 66, "REFUSED";
}

impl std::fmt::Display for Status {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Status::Other(code) => write!(out, "OTHER({code})"),
            named => out.write_str(named.name()),
        }
    }
}

/// Which operation ended. For a receive: which operation of the peer ended it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CompletionOpcode {
    /// RDMA write, with or without immediate value.
    Write,
    /// RDMA read.
    Read,
    /// Send, with or without immediate value.
    Send,
    /// A receive ended by a send, or by a failure.
    Recv,
    /// A receive ended by a write-imm.
    RecvWriteImm,
    /// Fetch and add.
    FetchAdd,
    /// Compare and swap.
    CompareSwap,
    /// Flush.
    Flush,
    /// Of a refused entry whose opcode is unknown; counted in the send queue.
    Unknown,
}

impl CompletionOpcode {
    /// The queue whose request ended.
    #[must_use]
    pub const fn queue(self) -> Queue {
        match self {
            CompletionOpcode::Recv | CompletionOpcode::RecvWriteImm => Queue::Receive,
            _ => Queue::Send,
        }
    }

    /// The opcode with which `operation` completes when it ends as itself.
    #[must_use]
    pub const fn of(operation: &Operation) -> Self {
        match operation {
            Operation::Write { .. } => CompletionOpcode::Write,
            Operation::Read { .. } => CompletionOpcode::Read,
            Operation::Send { .. } => CompletionOpcode::Send,
            Operation::Recv { .. } => CompletionOpcode::Recv,
            Operation::FetchAdd { .. } => CompletionOpcode::FetchAdd,
            Operation::CompareSwap { .. } => CompletionOpcode::CompareSwap,
            Operation::Flush { .. } => CompletionOpcode::Flush,
        }
    }

    const fn code(self) -> u8 {
        match self {
            CompletionOpcode::Write => abi::OP_WRITE,
            CompletionOpcode::Read => abi::OP_READ,
            CompletionOpcode::Send => abi::OP_SEND,
            CompletionOpcode::Recv => abi::OP_RECV,
            CompletionOpcode::RecvWriteImm => abi::OP_RECV_WRITE_IMM,
            CompletionOpcode::FetchAdd => abi::OP_FETCH_ADD,
            CompletionOpcode::CompareSwap => abi::OP_COMPARE_SWAP,
            CompletionOpcode::Flush => abi::OP_FLUSH,
            CompletionOpcode::Unknown => 0,
        }
    }

    /// The opcode with which an entry of raw opcode `code` completes.
    pub(crate) const fn of_entry(code: u8) -> Self {
        match code {
            abi::OP_WRITE_IMM => CompletionOpcode::Write,
            abi::OP_SEND_IMM => CompletionOpcode::Send,
            abi::OP_RECV_WRITE_IMM => CompletionOpcode::Unknown,
            other => Self::from_code(other),
        }
    }

    const fn from_code(code: u8) -> Self {
        match code {
            abi::OP_WRITE => CompletionOpcode::Write,
            abi::OP_READ => CompletionOpcode::Read,
            abi::OP_SEND => CompletionOpcode::Send,
            abi::OP_RECV => CompletionOpcode::Recv,
            abi::OP_RECV_WRITE_IMM => CompletionOpcode::RecvWriteImm,
            abi::OP_FETCH_ADD => CompletionOpcode::FetchAdd,
            abi::OP_COMPARE_SWAP => CompletionOpcode::CompareSwap,
            abi::OP_FLUSH => CompletionOpcode::Flush,
            _ => CompletionOpcode::Unknown,
        }
    }
}

/// One outcome. Fields that verbs leaves undefined on failure (`byte_len`, `imm`) are 0 and `None`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// As submitted.
    pub wr_id: u64,
    /// How it ended.
    pub status: Status,
    /// What ended.
    pub opcode: CompletionOpcode,
    /// Bytes moved, for receives, reads and atomics that succeeded.
    pub byte_len: u32,
    /// Immediate value, of a receive that got one.
    pub imm: Option<u32>,
    /// Queue pair at this host.
    pub qp_num: u32,
    /// What the provider adds to a failure (`ibv_wc.vendor_err`); the code of a
    /// [`crate::RefusalReason`] with status REFUSED; else 0.
    pub vendor_error: u32,
}

impl Completion {
    /// A completion of the request `wr_id` that did `operation`, with no bytes and no immediate.
    #[must_use]
    pub const fn new(wr_id: u64, opcode: CompletionOpcode, status: Status, qp_num: u32) -> Self {
        Self { wr_id, status, opcode, byte_len: 0, imm: None, qp_num, vendor_error: 0 }
    }

    pub(crate) fn encode(&self, sq_retired: u32) -> [u64; COMPLETION_WORDS] {
        let flags = match self.imm {
            Some(_) => abi::COMPLETION_FLAG_IMM,
            None => 0,
        };
        transmute!(CompletionEntry {
            wr_id: self.wr_id,
            status: self.status.code(),
            opcode: self.opcode.code(),
            flags,
            byte_len: self.byte_len,
            imm: self.imm.unwrap_or(0),
            qp_num: self.qp_num,
            sq_retired,
            vendor_error: self.vendor_error,
        })
    }

    /// The completion, and the broker's count of ended send-queue requests.
    pub(crate) fn decode(words: [u64; COMPLETION_WORDS]) -> (Self, u32) {
        let entry: CompletionEntry = transmute!(words);
        let completion = Self {
            wr_id: entry.wr_id,
            status: Status::from_code(entry.status),
            opcode: CompletionOpcode::from_code(entry.opcode),
            byte_len: entry.byte_len,
            imm: (entry.flags & abi::COMPLETION_FLAG_IMM != 0).then_some(entry.imm),
            qp_num: entry.qp_num,
            vendor_error: entry.vendor_error,
        };
        (completion, entry.sq_retired)
    }
}
