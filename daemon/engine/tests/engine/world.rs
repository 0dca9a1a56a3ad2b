//! A simulated host with an engine, and short words for what tests do with them.

use std::os::fd::AsFd;
use std::time::Duration;

use futures_channel::mpsc;
use gdrd_engine::{
    AcquireRequest, Continuity, Engine, EngineConfig, EngineError, GpuProof, Hardware, HostPlan, LeaseEvent,
    LeaseGrant, LeaseId, MemoryKind, MemoryPlace, Peer, PlannedGpu, Policy, Quota, Rule, SessionId, SessionOpened,
    SessionResumed, Subject, Traffic, Viewer,
};
use gdrd_hal::{DeviceNumber, Gid, GidEntry, GidType, GpuUuid, LinkLayer, PortState};
use gdrd_sim::{Provider, SimGpu, SimHca, SimHost, SimOptions, SimPort, SimSpec};
use gdrd_topology::model::GpuDetail;

pub(crate) const MIB: u64 = 1 << 20;
/// Against a test that hangs; far above what any wait here takes.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
/// Memory of each simulated GPU.
pub(crate) const GPU_BYTES: u64 = 64 * MIB;

pub(crate) struct World {
    pub(crate) sim: SimHost,
    pub(crate) engine: Engine,
}

fn gpu(index: u8) -> SimGpu {
    SimGpu {
        name: format!("GPU{index}"),
        uuid: GpuUuid(format!("GPU-{index}")),
        bdf: format!("0000:0{index}:00.0").parse().expect("an address"),
        detail: GpuDetail::default(),
        device_node: Some(DeviceNumber { major: 195, minor: u32::from(index) }),
        memory_bytes: GPU_BYTES,
    }
}

pub(crate) fn hca(index: u8) -> SimHca {
    let mut gid = [0; 16];
    gid[15] = index + 1;
    let entry = GidEntry { gid_index: 3, gid: Gid(gid), gid_type: GidType::RoceV2 };
    SimHca {
        name: format!("mlx5_{index}"),
        capabilities: Provider::Mlx5.capabilities(),
        ports: vec![SimPort {
            state: PortState::Active,
            link_layer: LinkLayer::Ethernet,
            rate_gbps: 200.0,
            lid: 0,
            mtu_bytes: 4096,
            gids: vec![entry],
        }],
    }
}

/// GPU0 is paired with two HCAs, GPU1 with one.
pub(crate) fn plan() -> HostPlan {
    let gpu = |index: u8, hcas: &[&str]| PlannedGpu {
        name: format!("GPU{index}"),
        uuid: GpuUuid(format!("GPU-{index}")),
        bdf: format!("0000:0{index}:00.0"),
        numa_node: None,
        hcas: hcas.iter().map(|hca| (*hca).to_owned()).collect(),
        bar1_bytes: None,
    };
    HostPlan { generation: 1, gpus: vec![gpu(0, &["mlx5_0", "mlx5_1"]), gpu(1, &["mlx5_2"])], ..HostPlan::default() }
}

pub(crate) fn hardware(sim: &SimHost, plan: HostPlan) -> Hardware {
    Hardware {
        gpu_memory: Some(sim.gpu_memory()),
        gpu_memory_kind: MemoryKind::Memfd,
        gpu_facts: Some(sim.gpu_facts()),
        hcas: sim.hcas(),
        plan,
    }
}

/// Everyone may lease, root administers, nothing is made ahead.
pub(crate) fn config() -> EngineConfig {
    let rule =
        Rule { subject: Subject::Anyone, quota: Quota::default(), traffic: Traffic::default(), prewarm: Vec::new() };
    let policy = Policy { leases: vec![rule], admins: vec![Subject::Uid(0)] };
    let mut config = EngineConfig { policy, gpu_proof: GpuProof::None, ..EngineConfig::default() };
    config.pool.ready_target_per_class = 0;
    config.pool.clean_target_per_class = 0;
    config.pool.headroom_bytes = 0;
    config.broker.spin = Duration::from_micros(5);
    config
}

pub(crate) fn peer(uid: u32) -> Peer {
    Peer { uid, gid: uid, groups: Vec::new(), pid: 1, scope: "unit/test.scope".to_owned() }
}

pub(crate) fn request(gpu: &str, size_bytes: u64) -> AcquireRequest {
    AcquireRequest {
        size_bytes,
        place: MemoryPlace::Gpu(gpu.to_owned()),
        hcas: Vec::new(),
        signal: false,
        label: "test".to_owned(),
    }
}

/// Two GPUs and three HCAs.
pub(crate) fn spec() -> SimSpec {
    SimSpec { gpus: vec![gpu(0), gpu(1)], hcas: vec![hca(0), hca(1), hca(2)] }
}

impl World {
    pub(crate) fn new() -> Self {
        Self::with(config())
    }

    pub(crate) fn with(config: EngineConfig) -> Self {
        Self::over(config, vec![hca(0), hca(1), hca(2)])
    }

    pub(crate) fn over(config: EngineConfig, hcas: Vec<SimHca>) -> Self {
        Self::planned(config, hcas, plan())
    }

    pub(crate) fn planned(config: EngineConfig, hcas: Vec<SimHca>, plan: HostPlan) -> Self {
        let sim = SimHost::with_options(SimSpec { hcas, ..spec() }, SimOptions::default()).expect("the host is sound");
        let engine = Engine::start(config, hardware(&sim, plan)).expect("the engine starts");
        Self { sim, engine }
    }

    /// On the same host, as the next daemon.
    pub(crate) fn taking_up(sim: SimHost, config: EngineConfig, continuity: Continuity) -> (Self, Vec<SessionResumed>) {
        let (engine, resumed) = Engine::take_up(config, hardware(&sim, plan()), continuity).expect("the engine starts");
        (Self { sim, engine }, resumed)
    }

    pub(crate) fn open_session(&self, uid: u32) -> SessionOpened {
        self.engine.open_session(peer(uid), "test").expect("the session opens")
    }

    pub(crate) fn session(&self, uid: u32) -> SessionId {
        self.open_session(uid).session
    }

    /// 2 MiB on GPU0.
    pub(crate) fn acquire(&self, session: SessionId) -> LeaseGrant {
        self.try_acquire(session, request("GPU0", 2 * MIB)).expect("a buffer")
    }

    pub(crate) fn try_acquire(&self, session: SessionId, request: AcquireRequest) -> Result<LeaseGrant, EngineError> {
        self.engine.acquire(session, request).wait()
    }

    /// Acquires and keeps.
    pub(crate) fn lease(&self, session: SessionId) -> LeaseId {
        self.acquire(session).keep().0.id
    }

    pub(crate) fn release(&self, session: SessionId, lease: LeaseId) {
        self.engine.release(session, lease, None).expect("the lease is held");
    }

    pub(crate) fn stat(&self, name: &str) -> u64 {
        let stats = self.engine.stats();
        let of = |value: f64| {
            // Test figures are small whole numbers.
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
            let whole = value as u64;
            whole
        };
        stats.iter().filter(|stat| stat.name == name).map(|stat| of(stat.value)).sum()
    }

    /// Bytes of buffers in a state.
    pub(crate) fn bytes(&self, state: &'static str) -> u64 {
        let stats = self.engine.stats();
        let found = stats.iter().find(|s| s.name == "gdrd_buffer_bytes" && s.labels == [("state", state.to_owned())]);
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let whole = found.expect("the gauge is there").value as u64;
        whole
    }

    /// Bytes in use on a simulated GPU, as its driver tells.
    pub(crate) fn gpu_used(&self, index: u8) -> u64 {
        let usage = self.sim.gpu_memory().usage(&GpuUuid(format!("GPU-{index}"))).expect("the gpu is there");
        usage.total_bytes - usage.free_bytes
    }

    /// Waits until nothing is on its way: no buffer is being changed and nobody waits.
    pub(crate) fn settle(&self) {
        self.until("the engine to settle", || self.bytes("changing") == 0 && self.stat("gdrd_waiting_acquires") == 0);
    }

    /// Waits for a state that the engine reaches by itself, on its own threads.
    pub(crate) fn until(&self, what: &str, mut reached: impl FnMut() -> bool) {
        let start = std::time::Instant::now();
        while !reached() {
            assert!(start.elapsed() < PATIENCE, "waited in vain for {what}: {:#?}", self.engine.stats());
            std::thread::yield_now();
        }
    }

    pub(crate) fn watch(&self, uid: u32) -> mpsc::Receiver<LeaseEvent> {
        self.engine.watch_leases(&Viewer::Peer(peer(uid))).expect("room for a watch")
    }
}

/// The next event that is there already.
pub(crate) fn next<T>(events: &mut mpsc::Receiver<T>) -> Option<T> {
    events.try_recv().ok()
}

pub(crate) fn write(fd: impl AsFd, offset: u64, bytes: &[u8]) {
    assert_eq!(rustix::io::pwrite(fd, bytes, offset).expect("the memory is writable"), bytes.len());
}

pub(crate) fn read(fd: impl AsFd, len_bytes: u64) -> Vec<u8> {
    let mut bytes = vec![0xaa; usize::try_from(len_bytes).expect("small")];
    let mut at = 0;
    while at < bytes.len() {
        let got = rustix::io::pread(fd.as_fd(), &mut bytes[at..], at as u64).expect("the memory is readable");
        assert_ne!(got, 0);
        at += got;
    }
    bytes
}
