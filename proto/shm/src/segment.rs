//! One mapped memfd: made here, or mapped from a foreign descriptor after its seals were checked.

use std::num::NonZeroUsize;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use rustix::fs::MemfdFlags;
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use crate::error::ShmError;
use crate::raw;
use crate::seal::{Seals, add_seals, seals};

/// Longest range that a mapping may have: offsets in it must fit `isize`.
const MAX_LEN_BYTES: u64 = (isize::MAX as u64) & !0xfff;
/// `f_type` of hugetlbfs, linux/magic.h.
const HUGETLBFS_MAGIC: u64 = 0x958458f6;
/// Bounce buffer of a move to a higher, overlapping offset.
const BOUNCE_BYTES: usize = 4096;

/// What a mapping may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Loads only. The one access left on a file with `F_SEAL_FUTURE_WRITE`.
    ReadOnly,
    /// Loads and stores.
    ReadWrite,
}

/// How to make a segment. `F_SEAL_SHRINK` is always set: without it a holder of the descriptor
/// could raise SIGBUS in every other one.
#[derive(Debug, Clone)]
pub struct SegmentOptions {
    len_bytes: u64,
    seals: Seals,
    huge_pages: bool,
    populate: bool,
}

impl SegmentOptions {
    /// A segment of `len_bytes` with the seals SHRINK, GROW and SEAL, in ordinary pages that are
    /// allocated at first touch.
    #[must_use]
    pub fn new(len_bytes: u64) -> Self {
        Self { len_bytes, seals: Seals::SHRINK | Seals::GROW | Seals::SEAL, huge_pages: false, populate: false }
    }

    /// Seals put on the file once it is mapped; SHRINK is added in any case. With `FUTURE_WRITE`
    /// this mapping stays writable, all later ones are read-only (Linux 5.1).
    #[must_use]
    pub fn seals(mut self, seals: Seals) -> Self {
        self.seals = seals;
        self
    }

    /// Takes the pages from the kernel's huge-page pool (default size); the length must be a
    /// multiple of it, and creation fails with `ENOMEM` when the pool is too small.
    #[must_use]
    pub fn huge_pages(mut self, huge_pages: bool) -> Self {
        self.huge_pages = huge_pages;
        self
    }

    /// Allocates all pages now (`MAP_POPULATE`), so that no first touch faults later.
    #[must_use]
    pub fn populate(mut self, populate: bool) -> Self {
        self.populate = populate;
        self
    }

    /// Makes the memfd, maps it for reading and writing, then seals it. `name` is what
    /// `/proc/PID/fd` shows after `/memfd:`.
    ///
    /// # Errors
    /// [`ShmError::Length`] for a length that cannot be mapped, [`ShmError::Kernel`] with what
    /// memfd_create(2), ftruncate(2), mmap(2) or fcntl(2) answered.
    pub fn create(&self, name: &str) -> Result<Segment, ShmError> {
        let len = mappable(self.len_bytes, MAX_LEN_BYTES)?;
        let kernel = |call| move |source| ShmError::Kernel { call, len_bytes: self.len_bytes, source };
        let mut flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        flags.set(MemfdFlags::HUGETLB, self.huge_pages);
        let fd = rustix::fs::memfd_create(name, flags).map_err(kernel("memfd_create"))?;
        rustix::fs::ftruncate(&fd, self.len_bytes).map_err(kernel("ftruncate"))?;
        // SHRINK comes first, so that the mapping below can never outlive its pages.
        add_seals(&fd, Seals::SHRINK)?;
        let segment = map_whole(fd, len, Access::ReadWrite, self.populate)?;
        add_seals(segment.fd(), self.seals)?;
        Ok(segment)
    }
}

/// How to map a foreign descriptor.
#[derive(Debug, Clone)]
pub struct MapOptions {
    access: Access,
    populate: bool,
    huge_pages: bool,
    max_len_bytes: u64,
}

impl MapOptions {
    /// Maps with `access`, ordinary pages only, any length.
    #[must_use]
    pub fn new(access: Access) -> Self {
        Self { access, populate: false, huge_pages: false, max_len_bytes: MAX_LEN_BYTES }
    }

    /// Allocates and maps all pages now. Only for a sender whose length is bounded by other means.
    #[must_use]
    pub fn populate(mut self, populate: bool) -> Self {
        self.populate = populate;
        self
    }

    /// Accepts a file on hugetlbfs. Only for a trusted sender: who punches a hole in one may leave
    /// the pool empty, and the next touch here raises SIGBUS.
    #[must_use]
    pub fn allow_huge_pages(mut self, allow: bool) -> Self {
        self.huge_pages = allow;
        self
    }

    /// Refuses a longer file.
    #[must_use]
    pub fn max_len_bytes(mut self, max_len_bytes: u64) -> Self {
        self.max_len_bytes = max_len_bytes.min(MAX_LEN_BYTES);
        self
    }

    /// Maps the whole of `fd`, at the length it has now.
    ///
    /// # Errors
    /// [`ShmError::NotSealed`] without `F_SEAL_SHRINK`, [`ShmError::Kernel`] with `EINVAL` from
    /// `F_GET_SEALS` when it is no memfd at all, `EPERM` or `EACCES` from mmap(2) for
    /// [`Access::ReadWrite`] on a file sealed against it, [`ShmError::Length`] when it is empty or
    /// too long, [`ShmError::HugePagesRefused`].
    pub fn map(&self, fd: OwnedFd) -> Result<Segment, ShmError> {
        let found = seals(&fd)?;
        if !found.contains(Seals::SHRINK) {
            return Err(ShmError::NotSealed { found });
        }
        let kernel = |call| move |source| ShmError::Kernel { call, len_bytes: 0, source };
        let file_system = rustix::fs::fstatfs(&fd).map_err(kernel("fstatfs"))?;
        let is_huge = u64::try_from(file_system.f_type) == Ok(HUGETLBFS_MAGIC);
        if is_huge && !self.huge_pages {
            return Err(ShmError::HugePagesRefused);
        }
        // The size is read after the seal was seen, so it can only grow from here.
        let stat = rustix::fs::fstat(&fd).map_err(kernel("fstat"))?;
        let len = mappable(u64::try_from(stat.st_size).unwrap_or(0), self.max_len_bytes)?;
        map_whole(fd, len, self.access, self.populate)
    }
}

/// One mapping of a whole memfd, and the descriptor behind it. Closed and unmapped on drop.
///
/// Other processes may write the same memory at any time; see the methods for what that means.
/// Nothing here blocks but page faults, and no call can raise SIGBUS: the file never shrinks.
#[derive(Debug)]
pub struct Segment {
    base: NonNull<u8>,
    len: usize,
    access: Access,
    fd: OwnedFd,
}

// SAFETY: the mapping belongs to the process, not to a thread (mmap(2)), and `base` is freed only
// by the one owner's drop.
unsafe impl Send for Segment {}
// SAFETY: every access through `&Segment` is atomic, volatile or inside an asm block, each of which
// tolerates concurrent access to a mapping; no reference to shared bytes exists.
unsafe impl Sync for Segment {}

impl Segment {
    /// A segment of `len_bytes` with [`SegmentOptions::new`]'s defaults.
    ///
    /// # Errors
    /// As [`SegmentOptions::create`].
    pub fn create(name: &str, len_bytes: u64) -> Result<Self, ShmError> {
        SegmentOptions::new(len_bytes).create(name)
    }

    /// Maps a foreign descriptor with [`MapOptions::new`]'s defaults.
    ///
    /// # Errors
    /// As [`MapOptions::map`].
    pub fn map(fd: OwnedFd, access: Access) -> Result<Self, ShmError> {
        MapOptions::new(access).map(fd)
    }

    /// Length in bytes, at least 1.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.len as u64
    }

    /// What this mapping may do.
    #[must_use]
    pub fn access(&self) -> Access {
        self.access
    }

    /// Where it is mapped in this process: a name for its bytes, to look them up by; nothing is reached through it.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.base.as_ptr().addr() as u64
    }

    /// The descriptor behind the mapping.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// A second descriptor of the same file, to be sent away; close-on-exec.
    ///
    /// # Errors
    /// [`ShmError::Kernel`] with `EMFILE` when the process has no descriptor left.
    pub fn try_clone_fd(&self) -> Result<OwnedFd, ShmError> {
        rustix::io::fcntl_dupfd_cloexec(&self.fd, 0).map_err(|source| self.refused("fcntl(F_DUPFD_CLOEXEC)", source))
    }

    /// Copies the bytes at `offset` into `to`, each read exactly once. Under a concurrent writer
    /// they may be a mix of old and new: check the copy, not the segment.
    ///
    /// # Errors
    /// [`ShmError::OutOfRange`]; then nothing was copied.
    pub fn read_into(&self, offset: u64, to: &mut [u8]) -> Result<(), ShmError> {
        let from = self.pointer(offset, to.len() as u64)?;
        // SAFETY: `pointer` checked that [offset, offset+len) lies in the mapping, readable in any
        // access; `to` is writable and ours alone by its borrow; a mapping never overlaps it.
        unsafe { raw::copy_forward(from, to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    /// Copies `from` to the bytes at `offset`. A concurrent reader may see any part of it; publish
    /// by a later release store to an atomic.
    ///
    /// # Errors
    /// [`ShmError::OutOfRange`], [`ShmError::ReadOnly`]; then nothing was written.
    pub fn write_from(&self, offset: u64, from: &[u8]) -> Result<(), ShmError> {
        let to = self.pointer_mut(offset, from.len() as u64)?;
        // SAFETY: `pointer_mut` checked the range and that the mapping is writable; `from` is
        // readable and unchanged by its borrow; a mapping never overlaps it.
        unsafe { raw::copy_forward(from.as_ptr(), to, from.len()) };
        Ok(())
    }

    /// Copies `len_bytes` at `offset` to `to_offset` of `to`, in one pass at memcpy speed, each
    /// source byte read once. `to` may be this segment, with ranges that overlap (as memmove(3)).
    /// Where `to` is *another mapping of the same file* and the ranges overlap there, the content
    /// of the overlap is unspecified.
    ///
    /// # Errors
    /// [`ShmError::OutOfRange`] for either range, [`ShmError::ReadOnly`]; then nothing was copied.
    pub fn copy_to(&self, offset: u64, to: &Segment, to_offset: u64, len_bytes: u64) -> Result<(), ShmError> {
        let from = self.pointer(offset, len_bytes)?;
        let to = to.pointer_mut(to_offset, len_bytes)?;
        let len = usize_of(len_bytes);
        let distance = to.addr().wrapping_sub(from.addr());
        if distance != 0 && distance < len {
            // SAFETY: both ranges were checked above, and `to` is writable.
            unsafe { copy_backward(from, to, len) };
        } else {
            // SAFETY: both ranges were checked above, `to` is writable, and as `to` does not start
            // inside the source, an overlap has it below.
            unsafe { raw::copy_forward(from, to, len) };
        }
        Ok(())
    }

    /// Copies inside the segment, as memmove(3).
    ///
    /// # Errors
    /// As [`Segment::copy_to`].
    pub fn copy_within(&self, offset: u64, to_offset: u64, len_bytes: u64) -> Result<(), ShmError> {
        self.copy_to(offset, self, to_offset, len_bytes)
    }

    /// Sets `len_bytes` at `offset` to zero, at memset speed.
    ///
    /// # Errors
    /// [`ShmError::OutOfRange`], [`ShmError::ReadOnly`]; then nothing was written.
    pub fn zero(&self, offset: u64, len_bytes: u64) -> Result<(), ShmError> {
        let to = self.pointer_mut(offset, len_bytes)?;
        // SAFETY: `pointer_mut` checked the range and that the mapping is writable.
        unsafe { raw::zero(to, usize_of(len_bytes)) };
        Ok(())
    }

    /// The word at `offset` as an atomic.
    ///
    /// # Errors
    /// [`ShmError::OutOfRange`], [`ShmError::Misaligned`]; [`ShmError::ReadOnly`] since a store
    /// through it would fault, use [`Segment::load_u32`].
    #[inline]
    pub fn atomic_u32(&self, offset: u64) -> Result<&AtomicU32, ShmError> {
        self.check_aligned(offset, 4)?;
        let word = self.pointer_mut(offset, 4)?.cast::<u32>();
        // SAFETY: in range, writable and aligned, all checked above (the base is page aligned); it
        // lives as long as the borrow of `self`. Peers in other processes cannot make Rust data
        // races; this process reaches the bytes only by atomics and the moves of `raw`.
        Ok(unsafe { AtomicU32::from_ptr(word) })
    }

    /// The double word at `offset` as an atomic.
    ///
    /// # Errors
    /// As [`Segment::atomic_u32`].
    #[inline]
    pub fn atomic_u64(&self, offset: u64) -> Result<&AtomicU64, ShmError> {
        self.check_aligned(offset, 8)?;
        let word = self.pointer_mut(offset, 8)?.cast::<u64>();
        // SAFETY: as in `atomic_u32`.
        Ok(unsafe { AtomicU64::from_ptr(word) })
    }

    /// Loads the word at `offset` with acquire ordering, in any access.
    ///
    /// # Errors
    /// [`ShmError::OutOfRange`], [`ShmError::Misaligned`].
    #[inline]
    pub fn load_u32(&self, offset: u64) -> Result<u32, ShmError> {
        self.check_aligned(offset, 4)?;
        let word = self.pointer(offset, 4)?.cast_mut().cast::<u32>();
        // SAFETY: in range and aligned, checked above. The reference stays in this function and is
        // only loaded from, relaxed, which std::sync::atomic allows on read-only memory.
        let word = unsafe { AtomicU32::from_ptr(word) };
        let value = word.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        Ok(value)
    }

    /// Loads the double word at `offset` with acquire ordering, in any access.
    ///
    /// # Errors
    /// As [`Segment::load_u32`].
    #[inline]
    pub fn load_u64(&self, offset: u64) -> Result<u64, ShmError> {
        self.check_aligned(offset, 8)?;
        let word = self.pointer(offset, 8)?.cast_mut().cast::<u64>();
        // SAFETY: as in `load_u32`.
        let word = unsafe { AtomicU64::from_ptr(word) };
        let value = word.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        Ok(value)
    }

    /// Checks that a range lies in the segment.
    ///
    /// # Errors
    /// [`ShmError::OutOfRange`].
    #[inline]
    pub fn check_range(&self, offset: u64, len_bytes: u64) -> Result<(), ShmError> {
        let segment_len_bytes = self.len_bytes();
        match offset.checked_add(len_bytes) {
            Some(end) if end <= segment_len_bytes => Ok(()),
            _ => Err(ShmError::OutOfRange { offset, len_bytes, segment_len_bytes }),
        }
    }

    /// The start of a range that lies in the mapping.
    #[inline]
    pub(crate) fn pointer(&self, offset: u64, len_bytes: u64) -> Result<*const u8, ShmError> {
        self.check_range(offset, len_bytes)?;
        Ok(self.base.as_ptr().wrapping_add(usize_of(offset)).cast_const())
    }

    /// The start of a range that lies in the mapping, which is writable.
    #[inline]
    pub(crate) fn pointer_mut(&self, offset: u64, len_bytes: u64) -> Result<*mut u8, ShmError> {
        if self.access == Access::ReadOnly {
            return Err(ShmError::ReadOnly);
        }
        Ok(self.pointer(offset, len_bytes)?.cast_mut())
    }

    #[inline]
    pub(crate) fn check_aligned(&self, offset: u64, align_bytes: u64) -> Result<(), ShmError> {
        match offset.is_multiple_of(align_bytes) {
            true => Ok(()),
            false => Err(ShmError::Misaligned { offset, align_bytes }),
        }
    }

    fn refused(&self, call: &'static str, source: Errno) -> ShmError {
        ShmError::Kernel { call, len_bytes: self.len_bytes(), source }
    }
}

impl AsFd for Segment {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd()
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: `base` and `len` are what mmap returned for this segment, unmapped nowhere else;
        // every word and slot array handed out borrows or keeps the segment, so none is left.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok(), "munmap of our own mapping");
    }
}

/// Copies to an address inside the source, last block first.
///
/// # Safety
/// `from` readable and `to` writable for `len` bytes, `from < to < from + len`.
unsafe fn copy_backward(from: *const u8, to: *mut u8, len: usize) {
    let mut bounce = [0_u8; BOUNCE_BYTES];
    let mut end = len;
    while end > 0 {
        let start = end.saturating_sub(BOUNCE_BYTES);
        let block = end - start;
        let source = from.wrapping_add(start);
        let target = to.wrapping_add(start);
        // SAFETY: [start, end) lies in the readable range, `bounce` holds `block` bytes, is ours.
        unsafe { raw::copy_forward(source, bounce.as_mut_ptr(), block) };
        // SAFETY: [start, end) lies in the writable range; what it overwrites of the source lies
        // at or above `start + distance`, which earlier rounds have copied or this one holds.
        unsafe { raw::copy_forward(bounce.as_ptr(), target, block) };
        end = start;
    }
}

fn mappable(len_bytes: u64, max_bytes: u64) -> Result<NonZeroUsize, ShmError> {
    Some(len_bytes)
        .filter(|len| *len <= max_bytes)
        .and_then(|len| usize::try_from(len).ok())
        .and_then(NonZeroUsize::new)
        .ok_or(ShmError::Length { len_bytes, max_bytes })
}

fn map_whole(fd: OwnedFd, len: NonZeroUsize, access: Access, populate: bool) -> Result<Segment, ShmError> {
    let protection = match access {
        Access::ReadOnly => ProtFlags::READ,
        Access::ReadWrite => ProtFlags::READ | ProtFlags::WRITE,
    };
    let mut flags = MapFlags::SHARED;
    flags.set(MapFlags::POPULATE, populate);
    let len = len.get();
    let refused = |source| ShmError::Kernel { call: "mmap", len_bytes: len as u64, source };
    // SAFETY: without MAP_FIXED the kernel picks a free range, so no mapping of ours is replaced.
    // That the pages stay is upheld by F_SEAL_SHRINK, which both callers have seen on `fd`.
    let base = unsafe { rustix::mm::mmap(ptr::null_mut(), len, protection, flags, &fd, 0) };
    let base = NonNull::new(base.map_err(refused)?.cast::<u8>());
    let base = base.ok_or_else(|| refused(Errno::NOMEM))?;
    Ok(Segment { base, len, access, fd })
}

/// A length or offset that a range check has already compared with a mapping's length.
fn usize_of(checked: u64) -> usize {
    usize::try_from(checked).expect("a range inside a mapping fits the address space")
}
