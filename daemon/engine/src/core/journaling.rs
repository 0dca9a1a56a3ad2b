//! What the state machine writes down as it goes, and the names of what is kept.
//!
//! A record comes before every effect that it makes true for others: a lease is in the journal before its client has it.

use std::collections::BTreeSet;

use super::allocation::Stage;
use super::record::{LeaseRecord, PlaceRecord, QueuePairRecord, Record, SessionRecord, TenantRecord};
use super::{Core, Effect, Place, TenantId};
use crate::ids::{LeaseId, QueuePairId, SessionId};
use crate::keep::Name;

/// Numbers that are written down as given at once, so that not every number is a record.
const NUMBERS_AHEAD: u64 = 4096;

/// Whether there is a journal, what is kept, and how far numbers are written down.
#[derive(Debug, Default)]
pub(super) struct Journaling {
    pub(super) on: bool,
    pub(super) written_numbers: u64,
    pub(super) names: BTreeSet<Name>,
}

impl Core {
    /// A number that was never given before, by this daemon or one whose journal it took up.
    pub(super) fn number(&mut self) -> u64 {
        self.last_number += 1;
        if self.journaling.on && self.last_number > self.journaling.written_numbers {
            self.journaling.written_numbers = self.last_number + NUMBERS_AHEAD;
            self.record(Record::Numbers(self.journaling.written_numbers));
        }
        self.last_number
    }

    /// A name that nothing kept has; `None` where nothing is kept. Names come round late, so that one of a moment ago
    /// never means something else now.
    pub(super) fn name(&mut self) -> Option<Name> {
        if !self.journaling.on {
            return None;
        }
        loop {
            let name = Name::of(self.number());
            // Ends: the bound on descriptors is far below the number of names.
            if self.journaling.names.insert(name) {
                return Some(name);
            }
        }
    }

    pub(super) fn unkeep(&mut self, names: impl IntoIterator<Item = Name>) {
        for name in names {
            self.journaling.names.remove(&name);
            self.effect(Effect::Unkeep { name });
        }
    }

    pub(super) fn record(&mut self, record: Record) {
        if self.journaling.on {
            self.effect(Effect::Record(Box::new(record)));
        }
    }

    pub(super) fn record_tenant(&mut self, id: TenantId) {
        if let Some(record) = self.tenant_record(id) {
            self.record(Record::Tenant(record));
        }
    }

    pub(super) fn record_session(&mut self, id: SessionId) {
        if let Some(record) = self.session_record(id) {
            self.record(Record::Session(record));
        }
    }

    pub(super) fn record_lease(&mut self, id: LeaseId) {
        if let Some(record) = self.lease_record(id) {
            self.record(Record::Lease(record));
        }
    }

    pub(super) fn record_queue_pair(&mut self, id: QueuePairId) {
        if let Some(record) = self.queue_pair_record(id) {
            self.record(Record::QueuePair(record));
        }
    }

    fn tenant_record(&self, id: TenantId) -> Option<TenantRecord> {
        let tenant = self.tenants.get(&id)?;
        Some(TenantRecord {
            id,
            uid: tenant.key.uid,
            scope: tenant.key.scope.to_string(),
            max_bytes: tenant.quota.max_bytes,
            max_registrations: tenant.quota.max_registrations,
            max_queue_pairs: tenant.quota.max_queue_pairs,
            max_sessions: tenant.quota.max_sessions,
            page: tenant.page?,
        })
    }

    fn session_record(&self, id: SessionId) -> Option<SessionRecord> {
        let session = self.session(id).ok()?;
        let uuid = |gpu| self.host.gpu(gpu).map(|gpu| gpu.planned.uuid.0.clone());
        Some(SessionRecord {
            id,
            tenant: session.tenant,
            uid: self.tenants.get(&session.tenant)?.key.uid,
            admin: session.admin,
            token: session.token,
            proven: session.proven.iter().filter_map(|gpu| uuid(*gpu)).collect(),
            socket: session.socket?,
        })
    }

    fn lease_record(&self, id: LeaseId) -> Option<LeaseRecord> {
        let lease = self.leases.get(&id)?;
        let allocation = self.allocations.get(&lease.allocation)?;
        let [memory, dma_buf] = allocation.names?;
        let place = match lease.key.place {
            Place::Gpu(gpu) => PlaceRecord::Gpu(self.host.gpu(gpu)?.planned.uuid.0.clone()),
            Place::Host(node) => PlaceRecord::Host(node),
        };
        // What it has left of its HCAs, where some were lost.
        let hcas: Vec<super::HcaIndex> = match allocation.stage {
            Stage::Leased => allocation.registrations.iter().map(|registration| registration.hca).collect(),
            _ => lease.key.hcas.to_vec(),
        };
        let hca = |index: &super::HcaIndex| self.host.hca(*index).map(|hca| hca.name.to_string());
        Some(LeaseRecord {
            id,
            tenant: lease.tenant,
            allocation: lease.allocation,
            place,
            len_bytes: lease.key.len_bytes,
            hcas: hcas.iter().filter_map(hca).collect(),
            signal: lease.key.signal,
            memory,
            dma_buf,
            generation: lease.generation,
            label: lease.label.to_string(),
            holders: lease.holders.sessions().collect(),
            ttl_ns: lease.ttl_ns,
            expires_at: lease.expires_at,
            revoked: lease.revoked.clone(),
        })
    }

    fn queue_pair_record(&self, id: QueuePairId) -> Option<QueuePairRecord> {
        let entry = self.queue_pairs.get(&id).filter(|entry| entry.is_shown())?;
        Some(QueuePairRecord {
            id,
            session: entry.session,
            hca: self.host.hca(entry.hca)?.name.to_string(),
            send_depth: entry.depths.0,
            recv_depth: entry.depths.1,
            ring: entry.ring?,
        })
    }

    /// All that a later daemon must know, as the fewest records.
    pub(crate) fn records(&self) -> Vec<Record> {
        let numbers = std::iter::once(Record::Numbers(self.journaling.written_numbers));
        let tenants = self.tenants.keys().filter_map(|id| self.tenant_record(*id)).map(Record::Tenant);
        let sessions = self.sessions.keys().filter_map(|id| self.session_record(*id)).map(Record::Session);
        let leases = self.leases.iter().filter_map(|(id, _)| self.lease_record(*id)).map(Record::Lease);
        let queue_pairs = self.queue_pairs.keys().filter_map(|id| self.queue_pair_record(*id)).map(Record::QueuePair);
        numbers.chain(tenants).chain(sessions).chain(leases).chain(queue_pairs).collect()
    }

    /// Names of all that is to be kept.
    pub(crate) fn names(&self) -> &BTreeSet<Name> {
        &self.journaling.names
    }

    /// What a session keeps: its socket, and its tenant's page.
    pub(crate) fn names_of(&self, id: SessionId) -> Option<(TenantId, Name, Name)> {
        let session = self.session(id).ok()?;
        Some((session.tenant, session.socket?, self.tenants.get(&session.tenant)?.page?))
    }
}
