//! Queue pairs as callers see them.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use gdrd_hal::{Endpoint, QueuePairState, QueuePairType};

use crate::call::Undo;
use crate::ids::QueuePairId;
use crate::peer::TenantKey;

/// What is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueuePairRequest {
    /// Name of the HCA; empty: the first one paired with `gpu`.
    pub hca: String,
    /// Name, UUID or BDF; used when `hca` is empty.
    pub gpu: String,
    /// Counted from 1; 0 for the first active port.
    pub port_num: u8,
    /// Type.
    pub qp_type: QueuePairType,
    /// Most sends outstanding; 0 for the default; rounded up to a power of two.
    pub send_depth: u32,
    /// Most receives outstanding; 0 for the default; rounded up to a power of two.
    pub recv_depth: u32,
}

/// A queue pair.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueuePairInfo {
    /// Identity.
    pub id: QueuePairId,
    /// HCA.
    pub hca: Arc<str>,
    /// Port, counted from 1.
    pub port_num: u8,
    /// Number on the HCA.
    pub qp_num: u32,
    /// Type.
    pub qp_type: QueuePairType,
    /// State as the engine last knew it.
    pub state: QueuePairState,
    /// What the peer needs to connect.
    pub endpoint: Endpoint,
    /// Most sends outstanding.
    pub send_depth: u32,
    /// Most receives outstanding.
    pub recv_depth: u32,
    /// Longest inline payload, bytes.
    pub max_inline_bytes: u32,
    /// Owner.
    pub tenant: TenantKey,
}

/// A queue pair just made, with the fds of its ring for the session. Taken back when dropped before
/// [`QueuePairGrant::keep`].
#[derive(Debug)]
pub struct QueuePairGrant {
    /// The queue pair.
    pub info: QueuePairInfo,
    /// The ring's memfd.
    pub ring: OwnedFd,
    /// The eventfd that wakes the broker.
    pub doorbell: OwnedFd,
    pub(crate) undo: Undo,
}

impl QueuePairGrant {
    /// The caller has the grant; gives what is to be sent: the ring, then the doorbell.
    #[must_use]
    pub fn keep(self) -> (QueuePairInfo, OwnedFd, OwnedFd) {
        self.undo.disarm();
        (self.info, self.ring, self.doorbell)
    }
}

/// A page of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueuePairPage {
    /// Queue pairs in order of id.
    pub queue_pairs: Vec<QueuePairInfo>,
    /// Where the next page starts; `None` on the last one.
    pub next: Option<QueuePairId>,
}
