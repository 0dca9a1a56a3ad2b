//! What the engine answers when it does not do what was asked.
//!
//! Each variant has a [`ErrorKind`], which the server maps to a gRPC code, and a stable reason. A
//! lease or queue pair of another tenant answers exactly as one that never was.

use thiserror::Error;

/// What a caller can do about an error. The server's table maps each to one gRPC code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The request can never succeed as it is.
    InvalidArgument,
    /// The object is unknown to this caller.
    NotFound,
    /// The caller has no right to it.
    PermissionDenied,
    /// The caller has not shown who it is.
    Unauthenticated,
    /// The object's state forbids it; the message says what to do first.
    FailedPrecondition,
    /// A limit of the caller or of the host is reached.
    ResourceExhausted,
    /// The hardware is missing, gone or draining.
    Unavailable,
    /// The caller acted on an older state.
    Aborted,
    /// It was not done in the time allowed.
    DeadlineExceeded,
    /// The daemon is at fault.
    Internal,
}

/// Why the engine refused or gave up.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum EngineError {
    /// An argument is out of range or malformed.
    #[error("{what}: {problem}")]
    BadArgument {
        /// Field of the request.
        what: &'static str,
        /// Value and allowed range.
        problem: String,
    },
    /// No GPU of that name, UUID or BDF.
    #[error("gpu '{gpu}' is not on this host; list the gpus with 'gdrctl topo'")]
    UnknownGpu {
        /// As asked for.
        gpu: String,
    },
    /// No HCA of that name.
    #[error("hca '{hca}' is not on this host; list the hcas with 'gdrctl topo'")]
    UnknownHca {
        /// As asked for.
        hca: String,
    },
    /// The lease is unknown, ended, or another tenant's.
    #[error("lease {lease} is not known; it ended or was never yours")]
    UnknownLease {
        /// As asked for.
        lease: u64,
    },
    /// The adopted memory is unknown, ended, or another tenant's.
    #[error("memory {memory} is not known; it was given up or was never yours")]
    UnknownMemory {
        /// As asked for.
        memory: u64,
    },
    /// The registration is unknown, ended, or another session's.
    #[error("registration {registration} is not known; it ended or was never yours")]
    UnknownRegistration {
        /// As asked for.
        registration: u64,
    },
    /// The lease ended while a range of it was being registered.
    #[error("the lease ended while a range of it was being registered")]
    LeaseEnding,
    /// Memory that cannot be adopted; the message names what can.
    #[error("memory cannot be adopted: {problem}")]
    NotAdoptable {
        /// What it is, and the alternative.
        problem: String,
    },
    /// The queue pair is unknown, destroyed, or another tenant's.
    #[error("queue pair {queue_pair} is not known; it ended or was never yours")]
    UnknownQueuePair {
        /// As asked for.
        queue_pair: u64,
    },
    /// The session ended.
    #[error("the session has ended; connect to the session socket again")]
    SessionEnded,
    /// The token names no session of the caller.
    #[error("the session token is not valid for this user; connect to the session socket first")]
    BadToken,
    /// The lease is the tenant's, but this session does not hold it.
    #[error("this session does not hold lease {lease}; open it first")]
    NotHolder {
        /// The lease.
        lease: u64,
    },
    /// No rule lets the caller lease.
    #[error("uid {uid} may not lease: no rule names it; join group gdrd or ask the operator for a lease rule")]
    NotAllowed {
        /// The caller.
        uid: u32,
    },
    /// The peer's identity is the overflow uid or pid 0.
    #[error("the peer's identity does not reach the daemon ({problem}); add a lease rule that names it")]
    OpaquePeer {
        /// Overflow uid or pid 0.
        problem: &'static str,
    },
    /// The call is for administrators.
    #[error("{what} needs root or group gdrd-admin")]
    NotAdmin {
        /// The call.
        what: &'static str,
    },
    /// The session has not shown an open fd of the GPU's device node.
    #[error("gpu {gpu} is not proven: send an open fd of its device node on the session socket first")]
    GpuNotProven {
        /// UUID of the GPU.
        gpu: String,
    },
    /// The GPU has no known device node, so nobody can prove the right to it.
    #[error("gpu {gpu} has no known device node, so the right to it cannot be proven; set gpu_proof = \"none\"")]
    GpuWithoutNode {
        /// UUID of the GPU.
        gpu: String,
    },
    /// A device number is no GPU of this host.
    #[error("device {major}:{minor} is no gpu of this host")]
    NotAGpu {
        /// Major number.
        major: u32,
        /// Minor number.
        minor: u32,
    },
    /// A generation is older than the object's.
    #[error("generation {given} of lease {lease} is stale, it is {current} now")]
    StaleGeneration {
        /// The lease.
        lease: u64,
        /// As given.
        given: u64,
        /// What holds.
        current: u64,
    },
    /// A posted receive still names the lease's memory.
    #[error("lease {lease} has receives posted on queue pair {queue_pair}; let them complete or destroy it first")]
    ReceivesPosted {
        /// The lease.
        lease: u64,
        /// The queue pair.
        queue_pair: u64,
    },
    /// NIC access to the lease has been revoked.
    #[error("lease {lease} was revoked ({cause}); release it and acquire anew")]
    LeaseRevoked {
        /// The lease.
        lease: u64,
        /// Why.
        cause: String,
    },
    /// The queue pair is not in a state that allows the call.
    #[error("queue pair {queue_pair} is {state}; this needs {needed}")]
    QueuePairState {
        /// The queue pair.
        queue_pair: u64,
        /// Its state.
        state: &'static str,
        /// What the call needs.
        needed: &'static str,
    },
    /// A limit of the tenant or session.
    #[error("{what} of {whom} is {limit}; {used} are in use and {asked} more were asked for")]
    Limit {
        /// Stable reason, `QUOTA_BYTES` and the like.
        reason: &'static str,
        /// What is limited.
        what: &'static str,
        /// Whose limit: the tenant, the session, the daemon.
        whom: &'static str,
        /// The limit.
        limit: u64,
        /// In use.
        used: u64,
        /// Asked for on top.
        asked: u64,
    },
    /// The GPU has not enough memory, also after idle buffers were given back.
    #[error("out of memory: {problem}")]
    OutOfMemory {
        /// What the backend said.
        problem: String,
    },
    /// The HCA's own limit is reached, also after idle registrations were dropped.
    #[error("hca limit reached: {problem}")]
    HcaExhausted {
        /// What the backend said.
        problem: String,
    },
    /// The daemon has no file descriptors or memory left for what goes with an answer.
    #[error(
        "out of descriptors: {problem}; raise the daemon's RLIMIT_NOFILE (LimitNOFILE= of its unit), or fs.file-max"
    )]
    OutOfDescriptors {
        /// What the kernel said.
        problem: String,
    },
    /// The provider cannot do it.
    #[error("not supported: {problem}")]
    Unsupported {
        /// What and where.
        problem: String,
    },
    /// There is no hardware for it on this host.
    #[error("{what} is absent: {problem}")]
    Absent {
        /// GPU memory, RDMA.
        what: &'static str,
        /// Why.
        problem: String,
    },
    /// No port of the HCA is active.
    #[error("{problem}; see 'gdrctl topo' for their states, or name a port")]
    PortsDown {
        /// Which HCA.
        problem: String,
    },
    /// A device was lost while it was needed.
    #[error("{problem}")]
    DeviceLost {
        /// Which and what was seen.
        problem: String,
    },
    /// Nothing leads to the peer's address.
    #[error("the peer cannot be reached: {problem}")]
    PeerUnreachable {
        /// Its address, and what was seen.
        problem: String,
    },
    /// A driver call failed.
    #[error("driver: {problem}")]
    Driver {
        /// What the backend said.
        problem: String,
    },
    /// It was done, but the next daemon will not know.
    #[error("done, but {what} is not kept for the next daemon: {path}: {problem}; make room there and call again")]
    NotKept {
        /// What is not kept.
        what: &'static str,
        /// The file.
        path: String,
        /// Why it was not written.
        problem: String,
    },
    /// The caller gave up before it was done.
    #[error("the call was cancelled")]
    Cancelled,
    /// The daemon stops.
    #[error("the daemon is shutting down")]
    ShuttingDown,
    /// A bug of the daemon.
    #[error("internal error: {problem}")]
    Internal {
        /// What did not hold.
        problem: String,
    },
}

impl EngineError {
    /// What a caller can do about it.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::BadArgument { .. } | Self::NotAGpu { .. } | Self::NotAdoptable { .. } => ErrorKind::InvalidArgument,
            Self::UnknownGpu { .. }
            | Self::UnknownHca { .. }
            | Self::UnknownLease { .. }
            | Self::UnknownMemory { .. }
            | Self::UnknownRegistration { .. }
            | Self::UnknownQueuePair { .. } => ErrorKind::NotFound,
            Self::SessionEnded | Self::BadToken => ErrorKind::Unauthenticated,
            Self::NotAllowed { .. } | Self::OpaquePeer { .. } | Self::NotAdmin { .. } | Self::GpuNotProven { .. } => {
                ErrorKind::PermissionDenied
            }
            Self::NotHolder { .. }
            | Self::GpuWithoutNode { .. }
            | Self::ReceivesPosted { .. }
            | Self::LeaseRevoked { .. }
            | Self::QueuePairState { .. } => ErrorKind::FailedPrecondition,
            Self::Limit { .. }
            | Self::OutOfMemory { .. }
            | Self::HcaExhausted { .. }
            | Self::OutOfDescriptors { .. }
            | Self::NotKept { .. } => ErrorKind::ResourceExhausted,
            Self::Unsupported { .. }
            | Self::Absent { .. }
            | Self::PortsDown { .. }
            | Self::DeviceLost { .. }
            | Self::PeerUnreachable { .. }
            | Self::Driver { .. }
            | Self::ShuttingDown => ErrorKind::Unavailable,
            Self::StaleGeneration { .. } | Self::LeaseEnding | Self::Cancelled => ErrorKind::Aborted,
            Self::Internal { .. } => ErrorKind::Internal,
        }
    }

    /// Stable name for programs.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::BadArgument { .. } => "BAD_ARGUMENT",
            Self::UnknownGpu { .. } => "GPU_UNKNOWN",
            Self::UnknownHca { .. } => "HCA_UNKNOWN",
            Self::UnknownLease { .. } => "LEASE_UNKNOWN",
            Self::UnknownMemory { .. } => "MEMORY_UNKNOWN",
            Self::UnknownRegistration { .. } => "REGISTRATION_UNKNOWN",
            Self::LeaseEnding => "LEASE_ENDING",
            Self::NotAdoptable { .. } => "MEMORY_NOT_ADOPTABLE",
            Self::UnknownQueuePair { .. } => "QUEUE_PAIR_UNKNOWN",
            Self::SessionEnded => "SESSION_ENDED",
            Self::BadToken => "SESSION_TOKEN_INVALID",
            Self::NotHolder { .. } => "LEASE_NOT_HELD",
            Self::NotAllowed { .. } => "LEASE_NOT_ALLOWED",
            Self::OpaquePeer { .. } => "PEER_OPAQUE",
            Self::NotAdmin { .. } => "ADMIN_REQUIRED",
            Self::GpuNotProven { .. } => "GPU_NOT_PROVEN",
            Self::GpuWithoutNode { .. } => "GPU_WITHOUT_NODE",
            Self::NotAGpu { .. } => "DEVICE_NOT_A_GPU",
            Self::StaleGeneration { .. } => "GENERATION_STALE",
            Self::ReceivesPosted { .. } => "RECEIVES_POSTED",
            Self::LeaseRevoked { .. } => "LEASE_REVOKED",
            Self::QueuePairState { .. } => "QUEUE_PAIR_STATE",
            Self::Limit { reason, .. } => reason,
            Self::OutOfMemory { .. } => "GPU_OUT_OF_MEMORY",
            Self::HcaExhausted { .. } => "HCA_EXHAUSTED",
            Self::OutOfDescriptors { .. } => "OUT_OF_DESCRIPTORS",
            Self::Unsupported { .. } => "UNSUPPORTED",
            Self::Absent { .. } => "HARDWARE_ABSENT",
            Self::PortsDown { .. } => "PORTS_DOWN",
            Self::DeviceLost { .. } => "DEVICE_LOST",
            Self::PeerUnreachable { .. } => "PEER_UNREACHABLE",
            Self::Driver { .. } => "DRIVER_FAILED",
            Self::NotKept { .. } => "STATE_NOT_KEPT",
            Self::Cancelled => "CANCELLED",
            Self::ShuttingDown => "SHUTTING_DOWN",
            Self::Internal { .. } => "INTERNAL",
        }
    }
}
