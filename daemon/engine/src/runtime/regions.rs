//! Cached regions: the driver calls behind them, and what a client gets of them.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use gdrd_hal::{Access, HcaError, MemoryRegion, MemorySource, ProtectionDomain};

use super::failure::of_hca;
use super::jobs::{bug, hca, no_dma_buf};
use super::objects::{AdoptedObjects, Mappings, RegionObjects, possible};
use super::{Runtime, lock};
use crate::broker::SlotEntry;
use crate::call::Undo;
use crate::core::{Failure, FailureKind, HcaIndex, Input, RegionId, Source, TenantId, nanos};
use crate::error::EngineError;
use crate::ids::{Generation, RegistrationId, RemoteKey, SessionId, SlotId};
use crate::registration::{AdoptedKind, RegisteredRange, RegistrationGrant, RegistrationPage};
use crate::session::Viewer;

/// What a region is made of.
pub(super) struct NewRegion {
    pub(super) id: RegionId,
    pub(super) tenant: TenantId,
    pub(super) source: Source,
    pub(super) hca: HcaIndex,
    pub(super) range: Range<u64>,
    pub(super) access: Access,
}

/// Registers a region; gives its wire address.
pub(super) fn register(runtime: &Runtime, new: &NewRegion, cost_ns: &mut u64) -> Result<u64, Failure> {
    let device = hca(runtime, new.hca)?;
    let tenant = runtime.objects.tenant(new.tenant).ok_or_else(|| bug("region for an unknown tenant"))?;
    let domain = tenant.domains.on(new.hca, &*device).map_err(|error| of_hca(new.hca, &error))?;
    let access = possible(new.access, &*device);
    let started = Instant::now();
    let (made, is_dma_buf) = match new.source {
        Source::Adopted(memory) => {
            let adopted = runtime.objects.adopted(memory).ok_or_else(|| bug("region of unknown memory"))?;
            let made = register_adopted(&runtime.objects.mappings, &adopted, new, &*domain.pd, access);
            (made, adopted.kind == AdoptedKind::DmaBuf)
        }
        Source::Leased(allocation) => {
            let memory = runtime.objects.memory(allocation).ok_or_else(|| bug("region of an unknown buffer"))?;
            let source = part_of(memory.source().ok_or_else(|| no_dma_buf(new.hca))?, &new.range)?;
            (domain.pd.register(source, access, new.range.start), matches!(source, MemorySource::DmaBuf { .. }))
        }
    };
    *cost_ns = nanos(started.elapsed());
    let region = made.map_err(|error| explained(of_hca(new.hca, &error), is_dma_buf))?;
    let iova = region.iova();
    runtime.objects.insert_region(new.id, RegionObjects::new(new.hca, region));
    Ok(iova)
}

/// Which kind of mapping an HCA takes of a GPU's memory is found out by trying, and remembered for both.
fn register_adopted(
    mappings: &Mappings,
    adopted: &AdoptedObjects,
    new: &NewRegion,
    pd: &dyn ProtectionDomain,
    access: Access,
) -> Result<Box<dyn MemoryRegion>, HcaError> {
    let (mut result, gpu) = (None, adopted.gpu.as_ref());
    let fds = adopted.fds_with(mappings.of(gpu, new.hca));
    let had_the_choice = fds.len() > 1;
    for (kind, fd) in fds {
        let (offset, len_bytes) = (new.range.start, new.range.end - new.range.start);
        let source = match adopted.kind {
            AdoptedKind::Memfd => MemorySource::Host { fd, offset, len_bytes },
            AdoptedKind::DmaBuf => MemorySource::DmaBuf { fd, offset, len_bytes },
        };
        // The wire address is the place in the memory, where the provider honours that.
        match pd.register(source, access, offset) {
            Ok(region) => {
                if had_the_choice {
                    mappings.note(gpu, new.hca, kind);
                }
                return Ok(region);
            }
            // The other kind would meet the same.
            Err(error @ (HcaError::Exhausted { .. } | HcaError::Gone { .. })) => return Err(error),
            Err(error) => drop(result.get_or_insert(error)),
        }
    }
    Err(result.unwrap_or_else(|| HcaError::Unsupported {
        hca: String::new(),
        what: "register memory without a descriptor".to_owned(),
    }))
}

/// A range of a buffer's memory.
fn part_of<'a>(source: MemorySource<'a>, range: &Range<u64>) -> Result<MemorySource<'a>, Failure> {
    let len_bytes = range.end - range.start;
    match source {
        MemorySource::DmaBuf { fd, offset, .. } => {
            Ok(MemorySource::DmaBuf { fd, offset: offset + range.start, len_bytes })
        }
        MemorySource::Host { fd, offset, .. } => Ok(MemorySource::Host { fd, offset: offset + range.start, len_bytes }),
        _ => Err(bug("a buffer of an unknown kind of memory")),
    }
}

/// With what the caller can do about it.
fn explained(failure: Failure, is_dma_buf: bool) -> Failure {
    const INSTEAD: &str = "adopt host memory (a memfd) instead";
    if is_dma_buf && failure.kind == FailureKind::Invalid {
        // That it is a dma-buf, and the range in it, was seen before: what is wrong is between driver and exporter, not the caller's.
        let message = format!("dma-buf: this HCA did not take it: {}; {INSTEAD}", failure.message);
        return Failure { kind: FailureKind::Driver, message, ..failure };
    }
    let message = match failure.kind {
        // Nothing else about memory is beyond a provider.
        FailureKind::Unsupported => {
            format!("dma-buf: not on this HCA: {}; {INSTEAD}", failure.message)
        }
        FailureKind::Exhausted => {
            let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
            let limit = limit.map_or("unlimited".to_owned(), |bytes| format!("{bytes} bytes"));
            format!("{}; the daemon's RLIMIT_MEMLOCK is {limit}", failure.message)
        }
        _ => failure.message,
    };
    Failure { message, ..failure }
}

/// Ends a region.
pub(super) fn deregister(runtime: &Runtime, id: RegionId) -> Result<(), Failure> {
    let objects = runtime.objects.remove_region(id).ok_or_else(|| bug("deregistration of an unknown region"))?;
    // Needs nothing but the handle: the memory may be long gone.
    let region = lock(&objects.region).take().ok_or_else(|| bug("a region is deregistered twice"))?;
    region.deregister().map_err(|error| of_hca(objects.hca, &error))
}

impl Runtime {
    /// Opens a region's slot for requests.
    pub(super) fn publish_region(&self, tenant: TenantId, region: RegionId, slot: SlotId, generation: Generation) {
        let (Some(tenant), Some(objects)) = (self.objects.tenant(tenant), self.objects.region(region)) else { return };
        let published = tenant.slots.publish(slot, objects.entry);
        let shown = tenant.page.set(slot.0, generation.0);
        if published.as_ref().ok() != Some(&generation) || shown.is_err() {
            tracing::error!(%slot, %generation, ?published, ?shown, "slot was not published as decided");
        }
    }

    /// The answer to a call to register.
    pub(super) fn registration_grant(
        self: &Arc<Self>,
        ids: Vec<RegistrationId>,
    ) -> Result<RegistrationGrant, EngineError> {
        let found: Vec<_> = {
            let state = self.state();
            ids.iter().filter_map(|id| state.core.registered_range(*id)).collect()
        };
        let (runtime, asked) = (Arc::clone(self), ids.len());
        // From here on, whatever goes wrong takes the registrations back.
        let undo = Undo::new(move || runtime.input(Input::UndoRegistrations { registrations: ids }));
        let ranges: Vec<_> = found.into_iter().map(|found| self.with_keys(found)).collect();
        // Their memory may have ended since.
        if ranges.len() < asked || ranges.iter().any(|range| range.parts.is_empty()) {
            return Err(EngineError::Cancelled);
        }
        Ok(RegistrationGrant { ranges, undo })
    }

    fn with_keys(&self, (mut range, regions): (RegisteredRange, Vec<RegionId>)) -> RegisteredRange {
        for (part, region) in range.parts.iter_mut().zip(regions) {
            if let Some(objects) = self.objects.region(region) {
                part.registration.rkey = RemoteKey(objects.rkey);
                part.registration.access = objects.entry.access;
            }
        }
        range
    }

    pub(crate) fn lookup(&self, session: SessionId, id: RegistrationId) -> Result<RegisteredRange, EngineError> {
        let found = self.state().core.seen_range(session, id)?;
        Ok(self.with_keys(found))
    }

    pub(crate) fn list_registrations(
        &self,
        viewer: &Viewer,
        start: Option<RegistrationId>,
        page: u32,
    ) -> Result<RegistrationPage, EngineError> {
        let state = self.state();
        let seen = self.seen(&state.core, viewer)?;
        Ok(state.core.registration_page(&seen, start, page))
    }
}

/// What the broker and clients need of a region.
pub(super) fn entry_of(hca: HcaIndex, region: &dyn MemoryRegion) -> SlotEntry {
    SlotEntry { hca, lkey: region.lkey(), iova: region.iova(), len_bytes: region.len_bytes(), access: region.access() }
}
