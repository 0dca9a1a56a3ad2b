//! The engine's decisions, as a pure state machine: (state, input, time) to effects.
//!
//! ```text
//!            allocate            register             acquire
//!   (none) ───────────► clean ───────────► ready ───────────────► leased
//!                         │                  ▲ │                     │ last holder gone:
//!                         │         register │ │ idle, over budget   │ retire slots
//!                         ▼                  │ ▼                     ▼
//!                       free ◄──────────── scrub ◄── deregister ◄── quiesce
//! ```
//!
//! A lease of an earlier daemon starts as being remade, and is leased once it is registered again.
//!
//! An allocation that was registered for a tenant stays that tenant's until it is freed; only clean
//! ones, which nobody ever saw, are shared. Registrations end before memory is scrubbed or freed, and
//! a session's queue pairs end before its buffers do.
//!
//! Owner of state: everything here is ids and numbers; the objects behind them are the runtime's.
//!
//! Must not know: clocks, threads, descriptors, hardware objects, randomness, keys of registrations.

mod adopted;
mod allocation;
mod costs;
mod effect;
mod fault;
mod holders;
mod host;
mod in_use;
mod input;
mod journaling;
mod lease;
mod pool;
mod queue_pair;
mod ranges;
mod record;
mod region;
mod region_life;
mod registration;
mod restore;
mod session;
mod shortage;
mod slots;
mod stats;
mod tenant;
#[cfg(test)]
pub(crate) mod tests;
mod view;

use std::collections::{BTreeMap, BTreeSet};

pub(crate) use adopted::NewMemory;
pub(crate) use allocation::RegistrationState;
pub(crate) use effect::{Answer, Change, Effect, Grant, Job, NewQueuePair};
pub(crate) use host::{HcaIndex, Host, Place};
pub(crate) use input::{
    AllocationId, BatchId, CallId, Failure, FailureKind, GpuIndex, GrantId, Input, NewSession, RegionId, TenantId,
    WarmUp,
};

pub(crate) use ranges::TRANSLATED_PIECE_BYTES;
pub(crate) use record::{Journaled, LeaseRecord, PlaceRecord, QueuePairRecord, Record, SessionRecord, TenantRecord};
pub(crate) use region::Source;
pub(crate) use restore::Restored;
pub(crate) use shortage::error_of;
pub(crate) use view::Seen;

use crate::config::{CacheConfig, EngineConfig, GpuProof, Limits, PoolConfig};
use crate::error::EngineError;
use crate::ids::{Generation, LeaseId, MemoryId, QueuePairId, RegistrationId, SessionId};
use crate::peer::TenantKey;
use crate::table::Table;

use adopted::Adopted;
use allocation::Allocation;
use costs::Costs;
use journaling::Journaling;
use lease::Lease;
use pool::CleanPool;
use queue_pair::QueuePair;
use region::Regions;
use registration::{Batch, Registration};
use session::Session;
use shortage::{Awaited, Starved};
use stats::Counters;
use tenant::Tenant;

/// What the state machine needs of the configuration.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    limits: Limits,
    pool: PoolConfig,
    cache: CacheConfig,
    /// Of a tenant: those of its buffers, and those of cached regions.
    slots: u32,
    gpu_proof: GpuProof,
    drain_ns: u64,
    /// Whether what must outlive the daemon is written down and kept.
    journal: bool,
}

impl Settings {
    pub(crate) fn new(config: &EngineConfig) -> Self {
        Self {
            limits: config.limits.clone(),
            pool: config.pool.clone(),
            cache: config.cache.clone(),
            slots: config.slots(),
            gpu_proof: config.gpu_proof,
            drain_ns: nanos(config.timeouts.drain),
            journal: false,
        }
    }

    /// With a journal, and descriptors kept.
    pub(crate) fn journaling(self) -> Self {
        Self { journal: true, ..self }
    }
}

/// Nanoseconds of a duration, the most there are where it is longer.
pub(crate) fn nanos(duration: std::time::Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// What is due at a time.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Deadline {
    /// A detached lease ends.
    Lease(LeaseId),
    /// Requests on an ended lease have had time enough.
    Drain(AllocationId),
    /// A tenant's pool may have been idle for long.
    Ready(TenantId, std::sync::Arc<pool::PoolKey>),
    /// A clean pool may have been idle for long.
    Clean(GpuIndex, u64),
    /// Requests on an ended region have had time enough.
    DrainRegion(RegionId),
    /// A tenant's cached regions may have been idle for long.
    IdleRegions(TenantId),
}

/// The state machine.
#[derive(Debug)]
pub(crate) struct Core {
    settings: Settings,
    host: Host,
    tenants: BTreeMap<TenantId, Tenant>,
    tenant_ids: BTreeMap<TenantKey, TenantId>,
    sessions: BTreeMap<SessionId, Session>,
    leases: Table<LeaseId, Lease>,
    allocations: Table<AllocationId, Allocation>,
    queue_pairs: BTreeMap<QueuePairId, QueuePair>,
    clean: BTreeMap<(GpuIndex, u64), CleanPool>,
    /// Acquires that wait, with the pool they wait at.
    waiting: BTreeMap<CallId, (TenantId, std::sync::Arc<pool::PoolKey>)>,
    /// What waits for others to be gone before it is tried once more.
    starved: BTreeMap<Starved, BTreeSet<Awaited>>,
    adopted: BTreeMap<MemoryId, Adopted>,
    regions: Regions,
    registrations: BTreeMap<RegistrationId, Registration>,
    /// Registrations of each memory that has any.
    by_source: BTreeMap<Source, BTreeSet<RegistrationId>>,
    /// Calls to register that wait for regions.
    batches: BTreeMap<BatchId, Batch>,
    /// Calls to disown that wait.
    disowning: u32,
    /// Orders idle regions by when they were let go of.
    idle_clock: u64,
    costs: Costs,
    deadlines: BTreeSet<(u64, Deadline)>,
    /// The last number given to anything; numbers are never used again.
    last_number: u64,
    journaling: Journaling,
    counters: Counters,
    /// Whether anyone watches leases: without, no changes are told.
    watched: bool,
    shutting_down: bool,
    /// Time of the input being applied.
    now: u64,
    effects: Vec<Effect>,
}

impl Core {
    pub(crate) fn new(settings: Settings, host: Host) -> Self {
        let journaling = Journaling { on: settings.journal, ..Journaling::default() };
        Self {
            settings,
            host,
            tenants: BTreeMap::new(),
            tenant_ids: BTreeMap::new(),
            sessions: BTreeMap::new(),
            leases: Table::default(),
            allocations: Table::default(),
            queue_pairs: BTreeMap::new(),
            clean: BTreeMap::new(),
            waiting: BTreeMap::new(),
            starved: BTreeMap::new(),
            adopted: BTreeMap::new(),
            regions: Regions::default(),
            registrations: BTreeMap::new(),
            by_source: BTreeMap::new(),
            batches: BTreeMap::new(),
            disowning: 0,
            idle_clock: 0,
            costs: Costs::default(),
            deadlines: BTreeSet::new(),
            last_number: 0,
            journaling,
            counters: Counters::default(),
            watched: false,
            shutting_down: false,
            now: 0,
            effects: Vec::new(),
        }
    }

    /// Takes one input at `now` (nanoseconds of a clock that never goes back) and appends what is to be done to
    /// `effects`, which must be carried out in order.
    pub(crate) fn apply(&mut self, input: Input, now: u64, effects: &mut Vec<Effect>) {
        self.now = self.now.max(now);
        std::mem::swap(&mut self.effects, effects);
        self.dispatch(input);
        std::mem::swap(&mut self.effects, effects);
    }

    fn dispatch(&mut self, input: Input) {
        match input {
            Input::OpenSession { call, session } => self.open_session(call, session),
            Input::CloseSession { session } => self.close_session(session),
            Input::ProveGpus { call, session, gpus } => self.prove_gpus(call, session, &gpus),
            Input::Acquire { call, session, request } => self.acquire(call, session, request),
            Input::Cancel { call } => self.cancel(call),
            Input::Open { call, session, lease } => self.open(call, session, lease),
            Input::Release { call, session, lease, generation, receives } => {
                self.release(call, session, lease, generation, receives);
            }
            Input::Undo { session, lease, grant } => self.undo(session, lease, grant),
            Input::Detach { call, session, lease, ttl } => self.detach(call, session, lease, ttl),
            Input::CreateQueuePair { call, session, request } => self.create_queue_pair(call, session, &request),
            Input::ConnectQueuePair { call, session, queue_pair, remote } => {
                self.connect_queue_pair(call, session, queue_pair, remote);
            }
            Input::DestroyQueuePair { call, session, queue_pair } => {
                self.destroy_queue_pair(call, session, queue_pair);
            }
            Input::UndoQueuePair { queue_pair } => self.undo_queue_pair(queue_pair),
            Input::Adopt { call, session, memory } => self.adopt(call, session, &memory),
            Input::Disown { call, session, memory } => self.disown(call, session, memory),
            Input::Register { call, session, request } => self.register_ranges(call, session, &request),
            Input::Deregister { call, session, registrations } => {
                self.deregister_ranges(call, session, &registrations);
            }
            Input::UndoRegistrations { registrations } => self.undo_registrations(registrations),
            Input::RegionRegistered { region, result, cost_ns } => self.region_registered(region, result, cost_ns),
            Input::RegionQuiesced { region } => self.region_quiesced(region),
            Input::RegionDeregistered { region, result } => self.region_deregistered(region, result),
            Input::MemoryClosed { memory } => self.memory_closed(memory),
            Input::Allocated { allocation, result } => self.allocated(allocation, result),
            Input::Registered { allocation, result } => self.registered(allocation, result),
            Input::Quiesced { allocation } => self.quiesced(allocation),
            Input::Deregistered { allocation, result } => self.deregistered(allocation, result),
            Input::Scrubbed { allocation, result } => self.scrubbed(allocation, result),
            Input::Freed { allocation } => self.freed(allocation),
            Input::Shed { tenant, slot } => self.shed(tenant, slot),
            Input::QueuePairCreated { queue_pair, result } => self.queue_pair_created(queue_pair, result),
            Input::QueuePairConnected { queue_pair, result } => self.queue_pair_connected(queue_pair, result),
            Input::QueuePairDestroyed { queue_pair } => self.queue_pair_destroyed(queue_pair),
            Input::QueuePairFailed { queue_pair, message } => self.queue_pair_failed(queue_pair, message),
            Input::GpuLost { gpu, message } => self.gpu_lost(gpu, message),
            Input::GpuHealthy { gpu } => self.host.set_lost(gpu, None),
            Input::GpuResumed { gpu, lost } => self.host.set_lost(gpu, lost),
            Input::GpuNodes { with_node } => self.host.note_nodes(&with_node),
            Input::HcaGone { hca, message } => self.hca_gone(hca, message),
            Input::HcaFound { name } => self.host.add_hca(name),
            Input::PortDown { hca, port_num } => self.port_down(hca, port_num),
            Input::Plan { plan, unserved } => self.host.update(&plan, &unserved),
            Input::Watched { watched } => self.watched = watched,
            Input::Restore(restored) => self.restore(*restored),
            Input::Resume { session, admin, quota } => self.resume(session, admin, quota),
            Input::Time => self.time(),
            Input::Shutdown => self.shutdown(),
        }
    }

    /// When [`Input::Time`] is due next; `None`: never.
    pub(crate) fn next_deadline(&self) -> Option<u64> {
        self.deadlines.first().map(|(at, _)| *at)
    }

    /// Whether some acquire waits for buffers that are on their way.
    pub(crate) fn is_awaited(&self) -> bool {
        !self.waiting.is_empty() || !self.batches.is_empty() || self.disowning > 0
    }

    /// Whether nothing of any tenant is left.
    pub(crate) fn is_empty(&self) -> bool {
        self.sessions.is_empty()
            && self.tenants.is_empty()
            && self.allocations.is_empty()
            && self.queue_pairs.is_empty()
            && self.adopted.is_empty()
            && self.regions.is_empty()
    }

    fn time(&mut self) {
        while let Some((at, _)) = self.deadlines.first() {
            if *at > self.now {
                return;
            }
            let Some((_, deadline)) = self.deadlines.pop_first() else { return };
            match deadline {
                Deadline::Lease(lease) => self.lease_expired(lease),
                Deadline::Drain(allocation) => self.drain_overdue(allocation),
                Deadline::Ready(tenant, key) => self.ready_pool_idle(tenant, &key),
                Deadline::Clean(gpu, len_bytes) => self.clean_pool_idle(gpu, len_bytes),
                Deadline::DrainRegion(region) => self.region_drain_overdue(region),
                Deadline::IdleRegions(tenant) => self.regions_idle(tenant),
            }
        }
    }

    fn shutdown(&mut self) {
        self.shutting_down = true;
        let sessions: Vec<SessionId> = self.sessions.keys().copied().collect();
        for session in sessions {
            self.end_session(session, "SHUTTING_DOWN", "the daemon is shutting down");
        }
        let detached: Vec<LeaseId> =
            self.leases.iter().filter(|(_, lease)| lease.is_detached()).map(|(id, _)| *id).collect();
        for lease in detached {
            self.end_lease(lease, "SHUTTING_DOWN");
        }
        let clean: Vec<AllocationId> = self.clean.values_mut().flat_map(|pool| pool.ready.clone()).collect();
        for allocation in clean {
            self.give_up(allocation);
        }
        let growing: Vec<AllocationId> =
            self.allocations.iter().filter(|(_, a)| a.owner.is_none()).map(|(id, _)| *id).collect();
        for allocation in growing {
            self.give_up(allocation);
        }
    }

    fn generation(&mut self) -> Generation {
        Generation(self.number())
    }

    fn effect(&mut self, effect: Effect) {
        self.effects.push(effect);
    }

    fn answer(&mut self, call: CallId, answer: Result<Answer, EngineError>) {
        self.effects.push(Effect::Answer { call, answer });
    }

    fn at(&mut self, delay_ns: u64, deadline: Deadline) -> u64 {
        let at = self.now.saturating_add(delay_ns);
        self.deadlines.insert((at, deadline));
        at
    }

    /// An input that fits no state: a bug of the runtime or of this machine. Counted, and asserted to be 0 in tests.
    fn unexpected(&mut self) {
        self.counters.unexpected_inputs += 1;
    }
}
