//! Taking up what an earlier daemon left: from its journal, and from what was kept of the objects.
//!
//! Sessions go on if their socket was kept, leases if their memory was. Registrations are made anew, with fresh keys and
//! under later generations than any client can know; until they are there, a lease is being remade, and no NIC reaches it.
//! Memory that no lease has is not taken up: what it holds is not known. An allocation stays its tenant's, whatever part
//! of a journal was read: nothing here gives memory to another.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::allocation::{Allocation, Owner, Stage};
use super::holders::Holders;
use super::lease::Lease;
use super::pool::PoolKey;
use super::queue_pair::QueuePair;
use super::record::{Journaled, LeaseRecord, PlaceRecord, QueuePairRecord, SessionRecord, TenantRecord};
use super::session::Session;
use super::slots::Slots;
use super::tenant::Tenant;
use super::{AllocationId, Change, Core, Deadline, Effect, Failure, GrantId, Job, Place, RegistrationState, TenantId};
use crate::ids::{LeaseId, QueuePairId, SessionId};
use crate::lease::LeaseState;
use crate::peer::TenantKey;
use crate::policy::Quota;

/// What is left of an earlier daemon.
#[derive(Debug, Clone, Default)]
pub(crate) struct Restored {
    pub(crate) journaled: Journaled,
    /// Tenants whose page was kept, with the generation of each slot from here on.
    pub(crate) tenants: BTreeMap<TenantId, Vec<u64>>,
    /// Sessions whose socket was kept.
    pub(crate) sessions: BTreeSet<SessionId>,
    /// Allocations whose memory was kept.
    pub(crate) memory: BTreeSet<AllocationId>,
    /// Queue pairs whose ring was kept.
    pub(crate) rings: BTreeSet<QueuePairId>,
}

impl Core {
    pub(super) fn restore(&mut self, restored: Restored) {
        let Restored { journaled, mut tenants, sessions, memory, rings } = restored;
        self.last_number = self.last_number.max(journaled.numbers);
        // What this daemon's journal begins with: no fewer numbers than its own may be given before the next one is.
        self.journaling.written_numbers = self.last_number;
        for (id, record) in journaled.tenants {
            if let Some(generations) = tenants.remove(&id) {
                self.restore_tenant(record, generations);
            }
        }
        for (_, record) in journaled.sessions.into_iter().filter(|(id, _)| sessions.contains(id)) {
            self.restore_session(record);
        }
        let leases = journaled.leases.into_iter().filter(|(_, lease)| memory.contains(&lease.allocation));
        for (_, record) in leases {
            self.restore_lease(record);
        }
        for (_, record) in journaled.queue_pairs.into_iter().filter(|(id, _)| rings.contains(id)) {
            self.restore_queue_pair(record);
        }
        self.settle_restored();
    }

    fn restore_tenant(&mut self, record: TenantRecord, generations: Vec<u64>) {
        let key = TenantKey { uid: record.uid, scope: record.scope.into() };
        let quota = Quota {
            max_bytes: record.max_bytes,
            max_registrations: record.max_registrations,
            max_queue_pairs: record.max_queue_pairs,
            max_sessions: record.max_sessions,
        };
        let mut tenant = Tenant::new(key.clone(), quota, self.settings.slots);
        tenant.slots = Slots::restored(self.settings.slots, generations);
        tenant.page = Some(record.page);
        self.journaling.names.insert(record.page);
        self.tenants.insert(record.id, tenant);
        self.tenant_ids.insert(key, record.id);
    }

    fn restore_session(&mut self, record: SessionRecord) {
        let uuids = record.proven.into_iter().map(gdrd_hal::GpuUuid);
        let proven = uuids.filter_map(|uuid| self.host.gpu_by_uuid(&uuid)).collect();
        let Some(tenant) = self.tenants.get_mut(&record.tenant) else { return };
        tenant.sessions += 1;
        self.journaling.names.insert(record.socket);
        self.counters.sessions_resumed += 1;
        let mut session = Session::new(record.tenant, record.admin, record.token, Some(record.socket));
        session.proven = proven;
        self.sessions.insert(record.id, session);
    }

    /// What its memory is; `None` without its GPU.
    fn key_of(&self, record: &LeaseRecord) -> Option<PoolKey> {
        let place = match &record.place {
            PlaceRecord::Gpu(uuid) => Place::Gpu(self.host.gpu_by_uuid(&gdrd_hal::GpuUuid(uuid.clone()))?),
            PlaceRecord::Host(node) => Place::Host(*node),
        };
        let hcas = record.hcas.iter().filter_map(|name| self.host.find_hca(name).ok()).collect();
        Some(PoolKey { place, len_bytes: record.len_bytes, hcas, signal: record.signal })
    }

    fn restore_lease(&mut self, mut record: LeaseRecord) {
        let Some(key) = self.key_of(&record).map(Arc::new) else { return };
        if key.hcas.len() < record.hcas.len() {
            let gone = || format!("this host no longer has each of its hcas: {}", record.hcas.join(", "));
            record.revoked.get_or_insert_with(gone);
        }
        if let Place::Gpu(gpu) = key.place
            && let Some(why) = self.host.gpu(gpu).and_then(|gpu| gpu.lost.clone())
        {
            record.revoked.get_or_insert(why);
        }
        let Some(tenant) = self.tenants.get_mut(&record.tenant) else { return };
        let (id, allocation) = (record.id, record.allocation);
        tenant.owned_bytes += key.len_bytes;
        tenant.allocations += 1;
        tenant.leases += 1;
        tenant.promised_bytes += key.len_bytes;
        tenant.promised_registrations += key.registrations();
        tenant.pools.entry(Arc::clone(&key)).or_default().leased += 1;
        let owner = Owner { tenant: record.tenant, key: Arc::clone(&key) };
        let mut entry = Allocation::new(key.place, key.len_bytes, Some(owner), true);
        entry.kept = false;
        entry.lease = Some(id);
        entry.names = Some([record.memory, record.dma_buf]);
        entry.stage = if record.revoked.is_some() { Stage::Revoked } else { Stage::Remaking };
        self.allocations.insert(allocation, entry);
        self.journaling.names.extend([record.memory, record.dma_buf]);
        let mut holders = Holders::default();
        for session in record.holders {
            let grant = GrantId(self.number());
            if let Some(entry) = self.sessions.get_mut(&session).filter(|entry| entry.tenant == record.tenant) {
                entry.holds.insert(id);
                entry.lent.insert(allocation);
                holders.add(session, grant);
            }
        }
        let state = if record.revoked.is_some() { LeaseState::Revoked } else { LeaseState::Held };
        let lease = Lease {
            tenant: record.tenant,
            allocation,
            key,
            generation: record.generation,
            state,
            revoked: record.revoked,
            label: record.label.into(),
            holders,
            ttl_ns: record.ttl_ns,
            expires_at: record.expires_at,
        };
        self.leases.insert(id, lease);
        self.counters.leases_resumed += 1;
        if state == LeaseState::Held {
            self.start_remaking(allocation);
        }
    }

    fn start_remaking(&mut self, id: AllocationId) {
        let Some(allocation) = self.allocations.get_mut(&id) else { return };
        let Some(owner) = allocation.owner.clone() else { return self.unexpected() };
        let Some(tenant) = self.tenants.get_mut(&owner.tenant) else { return self.unexpected() };
        // A slot short, as after a smaller number of them was configured, is told by the job as a failure.
        let slots = owner.key.hcas.iter().filter_map(|hca| Some((*hca, tenant.slots.take()?)));
        allocation.registrations =
            slots.map(|(hca, (slot, generation))| RegistrationState { hca, slot, generation, iova: 0 }).collect();
        let targets = allocation.registrations.iter().map(|r| (r.hca, r.slot)).collect();
        let (access, keep) = (owner.key.access(), allocation.names);
        self.effect(Effect::Start(Job::Register { allocation: id, tenant: owner.tenant, targets, access, keep }));
    }

    /// The registrations of a lease that was taken up are there, or cannot be made.
    pub(super) fn remade(&mut self, id: AllocationId, result: Result<Vec<u64>, Failure>) {
        let Some(allocation) = self.allocations.get_mut(&id) else { return };
        let made = u64::from(allocation.registration_count());
        let whole = allocation.is_whole();
        let lease = allocation.lease;
        match result {
            Ok(iovas) => {
                for (registration, iova) in allocation.registrations.iter_mut().zip(iovas) {
                    registration.iova = iova;
                }
                self.counters.registrations += made;
                match lease.filter(|lease| whole && self.leases.get(lease).is_some_and(|l| !l.is_revoked())) {
                    Some(lease) => self.rekey(id, lease),
                    None => {
                        self.start_deregistering(id);
                        if let Some(lease) = lease {
                            self.give_up_remade(lease, "the tenant has fewer registration slots than before");
                        }
                    }
                }
            }
            Err(failure) => {
                self.counters.registration_failures += 1;
                self.release_slots(id);
                match lease {
                    Some(lease) => {
                        if let Some(allocation) = self.allocations.get_mut(&id) {
                            allocation.stage = Stage::Revoked;
                        }
                        self.give_up_remade(lease, &failure.message);
                    }
                    None => self.start_freeing(id),
                }
                self.note_lost(id, &failure);
            }
        }
    }

    /// Revokes a lease that could not be registered again; one that nobody holds ends.
    fn give_up_remade(&mut self, lease: LeaseId, cause: &str) {
        if let Some((_, true)) = self.note_revoked(lease, cause) {
            self.end_lease(lease, "REVOKED");
        }
    }

    fn rekey(&mut self, id: AllocationId, lease: LeaseId) {
        let generation = self.generation();
        let Some(entry) = self.leases.get_mut(&lease) else { return self.unexpected() };
        entry.generation = generation;
        let tenant = entry.tenant;
        let Some(allocation) = self.allocations.get_mut(&id) else { return self.unexpected() };
        allocation.stage = Stage::Leased;
        let slots = allocation.registrations.iter().map(|r| (r.slot, r.generation)).collect();
        self.record_lease(lease);
        self.effect(Effect::Publish { tenant, allocation: id, slots });
        if self.watched
            && let Some(info) = self.lease_info(lease)
        {
            self.effect(Effect::Tell { tenant, change: Change::Rekeyed(info) });
        }
    }

    fn restore_queue_pair(&mut self, record: QueuePairRecord) {
        let Ok(hca) = self.host.find_hca(&record.hca) else { return };
        let Some(session) = self.sessions.get_mut(&record.session) else { return };
        session.queue_pairs.insert(record.id);
        let tenant = session.tenant;
        if let Some(tenant) = self.tenants.get_mut(&tenant) {
            tenant.queue_pairs += 1;
        }
        self.journaling.names.insert(record.ring);
        let depths = (record.send_depth, record.recv_depth);
        let entry = QueuePair::lost(tenant, record.session, hca, depths, record.ring);
        self.queue_pairs.insert(record.id, entry);
    }

    /// Ends leases that nobody holds any more, and forgets tenants of which nothing is left.
    fn settle_restored(&mut self) {
        let detached: Vec<LeaseId> =
            self.leases.iter().filter(|(_, lease)| lease.is_detached()).map(|(id, _)| *id).collect();
        for id in detached {
            let Some(lease) = self.leases.get_mut(&id) else { continue };
            if lease.is_revoked() {
                self.end_lease(id, "REVOKED");
                continue;
            }
            match (lease.expires_at, lease.ttl_ns) {
                (Some(at), _) => {
                    self.deadlines.insert((at, Deadline::Lease(id)));
                }
                (None, Some(ttl_ns)) => {
                    let at = self.now.saturating_add(ttl_ns);
                    lease.expires_at = Some(at);
                    self.deadlines.insert((at, Deadline::Lease(id)));
                    self.record_lease(id);
                }
                (None, None) => self.end_lease(id, "SESSION_ENDED"),
            }
        }
        let tenants: Vec<TenantId> = self.tenants.keys().copied().collect();
        for tenant in tenants {
            self.settle_tenant(tenant);
        }
    }

    /// Whether leases that were taken up still wait for their registrations.
    pub(crate) fn is_remaking(&self) -> bool {
        self.allocations.values().any(|allocation| allocation.stage == Stage::Remaking)
    }

    /// Whether there is such memory.
    pub(crate) fn has_allocation(&self, id: AllocationId) -> bool {
        self.allocations.contains_key(&id)
    }

    /// Whether there is such a queue pair.
    pub(crate) fn has_queue_pair(&self, id: QueuePairId) -> bool {
        self.queue_pairs.contains_key(&id)
    }

    /// Sessions with the leases that each holds and the queue pairs that it has.
    pub(crate) fn open_sessions(&self) -> Vec<(SessionId, Vec<LeaseId>, Vec<QueuePairId>)> {
        let of = |session: &Session| (session.holds.iter().collect(), session.queue_pairs.iter().copied().collect());
        self.sessions.iter().map(|(id, session)| (*id, of(session))).map(|(id, (l, q))| (id, l, q)).collect()
    }

    pub(super) fn resume(&mut self, session: SessionId, admin: bool, quota: Quota) {
        let Ok(entry) = self.live_session(session) else { return };
        entry.admin = admin;
        let tenant = entry.tenant;
        if let Some(entry) = self.tenants.get_mut(&tenant) {
            entry.quota = quota;
        }
        self.record_session(session);
        self.record_tenant(tenant);
    }
}
