//! What callers may see of the state.

use std::sync::Arc;
use std::time::Duration;

use gdrd_hal::{GpuUuid, QueuePairState};

use super::{AllocationId, Core, Place, RegionId, RegistrationState, TenantId};
use crate::error::EngineError;
use crate::ids::{LeaseId, QueuePairId, RegistrationId, RemoteKey, SessionId};
use crate::lease::{LeaseInfo, LeasePage, MemoryKind, RegistrationInfo};
use crate::peer::TenantKey;
use crate::registration::{RegisteredPart, RegisteredRange, RegistrationPage};

use super::allocation::Stage;
use super::lease::Lease;

/// Parts of registrations that a page begins no more registrations after: a page is made under the lock that all wait for.
const MAX_PARTS_PER_PAGE: usize = 4096;

/// Whose objects a caller sees.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Seen {
    All,
    /// One tenant's, which may have nothing at present.
    Tenant(TenantKey),
}

impl Core {
    /// Whose session it is.
    pub(crate) fn tenant_of_session(&self, session: SessionId) -> Result<TenantId, EngineError> {
        self.session(session).map(|session| session.tenant)
    }

    /// What a session sees.
    pub(crate) fn seen_by(&self, session: SessionId) -> Result<Seen, EngineError> {
        let session = self.session(session)?;
        if session.admin {
            return Ok(Seen::All);
        }
        let tenant = self.tenants.get(&session.tenant).ok_or(EngineError::SessionEnded)?;
        Ok(Seen::Tenant(tenant.key.clone()))
    }

    /// Whether `seen` covers the tenant.
    pub(crate) fn sees(&self, seen: &Seen, tenant: TenantId) -> bool {
        match seen {
            Seen::All => true,
            Seen::Tenant(key) => self.tenants.get(&tenant).is_some_and(|entry| entry.key == *key),
        }
    }

    /// A lease with its keys left at 0.
    pub(crate) fn lease_info(&self, id: LeaseId) -> Option<LeaseInfo> {
        self.leases.get(&id).and_then(|lease| self.info_of(id, lease))
    }

    fn info_of(&self, id: LeaseId, lease: &Lease) -> Option<LeaseInfo> {
        let allocation = self.allocations.get(&lease.allocation)?;
        let tenant = self.tenants.get(&lease.tenant)?;
        let (gpu, memory_kind) = self.kind_of(allocation.place);
        let registrations = match lease.is_revoked() || allocation.stage == Stage::Remaking {
            true => Vec::new(),
            false => allocation.registrations.iter().filter_map(|r| self.registration_info(r, lease)).collect(),
        };
        Some(LeaseInfo {
            id,
            generation: lease.generation,
            allocation: lease.allocation.0,
            size_bytes: allocation.len_bytes,
            gpu,
            registrations,
            label: Arc::clone(&lease.label),
            memory_kind,
            state: lease.state,
            holders: u32::try_from(lease.holders.len()).unwrap_or(u32::MAX),
            ttl: lease.expires_at.map(|at| Duration::from_nanos(at.saturating_sub(self.now))),
            tenant: tenant.key.clone(),
        })
    }

    fn kind_of(&self, place: Place) -> (Option<GpuUuid>, MemoryKind) {
        match place {
            Place::Gpu(gpu) => (
                self.host.gpu(gpu).map(|gpu| gpu.planned.uuid.clone()),
                self.host.gpu_memory.map_or(MemoryKind::CudaPosixFd, |(kind, _)| kind),
            ),
            Place::Host(_) => (None, MemoryKind::Memfd),
        }
    }

    fn registration_info(&self, registration: &RegistrationState, lease: &Lease) -> Option<RegistrationInfo> {
        Some(RegistrationInfo {
            hca: Arc::clone(&self.host.hca(registration.hca)?.name),
            slot: registration.slot,
            generation: registration.generation,
            rkey: RemoteKey(0),
            iova: registration.iova,
            len_bytes: lease.key.len_bytes,
            access: lease.key.access(),
        })
    }

    /// A registration with its keys left at 0, and the region of each of its parts.
    pub(crate) fn registered_range(&self, id: RegistrationId) -> Option<(RegisteredRange, Vec<RegionId>)> {
        let registration = self.registrations.get(&id)?;
        let tenant = self.tenants.get(&registration.tenant)?.key.clone();
        let range = &registration.range;
        let (mut parts, mut of) = (Vec::with_capacity(registration.regions.len()), Vec::new());
        for region_id in &registration.regions {
            // One that went with its HCA is no part any more.
            let Some(region) = self.regions.get(*region_id) else { continue };
            let Some((slot, generation)) = region.slot else { continue };
            let start = range.start.max(region.range.start);
            let slot_offset = start - region.range.start;
            let registration = RegistrationInfo {
                hca: Arc::clone(&self.host.hca(region.key.hca)?.name),
                slot,
                generation,
                rkey: RemoteKey(0),
                iova: region.iova.wrapping_add(slot_offset),
                len_bytes: range.end.min(region.range.end) - start,
                access: region.access,
            };
            parts.push(RegisteredPart { offset: start - range.start, slot_offset, registration });
            of.push(*region_id);
        }
        let (memory, offset, len_bytes) = (registration.memory, range.start, range.end - range.start);
        Some((RegisteredRange { id, memory, offset, len_bytes, parts, tenant }, of))
    }

    /// A registration that the session sees.
    pub(crate) fn seen_range(
        &self,
        session: SessionId,
        id: RegistrationId,
    ) -> Result<(RegisteredRange, Vec<RegionId>), EngineError> {
        let known = self.session(session)?.registrations.contains(&id);
        let unknown = EngineError::UnknownRegistration { registration: id.0 };
        self.registered_range(id).filter(|_| known).ok_or(unknown)
    }

    /// A page of registrations, in order of id.
    pub(crate) fn registration_page(&self, seen: &Seen, start: Option<RegistrationId>, page: u32) -> RegistrationPage {
        let most = self.page_size(page);
        let all = self.registrations.range(start.unwrap_or(RegistrationId(0))..);
        let (mut registrations, mut parts) = (Vec::new(), 0);
        for (id, registration) in all.filter(|(_, registration)| self.sees(seen, registration.tenant)) {
            parts += registration.regions.len();
            if registrations.len() == most || (parts > MAX_PARTS_PER_PAGE && !registrations.is_empty()) {
                return RegistrationPage { registrations, next: Some(*id) };
            }
            registrations.extend(self.registered_range(*id).map(|(range, _)| range));
        }
        RegistrationPage { registrations, next: None }
    }

    /// A page of leases, in order of id.
    pub(crate) fn lease_page(&self, seen: &Seen, start: Option<LeaseId>, page: u32) -> LeasePage {
        let most = self.page_size(page);
        // One more than the page has says where the next starts.
        let shown =
            self.leases.first_from(start.unwrap_or(LeaseId(0)), most + 1, |lease| self.sees(seen, lease.tenant));
        let leases = shown.iter().take(most).filter_map(|(id, lease)| self.info_of(**id, lease)).collect();
        LeasePage { leases, next: shown.get(most).map(|(id, _)| **id) }
    }

    /// Every lease that is seen, in order of id.
    pub(crate) fn all_leases(&self, seen: &Seen) -> Vec<LeaseInfo> {
        let shown = self.leases.iter().filter(|(_, lease)| self.sees(seen, lease.tenant));
        shown.filter_map(|(id, lease)| self.info_of(*id, lease)).collect()
    }

    /// A page of queue pairs with their states, in order of id, and where the next starts.
    pub(crate) fn queue_pair_page(
        &self,
        seen: &Seen,
        start: Option<QueuePairId>,
        page: u32,
    ) -> (Vec<(QueuePairId, QueuePairState)>, Option<QueuePairId>) {
        let most = self.page_size(page);
        let mut shown = self
            .queue_pairs
            .range(start.unwrap_or(QueuePairId(0))..)
            .filter(|(_, entry)| entry.is_shown() && self.sees(seen, entry.tenant));
        let queue_pairs = shown.by_ref().take(most).map(|(id, entry)| (*id, entry.state)).collect();
        (queue_pairs, shown.next().map(|(id, _)| *id))
    }

    /// Whether a queue pair sends and receives.
    pub(crate) fn is_connected(&self, id: QueuePairId) -> bool {
        self.queue_pairs.get(&id).is_some_and(|entry| entry.is_shown() && entry.state == QueuePairState::Rts)
    }

    fn page_size(&self, page: u32) -> usize {
        let most = self.settings.limits.max_list_page;
        (if page == 0 { most } else { page.min(most) }) as usize
    }

    pub(crate) fn tenant_key(&self, tenant: TenantId) -> Option<&TenantKey> {
        self.tenants.get(&tenant).map(|tenant| &tenant.key)
    }

    /// The slots of a lease, if the session may release it.
    pub(crate) fn slots_of(&self, session: SessionId, lease: LeaseId) -> Option<(TenantId, &[RegistrationState])> {
        let tenant = self.session(session).ok()?.tenant;
        let lease = self.leases.get(&lease).filter(|lease| lease.tenant == tenant)?;
        let allocation = self.allocations.get(&lease.allocation)?;
        Some((tenant, &allocation.registrations))
    }

    /// The memory of a lease.
    pub(crate) fn memory_of(&self, lease: LeaseId) -> Option<AllocationId> {
        self.leases.get(&lease).map(|lease| lease.allocation)
    }

    pub(crate) fn host(&self) -> &super::Host {
        &self.host
    }
}
