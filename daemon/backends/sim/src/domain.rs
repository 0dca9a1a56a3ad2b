//! Protection domains: every region and queue pair carries its domain's id, and only equal ids meet.

use std::sync::Arc;

use gdrd_hal::{
    Access, CqId, HcaError, MemoryRegion, MemorySource, ProtectionDomain, QueuePairConfig, QueuePairParts,
    SharedReceiveQueue, SrqId,
};

use crate::fault::Call;
use crate::hca::HcaCore;
use crate::memory;
use crate::queue_pair;
use crate::region::{RegionHandle, RegionSeed};

/// What a simulated HCA has none of.
const SHARED: &str = "share receives among queue pairs";

/// A protection domain. What is made in it holds the HCA and the id, so it may be dropped first.
pub(crate) struct Domain {
    hca: Arc<HcaCore>,
    id: u64,
}

impl Domain {
    pub(crate) fn new(hca: Arc<HcaCore>) -> Self {
        let id = hca.fabric.new_id();
        Self { hca, id }
    }
}

impl ProtectionDomain for Domain {
    fn register(&self, source: MemorySource<'_>, access: Access, iova: u64) -> Result<Box<dyn MemoryRegion>, HcaError> {
        const CALL: &str = "register";
        let (MemorySource::DmaBuf { len_bytes, .. } | MemorySource::Host { len_bytes, .. }) = source else {
            return Err(self.hca.unsupported("register this kind of memory"));
        };
        self.hca.admit_sized(CALL, Call::Register, len_bytes)?;
        if (access.remote_write || access.remote_atomic) && !access.local_write {
            // `ib_check_mr_access`, include/rdma/ib_verbs.h.
            return Err(self.hca.invalid(CALL, "remote write or atomic without local write".to_owned()));
        }
        let range = memory::open(&self.hca, source, access, iova)?;
        let seed = RegionSeed {
            pd_id: self.id,
            iova: range.iova,
            len_bytes: range.len_bytes,
            access,
            offset: range.offset,
            bytes: range.bytes,
        };
        let region = self.hca.keys.insert(seed).ok_or_else(|| self.hca.exhausted(CALL, "memory regions"))?;
        Ok(Box::new(RegionHandle::new(Arc::clone(&self.hca), region)))
    }

    fn create_queue_pair(&self, cq: CqId, config: &QueuePairConfig) -> Result<QueuePairParts, HcaError> {
        self.hca.admit(queue_pair::CREATE, Call::CreateQp)?;
        queue_pair::create(&self.hca, self.id, cq, config)
    }

    fn create_shared_receive_queue(&self, _depth: u32) -> Result<Box<dyn SharedReceiveQueue>, HcaError> {
        Err(self.hca.unsupported(SHARED))
    }

    fn create_queue_pair_on(&self, _: CqId, _: SrqId, _: &QueuePairConfig) -> Result<QueuePairParts, HcaError> {
        Err(self.hca.unsupported(SHARED))
    }
}
