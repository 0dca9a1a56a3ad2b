//! Accepts connections of the session socket, a bounded number of them.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use gdrd_engine::{Engine, SessionResumed};
use rustix::net::{SocketFlags, accept_with};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::warn;

use super::Sessions;
use super::channel::Channel;
use super::goodbye::SessionEnd;
use super::proof::Proofs;
use super::task;
use crate::admission::Admission;
use crate::limits::{PAUSE_WITHOUT_FDS, ServerLimits};
use crate::peer::{Credentials, is_admin};
use crate::readiness::watch;

/// What every connection shares.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) engine: Engine,
    pub(super) sessions: Sessions,
    pub(super) limits: ServerLimits,
    pub(super) proofs: Proofs,
    pub(super) stop: CancellationToken,
}

/// The listening session socket.
#[derive(Debug)]
pub(crate) struct Listener {
    socket: AsyncFd<OwnedFd>,
    replaced: mpsc::Receiver<OwnedFd>,
    admission: Arc<Admission>,
    shared: Arc<Shared>,
    tasks: TaskTracker,
}

impl Listener {
    /// Takes a listening SOCK_SEQPACKET socket, and others that take its place. Must be called within the runtime.
    ///
    /// # Errors
    /// As the runtime's registration of the fd.
    pub(crate) fn new(
        (socket, replaced): (OwnedFd, mpsc::Receiver<OwnedFd>),
        admission: Arc<Admission>,
        engine: Engine,
        sessions: Sessions,
        limits: ServerLimits,
        stop: CancellationToken,
    ) -> io::Result<Self> {
        let socket = listening(socket)?;
        let shared = Arc::new(Shared { engine, sessions, limits, proofs: Proofs::new(), stop });
        Ok(Self { socket, replaced, admission, shared, tasks: TaskTracker::new() })
    }

    /// Goes on with these sessions. From here on calls can name them.
    pub(crate) fn resume(&self, resumed: Vec<SessionResumed>) {
        resumed.into_iter().for_each(|session| self.resume_one(session));
    }

    /// Accepts until the daemon stops, then waits for the sessions to end.
    pub(crate) async fn run(mut self) {
        loop {
            let accepted = tokio::select! {
                () = self.shared.stop.cancelled() => break,
                Some(socket) = self.replaced.recv() => {
                    match listening(socket) {
                        Ok(socket) => self.socket = socket,
                        Err(error) => warn!(%error, "another session socket cannot be used"),
                    }
                    continue;
                }
                accepted = accept(&self.socket) => accepted,
            };
            match accepted {
                Ok(socket) => self.start(socket),
                Err(error) => {
                    warn!(%error, "session socket accepts no connection now");
                    tokio::time::sleep(PAUSE_WITHOUT_FDS).await;
                }
            }
        }
        drop(self.socket);
        self.tasks.close();
        self.tasks.wait().await;
    }

    /// A session counts as it did before, but is not refused for the bounds: it is there.
    fn resume_one(&self, mut session: SessionResumed) {
        let id = session.session;
        let channel = (|| {
            let socket = session.socket.try_clone()?;
            rustix::io::ioctl_fionbio(&socket, true)?;
            let place =
                Credentials::of(socket.as_fd()).ok().and_then(|peer| self.admission.admit(peer.uid, || true).ok());
            Channel::resumed(socket, place, self.shared.limits.max_queued_deliveries, session.last_delivery)
        })();
        match channel {
            Ok(channel) => {
                let (shared, channel) = (Arc::clone(&self.shared), Arc::new(channel));
                shared.sessions.insert(id, Arc::clone(&channel));
                self.tasks.spawn(async move { task::resume(channel, &shared, &mut session).await });
            }
            Err(error) => {
                warn!(%id, %error, "a session cannot go on");
                self.shared.engine.close_session(id, "SOCKET_FAILED");
            }
        }
    }

    fn start(&self, socket: OwnedFd) {
        let Ok(credentials) = Credentials::of(socket.as_fd()) else { return };
        let place = self.admission.admit(credentials.uid, || is_admin(&self.shared.engine, socket.as_fd()));
        let refused = place.as_ref().err().copied();
        let channel = match Channel::new(socket, place.ok(), self.shared.limits.max_queued_deliveries) {
            Ok(channel) => channel,
            Err(error) => return warn!(%error, "session connection dropped"),
        };
        if let Some(full) = refused {
            self.admission.log_refusal("session", full);
            return channel.goodbye(&SessionEnd::TooManyConnections(full));
        }
        let shared = Arc::clone(&self.shared);
        self.tasks.spawn(async move { task::serve(channel, &shared).await });
    }
}

/// Puts a listening socket under the runtime's watch.
fn listening(socket: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    rustix::io::ioctl_fionbio(&socket, true)?;
    watch(socket, Interest::READABLE)
}

async fn accept(socket: &AsyncFd<OwnedFd>) -> io::Result<OwnedFd> {
    loop {
        let mut ready = socket.readable().await?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        if let Ok(accepted) = ready.try_io(|socket| Ok(accept_with(socket.get_ref(), flags)?)) {
            match accepted {
                // The connection went away before it was taken (accept(2)).
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                other => return other,
            }
        }
    }
}
