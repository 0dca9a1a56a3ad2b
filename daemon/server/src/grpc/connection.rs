//! gRPC connections on the unix socket: who is at the other end, and how many there may be.

use std::io;
use std::os::fd::AsFd;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_util::Stream;
use futures_util::stream::unfold;
use gdrd_stream::Stream as Socket;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{UnixListener, UnixStream};
use tonic::transport::server::Connected;
use tracing::{debug, warn};

use crate::admission::{Admission, Admitted};
use crate::limits::PAUSE_WITHOUT_FDS;
use crate::peer::{Credentials, Peer};

/// What a call can know of its connection.
#[derive(Debug, Clone)]
pub(crate) struct Caller {
    /// Uid of the peer when it connected.
    pub(crate) uid: u32,
    /// The peer with groups and cgroup, or why it cannot be told.
    pub(crate) peer: Arc<Result<gdrd_engine::Peer, String>>,
}

/// One connection; its place is given back when it is dropped.
#[derive(Debug)]
pub(crate) struct Connection {
    stream: Socket,
    caller: Caller,
    _place: Admitted,
}

impl Connection {
    fn new(stream: UnixStream, admission: &Arc<Admission>) -> io::Result<Option<Self>> {
        let credentials = Credentials::of(stream.as_fd()).map_err(|error| io::Error::other(error.to_string()))?;
        let Some(place) = admission.admit(credentials.uid) else {
            debug!(uid = credentials.uid, "gRPC connection refused: too many");
            return Ok(None);
        };
        // Only lists without a session need it; topology is open to peers that cannot be told.
        let peer = Peer::of(stream.as_fd()).map(|peer| (&peer).into()).map_err(|error| error.to_string());
        let stream = Socket::new(stream.into_std()?)?;
        Ok(Some(Self { stream, caller: Caller { uid: credentials.uid, peer: Arc::new(peer) }, _place: place }))
    }
}

/// Connections as they come. An error of accepting pauses it, a refused connection is closed; the stream never ends.
pub(crate) fn incoming(
    listener: UnixListener,
    admission: Arc<Admission>,
) -> impl Stream<Item = io::Result<Connection>> + Send {
    unfold((listener, admission), |(listener, admission)| async move {
        let connection = next(&listener, &admission).await;
        Some((Ok(connection), (listener, admission)))
    })
}

async fn next(listener: &UnixListener, admission: &Arc<Admission>) -> Connection {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => match Connection::new(stream, admission) {
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
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
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
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
