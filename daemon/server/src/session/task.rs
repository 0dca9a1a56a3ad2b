//! The life of one connection: hello, welcome, then messages until something ends it.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use futures_util::StreamExt;
use gdrd_engine::{Engine, SessionEvent, SessionId, SessionOpened, SessionResumed};
use gdrd_proto::v1::{self, daemon_message};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tracing::{debug, info};

use super::calls::Calls;
use super::channel::{Channel, IDS_PER_MESSAGE, Incoming};
use super::goodbye::SessionEnd;
use super::listener::Shared;
use super::packet::MAX_PACKET_FDS;
use super::{Sessions, adoption, version};
use crate::peer::Peer;
use crate::readiness::watch;

/// Serves a connection from its first byte to its goodbye.
pub(super) async fn serve(channel: Channel, shared: &Shared) {
    let channel = Arc::new(channel);
    let end = match open(&channel, shared).await {
        Ok((session, events, peer)) => {
            let end = live(&channel, shared, &session, events, peer).await;
            info!(session = %session.id, reason = end.reason(), "session ended: {end}");
            // First, so that a client which reads the goodbye finds its token void and its leases on their way back.
            session.close(&end);
            channel.goodbye(&end);
            return;
        }
        Err(end) => end,
    };
    debug!(reason = end.reason(), "session refused: {end}");
    channel.goodbye(&end);
}

/// Goes on with a session of an earlier daemon, if its client may still have one.
pub(super) async fn resume(channel: Arc<Channel>, shared: &Shared, resumed: &mut SessionResumed) {
    let open = Open::new(resumed.session, shared);
    let taken_up = Peer::of(channel.fd()).map_err(SessionEnd::from).and_then(|peer| {
        shared.engine.resume_session(open.id, &(&peer).into())?;
        Ok(peer)
    });
    let end = match taken_up {
        Ok(peer) => {
            info!(session = %open.id, uid = peer.credentials.uid, pid = peer.credentials.pid, "session goes on");
            channel.forget_calls();
            tell_resumed(&channel, resumed);
            let (_, nothing) = futures_channel::mpsc::channel(0);
            let events = std::mem::replace(&mut resumed.events, nothing);
            live(&channel, shared, &open, events, peer).await
        }
        Err(end) => end,
    };
    info!(session = %open.id, reason = end.reason(), "session ended: {end}");
    open.close(&end);
    channel.goodbye(&end);
}

/// Tells the client what the session has, in as many messages as that takes.
fn tell_resumed(channel: &Channel, resumed: &SessionResumed) {
    let leases: Vec<u64> = resumed.leases.iter().map(|id| id.0).collect();
    let queue_pairs: Vec<u64> = resumed.queue_pairs.iter().map(|id| id.0).collect();
    let (mut leases, mut queue_pairs) = (leases.chunks(IDS_PER_MESSAGE), queue_pairs.chunks(IDS_PER_MESSAGE));
    loop {
        let (lease_ids, queue_pair_ids) = match leases.next() {
            Some(leases) => (leases.to_vec(), Vec::new()),
            None => (Vec::new(), queue_pairs.next().unwrap_or_default().to_vec()),
        };
        let more = leases.len() + queue_pairs.len() > 0;
        channel.answer(daemon_message::Message::Resumed(v1::Resumed { lease_ids, queue_pair_ids, more }));
        if !more {
            return;
        }
    }
}

type Events = futures_channel::mpsc::Receiver<SessionEvent>;

const HELLO_IS_FIRST: SessionEnd = SessionEnd::Protocol("the first message must be Hello");

/// Shakes hands and opens the session.
async fn open(channel: &Arc<Channel>, shared: &Shared) -> Result<(Open, Events, Peer), SessionEnd> {
    let timeout = shared.limits.hello_timeout;
    let first = tokio::select! {
        () = shared.stop.cancelled() => Err(SessionEnd::ShuttingDown),
        first = tokio::time::timeout(timeout, channel.next(|| Err(HELLO_IS_FIRST))) => first.map_err(|_| SessionEnd::HelloTimeout(timeout))?,
    };
    let hello = match first? {
        Incoming::Hello(hello) => hello,
        Incoming::ProveGpus { .. } | Incoming::Adopt { .. } | Incoming::Call(_) => return Err(HELLO_IS_FIRST),
    };
    let versions = hello.versions.ok_or(SessionEnd::Protocol("Hello names no versions"))?;
    version::check(&versions).map_err(SessionEnd::Version)?;
    let peer = Peer::of(channel.fd())?;
    let opened = shared.engine.open_session((&peer).into(), &hello.client_name)?;
    let SessionOpened { session, token, generation_page, events } = opened;
    info!(%session, uid = peer.credentials.uid, pid = peer.credentials.pid, scope = %peer.scope, "session opened");
    let open = Open::new(session, shared);
    keep(channel, shared, session).await?;
    // Known before the client can name it on gRPC.
    shared.sessions.insert(session, Arc::clone(channel));
    let welcome = v1::Welcome {
        session_id: session.0,
        token: token.as_bytes().to_vec(),
        versions: Some(version::VERSIONS),
        daemon_version: version::DAEMON_VERSION.to_owned(),
    };
    channel.welcome(welcome, &generation_page);
    Ok((open, events, peer))
}

/// Has the socket kept for the next daemon before its client can know of the session.
async fn keep(channel: &Channel, shared: &Shared, session: SessionId) -> Result<(), SessionEnd> {
    if !shared.engine.keeps() {
        return Ok(());
    }
    let socket = channel.fd().try_clone_to_owned()?;
    let engine = shared.engine.clone();
    let kept = tokio::task::spawn_blocking(move || engine.keep_session(session, socket.as_fd())).await;
    kept.map_err(|error| SessionEnd::Socket(error.into()))
}

/// Serves an open session until it ends.
async fn live(channel: &Channel, shared: &Shared, session: &Open, mut events: Events, peer: Peer) -> SessionEnd {
    let uid = peer.credentials.uid;
    let room = || if shared.proofs.has_room(uid) { Ok(()) } else { Err(SessionEnd::TooManyProofs { uid }) };
    let pidfd = match peer.pidfd.map(|pidfd| watch(pidfd, Interest::READABLE)).transpose() {
        Ok(pidfd) => pidfd,
        Err(error) => return error.into(),
    };
    let mut calls = Calls::new(shared.engine.clone(), session.id);
    loop {
        tokio::select! {
            () = shared.stop.cancelled() => return SessionEnd::ShuttingDown,
            end = channel.ended() => return end,
            () = process_ended(pidfd.as_ref()) => return SessionEnd::ProcessEnded,
            event = events.next() => match event {
                Some(SessionEvent::MemoryGone) => channel.memory_gone(&shared.engine.memory_gone(session.id)),
                Some(SessionEvent::QueuePairFailed { queue_pair, message }) => {
                    let failed = v1::QueuePairFailed { queue_pair_id: queue_pair.0, message };
                    channel.answer(daemon_message::Message::QueuePairFailed(failed));
                    // As at every event: see Engine::memory_gone.
                    channel.memory_gone(&shared.engine.memory_gone(session.id));
                }
                Some(SessionEvent::Ended { reason, message }) => return SessionEnd::ByEngine { reason, message },
                Some(_) => {}
                None => return gdrd_engine::EngineError::SessionEnded.into(),
            },
            () = calls.next(channel) => {}
            incoming = channel.next(room) => match incoming {
                Ok(Incoming::Call(call)) => calls.begin(channel, call),
                Ok(Incoming::ProveGpus { request_id, fds, cut }) => {
                    match prove(shared, (session.id, uid), request_id, fds, cut).await {
                        Ok(answer) => channel.answer(daemon_message::Message::GpusProven(answer)),
                        Err(end) => return end,
                    }
                }
                Ok(Incoming::Adopt { adopt, fds, cut }) => match take_in(shared, (session.id, uid), adopt, fds, cut).await {
                    Ok(answer) => channel.answer(daemon_message::Message::Adopted(answer)),
                    Err(end) => return end,
                },
                Ok(Incoming::Hello(_)) => return SessionEnd::Protocol("Hello came twice"),
                Err(end) => return end,
            },
        }
    }
}

async fn process_ended(pidfd: Option<&AsyncFd<OwnedFd>>) {
    match pidfd {
        // An error of the wait cannot be read as "still running".
        Some(pidfd) => drop(pidfd.readable().await),
        None => std::future::pending().await,
    }
}

async fn prove(
    shared: &Shared,
    (session, uid): (SessionId, u32),
    request_id: u64,
    fds: Vec<OwnedFd>,
    cut: bool,
) -> Result<v1::GpusProven, SessionEnd> {
    if cut {
        shared.proofs.close(uid, fds);
        return Err(SessionEnd::TooManyFds { limit: MAX_PACKET_FDS });
    }
    let timeout = shared.limits.proof_timeout;
    let looked = tokio::time::timeout(timeout, shared.proofs.look_at(uid, fds));
    let nodes = looked.await.map_err(|_| SessionEnd::ProofTimeout(timeout))?;
    let proven = nodes.and_then(|nodes| shared.engine.prove_gpus(session, &nodes).map_err(|error| error.to_string()));
    Ok(match proven {
        Ok(gpus) => {
            let gpu_uuids = gpus.into_iter().map(|gpu| gpu.0).collect();
            v1::GpusProven { request_id, gpu_uuids, error: String::new() }
        }
        Err(error) => v1::GpusProven { request_id, gpu_uuids: Vec::new(), error },
    })
}

async fn take_in(
    shared: &Shared,
    (session, uid): (SessionId, u32),
    adopt: v1::Adopt,
    fds: Vec<OwnedFd>,
    cut: bool,
) -> Result<v1::Adopted, SessionEnd> {
    if cut {
        shared.proofs.close(uid, fds);
        return Err(SessionEnd::TooManyFds { limit: MAX_PACKET_FDS });
    }
    let v1::Adopt { request_id, items } = adopt;
    let timeout = shared.limits.proof_timeout;
    let engine = shared.engine.clone();
    let looked =
        tokio::time::timeout(timeout, shared.proofs.apart(uid, move || adoption::adopt(&engine, session, items, fds)));
    match looked.await.map_err(|_| SessionEnd::ProofTimeout(timeout))? {
        Some(Ok(memories)) => Ok(v1::Adopted { request_id, memories, ..Default::default() }),
        Some(Err((reason, message))) => {
            Ok(v1::Adopted { request_id, reason: reason.to_owned(), message, ..Default::default() })
        }
        None => Err(SessionEnd::ShuttingDown),
    }
}

/// An open session; closed with the engine whatever becomes of its task.
struct Open {
    id: SessionId,
    engine: Engine,
    sessions: Sessions,
    closed: bool,
}

impl Open {
    fn new(id: SessionId, shared: &Shared) -> Self {
        Self { id, engine: shared.engine.clone(), sessions: shared.sessions.clone(), closed: false }
    }

    fn close(mut self, end: &SessionEnd) {
        self.closed = true;
        self.sessions.remove(self.id);
        self.engine.close_session(self.id, end.reason());
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        if !self.closed {
            self.sessions.remove(self.id);
            self.engine.close_session(self.id, "its task ended");
        }
    }
}
