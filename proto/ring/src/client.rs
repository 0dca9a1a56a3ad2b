//! The client's side of a ring.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use gdrd_shm::{Access, MapOptions, Segment, SharedSlots, SharedU32, WaitOutcome, futex_wait, futex_wake};
use zerocopy::FromZeros;

use crate::abi::{self, COMPLETION_WORDS, Header, SUBMISSION_WORDS};
use crate::bell;
use crate::completion::Completion;
use crate::cursor::{Consumer, Names, Producer, Word};
use crate::error::{Corrupt, OpenError, RingError, SubmitError};
use crate::geometry::{Geometry, MAX_DEPTH};
use crate::submission::{Queue, Submission};
use crate::unanswered::Unanswered;

pub(crate) const SUBMISSION_NAMES: Names = Names { tail: "submission tail", head: "submission head" };
pub(crate) const COMPLETION_NAMES: Names = Names { tail: "completion tail", head: "completion head" };
/// Longest segment that a geometry can give.
pub(crate) const MAX_SEGMENT_BYTES: u64 = match Geometry::new(MAX_DEPTH, MAX_DEPTH) {
    Ok(geometry) => geometry.segment_len_bytes(),
    Err(_) => 0,
};
const WHAT: &str = "ring";

/// Whether the broker must be woken after a flush.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "a sleeping broker sees nothing until its eventfd is written"]
pub enum Wake {
    /// The broker is awake, or nothing was published.
    NotNeeded,
    /// The broker sleeps: write 1 to the eventfd that came with the ring.
    Needed,
}

/// The client's side: posts submissions, polls completions. One owner at a time; it can be sent to
/// another thread. Nothing but [`ClientRing::wait`] blocks or makes a system call.
#[derive(Debug)]
pub struct ClientRing {
    segment: Arc<Segment>,
    geometry: Geometry,
    submissions: Producer<SharedU32, SharedSlots<SUBMISSION_WORDS>>,
    completions: Consumer<SharedU32, SharedSlots<COMPLETION_WORDS>>,
    broker_sleeping: SharedU32,
    waiting: SharedU32,
    wakes: SharedU32,
    state: SharedU32,
    /// Send-queue requests posted, and known to have ended, modulo 2^32.
    sq_posted: u32,
    sq_retired: u32,
    rq_used: u32,
    unanswered: Unanswered,
}

impl ClientRing {
    /// Maps the ring that the daemon sent. It must not have been used by another client.
    ///
    /// # Errors
    /// [`OpenError`]: no ring, another version, or a header that does not fit its segment.
    pub fn open(fd: OwnedFd) -> Result<Self, OpenError> {
        let segment_error = |source| OpenError::Segment { what: WHAT, source };
        let segment = MapOptions::new(Access::ReadWrite)
            .max_len_bytes(MAX_SEGMENT_BYTES)
            .populate(true)
            .map(fd)
            .map_err(segment_error)?;
        let geometry = read_header(&segment)?;
        Self::attach(Arc::new(segment), geometry).map_err(segment_error)
    }

    fn attach(segment: Arc<Segment>, geometry: Geometry) -> Result<Self, gdrd_shm::ShmError> {
        let word = |offset| SharedU32::new(&segment, offset);
        let capacity = geometry.capacity();
        let submission_slots = SharedSlots::new(&segment, geometry.submission_offset(), capacity)?;
        let completion_slots = SharedSlots::new(&segment, geometry.completion_offset(), capacity)?;
        Ok(Self {
            submissions: Producer::new(
                (word(abi::SUBMISSION_TAIL)?, word(abi::SUBMISSION_HEAD)?),
                submission_slots,
                SUBMISSION_NAMES,
                capacity,
                0,
            ),
            completions: Consumer::new(
                (word(abi::COMPLETION_TAIL)?, word(abi::COMPLETION_HEAD)?),
                completion_slots,
                COMPLETION_NAMES,
                capacity,
                0,
            ),
            broker_sleeping: word(abi::BROKER_SLEEPING)?,
            waiting: word(abi::CLIENT_WAITING)?,
            wakes: word(abi::WAKE_COUNT)?,
            state: word(abi::STATE)?,
            sq_posted: 0,
            sq_retired: 0,
            rq_used: 0,
            unanswered: Unanswered::new(geometry),
            geometry,
            segment,
        })
    }

    /// The depths that the daemon chose.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Requests of `queue` that are posted and not known to have ended.
    #[must_use]
    pub fn outstanding(&self, queue: Queue) -> u32 {
        match queue {
            Queue::Send => self.sq_posted.wrapping_sub(self.sq_retired),
            Queue::Receive => self.rq_used,
        }
    }

    /// Puts one request in the ring; the broker sees it after [`ClientRing::flush`].
    ///
    /// # Errors
    /// [`SubmitError`]; then nothing was put.
    pub fn submit(&mut self, submission: &Submission) -> Result<(), SubmitError> {
        let queue = submission.operation.queue();
        let depth = match queue {
            Queue::Send => self.geometry.sq_depth(),
            Queue::Receive => self.geometry.rq_depth(),
        };
        let full = SubmitError::Full { queue, depth };
        if self.outstanding(queue) >= depth {
            return Err(full);
        }
        let words = submission.encode()?;
        if !self.submissions.has_room(1)? {
            return Err(full);
        }
        if self.is_closed() {
            return Err(SubmitError::Closed);
        }
        self.submissions.stage(&words);
        self.unanswered.posted(submission);
        match queue {
            Queue::Send => self.sq_posted = self.sq_posted.wrapping_add(1),
            Queue::Receive => self.rq_used += 1,
        }
        Ok(())
    }

    /// Puts as many of `batch` in the ring as there is room for, in order, and returns how many.
    ///
    /// # Errors
    /// [`SubmitError`] of the first request, if not even that one was put; a later one that
    /// cannot be put ends the batch before it.
    pub fn submit_batch(&mut self, batch: &[Submission]) -> Result<usize, SubmitError> {
        for (taken, submission) in batch.iter().enumerate() {
            match self.submit(submission) {
                Ok(()) => {}
                Err(error) if taken == 0 => return Err(error),
                Err(_) => return Ok(taken),
            }
        }
        Ok(batch.len())
    }

    /// Publishes all that was submitted, with one store for the whole batch.
    pub fn flush(&mut self) -> Wake {
        // (tail) release inside; the (bell) fence inside `must_wake` orders it before the look.
        match self.submissions.publish() && bell::must_wake(&self.broker_sleeping) {
            true => Wake::Needed,
            false => Wake::NotNeeded,
        }
    }

    /// The next completion, if one is there. In the order in which the broker ended the requests. When the daemon that
    /// served the ring is gone, what it left unanswered ends here, each request with [`Status::OutcomeUnknown`].
    ///
    /// [`Status::OutcomeUnknown`]: crate::Status::OutcomeUnknown
    ///
    /// # Errors
    /// [`Corrupt`] when the broker's index is impossible.
    #[inline]
    pub fn poll(&mut self) -> Result<Option<Completion>, Corrupt> {
        match self.completions.take()? {
            Some(words) => Ok(Some(self.answered(words))),
            None if self.is_lost() => self.poll_lost(),
            None => Ok(None),
        }
    }

    #[inline]
    fn answered(&mut self, words: [u64; COMPLETION_WORDS]) -> Completion {
        let (completion, sq_retired) = Completion::decode(words);
        self.unanswered.ended(Queue::Send, sq_retired.wrapping_sub(self.sq_retired));
        self.sq_retired = sq_retired;
        if completion.opcode.queue() == Queue::Receive {
            self.unanswered.ended(Queue::Receive, 1);
            self.rq_used = self.rq_used.saturating_sub(1);
        }
        completion
    }

    /// What was published before the ring was lost comes first: it is visible now that the state was seen.
    #[cold]
    fn poll_lost(&mut self) -> Result<Option<Completion>, Corrupt> {
        if let Some(words) = self.completions.take()? {
            return Ok(Some(self.answered(words)));
        }
        let given_up = self.unanswered.give_up_one();
        match given_up.map(|completion| completion.opcode.queue()) {
            Some(Queue::Send) => self.sq_retired = self.sq_retired.wrapping_add(1),
            Some(Queue::Receive) => self.rq_used = self.rq_used.saturating_sub(1),
            None => {}
        }
        Ok(given_up)
    }

    fn is_lost(&self) -> bool {
        // (state) acquire: shows the completions published before the end.
        Word::load(&self.state, Ordering::Acquire) == abi::STATE_LOST
    }

    /// The next completion, sleeping until there is one or `timeout` is over (for ever with
    /// `None`): then `None`. Flush first. The daemon's death does not end the wait: watch the
    /// session socket, or use a timeout.
    ///
    /// # Errors
    /// [`RingError::Closed`] when the broker has closed the ring and all was polled,
    /// [`RingError::Corrupt`], [`RingError::Segment`] if the kernel refuses the wait.
    pub fn wait(&mut self, timeout: Option<Duration>) -> Result<Option<Completion>, RingError> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            let seen = bell::announce_wait(&self.waiting, &self.wakes);
            // Closed is looked at first: what was published before the close is then visible.
            let closed = self.is_closed();
            let polled = self.poll();
            if closed || !matches!(polled, Ok(None)) {
                bell::retract(&self.waiting);
                return match polled? {
                    Some(completion) => Ok(Some(completion)),
                    None => Err(RingError::Closed),
                };
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let outcome = futex_wait(&self.wakes, seen, left);
            bell::retract(&self.waiting);
            if outcome? == WaitOutcome::TimedOut {
                return Ok(self.poll()?);
            }
        }
    }

    /// Says that this side is about to sleep, for a caller whose other thread sleeps on the ticket while this one goes
    /// on posting. Poll once more after this, and sleep only if that finds nothing. The word that was given is not
    /// taken back, since another sleeper may rely on it: the broker makes at most one needless wake.
    ///
    /// # Errors
    /// [`gdrd_shm::ShmError`] never in practice: the word was mapped at open.
    pub fn announce_wait(&mut self) -> Result<WaitTicket, gdrd_shm::ShmError> {
        let wakes = SharedU32::new(&self.segment, abi::WAKE_COUNT)?;
        let seen = bell::announce_wait(&self.waiting, &self.wakes);
        Ok(WaitTicket { wakes, seen })
    }

    /// Ends every wait on a ticket of this ring, for a caller that is about to close it.
    pub fn cancel_waits(&self) {
        // (wake) release; the broker only ever adds to the count, so an extra one costs a look.
        self.wakes.fetch_add(1, Ordering::Release);
        // It fails for a word that is not mapped only, and this one is.
        let _ = futex_wake(&self.wakes, u32::MAX);
    }

    /// Whether the broker takes no more: the queue pair has ended. What it published before can
    /// still be polled.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        // (state) acquire: shows the completions published before the close.
        Word::load(&self.state, Ordering::Acquire) != abi::STATE_OPEN
    }

    /// The segment, for those who send it on or measure it.
    #[must_use]
    pub fn segment(&self) -> &Arc<Segment> {
        &self.segment
    }
}

/// The right to sleep until the broker wakes its client. Keeps the mapping alive.
#[derive(Debug)]
pub struct WaitTicket {
    wakes: SharedU32,
    seen: u32,
}

impl WaitTicket {
    /// Blocks until the broker has woken the client since [`ClientRing::announce_wait`], or [`ClientRing::cancel_waits`]
    /// was called, or `timeout` is over (for ever with `None`). May return early: poll, and announce again.
    ///
    /// # Errors
    /// [`gdrd_shm::ShmError::Kernel`] if the kernel refuses the wait.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<WaitOutcome, gdrd_shm::ShmError> {
        futex_wait(&self.wakes, self.seen, timeout)
    }
}

fn read_header(segment: &Segment) -> Result<Geometry, OpenError> {
    let mut header = Header::new_zeroed();
    let bytes = zerocopy::IntoBytes::as_mut_bytes(&mut header);
    segment.read_into(0, bytes).map_err(|source| OpenError::Segment { what: WHAT, source })?;
    if header.magic != abi::RING_MAGIC {
        return Err(OpenError::NotOurs { what: WHAT, found: header.magic });
    }
    if header.version != abi::RING_VERSION {
        return Err(OpenError::Version { what: WHAT, found: header.version, known: abi::RING_VERSION });
    }
    let geometry = Geometry::new(header.sq_depth, header.rq_depth)?;
    if header != geometry.header() {
        return Err(OpenError::Layout { found: header });
    }
    if segment.len_bytes() != geometry.segment_len_bytes() {
        return Err(OpenError::Size { what: WHAT, needed: geometry.segment_len_bytes(), found: segment.len_bytes() });
    }
    Ok(geometry)
}
