//! What the daemon and a worker say to each other: one JSON object a packet, fds beside it.
//!
//! Both ends are the same binary, so there is no version. Packets are bounded all the same, and one that does not
//! parse is an error, never a panic.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::device::{DeviceError, DeviceFacts, DeviceMemory, Place};

/// Longest packet.
pub(crate) const MAX_PACKET_BYTES: usize = 4096;
/// Most fds of a packet: memory and dma-buf.
const MAX_FDS: usize = 2;

/// An atomic operation, as it travels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Atomic {
    FetchAdd { operand: u64 },
    CompareSwap { compare: u64, operand: u64 },
}

/// What the daemon asks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Request {
    Memory,
    Allocate { len_bytes: u64 },
    Import { len_bytes: u64 },
    Scrub { id: u64 },
    Copy { from: Place, to: Place, len_bytes: u64 },
    Atomic { id: u64, offset: u64, operation: Atomic },
    Forget { id: u64 },
}

/// What a worker answers, and says first of all (`Ready` or `Failed`) and last (`Bye`, without being asked).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Reply {
    /// With the staging segment's fd.
    Ready {
        facts: DeviceFacts,
    },
    Done,
    Memory(DeviceMemory),
    /// With the fd of the memory, and of the dma-buf where there is one.
    Allocated {
        id: u64,
    },
    Imported {
        id: u64,
    },
    Old(u64),
    /// Out of memory tells what is free as well.
    Failed {
        error: DeviceError,
        free_bytes: u64,
    },
    /// The worker ends because it was idle. What was asked since was not done.
    Bye,
}

/// Why nothing was received.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReceiveError {
    #[error("the other end is gone")]
    Ended,
    #[error("no answer in {0:?}")]
    Timeout(Duration),
    #[error("no file descriptor is left for what it sent (RLIMIT_NOFILE)")]
    NoDescriptors,
    #[error("a packet that is none: {0}")]
    Malformed(String),
    #[error("socket: {0}")]
    Socket(#[from] Errno),
}

/// Sends one packet; blocks while the socket is full.
pub(crate) fn send<T: Serialize>(socket: impl AsFd, message: &T, fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    let bytes = serde_json::to_vec(message).map_err(|_| Errno::INVAL)?;
    if bytes.len() > MAX_PACKET_BYTES {
        return Err(Errno::MSGSIZE);
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::MSGSIZE);
    }
    loop {
        match sendmsg(&socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL) {
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
}

/// Receives one packet, waiting at most `patience`.
pub(crate) fn receive<T: DeserializeOwned>(
    socket: impl AsFd,
    patience: Option<Duration>,
) -> Result<(T, Vec<OwnedFd>), ReceiveError> {
    wait(&socket, patience)?;
    let mut bytes = [0; MAX_PACKET_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = recvmsg(&socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC);
    let received = match received {
        Err(Errno::CONNRESET) => return Err(ReceiveError::Ended),
        received => received?,
    };
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    if received.bytes == 0 && fds.is_empty() {
        return Err(ReceiveError::Ended);
    }
    if received.flags.contains(ReturnFlags::CTRUNC) {
        // The kernel drops what finds no free number (unix(7)).
        return Err(ReceiveError::NoDescriptors);
    }
    if received.flags.contains(ReturnFlags::TRUNC) {
        return Err(ReceiveError::Malformed("cut off".to_owned()));
    }
    let bytes = bytes.get(..received.bytes).unwrap_or_default();
    let message = serde_json::from_slice(bytes).map_err(|error| ReceiveError::Malformed(error.to_string()))?;
    Ok((message, fds))
}

fn wait(socket: impl AsFd, patience: Option<Duration>) -> Result<(), ReceiveError> {
    let timeout = patience.and_then(|patience| Timespec::try_from(patience).ok());
    loop {
        // A signal makes the wait longer, never endless: workers and daemon get few.
        match poll(&mut [PollFd::new(&socket, PollFlags::IN)], timeout.as_ref()) {
            Ok(0) => return Err(ReceiveError::Timeout(patience.unwrap_or_default())),
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}
