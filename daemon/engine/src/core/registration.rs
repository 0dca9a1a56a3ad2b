//! Registrations: what clients hold of regions, one call at a time, all of a call's ranges or none.
//!
//! ```text
//!   Register ──► hit: one more holder ─────────────────────────────► answered
//!            └─► miss: region ── waiting ─► registering ─► live ───► answered
//!   Deregister ─► last holder gone: idle (found again by a hit) ─► evicted: quiescing ─► deregistering ─► gone
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use gdrd_hal::Access;

use super::allocation::Stage;
use super::ranges::{GPU_PAGE_BYTES, HOST_PAGE_BYTES, Known, PIECE_BYTES, Planned, bounded_piece, merged, plan_range};
use super::region::{Region, RegionKey, RegionStage, Source};
use super::{Answer, BatchId, CallId, Core, Place, RegionId, TenantId};
use crate::error::EngineError;
use crate::ids::{RegistrationId, SessionId};
use crate::registration::{AdoptedKind, MemoryRef, Merging, RegisterRequest};

/// One registration of a range.
#[derive(Debug)]
pub(crate) struct Registration {
    pub(crate) session: SessionId,
    pub(crate) tenant: TenantId,
    pub(crate) memory: MemoryRef,
    pub(crate) source: Source,
    /// In the memory, bytes.
    pub(crate) range: Range<u64>,
    /// Its parts: by HCA in the order asked for, then by offset, each region once.
    pub(crate) regions: Vec<RegionId>,
    /// The call that has not been answered with it yet.
    batch: Option<BatchId>,
}

/// A call to register.
#[derive(Debug)]
pub(crate) struct Batch {
    /// `None` once its caller is gone.
    call: Option<CallId>,
    registrations: Vec<RegistrationId>,
    /// Regions that are still on their way.
    pending: u32,
    failed: Option<EngineError>,
}

impl Core {
    pub(super) fn register_ranges(&mut self, call: CallId, session: SessionId, request: &RegisterRequest) {
        let planned = match self.check_register(session, request) {
            Ok(planned) => planned,
            Err(error) => return self.answer(call, Err(error)),
        };
        let Ok(tenant) = self.session(session).map(|session| session.tenant) else { return self.unexpected() };
        // Before room is made: what is a hit must not be what gives way.
        let hits = self.hits(&planned, request.access);
        hits.iter().for_each(|id| self.take_hold_of(*id));
        let missing = self.missing(&planned, request);
        let count = missing.values().map(Vec::len).sum();
        match self.make_room(tenant, count, &missing) {
            Ok(()) => self.register_missing(call, session, tenant, request, planned, missing),
            Err(error) => self.answer(call, Err(error)),
        }
        hits.into_iter().for_each(|id| self.let_go_of_region(id));
        self.trim_idle(tenant);
    }

    /// Makes what is missing, and holds the rest.
    fn register_missing(
        &mut self,
        call: CallId,
        session: SessionId,
        tenant: TenantId,
        request: &RegisterRequest,
        planned: Vec<Planned>,
        missing: BTreeMap<RegionKey, Vec<Range<u64>>>,
    ) {
        let count: usize = missing.values().map(Vec::len).sum();
        self.counters.regions_asked += planned.iter().map(|p| p.pieces.len() * p.hcas.len()).sum::<usize>() as u64;
        self.counters.regions_missed += count as u64;
        for (key, ranges) in missing {
            for range in ranges {
                self.new_region(tenant, key, request.access, range);
            }
        }
        self.hold_ranges(call, session, tenant, request.access, planned);
        self.start_waiting_regions(tenant);
    }

    /// Regions that cover a part of what is asked for.
    fn hits(&self, planned: &[Planned], access: Access) -> BTreeSet<RegionId> {
        let parts = planned.iter().flat_map(|plan| plan.hcas.iter().map(move |hca| (plan, *hca)));
        parts
            .flat_map(|(plan, hca)| {
                let key = RegionKey::new(plan.source, hca, access);
                plan.pieces.iter().filter_map(move |piece| self.regions.covering(key, piece))
            })
            .collect()
    }

    /// Everything that may refuse a call before it costs anything.
    fn check_register(&self, id: SessionId, request: &RegisterRequest) -> Result<Vec<Planned>, EngineError> {
        let session = self.session(id)?;
        if self.shutting_down {
            return Err(EngineError::ShuttingDown);
        }
        let bad = |what, problem| Err(EngineError::BadArgument { what, problem });
        let cache = &self.settings.cache;
        let (asked, most) = (request.ranges.len(), cache.max_ranges_per_call);
        if asked == 0 || asked > most as usize {
            return bad("ranges", format!("there are {asked}, and a call takes 1 to {most}; make several calls"));
        }
        let access = request.access;
        if (access.remote_write || access.remote_atomic) && !access.local_write {
            return bad("access", "remote_write and remote_atomic need local_write".to_owned());
        }
        if !request.piece_bytes.is_multiple_of(PIECE_BYTES) {
            return bad("piece_bytes", format!("{} is not a multiple of {PIECE_BYTES}", request.piece_bytes));
        }
        let (held, most) = (session.registrations.len(), cache.max_registrations_per_session);
        if held + asked > most as usize {
            let (reason, what, whom) = ("LIMIT_REGISTRATIONS", "the limit on registrations", "the session");
            let (limit, used, asked) = (u64::from(most), held as u64, asked as u64);
            return Err(EngineError::Limit { reason, what, whom, limit, used, asked });
        }
        let mut known = BTreeMap::new();
        let mut parts = 0;
        let mut planned = Vec::with_capacity(asked);
        for (index, range) in request.ranges.iter().enumerate() {
            let memory = match known.entry(range.memory) {
                std::collections::btree_map::Entry::Occupied(entry) => entry.into_mut(),
                std::collections::btree_map::Entry::Vacant(entry) => {
                    entry.insert(self.known_memory(id, range.memory, request)?)
                }
            };
            let plan = plan_range(index, range, memory)?;
            parts += plan.pieces.len() * plan.hcas.len();
            if parts > cache.max_parts_per_call as usize {
                let most = cache.max_parts_per_call;
                return bad("ranges", format!("they come to more than {most} parts; ask for fewer, or longer pieces"));
            }
            planned.push(plan);
        }
        // As many as registrations without pieces may have. How many of the call's one region covers shows only later.
        let most = cache.max_registrations_per_session as usize * self.settings.limits.max_hcas_per_lease as usize;
        if session.parts + parts > most {
            let (reason, what, whom) = ("LIMIT_REGISTRATIONS", "the limit on parts of registrations", "the session");
            let (limit, used, asked) = (most as u64, session.parts as u64, parts as u64);
            return Err(EngineError::Limit { reason, what, whom, limit, used, asked });
        }
        Ok(planned)
    }

    fn known_memory(&self, id: SessionId, memory: MemoryRef, request: &RegisterRequest) -> Result<Known, EngineError> {
        let tenant = self.session(id)?.tenant;
        let (source, len_bytes, gpu, page_bytes) = match memory {
            MemoryRef::Adopted(memory) => {
                let adopted = self.adopted.get(&memory).filter(|a| a.tenant == tenant && !a.ending);
                let adopted = adopted.ok_or(EngineError::UnknownMemory { memory: memory.0 })?;
                let page_bytes = match adopted.kind {
                    AdoptedKind::Memfd => HOST_PAGE_BYTES,
                    AdoptedKind::DmaBuf => GPU_PAGE_BYTES,
                };
                (Source::Adopted(memory), adopted.len_bytes, adopted.gpu, page_bytes)
            }
            MemoryRef::Lease(lease) => {
                let entry = self.held_lease(id, lease)?;
                let allocation = self.allocations.get(&entry.allocation);
                if allocation.is_some_and(|a| a.stage != Stage::Leased) {
                    let cause = entry.why_no_nic();
                    return Err(EngineError::LeaseRevoked { lease: lease.0, cause });
                }
                let (gpu, page_bytes) = match entry.key.place {
                    Place::Gpu(gpu) => (Some(gpu), GPU_PAGE_BYTES),
                    Place::Host(_) => (None, HOST_PAGE_BYTES),
                };
                (Source::Leased(entry.allocation), entry.key.len_bytes, gpu, page_bytes)
            }
        };
        let most = self.settings.limits.max_hcas_per_lease;
        let hcas = self.host.named_or_paired(&request.hcas, gpu, most)?;
        for hca in hcas.iter() {
            self.host.usable_hca(*hca)?;
        }
        let is_translated = hcas.iter().any(|hca| self.host.is_translated(*hca));
        let piece_bytes = bounded_piece(request.piece_bytes, is_translated);
        Ok(Known { source, len_bytes, page_bytes, hcas, piece_bytes })
    }

    /// Ranges that no region covers, as few as the request allows.
    fn missing(&self, planned: &[Planned], request: &RegisterRequest) -> BTreeMap<RegionKey, Vec<Range<u64>>> {
        let mut missing: BTreeMap<RegionKey, Vec<Range<u64>>> = BTreeMap::new();
        for plan in planned {
            for hca in plan.hcas.iter() {
                let key = RegionKey::new(plan.source, *hca, request.access);
                let not_covered = plan.pieces.iter().filter(|piece| self.regions.covering(key, piece).is_none());
                missing.entry(key).or_default().extend(not_covered.cloned());
            }
        }
        let gap_bytes = (request.merging == Merging::Near).then_some(self.settings.cache.merge_gap_bytes);
        for (key, ranges) in &mut missing {
            let piece_bytes = bounded_piece(request.piece_bytes, self.host.is_translated(key.hca));
            *ranges = merged(std::mem::take(ranges), gap_bytes, piece_bytes);
        }
        missing.retain(|_, ranges| !ranges.is_empty());
        missing
    }

    /// Makes the call's registrations of regions that are all there or on their way.
    fn hold_ranges(
        &mut self,
        call: CallId,
        session: SessionId,
        tenant: TenantId,
        access: Access,
        planned: Vec<Planned>,
    ) {
        let id = BatchId(self.number());
        let mut batch = Batch { call: Some(call), registrations: Vec::new(), pending: 0, failed: None };
        let mut parts = 0;
        for plan in planned {
            let registration = RegistrationId(self.number());
            let mut regions = Vec::new();
            for hca in plan.hcas.iter() {
                let key = RegionKey::new(plan.source, *hca, access);
                for piece in &plan.pieces {
                    let Some(region) = self.regions.covering(key, piece) else { return self.unexpected() };
                    // Pieces that one region covers follow each other, and are one part.
                    if regions.last() != Some(&region) {
                        batch.pending += u32::from(self.hold_region(region, id));
                        regions.push(region);
                    }
                }
            }
            parts += regions.len();
            let Planned { memory, source, range, .. } = plan;
            let entry = Registration { session, tenant, memory, source, range, regions, batch: Some(id) };
            self.registrations.insert(registration, entry);
            self.by_source.entry(source).or_default().insert(registration);
            batch.registrations.push(registration);
        }
        if let Ok(session) = self.live_session(session) {
            session.registrations.extend(&batch.registrations);
            session.parts += parts;
        }
        self.batches.insert(id, batch);
        self.finish_batch(id);
    }

    /// One more holder of a region; true if the call has to wait for it and did not before.
    fn hold_region(&mut self, id: RegionId, batch: BatchId) -> bool {
        self.take_hold_of(id);
        let Some(region) = self.regions.get_mut(id) else { return false };
        let waits = region.stage != RegionStage::Live && region.waiters.last() != Some(&batch);
        if waits {
            region.waiters.push(batch);
        }
        waits
    }

    /// A region is used: it is idle no more.
    fn take_hold_of(&mut self, id: RegionId) {
        let Some(region) = self.regions.get_mut(id) else { return };
        region.holders += 1;
        let (tenant, idle, len_bytes) = (region.tenant, region.idle.take(), region.len_bytes());
        if let (Some(place), Some(tenant)) = (idle, self.tenants.get_mut(&tenant)) {
            tenant.idle_regions.remove(&place);
            tenant.idle_bytes -= len_bytes;
        }
    }

    /// One region that calls wait for is live, or will not be.
    pub(super) fn tell_waiters(&mut self, waiters: Vec<BatchId>, failed: Option<&EngineError>) {
        for id in waiters {
            let Some(batch) = self.batches.get_mut(&id) else { continue };
            batch.pending -= 1;
            if let (None, Some(error)) = (&batch.failed, failed) {
                batch.failed = Some(error.clone());
            }
            self.finish_batch(id);
        }
    }

    fn finish_batch(&mut self, id: BatchId) {
        if self.batches.get(&id).is_none_or(|batch| batch.pending > 0) {
            return;
        }
        let Some(batch) = self.batches.remove(&id) else { return };
        let Batch { call, registrations, failed, .. } = batch;
        for registration in &registrations {
            if let Some(entry) = self.registrations.get_mut(registration) {
                entry.batch = None;
            }
        }
        match (call, failed) {
            (Some(call), None) => self.answer(call, Ok(Answer::Registered(registrations))),
            (call, failed) => {
                // None of a failed call is left, nor of one whose caller is gone.
                for id in registrations {
                    self.drop_registration(id);
                }
                if let (Some(call), Some(error)) = (call, failed) {
                    self.answer(call, Err(error));
                }
            }
        }
    }

    /// The caller of a call to register is gone; true if it was one.
    pub(super) fn cancel_batch(&mut self, call: CallId) -> bool {
        let found = self.batches.values_mut().find(|batch| batch.call == Some(call));
        found.is_some_and(|batch| batch.call.take().is_some())
    }

    /// Ends registrations. One that is not the session's, or has ended with its memory, counts as done.
    pub(super) fn deregister_ranges(&mut self, call: CallId, session: SessionId, ids: &[RegistrationId]) {
        let of_session: Vec<RegistrationId> = match self.session(session) {
            Ok(session) => ids.iter().filter(|id| session.registrations.contains(id)).copied().collect(),
            Err(error) => return self.answer(call, Err(error)),
        };
        let ended = of_session.into_iter().filter(|id| self.drop_registration(*id)).count() as u64;
        self.answer(call, Ok(Answer::Deregistered(ended)));
    }

    /// Registrations that were answered with and not taken.
    pub(super) fn undo_registrations(&mut self, ids: Vec<RegistrationId>) {
        for id in ids {
            self.drop_registration(id);
        }
    }

    /// Ends one registration; false if it has ended before.
    pub(super) fn drop_registration(&mut self, id: RegistrationId) -> bool {
        let Some(registration) = self.registrations.remove(&id) else { return false };
        if let Some(session) = self.sessions.get_mut(&registration.session) {
            session.registrations.remove(&id);
            session.parts -= registration.regions.len();
        }
        if let Some(of_source) = self.by_source.get_mut(&registration.source) {
            of_source.remove(&id);
            if of_source.is_empty() {
                self.by_source.remove(&registration.source);
            }
        }
        for region in registration.regions {
            self.let_go_of_region(region);
        }
        self.trim_idle(registration.tenant);
        true
    }

    /// Ends every registration and region of some memory. Calls that wait for one of them fail with `error`.
    pub(super) fn end_source(&mut self, source: Source, error: &EngineError) {
        for id in self.by_source.get(&source).cloned().unwrap_or_default() {
            let batch = self.registrations.get(&id).and_then(|registration| registration.batch);
            if let Some(batch) = batch.and_then(|batch| self.batches.get_mut(&batch)) {
                batch.failed.get_or_insert_with(|| error.clone());
            }
            self.drop_registration(id);
        }
        let regions: Vec<RegionId> =
            self.regions.iter().filter(|(_, region)| region.key.source == source).map(|(id, _)| id).collect();
        for region in regions {
            self.end_region(region);
        }
    }

    /// Ends what a session registered.
    pub(super) fn end_registrations(&mut self, ids: BTreeSet<RegistrationId>) {
        for id in ids {
            let batch = self.registrations.get(&id).and_then(|registration| registration.batch);
            if let Some(batch) = batch.and_then(|batch| self.batches.get_mut(&batch)) {
                batch.failed.get_or_insert(EngineError::SessionEnded);
            }
            self.drop_registration(id);
        }
    }

    fn new_region(&mut self, tenant: TenantId, key: RegionKey, access: Access, range: Range<u64>) {
        let id = RegionId(self.number());
        let region = Region::new(tenant, key, access, range);
        match key.source {
            Source::Adopted(memory) => {
                if let Some(adopted) = self.adopted.get_mut(&memory) {
                    adopted.regions += 1;
                }
            }
            Source::Leased(allocation) => {
                if let Some(allocation) = self.allocations.get_mut(&allocation) {
                    allocation.regions += 1;
                }
            }
        }
        if let Some(tenant) = self.tenants.get_mut(&tenant) {
            tenant.regions += 1;
            tenant.waiting_regions.push_back(id);
        }
        // What it covers is of no more use once nobody holds it.
        for covered in self.regions.insert(id, region) {
            if self.regions.get(covered).is_some_and(|region| region.idle.is_some()) {
                self.end_region(covered);
            }
        }
    }
}
