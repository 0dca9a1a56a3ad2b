//! gRPC connections on the unix socket: who is at the other end, and how many there may be.

use std::io;
use std::os::fd::AsFd;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use futures_util::Stream;
use futures_util::stream::unfold;
use gdrd_engine::Engine;
use gdrd_stream::Stream as Socket;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;
use tonic::transport::server::Connected;
use tracing::{debug, warn};

use super::activity::{Calls, Patience, Watch};
use super::goaway::{Refusals, goodbye};
use crate::admission::{Admission, Admitted};
use crate::limits::{PARTING_TIME, PAUSE_WITHOUT_FDS};
use crate::peer::{Credentials, Peer, is_admin};

/// What a call can know of its connection.
#[derive(Debug, Clone)]
pub(crate) struct Caller {
    /// Uid of the peer when it connected.
    pub(crate) uid: u32,
    /// Its calls.
    pub(crate) calls: Calls,
    /// The peer with groups and cgroup, or why it cannot be told.
    pub(crate) peer: Arc<Result<gdrd_engine::Peer, String>>,
}

/// One connection; its place is given back when it is dropped.
#[derive(Debug)]
pub(crate) struct Connection {
    stream: Socket,
    caller: Caller,
    quiet: Watch,
    /// It was asked to go.
    parting: bool,
    /// Something waits to be written.
    is_full: bool,
    _place: Admitted,
}

impl Connection {
    /// `None` for one too many, which is told so.
    fn new(stream: UnixStream, shared: &Shared) -> io::Result<Option<Self>> {
        let Shared { admission, patience, refusals, engine } = shared;
        let credentials = Credentials::of(stream.as_fd()).map_err(|error| io::Error::other(error.to_string()))?;
        let place = match admission.admit(credentials.uid, || is_admin(engine, stream.as_fd())) {
            Ok(place) => place,
            Err(full) => {
                admission.log_refusal("gRPC", full);
                refusals.refuse(stream, credentials.uid, full);
                return Ok(None);
            }
        };
        // Only lists without a session need it; topology is open to peers that cannot be told.
        let peer = Peer::of(stream.as_fd()).map(|peer| (&peer).into()).map_err(|error| error.to_string());
        let stream = Socket::new(stream.into_std()?)?;
        let calls = Calls::new(*patience);
        let quiet = Watch::new(calls.clone());
        let caller = Caller { uid: credentials.uid, calls, peer: Arc::new(peer) };
        Ok(Some(Self { stream, caller, quiet, parting: false, is_full: false, _place: place }))
    }
}

impl Connection {
    /// Ready once there has been no call for too long. A client that made some is asked to go first, and has some time to: a
    /// call that it was just sending is served.
    fn poll_parted(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            ready!(self.quiet.poll_over(cx));
            if self.parting || !self.quiet.has_begun() || self.is_full {
                return Poll::Ready(());
            }
            // Between frames of the HTTP/2 library, which has nothing to write while there is no call.
            let goodbye = goodbye();
            match Pin::new(&mut self.stream).poll_write(cx, &goodbye) {
                Poll::Ready(Ok(written)) if written == goodbye.len() => {}
                _ => return Poll::Ready(()),
            }
            self.parting = true;
            self.quiet.wait_more(PARTING_TIME);
        }
    }
}

/// What all connections share.
#[derive(Debug)]
struct Shared {
    admission: Arc<Admission>,
    patience: Patience,
    refusals: Refusals,
    engine: Engine,
}

/// The listening socket, until there is another one.
#[derive(Debug)]
pub(crate) struct Listening {
    socket: UnixListener,
    replaced: mpsc::Receiver<std::os::unix::net::UnixListener>,
}

impl Listening {
    /// Must be called within the runtime.
    ///
    /// # Errors
    /// As the runtime's registration of the socket.
    pub(crate) fn new(
        socket: std::os::unix::net::UnixListener,
        replaced: mpsc::Receiver<std::os::unix::net::UnixListener>,
    ) -> io::Result<Self> {
        Ok(Self { socket: watched(socket)?, replaced })
    }

    async fn accept(&mut self) -> io::Result<UnixStream> {
        loop {
            tokio::select! {
                accepted = self.socket.accept() => return accepted.map(|(stream, _)| stream),
                Some(socket) = self.replaced.recv() => self.socket = watched(socket)?,
            }
        }
    }
}

fn watched(socket: std::os::unix::net::UnixListener) -> io::Result<UnixListener> {
    socket.set_nonblocking(true)?;
    UnixListener::from_std(socket)
}

/// Connections as they come. An error of accepting pauses it, a refused connection is closed; the stream never ends.
pub(crate) fn incoming(
    listening: Listening,
    admission: Arc<Admission>,
    patience: Patience,
    engine: Engine,
) -> impl Stream<Item = io::Result<Connection>> + Send {
    let shared = Shared { admission, patience, refusals: Refusals::default(), engine };
    unfold((listening, shared), |(mut listening, shared)| async move {
        let connection = next(&mut listening, &shared).await;
        Some((Ok(connection), (listening, shared)))
    })
}

async fn next(listening: &mut Listening, shared: &Shared) -> Connection {
    loop {
        match listening.accept().await {
            Ok(stream) => match Connection::new(stream, shared) {
                Ok(Some(connection)) => return connection,
                Ok(None) => {}
                Err(error) => debug!(%error, "gRPC connection dropped"),
            },
            Err(error) => {
                warn!(%error, "gRPC socket accepts no connection now");
                tokio::time::sleep(PAUSE_WITHOUT_FDS).await;
            }
        }
    }
}

impl Connected for Connection {
    type ConnectInfo = Caller;

    fn connect_info(&self) -> Caller {
        self.caller.clone()
    }
}

impl AsyncRead for Connection {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.stream).poll_read(cx, buf);
        if read.is_pending() && self.poll_parted(cx).is_ready() {
            debug!(uid = self.caller.uid, "gRPC connection closed: no call for too long");
            // Nothing read is the end, as if the client had closed it.
            return Poll::Ready(Ok(()));
        }
        read
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.is_full = written.is_pending();
        written
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.is_full = written.is_pending();
        written
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
