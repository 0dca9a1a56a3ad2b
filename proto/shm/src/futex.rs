//! Sleeping on a word in shared memory, futex(2). Never `FUTEX_PRIVATE`: the other side is another
//! process.

use std::sync::atomic::AtomicU32;
use std::time::Duration;

use rustix::fs::Timespec;
use rustix::io::Errno;
use rustix::thread::futex::{self, Flags};

use crate::error::ShmError;

/// How a wait ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitOutcome {
    /// Woken, interrupted by a signal, or the word had another value already. Look again: a wake
    /// may be spurious, and a peer may wake for nothing.
    Woken,
    /// The time ran out.
    TimedOut,
}

/// Blocks the thread while `word` is `expected`, until [`futex_wake`] on the same memory by any
/// process, or for `timeout` (for ever with `None`).
///
/// # Errors
/// [`ShmError::Kernel`] with what futex(2) answers but `EAGAIN`, `EINTR` and `ETIMEDOUT`.
pub fn futex_wait(word: &AtomicU32, expected: u32, timeout: Option<Duration>) -> Result<WaitOutcome, ShmError> {
    // A timeout longer than the kernel can hold is as good as none.
    let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
    match futex::wait(word, Flags::empty(), expected, timeout.as_ref()) {
        Ok(()) | Err(Errno::AGAIN | Errno::INTR) => Ok(WaitOutcome::Woken),
        Err(Errno::TIMEDOUT) => Ok(WaitOutcome::TimedOut),
        Err(source) => Err(refused("futex(FUTEX_WAIT)", source)),
    }
}

/// Wakes at most `count` threads that wait on `word`, all with `u32::MAX`; returns how many were woken. Never blocks.
///
/// # Errors
/// [`ShmError::Kernel`] with what futex(2) answers.
pub fn futex_wake(word: &AtomicU32, count: u32) -> Result<usize, ShmError> {
    // The kernel reads the count as an int, and a negative one as 1.
    let count = count.min(i32::MAX.unsigned_abs());
    futex::wake(word, Flags::empty(), count).map_err(|source| refused("futex(FUTEX_WAKE)", source))
}

fn refused(call: &'static str, source: Errno) -> ShmError {
    ShmError::Kernel { call, len_bytes: 4, source }
}
