//! The daemon's side of a ring. Trusts nothing in the segment: indices, geometry and reservations
//! are its own, and what it reads is copied once and checked.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use gdrd_shm::{Access, MapOptions, Segment, SegmentOptions, SharedSlots, SharedU32, ShmError, futex_wake};
use zerocopy::IntoBytes;

use crate::abi::{self, COMPLETION_WORDS, SUBMISSION_WORDS};
use crate::bell;
use crate::client::{COMPLETION_NAMES, MAX_SEGMENT_BYTES, SUBMISSION_NAMES};
use crate::completion::{Completion, CompletionOpcode};
use crate::cursor::{Consumer, Producer, Word};
use crate::error::{Corrupt, NotOutstanding, RingError};
use crate::geometry::Geometry;
use crate::submission::{Queue, Refusal, Submission};

/// Sleepers that a publish wakes. A client has one or two; one with ten thousand would keep the broker from everyone
/// else.
const MOST_WOKEN: u32 = 16;

/// An entry that was taken. It has a completion slot, given back by exactly one call of
/// [`BrokerRing::complete`] or [`BrokerRing::retire`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Submitted {
    /// Well formed. Slot, generation, range and rights are still to be checked.
    Request(Submission),
    /// Malformed: complete it with status REFUSED.
    Refused {
        /// The number in the entry.
        wr_id: u64,
        /// For the completion; tells the queue that the entry is counted in.
        opcode: CompletionOpcode,
        /// What was wrong.
        reason: Refusal,
    },
}

impl Submitted {
    /// The queue that it is counted in.
    #[must_use]
    #[inline]
    pub fn queue(&self) -> Queue {
        match self {
            Submitted::Request(submission) => submission.operation.queue(),
            Submitted::Refused { opcode, .. } => opcode.queue(),
        }
    }

    #[inline]
    fn decode(words: [u64; SUBMISSION_WORDS]) -> Self {
        Submission::decode(words).map_or_else(
            |reason| {
                let entry: abi::SubmissionEntry = zerocopy::transmute!(words);
                Submitted::Refused { wr_id: entry.wr_id, opcode: CompletionOpcode::of_entry(entry.opcode), reason }
            },
            Submitted::Request,
        )
    }
}

/// The daemon's side: takes submissions, publishes completions. One owner, usually a broker thread.
/// No call blocks; only [`BrokerRing::publish`] and [`BrokerRing::close`] may make a system call,
/// one futex wake, and only if the client said that it waits.
#[derive(Debug)]
pub struct BrokerRing {
    segment: Arc<Segment>,
    geometry: Geometry,
    submissions: Consumer<SharedU32, SharedSlots<SUBMISSION_WORDS>>,
    completions: Producer<SharedU32, SharedSlots<COMPLETION_WORDS>>,
    sleeping: SharedU32,
    client_waiting: SharedU32,
    wakes: SharedU32,
    state: SharedU32,
    /// Taken out of the ring, and waiting for its queue or the completion ring to have room.
    held_back: Option<Submitted>,
    /// Taken and not ended, by queue: each has a completion slot reserved.
    sq_outstanding: u32,
    rq_outstanding: u32,
    sq_retired: u32,
    corrupt: Option<Corrupt>,
}

impl BrokerRing {
    /// Makes a ring of its own segment, sealed and with all pages there.
    ///
    /// # Errors
    /// [`ShmError`] when the kernel has no memory or descriptor left.
    pub fn create(geometry: Geometry) -> Result<Self, ShmError> {
        let segment = SegmentOptions::new(geometry.segment_len_bytes()).populate(true).create("gdrd-ring")?;
        segment.write_from(0, geometry.header().as_bytes())?;
        Self::attach(Arc::new(segment), geometry)
    }

    fn attach(segment: Arc<Segment>, geometry: Geometry) -> Result<Self, ShmError> {
        let word = |offset| SharedU32::new(&segment, offset);
        let capacity = geometry.capacity();
        let submission_slots = SharedSlots::new(&segment, geometry.submission_offset(), capacity)?;
        let completion_slots = SharedSlots::new(&segment, geometry.completion_offset(), capacity)?;
        Ok(Self {
            submissions: Consumer::new(
                (word(abi::SUBMISSION_TAIL)?, word(abi::SUBMISSION_HEAD)?),
                submission_slots,
                SUBMISSION_NAMES,
                capacity,
                0,
            ),
            completions: Producer::new(
                (word(abi::COMPLETION_TAIL)?, word(abi::COMPLETION_HEAD)?),
                completion_slots,
                COMPLETION_NAMES,
                capacity,
                0,
            ),
            sleeping: word(abi::BROKER_SLEEPING)?,
            client_waiting: word(abi::CLIENT_WAITING)?,
            wakes: word(abi::WAKE_COUNT)?,
            state: word(abi::STATE)?,
            held_back: None,
            sq_outstanding: 0,
            rq_outstanding: 0,
            sq_retired: 0,
            corrupt: None,
            geometry,
            segment,
        })
    }

    /// The descriptor to send to the client.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.segment.fd()
    }

    /// The depths it was made with.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Requests of `queue` that were taken and not ended.
    #[must_use]
    pub fn outstanding(&self, queue: Queue) -> u32 {
        match queue {
            Queue::Send => self.sq_outstanding,
            Queue::Receive => self.rq_outstanding,
        }
    }

    /// Takes the next request, if there is one and both its queue and the completion ring have room
    /// for it. `None` may mean any of the three: a client that overruns its depths or does not poll
    /// waits for itself.
    ///
    /// # Errors
    /// [`Corrupt`] when the client's indices are impossible; sticky. End this queue pair.
    #[inline]
    pub fn take(&mut self) -> Result<Option<Submitted>, Corrupt> {
        if let Some(corrupt) = self.corrupt {
            return Err(corrupt);
        }
        if self.held_back.is_some() {
            return self.take_held_back();
        }
        // The single copy out of shared memory.
        match self.submissions.take() {
            Ok(None) => Ok(None),
            Ok(Some(words)) => self.admit(Submitted::decode(words)),
            Err(corrupt) => self.end_as(corrupt),
        }
    }

    #[cold]
    fn take_held_back(&mut self) -> Result<Option<Submitted>, Corrupt> {
        self.held_back.take().map_or(Ok(None), |submitted| self.admit(submitted))
    }

    #[cold]
    fn end_as(&mut self, corrupt: Corrupt) -> Result<Option<Submitted>, Corrupt> {
        self.corrupt = Some(corrupt);
        Err(corrupt)
    }

    /// Counts a request in, or holds it back for want of room.
    #[inline]
    fn admit(&mut self, submitted: Submitted) -> Result<Option<Submitted>, Corrupt> {
        let queue = submitted.queue();
        match self.can_admit(queue) {
            Ok(true) => {}
            Ok(false) => {
                self.held_back = Some(submitted);
                return Ok(None);
            }
            Err(corrupt) => return self.end_as(corrupt),
        }
        match queue {
            Queue::Send => self.sq_outstanding += 1,
            Queue::Receive => self.rq_outstanding += 1,
        }
        Ok(Some(submitted))
    }

    /// Whether one more request of `queue` would be admitted now: its queue is not full and, beside
    /// those reserved, there is a completion slot.
    ///
    /// # Errors
    /// [`Corrupt`] when the client's completion head is impossible.
    #[inline]
    pub fn can_admit(&mut self, queue: Queue) -> Result<bool, Corrupt> {
        let below_depth = match queue {
            Queue::Send => self.sq_outstanding < self.geometry.sq_depth(),
            Queue::Receive => self.rq_outstanding < self.geometry.rq_depth(),
        };
        if !below_depth {
            return Ok(false);
        }
        let reserved = self.sq_outstanding + self.rq_outstanding;
        self.completions.has_room(reserved + 1)
    }

    /// Ends a request with a completion, visible after [`BrokerRing::publish`]. Its slot was
    /// reserved, so there always is one.
    ///
    /// # Errors
    /// [`NotOutstanding`] when none of that queue is outstanding: a bug of the caller.
    #[inline]
    pub fn complete(&mut self, completion: &Completion) -> Result<(), NotOutstanding> {
        self.end_one(completion.opcode.queue())?;
        self.completions.stage(&completion.encode(self.sq_retired));
        Ok(())
    }

    /// Ends a request without a completion: the success of an unsignalled one. Its reserved slot is
    /// free again.
    ///
    /// # Errors
    /// As [`BrokerRing::complete`].
    #[inline]
    pub fn retire(&mut self, queue: Queue) -> Result<(), NotOutstanding> {
        self.end_one(queue)
    }

    #[inline]
    fn end_one(&mut self, queue: Queue) -> Result<(), NotOutstanding> {
        let outstanding = match queue {
            Queue::Send => &mut self.sq_outstanding,
            Queue::Receive => &mut self.rq_outstanding,
        };
        *outstanding = outstanding.checked_sub(1).ok_or(NotOutstanding { queue })?;
        if queue == Queue::Send {
            self.sq_retired = self.sq_retired.wrapping_add(1);
        }
        Ok(())
    }

    /// Makes all completions since the last call visible, with one store, and wakes the client if
    /// it waits. Returns whether it did.
    ///
    /// # Errors
    /// [`RingError::Segment`] when the kernel refuses the wake; the completions are visible.
    pub fn publish(&mut self) -> Result<bool, RingError> {
        // (tail) release inside; the (bell) fence inside `wake_client` orders it before the look.
        Ok(self.completions.publish() && self.wake_client(MOST_WOKEN)?)
    }

    fn wake_client(&self, most: u32) -> Result<bool, ShmError> {
        if !bell::raise(&self.client_waiting, &self.wakes) {
            return Ok(false);
        }
        futex_wake(&self.wakes, most)?;
        Ok(true)
    }

    /// Before the broker thread sleeps: asks the client for a wake-up, then looks once more.
    /// True: nothing can be taken, sleep on the eventfd and call [`BrokerRing::finish_sleep`] after.
    /// False: call [`BrokerRing::take`] again.
    ///
    /// A request that is held back for want of room does not keep the broker awake: it is taken
    /// after a completion of this ring, or after the client's next flush.
    ///
    /// # Errors
    /// As [`BrokerRing::take`].
    pub fn prepare_sleep(&mut self) -> Result<bool, Corrupt> {
        if let Some(corrupt) = self.corrupt {
            return Err(corrupt);
        }
        bell::announce(&self.sleeping);
        let ready = match &self.held_back {
            Some(submitted) => {
                let queue = submitted.queue();
                self.can_admit(queue)
            }
            None => self.submissions.has_next(),
        };
        if !matches!(ready, Ok(false)) {
            self.finish_sleep();
        }
        ready.map(|ready| !ready).inspect_err(|corrupt| self.corrupt = Some(*corrupt))
    }

    /// After the broker thread woke: the client need not ring any more.
    pub fn finish_sleep(&mut self) {
        bell::retract(&self.sleeping);
    }

    /// Publishes what is staged, tells the client that no more is taken, and wakes it. The client
    /// keeps its mapping; nothing in it is read again.
    ///
    /// # Errors
    /// As [`BrokerRing::publish`].
    pub fn close(mut self) -> Result<(), RingError> {
        let state = match self.corrupt {
            Some(_) => abi::STATE_CORRUPT,
            None => abi::STATE_CLOSED,
        };
        self.completions.publish();
        // (state) release: the completions published above are visible to who sees it.
        Word::store(&self.state, state, Ordering::Release);
        self.wake_client(u32::MAX)?;
        Ok(())
    }
}

/// Ends a ring of a daemon that is gone, for the client that still maps it: what it posted and did not see end, ends with
/// OUTCOME_UNKNOWN. Whatever the segment holds, nothing but its own client is affected.
///
/// # Errors
/// [`RingError::Segment`] for what is no segment, or one without a ring's length.
pub fn end_lost_ring(fd: OwnedFd) -> Result<(), RingError> {
    let segment = MapOptions::new(Access::ReadWrite).max_len_bytes(MAX_SEGMENT_BYTES).map(fd)?;
    // (state) release, as in `close`.
    segment.atomic_u32(abi::STATE)?.store(abi::STATE_LOST, Ordering::Release);
    let wakes = SharedU32::new(&Arc::new(segment), abi::WAKE_COUNT)?;
    wakes.fetch_add(1, Ordering::Release);
    futex_wake(&wakes, u32::MAX)?;
    Ok(())
}
