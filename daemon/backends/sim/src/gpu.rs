//! GPU memory as sealed memfds under a byte budget per GPU.
//!
//! The budget counts what this process has allocated and not dropped. Memory that lives on in a
//! client's fd or mapping is no longer counted, unlike on a GPU: the kernel does not tell who
//! else holds a memfd.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, OnceLock};

use gdrd_hal::{GpuAllocation, GpuMemory, GpuMemoryCapabilities, GpuMemoryError, GpuMemoryUsage, GpuUuid, KeptMemory};
use gdrd_shm::{Access, Seals, Segment, add_seals};
use rustix::fs::{MemfdFlags, Mode, OFlags, SeekFrom};
use rustix::io::Errno;

use crate::fabric::Fabric;
use crate::fault::{Call, Effect};
use crate::memory::GPU_MEMORY_NAME;
use crate::spec::SimGpu;
use crate::sync::lock;

/// Granularity of CUDA's virtual memory management, which the simulation keeps.
pub const GRANULARITY_BYTES: u64 = 2 << 20;

/// One GPU.
pub(crate) struct GpuCore {
    pub(crate) spec: SimGpu,
    used_bytes: Mutex<u64>,
    lost: Mutex<Option<String>>,
}

impl GpuCore {
    pub(crate) fn new(spec: SimGpu) -> Arc<Self> {
        Arc::new(Self { spec, used_bytes: Mutex::new(0), lost: Mutex::new(None) })
    }

    pub(crate) fn is_named(&self, name: &str) -> bool {
        self.spec.name == name || self.spec.uuid.0 == name
    }

    pub(crate) fn lose(&self) {
        // NVIDIA's Xid 79 as the kernel log prints it.
        *lock(&self.lost) = Some("gpu has fallen off the bus (by the fault script)".to_owned());
    }

    pub(crate) fn recover(&self) {
        *lock(&self.lost) = None;
    }

    pub(crate) fn lost_reason(&self) -> Option<String> {
        lock(&self.lost).clone()
    }

    fn uuid(&self) -> String {
        self.spec.uuid.0.clone()
    }

    fn check_present(&self) -> Result<(), GpuMemoryError> {
        match self.lost_reason() {
            Some(reason) => Err(GpuMemoryError::Lost { uuid: self.uuid(), reason }),
            None => Ok(()),
        }
    }

    fn check_length(&self, len_bytes: u64) -> Result<(), GpuMemoryError> {
        if len_bytes > 0 && len_bytes.is_multiple_of(GRANULARITY_BYTES) {
            return Ok(());
        }
        Err(GpuMemoryError::BadLength { uuid: self.uuid(), len_bytes, granularity_bytes: GRANULARITY_BYTES })
    }

    fn driver(&self, call: &'static str, reason: impl ToString) -> GpuMemoryError {
        GpuMemoryError::Driver { call, uuid: self.uuid(), reason: reason.to_string() }
    }

    /// What the kernel refused.
    fn kernel(&self, call: &'static str, errno: Errno) -> GpuMemoryError {
        match errno {
            Errno::MFILE | Errno::NFILE => {
                GpuMemoryError::OutOfDescriptors { call, uuid: self.uuid(), reason: errno.to_string() }
            }
            errno => self.driver(call, errno),
        }
    }

    pub(crate) fn usage(&self) -> GpuMemoryUsage {
        let total_bytes = self.spec.memory_bytes;
        GpuMemoryUsage { total_bytes, free_bytes: total_bytes - *lock(&self.used_bytes) }
    }

    /// Books `len_bytes`, or says how much is free.
    fn book(self: &Arc<Self>, len_bytes: u64) -> Result<Booking, GpuMemoryError> {
        let mut used = lock(&self.used_bytes);
        let free_bytes = self.spec.memory_bytes - *used;
        if len_bytes > free_bytes {
            return Err(GpuMemoryError::OutOfMemory { uuid: self.uuid(), len_bytes, free_bytes });
        }
        *used += len_bytes;
        Ok(Booking { gpu: Arc::clone(self), len_bytes })
    }

    /// Lets a call through, unless the GPU is lost or the fault script has it fail; may block by it.
    fn admit(&self, fabric: &Fabric, name: &'static str, call: Call, len_bytes: u64) -> Result<(), GpuMemoryError> {
        self.check_present()?;
        match fabric.faults.on_call(call, &self.spec.uuid.0) {
            // Only registrations have a cost, and they are an HCA's.
            None | Some(Effect::Cost { .. }) => Ok(()),
            Some(Effect::Hang) => self.check_present(),
            Some(Effect::Delay(delay)) => {
                std::thread::sleep(delay);
                self.check_present()
            }
            Some(Effect::Fail(errno)) => match Errno::from_raw_os_error(errno) {
                Errno::NOMEM if call == Call::Allocate => {
                    let free_bytes = self.usage().free_bytes;
                    Err(GpuMemoryError::OutOfMemory { uuid: self.uuid(), len_bytes, free_bytes })
                }
                Errno::NODEV => {
                    Err(GpuMemoryError::Lost { uuid: self.uuid(), reason: "by the fault script".to_owned() })
                }
                errno => Err(self.kernel(name, errno)),
            },
        }
    }
}

/// A share of a GPU's budget; given back on drop.
struct Booking {
    gpu: Arc<GpuCore>,
    len_bytes: u64,
}

impl Drop for Booking {
    fn drop(&mut self) {
        *lock(&self.gpu.used_bytes) -= self.len_bytes;
    }
}

/// GPU memory of a simulated host.
pub(crate) struct SimGpuMemory {
    pub(crate) fabric: Arc<Fabric>,
    /// Whether allocations carry a dma-buf.
    pub(crate) dma_buf: bool,
}

impl SimGpuMemory {
    fn find(&self, uuid: &GpuUuid) -> Result<&Arc<GpuCore>, GpuMemoryError> {
        let found = self.fabric.gpus.iter().find(|gpu| gpu.spec.uuid == *uuid);
        found.ok_or_else(|| GpuMemoryError::UnknownGpu { uuid: uuid.0.clone() })
    }
}

impl GpuMemory for SimGpuMemory {
    fn capabilities(&self) -> GpuMemoryCapabilities {
        GpuMemoryCapabilities { granularity_bytes: GRANULARITY_BYTES, dma_buf: self.dma_buf }
    }

    fn is_device_memory(&self, fd: BorrowedFd<'_>) -> bool {
        self.dma_buf && crate::memory::has_gpu_memory_name(fd).unwrap_or(false)
    }

    fn usage(&self, gpu: &GpuUuid) -> Result<GpuMemoryUsage, GpuMemoryError> {
        let gpu = self.find(gpu)?;
        gpu.check_present()?;
        Ok(gpu.usage())
    }

    fn allocate(&self, gpu: &GpuUuid, len_bytes: u64) -> Result<Box<dyn GpuAllocation>, GpuMemoryError> {
        let gpu = self.find(gpu)?;
        gpu.admit(&self.fabric, "allocate", Call::Allocate, len_bytes)?;
        gpu.check_length(len_bytes)?;
        let booking = gpu.book(len_bytes)?;
        let own = create(&gpu.spec.name, len_bytes).map_err(|errno| gpu.kernel("memfd_create", errno))?;
        let shared = reopen(&own).map_err(|errno| gpu.kernel("open", errno))?;
        Ok(Box::new(Allocation {
            fabric: Arc::clone(&self.fabric),
            booking,
            own,
            shared,
            mapped: OnceLock::new(),
            has_dma_buf: self.dma_buf,
        }))
    }

    fn import(
        &self,
        gpu: &GpuUuid,
        len_bytes: u64,
        kept: KeptMemory,
    ) -> Result<Box<dyn GpuAllocation>, GpuMemoryError> {
        let gpu = self.find(gpu)?;
        gpu.check_present()?;
        gpu.check_length(len_bytes)?;
        let shared = kept.memory;
        let found = rustix::fs::fstat(&shared).map_err(|errno| gpu.driver("fstat", errno))?;
        if u64::try_from(found.st_size) != Ok(len_bytes) {
            return Err(gpu.driver("import", format!("a file of {} bytes, not {len_bytes}", found.st_size)));
        }
        let own = match kept.dma_buf {
            Some(own) => own,
            None => reopen(&shared).map_err(|errno| gpu.kernel("open", errno))?,
        };
        let booking = gpu.book(len_bytes)?;
        let (fabric, has_dma_buf) = (Arc::clone(&self.fabric), self.dma_buf);
        Ok(Box::new(Allocation { fabric, booking, own, shared, mapped: OnceLock::new(), has_dma_buf }))
    }
}

/// A sealed memfd; pages come with the first touch, as zeros.
fn create(gpu_name: &str, len_bytes: u64) -> Result<OwnedFd, Errno> {
    let name = format!("{GPU_MEMORY_NAME}:{gpu_name}");
    let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&fd, len_bytes)?;
    add_seals(&fd, Seals::SHRINK | Seals::GROW | Seals::SEAL).map_err(|_| Errno::IO)?;
    Ok(fd)
}

/// A second file description of `own` to hand out. A client that shares one moves its offset, and then a scrub would
/// look for pages at the wrong places.
fn reopen(own: &OwnedFd) -> Result<OwnedFd, Errno> {
    rustix::fs::open(format!("/proc/self/fd/{}", own.as_raw_fd()), OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
}

struct Allocation {
    fabric: Arc<Fabric>,
    booking: Booking,
    /// Never leaves the process.
    own: OwnedFd,
    shared: OwnedFd,
    /// Made at the first scrub and kept: its pages need not be faulted in again for the next.
    mapped: OnceLock<Segment>,
    has_dma_buf: bool,
}

impl Allocation {
    fn mapped(&self) -> Result<&Segment, Errno> {
        if let Some(mapped) = self.mapped.get() {
            return Ok(mapped);
        }
        let own = self.own.try_clone().map_err(|_| Errno::MFILE)?;
        let mapped = Segment::map(own, Access::ReadWrite).map_err(|_| Errno::NOMEM)?;
        Ok(self.mapped.get_or_init(|| mapped))
    }
}

impl GpuAllocation for Allocation {
    fn gpu(&self) -> &GpuUuid {
        &self.booking.gpu.spec.uuid
    }

    fn len_bytes(&self) -> u64 {
        self.booking.len_bytes
    }

    fn memory_fd(&self) -> BorrowedFd<'_> {
        self.shared.as_fd()
    }

    fn dma_buf_fd(&self) -> Option<BorrowedFd<'_>> {
        self.has_dma_buf.then(|| self.own.as_fd())
    }

    fn scrub(&self) -> Result<(), GpuMemoryError> {
        let gpu = &self.booking.gpu;
        gpu.admit(&self.fabric, "scrub", Call::Scrub, self.len_bytes())?;
        let mapped = self.mapped().map_err(|errno| gpu.kernel("mmap", errno))?;
        overwrite(&self.own, mapped).map_err(|errno| gpu.driver("scrub", errno))
    }
}

/// Writes zeros over every page that exists. Pages that were never touched have no content to erase, and
/// writing them would take memory for nothing.
fn overwrite(memory: &OwnedFd, mapped: &Segment) -> Result<(), Errno> {
    let mut at = 0;
    while at < mapped.len_bytes() {
        let start = match rustix::fs::seek(memory, SeekFrom::Data(at)) {
            Ok(start) => start,
            // No data up to the end, lseek(2).
            Err(Errno::NXIO) => return Ok(()),
            Err(errno) => return Err(errno),
        };
        let end = rustix::fs::seek(memory, SeekFrom::Hole(start))?;
        mapped.zero(start, end - start).map_err(|_| Errno::FAULT)?;
        at = end;
    }
    Ok(())
}
