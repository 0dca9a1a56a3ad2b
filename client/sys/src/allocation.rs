//! Memory of cuMemAlloc, and the number by which the driver tells it from whatever is at its address later.

use std::ffi::c_uint;
use std::num::NonZeroU64;
use std::sync::Arc;

use crate::mapping::as_len;
use crate::table::{Address, Driver};
use crate::{CudaError, Gpu};

/// `CU_POINTER_ATTRIBUTE_BUFFER_ID`, cuda.h.
pub(crate) const BUFFER_ID: c_uint = 7;

/// Number of the allocation that has this address now. A process sees each number once: memory that is freed, and what is
/// allocated at its address next, have different ones (`CU_POINTER_ATTRIBUTE_BUFFER_ID`, cuda.h). Needs no current
/// context. 0.3 to 5 µs on an H200.
///
/// # Errors
/// `Absent`; `Driver` for an address that is not of CUDA memory.
#[inline]
pub fn buffer_id(address: u64) -> Result<NonZeroU64, CudaError> {
    let driver = Driver::get()?;
    let mut id = 0_u64;
    // SAFETY: for this attribute the result is an unsigned long long (cuda.h), and `id` is valid for a write of one for
    // the call. The address is looked up, not followed.
    let code = unsafe { (driver.pointer_get_attribute)((&raw mut id).cast(), BUFFER_ID, address) };
    driver.check("cuPointerGetAttribute", code)?;
    NonZeroU64::new(id).ok_or_else(|| CudaError::Absent { what: format!("a buffer id of the memory at {address:#x}") })
}

/// Memory of cuMemAlloc: what cudaMalloc and most frameworks give. Freed on drop.
#[derive(Debug)]
pub struct Allocation {
    gpu: Arc<Gpu>,
    start: Address,
    len_bytes: u64,
}

impl Allocation {
    /// Allocates. Not zeroed.
    ///
    /// # Errors
    /// `Driver`.
    pub fn new(gpu: &Arc<Gpu>, len_bytes: u64) -> Result<Self, CudaError> {
        let len = as_len(len_bytes)?;
        let _current = gpu.enter()?;
        let mut start = 0;
        // SAFETY: `start` is valid for a write for the call, and a context is current.
        gpu.driver.check("cuMemAlloc", unsafe { (gpu.driver.mem_alloc)(&raw mut start, len) })?;
        Ok(Self { gpu: Arc::clone(gpu), start, len_bytes })
    }

    /// Address of the first byte on the GPU, valid while this lives.
    #[must_use]
    pub fn device_address(&self) -> u64 {
        self.start
    }

    /// Length, bytes.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Has the legacy default stream set `len_bytes` at `offset` to `byte`, and does not wait for it.
    ///
    /// # Errors
    /// `Range`, `Driver`.
    pub fn queue_fill(&self, offset: u64, len_bytes: u64, byte: u8) -> Result<(), CudaError> {
        let whole_bytes = self.len_bytes;
        if offset.checked_add(len_bytes).is_none_or(|end| end > whole_bytes) {
            return Err(CudaError::Range { offset, len_bytes, whole_bytes });
        }
        let len = as_len(len_bytes)?;
        let _current = self.gpu.enter()?;
        // SAFETY: the range was checked, and is allocated while this lives.
        let code = unsafe { (self.gpu.driver.memset_d8)(self.start + offset, byte, len) };
        self.gpu.driver.check("cuMemsetD8", code)
    }

    /// The GPU that has it.
    #[must_use]
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        let Ok(_current) = self.gpu.enter() else { return };
        // SAFETY: it was allocated once by `new` and is freed once.
        let _ = unsafe { (self.gpu.driver.mem_free)(self.start) };
    }
}
