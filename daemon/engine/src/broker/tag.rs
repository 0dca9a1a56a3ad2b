//! The number under which the HCA knows a request: whose it is and where it stands in the books.

use gdrd_ring::Queue;

/// Queue pairs of one broker thread, at most.
pub(crate) const MAX_QUEUE_PAIRS: usize = 1 << 16;
const RECEIVE: u64 = 1 << 63;
const EPOCH_MASK: u16 = 0x7fff;

/// A queue pair's place in its thread's table, and which of the many that stood there it is: completions
/// of one that is gone must not be taken for its successor's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tag {
    index: u16,
    epoch: u16,
}

impl Tag {
    pub(crate) fn new(index: u16, epoch: u16) -> Self {
        Self { index, epoch: epoch & EPOCH_MASK }
    }

    pub(crate) fn index(self) -> usize {
        usize::from(self.index)
    }

    /// The `wr_id` of the request at `position` of `queue`.
    pub(crate) fn wr_id(self, queue: Queue, position: u32) -> u64 {
        let base = u64::from(self.epoch) << 48 | u64::from(self.index) << 32 | u64::from(position);
        match queue {
            Queue::Send => base,
            Queue::Receive => base | RECEIVE,
        }
    }

    /// What a `wr_id` says.
    pub(crate) fn decode(wr_id: u64) -> (Self, Queue, u32) {
        let [e0, e1, i0, i1, p0, p1, p2, p3] = wr_id.to_be_bytes();
        let queue = if wr_id & RECEIVE == 0 { Queue::Send } else { Queue::Receive };
        let tag = Self::new(u16::from_be_bytes([i0, i1]), u16::from_be_bytes([e0, e1]));
        (tag, queue, u32::from_be_bytes([p0, p1, p2, p3]))
    }
}
