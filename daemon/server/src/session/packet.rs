//! SOCK_SEQPACKET with fds, without waiting: one packet in, one packet out, as the session protocol needs them.
//!
//! Role: system calls and their flags, nothing of the protocol. An fd that a client attached is taken into this
//! process only by [`receive_with_fds`], since even closing one can wait for its file system (FUSE): every other
//! packet is read without room for fds, and the kernel drops them.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use gdrd_proto::MAX_SESSION_PACKET_BYTES;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, Shutdown, recvmsg, sendmsg, shutdown,
};

/// Most fds of one packet, either way: a GPU node has 8 to 16 GPUs, a delivery 3 fds (SCM_MAX_FD of unix(7) is 253).
pub(super) const MAX_PACKET_FDS: usize = 32;

/// More packets than a socket's buffer holds with the defaults of Linux: 208 KiB, each packet charged 512 bytes at least.
pub(super) const MAX_WAITING_PACKETS: usize = 512;

const CONTROL_BYTES: usize = rustix::cmsg_space!(ScmRights(MAX_PACKET_FDS));

/// A buffer that holds any packet of the protocol.
pub(super) type PacketBuffer = [u8; MAX_SESSION_PACKET_BYTES];

/// What arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Received {
    /// Length in the buffer, bytes; 0 at the end of the stream, and for an empty packet, which ends it as well.
    pub(super) len_bytes: usize,
    /// The packet was longer than the buffer.
    pub(super) truncated: bool,
    /// The packet had fds for which there was no room (MSG_CTRUNC).
    pub(super) fds_cut: bool,
}

/// Looks at the next packet and leaves it there. `fds_cut` tells that it has fds.
pub(super) fn peek(socket: BorrowedFd<'_>, buffer: &mut PacketBuffer) -> io::Result<Received> {
    receive(socket, buffer, &mut RecvAncillaryBuffer::default(), RecvFlags::PEEK)
}

/// Takes the next packet; fds on it are dropped by the kernel and reported as `fds_cut`.
pub(super) fn receive_plain(socket: BorrowedFd<'_>, buffer: &mut PacketBuffer) -> io::Result<Received> {
    receive(socket, buffer, &mut RecvAncillaryBuffer::default(), RecvFlags::empty())
}

/// Takes the next packet with its fds. The caller must drop them where waiting does no harm.
pub(super) fn receive_with_fds(
    socket: BorrowedFd<'_>,
    buffer: &mut PacketBuffer,
) -> io::Result<(Received, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); CONTROL_BYTES];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = receive(socket, buffer, &mut control, RecvFlags::empty())?;
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    Ok((received, fds))
}

fn receive(
    socket: BorrowedFd<'_>,
    buffer: &mut PacketBuffer,
    control: &mut RecvAncillaryBuffer<'_>,
    flags: RecvFlags,
) -> io::Result<Received> {
    let flags = flags | RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let found = recvmsg(socket, &mut [IoSliceMut::new(buffer)], control, flags)?;
    Ok(Received {
        len_bytes: found.bytes.min(buffer.len()),
        truncated: found.flags.contains(ReturnFlags::TRUNC),
        fds_cut: found.flags.contains(ReturnFlags::CTRUNC),
    })
}

/// Takes no more packets and drops those that wait, with their fds. A socket closed over unread packets would give its
/// peer a reset in place of the goodbye (unix_release_sock of net/unix/af_unix.c).
pub(super) fn refuse_more(socket: BorrowedFd<'_>) {
    // From here on the peer's sends fail, so what waits only gets less.
    let _ = shutdown(socket, Shutdown::Read);
    let mut buffer: PacketBuffer = [0; MAX_SESSION_PACKET_BYTES];
    for _ in 0..MAX_WAITING_PACKETS {
        match receive_plain(socket, &mut buffer) {
            Ok(received) if received.len_bytes > 0 => {}
            _ => return,
        }
    }
}

/// Ends the stream for the peer, after what was sent.
pub(super) fn send_no_more(socket: BorrowedFd<'_>) {
    // ENOTCONN: the peer was quicker.
    let _ = shutdown(socket, Shutdown::Write);
}

/// Sends one packet with its fds, or fails with `WouldBlock` where the peer reads too slowly.
///
/// # Errors
/// As sendmsg(2); `InvalidInput` for more fds than a packet takes.
pub(super) fn send<F: AsFd>(socket: BorrowedFd<'_>, packet: &[u8], fds: &[F]) -> io::Result<()> {
    let borrowed: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); CONTROL_BYTES];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !borrowed.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&borrowed)) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many fds for one packet"));
    }
    // SOCK_SEQPACKET sends all of a packet or nothing.
    sendmsg(socket, &[IoSlice::new(packet)], &mut control, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    fn pair() -> (OwnedFd, OwnedFd) {
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).expect("a socket pair")
    }

    fn null() -> OwnedFd {
        File::open("/dev/null").expect("/dev/null opens").into()
    }

    #[test]
    fn fds_travel_with_their_packet() {
        let (ours, theirs) = pair();
        let mut buffer = [0; MAX_SESSION_PACKET_BYTES];
        send(theirs.as_fd(), b"two", &[null(), null()]).expect("it fits");
        let (received, fds) = receive_with_fds(ours.as_fd(), &mut buffer).expect("it is there");
        assert_eq!((received.len_bytes, received.fds_cut, fds.len()), (3, false, 2));
    }

    #[test]
    fn peeking_tells_of_fds_and_takes_nothing() {
        let (ours, theirs) = pair();
        let mut buffer = [0; MAX_SESSION_PACKET_BYTES];
        send(theirs.as_fd(), b"one", &[null()]).expect("it fits");
        let seen = peek(ours.as_fd(), &mut buffer).expect("it is there");
        assert_eq!(seen, Received { len_bytes: 3, truncated: false, fds_cut: true });
        let (received, fds) = receive_with_fds(ours.as_fd(), &mut buffer).expect("it is still there");
        assert_eq!((received.fds_cut, fds.len()), (false, 1));
    }

    #[test]
    fn plain_receive_drops_fds_and_says_so() {
        let (ours, theirs) = pair();
        let mut buffer = [0; MAX_SESSION_PACKET_BYTES];
        send(theirs.as_fd(), b"x", &[null()]).expect("it fits");
        assert!(receive_plain(ours.as_fd(), &mut buffer).expect("it is there").fds_cut);
        send(theirs.as_fd(), b"y", &[] as &[OwnedFd]).expect("it fits");
        assert!(!receive_plain(ours.as_fd(), &mut buffer).expect("it is there").fds_cut);
    }

    #[test]
    fn oversized_packet_is_seen_as_truncated() {
        let (ours, theirs) = pair();
        let mut buffer = [0; MAX_SESSION_PACKET_BYTES];
        send(theirs.as_fd(), &[7; MAX_SESSION_PACKET_BYTES + 1], &[] as &[OwnedFd]).expect("the socket takes it");
        assert!(receive_plain(ours.as_fd(), &mut buffer).expect("it is there").truncated);
    }

    #[test]
    fn flood_beyond_the_bound_is_cut() {
        let (ours, theirs) = pair();
        let mut buffer = [0; MAX_SESSION_PACKET_BYTES];
        let file = null();
        let borrowed = [file.as_fd(); 200];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(200))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&borrowed)));
        sendmsg(&theirs, &[IoSlice::new(b"x")], &mut control, SendFlags::empty()).expect("the kernel takes it");
        let (received, fds) = receive_with_fds(ours.as_fd(), &mut buffer).expect("it is there");
        assert!(received.fds_cut);
        assert!(fds.len() <= MAX_PACKET_FDS + 2, "{} fds taken, alignment explains 2", fds.len());
    }

    #[test]
    fn end_of_stream_has_no_bytes() {
        let (ours, theirs) = pair();
        drop(theirs);
        let mut buffer = [0; MAX_SESSION_PACKET_BYTES];
        assert_eq!(receive_plain(ours.as_fd(), &mut buffer).expect("an end").len_bytes, 0);
    }
}
