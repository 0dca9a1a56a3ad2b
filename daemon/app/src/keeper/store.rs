//! The keeper's end of the descriptor store: messages of sd_notify(3), and the descriptors that came with them.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use gdrd_engine::Name;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::set_socket_passcred;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SocketAddrUnix, SocketFlags,
    SocketType, bind, recvmsg, socket_with,
};
use rustix::process::Pid;
use tracing::warn;

use super::{Interest, UnixDatagram};

/// Longest message: systemd's own bound (NOTIFY_BUFFER_MAX of src/core/manager.c).
const MAX_MESSAGE_BYTES: usize = 4096;
/// Most descriptors of one message (NOTIFY_FD_MAX there, and SCM_MAX_FD of unix(7), less one for credentials).
const MAX_FDS: usize = 32;

/// One kept descriptor.
#[derive(Debug)]
struct KeptFd {
    name: Name,
    fd: OwnedFd,
    watched: bool,
}

/// The store.
#[derive(Debug)]
pub(super) struct Store {
    socket: UnixDatagram,
    address: String,
    kept: Vec<KeptFd>,
    most: u32,
}

/// A message with its descriptors and its sender.
#[derive(Debug)]
pub(super) struct Heard {
    text: String,
    fds: Vec<OwnedFd>,
    pid: Option<Pid>,
}

impl Store {
    /// Binds its socket to a name in the abstract namespace: containers may have no writable folder, and every sender is
    /// checked anyway. Must be called within the runtime.
    pub(super) fn bind(most: u32) -> io::Result<Self> {
        let address = format!("gdrd-keeper/{}", std::process::id());
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
        set_socket_passcred(&socket, true)?;
        bind(&socket, &SocketAddrUnix::new_abstract_name(address.as_bytes())?)?;
        let socket = UnixDatagram::from_std(socket.into())?;
        Ok(Self { socket, address: format!("@{address}"), kept: Vec::new(), most })
    }

    /// For NOTIFY_SOCKET.
    pub(super) fn address(&self) -> &str {
        &self.address
    }

    /// Descriptors it takes.
    pub(super) fn most(&self) -> u32 {
        self.most
    }

    /// Descriptors it has.
    pub(super) fn len(&self) -> usize {
        self.kept.len()
    }

    /// What it has, by name.
    pub(super) fn kept(&self) -> impl Iterator<Item = (Name, &OwnedFd)> {
        self.kept.iter().map(|kept| (kept.name, &kept.fd))
    }

    /// The next message. Cancel-safe.
    pub(super) async fn hear(&self) -> io::Result<Heard> {
        self.socket.async_io(Interest::READABLE, || receive(&self.socket)).await
    }

    /// A message that is there already.
    pub(super) fn hear_now(&self) -> io::Result<Option<Heard>> {
        match receive(&self.socket) {
            Ok(heard) => Ok(Some(heard)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Does what the daemon `from` asks; gives what it says of itself. Others are not heard.
    pub(super) fn take(&mut self, heard: Heard, from: Pid) -> Option<String> {
        let Heard { text, fds, pid } = heard;
        if pid != Some(from) {
            return None;
        }
        let value = |key: &str| text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
        let is_set = |key| value(key) == Some("1");
        let name = value("FDNAME").and_then(|name| name.parse().ok());
        // A barrier is answered by closing its descriptor, here at the latest.
        match name {
            Some(name) if is_set("FDSTOREREMOVE") => self.kept.retain(|kept| kept.name != name),
            Some(name) if is_set("FDSTORE") => {
                let watched = value("FDPOLL") != Some("0");
                for fd in fds {
                    self.keep(KeptFd { name, fd, watched });
                }
            }
            _ => {}
        }
        let of_itself = |line: &&str| ["READY=", "STATUS=", "STOPPING="].iter().any(|key| line.starts_with(key));
        let said: Vec<&str> = text.lines().filter(of_itself).collect();
        (!said.is_empty()).then(|| said.join("\n"))
    }

    fn keep(&mut self, kept: KeptFd) {
        if self.kept.len() >= self.most as usize {
            return warn!(most = self.most, name = %kept.name, "the store is full; a descriptor is not kept");
        }
        self.kept.push(kept);
    }

    /// Drops watched descriptors whose other end is gone.
    pub(super) fn drop_hung_up(&mut self) {
        let hung_up = |fd: &OwnedFd| {
            let mut fds = [PollFd::new(fd, PollFlags::empty())];
            poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready > 0)
        };
        self.kept.retain(|kept| !(kept.watched && hung_up(&kept.fd)));
    }
}

fn receive(socket: &UnixDatagram) -> io::Result<Heard> {
    let mut bytes = [0; MAX_MESSAGE_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS), ScmCredentials(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let received = recvmsg(socket.as_fd(), &mut [IoSliceMut::new(&mut bytes)], &mut control, flags)?;
    let (mut fds, mut pid) = (Vec::new(), None);
    for message in control.drain() {
        match message {
            RecvAncillaryMessage::ScmRights(rights) => fds.extend(rights),
            RecvAncillaryMessage::ScmCredentials(credentials) => pid = Some(credentials.pid),
            _ => {}
        }
    }
    let cut = received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC);
    let text = bytes.get(..received.bytes).filter(|_| !cut).and_then(|bytes| std::str::from_utf8(bytes).ok());
    Ok(Heard { text: text.unwrap_or_default().to_owned(), fds, pid })
}
