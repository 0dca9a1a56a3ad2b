//! Queue pairs: creation, connection and the order of their end.

use gdrd_hal::{Endpoint, QueuePairState, QueuePairType};

use super::record::Record;
use super::shortage::error_of;
use super::{Answer, CallId, Core, Effect, Failure, FailureKind, HcaIndex, Job, NewQueuePair, TenantId};
use crate::error::EngineError;
use crate::ids::{QueuePairId, SessionId};
use crate::keep::Name;
use crate::queue_pair::QueuePairRequest;
use crate::session::SessionEvent;

/// What is being done to a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Creating,
    Idle,
    Connecting,
    Destroying,
}

/// One queue pair.
#[derive(Debug)]
pub(crate) struct QueuePair {
    pub(crate) tenant: TenantId,
    pub(super) session: SessionId,
    pub(crate) hca: HcaIndex,
    /// Of sends and receives.
    pub(super) depths: (u32, u32),
    /// Under which its ring is kept.
    pub(super) ring: Option<Name>,
    stage: Stage,
    pub(crate) state: QueuePairState,
    /// The call that made or connects it, until it is answered.
    call: Option<CallId>,
    /// Why it failed while it was being made.
    failed: Option<String>,
    /// To be destroyed as soon as what is being done to it is done.
    ending: bool,
    /// Calls to be answered once it is gone.
    destroyers: Vec<CallId>,
}

impl QueuePair {
    /// One of an earlier daemon: its requests have ended, with what outcome nobody knows.
    pub(super) fn lost(tenant: TenantId, session: SessionId, hca: HcaIndex, depths: (u32, u32), ring: Name) -> Self {
        Self {
            tenant,
            session,
            hca,
            depths,
            ring: Some(ring),
            stage: Stage::Idle,
            state: QueuePairState::Err,
            call: None,
            failed: None,
            ending: false,
            destroyers: Vec::new(),
        }
    }

    /// Whether lists show it.
    pub(crate) fn is_shown(&self) -> bool {
        self.stage != Stage::Creating && !self.ending
    }

    /// Whether it is being made for that call.
    pub(crate) fn is_made_for(&self, call: CallId) -> bool {
        self.stage == Stage::Creating && self.call == Some(call)
    }
}

impl Core {
    pub(super) fn create_queue_pair(&mut self, call: CallId, session: SessionId, request: &QueuePairRequest) {
        let new = match self.check_queue_pair(session, request) {
            Ok(new) => new,
            Err(error) => return self.answer(call, Err(error)),
        };
        let queue_pair = QueuePairId(self.number());
        let ring = self.name();
        let Ok(entry) = self.live_session(session) else { return self.unexpected() };
        entry.queue_pairs.insert(queue_pair);
        let tenant = entry.tenant;
        if let Some(tenant) = self.tenants.get_mut(&tenant) {
            tenant.queue_pairs += 1;
        }
        self.queue_pairs.insert(
            queue_pair,
            QueuePair {
                tenant,
                session,
                hca: new.hca,
                depths: (new.send_depth, new.recv_depth),
                ring,
                stage: Stage::Creating,
                state: QueuePairState::Reset,
                call: Some(call),
                failed: None,
                ending: false,
                destroyers: Vec::new(),
            },
        );
        self.effect(Effect::Start(Job::CreateQueuePair { queue_pair, tenant, session, new, keep: ring }));
    }

    fn check_queue_pair(&self, id: SessionId, request: &QueuePairRequest) -> Result<NewQueuePair, EngineError> {
        let session = self.session(id)?;
        if self.shutting_down {
            return Err(EngineError::ShuttingDown);
        }
        let hca = self.queue_pair_hca(request)?;
        self.host.usable_hca(hca)?;
        if !matches!(request.qp_type, QueuePairType::Rc | QueuePairType::Ud) {
            let problem = format!("queue pair type {:?}", request.qp_type);
            return Err(EngineError::Unsupported { problem });
        }
        let limits = &self.settings.limits;
        let depth = |what, asked: u32| match asked {
            0 => Ok(limits.default_queue_depth.next_power_of_two()),
            _ if asked <= limits.max_queue_depth => Ok(asked.next_power_of_two()),
            _ => {
                let problem = format!("{asked} is not within 1 to {}", limits.max_queue_depth);
                Err(EngineError::BadArgument { what, problem })
            }
        };
        let (send_depth, recv_depth) =
            (depth("send_depth", request.send_depth)?, depth("recv_depth", request.recv_depth)?);
        let tenant = self.tenants.get(&session.tenant).ok_or(EngineError::SessionEnded)?;
        let limits = [
            ("LIMIT_QUEUE_PAIRS", "the session", limits.max_queue_pairs_per_session, session.queue_pairs.len() as u64),
            ("QUOTA_QUEUE_PAIRS", "the tenant", tenant.quota.max_queue_pairs, u64::from(tenant.queue_pairs)),
        ];
        for (reason, whom, limit, used) in limits {
            let limit = u64::from(limit);
            if used >= limit {
                let what = "the limit on queue pairs";
                return Err(EngineError::Limit { reason, what, whom, limit, used, asked: 1 });
            }
        }
        self.check_descriptors()?;
        let (port_num, qp_type) = (request.port_num, request.qp_type);
        Ok(NewQueuePair { hca, port_num, qp_type, send_depth, recv_depth })
    }

    fn queue_pair_hca(&self, request: &QueuePairRequest) -> Result<HcaIndex, EngineError> {
        if !request.hca.is_empty() {
            return self.host.find_hca(&request.hca);
        }
        if request.gpu.is_empty() {
            let problem = "empty, and so is gpu; one of them is needed".to_owned();
            return Err(EngineError::BadArgument { what: "hca", problem });
        }
        let gpu = self.host.find_gpu(&request.gpu)?;
        let gpu = self.host.gpu(gpu).ok_or_else(|| EngineError::UnknownGpu { gpu: request.gpu.clone() })?;
        gpu.hcas.first().copied().ok_or_else(|| EngineError::Absent {
            what: "hca",
            problem: format!("{} is paired with none that this daemon serves", gpu.planned.name),
        })
    }

    pub(super) fn queue_pair_created(&mut self, id: QueuePairId, result: Result<(), Failure>) {
        let Some(entry) = self.queue_pairs.get_mut(&id).filter(|entry| entry.stage == Stage::Creating) else {
            return self.unexpected();
        };
        let call = entry.call.take();
        match result {
            Ok(()) => {
                entry.stage = Stage::Idle;
                self.counters.queue_pairs_created += 1;
                match (call, entry.failed.take()) {
                    (Some(call), None) => {
                        entry.state = QueuePairState::Init;
                        self.record_queue_pair(id);
                        self.answer(call, Ok(Answer::QueuePair(id)));
                    }
                    (call, failed) => {
                        let lost = self.host.usable_hca(entry.hca).err();
                        let error = lost.or(failed.map(|problem| EngineError::Driver { problem }));
                        if let (Some(call), Some(error)) = (call, error) {
                            self.answer(call, Err(error));
                        }
                        self.end_queue_pair(id);
                    }
                }
            }
            Err(failure) => {
                if let Some(call) = call {
                    self.answer(call, Err(call_error("queue pair", &failure)));
                }
                self.forget_queue_pair(id);
                self.note_hca_lost(&failure);
            }
        }
    }

    /// The queue pair, if it is the session's tenant's and not on its way out.
    fn queue_pair_of(&mut self, session: SessionId, id: QueuePairId) -> Result<&mut QueuePair, EngineError> {
        let tenant = self.session(session)?.tenant;
        let unknown = EngineError::UnknownQueuePair { queue_pair: id.0 };
        self.queue_pairs.get_mut(&id).filter(|entry| entry.tenant == tenant && entry.is_shown()).ok_or(unknown)
    }

    pub(super) fn connect_queue_pair(&mut self, call: CallId, session: SessionId, id: QueuePairId, remote: Endpoint) {
        let checked = self.queue_pair_of(session, id).and_then(|entry| {
            if entry.stage != Stage::Idle || entry.state != QueuePairState::Init {
                let state = if entry.stage == Stage::Connecting { "connecting" } else { entry.state.name() };
                return Err(EngineError::QueuePairState { queue_pair: id.0, state, needed: "INIT" });
            }
            entry.stage = Stage::Connecting;
            entry.call = Some(call);
            Ok(entry.hca)
        });
        match checked {
            Ok(hca) => self.effect(Effect::Start(Job::ConnectQueuePair { queue_pair: id, hca, remote })),
            Err(error) => self.answer(call, Err(error)),
        }
    }

    pub(super) fn queue_pair_connected(&mut self, id: QueuePairId, result: Result<(), Failure>) {
        let Some(entry) = self.queue_pairs.get_mut(&id).filter(|entry| entry.stage == Stage::Connecting) else {
            return self.unexpected();
        };
        entry.stage = Stage::Idle;
        let call = entry.call.take();
        let ending = entry.ending;
        let failed = entry.state == QueuePairState::Err;
        let answer = match result {
            Ok(()) if failed => Err(EngineError::QueuePairState { queue_pair: id.0, state: "ERR", needed: "INIT" }),
            Ok(()) => {
                entry.state = QueuePairState::Rts;
                Ok(Answer::Done)
            }
            // The driver refused before it changed anything: another endpoint may do, or the same one later.
            Err(failure) if matches!(failure.kind, FailureKind::Invalid | FailureKind::Unreachable) => {
                Err(call_error("remote", &failure))
            }
            Err(failure) => {
                entry.state = QueuePairState::Err;
                self.note_hca_lost(&failure);
                Err(call_error("remote", &failure))
            }
        };
        if let Some(call) = call {
            self.answer(call, answer);
        }
        if ending {
            self.end_queue_pair(id);
        }
    }

    pub(super) fn destroy_queue_pair(&mut self, call: CallId, session: SessionId, id: QueuePairId) {
        match self.queue_pair_of(session, id) {
            Ok(entry) => {
                entry.destroyers.push(call);
                self.end_queue_pair(id);
            }
            Err(error) => self.answer(call, Err(error)),
        }
    }

    pub(super) fn undo_queue_pair(&mut self, id: QueuePairId) {
        if self.queue_pairs.contains_key(&id) {
            self.end_queue_pair(id);
        }
    }

    /// Destroys a queue pair, now or as soon as what is being done to it is done.
    pub(super) fn end_queue_pair(&mut self, id: QueuePairId) {
        let Some(entry) = self.queue_pairs.get_mut(&id) else { return };
        entry.ending = true;
        let call = entry.call.take();
        if entry.stage == Stage::Idle {
            entry.stage = Stage::Destroying;
            self.effect(Effect::Start(Job::DestroyQueuePair { queue_pair: id }));
        }
        if let Some(call) = call {
            self.answer(call, Err(EngineError::Cancelled));
        }
    }

    pub(super) fn queue_pair_destroyed(&mut self, id: QueuePairId) {
        if self.queue_pairs.get(&id).is_none_or(|entry| entry.stage != Stage::Destroying) {
            return self.unexpected();
        }
        self.counters.queue_pairs_destroyed += 1;
        self.forget_queue_pair(id);
    }

    fn forget_queue_pair(&mut self, id: QueuePairId) {
        let Some(entry) = self.queue_pairs.remove(&id) else { return };
        self.record(Record::QueuePairGone(id));
        self.unkeep(entry.ring);
        for call in entry.destroyers {
            self.answer(call, Ok(Answer::Done));
        }
        if let Some(tenant) = self.tenants.get_mut(&entry.tenant) {
            tenant.queue_pairs -= 1;
        }
        if let Some(session) = self.sessions.get_mut(&entry.session) {
            session.queue_pairs.remove(&id);
        }
        self.finish_session(entry.session);
        self.settle_tenant(entry.tenant);
    }

    pub(super) fn queue_pair_failed(&mut self, id: QueuePairId, message: String) {
        // One that is being destroyed fails as a matter of course.
        let Some(entry) = self.queue_pairs.get_mut(&id).filter(|entry| !entry.ending) else { return };
        if entry.state == QueuePairState::Err {
            return;
        }
        entry.state = QueuePairState::Err;
        self.counters.queue_pairs_failed += 1;
        if entry.stage == Stage::Creating {
            // Its client does not know it yet: the answer tells.
            entry.failed = Some(message);
            return;
        }
        let session = entry.session;
        let event = SessionEvent::QueuePairFailed { queue_pair: id, message };
        self.effect(Effect::TellSession { session, event });
    }

    fn note_hca_lost(&mut self, failure: &Failure) {
        if let (FailureKind::Lost, Some(hca)) = (failure.kind, failure.hca) {
            self.hca_gone(hca, failure.message.clone());
        }
    }
}

/// The error of a failed queue pair job: what the driver calls invalid came from the caller.
fn call_error(what: &'static str, failure: &Failure) -> EngineError {
    match failure.kind {
        FailureKind::Invalid => EngineError::BadArgument { what, problem: failure.message.clone() },
        _ => error_of(failure),
    }
}
