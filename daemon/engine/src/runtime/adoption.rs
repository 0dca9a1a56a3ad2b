//! Taking in memory that a client sent: what it is, before anything else is done with it.
//!
//! The descriptor is the client's: a call on one of a file system that the client runs itself could wait for ever. So
//! first its name and its mount are read from our own `/proc`, which asks no file system (proc_pid_fd(5),
//! proc_pid_fdinfo(5)), and only a memfd or a dma-buf is asked for more. The name alone can be forged: it is a path of the
//! client's own mount namespace.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;

use gdrd_shm::{Seals, add_seals, seals};
use rustix::fs::{MemfdFlags, SeekFrom, memfd_create};

use super::objects::{AdoptedObjects, file_of};
use super::{Answered, Runtime};
use crate::core::{Input, NewMemory};
use crate::error::EngineError;
use crate::ids::SessionId;
use crate::registration::{AdoptRequest, AdoptedKind, AdoptedMemory};

/// How a link of `/proc/self/fd` to a memfd begins (memfd_create(2)).
const MEMFD: &str = "/memfd:";
/// To a dma-buf (`dmabuffs_dname`, drivers/dma-buf/dma-buf.c).
const DMA_BUF: &str = "/dmabuf:";
/// Longest piece of a link that is repeated in a message, characters.
const MAX_SHOWN: usize = 64;
/// Seals that adopted host memory gets: its length must not change under a registration.
const SEALS: Seals = Seals::SHRINK.union(Seals::GROW).union(Seals::SEAL);

/// What can be adopted in place of what cannot.
const ALTERNATIVES: &str = "adopt a memfd made with MFD_ALLOW_SEALING for host memory, or the dma-buf of memory from \
                            cudaMalloc or cuMemCreate (cuMemGetHandleForAddressRange); managed memory and memory of \
                            cudaHostRegister have none: copy to either, or lease a buffer";

impl Runtime {
    /// Takes in memory. The caller sees to it that dropping the request may block.
    pub(crate) fn adopt(
        self: &Arc<Self>,
        session: SessionId,
        request: AdoptRequest,
    ) -> Result<AdoptedMemory, EngineError> {
        let AdoptRequest { fd, other_mapping, gpu } = request;
        let (kind, len_bytes) = self.identify(session, fd.as_fd())?;
        let mut fds = vec![fd];
        if let Some(other) = other_mapping {
            if self.identify(session, other.as_fd())? != (AdoptedKind::DmaBuf, len_bytes) || kind != AdoptedKind::DmaBuf
            {
                return Err(refused("its other mapping is no dma-buf of the same length".to_owned()));
            }
            fds.push(other);
        }
        let memory = NewMemory { kind, len_bytes, gpu };
        let Answered::Adopted(id) = self.ask(|call| Input::Adopt { call, session, memory })? else {
            return Err(EngineError::Internal { problem: "an adoption was answered as something else".into() });
        };
        let gpu = self.state().core.gpu_of_memory(id);
        self.objects.insert_adopted(id, AdoptedObjects::new(kind, gpu.clone(), fds));
        let state = self.state();
        if !state.core.has_memory(id) {
            // The session ended meanwhile, and what it had was closed before this was there.
            drop(state);
            drop(self.objects.remove_adopted(id));
            return Err(EngineError::SessionEnded);
        }
        Ok(AdoptedMemory { id, kind, len_bytes, gpu })
    }

    /// What a descriptor is, and how long; host memory is sealed.
    fn identify(&self, session: SessionId, fd: BorrowedFd<'_>) -> Result<(AdoptedKind, u64), EngineError> {
        let link = format!("/proc/self/fd/{}", fd.as_raw_fd());
        let name = std::fs::read_link(link)
            .map_err(|error| EngineError::OutOfDescriptors { problem: format!("look at adopted memory: {error}") })?;
        let name = name.to_string_lossy();
        let info = Info::of(fd)?;
        if name.starts_with(DMA_BUF) && info.has_exporter {
            self.refuse_lent(session, fd)?;
            // The length, and nothing moves (`dma_buf_llseek`, drivers/dma-buf/dma-buf.c).
            let len = rustix::fs::seek(fd, SeekFrom::End(0));
            let len = len.map_err(|errno| refused(format!("the length of the dma-buf: {errno}")))?;
            return Ok((AdoptedKind::DmaBuf, not_empty(len)?));
        }
        if !name.starts_with(MEMFD) || !info.is_on_mount_of_memfds() {
            let shown: String = name.chars().take(MAX_SHOWN).filter(|c| !c.is_control()).collect();
            return Err(refused(format!("'{shown}' is neither a memfd nor a dma-buf; {ALTERNATIVES}")));
        }
        self.refuse_lent(session, fd)?;
        if self.gpu_memory.as_ref().is_some_and(|memory| memory.is_device_memory(fd)) {
            return Ok((AdoptedKind::DmaBuf, length_of(fd)?));
        }
        seal(fd)?;
        Ok((AdoptedKind::Memfd, length_of(fd)?))
    }

    /// Refuses what clients share with this daemon, and what it lends: an adoption would keep its pages beyond the lease, for whoever has the next one.
    fn refuse_lent(&self, session: SessionId, fd: BorrowedFd<'_>) -> Result<(), EngineError> {
        let Some(file) = file_of(fd) else { return Ok(()) };
        if self.objects.is_shared_state(file) {
            let what = "it is a generation page or a ring, memory of the daemon that no hca may write";
            return Err(refused(format!("{what}; adopt memory of your own")));
        }
        let Some(memory) = self.objects.memory_of_file(file) else { return Ok(()) };
        // Whose lease of another tenant it is, is nobody's business.
        let whose = match self.state().core.lease_of_memory(session, memory) {
            Some(lease) => format!("of lease {}; register ranges of the lease", lease.0),
            None => "that this daemon lends; a lease of it is what its ranges are registered of".to_owned(),
        };
        Err(refused(format!("it is memory {whose}, or adopt memory of your own")))
    }
}

/// What the kernel says of a descriptor by itself.
#[derive(Debug, PartialEq, Eq)]
struct Info {
    mount: Option<u64>,
    /// It is a dma-buf: nothing else has this line (`dma_buf_show_fdinfo`, drivers/dma-buf/dma-buf.c, Linux 5.3).
    has_exporter: bool,
}

impl Info {
    fn of(fd: BorrowedFd<'_>) -> Result<Self, EngineError> {
        let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd()))
            .map_err(|error| EngineError::OutOfDescriptors { problem: format!("look at adopted memory: {error}") })?;
        let mount = text.lines().find_map(|line| line.strip_prefix("mnt_id:")?.trim().parse().ok());
        Ok(Self { mount, has_exporter: text.lines().any(|line| line.starts_with("exp_name:")) })
    }

    /// Memfds lie on mounts of the kernel's own, one for plain memory and one for each size of huge page.
    fn is_on_mount_of_memfds(&self) -> bool {
        let huge = |size| MemfdFlags::HUGETLB | size;
        let kinds = [MemfdFlags::empty(), huge(MemfdFlags::HUGE_2MB), huge(MemfdFlags::HUGE_1GB)];
        let mut ours = kinds.into_iter().filter_map(|kind| memfd_create("gdrd-mount", MemfdFlags::CLOEXEC | kind).ok());
        self.mount.is_some() && ours.any(|fd| Self::of(fd.as_fd()).is_ok_and(|info| info.mount == self.mount))
    }
}

/// Sees to it that the memory cannot be resized.
fn seal(fd: BorrowedFd<'_>) -> Result<(), EngineError> {
    let found = seals(fd).map_err(|error| refused(format!("its seals: {error}")))?;
    if found.contains(Seals::SEAL) && !found.contains(SEALS) {
        let lacking = SEALS.difference(found);
        return Err(refused(format!("the memfd is closed to new seals and lacks {lacking:?}; {ALTERNATIVES}")));
    }
    add_seals(fd, SEALS).map_err(|error| {
        let cause = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
        refused(format!("sealing the memfd against resizing: {cause}; send a descriptor that is open for writing"))
    })
}

fn length_of(fd: BorrowedFd<'_>) -> Result<u64, EngineError> {
    let stat = rustix::fs::fstat(fd).map_err(|errno| refused(format!("its length: {errno}")))?;
    not_empty(u64::try_from(stat.st_size).unwrap_or(0))
}

fn not_empty(len_bytes: u64) -> Result<u64, EngineError> {
    if len_bytes > 0 { Ok(len_bytes) } else { Err(refused("it has no bytes".to_owned())) }
}

fn refused(problem: String) -> EngineError {
    EngineError::NotAdoptable { problem }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;

    fn memfd(flags: MemfdFlags, len_bytes: u64) -> OwnedFd {
        let fd = memfd_create("client", MemfdFlags::CLOEXEC | flags).unwrap();
        ftruncate(&fd, len_bytes).unwrap();
        fd
    }

    #[test]
    fn host_memory_cannot_be_resized_once_it_is_sealed() {
        let fd = memfd(MemfdFlags::ALLOW_SEALING, 8192);
        seal(fd.as_fd()).unwrap();
        assert!(ftruncate(&fd, 0).is_err());
        assert!(ftruncate(&fd, 1 << 20).is_err());
        assert_eq!(length_of(fd.as_fd()), Ok(8192));
        // Adopted a second time it is sealed already.
        assert_eq!(seal(fd.as_fd()), Ok(()));
    }

    #[test]
    fn a_memfd_is_told_by_its_mount_and_not_by_its_name() {
        let is_memfd = |fd: BorrowedFd<'_>| Info::of(fd).unwrap().is_on_mount_of_memfds();
        assert!(is_memfd(memfd(MemfdFlags::ALLOW_SEALING, 8192).as_fd()));
        let folder = tempfile::tempdir().unwrap();
        let forged = std::fs::File::create(folder.path().join("memfd:x")).unwrap();
        assert!(!is_memfd(forged.as_fd()));
        assert!(!Info::of(forged.as_fd()).unwrap().has_exporter);
    }

    #[test]
    fn what_cannot_be_sealed_is_refused_with_the_alternative() {
        let fd = memfd(MemfdFlags::empty(), 8192);
        let message = seal(fd.as_fd()).unwrap_err().to_string();
        assert!(message.contains("made with MFD_ALLOW_SEALING"), "{message}");
        let file = std::fs::File::open("/proc/self/status").unwrap();
        assert!(seal(file.as_fd()).is_err());
        assert!(length_of(memfd(MemfdFlags::ALLOW_SEALING, 0).as_fd()).is_err());
    }
}
