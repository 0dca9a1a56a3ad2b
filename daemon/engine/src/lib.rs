//! The engine: tenants, sessions, leases, pools, registrations and queue pairs of one host.
//!
//! Role: decides who may use which GPU memory through which HCA, and makes it so. [`Engine`] is the
//! handle that the server uses; calls return at once or as a [`Call`] that any executor can await.
//!
//! Owner of state: the state machine (module `core`) holds every decision as plain ids and is pure;
//! the runtime holds the objects of `gdrd-hal` behind those ids and runs what may block on its own
//! threads.
//!
//! Must not know: gRPC, sockets, tokio, or which backend serves the hardware.
#![forbid(unsafe_code)]

pub mod broker;
mod call;
mod config;
mod core;
mod direct;
mod drain;
mod engine;
mod error;
mod gpu_memory;
mod ids;
mod in_use;
mod journal;
mod keep;
mod lease;
mod peer;
mod plan;
mod policy;
mod probe;
mod pulse;
mod queue_pair;
mod registration;
mod runtime;
mod session;
mod state_file;
mod stats;
mod table;

/// Words of the hardware traits that requests and answers are made of.
pub use gdrd_hal::{Access, Endpoint, Gid, GpuUuid, LinkLayer, QueuePairState, QueuePairType};

pub use call::{Call, Undo};
pub use config::{
    BrokerConfig, CacheConfig, EngineConfig, GpuProof, HugePages, Limits, NumaCpus, PoolConfig, Timeouts,
};
pub use direct::{DirectGrant, DirectRegion};
pub use drain::{Drained, DrainedGpu, UnderWay};
pub use engine::{Engine, Hardware};
pub use error::{EngineError, ErrorKind};
pub use gpu_memory::{BufferBytes, GpuMemoryUse};
pub use ids::{
    DeviceNumber, Generation, LeaseId, MemoryId, QueuePairId, RegistrationId, RemoteKey, SessionId, SlotId, Token,
};
pub use in_use::InUse;
pub use keep::{Continuity, Keeper, Name, NotAName, Watch};
pub use lease::{
    AcquireRequest, LeaseEvent, LeaseEventKind, LeaseGrant, LeaseInfo, LeasePage, LeaseState, MemoryKind, MemoryPlace,
    RegistrationInfo,
};
pub use peer::{Peer, TenantKey};
pub use plan::{HostPlan, PlannedGpu};
pub use policy::{Policy, Prewarm, Quota, Rule, Subject, Traffic};
pub use probe::{ProbeFigures, ProbeOutcome, Probed};
pub use queue_pair::{QueuePairGrant, QueuePairInfo, QueuePairPage, QueuePairRequest};
pub use registration::{
    AdoptRequest, AdoptedKind, AdoptedMemory, MemoryRef, Merging, RangeRequest, RegisterRequest, RegisteredPart,
    RegisteredRange, RegistrationGrant, RegistrationPage,
};
pub use runtime::HeldBack;
pub use session::{SessionEvent, SessionOpened, SessionResumed, Viewer};
pub use state_file::{boot_id, read_state_file, replace_state_file};
pub use stats::Stat;
