//! Leases as callers see them.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use gdrd_hal::{Access, GpuUuid};

use crate::call::Undo;
use crate::ids::{Generation, LeaseId, RemoteKey, SlotId};
use crate::peer::TenantKey;

/// Where a buffer's memory is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MemoryPlace {
    /// On a GPU: name (`GPU0`), UUID or BDF.
    Gpu(String),
    /// On the host.
    Host {
        /// Near this GPU: on its NUMA node and registered with its HCAs, unless the request names others.
        near_gpu: Option<String>,
    },
}

/// What is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AcquireRequest {
    /// Least length, bytes, at least 1.
    pub size_bytes: u64,
    /// Where.
    pub place: MemoryPlace,
    /// HCAs to register with; empty for those paired with the GPU.
    pub hcas: Vec<String>,
    /// A buffer polled as a signal: registered without relaxed ordering.
    pub signal: bool,
    /// Shown in lists.
    pub label: String,
}

/// How a buffer's fd is to be mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MemoryKind {
    /// mmap(2) it.
    Memfd,
    /// cuMemImportFromShareableHandle it.
    CudaPosixFd,
}

/// Where a lease stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LeaseState {
    /// Held by sessions, or detached.
    Held,
    /// No NIC reaches it any more; it lives on only for its mappings.
    Revoked,
}

/// One memory region of a lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegistrationInfo {
    /// HCA.
    pub hca: Arc<str>,
    /// The tenant's index of it.
    pub slot: SlotId,
    /// Generation of that slot.
    pub generation: Generation,
    /// Key for peers.
    pub rkey: RemoteKey,
    /// Wire address of the first byte.
    pub iova: u64,
    /// Length, bytes.
    pub len_bytes: u64,
    /// Rights.
    pub access: Access,
}

/// A lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaseInfo {
    /// Identity.
    pub id: LeaseId,
    /// Changes when its registrations do.
    pub generation: Generation,
    /// Number of its memory, never used for any other: a later lease may have the same memory.
    pub allocation: u64,
    /// Length, bytes: that of the size class.
    pub size_bytes: u64,
    /// The GPU, or `None` for host memory.
    pub gpu: Option<GpuUuid>,
    /// One per HCA.
    pub registrations: Vec<RegistrationInfo>,
    /// As given.
    pub label: Arc<str>,
    /// How its fd is to be mapped.
    pub memory_kind: MemoryKind,
    /// State.
    pub state: LeaseState,
    /// Sessions that hold it.
    pub holders: u32,
    /// While detached: what is left of its time to live.
    pub ttl: Option<Duration>,
    /// Owner.
    pub tenant: TenantKey,
}

/// A lease just acquired or opened, with an fd of its memory for the session.
///
/// The hold is taken back when the grant is dropped before [`LeaseGrant::keep`]: a caller that went away must not
/// leave a lease behind.
#[derive(Debug)]
pub struct LeaseGrant {
    /// The lease.
    pub info: LeaseInfo,
    /// The memory.
    pub memory: OwnedFd,
    pub(crate) undo: Undo,
}

impl LeaseGrant {
    /// The caller has the grant; gives what is to be sent.
    #[must_use]
    pub fn keep(self) -> (LeaseInfo, OwnedFd) {
        self.undo.disarm();
        (self.info, self.memory)
    }
}

/// A page of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeasePage {
    /// Leases in order of id.
    pub leases: Vec<LeaseInfo>,
    /// Where the next page starts; `None` on the last one.
    pub next: Option<LeaseId>,
}

/// One event of a watch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaseEvent {
    /// Grows by 1 with each event of the stream.
    pub sequence: u64,
    /// What happened.
    pub kind: LeaseEventKind,
}

/// What a watch tells.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum LeaseEventKind {
    /// One lease of the starting state.
    Present(LeaseInfo),
    /// The starting state is complete.
    Synced,
    /// A lease began.
    Acquired(LeaseInfo),
    /// A lease ended.
    Released {
        /// The lease.
        lease: LeaseId,
        /// Its last generation.
        generation: Generation,
        /// Why.
        reason: &'static str,
    },
    /// NIC access ended although holders are left.
    Revoked {
        /// The lease.
        lease: LeaseId,
        /// Its last generation.
        generation: Generation,
        /// Why.
        reason: String,
    },
    /// Same lease, other registrations.
    Rekeyed(LeaseInfo),
    /// A port lost its link.
    NicDown {
        /// HCA.
        hca: Arc<str>,
        /// Port, counted from 1; 0 when the whole HCA is gone.
        port_num: u8,
    },
    /// Events were lost; the stream ends after this one. Watch again and start from the full state.
    Resync,
}
