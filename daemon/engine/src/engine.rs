//! The public handle.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_channel::mpsc;
use gdrd_hal::{Endpoint, GpuMemory, GpuUuid, Hca};

use crate::call::Call;
use crate::config::EngineConfig;
use crate::error::EngineError;
use crate::ids::{DeviceNumber, Generation, LeaseId, QueuePairId, SessionId, Token};
use crate::lease::{AcquireRequest, LeaseEvent, LeaseGrant, LeasePage};
use crate::peer::Peer;
use crate::plan::HostPlan;
use crate::queue_pair::{QueuePairGrant, QueuePairPage, QueuePairRequest};
use crate::session::{SessionOpened, Viewer};
use crate::stats::Stat;

/// What the host has.
pub struct Hardware {
    /// GPU memory, where there is a backend for it.
    pub gpu_memory: Option<Arc<dyn GpuMemory>>,
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

/// The engine. Cheap to clone; all clones are one engine.
#[derive(Clone, Debug)]
pub struct Engine {
    config: Arc<EngineConfig>,
}

fn unfinished<T>() -> Result<T, EngineError> {
    Err(EngineError::Internal { problem: "the engine's runtime is not linked".into() })
}

impl Engine {
    /// Starts an engine on this hardware. Nothing is allocated or opened on it before it is needed.
    ///
    /// # Errors
    /// `BadArgument` for a configuration out of range; `Internal` when a thread cannot be started.
    pub fn start(config: EngineConfig, _hardware: Hardware) -> Result<Self, EngineError> {
        config.validate()?;
        Ok(Self { config: Arc::new(config) })
    }

    /// Ends every session, gives back everything and joins the engine's threads. Blocks until that is done.
    pub fn shutdown(&self) {}

    /// Opens a session for a peer.
    ///
    /// # Errors
    /// `NotAllowed`, `OpaquePeer`, `Limit`, `BadArgument` (name too long), `ShuttingDown`.
    pub fn open_session(&self, _peer: Peer, _client_name: &str) -> Result<SessionOpened, EngineError> {
        unfinished()
    }

    /// Ends a session: its calls are cancelled, its queue pairs destroyed, its holds dropped. Does nothing when it
    /// has ended already. `reason` goes to the log.
    pub fn close_session(&self, _session: SessionId, _reason: &str) {}

    /// The session that a token proves, for a caller of that uid.
    ///
    /// # Errors
    /// `BadToken`.
    pub fn session_of_token(&self, _token: &Token, _uid: u32) -> Result<SessionId, EngineError> {
        unfinished()
    }

    /// Notes that the session holds open fds of these device nodes; answers with the GPUs they are.
    ///
    /// # Errors
    /// `NotAGpu` for the first number that is none (then nothing is noted), `SessionEnded`.
    pub fn prove_gpus(&self, _session: SessionId, _nodes: &[DeviceNumber]) -> Result<Vec<GpuUuid>, EngineError> {
        unfinished()
    }

    /// Leases a buffer. Warm, the answer is there at once.
    ///
    /// # Errors
    /// `BadArgument`, `UnknownGpu`, `UnknownHca`, `GpuNotProven`, `GpuWithoutNode`, `Limit`, `OutOfMemory`,
    /// `HcaExhausted`, `Unsupported`, `Absent`, `DeviceLost`, `Driver`, `SessionEnded`, `ShuttingDown`.
    pub fn acquire(&self, _session: SessionId, _request: AcquireRequest) -> Call<LeaseGrant> {
        Call::ready(unfinished())
    }

    /// Makes the session one more holder of a lease of its tenant.
    ///
    /// # Errors
    /// `UnknownLease`, `LeaseRevoked`, `GpuNotProven`, `Limit`, `SessionEnded`.
    pub fn open(&self, _session: SessionId, _lease: LeaseId) -> Result<LeaseGrant, EngineError> {
        unfinished()
    }

    /// Ends the session's hold. `generation`, where given, must be the lease's.
    ///
    /// # Errors
    /// `UnknownLease`, `NotHolder`, `StaleGeneration`, `ReceivesPosted`, `SessionEnded`.
    pub fn release(
        &self,
        _session: SessionId,
        _lease: LeaseId,
        _generation: Option<Generation>,
    ) -> Result<(), EngineError> {
        unfinished()
    }

    /// Lets a lease outlive its sessions by at most `ttl`.
    ///
    /// # Errors
    /// `UnknownLease`, `NotHolder`, `LeaseRevoked`, `BadArgument` (ttl zero or above the limit), `SessionEnded`.
    pub fn detach(&self, _session: SessionId, _lease: LeaseId, _ttl: Duration) -> Result<(), EngineError> {
        unfinished()
    }

    /// A page of leases, from `start` on; rkeys read 0. `page` 0 is the limit.
    ///
    /// # Errors
    /// `SessionEnded`.
    pub fn list_leases(&self, _viewer: &Viewer, _start: Option<LeaseId>, _page: u32) -> Result<LeasePage, EngineError> {
        unfinished()
    }

    /// The full state as `Present` events, `Synced`, then what happens.
    ///
    /// # Errors
    /// `SessionEnded`, `Limit`, `ShuttingDown`.
    pub fn watch_leases(&self, _viewer: &Viewer) -> Result<mpsc::Receiver<LeaseEvent>, EngineError> {
        unfinished()
    }

    /// A queue pair in INIT with its ring.
    ///
    /// # Errors
    /// `BadArgument`, `UnknownHca`, `UnknownGpu`, `GpuNotProven`, `Limit`, `HcaExhausted`, `Unsupported`, `Absent`,
    /// `DeviceLost`, `Driver`, `SessionEnded`, `ShuttingDown`.
    pub fn create_queue_pair(&self, _session: SessionId, _request: QueuePairRequest) -> Call<QueuePairGrant> {
        Call::ready(unfinished())
    }

    /// To RTS against the peer's endpoint.
    ///
    /// # Errors
    /// `UnknownQueuePair`, `QueuePairState`, `BadArgument`, `DeviceLost`, `Driver`, `SessionEnded`.
    pub fn connect_queue_pair(&self, _session: SessionId, _queue_pair: QueuePairId, _remote: Endpoint) -> Call<()> {
        Call::ready(unfinished())
    }

    /// Destroys a queue pair: posted work is flushed first.
    ///
    /// # Errors
    /// `UnknownQueuePair`, `SessionEnded`.
    pub fn destroy_queue_pair(&self, _session: SessionId, _queue_pair: QueuePairId) -> Call<()> {
        Call::ready(unfinished())
    }

    /// A page of queue pairs, from `start` on. `page` 0 is the limit.
    ///
    /// # Errors
    /// `SessionEnded`.
    pub fn list_queue_pairs(
        &self,
        _viewer: &Viewer,
        _start: Option<QueuePairId>,
        _page: u32,
    ) -> Result<QueuePairPage, EngineError> {
        unfinished()
    }

    /// Counters and gauges now.
    #[must_use]
    pub fn stats(&self) -> Vec<Stat> {
        Vec::new()
    }

    /// The pairing in force.
    #[must_use]
    pub fn plan(&self) -> Arc<HostPlan> {
        Arc::new(HostPlan::default())
    }

    /// Puts another pairing in force. Leases keep their registrations; new ones follow the new pairing.
    pub fn update_plan(&self, _plan: HostPlan) {}

    /// The configuration it runs with.
    #[must_use]
    pub fn config(&self) -> &EngineConfig {
        &self.config
    }
}
