//! Where a broker thread sleeps: epoll over its mailbox, the doorbells of its rings, and the events of
//! its completion queues. Everything is watched edge-triggered and nothing is ever read.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::fs::Timespec;
use rustix::io::Errno;

use super::error::BrokerError;

/// Edges taken at a time; which they are does not matter, so what does not fit only wakes once more.
const EVENTS: usize = 16;

/// An epoll instance.
pub(crate) struct Sleeper {
    epoll: OwnedFd,
}

impl Sleeper {
    pub(crate) fn new() -> Result<Self, BrokerError> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)
            .map_err(|source| BrokerError::System { call: "epoll_create1", source: source.into() })?;
        Ok(Self { epoll })
    }

    /// Watches `fd` for edges.
    pub(crate) fn watch(&self, fd: impl AsFd) -> Result<(), Errno> {
        epoll::add(&self.epoll, fd, EventData::new_u64(0), EventFlags::IN | EventFlags::ET)
    }

    /// Stops watching `fd`. Closing it does not do that while a client holds the same file description.
    pub(crate) fn forget(&self, fd: impl AsFd) -> Result<(), Errno> {
        epoll::delete(&self.epoll, fd)
    }

    /// Sleeps until an edge, or for `timeout`. A signal ends it early.
    pub(crate) fn sleep(&self, timeout: Option<Duration>) {
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        let mut events = [MaybeUninit::<Event>::uninit(); EVENTS];
        // Of the errors of epoll_wait(2) only EINTR can come, and it is an early wake.
        let _ = epoll::wait(&self.epoll, &mut events, timeout.as_ref());
    }
}
