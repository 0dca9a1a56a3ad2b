//! The life of one piece of memory, from allocation to free: what each finished job leads to.

use std::sync::Arc;

use super::pool::PoolKey;
use super::region::Source;
use super::shortage::{Awaited, Starved};
use super::{AllocationId, Core, Deadline, Effect, Failure, FailureKind, HcaIndex, Job, Place, TenantId};
use crate::error::EngineError;
use crate::ids::{Generation, LeaseId, SlotId};
use crate::keep::Name;

/// Where a piece of memory is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    Allocating,
    /// Nobody's.
    Clean,
    Registering,
    /// In its tenant's ready pool.
    Ready,
    Leased,
    /// Its slots are retired; requests admitted before still run.
    Quiescing,
    Deregistering,
    Scrubbing,
    /// Taken up from an earlier daemon with its lease; its registrations are being made anew.
    Remaking,
    /// No NIC reaches it; its lease lives on for mappings.
    Revoked,
    /// Waits for others to be freed, then is tried once more.
    Starved,
    Freeing,
}

/// Whose it is, and which pool it returns to.
#[derive(Debug, Clone)]
pub(crate) struct Owner {
    pub(crate) tenant: TenantId,
    pub(crate) key: Arc<PoolKey>,
}

/// One registration of an allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RegistrationState {
    pub(crate) hca: HcaIndex,
    pub(crate) slot: SlotId,
    pub(crate) generation: Generation,
    pub(crate) iova: u64,
}

/// One piece of memory.
#[derive(Debug)]
pub(crate) struct Allocation {
    pub(crate) place: Place,
    pub(crate) len_bytes: u64,
    pub(crate) owner: Option<Owner>,
    pub(crate) stage: Stage,
    /// Made, or made anew after a lease, while nobody waited for it in particular: nothing is given up for it.
    pub(crate) ahead: bool,
    /// Counted by its pool as coming: it is on its way to be ready, not to be freed.
    pub(crate) kept: bool,
    /// Others were given up for it once.
    pub(super) retried: bool,
    pub(crate) lease: Option<LeaseId>,
    pub(crate) registrations: Vec<RegistrationState>,
    /// Cached regions of ranges of it, in whatever stage.
    pub(crate) regions: u32,
    /// One of them could not be ended: an HCA may still reach it, and it is never lent again.
    pub(super) tainted: bool,
    /// Under which its memory and its dma-buf are kept, from its first registration on.
    pub(crate) names: Option<[Name; 2]>,
    /// When it became ready.
    pub(crate) since: u64,
    /// When requests on its retired slots are given up, while there may be any.
    drain_at: Option<u64>,
}

impl Allocation {
    pub(crate) fn new(place: Place, len_bytes: u64, owner: Option<Owner>, ahead: bool) -> Self {
        Self {
            place,
            len_bytes,
            owner,
            stage: Stage::Allocating,
            ahead,
            kept: true,
            retried: false,
            lease: None,
            registrations: Vec::new(),
            regions: 0,
            tainted: false,
            names: None,
            since: 0,
            drain_at: None,
        }
    }

    pub(crate) fn is_of(&self, tenant: TenantId) -> bool {
        self.owner.as_ref().is_some_and(|owner| owner.tenant == tenant)
    }

    /// Owned by the tenant, not lent, and not on its way out.
    pub(crate) fn is_kept_for(&self, tenant: TenantId) -> bool {
        self.is_of(tenant) && self.lease.is_none() && (self.kept || self.stage == Stage::Ready)
    }

    /// On its way to be freed.
    pub(crate) fn is_leaving(&self) -> bool {
        self.lease.is_none() && !self.kept && self.stage != Stage::Ready && self.stage != Stage::Clean
    }

    pub(crate) fn registration_count(&self) -> u32 {
        u32::try_from(self.registrations.len()).unwrap_or(u32::MAX)
    }

    /// Whether it has every registration that its pool promises.
    pub(crate) fn is_whole(&self) -> bool {
        self.owner.as_ref().is_some_and(|owner| owner.key.hcas.len() == self.registrations.len())
    }

    /// Whether it can be lent again after its lease.
    pub(super) fn is_sound(&self) -> bool {
        self.stage == Stage::Leased && self.is_whole() && !self.tainted
    }

    pub(super) fn is_on(&self, failure: &Failure, place: Place) -> bool {
        match failure.hca {
            Some(hca) => self.registrations.iter().any(|registration| registration.hca == hca),
            None => self.place == place,
        }
    }
}

impl Core {
    pub(super) fn allocated(&mut self, id: AllocationId, result: Result<(), Failure>) {
        let Some(allocation) = self.allocations.get_mut(&id).filter(|a| a.stage == Stage::Allocating) else {
            return self.unexpected();
        };
        if let Err(failure) = result {
            return self.allocation_failed(id, &failure);
        }
        self.counters.allocations += 1;
        if !allocation.kept {
            return self.start_freeing(id);
        }
        match (&allocation.owner, allocation.place) {
            (Some(_), _) => {
                let clean = allocation.owner.as_ref().map(|owner| Arc::clone(&owner.key));
                self.start_registering(id);
                if let Some(key) = clean {
                    self.refill_clean(&key);
                }
            }
            (None, Place::Gpu(gpu)) => {
                allocation.stage = Stage::Clean;
                allocation.kept = false;
                let len_bytes = allocation.len_bytes;
                self.add_clean(gpu, len_bytes, id);
            }
            (None, Place::Host(_)) => self.unexpected(),
        }
    }

    /// Gives the allocation slots for its tenant's registrations, and starts making them.
    pub(super) fn start_registering(&mut self, id: AllocationId) {
        let Some(allocation) = self.allocations.get_mut(&id) else { return self.unexpected() };
        let Some(owner) = allocation.owner.clone() else { return self.unexpected() };
        if allocation.registrations.is_empty() {
            let Some(tenant) = self.tenants.get_mut(&owner.tenant) else { return self.unexpected() };
            let mut registrations = Vec::with_capacity(owner.key.hcas.len());
            for hca in owner.key.hcas.iter() {
                let Some((slot, generation)) = tenant.slots.take() else { break };
                registrations.push(RegistrationState { hca: *hca, slot, generation, iova: 0 });
            }
            let complete = registrations.len() == owner.key.hcas.len();
            allocation.registrations = registrations;
            if !complete {
                let message = "every registration slot of the tenant is taken".to_owned();
                let failure = Failure { kind: FailureKind::Invalid, hca: None, message };
                allocation.stage = Stage::Registering;
                return self.registered(id, Err(failure));
            }
        }
        self.register(id);
    }

    pub(super) fn register(&mut self, id: AllocationId) {
        if self.allocations.get(&id).is_some_and(|allocation| allocation.names.is_none()) {
            let names = self.name().zip(self.name()).map(|(memory, dma_buf)| [memory, dma_buf]);
            if let Some(allocation) = self.allocations.get_mut(&id) {
                allocation.names = names;
            }
        }
        let Some(allocation) = self.allocations.get_mut(&id) else { return };
        let Some(owner) = allocation.owner.clone() else { return self.unexpected() };
        allocation.stage = Stage::Registering;
        let targets = allocation.registrations.iter().map(|r| (r.hca, r.slot)).collect();
        let (access, keep) = (owner.key.access(), allocation.names);
        self.effect(Effect::Start(Job::Register { allocation: id, tenant: owner.tenant, targets, access, keep }));
    }

    pub(super) fn registered(&mut self, id: AllocationId, result: Result<Vec<u64>, Failure>) {
        if self.allocations.get(&id).is_some_and(|allocation| allocation.stage == Stage::Remaking) {
            return self.remade(id, result);
        }
        let Some(allocation) = self.allocations.get_mut(&id).filter(|a| a.stage == Stage::Registering) else {
            return self.unexpected();
        };
        let iovas = match result {
            Ok(iovas) => iovas,
            Err(failure) => return self.registration_failed(id, &failure),
        };
        self.counters.registrations += iovas.len() as u64;
        for (registration, iova) in allocation.registrations.iter_mut().zip(iovas) {
            registration.iova = iova;
        }
        if !allocation.kept {
            return self.start_deregistering(id);
        }
        let Some(owner) = allocation.owner.clone() else { return self.unexpected() };
        allocation.kept = false;
        allocation.ahead = false;
        allocation.retried = false;
        allocation.stage = Stage::Ready;
        allocation.since = self.now;
        let Some(pool) = self.pool_mut(owner.tenant, &owner.key) else { return self.unexpected() };
        pool.coming -= 1;
        match pool.waiters.pop_front() {
            Some(waiter) => self.grant_to_waiter(id, owner.tenant, &owner.key, waiter),
            None => {
                pool.ready.push(id);
                self.watch_ready_pool(owner.tenant, &owner.key);
            }
        }
        self.feed(owner.tenant);
        self.balance(owner.tenant, &owner.key);
    }

    pub(super) fn quiesced(&mut self, id: AllocationId) {
        let Some(allocation) = self.allocations.get_mut(&id).filter(|a| a.stage == Stage::Quiescing) else {
            return self.unexpected();
        };
        let Some(overdue) = allocation.drain_at.take() else { return self.unexpected() };
        self.deadlines.remove(&(overdue, Deadline::Drain(id)));
        self.deregister_if_quiet(id);
    }

    /// Goes on once neither a request nor a cached region of its memory is left.
    pub(super) fn deregister_if_quiet(&mut self, id: AllocationId) {
        let quiet = |a: &&Allocation| a.stage == Stage::Quiescing && a.drain_at.is_none() && a.regions == 0;
        if self.allocations.get(&id).filter(quiet).is_some() {
            self.start_deregistering(id);
        }
    }

    pub(super) fn drain_overdue(&mut self, id: AllocationId) {
        let Some(allocation) = self.allocations.get(&id).filter(|a| a.stage == Stage::Quiescing) else { return };
        let Some(owner) = &allocation.owner else { return };
        let slots = allocation.registrations.iter().map(|r| r.slot).collect();
        let tenant = owner.tenant;
        self.counters.drains_overdue += 1;
        self.effect(Effect::FlushUsers { tenant, slots });
    }

    /// Closes the allocation's slots, then waits for what they let in.
    pub(super) fn start_quiescing(&mut self, id: AllocationId) {
        let drain_ns = self.settings.drain_ns;
        let Some(allocation) = self.allocations.get_mut(&id) else { return self.unexpected() };
        let Some(owner) = allocation.owner.clone() else { return self.unexpected() };
        let Some(tenant) = self.tenants.get_mut(&owner.tenant) else { return self.unexpected() };
        allocation.stage = Stage::Quiescing;
        for registration in &mut allocation.registrations {
            registration.generation = tenant.slots.retire(registration.slot);
        }
        let retired: Vec<_> = allocation.registrations.iter().map(|r| (r.slot, r.generation)).collect();
        let slots = retired.iter().map(|(slot, _)| *slot).collect();
        self.effect(Effect::Retire { tenant: owner.tenant, slots: retired });
        let overdue = self.at(drain_ns, Deadline::Drain(id));
        if let Some(allocation) = self.allocations.get_mut(&id) {
            allocation.drain_at = Some(overdue);
            if allocation.regions > 0 {
                self.end_source(Source::Leased(id), &EngineError::LeaseEnding);
            }
        }
        self.effect(Effect::Quiesce { tenant: owner.tenant, allocation: id, slots });
    }

    pub(super) fn start_deregistering(&mut self, id: AllocationId) {
        if let Some(allocation) = self.allocations.get_mut(&id) {
            allocation.stage = Stage::Deregistering;
            self.effect(Effect::Start(Job::Deregister { allocation: id }));
        }
    }

    pub(super) fn deregistered(&mut self, id: AllocationId, result: Result<(), Failure>) {
        let Some(allocation) = self.allocations.get_mut(&id).filter(|a| a.stage == Stage::Deregistering) else {
            return self.unexpected();
        };
        self.counters.deregistrations += u64::from(allocation.registration_count());
        if let Err(failure) = &result {
            // The driver may still reach it: it is never lent again.
            self.counters.deregistration_failures += 1;
            self.note_lost(id, failure);
            self.uncount(id);
        }
        let Some(allocation) = self.allocations.get_mut(&id) else { return };
        if allocation.lease.is_some() {
            allocation.stage = Stage::Revoked;
            return self.release_slots(id);
        }
        if allocation.kept {
            allocation.stage = Stage::Scrubbing;
            return self.effect(Effect::Start(Job::Scrub { allocation: id }));
        }
        let owner = allocation.owner.clone();
        self.release_slots(id);
        self.start_freeing(id);
        if let Some(owner) = owner {
            self.balance(owner.tenant, &owner.key);
        }
    }

    pub(super) fn scrubbed(&mut self, id: AllocationId, result: Result<(), Failure>) {
        let Some(allocation) = self.allocations.get(&id).filter(|a| a.stage == Stage::Scrubbing) else {
            return self.unexpected();
        };
        let (kept, owner) = (allocation.kept, allocation.owner.clone());
        if let (true, Ok(())) = (kept, &result) {
            self.counters.scrubs += 1;
            return self.start_registering(id);
        }
        if let Err(failure) = &result {
            self.counters.scrub_failures += 1;
            self.note_lost(id, failure);
            self.uncount(id);
        }
        self.release_slots(id);
        self.start_freeing(id);
        if let Some(owner) = owner {
            self.balance(owner.tenant, &owner.key);
        }
    }

    pub(super) fn start_freeing(&mut self, id: AllocationId) {
        if let Some(allocation) = self.allocations.get_mut(&id) {
            allocation.stage = Stage::Freeing;
            self.tell_freed(id);
            self.effect(Effect::Start(Job::Free { allocation: id }));
        }
    }

    pub(super) fn freed(&mut self, id: AllocationId) {
        if self.allocations.get(&id).is_none_or(|a| a.stage != Stage::Freeing) {
            return self.unexpected();
        }
        let Some(allocation) = self.allocations.remove(&id) else { return };
        self.counters.frees += 1;
        // Freed of its keeper as well, by the job.
        for name in allocation.names.iter().flatten() {
            self.journaling.names.remove(name);
        }
        self.forget_allocation(&allocation);
        self.after_freed(id, allocation.owner.as_ref().map(|owner| owner.tenant));
    }

    /// Takes an allocation that is gone off its owner's account.
    pub(super) fn forget_allocation(&mut self, allocation: &Allocation) {
        if let Some(tenant) = allocation.owner.as_ref().and_then(|owner| self.tenants.get_mut(&owner.tenant)) {
            tenant.owned_bytes -= allocation.len_bytes;
            tenant.allocations -= 1;
        }
    }

    pub(super) fn after_freed(&mut self, id: AllocationId, tenant: Option<TenantId>) {
        self.starved.remove(&Starved::Allocation(id));
        self.retry_starved(Awaited::Allocation(id));
        if let Some(tenant) = tenant {
            self.feed(tenant);
            self.settle_tenant(tenant);
        }
    }

    /// Puts an allocation that is not lent on its way to be freed.
    pub(super) fn give_up(&mut self, id: AllocationId) {
        let Some(allocation) = self.allocations.get(&id) else { return };
        if allocation.lease.is_some() {
            return;
        }
        match allocation.stage {
            Stage::Clean => {
                let Place::Gpu(gpu) = allocation.place else { return };
                if let Some(pool) = self.clean.get_mut(&(gpu, allocation.len_bytes)) {
                    pool.ready.retain(|ready| *ready != id);
                }
                self.start_freeing(id);
            }
            Stage::Ready => {
                let Some(owner) = allocation.owner.clone() else { return };
                if let Some(pool) = self.pool_mut(owner.tenant, &owner.key) {
                    pool.ready.retain(|ready| *ready != id);
                }
                self.start_deregistering(id);
            }
            // Nothing is being done to it, so no result would free it.
            Stage::Starved => {
                self.starved.remove(&Starved::Allocation(id));
                self.uncount(id);
                let has_memory = !allocation_is_empty(self.allocations.get(&id));
                self.release_slots(id);
                if has_memory {
                    self.start_freeing(id);
                } else if let Some(allocation) = self.allocations.remove(&id) {
                    self.forget_allocation(&allocation);
                    self.after_freed(id, allocation.owner.as_ref().map(|owner| owner.tenant));
                }
            }
            _ => self.uncount(id),
        }
    }

    /// Its pool no longer counts on it.
    pub(super) fn uncount(&mut self, id: AllocationId) {
        let Some(allocation) = self.allocations.get_mut(&id) else { return };
        if !std::mem::take(&mut allocation.kept) {
            return;
        }
        let (place, len_bytes) = (allocation.place, allocation.len_bytes);
        match allocation.owner.clone() {
            Some(owner) => {
                if let Some(pool) = self.pool_mut(owner.tenant, &owner.key) {
                    pool.coming -= 1;
                }
            }
            None => {
                let Place::Gpu(gpu) = place else { return };
                if let Some(pool) = self.clean.get_mut(&(gpu, len_bytes)) {
                    pool.coming -= 1;
                }
            }
        }
    }

    /// Gives the allocation's slots back to its tenant.
    pub(super) fn release_slots(&mut self, id: AllocationId) {
        let Some(allocation) = self.allocations.get_mut(&id) else { return };
        let registrations = std::mem::take(&mut allocation.registrations);
        let Some(tenant) = allocation.owner.as_ref().and_then(|owner| self.tenants.get_mut(&owner.tenant)) else {
            return;
        };
        for registration in registrations {
            tenant.slots.give_back(registration.slot);
        }
    }
}

/// Whether a starved allocation never got memory: it has slots only after it has memory.
fn allocation_is_empty(allocation: Option<&Allocation>) -> bool {
    allocation.is_none_or(|allocation| allocation.registrations.is_empty())
}
