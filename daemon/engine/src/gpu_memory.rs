//! Whose the memory of a GPU is.

use gdrd_hal::{GpuMemoryFact, GpuUuid};

/// Buffers of one GPU by state, bytes. What a descriptor of the daemon holds is in one of them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BufferBytes {
    /// Lent, revoked leases included.
    pub leased: u64,
    /// At hand for a tenant.
    pub ready: u64,
    /// At hand for anyone.
    pub clean: u64,
    /// Being made, registered, zeroed or freed.
    pub changing: u64,
}

impl BufferBytes {
    /// All of them.
    #[must_use]
    pub fn sum(&self) -> u64 {
        self.leased + self.ready + self.clean + self.changing
    }
}

/// Memory of one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuMemoryUse {
    /// Identity.
    pub gpu: GpuUuid,
    /// Name in the topology.
    pub name: String,
    /// Why it is not served; `None` when it is.
    pub unavailable: Option<String>,
    /// Buffers of the daemon.
    pub buffers: BufferBytes,
    /// What the driver says of it; `None` where it does not tell.
    pub driver: Option<GpuMemoryFact>,
}

impl GpuMemoryUse {
    /// What is in use beside buffers and the daemon's own contexts: jobs, and the driver's part in them.
    #[must_use]
    pub fn others_bytes(&self) -> Option<u64> {
        let driver = self.driver?;
        Some(driver.used_bytes.saturating_sub(self.buffers.sum() + driver.context_bytes))
    }
}
