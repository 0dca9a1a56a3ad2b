//! Adopted memory and registrations of ranges, as callers see them.

use std::os::fd::OwnedFd;

use gdrd_hal::{Access, GpuUuid};

use crate::call::Undo;
use crate::ids::{LeaseId, MemoryId, RegistrationId};
use crate::lease::RegistrationInfo;
use crate::peer::TenantKey;

/// Memory that a client brings along.
#[derive(Debug)]
pub struct AdoptRequest {
    /// The memory: a memfd, or a dma-buf of device memory.
    pub fd: OwnedFd,
    /// The same device memory exported with its other kind of mapping, where the client has it: which one an HCA can
    /// register is a property of the pair (`CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE`, cuda.h).
    pub other_mapping: Option<OwnedFd>,
    /// A GPU by name, UUID or BDF: the one whose memory it is, or that host memory is near to. Registrations that name
    /// no HCA use those paired with it.
    pub gpu: Option<String>,
}

/// What adopted memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum AdoptedKind {
    /// A memfd, sealed against resizing.
    Memfd,
    /// A dma-buf of device memory.
    DmaBuf,
}

/// Memory of a client that the daemon knows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdoptedMemory {
    /// Identity; never used again.
    pub id: MemoryId,
    /// What it is.
    pub kind: AdoptedKind,
    /// Length, bytes, from the kernel.
    pub len_bytes: u64,
    /// The GPU that was named for it.
    pub gpu: Option<GpuUuid>,
}

/// Memory that ranges are registered of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum MemoryRef {
    /// Adopted.
    Adopted(MemoryId),
    /// Leased, and held by the session.
    Lease(LeaseId),
}

/// A range of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RangeRequest {
    /// The memory.
    pub memory: MemoryRef,
    /// Start in it, bytes. Any place: what is registered is rounded out to pages, inside of the memory.
    pub offset: u64,
    /// Length, bytes, at least 1.
    pub len_bytes: u64,
}

/// Whether ranges may share a memory region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Merging {
    /// Neighbours in one memory share a region that covers them, and the gap between them where registering that costs
    /// less than another call to the provider. Who holds its rkey reaches all of it.
    Near,
    /// Each range has a region of its own, but for one that lies within another.
    None,
}

/// Ranges to register, all or none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegisterRequest {
    /// The ranges.
    pub ranges: Vec<RangeRequest>,
    /// Rights, which are part of a region's identity.
    pub access: Access,
    /// HCAs; empty for those paired with the memory's GPU.
    pub hcas: Vec<String>,
    /// Sharing of regions.
    pub merging: Merging,
    /// Longest region, bytes, a multiple of 2 MiB; 0 for no bound. A translating IOMMU may refuse longer ones.
    pub piece_bytes: u64,
}

/// A part of a range with one HCA: all of it, unless it is in pieces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegisteredPart {
    /// Where the part starts in the range, bytes.
    pub offset: u64,
    /// Where it starts in its slot, bytes: ring entries count from the slot's start.
    pub slot_offset: u64,
    /// Its keys; `iova` and `len_bytes` are the part's.
    pub registration: RegistrationInfo,
}

/// A registered range.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegisteredRange {
    /// What ends it.
    pub id: RegistrationId,
    /// The memory.
    pub memory: MemoryRef,
    /// Start in it, bytes.
    pub offset: u64,
    /// Length, bytes.
    pub len_bytes: u64,
    /// Its parts, by HCA in the order asked for, then by offset.
    pub parts: Vec<RegisteredPart>,
    /// Owner.
    pub tenant: TenantKey,
}

/// Ranges just registered. Taken back when dropped before [`RegistrationGrant::keep`].
#[derive(Debug)]
pub struct RegistrationGrant {
    /// In the order asked for.
    pub ranges: Vec<RegisteredRange>,
    pub(crate) undo: Undo,
}

impl RegistrationGrant {
    /// The caller has the grant.
    #[must_use]
    pub fn keep(self) -> Vec<RegisteredRange> {
        self.undo.disarm();
        self.ranges
    }
}

/// A page of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegistrationPage {
    /// Registrations in order of id, keys left at 0.
    pub registrations: Vec<RegisteredRange>,
    /// Where the next page starts; `None` on the last one.
    pub next: Option<RegistrationId>,
}
