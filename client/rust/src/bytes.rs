//! Bytes of a buffer, in shared memory or on a GPU.

use gdrd_client_sys::{CudaError, Mapping};
use gdrd_shm::Segment;

use crate::error::ClientError;

/// Where they are.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Bytes<'a> {
    Segment(&'a Segment),
    Device(&'a Mapping),
}

impl Bytes<'_> {
    pub(crate) fn read_into(self, offset: u64, to: &mut [u8]) -> Result<(), ClientError> {
        match self {
            Self::Segment(segment) => Ok(segment.read_into(offset, to)?),
            Self::Device(mapping) => Ok(mapping.read_into(offset, to)?),
        }
    }

    pub(crate) fn write_from(self, offset: u64, from: &[u8]) -> Result<(), ClientError> {
        match self {
            Self::Segment(segment) => Ok(segment.write_from(offset, from)?),
            Self::Device(mapping) => Ok(mapping.write_from(offset, from)?),
        }
    }

    pub(crate) fn check_range(self, offset: u64, len_bytes: u64) -> Result<(), ClientError> {
        let mapping = match self {
            Self::Segment(segment) => return Ok(segment.check_range(offset, len_bytes)?),
            Self::Device(mapping) => mapping,
        };
        let whole_bytes = mapping.len_bytes();
        match offset.checked_add(len_bytes) {
            Some(end) if end <= whole_bytes => Ok(()),
            _ => Err(CudaError::Range { offset, len_bytes, whole_bytes }.into()),
        }
    }
}

/// A reader over a range.
pub(crate) struct MemoryReader<'a> {
    memory: Bytes<'a>,
    offset: u64,
    left_bytes: u64,
}

impl<'a> MemoryReader<'a> {
    /// The range was checked.
    pub(crate) fn new(memory: Bytes<'a>, offset: u64, left_bytes: u64) -> Self {
        Self { memory, offset, left_bytes }
    }
}

impl std::io::Read for MemoryReader<'_> {
    fn read(&mut self, to: &mut [u8]) -> std::io::Result<usize> {
        let len = usize::try_from(self.left_bytes).unwrap_or(usize::MAX).min(to.len());
        let to = to.get_mut(..len).unwrap_or_default();
        self.memory.read_into(self.offset, to).map_err(std::io::Error::other)?;
        self.offset += len as u64;
        self.left_bytes -= len as u64;
        Ok(len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readers_give_the_range_and_then_end() {
        let memory = Segment::create("reader", 4096).unwrap();
        memory.write_from(10, b"content").unwrap();
        let mut reader = MemoryReader::new(Bytes::Segment(&memory), 10, 7);
        let mut text = String::new();
        std::io::Read::read_to_string(&mut reader, &mut text).unwrap();
        assert_eq!(text, "content");
    }
}
