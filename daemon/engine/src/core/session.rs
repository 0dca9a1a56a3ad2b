//! Sessions: opening, proof of GPUs, and the order in which one ends.
//!
//! An ended session first loses its waiting calls, then its queue pairs, and only when those are
//! destroyed its holds: no queue pair may outlive the registrations that its requests use.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::pool::PoolKey;
use super::record::Record;
use super::{AllocationId, Answer, CallId, Core, Effect, GpuIndex, NewSession, Place, TenantId, WarmUp, host};
use crate::config::GpuProof;
use crate::error::EngineError;
use crate::ids::{LeaseId, MemoryId, QueuePairId, RegistrationId, SessionId, TokenDigest};
use crate::keep::Name;
use crate::session::SessionEvent;
use crate::table::Ids;

/// One session.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) tenant: TenantId,
    pub(crate) admin: bool,
    pub(super) proven: BTreeSet<GpuIndex>,
    pub(crate) holds: Ids<LeaseId>,
    /// Memory that it was lent, until that is freed: its client may have it mapped.
    pub(super) lent: Ids<AllocationId>,
    pub(crate) queue_pairs: BTreeSet<QueuePairId>,
    pub(crate) waiting: BTreeSet<CallId>,
    pub(crate) memories: BTreeSet<MemoryId>,
    pub(crate) registrations: BTreeSet<RegistrationId>,
    /// Parts of them all.
    pub(crate) parts: usize,
    /// By which its token is known.
    pub(super) token: TokenDigest,
    /// Under which its socket is kept.
    pub(super) socket: Option<Name>,
    /// Its client is gone; only its queue pairs are still being destroyed.
    closing: bool,
}

impl Session {
    pub(super) fn new(tenant: TenantId, admin: bool, token: TokenDigest, socket: Option<Name>) -> Self {
        Self {
            tenant,
            admin,
            proven: BTreeSet::new(),
            holds: Ids::default(),
            lent: Ids::default(),
            queue_pairs: BTreeSet::new(),
            waiting: BTreeSet::new(),
            memories: BTreeSet::new(),
            registrations: BTreeSet::new(),
            parts: 0,
            token,
            socket,
            closing: false,
        }
    }
}

/// Descriptors that a buffer (memory, its dma-buf, one on its way to a client), a queue pair (ring, doorbell, one on
/// its way) or a session (socket, pidfd, generation page) keeps open at the most.
const DESCRIPTORS_PER_OBJECT: u64 = 3;

/// Descriptors of one buffer (memory, dma-buf) or session (socket, its tenant's page) that are kept for the next daemon.
const KEPT_PER_OBJECT: u64 = 2;

impl Core {
    pub(super) fn open_session(&mut self, call: CallId, new: NewSession) {
        if let Err(error) = self.may_open_session(&new) {
            return self.answer(call, Err(error));
        }
        let tenant = self.tenant_of(&new.tenant, new.quota);
        let session = SessionId(self.number());
        let Some(entry) = self.tenants.get_mut(&tenant) else { return self.unexpected() };
        let first = !entry.is_alive();
        entry.sessions += 1;
        entry.ending = false;
        let socket = self.name();
        self.sessions.insert(session, Session::new(tenant, new.admin, new.token, socket));
        self.record_session(session);
        self.counters.sessions_opened += 1;
        self.answer(call, Ok(Answer::Session(session, tenant)));
        if first {
            new.warm_up.iter().for_each(|warm_up| self.warm_up(tenant, warm_up));
        }
    }

    fn may_open_session(&self, new: &NewSession) -> Result<(), EngineError> {
        if self.shutting_down {
            return Err(EngineError::ShuttingDown);
        }
        let limits = &self.settings.limits;
        check_label("client_name", &new.client_name, limits.max_label_bytes)?;
        let limit = |reason, whom, limit: u32, used: u64| {
            let what = "the limit on sessions";
            Err(EngineError::Limit { reason, what, whom, limit: u64::from(limit), used, asked: 1 })
        };
        self.check_descriptors()?;
        if self.sessions.len() >= limits.max_sessions as usize {
            return limit("LIMIT_SESSIONS", "the daemon", limits.max_sessions, self.sessions.len() as u64);
        }
        let open = self.tenant_ids.get(&new.tenant).and_then(|id| self.tenants.get(id)).map_or(0, |t| t.sessions);
        if open >= new.quota.max_sessions {
            return limit("QUOTA_SESSIONS", "the tenant", new.quota.max_sessions, u64::from(open));
        }
        Ok(())
    }

    /// Refuses what would take descriptors that others need to connect.
    pub(super) fn check_descriptors(&self) -> Result<(), EngineError> {
        let kept = (self.journaling.names.len() as u64, u64::from(self.settings.limits.max_kept_descriptors));
        if kept.0 + KEPT_PER_OBJECT > kept.1 {
            let (reason, what, whom) = ("LIMIT_DESCRIPTORS", "the limit on kept descriptors", "the daemon");
            let (used, limit) = kept;
            return Err(EngineError::Limit { reason, what, whom, limit, used, asked: KEPT_PER_OBJECT });
        }
        let limit = u64::from(self.settings.limits.max_descriptors);
        let objects = self.allocations.len() + self.queue_pairs.len() + self.sessions.len() + self.adopted.len();
        let (used, asked) = (objects as u64 * DESCRIPTORS_PER_OBJECT, DESCRIPTORS_PER_OBJECT);
        if used + asked <= limit {
            return Ok(());
        }
        let (reason, what, whom) = ("LIMIT_DESCRIPTORS", "the limit on open descriptors", "the daemon");
        Err(EngineError::Limit { reason, what, whom, limit, used, asked })
    }

    /// Makes buffers ready that the configuration names.
    fn warm_up(&mut self, tenant: TenantId, warm_up: &WarmUp) {
        let (Some(gpu), Some((_, granularity))) = (self.host.gpu(warm_up.gpu), self.host.gpu_memory) else { return };
        let Some(len_bytes) = host::size_class(warm_up.size_bytes, granularity) else { return };
        if gpu.hcas.is_empty() || len_bytes > self.settings.limits.max_lease_bytes {
            return;
        }
        let hcas = Arc::clone(&gpu.hcas);
        let key = Arc::new(PoolKey { place: Place::Gpu(warm_up.gpu), len_bytes, hcas, signal: false });
        self.warm_pool(tenant, &key, warm_up.count);
    }

    pub(super) fn prove_gpus(&mut self, call: CallId, id: SessionId, gpus: &[GpuIndex]) {
        let answer = match self.live_session(id) {
            Ok(session) => {
                session.proven.extend(gpus);
                self.record_session(id);
                Ok(Answer::Done)
            }
            Err(error) => Err(error),
        };
        self.answer(call, answer);
    }

    /// Whether the session may lease on the GPU.
    pub(super) fn check_proof(&self, session: &Session, gpu: GpuIndex) -> Result<(), EngineError> {
        let Some(entry) = self.host.gpu(gpu) else { return Ok(()) };
        if self.settings.gpu_proof == GpuProof::None || session.proven.contains(&gpu) {
            return Ok(());
        }
        let gpu = entry.planned.uuid.0.clone();
        match entry.has_node {
            true => Err(EngineError::GpuNotProven { gpu }),
            false => Err(EngineError::GpuWithoutNode { gpu }),
        }
    }

    /// The session, unless it has ended.
    pub(super) fn live_session(&mut self, session: SessionId) -> Result<&mut Session, EngineError> {
        self.sessions.get_mut(&session).filter(|session| !session.closing).ok_or(EngineError::SessionEnded)
    }

    /// The session, unless it has ended.
    pub(super) fn session(&self, session: SessionId) -> Result<&Session, EngineError> {
        self.sessions.get(&session).filter(|session| !session.closing).ok_or(EngineError::SessionEnded)
    }

    /// Has those who may have it mapped let go of memory that is being freed.
    pub(super) fn tell_freed(&mut self, allocation: AllocationId) {
        let lent = self.sessions.iter_mut().filter_map(|(id, session)| session.lent.remove(&allocation).then_some(*id));
        let sessions: Vec<SessionId> = lent.collect();
        for session in sessions {
            self.effect(Effect::MemoryGone { session, allocation });
        }
    }

    /// The daemon ends a session: its client is told, and the server closes the socket.
    pub(super) fn end_session(&mut self, session: SessionId, reason: &'static str, message: &str) {
        let event = SessionEvent::Ended { reason, message: message.to_owned() };
        self.effect(Effect::TellSession { session, event });
        self.close_session(session);
    }

    pub(super) fn close_session(&mut self, id: SessionId) {
        let Ok(session) = self.live_session(id) else { return };
        session.closing = true;
        let waiting = std::mem::take(&mut session.waiting);
        let socket = session.socket.take();
        let queue_pairs: Vec<QueuePairId> = session.queue_pairs.iter().copied().collect();
        self.record(Record::SessionGone(id));
        self.unkeep(socket);
        for call in waiting {
            self.stop_waiting(call, EngineError::SessionEnded);
        }
        for queue_pair in queue_pairs {
            self.end_queue_pair(queue_pair);
        }
        self.finish_session(id);
    }

    /// Drops the holds of a session that is closing, once its queue pairs are gone.
    pub(super) fn finish_session(&mut self, id: SessionId) {
        let done = self.sessions.get(&id).is_some_and(|session| session.closing && session.queue_pairs.is_empty());
        if !done {
            return;
        }
        let Some(session) = self.sessions.remove(&id) else { return };
        if let Some(tenant) = self.tenants.get_mut(&session.tenant) {
            tenant.sessions -= 1;
        }
        self.end_registrations(session.registrations);
        for memory in session.memories {
            self.end_memory(memory);
        }
        for lease in session.holds.iter() {
            self.drop_hold(lease, id, "SESSION_ENDED");
        }
        self.effect(Effect::SessionGone { session: id });
        self.settle_tenant(session.tenant);
    }
}

/// Checks the length of a text that is shown in lists.
pub(super) fn check_label(what: &'static str, text: &str, max_bytes: u32) -> Result<(), EngineError> {
    if text.len() > max_bytes as usize {
        let problem = format!("{} bytes long, at most {max_bytes} are allowed", text.len());
        return Err(EngineError::BadArgument { what, problem });
    }
    Ok(())
}
