//! Direct mode: a context of a session's own on one HCA, which its client imports to make queue pairs itself.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use gdrd_hal::Access;

use crate::ids::{LeaseId, RemoteKey};

/// Buffers of a session as its own context on an HCA sees them.
#[derive(Debug)]
pub struct DirectGrant {
    /// The HCA.
    pub hca: Arc<str>,
    /// Descriptor of the context, for ibv_import_device(3). The same context at each grant to a session.
    pub context: OwnedFd,
    /// Handle of its protection domain, for ibv_import_pd(3).
    pub pd_handle: u32,
    /// In the order of the leases asked for.
    pub regions: Vec<DirectRegion>,
}

/// One buffer's region in such a context.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirectRegion {
    /// The buffer.
    pub lease: LeaseId,
    /// Handle of the region, for ibv_import_mr(3).
    pub mr_handle: u32,
    /// Key for peers; the buffer's other keys are of another protection domain.
    pub rkey: RemoteKey,
    /// Wire address of the first byte.
    pub iova: u64,
    /// Length, bytes.
    pub len_bytes: u64,
    /// Rights.
    pub access: Access,
}
