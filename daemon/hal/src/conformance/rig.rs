//! Two connected ends with memory, and the words in which cases are told.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Fixture;
use crate::{
    Access, CompletionQueue, Hca, LocalSpan, MAX_INLINE_BYTES, MemoryRegion, MemorySource, Opcode, ProtectionDomain,
    QueuePair, QueuePairConfig, QueuePairState, QueuePairType, ReceiveRequest, RemoteSpan, WorkCompletion, WorkQueue,
    WorkRequest, WorkStatus,
};

/// Memory of each end.
pub(super) const MEMORY_BYTES: u64 = 256 * 1024;
/// Depths that every provider allows.
pub(super) const DEPTH: u32 = 64;
/// A hang ends the test here; no case depends on how fast anything is.
const WATCHDOG: Duration = Duration::from_secs(60);

/// Repeats `attempt` until it gives something.
pub(super) fn wait_for<T>(what: &str, mut attempt: impl FnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(found) = attempt() {
            return found;
        }
        assert!(started.elapsed() < WATCHDOG, "{what} did not come");
        std::thread::yield_now();
    }
}

/// The configuration of most queue pairs here.
pub(super) fn config(qp_type: QueuePairType) -> QueuePairConfig {
    QueuePairConfig { qp_type, send_depth: DEPTH, recv_depth: DEPTH, inline_bytes: 0, port_num: 1 }
}

/// One end: domain, memory with a region over all of it, completion queue, queue pair.
pub(super) struct End<'f> {
    pub(super) fixture: &'f dyn Fixture,
    pub(super) hca: Arc<dyn Hca>,
    pub(super) pd: Arc<dyn ProtectionDomain>,
    pub(super) memory: OwnedFd,
    pub(super) region: Box<dyn MemoryRegion>,
    pub(super) cq: Box<dyn CompletionQueue>,
    pub(super) control: Arc<dyn QueuePair>,
    pub(super) work: Box<dyn WorkQueue>,
}

impl<'f> End<'f> {
    /// An end whose queue pair is in RESET.
    pub(super) fn new(fixture: &'f dyn Fixture, hca: &Arc<dyn Hca>, config: &QueuePairConfig) -> Self {
        let cq = hca.create_cq(DEPTH * 4).expect("a completion queue of moderate depth can be made");
        Self::with_cq(fixture, hca, config, cq)
    }

    pub(super) fn with_cq(
        fixture: &'f dyn Fixture,
        hca: &Arc<dyn Hca>,
        config: &QueuePairConfig,
        cq: Box<dyn CompletionQueue>,
    ) -> Self {
        let pd = hca.alloc_pd().expect("a protection domain can be made");
        let memory = fixture.host_memory(MEMORY_BYTES);
        let region = register(&*pd, &memory, everything());
        let parts = pd.create_queue_pair(cq.id(), config).expect("a queue pair of moderate depth can be made");
        Self { fixture, hca: Arc::clone(hca), pd, memory, region, cq, control: parts.control, work: parts.work }
    }

    pub(super) fn fill(&self, offset: u64, bytes: &[u8]) {
        self.fixture.write(self.memory.as_fd(), offset, bytes);
    }

    pub(super) fn content(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.fixture.read(self.memory.as_fd(), offset, &mut bytes);
        bytes
    }

    /// A range of this end's region, as its own requests name it.
    pub(super) fn local(&self, offset: u64, len_bytes: u32) -> LocalSpan {
        local_in(&*self.region, offset, len_bytes)
    }

    /// A place in this end's region, as the peer's requests name it.
    pub(super) fn remote(&self, offset: u64) -> RemoteSpan {
        remote_in(&*self.region, offset)
    }

    pub(super) fn send(&mut self, request: WorkRequest) {
        self.work.post_send(&[request]).expect("a queue pair in RTS with room takes a send");
    }

    pub(super) fn receive(&mut self, wr_id: u64, local: LocalSpan) {
        self.work.post_recv(&[ReceiveRequest { wr_id, local }]).expect("a queue pair with room takes a receive");
    }

    /// The next completion, however long it takes.
    pub(super) fn next(&mut self) -> WorkCompletion {
        next_of(&mut *self.cq)
    }

    /// The next completion, which must have this id and status.
    pub(super) fn expect(&mut self, wr_id: u64, status: WorkStatus) -> WorkCompletion {
        let completion = self.next();
        assert_eq!(completion.wr_id, wr_id, "{completion:?}");
        assert_status(self.fixture, completion.status, status, &format!("request {wr_id}"));
        assert_eq!(completion.qp_num, self.control.qp_num());
        completion
    }

    /// Nothing has completed so far. Cannot fail by bad timing, only miss a fault on slow hardware.
    pub(super) fn expect_nothing(&mut self) {
        for _ in 0..100 {
            let mut out = [WorkCompletion::EMPTY];
            let count = self.cq.poll(&mut out).expect("the completion queue is sound");
            assert_eq!(count, 0, "completed: {:?}", out[0]);
        }
    }

    pub(super) fn expect_state(&self, wanted: QueuePairState) {
        wait_for("the state", || {
            let state = self.control.state().expect("the device is there");
            (state == wanted).then_some(())
        });
    }
}

/// The status that the specification names, or the one that the fixture says its driver gives instead.
pub(super) fn assert_status(fixture: &dyn Fixture, seen: WorkStatus, specified: WorkStatus, what: &str) {
    let instead = fixture.gives_instead_of(specified);
    assert!(seen == specified || instead.contains(&seen), "{what}: {seen:?}, not {specified:?} or {instead:?}");
}

pub(super) fn next_of(cq: &mut dyn CompletionQueue) -> WorkCompletion {
    wait_for("a completion", || {
        let mut out = [WorkCompletion::EMPTY];
        let count = cq.poll(&mut out).expect("the completion queue is sound");
        (count == 1).then_some(out[0])
    })
}

/// Connects two ends in RESET.
pub(super) fn connect(a: &End<'_>, b: &End<'_>) {
    for end in [a, b] {
        end.control.to_init().expect("a fresh queue pair goes to INIT");
    }
    let endpoint = |end: &End<'_>| end.control.endpoint().expect("a queue pair in INIT has an endpoint");
    let (at_a, at_b) = (endpoint(a), endpoint(b));
    a.control.connect(&at_b).expect("a queue pair in INIT connects");
    b.control.connect(&at_a).expect("a queue pair in INIT connects");
}

/// Two ends that are connected by RC.
pub(super) fn pair<'f>(fixture: &'f dyn Fixture) -> (End<'f>, End<'f>) {
    pair_with(fixture, &config(QueuePairType::Rc))
}

pub(super) fn pair_with<'f>(fixture: &'f dyn Fixture, config: &QueuePairConfig) -> (End<'f>, End<'f>) {
    let [hca_a, hca_b] = fixture.hcas();
    let ends = (End::new(fixture, &hca_a, config), End::new(fixture, &hca_b, config));
    connect(&ends.0, &ends.1);
    ends
}

/// All rights but atomics, which not every provider has.
pub(super) fn everything() -> Access {
    Access { remote_atomic: false, relaxed_ordering: false, ..Access::DATA }
}

/// A region over the whole memory of an end.
pub(super) fn register(pd: &dyn ProtectionDomain, memory: &OwnedFd, access: Access) -> Box<dyn MemoryRegion> {
    pd.register(whole(memory), access, 0).expect("sealed host memory can be registered")
}

pub(super) fn whole(memory: &OwnedFd) -> MemorySource<'_> {
    MemorySource::Host { fd: memory.as_fd(), offset: 0, len_bytes: MEMORY_BYTES }
}

pub(super) fn local_in(region: &dyn MemoryRegion, offset: u64, len_bytes: u32) -> LocalSpan {
    LocalSpan { lkey: region.lkey(), addr: region.iova().wrapping_add(offset), len_bytes }
}

pub(super) fn remote_in(region: &dyn MemoryRegion, offset: u64) -> RemoteSpan {
    RemoteSpan { rkey: region.rkey(), addr: region.iova().wrapping_add(offset) }
}

/// A signaled request; what an opcode does not use is ignored.
pub(super) fn request(wr_id: u64, opcode: Opcode, local: LocalSpan, remote: RemoteSpan) -> WorkRequest {
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

/// A request that carries its payload itself.
pub(super) fn inline(mut request: WorkRequest, payload: &[u8]) -> WorkRequest {
    request.inline_len = u8::try_from(payload.len()).expect("inline payloads of the suite are short");
    request.inline[..payload.len()].copy_from_slice(payload);
    request
}

/// Bytes that differ from zero and from their neighbours.
pub(super) fn pattern(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|index| (index % 251).to_le_bytes()[0].wrapping_mul(7).wrapping_add(seed) | 1).collect()
}
