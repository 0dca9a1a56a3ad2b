//! Descriptors that the daemon was started with (sd_listen_fds(3)): the sockets it listens on, and what an earlier daemon
//! had kept.
//!
//! A socket that listens is told by what it is; anything else by its name. What is neither was kept by nobody that this
//! daemon knows, and is closed.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;

use gdrd_engine::Name;
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::net::sockopt::{socket_acceptconn, socket_domain, socket_type};
use rustix::net::{AddressFamily, SocketType};
use thiserror::Error;

use crate::sockets::Activated;

/// Most descriptors that are taken over: `FileDescriptorStoreMax=` of the unit and both sockets fit in.
const MAX_PASSED_FDS: u32 = 65_536;

/// What was passed makes no sense.
#[derive(Debug, Error)]
#[non_exhaustive]
pub(crate) enum InheritedError {
    /// The count is none.
    #[error("LISTEN_FDS={shown} is no number from 0 to {MAX_PASSED_FDS}")]
    Count {
        /// Its start.
        shown: String,
    },
    /// LISTEN_PID is none.
    #[error("socket activation")]
    Environment(#[from] sd_listen_fds::Error),
    /// Two listening sockets of one kind.
    #[error("socket activation: {name} is a second {kind} socket")]
    Twice {
        /// Its name.
        name: String,
        /// stream or seqpacket.
        kind: &'static str,
    },
}

/// What was passed, by what it is.
#[derive(Debug, Default)]
pub(crate) struct Inherited {
    /// Sockets that listen.
    pub(crate) activated: Activated,
    /// Kept for this daemon.
    pub(crate) kept: BTreeMap<Name, OwnedFd>,
    /// Names of what was closed; to be logged once there is a log.
    pub(crate) closed: Vec<String>,
}

impl Inherited {
    /// Takes them; must be called once, before anything else is opened.
    ///
    /// # Errors
    /// Any of [`InheritedError`].
    pub(crate) fn take(count: Option<String>) -> Result<Self, InheritedError> {
        let within = |count: &String| count.parse().is_ok_and(|count: u32| count <= MAX_PASSED_FDS);
        if let Some(count) = count.filter(|count| !within(count)) {
            return Err(InheritedError::Count { shown: count.chars().take(20).collect() });
        }
        let mut inherited = Self::default();
        for (name, fd) in sd_listen_fds::get()? {
            let fd = fd.into_std();
            // A number that was not open: nothing to take, and nothing to close.
            if fcntl_setfd(&fd, FdFlags::CLOEXEC).is_err() {
                std::mem::forget(fd);
                continue;
            }
            inherited.take_one(name.unwrap_or_else(|| "unknown".to_owned()), fd)?;
        }
        Ok(inherited)
    }

    fn take_one(&mut self, name: String, fd: OwnedFd) -> Result<(), InheritedError> {
        match listening(&fd) {
            Some(SocketType::STREAM) => match self.activated.grpc.replace(UnixListener::from(fd)) {
                None => Ok(()),
                Some(_) => Err(InheritedError::Twice { name, kind: "stream" }),
            },
            Some(_) => match self.activated.session.replace(fd) {
                None => Ok(()),
                Some(_) => Err(InheritedError::Twice { name, kind: "seqpacket" }),
            },
            None => {
                match name.parse() {
                    Ok(name) => drop(self.kept.insert(name, fd)),
                    Err(_) => self.closed.push(name.chars().take(64).collect()),
                }
                Ok(())
            }
        }
    }
}

/// The type of a unix socket that listens for one of the daemon's two.
fn listening(fd: impl AsFd) -> Option<SocketType> {
    let listens = socket_acceptconn(&fd).is_ok_and(|listens| listens);
    let unix = socket_domain(&fd).is_ok_and(|domain| domain == AddressFamily::UNIX);
    let kind = socket_type(&fd).ok().filter(|kind| [SocketType::STREAM, SocketType::SEQPACKET].contains(kind))?;
    (listens && unix).then_some(kind)
}
