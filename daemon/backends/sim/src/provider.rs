//! Providers and what they can do.

use gdrd_hal::{
    AtomicScope, HcaCapabilities, IWARP_HAS_RDMA_CM_ONLY, MAX_INLINE_BYTES, QueuePairType, TRANSPORT_HAS_NO_RC,
};
use gdrd_topology::model::{Hca, HcaOrigin, PciFunction};

/// Providers whose limits an HCA can be given. The abilities are those of the real provider as
/// `ibv_devinfo -v` and the kernel drivers show them; the sizes are the simulation's own, at or below it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Provider {
    /// NVIDIA ConnectX: all that this crate knows.
    Mlx5,
    /// Soft RoCE: no dma-buf (drivers/infiniband/sw/rxe has no `reg_user_mr_dmabuf`).
    Rxe,
    /// Soft iWARP: no queue pairs without rdma_cm, no atomics, no dma-buf, sets its own iova (drivers/infiniband/sw/siw).
    Siw,
    /// AWS EFA: no RC, so no queue pairs, and no atomics (drivers/infiniband/hw/efa).
    Efa,
    /// Any other: only what all providers with RC share, so neither atomics nor dma-buf.
    Other,
}

impl Provider {
    /// The provider of an RDMA device of a profile: by its PCI driver, else by vendor and kind.
    #[must_use]
    pub fn of(hca: &Hca, function: Option<&PciFunction>) -> Self {
        match &hca.origin {
            // Only rxe names its netdev.
            HcaOrigin::Soft { netdev: Some(_) } => return Self::Rxe,
            HcaOrigin::Soft { netdev: None } => return Self::Siw,
            _ => {}
        }
        let driver = function.and_then(|function| function.driver.as_deref());
        match (driver, function.and_then(|function| function.vendor)) {
            (Some("mlx5_core"), _) | (None, Some(0x15b3)) => Self::Mlx5,
            (Some("efa"), _) | (None, Some(0x1d0f)) => Self::Efa,
            _ => Self::Other,
        }
    }

    /// What HCAs of this provider can do.
    #[must_use]
    pub fn capabilities(self) -> HcaCapabilities {
        let all = HcaCapabilities {
            queue_pair_types: vec![QueuePairType::Rc, QueuePairType::Ud],
            no_queue_pairs: None,
            atomics: AtomicScope::Hca,
            iova_honoured: true,
            dma_buf: true,
            direct: false,
            software: false,
            max_inline_bytes: u32::try_from(MAX_INLINE_BYTES).unwrap_or(u32::MAX),
            max_work_requests: 16_384,
            max_completions: 4_194_303,
            max_shared_receives: 0,
            max_memory_regions: 1 << 20,
            max_message_bytes: 1 << 31,
        };
        match self {
            Self::Mlx5 => HcaCapabilities { direct: true, ..all },
            Self::Rxe => HcaCapabilities {
                dma_buf: false,
                software: true,
                max_completions: 32_767,
                max_memory_regions: 1 << 19,
                ..all
            },
            Self::Other => HcaCapabilities {
                atomics: AtomicScope::None,
                dma_buf: false,
                max_completions: 32_767,
                max_memory_regions: 1 << 18,
                ..all
            },
            Self::Siw => HcaCapabilities {
                queue_pair_types: Vec::new(),
                no_queue_pairs: Some(IWARP_HAS_RDMA_CM_ONLY),
                atomics: AtomicScope::None,
                iova_honoured: false,
                dma_buf: false,
                software: true,
                max_completions: 32_767,
                max_memory_regions: 1 << 19,
                ..all
            },
            Self::Efa => HcaCapabilities {
                queue_pair_types: Vec::new(),
                no_queue_pairs: Some(TRANSPORT_HAS_NO_RC),
                atomics: AtomicScope::None,
                max_inline_bytes: 32,
                max_work_requests: 4096,
                max_completions: 32_767,
                max_memory_regions: 1 << 18,
                ..all
            },
        }
    }
}
