//! The staging segment of a worker: a memfd through which bytes pass between the device and the daemon, which reads and
//! writes it as a file.

use std::ffi::c_void;
use std::os::fd::OwnedFd;
use std::ptr::null_mut;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// Its length, bytes: long enough that the way to the worker does not show in a large copy.
pub(crate) const STAGING_BYTES: usize = 4 << 20;

/// The worker's mapping; ends on drop.
#[derive(Debug)]
pub struct Staging {
    start: *mut c_void,
}

impl Staging {
    /// Makes a segment, and the fd for the daemon.
    ///
    /// # Errors
    /// The errno of memfd_create(2), ftruncate(2), fcntl(2) or mmap(2).
    pub fn create() -> Result<(Self, OwnedFd), Errno> {
        let fd = rustix::fs::memfd_create("gdrd-staging", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&fd, STAGING_BYTES as u64)?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        // SAFETY: a new mapping at an address of the kernel's choice replaces none (mmap(2)); the file has the length
        // and is sealed against shrinking, so that no access to the mapping can fault.
        let start =
            unsafe { mmap(null_mut(), STAGING_BYTES, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, &fd, 0)? };
        Ok((Self { start }, fd))
    }

    /// Address of the byte at `offset`, if `len_bytes` from there are inside. Valid while `self` lives. The daemon may
    /// change the bytes at any time, so no reference to them may be made.
    pub(crate) fn at(&self, offset: u64, len_bytes: u64) -> Option<*mut c_void> {
        let end = offset.checked_add(len_bytes).and_then(|end| usize::try_from(end).ok())?;
        let offset = usize::try_from(offset).ok()?;
        (end <= STAGING_BYTES).then(|| self.start.wrapping_byte_add(offset))
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // SAFETY: the range is exactly the mapping that `create` made, `self` is its only owner, and addresses of `at`
        // are not used beyond the life of `self`.
        let unmapped = unsafe { munmap(self.start, STAGING_BYTES) };
        debug_assert!(unmapped.is_ok(), "munmap(2) fails for ranges that are none only");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_past_the_end_have_no_address() {
        let (staging, fd) = Staging::create().expect("a memfd can be made");
        let whole = STAGING_BYTES as u64;
        assert!(staging.at(0, whole).is_some() && staging.at(whole, 0).is_some());
        assert!(staging.at(1, whole).is_none() && staging.at(u64::MAX, 2).is_none());
        assert_eq!(rustix::fs::ftruncate(&fd, 1), Err(Errno::PERM));
    }
}
