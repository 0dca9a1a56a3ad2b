//! Lines from a pipe, with a bound on the wait.

use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Longest line, bytes: a reply with a small piece of a buffer in hex.
const MAX_LINE_BYTES: usize = 1 << 20;

/// The reading end of a pipe, line by line.
#[derive(Debug)]
pub struct Lines {
    pipe: OwnedFd,
    pending: Vec<u8>,
}

impl Lines {
    /// Lines of `pipe`.
    #[must_use]
    pub fn new(pipe: OwnedFd) -> Self {
        Self { pipe, pending: Vec::new() }
    }

    /// The next line without its end; `None` when the writer is gone.
    ///
    /// # Errors
    /// `TimedOut` after `patience`, `InvalidData` for a line that is too long or no UTF-8, and what read(2) answers.
    pub fn next(&mut self, patience: Duration) -> std::io::Result<Option<String>> {
        let deadline = Instant::now() + patience;
        loop {
            if let Some(end) = self.pending.iter().position(|byte| *byte == b'\n') {
                let mut line: Vec<u8> = self.pending.drain(..=end).collect();
                line.pop();
                return String::from_utf8(line)
                    .map(Some)
                    .map_err(|source| std::io::Error::new(ErrorKind::InvalidData, source));
            }
            if self.pending.len() > MAX_LINE_BYTES {
                return Err(ErrorKind::InvalidData.into());
            }
            if !readable(&self.pipe, deadline)? {
                return Err(ErrorKind::TimedOut.into());
            }
            let mut chunk = [0; 4096];
            let got = rustix::io::read(&self.pipe, &mut chunk)?;
            if got == 0 {
                return Ok(None);
            }
            self.pending.extend_from_slice(chunk.get(..got).unwrap_or_default());
        }
    }
}

/// Waits until there is something to read, or the writer is gone; false after the deadline.
pub(crate) fn readable(fd: &OwnedFd, deadline: Instant) -> std::io::Result<bool> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 });
        let mut fds = [PollFd::new(fd, PollFlags::IN)];
        match poll(&mut fds, Some(&timeout)) {
            Ok(0) if left.is_zero() => return Ok(false),
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            Ok(_) => return Ok(true),
            Err(errno) => return Err(errno.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_whole_and_the_end_is_none() {
        let (read, write) = rustix::pipe::pipe().unwrap();
        let mut lines = Lines::new(read);
        rustix::io::write(&write, b"first\nsec").unwrap();
        assert_eq!(lines.next(Duration::from_secs(60)).unwrap().as_deref(), Some("first"));
        let late = lines.next(Duration::ZERO).unwrap_err();
        assert_eq!(late.kind(), ErrorKind::TimedOut);
        rustix::io::write(&write, b"ond\n").unwrap();
        assert_eq!(lines.next(Duration::from_secs(60)).unwrap().as_deref(), Some("second"));
        drop(write);
        assert_eq!(lines.next(Duration::from_secs(60)).unwrap(), None);
    }
}
