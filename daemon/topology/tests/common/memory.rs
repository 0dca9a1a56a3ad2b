//! Endless inputs, and what they make the process hold.

use std::io::{self, Read};

/// What all readers must stay below.
pub(crate) const MAX_MEMORY_KB: u64 = 64 << 10;

/// The most memory that this process has had, in kB (`VmHWM`, proc(5)).
pub(crate) fn peak_kb() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches("kB").trim().parse().unwrap()
}

/// Blocks made one by one, as often as asked for.
pub(crate) struct Stream<F> {
    make: F,
    left: usize,
    block: io::Cursor<Vec<u8>>,
}

impl<F: FnMut(usize) -> Vec<u8>> Read for Stream<F> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.block.read(buffer)?;
        if count > 0 || buffer.is_empty() || self.left == 0 {
            return Ok(count);
        }
        self.left -= 1;
        self.block = io::Cursor::new((self.make)(self.left));
        self.block.read(buffer)
    }
}

pub(crate) fn stream<F: FnMut(usize) -> Vec<u8>>(count: usize, make: F) -> Stream<F> {
    Stream { make, left: count, block: io::Cursor::new(Vec::new()) }
}
