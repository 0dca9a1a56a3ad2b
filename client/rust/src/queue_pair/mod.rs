//! Brokered queue pairs: the daemon owns the queue pair, this process posts to a ring and polls it.

mod endpoint;
mod waiter;

use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use gdrd_proto::v1;
use gdrd_proto::v1::queue_pairs_client::QueuePairsClient;
use gdrd_ring::{ClientRing, Completion, Operation, Queue, RingError, Submission, SubmissionFlags, SubmitError, Wake};

pub use endpoint::Endpoint;
use waiter::Waiter;

use crate::error::ClientError;
use crate::finish::FinishOnDrop;
use crate::options::QueuePairOptions;
use crate::session::{Live, Session, Subject};

/// Polls between two looks at the clock and at the session while busy polling.
const POLLS_PER_LOOK: u32 = 1 << 12;

/// A queue pair. Any task may post and poll; completions go to whoever asks first. Dropped, it is destroyed in the
/// background; await [`QueuePair::destroy`] to know that it was.
#[derive(Debug)]
pub struct QueuePair {
    session: Session,
    id: u64,
    hca: String,
    port_num: u32,
    max_inline_bytes: u32,
    endpoint: Endpoint,
    ring: Mutex<ClientRing>,
    doorbell: OwnedFd,
    waiter: Waiter,
    live: Live,
}

impl Session {
    /// Makes a brokered queue pair. Given up before its end, the call goes on in the background and destroys what it
    /// got.
    ///
    /// # Errors
    /// [`ClientError::Refused`] with the daemon's reason (no such HCA or port, quota, policy),
    /// [`ClientError::SessionEnded`], [`ClientError::Deadline`], [`ClientError::Unreachable`].
    pub async fn create_queue_pair(&self, options: QueuePairOptions) -> Result<QueuePair, ClientError> {
        let session = self.clone();
        let call = async move {
            let wanted = options.into_request();
            session.across_restarts(|session| QueuePair::create(session, wanted.clone())).await
        };
        FinishOnDrop::new(self.runtime(), call).await
    }

    pub(crate) async fn destroy_queue_pair(&self, queue_pair_id: u64) -> Result<(), ClientError> {
        let destroy = |session: Session| async move {
            let request = session.request(v1::DestroyQueuePairRequest { queue_pair_id });
            let answer = QueuePairsClient::new(session.channel()).destroy(request).await;
            answer.map(drop).map_err(|status| session.error("QueuePairs.Destroy", status))
        };
        self.ending(destroy).await
    }
}

impl QueuePair {
    async fn create(session: Session, wanted: v1::CreateQueuePairRequest) -> Result<Self, ClientError> {
        let expected = session.expect_delivery().await?;
        let request = session.request(wanted);
        let answer = QueuePairsClient::new(session.channel()).create(request).await;
        let made = answer.map_err(|status| session.error("QueuePairs.Create", status))?.into_inner();
        let subject = Subject::QueuePair(made.queue_pair_id);
        let (mut delivery, live) = session.claim(expected, made.delivery_id, subject).await?;
        let mut take = |kind| {
            let missing = || ClientError::protocol(format!("a queue pair came without its {kind} fd"));
            delivery.take(kind).ok_or_else(missing)
        };
        let (ring, doorbell) = (ClientRing::open(take("ring")?)?, take("doorbell")?);
        QueuePair::new(session, made, ring, doorbell, live)
    }

    fn new(
        session: Session,
        made: v1::QueuePair,
        ring: ClientRing,
        doorbell: OwnedFd,
        live: Live,
    ) -> Result<Self, ClientError> {
        let endpoint = made.endpoint.ok_or_else(|| ClientError::protocol("a queue pair came without its endpoint"))?;
        Ok(Self {
            session,
            id: made.queue_pair_id,
            hca: made.hca,
            port_num: made.port_num,
            max_inline_bytes: made.max_inline_bytes,
            endpoint: Endpoint::new(endpoint),
            ring: Mutex::new(ring),
            doorbell,
            waiter: Waiter::default(),
            live,
        })
    }

    pub(crate) fn session(&self) -> &Session {
        &self.session
    }

    /// The queue pair's number at the daemon.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Name of the HCA: buffers need a registration with it.
    #[must_use]
    pub fn hca(&self) -> &str {
        &self.hca
    }

    /// Port of the HCA, counted from 1.
    #[must_use]
    pub fn port_num(&self) -> u32 {
        self.port_num
    }

    /// Longest inline payload, bytes.
    #[must_use]
    pub fn max_inline_bytes(&self) -> u32 {
        self.max_inline_bytes
    }

    /// This side's address, for the peer.
    #[must_use]
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Most requests that may be outstanding, of sends and of receives.
    #[must_use]
    pub fn depths(&self) -> (u32, u32) {
        let geometry = self.lock().geometry();
        (geometry.sq_depth(), geometry.rq_depth())
    }

    /// Requests that are posted and not known to have ended: an unsignalled one is known to have ended by the next
    /// completion after it.
    #[must_use]
    pub fn outstanding(&self, queue: Queue) -> u32 {
        self.lock().outstanding(queue)
    }

    /// Connects to the peer whose endpoint the job handed over. Both sides do this.
    ///
    /// # Errors
    /// [`ClientError::Refused`] for an endpoint that this port cannot reach, or a queue pair that is connected.
    pub async fn connect(&self, remote: &Endpoint) -> Result<(), ClientError> {
        self.session.check_ours()?;
        let remote = Some(remote.message().clone());
        let request = self.session.request(v1::ConnectQueuePairRequest { queue_pair_id: self.id, remote });
        let answer = QueuePairsClient::new(self.session.channel()).connect(request).await;
        answer.map(drop).map_err(|status| self.session.error("QueuePairs.Connect", status))
    }

    /// Posts one request that makes a completion. `wr_id` comes back in it.
    ///
    /// What it sends from GPU memory that this process has mapped ([`Buffer::device_memory`](crate::Buffer::device_memory),
    /// [`AdoptOptions::cuda`](crate::AdoptOptions::cuda)) is what the work queued there before has written: it blocks until
    /// the default stream of that GPU is done. That stream does not wait for those made with `cudaStreamNonBlocking`, as
    /// PyTorch's side streams are: [`QueuePair::post_after`] names one, [`QueuePair::post_unordered`] waits for none. Other
    /// memory costs no wait.
    ///
    /// # Errors
    /// [`ClientError::Cuda`] when that work failed, and
    /// [`ClientError::Submit`] when the queue is full or closed, or the request is malformed, and
    /// [`ClientError::InvalidArgument`] in a forked child; then nothing was posted. [`ClientError::Io`] when it was, and the
    /// doorbell could not be rung.
    pub fn post(&self, wr_id: u64, operation: Operation) -> Result<(), ClientError> {
        self.post_with(&Submission { wr_id, flags: SubmissionFlags::SIGNALED, operation })
    }

    /// Posts one request with these flags.
    ///
    /// # Errors
    /// As [`QueuePair::post`].
    pub fn post_with(&self, submission: &Submission) -> Result<(), ClientError> {
        self.post_batch(std::slice::from_ref(submission)).map(drop)
    }

    /// Posts as many of `batch` as there is room for, in order and with one doorbell, and returns how many.
    ///
    /// # Errors
    /// As [`QueuePair::post`] when not even the first could be posted.
    pub fn post_batch(&self, batch: &[Submission]) -> Result<usize, ClientError> {
        self.session.check_ours()?;
        self.wait_for_gpus(batch)?;
        self.post_unordered(batch)
    }

    /// The same without a wait for any GPU: for who knows that what is sent is there, by an event of its own. Else a
    /// request may overtake the kernel that writes its bytes, and sends what was there before.
    ///
    /// # Errors
    /// As [`QueuePair::post_batch`], but for [`ClientError::Cuda`].
    pub fn post_unordered(&self, batch: &[Submission]) -> Result<usize, ClientError> {
        self.session.check_ours()?;
        let (posted, wake) = {
            let mut ring = self.lock();
            let posted = ring.submit_batch(batch).map_err(|error| self.submit_error(error))?;
            (posted, ring.flush())
        };
        if wake == Wake::Needed {
            self.ring_doorbell()?;
        }
        Ok(posted)
    }

    /// The next completion, if there is one. Makes no system call.
    ///
    /// # Errors
    /// [`ClientError::Ring`] when the queue pair has ended and all was polled, [`ClientError::SessionEnded`],
    /// [`ClientError::InvalidArgument`] in a forked child.
    pub fn poll(&self) -> Result<Option<Completion>, ClientError> {
        self.session.check_ours()?;
        let mut ring = self.lock();
        self.poll_locked(&mut ring)
    }

    /// Adds completions that there are to `completions`, at most `most`, and says how many: one lock for all of them, as
    /// ibv_poll_cq(3). Makes no system call.
    ///
    /// # Errors
    /// As [`QueuePair::poll`], once there is nothing to add.
    pub fn poll_into(&self, completions: &mut Vec<Completion>, most: usize) -> Result<usize, ClientError> {
        let mut ring = self.lock();
        let mut added = 0;
        while added < most {
            match ring.poll() {
                Ok(Some(completion)) => completions.push(completion),
                _ => break,
            }
            added += 1;
        }
        if added == 0 && most > 0 {
            let last = self.poll_locked(&mut ring)?;
            completions.extend(last);
            added = usize::from(last.is_some());
        }
        Ok(added)
    }

    /// The next completion, polling without sleep for at most `patience`; `None` when there was none. Takes the least
    /// time from post to completion, and a whole CPU. Others may post meanwhile.
    ///
    /// # Errors
    /// As [`QueuePair::poll`].
    pub fn poll_busy(&self, patience: Duration) -> Result<Option<Completion>, ClientError> {
        self.session.check_ours()?;
        let mut since = None;
        loop {
            let mut ring = self.lock();
            for _ in 0..POLLS_PER_LOOK {
                if let Some(completion) = ring.poll().map_err(RingError::from)? {
                    return Ok(Some(completion));
                }
                std::hint::spin_loop();
            }
            if let Some(completion) = self.poll_locked(&mut ring)? {
                return Ok(Some(completion));
            }
            drop(ring);
            if since.get_or_insert_with(Instant::now).elapsed() > patience {
                return Ok(None);
            }
            // Where the broker shares this CPU, it can only work when we let it.
            std::thread::yield_now();
        }
    }

    /// The next completion, asleep until there is one. Cancel-safe: a completion is never lost.
    ///
    /// # Errors
    /// As [`QueuePair::poll`].
    pub async fn completion(&self) -> Result<Completion, ClientError> {
        self.session.check_ours()?;
        loop {
            let woken = self.waiter.woken();
            tokio::pin!(woken);
            // From here on a wake is noticed, so that one between the poll and the await is not lost.
            woken.as_mut().enable();
            {
                let mut ring = self.lock();
                let ticket = ring.announce_wait()?;
                // Closed is looked at first, inside: what was published before the close is then visible.
                match self.poll_locked(&mut ring) {
                    Ok(None) => self.waiter.wait_on(ticket)?,
                    Ok(Some(completion)) => return Ok(completion),
                    Err(error) => return Err(error),
                }
            }
            tokio::select! {
                () = woken => {}
                _ = self.session.ended() => {
                    // What had come before the end is still handed out.
                    return self.poll()?.ok_or_else(|| self.closed());
                }
            }
        }
    }

    /// Destroys the queue pair; what is posted is flushed and makes no completion here.
    ///
    /// # Errors
    /// [`ClientError::SessionEnded`], [`ClientError::Deadline`], [`ClientError::Unreachable`].
    pub async fn destroy(mut self) -> Result<(), ClientError> {
        self.session.destroy_queue_pair(self.id).await?;
        self.live.over();
        Ok(())
    }

    fn poll_locked(&self, ring: &mut ClientRing) -> Result<Option<Completion>, ClientError> {
        // A completion published before the close is visible to a poll after it.
        let closed = ring.is_closed();
        match ring.poll().map_err(RingError::from)? {
            Some(completion) => Ok(Some(completion)),
            None if closed => Err(self.closed()),
            None => match self.session.end() {
                Some(end) => Err(end.into()),
                None => Ok(None),
            },
        }
    }

    fn submit_error(&self, error: SubmitError) -> ClientError {
        match error {
            SubmitError::Closed => self.closed(),
            error => error.into(),
        }
    }

    /// Why the ring is closed, as exactly as is known.
    fn closed(&self) -> ClientError {
        if let Some(end) = self.session.end() {
            return end.into();
        }
        match self.live.failure() {
            Some(message) => ClientError::QueuePairFailed { queue_pair_id: self.id, message },
            None => RingError::Closed.into(),
        }
    }

    fn ring_doorbell(&self) -> Result<(), ClientError> {
        // eventfd(2): EAGAIN and a block both mean a counter at its maximum, out of reach by adding 1.
        let written = rustix::io::write(&self.doorbell, &1_u64.to_ne_bytes());
        written
            .map(drop)
            .map_err(|source| ClientError::io(format!("ring the doorbell of queue pair {}", self.id), source))
    }

    fn lock(&self) -> MutexGuard<'_, ClientRing> {
        // The ring keeps its own order at every step, so a panic elsewhere in a caller leaves it whole.
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        if self.session.is_ours() {
            self.lock().cancel_waits();
        }
    }
}

impl From<gdrd_ring::Corrupt> for ClientError {
    fn from(corrupt: gdrd_ring::Corrupt) -> Self {
        Self::Ring(corrupt.into())
    }
}

#[cfg(test)]
mod tests {
    use gdrd_ring::{BrokerRing, CompletionOpcode, Geometry, RemoteSpan, Source, Status, Submitted};

    use super::*;
    use crate::session::tests::opened;

    /// Long beside anything that a busy machine does to a thread.
    const PATIENCE: Duration = Duration::from_secs(60);

    /// A queue pair of the session, whose broker is the test.
    fn queue_pair(session: &Session) -> (QueuePair, BrokerRing) {
        let broker = BrokerRing::create(Geometry::new(4, 4).unwrap()).unwrap();
        let ring = ClientRing::open(broker.fd().try_clone_to_owned().unwrap()).unwrap();
        let doorbell = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        let made = v1::QueuePair { queue_pair_id: 7, endpoint: Some(v1::Endpoint::default()), ..Default::default() };
        let live = session.live(Subject::QueuePair(7));
        (QueuePair::new(session.clone(), made, ring, doorbell, live).unwrap(), broker)
    }

    fn write() -> Operation {
        let local = gdrd_ring::LocalSpan { slot: 0, generation: 1, offset: 0, len_bytes: 8 };
        Operation::Write { source: Source::Local(local), remote: RemoteSpan { rkey: 1, iova: 0 }, imm: None }
    }

    #[tokio::test]
    async fn others_post_while_a_thread_polls_without_sleep() {
        let (session, _daemon, _page) = opened().await;
        let (queue_pair, mut broker) = queue_pair(&session);
        std::thread::scope(|scope| {
            let (tell, told) = std::sync::mpsc::channel();
            let queue_pair = &queue_pair;
            let polling = scope.spawn(move || {
                tell.send(()).unwrap();
                queue_pair.poll_busy(PATIENCE)
            });
            // That it holds the ring is not to be seen where both threads share a CPU: it lets go of both at once.
            told.recv().unwrap();
            queue_pair.post(1, write()).unwrap();
            assert!(matches!(broker.take(), Ok(Some(Submitted::Request(_)))));
            let (status, opcode) = (Status::Success, CompletionOpcode::Write);
            let done = Completion { wr_id: 1, status, opcode, byte_len: 0, imm: None, qp_num: 0, vendor_error: 0 };
            broker.complete(&done).unwrap();
            broker.publish().unwrap();
            assert_eq!(polling.join().unwrap().unwrap().map(|done| done.wr_id), Some(1));
        });
    }

    #[tokio::test]
    async fn a_forked_child_neither_uses_nor_ends_what_is_its_parents() {
        let (session, daemon, _page) = opened().await;
        let (queue_pair, mut broker) = queue_pair(&session);
        let lease = session.live(Subject::Lease(3));
        session.become_child();
        let refused = |answer: Result<(), ClientError>| match answer {
            Err(ClientError::InvalidArgument { what }) => assert!(what.contains("forked"), "{what}"),
            other => panic!("{other:?}"),
        };
        refused(queue_pair.post(1, write()));
        refused(queue_pair.poll().map(drop));
        refused(queue_pair.poll_busy(Duration::ZERO).map(drop));
        refused(queue_pair.completion().await.map(drop));
        refused(queue_pair.connect(queue_pair.endpoint()).await);
        refused(session.release_lease(3, 0).await);
        refused(session.register(Vec::new(), crate::RegisterOptions::new()).await.map(drop));
        session.parting().disown(1);
        session.parting().deregister(1);
        drop((queue_pair, lease, session));
        assert_eq!(broker.take().map(drop), Ok(()), "the ring is whole");
        // What was spawned would run now.
        for _ in 0..20 {
            tokio::task::yield_now().await;
        }
        let mut packet = [0; 16];
        let heard = rustix::net::recv(&daemon, &mut packet, rustix::net::RecvFlags::DONTWAIT);
        assert_eq!(
            heard.map(|(_, len)| len),
            Err(rustix::io::Errno::AGAIN),
            "the session goes on, and nothing was asked"
        );
    }
}
