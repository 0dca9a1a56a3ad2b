//! Descriptors that the client library keeps to itself, reached as any process can reach its own: by `/proc/self/fd`
//! and pidfd_getfd(2).

use std::io::Read as _;
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Command, Stdio};

use anyhow::Context as _;
use rustix::net::SocketType;
use rustix::net::sockopt::socket_type;
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};

/// Argument of a process that only holds its stdin.
pub(crate) const HOLD: &str = "--hold";

/// Duplicates of this process's descriptors whose link in `/proc/self/fd` starts with `kind`.
pub(crate) fn own(kind: &str) -> anyhow::Result<Vec<OwnedFd>> {
    let this = pidfd_open(getpid(), PidfdFlags::empty())?;
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc/self/fd")? {
        let entry = entry?;
        // The descriptor of this very listing is gone by now.
        let Ok(link) = std::fs::read_link(entry.path()) else { continue };
        if link.to_string_lossy().starts_with(kind) {
            let number: i32 = entry.file_name().to_string_lossy().parse()?;
            found.push(pidfd_getfd(&this, number, PidfdGetfdFlags::empty())?);
        }
    }
    Ok(found)
}

/// Starts a child that inherits the session socket, as a forked worker does, and lives until it is killed.
pub(crate) fn start_holder() -> anyhow::Result<u32> {
    let sockets = own("socket:")?;
    let session =
        sockets.into_iter().find(|fd| socket_type(fd.as_fd()).is_ok_and(|kind| kind == SocketType::SEQPACKET));
    let session = session.context("this process has no session socket")?;
    let child = Command::new(std::env::current_exe()?)
        .arg(HOLD)
        .stdin(session)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let pid = child.id();
    // Its first byte says that it runs, with the socket open.
    let mut stdout = child.stdout.context("stdout was asked for as a pipe")?;
    stdout.read_exact(&mut [0])?;
    Ok(pid)
}

/// The holder: says that it runs, then stands still until it is killed.
pub(crate) fn hold() -> anyhow::Result<()> {
    use std::io::Write as _;
    std::io::stdout().write_all(b".")?;
    std::io::stdout().flush()?;
    loop {
        std::thread::park();
    }
}

/// Host memory of this process.
pub(crate) fn memfd(len_bytes: u64) -> anyhow::Result<OwnedFd> {
    let flags = rustix::fs::MemfdFlags::CLOEXEC | rustix::fs::MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("puppet", flags)?;
    rustix::fs::ftruncate(&fd, len_bytes)?;
    Ok(fd)
}
