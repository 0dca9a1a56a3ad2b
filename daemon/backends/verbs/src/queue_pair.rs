//! Queue pairs: creation, states, connection.

use std::collections::BTreeSet;
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gdrd_hal::{
    CqId, Endpoint, Gid, HcaError, LinkLayer, PortAttributes, QueuePair, QueuePairConfig, QueuePairParts,
    QueuePairState, QueuePairType, SrqId,
};
use rdma_sys::{ibv_ah, ibv_ah_attr, ibv_qp, ibv_qp_init_attr, ibv_qp_state, ibv_qp_type};

use crate::completion::CqHandle;
use crate::domain::DomainHandle;
use crate::error::{Failed, errno, toward};
use crate::gid::{LAST_ROW, choose_gid};
use crate::ledger::Ledger;
use crate::port;
use crate::registry::QueuePairEntry;
use crate::shared_receive::SrqHandle;
use crate::transition;
use crate::work::Work;

/// Numbers of queue pairs and packets have 24 bits.
const MASK_24_BITS: u32 = 0x00ff_ffff;

/// How far its owner has taken a queue pair. The device may have it in ERR while this says `Ready`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    Fresh = 0,
    Init = 1,
    Ready = 2,
    Error = 3,
}

/// Where datagrams of a UD queue pair go.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Destination {
    pub(crate) ah: NonNull<ibv_ah>,
    pub(crate) qp_num: u32,
}

// SAFETY: the address handle is only given to libibverbs, which is thread-safe (libibverbs README), and lives as long
// as its queue pair.
unsafe impl Send for Destination {}

/// An `ibv_ah`. Destroyed with it.
#[derive(Debug)]
struct AddressHandle {
    to: Destination,
    domain: Arc<DomainHandle>,
}

impl AddressHandle {
    fn create(domain: &Arc<DomainHandle>, way: &mut ibv_ah_attr, qp_num: u32) -> Result<Self, HcaError> {
        let context = domain.context();
        let create = context.library().ibv_create_ah;
        // SAFETY: the domain is live; the structure is read during the call only.
        let ah = NonNull::new(unsafe { create(domain.raw(), way) });
        let failed = context.failed("ibv_create_ah", "memory");
        let to = Destination { ah: ah.ok_or_else(|| failed.with(errno()))?, qp_num };
        Ok(Self { to, domain: Arc::clone(domain) })
    }
}

impl Drop for AddressHandle {
    fn drop(&mut self) {
        let context = self.domain.context();
        let destroy = context.library().ibv_destroy_ah;
        // SAFETY: destroyed once, and no request names it: it was never given out, or its queue pair is destroyed.
        let destroyed = unsafe { destroy(self.to.ah.as_ptr()) };
        debug_assert!(destroyed == 0 || context.is_gone(), "ibv_destroy_ah: {destroyed}");
    }
}

/// What changes under the owner's calls.
#[derive(Debug, Default)]
struct Connection {
    /// Fixed at the first look, so that it does not change under the peer.
    endpoint: Option<Endpoint>,
    /// Of a UD queue pair that is connected.
    destination: Option<AddressHandle>,
}

/// An `ibv_qp`. Destroyed when control and work side are dropped.
#[derive(Debug)]
pub(crate) struct QueuePairHandle {
    qp: NonNull<ibv_qp>,
    qp_num: u32,
    qp_type: QueuePairType,
    port_num: u8,
    stage: AtomicU8,
    connection: Mutex<Connection>,
    pub(crate) ledger: Arc<Ledger>,
    cq: Arc<CqHandle>,
    /// Where its receives come from, unless it has its own.
    srq: Option<Arc<SrqHandle>>,
    domain: Arc<DomainHandle>,
}

// SAFETY: libibverbs is thread-safe (libibverbs README); the raw pointers are only given to it.
unsafe impl Send for QueuePairHandle {}
// SAFETY: as for Send.
unsafe impl Sync for QueuePairHandle {}

/// # Errors
/// As [`gdrd_hal::ProtectionDomain::create_queue_pair`].
pub(crate) fn create(
    domain: &Arc<DomainHandle>,
    cq: CqId,
    srq: Option<SrqId>,
    config: &QueuePairConfig,
) -> Result<QueuePairParts, HcaError> {
    let context = domain.context();
    let failed = context.failed("ibv_create_qp", "queue pairs or their memory");
    context.check_alive()?;
    check(domain, failed, config, srq.is_some())?;
    let srq = srq.map(|srq| srq_of(domain, failed, srq)).transpose()?;
    let cq = context.registry().cq(cq).ok_or_else(|| failed.invalid("no such completion queue on this HCA"))?;
    let mut init = init_attr(&cq, srq.as_deref(), config);
    let create = context.library().ibv_create_qp;
    // SAFETY: domain, completion queue and shared receive queue are live and outlive the queue pair (fields of the handle); the structure is
    // read and written during the call only.
    let qp = NonNull::new(unsafe { create(domain.raw(), &raw mut init) }).ok_or_else(|| failed.with(errno()))?;
    // SAFETY: the library returned an initialised structure; the number never changes.
    let qp_num = unsafe { (*qp.as_ptr()).qp_num };
    let ledger = Arc::new(match &srq {
        Some(srq) => Ledger::sharing(init.cap.max_send_wr, &srq.slots),
        None => Ledger::new(init.cap.max_send_wr, init.cap.max_recv_wr),
    });
    cq.enlist(qp_num, &ledger);
    let entry = QueuePairEntry { qp_num, cq: cq.address() };
    context.registry().objects().queue_pairs.insert(qp.as_ptr().expose_provenance(), entry);
    let handle = Arc::new(QueuePairHandle {
        qp,
        qp_num,
        qp_type: config.qp_type,
        port_num: config.port_num,
        stage: AtomicU8::new(Stage::Fresh as u8),
        connection: Mutex::default(),
        ledger,
        cq,
        srq,
        domain: Arc::clone(domain),
    });
    let work = Work::new(&handle, init.cap.max_inline_data);
    Ok(QueuePairParts { control: Arc::new(Control(handle)), work: Box::new(work) })
}

fn srq_of(domain: &Arc<DomainHandle>, failed: Failed<'_>, srq: SrqId) -> Result<Arc<SrqHandle>, HcaError> {
    let found = domain.context().registry().srq(srq).filter(|found| Arc::ptr_eq(found.domain(), domain));
    found.ok_or_else(|| failed.invalid("no such shared receive queue in this protection domain"))
}

fn check(domain: &DomainHandle, failed: Failed<'_>, config: &QueuePairConfig, shares: bool) -> Result<(), HcaError> {
    let context = domain.context();
    let capabilities = context.capabilities();
    let unsupported = |what| HcaError::Unsupported { hca: context.name().to_owned(), what };
    capabilities.check_queue_pair_type(config.qp_type).map_err(unsupported)?;
    // Some drivers make a queue of none, others refuse it.
    for (what, value, least, most) in [
        ("send depth", config.send_depth, 1, capabilities.max_work_requests),
        ("receive depth", if shares { 1 } else { config.recv_depth }, 1, capabilities.max_work_requests),
        ("inline bytes", config.inline_bytes, 0, capabilities.max_inline_bytes),
    ] {
        if value < least || value > most {
            return Err(failed.invalid(format!("{what} {value} is not in {least} to {most}")));
        }
    }
    if config.port_num == 0 || config.port_num > context.ports() {
        return Err(failed.invalid(format!("port {} is not 1 to {}", config.port_num, context.ports())));
    }
    Ok(())
}

fn init_attr(cq: &CqHandle, srq: Option<&SrqHandle>, config: &QueuePairConfig) -> ibv_qp_init_attr {
    // SAFETY: integers and pointers (struct ibv_qp_init_attr, verbs.h); zero and null are valid.
    let mut init: ibv_qp_init_attr = unsafe { MaybeUninit::zeroed().assume_init() };
    init.send_cq = cq.raw();
    init.recv_cq = cq.raw();
    init.qp_type = if config.qp_type == QueuePairType::Ud { ibv_qp_type::IBV_QPT_UD } else { ibv_qp_type::IBV_QPT_RC };
    init.cap.max_send_wr = config.send_depth;
    init.cap.max_send_sge = 1;
    match srq {
        Some(srq) => init.srq = srq.raw(),
        None => (init.cap.max_recv_wr, init.cap.max_recv_sge) = (config.recv_depth, 1),
    }
    init.cap.max_inline_data = config.inline_bytes;
    init
}

impl QueuePairHandle {
    pub(crate) fn raw(&self) -> *mut ibv_qp {
        self.qp.as_ptr()
    }

    pub(crate) fn qp_type(&self) -> QueuePairType {
        self.qp_type
    }

    /// Whether its receives come from a shared queue.
    pub(crate) fn shares(&self) -> bool {
        self.srq.is_some()
    }

    pub(crate) fn domain(&self) -> &DomainHandle {
        &self.domain
    }

    pub(crate) fn stage(&self) -> Stage {
        match self.stage.load(Ordering::Acquire) {
            0 => Stage::Fresh,
            1 => Stage::Init,
            2 => Stage::Ready,
            _ => Stage::Error,
        }
    }

    fn set_stage(&self, stage: Stage) {
        self.stage.store(stage as u8, Ordering::Release);
    }

    pub(crate) fn destination(&self) -> Option<Destination> {
        self.connection().destination.as_ref().map(|handle| handle.to)
    }

    fn connection(&self) -> MutexGuard<'_, Connection> {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn failed(&self, call: &'static str) -> Failed<'_> {
        self.domain.context().failed(call, "memory")
    }

    /// Tells the device once more that the queue pair is in ERR: rxe looks at receives that were posted in ERR only
    /// when told something (drivers/infiniband/sw/rxe, whose receive queue has no doorbell).
    pub(crate) fn flush_again(&self) {
        // SAFETY: the queue pair is live.
        let told = unsafe { transition::to_error(self.domain.context().library(), self.raw()) };
        debug_assert!(told.is_ok() || self.domain.context().is_gone(), "{told:?}");
    }
}

impl Drop for QueuePairHandle {
    fn drop(&mut self) {
        let context = self.domain.context();
        self.cq.strike(self.qp_num);
        context.registry().objects().queue_pairs.remove(&self.qp.as_ptr().expose_provenance());
        let destroy = context.library().ibv_destroy_qp;
        // SAFETY: destroyed once, after it left the registry, so that the event thread does not use it any more.
        let destroyed = unsafe { destroy(self.qp.as_ptr()) };
        debug_assert!(destroyed == 0 || context.is_gone(), "ibv_destroy_qp: {destroyed}");
        // Then its fields go, and with the connection the address handle that its requests named.
    }
}

/// The control side.
#[derive(Debug)]
struct Control(Arc<QueuePairHandle>);

impl Control {
    fn port(&self) -> Result<PortAttributes, HcaError> {
        let handle = &self.0;
        let found = port::all(handle.domain.context())?.into_iter().find(|port| port.port_num == handle.port_num);
        found.ok_or_else(|| handle.failed("ibv_query_port").invalid(format!("no port {}", handle.port_num)))
    }

    /// Looks at the port once and keeps what it sees.
    fn endpoint_in(&self, connection: &mut Connection) -> Result<Endpoint, HcaError> {
        if let Some(endpoint) = &connection.endpoint {
            return Ok(endpoint.clone());
        }
        let handle = &self.0;
        let port = self.port()?;
        let options = handle.domain.context().options();
        let current = match port.link_layer {
            LinkLayer::Ethernet => port::current_link_locals(handle.domain.context(), handle.port_num)?,
            _ => BTreeSet::new(),
        };
        let entry = choose_gid(&port.gids, port.link_layer, options.gid_index, &current);
        let is_infiniband = port.link_layer == LinkLayer::InfiniBand;
        if entry.is_none() && (!is_infiniband || port.lid == 0) {
            let reason = match options.gid_index {
                Some(index) if index > LAST_ROW => {
                    format!("no queue pair can name GID row {index}, only 0 to {LAST_ROW}")
                }
                Some(index) => format!("port {} has no GID in row {index}", port.port_num),
                None => format!("port {} has no usable GID; give its netdev an address", port.port_num),
            };
            return Err(handle.failed("endpoint").invalid(reason));
        }
        let endpoint = Endpoint {
            qp_num: handle.qp_num,
            port_num: handle.port_num,
            gid: entry.map_or(Gid::default(), |entry| entry.gid),
            gid_index: entry.map_or(0, |entry| entry.gid_index),
            lid: port.lid,
            psn: rand::random::<u32>() & MASK_24_BITS,
            mtu_bytes: port::path_mtu_bytes(port.mtu_bytes, options),
            link_layer: port.link_layer,
        };
        connection.endpoint = Some(endpoint.clone());
        Ok(endpoint)
    }

    /// A row whose GID changed since the endpoint was told would send from an address that the peer does not expect.
    fn check_gid(&self, local: &Endpoint) -> Result<(), HcaError> {
        if local.gid == Gid::default() {
            return Ok(());
        }
        let is_there = self.port()?.gids.iter().any(|row| row.gid_index == local.gid_index && row.gid == local.gid);
        if is_there {
            return Ok(());
        }
        let reason = format!(
            "row {} of the GID table changed since the endpoint was told; make a new queue pair",
            local.gid_index
        );
        Err(self.0.failed("connect").invalid(reason))
    }

    fn step(
        &self,
        call: &'static str,
        step: (rdma_sys::ibv_qp_attr, rdma_sys::ibv_qp_attr_mask),
    ) -> Result<(), HcaError> {
        let (mut attr, mask) = step;
        // SAFETY: the queue pair is live.
        let moved = unsafe { transition::modify(self.0.domain.context().library(), self.0.raw(), &mut attr, mask) };
        moved.map_err(|errno| self.0.failed(call).with(errno))
    }
}

impl QueuePair for Control {
    fn qp_num(&self) -> u32 {
        self.0.qp_num
    }

    fn state(&self) -> Result<QueuePairState, HcaError> {
        self.0.domain.context().check_alive()?;
        // SAFETY: the queue pair is live.
        let state = unsafe { transition::state(self.0.domain.context().library(), self.0.raw()) };
        let failed = self.0.failed("ibv_query_qp");
        Ok(match state.map_err(|errno| failed.with(errno))? {
            ibv_qp_state::IBV_QPS_RESET => QueuePairState::Reset,
            ibv_qp_state::IBV_QPS_INIT => QueuePairState::Init,
            ibv_qp_state::IBV_QPS_RTR => QueuePairState::Rtr,
            ibv_qp_state::IBV_QPS_RTS => QueuePairState::Rts,
            ibv_qp_state::IBV_QPS_SQD => QueuePairState::Sqd,
            ibv_qp_state::IBV_QPS_SQE => QueuePairState::Sqe,
            ibv_qp_state::IBV_QPS_ERR => QueuePairState::Err,
            other => {
                let reason = format!("the driver gave state {other}");
                return Err(HcaError::Driver { hca: failed.hca.to_owned(), call: failed.call, errno: 0, reason });
            }
        })
    }

    fn to_init(&self) -> Result<(), HcaError> {
        let context = self.0.domain.context();
        context.check_alive()?;
        let _alone = self.0.connection();
        if self.0.stage() != Stage::Fresh {
            return Err(self.0.failed("to INIT").invalid("the queue pair is not in RESET"));
        }
        let atomics = context.capabilities().atomics;
        let step = transition::init(self.0.qp_type, self.0.port_num, atomics, context.options());
        self.step("ibv_modify_qp to INIT", step)?;
        self.0.set_stage(Stage::Init);
        Ok(())
    }

    fn endpoint(&self) -> Result<Endpoint, HcaError> {
        let mut connection = self.0.connection();
        if self.0.stage() == Stage::Fresh {
            return Err(self.0.failed("endpoint").invalid("the queue pair is in RESET"));
        }
        self.endpoint_in(&mut connection)
    }

    fn connect(&self, remote: &Endpoint) -> Result<(), HcaError> {
        let context = self.0.domain.context();
        context.check_alive()?;
        let mut connection = self.0.connection();
        let failed = self.0.failed("connect");
        if self.0.stage() != Stage::Init {
            return Err(failed.invalid("the queue pair is not in INIT"));
        }
        let local = self.endpoint_in(&mut connection)?;
        if remote.link_layer != local.link_layer {
            let reason = format!("{:?} here, {:?} there", local.link_layer, remote.link_layer);
            return Err(failed.invalid(reason));
        }
        let Some(path_mtu) = port::mtu_of(remote.mtu_bytes).and(port::mtu_of(remote.mtu_bytes.min(local.mtu_bytes)))
        else {
            return Err(failed.invalid(format!("{} is no MTU of RDMA", remote.mtu_bytes)));
        };
        if remote.qp_num > MASK_24_BITS || remote.psn > MASK_24_BITS {
            return Err(failed.invalid("queue pair and packet numbers have 24 bits"));
        }
        self.check_gid(&local)?;
        let (qp_type, reads) = (self.0.qp_type, context.reads());
        let mut way = transition::address(&local, remote, context.options());
        // Given out once the queue pair is connected, so that a second try goes where it says.
        let destination = match qp_type {
            QueuePairType::Ud => Some(
                AddressHandle::create(&self.0.domain, &mut way, remote.qp_num)
                    .map_err(|error| toward(remote.gid, error))?,
            ),
            _ => None,
        };
        self.step("ibv_modify_qp to RTR", transition::receive(qp_type, remote, path_mtu, way, reads))
            .map_err(|error| toward(remote.gid, error))?;
        let ready = self.step("ibv_modify_qp to RTS", transition::send(qp_type, local.psn, reads, context.options()));
        if ready.is_err() {
            self.0.flush_again();
        }
        connection.destination = destination;
        self.0.set_stage(if ready.is_ok() { Stage::Ready } else { Stage::Error });
        ready
    }

    fn to_error(&self) -> Result<(), HcaError> {
        let context = self.0.domain.context();
        context.check_alive()?;
        let _alone = self.0.connection();
        if self.0.stage() == Stage::Fresh {
            // Verbs knows no way from RESET to ERR but through INIT (qp_state_table, drivers/infiniband/core/verbs.c).
            let atomics = context.capabilities().atomics;
            let step = transition::init(self.0.qp_type, self.0.port_num, atomics, context.options());
            self.step("ibv_modify_qp to INIT", step)?;
        }
        // SAFETY: the queue pair is live.
        let moved = unsafe { transition::to_error(context.library(), self.0.raw()) };
        moved.map_err(|errno| self.0.failed("ibv_modify_qp to ERR").with(errno))?;
        self.0.set_stage(Stage::Error);
        Ok(())
    }
}
