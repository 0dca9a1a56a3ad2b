//! State changes of a queue pair as `ibv_modify_qp(3)` wants them: which attributes go with which step.

use std::mem::MaybeUninit;

use gdrd_hal::{AtomicScope, Endpoint, LinkLayer, QueuePairType, RNR_RETRY};
use rdma_sys::{
    ibv_access_flags, ibv_ah_attr, ibv_mtu, ibv_qp, ibv_qp_attr, ibv_qp_attr_mask, ibv_qp_init_attr, ibv_qp_state,
};

use crate::error::status;
use crate::library::Library;
use crate::options::Options;

/// Q_Key of every UD queue pair here; below 2^31, as keys above it need privilege (InfiniBand specification vol. 1,
/// 10.2.5).
pub(crate) const UD_Q_KEY: u32 = 0x1d7_2d11;

/// Reads and atomics outstanding at most, where the device allows as many.
pub(crate) const MAX_READS: u8 = 16;

/// `min_rnr_timer`: code 12 is 0.64 ms between tries while the peer has no receive posted.
const MIN_RNR_TIMER: u8 = 12;

/// Routers that a packet may pass.
const HOP_LIMIT: u8 = 64;

/// All bytes zero, which every attribute structure of verbs allows: integers, unions of them and null pointers.
pub(crate) fn zeroed_attr() -> ibv_qp_attr {
    // SAFETY: the structure has integers and a GID union only (struct ibv_qp_attr, verbs.h); zero is valid for them.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

fn zeroed_ah() -> ibv_ah_attr {
    // SAFETY: as above (struct ibv_ah_attr).
    unsafe { MaybeUninit::zeroed().assume_init() }
}

/// Sets the masked attributes; an errno on failure.
///
/// # Safety
/// `qp` must be live.
pub(crate) unsafe fn modify(
    library: &Library,
    qp: *mut ibv_qp,
    attr: &mut ibv_qp_attr,
    mask: ibv_qp_attr_mask,
) -> Result<(), i32> {
    let modify = library.ibv_modify_qp;
    // SAFETY: the queue pair is live (above); the structure is initialised and read during the call only.
    status(unsafe { modify(qp, attr, mask.0.cast_signed()) })
}

/// To ERR.
///
/// # Safety
/// `qp` must be live.
pub(crate) unsafe fn to_error(library: &Library, qp: *mut ibv_qp) -> Result<(), i32> {
    let mut attr = zeroed_attr();
    attr.qp_state = ibv_qp_state::IBV_QPS_ERR;
    // SAFETY: the caller's.
    unsafe { modify(library, qp, &mut attr, ibv_qp_attr_mask::IBV_QP_STATE) }
}

/// The state now.
///
/// # Safety
/// `qp` must be live.
pub(crate) unsafe fn state(library: &Library, qp: *mut ibv_qp) -> Result<ibv_qp_state::Type, i32> {
    let mut attr = zeroed_attr();
    // SAFETY: integers and pointers, for which zero is valid (struct ibv_qp_init_attr).
    let mut init: ibv_qp_init_attr = unsafe { MaybeUninit::zeroed().assume_init() };
    let query = library.ibv_query_qp;
    let mask = ibv_qp_attr_mask::IBV_QP_STATE.0.cast_signed();
    // SAFETY: the queue pair is live (above), and both structures are written during the call only.
    status(unsafe { query(qp, &raw mut attr, mask, &raw mut init) })?;
    Ok(attr.qp_state)
}

fn mask(parts: &[ibv_qp_attr_mask]) -> ibv_qp_attr_mask {
    ibv_qp_attr_mask(parts.iter().fold(0, |bits, part| bits | part.0))
}

/// RESET to INIT.
pub(crate) fn init(
    qp_type: QueuePairType,
    port_num: u8,
    atomics: AtomicScope,
    options: &Options,
) -> (ibv_qp_attr, ibv_qp_attr_mask) {
    let mut attr = zeroed_attr();
    attr.qp_state = ibv_qp_state::IBV_QPS_INIT;
    attr.port_num = port_num;
    attr.pkey_index = options.pkey_index;
    let common = [ibv_qp_attr_mask::IBV_QP_STATE, ibv_qp_attr_mask::IBV_QP_PKEY_INDEX, ibv_qp_attr_mask::IBV_QP_PORT];
    let own = if qp_type == QueuePairType::Ud {
        attr.qkey = UD_Q_KEY;
        ibv_qp_attr_mask::IBV_QP_QKEY
    } else {
        let mut access = ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0 | ibv_access_flags::IBV_ACCESS_REMOTE_READ.0;
        if atomics != AtomicScope::None {
            access |= ibv_access_flags::IBV_ACCESS_REMOTE_ATOMIC.0;
        }
        attr.qp_access_flags = access;
        ibv_qp_attr_mask::IBV_QP_ACCESS_FLAGS
    };
    (attr, mask(&[mask(&common), own]))
}

/// Way to a remote port.
pub(crate) fn address(local: &Endpoint, remote: &Endpoint, options: &Options) -> ibv_ah_attr {
    let mut ah = zeroed_ah();
    ah.port_num = local.port_num;
    ah.sl = options.service_level;
    ah.dlid = remote.lid;
    // A route header is needed on Ethernet, and on InfiniBand to leave the subnet.
    if local.link_layer != LinkLayer::InfiniBand || is_other_subnet(local, remote) {
        ah.is_global = 1;
        ah.grh.dgid.raw = remote.gid.0;
        // `choose_gid` leaves out what does not fit.
        ah.grh.sgid_index = u8::try_from(local.gid_index).unwrap_or(u8::MAX);
        ah.grh.hop_limit = HOP_LIMIT;
        ah.grh.traffic_class = options.traffic_class;
    }
    ah
}

/// The upper half of a GID is its subnet.
fn is_other_subnet(local: &Endpoint, remote: &Endpoint) -> bool {
    remote.gid.0 != [0; 16] && local.gid.0[..8] != remote.gid.0[..8]
}

/// What the device allows of reads and atomics, as target and as initiator.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ReadLimits {
    pub(crate) as_target: u8,
    pub(crate) as_initiator: u8,
}

/// INIT to RTR.
pub(crate) fn receive(
    qp_type: QueuePairType,
    remote: &Endpoint,
    path_mtu: ibv_mtu::Type,
    way: ibv_ah_attr,
    reads: ReadLimits,
) -> (ibv_qp_attr, ibv_qp_attr_mask) {
    let mut attr = zeroed_attr();
    attr.qp_state = ibv_qp_state::IBV_QPS_RTR;
    if qp_type == QueuePairType::Ud {
        return (attr, ibv_qp_attr_mask::IBV_QP_STATE);
    }
    attr.ah_attr = way;
    attr.path_mtu = path_mtu;
    attr.dest_qp_num = remote.qp_num;
    attr.rq_psn = remote.psn;
    attr.max_dest_rd_atomic = reads.as_target;
    attr.min_rnr_timer = MIN_RNR_TIMER;
    let parts = [
        ibv_qp_attr_mask::IBV_QP_STATE,
        ibv_qp_attr_mask::IBV_QP_AV,
        ibv_qp_attr_mask::IBV_QP_PATH_MTU,
        ibv_qp_attr_mask::IBV_QP_DEST_QPN,
        ibv_qp_attr_mask::IBV_QP_RQ_PSN,
        ibv_qp_attr_mask::IBV_QP_MAX_DEST_RD_ATOMIC,
        ibv_qp_attr_mask::IBV_QP_MIN_RNR_TIMER,
    ];
    (attr, mask(&parts))
}

/// RTR to RTS.
pub(crate) fn send(
    qp_type: QueuePairType,
    psn: u32,
    reads: ReadLimits,
    options: &Options,
) -> (ibv_qp_attr, ibv_qp_attr_mask) {
    let mut attr = zeroed_attr();
    attr.qp_state = ibv_qp_state::IBV_QPS_RTS;
    attr.sq_psn = psn;
    if qp_type == QueuePairType::Ud {
        return (attr, mask(&[ibv_qp_attr_mask::IBV_QP_STATE, ibv_qp_attr_mask::IBV_QP_SQ_PSN]));
    }
    attr.timeout = options.ack_timeout_exponent;
    attr.retry_cnt = options.retry_count;
    attr.rnr_retry = RNR_RETRY;
    attr.max_rd_atomic = reads.as_initiator;
    let parts = [
        ibv_qp_attr_mask::IBV_QP_STATE,
        ibv_qp_attr_mask::IBV_QP_SQ_PSN,
        ibv_qp_attr_mask::IBV_QP_TIMEOUT,
        ibv_qp_attr_mask::IBV_QP_RETRY_CNT,
        ibv_qp_attr_mask::IBV_QP_RNR_RETRY,
        ibv_qp_attr_mask::IBV_QP_MAX_QP_RD_ATOMIC,
    ];
    (attr, mask(&parts))
}

#[cfg(test)]
mod tests {
    use gdrd_hal::Gid;

    use super::*;

    fn endpoint(link_layer: LinkLayer, subnet: u8) -> Endpoint {
        let mut gid = Gid::default();
        gid.0[0] = subnet;
        gid.0[15] = 1;
        Endpoint { qp_num: 17, port_num: 1, gid, gid_index: 3, lid: 9, psn: 77, mtu_bytes: 1024, link_layer }
    }

    #[test]
    fn ethernet_always_carries_a_route_header_and_infiniband_between_subnets() {
        let options = Options { traffic_class: 104, service_level: 3, ..Options::default() };
        let way = |link_layer, subnet| address(&endpoint(link_layer, 1), &endpoint(link_layer, subnet), &options);
        let roce = way(LinkLayer::Ethernet, 1);
        assert_eq!((roce.is_global, roce.grh.sgid_index, roce.grh.traffic_class, roce.sl), (1, 3, 104, 3));
        let inside = way(LinkLayer::InfiniBand, 1);
        assert_eq!((inside.is_global, inside.dlid), (0, 9));
        assert_eq!(way(LinkLayer::InfiniBand, 2).is_global, 1);
    }

    #[test]
    fn each_step_sets_what_its_type_needs() {
        let reads = ReadLimits { as_target: 4, as_initiator: 2 };
        let remote = endpoint(LinkLayer::Ethernet, 1);
        let (rtr, rtr_mask) = receive(QueuePairType::Rc, &remote, ibv_mtu::IBV_MTU_1024, zeroed_ah(), reads);
        assert_eq!((rtr.dest_qp_num, rtr.rq_psn, rtr.max_dest_rd_atomic), (17, 77, 4));
        assert_ne!(rtr_mask.0 & ibv_qp_attr_mask::IBV_QP_AV.0, 0);
        let patient = Options { ack_timeout_exponent: 20, retry_count: 3, ..Options::default() };
        let (rts, _) = send(QueuePairType::Rc, 5, reads, &patient);
        assert_eq!(
            (rts.sq_psn, rts.retry_cnt, rts.rnr_retry, rts.timeout, rts.max_rd_atomic),
            (5, 3, RNR_RETRY, 20, 2)
        );
        let (_, datagram) = receive(QueuePairType::Ud, &remote, ibv_mtu::IBV_MTU_1024, zeroed_ah(), reads);
        assert_eq!(datagram.0, ibv_qp_attr_mask::IBV_QP_STATE.0);
        let partition = Options { pkey_index: 9, ..Options::default() };
        for qp_type in [QueuePairType::Rc, QueuePairType::Ud] {
            let (attr, mask) = init(qp_type, 1, AtomicScope::None, &partition);
            assert_eq!((attr.pkey_index, attr.port_num), (9, 1));
            assert_ne!(mask.0 & ibv_qp_attr_mask::IBV_QP_PKEY_INDEX.0, 0);
        }
        let (init_ud, init_mask) = init(QueuePairType::Ud, 1, AtomicScope::None, &Options::default());
        assert_eq!(init_ud.qkey, UD_Q_KEY);
        assert_eq!(init_mask.0 & ibv_qp_attr_mask::IBV_QP_ACCESS_FLAGS.0, 0);
    }
}
