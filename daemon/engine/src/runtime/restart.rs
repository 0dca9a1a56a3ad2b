//! From one daemon to the next: what is kept while this one runs, and what the one before left.
//!
//! Role: owns the journal's file and the way to the keeper. A keeper that does not answer costs the next daemon its
//! leases, and this one's clients nothing.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use gdrd_hal::{Endpoint, Gid, GpuUuid, KeptMemory, LinkLayer, QueuePairState, QueuePairType};
use gdrd_ring::{GenerationWriter, end_lost_ring};

use super::executor::Lane;
use super::host_memory::HostMemory;
use super::objects::{Bytes, Memory, QueuePairObjects, Tenant, file_of};
use super::{Runtime, State, lock};
use crate::broker::SlotTable;
use crate::core::{
    AllocationId, Input, LeaseRecord, PlaceRecord, QueuePairRecord, Record, Restored, SessionRecord, TenantRecord,
};
use crate::error::EngineError;
use crate::ids::SessionId;
use crate::journal::JournalFile;
use crate::keep::{Keeper, Name, Watch};
use crate::peer::{Peer, TenantKey};
use crate::queue_pair::QueuePairInfo;
use crate::session::SessionResumed;

/// A generation beyond this never came from counting: the page was written by somebody else.
const MOST_GENERATION: u64 = 1 << 62;

/// Descriptors of an earlier daemon.
type Kept = BTreeMap<Name, OwnedFd>;

/// What outlives this process.
#[derive(Debug)]
pub(super) struct Keeping {
    keeper: Arc<dyn Keeper>,
    /// `None` until what an earlier daemon left is taken up.
    journal: Mutex<Option<JournalFile>>,
    /// A keeper that failed is told of once.
    failed: AtomicBool,
}

impl Keeping {
    pub(super) fn new(keeper: Arc<dyn Keeper>) -> Self {
        Self { keeper, journal: Mutex::default(), failed: AtomicBool::new(false) }
    }

    fn note(&self, what: &str, result: io::Result<()>) {
        if let Err(error) = result
            && !self.failed.swap(true, Ordering::Relaxed)
        {
            tracing::error!(%error, "{what} is not kept; a restart from here on ends the sessions concerned");
        }
    }
}

impl Runtime {
    /// Called under the state machine's lock, so that records stand in the order of decisions.
    pub(super) fn write_down(&self, record: &Record) {
        if let Some(keeping) = &self.keeping
            && let Some(journal) = &mut *lock(&keeping.journal)
        {
            journal.append(record);
        }
    }

    pub(super) fn shorten_journal(&self, state: &State) {
        if let Some(keeping) = &self.keeping
            && let Some(journal) = lock(&keeping.journal).as_mut().filter(|journal| journal.is_due())
        {
            journal.rewrite(&state.core.records());
        }
    }

    /// Whether what the next daemon needs is written down; `None` where nobody keeps descriptors for it.
    pub(super) fn is_written_down(&self) -> Option<bool> {
        let keeping = self.keeping.as_ref()?;
        Some(lock(&keeping.journal).as_ref().is_some_and(JournalFile::is_kept))
    }

    /// Writes anew what somebody has deleted of the files for the next daemon, or what could not be written before.
    pub(crate) fn restore_files(&self) -> Result<(), EngineError> {
        if let Some(keeping) = &self.keeping {
            let state = self.state();
            if let Some(journal) =
                lock(&keeping.journal).as_mut().filter(|journal| !journal.is_kept() || journal.is_missing())
            {
                if journal.is_kept() {
                    tracing::warn!("the journal was gone, and is written anew");
                }
                journal.rewrite(&state.core.records());
            }
        }
        self.drains.restore()
    }

    pub(super) fn unkeep(self: &Arc<Self>, name: Name) {
        let runtime = Arc::clone(self);
        self.background.submit(Lane::Unbounded, "let go of what was kept", move || {
            if let Some(keeping) = &runtime.keeping {
                keeping.note("a change", keeping.keeper.remove(name));
            }
        });
    }

    pub(super) fn keep_memory(&self, allocation: AllocationId, names: Option<[Name; 2]>) {
        if let (Some(keeping), Some(names)) = (&self.keeping, names)
            && let Some(memory) = self.objects.memory(allocation)
        {
            keeping.note("a buffer", memory.keep(&*keeping.keeper, names));
        }
    }

    /// Returns when nobody keeps it any more: only then is the memory free.
    pub(super) fn unkeep_memory(&self, names: Option<[Name; 2]>) {
        if let (Some(keeping), Some([memory, dma_buf])) = (&self.keeping, names) {
            let keeper = &keeping.keeper;
            let removed = keeper.remove(memory).and_then(|()| keeper.remove(dma_buf)).and_then(|()| keeper.barrier());
            keeping.note("a change", removed);
        }
    }

    pub(super) fn keep_ring(&self, ring: BorrowedFd<'_>, name: Option<Name>) {
        if let (Some(keeping), Some(name)) = (&self.keeping, name) {
            let kept = keeping.keeper.store(name, ring, Watch::No).and_then(|()| keeping.keeper.barrier());
            keeping.note("a ring", kept);
        }
    }

    pub(crate) fn keeps(&self) -> bool {
        self.keeping.is_some()
    }

    pub(crate) fn keep_session(&self, session: SessionId, socket: BorrowedFd<'_>) {
        let Some(keeping) = &self.keeping else { return };
        let names = self.state().core.names_of(session);
        let Some((tenant, socket_name, page_name)) = names else { return };
        let Some(tenant) = self.objects.tenant(tenant) else { return };
        let keep_page = || match tenant.page_kept.get() {
            Some(()) => Ok(()),
            None => keeping.keeper.store(page_name, tenant.page.fd(), Watch::No),
        };
        let kept = keep_page()
            .and_then(|()| keeping.keeper.store(socket_name, socket, Watch::HangUp))
            .and_then(|()| keeping.keeper.barrier());
        if kept.is_ok() {
            // Two sessions at once keep it twice, under one name.
            let _ = tenant.page_kept.set(());
        }
        keeping.note("a session", kept);
    }

    pub(crate) fn resume_session(self: &Arc<Self>, session: SessionId, peer: &Peer) -> Result<(), EngineError> {
        let rule = self.config.policy.rule_for(peer)?;
        let admin = self.config.policy.is_admin(peer);
        let tenant = self.state().core.tenant_of_session(session)?;
        self.input(Input::Resume { session, admin, quota: rule.quota });
        if let Some(tenant) = self.objects.tenant(tenant) {
            tenant.share.set(rule.traffic);
        }
        Ok(())
    }

    /// Takes up what an earlier daemon left, and starts the journal of this one.
    pub(crate) fn restore(self: &Arc<Self>, path: PathBuf, mut kept: Kept) -> Vec<SessionResumed> {
        let Some(keeping) = &self.keeping else { return Vec::new() };
        let restored = self.gather(&path, &mut kept);
        let sessions = restored.journaled.sessions.clone();
        let last_delivery = restored.journaled.numbers;
        let (memory, rings) = (restored.memory.clone(), restored.rings.clone());
        self.state().restoring = true;
        self.input(Input::Restore(Box::new(restored)));
        let (open, leftover) = {
            let state = self.state();
            *lock(&keeping.journal) = Some(JournalFile::start(path, &state.core.records()));
            for allocation in memory.into_iter().filter(|id| !state.core.has_allocation(*id)) {
                self.objects.remove_memory(allocation);
            }
            for queue_pair in rings.into_iter().filter(|id| !state.core.has_queue_pair(*id)) {
                self.objects.remove_queue_pair(queue_pair);
            }
            let used = state.core.names();
            let leftover: Vec<Name> = kept.keys().filter(|name| !used.contains(name)).copied().collect();
            (state.core.open_sessions(), leftover)
        };
        self.drop_leftover(keeping, &leftover, &mut kept);
        self.await_remade();
        let resumed = open.into_iter().filter_map(|(session, leases, queue_pairs)| {
            let record = sessions.get(&session)?;
            let socket = kept.remove(&record.socket)?;
            let events = self.sessions.insert(session, record.token, record.uid);
            Some(SessionResumed { session, socket, leases, queue_pairs, last_delivery, events })
        });
        resumed.collect()
    }

    fn drop_leftover(&self, keeping: &Keeping, leftover: &[Name], kept: &mut Kept) {
        if leftover.is_empty() {
            return;
        }
        let names: Vec<String> = leftover.iter().take(16).map(Name::to_string).collect();
        let (count, names) = (leftover.len(), names.join(" "));
        tracing::info!(count, %names, "kept descriptors that no lease or session has any more are closed");
        for name in leftover {
            kept.remove(name);
            keeping.note("a change", keeping.keeper.remove(*name));
        }
    }

    fn await_remade(&self) {
        let within = self.config.timeouts.restore;
        let waited = self.empty.wait_timeout_while(self.state(), within, |state| state.core.is_remaking());
        let (mut state, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        state.restoring = false;
        if timeout.timed_out() {
            tracing::warn!(?within, "some leases are not registered again yet; they are announced when they are");
        }
    }

    /// The journal, and the objects that were kept of what it names.
    fn gather(&self, path: &std::path::Path, kept: &mut Kept) -> Restored {
        let journaled = JournalFile::read(path);
        if !kept.is_empty() && journaled.sessions.is_empty() && journaled.leases.is_empty() {
            let (path, count) = (path.display(), kept.len());
            tracing::warn!(%path, count, "descriptors were kept, and the journal names no session and no lease: they end");
        }
        let mut restored = Restored { journaled, ..Restored::default() };
        let journaled = &restored.journaled;
        for (id, record) in &journaled.tenants {
            if let Some(generations) = self.adopt_tenant(record, kept) {
                restored.tenants.insert(*id, generations);
            }
        }
        for lease in journaled.leases.values() {
            match self.adopt_memory(lease, kept) {
                Ok(()) => drop(restored.memory.insert(lease.allocation)),
                Err(problem) => tracing::warn!(lease = %lease.id, %problem, "a lease is lost"),
            }
        }
        let has_socket = |record: &&SessionRecord| kept.contains_key(&record.socket);
        restored.sessions = journaled.sessions.values().filter(has_socket).map(|record| record.id).collect();
        for record in journaled.queue_pairs.values() {
            let ring = kept.get(&record.ring).and_then(|ring| ring.try_clone().ok());
            let ring_file = ring.as_ref().and_then(|ring| file_of(ring.as_fd()));
            let ended = ring.is_some_and(|ring| end_lost_ring(ring).is_ok());
            let tenant = journaled.sessions.get(&record.session).and_then(|s| journaled.tenants.get(&s.tenant));
            if let (true, Some(tenant)) = (ended, tenant) {
                let objects =
                    QueuePairObjects { info: lost_queue_pair(record, tenant), control: None, fds: None, ring_file };
                self.objects.insert_queue_pair(record.id, objects);
                restored.rings.insert(record.id);
            }
        }
        restored
    }

    /// The tenant's page with each generation that was ever shown ended; gives what its slots go on with.
    fn adopt_tenant(&self, record: &TenantRecord, kept: &mut Kept) -> Option<Vec<u64>> {
        let fd = kept.get(&record.page)?.try_clone().ok()?;
        let capacity = self.config.slots();
        let page = match GenerationWriter::adopt(fd) {
            Ok(page) if page.slots() == capacity => page,
            Ok(page) => {
                let (tenant, slots) = (record.id.0, page.slots());
                tracing::warn!(tenant, slots, capacity, "sessions of a tenant end: the number of its slots changed");
                return None;
            }
            Err(error) => {
                tracing::warn!(tenant = record.id.0, %error, "sessions of a tenant end: its generation page");
                return None;
            }
        };
        let shown: Vec<u64> = (0..capacity).map(|slot| page.current(slot).unwrap_or_default()).collect();
        let used = shown.iter().rposition(|generation| *generation != 0).map_or(0, |last| last + 1);
        if shown.iter().any(|generation| *generation > MOST_GENERATION) {
            tracing::warn!(tenant = record.id.0, "sessions of a tenant end: its generation page was written to");
            return None;
        }
        // One never shown is at 1, and one that was goes on with the next.
        let generations: Vec<u64> = shown.iter().take(used).map(|generation| generation + 1).collect();
        for (slot, (generation, shown)) in (0..).zip(generations.iter().zip(&shown)) {
            if *shown != 0 {
                page.set(slot, *generation).ok()?;
            }
        }
        let tenant = Tenant::new(SlotTable::restored(capacity, &generations), page);
        let _ = tenant.page_kept.set(());
        self.objects.insert_tenant(record.id, tenant);
        Some(generations)
    }

    fn adopt_memory(&self, lease: &LeaseRecord, kept: &mut Kept) -> Result<(), String> {
        let memory = kept.get(&lease.memory).ok_or("its memory was not kept")?;
        let memory = memory.try_clone().map_err(|error| error.to_string())?;
        let dma_buf =
            kept.get(&lease.dma_buf).map(OwnedFd::try_clone).transpose().map_err(|error| error.to_string())?;
        let (bytes, lane) = match &lease.place {
            PlaceRecord::Gpu(uuid) => {
                let backend = self.gpu_memory.as_ref().ok_or("there is no backend for gpu memory any more")?;
                let uuid = GpuUuid(uuid.clone());
                let gpu = self.state().core.host().gpu_by_uuid(&uuid).ok_or("its gpu is gone")?;
                let imported = backend.import(&uuid, lease.len_bytes, KeptMemory { memory, dma_buf });
                (Bytes::Gpu(imported.map_err(|error| error.to_string())?), Lane::Gpu(gpu))
            }
            PlaceRecord::Host(_) => {
                let adopted = HostMemory::adopt(memory, lease.len_bytes);
                (Bytes::Host(adopted.map_err(|errno| format!("its memory: {errno}"))?), Lane::Host)
            }
        };
        let memory = Memory::new(bytes, lane).kept_as([lease.memory, lease.dma_buf]);
        self.objects.insert_memory(lease.allocation, memory);
        Ok(())
    }
}

/// What is left to say of a queue pair that no HCA has any more.
fn lost_queue_pair(record: &QueuePairRecord, tenant: &TenantRecord) -> QueuePairInfo {
    let endpoint = Endpoint {
        qp_num: 0,
        port_num: 0,
        gid: Gid([0; 16]),
        gid_index: 0,
        lid: 0,
        psn: 0,
        mtu_bytes: 0,
        link_layer: LinkLayer::Ethernet,
    };
    QueuePairInfo {
        id: record.id,
        hca: record.hca.as_str().into(),
        port_num: 0,
        qp_num: 0,
        qp_type: QueuePairType::Rc,
        state: QueuePairState::Err,
        endpoint,
        send_depth: record.send_depth,
        recv_depth: record.recv_depth,
        max_inline_bytes: 0,
        tenant: TenantKey { uid: tenant.uid, scope: tenant.scope.as_str().into() },
    }
}
