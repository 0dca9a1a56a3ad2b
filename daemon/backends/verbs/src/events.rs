//! The thread that waits for a context's asynchronous events (`ibv_get_async_event(3)`).
//!
//! It acknowledges every event at once, since destroying an object waits for that; it marks a completion queue that
//! overran as dead and moves its queue pairs to ERR, which not every driver does. It sleeps without a timeout.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{Builder, JoinHandle};

use gdrd_hal::HcaEvent;
use rdma_sys::{ibv_context, ibv_event_type, ibv_qp};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;

use crate::library::{AsyncEvent, Library};
use crate::registry::Registry;
use crate::transition;

/// The thread of one context.
#[derive(Debug)]
pub(crate) struct EventThread {
    stop: OwnedFd,
    /// Readable while events wait.
    waiting: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

/// What the thread works on; valid until [`EventThread::join`].
struct Watched {
    context: *mut ibv_context,
    library: Arc<Library>,
    registry: Arc<Registry>,
    waiting: Arc<OwnedFd>,
}

// SAFETY: libibverbs is thread-safe (libibverbs README), and the context is closed only after the thread was joined.
unsafe impl Send for Watched {}

impl EventThread {
    /// Starts it.
    ///
    /// # Safety
    /// `context` must be open until `join` has returned.
    ///
    /// # Errors
    /// When the system gives no fds or no thread.
    pub(crate) unsafe fn start(
        context: *mut ibv_context,
        name: &str,
        library: &Arc<Library>,
        registry: &Arc<Registry>,
    ) -> io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let (stop, waiting) = (eventfd(0, flags)?, Arc::new(eventfd(0, flags)?));
        let watched = Watched {
            context,
            library: Arc::clone(library),
            registry: Arc::clone(registry),
            waiting: Arc::clone(&waiting),
        };
        let stopped = stop.try_clone()?;
        // SAFETY: the caller keeps the context open.
        let fd = unsafe { watched.async_fd() };
        fcntl_setfl(fd, fcntl_getfl(fd)? | OFlags::NONBLOCK)?;
        let thread = Builder::new().name(format!("gdrd-ev-{name}")).spawn(move || watched.run(stopped.as_fd()))?;
        Ok(Self { stop, waiting, thread: Some(thread) })
    }

    /// Readable while events wait.
    pub(crate) fn waiting(&self) -> BorrowedFd<'_> {
        self.waiting.as_fd()
    }

    /// Ends the thread; afterwards the context may be closed.
    pub(crate) fn join(&mut self) {
        signal(self.stop.as_fd());
        if let Some(thread) = self.thread.take() {
            // It ends in no other way than by returning; a panic of it has been reported already.
            drop(thread.join());
        }
    }
}

/// Makes an eventfd readable. EAGAIN: it is already.
fn signal(fd: BorrowedFd<'_>) {
    let written = rustix::io::write(fd, &1_u64.to_ne_bytes());
    debug_assert!(matches!(written, Ok(8) | Err(Errno::AGAIN)), "{written:?}");
}

impl Watched {
    /// # Safety
    /// The context must be open.
    unsafe fn async_fd(&self) -> BorrowedFd<'static> {
        // SAFETY: the pointer is of an open context (above), whose `async_fd` is set at opening and never changed.
        let fd = unsafe { (*self.context).async_fd };
        // SAFETY: the fd is open as long as the context is; users of this type do not outlive it.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }

    fn run(&self, stop: BorrowedFd<'_>) {
        // SAFETY: the thread is joined before the context is closed.
        let events = unsafe { self.async_fd() };
        loop {
            let mut fds =
                [PollFd::from_borrowed_fd(stop, PollFlags::IN), PollFd::from_borrowed_fd(events, PollFlags::IN)];
            match poll(&mut fds, None) {
                // Who destroys an object waits for its events to be read: without poll they are, if with more laps.
                Ok(_) | Err(Errno::INTR | Errno::AGAIN | Errno::NOMEM) => {}
                // Nothing else is said of two open descriptors.
                Err(_) => return self.device_gone(),
            }
            let asked_to_stop = !fds[0].revents().is_empty();
            if asked_to_stop || !self.take_all() {
                break;
            }
        }
    }

    /// False when there will be no more events.
    fn take_all(&self) -> bool {
        loop {
            let mut event = AsyncEvent { element: 0, event_type: u32::MAX };
            let get = self.library.ibv_get_async_event;
            // SAFETY: the context is open while this thread runs, and the structure has the layout of verbs.h
            // (tests/abi.rs).
            let returned = unsafe { get(self.context, &raw mut event) };
            if returned == 0 {
                self.note(event);
                let ack = self.library.ibv_ack_async_event;
                // SAFETY: this event was got just now and is acknowledged once.
                unsafe { ack(&raw mut event) };
                continue;
            }
            return match Errno::from_io_error(&io::Error::last_os_error()) {
                Some(Errno::AGAIN | Errno::INTR) => true,
                // The device was taken away (ib_uverbs closes the event file).
                _ => {
                    self.device_gone();
                    false
                }
            };
        }
    }

    fn device_gone(&self) {
        self.registry.set_gone();
        self.tell(HcaEvent::DeviceFatal);
    }

    fn tell(&self, event: HcaEvent) {
        self.registry.note(event);
        signal(self.waiting.as_fd());
    }

    fn note(&self, event: AsyncEvent) {
        let address = usize::try_from(event.element).unwrap_or(0);
        match Kind::of(event) {
            Kind::PortActive(port_num) => self.tell(HcaEvent::PortActive { port_num }),
            Kind::PortDown(port_num) => self.tell(HcaEvent::PortDown { port_num }),
            Kind::Addresses(port_num) => self.tell(HcaEvent::GidChange { port_num }),
            Kind::QueuePair => {
                let found = self.registry.objects().queue_pairs.get(&address).copied();
                if let Some(entry) = found {
                    self.tell(HcaEvent::QueuePairFatal { qp_num: entry.qp_num });
                }
            }
            Kind::CompletionQueue => self.completion_queue_overran(address),
            Kind::LastReceive => {
                let found = self.registry.objects().queue_pairs.get(&address).copied();
                if let Some(entry) = found {
                    self.tell(HcaEvent::LastSharedReceive { qp_num: entry.qp_num });
                }
            }
            Kind::SharedReceives { is_low } => {
                let found = self.registry.objects().srqs.get(&address).map(|entry| entry.id);
                match (found, is_low) {
                    (Some(srq), true) => self.tell(HcaEvent::SharedReceivesLow { srq }),
                    (Some(srq), false) => self.tell(HcaEvent::SharedReceiveQueueFatal { srq }),
                    (None, _) => {}
                }
            }
            Kind::Device => self.device_gone(),
            Kind::Other => {}
        }
    }

    fn completion_queue_overran(&self, cq: usize) {
        let objects = self.registry.objects();
        if let Some(entry) = objects.cqs.get(&cq) {
            entry.dead.store(true, Ordering::Release);
        }
        let mut ended = Vec::new();
        for (address, entry) in objects.queue_pairs.iter().filter(|(_, entry)| entry.cq == cq) {
            let queue_pair = ptr::with_exposed_provenance_mut::<ibv_qp>(*address);
            // SAFETY: a queue pair leaves the registry before it is destroyed, and the registry is locked here.
            let moved = unsafe { transition::to_error(&self.library, queue_pair) };
            if let Err(errno) = moved {
                // It is in ERR, or its device is going. The event still waits to be acknowledged: nothing may end the thread here.
                tracing::warn!(
                    qp_num = entry.qp_num,
                    errno,
                    "a queue pair of a completion queue that overran did not go to ERR"
                );
            }
            ended.push(entry.qp_num);
        }
        drop(objects);
        for qp_num in ended {
            self.tell(HcaEvent::QueuePairFatal { qp_num });
        }
    }
}

/// What an event is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    PortActive(u8),
    PortDown(u8),
    Addresses(u8),
    QueuePair,
    CompletionQueue,
    LastReceive,
    SharedReceives { is_low: bool },
    Device,
    Other,
}

impl Kind {
    fn of(event: AsyncEvent) -> Self {
        const fn number(event: ibv_event_type) -> u32 {
            event as u32
        }
        let is = |known: ibv_event_type| event.event_type == number(known);
        // The port is an int in the union's first bytes.
        let port_num = match event.element.to_ne_bytes() {
            [a, b, c, d, ..] => u8::try_from(i32::from_ne_bytes([a, b, c, d])).unwrap_or(0),
        };
        match () {
            () if is(ibv_event_type::IBV_EVENT_PORT_ACTIVE) => Self::PortActive(port_num),
            () if is(ibv_event_type::IBV_EVENT_PORT_ERR) => Self::PortDown(port_num),
            () if is(ibv_event_type::IBV_EVENT_GID_CHANGE) || is(ibv_event_type::IBV_EVENT_LID_CHANGE) => {
                Self::Addresses(port_num)
            }
            () if is(ibv_event_type::IBV_EVENT_QP_FATAL)
                || is(ibv_event_type::IBV_EVENT_QP_REQ_ERR)
                || is(ibv_event_type::IBV_EVENT_QP_ACCESS_ERR) =>
            {
                Self::QueuePair
            }
            () if is(ibv_event_type::IBV_EVENT_CQ_ERR) => Self::CompletionQueue,
            () if is(ibv_event_type::IBV_EVENT_QP_LAST_WQE_REACHED) => Self::LastReceive,
            () if is(ibv_event_type::IBV_EVENT_SRQ_LIMIT_REACHED) => Self::SharedReceives { is_low: true },
            () if is(ibv_event_type::IBV_EVENT_SRQ_ERR) => Self::SharedReceives { is_low: false },
            () if is(ibv_event_type::IBV_EVENT_DEVICE_FATAL) => Self::Device,
            () => Self::Other,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read as _;
    use std::mem::ManuallyDrop;
    use std::os::fd::{AsRawFd as _, FromRawFd as _};
    use std::sync::atomic::AtomicBool;
    use std::sync::{Condvar, Mutex, Weak};

    use gdrd_hal::CqId;

    use super::*;
    use crate::registry::{CqEntry, QueuePairEntry};

    fn kind(event_type: u32, port_num: i32) -> Kind {
        let mut element = [0; 8];
        element[..4].copy_from_slice(&port_num.to_ne_bytes());
        Kind::of(AsyncEvent { element: u64::from_ne_bytes(element), event_type })
    }

    /// Events acknowledged.
    static ACKNOWLEDGED: (Mutex<u32>, Condvar) = (Mutex::new(0), Condvar::new());

    /// A byte of the descriptor is an event of the completion queue at address 1, its end the end of the device.
    unsafe extern "C" fn get(context: *mut ibv_context, event: *mut AsyncEvent) -> i32 {
        // SAFETY: the test's own context, which outlives its thread.
        let number = unsafe { (*context).async_fd };
        // SAFETY: a pipe of the test, open as long, and not closed here.
        let mut pipe = ManuallyDrop::new(unsafe { File::from_raw_fd(number) });
        // It sets errno, as rustix does not.
        if pipe.read(&mut [0; 1]).is_ok_and(|read| read == 1) {
            // SAFETY: the thread's own event.
            unsafe { event.write(AsyncEvent { element: 1, event_type: 0 }) };
            return 0;
        }
        -1
    }

    unsafe extern "C" fn acknowledge(_: *mut AsyncEvent) {
        *ACKNOWLEDGED.0.lock().expect("nobody panicked") += 1;
        ACKNOWLEDGED.1.notify_all();
    }

    unsafe extern "C" fn refuse(_: *mut ibv_qp, _: *mut rdma_sys::ibv_qp_attr, _: i32) -> i32 {
        Errno::INVAL.raw_os_error()
    }

    #[test]
    fn an_event_is_acknowledged_whatever_a_driver_says_to_what_follows_from_it() {
        let mut library = Library::uncallable();
        (library.ibv_get_async_event, library.ibv_ack_async_event) = (get, acknowledge);
        library.ibv_modify_qp = refuse;
        let library = Arc::new(library);
        let (events, device) = rustix::pipe::pipe().expect("a pipe");
        // SAFETY: integers, pointers and a mutex that nobody locks (struct ibv_context, verbs.h); zero is valid.
        let mut context: ibv_context = unsafe { std::mem::zeroed() };
        context.async_fd = events.as_raw_fd();
        let registry = Arc::new(Registry::default());
        let dead = Arc::new(AtomicBool::new(false));
        let cq = CqEntry { id: CqId(7), dead: Arc::clone(&dead), handle: Weak::new() };
        registry.objects().cqs.insert(1, cq);
        registry.objects().queue_pairs.insert(2, QueuePairEntry { qp_num: 17, cq: 1 });
        // SAFETY: it is joined below, before the context goes.
        let thread = unsafe { EventThread::start(&raw mut context, "test", &library, &registry) };
        let mut thread = thread.expect("a thread");
        for round in 1..=2 {
            rustix::io::write(&device, &[0]).expect("room");
            let count = ACKNOWLEDGED.0.lock().expect("nobody panicked");
            drop(ACKNOWLEDGED.1.wait_while(count, |count| *count < round).expect("nobody panicked"));
            assert!(dead.load(Ordering::Acquire));
            assert_eq!(registry.take_events(), [HcaEvent::QueuePairFatal { qp_num: 17 }]);
        }
        thread.join();
        assert!(!registry.is_gone());
    }

    #[test]
    fn events_of_ports_and_devices_are_told_with_their_port() {
        assert_eq!(kind(9, 2), Kind::PortActive(2));
        assert_eq!(kind(10, 1), Kind::PortDown(1));
        assert_eq!(kind(18, 1), Kind::Addresses(1));
        assert_eq!(kind(8, 0), Kind::Device);
        assert_eq!(kind(0, 0), Kind::CompletionQueue);
        assert_eq!(kind(1, 0), Kind::QueuePair);
        assert_eq!(kind(14, 0), Kind::SharedReceives { is_low: false });
        assert_eq!(kind(15, 0), Kind::SharedReceives { is_low: true });
        assert_eq!(kind(16, 0), Kind::LastReceive);
    }

    #[test]
    fn events_newer_than_the_headers_are_passed_over() {
        for event_type in [20, 21, 1000, u32::MAX] {
            assert_eq!(kind(event_type, 1), Kind::Other);
        }
        assert_eq!(kind(9, -1), Kind::PortActive(0), "a port that no device has");
    }
}
