//! The way between two GPUs that do not reach each other: through host memory.

use std::ffi::c_uint;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use crate::mapping::as_len;
use crate::table::Opaque;
use crate::{CudaError, Gpu, Mapping};

/// `CU_MEMHOSTALLOC_PORTABLE`, cuda.h: pinned for every context of the process.
pub(crate) const PORTABLE: c_uint = 1;
/// Length of one piece on its way. Long enough that the cost of a call does not show, short enough that the first is
/// out early.
const PIECE_BYTES: u64 = 8 << 20;
/// Pieces on their way at one time: one comes in, one goes out, and one is ready for either.
const PIECES: u64 = 4;

/// Pinned host memory through which one GPU's data goes to another. The pieces of a copy come in from one GPU while
/// earlier ones go out to the other.
#[derive(Debug)]
pub struct BounceBuffer {
    gpu: Arc<Gpu>,
    start: Opaque,
}

/// A piece of a copy: bytes from its start, length, and the place that it has here.
type Piece = (u64, u64, Opaque);

impl BounceBuffer {
    /// 32 MiB of host memory near the calling thread, pinned.
    ///
    /// # Errors
    /// `Driver`.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self, CudaError> {
        let _current = gpu.enter()?;
        let (driver, len) = (gpu.driver, as_len(PIECE_BYTES * PIECES)?);
        let mut start: Opaque = 0;
        // SAFETY: `start` is valid for a write of a pointer for the call, and a context is current.
        driver.check("cuMemHostAlloc", unsafe { (driver.mem_host_alloc)(&raw mut start, len, PORTABLE) })?;
        Ok(Self { gpu: Arc::clone(gpu), start })
    }

    /// Copies `len_bytes` from the memory of one GPU to that of another. Blocks until they are there.
    ///
    /// # Errors
    /// `Range`, `Driver`.
    pub fn copy(
        &mut self,
        (from, from_offset): (&Mapping, u64),
        (to, to_offset): (&Mapping, u64),
        len_bytes: u64,
    ) -> Result<(), CudaError> {
        let (source, target) = (from.at(from_offset, len_bytes)?, to.at(to_offset, len_bytes)?);
        if len_bytes <= PIECE_BYTES {
            from.gpu().give(source, self.start, len_bytes)?;
            return to.gpu().take(target, self.start, len_bytes);
        }
        let pieces = usize::try_from(PIECES).unwrap_or(1);
        let (free, is_free) = sync_channel::<Opaque>(pieces);
        let (full, is_full) = sync_channel::<Piece>(pieces);
        for piece in 0..PIECES {
            // There is room for all of them.
            let _ = free.send(self.start + as_len(piece * PIECE_BYTES)?);
        }
        std::thread::scope(|scope| {
            let out = scope.spawn(move || to.gpu().take_pieces(target, &is_full, &free));
            let came_in = from.gpu().give_pieces(source, len_bytes, &is_free, full);
            // Its channels end with the other side, so it does.
            let went_out = out.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            came_in.and(went_out)
        })
    }
}

impl Gpu {
    /// Copies the pieces of `len_bytes` at `source` into free places, until all are in or the other side has given up.
    fn give_pieces(
        &self,
        source: u64,
        len_bytes: u64,
        free: &Receiver<Opaque>,
        full: SyncSender<Piece>,
    ) -> Result<(), CudaError> {
        let mut done = 0;
        while done < len_bytes {
            let len = PIECE_BYTES.min(len_bytes - done);
            let Ok(place) = free.recv() else { return Ok(()) };
            self.give(source + done, place, len)?;
            if full.send((done, len, place)).is_err() {
                return Ok(());
            }
            done += len;
        }
        Ok(())
    }

    /// Copies the pieces that come to `target`, until no more do.
    fn take_pieces(&self, target: u64, full: &Receiver<Piece>, free: &SyncSender<Opaque>) -> Result<(), CudaError> {
        while let Ok((done, len, place)) = full.recv() {
            self.take(target + done, place, len)?;
            // Refused when the other side is done.
            let _ = free.send(place);
        }
        Ok(())
    }

    /// From the GPU to a place in the buffer.
    fn give(&self, source: u64, place: Opaque, len_bytes: u64) -> Result<(), CudaError> {
        let _current = self.enter()?;
        let (to, len) = (std::ptr::with_exposed_provenance_mut(place), as_len(len_bytes)?);
        // SAFETY: `copy` checked the source, which is mapped for the call; the place is pinned, long enough, and nobody
        // else's during the call: `copy` is exclusive, and its two sides hand places over.
        self.driver.check("cuMemcpyDtoH", unsafe { (self.driver.memcpy_to_host)(to, source, len) })
    }

    /// From a place in the buffer to the GPU.
    fn take(&self, target: u64, place: Opaque, len_bytes: u64) -> Result<(), CudaError> {
        let _current = self.enter()?;
        let (from, len) = (std::ptr::with_exposed_provenance(place), as_len(len_bytes)?);
        // SAFETY: as for `give`, the target being what is mapped; the copy is waited for before the place is given up.
        self.driver.check("cuMemcpyHtoD", unsafe { (self.driver.memcpy_to_device)(target, from, len) })?;
        self.synchronize()
    }
}

impl Drop for BounceBuffer {
    fn drop(&mut self) {
        // It is the driver's to free in a context only. Where that is gone, so is what was pinned for it.
        let Ok(_current) = self.gpu.enter() else { return };
        // SAFETY: it was allocated by `new` and is freed once; every copy through it was waited for.
        let _ = unsafe { (self.gpu.driver.mem_free_host)(self.start) };
    }
}
