//! A state machine with its stand-in hardware, and short words for what tests do with them.

use std::sync::Arc;
use std::time::Duration;

use gdrd_hal::GpuUuid;

use super::hardware::{Hardware, Pending};
use crate::config::{EngineConfig, GpuProof};
use crate::core::{
    Answer, CallId, Core, Effect, Failure, FailureKind, GpuIndex, Grant, HcaIndex, Host, Input, Job, Journaled,
    NewMemory, NewSession, Restored, Settings, Source, TenantId,
};
use crate::error::EngineError;
use crate::ids::{LeaseId, MemoryId, QueuePairId, RegistrationId, SessionId, TokenDigest};
use crate::lease::{AcquireRequest, MemoryKind, MemoryPlace};
use crate::peer::TenantKey;
use crate::plan::{HostPlan, PlannedGpu};
use crate::policy::Quota;
use crate::queue_pair::QueuePairRequest;
use crate::registration::{AdoptedKind, MemoryRef, Merging, RangeRequest, RegisterRequest};

pub(super) const MIB: u64 = 1 << 20;

pub(super) struct Rig {
    pub(super) core: Core,
    pub(super) hardware: Hardware,
    pub(super) now: u64,
    /// Every effect so far, as text: two equal runs have equal traces.
    pub(super) trace: Vec<String>,
    calls: u64,
    config: EngineConfig,
    /// Effects until the daemon dies.
    pub(super) fuse: Option<usize>,
}

/// Two GPUs: GPU0 with two HCAs, GPU1 with one.
pub(super) fn plan() -> HostPlan {
    let gpu = |index: u32, hcas: &[&str]| PlannedGpu {
        name: format!("GPU{index}"),
        uuid: GpuUuid(format!("GPU-{index}")),
        bdf: format!("0000:0{index}:00.0"),
        numa_node: Some(index),
        hcas: hcas.iter().map(|hca| (*hca).to_owned()).collect(),
        bar1_bytes: None,
    };
    HostPlan { generation: 1, gpus: vec![gpu(0, &["mlx5_0", "mlx5_1"]), gpu(1, &["mlx5_2"])], ..HostPlan::default() }
}

/// No buffers are made ahead, unless the test asks for it.
pub(super) fn config() -> EngineConfig {
    let mut config = EngineConfig { gpu_proof: GpuProof::None, ..EngineConfig::default() };
    config.pool.ready_target_per_class = 0;
    config.pool.clean_target_per_class = 0;
    config
}

pub(super) fn request(gpu: &str, size_bytes: u64) -> AcquireRequest {
    AcquireRequest {
        size_bytes,
        place: MemoryPlace::Gpu(gpu.to_owned()),
        hcas: Vec::new(),
        signal: false,
        label: "test".to_owned(),
    }
}

/// Ranges of adopted memory with one HCA, each for itself.
pub(super) fn ranges_of(memory: MemoryId, ranges: &[std::ops::Range<u64>]) -> RegisterRequest {
    let memory = MemoryRef::Adopted(memory);
    let range =
        |range: &std::ops::Range<u64>| RangeRequest { memory, offset: range.start, len_bytes: range.end - range.start };
    RegisterRequest {
        ranges: ranges.iter().map(range).collect(),
        access: gdrd_hal::Access::DATA,
        hcas: vec!["mlx5_0".to_owned()],
        merging: Merging::None,
        piece_bytes: 0,
    }
}

pub(super) fn failure(kind: FailureKind) -> Failure {
    Failure { kind, hca: None, message: "by the test".to_owned() }
}

pub(super) fn on_hca(kind: FailureKind, hca: u16) -> Failure {
    Failure { hca: Some(HcaIndex(hca)), ..failure(kind) }
}

impl Rig {
    pub(super) fn new(config: &EngineConfig) -> Self {
        Self::with(config, Settings::new(config), Hardware::default())
    }

    /// With a journal, and descriptors kept.
    pub(super) fn journaling(config: &EngineConfig) -> Self {
        Self::with(config, Settings::new(config).journaling(), Hardware::default())
    }

    fn with(config: &EngineConfig, settings: Settings, hardware: Hardware) -> Self {
        Self::on(config, settings, hardware, &["mlx5_0", "mlx5_1", "mlx5_2"])
    }

    fn on(config: &EngineConfig, settings: Settings, hardware: Hardware, hcas: &[&str]) -> Self {
        let hcas: Vec<Arc<str>> = hcas.iter().map(|name| Arc::from(*name)).collect();
        let host = Host::new(&hcas, Some((MemoryKind::Memfd, 2 * MIB)), &plan());
        let core = Core::new(settings, host);
        Self { core, hardware, now: 0, trace: Vec::new(), calls: 0, config: config.clone(), fuse: None }
    }

    /// The daemon dies, and another one takes up what is left.
    pub(super) fn restart(self) -> Self {
        self.restart_with(&["mlx5_0", "mlx5_1", "mlx5_2"])
    }

    /// The next daemon finds these HCAs.
    pub(super) fn restart_with(self, hcas: &[&str]) -> Self {
        let (now, calls, config) = (self.now, self.calls, self.config);
        let (hardware, tenants) = self.hardware.after_crash();
        let restored = Restored {
            tenants,
            sessions: hardware.connected.clone(),
            memory: hardware.memory.keys().copied().collect(),
            rings: hardware.journal.queue_pairs.keys().copied().collect(),
            journaled: hardware.journal.clone(),
        };
        let mut rig = Self::on(&config, Settings::new(&config).journaling(), hardware, hcas);
        (rig.now, rig.calls) = (now, calls);
        let queue_pairs = restored.journaled.queue_pairs.values();
        let alive = queue_pairs.filter(|record| restored.sessions.contains(&record.session));
        rig.hardware.queue_pairs = alive.map(|record| (record.id, record.session)).collect();
        let mut effects = Vec::new();
        rig.core.apply(Input::Restore(Box::new(restored)), now, &mut effects);
        // The runtime starts its journal anew, and closes what is left over.
        rig.hardware.journal = Journaled::default();
        rig.core.records().into_iter().for_each(|record| rig.hardware.journal.add(record));
        let core = &rig.core;
        rig.hardware.memory.retain(|id, _| core.has_allocation(*id));
        rig.hardware.kept.retain(|name, _| core.names().contains(name));
        for effect in effects.into_iter().filter(|effect| !matches!(effect, Effect::Record(_))) {
            rig.trace.push(format!("{effect:?}"));
            rig.hardware.carry_out(effect);
        }
        super::invariants::check(&rig.core, &rig.hardware);
        rig
    }

    pub(super) fn call(&mut self) -> CallId {
        self.calls += 1;
        CallId(self.calls)
    }

    pub(super) fn apply(&mut self, input: Input) {
        if self.fuse == Some(0) {
            return;
        }
        match &input {
            Input::Release { session, lease, .. } | Input::Undo { session, lease, .. } => {
                self.hardware.held.remove(&(*session, *lease));
            }
            Input::CloseSession { session } => {
                self.hardware.connected.remove(session);
                self.hardware.held.retain(|(holder, _)| holder != session);
            }
            _ => {}
        }
        let mut effects = Vec::new();
        self.core.apply(input, self.now, &mut effects);
        for effect in effects {
            if let Some(fuse) = &mut self.fuse {
                if *fuse == 0 {
                    return;
                }
                *fuse -= 1;
            }
            self.trace.push(format!("{effect:?}"));
            self.hardware.carry_out(effect);
        }
        super::invariants::check(&self.core, &self.hardware);
    }

    pub(super) fn answer(&mut self, call: CallId) -> Option<Result<Answer, EngineError>> {
        self.hardware.answers.remove(&call)
    }

    fn answered(&mut self, call: CallId) -> Result<Answer, EngineError> {
        match self.answer(call) {
            // Nobody answers for a daemon that is dead.
            None if self.fuse == Some(0) => Err(EngineError::ShuttingDown),
            answer => answer.expect("the call is answered at once"),
        }
    }

    pub(super) fn open_session_with(&mut self, uid: u32, quota: Quota) -> Result<(SessionId, TenantId), EngineError> {
        let call = self.call();
        let tenant = TenantKey { uid, scope: "/test.scope".into() };
        let session = NewSession {
            tenant,
            quota,
            warm_up: Vec::new(),
            admin: uid == 0,
            client_name: "test".to_owned(),
            token: TokenDigest::ZERO,
        };
        self.apply(Input::OpenSession { call, session });
        match self.answered(call)? {
            Answer::Session(session, tenant) => Ok((session, tenant)),
            answer => panic!("{answer:?}"),
        }
    }

    pub(super) fn session(&mut self, uid: u32) -> SessionId {
        self.open_session_with(uid, Quota::default()).expect("the session opens").0
    }

    pub(super) fn close(&mut self, session: SessionId) {
        self.apply(Input::CloseSession { session });
    }

    /// Asks for a buffer; the answer may come later.
    pub(super) fn ask(&mut self, session: SessionId, request: AcquireRequest) -> CallId {
        let call = self.call();
        self.apply(Input::Acquire { call, session, request });
        call
    }

    /// Asks for 2 MiB on GPU0 and lets everything happen that must.
    pub(super) fn acquire(&mut self, session: SessionId) -> Box<Grant> {
        let call = self.ask(session, request("GPU0", 2 * MIB));
        self.settle();
        self.granted(call)
    }

    pub(super) fn granted(&mut self, call: CallId) -> Box<Grant> {
        match self.answer(call) {
            Some(Ok(Answer::Granted(grant))) => grant,
            answer => panic!("{answer:?}"),
        }
    }

    pub(super) fn refused(&mut self, call: CallId) -> EngineError {
        match self.answer(call) {
            Some(Err(error)) => error,
            answer => panic!("{answer:?}"),
        }
    }

    pub(super) fn open(&mut self, session: SessionId, lease: LeaseId) -> Result<Box<Grant>, EngineError> {
        let call = self.call();
        self.apply(Input::Open { call, session, lease });
        match self.answered(call)? {
            Answer::Granted(grant) => Ok(grant),
            answer => panic!("{answer:?}"),
        }
    }

    pub(super) fn release(&mut self, session: SessionId, lease: LeaseId) -> Result<(), EngineError> {
        let call = self.call();
        self.apply(Input::Release { call, session, lease, generation: None, receives: None });
        self.answered(call).map(|_| ())
    }

    pub(super) fn detach(&mut self, session: SessionId, lease: LeaseId, ttl: Duration) -> Result<(), EngineError> {
        let call = self.call();
        self.apply(Input::Detach { call, session, lease, ttl });
        self.answered(call).map(|_| ())
    }

    pub(super) fn create_queue_pair(&mut self, session: SessionId) -> CallId {
        let call = self.call();
        let request = QueuePairRequest {
            hca: "mlx5_0".to_owned(),
            gpu: String::new(),
            port_num: 0,
            qp_type: gdrd_hal::QueuePairType::Rc,
            send_depth: 0,
            recv_depth: 0,
        };
        self.apply(Input::CreateQueuePair { call, session, request });
        call
    }

    pub(super) fn queue_pair(&mut self, session: SessionId) -> QueuePairId {
        let call = self.create_queue_pair(session);
        self.settle();
        match self.answer(call) {
            Some(Ok(Answer::QueuePair(queue_pair))) => queue_pair,
            answer => panic!("{answer:?}"),
        }
    }

    pub(super) fn try_adopt(
        &mut self,
        session: SessionId,
        kind: AdoptedKind,
        len: u64,
    ) -> Result<MemoryId, EngineError> {
        let call = self.call();
        let memory = NewMemory { kind, len_bytes: len, gpu: Some("GPU0".to_owned()) };
        self.apply(Input::Adopt { call, session, memory });
        match self.answered(call)? {
            Answer::Adopted(memory) => Ok(memory),
            answer => panic!("{answer:?}"),
        }
    }

    pub(super) fn adopt(&mut self, session: SessionId, len_bytes: u64) -> MemoryId {
        self.try_adopt(session, AdoptedKind::Memfd, len_bytes).expect("the memory is adopted")
    }

    /// Asks for registrations; the answer may come later.
    pub(super) fn ask_register(&mut self, session: SessionId, request: RegisterRequest) -> CallId {
        let call = self.call();
        self.apply(Input::Register { call, session, request });
        call
    }

    /// Registers ranges with the first HCA and lets everything happen that must.
    pub(super) fn register(
        &mut self,
        session: SessionId,
        memory: MemoryId,
        ranges: &[std::ops::Range<u64>],
    ) -> Vec<RegistrationId> {
        let call = self.ask_register(session, ranges_of(memory, ranges));
        self.settle();
        self.registered(call)
    }

    pub(super) fn registered(&mut self, call: CallId) -> Vec<RegistrationId> {
        match self.answer(call) {
            Some(Ok(Answer::Registered(registrations))) => registrations,
            answer => panic!("{answer:?}"),
        }
    }

    pub(super) fn deregister(&mut self, session: SessionId, registrations: Vec<RegistrationId>) -> u64 {
        let call = self.call();
        self.apply(Input::Deregister { call, session, registrations });
        match self.answered(call) {
            Ok(Answer::Deregistered(count)) => count,
            Err(EngineError::ShuttingDown | EngineError::SessionEnded) => 0,
            answer => panic!("{answer:?}"),
        }
    }

    /// A figure of the statistics without labels.
    pub(super) fn figure(&self, name: &str) -> u64 {
        let stats = self.core.stats();
        let value = stats.iter().find(|s| s.name == name).expect("the figure is there").value;
        // Test figures are far below 2^53.
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let figure = value as u64;
        figure
    }

    /// Cached regions that are registered, or on their way in or out.
    pub(super) fn regions(&self) -> usize {
        self.core.regions.len()
    }

    /// Lets time pass, and what is due happen.
    pub(super) fn pass(&mut self, time: Duration) {
        self.now += u64::try_from(time.as_nanos()).expect("test times are short");
        self.apply(Input::Time);
    }

    /// Everything pending succeeds, in order, until nothing is pending.
    pub(super) fn settle(&mut self) {
        while !self.hardware.pending.is_empty() {
            self.finish(0, None);
        }
    }

    /// Jobs pending now, by the start of their names.
    pub(super) fn pending(&self) -> Vec<String> {
        let name = |pending: &Pending| match pending {
            Pending::Job(job) => format!("{job:?}"),
            other => format!("{other:?}"),
        };
        self.hardware.pending.iter().map(|p| name(p).split([' ', '{']).next().unwrap_or_default().to_owned()).collect()
    }

    /// The pending job at `at` ends, with `failed` where it can fail.
    pub(super) fn finish(&mut self, at: usize, failed: Option<Failure>) {
        let pending = self.hardware.pending.remove(at);
        let input = match pending {
            Pending::Job(job) => self.finish_job(job, failed),
            Pending::Quiesce { allocation, .. } => Input::Quiesced { allocation },
            Pending::QuiesceRegion { region } => Input::RegionQuiesced { region },
            Pending::Shed { tenant, allocation, hca, slot } => {
                if let Some(memory) = self.hardware.memory.get_mut(&allocation) {
                    memory.registered.retain(|registered| *registered != (hca, slot));
                }
                Input::Shed { tenant, slot }
            }
        };
        self.apply(input);
    }

    fn finish_job(&mut self, job: Job, failed: Option<Failure>) -> Input {
        let memory = &mut self.hardware.memory;
        let result = failed.map_or(Ok(()), Err);
        match job {
            Job::Allocate { allocation, .. } => {
                if result.is_ok() {
                    assert!(memory.insert(allocation, Default::default()).is_none());
                }
                Input::Allocated { allocation, result }
            }
            Job::Register { allocation, targets, keep, .. } => {
                let result = result.map(|()| vec![0; targets.len()]);
                if result.is_ok() {
                    self.hardware.kept.extend(keep.map(|[name, _]| (name, allocation)));
                    memory.get_mut(&allocation).expect("registered memory exists").registered = targets;
                }
                Input::Registered { allocation, result }
            }
            Job::Deregister { allocation } => {
                let memory = memory.get_mut(&allocation).expect("deregistered memory exists");
                memory.registered.clear();
                memory.reached |= result.is_err();
                Input::Deregistered { allocation, result }
            }
            Job::Scrub { allocation } => {
                memory.get_mut(&allocation).expect("scrubbed memory exists").dirty = result.is_err();
                Input::Scrubbed { allocation, result }
            }
            Job::Free { allocation } => {
                assert!(memory.remove(&allocation).is_some());
                self.hardware.kept.retain(|_, kept| *kept != allocation);
                Input::Freed { allocation }
            }
            Job::RegisterRegion { region, source, range, .. } => {
                if result.is_ok() {
                    self.hardware.regions.insert(region, source);
                }
                Input::RegionRegistered { region, result: result.map(|()| range.start), cost_ns: 1000 }
            }
            Job::DeregisterRegion { region } => {
                let source = self.hardware.regions.remove(&region).expect("a region is deregistered once");
                if let (Source::Leased(allocation), true) = (source, result.is_err()) {
                    memory.get_mut(&allocation).expect("memory outlives its regions").reached = true;
                }
                Input::RegionDeregistered { region, result }
            }
            Job::CloseMemory { memory } => {
                assert!(self.hardware.adopted.remove(&memory));
                Input::MemoryClosed { memory }
            }
            Job::CreateQueuePair { queue_pair, .. } => {
                if result.is_err() {
                    self.hardware.queue_pairs.remove(&queue_pair);
                }
                Input::QueuePairCreated { queue_pair, result }
            }
            Job::ConnectQueuePair { queue_pair, .. } => Input::QueuePairConnected { queue_pair, result },
            Job::DestroyQueuePair { queue_pair } => {
                assert!(self.hardware.queue_pairs.remove(&queue_pair).is_some());
                Input::QueuePairDestroyed { queue_pair }
            }
        }
    }

    /// Watch events and session news since the last call.
    pub(super) fn told(&mut self) -> Vec<Effect> {
        std::mem::take(&mut self.hardware.told)
    }

    pub(super) fn lose_gpu(&mut self, gpu: u16) {
        self.apply(Input::GpuLost { gpu: GpuIndex(gpu), message: "xid 79".to_owned() });
    }

    pub(super) fn lose_hca(&mut self, hca: u16) {
        self.apply(Input::HcaGone { hca: HcaIndex(hca), message: "fatal".to_owned() });
    }

    /// Bytes of the gauge `gdrd_buffer_bytes` in a state.
    pub(super) fn bytes(&self, state: &str) -> u64 {
        let stats = self.core.stats();
        let stat = stats.iter().find(|s| s.name == "gdrd_buffer_bytes" && s.labels == [("state", state.to_owned())]);
        let value = stat.expect("the gauge is there").value;
        // Test sizes are far below 2^53.
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let bytes = value as u64;
        bytes
    }
}
