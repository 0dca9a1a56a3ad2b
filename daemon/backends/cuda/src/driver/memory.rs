//! Allocations of CUDA's virtual memory management: a handle, a reserved range, a mapping.

use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::ptr::null_mut;

use cudarc::driver::sys::{
    CUdevice, CUdeviceptr, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationHandleType, CUmemAllocationProp,
    CUmemAllocationType, CUmemGenericAllocationHandle, CUmemLocation, CUmemLocationType, CUpointer_attribute, CUstream,
};

use super::table::Driver;
use crate::device::DeviceError;

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`, cuda.h.
const POSIX_FILE_DESCRIPTOR: c_uint = 1;
/// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`, cuda.h.
const DMA_BUF_FD: c_uint = 1;
/// `CU_MEM_ALLOC_GRANULARITY_MINIMUM`, cuda.h.
const GRANULARITY_MINIMUM: c_uint = 0;

/// How memory of a device is made: pinned there, exportable as fd, and for RDMA where the device can.
pub(super) fn properties(device: CUdevice, rdma: bool) -> CUmemAllocationProp {
    let mut properties = CUmemAllocationProp {
        type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        location: CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device },
        win32HandleMetaData: null_mut(),
        allocFlags: cudarc::driver::sys::CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: 0,
            usage: 0,
            reserved: [0; 4],
        },
    };
    properties.allocFlags.gpuDirectRDMACapable = u8::from(rdma);
    properties
}

/// One allocation mapped for its device. Its parts end in the reverse order.
#[derive(Debug)]
pub(super) struct Mapped {
    mapping: Mapping,
    range: Range,
    handle: Handle,
}

#[derive(Debug)]
struct Handle {
    driver: Driver,
    handle: CUmemGenericAllocationHandle,
}

#[derive(Debug)]
struct Range {
    driver: Driver,
    start: CUdeviceptr,
    len: usize,
}

#[derive(Debug)]
struct Mapping {
    driver: Driver,
    start: CUdeviceptr,
    len: usize,
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: the handle was made or imported once and is released once; mappings keep the memory (cuda.h). An
        // error means a spoilt device, whose process ends.
        let _ = unsafe { (self.driver.mem_release)(self.handle) };
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        // SAFETY: the range was reserved with this start and length, and its mapping has ended: fields drop in order.
        let _ = unsafe { (self.driver.mem_address_free)(self.start, self.len) };
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped as a whole by one cuMemMap, and every use of it was waited for.
        let _ = unsafe { (self.driver.mem_unmap)(self.start, self.len) };
    }
}

impl Mapped {
    /// New memory. Its content is whatever it was.
    pub(super) fn create(driver: &Driver, device: CUdevice, rdma: bool, len_bytes: u64) -> Result<Self, DeviceError> {
        let len = as_len(len_bytes)?;
        let properties = properties(device, rdma);
        let mut handle = 0;
        // SAFETY: `handle` and `properties` are valid for the call; the driver checks length and properties.
        let code = unsafe { (driver.mem_create)(&raw mut handle, len, &raw const properties, 0) };
        driver.check("cuMemCreate", code)?;
        Self::map(driver, device, Handle { driver: *driver, handle }, len)
    }

    /// The memory behind an fd that cuMemExportToShareableHandle made, in this or another process.
    pub(super) fn import(driver: &Driver, device: CUdevice, fd: RawFd, len_bytes: u64) -> Result<Self, DeviceError> {
        let len = as_len(len_bytes)?;
        let mut handle = 0;
        // The number itself goes in the place of a pointer (cuda.h).
        let by_number = std::ptr::without_provenance_mut::<c_void>(usize::try_from(fd).unwrap_or(usize::MAX));
        // SAFETY: `handle` is valid for a write for the call; the fd is open, and the driver checks that it is its own.
        let code = unsafe { (driver.mem_import)(&raw mut handle, by_number, POSIX_FILE_DESCRIPTOR) };
        driver.check("cuMemImportFromShareableHandle", code)?;
        Self::map(driver, device, Handle { driver: *driver, handle }, len)
    }

    fn map(driver: &Driver, device: CUdevice, handle: Handle, len: usize) -> Result<Self, DeviceError> {
        let mut start = 0;
        // SAFETY: `start` is valid for a write for the call; no address and no alignment is asked for.
        let code = unsafe { (driver.mem_address_reserve)(&raw mut start, len, 0, 0, 0) };
        driver.check("cuMemAddressReserve", code)?;
        let range = Range { driver: *driver, start, len };
        // SAFETY: the range is reserved and unmapped, the handle is live, and the driver checks that it is long enough.
        let code = unsafe { (driver.mem_map)(start, len, 0, handle.handle, 0) };
        driver.check("cuMemMap", code)?;
        let mapping = Mapping { driver: *driver, start, len };
        let access = CUmemAccessDesc {
            location: CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device },
            flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: `access` is one valid descriptor for the call, and the range is mapped as a whole.
        let code = unsafe { (driver.mem_set_access)(start, len, &raw const access, 1) };
        driver.check("cuMemSetAccess", code)?;
        Ok(Self { mapping, range, handle })
    }

    /// Device address of `offset`, if `len_bytes` from there are inside.
    pub(super) fn at(&self, offset: u64, len_bytes: u64) -> Option<CUdeviceptr> {
        let end = offset.checked_add(len_bytes)?;
        (end <= self.range.len as u64).then(|| self.mapping.start + offset)
    }
}

fn as_len(len_bytes: u64) -> Result<usize, DeviceError> {
    usize::try_from(len_bytes).map_err(|_| DeviceError::refused("length", format!("{len_bytes} bytes are too many")))
}

impl Driver {
    pub(super) fn granularity(&self, properties: &CUmemAllocationProp) -> Result<u64, DeviceError> {
        let mut bytes = 0;
        // SAFETY: both pointers are valid for the call.
        let code = unsafe { (self.mem_get_granularity)(&raw mut bytes, properties, GRANULARITY_MINIMUM) };
        self.check("cuMemGetAllocationGranularity", code).map(|()| bytes as u64)
    }

    pub(super) fn is_rdma_capable(&self, mapped: &Mapped) -> Result<bool, DeviceError> {
        let mut capable = 0_u32;
        let attribute = CUpointer_attribute::CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE as c_uint;
        // SAFETY: the attribute is a bool or an int (cuda.h), for which `capable` has room, and the address is mapped.
        let code = unsafe { (self.pointer_get_attribute)((&raw mut capable).cast(), attribute, mapped.mapping.start) };
        self.check("cuPointerGetAttribute", code).map(|()| capable != 0)
    }

    pub(super) fn export_memory(&self, mapped: &Mapped) -> Result<OwnedFd, DeviceError> {
        let mut fd: c_int = -1;
        // SAFETY: for this handle type the result is an int (cuda.h), `fd` is valid for a write, the handle is live.
        let code = unsafe { (self.mem_export)((&raw mut fd).cast(), mapped.handle.handle, POSIX_FILE_DESCRIPTOR, 0) };
        self.check("cuMemExportToShareableHandle", code)?;
        owned("cuMemExportToShareableHandle", fd)
    }

    pub(super) fn export_dma_buf(&self, mapped: &Mapped) -> Result<OwnedFd, DeviceError> {
        let mut fd: c_int = -1;
        let (start, len) = (mapped.mapping.start, mapped.mapping.len);
        // SAFETY: for this handle type the result is an int (cuda.h), `fd` is valid for a write, and the range is
        // mapped as a whole and aligned to 2 MiB.
        let code = unsafe { (self.mem_range_handle)((&raw mut fd).cast(), start, len, DMA_BUF_FD, 0) };
        self.check("cuMemGetHandleForAddressRange", code)?;
        owned("cuMemGetHandleForAddressRange", fd)
    }

    /// Starts zeroing all of it.
    pub(super) fn zero(&self, mapped: &Mapped, stream: CUstream) -> Result<(), DeviceError> {
        let (start, len) = (mapped.mapping.start, mapped.mapping.len);
        // SAFETY: the range is mapped for writing as a whole and stays so until the stream was waited for.
        self.check("cuMemsetD8Async", unsafe { (self.memset_d8)(start, 0, len, stream) })
    }

    /// Starts a copy on the device. Both ranges were checked by [`Mapped::at`].
    pub(super) fn copy_on_device(
        &self,
        to: CUdeviceptr,
        from: CUdeviceptr,
        len_bytes: u64,
        stream: CUstream,
    ) -> Result<(), DeviceError> {
        let len = as_len(len_bytes)?;
        // SAFETY: the caller checked both ranges against their mappings, which last until the stream was waited for.
        self.check("cuMemcpyDtoDAsync", unsafe { (self.memcpy_device)(to, from, len, stream) })
    }

    /// Starts a copy to the staging segment. Both ranges were checked.
    pub(super) fn copy_to_host(
        &self,
        to: *mut c_void,
        from: CUdeviceptr,
        len_bytes: u64,
        stream: CUstream,
    ) -> Result<(), DeviceError> {
        let len = as_len(len_bytes)?;
        // SAFETY: the caller checked both ranges, and both last until the stream was waited for.
        self.check("cuMemcpyDtoHAsync", unsafe { (self.memcpy_to_host)(to, from, len, stream) })
    }

    /// Starts a copy from the staging segment. Both ranges were checked.
    pub(super) fn copy_to_device(
        &self,
        to: CUdeviceptr,
        from: *mut c_void,
        len_bytes: u64,
        stream: CUstream,
    ) -> Result<(), DeviceError> {
        let len = as_len(len_bytes)?;
        // SAFETY: the caller checked both ranges, and both last until the stream was waited for.
        self.check("cuMemcpyHtoDAsync", unsafe { (self.memcpy_to_device)(to, from, len, stream) })
    }

    /// Reads the word at a checked address.
    pub(super) fn load_word(&self, at: CUdeviceptr, stream: CUstream) -> Result<u64, DeviceError> {
        let mut word = 0_u64;
        self.copy_to_host((&raw mut word).cast(), at, 8, stream)?;
        self.synchronize(stream)?;
        Ok(word)
    }

    /// Writes the word at a checked address.
    pub(super) fn store_word(&self, at: CUdeviceptr, mut word: u64, stream: CUstream) -> Result<(), DeviceError> {
        self.copy_to_device(at, (&raw mut word).cast(), 8, stream)?;
        self.synchronize(stream)
    }
}

fn owned(call: &str, fd: c_int) -> Result<OwnedFd, DeviceError> {
    if fd < 0 {
        return Err(DeviceError::refused(call, "the driver gave no descriptor"));
    }
    // SAFETY: the driver opened it for the caller, who owns it from here on.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
