//! A small simulated host and connected ends, for the tests of this crate.
#![allow(dead_code, reason = "each test binary uses its part")]

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gdrd_hal::{
    Access, CompletionQueue, DeviceNumber, Gid, GidEntry, GidType, GpuUuid, Hca, LinkLayer, LocalSpan,
    MAX_INLINE_BYTES, MemoryRegion, MemorySource, Opcode, PortState, ProtectionDomain, QueuePair, QueuePairConfig,
    QueuePairType, ReceiveRequest, RemoteSpan, WorkCompletion, WorkQueue, WorkRequest, WorkStatus,
};
use gdrd_shm::Segment;
use gdrd_sim::{Provider, SimGpu, SimHca, SimHost, SimOptions, SimPort, SimSpec, Timing};
use gdrd_topology::model::GpuDetail;

/// Memory of every end.
pub(crate) const MEMORY_BYTES: u64 = 64 * 1024;
/// A wait that no test sees the end of.
pub(crate) const FOREVER: Duration = Duration::from_secs(3600);
const WATCHDOG: Duration = Duration::from_secs(60);

/// Two GPUs and two RoCE HCAs, `mlx5_0` and `mlx5_1`.
pub(crate) fn spec() -> SimSpec {
    let gpu = |index: u8| SimGpu {
        name: format!("GPU{index}"),
        uuid: GpuUuid(format!("GPU-{index}0000000-0000-0000-0000-000000000000")),
        bdf: format!("0000:0{index}:00.0").parse().expect("it is an address"),
        detail: GpuDetail::default(),
        device_node: Some(DeviceNumber { major: 195, minor: u32::from(index) }),
        memory_bytes: 64 << 20,
    };
    let hca = |index: u8| SimHca {
        name: format!("mlx5_{index}"),
        capabilities: Provider::Mlx5.capabilities(),
        ports: vec![SimPort {
            state: PortState::Active,
            link_layer: LinkLayer::Ethernet,
            rate_gbps: 100.0,
            lid: 0,
            mtu_bytes: 1024,
            gids: vec![GidEntry {
                gid_index: 0,
                gid: Gid([0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, index + 1]),
                gid_type: GidType::RoceV2,
            }],
        }],
    };
    SimSpec { gpus: vec![gpu(0), gpu(1)], hcas: vec![hca(0), hca(1)] }
}

/// A host on which nothing ends by time.
pub(crate) fn patient_host() -> SimHost {
    host_with(Timing { retry_exceeded: FOREVER, receiver_not_ready: None })
}

pub(crate) fn host_with(timing: Timing) -> SimHost {
    SimHost::with_options(spec(), SimOptions { timing, ..SimOptions::default() }).expect("the description is sound")
}

/// One end of a connection with memory and a region over all of it.
pub(crate) struct End {
    pub(crate) hca: Arc<dyn Hca>,
    pub(crate) pd: Arc<dyn ProtectionDomain>,
    pub(crate) memory: OwnedFd,
    pub(crate) region: Box<dyn MemoryRegion>,
    pub(crate) cq: Box<dyn CompletionQueue>,
    pub(crate) control: Arc<dyn QueuePair>,
    pub(crate) work: Box<dyn WorkQueue>,
}

impl End {
    /// In RESET.
    pub(crate) fn new(hca: &Arc<dyn Hca>) -> Self {
        let pd = hca.alloc_pd().expect("a domain can be made");
        let memory = memory();
        let region = register(&*pd, &memory);
        let cq = hca.create_cq(256).expect("a completion queue can be made");
        let config = QueuePairConfig {
            qp_type: QueuePairType::Rc,
            send_depth: 64,
            recv_depth: 64,
            inline_bytes: 0,
            port_num: 1,
        };
        let parts = pd.create_queue_pair(cq.id(), &config).expect("a queue pair can be made");
        Self { hca: Arc::clone(hca), pd, memory, region, cq, control: parts.control, work: parts.work }
    }

    pub(crate) fn write(&self, wr_id: u64, to: &Self, offset: u64, len_bytes: u32) -> WorkRequest {
        let remote = RemoteSpan { rkey: to.region.rkey(), addr: to.region.iova() + offset };
        request(wr_id, Opcode::Write, self.span(0, len_bytes), remote)
    }

    pub(crate) fn message(&self, wr_id: u64) -> WorkRequest {
        request(wr_id, Opcode::Send, self.span(0, 8), RemoteSpan::default())
    }

    pub(crate) fn span(&self, offset: u64, len_bytes: u32) -> LocalSpan {
        LocalSpan { lkey: self.region.lkey(), addr: self.region.iova() + offset, len_bytes }
    }

    pub(crate) fn send(&mut self, request: WorkRequest) {
        self.work.post_send(&[request]).expect("a queue pair with room takes a send");
    }

    pub(crate) fn receive(&mut self, wr_id: u64) {
        let local = self.span(4096, 4096);
        self.work.post_recv(&[ReceiveRequest { wr_id, local }]).expect("a queue pair with room takes a receive");
    }

    pub(crate) fn fill(&self, offset: u64, bytes: &[u8]) {
        file(&self.memory).write_all_at(bytes, offset).expect("a memfd can be written");
    }

    pub(crate) fn content(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        file(&self.memory).read_exact_at(&mut bytes, offset).expect("a memfd can be read");
        bytes
    }

    /// What has completed by now.
    pub(crate) fn completed(&mut self) -> Vec<(u64, WorkStatus)> {
        let mut out = [WorkCompletion::EMPTY; 64];
        let count = self.cq.poll(&mut out).expect("the completion queue is sound");
        out[..count].iter().map(|completion| (completion.wr_id, completion.status)).collect()
    }

    /// The next completion, however long it takes.
    pub(crate) fn next(&mut self) -> (u64, WorkStatus) {
        wait_for("a completion", || {
            let mut out = [WorkCompletion::EMPTY];
            let count = self.cq.poll(&mut out).expect("the completion queue is sound");
            (count == 1).then_some((out[0].wr_id, out[0].status))
        })
    }

    /// Sleeps until the completion queue's event, without polling.
    pub(crate) fn sleep_for_event(&self) {
        let fd = self.cq.event_fd().expect("simulated queues have one");
        assert!(is_readable(fd, 60), "no event came");
    }
}

/// Whether an fd is readable now or within some seconds.
pub(crate) fn is_readable(fd: impl AsFd, wait_seconds: i64) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let timeout = Timespec { tv_sec: wait_seconds, tv_nsec: 0 };
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    poll(&mut fds, Some(&timeout)).expect("poll(2) works on an event fd") == 1
}

pub(crate) fn wait_for<T>(what: &str, mut attempt: impl FnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(found) = attempt() {
            return found;
        }
        assert!(started.elapsed() < WATCHDOG, "{what} did not come");
        std::thread::yield_now();
    }
}

pub(crate) fn file(fd: &impl AsFd) -> File {
    File::from(fd.as_fd().try_clone_to_owned().expect("the test process has a descriptor left"))
}

pub(crate) fn memory() -> OwnedFd {
    let segment = Segment::create("host memory", MEMORY_BYTES).expect("a segment can be made");
    segment.try_clone_fd().expect("the test process has a descriptor left")
}

pub(crate) fn source(memory: &OwnedFd) -> MemorySource<'_> {
    MemorySource::Host { fd: memory.as_fd(), offset: 0, len_bytes: MEMORY_BYTES }
}

pub(crate) fn register(pd: &dyn ProtectionDomain, memory: &OwnedFd) -> Box<dyn MemoryRegion> {
    pd.register(source(memory), Access::DATA, 0).expect("sealed memory can be registered")
}

/// Two ends on the two HCAs of a host, in INIT.
pub(crate) fn ends(host: &SimHost) -> (End, End) {
    let hcas = host.hcas();
    let ends = (End::new(&hcas[0]), End::new(&hcas[1]));
    for end in [&ends.0, &ends.1] {
        end.control.to_init().expect("it is in RESET");
    }
    ends
}

pub(crate) fn connect(from: &End, to: &End) {
    let at = to.control.endpoint().expect("it is in INIT or later");
    from.control.connect(&at).expect("it is in INIT");
}

/// Two connected ends on the two HCAs of a host.
pub(crate) fn pair(host: &SimHost) -> (End, End) {
    let (a, b) = ends(host);
    connect(&a, &b);
    connect(&b, &a);
    (a, b)
}

pub(crate) fn request(wr_id: u64, opcode: Opcode, local: LocalSpan, remote: RemoteSpan) -> WorkRequest {
    WorkRequest {
        wr_id,
        opcode,
        signaled: true,
        fence: false,
        local,
        remote,
        imm: 0,
        operand: 0,
        compare: 0,
        inline_len: 0,
        inline: [0; MAX_INLINE_BYTES],
    }
}
