//! Puts an owned fd under the runtime's watch.

use std::io;
use std::os::fd::OwnedFd;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Watches `fd` for what `interest` names. Must be called within the runtime.
///
/// # Errors
/// As epoll_ctl(2).
// Deprecated because a type may give another fd at each call of as_raw_fd; an OwnedFd has one for life and nobody
// else closes it, and the replacement is an unsafe call, which this crate must not make.
#[allow(deprecated)]
pub(crate) fn watch(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::with_interest(fd, interest)
}
