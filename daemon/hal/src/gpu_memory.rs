//! GPU memory by fd, size and UUID. No pointer or context crosses this trait: CUDA lives in a worker process per GPU.

use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};

use crate::GpuMemoryError;

/// Identity of a GPU as NVML prints it (`GPU-…`, or `MIG-…` for a slice).
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GpuUuid(pub String);

impl fmt::Display for GpuUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What a GPU-memory backend can do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuMemoryCapabilities {
    /// Every length is a multiple of this many bytes (2 MiB with CUDA VMM).
    pub granularity_bytes: u64,
    /// Whether allocations carry a dma-buf fd that an HCA can register.
    pub dma_buf: bool,
}

/// Memory of one GPU at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuMemoryUsage {
    /// All memory of the GPU, bytes.
    pub total_bytes: u64,
    /// What is free for anyone, bytes.
    pub free_bytes: u64,
}

/// Descriptors of an allocation that outlived the process that made it.
#[derive(Debug)]
pub struct KeptMemory {
    /// As [`GpuAllocation::memory_fd`] gave it.
    pub memory: OwnedFd,
    /// As [`GpuAllocation::dma_buf_fd`] gave it.
    pub dma_buf: Option<OwnedFd>,
}

/// Allocates GPU memory. All calls may block on the driver.
pub trait GpuMemory: Send + Sync {
    /// What this backend can do; constant for its life.
    fn capabilities(&self) -> GpuMemoryCapabilities;

    /// Memory of one GPU now.
    ///
    /// # Errors
    /// `UnknownGpu`, `Lost`, `Driver`.
    fn usage(&self, gpu: &GpuUuid) -> Result<GpuMemoryUsage, GpuMemoryError>;

    /// A new allocation, zeroed, exported as fd (and dma-buf where the capability says so).
    ///
    /// # Errors
    /// `UnknownGpu`, `BadLength`, `OutOfMemory`, `Lost`, `Driver`.
    fn allocate(&self, gpu: &GpuUuid, len_bytes: u64) -> Result<Box<dyn GpuAllocation>, GpuMemoryError>;

    /// Goes on with an allocation of this GPU that an earlier process made. Its content stays; whether the descriptors are
    /// what the caller says is found out at the first use at the latest.
    ///
    /// # Errors
    /// `UnknownGpu`, `BadLength`, `OutOfMemory` (a backend that keeps a budget), `Lost`, `Driver`.
    fn import(&self, gpu: &GpuUuid, len_bytes: u64, kept: KeptMemory)
    -> Result<Box<dyn GpuAllocation>, GpuMemoryError>;

    /// Whether a descriptor of a memfd is device memory that HCAs take for a dma-buf, as on a simulated host. A real
    /// dma-buf is known by its name, and this is not asked.
    fn is_device_memory(&self, fd: BorrowedFd<'_>) -> bool {
        let _ = fd;
        false
    }

    /// Lets go of the device: ends what holds its files open, and refuses calls as `Lost` until [`GpuMemory::resume`].
    /// Allocations stay with their fds. A backend that holds nothing does nothing.
    ///
    /// # Errors
    /// `UnknownGpu`.
    fn drain(&self, gpu: &GpuUuid) -> Result<(), GpuMemoryError> {
        let _ = gpu;
        Ok(())
    }

    /// Serves a drained GPU again.
    ///
    /// # Errors
    /// `UnknownGpu`.
    fn resume(&self, gpu: &GpuUuid) -> Result<(), GpuMemoryError> {
        let _ = gpu;
        Ok(())
    }
}

/// One exported allocation. Dropping it ends this process's hold; the memory lives on while anyone
/// else holds an fd or a mapping of it (`cuda.h`, cuMemExportToShareableHandle).
pub trait GpuAllocation: Send + Sync {
    /// The GPU whose memory it is.
    fn gpu(&self) -> &GpuUuid;

    /// Its length in bytes, a multiple of the granularity.
    fn len_bytes(&self) -> u64;

    /// The fd that a client imports.
    fn memory_fd(&self) -> BorrowedFd<'_>;

    /// The fd that an HCA registers, where there is one.
    fn dma_buf_fd(&self) -> Option<BorrowedFd<'_>>;

    /// Overwrites every byte with zero in place and returns when that is done and visible to all.
    ///
    /// # Errors
    /// `Lost`, `Driver`: then the content is unknown and the allocation must be destroyed.
    fn scrub(&self) -> Result<(), GpuMemoryError>;
}
