//! The two listening sockets: handed over by systemd (see `inherited`), else bound in the runtime folder.

use std::fs::{self, Permissions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use gdrd_server::Sockets;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with};
use thiserror::Error;

use crate::runtime_dir::RuntimeDir;

const GRPC_NAME: &str = "gdrd.sock";
const SESSION_NAME: &str = "session.sock";

/// One of the two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Grpc,
    Session,
}

impl Kind {
    /// Its name in the runtime folder.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Grpc => GRPC_NAME,
            Self::Session => SESSION_NAME,
        }
    }

    fn socket_type(self) -> SocketType {
        match self {
            Self::Grpc => SocketType::STREAM,
            Self::Session => SocketType::SEQPACKET,
        }
    }
}

/// Open to every user: what a peer may do is decided by its credentials.
const SOCKET_MODE: u32 = 0o666;

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 4096;

/// Why there are no sockets.
#[derive(Debug, Error)]
#[non_exhaustive]
pub(crate) enum SocketError {
    /// One could not be made.
    #[error("socket {}", path.display())]
    Bind {
        /// Its path.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Something else has its name.
    #[error("{} is there and is no socket; remove it", path.display())]
    NotASocket {
        /// Its path.
        path: PathBuf,
    },
}

/// Sockets, and which of them this process made and removes in the end.
#[derive(Debug)]
pub(crate) struct Listening {
    /// The sockets.
    pub(crate) sockets: Sockets,
    /// Names to be removed.
    pub(crate) made: Made,
}

/// Socket files of this process. They are removed when dropped, if the folder is still this daemon's.
#[derive(Debug)]
pub(crate) struct Made {
    folder: Arc<RuntimeDir>,
    kinds: Vec<Kind>,
}

impl Made {
    /// Where they are.
    pub(crate) fn folder(&self) -> &RuntimeDir {
        &self.folder
    }

    /// The names of all.
    pub(crate) fn names(&self) -> impl Iterator<Item = &'static str> {
        self.kinds.iter().map(|kind| kind.name())
    }

    fn path(&self, kind: Kind) -> PathBuf {
        self.folder.path().join(kind.name())
    }

    fn bind(&mut self, kind: Kind) -> Result<OwnedFd, SocketError> {
        let path = self.path(kind);
        remove_stale(&path)?;
        self.kinds.push(kind);
        bound(&path, kind.socket_type())
    }

    /// Those whose name is gone.
    pub(crate) fn missing(&self) -> Vec<Kind> {
        let is_missing = |kind: &Kind| {
            let found = fs::symlink_metadata(self.path(*kind));
            found.is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
        };
        self.kinds.iter().copied().filter(is_missing).collect()
    }

    /// Binds one whose name is gone; what else may have that name meanwhile is left alone.
    ///
    /// # Errors
    /// `Bind`.
    pub(crate) fn bind_again(&self, kind: Kind) -> Result<OwnedFd, SocketError> {
        bound(&self.path(kind), kind.socket_type())
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        if !self.folder.is_ours() {
            return;
        }
        for kind in &self.kinds {
            // Gone already is as good.
            let _ = fs::remove_file(self.path(*kind));
        }
    }
}

/// What systemd handed over; either may be missing and is then bound.
#[derive(Debug, Default)]
pub(crate) struct Activated {
    pub(crate) grpc: Option<UnixListener>,
    pub(crate) session: Option<OwnedFd>,
}

impl Activated {
    /// Completes them with sockets bound in `folder`: stale ones are replaced.
    ///
    /// # Errors
    /// `Bind`, `NotASocket`.
    pub(crate) fn complete(self, folder: &Arc<RuntimeDir>) -> Result<Listening, SocketError> {
        let mut made = Made { folder: Arc::clone(folder), kinds: Vec::new() };
        let grpc = match self.grpc {
            Some(grpc) => grpc,
            None => UnixListener::from(made.bind(Kind::Grpc)?),
        };
        let session = match self.session {
            Some(session) => session,
            None => made.bind(Kind::Session)?,
        };
        Ok(Listening { sockets: Sockets { grpc, session }, made })
    }
}

fn bound(path: &Path, kind: SocketType) -> Result<OwnedFd, SocketError> {
    let failed = |source: io::Error| SocketError::Bind { path: path.to_owned(), source };
    let address = SocketAddrUnix::new(path).map_err(|errno| failed(errno.into()))?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, kind, flags, None).map_err(|errno| failed(errno.into()))?;
    bind(&socket, &address).map_err(|errno| failed(errno.into()))?;
    let opened = fs::set_permissions(path, Permissions::from_mode(SOCKET_MODE));
    match opened.and_then(|()| Ok(listen(&socket, BACKLOG)?)) {
        Ok(()) => Ok(socket),
        Err(error) => {
            // A name that nobody listens on would pass for one that is served.
            let _ = fs::remove_file(path);
            Err(failed(error))
        }
    }
}

/// A socket left by a daemon that ended without a word; the lock of the folder says that nobody listens on it.
fn remove_stale(path: &Path) -> Result<(), SocketError> {
    let failed = |source| SocketError::Bind { path: path.to_owned(), source };
    match fs::symlink_metadata(path) {
        Ok(found) if found.file_type().is_socket() => fs::remove_file(path).map_err(failed),
        Ok(_) => Err(SocketError::NotASocket { path: path.to_owned() }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(failed(error)),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::runtime_dir::LOCK_NAME;

    fn claimed(folder: &tempfile::TempDir) -> Arc<RuntimeDir> {
        Arc::new(RuntimeDir::claim(folder.path().to_owned()).expect("it is ours"))
    }

    #[test]
    fn sockets_are_open_to_all_and_removed_in_the_end() {
        let folder = tempfile::tempdir().expect("a folder");
        let listening = Activated::default().complete(&claimed(&folder)).expect("bound");
        for name in [GRPC_NAME, SESSION_NAME] {
            let mode = fs::metadata(folder.path().join(name)).expect("bound").mode();
            assert_eq!(mode & 0o777, SOCKET_MODE, "{name}");
        }
        drop(listening);
        assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 1, "the lock alone");
    }

    #[test]
    fn sockets_in_a_folder_that_another_daemon_has_taken_are_left_to_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let ours = Activated::default().complete(&claimed(&folder)).expect("bound");
        fs::remove_file(folder.path().join(LOCK_NAME)).expect("it is there");
        let _theirs = Activated::default().complete(&claimed(&folder)).expect("bound");
        drop(ours);
        assert!(UnixStream::connect(folder.path().join(GRPC_NAME)).is_ok());
    }

    #[test]
    fn folder_is_taken_as_long_as_sockets_are_to_be_removed_from_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let listening = Activated::default().complete(&claimed(&folder)).expect("bound");
        assert!(RuntimeDir::claim(folder.path().to_owned()).is_err());
        drop(listening);
        assert!(RuntimeDir::claim(folder.path().to_owned()).is_ok());
    }

    #[test]
    fn stale_socket_is_replaced() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join(GRPC_NAME);
        drop(UnixListener::bind(&path).expect("bound"));
        assert!(UnixStream::connect(&path).is_err(), "nobody listens");
        let _listening = Activated::default().complete(&claimed(&folder)).expect("bound");
        assert!(UnixStream::connect(&path).is_ok());
    }

    #[test]
    fn file_with_the_name_of_a_socket_is_left_alone() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join(SESSION_NAME);
        fs::write(&path, "precious").expect("written");
        assert!(matches!(Activated::default().complete(&claimed(&folder)), Err(SocketError::NotASocket { .. })));
        assert_eq!(fs::read_to_string(path).expect("still there"), "precious");
    }
}
