//! Whether this process is a forked child of the one that made an object: one load, no system call.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::error::ShmError;

/// One page of the least length there is.
const PAGE_BYTES: usize = 4096;
const OURS: u64 = 1;

/// A word that reads as set in the process that made it and in none of its children, since the kernel gives each child
/// a page of zeros in its place (`MADV_WIPEONFORK`, madvise(2), Linux 4.14).
#[derive(Debug)]
pub struct ForkMark {
    page: NonNull<AtomicU64>,
}

// SAFETY: the page belongs to this value until its drop, and is reached through an atomic only.
unsafe impl Send for ForkMark {}
// SAFETY: as for Send.
unsafe impl Sync for ForkMark {}

impl ForkMark {
    /// Marks this process.
    ///
    /// # Errors
    /// [`ShmError::Kernel`] when the kernel has no page, or does not know the advice.
    pub fn new() -> Result<Self, ShmError> {
        let refused = |call| move |source| ShmError::Kernel { call, len_bytes: PAGE_BYTES as u64, source };
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at a place of the kernel's choice touches no memory of this process.
        let page = unsafe { mmap_anonymous(std::ptr::null_mut(), PAGE_BYTES, protection, MapFlags::PRIVATE) }
            .map_err(refused("mmap"))?;
        let mark = Self { page: NonNull::new(page.cast()).ok_or_else(|| refused("mmap")(rustix::io::Errno::NOMEM))? };
        // SAFETY: the range is the page just mapped, which nothing refers to yet; the advice changes only what a child
        // sees of it.
        unsafe { madvise(page, PAGE_BYTES, Advice::LinuxWipeOnFork) }.map_err(refused("madvise(MADV_WIPEONFORK)"))?;
        mark.word().store(OURS, Ordering::Relaxed);
        Ok(mark)
    }

    /// Whether this process made the mark.
    #[must_use]
    #[inline]
    pub fn is_ours(&self) -> bool {
        self.word().load(Ordering::Relaxed) == OURS
    }

    /// Takes the mark away, as the kernel does for a child: for tests of what a child may do.
    #[doc(hidden)]
    pub fn wipe(&self) {
        self.word().store(0, Ordering::Relaxed);
    }

    fn word(&self) -> &AtomicU64 {
        // SAFETY: the page is mapped until the drop, aligned to more than the word needs, zeroed by the kernel and thus
        // a valid value, and nothing else refers to it.
        unsafe { self.page.as_ref() }
    }
}

impl Drop for ForkMark {
    fn drop(&mut self) {
        // SAFETY: the page was mapped by `new` at this length, and no reference to it outlives this value.
        let unmapped = unsafe { munmap(self.page.as_ptr().cast(), PAGE_BYTES) };
        // The only errors are those of a range that is none (munmap(2)).
        debug_assert!(unmapped.is_ok(), "{unmapped:?}");
    }
}

#[cfg(test)]
mod tests {
    use nix::sys::wait::{WaitStatus, waitpid};
    use nix::unistd::{ForkResult, fork};

    use super::*;

    #[test]
    fn a_mark_is_not_a_forked_childs() {
        let mark = ForkMark::new().unwrap();
        assert!(mark.is_ours());
        // SAFETY: the child loads one word and exits, both of which a child of a process with threads may do
        // (signal-safety(7)).
        let child = match unsafe { fork() }.unwrap() {
            // SAFETY: as above; it runs no destructor of the parent's.
            ForkResult::Child => unsafe { nix::libc::_exit(i32::from(mark.is_ours())) },
            ForkResult::Parent { child } => child,
        };
        assert_eq!(waitpid(child, None).unwrap(), WaitStatus::Exited(child, 0));
        assert!(mark.is_ours());
    }
}
