//! A GPU of this process, its context, and order with its streams.

use std::ffi::{c_int, c_uint};
use std::os::fd::{FromRawFd as _, OwnedFd};
use std::sync::Arc;

use crate::mapping::as_len;
use crate::table::{Device, Driver, Opaque};
use crate::{CudaError, Mapping};

/// Flags of cuEventCreate: waiting sleeps, no times are kept (`CU_EVENT_BLOCKING_SYNC`, `CU_EVENT_DISABLE_TIMING`).
pub(crate) const EVENT_FLAGS: c_uint = 1 | 2;
/// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`, cuda.h.
pub(crate) const DMA_BUF_FD: c_uint = 1;
/// `CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE`, cuda.h (CUDA 12.8).
pub(crate) const MAPPING_TYPE_PCIE: u64 = 1;
/// `CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES`, cuda.h: the GPU and the CPU share theirs over NVLink-C2C.
pub(crate) const HOST_PAGE_TABLES: c_uint = 100;
/// `CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL`, cuda.h.
pub(crate) const DEVICE_ORDINAL: c_uint = 9;
/// `CU_CTX_SYNC_MEMOPS`, cuda.h (CUDA 12.1).
pub(crate) const CTX_SYNC_MEMOPS: c_uint = 0x80;

/// One GPU with its primary context retained; released on drop.
#[derive(Debug)]
pub struct Gpu {
    pub(crate) driver: &'static Driver,
    pub(crate) device: Device,
    context: Opaque,
    uuid: String,
}

/// A stream of the caller: a `CUstream` or `cudaStream_t`, such as `torch.cuda.current_stream().cuda_stream`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stream(usize);

impl Stream {
    /// The legacy default stream.
    pub const DEFAULT: Self = Self(0);

    /// A stream by its handle.
    ///
    /// # Safety
    /// `handle` is a live stream of the GPU that it is used with, or 0, 1 or 2 (the default streams of cuda.h), and stays
    /// so for each call that it is given to.
    #[must_use]
    pub const unsafe fn from_handle(handle: usize) -> Self {
        Self(handle)
    }
}

/// The context is current on this thread while it lives.
pub(crate) struct Current<'g>(&'g Gpu);

impl Drop for Current<'_> {
    fn drop(&mut self) {
        let mut popped: Opaque = 0;
        // SAFETY: `popped` is valid for a write for the call. What was pushed by `Gpu::enter` is on top: calls in between
        // are this crate's own, and leave the stack as it was.
        let _ = unsafe { (self.0.driver.ctx_pop)(&raw mut popped) };
    }
}

impl Gpu {
    /// The GPU of a UUID (`GPU-…`), as far as the driver shows it to this process.
    ///
    /// # Errors
    /// `Absent`, `UnknownGpu`, `Driver`.
    pub fn open(uuid: &str) -> Result<Arc<Self>, CudaError> {
        let driver = Driver::get()?;
        let device = device(driver, uuid)?;
        let mut context: Opaque = 0;
        // SAFETY: `context` is valid for a write for the call, and the device is one that cuDeviceGet gave.
        let code = unsafe { (driver.primary_ctx_retain)(&raw mut context, device) };
        driver.check("cuDevicePrimaryCtxRetain", code)?;
        Ok(Arc::new(Self { driver, device, context, uuid: uuid.to_owned() }))
    }

    /// The GPU that has the memory at an address of this process.
    ///
    /// # Errors
    /// `Absent`; `Driver`, also for an address that is not of CUDA memory.
    pub fn of(address: u64) -> Result<Arc<Self>, CudaError> {
        let driver = Driver::get()?;
        let mut ordinal: c_int = 0;
        // SAFETY: for this attribute the result is an int (cuda.h), and `ordinal` is valid for a write of one for the call.
        // The address is looked up, not followed.
        let code = unsafe { (driver.pointer_get_attribute)((&raw mut ordinal).cast(), DEVICE_ORDINAL, address) };
        driver.check("cuPointerGetAttribute", code)?;
        let (_, bytes) = device_at(driver, ordinal)?;
        Self::open(&uuid_text(bytes))
    }

    /// Its UUID.
    #[must_use]
    pub fn uuid(&self) -> &str {
        &self.uuid
    }

    /// Whether it reaches the memory of another GPU, by NVLink or PCIe. Makes no context there.
    ///
    /// # Errors
    /// `UnknownGpu` where the driver does not show the other to this process, `Driver`.
    pub fn can_reach(&self, uuid: &str) -> Result<bool, CudaError> {
        let other = device(self.driver, uuid)?;
        let mut can: c_int = 0;
        // SAFETY: `can` is valid for a write for the call, and both devices are ones that cuDeviceGet gave.
        let code = unsafe { (self.driver.device_can_access_peer)(&raw mut can, self.device, other) };
        self.driver.check("cuDeviceCanAccessPeer", code)?;
        Ok(other == self.device || can != 0)
    }

    /// Has this GPU copy `len_bytes` from one place to another, both in memory that is open to it. Blocks until done.
    ///
    /// # Errors
    /// `Range`, `Driver`.
    pub fn copy(
        &self,
        (from, from_offset): (&Mapping, u64),
        (to, to_offset): (&Mapping, u64),
        len_bytes: u64,
    ) -> Result<(), CudaError> {
        let (from, to) = (from.at(from_offset, len_bytes)?, to.at(to_offset, len_bytes)?);
        let len = as_len(len_bytes)?;
        let _current = self.enter()?;
        // SAFETY: both ranges were checked and are mapped for the call, which waits for the copy below.
        self.driver.check("cuMemcpyDtoD", unsafe { (self.driver.memcpy_device)(to, from, len) })?;
        self.synchronize()
    }

    /// A dma-buf of device memory of this process, a new one at each call: memory of cuMemAlloc and cudaMalloc, or a range
    /// that is mapped as a whole. Address and length are multiples of the host's page size.
    ///
    /// # Errors
    /// `Driver`, also for an address that is not of such memory.
    pub fn export_dma_buf(&self, address: u64, len_bytes: u64) -> Result<OwnedFd, CudaError> {
        self.export(address, len_bytes, 0)
    }

    /// The same memory as [`Gpu::export_dma_buf`] has it, mapped by PCIe, for NICs that do not take the other: `None` where the
    /// GPU is not coherent with the CPU, and so has one way only, or the driver refuses (before CUDA 12.8 it knows none).
    ///
    /// # Errors
    /// `Driver`.
    pub fn export_dma_buf_by_pcie(&self, address: u64, len_bytes: u64) -> Result<Option<OwnedFd>, CudaError> {
        let mut coherent: c_int = 0;
        // SAFETY: `coherent` is valid for a write for the call, and the device is one that cuDeviceGet gave.
        let code = unsafe { (self.driver.device_get_attribute)(&raw mut coherent, HOST_PAGE_TABLES, self.device) };
        self.driver.check("cuDeviceGetAttribute", code)?;
        Ok(if coherent == 0 { None } else { self.export(address, len_bytes, MAPPING_TYPE_PCIE).ok() })
    }

    fn export(&self, address: u64, len_bytes: u64, flags: u64) -> Result<OwnedFd, CudaError> {
        let len = as_len(len_bytes)?;
        let _current = self.enter()?;
        let mut fd: c_int = -1;
        // SAFETY: for this handle type the result is an int (cuda.h), and `fd` is valid for a write for the call. The driver
        // looks the range up, and refuses one that is not there.
        let code = unsafe { (self.driver.mem_range_handle)(&raw mut fd, address, len, DMA_BUF_FD, flags) };
        self.driver.check("cuMemGetHandleForAddressRange", code)?;
        // SAFETY: the driver opened it for the caller, who owns it from here on.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// Waits for all that this process queued on it, with its context current.
    pub(crate) fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: the callers have made the context current.
        self.driver.check("cuCtxSynchronize", unsafe { (self.driver.ctx_synchronize)() })
    }

    /// Waits until all work queued on `stream` before this call is done: what it wrote is then in memory, for a NIC to
    /// send. Blocks without spinning.
    ///
    /// # Errors
    /// `Driver`; also for an error of that earlier work.
    pub fn wait_for_stream(&self, stream: Stream) -> Result<(), CudaError> {
        let _current = self.enter()?;
        let driver = self.driver;
        let mut event: Opaque = 0;
        // SAFETY: `event` is valid for a write for the call, and a context is current.
        driver.check("cuEventCreate", unsafe { (driver.event_create)(&raw mut event, EVENT_FLAGS) })?;
        // SAFETY: the event was made just now in the current context; the stream is live by the promise of
        // `Stream::from_handle`.
        let recorded = driver.check("cuEventRecord", unsafe { (driver.event_record)(event, stream.0) });
        let waited = recorded.and_then(|()| {
            // SAFETY: the event was made just now and is not yet destroyed.
            driver.check("cuEventSynchronize", unsafe { (driver.event_synchronize)(event) })
        });
        // SAFETY: the event was made just now, and is destroyed once.
        let _ = unsafe { (driver.event_destroy)(event) };
        waited
    }

    /// Makes every synchronous copy and memset of this process' context wait for its end (`CU_CTX_SYNC_MEMOPS`), the one
    /// form there is for imported memory. For the whole context, and so not done by itself.
    ///
    /// # Errors
    /// `Driver`, `Absent` where the driver is older than CUDA 12.1.
    pub fn sync_memory_operations(&self) -> Result<(), CudaError> {
        let set_flags = self.driver.ctx_set_flags;
        let set_flags =
            set_flags.ok_or_else(|| CudaError::Absent { what: "cuCtxSetFlags, of CUDA 12.1,".to_owned() })?;
        let _current = self.enter()?;
        let mut flags = 0;
        // SAFETY: `flags` is valid for a write for the call, and a context is current.
        self.driver.check("cuCtxGetFlags", unsafe { (self.driver.ctx_get_flags)(&raw mut flags) })?;
        // SAFETY: a context is current; only this flag may be set on a live context, the others stay (cuda.h).
        self.driver.check("cuCtxSetFlags", unsafe { set_flags(flags | CTX_SYNC_MEMOPS) })
    }

    pub(crate) fn enter(&self) -> Result<Current<'_>, CudaError> {
        // SAFETY: the context is retained while `self` lives.
        self.driver.check("cuCtxPushCurrent", unsafe { (self.driver.ctx_push)(self.context) })?;
        Ok(Current(self))
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // SAFETY: the primary context was retained once by `open`, and mappings, which hold `self`, are gone.
        let _ = unsafe { (self.driver.primary_ctx_release)(self.device) };
    }
}

/// The device of a UUID.
fn device(driver: &Driver, uuid: &str) -> Result<Device, CudaError> {
    let mut count = 0;
    // SAFETY: `count` is valid for a write for the call, after cuInit.
    driver.check("cuDeviceGetCount", unsafe { (driver.device_get_count)(&raw mut count) })?;
    for ordinal in 0..count {
        let (device, bytes) = device_at(driver, ordinal)?;
        if uuid_text(bytes).eq_ignore_ascii_case(uuid) {
            return Ok(device);
        }
    }
    Err(CudaError::UnknownGpu { uuid: uuid.to_owned() })
}

/// The device of an ordinal, and its UUID.
fn device_at(driver: &Driver, ordinal: c_int) -> Result<(Device, [u8; 16]), CudaError> {
    let mut device: Device = 0;
    // SAFETY: `device` is valid for a write for the call; an ordinal that is none is an error (cuda.h).
    driver.check("cuDeviceGet", unsafe { (driver.device_get)(&raw mut device, ordinal) })?;
    let mut bytes = [0; 16];
    // SAFETY: `bytes` has the 16 bytes of a CUuuid, and the device is one that cuDeviceGet gave.
    driver.check("cuDeviceGetUuid", unsafe { (driver.device_get_uuid)(&raw mut bytes, device) })?;
    Ok((device, bytes))
}

/// As NVML prints it.
fn uuid_text(bytes: [u8; 16]) -> String {
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let part = |from: usize, to: usize| hex.get(from..to).unwrap_or_default();
    format!("GPU-{}-{}-{}-{}-{}", part(0, 8), part(8, 12), part(12, 16), part(16, 20), part(20, 32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuids_print_as_nvml_prints_them() {
        let bytes = std::array::from_fn(|at| u8::try_from(at * 17).expect("at most 255"));
        assert_eq!(uuid_text(bytes), "GPU-00112233-4455-6677-8899-aabbccddeeff");
    }

    #[test]
    fn a_gpu_that_is_not_there_is_an_error_on_every_host() {
        let error = Gpu::open("GPU-00000000-dead-beef-0000-000000000000").expect_err("there is no such gpu");
        let told = matches!(
            error,
            CudaError::Absent { .. } | CudaError::UnknownGpu { .. } | CudaError::Driver { call: "cuInit", .. }
        );
        assert!(told, "{error}");
    }
}
