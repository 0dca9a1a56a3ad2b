//! A unix stream for gRPC that wakes its owner for what arrives, and for nothing else.
//!
//! Why not tokio's: it watches for writing from the start, and a unix socket becomes writable anew each time its peer
//! has read something (`unix_write_space` of net/unix/af_unix.c). So each message that one side reads wakes the other
//! side for nothing; between two cores that is one wake-up in two. This one asks to write only once a write has found
//! the socket full, and stops asking when it is not.
//!
//! Owner of state: the stream owns its descriptor. It must not know what travels over it.
#![forbid(unsafe_code)]

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown};
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};

/// A connected unix stream.
#[derive(Debug)]
pub struct Stream {
    socket: AsyncFd<UnixStream>,
    /// There while a write waits: a duplicate, since one descriptor is watched once.
    full: Option<AsyncFd<OwnedFd>>,
}

impl Stream {
    /// Takes a connected stream and puts it under the runtime's watch; must be called within it.
    ///
    /// # Errors
    /// As the runtime's registration of the descriptor.
    pub fn new(stream: UnixStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self { socket: watch(stream, Interest::READABLE)?, full: None })
    }

    /// Connects to a socket that listens at `path`. Does not wait: a full backlog is `WouldBlock`.
    ///
    /// # Errors
    /// As connect(2) of unix(7).
    pub async fn connect(path: &std::path::Path) -> io::Result<Self> {
        let stream = tokio::net::UnixStream::connect(path).await?;
        Self::new(stream.into_std()?)
    }

    /// Writes at once, or waits until something was read; `write` makes the system call.
    fn write_with(
        &mut self,
        cx: &mut Context<'_>,
        write: impl Fn(BorrowedFd<'_>) -> rustix::io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        loop {
            match write(self.socket.get_ref().as_fd()) {
                Err(rustix::io::Errno::WOULDBLOCK) => {}
                Err(rustix::io::Errno::INTR) => continue,
                written => {
                    self.full = None;
                    return Poll::Ready(written.map_err(Into::into));
                }
            }
            let full = match self.full.take() {
                Some(full) => full,
                None => {
                    let again = self.socket.get_ref().as_fd().try_clone_to_owned()?;
                    watch(again, Interest::WRITABLE)?
                }
            };
            let ready = full.poll_write_ready(cx).map_ok(|mut ready| ready.clear_ready());
            self.full = Some(full);
            ready!(ready)?;
        }
    }
}

/// Watches a descriptor of this process for what `interest` names, and nothing else. Must be called within the runtime.
///
/// # Errors
/// As epoll_ctl(2).
// Deprecated because a type may give another fd at each call of as_raw_fd; these have one for life and nobody else
// closes it, and the replacement is an unsafe call, which this crate must not make.
#[allow(deprecated)]
pub fn watch<T: AsRawFd>(fd: T, interest: Interest) -> io::Result<AsyncFd<T>> {
    AsyncFd::with_interest(fd, interest)
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.get_ref().as_fd()
    }
}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let stream = self.get_mut();
        loop {
            let mut ready = ready!(stream.socket.poll_read_ready(cx))?;
            let space = buf.initialize_unfilled();
            let wanted = space.len();
            match rustix::net::recv(stream.socket.get_ref(), space, RecvFlags::empty()) {
                Ok((_, got)) => {
                    buf.advance(got);
                    // Less than there was room for: the socket is empty, and the next arrival is a new edge (epoll(7)).
                    if got > 0 && got < wanted {
                        ready.clear_ready();
                    }
                    return Poll::Ready(Ok(()));
                }
                Err(rustix::io::Errno::WOULDBLOCK) => ready.clear_ready(),
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Poll::Ready(Err(errno.into())),
            }
        }
    }
}

/// A peer that is gone is an error, not a signal.
const FLAGS: SendFlags = SendFlags::NOSIGNAL;

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.get_mut().write_with(cx, |socket| rustix::net::send(socket, bytes, FLAGS))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let write =
            |socket: BorrowedFd<'_>| rustix::net::sendmsg(socket, parts, &mut SendAncillaryBuffer::default(), FLAGS);
        self.get_mut().write_with(cx, write)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        match rustix::net::shutdown(self.get_mut().socket.get_ref(), Shutdown::Write) {
            // The peer was quicker.
            Err(rustix::io::Errno::NOTCONN) => Poll::Ready(Ok(())),
            done => Poll::Ready(done.map_err(Into::into)),
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    fn pair() -> (Stream, Stream) {
        let (a, b) = UnixStream::pair().unwrap();
        (Stream::new(a).unwrap(), Stream::new(b).unwrap())
    }

    #[tokio::test]
    async fn bytes_arrive_in_order_whatever_the_sizes_of_writes_and_reads() {
        let (mut a, mut b) = pair();
        // More than a socket's buffer holds, so that writes must wait.
        let sent: Vec<u8> = (0..=250_u8).cycle().take(8 << 20).collect();
        let expected = sent.clone();
        let writer = tokio::spawn(async move {
            a.write_all(&sent).await.unwrap();
            a.shutdown().await.unwrap();
            a
        });
        let mut got = Vec::new();
        let mut part = vec![0; 100_003];
        loop {
            match b.read(&mut part).await.unwrap() {
                0 => break,
                len => got.extend_from_slice(&part[..len]),
            }
        }
        assert!(got == expected, "{} of {} bytes, or other ones", got.len(), expected.len());
        let a = writer.await.unwrap();
        assert!(a.full.is_none(), "nothing waits to be written any more");
    }

    #[tokio::test]
    async fn a_full_socket_is_watched_for_writing_until_there_is_room() {
        let (mut a, mut b) = pair();
        let chunk = vec![7; 1 << 16];
        let mut written = 0;
        let mut cx = Context::from_waker(std::task::Waker::noop());
        while let Poll::Ready(done) = Pin::new(&mut a).poll_write(&mut cx, &chunk) {
            written += done.unwrap();
        }
        assert!(a.full.is_some());
        let mut got = vec![0; written];
        b.read_exact(&mut got).await.unwrap();
        a.write_all(&[8]).await.unwrap();
        assert!(a.full.is_none());
        assert_eq!(b.read_u8().await.unwrap(), 8);
    }

    #[tokio::test]
    async fn parts_go_out_in_one_call_and_in_order() {
        let (mut a, mut b) = pair();
        assert!(a.is_write_vectored());
        let parts = [IoSlice::new(b"one "), IoSlice::new(b"two")];
        let written = std::future::poll_fn(|cx| Pin::new(&mut a).poll_write_vectored(cx, &parts)).await.unwrap();
        assert_eq!(written, 7);
        let mut got = [0; 7];
        b.read_exact(&mut got).await.unwrap();
        assert_eq!(&got, b"one two");
    }

    #[tokio::test]
    async fn the_end_of_the_peer_is_seen_by_reads_and_writes() {
        let (mut a, b) = pair();
        drop(b);
        assert_eq!(a.read(&mut [0; 8]).await.unwrap(), 0);
        assert_eq!(a.read(&mut [0; 8]).await.unwrap(), 0, "and again");
        assert_eq!(a.write(&[1]).await.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }

    #[tokio::test]
    async fn what_the_peer_reads_wakes_nobody() {
        let (mut a, mut b) = pair();
        a.write_all(b"ping").await.unwrap();
        // One runtime drives both: had `a` been woken by the read, its readiness to write would be there.
        b.read_exact(&mut [0; 4]).await.unwrap();
        assert!(a.full.is_none(), "writing is not even watched");
        b.write_all(b"pong").await.unwrap();
        let mut got = [0; 4];
        a.read_exact(&mut got).await.unwrap();
        assert_eq!(&got, b"pong");
    }
}
