//! What a device's provider can do, from what verbs says of it.

use gdrd_hal::{
    AtomicScope, HcaCapabilities, IWARP_HAS_RDMA_CM_ONLY, MAX_INLINE_BYTES, QueuePairType, TRANSPORT_HAS_NO_RC,
};
use rdma_sys::{ibv_atomic_cap, ibv_device_attr, ibv_transport_type};

use crate::transition::{MAX_READS, ReadLimits};

/// Longest message that there is (InfiniBand specification vol. 1, 9.7.2: 2^31).
const MAX_MESSAGE_BYTES: u64 = 1 << 31;

/// PCI vendor of Amazon, whose EFA honours the iova asked for (providers/efa/verbs.c, efa_reg_mr).
const VENDOR_AMAZON: u32 = 0x1d0f;

/// What soft RoCE and soft iWARP call their vendor (`RXE_VENDOR_ID`, drivers/infiniband/sw/rxe/rxe_param.h; `SIW_VENDOR_ID`,
/// drivers/infiniband/sw/siw/siw.h).
const VENDOR_RXE: u32 = 0xff_ffff;
const VENDOR_SIW: u32 = 0x62_6d74;

/// Constant facts of a device.
#[derive(Debug, Clone)]
pub(crate) struct Facts {
    pub(crate) capabilities: HcaCapabilities,
    pub(crate) ports: u8,
    pub(crate) reads: ReadLimits,
}

impl Facts {
    /// From `ibv_query_device(3)`, the transport of the device, and the longest message that each port takes
    /// (`max_msg_sz` of `ibv_query_port(3)`). `max_inline_bytes` and `dma_buf` are upper bounds until they were tried.
    pub(crate) fn new(attr: &ibv_device_attr, transport: ibv_transport_type::Type, messages: &[u32]) -> Self {
        let no_queue_pairs = match transport {
            ibv_transport_type::IBV_TRANSPORT_IB => None,
            ibv_transport_type::IBV_TRANSPORT_IWARP => Some(IWARP_HAS_RDMA_CM_ONLY),
            _ => Some(TRANSPORT_HAS_NO_RC),
        };
        let is_infiniband = no_queue_pairs.is_none();
        let capabilities = HcaCapabilities {
            queue_pair_types: if is_infiniband { vec![QueuePairType::Rc, QueuePairType::Ud] } else { Vec::new() },
            no_queue_pairs,
            atomics: if is_infiniband { atomics(attr.atomic_cap) } else { AtomicScope::None },
            iova_honoured: is_infiniband || attr.vendor_id == VENDOR_AMAZON,
            dma_buf: true,
            direct: false,
            software: matches!(attr.vendor_id, VENDOR_RXE | VENDOR_SIW),
            max_inline_bytes: u32::try_from(MAX_INLINE_BYTES).unwrap_or(u32::MAX),
            max_work_requests: positive(attr.max_qp_wr),
            // One less than the largest number, so that callers can name one that is too large.
            max_completions: positive(attr.max_cqe).min(u32::MAX - 1),
            max_shared_receives: if is_infiniband && attr.max_srq > 0 { positive(attr.max_srq_wr) } else { 0 },
            max_memory_regions: positive(attr.max_mr),
            // Told for the device, so it is what every port takes. A port that takes none tells nothing.
            max_message_bytes: messages
                .iter()
                .filter(|bytes| **bytes > 0)
                .map(|bytes| u64::from(*bytes))
                .fold(MAX_MESSAGE_BYTES, u64::min),
        };
        let reads = ReadLimits { as_target: reads(attr.max_qp_rd_atom), as_initiator: reads(attr.max_qp_init_rd_atom) };
        Self { capabilities, ports: attr.phys_port_cnt, reads }
    }
}

fn atomics(scope: ibv_atomic_cap::Type) -> AtomicScope {
    match scope {
        ibv_atomic_cap::IBV_ATOMIC_HCA => AtomicScope::Hca,
        ibv_atomic_cap::IBV_ATOMIC_GLOB => AtomicScope::Global,
        _ => AtomicScope::None,
    }
}

/// Drivers give these limits as int.
fn positive(limit: i32) -> u32 {
    u32::try_from(limit).unwrap_or(0)
}

fn reads(limit: i32) -> u8 {
    u8::try_from(limit.clamp(0, i32::from(MAX_READS))).unwrap_or(MAX_READS)
}

#[cfg(test)]
mod tests {
    use std::mem::MaybeUninit;

    use super::*;

    fn attr() -> ibv_device_attr {
        // SAFETY: integers and characters only (struct ibv_device_attr); zero is valid.
        unsafe { MaybeUninit::zeroed().assume_init() }
    }

    #[test]
    fn infiniband_and_roce_have_queue_pairs_with_the_limits_of_the_device() {
        let attr = ibv_device_attr {
            max_qp_wr: 1024,
            max_cqe: 32_767,
            max_qp_rd_atom: 128,
            max_qp_init_rd_atom: 4,
            atomic_cap: ibv_atomic_cap::IBV_ATOMIC_HCA,
            ..attr()
        };
        let facts = Facts::new(&attr, ibv_transport_type::IBV_TRANSPORT_IB, &[]);
        assert_eq!(facts.capabilities.queue_pair_types, [QueuePairType::Rc, QueuePairType::Ud]);
        assert_eq!(facts.capabilities.atomics, AtomicScope::Hca);
        assert_eq!((facts.reads.as_target, facts.reads.as_initiator), (16, 4));
        assert_eq!(facts.capabilities.max_work_requests, 1024);
        assert!(facts.capabilities.iova_honoured && !facts.capabilities.software);
    }

    #[test]
    fn soft_roce_and_soft_iwarp_need_cpus_of_this_host() {
        for vendor_id in [VENDOR_RXE, VENDOR_SIW] {
            let attr = ibv_device_attr { vendor_id, ..attr() };
            assert!(Facts::new(&attr, ibv_transport_type::IBV_TRANSPORT_IB, &[]).capabilities.software);
        }
    }

    #[test]
    fn the_longest_message_is_what_every_port_takes() {
        let longest = |messages: &[u32]| {
            Facts::new(&attr(), ibv_transport_type::IBV_TRANSPORT_IB, messages).capabilities.max_message_bytes
        };
        assert_eq!(longest(&[1 << 30, 8 << 20]), 8 << 20);
        assert_eq!((longest(&[0]), longest(&[u32::MAX]), longest(&[])), (1 << 31, 1 << 31, 1 << 31));
    }

    #[test]
    fn iwarp_has_no_queue_pairs_and_sets_its_own_iova() {
        let facts = Facts::new(&attr(), ibv_transport_type::IBV_TRANSPORT_IWARP, &[]);
        assert!(facts.capabilities.queue_pair_types.is_empty() && !facts.capabilities.iova_honoured);
        assert!(facts.capabilities.no_queue_pairs.is_some_and(|reason| reason.contains("rdma_cm")));
    }

    #[test]
    fn efa_honours_the_iova_and_has_no_rc() {
        let attr = ibv_device_attr { vendor_id: VENDOR_AMAZON, ..attr() };
        let facts = Facts::new(&attr, ibv_transport_type::IBV_TRANSPORT_UNSPECIFIED, &[]);
        assert!(facts.capabilities.iova_honoured && facts.capabilities.queue_pair_types.is_empty());
        assert!(facts.capabilities.no_queue_pairs.is_some_and(|reason| reason.contains("EFA")));
    }

    #[test]
    fn limits_and_scopes_that_a_driver_invents_are_taken_for_none() {
        let attr = ibv_device_attr { max_qp_wr: -1, max_cqe: i32::MIN, max_qp_rd_atom: -5, atomic_cap: 99, ..attr() };
        let facts = Facts::new(&attr, ibv_transport_type::IBV_TRANSPORT_IB, &[]);
        assert_eq!((facts.capabilities.max_work_requests, facts.capabilities.max_completions), (0, 0));
        assert_eq!((facts.reads.as_target, facts.capabilities.atomics), (0, AtomicScope::None));
        let unknown = Facts::new(&attr, -1, &[]);
        assert!(unknown.capabilities.no_queue_pairs.is_some());
    }
}
