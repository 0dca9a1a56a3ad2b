//! Tenants: what each has, against what it may have.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use super::pool::{Pool, PoolKey};
use super::record::Record;
use super::slots::Slots;
use super::{Core, Effect, RegionId, TenantId};
use crate::error::EngineError;
use crate::keep::Name;
use crate::peer::TenantKey;
use crate::policy::Quota;

/// One tenant.
#[derive(Debug)]
pub(crate) struct Tenant {
    pub(crate) key: TenantKey,
    pub(crate) quota: Quota,
    pub(crate) slots: Slots,
    pub(crate) pools: BTreeMap<Arc<PoolKey>, Pool>,
    pub(crate) sessions: u32,
    pub(crate) leases: u32,
    pub(crate) queue_pairs: u32,
    /// Allocations it owns, in whatever state.
    pub(crate) allocations: u32,
    /// Bytes of them.
    pub(crate) owned_bytes: u64,
    /// Bytes of its leases and of its acquires that wait.
    pub(crate) promised_bytes: u64,
    /// Registrations of the same.
    pub(crate) promised_registrations: u32,
    /// Bytes of memory that its clients brought along.
    pub(crate) adopted_bytes: u64,
    /// Pieces of such memory.
    pub(crate) memories: u32,
    /// Cached regions, in whatever stage.
    pub(crate) regions: u32,
    /// Those of them that are being quiesced or deregistered.
    pub(crate) leaving_regions: u32,
    /// Slots of them.
    pub(crate) cached_slots: u32,
    /// Those of them that wait for a slot, the longest waiting first.
    pub(crate) waiting_regions: VecDeque<RegionId>,
    /// Those of them that nobody holds, the longest unused first, and when each is dropped for age.
    pub(crate) idle_regions: BTreeMap<u64, (RegionId, u64)>,
    /// Bytes of those.
    pub(crate) idle_bytes: u64,
    /// Whether idle regions are looked at when one may have been idle for long.
    pub(crate) idle_timer: bool,
    /// Slots that wait for a lost HCA's requests to end.
    pub(crate) shedding: u32,
    /// All that it had ready or on its way has been given up: it has neither session nor lease.
    pub(crate) ending: bool,
    /// Under which its generation page is kept.
    pub(crate) page: Option<Name>,
    /// An acquire waits for the tenant's own idle or returning buffers to make room in the quota.
    pub(crate) hungry: bool,
}

impl Tenant {
    pub(super) fn new(key: TenantKey, quota: Quota, slots: u32) -> Self {
        Self {
            key,
            quota,
            slots: Slots::new(slots),
            pools: BTreeMap::new(),
            sessions: 0,
            leases: 0,
            queue_pairs: 0,
            allocations: 0,
            owned_bytes: 0,
            promised_bytes: 0,
            promised_registrations: 0,
            adopted_bytes: 0,
            memories: 0,
            regions: 0,
            leaving_regions: 0,
            cached_slots: 0,
            waiting_regions: VecDeque::new(),
            idle_regions: BTreeMap::new(),
            idle_bytes: 0,
            idle_timer: false,
            shedding: 0,
            ending: false,
            page: None,
            hungry: false,
        }
    }

    /// Whether it may still want buffers.
    pub(crate) fn is_alive(&self) -> bool {
        self.sessions > 0 || self.leases > 0
    }

    /// Registrations it may have: the quota, and no more than there are slots.
    pub(crate) fn max_registrations(&self, slots: u32) -> u32 {
        self.quota.max_registrations.min(slots)
    }

    /// Whether so much more can be promised to it.
    pub(crate) fn may_promise(&self, len_bytes: u64, registrations: u32, slots: u32) -> Result<(), EngineError> {
        let limit = |reason, what, limit, used, asked| EngineError::Limit {
            reason,
            what,
            whom: "the tenant",
            limit,
            used,
            asked,
        };
        let used = self.promised_bytes.saturating_add(self.adopted_bytes);
        if used.saturating_add(len_bytes) > self.quota.max_bytes {
            let most = self.quota.max_bytes;
            return Err(limit("QUOTA_BYTES", "the limit on bytes", most, used, len_bytes));
        }
        let most = self.max_registrations(slots);
        let used = self.promised_registrations.saturating_add(self.held_regions());
        if used.saturating_add(registrations) > most {
            let used = u64::from(used);
            let asked = u64::from(registrations);
            return Err(limit("QUOTA_REGISTRATIONS", "the limit on registrations", u64::from(most), used, asked));
        }
        Ok(())
    }

    /// Slots that registrations of buffers take.
    pub(crate) fn lease_slots(&self) -> u32 {
        u32::try_from(self.slots.taken()).unwrap_or(u32::MAX) - self.cached_slots
    }

    /// Cached regions that somebody holds or waits for.
    pub(crate) fn held_regions(&self) -> u32 {
        let idle = u32::try_from(self.idle_regions.len()).unwrap_or(u32::MAX);
        self.regions.saturating_sub(self.leaving_regions).saturating_sub(idle)
    }

    /// Whether it can own so much more now, without giving anything up first.
    pub(crate) fn has_room(&self, len_bytes: u64, registrations: u32, slots: u32) -> bool {
        self.owned_bytes.saturating_add(self.adopted_bytes).saturating_add(len_bytes) <= self.quota.max_bytes
            && self.lease_slots().saturating_add(registrations) <= self.max_registrations(slots)
    }
}

impl Core {
    /// The tenant of that key, made where there is none.
    pub(super) fn tenant_of(&mut self, key: &TenantKey, quota: Quota) -> TenantId {
        if let Some(id) = self.tenant_ids.get(key) {
            let id = *id;
            if let Some(tenant) = self.tenants.get_mut(&id).filter(|tenant| tenant.quota != quota) {
                // The rule that let the newest session in holds.
                tenant.quota = quota;
                self.record_tenant(id);
            }
            return id;
        }
        let id = TenantId(self.number());
        let mut tenant = Tenant::new(key.clone(), quota, self.settings.slots);
        tenant.page = self.name();
        self.tenants.insert(id, tenant);
        self.tenant_ids.insert(key.clone(), id);
        self.record_tenant(id);
        self.effect(Effect::CreateTenant { tenant: id });
        id
    }

    /// Gives up what a tenant without session and lease still has, and forgets it once that is gone.
    pub(super) fn settle_tenant(&mut self, id: TenantId) {
        let Some(tenant) = self.tenants.get_mut(&id) else { return };
        if tenant.is_alive() {
            tenant.ending = false;
            return;
        }
        // Once: nothing is kept for it from here on, and this is asked at each of its buffers that goes.
        if !std::mem::replace(&mut tenant.ending, true) {
            let owned: Vec<_> =
                self.allocations.iter().filter(|(_, a)| a.is_kept_for(id)).map(|(allocation, _)| *allocation).collect();
            for allocation in owned {
                self.give_up(allocation);
            }
            self.end_idle_regions(id);
        }
        let Some(tenant) = self.tenants.get(&id) else { return };
        let cached = tenant.memories + tenant.regions;
        if tenant.allocations == 0 && tenant.queue_pairs == 0 && tenant.shedding == 0 && cached == 0 {
            let (key, page) = (tenant.key.clone(), tenant.page);
            self.tenants.remove(&id);
            self.record(Record::TenantGone(id));
            self.unkeep(page);
            self.tenant_ids.remove(&key);
            self.effect(Effect::DropTenant { tenant: id });
        }
    }
}
