//! Zeroes where pwrite(2) is not to be had, as on hugetlbfs: through a mapping, but written by the kernel.

use std::os::fd::BorrowedFd;
use std::ptr;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::error::ShmError;

/// One read(2) moves at most so much (MAX_RW_COUNT); kept at a multiple of every huge page.
const MOST_BYTES: usize = 1 << 30;

/// Sets the first `len_bytes` of a memfd to zero. Whoever else has it may punch holes meanwhile: where no page can be had
/// for one, that is an error here. A store of this process would meet SIGBUS instead. Blocks.
///
/// # Errors
/// [`ShmError::Kernel`] with what the system answered, [`ShmError::Length`] for what cannot be mapped.
pub fn zero_by_kernel(fd: BorrowedFd<'_>, len_bytes: u64) -> Result<(), ShmError> {
    let kernel = |call| move |source| ShmError::Kernel { call, len_bytes, source };
    let len = usize::try_from(len_bytes).ok().filter(|len| *len > 0 && isize::try_from(*len).is_ok());
    let len = len.ok_or(ShmError::Length { len_bytes, max_bytes: isize::MAX as u64 })?;
    let zeros = rustix::fs::open("/dev/zero", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
    let zeros = zeros.map_err(kernel("open(/dev/zero)"))?;
    let mapping = Mapping::new(fd, len).map_err(kernel("mmap"))?;
    let mut done = 0;
    while done < len {
        let most = (len - done).min(MOST_BYTES);
        let to = mapping.base.wrapping_byte_add(done);
        // SAFETY: the range lies in the mapping, since `done` + `most` is at most `len`; no reference to its bytes exists, and
        // the kernel answers for what is not there with EFAULT (read(2)).
        let read = unsafe { libc::read(std::os::fd::AsRawFd::as_raw_fd(&zeros), to, most) };
        match usize::try_from(read) {
            // /dev/zero has no end (zero(4)).
            Ok(0) => return Err(kernel("read")(Errno::IO)),
            Ok(count) => done += count,
            Err(_) => {
                let errno = std::io::Error::last_os_error().raw_os_error().unwrap_or(0);
                let errno = Errno::from_raw_os_error(errno);
                if errno != Errno::INTR {
                    return Err(kernel("read")(errno));
                }
            }
        }
    }
    Ok(())
}

struct Mapping {
    base: *mut std::ffi::c_void,
    len: usize,
}

impl Mapping {
    fn new(fd: BorrowedFd<'_>, len: usize) -> Result<Self, Errno> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at a place of the kernel's choice touches no memory of this process.
        let base = unsafe { mmap(ptr::null_mut(), len, protection, MapFlags::SHARED, fd, 0) }?;
        Ok(Self { base, len })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `new`, unmapped here only; no reference into it was ever made.
        let unmapped = unsafe { munmap(self.base, self.len) };
        debug_assert!(unmapped.is_ok(), "munmap of a mapping of ours");
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;

    #[test]
    fn every_byte_is_zero_and_none_past_the_length_is_touched() {
        let fd = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, 12_288).unwrap();
        rustix::io::pwrite(&fd, &[7; 12_288], 0).unwrap();
        zero_by_kernel(fd.as_fd(), 8192).unwrap();
        let mut read = [1; 12_288];
        assert_eq!(rustix::io::pread(&fd, &mut read, 0).unwrap(), read.len());
        assert!(read[..8192].iter().all(|byte| *byte == 0) && read[8192..].iter().all(|byte| *byte == 7));
    }

    #[test]
    fn pages_that_are_not_there_are_an_error_and_no_signal() {
        let fd = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, 4096).unwrap();
        let refused = zero_by_kernel(fd.as_fd(), 8192).unwrap_err();
        assert!(matches!(refused, ShmError::Kernel { call: "read", source: Errno::FAULT, .. }), "{refused:?}");
        assert!(matches!(zero_by_kernel(fd.as_fd(), 0), Err(ShmError::Length { .. })));
    }
}
