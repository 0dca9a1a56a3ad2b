//! Errors of the hardware traits. Missing hardware, refused requests and driver faults never share a variant.

use std::net::Ipv6Addr;

use thiserror::Error;

/// Why a call on GPU memory was refused.
#[derive(Debug, Clone, Error)]
#[non_exhaustive]
pub enum GpuMemoryError {
    /// No GPU of that UUID is served by this backend.
    #[error("gpu {uuid} is not served by this backend; list the gpus with 'gdrctl topo'")]
    UnknownGpu {
        /// The UUID asked for.
        uuid: String,
    },
    /// The length is zero or not a multiple of the granularity.
    #[error("length {len_bytes} on gpu {uuid} is not a positive multiple of {granularity_bytes} bytes")]
    BadLength {
        /// The GPU.
        uuid: String,
        /// Length asked for, bytes.
        len_bytes: u64,
        /// Granularity of the backend, bytes.
        granularity_bytes: u64,
    },
    /// The GPU has not that much memory left.
    #[error(
        "gpu {uuid} has {free_bytes} bytes free, {len_bytes} were asked for; release leases or lower the pool budget"
    )]
    OutOfMemory {
        /// The GPU.
        uuid: String,
        /// Length asked for, bytes.
        len_bytes: u64,
        /// What is free, bytes.
        free_bytes: u64,
    },
    /// This process, or the whole system, has no file descriptor left for the memory.
    #[error("{call} on gpu {uuid}: {reason}")]
    OutOfDescriptors {
        /// The call.
        call: &'static str,
        /// The GPU.
        uuid: String,
        /// What the kernel said.
        reason: String,
    },
    /// The GPU is lost (Xid, fell off the bus) or drained.
    #[error("gpu {uuid} is lost: {reason}")]
    Lost {
        /// The GPU.
        uuid: String,
        /// What the driver said.
        reason: String,
    },
    /// The driver failed in a way that is neither of the above.
    #[error("{call} on gpu {uuid}: {reason}")]
    Driver {
        /// The driver call.
        call: &'static str,
        /// The GPU.
        uuid: String,
        /// What the driver said.
        reason: String,
    },
}

/// Why a call on an HCA was refused.
#[derive(Debug, Clone, Error)]
#[non_exhaustive]
pub enum HcaError {
    /// The provider cannot do this at all (EOPNOTSUPP).
    #[error("{hca} cannot {what}")]
    Unsupported {
        /// The HCA.
        hca: String,
        /// What it cannot do.
        what: String,
    },
    /// The caller's argument is wrong (EINVAL): state, range, access or length.
    #[error("{call} on {hca}: {reason}")]
    Invalid {
        /// The HCA.
        hca: String,
        /// The call.
        call: &'static str,
        /// What is wrong with which value.
        reason: String,
    },
    /// A limit of the HCA or of locked memory is reached (ENOMEM). Dropping idle registrations may help.
    #[error("{call} on {hca}: out of {what}; drop idle registrations or raise the limit")]
    Exhausted {
        /// The HCA.
        hca: String,
        /// The call.
        call: &'static str,
        /// The resource.
        what: String,
    },
    /// The device is gone or fatal, for everybody: never told for the errno of a single call alone, which is `Driver`.
    #[error("{hca} is gone: {reason}")]
    Gone {
        /// The HCA.
        hca: String,
        /// What was seen.
        reason: String,
    },
    /// Nothing leads to the peer's address (ETIMEDOUT, EHOSTUNREACH, ENETUNREACH, EADDRNOTAVAIL of the kernel's neighbour
    /// and route lookup, `ib_resolve_unicast_gid_dmac`, drivers/infiniband/core/verbs.c). The queue pair stays in INIT, and
    /// the same address may do a moment later: that of a port that has just come up is not in use yet.
    #[error(
        "{hca} finds no way to the peer's gid {gid}: {reason}; see that both ports are up and in one network, then connect \
         again"
    )]
    Unreachable {
        /// The HCA.
        hca: String,
        /// The peer's address.
        gid: Ipv6Addr,
        /// What the driver said.
        reason: String,
    },
    /// Any other driver failure, with its errno.
    #[error("{call} on {hca}: errno {errno}: {reason}")]
    Driver {
        /// The HCA.
        hca: String,
        /// The call.
        call: &'static str,
        /// errno of the call, 0 where there is none.
        errno: i32,
        /// What the driver said.
        reason: String,
    },
}

/// Why a post was refused; nothing of the refused request was queued.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PostError {
    /// The queue has no room (ENOMEM of ibv_post_send(3)).
    #[error("the work queue is full")]
    Full,
    /// The queue pair's state takes no such post (EINVAL).
    #[error("the queue pair is in a state that takes no such request")]
    BadState,
    /// The request cannot be expressed on this provider: opcode, inline length, alignment.
    #[error("the provider takes no such request")]
    Unsupported,
    /// The device is gone.
    #[error("the device is gone")]
    Gone,
}
