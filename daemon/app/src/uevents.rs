//! What the kernel says of devices that come, go or change: uevents (Documentation/ABI/stable/sysfs-uevent,
//! lib/kobject_uevent.c), by a netlink socket. Whoever may not have one, as in some containers, is left with the timer.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::netlink::{KOBJECT_UEVENT, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, bind, recv, socket_with};
use tokio::io::unix::AsyncFd;

/// Group of the kernel's own messages; the next one is udev's.
const KERNEL_GROUP: u32 = 1;
/// Longest message (UEVENT_BUFFER_SIZE and its header).
const MAX_MESSAGE_BYTES: usize = 4096;
/// What a topology is made of.
const SUBSYSTEMS: [&str; 6] = ["pci", "net", "infiniband", "infiniband_verbs", "nvme", "auxiliary"];
/// Devices come in many messages; the host is read once they have come.
pub(crate) const SETTLE: Duration = Duration::from_millis(300);

/// The socket.
#[derive(Debug)]
pub(crate) struct Uevents(AsyncFd<OwnedFd>);

impl Uevents {
    /// Must be called on a tokio runtime.
    ///
    /// # Errors
    /// When there is no such socket for this process.
    pub(crate) fn open() -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, Some(KOBJECT_UEVENT))?;
        bind(&socket, &SocketAddrNetlink::new(0, KERNEL_GROUP))?;
        Self::over(socket)
    }

    fn over(socket: OwnedFd) -> io::Result<Self> {
        // What took its place is unsafe, for types whose fd may change; an OwnedFd's does not.
        #[allow(deprecated, reason = "sound for an OwnedFd")]
        let registered = AsyncFd::new(socket)?;
        Ok(Self(registered))
    }

    /// Returns a while after devices that matter have changed. Dropped early, it loses nothing that lasts.
    pub(crate) async fn changed(&self) {
        self.changed_once(async { tokio::time::sleep(SETTLE).await }).await;
    }

    /// The same, once devices have `settled` after the first message.
    async fn changed_once(&self, settled: impl Future<Output = ()>) {
        while !self.next().await {}
        settled.await;
        // What came meanwhile is part of the same change.
        while self.take().is_some() {}
    }

    /// Whether the next messages are about devices that matter.
    async fn next(&self) -> bool {
        let Ok(mut ready) = self.0.readable().await else { return std::future::pending().await };
        let mut matters = false;
        while let Some(message) = self.take() {
            matters |= message;
        }
        ready.clear_ready();
        matters
    }

    /// Takes one message; `None` when there is none.
    fn take(&self) -> Option<bool> {
        let mut bytes = [0; MAX_MESSAGE_BYTES];
        match recv(self.0.get_ref(), &mut bytes[..], RecvFlags::empty()) {
            Ok((got, _)) => Some(matters(bytes.get(..got).unwrap_or_default())),
            // More was said than the socket holds: anything may have changed.
            Err(Errno::NOBUFS) => Some(true),
            Err(Errno::INTR) => Some(false),
            Err(_) => None,
        }
    }
}

/// Messages are `ACTION@PATH` and `NAME=VALUE`, each ended by a zero.
fn matters(message: &[u8]) -> bool {
    let subsystem = message.split(|byte| *byte == 0).find_map(|field| field.strip_prefix(b"SUBSYSTEM="));
    subsystem.is_some_and(|subsystem| SUBSYSTEMS.iter().any(|known| known.as_bytes() == subsystem))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{SendFlags, send, socketpair};

    #[test]
    fn messages_of_other_subsystems_and_broken_ones_do_not_matter() {
        assert!(matters(b"add@/devices/virtual/infiniband/rxe0\0ACTION=add\0SUBSYSTEM=infiniband\0SEQNUM=7\0"));
        for other in
            [&b"change@/x\0SUBSYSTEM=block\0"[..], b"", b"\0\0\0", b"SUBSYSTEM", b"libudev\0\xfe\xed", b"SUBSYSTEM=pc"]
        {
            assert!(!matters(other), "{other:?}");
        }
    }

    /// A socket with messages as the kernel sends them, and its other end.
    fn pair() -> (Uevents, impl Fn(&str)) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::DGRAM, flags, None).unwrap();
        let tell = move |subsystem: &str| {
            let message = format!("add@/devices/x\0SUBSYSTEM={subsystem}\0");
            send(&theirs, message.as_bytes(), SendFlags::empty()).unwrap();
        };
        (Uevents::over(ours).unwrap(), tell)
    }

    #[tokio::test]
    async fn many_messages_are_one_change() {
        let (uevents, tell) = pair();
        (0..5).for_each(|_| tell("net"));
        tell("block");
        uevents.changed().await;
        assert_eq!(uevents.take(), None);
    }

    #[tokio::test]
    async fn what_is_told_while_devices_settle_is_part_of_the_change() {
        let (uevents, tell) = pair();
        tell("pci");
        uevents.changed_once(async { (0..5).for_each(|_| tell("infiniband")) }).await;
        assert_eq!(uevents.take(), None);
    }

    #[tokio::test]
    async fn what_does_not_matter_is_no_change() {
        let (uevents, tell) = pair();
        tell("block");
        assert!(!uevents.next().await);
        tell("net");
        assert!(uevents.next().await);
    }

    #[tokio::test]
    async fn a_socket_without_messages_waits() {
        // Some sandboxes have no such socket.
        let Ok(uevents) = Uevents::open() else { return };
        while uevents.take().is_some() {}
        assert_eq!(uevents.take(), None);
    }
}
