//! Contexts of sessions' own: opened at the first call, with a region for each buffer asked for.
//!
//! A region ends with its lease, in the job that ends the lease's others: before the memory is zeroed or freed. All of a context
//! ends with its session, and so far as it is ours when its HCA goes. What the client made in it the kernel keeps until the client
//! closes it; without a region it reaches nothing of ours.

use std::sync::{Arc, Mutex};

use gdrd_hal::{DirectContext, HcaError, MemoryRegion};

use super::executor::Lane;
use super::failure::of_hca;
use super::jobs::{bug, no_dma_buf};
use super::{Runtime, lock};
use crate::core::{AllocationId, Failure, HcaIndex, error_of};
use crate::direct::{DirectGrant, DirectRegion};
use crate::error::EngineError;
use crate::ids::{LeaseId, RemoteKey, SessionId};

/// Leases of one call.
const MAX_LEASES: usize = 64;
/// Where to go instead.
const BROKERED: &str = "use a brokered queue pair, which every provider has that has any";

/// One region, and where it is.
struct Made {
    allocation: AllocationId,
    told: DirectRegion,
    /// Or why the driver would not end it: then it may reach the memory still.
    region: Result<Box<dyn MemoryRegion>, HcaError>,
}

/// A context of one session on one HCA. Regions are dropped before it.
struct Opened {
    session: SessionId,
    hca: HcaIndex,
    made: Mutex<Vec<Made>>,
    context: Arc<dyn DirectContext>,
}

/// All of them.
#[derive(Default)]
pub(super) struct Directs {
    open: Mutex<Vec<Arc<Opened>>>,
    /// Held while one is opened, so that a session has one on an HCA.
    opening: Mutex<()>,
}

impl Directs {
    fn find(&self, session: SessionId, hca: HcaIndex) -> Option<Arc<Opened>> {
        lock(&self.open).iter().find(|opened| opened.session == session && opened.hca == hca).cloned()
    }

    /// Ends the regions of a buffer; waits for those that the end of their session is ending. Blocks on the driver.
    pub(super) fn deregister(&self, allocation: AllocationId) -> Result<(), Failure> {
        let open = lock(&self.open).clone();
        let mut result = Ok(());
        for opened in open {
            let of_buffer: Vec<Made> =
                lock(&opened.made).extract_if(.., |made| made.allocation == allocation).collect();
            for made in of_buffer {
                if let Err(error) = made.region.and_then(MemoryRegion::deregister) {
                    result = Err(of_hca(opened.hca, &error));
                }
            }
        }
        result
    }

    fn which(&self, which: impl Fn(&Opened) -> bool) -> Vec<Arc<Opened>> {
        lock(&self.open).iter().filter(|opened| which(opened)).cloned().collect()
    }

    /// Ends all regions of a context, and the context unless the driver would not end one. Blocks on the driver.
    fn end(&self, opened: &Arc<Opened>) {
        // Held meanwhile, so that whoever frees the memory of one waits for its end.
        let mut regions = lock(&opened.made);
        let ended = std::mem::take(&mut *regions).into_iter().filter_map(|made| {
            let error = made.region.and_then(MemoryRegion::deregister).err()?;
            Some(Made { allocation: made.allocation, told: made.told, region: Err(error) })
        });
        *regions = ended.collect();
        if regions.is_empty() {
            lock(&self.open).retain(|known| !Arc::ptr_eq(known, opened));
        }
    }
}

impl Runtime {
    /// A session's own context on an HCA with a region for each of these leases, which it must hold. Blocks on the driver.
    pub(crate) fn open_direct(
        &self,
        session: SessionId,
        hca: &str,
        leases: &[LeaseId],
    ) -> Result<DirectGrant, EngineError> {
        if !self.config.direct {
            let problem = format!("direct mode is off (verbs.direct in gdrd.toml); {BROKERED}");
            return Err(EngineError::Unsupported { problem });
        }
        if leases.is_empty() || leases.len() > MAX_LEASES {
            let problem = format!("{} is not within 1 to {MAX_LEASES}", leases.len());
            return Err(EngineError::BadArgument { what: "leases", problem });
        }
        let index = self.direct_hca(session, hca)?;
        let opened = self.opened(session, index)?;
        let regions = leases.iter().map(|lease| self.direct_region(&opened, *lease)).collect::<Result<_, _>>();
        let regions = regions.inspect_err(|_| self.end_directs_if_gone(session))?;
        let context = opened.context.command_fd().try_clone_to_owned();
        let context = context.map_err(|error| EngineError::OutOfDescriptors { problem: format!("dup: {error}") })?;
        Ok(DirectGrant { hca: hca.into(), context, pd_handle: opened.context.pd_handle(), regions })
    }

    fn direct_hca(&self, session: SessionId, hca: &str) -> Result<HcaIndex, EngineError> {
        let state = self.state();
        state.core.check_session(session)?;
        let index = state.core.host().find_hca(hca)?;
        state.core.host().usable_hca(index)?;
        Ok(index)
    }

    fn opened(&self, session: SessionId, index: HcaIndex) -> Result<Arc<Opened>, EngineError> {
        let _turn = lock(&self.directs.opening);
        if let Some(opened) = self.directs.find(session, index) {
            return Ok(opened);
        }
        let device = super::jobs::hca(self, index).map_err(|failure| error_of(&failure))?;
        if !device.capabilities().direct {
            let problem = format!("{} has a provider that cannot import a context; {BROKERED}", device.name());
            return Err(EngineError::Unsupported { problem });
        }
        let context = device.open_direct().map_err(|error| error_of(&of_hca(index, &error)))?;
        let opened = Arc::new(Opened { session, hca: index, made: Mutex::default(), context });
        lock(&self.directs.open).push(Arc::clone(&opened));
        Ok(opened)
    }

    fn direct_region(&self, opened: &Opened, lease: LeaseId) -> Result<DirectRegion, EngineError> {
        let (allocation, access) = self.state().core.direct_memory(opened.session, lease, opened.hca)?;
        let found = |made: &&Made| made.allocation == allocation;
        if let Some(made) = lock(&opened.made).iter().find(found) {
            return Ok(DirectRegion { lease, ..made.told.clone() });
        }
        let made = || -> Result<Made, Failure> {
            let memory = self.objects.memory(allocation).ok_or_else(|| bug("a region of an unknown buffer"))?;
            let source = memory.source().ok_or_else(|| no_dma_buf(opened.hca))?;
            let device = super::jobs::hca(self, opened.hca)?;
            let access = super::possible(access, &*device);
            let (region, mr_handle) =
                opened.context.register(source, access, 0).map_err(|error| of_hca(opened.hca, &error))?;
            let (rkey, iova, len_bytes) = (RemoteKey(region.rkey()), region.iova(), region.len_bytes());
            let told = DirectRegion { lease, mr_handle, rkey, iova, len_bytes, access };
            Ok(Made { allocation, told, region: Ok(region) })
        };
        let made = made().map_err(|failure| error_of(&failure))?;
        let told = made.told.clone();
        lock(&opened.made).push(made);
        // Whatever ended the lease meanwhile may have looked for regions before this one was there.
        if let Err(ended) = self.state().core.direct_memory(opened.session, lease, opened.hca) {
            let late = lock(&opened.made).extract_if(.., |made| made.allocation == allocation).collect::<Vec<_>>();
            drop(late);
            return Err(ended);
        }
        Ok(told)
    }

    /// A context that was opened while its session ended has nobody else to end it.
    fn end_directs_if_gone(&self, session: SessionId) {
        if self.state().core.check_session(session).is_err() {
            self.directs.which(|opened| opened.session == session).iter().for_each(|opened| self.directs.end(opened));
        }
    }

    /// Ends what a session had of its own. That may block on the driver.
    pub(super) fn end_directs_of(self: &Arc<Self>, session: SessionId) {
        self.end_directs(self.directs.which(|opened| opened.session == session));
    }

    /// Ends what was open on an HCA that went away.
    pub(super) fn end_directs_on(self: &Arc<Self>, hca: HcaIndex) {
        self.end_directs(self.directs.which(|opened| opened.hca == hca));
    }

    fn end_directs(self: &Arc<Self>, gone: Vec<Arc<Opened>>) {
        if !gone.is_empty() {
            let runtime = Arc::clone(self);
            self.submit(&self.background, Lane::Unbounded, "end direct queue pairs", move || {
                gone.iter().for_each(|opened| runtime.directs.end(opened));
            });
        }
    }
}
