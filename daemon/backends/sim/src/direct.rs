//! Contexts that a client could import, were there a device behind them: descriptor and handles are given, and regions in them
//! answer to the fabric like any other; no queue pair can be made in one.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use gdrd_hal::{Access, DirectContext, HcaError, MemoryRegion, MemorySource, ProtectionDomain as _};

use crate::domain::Domain;
use crate::event_fd;
use crate::fault::Call;
use crate::hca::HcaCore;

/// Handle of the domain: the first object of its context.
const PD_HANDLE: u32 = 0;

pub(crate) struct Direct {
    domain: Domain,
    descriptor: OwnedFd,
    next_handle: AtomicU32,
}

impl Direct {
    pub(crate) fn open(hca: &Arc<HcaCore>) -> Result<Self, HcaError> {
        if !hca.capabilities.direct {
            return Err(hca.unsupported("hand out contexts: its provider cannot import one"));
        }
        hca.admit("open_direct", Call::AllocPd)?;
        let descriptor = event_fd::new();
        let descriptor =
            descriptor.map_err(|error| hca.exhausted("open_direct", &format!("file descriptors: {error}")))?;
        Ok(Self { domain: Domain::new(Arc::clone(hca)), descriptor, next_handle: AtomicU32::new(PD_HANDLE + 1) })
    }
}

impl DirectContext for Direct {
    fn command_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }

    fn pd_handle(&self) -> u32 {
        PD_HANDLE
    }

    fn register(
        &self,
        source: MemorySource<'_>,
        access: Access,
        iova: u64,
    ) -> Result<(Box<dyn MemoryRegion>, u32), HcaError> {
        let region = self.domain.register(source, access, iova)?;
        Ok((region, self.next_handle.fetch_add(1, Ordering::Relaxed)))
    }
}
