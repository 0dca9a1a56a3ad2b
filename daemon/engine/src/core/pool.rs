//! Pools: ready buffers of a tenant, clean memory of a GPU, and when either grows or shrinks.
//!
//! A ready pool is last in, first out, so that what is lent next was touched last. Acquires that find
//! it dry wait at it, first come first served, for buffers on their way: released ones being
//! scrubbed, and new ones, of which as many are started as acquires wait without supply.

use std::collections::VecDeque;
use std::sync::Arc;

use gdrd_hal::Access;

use super::allocation::{Allocation, Owner, Stage};
use super::tenant::Tenant;
use super::{AllocationId, CallId, Core, Deadline, Effect, GpuIndex, HcaIndex, Job, Place, TenantId, nanos};
use crate::error::EngineError;
use crate::ids::SessionId;

/// How long nothing is made ahead at a pool after that did not work, ns: no full GPU is asked again at each acquire.
const RETRY_AHEAD_NS: u64 = 1_000_000_000;

/// What makes two buffers of a tenant interchangeable.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PoolKey {
    pub(crate) place: Place,
    pub(crate) len_bytes: u64,
    pub(crate) hcas: Arc<[HcaIndex]>,
    pub(crate) signal: bool,
}

impl PoolKey {
    pub(crate) fn registrations(&self) -> u32 {
        u32::try_from(self.hcas.len()).unwrap_or(u32::MAX)
    }

    /// Rights of the registrations: relaxed ordering is off for buffers polled as signals.
    pub(crate) fn access(&self) -> Access {
        Access { relaxed_ordering: !self.signal, ..Access::DATA }
    }
}

/// An acquire that waits.
#[derive(Debug)]
pub(crate) struct Waiter {
    pub(crate) call: CallId,
    pub(crate) session: SessionId,
    pub(crate) label: Arc<str>,
}

/// Ready buffers of one kind.
#[derive(Debug, Default)]
pub(crate) struct Pool {
    /// Registered and lent to nobody; the last is lent next.
    pub(crate) ready: Vec<AllocationId>,
    /// On their way to `ready`.
    pub(crate) coming: u32,
    /// Lent.
    pub(crate) leased: u32,
    pub(crate) waiters: VecDeque<Waiter>,
    /// How many are to be ready while the pool is in use.
    target: u32,
    /// Making one ahead did not work; it is not tried again before this time, nor without use.
    blocked_until: u64,
    last_used: u64,
    timer: bool,
}

impl Pool {
    /// Nothing depends on it: it can be forgotten.
    fn is_unused(&self) -> bool {
        self.ready.is_empty() && self.coming == 0 && self.leased == 0 && self.waiters.is_empty()
    }

    /// Whether it is looked at when it may have been idle for long.
    #[cfg(test)]
    pub(crate) fn has_timer(&self) -> bool {
        self.timer
    }

    /// Waiters that nothing on its way will serve.
    pub(crate) fn unserved(&self) -> usize {
        self.waiters.len().saturating_sub(self.coming as usize)
    }
}

/// Clean memory of one GPU and size class.
#[derive(Debug, Default)]
pub(crate) struct CleanPool {
    pub(crate) ready: Vec<AllocationId>,
    pub(crate) coming: u32,
    /// Making one did not work; it is not tried again before this time, nor without use.
    blocked_until: u64,
    warm: bool,
    last_used: u64,
    timer: bool,
}

#[cfg(test)]
impl CleanPool {
    /// Whether it is looked at when it may have been idle for long.
    pub(crate) fn has_timer(&self) -> bool {
        self.timer
    }
}

impl Core {
    /// The pool, made where there is none.
    pub(super) fn pool_mut(&mut self, tenant: TenantId, key: &Arc<PoolKey>) -> Option<&mut Pool> {
        self.tenants.get_mut(&tenant).map(|tenant| tenant.pools.entry(Arc::clone(key)).or_default())
    }

    /// Notes use of a pool: it is kept warm from here on.
    pub(super) fn use_pool(&mut self, tenant: TenantId, key: &Arc<PoolKey>) {
        let config = &self.settings.pool;
        let most = most_ready(config.ready_max_per_class, config.ready_max_bytes_per_class, key.len_bytes);
        let target = config.ready_target_per_class.min(most);
        let now = self.now;
        let Some(pool) = self.pool_mut(tenant, key) else { return };
        pool.last_used = now;
        pool.target = pool.target.max(target);
        self.watch_ready_pool(tenant, key);
    }

    /// Sees to it that the pool is looked at once it may have been idle for long.
    pub(super) fn watch_ready_pool(&mut self, tenant: TenantId, key: &Arc<PoolKey>) {
        let idle_ns = nanos(self.settings.pool.idle);
        let Some(pool) = self.pool_mut(tenant, key) else { return };
        if !std::mem::replace(&mut pool.timer, true) {
            self.at(idle_ns, Deadline::Ready(tenant, Arc::clone(key)));
        }
    }

    /// Makes `count` buffers ready ahead.
    pub(super) fn warm_pool(&mut self, tenant: TenantId, key: &Arc<PoolKey>, count: u32) {
        self.use_pool(tenant, key);
        let config = &self.settings.pool;
        let most = most_ready(config.ready_max_per_class, config.ready_max_bytes_per_class, key.len_bytes);
        if let Some(pool) = self.pool_mut(tenant, key) {
            pool.target = pool.target.max(count.min(most));
        }
        self.balance(tenant, key);
    }

    /// Whether a buffer that comes back is worth keeping.
    pub(super) fn wants_back(&self, tenant: TenantId, key: &Arc<PoolKey>) -> bool {
        let Some(tenant) = self.tenants.get(&tenant) else { return false };
        let Some(pool) = tenant.pools.get(key) else { return false };
        let config = &self.settings.pool;
        let most = most_ready(config.ready_max_per_class, config.ready_max_bytes_per_class, key.len_bytes);
        let have = pool.ready.len() + pool.coming as usize;
        !self.shutting_down
            && tenant.is_alive()
            && self.is_usable(key)
            && (have < most as usize + pool.waiters.len())
            && (!tenant.hungry || pool.unserved() > 0)
    }

    /// Whether the devices behind a pool can be used.
    pub(super) fn is_usable(&self, key: &PoolKey) -> bool {
        let gpu = match key.place {
            Place::Gpu(gpu) => self.host.gpu(gpu).is_some_and(|gpu| gpu.lost.is_none()),
            Place::Host(_) => true,
        };
        gpu && key.hcas.iter().all(|hca| self.host.usable_hca(*hca).is_ok())
    }

    /// Starts as many new buffers as waiters and the pool's target ask for.
    pub(super) fn balance(&mut self, tenant: TenantId, key: &Arc<PoolKey>) {
        loop {
            let Some(entry) = self.tenants.get(&tenant) else { return };
            let Some(pool) = entry.pools.get(key) else { return };
            let grown = if pool.unserved() > 0 {
                self.grow(tenant, key, false)
            } else {
                self.wants_ahead(entry, pool, key) && self.is_usable(key) && self.grow(tenant, key, true)
            };
            if !grown {
                break;
            }
        }
        self.forget_pool(tenant, key);
    }

    /// Whether one more buffer is to be made ahead. Not beyond what could be kept once all that is lent has come
    /// back, or each acquire would make one and each release free one; but never without any. Not with the last descriptors
    /// either, which others need to connect.
    fn wants_ahead(&self, tenant: &Tenant, pool: &Pool, key: &PoolKey) -> bool {
        let config = &self.settings.pool;
        let most = most_ready(config.ready_max_per_class, config.ready_max_bytes_per_class, key.len_bytes) as usize;
        let spare = (pool.ready.len() + pool.coming as usize).saturating_sub(pool.waiters.len());
        let keepable = spare + pool.waiters.len() + (pool.leased as usize) < most || spare == 0;
        spare < pool.target as usize
            && keepable
            && pool.blocked_until <= self.now
            && !tenant.hungry
            && tenant.is_alive()
            && self.check_descriptors().is_ok()
    }

    fn forget_pool(&mut self, tenant: TenantId, key: &Arc<PoolKey>) {
        if let Some(entry) = self.tenants.get_mut(&tenant)
            && entry.pools.get(key).is_some_and(Pool::is_unused)
        {
            entry.pools.remove(key);
        }
    }

    /// Balances every pool of the tenant at which somebody waits without supply.
    pub(super) fn feed(&mut self, tenant: TenantId) {
        let Some(entry) = self.tenants.get_mut(&tenant) else { return };
        if !std::mem::take(&mut entry.hungry) {
            return;
        }
        let keys: Vec<_> =
            entry.pools.iter().filter(|(_, p)| p.unserved() > 0).map(|(key, _)| Arc::clone(key)).collect();
        for key in keys {
            self.balance(tenant, &key);
        }
    }

    /// Starts one new buffer; false when the quota has no room for it now.
    fn grow(&mut self, tenant: TenantId, key: &Arc<PoolKey>, ahead: bool) -> bool {
        let slots = self.settings.limits.registration_slots;
        let Some(entry) = self.tenants.get_mut(&tenant) else { return false };
        if !entry.has_room(key.len_bytes, key.registrations(), slots) {
            if !ahead {
                entry.hungry = true;
                self.give_up_oldest_of(tenant, key.len_bytes, key.registrations());
            }
            return false;
        }
        entry.owned_bytes += key.len_bytes;
        entry.allocations += 1;
        entry.pools.entry(Arc::clone(key)).or_default().coming += 1;
        let owner = Owner { tenant, key: Arc::clone(key) };
        match self.take_clean(key) {
            Some(allocation) => {
                if let Some(entry) = self.allocations.get_mut(&allocation) {
                    entry.owner = Some(owner);
                    entry.ahead = ahead;
                    entry.kept = true;
                }
                self.start_registering(allocation);
                self.refill_clean(key);
            }
            None => {
                self.start_allocation(key.place, key.len_bytes, Some(owner), ahead);
            }
        }
        true
    }

    /// Starts an allocation; returns its id.
    fn start_allocation(&mut self, place: Place, len_bytes: u64, owner: Option<Owner>, ahead: bool) -> AllocationId {
        let allocation = AllocationId(self.number());
        self.allocations.insert(allocation, Allocation::new(place, len_bytes, owner, ahead));
        self.effect(Effect::Start(Job::Allocate { allocation, place, len_bytes, ahead }));
        allocation
    }

    /// Gives up ready buffers of the tenant, the longest unused first, until there is room or none is left.
    pub(super) fn give_up_oldest_of(&mut self, tenant: TenantId, len_bytes: u64, registrations: u32) {
        let slots = self.settings.limits.registration_slots;
        let Some(entry) = self.tenants.get(&tenant) else { return };
        let over_bytes = (entry.owned_bytes + entry.adopted_bytes + len_bytes).saturating_sub(entry.quota.max_bytes);
        let over_slots = (entry.lease_slots() + registrations).saturating_sub(entry.max_registrations(slots));
        // What is already on its way out counts first.
        let (mut bytes, mut freed_slots) = (0, 0);
        for allocation in self.allocations.values().filter(|a| a.is_leaving() && a.is_of(tenant)) {
            bytes += allocation.len_bytes;
            freed_slots += allocation.registration_count();
        }
        let mut ready: Vec<_> = self
            .allocations
            .iter()
            .filter(|(_, a)| a.stage == Stage::Ready && a.is_of(tenant))
            .map(|(id, a)| (a.since, *id, a.len_bytes, a.registration_count()))
            .collect();
        ready.sort_unstable();
        for (_, allocation, len_bytes, registrations) in ready {
            if bytes >= over_bytes && freed_slots >= over_slots {
                return;
            }
            bytes += len_bytes;
            freed_slots += registrations;
            self.give_up(allocation);
        }
    }

    /// The acquire that would be served last fails, if nothing on its way will serve it.
    pub(super) fn fail_one_unserved(&mut self, tenant: TenantId, key: &Arc<PoolKey>, error: EngineError) {
        let pool = self.tenants.get(&tenant).and_then(|tenant| tenant.pools.get(key)).filter(|p| p.unserved() > 0);
        if let Some(call) = pool.and_then(|pool| pool.waiters.back()).map(|waiter| waiter.call) {
            self.stop_waiting(call, error);
        }
    }

    /// Ends a waiting acquire with an error.
    pub(super) fn stop_waiting(&mut self, call: CallId, error: EngineError) {
        let Some((tenant, key)) = self.waiting.remove(&call) else { return };
        if let Some(entry) = self.tenants.get_mut(&tenant) {
            entry.promised_bytes -= key.len_bytes;
            entry.promised_registrations -= key.registrations();
            if let Some(pool) = entry.pools.get_mut(&key)
                && let Some(at) = pool.waiters.iter().position(|waiter| waiter.call == call)
                && let Some(waiter) = pool.waiters.remove(at)
                && let Some(session) = self.sessions.get_mut(&waiter.session)
            {
                session.waiting.remove(&call);
            }
        }
        self.answer(call, Err(error));
        self.forget_pool(tenant, &key);
    }

    /// Making one ahead did not work: leave it for a while.
    pub(super) fn block_pool(&mut self, tenant: TenantId, key: &Arc<PoolKey>) {
        let until = self.now.saturating_add(RETRY_AHEAD_NS);
        if let Some(pool) = self.pool_mut(tenant, key) {
            pool.blocked_until = until;
        }
    }

    pub(super) fn ready_pool_idle(&mut self, tenant: TenantId, key: &Arc<PoolKey>) {
        let idle_ns = nanos(self.settings.pool.idle);
        let now = self.now;
        let Some(pool) = self.tenants.get_mut(&tenant).and_then(|tenant| tenant.pools.get_mut(key)) else { return };
        let due = pool.last_used.saturating_add(idle_ns);
        if due > now {
            self.deadlines.insert((due, Deadline::Ready(tenant, Arc::clone(key))));
            return;
        }
        pool.timer = false;
        pool.target = 0;
        let idle = pool.ready.clone();
        self.counters.idle_dropped += idle.len() as u64;
        for allocation in idle {
            self.give_up(allocation);
        }
        self.forget_pool(tenant, key);
    }

    /// Clean memory for a buffer of that kind, if there is any.
    fn take_clean(&mut self, key: &PoolKey) -> Option<AllocationId> {
        let Place::Gpu(gpu) = key.place else { return None };
        let now = self.now;
        let pool = self.clean.entry((gpu, key.len_bytes)).or_default();
        pool.last_used = now;
        pool.warm = true;
        let taken = pool.ready.pop();
        self.watch_clean_pool(gpu, key.len_bytes);
        taken
    }

    /// Sees to it that the pool is looked at once it may have been idle for long.
    fn watch_clean_pool(&mut self, gpu: GpuIndex, len_bytes: u64) {
        let idle_ns = nanos(self.settings.pool.idle);
        let pool = self.clean.entry((gpu, len_bytes)).or_default();
        if !std::mem::replace(&mut pool.timer, true) {
            self.at(idle_ns, Deadline::Clean(gpu, len_bytes));
        }
    }

    /// New clean memory has come.
    pub(super) fn add_clean(&mut self, gpu: GpuIndex, len_bytes: u64, allocation: AllocationId) {
        let pool = self.clean.entry((gpu, len_bytes)).or_default();
        pool.coming -= 1;
        pool.ready.push(allocation);
        self.watch_clean_pool(gpu, len_bytes);
    }

    /// Makes clean memory ahead, up to the target and the GPU's budget.
    pub(super) fn refill_clean(&mut self, key: &PoolKey) {
        let Place::Gpu(gpu) = key.place else { return };
        let config = &self.settings.pool;
        let most = most_ready(config.clean_target_per_class, config.clean_max_bytes, key.len_bytes);
        loop {
            let has_descriptors = self.check_descriptors().is_ok();
            let held: u64 = self
                .clean
                .range((gpu, 0)..=(gpu, u64::MAX))
                .map(|((_, len_bytes), pool)| len_bytes * (pool.ready.len() as u64 + u64::from(pool.coming)))
                .sum();
            let Some(pool) = self.clean.get_mut(&(gpu, key.len_bytes)) else { return };
            let have = pool.ready.len() + pool.coming as usize;
            let budget = held.saturating_add(key.len_bytes) <= self.settings.pool.clean_max_bytes && has_descriptors;
            if !pool.warm || pool.blocked_until > self.now || self.shutting_down || !budget || have >= most as usize {
                return;
            }
            pool.coming += 1;
            self.start_allocation(key.place, key.len_bytes, None, true);
        }
    }

    /// Making clean memory ahead did not work.
    pub(super) fn clean_failed(&mut self, gpu: GpuIndex, len_bytes: u64) {
        let until = self.now.saturating_add(RETRY_AHEAD_NS);
        if let Some(pool) = self.clean.get_mut(&(gpu, len_bytes)) {
            pool.blocked_until = until;
        }
    }

    pub(super) fn clean_pool_idle(&mut self, gpu: GpuIndex, len_bytes: u64) {
        let idle_ns = nanos(self.settings.pool.idle);
        let now = self.now;
        let Some(pool) = self.clean.get_mut(&(gpu, len_bytes)) else { return };
        let due = pool.last_used.saturating_add(idle_ns);
        if due > now {
            self.deadlines.insert((due, Deadline::Clean(gpu, len_bytes)));
            return;
        }
        pool.timer = false;
        pool.warm = false;
        let idle = pool.ready.clone();
        self.counters.idle_dropped += idle.len() as u64;
        for allocation in idle {
            self.give_up(allocation);
        }
    }
}

/// How many buffers of a length a count and a byte budget allow; one always, unless the count is 0.
fn most_ready(count: u32, bytes: u64, len_bytes: u64) -> u32 {
    let by_bytes = u32::try_from(bytes / len_bytes.max(1)).unwrap_or(u32::MAX).max(1);
    count.min(by_bytes)
}
