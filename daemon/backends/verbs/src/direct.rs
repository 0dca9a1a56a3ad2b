//! Contexts for clients to import: one for each, opened without rights that the daemon may have.
//!
//! A provider gives a context the rights of whoever opens it for good: mlx5 bakes raw packets and device internals into it
//! (drivers/infiniband/hw/mlx5/devx.c, mlx5_ib_devx_create). Capabilities belong to a thread (capabilities(7)), so the one that
//! opens such a context gives them up first, and ends after.

use std::os::fd::{BorrowedFd, FromRawFd as _, IntoRawFd as _, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::sync::Arc;

use gdrd_hal::{Access, DirectContext, HcaError, MemoryRegion, MemorySource};
use rustix::io::Errno;
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

use crate::context::Context;
use crate::device;
use crate::domain::{Domain, DomainHandle};
use crate::error::errno;

/// What a client's context must not be opened with.
const DROPPED: CapabilitySet = CapabilitySet::NET_RAW.union(CapabilitySet::SYS_RAWIO);

/// A context with its one domain.
#[derive(Debug)]
pub(crate) struct Direct(Domain);

impl Direct {
    /// Opens another context of the same device. Blocks.
    pub(crate) fn open(context: &Arc<Context>) -> Result<Self, HcaError> {
        let own = Arc::clone(context);
        let failed = context.failed("open a context for a client", "threads");
        let opened =
            without_raw_rights(move || device::open_again(&own)).map_err(|not_opened| match not_opened {
                NotOpened::NoThread(error) => failed.with(error.raw_os_error().unwrap_or(0)),
                NotOpened::KeepsRights(errno) => context.failed("capset", "memory").with(errno.raw_os_error()),
                NotOpened::Panicked => failed.invalid("the thread that opens it panicked"),
            })??;
        opened.share();
        Ok(Self(Domain(Arc::new(DomainHandle::alloc(&Arc::new(opened))?))))
    }
}

impl DirectContext for Direct {
    fn command_fd(&self) -> BorrowedFd<'_> {
        self.0.0.context().command_fd()
    }

    fn pd_handle(&self) -> u32 {
        self.0.0.handle()
    }

    fn register(
        &self,
        source: MemorySource<'_>,
        access: Access,
        iova: u64,
    ) -> Result<(Box<dyn MemoryRegion>, u32), HcaError> {
        let region = self.0.register_region(source, access, iova)?;
        let handle = region.handle();
        Ok((Box::new(region), handle))
    }
}

/// Whether the provider can import a context, found out with a copy of the daemon's own: only mlx5 can, as of rdma-core 65.
pub(crate) fn can_import(context: &Context) -> bool {
    let import = context.library().ibv_import_device;
    let imported = import_copy(context.command_fd(), |copy| {
        // SAFETY: the descriptor is open, and the library's from here on.
        NonNull::new(unsafe { import(copy) }).ok_or_else(errno)
    });
    let Some(imported) = imported else { return false };
    let close = context.library().ibv_close_device;
    // SAFETY: imported just now, and given to nobody else; closing it ends no object of the context that it is of.
    let closed = unsafe { close(imported.as_ptr()) };
    debug_assert_eq!(closed, 0, "{}", std::io::Error::from_raw_os_error(errno()));
    true
}

/// Imports a copy of a context's descriptor. One that comes from an import is closed with it. Where the import fails, libibverbs may
/// have closed it or not, and its number may be another thread's by now: a provider that has tried closes it
/// (providers/mlx5/mlx5.c, mlx5_uninit_context), as does the end of an import that only lacks its event descriptor
/// (libibverbs/device.c, ibv_import_device). So it is closed here in the one case that is certain, and is lost in others.
fn import_copy<T>(context: BorrowedFd<'_>, import: impl FnOnce(RawFd) -> Result<T, i32>) -> Option<T> {
    const NO_PROVIDER_TRIED: i32 = Errno::OPNOTSUPP.raw_os_error();
    let copy = context.try_clone_to_owned().ok()?.into_raw_fd();
    match import(copy) {
        Ok(imported) => return Some(imported),
        Err(NO_PROVIDER_TRIED) => {
            // SAFETY: made above. libibverbs itself gives this errno, to providers that import nothing, and closes nothing then; the
            // kernel gives it in an import to those that have no query_ucontext (uverbs_std_types_device.c), which mlx5 has had
            // since that method is there.
            drop(unsafe { OwnedFd::from_raw_fd(copy) });
        }
        Err(_) => {}
    }
    None
}

/// Why nothing was opened.
#[derive(Debug)]
enum NotOpened {
    NoThread(std::io::Error),
    KeepsRights(Errno),
    Panicked,
}

/// What `open` gives, called on a thread of its own that has given up what a client must not have.
fn without_raw_rights<T: Send + 'static>(open: impl FnOnce() -> T + Send + 'static) -> Result<T, NotOpened> {
    let opening = move || drop_raw_rights().map(|()| open());
    let thread = std::thread::Builder::new().name("gdrd-direct".to_owned()).spawn(opening);
    let opened = thread.map_err(NotOpened::NoThread)?.join().map_err(|_| NotOpened::Panicked)?;
    opened.map_err(NotOpened::KeepsRights)
}

/// Gives up, for the calling thread and for ever, what a client must not have.
fn drop_raw_rights() -> rustix::io::Result<()> {
    let mut sets = capabilities(None)?;
    sets.effective.remove(DROPPED);
    sets.permitted.remove(DROPPED);
    sets.inheritable.remove(DROPPED);
    set_capabilities(None, sets)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_that_a_failed_import_may_have_closed_is_not_closed_again() {
        use std::os::fd::{AsFd as _, AsRawFd as _};

        let file = tempfile::tempfile().expect("a file");
        let mut next = None;
        let tried = import_copy(file.as_fd(), |copy| {
            // What mlx5 does where the kernel refuses, and what another thread may do then.
            // SAFETY: it was given to this import, which is its owner.
            drop(unsafe { OwnedFd::from_raw_fd(copy) });
            next = rustix::io::fcntl_dupfd_cloexec(&file, copy).ok();
            Err::<(), _>(Errno::IO.raw_os_error())
        });
        assert_eq!(tried, None);
        let next = next.expect("a descriptor is left");
        assert!(rustix::io::fcntl_getfd(&next).is_ok(), "{} is another's", next.as_raw_fd());
    }

    #[test]
    fn a_provider_that_cannot_import_costs_no_descriptor() {
        use std::os::fd::AsFd as _;

        let file = tempfile::tempfile().expect("a file");
        let mut copy = None;
        let tried = import_copy(file.as_fd(), |number| {
            copy = Some(number);
            Err::<(), _>(Errno::OPNOTSUPP.raw_os_error())
        });
        assert_eq!(tried, None);
        let link = std::fs::read_link(format!("/proc/self/fd/{}", copy.expect("it was tried")));
        let own = std::fs::read_link(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file)));
        assert_ne!(link.ok(), own.ok(), "the copy is closed");
    }

    #[test]
    fn the_thread_that_opens_a_clients_context_has_no_raw_rights_and_others_keep_theirs() {
        let before = capabilities(None).expect("the kernel tells");
        let now = || capabilities(None).expect("the kernel tells");
        // What the opener starts has no more. Run as root, as builders do, there is something to give up.
        let opened = without_raw_rights(move || (now(), std::thread::spawn(now).join().expect("it ends")));
        let (dropped, started) = opened.expect("less can always be had");
        assert_eq!(dropped, started);
        for set in [dropped.effective, dropped.permitted, dropped.inheritable] {
            assert!(!set.intersects(DROPPED), "{set:?}");
        }
        assert_eq!(dropped.effective, before.effective.difference(DROPPED), "nothing else is given up");
        assert_eq!(capabilities(None).expect("the kernel tells"), before);
    }
}
