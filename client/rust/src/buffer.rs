//! A leased buffer: its registrations, its descriptor, and its memory mapped on first use.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

use gdrd_client_sys::Mapping;
use gdrd_proto::v1::buffers_client::BuffersClient;
use gdrd_proto::v1::{self, call};
use gdrd_ring::LocalSpan;
use gdrd_shm::{Access, MapOptions, Segment};
use tonic::Response;

use crate::bytes::MemoryReader;
use crate::error::ClientError;
use crate::finish::FinishOnDrop;
use crate::kept::Kept;
use crate::options::AcquireOptions;
use crate::registered::MemoryName;
use crate::remote::RemoteBuffer;
use crate::session::{Lent, Live, Session};

/// How the memory of a buffer is reached by its descriptor.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum MemoryKind {
    /// mmap(2): host memory, and GPU memory of a simulated host.
    Memfd,
    /// cuMemImportFromShareableHandle: memory of a CUDA GPU.
    CudaPosixFd,
    /// A kind that this client has no name for.
    Other(String),
}

impl MemoryKind {
    fn of(word: &str) -> Self {
        match word {
            "memfd" => Self::Memfd,
            "cuda-posix-fd" => Self::CudaPosixFd,
            other => Self::Other(other.to_owned()),
        }
    }
}

/// A memory region of a buffer with one HCA, as it was when it was asked for. Its Debug form leaves the rkey out. Cheap
/// to clone.
#[derive(Clone, PartialEq)]
pub struct Registration(Arc<v1::Registration>);

impl std::fmt::Debug for Registration {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Registration")
            .field("hca", &self.0.hca)
            .field("slot", &self.0.slot)
            .field("generation", &self.0.generation)
            .field("iova", &self.0.iova)
            .field("length_bytes", &self.0.length_bytes)
            .finish_non_exhaustive()
    }
}

impl Registration {
    /// Name of the HCA.
    #[must_use]
    pub fn hca(&self) -> &str {
        &self.0.hca
    }

    /// The tenant's index of this registration, and its place in the generation page.
    #[must_use]
    pub fn slot(&self) -> u32 {
        self.0.slot
    }

    /// Generation as it was lent; see [`Session::generation_of`].
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.0.generation
    }

    /// Wire address of the first byte.
    #[must_use]
    pub fn iova(&self) -> u64 {
        self.0.iova
    }

    /// Length, bytes.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.0.length_bytes
    }

    /// What peers and the HCA may do.
    #[must_use]
    pub fn access(&self) -> v1::Access {
        self.0.access.unwrap_or_default()
    }

    /// Local address of `len_bytes` at `offset`, for a queue pair of this HCA. The daemon checks it again.
    ///
    /// # Errors
    /// [`ClientError::InvalidArgument`] when the range is not in the registration.
    pub fn span(&self, offset: u64, len_bytes: u32) -> Result<LocalSpan, ClientError> {
        let end = offset.checked_add(u64::from(len_bytes));
        if end.is_none_or(|end| end > self.len_bytes()) {
            return Err(ClientError::InvalidArgument {
                what: format!(
                    "{len_bytes} bytes at offset {offset} are outside the registration of {} bytes",
                    self.len_bytes()
                ),
            });
        }
        Ok(LocalSpan { slot: self.slot(), generation: self.generation(), offset, len_bytes })
    }

    /// What a peer needs to read and write this buffer.
    #[must_use]
    pub fn remote(&self) -> RemoteBuffer {
        RemoteBuffer::new((*self.0).clone())
    }
}

/// One handle of a lease. With the last one that this process has in a session, dropped, the session's hold is released in
/// the background; await [`Buffer::release`] to know that it was.
#[derive(Debug)]
pub struct Buffer {
    session: Session,
    lease_id: u64,
    allocation: u64,
    size_bytes: u64,
    gpu_uuid: String,
    label: String,
    kind: MemoryKind,
    /// Lease generation and registrations, as the daemon told them last.
    current: RwLock<(u64, Vec<Registration>)>,
    fd: Mutex<Option<OwnedFd>>,
    memory: OnceLock<Segment>,
    /// What `memory` is for a CUDA GPU.
    pub(crate) device: OnceLock<Mapping>,
    live: Live,
}

impl Session {
    /// Leases a buffer. Given up before its end, the call goes on in the background and returns what it got.
    ///
    /// # Errors
    /// [`ClientError::Refused`] with the daemon's reason (quota, policy, unknown GPU, missing proof, no memory),
    /// [`ClientError::SessionEnded`], [`ClientError::Deadline`], [`ClientError::Unreachable`].
    pub async fn acquire(&self, options: AcquireOptions) -> Result<Buffer, ClientError> {
        let session = self.clone();
        let call = async move {
            let wanted = call::Call::Acquire(options.into_request());
            let acquire = |session: Session| {
                let wanted = wanted.clone();
                async move { Ok(Buffer::new(session.call_for_lease("Buffers.Acquire", wanted).await?, session)) }
            };
            session.across_restarts(acquire).await
        };
        FinishOnDrop::new(self.runtime(), call).await
    }

    /// Becomes one more holder of a lease of the same tenant, with an own descriptor. A detached lease is detached no
    /// more. Of a lease that this session holds already it is one more handle.
    ///
    /// # Errors
    /// As [`Session::acquire`]; a lease of another tenant is refused as an unknown one.
    pub async fn open_lease(&self, lease_id: u64) -> Result<Buffer, ClientError> {
        let session = self.clone();
        let call = async move {
            let open = |session: Session| async move {
                let wanted = call::Call::Open(v1::OpenRequest { lease_id });
                Ok(Buffer::new(session.call_for_lease("Buffers.Open", wanted).await?, session))
            };
            session.across_restarts(open).await
        };
        FinishOnDrop::new(self.runtime(), call).await
    }

    /// Ends this session's hold on a lease that it has no [`Buffer`] of. `generation` 0 skips the check.
    ///
    /// # Errors
    /// [`ClientError::Refused`] for a lease that this session does not hold, and a stale generation.
    pub async fn release_lease(&self, lease_id: u64, generation: u64) -> Result<(), ClientError> {
        let release = |session: Session| async move {
            let release = call::Call::Release(v1::ReleaseRequest { lease_id, generation });
            session.call("Buffers.Release", release).await.map(drop)
        };
        self.ending(release).await
    }
}

impl Buffer {
    /// The buffer of an answer. From here on it is held, and dropping it gives it back.
    fn new(lent: Lent, session: Session) -> Self {
        let Lent(lease, memory, live) = lent;
        let buffer = Self {
            lease_id: lease.lease_id,
            allocation: lease.allocation_id,
            size_bytes: lease.size_bytes,
            gpu_uuid: lease.gpu_uuid,
            label: lease.label,
            kind: MemoryKind::of(&lease.memory_kind),
            current: RwLock::new((lease.generation, registrations(lease.registrations))),
            fd: Mutex::new(Some(memory)),
            memory: OnceLock::new(),
            device: OnceLock::new(),
            live,
            session,
        };
        if buffer.kind == MemoryKind::CudaPosixFd {
            buffer.session.mappings().gpu_slots().hold(buffer.name());
            buffer.tell_slots();
        }
        buffer
    }

    pub(crate) fn name(&self) -> MemoryName {
        MemoryName::Lease(self.lease_id)
    }

    /// Has posts from its registrations wait for its GPU.
    fn tell_slots(&self) {
        let slots = self.registrations().map(|registration| (registration.slot(), registration.generation()));
        self.session.mappings().registered(self.name(), slots);
    }

    /// The lease's number.
    #[must_use]
    pub fn lease_id(&self) -> u64 {
        self.lease_id
    }

    /// The lease's generation.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.current().0
    }

    fn current(&self) -> RwLockReadGuard<'_, (u64, Vec<Registration>)> {
        // Replaced whole, so that a panic elsewhere leaves it whole.
        self.current.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of its memory at the daemon. A later lease may have the same memory, zeroed.
    #[must_use]
    pub fn allocation_id(&self) -> u64 {
        self.allocation
    }

    pub(crate) fn session(&self) -> &Session {
        &self.session
    }

    /// Length of the buffer, bytes: at least what was asked for.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// UUID of the GPU; empty for host memory.
    #[must_use]
    pub fn gpu_uuid(&self) -> &str {
        &self.gpu_uuid
    }

    /// The label given at acquire.
    #[must_use]
    pub fn label(&self) -> &str {
        &self.label
    }

    /// How the memory is reached.
    #[must_use]
    pub fn kind(&self) -> &MemoryKind {
        &self.kind
    }

    /// The registrations, nearest HCA first.
    pub fn registrations(&self) -> impl Iterator<Item = Registration> {
        self.current().1.clone().into_iter()
    }

    /// The registration with an HCA.
    ///
    /// # Errors
    /// [`ClientError::InvalidArgument`] when there is none, naming those there are.
    pub fn registration(&self, hca: &str) -> Result<Registration, ClientError> {
        let current = self.current();
        let found = current.1.iter().find(|registration| registration.hca() == hca);
        found.cloned().ok_or_else(|| {
            let names: Vec<&str> = current.1.iter().map(Registration::hca).collect();
            ClientError::InvalidArgument {
                what: format!("lease {} has no registration with {hca}, only with {}", self.lease_id, names.join(", ")),
            }
        })
    }

    /// Whether NICs still take the buffer's registrations as they were lent: one load each, no call.
    #[must_use]
    pub fn is_current(&self) -> bool {
        let shows = |registration: &Registration| self.session.generation_of(registration.slot());
        self.current().1.iter().all(|registration| shows(registration) == Some(registration.generation()))
    }

    /// Asks the daemon for the registrations as they are now: after a restart of it they are new ones, with other keys, which
    /// peers must be told again, and [`Buffer::is_current`] says that those here are not.
    ///
    /// # Errors
    /// [`ClientError::SessionEnded`], [`ClientError::Refused`], [`ClientError::Deadline`], [`ClientError::Unreachable`].
    pub async fn refresh(&self) -> Result<(), ClientError> {
        let lease_id = self.lease_id;
        let get = |session: Session| async move {
            let request = session.request(v1::GetLeaseRequest { lease_id });
            let answer = BuffersClient::new(session.channel()).get(request).await;
            answer.map(Response::into_inner).map_err(|status| session.error("Buffers.Get", status))
        };
        let lease = self.session.across_restarts(get).await?;
        let now = (lease.generation, registrations(lease.registrations));
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = now;
        self.tell_slots();
        Ok(())
    }

    /// The memory, mapped at the first call. The mapping stays valid after the end of the lease: only NIC access ends.
    ///
    /// # Errors
    /// [`ClientError::NotMappable`] for memory of a real GPU, which has [`Buffer::device_memory`];
    /// [`ClientError::Memory`].
    pub fn memory(&self) -> Result<&Segment, ClientError> {
        if self.kind != MemoryKind::Memfd {
            return Err(ClientError::NotMappable { kind: format!("{:?}", self.kind) });
        }
        if let Some(segment) = self.memory.get() {
            return Ok(segment);
        }
        let mut fd = self.fd.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(fd) = fd.take() {
            let segment = match self.session.kept().take(self.allocation) {
                Some(Kept::Host(segment)) => segment,
                // Of huge pages only the daemon lends memory, and only to us and to those whom we let in.
                _ => MapOptions::new(Access::ReadWrite).allow_huge_pages(true).map(fd)?,
            };
            self.is_mapped_at(segment.address());
            // The lock is held and the descriptor was there, so nobody else has set it.
            let _ = self.memory.set(segment);
        }
        self.memory
            .get()
            .ok_or_else(|| ClientError::NotMappable { kind: "a descriptor that could not be mapped".into() })
    }

    /// Copies bytes of the buffer at `offset` into `to`.
    ///
    /// # Errors
    /// [`ClientError::Memory`] or [`ClientError::Cuda`] outside the buffer, and as [`Buffer::memory`] and
    /// [`Buffer::device_memory`].
    pub fn read_into(&self, offset: u64, to: &mut [u8]) -> Result<(), ClientError> {
        self.bytes()?.read_into(offset, to)
    }

    /// Copies `from` into the buffer at `offset`.
    ///
    /// # Errors
    /// As [`Buffer::read_into`].
    pub fn write_from(&self, offset: u64, from: &[u8]) -> Result<(), ClientError> {
        self.bytes()?.write_from(offset, from)
    }

    /// A reader over `len_bytes` at `offset`, for digests and files: `std::io::copy(&mut reader, &mut hasher)`. What a
    /// NIC writes meanwhile may be seen in part.
    ///
    /// # Errors
    /// As [`Buffer::read_into`].
    pub fn reader(&self, offset: u64, len_bytes: u64) -> Result<impl std::io::Read + '_, ClientError> {
        let memory = self.bytes()?;
        memory.check_range(offset, len_bytes)?;
        Ok(MemoryReader::new(memory, offset, len_bytes))
    }

    /// A second descriptor of the memory, to map or import by other means; close-on-exec.
    ///
    /// # Errors
    /// [`ClientError::Io`] when the process has no descriptor left.
    pub fn try_clone_fd(&self) -> Result<OwnedFd, ClientError> {
        let clone = |fd: BorrowedFd<'_>| {
            fd.try_clone_to_owned().map_err(|source| ClientError::io("duplicate the descriptor of a buffer", source))
        };
        let fd = self.fd.lock().unwrap_or_else(PoisonError::into_inner);
        match (self.memory.get(), fd.as_ref()) {
            (Some(segment), _) => clone(segment.fd()),
            (None, Some(fd)) => clone(fd.as_fd()),
            (None, None) => Err(ClientError::NotMappable { kind: "a descriptor that could not be mapped".into() }),
        }
    }

    /// Ends this handle, and with the last one in this session its hold. With the last holder NICs lose access and the
    /// memory is scrubbed.
    ///
    /// # Errors
    /// [`ClientError::Refused`], such as for receives that are still posted to it; then it is released in the
    /// background as by a drop, which may be refused again and is then left to the end of the session.
    pub async fn release(mut self) -> Result<(), ClientError> {
        self.session.check_ours()?;
        self.part_with_memory();
        if !self.live.is_shared() {
            // Which lease is meant is certain without its generation, which a restart of the daemon changes.
            self.session.release_lease(self.lease_id, 0).await?;
            self.live.over();
        }
        Ok(())
    }

    /// Has ranges of it found by address from now on.
    pub(crate) fn is_mapped_at(&self, address: u64) {
        self.session.mappings().add(address, self.size_bytes, self.name());
    }

    /// Leaves the mapping to the next buffer of the same memory.
    fn part_with_memory(&mut self) {
        let host_address = self.memory.get().map(Segment::address);
        if let Some(address) = host_address.or_else(|| self.device.get().map(Mapping::device_address)) {
            self.session.mappings().forget_at(address, self.name());
        }
        let host = self.memory.take().map(Kept::Host);
        if let Some(kept) = host.or_else(|| self.device.take().map(Kept::Device)) {
            self.session.kept().put(self.allocation, kept);
        }
    }

    /// Lets the lease outlive this session: once the last session that holds it has ended, it lives for `ttl`, until a
    /// session of the tenant opens it by its id. From here on dropping the buffer does not release it;
    /// [`Buffer::release`] still does.
    ///
    /// # Errors
    /// [`ClientError::Refused`] for a time to live beyond the daemon's bound.
    pub async fn detach(&mut self, ttl: Duration) -> Result<(), ClientError> {
        let ttl = prost_types::Duration::try_from(ttl)
            .map_err(|_| ClientError::InvalidArgument { what: format!("a time to live of {ttl:?} is too long") })?;
        let lease_id = self.lease_id;
        let detach = |session: Session| async move {
            let request = session.request(v1::DetachRequest { lease_id, ttl: Some(ttl) });
            let answer = BuffersClient::new(session.channel()).detach(request).await;
            answer.map(drop).map_err(|status| session.error("Buffers.Detach", status))
        };
        self.session.across_restarts(detach).await?;
        self.live.leave();
        Ok(())
    }
}

fn registrations(told: Vec<v1::Registration>) -> Vec<Registration> {
    told.into_iter().map(|registration| Registration(Arc::new(registration))).collect()
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.session.is_ours() {
            self.part_with_memory();
            if self.kind == MemoryKind::CudaPosixFd {
                self.session.mappings().gpu_slots().part(self.name());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn registration(length_bytes: u64) -> Registration {
        Registration(Arc::new(v1::Registration {
            hca: "mlx5_0".into(),
            slot: 3,
            generation: 9,
            rkey: 77_777,
            length_bytes,
            ..Default::default()
        }))
    }

    #[test]
    fn spans_carry_slot_and_generation_and_stay_inside() {
        let registration = registration(100);
        let span = registration.span(60, 40).unwrap();
        assert_eq!((span.slot, span.generation, span.offset, span.len_bytes), (3, 9, 60, 40));
        for (offset, len) in [(61, 40), (u64::MAX, 1)] {
            assert!(registration.span(offset, len).is_err(), "{offset} {len}");
        }
    }

    #[test]
    fn debug_output_has_no_rkey() {
        assert!(!format!("{:?}", registration(100)).contains("77777"));
    }
}
