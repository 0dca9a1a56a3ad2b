//! What the state machine is told.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use gdrd_hal::{Endpoint, GpuUuid};
use serde::{Deserialize, Serialize};

use super::adopted::NewMemory;
use super::host::HcaIndex;
use super::restore::Restored;
use crate::ids::{Generation, LeaseId, MemoryId, QueuePairId, RegistrationId, SessionId, SlotId, TokenDigest};
use crate::lease::AcquireRequest;
use crate::peer::TenantKey;
use crate::plan::HostPlan;
use crate::policy::Quota;
use crate::queue_pair::QueuePairRequest;
use crate::registration::RegisterRequest;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $inner:ty) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        pub(crate) struct $name(pub(crate) $inner);
    };
}

id!(
    /// One tenant while it has a session, a lease, or anything being given back.
    TenantId,
    u64
);
id!(
    /// One piece of memory.
    AllocationId,
    u64
);
id!(
    /// One memory region of the registration cache.
    RegionId,
    u64
);
id!(
    /// One call to register, until it is answered.
    BatchId,
    u64
);
id!(
    /// One call to be answered, numbered by the runtime.
    CallId,
    u64
);
id!(
    /// One grant of a lease to a session; what an undo names.
    GrantId,
    u64
);
id!(
    /// Place of a GPU in the host's list. Never used again.
    GpuIndex,
    u16
);

/// Why a job did not succeed, as the state machine tells kinds apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FailureKind {
    /// The GPU or the host has not that much memory.
    OutOfMemory,
    /// The daemon, or the system, has no file descriptor left.
    OutOfDescriptors,
    /// No port of the HCA is active.
    PortsDown,
    /// A limit of the HCA.
    Exhausted,
    /// The provider cannot.
    Unsupported,
    /// An argument that only the driver could check.
    Invalid,
    /// The device is lost.
    Lost,
    /// Nothing leads to the peer's address.
    Unreachable,
    /// Anything else.
    Driver,
    /// The daemon's own fault.
    Bug,
}

/// Why a job did not succeed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) kind: FailureKind,
    /// The HCA at fault, where it is one.
    pub(crate) hca: Option<HcaIndex>,
    /// What the backend said.
    pub(crate) message: String,
}

/// Buffers to make ready when a tenant appears.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WarmUp {
    pub(crate) gpu: GpuIndex,
    pub(crate) size_bytes: u64,
    pub(crate) count: u32,
}

/// A session to be opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NewSession {
    pub(crate) tenant: TenantKey,
    pub(crate) quota: Quota,
    pub(crate) warm_up: Vec<WarmUp>,
    pub(crate) admin: bool,
    pub(crate) client_name: String,
    pub(crate) token: TokenDigest,
}

/// One thing that happened.
#[derive(Debug, Clone)]
pub(crate) enum Input {
    /// Answered `Session`.
    OpenSession { call: CallId, session: NewSession },
    /// The session's socket or process ended.
    CloseSession { session: SessionId },
    /// Answered `Done`.
    ProveGpus { call: CallId, session: SessionId, gpus: Vec<GpuIndex> },
    /// Answered `Granted`, at once or later.
    Acquire { call: CallId, session: SessionId, request: AcquireRequest },
    /// The caller does not wait for the answer any more.
    Cancel { call: CallId },
    /// Answered `Granted`.
    Open { call: CallId, session: SessionId, lease: LeaseId },
    /// Answered `Done`. `receives`: a queue pair that has receives posted on the lease, if any.
    Release {
        call: CallId,
        session: SessionId,
        lease: LeaseId,
        generation: Option<Generation>,
        receives: Option<QueuePairId>,
    },
    /// A grant was not taken.
    Undo { session: SessionId, lease: LeaseId, grant: GrantId },
    /// Answered `Done`.
    Detach { call: CallId, session: SessionId, lease: LeaseId, ttl: Duration },
    /// Answered `QueuePair`, later.
    CreateQueuePair { call: CallId, session: SessionId, request: QueuePairRequest },
    /// Answered `Done`, later.
    ConnectQueuePair { call: CallId, session: SessionId, queue_pair: QueuePairId, remote: Endpoint },
    /// Answered `Done`, later.
    DestroyQueuePair { call: CallId, session: SessionId, queue_pair: QueuePairId },
    /// A new queue pair was not taken.
    UndoQueuePair { queue_pair: QueuePairId },
    /// Answered `Adopted`.
    Adopt { call: CallId, session: SessionId, memory: NewMemory },
    /// Answered `Done` once no HCA reaches the memory and it is let go of.
    Disown { call: CallId, session: SessionId, memory: MemoryId },
    /// Answered `Registered`, at once or later.
    Register { call: CallId, session: SessionId, request: RegisterRequest },
    /// Answered `Deregistered`.
    Deregister { call: CallId, session: SessionId, registrations: Vec<RegistrationId> },
    /// An answer to `Register` was not taken.
    UndoRegistrations { registrations: Vec<RegistrationId> },

    /// Result of `Job::RegisterRegion`: the region's wire address, and how long the driver took.
    RegionRegistered { region: RegionId, result: Result<u64, Failure>, cost_ns: u64 },
    /// Result of `Effect::QuiesceRegion`.
    RegionQuiesced { region: RegionId },
    /// Result of `Job::DeregisterRegion`; it is gone either way.
    RegionDeregistered { region: RegionId, result: Result<(), Failure> },
    /// Result of `Job::CloseMemory`.
    MemoryClosed { memory: MemoryId },
    /// Result of `Job::Allocate`.
    Allocated { allocation: AllocationId, result: Result<(), Failure> },
    /// Result of `Job::Register`: the wire address of each registration, in the job's order; or none was made.
    Registered { allocation: AllocationId, result: Result<Vec<u64>, Failure> },
    /// Result of `Effect::Quiesce`.
    Quiesced { allocation: AllocationId },
    /// Result of `Job::Deregister`; the registrations are gone either way.
    Deregistered { allocation: AllocationId, result: Result<(), Failure> },
    /// Result of `Job::Scrub`.
    Scrubbed { allocation: AllocationId, result: Result<(), Failure> },
    /// Result of `Job::Free`.
    Freed { allocation: AllocationId },
    /// Result of `Effect::Shed`.
    Shed { tenant: TenantId, slot: SlotId },
    /// Result of `Job::CreateQueuePair`.
    QueuePairCreated { queue_pair: QueuePairId, result: Result<(), Failure> },
    /// Result of `Job::ConnectQueuePair`.
    QueuePairConnected { queue_pair: QueuePairId, result: Result<(), Failure> },
    /// Result of `Job::DestroyQueuePair`.
    QueuePairDestroyed { queue_pair: QueuePairId },
    /// A queue pair went into error by itself.
    QueuePairFailed { queue_pair: QueuePairId, message: String },

    /// A GPU was lost.
    GpuLost { gpu: GpuIndex, message: String },
    /// A GPU can be used again.
    GpuHealthy { gpu: GpuIndex },
    /// An administrator has it served again; why it cannot be, where it was lost meanwhile.
    GpuResumed { gpu: GpuIndex, lost: Option<String> },
    /// These GPUs have a device node, and no others.
    GpuNodes { with_node: BTreeSet<GpuIndex> },
    /// An HCA was lost.
    HcaGone { hca: HcaIndex, message: String },
    /// An HCA was found, or found again: it takes the next place.
    HcaFound { name: Arc<str> },
    /// A port lost its link.
    PortDown { hca: HcaIndex, port_num: u8 },
    /// Another pairing. Of GPUs that come with it, these are not served, and why.
    Plan { plan: HostPlan, unserved: BTreeMap<GpuUuid, String> },
    /// Whether anyone watches leases.
    Watched { watched: bool },
    /// Takes up what an earlier daemon left. The first input, if it comes at all.
    Restore(Box<Restored>),
    /// The client of a session that was taken up is there, and may have so much.
    Resume { session: SessionId, admin: bool, quota: Quota },
    /// Nothing but that time has passed.
    Time,
    /// Everything ends.
    Shutdown,
}
