//! Memory regions.

use std::ptr::NonNull;
use std::sync::Arc;

use gdrd_hal::{Access, HcaError, MemoryRegion};
use rdma_sys::ibv_mr;

use crate::domain::DomainHandle;
use crate::error::status;
use crate::mapping::Mapping;

/// An `ibv_mr`. Deregistered on drop; the domain and the mapping outlive it.
#[derive(Debug)]
pub(crate) struct Region {
    mr: Option<NonNull<ibv_mr>>,
    handle: u32,
    lkey: u32,
    rkey: u32,
    iova: u64,
    len_bytes: u64,
    access: Access,
    domain: Arc<DomainHandle>,
    /// Dropped after the region: fields drop after `Drop::drop`.
    _mapping: Option<Mapping>,
}

// SAFETY: libibverbs is thread-safe (ibv_reg_mr(3) names no exception; "The verbs API is thread safe", libibverbs
// README), and the pointer is used for deregistration only.
unsafe impl Send for Region {}
// SAFETY: as for Send; shared references only read plain fields.
unsafe impl Sync for Region {}

impl Region {
    pub(crate) fn new(
        mr: NonNull<ibv_mr>,
        iova: u64,
        len_bytes: u64,
        access: Access,
        domain: Arc<DomainHandle>,
        mapping: Option<Mapping>,
    ) -> Self {
        // SAFETY: libibverbs returned the pointer from a registration that succeeded; the structure is initialised and
        // stays until ibv_dereg_mr, which only `end` calls.
        let keys = unsafe { mr.as_ref() };
        let (handle, lkey, rkey) = (keys.handle, keys.lkey, keys.rkey);
        Self { mr: Some(mr), handle, lkey, rkey, iova, len_bytes, access, domain, _mapping: mapping }
    }

    /// The kernel's number of it in its context.
    pub(crate) fn handle(&self) -> u32 {
        self.handle
    }

    fn end(&mut self) -> Result<(), HcaError> {
        let Some(mr) = self.mr.take() else { return Ok(()) };
        let context = self.domain.context();
        let dereg = context.library().ibv_dereg_mr;
        // SAFETY: the region is live (taken out of the option just now, so this happens once), its domain and context
        // are kept by `self.domain`.
        let returned = unsafe { dereg(mr.as_ptr()) };
        let failed = context.failed("ibv_dereg_mr", "memory");
        status(returned).map_err(|errno| failed.with(errno))
    }
}

impl MemoryRegion for Region {
    fn lkey(&self) -> u32 {
        self.lkey
    }

    fn rkey(&self) -> u32 {
        self.rkey
    }

    fn iova(&self) -> u64 {
        self.iova
    }

    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn access(&self) -> Access {
        self.access
    }

    fn deregister(mut self: Box<Self>) -> Result<(), HcaError> {
        self.end()
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // The trait says that drop is silent; a region that the driver would not end stays until its context is closed.
        drop(self.end());
    }
}
