//! The session socket: whole packets with their descriptors, SOCK_SEQPACKET of unix(7).

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use gdrd_proto::MAX_SESSION_PACKET_BYTES;
use gdrd_proto::v1::{ClientMessage, DaemonMessage, client_message, daemon_message};
use gdrd_stream::watch;
use prost::Message as _;
use rustix::io::{Errno, retry_on_intr};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType,
};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::calls::CallContext;
use crate::error::ClientError;

/// Most descriptors that one packet can carry (SCM_MAX_FD, include/net/scm.h).
const MAX_FDS: usize = 253;

/// A packet of the daemon and the descriptors that came with it.
#[derive(Debug)]
pub(crate) struct Packet {
    pub(crate) message: daemon_message::Message,
    pub(crate) fds: Vec<OwnedFd>,
}

/// A connected session socket. Closing it ends the session.
#[derive(Debug)]
pub(crate) struct SessionSocket {
    /// Watched for reading alone: what the daemon reads would wake this process too (gdrd-stream says why).
    fd: AsyncFd<OwnedFd>,
    closed_here: AtomicBool,
}

impl SessionSocket {
    /// Connects, waiting at most the context's deadline while the daemon's backlog is full.
    pub(crate) async fn connect(path: &Path, context: &CallContext) -> Result<Self, ClientError> {
        let (target, deadline) = (path.to_owned(), context.deadline);
        // A connect(2) to a unix socket with a full backlog blocks and is no poll event, so it has a thread.
        let connected = tokio::task::spawn_blocking(move || connect_blocking(&target, deadline)).await;
        let connected = connected.map_err(|source| ClientError::io("wait for the session socket", source))?;
        let here = CallContext { socket: path.to_owned(), deadline };
        Self::new(
            connected.map_err(|source| ClientError::of_connection(&here, "the session handshake", source.into()))?,
        )
    }

    fn new(fd: OwnedFd) -> Result<Self, ClientError> {
        let fd = watch(fd, Interest::READABLE).map_err(|source| ClientError::io("watch the session socket", source))?;
        Ok(Self { fd, closed_here: AtomicBool::new(false) })
    }

    /// Sends one packet.
    pub(crate) async fn send(
        &self,
        message: client_message::Message,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), ClientError> {
        let bytes = ClientMessage { message: Some(message) }.encode_to_vec();
        if bytes.len() > MAX_SESSION_PACKET_BYTES || fds.len() > MAX_FDS {
            return Err(ClientError::InvalidArgument {
                what: format!("a packet of {} bytes and {} fds is too long for a session", bytes.len(), fds.len()),
            });
        }
        let failed = |source| ClientError::io("send on the session socket", source);
        loop {
            match send_packet(self.fd.get_ref().as_fd(), &bytes, fds) {
                Err(Errno::WOULDBLOCK) => self.writable().await.map_err(failed)?,
                Err(Errno::INTR) => {}
                sent => return sent.map_err(|errno| failed(errno.into())),
            }
        }
    }

    /// Sends one packet for which nobody waits. To a daemon that has gone it is not sent, and that is no error: what the
    /// daemon said last is still to be received.
    pub(crate) async fn tell(&self, message: client_message::Message) -> Result<(), ClientError> {
        match self.send(message, &[]).await {
            Err(error) if error.is_lost_socket() => Ok(()),
            sent => sent,
        }
    }

    /// Waits until the daemon has read something: on a duplicate, since one descriptor is watched once.
    async fn writable(&self) -> std::io::Result<()> {
        let again = watch(self.fd.get_ref().try_clone()?, Interest::WRITABLE)?;
        again.writable().await.map(drop)
    }

    /// Receives one packet; `None` at the end of the session. Cancel-safe.
    pub(crate) async fn receive(&self) -> Result<Option<Packet>, ClientError> {
        let mut bytes = [0_u8; MAX_SESSION_PACKET_BYTES];
        let got = self.fd.async_io(Interest::READABLE, |fd| {
            match receive_packet(fd.as_fd(), &mut bytes) {
                // The daemon closed it with packets of ours unread. That is told once, before what it sent last.
                Err(Errno::CONNRESET) => Ok(receive_packet(fd.as_fd(), &mut bytes)?),
                got => Ok(got?),
            }
        });
        let got = got.await;
        let got = got.map_err(|source| ClientError::io("receive on the session socket", source))?;
        if got.truncated {
            return Err(ClientError::protocol("a session packet was cut off: too long, or no room for its fds"));
        }
        let bytes = bytes.get(..got.len_bytes).unwrap_or_default();
        if bytes.is_empty() && got.fds.is_empty() {
            return Ok(None);
        }
        let message = DaemonMessage::decode(bytes)
            .map_err(|source| ClientError::protocol(format!("a session packet does not decode: {source}")))?;
        match message.message {
            Some(message) => Ok(Some(Packet { message, fds: got.fds })),
            None => Err(ClientError::protocol("a session packet of an unknown kind; upgrade this client")),
        }
    }

    /// Ends the session for every holder of the socket, forked children included.
    pub(crate) fn shutdown(&self) {
        // ENOTCONN: the daemon was quicker.
        let _ = rustix::net::shutdown(self.fd.get_ref(), Shutdown::Both);
    }

    /// The same, on behalf of this client.
    pub(crate) fn close(&self) {
        self.closed_here.store(true, Ordering::Release);
        self.shutdown();
    }

    /// Whether this client has closed it.
    pub(crate) fn is_closed_here(&self) -> bool {
        self.closed_here.load(Ordering::Acquire)
    }
}

fn connect_blocking(path: &Path, deadline: Duration) -> std::io::Result<OwnedFd> {
    let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    set_socket_timeout(&fd, Timeout::Send, Some(deadline))?;
    let address = SocketAddrUnix::new(path)?;
    // A client that is stopped and continued (^Z, a debugger) is not restarted by the kernel: signal(7), under SIGCONT.
    retry_on_intr(|| rustix::net::connect(&fd, &address))?;
    rustix::io::ioctl_fionbio(&fd, true)?;
    Ok(fd)
}

fn send_packet(socket: BorrowedFd<'_>, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> rustix::io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(fds));
    }
    rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL).map(drop)
}

struct Received {
    len_bytes: usize,
    fds: Vec<OwnedFd>,
    truncated: bool,
}

fn receive_packet(socket: BorrowedFd<'_>, bytes: &mut [u8]) -> rustix::io::Result<Received> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = rustix::net::recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    let truncated = got.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC);
    Ok(Received { len_bytes: got.bytes, fds, truncated })
}

#[cfg(test)]
pub(crate) mod tests {
    use std::io::{Read as _, Write as _};
    use std::process::{Command, Stdio};

    use gdrd_proto::v1;
    use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

    use super::*;

    /// A session socket and the daemon's end of it, blocking.
    pub(crate) fn pair() -> (SessionSocket, OwnedFd) {
        let (ours, daemons) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        rustix::io::ioctl_fionbio(&ours, true).unwrap();
        (SessionSocket::new(ours).unwrap(), daemons)
    }

    /// Sends a packet as the daemon does.
    pub(crate) fn daemon_send(daemon: &OwnedFd, message: daemon_message::Message, fds: &[BorrowedFd<'_>]) {
        let bytes = DaemonMessage { message: Some(message) }.encode_to_vec();
        send_packet(daemon.as_fd(), &bytes, fds).unwrap();
    }

    /// Receives a packet as the daemon does.
    pub(crate) fn daemon_receive(daemon: &OwnedFd) -> Option<client_message::Message> {
        let mut bytes = [0_u8; MAX_SESSION_PACKET_BYTES];
        let got = receive_packet(daemon.as_fd(), &mut bytes).unwrap();
        ClientMessage::decode(&bytes[..got.len_bytes]).unwrap().message
    }

    /// Has this test connect there, in a process of its own.
    const CONNECT_TO: &str = "GDRD_TEST_CONNECT_TO";

    #[test]
    fn a_client_that_is_stopped_goes_on_connecting_once_it_is_continued() {
        let patience = Duration::from_secs(60);
        if let Some(path) = std::env::var_os(CONNECT_TO) {
            std::io::stderr().write_all(b"!").unwrap();
            connect_blocking(Path::new(&path), patience).unwrap();
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("session.sock");
        let flags = SocketFlags::CLOEXEC;
        let daemon = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        rustix::net::bind(&daemon, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        rustix::net::listen(&daemon, 0).unwrap();
        let _only_place = connect_blocking(&path, patience).unwrap();
        let name = "session::socket::tests::a_client_that_is_stopped_goes_on_connecting_once_it_is_continued";
        let mut client = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--nocapture"])
            .env(CONNECT_TO, &path)
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        client.stderr.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        let pid = Pid::from_child(&client);
        // Until it sleeps in connect(2) it gets a little further each time.
        for _ in 0..100 {
            kill_process(pid, Signal::STOP).unwrap();
            waitpid(Some(pid), WaitOptions::UNTRACED).unwrap();
            kill_process(pid, Signal::CONT).unwrap();
            std::thread::yield_now();
        }
        drop(rustix::net::accept(&daemon).unwrap());
        let ended = client.wait_with_output().unwrap();
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    }

    #[tokio::test]
    async fn descriptors_arrive_with_their_packet_and_the_end_is_none() {
        let (socket, daemon) = pair();
        let file = rustix::fs::memfd_create("x", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let delivery = v1::Delivery { delivery_id: 9, kinds: vec!["memory".into()], subject: None };
        daemon_send(&daemon, daemon_message::Message::Delivery(delivery), &[file.as_fd()]);
        let packet = socket.receive().await.unwrap().unwrap();
        assert_eq!(packet.fds.len(), 1);
        assert!(rustix::io::fcntl_getfd(&packet.fds[0]).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
        drop(daemon);
        assert!(socket.receive().await.unwrap().is_none());
    }

    #[tokio::test]
    async fn a_packet_that_is_too_long_or_no_message_is_a_protocol_error() {
        let (socket, daemon) = pair();
        rustix::net::send(&daemon, &[0xff; MAX_SESSION_PACKET_BYTES + 1], SendFlags::empty()).unwrap();
        rustix::net::send(&daemon, &[0xff; 12], SendFlags::empty()).unwrap();
        for _ in 0..2 {
            assert!(matches!(socket.receive().await, Err(ClientError::Protocol { .. })));
        }
    }

    #[tokio::test]
    async fn a_packet_beyond_the_bound_is_not_sent() {
        let (socket, _daemon) = pair();
        let hello = v1::Hello { client_name: "n".repeat(MAX_SESSION_PACKET_BYTES), versions: None };
        let error = socket.send(client_message::Message::Hello(hello), &[]).await.unwrap_err();
        assert!(matches!(error, ClientError::InvalidArgument { .. }));
    }
}
