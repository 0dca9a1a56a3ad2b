//! A stand-in for the runtime and its hardware: carries out effects on plain books, and fails the test when an
//! effect would break a rule of the hardware or of isolation.

use std::collections::{BTreeMap, BTreeSet};

use crate::core::{AllocationId, Answer, CallId, Effect, HcaIndex, Job, Journaled, RegionId, Source, TenantId};
use crate::error::EngineError;
use crate::ids::{LeaseId, MemoryId, QueuePairId, RegistrationId, SessionId, SlotId};
use crate::keep::Name;

/// One piece of memory.
#[derive(Debug, Default)]
pub(super) struct Memory {
    pub(super) registered: Vec<(HcaIndex, SlotId)>,
    /// The tenant that has an fd of it, for ever.
    pub(super) seen_by: Option<TenantId>,
    /// Whether a client may have written to it since it was zeroed.
    pub(super) dirty: bool,
    /// A registration of it could not be ended: an HCA may reach it.
    pub(super) reached: bool,
    /// It goes on with the lease that it had when the daemon died, content and all.
    pub(super) resumed: bool,
}

/// One registration slot as the broker's table has it.
#[derive(Debug)]
struct Slot {
    generation: u64,
    live: bool,
}

/// What a job or wait leads to once the test lets it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Pending {
    Job(Job),
    Quiesce { tenant: TenantId, allocation: AllocationId, slots: Vec<SlotId> },
    Shed { tenant: TenantId, allocation: AllocationId, hca: HcaIndex, slot: SlotId },
    QuiesceRegion { region: RegionId },
}

#[derive(Debug, Default)]
pub(super) struct Hardware {
    pub(super) memory: BTreeMap<AllocationId, Memory>,
    slots: BTreeMap<(TenantId, SlotId), Slot>,
    tenants: BTreeSet<TenantId>,
    pub(super) queue_pairs: BTreeMap<QueuePairId, SessionId>,
    /// Adopted memory whose descriptors are open.
    pub(super) adopted: BTreeSet<MemoryId>,
    /// Regions that an HCA has, and the memory of each.
    pub(super) regions: BTreeMap<RegionId, Source>,
    /// Registrations that clients were told of.
    pub(super) ranges: BTreeSet<RegistrationId>,
    pub(super) pending: Vec<Pending>,
    pub(super) answers: BTreeMap<CallId, Result<Answer, EngineError>>,
    /// Effects that tests look at by themselves.
    pub(super) told: Vec<Effect>,
    pub(super) flushed: Vec<SlotId>,
    /// What the journal adds up to.
    pub(super) journal: Journaled,
    /// Memory that is kept for the next daemon.
    pub(super) kept: BTreeMap<Name, AllocationId>,
    /// Leases that living clients have been granted and have not given back.
    pub(super) held: BTreeSet<(SessionId, LeaseId)>,
    /// Sessions whose clients live.
    pub(super) connected: BTreeSet<SessionId>,
}

impl Hardware {
    pub(super) fn carry_out(&mut self, effect: Effect) {
        match effect {
            Effect::Answer { call, answer } => {
                match &answer {
                    Ok(Answer::Granted(grant)) => {
                        self.hand_out(grant.allocation, grant.session);
                        self.held.insert((grant.session, grant.info.id));
                    }
                    Ok(Answer::Adopted(memory)) => assert!(self.adopted.insert(*memory)),
                    Ok(Answer::Registered(ranges)) => self.ranges.extend(ranges),
                    Ok(Answer::Session(session, _)) => drop(self.connected.insert(*session)),
                    _ => {}
                }
                assert!(self.answers.insert(call, answer).is_none(), "{call:?} is answered twice");
            }
            Effect::Record(record) => self.journal.add(*record),
            Effect::Unkeep { name } => assert!(!self.kept.contains_key(&name), "memory is let go before it is freed"),
            Effect::CreateTenant { tenant } => assert!(self.tenants.insert(tenant)),
            Effect::DropTenant { tenant } => self.drop_tenant(tenant),
            Effect::Publish { tenant, allocation, slots } => {
                let memory = self.memory.get_mut(&allocation).expect("published memory exists");
                assert!(!memory.dirty || memory.resumed, "memory is lent unscrubbed");
                assert!(!memory.reached, "memory that an HCA may still reach is lent again");
                memory.resumed = false;
                assert!(memory.seen_by.is_none_or(|seen| seen == tenant), "memory crosses tenants");
                memory.seen_by = Some(tenant);
                let registered: Vec<_> = memory.registered.iter().map(|(_, slot)| *slot).collect();
                assert_eq!(registered, slots.iter().map(|(slot, _)| *slot).collect::<Vec<_>>());
                slots.into_iter().for_each(|(slot, generation)| self.open(tenant, slot, generation.0));
            }
            Effect::Retire { tenant, slots } => {
                for (slot, generation) in slots {
                    let entry = self.slots.get_mut(&(tenant, slot)).expect("retired slots were published");
                    assert!(entry.live, "{slot} is retired twice");
                    entry.live = false;
                    entry.generation += 1;
                    assert_eq!(entry.generation, generation.0);
                }
            }
            Effect::Quiesce { tenant, allocation, slots } => {
                self.assert_closed(tenant, &slots);
                self.pending.push(Pending::Quiesce { tenant, allocation, slots });
            }
            Effect::PublishRegion { tenant, region, slot, generation } => {
                assert!(self.regions.contains_key(&region), "a region is published before it is there");
                self.open(tenant, slot, generation.0);
            }
            Effect::QuiesceRegion { tenant, region, slot } => {
                self.assert_closed(tenant, &[slot]);
                self.pending.push(Pending::QuiesceRegion { region });
            }
            Effect::FlushUsers { slots, .. } => self.flushed.extend(slots),
            Effect::Shed { tenant, allocation, hca, slot } => {
                self.assert_closed(tenant, &[slot]);
                self.pending.push(Pending::Shed { tenant, allocation, hca, slot });
            }
            Effect::Start(job) => self.start(job),
            effect @ (Effect::Tell { .. }
            | Effect::NicDown { .. }
            | Effect::ForgetHca { .. }
            | Effect::MemoryGone { .. }
            | Effect::TellSession { .. }) => {
                self.told.push(effect);
            }
            Effect::SessionGone { session } => {
                let left = self.queue_pairs.values().any(|owner| *owner == session);
                assert!(!left, "a session is gone before its queue pairs");
                self.told.push(Effect::SessionGone { session });
            }
        }
    }

    fn open(&mut self, tenant: TenantId, slot: SlotId, generation: u64) {
        let entry = self.slots.entry((tenant, slot)).or_insert(Slot { generation: 1, live: false });
        assert!(!entry.live, "{slot} is published twice");
        assert_eq!(entry.generation, generation);
        entry.live = true;
    }

    fn hand_out(&mut self, allocation: AllocationId, _session: SessionId) {
        let memory = self.memory.get_mut(&allocation).expect("lent memory exists");
        assert!(memory.seen_by.is_some(), "memory is lent before it is published");
        memory.dirty = true;
    }

    fn drop_tenant(&mut self, tenant: TenantId) {
        assert!(self.tenants.remove(&tenant));
        assert!(self.memory.values().all(|memory| memory.seen_by != Some(tenant)), "memory outlives its tenant");
        self.slots.retain(|(owner, slot), entry| {
            assert!(*owner != tenant || !entry.live, "{slot} outlives its tenant");
            *owner != tenant
        });
    }

    fn assert_closed(&self, tenant: TenantId, slots: &[SlotId]) {
        for slot in slots {
            assert!(self.slots.get(&(tenant, *slot)).is_some_and(|entry| !entry.live), "{slot} is waited for live");
        }
    }

    fn start(&mut self, job: Job) {
        match &job {
            Job::Allocate { .. } | Job::ConnectQueuePair { .. } | Job::DestroyQueuePair { .. } => {}
            Job::CreateQueuePair { queue_pair, session, .. } => {
                assert!(self.queue_pairs.insert(*queue_pair, *session).is_none());
            }
            Job::Register { allocation, tenant, targets, .. } => {
                let memory = &self.memory[allocation];
                assert!(memory.registered.is_empty() && (!memory.dirty || memory.resumed));
                assert!(memory.seen_by.is_none_or(|seen| seen == *tenant), "memory crosses tenants");
                assert!(!targets.is_empty());
            }
            Job::Deregister { allocation } => {
                let waits = |p: &Pending| matches!(p, Pending::Quiesce { allocation: a, .. } if a == allocation);
                assert!(!self.pending.iter().any(waits), "deregistered before it is quiet");
            }
            Job::RegisterRegion { region, source, .. } => {
                assert!(self.is_there(*source), "a region of memory that is gone");
                assert!(!self.regions.contains_key(region));
            }
            Job::DeregisterRegion { region } => {
                let quiet = !self.pending.contains(&Pending::QuiesceRegion { region: *region });
                assert!(quiet, "a region is deregistered before it is quiet");
            }
            Job::CloseMemory { memory } => {
                assert!(self.adopted.contains(memory), "memory is closed twice");
                self.assert_unreached(Source::Adopted(*memory));
            }
            Job::Scrub { allocation } | Job::Free { allocation } => {
                self.assert_unreached(Source::Leased(*allocation));
                assert!(self.memory[allocation].registered.is_empty(), "a NIC still reaches the memory");
            }
        }
        let of = |job: &Job| match job {
            Job::Allocate { allocation, .. }
            | Job::Register { allocation, .. }
            | Job::Deregister { allocation }
            | Job::Scrub { allocation }
            | Job::Free { allocation } => Some(*allocation),
            _ => None,
        };
        let busy = self
            .pending
            .iter()
            .any(|p| matches!(p, Pending::Job(other) if of(other).is_some() && of(other) == of(&job)));
        assert!(!busy, "two jobs at once on one allocation: {job:?}");
        self.pending.push(Pending::Job(job));
    }

    fn is_there(&self, source: Source) -> bool {
        match source {
            Source::Adopted(memory) => self.adopted.contains(&memory),
            Source::Leased(allocation) => self.memory.contains_key(&allocation),
        }
    }

    fn assert_unreached(&self, source: Source) {
        let making = |p: &Pending| matches!(p, Pending::Job(Job::RegisterRegion { source: s, .. }) if *s == source);
        assert!(self.regions.values().all(|of| *of != source), "an HCA still reaches the memory of a region");
        assert!(!self.pending.iter().any(making), "a region is being made of memory that is given back");
    }

    /// What is left when the daemon dies: kept memory, pages, and the clients.
    pub(super) fn after_crash(self) -> (Self, BTreeMap<TenantId, Vec<u64>>) {
        let mut left = Self {
            journal: self.journal,
            kept: self.kept,
            held: self.held,
            connected: self.connected,
            tenants: self.tenants,
            ..Self::default()
        };
        let kept: BTreeSet<AllocationId> = left.kept.values().copied().collect();
        for (id, memory) in self.memory.into_iter().filter(|(id, _)| kept.contains(id)) {
            left.memory.insert(id, Memory { registered: Vec::new(), resumed: true, reached: false, ..memory });
        }
        let mut pages: BTreeMap<TenantId, Vec<u64>> = left.tenants.iter().map(|id| (*id, Vec::new())).collect();
        for ((tenant, slot), entry) in self.slots {
            let page = pages.entry(tenant).or_default();
            let (at, next) = (slot.0 as usize, entry.generation + 1);
            page.resize(page.len().max(at + 1), 1);
            page[at] = next;
            left.slots.insert((tenant, slot), Slot { generation: next, live: false });
        }
        (left, pages)
    }

    /// Whether any slot of the tenant is open.
    pub(super) fn live_slots(&self, tenant: TenantId) -> usize {
        self.slots.iter().filter(|((owner, _), slot)| *owner == tenant && slot.live).count()
    }
}
