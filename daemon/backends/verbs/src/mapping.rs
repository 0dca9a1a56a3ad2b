//! A range of a sealed memfd in this process, for as long as a device may reach it.
//!
//! The bytes are never touched here: the mapping gives the driver pages to pin.

use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};

use rustix::fs::{SealFlags, fcntl_get_seals, fstat};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// Why memory cannot be mapped for a device.
#[derive(Debug)]
pub(crate) enum MapError {
    /// The caller gave the wrong memory or range.
    Invalid(String),
    /// mmap(2) failed with this errno.
    System(i32),
}

/// A shared mapping; unmapped on drop.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<std::ffi::c_void>,
    mapped_bytes: usize,
    /// From the start of the mapping to the first byte asked for.
    lead_bytes: usize,
}

// SAFETY: the mapping is plain shared memory of the process (mmap(2)); no thread owns it, and this type never reads or
// writes it.
unsafe impl Send for Mapping {}
// SAFETY: as for Send; all methods that take a shared reference only give the address.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len_bytes` from `offset` on of a memfd that cannot shrink.
    ///
    /// # Errors
    /// `Invalid` for anything that is no such memfd, an empty range or one past its end; `System`.
    pub(crate) fn new(fd: BorrowedFd<'_>, offset: u64, len_bytes: u64) -> Result<Self, MapError> {
        let page = check(fd, offset, len_bytes)?;
        let lead = offset % page;
        let mapped = len_bytes.checked_add(lead).and_then(|bytes| bytes.checked_next_multiple_of(page));
        let (Some(Ok(mapped_bytes)), Ok(lead_bytes)) = (mapped.map(usize::try_from), usize::try_from(lead)) else {
            return Err(MapError::Invalid(format!("{len_bytes} bytes do not fit the address space")));
        };
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel picks the address, so no mapping of this process is replaced; length is positive and the
        // offset a multiple of the file's page size, both computed above. The memory is only ever given to the driver.
        let base = unsafe { mmap(ptr::null_mut(), mapped_bytes, protection, MapFlags::SHARED, fd, offset - lead) };
        let base = base.map_err(|errno| MapError::System(errno.raw_os_error()))?;
        let base = NonNull::new(base).ok_or_else(|| MapError::Invalid("the kernel mapped at address 0".to_owned()))?;
        Ok(Self { base, mapped_bytes, lead_bytes })
    }

    /// Address of the first byte asked for.
    pub(crate) fn address(&self) -> *mut std::ffi::c_void {
        self.base.as_ptr().wrapping_byte_add(self.lead_bytes)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: base and length are those of the mmap in `new`, unmapped here only, and no reference into the memory
        // exists as none is ever made. Pages that a device still holds stay pinned by the kernel.
        let unmapped = unsafe { munmap(self.base.as_ptr(), self.mapped_bytes) };
        debug_assert!(unmapped.is_ok(), "munmap of a mapping of ours");
    }
}

/// The page size of the memfd behind `fd`, if the range lies in it.
fn check(fd: BorrowedFd<'_>, offset: u64, len_bytes: u64) -> Result<u64, MapError> {
    let invalid = |reason: String| Err(MapError::Invalid(reason));
    // Only memfds and files of hugetlbfs and tmpfs have seals (fcntl(2), F_GET_SEALS).
    match fcntl_get_seals(fd) {
        Ok(seals) if seals.contains(SealFlags::SHRINK) => {}
        Ok(_) => return invalid("the memfd has no F_SEAL_SHRINK: its pages could vanish".to_owned()),
        Err(_) => return invalid("the fd is no memfd".to_owned()),
    }
    let stat = fstat(fd).map_err(|errno| MapError::System(errno.raw_os_error()))?;
    let size = u64::try_from(stat.st_size).unwrap_or(0);
    let end = offset.checked_add(len_bytes);
    if len_bytes == 0 || end.is_none_or(|end| end > size) {
        return invalid(format!("{len_bytes} bytes at {offset} are not inside of the memfd's {size} bytes"));
    }
    // st_blksize is the huge page size on hugetlbfs, where offsets of mmap(2) are multiples of it.
    let page = u64::try_from(rustix::param::page_size()).unwrap_or(4096);
    Ok(u64::try_from(stat.st_blksize).ok().filter(|block| block.is_power_of_two()).unwrap_or(page).max(page))
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, OwnedFd};

    use rustix::fs::{MemfdFlags, fcntl_add_seals, ftruncate, memfd_create};

    use super::*;

    fn memfd(len_bytes: u64, seals: SealFlags) -> OwnedFd {
        let fd = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("a memfd can be made");
        ftruncate(&fd, len_bytes).expect("a memfd can be grown");
        fcntl_add_seals(&fd, seals).expect("a fresh memfd takes seals");
        fd
    }

    #[test]
    fn range_inside_a_sealed_memfd_is_mapped_at_its_place_in_the_page() {
        let fd = memfd(16_384, SealFlags::SHRINK);
        let mapping = Mapping::new(fd.as_fd(), 4096 + 512, 8192).expect("a good range");
        assert_eq!(mapping.address().addr() % 4096, 512);
    }

    #[test]
    fn memory_that_could_vanish_and_ranges_outside_are_refused() {
        let open = memfd(4096, SealFlags::GROW);
        assert!(matches!(Mapping::new(open.as_fd(), 0, 4096), Err(MapError::Invalid(_))));
        let sealed = memfd(4096, SealFlags::SHRINK);
        for (offset, len_bytes) in [(0, 0), (0, 4097), (4096, 1), (u64::MAX, 1), (1, u64::MAX)] {
            assert!(matches!(Mapping::new(sealed.as_fd(), offset, len_bytes), Err(MapError::Invalid(_))), "{offset}");
        }
        let (reader, _writer) = std::io::pipe().expect("a pipe can be made");
        assert!(matches!(Mapping::new(reader.as_fd(), 0, 1), Err(MapError::Invalid(_))));
    }
}
