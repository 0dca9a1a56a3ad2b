//! Calls of Buffers by the session socket, in place of gRPC: one packet there, one back with the descriptor.
//!
//! An acknowledgement is held back for the next call to carry. It is sent by itself where something may wait for it:
//! another call that is under way, or one by gRPC whose descriptors come as a delivery of their own.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};

use gdrd_proto::v1;
use gdrd_proto::v1::{answer, call, client_message};
use tokio::sync::{Semaphore, SemaphorePermit};
use tonic::{Code, Status};

use super::Session;
use super::deliveries::{Live, Subject};
use super::questions::Questions;
use super::reader::Reader;
use super::socket::SessionSocket;
use crate::calls::REASON_KEY;
use crate::error::ClientError;

/// Calls under way, of those that lend and of the others: the answers of all fit into the socket, whether or not this
/// process comes to read them, since the daemon ends a session that does not take its answers.
const MOST_AT_ONCE: usize = 64;

/// What the daemon answered.
#[derive(Debug)]
pub(crate) enum Answered {
    Lent(Lent),
    Released,
    Refused(v1::Refused),
}

/// A lease that this process has from here on, its memory, and what gives it back.
#[derive(Debug)]
pub(crate) struct Lent(pub(crate) v1::Lease, pub(crate) OwnedFd, pub(crate) Live);

/// Calls of one session.
#[derive(Debug)]
pub(super) struct Calls {
    questions: Questions<Answered>,
    lending: Semaphore,
    others: Semaphore,
    /// Number of the delivery whose acknowledgement is held back; 0 for none.
    held_ack: AtomicU64,
}

/// An acknowledgement to be sent; not sent, it is held back again.
struct Ack<'a> {
    calls: &'a Calls,
    delivery_id: u64,
}

impl Drop for Ack<'_> {
    fn drop(&mut self) {
        if self.delivery_id != 0 {
            self.calls.held_ack.store(self.delivery_id, Ordering::SeqCst);
        }
    }
}

impl Ack<'_> {
    fn sent(mut self) {
        self.delivery_id = 0;
    }
}

impl Calls {
    pub(super) fn new() -> Self {
        let semaphore = || Semaphore::new(MOST_AT_ONCE);
        Self { questions: Questions::default(), lending: semaphore(), others: semaphore(), held_ack: AtomicU64::new(0) }
    }

    /// The daemon answers none of those that are under way: it was started again.
    pub(super) fn lose(&self) {
        self.questions.lose();
    }

    /// No answer comes any more.
    pub(super) fn end(&self) {
        self.questions.end();
    }

    async fn permit(&self, call: &call::Call) -> Option<SemaphorePermit<'_>> {
        let semaphore = match call {
            call::Call::Release(_) => &self.others,
            _ => &self.lending,
        };
        // Never closed.
        semaphore.acquire().await.ok()
    }

    fn held_ack(&self) -> Ack<'_> {
        // The daemon sends no second delivery before this is acknowledged, so there is one at most.
        Ack { calls: self, delivery_id: self.held_ack.swap(0, Ordering::SeqCst) }
    }

    /// Sends the acknowledgement that is held back, if there is one.
    pub(super) async fn flush_ack(&self, socket: &SessionSocket) -> Result<(), ClientError> {
        let ack = self.held_ack();
        if ack.delivery_id != 0 {
            let message = v1::Ack { delivery_id: ack.delivery_id };
            socket.tell(client_message::Message::Ack(message)).await?;
        }
        ack.sent();
        Ok(())
    }
}

impl Session {
    /// Makes a call and waits for its answer, no longer than the deadline.
    pub(crate) async fn call(&self, name: &'static str, call: call::Call) -> Result<Answered, ClientError> {
        let deadline = self.context().deadline;
        let late = |_| ClientError::Deadline { call: name, deadline };
        match tokio::time::timeout(deadline, self.ask(call)).await.map_err(late)?? {
            Answered::Refused(refused) => Err(self.error(name, status(refused))),
            answered => Ok(answered),
        }
    }

    /// Makes a call that lends a buffer.
    pub(crate) async fn call_for_lease(&self, name: &'static str, call: call::Call) -> Result<Lent, ClientError> {
        match self.call(name, call).await? {
            Answered::Lent(lent) => Ok(lent),
            other => Err(ClientError::protocol(format!("{name} was answered {other:?}"))),
        }
    }

    async fn ask(&self, call: call::Call) -> Result<Answered, ClientError> {
        let calls = &self.0.calls;
        let _permit = calls.permit(&call).await;
        let (request_id, answer) = calls.questions.begin();
        let ack = calls.held_ack();
        let timeout_ms = u32::try_from(self.context().deadline.as_millis()).unwrap_or(u32::MAX);
        let message = v1::Call { request_id, ack_delivery_id: ack.delivery_id, timeout_ms, call: Some(call) };
        self.send(client_message::Message::Call(message), &[]).await?;
        ack.sent();
        answer.await.map_err(|_| self.unanswered())
    }
}

impl Reader {
    /// Hands an answer to its call. What was lent to one that was given up goes back.
    pub(super) async fn answered(&self, answer: v1::Answer, mut fds: Vec<OwnedFd>) -> Result<(), ClientError> {
        let v1::Answer { request_id, answer } = answer;
        let answered = match answer {
            Some(answer::Answer::Lease(lease)) => {
                let memory = fds.pop().ok_or_else(|| ClientError::protocol("a buffer came without its memory fd"))?;
                self.calls.held_ack.store(lease.delivery_id, Ordering::SeqCst);
                let live = self.deliveries.live(Subject::Lease(lease.lease_id));
                Answered::Lent(Lent(lease, memory, live))
            }
            Some(answer::Answer::Released(_)) => Answered::Released,
            Some(answer::Answer::Refused(refused)) => Answered::Refused(refused),
            None => return Err(ClientError::protocol("an answer of an unknown kind; upgrade this client")),
        };
        drop(self.calls.questions.answer(request_id, answered));
        // After the store: whoever begins to wait from here on sends the acknowledgement.
        if self.calls.questions.is_asked() || self.deliveries.is_expected() {
            self.calls.flush_ack(&self.socket).await?;
        }
        Ok(())
    }
}

/// The refusal as gRPC would have brought it.
fn status(refused: v1::Refused) -> Status {
    let mut status = Status::new(Code::from_i32(refused.code), refused.message);
    if let Ok(reason) = refused.reason.parse() {
        status.metadata_mut().insert(REASON_KEY, reason);
    }
    status
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd as _, OwnedFd};

    use gdrd_proto::v1::daemon_message;

    use super::super::socket::tests::{daemon_receive, daemon_send};
    use super::super::tests::opened;
    use super::*;

    fn acquire() -> call::Call {
        call::Call::Acquire(v1::AcquireRequest::default())
    }

    fn release(lease_id: u64) -> call::Call {
        call::Call::Release(v1::ReleaseRequest { lease_id, generation: 0 })
    }

    fn next_call(daemon: &OwnedFd) -> v1::Call {
        match daemon_receive(daemon) {
            Some(client_message::Message::Call(call)) => call,
            other => panic!("no call but {other:?}"),
        }
    }

    fn lend(daemon: &OwnedFd, request_id: u64, lease_id: u64, delivery_id: u64) {
        let memory = rustix::fs::memfd_create("lent", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let lease = v1::Lease { lease_id, delivery_id, ..Default::default() };
        send(daemon, request_id, answer::Answer::Lease(lease), &[memory.as_fd()]);
    }

    fn send(daemon: &OwnedFd, request_id: u64, answer: answer::Answer, fds: &[std::os::fd::BorrowedFd<'_>]) {
        daemon_send(daemon, daemon_message::Message::Answer(v1::Answer { request_id, answer: Some(answer) }), fds);
    }

    fn lent_to(session: &Session) -> tokio::task::JoinHandle<Result<Lent, ClientError>> {
        let session = session.clone();
        tokio::spawn(async move { session.call_for_lease("Buffers.Acquire", acquire()).await })
    }

    /// Lets other tasks run until they wait.
    async fn settle() {
        for _ in 0..20 {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn an_acknowledgement_rides_on_the_next_call() {
        let (session, daemon, _page) = opened().await;
        let acquiring = lent_to(&session);
        settle().await;
        let call = next_call(&daemon);
        assert_eq!((call.ack_delivery_id, call.timeout_ms), (0, 30_000));
        lend(&daemon, call.request_id, 10, 7);
        let Lent(lease, _memory, _live) = acquiring.await.unwrap().unwrap();
        assert_eq!(lease.lease_id, 10);
        let releasing = session.call("Buffers.Release", release(10));
        let answering = async {
            settle().await;
            let call = next_call(&daemon);
            assert_eq!(call.ack_delivery_id, 7, "and no packet of its own came before it");
            send(&daemon, call.request_id, answer::Answer::Released(v1::ReleaseResponse {}), &[]);
        };
        assert!(matches!(tokio::join!(releasing, answering).0, Ok(Answered::Released)));
    }

    #[tokio::test]
    async fn an_acknowledgement_that_another_call_waits_for_is_sent_by_itself() {
        let (session, daemon, _page) = opened().await;
        let (first, second) = (lent_to(&session), lent_to(&session));
        settle().await;
        let (one, two) = (next_call(&daemon).request_id, next_call(&daemon).request_id);
        lend(&daemon, one, 10, 7);
        let _first = first.await.unwrap().unwrap();
        assert_eq!(daemon_receive(&daemon), Some(client_message::Message::Ack(v1::Ack { delivery_id: 7 })));
        lend(&daemon, two, 20, 8);
        let _second = second.await.unwrap().unwrap();
        let expected = session.expect_delivery().await.unwrap();
        assert_eq!(daemon_receive(&daemon), Some(client_message::Message::Ack(v1::Ack { delivery_id: 8 })));
        let third = lent_to(&session);
        settle().await;
        lend(&daemon, next_call(&daemon).request_id, 30, 9);
        let _third = third.await.unwrap().unwrap();
        let acknowledged = daemon_receive(&daemon);
        assert_eq!(
            acknowledged,
            Some(client_message::Message::Ack(v1::Ack { delivery_id: 9 })),
            "a delivery may follow"
        );
        drop(expected);
    }

    #[tokio::test]
    async fn a_refusal_keeps_code_and_reason_and_time_over_is_a_deadline() {
        let (session, daemon, _page) = opened().await;
        for (code, reason) in [(Code::NotFound, "LEASE_UNKNOWN"), (Code::DeadlineExceeded, "")] {
            let refused = v1::Refused { code: code.into(), reason: reason.into(), message: "no".into() };
            let answering = async {
                settle().await;
                send(&daemon, next_call(&daemon).request_id, answer::Answer::Refused(refused), &[]);
            };
            let (answered, ()) = tokio::join!(session.call("Buffers.Release", release(1)), answering);
            match answered.unwrap_err() {
                ClientError::Refused { code: got, reason: why, .. } => assert_eq!((got, why.as_str()), (code, reason)),
                ClientError::Deadline { .. } => assert_eq!(code, Code::DeadlineExceeded),
                other => panic!("{other}"),
            }
        }
    }

    #[tokio::test]
    async fn calls_that_a_daemon_before_took_are_made_again() {
        let (session, daemon, _page) = opened().await;
        let again = session.clone();
        let acquiring = tokio::spawn(async move {
            again.across_restarts(|s| async move { s.call_for_lease("Buffers.Acquire", acquire()).await }).await
        });
        settle().await;
        let lost = next_call(&daemon).request_id;
        daemon_send(&daemon, daemon_message::Message::Resumed(v1::Resumed::default()), &[]);
        assert_eq!(session.restarted(0).await, Some(1));
        settle().await;
        let made_again = next_call(&daemon).request_id;
        assert_ne!(made_again, lost);
        lend(&daemon, made_again, 10, 7);
        assert_eq!(acquiring.await.unwrap().unwrap().0.lease_id, 10);
    }

    #[tokio::test]
    async fn an_answer_without_its_descriptor_ends_the_session() {
        let (session, daemon, _page) = opened().await;
        let acquiring = lent_to(&session);
        settle().await;
        let request_id = next_call(&daemon).request_id;
        send(&daemon, request_id, answer::Answer::Lease(v1::Lease::default()), &[]);
        assert!(matches!(acquiring.await.unwrap(), Err(ClientError::SessionEnded { .. })));
    }
}
