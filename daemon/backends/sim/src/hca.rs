//! One simulated HCA: ports, key table, queue pairs by number, asynchronous events.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock, Weak};

use gdrd_hal::{
    CompletionQueue, CqId, DirectContext, Gid, GidEntry, Hca, HcaCapabilities, HcaError, HcaEvent, PortAttributes,
    PortState, ProtectionDomain,
};
use rustix::io::Errno;

use crate::completion::{CqCore, CqHandle};
use crate::direct::Direct;
use crate::domain::Domain;
use crate::event_fd;
use crate::fabric::Fabric;
use crate::fault::{Call, Effect, FaultEvent, MAX_DELAY};
use crate::keys::KeyTable;
use crate::queue_pair::QueuePairCore;
use crate::spec::{SimHca, SimPort};
use crate::sync::{lock, read, write};

/// Asynchronous events kept for a reader that does not come; older ones are dropped.
const MAX_EVENTS: usize = 1024;
/// Queue pair numbers have 24 bits; 0 and 1 are the management queue pairs (InfiniBand specification vol. 1, 3.5.3).
const QP_NUMS: std::ops::Range<u32> = 2..1 << 24;
/// Most queue pairs of an HCA: few enough that a random number is free nearly always.
const MAX_QUEUE_PAIRS: usize = 1 << 17;

/// One port.
pub(crate) struct Port {
    pub(crate) spec: SimPort,
    active: AtomicBool,
    /// Whether a subnet manager has seen it: an InfiniBand port has no LID before.
    was_active: AtomicBool,
    gids: RwLock<Vec<GidEntry>>,
    /// Counts changes of `gids`: an address handle of an older epoch reaches nobody.
    epoch: AtomicU32,
}

impl Port {
    fn new(spec: SimPort) -> Self {
        let is_active = spec.state == PortState::Active;
        Self {
            gids: RwLock::new(spec.gids.clone()),
            spec,
            active: AtomicBool::new(is_active),
            was_active: AtomicBool::new(is_active),
            epoch: AtomicU32::new(0),
        }
    }

    /// Whether packets pass to or from an address of `epoch`.
    pub(crate) fn passes(&self, epoch: u32) -> bool {
        self.active.load(Ordering::Acquire) && self.epoch.load(Ordering::Acquire) == epoch
    }

    /// LID, 0 while there is none.
    pub(crate) fn lid(&self) -> u16 {
        if self.was_active.load(Ordering::Acquire) { self.spec.lid } else { 0 }
    }

    pub(crate) fn epoch(&self) -> u32 {
        self.epoch.load(Ordering::Acquire)
    }

    pub(crate) fn has_gid(&self, gid: Gid) -> bool {
        read(&self.gids).iter().any(|entry| entry.gid == gid)
    }

    pub(crate) fn gids(&self) -> Vec<GidEntry> {
        read(&self.gids).clone()
    }

    fn state(&self) -> PortState {
        match self.active.load(Ordering::Acquire) {
            true => PortState::Active,
            false if self.spec.state == PortState::Active => PortState::Down,
            false => self.spec.state,
        }
    }
}

/// State of an HCA, shared with all that lives on it.
pub(crate) struct HcaCore {
    pub(crate) name: String,
    pub(crate) capabilities: HcaCapabilities,
    pub(crate) fabric: Arc<Fabric>,
    pub(crate) keys: KeyTable,
    ports: Vec<Port>,
    queue_pairs: RwLock<HashMap<u32, Weak<QueuePairCore>>>,
    cqs: Mutex<HashMap<u64, Weak<CqCore>>>,
    gone: AtomicBool,
    events: Mutex<VecDeque<HcaEvent>>,
    event: OwnedFd,
    /// Work requests executed while a script waited for some.
    ops: AtomicU64,
    /// `ops` at which the next of `op_faults` happens.
    next_op_fault: AtomicU64,
    op_faults: Mutex<Vec<(u64, FaultEvent)>>,
}

impl HcaCore {
    pub(crate) fn new(spec: SimHca, fabric: Arc<Fabric>) -> std::io::Result<Arc<Self>> {
        let hca = Arc::new(Self {
            name: spec.name,
            keys: KeyTable::new(spec.capabilities.max_memory_regions),
            capabilities: spec.capabilities,
            fabric: Arc::clone(&fabric),
            ports: spec.ports.into_iter().map(Port::new).collect(),
            queue_pairs: RwLock::new(HashMap::new()),
            cqs: Mutex::new(HashMap::new()),
            gone: AtomicBool::new(false),
            events: Mutex::new(VecDeque::new()),
            event: event_fd::new()?,
            ops: AtomicU64::new(0),
            next_op_fault: AtomicU64::new(u64::MAX),
            op_faults: Mutex::new(Vec::new()),
        });
        fabric.attach(&hca);
        Ok(hca)
    }

    pub(crate) fn invalid(&self, call: &'static str, reason: String) -> HcaError {
        HcaError::Invalid { hca: self.name.clone(), call, reason }
    }

    pub(crate) fn unsupported(&self, what: &str) -> HcaError {
        HcaError::Unsupported { hca: self.name.clone(), what: what.to_owned() }
    }

    pub(crate) fn exhausted(&self, call: &'static str, what: &str) -> HcaError {
        HcaError::Exhausted { hca: self.name.clone(), call, what: what.to_owned() }
    }

    pub(crate) fn driver(&self, call: &'static str, errno: Errno, reason: String) -> HcaError {
        HcaError::Driver { hca: self.name.clone(), call, errno: errno.raw_os_error(), reason }
    }

    pub(crate) fn check_present(&self) -> Result<(), HcaError> {
        match self.is_gone() {
            true => Err(HcaError::Gone { hca: self.name.clone(), reason: "the device is fatal".to_owned() }),
            false => Ok(()),
        }
    }

    /// Lets a cold call through, unless the device is gone or the fault script has it fail; may block by it.
    pub(crate) fn admit(&self, call: &'static str, fault: Call) -> Result<(), HcaError> {
        self.admit_sized(call, fault, 0)
    }

    /// The same for a call about so many bytes.
    pub(crate) fn admit_sized(&self, call: &'static str, fault: Call, len_bytes: u64) -> Result<(), HcaError> {
        self.check_present()?;
        match self.fabric.faults.on_call(fault, &self.name) {
            None => Ok(()),
            Some(Effect::Hang) => self.check_present(),
            Some(Effect::Delay(delay)) => {
                std::thread::sleep(delay);
                self.check_present()
            }
            Some(Effect::Cost { call, per_mib }) => {
                let mib = u32::try_from(len_bytes.div_ceil(1 << 20)).unwrap_or(u32::MAX);
                std::thread::sleep(call + per_mib.saturating_mul(mib).min(MAX_DELAY));
                self.check_present()
            }
            Some(Effect::Fail(errno)) => Err(self.scripted_failure(call, Errno::from_raw_os_error(errno))),
        }
    }

    fn scripted_failure(&self, call: &'static str, errno: Errno) -> HcaError {
        let reason = "by the fault script".to_owned();
        match errno {
            Errno::NOMEM => self.exhausted(call, "memory by the fault script"),
            Errno::INVAL => self.invalid(call, reason),
            Errno::OPNOTSUPP => self.unsupported(&format!("do {call} by the fault script")),
            Errno::NODEV => {
                self.become_fatal();
                HcaError::Gone { hca: self.name.clone(), reason }
            }
            // The failure of one call, as of a device that answers when it is asked once more.
            errno => self.driver(call, errno, reason),
        }
    }

    pub(crate) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    pub(crate) fn port(&self, port_num: u8) -> Option<&Port> {
        self.ports.get(usize::from(port_num).checked_sub(1)?)
    }

    pub(crate) fn raise(&self, event: HcaEvent) {
        let mut events = lock(&self.events);
        if events.len() == MAX_EVENTS {
            events.pop_front();
        }
        events.push_back(event);
        event_fd::set(&self.event);
    }

    pub(crate) fn set_link(&self, port_num: u8, active: bool) {
        let Some(port) = self.port(port_num) else { return };
        if active {
            port.was_active.store(true, Ordering::Release);
        }
        if port.active.swap(active, Ordering::AcqRel) != active {
            self.raise(match active {
                true => HcaEvent::PortActive { port_num },
                false => HcaEvent::PortDown { port_num },
            });
        }
    }

    /// Gives every row of the GID table a new interface identifier, as after a change of addresses.
    pub(crate) fn change_gids(&self, port_num: u8) {
        let Some(port) = self.port(port_num) else { return };
        for entry in write(&port.gids).iter_mut() {
            let interface: [u8; 8] = rand::random();
            entry.gid.0[8..].copy_from_slice(&interface);
        }
        port.epoch.fetch_add(1, Ordering::AcqRel);
        self.raise(HcaEvent::GidChange { port_num });
    }

    pub(crate) fn become_fatal(&self) {
        if self.gone.swap(true, Ordering::AcqRel) {
            return;
        }
        for cq in lock(&self.cqs).values().filter_map(Weak::upgrade) {
            cq.device_gone();
        }
        self.raise(HcaEvent::DeviceFatal);
    }

    /// Has `event` happen once `ops` more work requests were executed here.
    pub(crate) fn schedule_fault(&self, ops: u64, event: FaultEvent) {
        let mut faults = lock(&self.op_faults);
        let at = self.ops.load(Ordering::Acquire).saturating_add(ops);
        faults.push((at, event));
        self.publish_next_fault(&faults);
    }

    fn publish_next_fault(&self, faults: &[(u64, FaultEvent)]) {
        let next = faults.iter().map(|(at, _)| *at).min();
        self.next_op_fault.store(next.unwrap_or(u64::MAX), Ordering::Release);
    }

    /// Counts an executed work request, while a script waits for one.
    pub(crate) fn count_op(&self) {
        if self.next_op_fault.load(Ordering::Acquire) != u64::MAX {
            self.ops.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// Makes the scripted events happen that are due before the next work request; true when waiting work may go on.
    pub(crate) fn fire_due_faults(&self) -> bool {
        let next = self.next_op_fault.load(Ordering::Acquire);
        if next == u64::MAX || self.ops.load(Ordering::Acquire) < next {
            return false;
        }
        let due: Vec<_> = {
            let mut faults = lock(&self.op_faults);
            let ops = self.ops.load(Ordering::Acquire);
            let due = faults.extract_if(.., |(at, _)| *at <= ops).collect();
            self.publish_next_fault(&faults);
            due
        };
        due.iter().fold(false, |kick, (_, event)| self.fabric.fire(event) || kick)
    }

    pub(crate) fn find_cq(&self, id: CqId) -> Option<Arc<CqCore>> {
        lock(&self.cqs).get(&id.0)?.upgrade()
    }

    pub(crate) fn forget_cq(&self, id: CqId) {
        lock(&self.cqs).remove(&id.0);
    }

    pub(crate) fn find_queue_pair(&self, qp_num: u32) -> Option<Arc<QueuePairCore>> {
        read(&self.queue_pairs).get(&qp_num)?.upgrade()
    }

    pub(crate) fn queue_pairs(&self) -> Vec<Arc<QueuePairCore>> {
        read(&self.queue_pairs).values().filter_map(Weak::upgrade).collect()
    }

    /// Makes a queue pair under a fresh number; `None` when the HCA has no room for one more.
    pub(crate) fn add_queue_pair(&self, make: impl FnOnce(u32) -> QueuePairCore) -> Option<Arc<QueuePairCore>> {
        let mut queue_pairs = write(&self.queue_pairs);
        if queue_pairs.len() >= MAX_QUEUE_PAIRS {
            return None;
        }
        let qp_num = loop {
            let qp_num = rand::random_range(QP_NUMS);
            if !queue_pairs.contains_key(&qp_num) {
                break qp_num;
            }
        };
        let queue_pair = Arc::new(make(qp_num));
        queue_pairs.insert(qp_num, Arc::downgrade(&queue_pair));
        Some(queue_pair)
    }

    pub(crate) fn forget_queue_pair(&self, qp_num: u32) {
        write(&self.queue_pairs).remove(&qp_num);
    }
}

/// The HCA as the engine holds it.
pub(crate) struct HcaHandle(pub(crate) Arc<HcaCore>);

impl Hca for HcaHandle {
    fn name(&self) -> &str {
        &self.0.name
    }

    fn capabilities(&self) -> HcaCapabilities {
        self.0.capabilities.clone()
    }

    fn ports(&self) -> Result<Vec<PortAttributes>, HcaError> {
        self.0.check_present()?;
        let attributes = |(port_num, port): (u8, &Port)| PortAttributes {
            port_num,
            state: port.state(),
            link_layer: port.spec.link_layer,
            rate_gbps: port.spec.rate_gbps,
            lid: port.lid(),
            mtu_bytes: port.spec.mtu_bytes,
            gids: port.gids(),
        };
        Ok((1..).zip(&self.0.ports).map(attributes).collect())
    }

    fn alloc_pd(&self) -> Result<Arc<dyn ProtectionDomain>, HcaError> {
        self.0.admit("alloc_pd", Call::AllocPd)?;
        Ok(Arc::new(Domain::new(Arc::clone(&self.0))))
    }

    fn open_direct(&self) -> Result<Arc<dyn DirectContext>, HcaError> {
        Ok(Arc::new(Direct::open(&self.0)?))
    }

    fn create_cq(&self, depth: u32) -> Result<Box<dyn CompletionQueue>, HcaError> {
        const CALL: &str = "create_cq";
        self.0.admit(CALL, Call::CreateCq)?;
        let most = self.0.capabilities.max_completions;
        if depth == 0 || depth > most {
            return Err(self.0.invalid(CALL, format!("depth {depth} is not in 1 to {most}")));
        }
        let id = CqId(self.0.fabric.new_id());
        let cq = CqCore::new(Arc::clone(&self.0), depth, id);
        let cq = cq.map_err(|error| self.0.exhausted(CALL, &format!("file descriptors: {error}")))?;
        let cq = Arc::new(cq);
        lock(&self.0.cqs).insert(id.0, Arc::downgrade(&cq));
        Ok(Box::new(CqHandle(cq)))
    }

    fn take_events(&self) -> Vec<HcaEvent> {
        let mut events = lock(&self.0.events);
        event_fd::clear(&self.0.event);
        events.drain(..).collect()
    }

    fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.0.event.as_fd())
    }
}
