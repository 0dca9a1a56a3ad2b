//! The folder of the sockets: which it is, that it is safe to use, and that no other daemon uses it.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use rustix::fs::{FlockOperation, flock};
use thiserror::Error;

const SYSTEM_DIR: &str = "/run/gdrd";
pub(crate) const LOCK_NAME: &str = "gdrd.lock";
const DIR_MODE: u32 = 0o755;

/// Longest path of the folder, bytes: what sun_path of unix(7), a zero at its end, leaves beside the longest name in it.
const MAX_DIR_BYTES: usize = 108 - "/session.sock".len() - 1;

/// Why there is no runtime folder.
#[derive(Debug, Error)]
#[non_exhaustive]
pub(crate) enum RuntimeDirError {
    /// Nothing names one.
    #[error("no runtime folder: not root, and XDG_RUNTIME_DIR is not set; pass --runtime-dir")]
    Unnamed,
    /// No socket in it could be named.
    #[error(
        "runtime folder {} is {} bytes long; with more than {MAX_DIR_BYTES} its sockets cannot be named (unix(7)): pass a shorter --runtime-dir",
        path.display(),
        path.as_os_str().len()
    )]
    TooLong {
        /// The folder.
        path: PathBuf,
    },
    /// Something else has its name.
    #[error("runtime folder {} is not a folder; pass another --runtime-dir", path.display())]
    NotAFolder {
        /// What is there.
        path: PathBuf,
    },
    /// It cannot be made or used.
    #[error("runtime folder {}", path.display())]
    Unusable {
        /// The folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Others could put their own sockets there.
    #[error(
        "runtime folder {} belongs to uid {owner} with mode {mode:04o}; it must belong to root or uid {ours} and be writable by its owner alone",
        path.display()
    )]
    Unsafe {
        /// The folder.
        path: PathBuf,
        /// Its owner.
        owner: u32,
        /// Its mode.
        mode: u32,
        /// The daemon's uid.
        ours: u32,
    },
    /// Another daemon serves it.
    #[error("runtime folder {} is in use by gdrd with pid {pid}; stop it or pass another --runtime-dir", path.display())]
    InUse {
        /// The folder.
        path: PathBuf,
        /// Pid of the other daemon, as it wrote it.
        pid: String,
    },
}

impl RuntimeDirError {
    /// Whether only other arguments or another environment can help.
    pub(crate) fn is_usage(&self) -> bool {
        matches!(self, Self::Unnamed | Self::TooLong { .. } | Self::NotAFolder { .. } | Self::Unsafe { .. })
    }
}

/// A runtime folder that is this daemon's while this value lives: until all that works on its files has ended.
#[derive(Debug)]
pub(crate) struct RuntimeDir {
    path: PathBuf,
    lock: Mutex<File>,
}

impl RuntimeDir {
    /// Makes the folder where it is missing and locks it against a second daemon.
    ///
    /// # Errors
    /// `TooLong`, `NotAFolder`, `Unusable`, `Unsafe`, `InUse`.
    pub(crate) fn claim(path: PathBuf) -> Result<Self, RuntimeDirError> {
        if path.as_os_str().len() > MAX_DIR_BYTES {
            return Err(RuntimeDirError::TooLong { path });
        }
        let lock = Mutex::new(locked(&path)?);
        Ok(Self { path, lock })
    }

    /// Makes and locks it anew where the folder or its lock was deleted. Whether that was so.
    ///
    /// # Errors
    /// As [`RuntimeDir::claim`]; then another daemon may have it.
    pub(crate) fn renew(&self) -> Result<bool, RuntimeDirError> {
        let mut lock = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        if self.has(&lock) {
            return Ok(false);
        }
        *lock = locked(&self.path)?;
        Ok(true)
    }

    /// Whether the lock in the folder is still this one.
    pub(crate) fn is_ours(&self) -> bool {
        self.has(&self.lock.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn has(&self, lock: &File) -> bool {
        let ours = lock.metadata().map(|ours| (ours.dev(), ours.ino())).ok();
        let there = fs::metadata(self.path.join(LOCK_NAME)).map(|there| (there.dev(), there.ino())).ok();
        ours.is_some() && ours == there
    }

    /// The folder.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

/// The lock of a folder, which is made where it is missing.
fn locked(path: &Path) -> Result<File, RuntimeDirError> {
    let unusable = |source| RuntimeDirError::Unusable { path: path.to_owned(), source };
    create(path).map_err(unusable)?;
    check(path)?;
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o644);
    let mut lock = options.open(path.join(LOCK_NAME)).map_err(unusable)?;
    if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
        let mut pid = String::new();
        // Only for the message; the lock says what counts.
        let _ = (&lock).take(20).read_to_string(&mut pid);
        return Err(RuntimeDirError::InUse { path: path.to_owned(), pid: pid.trim().to_owned() });
    }
    lock.set_len(0).and_then(|()| writeln!(lock, "{}", std::process::id())).map_err(unusable)?;
    Ok(lock)
}

/// The folder by the rule of the documentation: argument, RUNTIME_DIRECTORY, /run/gdrd for root, else
/// XDG_RUNTIME_DIR/gdrd.
///
/// # Errors
/// `Unnamed`.
pub(crate) fn locate(
    argument: Option<PathBuf>,
    variable: impl Fn(&str) -> Option<OsString>,
    is_root: bool,
) -> Result<PathBuf, RuntimeDirError> {
    let set = |name| variable(name).filter(|value| !value.is_empty());
    if let Some(path) = argument {
        return Ok(path);
    }
    // Several folders are joined by colons (systemd.exec(5)); the first is the service's own.
    let of_service = set("RUNTIME_DIRECTORY").and_then(|list| std::env::split_paths(&list).next());
    if let Some(path) = of_service.filter(|path| !path.as_os_str().is_empty()) {
        return Ok(path);
    }
    if is_root {
        return Ok(PathBuf::from(SYSTEM_DIR));
    }
    set("XDG_RUNTIME_DIR").map(|dir| PathBuf::from(dir).join("gdrd")).ok_or(RuntimeDirError::Unnamed)
}

fn create(path: &Path) -> io::Result<()> {
    match fs::create_dir(path) {
        // Whatever the umask: clients of all users pass through.
        Ok(()) => fs::set_permissions(path, Permissions::from_mode(DIR_MODE)),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
    }
}

fn check(path: &Path) -> Result<(), RuntimeDirError> {
    let unusable = |source| RuntimeDirError::Unusable { path: path.to_owned(), source };
    let found = fs::metadata(path).map_err(unusable)?;
    if !found.is_dir() {
        return Err(RuntimeDirError::NotAFolder { path: path.to_owned() });
    }
    let (owner, mode) = (found.uid(), found.mode() & 0o7777);
    let ours = rustix::process::geteuid().as_raw();
    if (owner != ours && owner != 0) || mode & 0o022 != 0 {
        return Err(RuntimeDirError::Unsafe { path: path.to_owned(), owner, mode, ours });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn located(set: &[(&str, &str)], is_root: bool) -> Option<PathBuf> {
        let variable = |name: &str| set.iter().find(|(key, _)| *key == name).map(|(_, value)| OsString::from(value));
        locate(None, variable, is_root).ok()
    }

    #[test]
    fn folder_follows_the_documented_order() {
        let all = [("RUNTIME_DIRECTORY", "/run/gdrd:/run/other"), ("XDG_RUNTIME_DIR", "/run/user/7")];
        let given = locate(Some("/x".into()), |_| Some("/y".into()), true).expect("given");
        assert_eq!(given, PathBuf::from("/x"));
        assert_eq!(located(&all, false), Some("/run/gdrd".into()));
        assert_eq!(located(&all[1..], true), Some("/run/gdrd".into()));
        assert_eq!(located(&all[1..], false), Some("/run/user/7/gdrd".into()));
        assert_eq!(located(&[("RUNTIME_DIRECTORY", "")], false), None);
    }

    #[test]
    fn only_what_another_try_cannot_help_is_usage() {
        let folder = tempfile::tempdir().expect("a folder");
        let refused = |path: PathBuf| RuntimeDir::claim(path).expect_err("it cannot be used").is_usage();
        let (file, open) = (folder.path().join("file"), folder.path().join("open"));
        File::create(&file).expect("a file");
        fs::create_dir(&open).expect("a folder");
        fs::set_permissions(&open, Permissions::from_mode(0o1777)).expect("it is ours");
        assert!(refused(file) && refused(open));
        assert!(!refused(folder.path().join("missing/run")), "the parent may come");
        let path = folder.path().join("run");
        let _first = RuntimeDir::claim(path.clone()).expect("free");
        assert!(!refused(path), "the other daemon may end");
    }

    #[test]
    fn second_daemon_is_refused_and_told_of_the_first() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("run");
        let first = RuntimeDir::claim(path.clone()).expect("free");
        let refused = RuntimeDir::claim(path.clone()).expect_err("taken").to_string();
        assert!(refused.contains(&format!("pid {}", std::process::id())), "{refused}");
        drop(first);
        assert!(RuntimeDir::claim(path).is_ok());
    }

    #[test]
    fn folder_is_passable_for_everyone_and_writable_for_nobody_else() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("run");
        let _claimed = RuntimeDir::claim(path.clone()).expect("free");
        assert_eq!(fs::metadata(&path).expect("it is there").mode() & 0o777, DIR_MODE);
        fs::set_permissions(&path, Permissions::from_mode(0o777)).expect("it is ours");
        assert!(matches!(RuntimeDir::claim(path), Err(RuntimeDirError::Unsafe { .. })));
    }

    #[test]
    fn file_in_its_place_is_named() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("run");
        fs::write(&path, "x").expect("a file");
        assert!(RuntimeDir::claim(path).expect_err("no folder").to_string().contains("run"));
    }

    #[test]
    fn folder_too_long_for_a_socket_is_refused_with_the_remedy_and_the_longest_one_is_not() {
        let folder = tempfile::tempdir().expect("a folder");
        let room = MAX_DIR_BYTES - folder.path().as_os_str().len() - 1;
        let path = folder.path().join("x".repeat(room));
        let _claimed = RuntimeDir::claim(path.clone()).expect("it fits");
        assert!(rustix::net::SocketAddrUnix::new(path.join("session.sock")).is_ok());
        let refused = RuntimeDir::claim(folder.path().join("x".repeat(room + 1))).expect_err("too long");
        assert!(refused.is_usage(), "{refused}");
        assert!(refused.to_string().contains("pass a shorter --runtime-dir"), "{refused}");
        assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 1, "nothing was made");
    }
}
