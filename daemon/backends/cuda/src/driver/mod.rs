//! The CUDA driver API in the worker: the only place that calls libcuda.
//!
//! cudarc gives the layouts and finds the library. Its own functions are not used: they panic where a symbol is missing,
//! and return an enum that has no room for an error code that a newer driver invents. So each symbol is looked up
//! once, before the first call, with a plain integer as its result.

mod memory;
mod table;

use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::null_mut;

use cudarc::driver::sys::{self, CUdevice, CUdevice_attribute, CUstream, CUuuid};
use gdrd_hal::GpuAtomic;

use crate::device::{Device, DeviceError, DeviceErrorKind, DeviceFacts, DeviceMemory, Exported, Place};
use crate::staging::Staging;
use memory::Mapped;
use table::Driver;

/// Flag of cuStreamCreateWithPriority: no order with the legacy default stream (`CU_STREAM_NON_BLOCKING`, cuda.h).
const STREAM_NON_BLOCKING: c_uint = 1;
/// Flag of cuDevicePrimaryCtxSetFlags: waiting gives way to every other thread (`CU_CTX_SCHED_YIELD`, cuda.h). Sleeping
/// for the interrupt instead costs a scrub of 1 GiB a fifth of its speed, and a call takes milliseconds at most.
const CTX_SCHED_YIELD: c_uint = 2;
/// Length of what atomics work on, bytes.
const ATOMIC_BYTES: u64 = 8;

/// One CUDA device with its primary context current on this thread.
#[derive(Debug)]
pub struct CudaDevice {
    driver: Driver,
    device: CUdevice,
    facts: DeviceFacts,
    /// Whether memory must be made for GPUDirect RDMA.
    rdma: bool,
    /// Of low priority: zeroing waits for the jobs on the GPU.
    scrubs: CUstream,
    copies: CUstream,
    staging: Staging,
    memory: BTreeMap<u64, Mapped>,
    next_id: u64,
}

impl CudaDevice {
    /// Looks for libcuda and its symbols, without starting it: no device file is opened.
    ///
    /// # Errors
    /// `Refused`, with what is missing.
    pub fn look_for_library() -> Result<(), DeviceError> {
        Driver::load().map(drop)
    }

    /// Opens the device of that UUID, and the fd of its staging segment for the daemon.
    ///
    /// # Errors
    /// `Refused` without libcuda or one of its symbols, or for a device that cannot export memory; `Lost` when there is
    /// no such device; `Sticky` for what the driver says of a device that does not start.
    pub fn open(uuid: &str) -> Result<(Self, OwnedFd), DeviceError> {
        let driver = Driver::load()?;
        driver.init()?;
        let device = driver.device(uuid)?;
        let attribute = |attribute: CUdevice_attribute| driver.attribute(device, attribute);
        if attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)? == 0 {
            return Err(DeviceError::refused("cuDeviceGetAttribute", "the gpu cannot export memory as a descriptor"));
        }
        let dma_buf = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED)? != 0;
        let rdma = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED)? != 0;
        driver.retain_context(device, CTX_SCHED_YIELD)?;
        let facts = DeviceFacts { granularity_bytes: driver.granularity(&memory::properties(device, rdma))?, dma_buf };
        let (least, _) = driver.priorities()?;
        let (scrubs, copies) = (driver.stream(least)?, driver.stream(0)?);
        let (staging, fd) =
            Staging::create().map_err(|errno| DeviceError::refused("memfd_create", errno.to_string()))?;
        let memory = BTreeMap::new();
        Ok((Self { driver, device, facts, rdma, scrubs, copies, staging, memory, next_id: 1 }, fd))
    }

    fn find(&self, id: u64) -> Result<&Mapped, DeviceError> {
        self.memory.get(&id).ok_or_else(|| DeviceError::refused("find", format!("no allocation {id}")))
    }

    fn keep(&mut self, mapped: Mapped) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        self.memory.insert(id, mapped);
        id
    }

    fn zero(&self, mapped: &Mapped) -> Result<(), DeviceError> {
        self.driver.zero(mapped, self.scrubs)?;
        self.driver.synchronize(self.scrubs)
    }
}

impl Device for CudaDevice {
    fn facts(&self) -> DeviceFacts {
        self.facts
    }

    fn memory(&self) -> Result<DeviceMemory, DeviceError> {
        self.driver.memory_info()
    }

    fn allocate(&mut self, len_bytes: u64) -> Result<Exported, DeviceError> {
        let mapped = Mapped::create(&self.driver, self.device, self.rdma, len_bytes)?;
        if self.rdma && !self.driver.is_rdma_capable(&mapped)? {
            return Err(DeviceError::refused("cuPointerGetAttribute", "memory came without gpudirect rdma"));
        }
        // The driver does not promise zeroes (cuMemCreate, cuda.h).
        self.zero(&mapped)?;
        let memory = self.driver.export_memory(&mapped)?;
        let dma_buf = if self.facts.dma_buf { Some(self.driver.export_dma_buf(&mapped)?) } else { None };
        Ok(Exported { id: self.keep(mapped), memory, dma_buf })
    }

    fn import(&mut self, memory: BorrowedFd<'_>, len_bytes: u64) -> Result<u64, DeviceError> {
        let mapped = Mapped::import(&self.driver, self.device, memory.as_raw_fd(), len_bytes)?;
        Ok(self.keep(mapped))
    }

    fn scrub(&mut self, id: u64) -> Result<(), DeviceError> {
        self.zero(self.find(id)?)
    }

    fn copy(&mut self, from: Place, to: Place, len_bytes: u64) -> Result<(), DeviceError> {
        let outside = || DeviceError::refused("copy", format!("{len_bytes} bytes at {from:?} or {to:?} are not there"));
        let device = |id, offset| self.find(id)?.at(offset, len_bytes).ok_or_else(outside);
        let host = |offset| self.staging.at(offset, len_bytes).ok_or_else(outside);
        match (from, to) {
            (Place::Memory { id: from, offset: at }, Place::Memory { id: to, offset: to_offset }) => {
                self.driver.copy_on_device(device(to, to_offset)?, device(from, at)?, len_bytes, self.copies)?;
            }
            (Place::Memory { id, offset: at }, Place::Staging { offset }) => {
                self.driver.copy_to_host(host(offset)?, device(id, at)?, len_bytes, self.copies)?;
            }
            (Place::Staging { offset }, Place::Memory { id, offset: to_offset }) => {
                self.driver.copy_to_device(device(id, to_offset)?, host(offset)?, len_bytes, self.copies)?;
            }
            (Place::Staging { .. }, Place::Staging { .. }) => return Err(outside()),
        }
        self.driver.synchronize(self.copies)
    }

    fn atomic(&mut self, id: u64, offset: u64, operation: GpuAtomic) -> Result<u64, DeviceError> {
        let refused = |reason: &str| DeviceError::refused("atomic", reason);
        let at = self.find(id)?.at(offset, ATOMIC_BYTES).ok_or_else(|| refused("the word is not there"))?;
        if !offset.is_multiple_of(ATOMIC_BYTES) {
            return Err(refused("the word is not aligned"));
        }
        let old = self.driver.load_word(at, self.copies)?;
        let new = match operation {
            GpuAtomic::FetchAdd { operand } => old.wrapping_add(operand),
            GpuAtomic::CompareSwap { compare, operand } if old == compare => operand,
            GpuAtomic::CompareSwap { .. } => return Ok(old),
            _ => return Err(refused("an operation that it does not know")),
        };
        self.driver.store_word(at, new, self.copies)?;
        Ok(old)
    }

    fn forget(&mut self, id: u64) {
        self.memory.remove(&id);
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        // Mappings end before the context. Errors are those of a device that is spoilt, and the process ends next.
        self.memory.clear();
        self.driver.release_context(self.device);
    }
}

impl Driver {
    fn init(&self) -> Result<(), DeviceError> {
        // SAFETY: cuInit takes 0 as its flags and may be called at any time (cuda.h).
        self.check("cuInit", unsafe { (self.init)(0) })
    }

    fn device(&self, uuid: &str) -> Result<CUdevice, DeviceError> {
        let mut count = 0;
        // SAFETY: `count` is valid for a write for the call, after cuInit (cuda.h).
        self.check("cuDeviceGetCount", unsafe { (self.device_get_count)(&raw mut count) })?;
        for ordinal in 0..count {
            let mut device: CUdevice = 0;
            // SAFETY: `device` is valid for a write for the call, and the ordinal is below the count.
            self.check("cuDeviceGet", unsafe { (self.device_get)(&raw mut device, ordinal) })?;
            let mut found = CUuuid { bytes: [0; 16] };
            // SAFETY: `found` is valid for a write for the call, and the device is one that cuDeviceGet gave.
            self.check("cuDeviceGetUuid", unsafe { (self.device_get_uuid)(&raw mut found, device) })?;
            if uuid_text(&found).eq_ignore_ascii_case(uuid) {
                return Ok(device);
            }
        }
        let reason = format!("the driver shows {count} gpus, none of them {uuid}");
        Err(DeviceError { kind: DeviceErrorKind::Lost, call: "cuDeviceGetCount".to_owned(), reason })
    }

    fn attribute(&self, device: CUdevice, attribute: CUdevice_attribute) -> Result<c_int, DeviceError> {
        let mut value = 0;
        // SAFETY: `value` is valid for a write for the call, and the device is one that cuDeviceGet gave.
        let code = unsafe { (self.device_get_attribute)(&raw mut value, attribute as c_uint, device) };
        self.check("cuDeviceGetAttribute", code).map(|()| value)
    }

    /// Makes the primary context current on this thread.
    fn retain_context(&self, device: CUdevice, flags: c_uint) -> Result<(), DeviceError> {
        // SAFETY: the device is one that cuDeviceGet gave; flags can be set at any time (cuda.h).
        let code = unsafe { (self.primary_ctx_set_flags)(device, flags) };
        self.check("cuDevicePrimaryCtxSetFlags", code)?;
        let mut context = null_mut();
        // SAFETY: `context` is valid for a write for the call, and the device is one that cuDeviceGet gave.
        let code = unsafe { (self.primary_ctx_retain)(&raw mut context, device) };
        self.check("cuDevicePrimaryCtxRetain", code)?;
        // SAFETY: the context was retained just now and is released by the drop of `CudaDevice` or the process' end.
        self.check("cuCtxSetCurrent", unsafe { (self.ctx_set_current)(context) })
    }

    fn release_context(&self, device: CUdevice) {
        // SAFETY: the device's primary context was retained once by `retain_context`; nothing uses it afterwards. Its
        // result tells of a device that is spoilt, which changes nothing now.
        let _ = unsafe { (self.primary_ctx_release)(device) };
    }

    /// Least and greatest priority of streams.
    fn priorities(&self) -> Result<(c_int, c_int), DeviceError> {
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: both are valid for a write for the call, and a context is current.
        let code = unsafe { (self.stream_priority_range)(&raw mut least, &raw mut greatest) };
        self.check("cuCtxGetStreamPriorityRange", code).map(|()| (least, greatest))
    }

    fn stream(&self, priority: c_int) -> Result<CUstream, DeviceError> {
        let mut stream = null_mut();
        // SAFETY: `stream` is valid for a write for the call, and a context is current.
        let code = unsafe { (self.stream_create)(&raw mut stream, STREAM_NON_BLOCKING, priority) };
        self.check("cuStreamCreateWithPriority", code).map(|()| stream)
    }

    fn synchronize(&self, stream: CUstream) -> Result<(), DeviceError> {
        // SAFETY: the stream was made by `stream` and lives as long as the context.
        self.check("cuStreamSynchronize", unsafe { (self.stream_synchronize)(stream) })
    }

    fn memory_info(&self) -> Result<DeviceMemory, DeviceError> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: both are valid for a write for the call, and a context is current.
        let code = unsafe { (self.mem_get_info)(&raw mut free, &raw mut total) };
        self.check("cuMemGetInfo", code)?;
        Ok(DeviceMemory { total_bytes: total as u64, free_bytes: free as u64 })
    }

    /// The library, loaded if it is there. cudarc's own loading panics where it is not.
    fn library() -> Result<&'static table::Library, DeviceError> {
        // SAFETY: loading libcuda runs its initialisers, which are sound in any process at any time.
        if !unsafe { sys::is_culib_present() } {
            let reason = "libcuda.so.1 cannot be loaded; install the nvidia driver";
            return Err(DeviceError::refused("dlopen", reason));
        }
        // SAFETY: as above; it is there, so that this does not panic.
        Ok(unsafe { sys::culib() })
    }
}

/// As NVML prints it.
fn uuid_text(uuid: &CUuuid) -> String {
    let hex: String = uuid.bytes.iter().map(|byte| format!("{:02x}", byte.cast_unsigned())).collect();
    let part = |from: usize, to: usize| hex.get(from..to).unwrap_or_default();
    format!("GPU-{}-{}-{}-{}-{}", part(0, 8), part(8, 12), part(12, 16), part(16, 20), part(20, 32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuids_print_as_nvml_prints_them() {
        let mut uuid = CUuuid { bytes: [0; 16] };
        for (at, byte) in (0_u8..).zip(uuid.bytes.iter_mut()) {
            *byte = (at * 17).cast_signed();
        }
        assert_eq!(uuid_text(&uuid), "GPU-00112233-4455-6677-8899-aabbccddeeff");
    }

    #[test]
    fn without_a_library_or_a_device_the_reason_is_told() {
        let Err(error) = CudaDevice::open("GPU-00000000-0000-0000-0000-000000000000") else {
            panic!("there is no such gpu");
        };
        assert!(!error.reason.is_empty() && error.kind != DeviceErrorKind::OutOfMemory, "{error}");
    }
}
