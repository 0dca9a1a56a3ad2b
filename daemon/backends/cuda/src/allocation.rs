//! An allocation as the daemon holds it: its fds, and its number in the worker that runs now.

use std::any::Any;
use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, Weak};

use gdrd_hal::{GpuAllocation, GpuAtomic, GpuBytes, GpuMemoryError, GpuUuid};

use crate::device::Place;
use crate::pool::{Interrupted, Slot, Worker, lock};
use crate::protocol::{Atomic, Reply, Request};
use crate::staging::STAGING_BYTES;

/// Device and inode of a file. Each dma-buf is an inode of its own; a duplicate of its fd has the same.
pub(crate) type FileId = (u64, u64);

/// The file behind an fd.
pub(crate) fn file_id(fd: BorrowedFd<'_>) -> Option<FileId> {
    let stat = rustix::fs::fstat(fd).ok()?;
    Some((stat.st_dev, stat.st_ino))
}

/// Living allocations by the file of their dma-buf.
#[derive(Default)]
pub(crate) struct Known(Mutex<HashMap<FileId, Weak<Memory>>>);

impl Known {
    pub(crate) fn insert(&self, memory: &Arc<Memory>) {
        if let Some(id) = memory.dma_buf_id() {
            lock(&self.0).insert(id, Arc::downgrade(memory));
        }
    }

    pub(crate) fn remove(&self, id: FileId) {
        lock(&self.0).remove(&id);
    }

    pub(crate) fn find(&self, id: FileId) -> Option<Arc<Memory>> {
        lock(&self.0).get(&id)?.upgrade()
    }
}

/// One allocation. The fds keep the memory; the worker may come and go.
pub(crate) struct Memory {
    slot: Arc<Slot>,
    known: Arc<Known>,
    len_bytes: u64,
    memory: OwnedFd,
    dma_buf: Option<OwnedFd>,
    /// Epoch of a worker and the number there.
    at: Mutex<(u64, u64)>,
}

impl Memory {
    pub(crate) fn new(
        slot: &Arc<Slot>,
        known: &Arc<Known>,
        len_bytes: u64,
        (memory, dma_buf): (OwnedFd, Option<OwnedFd>),
        at: (u64, u64),
    ) -> Self {
        Self { slot: Arc::clone(slot), known: Arc::clone(known), len_bytes, memory, dma_buf, at: Mutex::new(at) }
    }

    pub(crate) fn dma_buf_id(&self) -> Option<FileId> {
        file_id(self.dma_buf.as_ref()?.as_fd())
    }

    /// Its number in this worker, imported where an earlier one made it.
    fn id_in(&self, worker: &Worker) -> Result<u64, Interrupted> {
        let mut at = lock(&self.at);
        if at.0 != worker.epoch {
            let request = Request::Import { len_bytes: self.len_bytes };
            let (Reply::Imported { id }, _) = worker.ask(&request, &[self.memory.as_fd()])? else {
                return Err(Interrupted::nonsense());
            };
            worker.mapped_bytes.fetch_add(self.len_bytes, Ordering::Relaxed);
            *at = (worker.epoch, id);
        }
        Ok(at.1)
    }

    fn place_in(&self, worker: &Worker, offset: u64) -> Result<Place, Interrupted> {
        Ok(Place::Memory { id: self.id_in(worker)?, offset })
    }

    fn scrub(&self) -> Result<(), GpuMemoryError> {
        let scrubbed = self.slot.with_worker(|worker| {
            let id = self.id_in(worker)?;
            done(worker, &Request::Scrub { id })
        });
        scrubbed.map_err(|failure| self.slot.error("scrub", self.len_bytes, failure))
    }
}

fn done(worker: &Worker, request: &Request) -> Result<(), Interrupted> {
    match worker.ask(request, &[])? {
        (Reply::Done, _) => Ok(()),
        _ => Err(Interrupted::nonsense()),
    }
}

fn copy(worker: &Worker, from: Place, to: Place, len_bytes: u64) -> Result<(), Interrupted> {
    done(worker, &Request::Copy { from, to, len_bytes })
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Some(id) = self.dma_buf_id() {
            self.known.remove(id);
        }
        let (epoch, id) = *lock(&self.at);
        // A worker that has ended holds nothing.
        self.slot.with_running(epoch, |worker| {
            done(worker, &Request::Forget { id })?;
            worker.mapped_bytes.fetch_sub(self.len_bytes, Ordering::Relaxed);
            Ok(())
        });
    }
}

/// What the engine owns.
pub(crate) struct Allocation(pub(crate) Arc<Memory>);

impl GpuAllocation for Allocation {
    fn gpu(&self) -> &GpuUuid {
        &self.0.slot.gpu
    }

    fn len_bytes(&self) -> u64 {
        self.0.len_bytes
    }

    fn memory_fd(&self) -> BorrowedFd<'_> {
        self.0.memory.as_fd()
    }

    fn dma_buf_fd(&self) -> Option<BorrowedFd<'_>> {
        self.0.dma_buf.as_ref().map(AsFd::as_fd)
    }

    fn scrub(&self) -> Result<(), GpuMemoryError> {
        self.0.scrub()
    }
}

/// Its bytes, for who has no NIC to move them.
pub(crate) struct Bytes(pub(crate) Arc<Memory>);

impl Bytes {
    fn chunks(len: usize) -> impl Iterator<Item = (usize, usize)> {
        (0..len).step_by(STAGING_BYTES).map(move |start| (start, STAGING_BYTES.min(len - start)))
    }
}

fn io(call: &'static str) -> impl Fn(rustix::io::Errno) -> Interrupted {
    move |errno| Interrupted::refused(call, format!("staging: {errno}"))
}

impl GpuBytes for Bytes {
    fn len_bytes(&self) -> u64 {
        self.0.len_bytes
    }

    fn read(&self, offset: u64, to: &mut [u8]) -> Result<(), GpuMemoryError> {
        let memory = &self.0;
        for (start, len) in Self::chunks(to.len()) {
            let to = to.get_mut(start..start + len).unwrap_or_default();
            let moved = memory.slot.with_worker(|worker| {
                let from = memory.place_in(worker, offset.saturating_add(start as u64))?;
                copy(worker, from, Place::Staging { offset: 0 }, len as u64)?;
                let got = rustix::io::pread(&worker.staging, &mut *to, 0).map_err(io("read"))?;
                if got == len { Ok(()) } else { Err(Interrupted::nonsense()) }
            });
            moved.map_err(|failure| memory.slot.error("read", len as u64, failure))?;
        }
        Ok(())
    }

    fn write(&self, offset: u64, from: &[u8]) -> Result<(), GpuMemoryError> {
        let memory = &self.0;
        for (start, len) in Self::chunks(from.len()) {
            let from = from.get(start..start + len).unwrap_or_default();
            let moved = memory.slot.with_worker(|worker| {
                let put = rustix::io::pwrite(&worker.staging, from, 0).map_err(io("write"))?;
                if put != len {
                    return Err(Interrupted::nonsense());
                }
                let to = memory.place_in(worker, offset.saturating_add(start as u64))?;
                copy(worker, Place::Staging { offset: 0 }, to, len as u64)
            });
            moved.map_err(|failure| memory.slot.error("write", len as u64, failure))?;
        }
        Ok(())
    }

    fn copy_to(&self, offset: u64, to: &dyn GpuBytes, to_offset: u64, len_bytes: u64) -> Result<(), GpuMemoryError> {
        let from = &self.0;
        let Some(Self(to)) = to.as_any().downcast_ref::<Self>() else {
            return Err(from.slot.driver("copy", "the other memory is of another backend".to_owned()));
        };
        if Arc::ptr_eq(&from.slot, &to.slot) {
            let copied = from.slot.with_worker(|worker| {
                let (from, to) = (from.place_in(worker, offset)?, to.place_in(worker, to_offset)?);
                copy(worker, from, to, len_bytes)
            });
            return copied.map_err(|failure| from.slot.error("copy", len_bytes, failure));
        }
        // Two GPUs, two workers: by way of the daemon.
        let mut done_bytes = 0;
        let mut chunk = vec![0; STAGING_BYTES];
        while done_bytes < len_bytes {
            let len = usize::try_from(len_bytes - done_bytes).unwrap_or(usize::MAX).min(STAGING_BYTES);
            let chunk = chunk.get_mut(..len).unwrap_or_default();
            self.read(offset.saturating_add(done_bytes), chunk)?;
            Self(Arc::clone(to)).write(to_offset.saturating_add(done_bytes), chunk)?;
            done_bytes += len as u64;
        }
        Ok(())
    }

    fn atomic(&self, offset: u64, operation: GpuAtomic) -> Result<u64, GpuMemoryError> {
        let memory = &self.0;
        let operation = match operation {
            GpuAtomic::FetchAdd { operand } => Atomic::FetchAdd { operand },
            GpuAtomic::CompareSwap { compare, operand } => Atomic::CompareSwap { compare, operand },
            _ => return Err(memory.slot.driver("atomic", "an operation that it does not know".to_owned())),
        };
        let done = memory.slot.with_worker(|worker| {
            let id = memory.id_in(worker)?;
            match worker.ask(&Request::Atomic { id, offset, operation }, &[])? {
                (Reply::Old(old), _) => Ok(old),
                _ => Err(Interrupted::nonsense()),
            }
        });
        done.map_err(|failure| memory.slot.error("atomic", 8, failure))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
