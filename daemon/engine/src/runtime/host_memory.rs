//! Host buffers: sealed memfds.
//!
//! The daemon never maps them. What it hands out is a second file description: on one that a client
//! shares, the client could set O_APPEND and so make every pwrite(2) of a scrub fail.

use std::io::IoSlice;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use gdrd_shm::{Seals, add_seals};
use rustix::fs::{MemfdFlags, Mode, OFlags, SeekFrom};
use rustix::io::Errno;

/// Name of the memfds.
pub(super) const NAME: &str = "gdrd-host";
/// Zeros that a scrub writes, many times a call.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];
/// Slices of [`ZEROS`] in one pwritev(2).
const SCRUB_SLICES: usize = 64;

/// One host buffer.
#[derive(Debug)]
pub(crate) struct HostMemory {
    /// Never leaves the process.
    own: OwnedFd,
    shared: OwnedFd,
    len_bytes: u64,
}

impl HostMemory {
    /// A zeroed buffer. Pages come with the first touch, on the node of who touches them.
    pub(crate) fn allocate(len_bytes: u64) -> Result<Self, Errno> {
        let own = rustix::fs::memfd_create(NAME, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&own, len_bytes)?;
        add_seals(&own, Seals::SHRINK | Seals::GROW | Seals::SEAL).map_err(|_| Errno::IO)?;
        Self::over(own, len_bytes)
    }

    /// Goes on with one that an earlier daemon made, by the description that never left it.
    pub(super) fn adopt(own: OwnedFd, len_bytes: u64) -> Result<Self, Errno> {
        let sealed = gdrd_shm::seals(&own).is_ok_and(|seals| seals.contains(Seals::SHRINK));
        let found = rustix::fs::fstat(&own)?.st_size;
        if !sealed || u64::try_from(found) != Ok(len_bytes) {
            return Err(Errno::INVAL);
        }
        Self::over(own, len_bytes)
    }

    fn over(own: OwnedFd, len_bytes: u64) -> Result<Self, Errno> {
        let path = format!("/proc/self/fd/{}", own.as_raw_fd());
        let shared = rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        Ok(Self { own, shared, len_bytes })
    }

    pub(super) fn shared_fd(&self) -> BorrowedFd<'_> {
        self.shared.as_fd()
    }

    pub(crate) fn own_fd(&self) -> BorrowedFd<'_> {
        self.own.as_fd()
    }

    pub(crate) fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Zeroes every page that exists. A hole punched instead would be no scrub: a live registration keeps its pages.
    pub(super) fn scrub(&self) -> Result<(), Errno> {
        let mut at = 0;
        while at < self.len_bytes {
            let start = match rustix::fs::seek(&self.own, SeekFrom::Data(at)) {
                Ok(start) => start,
                // No page up to the end, lseek(2).
                Err(Errno::NXIO) => return Ok(()),
                Err(errno) => return Err(errno),
            };
            let end = rustix::fs::seek(&self.own, SeekFrom::Hole(start))?;
            self.write_zeros(start, end)?;
            at = end;
        }
        Ok(())
    }

    fn write_zeros(&self, mut at: u64, end: u64) -> Result<(), Errno> {
        while at < end {
            let mut slices = [IoSlice::new(&[]); SCRUB_SLICES];
            let mut left = end - at;
            for slice in &mut slices {
                let len = usize::try_from(left).unwrap_or(usize::MAX).min(ZEROS.len());
                *slice = IoSlice::new(ZEROS.get(..len).unwrap_or_default());
                left -= len as u64;
            }
            at += rustix::io::pwritev(&self.own, &slices, at)? as u64;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scrub_zeroes_what_was_written_through_the_shared_descriptor() {
        let memory = HostMemory::allocate(256 << 10).unwrap();
        rustix::io::pwrite(memory.shared_fd(), &[7; 5000], 100_000).unwrap();
        // A client may set O_APPEND on the description that it shares.
        rustix::fs::fcntl_setfl(memory.shared_fd(), OFlags::APPEND).unwrap();
        memory.scrub().unwrap();
        let mut read = vec![1; 256 << 10];
        assert_eq!(rustix::io::pread(memory.shared_fd(), &mut read, 0).unwrap(), read.len());
        assert!(read.iter().all(|byte| *byte == 0));
    }

    #[test]
    fn a_client_cannot_resize_it() {
        let memory = HostMemory::allocate(64 << 10).unwrap();
        assert_eq!(rustix::fs::ftruncate(memory.shared_fd(), 0), Err(Errno::PERM));
        assert_eq!(rustix::fs::ftruncate(memory.shared_fd(), 1 << 20), Err(Errno::PERM));
    }
}
