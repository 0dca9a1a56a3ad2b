//! How deep a ring is, and where its parts lie.

use crate::abi;

/// Deepest send or receive queue; bounds the segment to 2.5 MiB and a page.
pub const MAX_DEPTH: u32 = 8192;

/// A geometry outside of the allowed range. The caller's fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("depths of {sq_depth} sends and {rq_depth} receives: each must be at most {MAX_DEPTH}, and sends at least 1")]
pub struct GeometryError {
    /// Send depth asked for.
    pub sq_depth: u32,
    /// Receive depth asked for.
    pub rq_depth: u32,
}

/// Depths of a queue pair's ring. Both capacities are the sum of the depths, rounded up to a power
/// of two, so a client that keeps to its depths never finds either ring full.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    sq_depth: u32,
    rq_depth: u32,
}

impl Geometry {
    /// `sq_depth` send-queue requests, 1 to [`MAX_DEPTH`], and `rq_depth` receives, 0 to
    /// [`MAX_DEPTH`], may be outstanding at a time.
    ///
    /// # Errors
    /// [`GeometryError`] outside of those ranges.
    pub const fn new(sq_depth: u32, rq_depth: u32) -> Result<Self, GeometryError> {
        if sq_depth == 0 || sq_depth > MAX_DEPTH || rq_depth > MAX_DEPTH {
            return Err(GeometryError { sq_depth, rq_depth });
        }
        Ok(Self { sq_depth, rq_depth })
    }

    /// Send-queue requests that may be outstanding.
    #[must_use]
    pub const fn sq_depth(self) -> u32 {
        self.sq_depth
    }

    /// Receives that may be outstanding.
    #[must_use]
    pub const fn rq_depth(self) -> u32 {
        self.rq_depth
    }

    /// Entries of the submission ring, and of the completion ring.
    #[must_use]
    pub const fn capacity(self) -> u32 {
        (self.sq_depth + self.rq_depth).next_power_of_two()
    }

    /// Length of the whole segment in bytes.
    #[must_use]
    pub const fn segment_len_bytes(self) -> u64 {
        self.completion_offset() + self.capacity() as u64 * abi::COMPLETION_WORDS as u64 * 8
    }

    pub(crate) const fn submission_offset(self) -> u64 {
        abi::RINGS_OFFSET
    }

    pub(crate) const fn completion_offset(self) -> u64 {
        abi::RINGS_OFFSET + self.capacity() as u64 * abi::SUBMISSION_WORDS as u64 * 8
    }

    pub(crate) const fn header(self) -> abi::Header {
        abi::Header {
            magic: abi::RING_MAGIC,
            version: abi::RING_VERSION,
            sq_depth: self.sq_depth,
            rq_depth: self.rq_depth,
            submission_capacity: self.capacity(),
            completion_capacity: self.capacity(),
            reserved: 0,
            submission_offset: self.submission_offset(),
            completion_offset: self.completion_offset(),
        }
    }
}
