//! The public handle.

use std::collections::BTreeMap;
use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use futures_channel::{mpsc, oneshot};
use gdrd_hal::{Endpoint, GpuFacts, GpuMemory, GpuUuid, Hca};

use crate::call::{Call, Undo};
use crate::config::EngineConfig;
use crate::core::{CallId, Input};
use crate::direct::DirectGrant;
use crate::error::EngineError;
use crate::gpu_memory::GpuMemoryUse;
use crate::ids::{DeviceNumber, Generation, LeaseId, MemoryId, QueuePairId, RegistrationId, SessionId, Token};
use crate::keep::Continuity;
use crate::lease::{AcquireRequest, LeaseEvent, LeaseGrant, LeaseInfo, LeasePage, MemoryKind};
use crate::peer::Peer;
use crate::plan::HostPlan;
use crate::probe::Probed;
use crate::queue_pair::{QueuePairGrant, QueuePairPage, QueuePairRequest};
use crate::registration::{
    AdoptRequest, AdoptedMemory, RegisterRequest, RegisteredRange, RegistrationGrant, RegistrationPage,
};
use crate::runtime::{Answered, HeldBack, Runtime};
use crate::session::{SessionOpened, SessionResumed, Viewer};
use crate::stats::Stat;

/// What the host has.
pub struct Hardware {
    /// GPU memory, where there is a backend for it.
    pub gpu_memory: Option<Arc<dyn GpuMemory>>,
    /// How clients map that backend's memory.
    pub gpu_memory_kind: MemoryKind,
    /// What the GPU driver tells, where there is one: device nodes and health.
    pub gpu_facts: Option<Arc<dyn GpuFacts>>,
    /// RDMA devices.
    pub hcas: Vec<Arc<dyn Hca>>,
    /// GPUs and their pairing.
    pub plan: HostPlan,
}

impl fmt::Debug for Hardware {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hcas: Vec<&str> = self.hcas.iter().map(|hca| hca.name()).collect();
        f.debug_struct("Hardware")
            .field("gpu_memory", &self.gpu_memory.is_some())
            .field("hcas", &hcas)
            .field("plan", &self.plan)
            .finish()
    }
}

/// The engine. Cheap to clone; all clones are one engine, which shuts down with the last.
#[derive(Clone)]
pub struct Engine {
    running: Arc<Running>,
}

/// Shuts the runtime down when the last handle goes: its own threads keep it alive.
struct Running(Arc<Runtime>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.shutdown();
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine").field("config", self.config()).finish_non_exhaustive()
    }
}

impl Engine {
    /// Starts an engine on this hardware. Nothing is allocated or opened on it before it is needed.
    ///
    /// # Errors
    /// `BadArgument` for a configuration out of range; `Internal` when a thread cannot be started.
    pub fn start(config: EngineConfig, hardware: Hardware) -> Result<Self, EngineError> {
        let runtime = Runtime::start(config, hardware, None)?;
        Ok(Self { running: Arc::new(Running(runtime)) })
    }

    /// Starts an engine that takes up what an earlier daemon left, and keeps what it has for the next one. Returns once
    /// the leases that it took up are registered again, with fresh keys; what cannot be registered is revoked. What was
    /// kept and belongs to nothing is closed. Blocks on drivers, at most about [`crate::Timeouts::restore`].
    ///
    /// # Errors
    /// As [`Engine::start`].
    pub fn take_up(
        config: EngineConfig,
        hardware: Hardware,
        continuity: Continuity,
    ) -> Result<(Self, Vec<SessionResumed>), EngineError> {
        let Continuity { keeper, journal, kept } = continuity;
        let runtime = Runtime::start(config, hardware, Some(keeper))?;
        let engine = Self { running: Arc::new(Running(Arc::clone(&runtime))) };
        Ok((engine, runtime.restore(journal, kept)))
    }

    /// Whether anything is kept for the next daemon.
    #[must_use]
    pub fn keeps(&self) -> bool {
        self.runtime().keeps()
    }

    /// Writes the files for the next daemon anew, as far as somebody has deleted them or there was no room: the journal, and which
    /// GPUs are drained. Blocks on the file system. What becomes of the journal is told by `gdrd_journal_kept` alone.
    ///
    /// # Errors
    /// `NotKept`, where the drains cannot be written.
    pub fn restore_files(&self) -> Result<(), EngineError> {
        self.runtime().restore_files()
    }

    /// Has the socket of a session just opened kept for the next daemon. Returns once it is; blocks on the keeper. Does
    /// nothing where nothing is kept.
    pub fn keep_session(&self, session: SessionId, socket: BorrowedFd<'_>) {
        self.runtime().keep_session(session, socket);
    }

    /// Goes on with a session of an earlier daemon, for the peer that its socket names now.
    ///
    /// # Errors
    /// `NotAllowed`, `OpaquePeer`, `SessionEnded`.
    pub fn resume_session(&self, session: SessionId, peer: &Peer) -> Result<(), EngineError> {
        self.runtime().resume_session(session, peer)
    }

    /// Ends every session, gives back everything and joins the engine's threads. Blocks until that is done, at most
    /// about [`crate::Timeouts::shutdown`]. Does nothing the second time.
    pub fn shutdown(&self) {
        self.runtime().shutdown();
    }

    pub(crate) fn runtime(&self) -> &Arc<Runtime> {
        &self.running.0
    }

    /// A call that is answered at once with nothing but success.
    fn done(&self, input: impl FnOnce(CallId) -> Input) -> Result<(), EngineError> {
        self.runtime().ask(input).map(|_| ())
    }

    /// A call that may be answered later.
    fn call<T>(&self, pick: fn(Answered) -> Option<T>, input: impl FnOnce(CallId) -> Input) -> Call<T> {
        let (sender, receiver) = oneshot::channel();
        match self.runtime().ask_later(sender, input) {
            (_, Some(answer)) => Call::ready(answer.and_then(|answer| {
                pick(answer).ok_or_else(|| EngineError::Internal { problem: "a call got another's answer".into() })
            })),
            (call, None) => {
                let runtime = Arc::clone(self.runtime());
                Call::later(receiver, pick, Undo::new(move || runtime.cancel(call)))
            }
        }
    }

    /// Opens a session for a peer.
    ///
    /// # Errors
    /// `NotAllowed`, `OpaquePeer`, `Limit`, `BadArgument` (name too long), `ShuttingDown`.
    pub fn open_session(&self, peer: Peer, client_name: &str) -> Result<SessionOpened, EngineError> {
        self.runtime().open_session(&peer, client_name)
    }

    /// Ends a session: its calls are cancelled, its queue pairs destroyed, its holds dropped. Does nothing when it
    /// has ended already. `reason` goes to the log.
    pub fn close_session(&self, session: SessionId, reason: &str) {
        tracing::info!(%session, reason, "session closed");
        self.runtime().close_session(session);
    }

    /// The session that a token proves, for a caller of that uid.
    ///
    /// # Errors
    /// `BadToken`.
    pub fn session_of_token(&self, token: &Token, uid: u32) -> Result<SessionId, EngineError> {
        self.runtime().session_of_token(token, uid)
    }

    /// Notes that the session holds open fds of these device nodes; answers with the GPUs they are.
    ///
    /// # Errors
    /// `NotAGpu` for the first number that is none (then nothing is noted), `SessionEnded`.
    pub fn prove_gpus(&self, session: SessionId, nodes: &[DeviceNumber]) -> Result<Vec<GpuUuid>, EngineError> {
        self.runtime().prove_gpus(session, nodes)
    }

    /// Leases a buffer. Warm, the answer is there at once.
    ///
    /// # Errors
    /// `BadArgument`, `UnknownGpu`, `UnknownHca`, `GpuNotProven`, `GpuWithoutNode`, `Limit`, `OutOfMemory`,
    /// `HcaExhausted`, `Unsupported`, `Absent`, `DeviceLost`, `Driver`, `SessionEnded`, `ShuttingDown`.
    pub fn acquire(&self, session: SessionId, request: AcquireRequest) -> Call<LeaseGrant> {
        self.call(lease, |call| Input::Acquire { call, session, request })
    }

    /// Makes the session one more holder of a lease of its tenant.
    ///
    /// # Errors
    /// `UnknownLease`, `LeaseRevoked`, `GpuNotProven`, `Limit`, `SessionEnded`.
    pub fn open(&self, session: SessionId, id: LeaseId) -> Result<LeaseGrant, EngineError> {
        let answer = self.runtime().ask(|call| Input::Open { call, session, lease: id })?;
        lease(answer).ok_or_else(|| EngineError::Internal { problem: "a call got another's answer".into() })
    }

    /// Ends the session's hold. `generation`, where given, must be the lease's.
    ///
    /// # Errors
    /// `UnknownLease`, `NotHolder`, `StaleGeneration`, `ReceivesPosted`, `SessionEnded`.
    pub fn release(
        &self,
        session: SessionId,
        lease: LeaseId,
        generation: Option<Generation>,
    ) -> Result<(), EngineError> {
        let receives = self.runtime().receives_on(session, lease);
        self.done(|call| Input::Release { call, session, lease, generation, receives })
    }

    /// Memory ([`LeaseInfo::allocation`]) that the session was lent and that has been given up since the last call. Its
    /// client may still have it mapped, and must let go of it. To be asked at every event of the session.
    #[must_use]
    pub fn memory_gone(&self, session: SessionId) -> Vec<u64> {
        self.runtime().memory_gone(session)
    }

    /// Until this is dropped, what calls of this thread leave to be done in the background waits: let it go once their
    /// answers are written, or the background competes with them.
    pub fn hold_back(&self) -> HeldBack<'_> {
        self.runtime().hold_back()
    }

    /// Lets a lease outlive its sessions by at most `ttl`.
    ///
    /// # Errors
    /// `UnknownLease`, `NotHolder`, `LeaseRevoked`, `BadArgument` (ttl zero or above the limit), `SessionEnded`.
    pub fn detach(&self, session: SessionId, lease: LeaseId, ttl: Duration) -> Result<(), EngineError> {
        self.done(|call| Input::Detach { call, session, lease, ttl })
    }

    /// A lease that the session holds, as it is now, with its keys.
    ///
    /// # Errors
    /// `UnknownLease`, `NotHolder`, `SessionEnded`.
    pub fn lease(&self, session: SessionId, lease: LeaseId) -> Result<LeaseInfo, EngineError> {
        self.runtime().lease_with_keys(session, lease)
    }

    /// A page of leases, from `start` on; rkeys read 0. `page` 0 is the limit.
    ///
    /// # Errors
    /// `SessionEnded`.
    pub fn list_leases(&self, viewer: &Viewer, start: Option<LeaseId>, page: u32) -> Result<LeasePage, EngineError> {
        self.runtime().list_leases(viewer, start, page)
    }

    /// The full state as `Present` events, `Synced`, then what happens.
    ///
    /// # Errors
    /// `SessionEnded`, `Limit`, `ShuttingDown`.
    pub fn watch_leases(&self, viewer: &Viewer) -> Result<mpsc::Receiver<LeaseEvent>, EngineError> {
        self.runtime().watch_leases(viewer)
    }

    /// Takes in memory of a client, so that ranges of it can be registered. Looks at the descriptors, keeps them until the
    /// memory is given up, and closes what it does not take, which may block: call it where that does no harm.
    ///
    /// # Errors
    /// `NotAdoptable` naming the alternative, `UnknownGpu`, `Limit`, `OutOfDescriptors`, `SessionEnded`, `ShuttingDown`.
    pub fn adopt(&self, session: SessionId, request: AdoptRequest) -> Result<AdoptedMemory, EngineError> {
        self.runtime().adopt(session, request)
    }

    /// Gives up adopted memory, as when it is freed: its registrations end, whoever holds them. The answer comes once no
    /// HCA reaches it and its descriptors are closed.
    ///
    /// # Errors
    /// `UnknownMemory`, `SessionEnded`.
    pub fn disown(&self, session: SessionId, memory: MemoryId) -> Call<()> {
        self.call(done, |call| Input::Disown { call, session, memory })
    }

    /// Registers ranges of adopted or leased memory, all or none. What is registered already is there at once.
    ///
    /// # Errors
    /// `BadArgument`, `UnknownMemory`, `UnknownLease`, `NotHolder`, `LeaseRevoked`, `LeaseEnding`, `UnknownHca`, `Absent`,
    /// `Limit`, `HcaExhausted`, `Unsupported`, `DeviceLost`, `Driver`, `SessionEnded`, `ShuttingDown`.
    pub fn register(&self, session: SessionId, request: RegisterRequest) -> Call<RegistrationGrant> {
        self.call(registered, |call| Input::Register { call, session, request })
    }

    /// Gives a session a context of its own on an HCA (direct mode), with a region for each of these leases, which it holds and
    /// which are registered there. Later calls add regions to the same context. Blocks on the driver.
    ///
    /// # Errors
    /// `Unsupported` where it is off or the provider cannot, naming the way around; `BadArgument`, `UnknownHca`, `UnknownLease`,
    /// `NotHolder`, `LeaseRevoked`, `HcaExhausted`, `DeviceLost`, `Driver`, `OutOfDescriptors`, `SessionEnded`.
    pub fn open_direct(&self, session: SessionId, hca: &str, leases: &[LeaseId]) -> Result<DirectGrant, EngineError> {
        self.runtime().open_direct(session, hca, leases)
    }

    /// Ends registrations; gives how many of them were there. One that is not the session's, or ended with its memory,
    /// counts as done.
    ///
    /// # Errors
    /// `SessionEnded`.
    pub fn deregister(&self, session: SessionId, registrations: Vec<RegistrationId>) -> Result<u64, EngineError> {
        match self.runtime().ask(|call| Input::Deregister { call, session, registrations })? {
            Answered::Deregistered(count) => Ok(count),
            _ => Err(EngineError::Internal { problem: "a call got another's answer".into() }),
        }
    }

    /// A registration of the session, with its keys as they are now.
    ///
    /// # Errors
    /// `UnknownRegistration`, `SessionEnded`.
    pub fn lookup(&self, session: SessionId, registration: RegistrationId) -> Result<RegisteredRange, EngineError> {
        self.runtime().lookup(session, registration)
    }

    /// A page of registrations, from `start` on; rkeys read 0. `page` 0 is the limit.
    ///
    /// # Errors
    /// `SessionEnded`.
    pub fn list_registrations(
        &self,
        viewer: &Viewer,
        start: Option<RegistrationId>,
        page: u32,
    ) -> Result<RegistrationPage, EngineError> {
        self.runtime().list_registrations(viewer, start, page)
    }

    /// A queue pair in INIT with its ring.
    ///
    /// # Errors
    /// `BadArgument`, `UnknownHca`, `UnknownGpu`, `Limit`, `HcaExhausted`, `Unsupported`, `Absent`,
    /// `DeviceLost`, `Driver`, `SessionEnded`, `ShuttingDown`.
    pub fn create_queue_pair(&self, session: SessionId, request: QueuePairRequest) -> Call<QueuePairGrant> {
        self.call(queue_pair, |call| Input::CreateQueuePair { call, session, request })
    }

    /// To RTS against the peer's endpoint.
    ///
    /// # Errors
    /// `UnknownQueuePair`, `QueuePairState`, `BadArgument`, `DeviceLost`, `Driver`, `SessionEnded`.
    pub fn connect_queue_pair(&self, session: SessionId, queue_pair: QueuePairId, remote: Endpoint) -> Call<()> {
        self.call(done, |call| Input::ConnectQueuePair { call, session, queue_pair, remote })
    }

    /// Destroys a queue pair: posted work is flushed first.
    ///
    /// # Errors
    /// `UnknownQueuePair`, `SessionEnded`.
    pub fn destroy_queue_pair(&self, session: SessionId, queue_pair: QueuePairId) -> Call<()> {
        self.call(done, |call| Input::DestroyQueuePair { call, session, queue_pair })
    }

    /// A page of queue pairs, from `start` on. `page` 0 is the limit.
    ///
    /// # Errors
    /// `SessionEnded`.
    pub fn list_queue_pairs(
        &self,
        viewer: &Viewer,
        start: Option<QueuePairId>,
        page: u32,
    ) -> Result<QueuePairPage, EngineError> {
        self.runtime().list_queue_pairs(viewer, start, page)
    }

    /// Whose the memory of each GPU is, in PCI order. Blocks on the driver.
    #[must_use]
    pub fn gpu_memory(&self) -> Vec<GpuMemoryUse> {
        self.runtime().gpu_memory()
    }

    /// Asks the GPU driver which GPUs are lost or healthy again, and which device nodes they have. Blocks on the driver.
    pub fn refresh_gpus(&self) {
        self.runtime().refresh_gpus();
    }

    /// Refuses whoever is no administrator what only they may do.
    ///
    /// # Errors
    /// `NotAdmin`, `SessionEnded`.
    pub fn require_admin(&self, viewer: &Viewer, what: &'static str) -> Result<(), EngineError> {
        self.runtime().require_admin(viewer, what)
    }

    /// Proves, for an administrator, that HCAs move memory of GPUs and of the host, by loopback transfers with checked
    /// content, one after the other. `gpu` (name, UUID or BDF) and `hca` choose; empty for all: then each GPU with its
    /// assigned HCAs, and a host buffer with each HCA. Blocks on drivers for a while.
    ///
    /// # Errors
    /// `NotAdmin`, `UnknownGpu`, `UnknownHca`, `SessionEnded`, `ShuttingDown`.
    pub fn probe(&self, viewer: &Viewer, gpu: &str, hca: &str) -> Result<Vec<Probed>, EngineError> {
        self.runtime().probe_for(viewer, gpu, hca)
    }

    /// The same for the daemon itself, one pair: what was proven once is proven again after a link has changed. Without a
    /// GPU it is a host buffer.
    ///
    /// # Errors
    /// `UnknownGpu`, `UnknownHca`, `ShuttingDown`.
    pub fn probe_again(&self, gpu: &str, hca: &str) -> Result<Vec<Probed>, EngineError> {
        self.runtime().probe_again(gpu, hca)
    }

    /// How often a link of each HCA went down or came up.
    #[must_use]
    pub fn link_changes(&self) -> BTreeMap<String, u64> {
        self.runtime().link_changes()
    }

    /// Names of the HCAs that are served. One that has gone is not among them.
    #[must_use]
    pub fn hca_names(&self) -> Vec<String> {
        self.runtime().hca_names()
    }

    /// Tells of events of HCAs: a port, addresses, a device that went. Several may come as one. One watch counts, the last.
    #[must_use]
    pub fn watch_hcas(&self) -> mpsc::Receiver<()> {
        self.runtime().watch_hcas()
    }

    /// Serves one more HCA: one that has come, or come back after it had gone. Leases and queue pairs of the earlier
    /// one stay lost. False, and the device is dropped, when one of its name is served.
    pub fn add_hca(&self, hca: Arc<dyn Hca>) -> bool {
        self.runtime().add_hca(hca)
    }

    /// Counters and gauges now.
    #[must_use]
    pub fn stats(&self) -> Vec<Stat> {
        self.runtime().stats()
    }

    /// The pairing in force.
    #[must_use]
    pub fn plan(&self) -> Arc<HostPlan> {
        self.runtime().plan()
    }

    /// Puts another pairing in force. Leases keep their registrations; new ones follow the new pairing. `plan` is made when
    /// no other can come in between, so that of two calls the later plan stays. Blocks on the driver, where a GPU comes
    /// that is drained, or another is being drained.
    pub fn update_plan(&self, plan: impl FnOnce() -> HostPlan) {
        self.runtime().update_plan(plan);
    }

    /// The configuration it runs with.
    #[must_use]
    pub fn config(&self) -> &EngineConfig {
        &self.runtime().config
    }
}

fn done(answer: Answered) -> Option<()> {
    matches!(answer, Answered::Done).then_some(())
}

fn lease(answer: Answered) -> Option<LeaseGrant> {
    match answer {
        Answered::Lease(grant) => Some(grant),
        _ => None,
    }
}

fn registered(answer: Answered) -> Option<RegistrationGrant> {
    match answer {
        Answered::Registered(grant) => Some(grant),
        _ => None,
    }
}

fn queue_pair(answer: Answered) -> Option<QueuePairGrant> {
    match answer {
        Answered::QueuePair(grant) => Some(grant),
        _ => None,
    }
}
