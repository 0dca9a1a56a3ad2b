//! What a test can tell a puppet, and what it answers: one line of JSON each.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Bytes of a puppet's buffer or of its peer's.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Local {
    /// Name of the buffer; its registration with the queue pair's HCA is used.
    pub buffer: String,
    /// Offset in it, bytes.
    pub offset: u64,
    /// Length, bytes.
    pub len: u32,
    /// Generation to claim instead of the lease's own.
    pub generation: Option<u64>,
    /// Registration slot to name instead of the lease's own.
    pub slot: Option<u32>,
}

impl Local {
    /// `len` bytes at `offset` of `buffer`.
    #[must_use]
    pub fn new(buffer: &str, offset: u64, len: u32) -> Self {
        Self { buffer: buffer.into(), offset, len, generation: None, slot: None }
    }
}

/// Bytes at a peer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Remote {
    /// What [`Command::Remote`] answered at the peer.
    pub blob: String,
    /// Offset in the peer's registration, not checked here.
    pub offset: u64,
    /// Flips these bits of the rkey.
    pub rkey_flip: u32,
}

impl Remote {
    /// The bytes at `offset` of the registration in `blob`.
    #[must_use]
    pub fn new(blob: &str, offset: u64) -> Self {
        Self { blob: blob.into(), offset, rkey_flip: 0 }
    }
}

/// A request of a queue pair.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields are those of gdrd_client::Operation")]
pub enum Work {
    Write { local: Local, remote: Remote, imm: Option<u32> },
    WriteInline { payload: String, remote: Remote, imm: Option<u32> },
    Read { local: Local, remote: Remote },
    Send { local: Local, imm: Option<u32> },
    SendInline { payload: String, imm: Option<u32> },
    Recv { local: Local },
    FetchAdd { local: Local, remote: Remote, add: u64 },
    CompareSwap { local: Local, remote: Remote, compare: u64, swap: u64 },
    Flush { remote: Remote, len: u32 },
}

/// One thing to do. A puppet answers when it is done, and then stands still.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Command {
    /// Opens a session. Answers its number.
    Connect {
        /// Folder of the daemon's sockets.
        runtime_dir: String,
    },
    /// Acquires. Answers the lease.
    Acquire {
        /// Name for later commands.
        buffer: String,
        /// GPU, or the GPU that host memory is to be near.
        gpu: String,
        /// Bytes.
        size: u64,
        /// Host memory instead of the GPU's.
        host: bool,
    },
    /// Acquires host memory registered with one HCA. Answers the lease.
    AcquireHost {
        /// Name for later commands.
        buffer: String,
        /// HCA.
        hca: String,
        /// Bytes.
        size: u64,
    },
    /// Sends the acquire, and answers as soon as it is on its way.
    StartAcquire {
        /// GPU.
        gpu: String,
        /// Bytes.
        size: u64,
    },
    /// Opens a lease of the tenant. Answers the lease.
    Open {
        /// Name for later commands.
        buffer: String,
        /// The lease.
        lease_id: u64,
    },
    /// Maps the buffer.
    Map {
        /// Buffer.
        buffer: String,
    },
    /// Fills the buffer with content drawn from a seed.
    Fill {
        /// Buffer.
        buffer: String,
        /// Seed.
        seed: u64,
    },
    /// Writes bytes, given in hex.
    Poke {
        /// Buffer.
        buffer: String,
        /// Where.
        offset: u64,
        /// Hex.
        bytes: String,
    },
    /// Answers bytes in hex.
    Peek {
        /// Buffer.
        buffer: String,
        /// Where.
        offset: u64,
        /// How many.
        len: usize,
    },
    /// Answers the SHA-256 of bytes of the buffer, read from this process's own mapping.
    Digest {
        /// Buffer.
        buffer: String,
        /// Where.
        offset: u64,
        /// How many.
        len: u64,
    },
    /// Answers the registration with an HCA as a blob in hex.
    Remote {
        /// Buffer.
        buffer: String,
        /// HCA.
        hca: String,
    },
    /// Answers whether the generation page still shows the buffer's generations.
    IsCurrent {
        /// Buffer.
        buffer: String,
    },
    /// Awaits that the daemon was started again so often and went on with the session. Answers how often it was.
    AwaitRestart {
        /// How often.
        restarts: u64,
    },
    /// Asks for the buffer's registrations as they are now. Answers the lease.
    Refresh {
        /// Buffer.
        buffer: String,
    },
    /// Releases, awaiting the answer.
    Release {
        /// Buffer.
        buffer: String,
    },
    /// Releases a lease by number.
    ReleaseLease {
        /// The lease.
        lease_id: u64,
        /// Generation to claim, 0 for none.
        generation: u64,
    },
    /// Sends the release, and answers as soon as it is on its way.
    StartRelease {
        /// Buffer.
        buffer: String,
    },
    /// Releases, and keeps a descriptor and a mapping of the memory under a new name.
    ReleaseAndKeep {
        /// Buffer.
        buffer: String,
        /// Name of what is kept.
        kept: String,
    },
    /// Digest of what was kept, through the old mapping and through a new one of the kept descriptor.
    DigestKept {
        /// Name of what is kept.
        kept: String,
    },
    /// Fills what was kept, through the old mapping, with content drawn from a seed.
    FillKept {
        /// Name of what is kept.
        kept: String,
        /// Seed.
        seed: u64,
    },
    /// Bytes of what was kept that are not zero: their number.
    CountKept {
        /// Name of what is kept.
        kept: String,
    },
    /// Lets a lease outlive the session.
    Detach {
        /// Buffer.
        buffer: String,
        /// Time to live, ms.
        ttl_ms: u64,
    },
    /// Answers the list of leases.
    Leases,
    /// Answers the list of queue pairs.
    QueuePairs,
    /// Begins to watch the tenant's leases.
    WatchLeases,
    /// Awaits the next event of the watch. Answers its kind and lease.
    NextLeaseEvent,
    /// Awaits the next snapshot of a topology watch, which begins with the first of these. Answers its
    /// `generation` and the names of its `hcas`.
    NextTopology,
    /// Makes a queue pair. Answers its HCA, number and endpoint blob.
    QueuePair {
        /// Name for later commands.
        queue_pair: String,
        /// GPU whose NIC is used; empty for `hca`.
        gpu: String,
        /// HCA.
        hca: String,
        /// Depths of both queues, 0 for the default.
        depth: u32,
    },
    /// Makes a queue pair of datagrams. Answers as [`Command::QueuePair`].
    DatagramQueuePair {
        /// Name for later commands.
        queue_pair: String,
        /// HCA.
        hca: String,
    },
    /// Makes host memory of its own, adopts it and maps it.
    Adopt {
        /// Name of the memory.
        memory: String,
        /// Length, bytes.
        size: u64,
        /// GPU that it is near to.
        gpu: String,
    },
    /// Adopts the dma-buf that it was started with as `dma-buf` (sd_listen_fds(3)), and keeps the memory behind it, if that
    /// was given as `memory`, for [`Command::DigestKept`] and its like.
    AdoptInherited {
        /// Name of both.
        memory: String,
    },
    /// Registers a range of adopted memory with one HCA. Answers it as a peer needs it, in hex.
    RegisterRange {
        /// Name of the memory.
        memory: String,
        /// Start, bytes.
        offset: u64,
        /// Length, bytes.
        len: u64,
        /// HCA.
        hca: String,
    },
    /// Reads adopted memory. Answers hex.
    PeekAdopted {
        /// Name of the memory.
        memory: String,
        /// Start, bytes.
        offset: u64,
        /// Length, bytes.
        len: usize,
    },
    /// How often a thread named `hits` has found the registration of the start of adopted memory. The first such command
    /// registers it and starts the thread.
    Hits {
        /// Name of the memory.
        memory: String,
    },
    /// Gives adopted memory up, and waits until no NIC reaches it.
    Disown {
        /// Name of the memory.
        memory: String,
    },
    /// Connects to the endpoint in a blob.
    ConnectQueuePair {
        /// Queue pair.
        queue_pair: String,
        /// Hex.
        endpoint: String,
    },
    /// Posts requests as one batch. Answers how many were taken.
    Post {
        /// Queue pair.
        queue_pair: String,
        /// Requests; each one's wr_id is its place here plus `first_wr_id`.
        work: Vec<Work>,
        /// Number of the first.
        first_wr_id: u64,
        /// Only the last one makes a completion.
        only_last_signaled: bool,
    },
    /// Posts until the queue is full, and answers how many were posted; polls nothing.
    Flood {
        /// Queue pair.
        queue_pair: String,
        /// What to post.
        work: Work,
    },
    /// Awaits the next completion, asleep. Answers it.
    Completion {
        /// Queue pair.
        queue_pair: String,
    },
    /// Awaits the next completion, polling.
    CompletionBusy {
        /// Queue pair.
        queue_pair: String,
    },
    /// Posts one request over and over, with at most `window` of them under way. Answers the nanoseconds of all of them
    /// together and, for each, from its post to its completion: the median.
    TimeWork {
        /// Queue pair.
        queue_pair: String,
        /// What to post.
        work: Work,
        /// How often.
        rounds: u32,
        /// Most under way at once.
        window: u32,
        /// Polls for completions instead of sleeping until they come.
        polling: bool,
    },
    /// Sends the bytes of the ring's segment from `offset` on to what is given in hex, as a hostile client would.
    ScribbleRing {
        /// Queue pair.
        queue_pair: String,
        /// Where.
        offset: u64,
        /// Hex.
        bytes: String,
    },
    /// Destroys a queue pair.
    Destroy {
        /// Queue pair.
        queue_pair: String,
    },
    /// Starts a child that inherits the session socket and lives on. Answers its pid.
    ForkHolder,
    /// Closes the session, with the buffers' handles kept.
    CloseSession,
    /// Awaits the session's end. Answers the reason.
    SessionEnd,
    /// Asks for the topology, without a session. Answers the number of GPUs and NICs.
    Topology {
        /// Folder of the daemon's sockets.
        runtime_dir: String,
    },
    /// Answers the uid.
    WhoAmI,
}

/// What a puppet answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Reply {
    /// Done.
    Done(Value),
    /// Not done.
    Failed {
        /// The error and its causes, joined by colons.
        message: String,
        /// The daemon's stable reason string, empty for errors of the client.
        reason: String,
    },
}
