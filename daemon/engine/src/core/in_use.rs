//! Which devices clients hold something on.

use std::collections::BTreeSet;

use super::{Core, GpuIndex, HcaIndex, Place};
use crate::in_use::InUse;

impl Core {
    /// One look at each lease, adopted memory, registration and queue pair.
    pub(crate) fn in_use(&self) -> InUse {
        let (mut gpus, mut hcas) = (BTreeSet::new(), BTreeSet::new());
        for lease in self.leases.values() {
            let Some(allocation) = self.allocations.get(&lease.allocation) else { continue };
            if let Place::Gpu(gpu) = allocation.place {
                gpus.insert(gpu);
            }
            hcas.extend(allocation.registrations.iter().map(|registration| registration.hca));
        }
        gpus.extend(self.adopted.values().filter_map(|memory| memory.gpu));
        let regions = self.registrations.values().flat_map(|registration| &registration.regions);
        hcas.extend(regions.filter_map(|region| self.regions.get(*region)).map(|region| region.key.hca));
        hcas.extend(self.queue_pairs.values().map(|queue_pair| queue_pair.hca));
        let gpu = |index: GpuIndex| self.host.gpu(index).map(|gpu| gpu.planned.name.clone());
        let hca = |index: HcaIndex| self.host.hca(index).map(|hca| hca.name.to_string());
        InUse { gpus: gpus.into_iter().filter_map(gpu).collect(), hcas: hcas.into_iter().filter_map(hca).collect() }
    }
}
