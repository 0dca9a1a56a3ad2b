//! What a client needs of libibverbs to use a context that the daemon opened for it: import, and its end.
//!
//! The library is loaded at the first import and only then. What is imported is given as plain addresses, for the caller's own
//! verbs: this crate binds none.

use std::ffi::{c_int, c_void};
use std::fs::File;
use std::io;
use std::os::fd::{BorrowedFd, IntoRawFd as _};
use std::os::unix::fs::FileTypeExt as _;
use std::ptr::NonNull;
use std::sync::OnceLock;

use libloading::Library;

/// Soname since rdma-core 15; it names the ABI.
const LIBRARY: &str = "libibverbs.so.1";

/// Why a context was not imported.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VerbsError {
    /// No libibverbs, or one without a function that is needed.
    #[error("{what}; install rdma-core 31 or later")]
    Absent {
        /// The library or the function.
        what: String,
    },
    /// The library refused.
    #[error("{call}: {source}; a brokered queue pair needs no import")]
    Refused {
        /// The call.
        call: &'static str,
        /// What it said.
        source: io::Error,
    },
}

macro_rules! table {
    ($($name:ident ($($argument:ty),*) $(-> $result:ty)?;)*) => {
        #[derive(Debug)]
        struct Verbs {
            $($name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Verbs {
            fn load() -> Result<Self, VerbsError> {
                let absent = |error: libloading::Error| VerbsError::Absent { what: error.to_string() };
                // SAFETY: loading libibverbs runs its initialisers, which are sound in any process at any time.
                let library = unsafe { Library::new(LIBRARY) }.map_err(absent)?;
                // Never unloaded: its providers have exit handlers of their own.
                let library: &'static Library = Box::leak(Box::new(library));
                Ok(Self {
                    $($name: {
                        // SAFETY: the signature is the one that <infiniband/verbs.h> gives for this name, with every structure as
                        // an opaque pointer.
                        let found = unsafe {
                            library.get::<unsafe extern "C" fn($($argument),*) $(-> $result)?>(
                                stringify!($name).as_bytes(),
                            )
                        };
                        *found.map_err(absent)?
                    },)*
                })
            }
        }
    };
}

table! {
    ibv_import_device(c_int) -> *mut c_void;
    ibv_close_device(*mut c_void) -> c_int;
    ibv_import_pd(*mut c_void, u32) -> *mut c_void;
    ibv_unimport_pd(*mut c_void);
    ibv_import_mr(*mut c_void, u32) -> *mut c_void;
    ibv_unimport_mr(*mut c_void);
}

fn verbs() -> Result<&'static Verbs, VerbsError> {
    static VERBS: OnceLock<Verbs> = OnceLock::new();
    if let Some(verbs) = VERBS.get() {
        return Ok(verbs);
    }
    let loaded = Verbs::load()?;
    Ok(VERBS.get_or_init(|| loaded))
}

/// An imported context with its protection domain and regions. Dropped, all three are unimported, in the right order: what the
/// caller has made in the context must have ended before. The objects themselves are the daemon's.
#[derive(Debug)]
pub struct ImportedContext {
    context: NonNull<c_void>,
    pd: Option<NonNull<c_void>>,
    regions: Vec<NonNull<c_void>>,
    verbs: &'static Verbs,
}

// SAFETY: libibverbs is thread-safe (libibverbs README: "all functions may be called simultaneously from any thread"), and this
// type gives the pointers to it alone.
unsafe impl Send for ImportedContext {}
// SAFETY: as for Send; shared references only read the addresses.
unsafe impl Sync for ImportedContext {}

impl ImportedContext {
    /// Imports what these handles name.
    ///
    /// # Errors
    /// `Absent`, `Refused`. An import of a context that libibverbs refuses may cost a descriptor: whether it has closed its copy
    /// is not told, and the number may be another thread's by then (libibverbs/device.c, ibv_import_device;
    /// providers/mlx5/mlx5.c, mlx5_import_context).
    pub fn import(context: BorrowedFd<'_>, pd_handle: u32, mr_handles: &[u32]) -> Result<Self, VerbsError> {
        Self::import_by(verbs()?, context, pd_handle, mr_handles)
    }

    fn import_by(
        verbs: &'static Verbs,
        context: BorrowedFd<'_>,
        pd_handle: u32,
        mr_handles: &[u32],
    ) -> Result<Self, VerbsError> {
        let refused = |call| move |source| VerbsError::Refused { call, source };
        let copy = File::from(context.try_clone_to_owned().map_err(refused("dup"))?);
        if !copy.metadata().map_err(refused("fstat"))?.file_type().is_char_device() {
            return Err(refused("ibv_import_device")(io::ErrorKind::InvalidInput.into()));
        }
        let import = verbs.ibv_import_device;
        // SAFETY: the descriptor is open, and the library's from here on.
        let found = made("ibv_import_device", unsafe { import(copy.into_raw_fd()) })?;
        let mut imported = Self { context: found, pd: None, regions: Vec::new(), verbs };
        let import = verbs.ibv_import_pd;
        // SAFETY: the context was imported just now and ends with this value; a wrong handle is an error.
        let pd = made("ibv_import_pd", unsafe { import(found.as_ptr(), pd_handle) })?;
        imported.pd = Some(pd);
        let import = verbs.ibv_import_mr;
        for handle in mr_handles {
            // SAFETY: the domain was imported above and ends after its regions; a wrong handle is an error.
            imported.regions.push(made("ibv_import_mr", unsafe { import(pd.as_ptr(), *handle) })?);
        }
        Ok(imported)
    }

    /// Address of its `struct ibv_context`, good while this value lives.
    #[must_use]
    pub fn context(&self) -> *mut c_void {
        self.context.as_ptr()
    }

    /// Address of its `struct ibv_pd`, likewise.
    #[must_use]
    pub fn pd(&self) -> *mut c_void {
        self.pd.map_or(std::ptr::null_mut(), NonNull::as_ptr)
    }

    /// Addresses of its `struct ibv_mr`, likewise, in the order of the handles.
    pub fn regions(&self) -> impl Iterator<Item = *mut c_void> + '_ {
        self.regions.iter().map(|region| region.as_ptr())
    }
}

impl Drop for ImportedContext {
    fn drop(&mut self) {
        let unimport = self.verbs.ibv_unimport_mr;
        for region in self.regions.drain(..) {
            // SAFETY: imported above, unimported once; its domain is unimported after it.
            unsafe { unimport(region.as_ptr()) };
        }
        if let Some(pd) = self.pd.take() {
            let unimport = self.verbs.ibv_unimport_pd;
            // SAFETY: imported above, unimported once; its regions are gone, its context is closed after it.
            unsafe { unimport(pd.as_ptr()) };
        }
        let close = self.verbs.ibv_close_device;
        // SAFETY: imported above, closed once, after all that was imported of it.
        unsafe { close(self.context.as_ptr()) };
    }
}

fn made(call: &'static str, pointer: *mut c_void) -> Result<NonNull<c_void>, VerbsError> {
    NonNull::new(pointer).ok_or_else(|| VerbsError::Refused { call, source: io::Error::last_os_error() })
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd as _, FromRawFd as _, OwnedFd};
    use std::sync::Mutex;

    use super::*;

    /// What another thread opened while an import failed.
    static OPENED: Mutex<Option<File>> = Mutex::new(None);

    /// As mlx5 where the kernel refuses: the descriptor is closed, and its number free for others.
    extern "C" fn close_and_fail(fd: c_int) -> *mut c_void {
        // SAFETY: an import owns what it is given.
        drop(unsafe { OwnedFd::from_raw_fd(fd) });
        *OPENED.lock().expect("nobody panicked") = File::open("/dev/zero").ok();
        std::ptr::null_mut()
    }

    #[test]
    fn a_descriptor_that_a_failed_import_may_have_closed_is_not_closed_again() {
        extern "C" fn never(_: *mut c_void) {}
        extern "C" fn close(_: *mut c_void) -> c_int {
            0
        }
        extern "C" fn none(_: *mut c_void, _: u32) -> *mut c_void {
            std::ptr::null_mut()
        }
        static LIBRARY: Verbs = Verbs {
            ibv_import_device: close_and_fail,
            ibv_close_device: close,
            ibv_import_pd: none,
            ibv_unimport_pd: never,
            ibv_import_mr: none,
            ibv_unimport_mr: never,
        };
        let device = File::open("/dev/null").expect("there is always one");
        let refused = ImportedContext::import_by(&LIBRARY, device.as_fd(), 0, &[]).expect_err("it fails");
        assert!(matches!(refused, VerbsError::Refused { call: "ibv_import_device", .. }), "{refused}");
        let opened = OPENED.lock().expect("nobody panicked").take().expect("a descriptor is left");
        assert!(opened.metadata().is_ok(), "it is another's by now: {opened:?}");
    }

    #[test]
    fn what_is_no_context_is_refused_and_stays_open() {
        let (reader, mut writer) = io::pipe().expect("a pipe can be made");
        let refused = ImportedContext::import(reader.as_fd(), 0, &[]).expect_err("no context");
        assert!(matches!(refused, VerbsError::Absent { .. } | VerbsError::Refused { .. }), "{refused}");
        io::Write::write_all(&mut writer, b"x").expect("the other end is open");
    }
}
