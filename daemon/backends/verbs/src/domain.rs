//! Protection domains: registration and queue pair creation.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use gdrd_hal::{
    Access, AtomicScope, CqId, HcaError, MemoryRegion, MemorySource, ProtectionDomain, QueuePairConfig, QueuePairParts,
    SharedReceiveQueue, SrqId,
};
use rdma_sys::{ibv_access_flags, ibv_pd};

use crate::context::Context;
use crate::error::{Failed, errno};
use crate::mapping::{MapError, Mapping};
use crate::queue_pair;
use crate::region::Region;
use crate::shared_receive;

/// Smallest page of every device; iova and memory share their place in it.
const PAGE_BYTES: u64 = 4096;

/// An `ibv_pd`. Freed on drop; the context outlives it.
#[derive(Debug)]
pub(crate) struct DomainHandle {
    pd: NonNull<ibv_pd>,
    context: Arc<Context>,
}

// SAFETY: libibverbs is thread-safe (libibverbs README), and the pointer is only given to it.
unsafe impl Send for DomainHandle {}
// SAFETY: as for Send.
unsafe impl Sync for DomainHandle {}

impl DomainHandle {
    pub(crate) fn alloc(context: &Arc<Context>) -> Result<Self, HcaError> {
        let alloc = context.library().ibv_alloc_pd;
        // SAFETY: the context is open for as long as `context` lives.
        let pd = unsafe { alloc(context.raw()) };
        let failed = context.failed("ibv_alloc_pd", "protection domains");
        let pd = NonNull::new(pd).ok_or_else(|| failed.with(errno()))?;
        Ok(Self { pd, context: Arc::clone(context) })
    }

    /// The kernel's number of it in its context.
    pub(crate) fn handle(&self) -> u32 {
        // SAFETY: the structure is libibverbs' own, initialised by ibv_alloc_pd and there until ibv_dealloc_pd in the drop.
        unsafe { self.pd.as_ref() }.handle
    }

    pub(crate) fn raw(&self) -> *mut ibv_pd {
        self.pd.as_ptr()
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }
}

impl Drop for DomainHandle {
    fn drop(&mut self) {
        let dealloc = self.context.library().ibv_dealloc_pd;
        // SAFETY: freed once; regions, address handles, queue pairs and shared receive queues of the domain hold an Arc of it, so none is left.
        let returned = unsafe { dealloc(self.pd.as_ptr()) };
        // A client that shares the context may have queue pairs of its own in it.
        let may_fail = self.context.is_gone() || self.context.is_shared();
        debug_assert!(returned == 0 || may_fail, "ibv_dealloc_pd: {returned}");
    }
}

/// The domain as gdrd-hal sees it.
#[derive(Debug)]
pub(crate) struct Domain(pub(crate) Arc<DomainHandle>);

impl ProtectionDomain for Domain {
    fn register(&self, source: MemorySource<'_>, access: Access, iova: u64) -> Result<Box<dyn MemoryRegion>, HcaError> {
        Ok(Box::new(self.register_region(source, access, iova)?))
    }

    fn create_queue_pair(&self, cq: CqId, config: &QueuePairConfig) -> Result<QueuePairParts, HcaError> {
        queue_pair::create(&self.0, cq, None, config)
    }

    fn create_shared_receive_queue(&self, depth: u32) -> Result<Box<dyn SharedReceiveQueue>, HcaError> {
        Ok(Box::new(shared_receive::create(&self.0, depth)?))
    }

    fn create_queue_pair_on(&self, cq: CqId, srq: SrqId, config: &QueuePairConfig) -> Result<QueuePairParts, HcaError> {
        queue_pair::create(&self.0, cq, Some(srq), config)
    }
}

impl Domain {
    pub(crate) fn register_region(
        &self,
        source: MemorySource<'_>,
        access: Access,
        iova: u64,
    ) -> Result<Region, HcaError> {
        let failed = self.0.context.failed("register", "memory regions");
        self.0.context.check_alive()?;
        if (access.remote_write || access.remote_atomic) && !access.local_write {
            return Err(failed.invalid("remote write and atomics need local write (ibv_reg_mr(3))"));
        }
        match source {
            MemorySource::Host { fd, offset, len_bytes } => self.register_host(fd, offset, len_bytes, access, iova),
            MemorySource::DmaBuf { fd, offset, len_bytes } => {
                self.register_dma_buf(fd, offset, len_bytes, access, iova)
            }
            _ => Err(failed.invalid("memory of a kind that this backend does not know")),
        }
    }

    fn register_host(
        &self,
        fd: BorrowedFd<'_>,
        offset: u64,
        len_bytes: u64,
        access: Access,
        iova: u64,
    ) -> Result<Region, HcaError> {
        let context = &self.0.context;
        let call = if context.capabilities().iova_honoured { "ibv_reg_mr_iova2" } else { "ibv_reg_mr" };
        let failed = context.failed(call, "memory regions");
        let length = usize::try_from(len_bytes).map_err(|_| failed.invalid("longer than the address space"))?;
        if context.capabilities().iova_honoured {
            check_iova(failed, iova, offset, len_bytes)?;
        }
        let mapping = Mapping::new(fd, offset, len_bytes).map_err(|error| match error {
            MapError::Invalid(reason) => failed.invalid(reason),
            MapError::System(errno) => Failed { call: "mmap", resource: "address space", ..failed }.with(errno),
        })?;
        let flags = self.access_flags(access);
        let (mr, iova) = if context.capabilities().iova_honoured {
            let reg = context.library().ibv_reg_mr_iova2;
            // SAFETY: the domain is live; the range lies in a mapping that the region keeps until it is deregistered.
            (unsafe { reg(self.0.raw(), mapping.address(), length, iova, flags.0) }, iova)
        } else {
            let reg = context.library().ibv_reg_mr;
            let strict = flags.0 & !ibv_access_flags::IBV_ACCESS_RELAXED_ORDERING.0;
            // SAFETY: as above.
            let mr = unsafe { reg(self.0.raw(), mapping.address(), length, strict.cast_signed()) };
            (mr, u64::try_from(mapping.address().expose_provenance()).unwrap_or(u64::MAX))
        };
        let mr = NonNull::new(mr).ok_or_else(|| failed.with(errno()))?;
        Ok(Region::new(mr, iova, len_bytes, access, Arc::clone(&self.0), Some(mapping)))
    }

    fn register_dma_buf(
        &self,
        fd: BorrowedFd<'_>,
        offset: u64,
        len_bytes: u64,
        access: Access,
        iova: u64,
    ) -> Result<Region, HcaError> {
        let context = &self.0.context;
        let failed = context.failed("ibv_reg_dmabuf_mr", "memory regions or BAR1");
        let length = usize::try_from(len_bytes).map_err(|_| failed.invalid("longer than the address space"))?;
        if len_bytes == 0 {
            return Err(failed.invalid("a range of no bytes"));
        }
        check_iova(failed, iova, offset, len_bytes)?;
        let reg = context.library().ibv_reg_dmabuf_mr;
        let flags = self.access_flags(access).0.cast_signed();
        // SAFETY: the domain is live and the fd is open for the call; the kernel takes its own reference to the buffer
        // (drivers/infiniband/core/umem_dmabuf.c), and checks the range.
        let mr = unsafe { reg(self.0.raw(), offset, length, iova, fd.as_raw_fd(), flags) };
        let mr = NonNull::new(mr).ok_or_else(|| match errno() {
            // What the kernel says of an fd that is no dma-buf, and of a range outside of it.
            number @ (libc_einval::EINVAL | libc_einval::EBADF) => failed.invalid(format!(
                "{}; no dma-buf, or not {len_bytes} bytes at {offset} of it",
                std::io::Error::from_raw_os_error(number)
            )),
            number => failed.with(number),
        })?;
        Ok(Region::new(mr, iova, len_bytes, access, Arc::clone(&self.0), None))
    }

    fn access_flags(&self, access: Access) -> ibv_access_flags {
        let has_atomics = self.0.context.capabilities().atomics != AtomicScope::None;
        let flags = [
            (access.local_write, ibv_access_flags::IBV_ACCESS_LOCAL_WRITE),
            (access.remote_write, ibv_access_flags::IBV_ACCESS_REMOTE_WRITE),
            (access.remote_read, ibv_access_flags::IBV_ACCESS_REMOTE_READ),
            // A provider without atomics may refuse the flag; no atomic can reach the region there anyway.
            (access.remote_atomic && has_atomics, ibv_access_flags::IBV_ACCESS_REMOTE_ATOMIC),
            (access.relaxed_ordering, ibv_access_flags::IBV_ACCESS_RELAXED_ORDERING),
        ];
        let bits = flags.iter().filter(|(wanted, _)| *wanted).fold(0, |bits, (_, flag)| bits | flag.0);
        ibv_access_flags(bits)
    }
}

mod libc_einval {
    //! Errno values as patterns.
    use rustix::io::Errno;

    pub(super) const EINVAL: i32 = Errno::INVAL.raw_os_error();
    pub(super) const EBADF: i32 = Errno::BADF.raw_os_error();
}

/// Every provider shares this rule (drivers/infiniband/core/uverbs_std_types_mr.c, ib_umem_find_best_pgsz).
fn check_iova(failed: Failed<'_>, iova: u64, offset: u64, len_bytes: u64) -> Result<(), HcaError> {
    if iova.checked_add(len_bytes).is_none() {
        return Err(failed.invalid(format!("iova {iova:#x} plus {len_bytes} bytes wraps")));
    }
    if iova % PAGE_BYTES != offset % PAGE_BYTES {
        return Err(failed.invalid(format!("iova {iova:#x} is not at the place in its page that offset {offset} has")));
    }
    Ok(())
}
