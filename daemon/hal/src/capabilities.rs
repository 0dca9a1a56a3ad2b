//! What an HCA's provider can do, so that the engine refuses with a reason instead of trying.

use crate::QueuePairType;

/// What atomics are atomic against (`enum ibv_atomic_cap`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum AtomicScope {
    /// No atomics.
    None,
    /// Against other operations through the same HCA only.
    Hca,
    /// Against all, the CPU and other HCAs included.
    Global,
}

/// Why there are no queue pairs where the transport is iWARP.
pub const IWARP_HAS_RDMA_CM_ONLY: &str = "iWARP connects through rdma_cm only, which gdrd does not speak";
/// Why there are none where it is neither iWARP nor of InfiniBand's kind.
pub const TRANSPORT_HAS_NO_RC: &str =
    "its transport has no RC queue pairs (EFA has SRD instead, which gdrd does not speak)";

/// What an HCA's provider can do; constant while the device lives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HcaCapabilities {
    /// Queue pair types that can be created here.
    pub queue_pair_types: Vec<QueuePairType>,
    /// Why there are none of any type, where there are none.
    pub no_queue_pairs: Option<&'static str>,
    /// Scope of fetch-add and compare-swap.
    pub atomics: AtomicScope,
    /// Whether the iova asked for is honoured (mlx5, rxe) or the provider sets its own (siw).
    pub iova_honoured: bool,
    /// Whether dma-buf fds can be registered.
    pub dma_buf: bool,
    /// Whether another process can import a context of this device (ibv_import_device(3)).
    pub direct: bool,
    /// Whether threads of this host's kernel move the data (soft RoCE, soft iWARP): who spins until they are done may hold the
    /// CPU that they need.
    pub software: bool,
    /// Longest inline payload of a send, bytes.
    pub max_inline_bytes: u32,
    /// Most entries of a work queue.
    pub max_work_requests: u32,
    /// Most entries of a completion queue.
    pub max_completions: u32,
    /// Most receives of a shared receive queue, 0 where there are none.
    pub max_shared_receives: u32,
    /// Most memory regions on the HCA.
    pub max_memory_regions: u32,
    /// Longest message, bytes (2^31 on most).
    pub max_message_bytes: u64,
}

impl HcaCapabilities {
    /// Whether queue pairs of this type can be created.
    ///
    /// # Errors
    /// What cannot be done, and why where that is known.
    pub fn check_queue_pair_type(&self, qp_type: QueuePairType) -> Result<(), String> {
        match self.no_queue_pairs {
            _ if self.queue_pair_types.contains(&qp_type) => Ok(()),
            Some(reason) => Err(format!("create {qp_type:?} queue pairs: {reason}")),
            None => Err(format!("create {qp_type:?} queue pairs")),
        }
    }
}
