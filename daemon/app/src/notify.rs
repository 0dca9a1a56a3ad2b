//! What systemd is told: ready, status, watchdog, stopping (sd_notify(3)). Without NOTIFY_SOCKET nothing is said.

use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::time::Duration;

use rustix::io::retry_on_intr;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, send, socket_with};
use tokio::time::MissedTickBehavior;
use tracing::warn;

/// How long a message may wait for room in the socket's queue.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);

/// The daemon serves.
pub(crate) fn ready(status: &str) {
    tell(&format!("READY=1\nSTATUS={}", one_line(status)));
}

/// The daemon ends.
pub(crate) fn stopping() {
    tell("STOPPING=1\nSTATUS=draining");
}

/// Tells the watchdog that the daemon lives, each time that `alive` has come back; pending for ever where none is set.
pub(crate) async fn watchdog(alive: impl AsyncFn()) {
    let Some(timeout) = sd_notify::watchdog_enabled() else { return std::future::pending().await };
    // Twice in each period, as sd_watchdog_enabled(3) recommends.
    let mut ticks = tokio::time::interval((timeout / 2).max(Duration::from_millis(1)));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        alive().await;
        tell("WATCHDOG=1");
    }
}

/// The socket to whoever started this process, at the address in NOTIFY_SOCKET: a path, or with `@` a name in the
/// abstract namespace, which the sd-notify crate does not know.
///
/// # Errors
/// When nobody listens there.
pub(crate) fn socket(address: &OsStr) -> io::Result<OwnedFd> {
    let address = match address.as_bytes() {
        [b'@', name @ ..] => SocketAddrUnix::new_abstract_name(name)?,
        path => SocketAddrUnix::new(path)?,
    };
    let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    connect(&socket, &address)?;
    // Whoever does not take what is sent, frozen say, holds nothing of this process up for longer.
    set_socket_timeout(&socket, Timeout::Send, Some(SEND_TIMEOUT))?;
    Ok(socket)
}

/// Says something, one assignment a line.
pub(crate) fn tell(message: &str) {
    let Some(address) = std::env::var_os("NOTIFY_SOCKET") else { return };
    let told = socket(&address)
        .and_then(|socket| Ok(retry_on_intr(|| send(&socket, message.as_bytes(), SendFlags::NOSIGNAL))?));
    if let Err(error) = told {
        warn!(%error, "systemd could not be told");
    }
}

fn one_line(text: &str) -> String {
    text.replace('\n', " ")
}
