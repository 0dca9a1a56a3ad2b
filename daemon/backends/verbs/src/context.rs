//! One open device: what every object made on it keeps alive.

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use gdrd_hal::{HcaCapabilities, HcaError};
use rdma_sys::ibv_context;

use crate::capability::Facts;
use crate::device;
use crate::error::{Failed, Presence, may_be_gone, status};
use crate::events::EventThread;
use crate::library::Library;
use crate::options::Options;
use crate::registry::Registry;
use crate::transition::ReadLimits;

/// An `ibv_context`. Closed when it and all made on it are dropped.
#[derive(Debug)]
pub(crate) struct Context {
    raw: NonNull<ibv_context>,
    name: String,
    library: Arc<Library>,
    registry: Arc<Registry>,
    facts: Facts,
    options: Options,
    events: EventThread,
    next_id: AtomicU64,
    /// Whether a client has its descriptor.
    shared: AtomicBool,
}

// SAFETY: libibverbs is thread-safe (libibverbs README: "all functions may be called simultaneously from any thread"),
// and the pointer is only given to it.
unsafe impl Send for Context {}
// SAFETY: as for Send.
unsafe impl Sync for Context {}

impl Context {
    /// Takes over an open context.
    ///
    /// # Safety
    /// `raw` must be an open context that nobody else closes.
    ///
    /// # Errors
    /// `Driver` when the system gives no thread.
    pub(crate) unsafe fn own(
        raw: NonNull<ibv_context>,
        opening: Failed<'_>,
        library: &Arc<Library>,
        facts: Facts,
        options: &Options,
    ) -> Result<Self, HcaError> {
        let (name, registry) = (opening.hca, Arc::new(Registry::default()));
        // SAFETY: the context is open, and Drop joins the thread before it closes it.
        let events = unsafe { EventThread::start(raw.as_ptr(), name, library, &registry) };
        let failed = Failed { call: "start the event thread", resource: "threads or descriptors", ..opening };
        let events = events.map_err(|error| failed.with(error.raw_os_error().unwrap_or(0)))?;
        Ok(Self {
            raw,
            name: name.to_owned(),
            library: Arc::clone(library),
            registry,
            facts,
            options: options.clone(),
            events,
            next_id: AtomicU64::new(1),
            shared: AtomicBool::new(false),
        })
    }

    pub(crate) fn raw(&self) -> *mut ibv_context {
        self.raw.as_ptr()
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn library(&self) -> &Arc<Library> {
        &self.library
    }

    /// Its descriptor, as whoever imports it needs it (ibv_import_device(3)).
    pub(crate) fn command_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the structure is libibverbs' own, initialised by ibv_open_device and there until ibv_close_device in the drop.
        let number = unsafe { self.raw.as_ref() }.cmd_fd;
        // SAFETY: open until the context is closed, which outlives the borrow of `self`.
        unsafe { BorrowedFd::borrow_raw(number) }
    }

    /// Notes that a client gets the descriptor.
    pub(crate) fn share(&self) {
        self.shared.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_shared(&self) -> bool {
        self.shared.load(Ordering::Relaxed)
    }

    pub(crate) fn registry(&self) -> &Registry {
        &self.registry
    }

    pub(crate) fn capabilities(&self) -> &HcaCapabilities {
        &self.facts.capabilities
    }

    pub(crate) fn ports(&self) -> u8 {
        self.facts.ports
    }

    pub(crate) fn reads(&self) -> ReadLimits {
        self.facts.reads
    }

    pub(crate) fn options(&self) -> &Options {
        &self.options
    }

    pub(crate) fn event_fd(&self) -> BorrowedFd<'_> {
        self.events.waiting()
    }

    pub(crate) fn next_id(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn is_gone(&self) -> bool {
        self.registry.is_gone()
    }

    /// A call on it that failed, and what ENOMEM would be short of.
    pub(crate) fn failed(&self, call: &'static str, resource: &'static str) -> Failed<'_> {
        Failed { hca: &self.name, device: self, call, resource }
    }

    /// # Errors
    /// `Gone` after a device fatal event or the removal of the device.
    pub(crate) fn check_alive(&self) -> Result<(), HcaError> {
        if !self.is_gone() {
            return Ok(());
        }
        let reason = "the driver reported it fatal or it was removed; it is served again once it is back".to_owned();
        Err(HcaError::Gone { hca: self.name.clone(), reason })
    }
}

impl Presence for Context {
    /// Asks what no caller's memory or queue pair is part of; libibverbs keeps no answer of it.
    fn has_gone(&self) -> bool {
        // SAFETY: the context is open until the drop.
        let answer = || unsafe { device::attributes(&self.library, self.raw) };
        self.is_gone() || answer().is_err_and(may_be_gone)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        self.events.join();
        let close = self.library.ibv_close_device;
        // SAFETY: closed once; everything made on it holds an Arc of this, and the event thread has ended.
        let closed = status(unsafe { close(self.raw.as_ptr()) });
        debug_assert!(closed.is_ok() || self.is_gone(), "{closed:?}");
    }
}
