//! Host buffers: sealed memfds, of huge pages where there are any, on the NUMA node that is asked for.
//!
//! The daemon never maps them, but to scrub huge pages, which cannot be written otherwise. What it hands out is a second
//! file description: on one that a client shares, the client could set O_APPEND and so make every pwrite(2) of a scrub fail.

use std::io::IoSlice;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use gdrd_shm::{NodeRule, Seals, ShmError, add_seals, on_node, zero_by_kernel};
use rustix::fs::{FallocateFlags, MemfdFlags, Mode, OFlags, SeekFrom};
use rustix::io::Errno;

use crate::config::HugePages;

/// Name of the memfds.
pub(super) const NAME: &str = "gdrd-host";
/// Zeros that a scrub writes, many times a call.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];
/// Slices of [`ZEROS`] in one pwritev(2).
const SCRUB_SLICES: usize = 64;
/// Huge pages that are tried, longest first (memfd_create(2), MFD_HUGE_1GB and MFD_HUGE_2MB).
const HUGE: [(u64, MemfdFlags); 2] = [(1 << 30, MemfdFlags::HUGE_1GB), (2 << 20, MemfdFlags::HUGE_2MB)];
/// `HUGETLBFS_MAGIC` (include/uapi/linux/magic.h).
const HUGETLBFS: u64 = 0x9584_58f6;

/// Where pages come from.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pages {
    /// NUMA node; huge pages come from no other one, ordinary ones from others when it is full.
    pub(crate) node: Option<u32>,
    pub(crate) huge: HugePages,
}

/// Why there is no host buffer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HostMemoryError {
    #[error("host buffer: {0}")]
    System(#[from] Errno),
    #[error(
        "host buffer of {len_bytes} bytes: pool.host_huge_pages is require, and none of 2 MiB or 1 GiB are free {place}; reserve some (vm.nr_hugepages) or set it to try"
    )]
    NoHugePages { len_bytes: u64, place: String },
}

/// One host buffer.
#[derive(Debug)]
pub(crate) struct HostMemory {
    /// Never leaves the process.
    own: OwnedFd,
    shared: OwnedFd,
    len_bytes: u64,
    is_huge: bool,
}

impl HostMemory {
    /// A zeroed buffer.
    pub(crate) fn allocate(len_bytes: u64, pages: Pages) -> Result<Self, HostMemoryError> {
        if pages.huge != HugePages::Off {
            let fitting = HUGE.into_iter().filter(|(page, _)| len_bytes > 0 && len_bytes.is_multiple_of(*page));
            if let Some(own) = fitting.filter_map(|(_, size)| huge(len_bytes, size, pages.node).ok()).next() {
                return Ok(Self::over(own, len_bytes)?);
            }
            // Shorter ones never are.
            if pages.huge == HugePages::Require && len_bytes >= HUGE[1].0 {
                let place = pages.node.map_or("on any NUMA node".to_owned(), |node| format!("on NUMA node {node}"));
                return Err(HostMemoryError::NoHugePages { len_bytes, place });
            }
        }
        let memory = Self::ordinary(len_bytes)?;
        if let Some(node) = pages.node {
            match on_node(node, NodeRule::First, || populate(&memory.own, len_bytes)) {
                Ok(populated) => populated?,
                // Then they come with the first touch, from wherever.
                Err(error) => tracing::debug!(node, %error, "host buffer is bound to no node"),
            }
        }
        Ok(memory)
    }

    /// One of ordinary pages, which come with the first touch. It can be read and written by its descriptor.
    pub(crate) fn ordinary(len_bytes: u64) -> Result<Self, Errno> {
        Self::over(sealed(len_bytes, MemfdFlags::empty())?, len_bytes)
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
        let is_huge = u64::try_from(rustix::fs::fstatfs(&own)?.f_type) == Ok(HUGETLBFS);
        Ok(Self { own, shared, len_bytes, is_huge })
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
        if self.is_huge {
            return zero_by_kernel(self.own.as_fd(), self.len_bytes).map_err(|error| errno_of(&error));
        }
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

fn sealed(len_bytes: u64, flags: MemfdFlags) -> Result<OwnedFd, Errno> {
    let fd = rustix::fs::memfd_create(NAME, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | flags)?;
    rustix::fs::ftruncate(&fd, len_bytes)?;
    add_seals(&fd, Seals::SHRINK | Seals::GROW | Seals::SEAL).map_err(|error| errno_of(&error))?;
    Ok(fd)
}

/// All of its pages at once: one that is missing later would be SIGBUS for whoever touches it.
fn huge(len_bytes: u64, size: MemfdFlags, node: Option<u32>) -> Result<OwnedFd, Errno> {
    let fd = sealed(len_bytes, MemfdFlags::HUGETLB | size)?;
    match node {
        Some(node) => {
            on_node(node, NodeRule::Only, || populate(&fd, len_bytes)).map_err(|error| errno_of(&error))??
        }
        None => populate(&fd, len_bytes)?,
    }
    Ok(fd)
}

fn populate(fd: &OwnedFd, len_bytes: u64) -> Result<(), Errno> {
    rustix::io::retry_on_intr(|| rustix::fs::fallocate(fd, FallocateFlags::empty(), 0, len_bytes))
}

fn errno_of(error: &ShmError) -> Errno {
    match error {
        ShmError::Kernel { source, .. } => *source,
        _ => Errno::INVAL,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn huge_pages_that_are_required_and_not_there_are_refused_with_the_remedy() {
        // Longer than the pool of any machine, and a length of no huge page.
        let pages = Pages { node: None, huge: HugePages::Require };
        let refused = HostMemory::allocate(1 << 60, pages).unwrap_err().to_string();
        assert!(refused.contains("vm.nr_hugepages") && refused.contains("any NUMA node"), "{refused}");
        assert_eq!(HostMemory::allocate(MIB, pages).unwrap().len_bytes(), MIB);
    }

    #[test]
    fn memory_asked_for_on_a_node_is_there_at_once_or_comes_from_wherever() {
        for node in [0, 4000] {
            let memory = HostMemory::allocate(4 * MIB, Pages { node: Some(node), huge: HugePages::Try }).unwrap();
            let blocks = rustix::fs::fstat(memory.own_fd()).unwrap().st_blocks;
            assert!(node != 0 || blocks == 0 || blocks * 512 >= 4 << 20, "all of it or none");
            assert_eq!(memory.scrub(), Ok(()));
        }
    }

    #[test]
    fn a_scrub_zeroes_what_was_written_through_the_shared_descriptor() {
        let memory = HostMemory::ordinary(256 << 10).unwrap();
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
        let memory = HostMemory::ordinary(64 << 10).unwrap();
        assert_eq!(rustix::fs::ftruncate(memory.shared_fd(), 0), Err(Errno::PERM));
        assert_eq!(rustix::fs::ftruncate(memory.shared_fd(), 1 << 20), Err(Errno::PERM));
    }
}
