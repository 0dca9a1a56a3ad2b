//! Workers without CUDA: threads that serve memfds, and fail when told to.
#![allow(dead_code, reason = "each test binary uses its part")]

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use gdrd_cuda::worker::{End, serve};
use gdrd_cuda::{
    Device, DeviceError, DeviceErrorKind, DeviceFacts, DeviceMemory, Exported, GRANULARITY_BYTES, Launch, Place,
    PoolConfig, Scope, ServedGpu, WorkerExit, WorkerHandle, WorkerPool,
};
use gdrd_hal::{GpuAtomic, GpuUuid};
use rustix::fs::MemfdFlags;

/// Memory of the fake GPU.
pub(crate) const TOTAL_BYTES: u64 = 256 << 20;
const STAGING_BYTES: u64 = 4 << 20;

/// What goes wrong at the next call.
#[derive(Debug, Clone)]
pub(crate) enum Fault {
    /// The driver says this.
    Error(DeviceErrorKind),
    /// The worker dies before it answers.
    Die,
    /// The next memory is forgotten no sooner than the worker is killed, or [`FakeGpu::let_go`] says so.
    HangInForget,
}

/// A fake GPU: what is used is counted across its workers, as a real one counts memory that fds keep.
#[derive(Debug, Default)]
pub(crate) struct FakeGpu {
    pub(crate) faults: Mutex<VecDeque<Fault>>,
    pub(crate) no_start: Mutex<Option<DeviceError>>,
    used: Mutex<u64>,
    pub(crate) started: Mutex<u32>,
    pub(crate) scopes: Mutex<Vec<Scope>>,
    pub(crate) ends: Mutex<Vec<End>>,
    hangs: Mutex<bool>,
    goes_on: Condvar,
}

impl FakeGpu {
    pub(crate) fn let_go(&self) {
        *self.hangs.lock().expect("the fake works") = false;
        self.goes_on.notify_all();
    }

    pub(crate) fn fail_next(&self, fault: Fault) {
        if matches!(fault, Fault::HangInForget) {
            *self.hangs.lock().expect("the fake works") = true;
            return;
        }
        self.faults.lock().expect("the fake works").push_back(fault);
    }

    pub(crate) fn started(&self) -> u32 {
        *self.started.lock().expect("the fake works")
    }
}

struct FakeDevice {
    gpu: Arc<FakeGpu>,
    memory: BTreeMap<u64, (File, u64)>,
    staging: File,
    next_id: u64,
}

fn memfd(len_bytes: u64) -> OwnedFd {
    let fd = rustix::fs::memfd_create("fake-gpu", MemfdFlags::CLOEXEC).expect("the fake works");
    rustix::fs::ftruncate(&fd, len_bytes).expect("the fake works");
    fd
}

fn refused(reason: &str) -> DeviceError {
    DeviceError::refused("fake", reason)
}

impl FakeDevice {
    fn open(gpu: Arc<FakeGpu>) -> Result<(Self, OwnedFd), DeviceError> {
        *gpu.started.lock().expect("the fake works") += 1;
        if let Some(error) = gpu.no_start.lock().expect("the fake works").clone() {
            return Err(error);
        }
        let staging = memfd(STAGING_BYTES);
        let own = File::from(staging.try_clone().expect("the fake works"));
        Ok((Self { gpu, memory: BTreeMap::new(), staging: own, next_id: 1 }, staging))
    }

    fn fault(&self) -> Result<(), DeviceError> {
        let next = self.gpu.faults.lock().expect("the fake works").pop_front();
        match next {
            None | Some(Fault::HangInForget) => Ok(()),
            Some(Fault::Error(kind)) => {
                Err(DeviceError { kind, call: "fake".to_owned(), reason: "told to".to_owned() })
            }
            // Ends the thread without an answer, as a signal ends a process.
            Some(Fault::Die) => std::panic::resume_unwind(Box::new("told to die")),
        }
    }

    fn file(&self, place: Place, len_bytes: u64) -> Result<(&File, u64), DeviceError> {
        let (file, offset, whole) = match place {
            Place::Staging { offset } => (&self.staging, offset, STAGING_BYTES),
            Place::Memory { id, offset } => {
                let (file, whole) = self.memory.get(&id).ok_or_else(|| refused("no such memory"))?;
                (file, offset, *whole)
            }
        };
        match offset.checked_add(len_bytes) {
            Some(end) if end <= whole => Ok((file, offset)),
            _ => Err(refused("outside")),
        }
    }
}

impl Device for FakeDevice {
    fn facts(&self) -> DeviceFacts {
        DeviceFacts { granularity_bytes: GRANULARITY_BYTES, dma_buf: true }
    }

    fn memory(&self) -> Result<DeviceMemory, DeviceError> {
        self.fault()?;
        Ok(DeviceMemory {
            total_bytes: TOTAL_BYTES,
            free_bytes: TOTAL_BYTES - *self.gpu.used.lock().expect("the fake works"),
        })
    }

    fn allocate(&mut self, len_bytes: u64) -> Result<Exported, DeviceError> {
        self.fault()?;
        let mut used = self.gpu.used.lock().expect("the fake works");
        if len_bytes > TOTAL_BYTES - *used {
            let kind = DeviceErrorKind::OutOfMemory;
            return Err(DeviceError { kind, call: "fake".to_owned(), reason: "full".to_owned() });
        }
        *used += len_bytes;
        let memory = memfd(len_bytes);
        let id = self.next_id;
        self.next_id += 1;
        self.memory.insert(id, (File::from(memory.try_clone().expect("the fake works")), len_bytes));
        let dma_buf = Some(memory.try_clone().expect("the fake works"));
        Ok(Exported { id, memory, dma_buf })
    }

    fn import(&mut self, memory: BorrowedFd<'_>, len_bytes: u64) -> Result<u64, DeviceError> {
        self.fault()?;
        let id = self.next_id;
        self.next_id += 1;
        self.memory.insert(id, (File::from(memory.try_clone_to_owned().expect("the fake works")), len_bytes));
        Ok(id)
    }

    fn scrub(&mut self, id: u64) -> Result<(), DeviceError> {
        self.fault()?;
        let (file, len_bytes) = self.memory.get(&id).ok_or_else(|| refused("no such memory"))?;
        file.write_all_at(&vec![0; usize::try_from(*len_bytes).expect("the fake works")], 0).expect("the fake works");
        Ok(())
    }

    fn copy(&mut self, from: Place, to: Place, len_bytes: u64) -> Result<(), DeviceError> {
        self.fault()?;
        let mut bytes = vec![0; usize::try_from(len_bytes).expect("the fake works")];
        let (file, offset) = self.file(from, len_bytes)?;
        file.read_exact_at(&mut bytes, offset).expect("the fake works");
        let (file, offset) = self.file(to, len_bytes)?;
        file.write_all_at(&bytes, offset).expect("the fake works");
        Ok(())
    }

    fn atomic(&mut self, id: u64, offset: u64, operation: GpuAtomic) -> Result<u64, DeviceError> {
        self.fault()?;
        let (file, offset) = self.file(Place::Memory { id, offset }, 8)?;
        let mut word = [0; 8];
        file.read_exact_at(&mut word, offset).expect("the fake works");
        let old = u64::from_ne_bytes(word);
        let new = match operation {
            GpuAtomic::FetchAdd { operand } => old.wrapping_add(operand),
            GpuAtomic::CompareSwap { compare, operand } if compare == old => operand,
            _ => old,
        };
        file.write_all_at(&new.to_ne_bytes(), offset).expect("the fake works");
        Ok(old)
    }

    fn forget(&mut self, id: u64) {
        let hangs = self.gpu.hangs.lock().expect("the fake works");
        drop(self.gpu.goes_on.wait_while(hangs, |hangs| *hangs).expect("the fake works"));
        if let Some((_, len_bytes)) = self.memory.remove(&id) {
            *self.gpu.used.lock().expect("the fake works") -= len_bytes;
        }
    }
}

/// Workers as threads.
pub(crate) struct ThreadLauncher {
    pub(crate) gpus: Vec<(GpuUuid, Arc<FakeGpu>)>,
    pub(crate) idle: Duration,
}

struct Thread {
    gpu: Arc<FakeGpu>,
    socket: OwnedFd,
    ended: Receiver<()>,
}

impl Launch for ThreadLauncher {
    fn launch(&self, gpu: &GpuUuid, scope: Scope, socket: OwnedFd) -> io::Result<Box<dyn WorkerHandle>> {
        let found = self.gpus.iter().find(|(uuid, _)| uuid == gpu);
        let fake = found.map(|(_, fake)| Arc::clone(fake)).ok_or_else(|| io::Error::other("no such fake"))?;
        fake.scopes.lock().expect("the fake works").push(scope);
        let (idle, own) = (self.idle, socket.try_clone()?);
        let (sender, ended) = sync_channel(1);
        let gpu = Arc::clone(&fake);
        std::thread::spawn(move || {
            // Said when the thread ends, also by a panic.
            let _sender = sender;
            let socket = HangUp(socket);
            let end = serve(socket.0.as_fd(), idle, || FakeDevice::open(Arc::clone(&fake)));
            fake.ends.lock().expect("the fake works").push(end);
        });
        Ok(Box::new(Thread { gpu, socket: own, ended }))
    }
}

/// A thread's death must close the connection, of which its handle has a second descriptor.
struct HangUp(OwnedFd);

impl Drop for HangUp {
    fn drop(&mut self) {
        let _ = rustix::net::shutdown(&self.0, rustix::net::Shutdown::Both);
    }
}

impl WorkerHandle for Thread {
    fn kill(&self) {
        self.gpu.let_go();
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
    }

    fn ended(&self, patience: Duration) -> Option<WorkerExit> {
        match self.ended.recv_timeout(patience) {
            Err(std::sync::mpsc::RecvTimeoutError::Timeout) => None,
            _ => Some(WorkerExit("the thread ended".to_owned())),
        }
    }
}

pub(crate) fn uuid(index: u8) -> GpuUuid {
    GpuUuid(format!("GPU-{index:08}-0000-0000-0000-000000000000"))
}

/// A pool over this many fake GPUs.
pub(crate) fn pool(gpus: u8, idle: Duration) -> (WorkerPool, Vec<Arc<FakeGpu>>) {
    pool_with(gpus, idle, PoolConfig::default())
}

/// The same with these patiences.
pub(crate) fn pool_with(gpus: u8, idle: Duration, config: PoolConfig) -> (WorkerPool, Vec<Arc<FakeGpu>>) {
    let fakes: Vec<_> = (0..gpus).map(|index| (uuid(index), Arc::new(FakeGpu::default()))).collect();
    let served = fakes.iter().map(|(uuid, _)| ServedGpu { uuid: uuid.clone(), skipped: None }).collect();
    let launcher = ThreadLauncher { gpus: fakes.clone(), idle };
    let launcher: Arc<dyn Launch> = Arc::new(launcher);
    let pool = WorkerPool::new(served, &launcher, config);
    (pool, fakes.into_iter().map(|(_, fake)| fake).collect())
}
