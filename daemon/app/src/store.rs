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
use rustix::io::retry_on_intr;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::pipe::{PipeFlags, pipe_with};

use crate::notify;

/// How long a barrier may take: systemd answers between two events of its loop.
const BARRIER_TIMEOUT: Duration = Duration::from_secs(10);
/// Name of the descriptor that a promised store is tried with: no name of the engine's, which have 4 characters.
const TRIAL: &str = "trial";
/// Nothing is waited for.
const NOW: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// How many descriptors a store takes, and whose word that is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Promise {
    /// Its own: FDSTORE, which systemd 254 and later and `gdrd keeper` set (sd_pid_notify_with_fds(3)).
    Told(u32),
    /// The unit's, in GDRD_FDSTORE: an older systemd has a store and does not say so, and a drop-in may have taken it away.
    Unproven(u32),
}

impl Promise {
    /// What the two variables say.
    pub(crate) fn of(told: Option<&str>, unproven: Option<&str>) -> Option<Self> {
        let number = |text: Option<&str>| text?.parse().ok().filter(|most| *most > 0);
        match told {
            Some(_) => number(told).map(Self::Told),
            None => number(unproven).map(Self::Unproven),
        }
    }
}

/// The store.
#[derive(Debug)]
pub(crate) struct Store {
    socket: OwnedFd,
    /// Descriptors that it takes.
    pub(crate) most: u32,
}

impl Store {
    /// The store of the environment, if there is one: NOTIFY_SOCKET names the way to it.
    ///
    /// # Errors
    /// When the socket cannot be connected, or whoever listens there does not answer.
    pub(crate) fn find(socket: Option<&OsStr>, promise: Option<Promise>) -> io::Result<Option<Self>> {
        let (Some(path), Some(promise)) = (socket, promise) else { return Ok(None) };
        let socket = notify::socket(path)?;
        match promise {
            Promise::Told(most) => Ok(Some(Self { socket, most })),
            Promise::Unproven(most) => {
                let store = Self { socket, most };
                Ok(store.keeps()?.then_some(store))
            }
        }
    }

    /// Whether a descriptor that is stored is kept: of a pipe, the other end tells.
    fn keeps(&self) -> io::Result<bool> {
        let (ours, theirs) = pipe_with(PipeFlags::CLOEXEC)?;
        self.send(&format!("FDSTORE=1\nFDNAME={TRIAL}\nFDPOLL=0"), Some(theirs.as_fd()))?;
        drop(theirs);
        self.barrier()?;
        let hung_up = retry_on_intr(|| poll(&mut [PollFd::new(&ours, PollFlags::empty())], Some(&NOW)))? > 0;
        self.send(&format!("FDSTOREREMOVE=1\nFDNAME={TRIAL}"), None)?;
        Ok(!hung_up)
    }

    fn send(&self, message: &str, fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds: Vec<BorrowedFd<'_>> = fd.into_iter().collect();
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&fds)) {
            return Err(io::Error::from(io::ErrorKind::InvalidInput));
        }
        retry_on_intr(|| {
            sendmsg(&self.socket, &[IoSlice::new(message.as_bytes())], &mut control, SendFlags::NOSIGNAL)
        })?;
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
        match retry_on_intr(|| poll(&mut [PollFd::new(&ours, PollFlags::empty())], Some(&timeout)))? {
            0 => Err(io::Error::new(io::ErrorKind::TimedOut, "the descriptor store does not answer")),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::IoSliceMut;
    use std::thread;

    use rustix::net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags, SocketType, recvmsg,
        socketpair,
    };

    use super::*;

    /// Answers as systemd does until it is asked to remove something. Returns what is left in the store.
    fn serve(socket: &OwnedFd, keeps: bool) -> usize {
        let mut kept: Vec<OwnedFd> = Vec::new();
        loop {
            let mut bytes = [0; 256];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let got = recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC);
            let text = String::from_utf8_lossy(&bytes[..got.expect("a message").bytes]).into_owned();
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(fds) = message
                    && text.starts_with("FDSTORE=1")
                    && keeps
                {
                    kept.extend(fds);
                }
            }
            if text.starts_with("FDSTOREREMOVE=1") {
                return kept.len();
            }
        }
    }

    fn tried(keeps: bool) -> (bool, usize) {
        let kind = (AddressFamily::UNIX, SocketType::DGRAM);
        let (ours, theirs) = socketpair(kind.0, kind.1, SocketFlags::CLOEXEC, None).expect("a pair of sockets");
        let systemd = thread::spawn(move || serve(&theirs, keeps));
        let kept = Store { socket: ours, most: 1 }.keeps().expect("it answers");
        (kept, systemd.join().expect("it ends"))
    }

    #[test]
    fn a_store_that_is_only_promised_is_believed_when_it_keeps_what_it_is_given() {
        assert_eq!(tried(true), (true, 1));
        assert_eq!(tried(false), (false, 0));
    }

    #[test]
    fn the_word_of_the_store_itself_goes_before_the_units() {
        assert_eq!(Promise::of(Some("7"), Some("9")), Some(Promise::Told(7)));
        assert_eq!(Promise::of(Some("0"), Some("9")), None);
        assert_eq!(Promise::of(None, Some("9")), Some(Promise::Unproven(9)));
        assert_eq!(Promise::of(None, Some("many")), None);
        assert_eq!(Promise::of(None, None), None);
    }
}
