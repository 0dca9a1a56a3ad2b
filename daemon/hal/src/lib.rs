//! Narrow hardware traits: GPU memory, HCAs and GPU facts.
//!
//! Role: the seam between the engine and hardware. Every backend (sim, verbs, cuda, nvml) implements
//! these traits and passes the conformance suite unchanged; what a backend cannot do it declares
//! as a capability, never by a kinder or silent behaviour.
//!
//! Must not know: tenants, sessions, leases, pools, gRPC. GPU memory speaks only fds, sizes and
//! UUIDs, because CUDA lives in another process.
#![forbid(unsafe_code)]

mod capabilities;
mod causes;
#[cfg(feature = "conformance")]
pub mod conformance;
mod error;
mod gpu_bytes;
mod gpu_facts;
mod gpu_memory;
mod hca;
mod queues;
mod work;

pub use capabilities::{AtomicScope, HcaCapabilities, IWARP_HAS_RDMA_CM_ONLY, TRANSPORT_HAS_NO_RC};
pub use causes::text_with_causes;
pub use error::{GpuMemoryError, HcaError, PostError};
pub use gpu_bytes::{GpuAtomic, GpuBytes, GpuCopies};
pub use gpu_facts::{Bar1Fact, DeviceNumber, GpuFact, GpuFacts, GpuHealth, GpuMemoryFact};
pub use gpu_memory::{GpuAllocation, GpuMemory, GpuMemoryCapabilities, GpuMemoryUsage, GpuUuid, KeptMemory};
pub use hca::{
    ACK_TIMEOUT_EXPONENT, Access, DirectContext, Endpoint, GRH_BYTES, Gid, GidEntry, GidType, Hca, HcaEvent, LinkLayer,
    MemoryRegion, MemorySource, PortAttributes, PortState, ProtectionDomain, QueuePair, QueuePairConfig,
    QueuePairParts, QueuePairState, QueuePairType, RETRY_COUNT, RNR_RETRY,
};
pub use queues::{CompletionQueue, CqId, SharedReceiveQueue, SrqId, WorkQueue};
pub use work::{
    LocalSpan, MAX_INLINE_BYTES, Opcode, ReceiveRequest, RemoteSpan, WorkCompletion, WorkRequest, WorkStatus,
};
