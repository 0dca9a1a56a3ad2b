//! The descriptor store of whoever started the daemon: systemd's (sd_pid_notify_with_fds(3)) or `gdrd keeper`'s.
//!
//! One socket for everything, so that what is asked is done in that order.

use std::ffi::OsStr;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use gdrd_engine::{Keeper, Name, Watch};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::pipe::{PipeFlags, pipe_with};

use crate::notify;

/// How long a barrier may take: systemd answers between two events of its loop.
const BARRIER_TIMEOUT: Duration = Duration::from_secs(10);

/// The store.
#[derive(Debug)]
pub(crate) struct Store {
    socket: OwnedFd,
    /// Descriptors that it takes.
    pub(crate) most: u32,
}

impl Store {
    /// The store of the environment, if there is one: NOTIFY_SOCKET names the way to it, and FDSTORE (systemd 254 and
    /// later, `gdrd keeper`) how many descriptors it takes.
    ///
    /// # Errors
    /// When the socket cannot be connected.
    pub(crate) fn find(socket: Option<&OsStr>, most: Option<&str>) -> io::Result<Option<Self>> {
        let most = most.and_then(|most| most.parse().ok()).filter(|most| *most > 0);
        let (Some(path), Some(most)) = (socket, most) else { return Ok(None) };
        Ok(Some(Self { socket: notify::socket(path)?, most }))
    }

    fn send(&self, message: &str, fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds: Vec<BorrowedFd<'_>> = fd.into_iter().collect();
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&fds)) {
            return Err(io::Error::from(io::ErrorKind::InvalidInput));
        }
        sendmsg(&self.socket, &[IoSlice::new(message.as_bytes())], &mut control, SendFlags::NOSIGNAL)?;
        Ok(())
    }
}

impl Keeper for Store {
    fn store(&self, name: Name, fd: BorrowedFd<'_>, watch: Watch) -> io::Result<()> {
        let poll = match watch {
            Watch::No => "\nFDPOLL=0",
            Watch::HangUp => "",
        };
        self.send(&format!("FDSTORE=1\nFDNAME={name}{poll}"), Some(fd))
    }

    fn remove(&self, name: Name) -> io::Result<()> {
        self.send(&format!("FDSTOREREMOVE=1\nFDNAME={name}"), None)
    }

    fn barrier(&self) -> io::Result<()> {
        let (ours, theirs) = pipe_with(PipeFlags::CLOEXEC)?;
        self.send("BARRIER=1", Some(theirs.as_fd()))?;
        drop(theirs);
        // The other end is closed once all before it is done.
        let timeout = Timespec::try_from(BARRIER_TIMEOUT).map_err(io::Error::other)?;
        match poll(&mut [PollFd::new(&ours, PollFlags::empty())], Some(&timeout))? {
            0 => Err(io::Error::new(io::ErrorKind::TimedOut, "the descriptor store does not answer")),
            _ => Ok(()),
        }
    }
}
