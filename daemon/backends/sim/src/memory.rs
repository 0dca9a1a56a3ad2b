//! From a memory fd to a mapped segment, with the checks that uverbs and the exporters make.

use std::os::fd::{AsRawFd, BorrowedFd};

use gdrd_hal::{Access, HcaError, MemorySource};
use gdrd_shm::{Access as MapAccess, Segment, ShmError};
use rustix::io::Errno;

use crate::bytes::Bytes;
use crate::hca::HcaCore;

/// Name of the memfds that stand for GPU memory. It is this backend's notion of a dma-buf: what has
/// the name can be registered as one, what lacks it cannot, as a kernel tells dma-bufs from memfds.
pub(crate) const GPU_MEMORY_NAME: &str = "gdrd-sim-gpu";

/// Page size in which wire address and offset must agree (`ib_uverbs_reg_mr`, drivers/infiniband/core/uverbs_cmd.c;
/// for dma-bufs drivers/infiniband/core/uverbs_std_types_mr.c).
const PAGE_BYTES: u64 = 4096;

const CALL: &str = "register";

/// A range that passed all checks.
pub(crate) struct Range {
    pub(crate) bytes: Bytes,
    pub(crate) offset: u64,
    pub(crate) len_bytes: u64,
    pub(crate) iova: u64,
}

/// Maps what `source` names for a region of `access` whose first byte shall have wire address `iova`.
pub(crate) fn open(hca: &HcaCore, source: MemorySource<'_>, access: Access, iova: u64) -> Result<Range, HcaError> {
    let invalid = |reason: String| hca.invalid(CALL, reason);
    let (bytes, offset, len_bytes) = match source {
        MemorySource::DmaBuf { fd, offset, len_bytes } => {
            if !hca.capabilities.dma_buf {
                return Err(hca.unsupported("register dma-bufs; use host memory"));
            }
            (dma_buf(hca, fd, access)?, offset, len_bytes)
        }
        MemorySource::Host { fd, offset, len_bytes } => {
            if is_gpu_memory(hca, fd)? {
                return Err(invalid(format!("fd {} is gpu memory, not host memory", fd.as_raw_fd())));
            }
            (Bytes::Segment(map(hca, fd, access)?), offset, len_bytes)
        }
        _ => return Err(hca.unsupported("register this kind of memory")),
    };
    let end = offset.checked_add(len_bytes).filter(|end| len_bytes > 0 && *end <= bytes.len_bytes());
    if end.is_none() {
        let memory_bytes = bytes.len_bytes();
        return Err(invalid(format!("{len_bytes} bytes at offset {offset} of a memory of {memory_bytes} bytes")));
    }
    let iova = match hca.capabilities.iova_honoured {
        true => checked_iova(hca, iova, offset, len_bytes)?,
        false => own_iova(offset),
    };
    Ok(Range { bytes, offset, len_bytes, iova })
}

/// GPU memory behind a dma-buf: of a real GPU, where the host has some, else a memfd of the right name.
fn dma_buf(hca: &HcaCore, fd: BorrowedFd<'_>, access: Access) -> Result<Bytes, HcaError> {
    if let Some(found) = hca.fabric.gpu_copies.as_ref().and_then(|copies| copies.find(fd)) {
        return Ok(Bytes::Gpu(found));
    }
    if !is_gpu_memory(hca, fd)? {
        return Err(hca.invalid(CALL, format!("fd {} is no dma-buf", fd.as_raw_fd())));
    }
    Ok(Bytes::Segment(map(hca, fd, access)?))
}

fn checked_iova(hca: &HcaCore, iova: u64, offset: u64, len_bytes: u64) -> Result<u64, HcaError> {
    if iova.checked_add(len_bytes).is_none() {
        return Err(hca.invalid(CALL, format!("iova {iova:#x} plus {len_bytes} bytes passes 2^64")));
    }
    if iova % PAGE_BYTES != offset % PAGE_BYTES {
        let reason = format!("iova {iova:#x} and offset {offset:#x} differ inside a page of {PAGE_BYTES} bytes");
        return Err(hca.invalid(CALL, reason));
    }
    Ok(iova)
}

/// An address as siw reports one: somewhere in user space, at the range's place in its page.
fn own_iova(offset: u64) -> u64 {
    let page: u64 = rand::random_range(0x7_0000_0000..0x7_fff0_0000);
    page * PAGE_BYTES + offset % PAGE_BYTES
}

fn is_gpu_memory(hca: &HcaCore, fd: BorrowedFd<'_>) -> Result<bool, HcaError> {
    if hca.fabric.gpu_copies.as_ref().is_some_and(|copies| copies.find(fd).is_some()) {
        return Ok(true);
    }
    has_gpu_memory_name(fd).map_err(|error| HcaError::Driver {
        hca: hca.name.clone(),
        call: CALL,
        errno: error.raw_os_error().unwrap_or(0),
        reason: format!("name of fd {}: {error}", fd.as_raw_fd()),
    })
}

/// Whether a descriptor is a memfd that stands for GPU memory.
pub(crate) fn has_gpu_memory_name(fd: BorrowedFd<'_>) -> std::io::Result<bool> {
    let link = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))?;
    let name = link.to_str().and_then(|link| link.strip_prefix("/memfd:"));
    Ok(name.is_some_and(|name| name.starts_with(GPU_MEMORY_NAME)))
}

fn map(hca: &HcaCore, fd: BorrowedFd<'_>, access: Access) -> Result<Segment, HcaError> {
    let fd = fd.try_clone_to_owned().map_err(|error| hca.exhausted(CALL, &format!("file descriptors: {error}")))?;
    let wanted = if access.local_write { MapAccess::ReadWrite } else { MapAccess::ReadOnly };
    Segment::map(fd, wanted).map_err(|error| match &error {
        ShmError::Kernel { call, source: Errno::NOMEM, .. } => hca.exhausted(CALL, &format!("memory ({call})")),
        ShmError::HugePagesRefused => hca.unsupported("register hugetlbfs memory in simulation"),
        _ => hca.invalid(CALL, chain(&error)),
    })
}

fn chain(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}
