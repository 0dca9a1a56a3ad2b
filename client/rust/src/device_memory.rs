//! A buffer on a CUDA GPU, mapped into this process, and order with the work that fills it.

use std::os::fd::AsFd as _;
use std::sync::Arc;

use gdrd_client_sys::{CudaError, Gpu, Mapping, Stream};
use gdrd_ring::{Operation, Submission, SubmissionFlags};

use crate::buffer::{Buffer, MemoryKind};
use crate::bytes::Bytes;
use crate::error::ClientError;
use crate::kept::Kept;
use crate::queue_pair::QueuePair;

impl Buffer {
    /// The memory on its GPU, mapped at the first call by the process' primary context, or as an earlier buffer of the same
    /// memory had it mapped ([`ClientOptions::kept_mappings`](crate::ClientOptions::kept_mappings)): work on it must have
    /// ended when a buffer is released. The mapping stays valid after
    /// the end of the lease: only NIC access ends. To use it from another GPU of this host:
    /// [`Buffer::device_memory_on`], or [`Mapping::allow`] where this process uses both.
    ///
    /// # Errors
    /// [`ClientError::NotMappable`] for memory that is on no CUDA GPU, [`ClientError::Cuda`].
    pub fn device_memory(&self) -> Result<&Mapping, ClientError> {
        self.check_kind()?;
        if let Some(mapping) = self.device.get() {
            return Ok(mapping);
        }
        let mapping = match self.session().kept().take(self.allocation_id()) {
            Some(Kept::Device(mapping)) => mapping,
            _ => Mapping::import(&Gpu::open(self.gpu_uuid())?, self.try_clone_fd()?.as_fd(), self.len_bytes())?,
        };
        // Of two threads at once one maps for nothing.
        let mapping = self.device.get_or_init(|| mapping);
        self.is_mapped_at(mapping.device_address());
        self.session().mappings().gpu_slots().mapped(self.name(), mapping.gpu());
        Ok(mapping)
    }

    /// The memory mapped for another GPU of this host, which reads and writes it by NVLink or PCIe. This process makes no
    /// context on the GPU that has the memory. A new mapping at each call, valid after the end of the lease.
    ///
    /// # Errors
    /// [`ClientError::NotMappable`] for memory that is on no CUDA GPU, [`ClientError::Cuda`]: also where `gpu` does not
    /// reach it, then [`gdrd_client_sys::BounceBuffer`] is the way.
    pub fn device_memory_on(&self, gpu: &Arc<Gpu>) -> Result<Mapping, ClientError> {
        self.check_kind()?;
        if !gpu.can_reach(self.gpu_uuid())? {
            let (from, to) = (gpu.uuid().to_owned(), self.gpu_uuid().to_owned());
            return Err(CudaError::NoWay { from, to }.into());
        }
        let mapping = Mapping::import(gpu, self.try_clone_fd()?.as_fd(), self.len_bytes())?;
        self.session().mappings().gpu_slots().mapped(self.name(), gpu);
        Ok(mapping)
    }

    fn check_kind(&self) -> Result<(), ClientError> {
        match self.kind() {
            MemoryKind::CudaPosixFd => Ok(()),
            other => Err(ClientError::NotMappable { kind: format!("{other:?}") }),
        }
    }

    /// Waits until what was queued on `stream` before is done. [`QueuePair::post`] does so by itself for what it sends and
    /// the default stream; before a read, a receive or an atomic that lands in memory of which queued work still has to be
    /// done, and before [`QueuePair::post_unordered`], it is the caller's part.
    ///
    /// # Errors
    /// As [`Buffer::device_memory`].
    pub fn wait_for_stream(&self, stream: Stream) -> Result<(), ClientError> {
        Ok(self.device_memory()?.gpu().wait_for_stream(stream)?)
    }

    pub(crate) fn bytes(&self) -> Result<Bytes<'_>, ClientError> {
        match self.kind() {
            MemoryKind::CudaPosixFd => self.device_memory().map(Bytes::Device),
            _ => self.memory().map(Bytes::Segment),
        }
    }
}

impl QueuePair {
    /// Posts one request that makes a completion, once what was queued on `stream` before is done: for requests that
    /// send from `buffer`. Blocks until then. [`QueuePair::post`] waits for the default stream in its place.
    ///
    /// # Errors
    /// As [`Buffer::wait_for_stream`] and [`QueuePair::post`].
    pub fn post_after(
        &self,
        buffer: &Buffer,
        stream: Stream,
        wr_id: u64,
        operation: Operation,
    ) -> Result<(), ClientError> {
        buffer.wait_for_stream(stream)?;
        let submission = Submission { wr_id, flags: SubmissionFlags::SIGNALED, operation };
        self.post_unordered(&[submission]).map(drop)
    }

    /// Waits for the default streams of GPUs whose memory these requests send from.
    pub(crate) fn wait_for_gpus(&self, batch: &[Submission]) -> Result<(), ClientError> {
        let slots = self.session().mappings().gpu_slots();
        let mut waited: Vec<Arc<Gpu>> = Vec::new();
        for gpu in batch.iter().flat_map(|submission| slots.to_wait_for(&submission.operation)) {
            if !waited.iter().any(|other| other.uuid() == gpu.uuid()) {
                gpu.wait_for_stream(Stream::DEFAULT)?;
                waited.push(gpu);
            }
        }
        Ok(())
    }
}
