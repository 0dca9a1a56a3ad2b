//! GPU memory in this process' address space.

use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use crate::table::{AccessDescriptor, Address, AllocationHandle, AllocationProperties, Driver, Location};
use crate::{CudaError, Gpu};

/// `CU_MEM_LOCATION_TYPE_DEVICE`, `CU_MEM_ALLOCATION_TYPE_PINNED`, cuda.h.
pub(crate) const LOCATION_DEVICE: c_uint = 1;
pub(crate) const ALLOCATION_PINNED: c_uint = 1;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`, cuda.h.
pub(crate) const READ_WRITE: c_uint = 3;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`, cuda.h.
pub(crate) const POSIX_FILE_DESCRIPTOR: c_uint = 1;

/// A handle of an allocation; released on drop, after which mappings and descriptors keep the memory.
#[derive(Debug)]
struct Handle {
    driver: &'static Driver,
    handle: AllocationHandle,
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: the handle was made or imported once and is released once (cuda.h: mappings keep the memory).
        let _ = unsafe { (self.driver.mem_release)(self.handle) };
    }
}

#[derive(Debug)]
struct Range {
    driver: &'static Driver,
    start: Address,
    len: usize,
    is_mapped: bool,
}

impl Drop for Range {
    fn drop(&mut self) {
        if self.is_mapped {
            // SAFETY: the range was mapped as a whole by one cuMemMap. That no work on the GPU uses it any more is the
            // caller's part, as with every free of CUDA, and the driver reports it otherwise.
            let _ = unsafe { (self.driver.mem_unmap)(self.start, self.len) };
        }
        // SAFETY: the range was reserved with this start and length, and is not mapped any more.
        let _ = unsafe { (self.driver.mem_address_free)(self.start, self.len) };
    }
}

/// Memory of a GPU, mapped for reading and writing by it or a peer, and by those it was opened to. Unmapped on drop.
#[derive(Debug)]
pub struct Mapping {
    range: Range,
    handle: Handle,
    gpu: Arc<Gpu>,
}

impl Mapping {
    /// Maps the memory behind a descriptor that a daemon lent (`cuda-posix-fd`) for `gpu`: the one that has the memory, or
    /// one that reaches it ([`Gpu::can_reach`]). No context is made on any other GPU. The descriptor may be closed after
    /// it.
    ///
    /// # Errors
    /// `Driver`: such as for a descriptor of another kind, memory shorter than `len_bytes`, or a GPU that does not reach it.
    pub fn import(gpu: &Arc<Gpu>, memory: BorrowedFd<'_>, len_bytes: u64) -> Result<Self, CudaError> {
        let _current = gpu.enter()?;
        let driver = gpu.driver;
        let mut handle = 0;
        // The number itself goes in the place of a pointer (cuda.h).
        let number = usize::try_from(memory.as_raw_fd()).unwrap_or(usize::MAX);
        let number = std::ptr::without_provenance_mut::<c_void>(number);
        // SAFETY: `handle` is valid for a write for the call; the descriptor is open, and the driver checks its kind.
        let code = unsafe { (driver.mem_import)(&raw mut handle, number, POSIX_FILE_DESCRIPTOR) };
        driver.check("cuMemImportFromShareableHandle", code)?;
        Self::map(gpu, Handle { driver, handle }, len_bytes)
    }

    /// Makes memory that can be exported, for a client that wants its own adopted. Not zeroed. `len_bytes` is a multiple
    /// of 2 MiB.
    ///
    /// # Errors
    /// `Driver`.
    pub fn create(gpu: &Arc<Gpu>, len_bytes: u64) -> Result<Self, CudaError> {
        let _current = gpu.enter()?;
        let driver = gpu.driver;
        let properties = AllocationProperties {
            kind: ALLOCATION_PINNED,
            handle_types: POSIX_FILE_DESCRIPTOR,
            location: Location { kind: LOCATION_DEVICE, id: gpu.device },
            windows_metadata: 0,
            compression: 0,
            rdma_capable: 1,
            usage: 0,
            reserved: [0; 4],
        };
        let mut handle = 0;
        let len = as_len(len_bytes)?;
        // SAFETY: both pointers are valid for the call; the driver checks length and properties.
        let code = unsafe { (driver.mem_create)(&raw mut handle, len, &raw const properties, 0) };
        driver.check("cuMemCreate", code)?;
        Self::map(gpu, Handle { driver, handle }, len_bytes)
    }

    fn map(gpu: &Arc<Gpu>, handle: Handle, len_bytes: u64) -> Result<Self, CudaError> {
        let driver = gpu.driver;
        let len = as_len(len_bytes)?;
        let mut start = 0;
        // SAFETY: `start` is valid for a write for the call; no address and no alignment is asked for.
        let code = unsafe { (driver.mem_address_reserve)(&raw mut start, len, 0, 0, 0) };
        driver.check("cuMemAddressReserve", code)?;
        let mut range = Range { driver, start, len, is_mapped: false };
        // SAFETY: the range is reserved and unmapped, the handle is live, and the driver checks that it is long enough.
        driver.check("cuMemMap", unsafe { (driver.mem_map)(start, len, 0, handle.handle, 0) })?;
        range.is_mapped = true;
        let mapping = Self { range, handle, gpu: Arc::clone(gpu) };
        mapping.allow(&[gpu])?;
        Ok(mapping)
    }

    /// Opens it to these GPUs, its own or peers of it by NVLink or PCIe, for reading and writing.
    ///
    /// # Errors
    /// `Driver` for a GPU that cannot reach it.
    pub fn allow(&self, gpus: &[&Arc<Gpu>]) -> Result<(), CudaError> {
        let descriptor = |gpu: &&Arc<Gpu>| AccessDescriptor {
            location: Location { kind: LOCATION_DEVICE, id: gpu.device },
            flags: READ_WRITE,
        };
        let access: Vec<_> = gpus.iter().map(descriptor).collect();
        let driver = self.gpu.driver;
        // SAFETY: `access` is as many valid descriptors as said, and the range is mapped as a whole.
        let code = unsafe { (driver.mem_set_access)(self.range.start, self.range.len, access.as_ptr(), access.len()) };
        driver.check("cuMemSetAccess", code)
    }

    /// Address of the first byte on the GPU, valid while this lives.
    #[must_use]
    pub fn device_address(&self) -> u64 {
        self.range.start
    }

    /// Length, bytes.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.range.len as u64
    }

    /// The GPU that it was mapped for.
    #[must_use]
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Copies bytes at `offset` into `to`. Blocks until done.
    ///
    /// # Errors
    /// `Range`, `Driver`.
    pub fn read_into(&self, offset: u64, to: &mut [u8]) -> Result<(), CudaError> {
        let from = self.at(offset, to.len() as u64)?;
        let _current = self.gpu.enter()?;
        let driver = self.gpu.driver;
        // SAFETY: the range was checked and is mapped, and `to` is valid for writes of its length for the call, which
        // returns when the copy is done.
        let code = unsafe { (driver.memcpy_to_host)(to.as_mut_ptr().cast(), from, to.len()) };
        driver.check("cuMemcpyDtoH", code)
    }

    /// Copies `from` to `offset`. Blocks until the bytes are on the GPU.
    ///
    /// # Errors
    /// `Range`, `Driver`.
    pub fn write_from(&self, offset: u64, from: &[u8]) -> Result<(), CudaError> {
        let to = self.at(offset, from.len() as u64)?;
        let _current = self.gpu.enter()?;
        let driver = self.gpu.driver;
        // SAFETY: the range was checked and is mapped, and `from` is valid for reads of its length for the call.
        driver.check("cuMemcpyHtoD", unsafe { (driver.memcpy_to_device)(to, from.as_ptr().cast(), from.len()) })?;
        // Small copies from pageable memory may return before they have landed (API synchronisation behaviour, CUDA
        // driver API), and a NIC does not wait for them.
        self.gpu.synchronize()
    }

    /// Sets `len_bytes` at `offset` to `byte`. Blocks until done.
    ///
    /// # Errors
    /// `Range`, `Driver`.
    pub fn fill(&self, offset: u64, len_bytes: u64, byte: u8) -> Result<(), CudaError> {
        self.queue_fill(offset, len_bytes, byte)?;
        let _current = self.gpu.enter()?;
        self.gpu.synchronize()
    }

    /// Has the legacy default stream set `len_bytes` at `offset` to `byte`, and does not wait for it.
    ///
    /// # Errors
    /// `Range`, `Driver`.
    pub fn queue_fill(&self, offset: u64, len_bytes: u64, byte: u8) -> Result<(), CudaError> {
        let (to, len) = (self.at(offset, len_bytes)?, as_len(len_bytes)?);
        let _current = self.gpu.enter()?;
        let driver = self.gpu.driver;
        // SAFETY: the range was checked and is mapped.
        driver.check("cuMemsetD8", unsafe { (driver.memset_d8)(to, byte, len) })
    }

    /// A descriptor that another process can import. Costs about a millisecond.
    ///
    /// # Errors
    /// `Driver`.
    pub fn export_memory(&self) -> Result<OwnedFd, CudaError> {
        let driver = self.gpu.driver;
        let mut fd: c_int = -1;
        // SAFETY: for this handle type the result is an int (cuda.h), `fd` is valid for a write, the handle is live.
        let code = unsafe { (driver.mem_export)(&raw mut fd, self.handle.handle, POSIX_FILE_DESCRIPTOR, 0) };
        driver.check("cuMemExportToShareableHandle", code)?;
        // SAFETY: the driver opened it for the caller, who owns it from here on.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// A dma-buf of the whole of it; a new one at each call.
    ///
    /// # Errors
    /// `Driver`.
    pub fn export_dma_buf(&self) -> Result<OwnedFd, CudaError> {
        self.gpu.export_dma_buf(self.range.start, self.len_bytes())
    }

    pub(crate) fn at(&self, offset: u64, len_bytes: u64) -> Result<Address, CudaError> {
        let whole_bytes = self.len_bytes();
        match offset.checked_add(len_bytes) {
            Some(end) if end <= whole_bytes => Ok(self.range.start + offset),
            _ => Err(CudaError::Range { offset, len_bytes, whole_bytes }),
        }
    }
}

pub(crate) fn as_len(len_bytes: u64) -> Result<usize, CudaError> {
    usize::try_from(len_bytes).map_err(|_| CudaError::Range { offset: 0, len_bytes, whole_bytes: u64::MAX })
}
