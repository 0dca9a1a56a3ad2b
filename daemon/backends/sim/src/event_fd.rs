//! eventfd(2) as a level: set or clear.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::EventfdFlags;

pub(crate) fn new() -> io::Result<OwnedFd> {
    Ok(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

pub(crate) fn set(fd: impl AsFd) {
    // The one error left, EAGAIN, means that the counter is at its end and so readable already.
    let _ = rustix::io::write(fd, &1_u64.to_ne_bytes());
}

pub(crate) fn clear(fd: impl AsFd) {
    // EAGAIN: it was clear.
    let _ = rustix::io::read(fd, &mut [0_u8; 8]);
}
