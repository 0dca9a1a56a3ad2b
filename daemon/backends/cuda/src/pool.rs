//! The daemon's side: a worker per GPU, started on use.
//!
//! Calls on one GPU go one after the other; a worker that ends in a call fails that call, and the next one starts
//! another. A worker that was idle says so before it ends, and what met it is asked again.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use gdrd_hal::{
    GpuAllocation, GpuBytes, GpuCopies, GpuMemory, GpuMemoryCapabilities, GpuMemoryError, GpuMemoryUsage, GpuUuid,
    KeptMemory,
};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use crate::allocation::{Allocation, Bytes, Known, Memory, file_id};
use crate::device::{DeviceError, DeviceErrorKind};
use crate::launch::{Launch, Scope, WorkerHandle};
use crate::loss::Loss;
use crate::protocol::{ReceiveError, Reply, Request, receive, send};

/// Granularity of CUDA's virtual memory management on every GPU so far; a worker whose driver says otherwise does not
/// start. A constant, so that it is known without starting one.
pub const GRANULARITY_BYTES: u64 = 2 << 20;

/// Place of memory that no worker of this pool has: epochs start at 1.
const NO_WORKER: (u64, u64) = (0, 0);

/// How often a call is asked again because the worker it met was just ending. Two in a row would be chance enough.
const MAX_IDLE_ENDS: u32 = 3;
/// How long the end of a worker is waited for before it is killed, and after.
const END_PATIENCE: Duration = Duration::from_secs(5);

/// How long workers are waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolConfig {
    /// For one call. A worker that takes longer is killed.
    pub call_timeout: Duration,
    /// For the start: a context takes about 0.25 s, more where the driver has to wake the GPU first.
    pub start_timeout: Duration,
}

impl Default for PoolConfig {
    fn default() -> Self {
        Self { call_timeout: Duration::from_secs(60), start_timeout: Duration::from_secs(60) }
    }
}

/// A GPU that the pool knows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServedGpu {
    /// Identity.
    pub uuid: GpuUuid,
    /// Why it is not served (MIG on, exclusive process, lost); `None` when it is.
    pub skipped: Option<String>,
}

/// GPU memory of a host, by workers.
pub struct WorkerPool {
    slots: Vec<Arc<Slot>>,
    known: Arc<Known>,
    last_resumed: Mutex<Option<Instant>>,
}

impl std::fmt::Debug for WorkerPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.slots.iter().map(|slot| &slot.gpu)).finish()
    }
}

impl WorkerPool {
    /// A pool for these GPUs. Starts no worker.
    #[must_use]
    pub fn new(gpus: Vec<ServedGpu>, launcher: &Arc<dyn Launch>, config: PoolConfig) -> Self {
        let drained = Arc::new(AtomicUsize::new(0));
        let slot = |gpu: ServedGpu| {
            Arc::new(Slot {
                gpu: gpu.uuid,
                skipped: gpu.skipped,
                launcher: Arc::clone(launcher),
                config,
                drained: Arc::clone(&drained),
                lost: Loss::default(),
                state: Mutex::default(),
            })
        };
        Self { slots: gpus.into_iter().map(slot).collect(), known: Arc::default(), last_resumed: Mutex::default() }
    }

    fn allocation(
        &self,
        slot: &Arc<Slot>,
        len_bytes: u64,
        fds: (OwnedFd, Option<OwnedFd>),
        at: (u64, u64),
    ) -> Box<dyn GpuAllocation> {
        let memory = Arc::new(Memory::new(slot, &self.known, len_bytes, fds, at));
        self.known.insert(&memory);
        Box::new(Allocation(memory))
    }

    /// Serves a GPU no more, since something was heard of it, until it is resumed and found well. Its worker ends at the
    /// next call.
    pub fn lose(&self, gpu: &GpuUuid, reason: &str) {
        if let Ok(slot) = self.slot(gpu) {
            slot.lost.hear(reason);
        }
    }

    /// The driver was asked at `asked`, and says that the GPU works: that ends a loss if the GPU had been resumed by then.
    pub fn found_well(&self, gpu: &GpuUuid, asked: Instant) {
        if let Ok(slot) = self.slot(gpu) {
            slot.lost.found_well(asked);
        }
    }

    /// When a GPU was last resumed.
    #[must_use]
    pub fn last_resumed(&self) -> Option<Instant> {
        *lock(&self.last_resumed)
    }

    /// The process that serves a GPU now, and the bytes of allocations that it has mapped.
    #[must_use]
    pub fn worker_process(&self, gpu: &GpuUuid) -> Option<(u32, u64)> {
        let state = lock(&self.slot(gpu).ok()?.state);
        let worker = state.worker.as_ref()?;
        Some((worker.handle.pid()?, worker.mapped_bytes.load(Ordering::Relaxed)))
    }

    /// Why a GPU is served no more, after [`WorkerPool::lose`].
    #[must_use]
    pub fn lost(&self, gpu: &GpuUuid) -> Option<String> {
        self.slot(gpu).ok()?.lost.reason()
    }

    fn slot(&self, gpu: &GpuUuid) -> Result<&Arc<Slot>, GpuMemoryError> {
        let found = self.slots.iter().find(|slot| slot.gpu == *gpu);
        found.ok_or_else(|| GpuMemoryError::UnknownGpu { uuid: gpu.0.clone() })
    }
}

impl GpuMemory for WorkerPool {
    fn capabilities(&self) -> GpuMemoryCapabilities {
        GpuMemoryCapabilities { granularity_bytes: GRANULARITY_BYTES, dma_buf: true }
    }

    fn usage(&self, gpu: &GpuUuid) -> Result<GpuMemoryUsage, GpuMemoryError> {
        let slot = self.slot(gpu)?;
        slot.with_worker(|worker| match worker.ask(&Request::Memory, &[])? {
            (Reply::Memory(memory), _) => {
                Ok(GpuMemoryUsage { total_bytes: memory.total_bytes, free_bytes: memory.free_bytes })
            }
            _ => Err(Interrupted::nonsense()),
        })
        .map_err(|failure| slot.error("usage", 0, failure))
    }

    fn allocate(&self, gpu: &GpuUuid, len_bytes: u64) -> Result<Box<dyn GpuAllocation>, GpuMemoryError> {
        let slot = self.slot(gpu)?;
        slot.check_length(len_bytes)?;
        let made = slot.with_worker(|worker| match worker.ask(&Request::Allocate { len_bytes }, &[])? {
            (Reply::Allocated { id }, fds) => {
                worker.mapped_bytes.fetch_add(len_bytes, Ordering::Relaxed);
                Ok((worker.epoch, id, fds))
            }
            _ => Err(Interrupted::nonsense()),
        });
        let (epoch, id, fds) = made.map_err(|failure| slot.error("allocate", len_bytes, failure))?;
        let mut fds = fds.into_iter();
        let memory = fds.next().ok_or_else(|| slot.driver("allocate", "the worker sent no fd".to_owned()))?;
        Ok(self.allocation(slot, len_bytes, (memory, fds.next()), (epoch, id)))
    }

    fn import(
        &self,
        gpu: &GpuUuid,
        len_bytes: u64,
        kept: KeptMemory,
    ) -> Result<Box<dyn GpuAllocation>, GpuMemoryError> {
        let slot = self.slot(gpu)?;
        slot.check_length(len_bytes)?;
        // The worker of the first call on it takes it in.
        Ok(self.allocation(slot, len_bytes, (kept.memory, kept.dma_buf), NO_WORKER))
    }

    fn drain(&self, gpu: &GpuUuid) -> Result<(), GpuMemoryError> {
        let slot = self.slot(gpu)?;
        // Before the others are looked at, so that what they start from here on holds nothing of this one.
        slot.set_drained(true);
        for other in &self.slots {
            let mut state = lock(&other.state);
            if Arc::ptr_eq(slot, other) || state.worker.as_ref().is_some_and(|worker| worker.scope == Scope::Host) {
                state.stop();
            }
        }
        Ok(())
    }

    fn resume(&self, gpu: &GpuUuid) -> Result<(), GpuMemoryError> {
        let slot = self.slot(gpu)?;
        slot.set_drained(false);
        let now = Instant::now();
        *lock(&self.last_resumed) = Some(now);
        slot.lost.resume(now);
        Ok(())
    }
}

impl GpuCopies for WorkerPool {
    fn find(&self, dma_buf: BorrowedFd<'_>) -> Option<Arc<dyn GpuBytes>> {
        self.known.find(file_id(dma_buf)?).map(|memory| Arc::new(Bytes(memory)) as Arc<dyn GpuBytes>)
    }
}

/// One GPU and its worker.
pub(crate) struct Slot {
    pub(crate) gpu: GpuUuid,
    skipped: Option<String>,
    launcher: Arc<dyn Launch>,
    config: PoolConfig,
    /// How many GPUs of the pool are drained.
    drained: Arc<AtomicUsize>,
    /// What was heard of it that ends its service.
    lost: Loss,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    worker: Option<Worker>,
    started: u64,
    drained: bool,
}

impl State {
    /// Ends the worker, if there is one, and says how it ended.
    fn stop(&mut self) -> Option<String> {
        let Worker { socket, staging, handle, .. } = self.worker.take()?;
        // The end of the stream ends it.
        drop((socket, staging));
        let exit = handle.ended(END_PATIENCE).or_else(|| {
            handle.kill();
            handle.ended(END_PATIENCE)
        });
        exit.map(|exit| exit.0)
    }
}

/// A running worker.
pub(crate) struct Worker {
    socket: OwnedFd,
    pub(crate) staging: OwnedFd,
    handle: Box<dyn WorkerHandle>,
    /// Counts workers of the GPU: numbers of allocations are good for one worker only.
    pub(crate) epoch: u64,
    scope: Scope,
    /// Bytes of the allocations that it has mapped: they count as its own in the driver's lists of processes.
    pub(crate) mapped_bytes: AtomicU64,
    call_timeout: Duration,
}

/// Why a call on a worker came to nothing.
pub(crate) enum Interrupted {
    /// The worker was ending; ask another.
    Idle,
    /// The worker answers no more.
    Gone(String),
    /// It answered with descriptors that this process has no room for. Nobody has what they were of but the worker.
    NoDescriptors(String),
    /// The device refused.
    Device { error: DeviceError, free_bytes: u64 },
}

impl Interrupted {
    pub(crate) fn nonsense() -> Self {
        Self::Gone("it answered something else than what was asked".to_owned())
    }

    pub(crate) fn refused(call: &str, reason: impl Into<String>) -> Self {
        Self::Device { error: DeviceError::refused(call, reason), free_bytes: 0 }
    }
}

/// Why a call failed for good.
pub(crate) enum Failure {
    Unavailable(String),
    Broken(String),
    NoDescriptors(String),
    Device { error: DeviceError, free_bytes: u64 },
}

impl Worker {
    /// Asks and waits for the answer.
    pub(crate) fn ask(&self, request: &Request, fds: &[BorrowedFd<'_>]) -> Result<(Reply, Vec<OwnedFd>), Interrupted> {
        // A worker that has gone may have said why: what it sent last can still be read.
        let sent = send(&self.socket, request, fds);
        match receive(&self.socket, Some(self.call_timeout)) {
            Ok((Reply::Bye, _)) => Err(Interrupted::Idle),
            Ok((Reply::Failed { error, free_bytes }, _)) => Err(Interrupted::Device { error, free_bytes }),
            Ok(answer) => sent.map(|()| answer).map_err(|errno| Interrupted::Gone(format!("send: {errno}"))),
            Err(error @ ReceiveError::NoDescriptors) => Err(Interrupted::NoDescriptors(error.to_string())),
            Err(error) => Err(Interrupted::Gone(error.to_string())),
        }
    }
}

impl Slot {
    /// Runs `call` on the worker, started where there is none; again where the worker was just ending.
    pub(crate) fn with_worker<T>(&self, mut call: impl FnMut(&Worker) -> Result<T, Interrupted>) -> Result<T, Failure> {
        let mut state = lock(&self.state);
        for _ in 0..MAX_IDLE_ENDS {
            let worker = self.start(&mut state)?;
            match call(worker) {
                Ok(done) => return Ok(done),
                Err(interrupted) => match self.interrupted(&mut state, interrupted) {
                    Some(failure) => return Err(failure),
                    None => continue,
                },
            }
        }
        Err(Failure::Broken(format!("{MAX_IDLE_ENDS} workers in a row ended as idle; raise the idle time")))
    }

    /// Runs `call` on the worker of that epoch, if it still runs.
    pub(crate) fn with_running(&self, epoch: u64, call: impl FnOnce(&Worker) -> Result<(), Interrupted>) {
        let mut state = lock(&self.state);
        let worker = state.worker.as_ref().filter(|worker| worker.epoch == epoch);
        if let Some(Err(interrupted)) = worker.map(call) {
            self.interrupted(&mut state, interrupted);
        }
    }

    /// Ends the worker of a call that came to nothing, unless it is as good as before: what it sends late would be taken
    /// for the answer to the next call. `None` where another one may be asked.
    fn interrupted(&self, state: &mut State, interrupted: Interrupted) -> Option<Failure> {
        match interrupted {
            Interrupted::Idle => {
                state.stop();
                None
            }
            Interrupted::Gone(reason) => {
                let exit = self.kill(state, &reason);
                Some(Failure::Broken(format!("the worker failed in the call ({reason}; {exit})")))
            }
            Interrupted::NoDescriptors(reason) => {
                self.kill(state, &reason);
                Some(Failure::NoDescriptors(reason))
            }
            Interrupted::Device { error, free_bytes } => {
                if matches!(error.kind, DeviceErrorKind::Sticky | DeviceErrorKind::Lost) {
                    state.stop();
                    tracing::warn!(gpu = %self.gpu, %error, "a worker ended: its device failed");
                }
                Some(Failure::Device { error, free_bytes })
            }
        }
    }

    /// How it ended.
    fn kill(&self, state: &mut State, reason: &str) -> String {
        // One that hangs does not mind the end of the stream.
        if let Some(worker) = &state.worker {
            worker.handle.kill();
        }
        let exit = state.stop().unwrap_or_else(|| "it does not end".to_owned());
        tracing::warn!(gpu = %self.gpu, %reason, %exit, "a worker failed");
        exit
    }

    fn start<'s>(&self, state: &'s mut State) -> Result<&'s Worker, Failure> {
        if let Some(reason) = &self.skipped {
            return Err(Failure::Unavailable(reason.clone()));
        }
        if state.drained {
            return Err(Failure::Unavailable("it is drained".to_owned()));
        }
        if let Some(reason) = self.lost.reason() {
            state.stop();
            return Err(Failure::Unavailable(reason));
        }
        let worker = match state.worker.take() {
            Some(worker) => worker,
            None => {
                state.started += 1;
                self.launch(state.started)?
            }
        };
        Ok(state.worker.insert(worker))
    }

    fn set_drained(&self, drained: bool) {
        let mut state = lock(&self.state);
        if state.drained != drained {
            state.drained = drained;
            if drained {
                self.drained.fetch_add(1, Ordering::AcqRel);
            } else {
                self.drained.fetch_sub(1, Ordering::AcqRel);
            }
        }
    }

    fn launch(&self, epoch: u64) -> Result<Worker, Failure> {
        let failed = |reason: String| Failure::Broken(format!("start a worker: {reason}"));
        let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let refused = |call: &str, error: io::Error| match Errno::from_io_error(&error) {
            Some(Errno::MFILE | Errno::NFILE) => Failure::NoDescriptors(format!("start a worker: {call}{error}")),
            _ => failed(format!("{call}{error}")),
        };
        let (socket, theirs) = pair.map_err(|errno| refused("socketpair: ", errno.into()))?;
        let scope = if self.drained.load(Ordering::Acquire) == 0 { Scope::Host } else { Scope::OwnGpu };
        let handle = self.launcher.launch(&self.gpu, scope, theirs).map_err(|error| refused("", error))?;
        let answer = receive::<Reply>(&socket, Some(self.config.start_timeout));
        let refused = match answer {
            Ok((Reply::Ready { facts }, fds)) => match fds.into_iter().next() {
                Some(staging) if GRANULARITY_BYTES.is_multiple_of(facts.granularity_bytes.max(1)) => {
                    tracing::info!(gpu = %self.gpu, dma_buf = facts.dma_buf, "a worker started");
                    let call_timeout = self.config.call_timeout;
                    let mapped_bytes = AtomicU64::new(0);
                    return Ok(Worker { socket, staging, handle, epoch, scope, mapped_bytes, call_timeout });
                }
                Some(_) => failed(format!("granularity {} does not divide 2 MiB", facts.granularity_bytes)),
                None => failed("it sent no staging segment".to_owned()),
            },
            Ok((Reply::Failed { error, free_bytes }, _)) => Failure::Device { error, free_bytes },
            Ok(_) => failed("it did not say that it is ready".to_owned()),
            Err(ReceiveError::Ended) => {
                let exit = handle.ended(END_PATIENCE).map_or_else(|| "unknown".to_owned(), |exit| exit.0);
                failed(format!("it ended at once ({exit})"))
            }
            Err(error @ ReceiveError::NoDescriptors) => Failure::NoDescriptors(format!("start a worker: {error}")),
            Err(error) => failed(error.to_string()),
        };
        handle.kill();
        handle.ended(END_PATIENCE);
        Err(refused)
    }

    fn check_length(&self, len_bytes: u64) -> Result<(), GpuMemoryError> {
        if len_bytes > 0 && len_bytes.is_multiple_of(GRANULARITY_BYTES) {
            return Ok(());
        }
        let granularity_bytes = GRANULARITY_BYTES;
        Err(GpuMemoryError::BadLength { uuid: self.gpu.0.clone(), len_bytes, granularity_bytes })
    }

    pub(crate) fn driver(&self, call: &'static str, reason: String) -> GpuMemoryError {
        GpuMemoryError::Driver { call, uuid: self.gpu.0.clone(), reason }
    }

    /// What the engine is told.
    pub(crate) fn error(&self, call: &'static str, len_bytes: u64, failure: Failure) -> GpuMemoryError {
        let uuid = self.gpu.0.clone();
        match failure {
            Failure::Unavailable(reason) => GpuMemoryError::Lost { uuid, reason },
            Failure::NoDescriptors(reason) => GpuMemoryError::OutOfDescriptors { call, uuid, reason },
            Failure::Broken(reason) => self.driver(call, format!("{reason}; the next call starts another")),
            Failure::Device { error, free_bytes } => match error.kind {
                DeviceErrorKind::OutOfMemory => GpuMemoryError::OutOfMemory { uuid, len_bytes, free_bytes },
                DeviceErrorKind::Lost => GpuMemoryError::Lost { uuid, reason: error.to_string() },
                DeviceErrorKind::Sticky => {
                    self.driver(call, format!("{error}; its worker ended, the next call starts another"))
                }
                DeviceErrorKind::Refused => self.driver(call, error.to_string()),
            },
        }
    }
}

/// A lock whose content is whole at every step, so that a panic elsewhere does not matter.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for Slot {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        state.stop();
    }
}
