//! What a worker serves: one device. CUDA in the daemon, memfds in tests.

use std::os::fd::{BorrowedFd, OwnedFd};

use gdrd_hal::GpuAtomic;
use serde::{Deserialize, Serialize};

/// What kind of failure a call had.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum DeviceErrorKind {
    /// Not that much memory is left.
    OutOfMemory,
    /// The call is refused; the device goes on.
    Refused,
    /// The context is spoilt: every later call in this process fails too.
    Sticky,
    /// The device is gone.
    Lost,
}

/// A failed call on a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{call}: {reason}")]
pub struct DeviceError {
    /// Kind.
    pub kind: DeviceErrorKind,
    /// The driver call.
    pub call: String,
    /// What the driver said.
    pub reason: String,
}

impl DeviceError {
    /// A call refused before it reached the driver, or by it.
    #[must_use]
    pub fn refused(call: &str, reason: impl Into<String>) -> Self {
        Self { kind: DeviceErrorKind::Refused, call: call.to_owned(), reason: reason.into() }
    }
}

/// What a device tells once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceFacts {
    /// Every allocation is a multiple of this many bytes.
    pub granularity_bytes: u64,
    /// Whether allocations are exported as dma-buf.
    pub dma_buf: bool,
}

/// Memory of a device at one moment, bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceMemory {
    /// All of it.
    pub total_bytes: u64,
    /// What is free.
    pub free_bytes: u64,
}

/// A new allocation.
#[derive(Debug)]
pub struct Exported {
    /// Its number in this worker.
    pub id: u64,
    /// What a client imports.
    pub memory: OwnedFd,
    /// What an HCA registers.
    pub dma_buf: Option<OwnedFd>,
}

/// A place in memory that a worker knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Place {
    /// In an allocation.
    Memory {
        /// Its number.
        id: u64,
        /// Bytes from its start.
        offset: u64,
    },
    /// In the staging segment.
    Staging {
        /// Bytes from its start.
        offset: u64,
    },
}

/// One device. Calls block until they are done on it; after a `Sticky` or `Lost` error nothing more is asked.
pub trait Device {
    /// What it can do.
    fn facts(&self) -> DeviceFacts;

    /// Its memory now.
    ///
    /// # Errors
    /// Any kind but `OutOfMemory`.
    fn memory(&self) -> Result<DeviceMemory, DeviceError>;

    /// A new allocation, zeroed and exported.
    ///
    /// # Errors
    /// Any kind.
    fn allocate(&mut self, len_bytes: u64) -> Result<Exported, DeviceError>;

    /// Takes an allocation that an earlier worker made, by its fd, and gives it a number.
    ///
    /// # Errors
    /// Any kind.
    fn import(&mut self, memory: BorrowedFd<'_>, len_bytes: u64) -> Result<u64, DeviceError>;

    /// Zeroes an allocation, and returns when that is done.
    ///
    /// # Errors
    /// Any kind; then the content is unknown.
    fn scrub(&mut self, id: u64) -> Result<(), DeviceError>;

    /// Copies.
    ///
    /// # Errors
    /// Any kind; `Refused` for a range that is not there.
    fn copy(&mut self, from: Place, to: Place, len_bytes: u64) -> Result<(), DeviceError>;

    /// Does an atomic operation on the u64 at a place and returns the old value.
    ///
    /// # Errors
    /// As [`Device::copy`].
    fn atomic(&mut self, id: u64, offset: u64, operation: GpuAtomic) -> Result<u64, DeviceError>;

    /// Forgets an allocation: this process holds it no more. Unknown numbers are ignored.
    fn forget(&mut self, id: u64);
}
