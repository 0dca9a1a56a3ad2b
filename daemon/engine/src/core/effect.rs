//! What the state machine wants done.

use std::ops::Range;
use std::sync::Arc;

use gdrd_hal::{Access, Endpoint, QueuePairType};

use super::host::{HcaIndex, Place};
use super::input::{AllocationId, CallId, GrantId, RegionId, TenantId};
use super::record::Record;
use super::region::Source;
use crate::error::EngineError;
use crate::ids::{Generation, LeaseId, MemoryId, QueuePairId, RegistrationId, SessionId, SlotId};
use crate::keep::Name;
use crate::lease::LeaseInfo;
use crate::session::SessionEvent;

/// A lease given to a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Grant {
    pub(crate) grant: GrantId,
    pub(crate) session: SessionId,
    pub(crate) allocation: AllocationId,
    /// The lease, with keys left at 0.
    pub(crate) info: LeaseInfo,
}

/// What answers a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Answer {
    Done,
    Session(SessionId, TenantId),
    Granted(Box<Grant>),
    QueuePair(QueuePairId),
    Adopted(MemoryId),
    Registered(Vec<RegistrationId>),
    /// How many of those named were there.
    Deregistered(u64),
}

/// What happened to a lease, for watchers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Change {
    Acquired(LeaseInfo),
    Released { lease: LeaseId, generation: Generation, reason: &'static str },
    Revoked { lease: LeaseId, generation: Generation, reason: String },
    Rekeyed(LeaseInfo),
}

/// What a queue pair is made with, after checks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NewQueuePair {
    pub(crate) hca: HcaIndex,
    /// 0 for the first active port.
    pub(crate) port_num: u8,
    pub(crate) qp_type: QueuePairType,
    pub(crate) send_depth: u32,
    pub(crate) recv_depth: u32,
}

/// Work that may block on a driver. Its result comes back as an input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Job {
    /// New memory. `ahead`: nobody waits for it, so it must leave the headroom free.
    Allocate { allocation: AllocationId, place: Place, len_bytes: u64, ahead: bool },
    /// Registrations in the tenant's PDs, all or none. `keep`: names under which memory and dma-buf are kept from here
    /// on, unless they are already.
    Register {
        allocation: AllocationId,
        tenant: TenantId,
        targets: Vec<(HcaIndex, SlotId)>,
        access: Access,
        keep: Option<[Name; 2]>,
    },
    /// Ends all registrations of the allocation.
    Deregister { allocation: AllocationId },
    /// Zeroes the whole allocation.
    Scrub { allocation: AllocationId },
    /// Drops the allocation.
    Free { allocation: AllocationId },
    /// A queue pair in INIT, attached to the broker. `keep`: name under which its ring is kept.
    CreateQueuePair {
        queue_pair: QueuePairId,
        tenant: TenantId,
        session: SessionId,
        new: NewQueuePair,
        keep: Option<Name>,
    },
    /// One region of a range of memory, in the tenant's PD.
    RegisterRegion {
        region: RegionId,
        tenant: TenantId,
        source: Source,
        hca: HcaIndex,
        range: Range<u64>,
        access: Access,
    },
    /// Ends a region.
    DeregisterRegion { region: RegionId },
    /// Lets go of adopted memory.
    CloseMemory { memory: MemoryId },
    /// To RTS.
    ConnectQueuePair { queue_pair: QueuePairId, hca: HcaIndex, remote: Endpoint },
    /// To ERR, drained, detached, destroyed.
    DestroyQueuePair { queue_pair: QueuePairId },
}

/// One thing to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Effect {
    /// Ends a call.
    Answer { call: CallId, answer: Result<Answer, EngineError> },
    /// For the journal, before any effect that follows.
    Record(Box<Record>),
    /// What has that name need not be kept any more.
    Unkeep { name: Name },
    /// The tenant's table of slots and generation page are needed from here on.
    CreateTenant { tenant: TenantId },
    /// Nothing of the tenant is left.
    DropTenant { tenant: TenantId },
    /// Opens the allocation's slots for requests, at these generations.
    Publish { tenant: TenantId, allocation: AllocationId, slots: Vec<(SlotId, Generation)> },
    /// Closes slots: these are their generations from here on.
    Retire { tenant: TenantId, slots: Vec<(SlotId, Generation)> },
    /// Tells `Quiesced` once no admitted request uses the retired slots.
    Quiesce { tenant: TenantId, allocation: AllocationId, slots: Vec<SlotId> },
    /// The HCA is gone, and nothing will be made on it any more.
    ForgetHca { hca: HcaIndex },
    /// Opens a region's slot for requests, at this generation.
    PublishRegion { tenant: TenantId, region: RegionId, slot: SlotId, generation: Generation },
    /// Tells `RegionQuiesced` once no admitted request uses the retired slot.
    QuiesceRegion { tenant: TenantId, region: RegionId, slot: SlotId },
    /// Queue pairs with requests on the slots go to ERR, so that they quiesce.
    FlushUsers { tenant: TenantId, slots: Vec<SlotId> },
    /// Ends that one registration, whose HCA is gone; tells `Shed` once the retired slot is quiet.
    Shed { tenant: TenantId, allocation: AllocationId, hca: HcaIndex, slot: SlotId },
    /// Something for an executor thread.
    Start(Job),
    /// News for watchers of the tenant.
    Tell { tenant: TenantId, change: Change },
    /// News for all watchers: a port is down, or with port 0 the whole HCA.
    NicDown { hca: Arc<str>, port_num: u8 },
    /// News for a session.
    TellSession { session: SessionId, event: SessionEvent },
    /// Memory that the session was lent is freed as soon as no client has it mapped.
    MemoryGone { session: SessionId, allocation: AllocationId },
    /// The session is gone; nothing of it is left but leases that others hold.
    SessionGone { session: SessionId },
}
