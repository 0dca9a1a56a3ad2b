//! HCAs: protection domains, memory regions and queue pairs, in the words of verbs. What is posted to and polled is in
//! `queues`.
//!
//! Objects are owned by the caller and end on drop; each keeps its parents alive. These calls are cold and may block.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use crate::{CompletionQueue, CqId, HcaCapabilities, HcaError, SharedReceiveQueue, SrqId, WorkQueue};

/// Access rights of a memory region (`enum ibv_access_flags`, ibv_reg_mr(3)). Local read is always allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Access {
    /// The owner's HCA may write (receive, read result, atomic result).
    pub local_write: bool,
    /// Peers may write. Requires `local_write`.
    pub remote_write: bool,
    /// Peers may read.
    pub remote_read: bool,
    /// Peers may use atomics. Requires `local_write`.
    pub remote_atomic: bool,
    /// Writes may pass each other on PCIe: on for data, off for buffers polled as signals.
    pub relaxed_ordering: bool,
}

impl Access {
    /// Every right that a data buffer gets by default.
    pub const DATA: Self =
        Self { local_write: true, remote_write: true, remote_read: true, remote_atomic: true, relaxed_ordering: true };
}

/// Transport retries of an RC queue pair before [`crate::WorkStatus::RetryExceeded`] (`retry_cnt`, ibv_modify_qp(3)).
/// Not the longest, 7, since soft RoCE takes that for without end (drivers/infiniband/sw/rxe/rxe_comp.c) and a dead
/// peer would never be told.
pub const RETRY_COUNT: u8 = 6;

/// Receiver-not-ready retries of an RC queue pair (`rnr_retry`); 7 means without end, so that a message waits
/// until the peer posts a receive, and its own owner ends the wait by moving the queue pair to ERR.
pub const RNR_RETRY: u8 = 7;

/// Local ACK timeout of an RC queue pair (`timeout`): 4.096 us times 2^14, about 67 ms a try.
pub const ACK_TIMEOUT_EXPONENT: u8 = 14;

/// Bytes in front of every message that a UD queue pair receives (global route header, InfiniBand
/// specification vol. 1, 8.3).
pub const GRH_BYTES: u32 = 40;

/// Queue pair types (`enum ibv_qp_type`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum QueuePairType {
    /// Reliable connection.
    Rc,
    /// Unreliable datagram.
    Ud,
}

/// Queue pair states (`enum ibv_qp_state`, ibv_modify_qp(3)).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum QueuePairState {
    /// Fresh: nothing can be posted.
    Reset,
    /// Receives can be posted.
    Init,
    /// Ready to receive.
    Rtr,
    /// Ready to send.
    Rts,
    /// Send queue drained on request.
    Sqd,
    /// Send queue in error (not on RC).
    Sqe,
    /// Error: posted work flushes.
    Err,
}

impl QueuePairState {
    /// The name of ibv_modify_qp(3) without its prefix, as in `RTS`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Reset => "RESET",
            Self::Init => "INIT",
            Self::Rtr => "RTR",
            Self::Rts => "RTS",
            Self::Sqd => "SQD",
            Self::Sqe => "SQE",
            Self::Err => "ERR",
        }
    }
}

/// 128-bit port address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Gid(pub [u8; 16]);

/// GID types (`gid_attrs/types` of sysfs).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GidType {
    /// InfiniBand.
    Ib,
    /// RoCE v1.
    RoceV1,
    /// RoCE v2.
    RoceV2,
}

/// One filled row of a port's GID table; empty rows are left out, so indices have gaps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GidEntry {
    /// Row in the table.
    pub gid_index: u16,
    /// The address.
    pub gid: Gid,
    /// Its type.
    pub gid_type: GidType,
}

/// Port states (`enum ibv_port_state`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PortState {
    /// No link.
    Down,
    /// Link, not yet configured by the subnet manager.
    Init,
    /// Configured, not yet usable.
    Armed,
    /// Usable.
    Active,
    /// Anything the driver says that is none of these.
    Unknown,
}

/// Link layers (`IBV_LINK_LAYER_*`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LinkLayer {
    /// InfiniBand.
    InfiniBand,
    /// Ethernet (RoCE, iWARP).
    Ethernet,
    /// Unknown to the driver.
    Unknown,
}

/// One port of an HCA now.
#[derive(Debug, Clone, PartialEq)]
pub struct PortAttributes {
    /// Counted from 1.
    pub port_num: u8,
    /// State.
    pub state: PortState,
    /// Link layer.
    pub link_layer: LinkLayer,
    /// Rate in Gbit/s.
    pub rate_gbps: f64,
    /// LID, 0 on Ethernet.
    pub lid: u16,
    /// Path MTU in bytes that this port can use.
    pub mtu_bytes: u32,
    /// Filled rows of the GID table.
    pub gids: Vec<GidEntry>,
}

/// Asynchronous events (`ibv_get_async_event(3)`).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum HcaEvent {
    /// A port became active.
    PortActive {
        /// The port.
        port_num: u8,
    },
    /// A port went down.
    PortDown {
        /// The port.
        port_num: u8,
    },
    /// The GID table changed.
    GidChange {
        /// The port.
        port_num: u8,
    },
    /// A queue pair went into error.
    QueuePairFatal {
        /// Its number.
        qp_num: u32,
    },
    /// Fewer receives are left than [`SharedReceiveQueue::set_limit`] asked to be told of.
    SharedReceivesLow {
        /// The queue.
        srq: SrqId,
    },
    /// A shared receive queue takes and gives no receives any more.
    SharedReceiveQueueFatal {
        /// The queue.
        srq: SrqId,
    },
    /// A queue pair in ERR takes no more of its shared receive queue: all that it took have completed.
    LastSharedReceive {
        /// Its number.
        qp_num: u32,
    },
    /// The device is unusable; everything on it is gone.
    DeviceFatal,
}

/// Memory that an HCA can register: an fd, never an address.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum MemorySource<'a> {
    /// A dma-buf of GPU memory.
    DmaBuf {
        /// The dma-buf.
        fd: BorrowedFd<'a>,
        /// Start of the range in it, bytes.
        offset: u64,
        /// Length, bytes.
        len_bytes: u64,
    },
    /// A sealed memfd of host memory.
    Host {
        /// The memfd; SHRINK sealed, so that no page can vanish.
        fd: BorrowedFd<'a>,
        /// Start of the range in it, bytes.
        offset: u64,
        /// Length, bytes.
        len_bytes: u64,
    },
}

/// One RDMA device. Cold calls; each may block on the driver.
pub trait Hca: Send + Sync {
    /// Name as verbs gives it (`mlx5_0`).
    fn name(&self) -> &str;

    /// What it can do.
    fn capabilities(&self) -> HcaCapabilities;

    /// Its ports, now.
    ///
    /// # Errors
    /// `Gone`, `Driver`.
    fn ports(&self) -> Result<Vec<PortAttributes>, HcaError>;

    /// A new protection domain.
    ///
    /// # Errors
    /// `Exhausted`, `Gone`, `Driver`.
    fn alloc_pd(&self) -> Result<Arc<dyn ProtectionDomain>, HcaError>;

    /// A completion queue of at least `depth` entries.
    ///
    /// # Errors
    /// `Invalid` (depth 0 or above the capability), `Exhausted`, `Gone`, `Driver`.
    fn create_cq(&self, depth: u32) -> Result<Box<dyn CompletionQueue>, HcaError>;

    /// A context of its own for one client, made without the rights to raw packets and device internals that the daemon may have.
    ///
    /// # Errors
    /// `Unsupported` where the capability says so, `Exhausted`, `Gone`, `Driver`.
    fn open_direct(&self) -> Result<Arc<dyn DirectContext>, HcaError> {
        Err(HcaError::Unsupported { hca: self.name().to_owned(), what: "hand out contexts".to_owned() })
    }

    /// Takes the asynchronous events since the last call; does not block.
    fn take_events(&self) -> Vec<HcaEvent>;

    /// An fd that is readable while [`Hca::take_events`] has something to give, so that nobody polls for
    /// events (`async_fd` of `struct ibv_context`). `None`: the backend never has events.
    fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// A context of one client's own, with one protection domain, for the client to import and make its queue pairs in (ibv_import_device(3),
/// ibv_import_pd(3)). Whoever has the descriptor has every object in the context: nothing of others may be in it. It ends here
/// when it and its regions are dropped; the kernel keeps what the client made until the client has closed it too.
pub trait DirectContext: Send + Sync {
    /// Its descriptor (`cmd_fd` of `struct ibv_context`).
    fn command_fd(&self) -> BorrowedFd<'_>;

    /// Handle of its protection domain (`handle` of `struct ibv_pd`).
    fn pd_handle(&self) -> u32;

    /// As [`ProtectionDomain::register`], with the region's handle (`handle` of `struct ibv_mr`, ibv_import_mr(3)).
    ///
    /// # Errors
    /// As [`ProtectionDomain::register`].
    fn register(
        &self,
        source: MemorySource<'_>,
        access: Access,
        iova: u64,
    ) -> Result<(Box<dyn MemoryRegion>, u32), HcaError>;
}

/// A protection domain: the wall between tenants. It ends when it and all made in it are dropped.
pub trait ProtectionDomain: Send + Sync {
    /// Registers a range of memory. `iova` is the wire address asked for its first byte; the region
    /// tells the one that holds. The fd may be closed after. Where the iova is honoured it must lie at the same
    /// place in its page of 4096 bytes as the offset does (`ib_uverbs_reg_mr`).
    ///
    /// # Errors
    /// `Invalid` (no bytes, range outside of the memory, iova that wraps or lies elsewhere in its page, remote
    /// write or atomic without local write, an fd of the other kind, a memfd that can shrink), `Unsupported`
    /// (dma-buf on a provider without), `Exhausted`, `Gone`, `Driver`.
    fn register(&self, source: MemorySource<'_>, access: Access, iova: u64) -> Result<Box<dyn MemoryRegion>, HcaError>;

    /// A queue pair in RESET whose completions go to `cq` of the same HCA.
    ///
    /// # Errors
    /// `Invalid` (unknown CQ, depth 0 or above the capability), `Unsupported` (type), `Exhausted`, `Gone`, `Driver`.
    fn create_queue_pair(&self, cq: CqId, config: &QueuePairConfig) -> Result<QueuePairParts, HcaError>;

    /// A shared receive queue for at least `depth` receives (ibv_create_srq(3)).
    ///
    /// # Errors
    /// `Unsupported` where the capability says so, `Invalid` (depth 0 or above the capability), `Exhausted`, `Gone`, `Driver`.
    fn create_shared_receive_queue(&self, depth: u32) -> Result<Box<dyn SharedReceiveQueue>, HcaError>;

    /// As [`ProtectionDomain::create_queue_pair`], with receives taken from a shared receive queue of this domain, which the
    /// queue pair keeps alive: `recv_depth` is not looked at, and its work side takes no receives. One that ends before its
    /// [`HcaEvent::LastSharedReceive`] takes those with it that it had begun to fill.
    ///
    /// # Errors
    /// The same, and `Invalid` for a queue that this domain has not.
    fn create_queue_pair_on(&self, cq: CqId, srq: SrqId, config: &QueuePairConfig) -> Result<QueuePairParts, HcaError>;
}

/// A registered range. From the return of `deregister` (or drop) on no operation reaches the memory through it.
pub trait MemoryRegion: Send + Sync {
    /// Local key.
    fn lkey(&self) -> u32;
    /// Remote key: a capability, never logged.
    fn rkey(&self) -> u32;
    /// Wire address of its first byte.
    fn iova(&self) -> u64;
    /// Length in bytes.
    fn len_bytes(&self) -> u64;
    /// Rights it was made with.
    fn access(&self) -> Access;

    /// Ends it and says whether the driver agreed; drop does the same silently.
    ///
    /// # Errors
    /// `Driver`, `Gone`. The region is given up either way.
    fn deregister(self: Box<Self>) -> Result<(), HcaError>;
}

/// What a queue pair is made with (`struct ibv_qp_init_attr`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueuePairConfig {
    /// Type.
    pub qp_type: QueuePairType,
    /// Most sends outstanding, at least 1.
    pub send_depth: u32,
    /// Most receives outstanding, at least 1.
    pub recv_depth: u32,
    /// Inline payload wanted, bytes.
    pub inline_bytes: u32,
    /// Port, counted from 1.
    pub port_num: u8,
}

/// Address of one side of a connection, exchanged by the job's own means.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    /// Queue pair number, 24 bits.
    pub qp_num: u32,
    /// Port it is on.
    pub port_num: u8,
    /// GID of that port, zero where LIDs are used.
    pub gid: Gid,
    /// Row of `gid` in the owner's table.
    pub gid_index: u16,
    /// LID, 0 on Ethernet.
    pub lid: u16,
    /// First packet sequence number, 24 bits.
    pub psn: u32,
    /// Path MTU in bytes.
    pub mtu_bytes: u32,
    /// Link layer of the port.
    pub link_layer: LinkLayer,
}

/// A new queue pair: its control side, shared, and its posting side, with one owner.
pub struct QueuePairParts {
    /// State, connection, teardown.
    pub control: Arc<dyn QueuePair>,
    /// Posting.
    pub work: Box<dyn WorkQueue>,
}

impl std::fmt::Debug for QueuePairParts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("QueuePairParts").field("qp_num", &self.control.qp_num()).finish_non_exhaustive()
    }
}

/// Control side of a queue pair. It is destroyed when control and work side are both dropped.
pub trait QueuePair: Send + Sync {
    /// Its number.
    fn qp_num(&self) -> u32;

    /// Its state as the device has it.
    ///
    /// # Errors
    /// `Gone`, `Driver`.
    fn state(&self) -> Result<QueuePairState, HcaError>;

    /// RESET to INIT: receives may be posted.
    ///
    /// # Errors
    /// `Invalid` (other state, unknown port), `Gone`, `Driver`.
    fn to_init(&self) -> Result<(), HcaError>;

    /// What the peer needs to connect. Valid from INIT on.
    ///
    /// # Errors
    /// `Invalid` (no usable GID or LID on the port), `Gone`, `Driver`.
    fn endpoint(&self) -> Result<Endpoint, HcaError>;

    /// INIT to RTR and RTS. RC: against `remote`, with [`RETRY_COUNT`] and [`RNR_RETRY`]; the path MTU is the
    /// smaller of both ends'. UD: receives from anyone; `remote` is the one address that sends go to
    /// (an address handle is made of it), and received messages start [`GRH_BYTES`] into the buffer.
    ///
    /// # Errors
    /// `Invalid` (other state, link layers differ, MTU unknown), `Gone`, `Driver` (on Ethernet also when
    /// the GID cannot be resolved).
    fn connect(&self, remote: &Endpoint) -> Result<(), HcaError>;

    /// To ERR from any state: posted work completes as flushed.
    ///
    /// # Errors
    /// `Gone`, `Driver`.
    fn to_error(&self) -> Result<(), HcaError>;
}
