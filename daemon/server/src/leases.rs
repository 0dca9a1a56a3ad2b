//! The calls that lend buffers and take them back, whichever socket they came by: one meaning, one table of errors.
//!
//! Role: from a message to the engine, and from what the engine lends to a message. Decides nothing; the engine does.
//! Must not know: how the answer and its fds travel.

use gdrd_engine::{
    AcquireRequest, Call, Engine, Generation, LeaseGrant, LeaseId, LeaseInfo, MemoryKind, MemoryPlace,
    RegistrationInfo, SessionId,
};
use gdrd_proto::v1::{self, acquire_request};
use tonic::Status;

use crate::status::{bad_argument, of_engine};

/// Asks for a buffer. Dropped before its end, the call is withdrawn.
///
/// # Errors
/// `InvalidArgument` for a request that says nothing sensible; everything else is in the answer.
pub(crate) fn acquire(
    engine: &Engine,
    session: SessionId,
    request: v1::AcquireRequest,
) -> Result<Call<LeaseGrant>, Status> {
    Ok(engine.acquire(session, wanted(request)?))
}

/// Makes the session one more holder of a lease.
///
/// # Errors
/// As the engine's.
pub(crate) fn open(engine: &Engine, session: SessionId, request: v1::OpenRequest) -> Result<LeaseGrant, Status> {
    engine.open(session, LeaseId(request.lease_id)).map_err(|refusal| of_engine(&refusal))
}

/// Ends the session's hold.
///
/// # Errors
/// As the engine's.
pub(crate) fn release(
    engine: &Engine,
    session: SessionId,
    request: v1::ReleaseRequest,
) -> Result<v1::ReleaseResponse, Status> {
    let v1::ReleaseRequest { lease_id, generation } = request;
    let generation = (generation != 0).then_some(Generation(generation));
    engine.release(session, LeaseId(lease_id), generation).map_err(|refusal| of_engine(&refusal))?;
    Ok(v1::ReleaseResponse {})
}

fn wanted(request: v1::AcquireRequest) -> Result<AcquireRequest, Status> {
    let v1::AcquireRequest { size_bytes, memory, hcas, signal, label } = request;
    let place = match memory {
        Some(acquire_request::Memory::Gpu(gpu)) if gpu.is_empty() => {
            return Err(bad_argument("gpu is empty; name a GPU (GPU0), its UUID or its BDF"));
        }
        Some(acquire_request::Memory::Gpu(gpu)) => MemoryPlace::Gpu(gpu),
        Some(acquire_request::Memory::Host(host)) => {
            MemoryPlace::Host { near_gpu: (!host.near_gpu.is_empty()).then_some(host.near_gpu) }
        }
        None => return Err(bad_argument("memory is missing; name a gpu, or host for host memory")),
    };
    Ok(AcquireRequest { size_bytes, place, hcas, signal, label })
}

/// A lease on the wire, without a delivery.
pub(crate) fn lease(info: &LeaseInfo) -> v1::Lease {
    v1::Lease {
        lease_id: info.id.0,
        generation: info.generation.0,
        size_bytes: info.size_bytes,
        gpu_uuid: info.gpu.as_ref().map(|gpu| gpu.0.clone()).unwrap_or_default(),
        registrations: info.registrations.iter().map(registration).collect(),
        delivery_id: 0,
        label: info.label.to_string(),
        memory_kind: memory_kind(info.memory_kind).to_owned(),
        holders: info.holders,
        ttl: info.ttl.and_then(|ttl| ttl.try_into().ok()),
        tenant: info.tenant.to_string(),
        allocation_id: info.allocation,
    }
}

/// A memory region on the wire.
pub(crate) fn registration(info: &RegistrationInfo) -> v1::Registration {
    let access = v1::Access {
        local_write: info.access.local_write,
        remote_write: info.access.remote_write,
        remote_read: info.access.remote_read,
        remote_atomic: info.access.remote_atomic,
        relaxed_ordering: info.access.relaxed_ordering,
    };
    v1::Registration {
        hca: info.hca.to_string(),
        slot: info.slot.0,
        generation: info.generation.0,
        rkey: info.rkey.0,
        iova: info.iova,
        length_bytes: info.len_bytes,
        access: Some(access),
    }
}

fn memory_kind(kind: MemoryKind) -> &'static str {
    match kind {
        MemoryKind::Memfd => "memfd",
        MemoryKind::CudaPosixFd => "cuda-posix-fd",
        _ => "unknown",
    }
}
