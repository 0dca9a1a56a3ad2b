//! Creation, state changes, connection and end of queue pairs.

use std::net::Ipv6Addr;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use gdrd_hal::{
    CqId, Endpoint, Gid, GidType, HcaError, LinkLayer, PostError, QueuePair, QueuePairConfig, QueuePairParts,
    QueuePairState, QueuePairType, ReceiveRequest, WorkQueue, WorkRequest,
};

use super::{Connection, Credits, DESTROYED, QueuePairCore, ReceiveSide, SendSide, state_number};
use crate::fault::Call;
use crate::hca::{HcaCore, Port};
use crate::sync::lock;

/// The creating call, in errors.
pub(crate) const CREATE: &str = "create_queue_pair";
const CONNECT: &str = "connect";

/// Path MTUs of verbs (`enum ibv_mtu`).
const MTUS_BYTES: [u32; 5] = [256, 512, 1024, 2048, 4096];
/// Queue pair and packet sequence numbers have 24 bits.
const MAX_24_BITS: u32 = (1 << 24) - 1;

/// Makes a queue pair in RESET.
pub(crate) fn create(
    hca: &Arc<HcaCore>,
    pd_id: u64,
    cq: CqId,
    config: &QueuePairConfig,
) -> Result<QueuePairParts, HcaError> {
    check_config(hca, config)?;
    let cq = hca.find_cq(cq).ok_or_else(|| hca.invalid(CREATE, format!("{cq:?} is not on {}", hca.name)))?;
    let credits = Arc::new(Credits::default());
    let cq_slot = cq.reserve(Arc::clone(&credits));
    let make = |qp_num| QueuePairCore {
        qp_num,
        hca: Arc::clone(hca),
        pd_id,
        cq: Arc::clone(&cq),
        config: config.clone(),
        psn: rand::random_range(0..=MAX_24_BITS),
        state: AtomicU8::new(state_number(QueuePairState::Reset)),
        connection: OnceLock::new(),
        send: Mutex::new(SendSide::default()),
        receive: Mutex::new(ReceiveSide::default()),
        credits,
        cq_slot,
    };
    let Some(core) = hca.add_queue_pair(make) else {
        cq.forget(cq_slot);
        return Err(hca.exhausted(CREATE, "queue pairs"));
    };
    cq.attach(cq_slot, Arc::downgrade(&core));
    let owner = Arc::new(Owner(core));
    Ok(QueuePairParts { control: Arc::clone(&owner) as Arc<dyn QueuePair>, work: Box::new(Work(owner)) })
}

fn check_config(hca: &HcaCore, config: &QueuePairConfig) -> Result<(), HcaError> {
    let capabilities = &hca.capabilities;
    if !capabilities.queue_pair_types.contains(&config.qp_type) {
        return Err(hca.unsupported(&format!("make {:?} queue pairs", config.qp_type)));
    }
    let most = capabilities.max_work_requests;
    for (what, depth) in [("send", config.send_depth), ("receive", config.recv_depth)] {
        if depth == 0 || depth > most {
            return Err(hca.invalid(CREATE, format!("{what} depth {depth} is not in 1 to {most}")));
        }
    }
    if config.inline_bytes > capabilities.max_inline_bytes {
        let reason = format!("{} inline bytes, at most {}", config.inline_bytes, capabilities.max_inline_bytes);
        return Err(hca.invalid(CREATE, reason));
    }
    if hca.port(config.port_num).is_none() {
        return Err(hca.invalid(CREATE, format!("port {} is not there", config.port_num)));
    }
    Ok(())
}

/// The one owner of a queue pair, held by its control and its work side; destroys it on drop.
struct Owner(Arc<QueuePairCore>);

impl QueuePair for Owner {
    fn qp_num(&self) -> u32 {
        self.0.qp_num
    }

    fn state(&self) -> Result<QueuePairState, HcaError> {
        self.0.hca.check_present()?;
        Ok(self.0.state().unwrap_or(QueuePairState::Err))
    }

    fn to_init(&self) -> Result<(), HcaError> {
        self.0.hca.check_present()?;
        match self.0.step(QueuePairState::Reset, QueuePairState::Init) {
            true => Ok(()),
            false => Err(self.0.hca.invalid("to_init", format!("the queue pair is in {:?}", self.0.state()))),
        }
    }

    fn endpoint(&self) -> Result<Endpoint, HcaError> {
        self.0.hca.check_present()?;
        self.0.endpoint()
    }

    fn connect(&self, remote: &Endpoint) -> Result<(), HcaError> {
        self.0.hca.admit(CONNECT, Call::Connect)?;
        self.0.connect(remote)
    }

    fn to_error(&self) -> Result<(), HcaError> {
        self.0.hca.check_present()?;
        self.0.set_error();
        self.0.flush_sends();
        self.0.flush_receives();
        Ok(())
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.destroy();
    }
}

impl QueuePairCore {
    fn port(&self) -> Option<&Port> {
        self.hca.port(self.config.port_num)
    }

    /// Row and address that packets leave with: RoCE v2 before v1.
    fn source(&self) -> Option<(u16, Gid)> {
        let gids = self.port()?.gids();
        let best = gids.iter().find(|entry| entry.gid_type == GidType::RoceV2).or(gids.first())?;
        Some((best.gid_index, best.gid))
    }

    pub(super) fn source_gid(&self) -> Gid {
        self.source().map_or(Gid::default(), |(_, gid)| gid)
    }

    fn endpoint(&self) -> Result<Endpoint, HcaError> {
        const CALL: &str = "endpoint";
        let invalid = |reason: &str| self.hca.invalid(CALL, reason.to_owned());
        if self.state() == Some(QueuePairState::Reset) {
            return Err(invalid("the queue pair is in RESET"));
        }
        let port = self.port().ok_or_else(|| invalid("the port is not there"))?;
        let by_lid = port.spec.link_layer == LinkLayer::InfiniBand;
        let (gid_index, gid) = match by_lid {
            true if port.lid() == 0 => return Err(invalid("the port has no LID")),
            true => (0, Gid::default()),
            false => self.source().ok_or_else(|| invalid("the port has no GID"))?,
        };
        Ok(Endpoint {
            qp_num: self.qp_num,
            port_num: self.config.port_num,
            gid,
            gid_index,
            lid: port.lid(),
            psn: self.psn,
            mtu_bytes: port.spec.mtu_bytes,
            link_layer: port.spec.link_layer,
        })
    }

    fn connect(self: &Arc<Self>, remote: &Endpoint) -> Result<(), HcaError> {
        let invalid = |reason: String| self.hca.invalid(CONNECT, reason);
        let state = self.state();
        if state != Some(QueuePairState::Init) {
            return Err(invalid(format!("the queue pair is in {state:?}, not in INIT")));
        }
        let connection = self.resolve(remote)?;
        let peer = connection.hca.as_ref().and_then(|hca| hca.find_queue_pair(remote.qp_num));
        if self.connection.set(connection).is_err() || !self.step(QueuePairState::Init, QueuePairState::Rts) {
            return Err(invalid("the queue pair left INIT meanwhile".to_owned()));
        }
        // The peer may have sent before we listened; on a wire its next retry would come through.
        if let Some(peer) = peer.filter(|_| self.config.qp_type == QueuePairType::Rc) {
            peer.progress();
        }
        Ok(())
    }

    fn resolve(&self, remote: &Endpoint) -> Result<Connection, HcaError> {
        let invalid = |reason: String| self.hca.invalid(CONNECT, reason);
        let port = self.port().ok_or_else(|| invalid("the port is not there".to_owned()))?;
        let own_layer = port.spec.link_layer;
        if remote.link_layer != own_layer {
            return Err(invalid(format!("link layers differ: {own_layer:?} here, {:?} there", remote.link_layer)));
        }
        if !MTUS_BYTES.contains(&remote.mtu_bytes) {
            return Err(invalid(format!("{} bytes is no path MTU", remote.mtu_bytes)));
        }
        if remote.qp_num > MAX_24_BITS || remote.psn > MAX_24_BITS {
            return Err(invalid(format!("qp_num {:#x} or psn {:#x} exceeds 24 bits", remote.qp_num, remote.psn)));
        }
        let hca = self.hca.fabric.resolve(remote);
        if hca.is_none() && own_layer == LinkLayer::Ethernet {
            // The kernel asks the neighbour table for the GID's MAC (`rdma_addr_find_l2_eth_by_grh`, core/addr.c).
            let reason = "no port of the simulated fabric has it".to_owned();
            return Err(HcaError::Unreachable {
                hca: self.hca.name.clone(),
                gid: Ipv6Addr::from(remote.gid.0),
                reason,
            });
        }
        let remote_port = hca.as_ref().and_then(|hca| hca.port(remote.port_num));
        let remote_epoch = remote_port.map_or(0, Port::epoch);
        let path_mtu_bytes = remote.mtu_bytes.min(port.spec.mtu_bytes);
        Ok(Connection { remote: remote.clone(), local_epoch: port.epoch(), remote_epoch, path_mtu_bytes, hca })
    }

    fn destroy(&self) {
        self.state.store(DESTROYED, Ordering::Release);
        self.hca.forget_queue_pair(self.qp_num);
        let peer = {
            let mut send = lock(&self.send);
            send.pending.clear();
            send.peer.take()
        };
        // The last owner of the peer may be this cache; it must not end under our lock.
        drop(peer);
        self.clear_receives();
        self.cq.forget(self.cq_slot);
    }
}

/// The posting side.
struct Work(Arc<Owner>);

impl WorkQueue for Work {
    fn post_send(&mut self, requests: &[WorkRequest]) -> Result<(), (usize, PostError)> {
        self.0.0.post_send(requests)
    }

    fn post_recv(&mut self, requests: &[ReceiveRequest]) -> Result<(), (usize, PostError)> {
        self.0.0.post_receive(requests)
    }
}
