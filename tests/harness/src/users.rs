//! Real users: two tenants are two uids, which needs root, in the host's user namespace or in one of our own.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::fail;

/// Set in the process that already runs in a user namespace of its own.
const MARK: &str = "GDRD_HARNESS_USER_NAMESPACE";

/// Who a process runs as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum User {
    /// This process's user.
    Own,
    /// The user and group of this number; needs root.
    Uid(u32),
}

/// A program at a place where its user can run it.
#[derive(Debug)]
pub struct Program {
    path: PathBuf,
    _copy: Option<TempDir>,
}

impl User {
    /// `program` where this user can run it: at its place, or as a copy that goes with the returned value, since a
    /// checkout in root's home is closed to others.
    ///
    /// # Panics
    /// When it cannot be copied.
    #[must_use]
    pub fn program(self, program: &Path) -> Program {
        if self == Self::Own || is_open_to_all(program) {
            return Program { path: program.to_owned(), _copy: None };
        }
        let folder = tempfile::tempdir().expect("make a folder for a program");
        std::fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).expect("open the program's folder");
        let path = folder.path().join(program.file_name().expect("a program has a name"));
        // Copied by another process: a descriptor of ours that is open for writing could be inherited by a child that
        // another thread starts, and the copy then not be run (ETXTBSY).
        let copied = Command::new("install").args(["-m", "755"]).args([program, &path]).status();
        assert!(copied.is_ok_and(|status| status.success()), "copy {} for another user", program.display());
        Program { path, _copy: Some(folder) }
    }

    /// A command that runs `program` as this user.
    #[must_use]
    pub fn command(self, program: &Program) -> Command {
        let mut command = Command::new(&program.path);
        if let Self::Uid(uid) = self {
            // Dropping the groups comes with it: setgroups(2) to none, when it is root who asks.
            command.uid(uid).gid(uid);
        }
        command
    }
}

/// Whether every folder above a file lets everyone through, and the file itself everyone run it.
fn is_open_to_all(file: &Path) -> bool {
    let runs = |path: &Path| std::fs::metadata(path).is_ok_and(|found| found.permissions().mode() & 0o001 != 0);
    file.ancestors().filter(|path| !path.as_os_str().is_empty()).all(runs)
}

/// Runs `test`, the body of the test `name`, where processes of any uid can be started: here when this is root, else in
/// a user namespace that maps the user's subordinate uids (subuid(5)), by running this test program again in it.
///
/// # Panics
/// When neither is possible, naming what to install.
pub fn as_root_of_a_user_namespace(name: &str, test: impl FnOnce()) {
    if rustix::process::geteuid().is_root() {
        return test();
    }
    assert!(std::env::var_os(MARK).is_none(), "unshare(1) gave no root");
    let this = std::env::current_exe().expect("a running program has a path");
    let mut unshare = Command::new("unshare");
    unshare.args(["--user", "--map-root-user", "--map-auto", "--"]).arg(this).args(["--exact", name, "--nocapture"]);
    let output = unshare.env(MARK, "1").output();
    let output = output.unwrap_or_else(|error| fail(format_args!("unshare of package util-linux: {error}")));
    assert!(
        output.status.success(),
        "{name} in a user namespace of its own: {}. It needs two uids: run it as root, or install the package uidmap and \
         give this user a range in /etc/subuid and /etc/subgid\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_in_a_closed_folder_is_copied_for_others_and_the_copy_goes_away() {
        let closed = tempfile::tempdir().expect("a folder that is closed to others");
        let program = closed.path().join("program");
        std::fs::write(&program, "#!/bin/sh\n").expect("write a program");
        assert_eq!(User::Own.program(&program).path, program);
        let copy = User::Uid(1001).program(&program);
        assert!(copy.path != program && is_open_to_all(&copy.path));
        let path = copy.path.clone();
        drop(copy);
        assert!(!path.exists());
        assert_eq!(User::Uid(1001).program(Path::new("/bin/sh")).path, Path::new("/bin/sh"));
    }
}
