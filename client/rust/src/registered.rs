//! Registered ranges of adopted and leased memory.

use std::sync::Arc;

use gdrd_proto::v1;
use gdrd_proto::v1::registrations_client::RegistrationsClient;
use gdrd_ring::LocalSpan;
use tonic::Response;

use crate::adopted::AdoptedMemory;
use crate::buffer::Buffer;
use crate::error::ClientError;
use crate::finish::FinishOnDrop;
use crate::parting::Parting;
use crate::remote::RemoteBuffer;
use crate::session::Session;

/// Every right; what registrations have unless they are asked for others.
pub(crate) const ALL: v1::Access = v1::Access {
    local_write: true,
    remote_write: true,
    remote_read: true,
    remote_atomic: true,
    relaxed_ordering: true,
};

/// Memory of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum MemoryName {
    Adopted(u64),
    Lease(u64),
}

impl MemoryName {
    /// Before and after all others, in the order of the variants.
    pub(crate) const FIRST: Self = Self::Adopted(0);
    pub(crate) const LAST: Self = Self::Lease(u64::MAX);
}

/// A range to register.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RangeOf {
    memory: MemoryName,
    offset: u64,
    len_bytes: u64,
}

impl RangeOf {
    /// A range of adopted memory.
    #[must_use]
    pub fn adopted(memory: &AdoptedMemory, offset: u64, len_bytes: u64) -> Self {
        Self { memory: memory.name(), offset, len_bytes }
    }

    /// A range of a leased buffer.
    #[must_use]
    pub fn buffer(buffer: &Buffer, offset: u64, len_bytes: u64) -> Self {
        Self { memory: MemoryName::Lease(buffer.lease_id()), offset, len_bytes }
    }

    pub(crate) fn new(memory: MemoryName, offset: u64, len_bytes: u64) -> Self {
        Self { memory, offset, len_bytes }
    }

    fn into_message(self) -> v1::Range {
        let memory = match self.memory {
            MemoryName::Adopted(id) => v1::range::Memory::MemoryId(id),
            MemoryName::Lease(id) => v1::range::Memory::LeaseId(id),
        };
        v1::Range { memory: Some(memory), offset_bytes: self.offset, length_bytes: self.len_bytes }
    }
}

/// How ranges are registered.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct RegisterOptions(v1::RegisterRequest);

impl RegisterOptions {
    /// With the HCAs paired with the memory's GPU, all rights, neighbours sharing a region.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// With these HCAs.
    #[must_use]
    pub fn hcas(mut self, hcas: impl IntoIterator<Item = String>) -> Self {
        self.0.hcas = hcas.into_iter().collect();
        self
    }

    /// With these rights, which are part of a region's identity.
    #[must_use]
    pub fn access(mut self, access: v1::Access) -> Self {
        self.0.access = Some(access);
        self
    }

    /// Each range in a region of its own: its rkey opens nothing beyond the range's pages.
    #[must_use]
    pub fn apart(mut self) -> Self {
        self.0.merging = v1::Merging::None.into();
        self
    }

    /// In regions no longer than this, bytes, a multiple of 2 MiB. With HCAs that an IOMMU translates for, 1 GiB at most in any case.
    #[must_use]
    pub fn pieces(mut self, piece_bytes: u64) -> Self {
        self.0.piece_bytes = piece_bytes;
        self
    }
}

/// The daemon's answer, and its end by drop. Keeps no session open.
#[derive(Debug)]
pub(crate) struct Registered {
    parting: Arc<Parting>,
    id: u64,
    offset: u64,
    len_bytes: u64,
    parts: Vec<Part>,
    held: bool,
}

/// A part of a range with one HCA. Its Debug form leaves the rkey out.
#[derive(Clone, PartialEq)]
struct Part {
    offset: u64,
    slot_offset: u64,
    registration: v1::Registration,
}

impl std::fmt::Debug for Part {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Part")
            .field("hca", &self.registration.hca)
            .field("slot", &self.registration.slot)
            .field("generation", &self.registration.generation)
            .field("offset", &self.offset)
            .finish_non_exhaustive()
    }
}

impl Registered {
    fn new(parting: Arc<Parting>, range: v1::RegisteredRange) -> Result<Self, ClientError> {
        let v1::RegisteredRange { registration_id, range, parts, .. } = range;
        let range = range.unwrap_or_default();
        let (offset, len_bytes) = (range.offset_bytes, range.length_bytes);
        let parts = parts.into_iter().filter_map(|part| {
            let (offset, slot_offset) = (part.offset_bytes, part.slot_offset_bytes);
            part.registration.map(|registration| Part { offset, slot_offset, registration })
        });
        let registered = Self { parting, id: registration_id, offset, len_bytes, parts: parts.collect(), held: true };
        let fits = |part: &Part| part.offset.saturating_add(part.registration.length_bytes) <= len_bytes;
        match !registered.parts.is_empty() && registered.parts.iter().all(fits) {
            true => Ok(registered),
            false => Err(ClientError::protocol("a registration whose parts are not those of its range")),
        }
    }

    /// What a peer needs of `len_bytes` at `slot_offset` of the slot of the first part with an HCA, or of all.
    pub(crate) fn remote(&self, hca: &str, slot_offset: u64, len_bytes: u64) -> Option<RemoteBuffer> {
        let (registration, start) = self.slot(hca)?;
        let at = slot_offset.checked_sub(start)?;
        let iova = registration.iova.checked_add(at)?;
        Some(RemoteBuffer::new(v1::Registration { iova, length_bytes: len_bytes, ..registration.clone() }))
    }

    /// The first part with an HCA, or of all.
    pub(crate) fn slot(&self, hca: &str) -> Option<(&v1::Registration, u64)> {
        let part = self.parts.iter().find(|part| hca.is_empty() || part.registration.hca == hca)?;
        Some((&part.registration, part.slot_offset))
    }

    fn part(&self, hca: &str, offset: u64, len_bytes: u64) -> Result<(&Part, u64), ClientError> {
        let end = offset.checked_add(len_bytes);
        let found = self.parts.iter().find(|part| {
            let within = offset.checked_sub(part.offset).is_some();
            let last = part.offset.saturating_add(part.registration.length_bytes);
            part.registration.hca == hca && within && end.is_some_and(|end| end <= last)
        });
        found.map(|part| (part, offset - part.offset)).ok_or_else(|| ClientError::InvalidArgument {
            what: format!(
                "{len_bytes} bytes at offset {offset} are in no one part with {hca} of registration {}, which has {} bytes",
                self.id, self.len_bytes
            ),
        })
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        if self.held {
            self.parting.deregister(self.id);
        }
    }
}

/// A registered range. Dropped, it is deregistered in the background.
#[derive(Debug)]
pub struct RegisteredRange {
    session: Session,
    registered: Registered,
}

impl RegisteredRange {
    /// Its number.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.registered.id
    }

    /// Start in its memory, bytes.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.registered.offset
    }

    /// Length, bytes.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.registered.len_bytes
    }

    /// HCAs that it is registered with, each once.
    pub fn hcas(&self) -> impl Iterator<Item = &str> {
        let parts = self.registered.parts.iter().filter(|part| part.offset == 0);
        parts.map(|part| part.registration.hca.as_str())
    }

    /// Regions that it is made of: one for each HCA, unless it is in pieces. Ranges that share one name its slot.
    pub fn slots(&self) -> impl Iterator<Item = u32> + '_ {
        self.registered.parts.iter().map(|part| part.registration.slot)
    }

    /// Whether NICs still take it: one load for each part, no call.
    #[must_use]
    pub fn is_current(&self) -> bool {
        let shows = |part: &Part| self.session.generation_of(part.registration.slot);
        self.registered.parts.iter().all(|part| shows(part) == Some(part.registration.generation))
    }

    /// Local address of `len_bytes` at `offset` of the range, for a queue pair of this HCA. The daemon checks it again.
    ///
    /// # Errors
    /// [`ClientError::InvalidArgument`] when they are not in one part with that HCA.
    pub fn span(&self, hca: &str, offset: u64, len_bytes: u32) -> Result<LocalSpan, ClientError> {
        let (part, at) = self.registered.part(hca, offset, u64::from(len_bytes))?;
        let v1::Registration { slot, generation, .. } = part.registration;
        Ok(LocalSpan { slot, generation, offset: part.slot_offset + at, len_bytes })
    }

    /// What a peer needs to read and write the part that starts at `offset` of the range.
    ///
    /// # Errors
    /// As [`RegisteredRange::span`].
    pub fn remote(&self, hca: &str, offset: u64) -> Result<RemoteBuffer, ClientError> {
        let (part, _) = self.registered.part(hca, offset, 1)?;
        Ok(RemoteBuffer::new(part.registration.clone()))
    }

    /// Ends the registration. The daemon may keep its region for the next one of the same range.
    ///
    /// # Errors
    /// [`ClientError::SessionEnded`], [`ClientError::Deadline`], [`ClientError::Unreachable`].
    pub async fn deregister(mut self) -> Result<(), ClientError> {
        self.session.deregister_ids(vec![self.registered.id]).await?;
        self.registered.held = false;
        Ok(())
    }
}

impl Session {
    /// Registers ranges, all or none, in the order given.
    ///
    /// # Errors
    /// [`ClientError::Refused`] with the daemon's reason, [`ClientError::SessionEnded`], [`ClientError::Deadline`],
    /// [`ClientError::Unreachable`].
    pub async fn register(
        &self,
        ranges: Vec<RangeOf>,
        options: RegisterOptions,
    ) -> Result<Vec<RegisteredRange>, ClientError> {
        let registered = self.register_inner(ranges, options).await?;
        let whole = |registered| RegisteredRange { session: self.clone(), registered };
        Ok(registered.into_iter().map(whole).collect())
    }

    pub(crate) async fn register_inner(
        &self,
        ranges: Vec<RangeOf>,
        options: RegisterOptions,
    ) -> Result<Vec<Registered>, ClientError> {
        let session = self.clone();
        let call = async move {
            let memories: Vec<MemoryName> = ranges.iter().map(|range| range.memory).collect();
            let mut request = options.0;
            request.ranges = ranges.into_iter().map(RangeOf::into_message).collect();
            let register = |session: Session| {
                let request = session.request(request.clone());
                async move {
                    let answer = RegistrationsClient::new(session.channel()).register(request).await;
                    answer.map(Response::into_inner).map_err(|status| session.error("Registrations.Register", status))
                }
            };
            let answer = session.across_restarts(register).await?;
            if answer.ranges.len() != memories.len() {
                return Err(ClientError::protocol("as many registrations came as ranges were not asked for"));
            }
            let parting = session.parting();
            let registered = |range| Registered::new(Arc::clone(parting), range);
            let all: Vec<Registered> = answer.ranges.into_iter().map(registered).collect::<Result<_, _>>()?;
            for (memory, registered) in memories.into_iter().zip(&all) {
                let slots = registered.parts.iter().map(|part| (part.registration.slot, part.registration.generation));
                session.mappings().registered(memory, slots);
            }
            Ok(all)
        };
        FinishOnDrop::new(self.runtime(), call).await
    }

    /// Ends many registrations in one call.
    ///
    /// # Errors
    /// As [`RegisteredRange::deregister`].
    pub async fn deregister_all(&self, ranges: Vec<RegisteredRange>) -> Result<(), ClientError> {
        let mut ranges = ranges;
        self.deregister_ids(ranges.iter().map(RegisteredRange::id).collect()).await?;
        ranges.iter_mut().for_each(|range| range.registered.held = false);
        Ok(())
    }

    async fn deregister_ids(&self, registration_ids: Vec<u64>) -> Result<(), ClientError> {
        let deregister = |session: Session| {
            let request = session.request(v1::DeregisterRequest { registration_ids: registration_ids.clone() });
            async move {
                let answer = RegistrationsClient::new(session.channel()).deregister(request).await;
                answer.map(drop).map_err(|status| session.error("Registrations.Deregister", status))
            }
        };
        self.across_restarts(deregister).await
    }
}
