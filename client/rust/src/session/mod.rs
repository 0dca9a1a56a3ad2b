//! A session: opened by a handshake on the session socket, kept by one task that reads it, ended with the socket.

mod adopt;
mod calls;
mod deliveries;
mod lifeline;
mod prove;
mod questions;
mod reader;
mod socket;

use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use gdrd_proto::v1;
use gdrd_proto::v1::{client_message, daemon_message};
use gdrd_ring::GenerationReader;
use gdrd_shm::ForkMark;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tonic::transport::Channel;
use tonic::{Request, Status};

use calls::Calls;
pub(crate) use calls::Lent;
use deliveries::Deliveries;
pub(crate) use deliveries::{Delivery, Expectation, Live, Subject};
pub(crate) use lifeline::Lifeline;
use questions::Questions;
use reader::Reader;
use socket::{Packet, SessionSocket};

use crate::calls::{CallContext, Token};
use crate::error::ClientError;
use crate::kept::KeptMappings;
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

    fn closed_by_client() -> Self {
        Self::new("CLOSED_BY_CLIENT", "this client closed it")
    }
}

impl From<SessionEnd> for ClientError {
    fn from(end: SessionEnd) -> Self {
        Self::SessionEnded { reason: end.reason, message: end.message }
    }
}

/// The lifeline of buffers and queue pairs. Cheap to clone; clones share it. When the last clone is dropped, and no
/// buffer or queue pair of it is left, the session ends, and the daemon takes back what it still held.
///
/// After fork(2) it is the parent's alone: in the child, calls, posts and polls are refused with
/// [`ClientError::InvalidArgument`], and what is dropped there ends nothing.
#[derive(Debug, Clone)]
pub struct Session(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// Its mark says whose this is: in a forked child everything here is the parent's, and locks may be held for ever.
    line: Lifeline,
    id: u64,
    socket: Arc<SessionSocket>,
    page: Arc<GenerationReader>,
    mappings: Mappings,
    kept: Arc<KeptMappings>,
    parting: Arc<Parting>,
    calls: Arc<Calls>,
    deliveries: Deliveries,
    proofs: Questions<v1::GpusProven>,
    adoptions: Questions<v1::Adopted>,
    reader: AbortHandle,
    runtime: Handle,
}

impl Session {
    pub(crate) async fn open(
        path: &Path,
        name: &str,
        channel: Channel,
        context: CallContext,
        kept_bytes: u64,
    ) -> Result<Self, ClientError> {
        let socket = SessionSocket::connect(path, &context).await?;
        Self::over(socket, name, channel, context, kept_bytes).await
    }

    /// Shakes hands over a connected socket.
    async fn over(
        socket: SessionSocket,
        name: &str,
        channel: Channel,
        context: CallContext,
        kept_bytes: u64,
    ) -> Result<Self, ClientError> {
        let deadline = context.deadline;
        let late = |_| ClientError::Deadline { call: "the session handshake", deadline };
        let handshake = tokio::time::timeout(deadline, shake_hands(&socket, name)).await;
        let (welcome, page) = handshake.map_err(late)??;
        let socket = Arc::new(socket);
        let token = Token::new(&welcome.token);
        let mark = Arc::new(ForkMark::new()?);
        let (proofs, adoptions) = (Questions::default(), Questions::default());
        let (calls, kept) = (Arc::new(Calls::new()), Arc::new(KeptMappings::new(kept_bytes)));
        let page = Arc::new(page);
        let mappings = Mappings::new(Arc::clone(&page))?;
        let runtime = Handle::current();
        let parting = Parting::new(Arc::clone(&mark), channel.clone(), token.clone(), context.clone(), runtime.clone());
        let (end_sender, end) = watch::channel(None);
        let (resumed_sender, resumed) = watch::channel(0);
        let over = |weak: &Weak<Shared>| {
            let weak = Weak::clone(weak);
            // What a session that is gone held, the daemon has taken back.
            let give_back = move |subject| {
                if let Some(shared) = weak.upgrade() {
                    Session(shared).give_back(subject);
                }
            };
            let deliveries = Deliveries::new(Arc::clone(&mark), give_back);
            let reader = Reader {
                socket: Arc::clone(&socket),
                calls: Arc::clone(&calls),
                deliveries: deliveries.clone(),
                proofs: proofs.clone(),
                resumed: resumed_sender,
                adoptions: adoptions.clone(),
                kept: Arc::clone(&kept),
                parting: Arc::clone(&parting),
                page: Arc::clone(&page),
            };
            let reader = runtime.spawn(reader.run(end_sender)).abort_handle();
            let id = welcome.session_id;
            Shared {
                line: Lifeline { mark, token, channel, context, end, resumed },
                id,
                socket,
                page,
                mappings,
                kept,
                parting,
                calls,
                deliveries,
                proofs,
                adoptions,
                reader,
                runtime,
            }
        };
        Ok(Self(Arc::new_cyclic(over)))
    }

    /// The session's number, as lists and the daemon's log show it.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.0.id
    }

    /// Waits until the session is over, however that comes about, and says how. Cancel-safe.
    pub async fn ended(&self) -> SessionEnd {
        self.0.line.ended().await
    }

    /// What does not keep the session alive.
    pub(crate) fn lifeline(&self) -> &Lifeline {
        &self.0.line
    }

    /// Whether the session is over, and how.
    #[must_use]
    pub fn end(&self) -> Option<SessionEnd> {
        self.0.line.end()
    }

    /// How often the daemon was started again and went on with this session. Memory and its content are the same; buffers
    /// have new registrations ([`Buffer::refresh`](crate::Buffer::refresh)), and queue pairs have ended.
    #[must_use]
    pub fn restarts(&self) -> u64 {
        self.0.line.restarts()
    }

    /// Waits until [`Session::restarts`] is more than `seen`, and returns it; `None` when the session ends first.
    /// Cancel-safe.
    pub async fn restarted(&self, seen: u64) -> Option<u64> {
        self.0.line.restarted(seen).await
    }

    /// Ends the session now, for forked children that hold its socket as well. Mappings stay valid until their buffers
    /// are dropped; NIC access ends.
    pub fn close(&self) {
        self.0.socket.close();
    }

    /// The generation that the daemon now gives to a registration slot: one load, no call. A registration whose own
    /// generation differs is stale. `None` for a slot that the page does not have, and once the session has ended.
    #[must_use]
    pub fn generation_of(&self, slot: u32) -> Option<u64> {
        self.0.page.current(slot)
    }

    /// Whether this process opened the session, and is no forked child of the one that did.
    pub(crate) fn is_ours(&self) -> bool {
        self.0.line.mark.is_ours()
    }

    /// # Errors
    /// [`ClientError::InvalidArgument`] in a forked child: rings and leases are the parent's, and so is the runtime that
    /// would make a call.
    pub(crate) fn check_ours(&self) -> Result<(), ClientError> {
        self.0.line.check_ours()
    }

    #[cfg(test)]
    pub(crate) fn live(&self, subject: Subject) -> Live {
        self.0.deliveries.live(subject)
    }

    /// From here on everything takes this process for a forked child.
    #[cfg(test)]
    pub(crate) fn become_child(&self) {
        self.0.line.mark.wipe();
    }

    pub(crate) fn mappings(&self) -> &Mappings {
        &self.0.mappings
    }

    /// Released memory that is still mapped, for the case that it is lent again, bytes.
    #[must_use]
    pub fn kept_mappings_bytes(&self) -> u64 {
        self.0.kept.bytes()
    }

    pub(crate) fn kept(&self) -> &KeptMappings {
        &self.0.kept
    }

    pub(crate) fn parting(&self) -> &Arc<Parting> {
        &self.0.parting
    }

    pub(crate) fn channel(&self) -> Channel {
        self.0.line.channel.clone()
    }

    pub(crate) fn context(&self) -> &CallContext {
        &self.0.line.context
    }

    pub(crate) fn runtime(&self) -> &Handle {
        &self.0.runtime
    }

    pub(crate) fn request<T>(&self, message: T) -> Request<T> {
        self.0.line.context.session_request(&self.0.line.token, message)
    }

    /// Sends a packet whose answer is waited for.
    async fn send(&self, message: client_message::Message, fds: &[BorrowedFd<'_>]) -> Result<(), ClientError> {
        self.check_ours()?;
        match self.0.socket.send(message, fds).await {
            Err(error) if error.is_lost_socket() => Err(self.ended().await.into()),
            sent => sent,
        }
    }

    /// Why a question on the socket has no answer.
    fn unanswered(&self) -> ClientError {
        match self.end() {
            Some(end) => end.into(),
            None => self.0.line.context.restarted("the daemon was started again before it answered"),
        }
    }

    /// Gives back in the background what has no handle here. Nobody is left to tell where that is refused; it then ends
    /// with the session, and a daemon that is started again asks again.
    fn give_back(self, subject: Subject) {
        let runtime = self.runtime().clone();
        runtime.spawn(async move {
            match subject {
                Subject::Lease(id) => self.release_lease(id, 0).await.ok(),
                Subject::QueuePair(id) => self.destroy_queue_pair(id).await.ok(),
                // The descriptor is closed; the daemon keeps the context for the session's next call.
                Subject::Contexts => None,
            }
        });
    }

    /// What a failed call means; after the end of the session that is the reason, whatever the call said.
    pub(crate) fn error(&self, call: &'static str, status: Status) -> ClientError {
        self.0.line.error(call, status)
    }

    /// Before a gRPC call whose descriptors come as a delivery: for that the one before must be acknowledged.
    pub(crate) async fn expect_delivery(&self) -> Result<Expectation, ClientError> {
        let expected = self.0.deliveries.expect();
        self.0.calls.flush_ack(&self.0.socket).await?;
        Ok(expected)
    }

    /// Makes a call, as [`Lifeline::across_restarts`] does.
    pub(crate) async fn across_restarts<T, F: Future<Output = Result<T, ClientError>>>(
        &self,
        call: impl Fn(Session) -> F,
    ) -> Result<T, ClientError> {
        self.0.line.across_restarts(|| call(self.clone())).await
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
        let deadline = self.0.line.context.deadline;
        match tokio::time::timeout(deadline, expected.claim(id, subject)).await {
            Ok(Some(claimed)) => Ok(claimed),
            Ok(None) => match self.end() {
                Some(end) => Err(end.into()),
                None => {
                    Err(self.0.line.context.restarted("the daemon was started again before it sent the descriptors"))
                }
            },
            Err(_) => Err(ClientError::Deadline { call: "the delivery of descriptors", deadline }),
        }
    }
}

/// Reasons of the daemon for not ending what is not there.
const GONE: [&str; 3] = ["LEASE_UNKNOWN", "LEASE_NOT_HELD", "QUEUE_PAIR_UNKNOWN"];

impl Drop for Shared {
    fn drop(&mut self) {
        // A forked child that drops its copy of this value must not end its parent's session.
        if self.line.mark.is_ours() {
            self.reader.abort();
            // Caches outlive the session, and the reader goes only when its runtime next runs.
            self.page.end();
            self.socket.shutdown();
        }
    }
}

async fn shake_hands(socket: &SessionSocket, name: &str) -> Result<(v1::Welcome, GenerationReader), ClientError> {
    let hello = v1::Hello { versions: Some(our_versions()), client_name: name.to_owned() };
    // A daemon that refuses the session may have said so, and closed it, before it read anything.
    socket.tell(client_message::Message::Hello(hello)).await?;
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

#[cfg(test)]
pub(crate) mod tests {
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
    pub(crate) async fn opened() -> (Session, OwnedFd, GenerationWriter) {
        let (socket, daemon) = pair();
        let page = GenerationWriter::create(8).unwrap();
        daemon_send(&daemon, welcome(our_versions()), &[page.fd()]);
        let context = CallContext { deadline: Duration::from_secs(30), socket: "/nowhere".into() };
        let channel = Endpoint::from_static("http://nowhere").connect_lazy();
        let session = Session::over(socket, "test", channel, context, 1 << 30).await.unwrap();
        assert!(matches!(daemon_receive(&daemon), Some(client_message::Message::Hello(_))));
        (session, daemon, page)
    }

    /// Ends a session as the daemon does.
    pub(crate) fn say_goodbye(daemon: &OwnedFd) {
        let goodbye = v1::Goodbye { reason: "ACK_MISSING".into(), message: "too slow".into() };
        daemon_send(daemon, daemon_message::Message::Goodbye(goodbye), &[]);
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
        let (session, daemon, page) = opened().await;
        page.set(0, 3).unwrap();
        assert_eq!(session.generation_of(0), Some(3));
        let expected = session.expect_delivery().await.unwrap();
        let (claimed, proven, ()) =
            tokio::join!(session.claim(expected, 1, Subject::Lease(1)), session.prove_gpus(&[]), async {
                drop(daemon)
            },);
        assert_eq!(claimed.unwrap_err().reason(), Some("CONNECTION_LOST"));
        assert!(matches!(proven.unwrap_err(), ClientError::SessionEnded { .. } | ClientError::Io { .. }));
        assert_eq!(session.ended().await.reason, "CONNECTION_LOST");
        assert_eq!(session.generation_of(0), None, "whatever the page still shows");
        assert_eq!(session.error("X", Status::internal("y")).reason(), Some("CONNECTION_LOST"));
    }

    #[tokio::test]
    async fn the_daemons_goodbye_gives_the_reason() {
        let (session, daemon, _page) = opened().await;
        say_goodbye(&daemon);
        assert_eq!(session.ended().await.reason, "ACK_MISSING");
    }

    #[tokio::test]
    async fn a_proof_that_a_daemon_before_was_asked_for_is_asked_for_again() {
        let (session, daemon, _page) = opened().await;
        let again = session.clone();
        let proving = tokio::spawn(async move { again.prove_gpus(&[]).await });
        let asked = || match daemon_receive(&daemon) {
            Some(client_message::Message::ProveGpus(asked)) => asked.request_id,
            other => panic!("no proof but {other:?}"),
        };
        for _ in 0..20 {
            tokio::task::yield_now().await;
        }
        let lost = asked();
        daemon_send(&daemon, daemon_message::Message::Resumed(v1::Resumed::default()), &[]);
        assert_eq!(session.restarted(0).await, Some(1));
        for _ in 0..20 {
            tokio::task::yield_now().await;
        }
        let request_id = asked();
        assert_ne!(request_id, lost);
        let proven = v1::GpusProven { request_id, gpu_uuids: vec!["GPU-1".into()], error: String::new() };
        daemon_send(&daemon, daemon_message::Message::GpusProven(proven), &[]);
        assert_eq!(proving.await.unwrap().unwrap(), ["GPU-1"]);
    }

    #[tokio::test]
    async fn a_session_that_was_closed_here_says_so() {
        let (session, _daemon, _page) = opened().await;
        session.close();
        assert_eq!(session.ended().await.reason, "CLOSED_BY_CLIENT");
        let refused = session.release_lease(1, 0).await.unwrap_err();
        assert_eq!(refused.reason(), Some("CLOSED_BY_CLIENT"), "{refused}");
    }

    #[tokio::test]
    async fn what_the_daemon_said_last_is_heard_though_it_takes_no_acknowledgement_any_more() {
        let (session, daemon, page) = opened().await;
        let delivery = v1::Delivery { delivery_id: 9, kinds: vec!["memory".into()], subject: None };
        daemon_send(&daemon, daemon_message::Message::Delivery(delivery), &[page.fd()]);
        say_goodbye(&daemon);
        drop(daemon);
        assert_eq!(session.ended().await.reason, "ACK_MISSING");
    }

    #[tokio::test]
    async fn a_refusal_is_heard_though_the_daemon_has_gone_with_or_without_reading() {
        let goodbye =
            || daemon_message::Message::Goodbye(v1::Goodbye { reason: "POLICY".into(), message: "no rule".into() });
        let refused = |error: ClientError| assert_eq!(error.reason(), Some("POLICY"), "{error}");
        // Before the hello was sent: the socket takes it no more.
        let (socket, daemon) = pair();
        daemon_send(&daemon, goodbye(), &[]);
        drop(daemon);
        refused(shake_hands(&socket, "test").await.unwrap_err());
        // After, and unread: the kernel tells a reset before the goodbye.
        let (socket, daemon) = pair();
        let ((), shaken) = tokio::join!(
            async {
                tokio::task::yield_now().await;
                daemon_send(&daemon, goodbye(), &[]);
                drop(daemon);
            },
            shake_hands(&socket, "test")
        );
        refused(shaken.unwrap_err());
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
    async fn the_page_ends_with_the_last_clone() {
        let (session, _daemon, page) = opened().await;
        page.set(0, 3).unwrap();
        let of_a_cache = Arc::clone(&session.0.page);
        assert_eq!(of_a_cache.current(0), Some(3));
        drop(session);
        assert_eq!(of_a_cache.current(0), None);
    }

    #[test]
    fn the_page_ends_with_the_runtime_that_read_the_socket() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let (session, _daemon, page) = runtime.block_on(opened());
        page.set(0, 3).unwrap();
        assert_eq!(session.generation_of(0), Some(3));
        drop(runtime);
        assert_eq!(session.generation_of(0), None);
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
