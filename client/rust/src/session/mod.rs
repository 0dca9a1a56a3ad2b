//! A session: opened by a handshake on the session socket, kept by one task that reads it, ended with the socket.

mod adopt;
mod calls;
mod deliveries;
mod prove;
mod questions;
mod socket;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use gdrd_proto::v1;
use gdrd_proto::v1::buffers_client::BuffersClient;
use gdrd_proto::v1::queue_pairs_client::QueuePairsClient;
use gdrd_proto::v1::{client_message, daemon_message};
use gdrd_ring::GenerationReader;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tonic::transport::Channel;
use tonic::{Request, Status};

use calls::Calls;
pub(crate) use calls::Lent;
use deliveries::Deliveries;
pub(crate) use deliveries::{Delivery, Expectation, Live, Subject};
use questions::Questions;
use socket::{Packet, SessionSocket};

use crate::calls::{CallContext, Token};
use crate::error::ClientError;
use crate::parting::Parting;
use crate::registration_cache::Mappings;

/// How a session ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionEnd {
    /// Stable reason string of the daemon, `CONNECTION_LOST` when it said nothing, `CLOSED_BY_CLIENT` after
    /// [`Session::close`].
    pub reason: String,
    /// What happened, in words.
    pub message: String,
}

impl SessionEnd {
    fn new(reason: &str, message: impl Into<String>) -> Self {
        Self { reason: reason.to_owned(), message: message.into() }
    }
}

impl From<SessionEnd> for ClientError {
    fn from(end: SessionEnd) -> Self {
        Self::SessionEnded { reason: end.reason, message: end.message }
    }
}

/// The lifeline of buffers and queue pairs. Cheap to clone; clones share it. When the last clone is dropped, and no
/// buffer or queue pair of it is left, the session ends, and the daemon takes back what it still held.
#[derive(Debug, Clone)]
pub struct Session(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    id: u64,
    token: Token,
    channel: Channel,
    context: CallContext,
    socket: Arc<SessionSocket>,
    page: Arc<GenerationReader>,
    mappings: Mappings,
    parting: Arc<Parting>,
    calls: Arc<Calls>,
    deliveries: Deliveries,
    proofs: Questions<v1::GpusProven>,
    adoptions: Questions<v1::Adopted>,
    end: watch::Receiver<Option<SessionEnd>>,
    /// How often the daemon was started again and took the session up.
    resumed: watch::Receiver<u64>,
    reader: AbortHandle,
    runtime: Handle,
}

impl Session {
    pub(crate) async fn open(
        path: &Path,
        name: &str,
        channel: Channel,
        context: CallContext,
    ) -> Result<Self, ClientError> {
        let socket = SessionSocket::connect(path, context.deadline).await?;
        Self::over(socket, name, channel, context).await
    }

    /// Shakes hands over a connected socket.
    async fn over(
        socket: SessionSocket,
        name: &str,
        channel: Channel,
        context: CallContext,
    ) -> Result<Self, ClientError> {
        let deadline = context.deadline;
        let late = |_| ClientError::Deadline { call: "the session handshake", deadline };
        let handshake = tokio::time::timeout(deadline, shake_hands(&socket, name)).await;
        let (welcome, page) = handshake.map_err(late)??;
        let socket = Arc::new(socket);
        let token = Token::new(&welcome.token);
        let deliveries = deliveries_of(channel.clone(), token.clone(), context.clone());
        let (proofs, adoptions) = (Questions::default(), Questions::default());
        let calls = Arc::new(Calls::new());
        let page = Arc::new(page);
        let mappings = Mappings::new(Arc::clone(&page))?;
        let parting = Parting::new(channel.clone(), token.clone(), context.clone(), Handle::current());
        let (end_sender, end) = watch::channel(None);
        let (resumed_sender, resumed) = watch::channel(0);
        let reader = Reader {
            socket: Arc::clone(&socket),
            calls: Arc::clone(&calls),
            deliveries: deliveries.clone(),
            proofs: proofs.clone(),
            resumed: resumed_sender,
            adoptions: adoptions.clone(),
            parting: Arc::clone(&parting),
        };
        let reader = tokio::spawn(reader.run(end_sender)).abort_handle();
        let (id, runtime) = (welcome.session_id, Handle::current());
        Ok(Self(Arc::new(Shared {
            id,
            token,
            channel,
            context,
            socket,
            page,
            mappings,
            parting,
            calls,
            deliveries,
            proofs,
            adoptions,
            end,
            resumed,
            reader,
            runtime,
        })))
    }

    /// The session's number, as lists and the daemon's log show it.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.0.id
    }

    /// Waits until the session is over, however that comes about, and says how. Cancel-safe.
    pub async fn ended(&self) -> SessionEnd {
        let mut end = self.0.end.clone();
        let ended = end.wait_for(Option::is_some).await.ok().and_then(|end| end.clone());
        ended.unwrap_or_else(|| SessionEnd::new("CLOSED_BY_CLIENT", "this client closed it"))
    }

    /// Whether the session is over, and how.
    #[must_use]
    pub fn end(&self) -> Option<SessionEnd> {
        self.0.end.borrow().clone()
    }

    /// How often the daemon was started again and went on with this session. Memory and its content are the same; buffers
    /// have new registrations ([`Buffer::refresh`](crate::Buffer::refresh)), and queue pairs have ended.
    #[must_use]
    pub fn restarts(&self) -> u64 {
        *self.0.resumed.borrow()
    }

    /// Waits until [`Session::restarts`] is more than `seen`, and returns it; `None` when the session ends first.
    /// Cancel-safe.
    pub async fn restarted(&self, seen: u64) -> Option<u64> {
        let mut resumed = self.0.resumed.clone();
        resumed.wait_for(|count| *count > seen).await.ok().map(|count| *count)
    }

    /// Ends the session now, for forked children that hold its socket as well. Mappings stay valid until their buffers
    /// are dropped; NIC access ends.
    pub fn close(&self) {
        self.0.socket.shutdown();
    }

    /// The generation that the daemon now gives to a registration slot: one load, no call. A registration whose own
    /// generation differs is stale. `None` for a slot that the page does not have.
    #[must_use]
    pub fn generation_of(&self, slot: u32) -> Option<u64> {
        self.0.page.current(slot)
    }

    pub(crate) fn mappings(&self) -> &Mappings {
        &self.0.mappings
    }

    pub(crate) fn parting(&self) -> &Arc<Parting> {
        &self.0.parting
    }

    pub(crate) fn channel(&self) -> Channel {
        self.0.channel.clone()
    }

    pub(crate) fn token(&self) -> &Token {
        &self.0.token
    }

    pub(crate) fn context(&self) -> &CallContext {
        &self.0.context
    }

    pub(crate) fn runtime(&self) -> &Handle {
        &self.0.runtime
    }

    pub(crate) fn request<T>(&self, message: T) -> Request<T> {
        self.0.context.session_request(&self.0.token, message)
    }

    /// What a failed call means; after the end of the session that is the reason, whatever the call said.
    pub(crate) fn error(&self, call: &'static str, status: Status) -> ClientError {
        match self.end() {
            Some(end) => end.into(),
            None => self.0.context.error(call, status),
        }
    }

    /// Before a gRPC call whose descriptors come as a delivery: for that the one before must be acknowledged.
    pub(crate) async fn expect_delivery(&self) -> Result<Expectation, ClientError> {
        let expected = self.0.deliveries.expect();
        self.0.calls.flush_ack(&self.0.socket).await?;
        Ok(expected)
    }

    /// Makes a call. Where the connection to the daemon breaks it is made again: at once, since the connection may have
    /// been to a daemon before this one, and once more when the daemon has taken the session up. What calls without an
    /// answer were lent is given back then, so that a second call takes nothing twice.
    pub(crate) async fn across_restarts<T, F: Future<Output = Result<T, ClientError>>>(
        &self,
        call: impl Fn(Session) -> F,
    ) -> Result<T, ClientError> {
        let call = || call(self.clone());
        let seen = self.restarts();
        let until = tokio::time::Instant::now() + self.0.context.deadline;
        match call().await {
            Err(error) if error.is_unreachable() && self.end().is_none() => {}
            answer => return answer,
        }
        let broken = match call().await {
            Err(error) if error.is_unreachable() => error,
            answer => return answer,
        };
        match tokio::time::timeout_at(until, self.restarted(seen)).await {
            Ok(Some(_)) => call().await,
            Ok(None) => Err(self.ended().await.into()),
            Err(_) => Err(broken),
        }
    }

    /// Makes a call that ends something. That it is gone is what was wanted, if an attempt without an answer may have
    /// ended it.
    pub(crate) async fn ending<F: Future<Output = Result<(), ClientError>>>(
        &self,
        call: impl Fn(Session) -> F,
    ) -> Result<(), ClientError> {
        let attempts = AtomicU32::new(0);
        let ended = self.across_restarts(|session| {
            attempts.fetch_add(1, Ordering::Relaxed);
            call(session)
        });
        match ended.await {
            Err(error) if attempts.into_inner() > 1 && error.reason().is_some_and(|reason| GONE.contains(&reason)) => {
                Ok(())
            }
            answer => answer,
        }
    }

    /// The descriptors that a reply named.
    pub(crate) async fn claim(
        &self,
        expected: Expectation,
        id: u64,
        subject: Subject,
    ) -> Result<(Delivery, Live), ClientError> {
        let deadline = self.0.context.deadline;
        match tokio::time::timeout(deadline, expected.claim(id, subject)).await {
            Ok(Some(claimed)) => Ok(claimed),
            Ok(None) => match self.end() {
                Some(end) => Err(end.into()),
                None => Err(self.0.context.restarted("the daemon was started again before it sent the descriptors")),
            },
            Err(_) => Err(ClientError::Deadline { call: "the delivery of descriptors", deadline }),
        }
    }
}

/// Reasons of the daemon for not ending what is not there.
const GONE: [&str; 3] = ["LEASE_UNKNOWN", "LEASE_NOT_HELD", "QUEUE_PAIR_UNKNOWN"];

impl Drop for Shared {
    fn drop(&mut self) {
        self.reader.abort();
        // A forked child that drops its copy of this value must not end its parent's session.
        if self.socket.is_owner() {
            self.socket.shutdown();
        }
    }
}

async fn shake_hands(socket: &SessionSocket, name: &str) -> Result<(v1::Welcome, GenerationReader), ClientError> {
    let hello = v1::Hello { versions: Some(our_versions()), client_name: name.to_owned() };
    socket.send(client_message::Message::Hello(hello), &[]).await?;
    let Some(Packet { message, mut fds }) = socket.receive().await? else {
        return Err(ClientError::SessionRefused {
            reason: "CONNECTION_LOST".into(),
            message: "it closed the session socket without a word".into(),
        });
    };
    match message {
        daemon_message::Message::Welcome(welcome) => {
            check_versions(welcome.versions.unwrap_or_default())?;
            let page = fds.pop().ok_or_else(|| ClientError::protocol("the welcome carried no generation page"))?;
            Ok((welcome, GenerationReader::open(page)?))
        }
        daemon_message::Message::Goodbye(goodbye) => {
            Err(ClientError::SessionRefused { reason: goodbye.reason, message: goodbye.message })
        }
        _ => Err(ClientError::protocol("the first packet of a session is neither welcome nor goodbye")),
    }
}

/// Deliveries that release or destroy what a call was lent after it had been given up.
fn deliveries_of(channel: Channel, token: Token, context: CallContext) -> Deliveries {
    let runtime = Handle::current();
    Deliveries::new(move |subject| {
        let (channel, token, context) = (channel.clone(), token.clone(), context.clone());
        runtime.spawn(async move {
            // The first may meet the dead connection to a daemon before this one. Refused where the daemon was quicker;
            // there is nobody to tell, and a daemon that is started again asks again.
            for _ in 0..2 {
                let channel = channel.clone();
                let given_back = match subject {
                    Subject::Lease(lease_id) => {
                        let request = v1::ReleaseRequest { lease_id, generation: 0 };
                        let request = context.session_request(&token, request);
                        BuffersClient::new(channel).release(request).await.map(drop)
                    }
                    Subject::QueuePair(queue_pair_id) => {
                        let request = context.session_request(&token, v1::DestroyQueuePairRequest { queue_pair_id });
                        QueuePairsClient::new(channel).destroy(request).await.map(drop)
                    }
                };
                if given_back.is_ok() {
                    break;
                }
            }
        });
    })
}

fn our_versions() -> v1::Versions {
    v1::Versions {
        api: gdrd_proto::API_VERSION,
        ring: gdrd_ring::RING_VERSION,
        generation_page: gdrd_ring::GENERATION_PAGE_VERSION,
    }
}

fn check_versions(daemon: v1::Versions) -> Result<(), ClientError> {
    let client = our_versions();
    let pairs = [
        ("API", daemon.api, client.api),
        ("ring", daemon.ring, client.ring),
        ("generation page", daemon.generation_page, client.generation_page),
    ];
    match pairs.into_iter().find(|(_, daemon, client)| daemon != client) {
        Some((what, daemon, client)) => Err(ClientError::Version { what, daemon, client }),
        None => Ok(()),
    }
}

/// The task that reads the session socket to its end.
struct Reader {
    socket: Arc<SessionSocket>,
    calls: Arc<Calls>,
    deliveries: Deliveries,
    proofs: Questions<v1::GpusProven>,
    adoptions: Questions<v1::Adopted>,
    parting: Arc<Parting>,
    resumed: watch::Sender<u64>,
}

impl Reader {
    async fn run(self, end: watch::Sender<Option<SessionEnd>>) {
        let ended = loop {
            match self.step().await {
                Ok(None) => {}
                Ok(Some(ended)) => break ended,
                Err(error) => break SessionEnd::new("CONNECTION_LOST", error.to_string()),
            }
        };
        // First the reason, then the waiters, who look for it.
        end.send_replace(Some(ended));
        self.calls.end();
        self.deliveries.end();
        self.proofs.end();
        self.adoptions.end();
        self.socket.shutdown();
    }

    async fn step(&self) -> Result<Option<SessionEnd>, ClientError> {
        let Some(Packet { message, fds }) = self.socket.receive().await? else {
            return Ok(Some(SessionEnd::new("CONNECTION_LOST", "the daemon closed the session socket")));
        };
        match message {
            daemon_message::Message::Delivery(delivery) => {
                let id = delivery.delivery_id;
                self.deliveries.arrive(id, Delivery::new(delivery, fds));
                self.socket.send(client_message::Message::Ack(v1::Ack { delivery_id: id }), &[]).await?;
                Ok(None)
            }
            daemon_message::Message::Answer(answer) => {
                self.answered(answer, fds).await?;
                Ok(None)
            }
            daemon_message::Message::GpusProven(proven) => {
                // Nobody is left to tell where it is not taken.
                let _ = self.proofs.answer(proven.request_id, proven);
                Ok(None)
            }
            daemon_message::Message::Adopted(adopted) => {
                if let Err(adopted) = self.adoptions.answer(adopted.request_id, adopted) {
                    // Its call was given up: the memory goes back.
                    adopted.memories.iter().for_each(|memory| self.parting.disown(memory.memory_id));
                }
                Ok(None)
            }
            daemon_message::Message::Goodbye(goodbye) => {
                Ok(Some(SessionEnd { reason: goodbye.reason, message: goodbye.message }))
            }
            daemon_message::Message::QueuePairFailed(failed) => {
                self.deliveries.fail(failed.queue_pair_id, failed.message);
                Ok(None)
            }
            daemon_message::Message::Resumed(resumed) => {
                let leases = resumed.lease_ids.into_iter().map(Subject::Lease);
                let queue_pairs = resumed.queue_pair_ids.into_iter().map(Subject::QueuePair);
                let queue_pairs: Vec<Subject> = queue_pairs.collect();
                for subject in &queue_pairs {
                    if let Subject::QueuePair(id) = subject {
                        self.deliveries.fail(*id, "the daemon that owned it was started again".to_owned());
                    }
                }
                self.deliveries.resumed(leases.chain(queue_pairs));
                if !resumed.more {
                    self.calls.lose();
                    self.resumed.send_modify(|count| *count += 1);
                }
                Ok(None)
            }
            daemon_message::Message::Welcome(_) => Err(ClientError::protocol("a second welcome")),
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::os::fd::{AsFd, OwnedFd};
    use std::time::Duration;

    use gdrd_ring::GenerationWriter;
    use tonic::transport::Endpoint;

    use super::socket::tests::{daemon_receive, daemon_send, pair};
    use super::*;

    fn welcome(versions: v1::Versions) -> daemon_message::Message {
        let welcome = v1::Welcome { session_id: 5, token: vec![1; 32], versions: Some(versions), ..Default::default() };
        daemon_message::Message::Welcome(welcome)
    }

    /// A session whose daemon is this test.
    pub(super) async fn opened() -> (Session, OwnedFd, GenerationWriter) {
        let (socket, daemon) = pair();
        let page = GenerationWriter::create(8).unwrap();
        daemon_send(&daemon, welcome(our_versions()), &[page.fd()]);
        let context = CallContext { deadline: Duration::from_secs(30), socket: "/nowhere".into() };
        let channel = Endpoint::from_static("http://nowhere").connect_lazy();
        let session = Session::over(socket, "test", channel, context).await.unwrap();
        assert!(matches!(daemon_receive(&daemon), Some(client_message::Message::Hello(_))));
        (session, daemon, page)
    }

    #[tokio::test]
    async fn the_generation_page_is_read_without_a_call() {
        let (session, _daemon, page) = opened().await;
        page.bump(3).unwrap();
        assert_eq!((session.id(), session.generation_of(3), session.generation_of(8)), (5, Some(1), None));
    }

    #[tokio::test]
    async fn deliveries_are_acknowledged_and_claimed_by_their_number() {
        let (session, daemon, page) = opened().await;
        let expected = session.expect_delivery().await.unwrap();
        let delivery = v1::Delivery { delivery_id: 9, kinds: vec!["memory".into()], subject: None };
        daemon_send(&daemon, daemon_message::Message::Delivery(delivery), &[page.fd()]);
        let (mut delivery, _live) = session.claim(expected, 9, Subject::Lease(1)).await.unwrap();
        assert!(delivery.take("memory").is_some());
        assert_eq!(daemon_receive(&daemon), Some(client_message::Message::Ack(v1::Ack { delivery_id: 9 })));
    }

    #[tokio::test]
    async fn a_lost_daemon_is_an_end_and_every_waiting_call_says_so() {
        let (session, daemon, _page) = opened().await;
        let expected = session.expect_delivery().await.unwrap();
        let (claimed, proven, ()) =
            tokio::join!(session.claim(expected, 1, Subject::Lease(1)), session.prove_gpus(&[]), async {
                drop(daemon)
            },);
        assert_eq!(claimed.unwrap_err().reason(), Some("CONNECTION_LOST"));
        assert!(matches!(proven.unwrap_err(), ClientError::SessionEnded { .. } | ClientError::Io { .. }));
        assert_eq!(session.ended().await.reason, "CONNECTION_LOST");
        assert_eq!(session.error("X", Status::internal("y")).reason(), Some("CONNECTION_LOST"));
    }

    #[tokio::test]
    async fn the_daemons_goodbye_gives_the_reason() {
        let (session, daemon, _page) = opened().await;
        let goodbye = v1::Goodbye { reason: "ACK_MISSING".into(), message: "too slow".into() };
        daemon_send(&daemon, daemon_message::Message::Goodbye(goodbye), &[]);
        assert_eq!(session.ended().await.reason, "ACK_MISSING");
    }

    #[tokio::test]
    async fn the_last_clone_ends_the_session() {
        let (session, daemon, _page) = opened().await;
        let other = session.clone();
        drop(session);
        assert_eq!(other.end(), None);
        drop(other);
        assert_eq!(daemon_receive(&daemon), None);
    }

    #[tokio::test]
    async fn another_version_and_a_refusal_are_told_apart() {
        let refused = |message| async move {
            let (socket, daemon) = pair();
            let page = GenerationWriter::create(1).unwrap();
            daemon_send(&daemon, message, &[page.fd().as_fd()]);
            shake_hands(&socket, "test").await.unwrap_err()
        };
        let newer = v1::Versions { ring: 99, ..our_versions() };
        let error = refused(welcome(newer)).await;
        assert!(matches!(error, ClientError::Version { what: "ring", daemon: 99, .. }), "{error}");
        let goodbye = v1::Goodbye { reason: "POLICY".into(), message: "no rule".into() };
        let error = refused(daemon_message::Message::Goodbye(goodbye)).await;
        assert!(matches!(error, ClientError::SessionRefused { .. }), "{error}");
    }
}
