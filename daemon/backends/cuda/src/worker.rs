//! The worker's loop: one request, one answer, until the daemon hangs up, nothing comes for a while, or the device is
//! spoilt.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use gdrd_hal::GpuAtomic;
use rustix::io::Errno;

use crate::device::{Device, DeviceError, DeviceErrorKind};
use crate::protocol::{Atomic, ReceiveError, Reply, Request, receive, send};

/// Why a worker ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum End {
    /// The daemon closed the socket.
    HungUp,
    /// Nothing was asked for the idle time.
    Idle,
    /// The device cannot be used any more, or could not at all.
    Spoilt(DeviceError),
    /// The socket failed, or the daemon spoke nonsense.
    Broken(String),
}

/// Serves the device that `open` gives on `socket`. `staging` is the fd of its staging segment.
///
/// Returns when the worker is to end; its process should exit then, which lets go of the device files.
pub fn serve<D: Device>(
    socket: BorrowedFd<'_>,
    idle: Duration,
    open: impl FnOnce() -> Result<(D, OwnedFd), DeviceError>,
) -> End {
    let (mut device, staging) = match open() {
        Ok(opened) => opened,
        Err(error) => {
            // Nobody to tell: the daemon sees the end of the stream.
            let _ = send(socket, &Reply::Failed { error: error.clone(), free_bytes: 0 }, &[]);
            return End::Spoilt(error);
        }
    };
    if let Err(errno) = send(socket, &Reply::Ready { facts: device.facts() }, &[staging.as_fd()]) {
        return broken(errno);
    }
    drop(staging);
    // A worker is started for a call: the first one always comes, or the end of the stream does.
    let mut patience = None;
    loop {
        let (request, fds) = match receive::<Request>(socket, patience) {
            Ok(received) => received,
            Err(ReceiveError::Timeout(_)) => {
                return send(socket, &Reply::Bye, &[]).map_or_else(broken, |()| End::Idle);
            }
            Err(ReceiveError::Ended) => return End::HungUp,
            Err(error) => return End::Broken(error.to_string()),
        };
        if let Err(end) = answer(socket, &mut device, request, fds) {
            return end;
        }
        patience = Some(idle);
    }
}

fn broken(errno: Errno) -> End {
    match errno {
        Errno::PIPE | Errno::CONNRESET => End::HungUp,
        errno => End::Broken(errno.to_string()),
    }
}

fn answer<D: Device>(socket: BorrowedFd<'_>, device: &mut D, request: Request, fds: Vec<OwnedFd>) -> Result<(), End> {
    let mut exported = Vec::new();
    let result = carry_out(device, request, fds, &mut exported);
    let spoilt = match &result {
        Err(error) if matches!(error.kind, DeviceErrorKind::Sticky | DeviceErrorKind::Lost) => Some(error.clone()),
        _ => None,
    };
    let reply = result.unwrap_or_else(|error| {
        let free = if error.kind == DeviceErrorKind::OutOfMemory { device.memory().ok() } else { None };
        Reply::Failed { error, free_bytes: free.map_or(0, |memory| memory.free_bytes) }
    });
    let fds: Vec<_> = exported.iter().map(AsFd::as_fd).collect();
    send(socket, &reply, &fds).map_err(broken)?;
    spoilt.map_or(Ok(()), |error| Err(End::Spoilt(error)))
}

fn carry_out<D: Device>(
    device: &mut D,
    request: Request,
    fds: Vec<OwnedFd>,
    exported: &mut Vec<OwnedFd>,
) -> Result<Reply, DeviceError> {
    match request {
        Request::Memory => device.memory().map(Reply::Memory),
        Request::Allocate { len_bytes } => {
            let made = device.allocate(len_bytes)?;
            exported.push(made.memory);
            exported.extend(made.dma_buf);
            Ok(Reply::Allocated { id: made.id })
        }
        Request::Import { len_bytes } => {
            let memory = fds.first().ok_or_else(|| DeviceError::refused("import", "no fd came with the request"))?;
            device.import(memory.as_fd(), len_bytes).map(|id| Reply::Imported { id })
        }
        Request::Scrub { id } => device.scrub(id).map(|()| Reply::Done),
        Request::Copy { from, to, len_bytes } => device.copy(from, to, len_bytes).map(|()| Reply::Done),
        Request::Atomic { id, offset, operation } => {
            let operation = match operation {
                Atomic::FetchAdd { operand } => GpuAtomic::FetchAdd { operand },
                Atomic::CompareSwap { compare, operand } => GpuAtomic::CompareSwap { compare, operand },
            };
            device.atomic(id, offset, operation).map(Reply::Old)
        }
        Request::Forget { id } => {
            device.forget(id);
            Ok(Reply::Done)
        }
    }
}
