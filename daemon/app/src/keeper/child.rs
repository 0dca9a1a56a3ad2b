//! Starting the daemon with kept descriptors at the numbers that sd_listen_fds(3) wants.
//!
//! A process that has nothing open but its standard streams gets received descriptors at 3 and up, one after the other
//! (the lowest free number, fcntl(2) and unix(7)). So the keeper starts such a one from its own binary and sends them; it
//! checks the numbers, states its own pid, and becomes the daemon.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, IntoRawFd as _, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};

use anyhow::{Context, bail, ensure};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use rustix::process::{Signal, set_parent_process_death_signal};
use tokio::process::Child;

use super::Store;

/// SD_LISTEN_FDS_START of sd_listen_fds(3).
const FIRST_FD: i32 = 3;
/// Descriptors of one packet: below SCM_MAX_FD of unix(7), and their names below 2 KiB.
const BATCH: usize = 250;
const MAX_NAMES_BYTES: usize = 2048;

/// Starts the daemon with what the store has.
pub(super) async fn start(arguments: &[OsString], store: &Store) -> anyhow::Result<Child> {
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    let program = std::env::current_exe().context("find the daemon's program")?;
    let mut command = tokio::process::Command::new(program);
    command.arg("keeper-child").arg("--").args(arguments).stdin(Stdio::from(theirs));
    command.env("NOTIFY_SOCKET", store.address()).env("FDSTORE", store.most().to_string());
    for variable in ["LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PID", "WATCHDOG_USEC", "WATCHDOG_PID"] {
        command.env_remove(variable);
    }
    let child = command.spawn().context("start it")?;
    drop(command);
    let kept =
        store.kept().map(|(name, fd)| Ok((name.to_string(), fd.try_clone()?))).collect::<io::Result<Vec<_>>>()?;
    // The socket holds less than all of them, and the other end reads when it is there.
    tokio::task::spawn_blocking(move || send_all(&ours, &kept)).await?.context("hand it what is kept")?;
    Ok(child)
}

fn send_all(socket: &OwnedFd, kept: &[(String, OwnedFd)]) -> io::Result<()> {
    for batch in kept.chunks(BATCH) {
        let names: Vec<&str> = batch.iter().map(|(name, _)| name.as_str()).collect();
        let fds: Vec<BorrowedFd<'_>> = batch.iter().map(|(_, fd)| fd.as_fd()).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(BATCH))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !control.push(SendAncillaryMessage::ScmRights(&fds)) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        sendmsg(socket, &[IoSlice::new(names.join(":").as_bytes())], &mut control, SendFlags::NOSIGNAL)?;
    }
    Ok(())
}

/// The other end: takes what the keeper sends on standard input, and becomes the daemon. Returns only if it cannot.
pub(crate) fn become_daemon(arguments: &[OsString]) -> anyhow::Result<()> {
    // A daemon whose descriptors nobody keeps any more would not know.
    set_parent_process_death_signal(Some(Signal::TERM)).context("end with the keeper")?;
    close_inherited().context("close what was inherited")?;
    let mut names = Vec::new();
    while let Some(batch) = receive(names.len())? {
        names.extend(batch);
    }
    rustix::stdio::dup2_stdin(File::open("/dev/null").context("open /dev/null")?)
        .context("close the keeper's socket")?;
    let program = std::env::current_exe().context("find the daemon's program")?;
    let mut command = Command::new(program);
    command.args(arguments);
    if !names.is_empty() {
        command.env("LISTEN_FDS", names.len().to_string()).env("LISTEN_FDNAMES", names.join(":"));
        command.env("LISTEN_PID", std::process::id().to_string());
    }
    Err(command.exec()).context("become the daemon")
}

/// What whoever started the keeper left open would be in the way of the numbers, and would stay open in the daemon.
fn close_inherited() -> anyhow::Result<()> {
    let mut open = Vec::new();
    for entry in std::fs::read_dir("/proc/self/fd")? {
        open.extend(entry?.file_name().to_str().and_then(|name| name.parse::<i32>().ok()));
    }
    for fd in open.into_iter().filter(|fd| *fd >= FIRST_FD) {
        // EBADF: that of the listing itself. Nothing of this process is open yet but the standard streams.
        let _ = nix::unistd::close(fd);
    }
    Ok(())
}

/// Names of the next descriptors, which are left open at the numbers that follow; `None` after the last.
fn receive(had: usize) -> anyhow::Result<Option<Vec<String>>> {
    let mut bytes = [0; MAX_NAMES_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(BATCH))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let socket = rustix::stdio::stdin();
    let received = recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::empty())?;
    if received.bytes == 0 {
        return Ok(None);
    }
    ensure!(!received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC), "a packet of the keeper was cut");
    let text = std::str::from_utf8(bytes.get(..received.bytes).unwrap_or_default())?;
    let names: Vec<String> = text.split(':').map(str::to_owned).collect();
    let mut next = i32::try_from(had)? + FIRST_FD;
    for message in control.drain() {
        let RecvAncillaryMessage::ScmRights(rights) = message else { continue };
        for fd in rights {
            let number = fd.into_raw_fd();
            if number != next {
                bail!("descriptor {number} came where {next} was expected");
            }
            next += 1;
        }
    }
    ensure!(usize::try_from(next - FIRST_FD)? == had + names.len(), "names and descriptors differ in number");
    Ok(Some(names))
}
