//! Every bound of the server in one place. What clients may hold in the engine is bounded there.

use std::time::Duration;

/// Bounds on connections, messages and waiting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerLimits {
    /// gRPC connections of all users. Default 1024.
    pub max_grpc_connections: u32,
    /// gRPC connections of one uid. Default 256.
    pub max_grpc_connections_per_uid: u32,
    /// Calls in flight on one gRPC connection; more wait. Default 256.
    pub max_calls_per_connection: u32,
    /// Connections to the session socket of all users, sessions and those that have not said hello. Default 1280.
    pub max_session_connections: u32,
    /// Connections to the session socket of one uid. Default 512.
    pub max_session_connections_per_uid: u32,
    /// How long a connection may take to say hello, or to begin its first gRPC call. Default 5 s.
    pub hello_timeout: Duration,
    /// How long a gRPC connection may be without a call before it is closed. Default 10 min.
    pub grpc_idle: Duration,
    /// How long looking at the fds of one proof may take: an fd of a file system in user space can block. Default 5 s.
    pub proof_timeout: Duration,
    /// Deliveries queued for a session behind the one it has not acknowledged; one more ends it. Default 256.
    pub max_queued_deliveries: u32,
    /// How long calls in flight may take once the daemon stops. Default 5 s.
    pub drain_timeout: Duration,
}

impl Default for ServerLimits {
    fn default() -> Self {
        Self {
            max_grpc_connections: 1024,
            max_grpc_connections_per_uid: 256,
            max_calls_per_connection: 256,
            max_session_connections: 1280,
            max_session_connections_per_uid: 512,
            hello_timeout: Duration::from_secs(5),
            grpc_idle: Duration::from_secs(600),
            proof_timeout: Duration::from_secs(5),
            max_queued_deliveries: 256,
            drain_timeout: Duration::from_secs(5),
        }
    }
}

/// Longest gRPC request, bytes; the longest sensible one has a few names.
pub(crate) const MAX_REQUEST_BYTES: usize = 64 * 1024;

/// Longest request to register, bytes: 4096 ranges of 40 bytes, and some names.
pub(crate) const MAX_BATCH_REQUEST_BYTES: usize = 192 * 1024;

/// Longest gRPC header list, bytes.
pub(crate) const MAX_HEADER_BYTES: u32 = 16 * 1024;

/// Longest gRPC response, bytes: what a client accepts unless it was told otherwise (tonic's default).
pub(crate) const MAX_RESPONSE_BYTES: usize = 4 * 1024 * 1024;

/// Encoded length at which a list page ends early, bytes: well below [`MAX_RESPONSE_BYTES`].
pub(crate) const MAX_PAGE_BYTES: usize = 2 * 1024 * 1024;

/// Proofs looked at at one time, each on a thread of its own that may block.
pub(crate) const MAX_PROOFS_AT_ONCE: usize = 8;

/// Of those, one user's.
pub(crate) const MAX_PROOFS_OF_USER_AT_ONCE: usize = 4;

/// Proofs of one user that are looked at or wait for that; the fds of more are not taken in.
pub(crate) const MAX_PROOFS_WAITING_OF_USER: usize = 128;

/// Placements scored at one time; others wait their turn.
pub(crate) const MAX_PLACEMENTS_AT_ONCE: usize = 2;

/// How long an idle gRPC connection has to go once it was asked to.
pub(crate) const PARTING_TIME: Duration = Duration::from_secs(1);

/// Refused gRPC connections that are told why at one time; others are closed without a word.
pub(crate) const MAX_REFUSALS_AT_ONCE: u32 = 64;

/// Of those one uid's: a client that listens to none of them keeps the answers from its own uid only.
pub(crate) const MAX_REFUSALS_PER_UID: u32 = 4;

/// How long a refused gRPC connection may take to hear why.
pub(crate) const REFUSAL_TIMEOUT: Duration = Duration::from_secs(1);

/// How long accepting pauses when the daemon has no fd left for a connection; others' fds may go meanwhile.
pub(crate) const PAUSE_WITHOUT_FDS: Duration = Duration::from_millis(100);
