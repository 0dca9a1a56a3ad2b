//! What the journal holds, record by record, and what the records of a journal add up to.
//!
//! Enough to take up every session and lease again, and nothing that opens one: no key of a registration, and of a
//! session's token only a digest, by which the token is known again when its client shows it. A record states the whole
//! of what it is about, so that the last one counts and one that is told twice does no harm.
//!
//! Must not know: files, bytes, descriptors.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{AllocationId, TenantId};
use crate::ids::{Generation, LeaseId, QueuePairId, SessionId, TokenDigest};
use crate::keep::Name;

/// One thing that a later daemon must know.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Record {
    /// Numbers up to this one may have been given.
    Numbers(u64),
    Tenant(TenantRecord),
    TenantGone(TenantId),
    Session(SessionRecord),
    SessionGone(SessionId),
    Lease(LeaseRecord),
    LeaseGone(LeaseId),
    QueuePair(QueuePairRecord),
    QueuePairGone(QueuePairId),
}

/// A tenant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TenantRecord {
    pub(crate) id: TenantId,
    pub(crate) uid: u32,
    pub(crate) scope: String,
    pub(crate) max_bytes: u64,
    pub(crate) max_registrations: u32,
    pub(crate) max_queue_pairs: u32,
    pub(crate) max_sessions: u32,
    /// Its generation page.
    pub(crate) page: Name,
}

/// A session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SessionRecord {
    pub(crate) id: SessionId,
    pub(crate) tenant: TenantId,
    pub(crate) uid: u32,
    pub(crate) admin: bool,
    pub(crate) token: TokenDigest,
    /// UUIDs of the GPUs that it has proven its right to.
    pub(crate) proven: Vec<String>,
    pub(crate) socket: Name,
}

/// Where a lease's memory is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum PlaceRecord {
    /// UUID of the GPU.
    Gpu(String),
    /// NUMA node.
    Host(Option<u32>),
}

/// A lease with its memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LeaseRecord {
    pub(crate) id: LeaseId,
    pub(crate) tenant: TenantId,
    pub(crate) allocation: AllocationId,
    pub(crate) place: PlaceRecord,
    pub(crate) len_bytes: u64,
    /// Names of the HCAs it is registered with.
    pub(crate) hcas: Vec<String>,
    pub(crate) signal: bool,
    /// Its memory; for host memory the daemon's own description.
    pub(crate) memory: Name,
    /// Its dma-buf, where there is one.
    pub(crate) dma_buf: Name,
    pub(crate) generation: Generation,
    pub(crate) label: String,
    pub(crate) holders: Vec<SessionId>,
    pub(crate) ttl_ns: Option<u64>,
    /// When it ends, while nobody holds it: CLOCK_MONOTONIC of this boot, ns.
    pub(crate) expires_at: Option<u64>,
    /// Why NIC access ended.
    pub(crate) revoked: Option<String>,
}

/// A queue pair, of which only the ring can be taken up again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct QueuePairRecord {
    pub(crate) id: QueuePairId,
    pub(crate) session: SessionId,
    pub(crate) hca: String,
    pub(crate) send_depth: u32,
    pub(crate) recv_depth: u32,
    pub(crate) ring: Name,
}

/// What a journal's records add up to.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Journaled {
    pub(crate) numbers: u64,
    pub(crate) tenants: BTreeMap<TenantId, TenantRecord>,
    pub(crate) sessions: BTreeMap<SessionId, SessionRecord>,
    pub(crate) leases: BTreeMap<LeaseId, LeaseRecord>,
    pub(crate) queue_pairs: BTreeMap<QueuePairId, QueuePairRecord>,
}

impl Journaled {
    pub(crate) fn add(&mut self, record: Record) {
        match record {
            Record::Numbers(up_to) => self.numbers = self.numbers.max(up_to),
            Record::Tenant(tenant) => drop(self.tenants.insert(tenant.id, tenant)),
            Record::TenantGone(id) => drop(self.tenants.remove(&id)),
            Record::Session(session) => drop(self.sessions.insert(session.id, session)),
            Record::SessionGone(id) => drop(self.sessions.remove(&id)),
            Record::Lease(lease) => drop(self.leases.insert(lease.id, lease)),
            Record::LeaseGone(id) => drop(self.leases.remove(&id)),
            Record::QueuePair(queue_pair) => drop(self.queue_pairs.insert(queue_pair.id, queue_pair)),
            Record::QueuePairGone(id) => drop(self.queue_pairs.remove(&id)),
        }
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.tenants.is_empty() && self.sessions.is_empty() && self.leases.is_empty() && self.queue_pairs.is_empty()
    }
}
