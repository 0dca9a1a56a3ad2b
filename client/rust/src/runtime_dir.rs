//! Where the daemon's sockets are. The rule is the daemon's own, with the client's variable first.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

use crate::error::ClientError;

/// Name of the gRPC socket in the runtime folder.
pub const GRPC_SOCKET: &str = "gdrd.sock";
/// Name of the session socket in the runtime folder.
pub const SESSION_SOCKET: &str = "session.sock";
/// Longest path of a socket, bytes: sun_path of unix(7), a zero at its end.
const MAX_SOCKET_PATH_BYTES: usize = 107;
/// Where a daemon of the host has its sockets.
const SYSTEM_DIR: &str = "/run/gdrd";

/// A runtime folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuntimeDir(PathBuf);

impl RuntimeDir {
    /// This folder, whether or not a daemon has its sockets there.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    /// The first folder that holds a daemon's socket, of those that this process's environment and user name.
    ///
    /// # Errors
    /// [`ClientError::NoDaemon`] with the folders looked in; [`ClientError::NotPermitted`] with the first that this user may not
    /// enter.
    pub fn locate() -> Result<Self, ClientError> {
        Self::locate_with(|name| std::env::var_os(name), rustix::process::geteuid().is_root())
    }

    /// As [`RuntimeDir::locate`], with the environment given.
    ///
    /// # Errors
    /// [`ClientError::NoDaemon`] with the folders looked in; [`ClientError::NotPermitted`] with the first that this user may not
    /// enter.
    pub fn locate_with(variable: impl Fn(&str) -> Option<OsString>, is_root: bool) -> Result<Self, ClientError> {
        let looked_in = candidates(variable, is_root);
        let mut closed = None;
        for dir in &looked_in {
            let dir = Self(dir.clone());
            match dir.grpc_socket().try_exists() {
                Ok(true) => return Ok(dir),
                // That daemon is not for us, and the next one may be.
                Err(source) if source.kind() == io::ErrorKind::PermissionDenied && closed.is_none() => {
                    closed = Some(ClientError::NotPermitted { path: dir.grpc_socket(), source: source.into() });
                }
                _ => {}
            }
        }
        Err(closed.unwrap_or(ClientError::NoDaemon { looked_in }))
    }

    /// The folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Whether its sockets can be named.
    pub(crate) fn check_length(&self) -> Result<(), ClientError> {
        let len = self.session_socket().as_os_str().len();
        if len > MAX_SOCKET_PATH_BYTES {
            let path = self.0.display();
            let what = format!(
                "runtime folder {path}: the paths of its sockets have {len} bytes, and unix(7) allows {MAX_SOCKET_PATH_BYTES}; use a shorter one"
            );
            return Err(ClientError::InvalidArgument { what });
        }
        Ok(())
    }

    /// The gRPC socket in it.
    #[must_use]
    pub fn grpc_socket(&self) -> PathBuf {
        self.0.join(GRPC_SOCKET)
    }

    /// The session socket in it.
    #[must_use]
    pub fn session_socket(&self) -> PathBuf {
        self.0.join(SESSION_SOCKET)
    }
}

/// GDRD_RUNTIME_DIR is an order: nothing else is looked at. RUNTIME_DIRECTORY may be the folder of whatever service
/// this process belongs to, and a user may have no daemon of their own, so those two are only tried first.
fn candidates(variable: impl Fn(&str) -> Option<OsString>, is_root: bool) -> Vec<PathBuf> {
    let set = |name| variable(name).filter(|value| !value.is_empty());
    if let Some(dir) = set("GDRD_RUNTIME_DIR") {
        return vec![dir.into()];
    }
    let mut dirs = Vec::new();
    // systemd.exec(5): several folders are joined by colons.
    if let Some(list) = set("RUNTIME_DIRECTORY") {
        dirs.extend(std::env::split_paths(&list).filter(|dir| !dir.as_os_str().is_empty()));
    }
    if !is_root && let Some(dir) = set("XDG_RUNTIME_DIR") {
        dirs.push(PathBuf::from(dir).join("gdrd"));
    }
    dirs.push(SYSTEM_DIR.into());
    dirs
}

#[cfg(test)]
mod tests {
    use super::*;

    fn looked_in(variables: &[(&str, &str)], is_root: bool) -> Vec<PathBuf> {
        candidates(|name| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into()), is_root)
    }

    #[test]
    fn the_clients_own_variable_is_an_order() {
        let variables = [("GDRD_RUNTIME_DIR", "/mine"), ("RUNTIME_DIRECTORY", "/run/other")];
        assert_eq!(looked_in(&variables, false), [PathBuf::from("/mine")]);
    }

    #[test]
    fn root_looks_at_the_hosts_daemon() {
        assert_eq!(looked_in(&[("XDG_RUNTIME_DIR", "/run/user/0")], true), [PathBuf::from("/run/gdrd")]);
    }

    #[test]
    fn a_user_looks_at_their_own_daemon_then_at_the_hosts() {
        let found = looked_in(&[("XDG_RUNTIME_DIR", "/run/user/7"), ("RUNTIME_DIRECTORY", "/run/a:/run/b")], false);
        let wanted = ["/run/a", "/run/b", "/run/user/7/gdrd", "/run/gdrd"].map(PathBuf::from);
        assert_eq!(found, wanted);
    }

    #[test]
    fn empty_variables_count_as_unset() {
        assert_eq!(looked_in(&[("GDRD_RUNTIME_DIR", ""), ("XDG_RUNTIME_DIR", "")], false), [PathBuf::from(SYSTEM_DIR)]);
    }

    #[test]
    fn the_first_folder_with_a_socket_wins_and_none_is_an_error() {
        let own = tempfile::tempdir().unwrap();
        let variable = |name: &str| (name == "GDRD_RUNTIME_DIR").then(|| own.path().into());
        let error = RuntimeDir::locate_with(variable, true).unwrap_err();
        assert!(error.is_unreachable());
        std::fs::write(own.path().join(GRPC_SOCKET), "").unwrap();
        assert_eq!(RuntimeDir::locate_with(variable, true).unwrap(), RuntimeDir::new(own.path()));
    }
}
