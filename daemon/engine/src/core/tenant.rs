//! Tenants: what each has, against what it may have.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::pool::{Pool, PoolKey};
use super::record::Record;
use super::slots::Slots;
use super::{Core, Effect, TenantId};
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
        if self.promised_bytes.saturating_add(len_bytes) > self.quota.max_bytes {
            let (most, used) = (self.quota.max_bytes, self.promised_bytes);
            return Err(limit("QUOTA_BYTES", "the limit on bytes", most, used, len_bytes));
        }
        let most = self.max_registrations(slots);
        if self.promised_registrations.saturating_add(registrations) > most {
            let used = u64::from(self.promised_registrations);
            let asked = u64::from(registrations);
            return Err(limit("QUOTA_REGISTRATIONS", "the limit on registrations", u64::from(most), used, asked));
        }
        Ok(())
    }

    /// Whether it can own so much more now, without giving anything up first.
    pub(crate) fn has_room(&self, len_bytes: u64, registrations: u32, slots: u32) -> bool {
        let taken = u32::try_from(self.slots.taken()).unwrap_or(u32::MAX);
        self.owned_bytes.saturating_add(len_bytes) <= self.quota.max_bytes
            && taken.saturating_add(registrations) <= self.max_registrations(slots)
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
        let mut tenant = Tenant::new(key.clone(), quota, self.settings.limits.registration_slots);
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
        }
        let Some(tenant) = self.tenants.get(&id) else { return };
        if tenant.allocations == 0 && tenant.queue_pairs == 0 && tenant.shedding == 0 {
            let (key, page) = (tenant.key.clone(), tenant.page);
            self.tenants.remove(&id);
            self.record(Record::TenantGone(id));
            self.unkeep(page);
            self.tenant_ids.remove(&key);
            self.effect(Effect::DropTenant { tenant: id });
        }
    }
}
