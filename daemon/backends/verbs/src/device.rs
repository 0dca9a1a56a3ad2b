//! The list of devices, and a device as gdrd-hal sees it.

use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use gdrd_hal::{
    Access, CompletionQueue, DirectContext, Hca, HcaCapabilities, HcaError, HcaEvent, MemorySource, PortAttributes,
    ProtectionDomain, QueuePairConfig, QueuePairType,
};
use rdma_sys::{ibv_context, ibv_device, ibv_device_attr};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use crate::capability::Facts;
use crate::completion;
use crate::context::Context;
use crate::direct::{self, Direct};
use crate::domain::{Domain, DomainHandle};
use crate::error::{AbsentError, Failed, Opening, Presence as _, errno, status};
use crate::library::Library;
use crate::options::Options;
use crate::port;
use crate::queue_pair;

/// Inline payloads that are tried, longest first; drivers tell no limit.
const INLINE_BYTES: [u32; 4] = [64, 48, 32, 16];
/// What opening a device may be short of.
const OPENING: &str = "memory or descriptors";

/// What `ibv_get_device_list(3)` gives. Freed on drop; opened devices outlive it.
#[derive(Debug)]
pub(crate) struct DeviceList<'l> {
    library: &'l Arc<Library>,
    list: NonNull<*mut ibv_device>,
    len: usize,
}

impl<'l> DeviceList<'l> {
    /// # Errors
    /// `NoList`.
    pub(crate) fn read(library: &'l Arc<Library>) -> Result<Self, AbsentError> {
        let mut count = 0;
        let get = library.ibv_get_device_list;
        // SAFETY: the count is written during the call only.
        let list = unsafe { get(&raw mut count) };
        let reason = || std::io::Error::from_raw_os_error(errno()).to_string();
        let list = NonNull::new(list).ok_or_else(|| AbsentError::NoList { reason: reason() })?;
        Ok(Self { library, list, len: usize::try_from(count).unwrap_or(0) })
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Name of the device at this place; `None` past the end.
    pub(crate) fn name(&self, place: usize) -> Option<String> {
        self.device(place).map(|(_, name)| name)
    }

    /// The device and its name; `None` past the end.
    fn device(&self, place: usize) -> Option<(NonNull<ibv_device>, String)> {
        if place >= self.len {
            return None;
        }
        // SAFETY: the array has `len` entries.
        let entry = unsafe { self.list.add(place) };
        // SAFETY: the entry lies in the array, which is not changed until it is freed.
        let device = NonNull::new(unsafe { entry.read() })?;
        let name = self.library.ibv_get_device_name;
        // SAFETY: the device is of this list, which is not freed yet.
        let name = NonNull::new(unsafe { name(device.as_ptr()) }.cast_mut())?;
        // SAFETY: the library returns the device's own zero-terminated name, which lives as long as the device.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) };
        Some((device, name.to_string_lossy().into_owned()))
    }
}

impl Drop for DeviceList<'_> {
    fn drop(&mut self) {
        let free = self.library.ibv_free_device_list;
        // SAFETY: freed once; contexts keep their device themselves (ibv_free_device_list in libibverbs/device.c).
        unsafe { free(self.list.as_ptr()) };
    }
}

/// One device.
#[derive(Debug)]
pub(crate) struct Device {
    context: Arc<Context>,
    capabilities: HcaCapabilities,
}

impl Device {
    /// Opens the device at this place of the list; its name comes with the error too.
    pub(crate) fn open(list: &DeviceList<'_>, place: usize, options: &Options) -> (String, Result<Self, HcaError>) {
        let Some((device, name)) = list.device(place) else {
            let reason = "the list of devices changed".to_owned();
            let hca = format!("device {place}");
            return (hca.clone(), Err(HcaError::Gone { hca, reason }));
        };
        let opening = Failed { hca: &name, device: &Opening, call: "ibv_open_device", resource: OPENING };
        let opened = open(list.library, device, opening, options).map(Self::with_context);
        (name, opened)
    }

    /// Tries what no query tells.
    fn with_context(context: Context) -> Self {
        let context = Arc::new(context);
        let mut capabilities = context.capabilities().clone();
        capabilities.max_inline_bytes = most_inline_bytes(&context);
        capabilities.dma_buf = may_register_dma_bufs(&context);
        capabilities.direct = direct::can_import(&context);
        Self { context, capabilities }
    }
}

/// The device of this context once more, with a context of its own.
pub(crate) fn open_again(context: &Context) -> Result<Context, HcaError> {
    let opening = context.failed("ibv_open_device", OPENING);
    // A process short of descriptors is told of no devices or of some, so a list says nothing about the device.
    let unlisted = |reason: String| match context.has_gone() {
        true => HcaError::Gone { hca: context.name().to_owned(), reason },
        false => HcaError::Driver { hca: context.name().to_owned(), call: "ibv_get_device_list", errno: 0, reason },
    };
    let list = DeviceList::read(context.library()).map_err(|error| unlisted(error.to_string()))?;
    let found = (0..list.len()).filter_map(|place| list.device(place)).find(|(_, found)| found == context.name());
    let (device, _) = found.ok_or_else(|| unlisted("libibverbs does not list it".to_owned()))?;
    open(context.library(), device, opening, context.options())
}

fn open(
    library: &Arc<Library>,
    device: NonNull<ibv_device>,
    opening: Failed<'_>,
    options: &Options,
) -> Result<Context, HcaError> {
    let open = library.ibv_open_device;
    // SAFETY: the device is of a list that the caller keeps during the call.
    let raw = unsafe { open(device.as_ptr()) };
    let raw = NonNull::new(raw).ok_or_else(|| opening.with(errno()))?;
    // SAFETY: the device is of a list that the caller keeps during the call; the field is set when the list is made.
    let transport = unsafe { (*device.as_ptr()).transport_type };
    // SAFETY: the context is open.
    let asked = unsafe { attributes(library, raw) };
    let asked = asked.map_err(|errno| Failed { call: "ibv_query_device", ..opening }.with(errno));
    let owned = asked.and_then(|attr| {
        // SAFETY: the context is open.
        let messages = unsafe { port::messages(library, raw.as_ptr(), opening, attr.phys_port_cnt) }?;
        // SAFETY: opened just now, and given to nobody else.
        unsafe { Context::own(raw, opening, library, Facts::new(&attr, transport, &messages), options) }
    });
    owned.inspect_err(|_| {
        let close = library.ibv_close_device;
        // SAFETY: nobody has taken the context over.
        let closed = unsafe { close(raw.as_ptr()) };
        debug_assert_eq!(closed, 0, "ibv_close_device");
    })
}

/// What `ibv_query_device(3)` gives; an errno on failure.
///
/// # Safety
/// `context` must be open.
pub(crate) unsafe fn attributes(library: &Library, context: NonNull<ibv_context>) -> Result<ibv_device_attr, i32> {
    // SAFETY: integers and characters only (struct ibv_device_attr, verbs.h); zero is valid.
    let mut attr: ibv_device_attr = unsafe { MaybeUninit::zeroed().assume_init() };
    let query = library.ibv_query_device;
    // SAFETY: the context is open (above), and the structure is written during the call only.
    status(unsafe { query(context.as_ptr(), &raw mut attr) })?;
    Ok(attr)
}

/// The longest inline payload with which the provider makes an RC queue pair.
fn most_inline_bytes(context: &Arc<Context>) -> u32 {
    if context.capabilities().no_queue_pairs.is_some() {
        return 0;
    }
    let takes = |inline_bytes: u32| -> Result<(), HcaError> {
        let domain = Arc::new(DomainHandle::alloc(context)?);
        let cq = completion::create(context, 2)?;
        let config =
            QueuePairConfig { qp_type: QueuePairType::Rc, send_depth: 1, recv_depth: 1, inline_bytes, port_num: 1 };
        queue_pair::create(&domain, cq.id(), None, &config).map(drop)
    };
    INLINE_BYTES.into_iter().find(|bytes| takes(*bytes).is_ok()).unwrap_or(0)
}

/// Whether the provider takes dma-bufs at all: a memfd is none, and what knows dma-bufs says so rather than that it
/// does not know them. A yes is no promise for any GPU; registration decides.
fn may_register_dma_bufs(context: &Arc<Context>) -> bool {
    const LEN_BYTES: u64 = 4096;
    let attempt = || -> Result<(), HcaError> {
        let domain = Domain(Arc::new(DomainHandle::alloc(context)?));
        let fd = sealed_memfd(LEN_BYTES)
            .map_err(|errno| context.failed("memfd_create", "descriptors").with(errno.raw_os_error()))?;
        let source = MemorySource::DmaBuf { fd: fd.as_fd(), offset: 0, len_bytes: LEN_BYTES };
        domain.register(source, Access::DATA, 0).map(drop)
    };
    !matches!(attempt(), Err(HcaError::Unsupported { .. } | HcaError::Gone { .. }))
}

fn sealed_memfd(len_bytes: u64) -> rustix::io::Result<OwnedFd> {
    let fd = memfd_create("gdrd-probe", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&fd, len_bytes)?;
    fcntl_add_seals(&fd, SealFlags::SHRINK)?;
    Ok(fd)
}

impl Hca for Device {
    fn name(&self) -> &str {
        self.context.name()
    }

    fn capabilities(&self) -> HcaCapabilities {
        self.capabilities.clone()
    }

    fn ports(&self) -> Result<Vec<PortAttributes>, HcaError> {
        port::all(&self.context)
    }

    fn alloc_pd(&self) -> Result<Arc<dyn ProtectionDomain>, HcaError> {
        self.context.check_alive()?;
        Ok(Arc::new(Domain(Arc::new(DomainHandle::alloc(&self.context)?))))
    }

    fn open_direct(&self) -> Result<Arc<dyn DirectContext>, HcaError> {
        self.context.check_alive()?;
        if !self.capabilities.direct {
            let what = "hand out contexts: its provider cannot import one (ibv_import_device(3))".to_owned();
            return Err(HcaError::Unsupported { hca: self.context.name().to_owned(), what });
        }
        Ok(Arc::new(Direct::open(&self.context)?))
    }

    fn create_cq(&self, depth: u32) -> Result<Box<dyn CompletionQueue>, HcaError> {
        Ok(Box::new(completion::create(&self.context, depth)?))
    }

    fn take_events(&self) -> Vec<HcaEvent> {
        // First the readiness, then the events: one that comes in between is told again by the fd.
        let mut count = [0; 8];
        match rustix::io::read(self.context.event_fd(), &mut count) {
            Ok(_) | Err(_) => self.context.registry().take_events(),
        }
    }

    fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.context.event_fd())
    }
}
