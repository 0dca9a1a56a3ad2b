//! The memory of a region: a mapped segment, or memory of a real GPU that only its own backend can touch.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use gdrd_hal::{GpuAtomic, GpuBytes};
use gdrd_shm::Segment;

/// Bytes that pass through this process at once where one end is a segment and the other a GPU.
const CHUNK_BYTES: usize = 1 << 20;

/// Bytes could not be moved. What they were for says how that ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Unmoved;

/// Memory that a region covers, or a part of it.
pub(crate) enum Bytes {
    Segment(Segment),
    Gpu(Arc<dyn GpuBytes>),
}

impl Bytes {
    pub(crate) fn len_bytes(&self) -> u64 {
        match self {
            Self::Segment(segment) => segment.len_bytes(),
            Self::Gpu(gpu) => gpu.len_bytes(),
        }
    }

    pub(crate) fn write_from(&self, offset: u64, from: &[u8]) -> Result<(), Unmoved> {
        match self {
            Self::Segment(segment) => segment.write_from(offset, from).map_err(|_| Unmoved),
            Self::Gpu(gpu) => gpu.write(offset, from).map_err(|_| Unmoved),
        }
    }

    fn read_into(&self, offset: u64, to: &mut [u8]) -> Result<(), Unmoved> {
        match self {
            Self::Segment(segment) => segment.read_into(offset, to).map_err(|_| Unmoved),
            Self::Gpu(gpu) => gpu.read(offset, to).map_err(|_| Unmoved),
        }
    }

    pub(crate) fn copy_to(&self, offset: u64, to: &Self, to_offset: u64, len_bytes: u64) -> Result<(), Unmoved> {
        match (self, to) {
            (Self::Segment(from), Self::Segment(to)) => {
                from.copy_to(offset, to, to_offset, len_bytes).map_err(|_| Unmoved)
            }
            (Self::Gpu(from), Self::Gpu(to)) => from.copy_to(offset, &**to, to_offset, len_bytes).map_err(|_| Unmoved),
            _ => self.copy_through(offset, to, to_offset, len_bytes),
        }
    }

    fn copy_through(&self, offset: u64, to: &Self, to_offset: u64, len_bytes: u64) -> Result<(), Unmoved> {
        let whole = usize::try_from(len_bytes).map_err(|_| Unmoved)?;
        let mut chunk = vec![0; CHUNK_BYTES.min(whole)];
        let mut done = 0;
        while done < whole {
            let len = CHUNK_BYTES.min(whole - done);
            let part = chunk.get_mut(..len).ok_or(Unmoved)?;
            self.read_into(offset + done as u64, part)?;
            to.write_from(to_offset + done as u64, part)?;
            done += len;
        }
        Ok(())
    }

    /// The old value.
    pub(crate) fn atomic(&self, offset: u64, operation: GpuAtomic) -> Result<u64, Unmoved> {
        let segment = match self {
            Self::Segment(segment) => segment,
            Self::Gpu(gpu) => return gpu.atomic(offset, operation).map_err(|_| Unmoved),
        };
        let word = segment.atomic_u64(offset).map_err(|_| Unmoved)?;
        match operation {
            GpuAtomic::FetchAdd { operand } => Ok(word.fetch_add(operand, Ordering::AcqRel)),
            GpuAtomic::CompareSwap { compare, operand } => Ok(word
                .compare_exchange(compare, operand, Ordering::AcqRel, Ordering::Acquire)
                .unwrap_or_else(|found| found)),
            _ => Err(Unmoved),
        }
    }
}
