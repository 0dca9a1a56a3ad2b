//! Proof that an HCA moves a piece of memory: a transfer to itself, with content that is checked.
//!
//! A registration that succeeds proves nothing: the NIC may still not reach the memory. Here an RC queue pair of the device
//! writes random bytes into the memory and another reads them back, which only works if it does.
//! Must not know: tenants, leases; what the memory is.

use std::os::fd::AsFd as _;
use std::time::{Duration, Instant};

use gdrd_hal::{
    Access, CompletionQueue, Hca, HcaError, LocalSpan, MAX_INLINE_BYTES, MemoryRegion, MemorySource, Opcode,
    QueuePairConfig, QueuePairParts, QueuePairType, RemoteSpan, WorkCompletion, WorkRequest, WorkStatus,
};

use crate::runtime::{HostMemory, possible};

/// Bytes of the memory that are proven, from its start; every backend's granularity allows as much.
pub(crate) const PROBED_BYTES: u64 = 1 << 20;
const MESSAGE_BYTES: u32 = 1 << 20;
/// Messages that are timed for bandwidth.
const MESSAGES: u32 = 16;
/// Small writes whose middle one is the latency.
const SMALL_WRITES: usize = 101;
const SMALL_BYTES: u32 = 8;
/// How long any one completion may take: far longer than retries of a queue pair.
const PATIENCE: Duration = Duration::from_secs(20);

/// What was measured beside the proof. A loopback in one device says what the path to the memory gives, not a wire.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ProbeFigures {
    /// Of writes of 1 MiB, Gbit/s.
    pub gbps: f64,
    /// Of one write of 8 bytes from post to completion, the middle one of a hundred, microseconds.
    pub latency_us: f64,
}

/// What became of a probe.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum ProbeOutcome {
    /// Every byte came back.
    Proven(ProbeFigures),
    /// It was tried and does not work.
    Failed(String),
    /// It could not be tried.
    NotTried(String),
}

/// One memory and one port of an HCA.
#[derive(Debug, Clone, PartialEq)]
pub struct Probed {
    /// Name of the GPU; empty for a host buffer.
    pub gpu: String,
    /// The HCA.
    pub hca: String,
    /// Its port, counted from 1.
    pub port_num: u8,
    /// What became of it.
    pub outcome: ProbeOutcome,
}

/// Proves one memory on one port. Blocks until it is done.
pub(crate) fn probe(hca: &dyn Hca, port_num: u8, target: MemorySource<'_>) -> ProbeOutcome {
    if let Err(what) = hca.capabilities().check_queue_pair_type(QueuePairType::Rc) {
        return ProbeOutcome::NotTried(format!("{} cannot {what}", hca.name()));
    }
    match Loop::new(hca, port_num, target).and_then(|mut made| made.prove()) {
        Ok(figures) => ProbeOutcome::Proven(figures),
        // A port whose own address is not in use yet shows nothing of the pair.
        Err(Problem::Hca(error @ (HcaError::Exhausted { .. } | HcaError::Unreachable { .. }))) => {
            ProbeOutcome::NotTried(error.to_string())
        }
        Err(Problem::Hca(error @ HcaError::Unsupported { .. })) if matches!(target, MemorySource::DmaBuf { .. }) => {
            ProbeOutcome::Failed(format!("dma-buf: not on this HCA: {error}"))
        }
        Err(Problem::Hca(error)) => ProbeOutcome::Failed(error.to_string()),
        Err(Problem::System(errno)) => ProbeOutcome::NotTried(format!("host memory: {errno}")),
        Err(Problem::Transfer(what)) => ProbeOutcome::Failed(what),
    }
}

enum Problem {
    Hca(HcaError),
    System(rustix::io::Errno),
    Transfer(String),
}

impl From<HcaError> for Problem {
    fn from(error: HcaError) -> Self {
        Self::Hca(error)
    }
}

impl From<rustix::io::Errno> for Problem {
    fn from(errno: rustix::io::Errno) -> Self {
        Self::System(errno)
    }
}

/// Two connected queue pairs of one device. Queue pairs end before the registrations that they use.
struct Loop {
    near: QueuePairParts,
    _far: QueuePairParts,
    cq: Box<dyn CompletionQueue>,
    target: Box<dyn MemoryRegion>,
    /// What is sent, and behind it what comes back.
    own: Box<dyn MemoryRegion>,
    memory: HostMemory,
}

impl Loop {
    fn new(hca: &dyn Hca, port_num: u8, target: MemorySource<'_>) -> Result<Self, Problem> {
        let pd = hca.alloc_pd()?;
        let memory = HostMemory::ordinary(2 * PROBED_BYTES)?;
        let access = possible(Access::DATA, hca);
        let source = MemorySource::Host { fd: memory.own_fd(), offset: 0, len_bytes: memory.len_bytes() };
        let own = pd.register(source, access, 0)?;
        let target = pd.register(target, access, 0)?;
        let cq = hca.create_cq(4 * MESSAGES)?;
        let config = QueuePairConfig {
            qp_type: QueuePairType::Rc,
            send_depth: MESSAGES,
            recv_depth: 1,
            inline_bytes: 0,
            port_num,
        };
        let (near, far) = (pd.create_queue_pair(cq.id(), &config)?, pd.create_queue_pair(cq.id(), &config)?);
        near.control.to_init()?;
        far.control.to_init()?;
        let (at_near, at_far) = (near.control.endpoint()?, far.control.endpoint()?);
        near.control.connect(&at_far)?;
        far.control.connect(&at_near)?;
        Ok(Self { near, _far: far, cq, target, own, memory })
    }

    fn prove(&mut self) -> Result<ProbeFigures, Problem> {
        let mut sent = vec![0; usize::try_from(PROBED_BYTES).unwrap_or(0)];
        fill(&mut sent)?;
        pwrite_all(&self.memory, &sent)?;
        self.complete(Opcode::Write, MESSAGE_BYTES, 0)?;
        self.complete(Opcode::Read, MESSAGE_BYTES, PROBED_BYTES)?;
        let mut back = vec![0; sent.len()];
        pread_all(&self.memory, PROBED_BYTES, &mut back)?;
        if let Some(at) = sent.iter().zip(&back).position(|(sent, back)| sent != back) {
            return Err(Problem::Transfer(format!("the content that came back differs from byte {at} on")));
        }
        Ok(ProbeFigures { gbps: self.bandwidth()?, latency_us: self.latency()? })
    }

    /// Bits a nanosecond are Gbit/s.
    fn bandwidth(&mut self) -> Result<f64, Problem> {
        let start = Instant::now();
        for _ in 0..MESSAGES {
            self.post(Opcode::Write, MESSAGE_BYTES, 0)?;
        }
        for _ in 0..MESSAGES {
            self.completion()?;
        }
        let bits = f64::from(MESSAGES) * f64::from(MESSAGE_BYTES) * 8.0;
        Ok(bits / (start.elapsed().as_secs_f64() * 1e9))
    }

    fn latency(&mut self) -> Result<f64, Problem> {
        let mut taken = [Duration::ZERO; SMALL_WRITES];
        for one in &mut taken {
            let start = Instant::now();
            self.complete(Opcode::Write, SMALL_BYTES, 0)?;
            *one = start.elapsed();
        }
        taken.sort_unstable();
        Ok(taken.get(SMALL_WRITES / 2).map_or(0.0, |middle| middle.as_secs_f64() * 1e6))
    }

    fn complete(&mut self, opcode: Opcode, len_bytes: u32, at: u64) -> Result<(), Problem> {
        self.post(opcode, len_bytes, at)?;
        self.completion()
    }

    fn post(&mut self, opcode: Opcode, len_bytes: u32, at: u64) -> Result<(), Problem> {
        let request = WorkRequest {
            wr_id: 1,
            opcode,
            signaled: true,
            fence: false,
            local: LocalSpan { lkey: self.own.lkey(), addr: self.own.iova().wrapping_add(at), len_bytes },
            remote: RemoteSpan { rkey: self.target.rkey(), addr: self.target.iova() },
            imm: 0,
            operand: 0,
            compare: 0,
            inline_len: 0,
            inline: [0; MAX_INLINE_BYTES],
        };
        let posted = self.near.work.post_send(&[request]);
        posted.map_err(|(_, error)| Problem::Transfer(format!("{opcode:?} was not taken: {error}")))
    }

    fn completion(&mut self) -> Result<(), Problem> {
        let start = Instant::now();
        let mut out = [WorkCompletion::EMPTY];
        while self.cq.poll(&mut out)? == 0 {
            if start.elapsed() > PATIENCE {
                return Err(Problem::Transfer(format!("no completion within {} s", PATIENCE.as_secs())));
            }
            std::thread::yield_now();
        }
        match out[0].status {
            WorkStatus::Success => Ok(()),
            status => Err(Problem::Transfer(format!("a transfer ended with {status:?}"))),
        }
    }
}

/// Content that no earlier probe has left there: xorshift64 from a random seed.
fn fill(bytes: &mut [u8]) -> Result<(), rustix::io::Errno> {
    let mut seed = [0; 8];
    rustix::rand::getrandom(&mut seed, rustix::rand::GetRandomFlags::empty())?;
    let mut state = u64::from_ne_bytes(seed) | 1;
    for chunk in bytes.chunks_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        for (byte, drawn) in chunk.iter_mut().zip(state.to_ne_bytes()) {
            *byte = drawn;
        }
    }
    Ok(())
}

fn pwrite_all(memory: &HostMemory, bytes: &[u8]) -> Result<(), rustix::io::Errno> {
    let mut done = 0;
    while let Some(left) = bytes.get(done..).filter(|left| !left.is_empty()) {
        match rustix::io::pwrite(memory.own_fd().as_fd(), left, done as u64)? {
            0 => return Err(rustix::io::Errno::IO),
            count => done += count,
        }
    }
    Ok(())
}

fn pread_all(memory: &HostMemory, offset: u64, bytes: &mut [u8]) -> Result<(), rustix::io::Errno> {
    let mut done = 0;
    while let Some(left) = bytes.get_mut(done..).filter(|left| !left.is_empty()) {
        match rustix::io::pread(memory.own_fd().as_fd(), left, offset + done as u64)? {
            0 => return Err(rustix::io::Errno::IO),
            count => done += count,
        }
    }
    Ok(())
}
