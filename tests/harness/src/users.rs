//! Real users: two tenants are two uids, which needs root, in the host's user namespace or in one of our own.

use std::os::unix::process::CommandExt as _;
use std::process::Command;

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

impl User {
    pub(crate) fn apply(self, command: &mut Command) {
        if let Self::Uid(uid) = self {
            // Dropping the groups comes with it: setgroups(2) to none, when it is root who asks.
            command.uid(uid).gid(uid);
        }
    }
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
