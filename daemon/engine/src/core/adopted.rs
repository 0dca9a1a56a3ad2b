//! Adopted memory: a client's own, known by a number, and gone only when no HCA reaches it.

use std::collections::BTreeMap;

use super::region::Source;
use super::{Answer, CallId, Core, Effect, GpuIndex, Job, RegionId, TenantId};
use crate::error::EngineError;
use crate::ids::{MemoryId, SessionId};
use crate::registration::AdoptedKind;

/// One piece of adopted memory.
#[derive(Debug)]
pub(crate) struct Adopted {
    pub(crate) tenant: TenantId,
    /// Whose end is its end.
    pub(crate) session: SessionId,
    pub(crate) kind: AdoptedKind,
    pub(crate) len_bytes: u64,
    pub(crate) gpu: Option<GpuIndex>,
    /// Regions of it, in whatever stage.
    pub(crate) regions: u32,
    /// Why one of them could not be ended.
    pub(super) tainted: Option<String>,
    /// Nothing new is registered of it.
    pub(crate) ending: bool,
    /// Its descriptors are being closed.
    closing: bool,
    /// Calls that wait for its end.
    waiters: Vec<CallId>,
}

/// What the runtime found out about memory to be adopted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NewMemory {
    pub(crate) kind: AdoptedKind,
    pub(crate) len_bytes: u64,
    pub(crate) gpu: Option<String>,
}

impl Core {
    pub(super) fn adopt(&mut self, call: CallId, session: SessionId, new: &NewMemory) {
        let gpu = match self.check_adopt(session, new) {
            Ok(gpu) => gpu,
            Err(error) => return self.answer(call, Err(error)),
        };
        let id = MemoryId(self.number());
        let Ok(entry) = self.live_session(session) else { return self.unexpected() };
        entry.memories.insert(id);
        let tenant = entry.tenant;
        let Some(owner) = self.tenants.get_mut(&tenant) else { return self.unexpected() };
        owner.adopted_bytes += new.len_bytes;
        owner.memories += 1;
        // What lies idle gives way to it.
        self.give_up_oldest_of(tenant, 0, 0);
        let (kind, len_bytes) = (new.kind, new.len_bytes);
        let adopted = Adopted {
            tenant,
            session,
            kind,
            len_bytes,
            gpu,
            regions: 0,
            tainted: None,
            ending: false,
            closing: false,
            waiters: Vec::new(),
        };
        self.adopted.insert(id, adopted);
        self.counters.memories_adopted += 1;
        self.answer(call, Ok(Answer::Adopted(id)));
    }

    fn check_adopt(&self, id: SessionId, new: &NewMemory) -> Result<Option<GpuIndex>, EngineError> {
        let session = self.session(id)?;
        if self.shutting_down {
            return Err(EngineError::ShuttingDown);
        }
        let gpu = new.gpu.as_deref().map(|name| self.host.find_gpu(name)).transpose()?;
        let most = self.settings.cache.max_memories_per_session;
        if session.memories.len() >= most as usize {
            let (what, whom, used) = ("the limit on adopted memory", "the session", session.memories.len() as u64);
            let limit = u64::from(most);
            return Err(EngineError::Limit { reason: "LIMIT_MEMORIES", what, whom, limit, used, asked: 1 });
        }
        self.check_descriptors()?;
        let tenant = self.tenants.get(&session.tenant).ok_or(EngineError::SessionEnded)?;
        tenant.may_promise(new.len_bytes, 0, self.settings.limits.registration_slots)?;
        Ok(gpu)
    }

    /// The client lets go of memory, or has freed it: whatever is registered of it ends, whoever holds it.
    pub(super) fn disown(&mut self, call: CallId, session: SessionId, id: MemoryId) {
        if let Err(error) = self.session(session) {
            return self.answer(call, Err(error));
        }
        // Memory that is ending already: a second one waits as well.
        let Some(adopted) = self.adopted.get_mut(&id).filter(|adopted| adopted.session == session) else {
            return self.answer(call, Err(EngineError::UnknownMemory { memory: id.0 }));
        };
        adopted.waiters.push(call);
        self.disowning += 1;
        self.end_memory(id);
    }

    /// Ends adopted memory: no registration of it is found, held or made from here on.
    pub(super) fn end_memory(&mut self, id: MemoryId) {
        let Some(adopted) = self.adopted.get_mut(&id) else { return };
        if std::mem::replace(&mut adopted.ending, true) {
            return;
        }
        let session = adopted.session;
        if let Some(session) = self.sessions.get_mut(&session) {
            session.memories.remove(&id);
        }
        self.end_source(Source::Adopted(id), &EngineError::UnknownMemory { memory: id.0 });
        self.close_memory(id);
    }

    /// Lets go of the memory once no region of it is left.
    pub(super) fn close_memory(&mut self, id: MemoryId) {
        let Some(adopted) = self.adopted.get_mut(&id) else { return };
        if adopted.ending && adopted.regions == 0 && !std::mem::replace(&mut adopted.closing, true) {
            self.effect(Effect::Start(Job::CloseMemory { memory: id }));
        }
    }

    pub(super) fn memory_closed(&mut self, id: MemoryId) {
        let Some(adopted) = self.adopted.remove(&id) else { return self.unexpected() };
        if let Some(tenant) = self.tenants.get_mut(&adopted.tenant) {
            tenant.adopted_bytes -= adopted.len_bytes;
            tenant.memories -= 1;
        }
        let answer = match adopted.tainted {
            None => Ok(Answer::Done),
            Some(problem) => {
                let problem =
                    format!("memory {id} is given up, but an hca may reach it until gdrd restarts: {problem}");
                Err(EngineError::Driver { problem })
            }
        };
        for call in adopted.waiters {
            self.disowning -= 1;
            self.answer(call, answer.clone());
        }
        self.feed(adopted.tenant);
        self.settle_tenant(adopted.tenant);
    }

    /// The GPU that was named for the memory.
    pub(crate) fn gpu_of_memory(&self, id: MemoryId) -> Option<gdrd_hal::GpuUuid> {
        let gpu = self.host.gpu(self.adopted.get(&id)?.gpu?)?;
        Some(gpu.planned.uuid.clone())
    }

    /// Whether the memory is known; the runtime keeps no descriptor of one that is not.
    pub(crate) fn has_memory(&self, id: MemoryId) -> bool {
        self.adopted.contains_key(&id)
    }

    /// Bytes of a GPU's BAR1 that regions keep mapped: the exporter maps a dma-buf once, however many regions it has
    /// (nv-dmabuf.c of NVIDIA's open kernel modules).
    pub(super) fn bar1_bytes(&self, gpu: GpuIndex) -> u64 {
        let adopted = self.adopted.values().filter(|a| a.gpu == Some(gpu) && a.regions > 0);
        let adopted: u64 = adopted.filter(|a| a.kind == AdoptedKind::DmaBuf).map(|a| a.len_bytes).sum();
        let of_gpu = |a: &&super::Allocation| a.place == super::Place::Gpu(gpu) && !a.registrations.is_empty();
        adopted + self.allocations.values().filter(of_gpu).map(|a| a.len_bytes).sum::<u64>()
    }

    /// Idle regions whose end lets BAR1 of the GPU go: those of memory that has no others.
    pub(super) fn idle_on_bar1(&self, gpu: GpuIndex) -> Vec<RegionId> {
        let mut idle: BTreeMap<MemoryId, Vec<RegionId>> = BTreeMap::new();
        for (id, region) in self.regions.iter().filter(|(_, region)| region.idle.is_some()) {
            if let Source::Adopted(memory) = region.key.source {
                idle.entry(memory).or_default().push(id);
            }
        }
        let lets_go = |memory: &MemoryId, idle: &Vec<RegionId>| {
            let adopted = self.adopted.get(memory);
            adopted.is_some_and(|a| {
                a.gpu == Some(gpu) && a.kind == AdoptedKind::DmaBuf && a.regions as usize == idle.len()
            })
        };
        idle.into_iter().filter(|(memory, idle)| lets_go(memory, idle)).flat_map(|(_, idle)| idle).collect()
    }
}
