//! Bytes of GPU memory for who has no NIC to move them: a simulated HCA over real GPU memory, and tests.

use std::any::Any;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use crate::GpuMemoryError;

/// Finds the GPU memory behind a dma-buf that the same backend exported.
pub trait GpuCopies: Send + Sync {
    /// The memory whose dma-buf this fd, or a duplicate of it, is; `None` for every other file. Makes no driver call.
    fn find(&self, dma_buf: BorrowedFd<'_>) -> Option<Arc<dyn GpuBytes>>;
}

/// An atomic operation on an aligned u64.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum GpuAtomic {
    /// Adds.
    FetchAdd {
        /// What is added.
        operand: u64,
    },
    /// Stores on equality.
    CompareSwap {
        /// What must be there.
        compare: u64,
        /// What is stored.
        operand: u64,
    },
}

/// Memory of one allocation, kept alive by whoever holds this. Every call blocks until it is done on the device.
pub trait GpuBytes: Send + Sync {
    /// Its length, bytes.
    fn len_bytes(&self) -> u64;

    /// Copies bytes at `offset` into `to`.
    ///
    /// # Errors
    /// `Lost`, `Driver`; `Driver` also for a range that is not in the memory.
    fn read(&self, offset: u64, to: &mut [u8]) -> Result<(), GpuMemoryError>;

    /// Copies `from` to `offset`.
    ///
    /// # Errors
    /// As [`GpuBytes::read`].
    fn write(&self, offset: u64, from: &[u8]) -> Result<(), GpuMemoryError>;

    /// Copies `len_bytes` at `offset` to `to_offset` of `to`, on the device where both are on one. The ranges may
    /// overlap, and then what is copied is undefined.
    ///
    /// # Errors
    /// As [`GpuBytes::read`]; `Driver` also where `to` is of another backend.
    fn copy_to(&self, offset: u64, to: &dyn GpuBytes, to_offset: u64, len_bytes: u64) -> Result<(), GpuMemoryError>;

    /// Does `operation` at an aligned `offset` and returns the old value. Atomic against other calls of this trait
    /// only, not against kernels.
    ///
    /// # Errors
    /// As [`GpuBytes::read`].
    fn atomic(&self, offset: u64, operation: GpuAtomic) -> Result<u64, GpuMemoryError>;

    /// Itself, for [`GpuBytes::copy_to`] to know its own kind.
    fn as_any(&self) -> &dyn Any;
}
