//! Leases: acquire, open, release, detach, and their end.

use std::sync::Arc;
use std::time::Duration;

use gdrd_hal::Access;

use super::allocation::{Allocation, Stage};
use super::holders::Holders;
use super::pool::{PoolKey, Waiter};
use super::record::Record;
use super::session::check_label;
use super::{
    AllocationId, Answer, CallId, Change, Core, Deadline, Effect, Grant, GrantId, HcaIndex, Place, TenantId, host,
    nanos,
};
use crate::error::EngineError;
use crate::ids::{Generation, LeaseId, QueuePairId, SessionId};
use crate::lease::{AcquireRequest, LeaseInfo, LeaseState};

/// How often one session may acquire or open a lease until it releases it: each is remembered, to be undone by itself.
pub(super) const MAX_OPENS: usize = 256;

/// One lease.
#[derive(Debug)]
pub(crate) struct Lease {
    pub(crate) tenant: TenantId,
    pub(crate) allocation: AllocationId,
    pub(crate) key: Arc<PoolKey>,
    pub(crate) generation: Generation,
    pub(crate) state: LeaseState,
    /// Why NIC access ended.
    pub(super) revoked: Option<String>,
    pub(crate) label: Arc<str>,
    pub(crate) holders: Holders,
    /// How long it may live without holders, ns.
    pub(super) ttl_ns: Option<u64>,
    /// When it ends, while it has none.
    pub(crate) expires_at: Option<u64>,
}

impl Lease {
    pub(crate) fn is_detached(&self) -> bool {
        self.holders.is_empty()
    }

    /// Why no NIC reaches its memory, where none does.
    pub(super) fn why_no_nic(&self) -> String {
        self.revoked.clone().unwrap_or_else(|| "its registrations are being made anew".to_owned())
    }

    pub(crate) fn is_revoked(&self) -> bool {
        self.revoked.is_some()
    }
}

impl Core {
    pub(super) fn acquire(&mut self, call: CallId, session: SessionId, request: AcquireRequest) {
        let key = match self.check_acquire(session, &request) {
            Ok(key) => Arc::new(key),
            Err(error) => return self.answer(call, Err(error)),
        };
        let Ok(tenant) = self.session(session).map(|session| session.tenant) else { return self.unexpected() };
        let Some(entry) = self.tenants.get_mut(&tenant) else { return self.unexpected() };
        entry.promised_bytes += key.len_bytes;
        entry.promised_registrations += key.registrations();
        self.use_pool(tenant, &key);
        let waiter = Waiter { call, session, label: request.label.into() };
        let Some(pool) = self.pool_mut(tenant, &key) else { return self.unexpected() };
        if let Some(allocation) = pool.ready.pop() {
            self.counters.acquires_warm += 1;
            self.grant_new(allocation, tenant, &key, waiter);
        } else {
            pool.waiters.push_back(waiter);
            self.counters.acquires_cold += 1;
            self.waiting.insert(call, (tenant, Arc::clone(&key)));
            if let Ok(session) = self.live_session(session) {
                session.waiting.insert(call);
            }
        }
        self.balance(tenant, &key);
    }

    /// Everything that may refuse an acquire before it costs anything.
    fn check_acquire(&self, id: SessionId, request: &AcquireRequest) -> Result<PoolKey, EngineError> {
        let session = self.session(id)?;
        if self.shutting_down {
            return Err(EngineError::ShuttingDown);
        }
        let limits = &self.settings.limits;
        check_label("label", &request.label, limits.max_label_bytes)?;
        let most = limits.max_lease_bytes;
        if request.size_bytes == 0 || request.size_bytes > most {
            let problem = format!("{} is not within 1 to {most}", request.size_bytes);
            return Err(EngineError::BadArgument { what: "size_bytes", problem });
        }
        let resolved = self.host.resolve(request, limits.max_hcas_per_lease)?;
        if let Place::Gpu(gpu) = resolved.place {
            self.check_proof(session, gpu)?;
        }
        let class = host::size_class(request.size_bytes, resolved.granularity_bytes).filter(|class| *class <= most);
        let Some(len_bytes) = class else {
            let problem = format!("the size class of {} is above {most}", request.size_bytes);
            return Err(EngineError::BadArgument { what: "size_bytes", problem });
        };
        let key = PoolKey { place: resolved.place, len_bytes, hcas: resolved.hcas, signal: request.signal };
        self.check_session_limits(session.holds.len(), session.waiting.len())?;
        let tenant = self.tenants.get(&session.tenant).ok_or(EngineError::SessionEnded)?;
        // A buffer that is at hand has its descriptors.
        if tenant.pools.get(&key).is_none_or(|pool| pool.ready.is_empty()) {
            self.check_descriptors()?;
        }
        tenant.may_promise(key.len_bytes, key.registrations(), limits.registration_slots)?;
        Ok(key)
    }

    fn check_session_limits(&self, holds: usize, waiting: usize) -> Result<(), EngineError> {
        let limits = &self.settings.limits;
        let over = |reason, what, limit: u32, used: usize| {
            let (limit, used) = (u64::from(limit), used as u64);
            Err(EngineError::Limit { reason, what, whom: "the session", limit, used, asked: 1 })
        };
        if holds + waiting >= limits.max_leases_per_session as usize {
            return over("LIMIT_LEASES", "the limit on leases", limits.max_leases_per_session, holds + waiting);
        }
        if waiting >= limits.max_waiting_acquires_per_session as usize {
            let most = limits.max_waiting_acquires_per_session;
            return over("LIMIT_WAITING_ACQUIRES", "the limit on waiting acquires", most, waiting);
        }
        Ok(())
    }

    /// The buffer goes to the acquire that waited longest.
    pub(super) fn grant_to_waiter(
        &mut self,
        allocation: AllocationId,
        tenant: TenantId,
        key: &Arc<PoolKey>,
        waiter: Waiter,
    ) {
        self.waiting.remove(&waiter.call);
        if let Some(session) = self.sessions.get_mut(&waiter.session) {
            session.waiting.remove(&waiter.call);
        }
        self.grant_new(allocation, tenant, key, waiter);
    }

    /// A new lease of a ready buffer. What it promises is on the tenant's account already.
    fn grant_new(&mut self, id: AllocationId, tenant: TenantId, key: &Arc<PoolKey>, waiter: Waiter) {
        let lease = LeaseId(self.number());
        let generation = self.generation();
        let Some(allocation) = self.allocations.get_mut(&id) else { return self.unexpected() };
        allocation.stage = Stage::Leased;
        allocation.lease = Some(lease);
        let slots = allocation.registrations.iter().map(|r| (r.slot, r.generation)).collect();
        self.leases.insert(
            lease,
            Lease {
                tenant,
                allocation: id,
                key: Arc::clone(key),
                generation,
                state: LeaseState::Held,
                revoked: None,
                label: waiter.label,
                holders: Holders::default(),
                ttl_ns: None,
                expires_at: None,
            },
        );
        if let Some(entry) = self.tenants.get_mut(&tenant) {
            entry.leases += 1;
            if let Some(pool) = entry.pools.get_mut(key) {
                pool.leased += 1;
            }
        }
        self.counters.leases_started += 1;
        self.effect(Effect::Publish { tenant, allocation: id, slots });
        self.hold(waiter.call, waiter.session, lease);
        if self.watched
            && let Some(info) = self.lease_info(lease)
        {
            self.effect(Effect::Tell { tenant, change: Change::Acquired(info) });
        }
    }

    /// Makes the session a holder and answers the call with it.
    fn hold(&mut self, call: CallId, session: SessionId, id: LeaseId) {
        let grant = GrantId(self.number());
        let Some(lease) = self.leases.get_mut(&id) else { return self.unexpected() };
        let changes = !lease.holders.contains(session) || lease.ttl_ns.is_some();
        lease.holders.add(session, grant);
        lease.ttl_ns = None;
        let expires = lease.expires_at.take();
        let allocation = lease.allocation;
        if let Some(at) = expires {
            self.deadlines.remove(&(at, Deadline::Lease(id)));
        }
        if let Some(session) = self.sessions.get_mut(&session) {
            session.holds.insert(id);
            session.lent.insert(allocation);
        }
        if changes {
            self.record_lease(id);
        }
        let Some(info) = self.lease_info(id) else { return self.unexpected() };
        self.answer(call, Ok(Answer::Granted(Box::new(Grant { grant, session, allocation, info }))));
    }

    pub(super) fn open(&mut self, call: CallId, session: SessionId, lease: LeaseId) {
        match self.check_open(session, lease) {
            Ok(()) => self.hold(call, session, lease),
            Err(error) => self.answer(call, Err(error)),
        }
    }

    fn check_open(&self, id: SessionId, lease_id: LeaseId) -> Result<(), EngineError> {
        let session = self.session(id)?;
        let lease = self.lease_of(session.tenant, lease_id)?;
        if let Some(cause) = &lease.revoked {
            return Err(EngineError::LeaseRevoked { lease: lease_id.0, cause: cause.clone() });
        }
        if let Place::Gpu(gpu) = lease.key.place {
            self.check_proof(session, gpu)?;
        }
        let grants = lease.holders.grants_of(id);
        if grants > 0 {
            let (limit, used) = (MAX_OPENS as u64, grants as u64);
            let (reason, what, whom) = ("LIMIT_OPENS", "the limit on opens of one lease", "the session");
            return match used < limit {
                true => Ok(()),
                false => Err(EngineError::Limit { reason, what, whom, limit, used, asked: 1 }),
            };
        }
        self.check_session_limits(session.holds.len(), session.waiting.len())
    }

    /// The lease, if it is the tenant's. Another tenant's is as unknown as one that never was.
    fn lease_of(&self, tenant: TenantId, id: LeaseId) -> Result<&Lease, EngineError> {
        self.leases.get(&id).filter(|lease| lease.tenant == tenant).ok_or(EngineError::UnknownLease { lease: id.0 })
    }

    /// The lease that has this memory now, if it is of the session's tenant.
    pub(crate) fn lease_of_memory(&self, session: SessionId, memory: AllocationId) -> Option<LeaseId> {
        let tenant = self.session(session).ok()?.tenant;
        let lease = self.allocations.get(&memory)?.lease?;
        self.lease_of(tenant, lease).is_ok().then_some(lease)
    }

    /// The lease, if the session holds it.
    pub(super) fn held_lease(&self, session: SessionId, id: LeaseId) -> Result<&Lease, EngineError> {
        let tenant = self.session(session)?.tenant;
        let lease = self.lease_of(tenant, id)?;
        match lease.holders.contains(session) {
            true => Ok(lease),
            false => Err(EngineError::NotHolder { lease: id.0 }),
        }
    }

    /// A lease that the session holds, with its keys left at 0, and its memory.
    pub(crate) fn held_info(&self, session: SessionId, id: LeaseId) -> Result<(AllocationId, LeaseInfo), EngineError> {
        let allocation = self.held_lease(session, id)?.allocation;
        let info = self.lease_info(id).ok_or(EngineError::UnknownLease { lease: id.0 })?;
        Ok((allocation, info))
    }

    /// Memory of a lease that the session holds and that an HCA reaches, with the rights it has there.
    pub(crate) fn direct_memory(
        &self,
        session: SessionId,
        id: LeaseId,
        hca: HcaIndex,
    ) -> Result<(AllocationId, Access), EngineError> {
        let lease = self.held_lease(session, id)?;
        let allocation = self.allocations.get(&lease.allocation);
        if allocation.is_some_and(|allocation| allocation.stage != Stage::Leased) {
            let cause = lease.why_no_nic();
            return Err(EngineError::LeaseRevoked { lease: id.0, cause });
        }
        if !lease.key.hcas.contains(&hca) {
            let problem = format!("lease {} is not registered with that one", id.0);
            return Err(EngineError::BadArgument { what: "hca", problem });
        }
        Ok((lease.allocation, lease.key.access()))
    }

    /// Whether the session is there.
    pub(crate) fn check_session(&self, session: SessionId) -> Result<(), EngineError> {
        self.session(session).map(drop)
    }

    pub(super) fn release(
        &mut self,
        call: CallId,
        session: SessionId,
        id: LeaseId,
        generation: Option<Generation>,
        receives: Option<QueuePairId>,
    ) {
        if let Err(error) = self.check_release(session, id, generation, receives) {
            return self.answer(call, Err(error));
        }
        // A client that says it is done with the lease wants no time to live any more.
        if let Some(lease) = self.leases.get_mut(&id) {
            lease.ttl_ns = None;
        }
        if let Ok(entry) = self.live_session(session) {
            entry.holds.remove(&id);
        }
        self.answer(call, Ok(Answer::Done));
        self.drop_hold(id, session, "RELEASED");
    }

    fn check_release(
        &self,
        session: SessionId,
        id: LeaseId,
        generation: Option<Generation>,
        receives: Option<QueuePairId>,
    ) -> Result<(), EngineError> {
        let lease = self.held_lease(session, id)?;
        if let Some(given) = generation.filter(|given| *given != lease.generation) {
            return Err(EngineError::StaleGeneration { lease: id.0, given: given.0, current: lease.generation.0 });
        }
        match receives {
            Some(queue_pair) if lease.holders.len() == 1 => {
                Err(EngineError::ReceivesPosted { lease: id.0, queue_pair: queue_pair.0 })
            }
            _ => Ok(()),
        }
    }

    pub(super) fn undo(&mut self, session: SessionId, id: LeaseId, grant: GrantId) {
        let Some(lease) = self.leases.get_mut(&id) else { return };
        if !lease.holders.take_back(session, grant) {
            return;
        }
        self.counters.grants_undone += 1;
        if let Some(entry) = self.sessions.get_mut(&session) {
            entry.holds.remove(&id);
        }
        self.drop_hold(id, session, "NOT_TAKEN");
    }

    pub(super) fn detach(&mut self, call: CallId, session: SessionId, id: LeaseId, ttl: Duration) {
        let answer = self.check_detach(session, id, ttl).map(|()| Answer::Done);
        if answer.is_ok()
            && let Some(lease) = self.leases.get_mut(&id)
        {
            lease.ttl_ns = Some(nanos(ttl));
            self.record_lease(id);
        }
        self.answer(call, answer);
    }

    fn check_detach(&self, session: SessionId, id: LeaseId, ttl: Duration) -> Result<(), EngineError> {
        let lease = self.held_lease(session, id)?;
        if let Some(cause) = &lease.revoked {
            return Err(EngineError::LeaseRevoked { lease: id.0, cause: cause.clone() });
        }
        let most = self.settings.limits.max_ttl;
        if ttl.is_zero() || ttl > most {
            let problem = format!("{} ms is not within 1 to {} ms", ttl.as_millis(), most.as_millis());
            return Err(EngineError::BadArgument { what: "ttl", problem });
        }
        Ok(())
    }

    /// Takes a session off the lease's holders; the last one ends it, unless it was detached.
    pub(super) fn drop_hold(&mut self, id: LeaseId, session: SessionId, reason: &'static str) {
        let Some(lease) = self.leases.get_mut(&id) else { return };
        lease.holders.remove(session);
        if !lease.holders.is_empty() {
            return self.record_lease(id);
        }
        match lease.ttl_ns.filter(|_| lease.revoked.is_none() && !self.shutting_down) {
            Some(ttl_ns) => {
                let at = self.now.saturating_add(ttl_ns);
                lease.expires_at = Some(at);
                self.deadlines.insert((at, Deadline::Lease(id)));
                self.record_lease(id);
            }
            None => self.end_lease(id, reason),
        }
    }

    pub(super) fn lease_expired(&mut self, id: LeaseId) {
        if self.leases.get(&id).is_some_and(Lease::is_detached) {
            self.end_lease(id, "TTL_EXPIRED");
        }
    }

    /// Ends a lease nobody holds: its buffer is scrubbed for the next, or freed.
    pub(super) fn end_lease(&mut self, id: LeaseId, reason: &'static str) {
        let Some(lease) = self.leases.remove(&id) else { return };
        if let Some(at) = lease.expires_at {
            self.deadlines.remove(&(at, Deadline::Lease(id)));
        }
        let sound = self.allocations.get(&lease.allocation).is_some_and(Allocation::is_sound);
        let keep = sound && self.wants_back(lease.tenant, &lease.key);
        let Some(tenant) = self.tenants.get_mut(&lease.tenant) else { return self.unexpected() };
        tenant.leases -= 1;
        tenant.promised_bytes -= lease.key.len_bytes;
        tenant.promised_registrations -= lease.key.registrations();
        if let Some(pool) = tenant.pools.get_mut(&lease.key) {
            pool.leased -= 1;
            pool.coming += u32::from(keep);
        }
        self.counters.leases_ended += 1;
        self.record(Record::LeaseGone(id));
        let Some(allocation) = self.allocations.get_mut(&lease.allocation) else { return self.unexpected() };
        allocation.lease = None;
        allocation.kept = keep;
        allocation.ahead = true;
        let stage = allocation.stage;
        if self.watched {
            let change = Change::Released { lease: id, generation: lease.generation, reason };
            self.effect(Effect::Tell { tenant: lease.tenant, change });
        }
        match stage {
            Stage::Leased => self.start_quiescing(lease.allocation),
            Stage::Revoked => self.start_freeing(lease.allocation),
            // Being revoked or remade: freed once that is done.
            _ => {}
        }
        self.balance(lease.tenant, &lease.key);
        self.settle_tenant(lease.tenant);
    }

    /// Ends NIC access to a lease that is held on.
    pub(super) fn revoke(&mut self, id: LeaseId, cause: &str) {
        let Some((allocation, detached)) = self.note_revoked(id, cause) else { return };
        // One that is being remade is not open to anybody yet.
        if self.allocations.get(&allocation).is_some_and(|a| a.stage == Stage::Leased) {
            self.start_quiescing(allocation);
        }
        if detached {
            self.end_lease(id, "REVOKED");
        }
    }

    /// From here on the lease counts as revoked; `None` when it did before. Its memory, and whether nobody holds it.
    pub(super) fn note_revoked(&mut self, id: LeaseId, cause: &str) -> Option<(AllocationId, bool)> {
        let generation = self.generation();
        let lease = self.leases.get_mut(&id).filter(|lease| lease.revoked.is_none())?;
        lease.revoked = Some(cause.to_owned());
        lease.state = LeaseState::Revoked;
        lease.generation = generation;
        let (tenant, allocation, detached) = (lease.tenant, lease.allocation, lease.is_detached());
        self.counters.leases_revoked += 1;
        self.record_lease(id);
        if self.watched {
            let change = Change::Revoked { lease: id, generation, reason: cause.to_owned() };
            self.effect(Effect::Tell { tenant, change });
        }
        Some((allocation, detached))
    }
}
