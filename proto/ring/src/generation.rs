//! The generation page: one number per slot, written by the daemon, read by every client that maps
//! it. It tells a client that a registration it remembers is gone, without a call.
//!
//! A generation is a plain counter from 0, which means that the slot was never used; it only
//! rises, so none repeats within a slot. What a client reads is a hint to itself: the daemon checks
//! each request against its own copy.

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};

use gdrd_shm::{Access, MapOptions, Segment, SegmentOptions, ShmError};
use rustix::fs::{Mode, OFlags};

use crate::error::{GenerationError, OpenError};

/// Version of the page's layout.
pub const GENERATION_PAGE_VERSION: u32 = 1;
/// First eight bytes of the segment.
pub(crate) const GENERATION_MAGIC: u64 = u64::from_le_bytes(*b"gdrd-gen");
/// Most slots of a page; bounds it to 8 MiB.
pub const MAX_SLOTS: u32 = 1 << 20;

const VERSION_OFFSET: u64 = 8;
const SLOTS_OFFSET: u64 = 12;
const FIRST_SLOT: u64 = 64;
const SLOT_BYTES: u64 = 8;
const WHAT: &str = "generation page";

const fn len_bytes(slots: u32) -> u64 {
    FIRST_SLOT + slots as u64 * SLOT_BYTES
}

const fn offset_of(slot: u32) -> u64 {
    FIRST_SLOT + slot as u64 * SLOT_BYTES
}

/// The daemon's side. Shared by threads: each change is one atomic operation.
#[derive(Debug)]
pub struct GenerationWriter {
    segment: Segment,
    slots: u32,
}

impl GenerationWriter {
    /// A page of `slots`, all at 0. It has no seal against later writers, since a daemon that takes over must be one:
    /// clients get [`GenerationWriter::client_fd`], and the file's mode keeps other users from opening it anew.
    ///
    /// # Errors
    /// [`GenerationError::NoSuchSlot`] for no slots or more than [`MAX_SLOTS`],
    /// [`GenerationError::Segment`] when the kernel refuses.
    pub fn create(slots: u32) -> Result<Self, GenerationError> {
        if slots == 0 || slots > MAX_SLOTS {
            return Err(GenerationError::NoSuchSlot { slot: slots, slots: MAX_SLOTS });
        }
        let segment = SegmentOptions::new(len_bytes(slots)).create("gdrd-generations")?;
        // memfds are born open to all, and could be opened through /proc for writing.
        let mode = Mode::RUSR | Mode::WUSR;
        rustix::fs::fchmod(segment.fd(), mode).map_err(kernel("fchmod", segment.len_bytes()))?;
        segment.write_from(0, &GENERATION_MAGIC.to_ne_bytes())?;
        segment.write_from(VERSION_OFFSET, &GENERATION_PAGE_VERSION.to_ne_bytes())?;
        segment.write_from(SLOTS_OFFSET, &slots.to_ne_bytes())?;
        Ok(Self { segment, slots })
    }

    /// Goes on with a page that an earlier daemon made and kept.
    ///
    /// # Errors
    /// As [`GenerationReader::open`].
    pub fn adopt(fd: OwnedFd) -> Result<Self, OpenError> {
        let (segment, slots) = open(fd, Access::ReadWrite)?;
        Ok(Self { segment, slots })
    }

    /// The page itself, to be kept for the next daemon and shown to nobody else.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.segment.fd()
    }

    /// The descriptor to send to a client: a description of its own that reads only, and so cannot be mapped for
    /// writing (mmap(2), EACCES).
    ///
    /// # Errors
    /// [`GenerationError::Segment`] when the process has no descriptor left.
    pub fn client_fd(&self) -> Result<OwnedFd, GenerationError> {
        let path = format!("/proc/self/fd/{}", self.segment.fd().as_raw_fd());
        let opened = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
        Ok(opened.map_err(kernel("open", self.segment.len_bytes()))?)
    }

    /// Slots of the page.
    #[must_use]
    pub fn slots(&self) -> u32 {
        self.slots
    }

    /// Ends the slot's generation and returns the next one.
    ///
    /// # Errors
    /// [`GenerationError::NoSuchSlot`].
    pub fn bump(&self, slot: u32) -> Result<u64, GenerationError> {
        let word = self.segment.atomic_u64(self.offset(slot)?)?;
        // (generation) release: who sees the new number sees what was done before the bump. 2^64
        // bumps of one slot are out of reach, so it does not wrap.
        Ok(word.fetch_add(1, Ordering::Release) + 1)
    }

    /// Raises the slot to `generation`, as the journal or the engine's own counter has it.
    ///
    /// # Errors
    /// [`GenerationError::NoSuchSlot`]; [`GenerationError::NotNewer`] below what the slot shows
    /// (the same number is no error).
    pub fn set(&self, slot: u32, generation: u64) -> Result<(), GenerationError> {
        let word = self.segment.atomic_u64(self.offset(slot)?)?;
        // (generation) release.
        let current = word.fetch_max(generation, Ordering::Release);
        match current <= generation {
            true => Ok(()),
            false => Err(GenerationError::NotNewer { slot, current, asked: generation }),
        }
    }

    /// What the slot shows; `None` outside of the page.
    #[must_use]
    pub fn current(&self, slot: u32) -> Option<u64> {
        let offset = self.offset(slot).ok()?;
        self.segment.load_u64(offset).ok()
    }

    fn offset(&self, slot: u32) -> Result<u64, GenerationError> {
        match slot < self.slots {
            true => Ok(offset_of(slot)),
            false => Err(GenerationError::NoSuchSlot { slot, slots: self.slots }),
        }
    }
}

/// A client's side, mapped read-only. Shared by threads.
#[derive(Debug)]
pub struct GenerationReader {
    segment: Segment,
    /// 0 once the writer is gone.
    slots: AtomicU32,
}

impl GenerationReader {
    /// Maps the page that the daemon sent.
    ///
    /// # Errors
    /// [`OpenError`]: no generation page, another version, or too short.
    pub fn open(fd: OwnedFd) -> Result<Self, OpenError> {
        let (segment, slots) = open(fd, Access::ReadOnly)?;
        Ok(Self { segment, slots: AtomicU32::new(slots) })
    }

    /// Slots of the page; none after [`GenerationReader::end`].
    #[must_use]
    pub fn slots(&self) -> u32 {
        self.slots.load(Ordering::Relaxed)
    }

    /// Nobody writes the page any more: what it shows says nothing from here on, so no slot is within it.
    pub fn end(&self) {
        self.slots.store(0, Ordering::Relaxed);
    }

    /// What the slot shows now, 0 if it was never used; `None` outside of the page. One load of it.
    #[must_use]
    #[inline]
    pub fn current(&self, slot: u32) -> Option<u64> {
        if slot >= self.slots() {
            return None;
        }
        // (generation) acquire.
        self.segment.load_u64(offset_of(slot)).ok()
    }
}

fn segment_error(source: ShmError) -> OpenError {
    OpenError::Segment { what: WHAT, source }
}

/// Maps a page and checks its header.
fn open(fd: OwnedFd, access: Access) -> Result<(Segment, u32), OpenError> {
    let segment = MapOptions::new(access).max_len_bytes(len_bytes(MAX_SLOTS)).map(fd).map_err(segment_error)?;
    let magic = segment.load_u64(0).map_err(segment_error)?;
    if magic != GENERATION_MAGIC {
        return Err(OpenError::NotOurs { what: WHAT, found: magic });
    }
    let version = segment.load_u32(VERSION_OFFSET).map_err(segment_error)?;
    if version != GENERATION_PAGE_VERSION {
        return Err(OpenError::Version { what: WHAT, found: version, known: GENERATION_PAGE_VERSION });
    }
    let slots = segment.load_u32(SLOTS_OFFSET).map_err(segment_error)?;
    let (needed, found) = (len_bytes(slots), segment.len_bytes());
    if needed != found {
        return Err(OpenError::Size { what: WHAT, needed, found });
    }
    Ok((segment, slots))
}

fn kernel(call: &'static str, len_bytes: u64) -> impl Fn(rustix::io::Errno) -> ShmError {
    move |source| ShmError::Kernel { call, len_bytes, source }
}
