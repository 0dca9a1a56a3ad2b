//! GPUs and HCAs as the state machine sees them: names, pairing, health.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use gdrd_hal::GpuUuid;

use super::input::GpuIndex;
use crate::drain::DRAINED;
use crate::error::EngineError;
use crate::lease::{AcquireRequest, MemoryKind, MemoryPlace};
use crate::plan::{HostPlan, PlannedGpu};

/// Place of an HCA in the host's list. Never used again: a device that comes back takes a new one.
pub(crate) use crate::broker::HcaIndex;

/// Least length of a host buffer, bytes.
pub(crate) const HOST_GRANULARITY_BYTES: u64 = 64 << 10;

/// Where memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Place {
    Gpu(GpuIndex),
    /// On a NUMA node, or anywhere.
    Host(Option<u32>),
}

/// One GPU.
#[derive(Debug, Clone)]
pub(crate) struct Gpu {
    pub(crate) planned: PlannedGpu,
    /// HCAs it is paired with that have a backend, best first.
    pub(crate) hcas: Arc<[HcaIndex]>,
    /// Whether the driver names a device node, so that the right to it can be proven.
    pub(crate) has_node: bool,
    /// Why it cannot be used.
    pub(crate) lost: Option<String>,
}

/// One HCA.
#[derive(Debug, Clone)]
pub(crate) struct HcaState {
    pub(crate) name: Arc<str>,
    /// Why it cannot be used.
    pub(crate) gone: Option<String>,
}

/// The host.
#[derive(Debug, Clone)]
pub(crate) struct Host {
    pub(crate) gpus: Vec<Gpu>,
    pub(crate) hcas: Vec<HcaState>,
    /// NUMA nodes of HCAs by name, where known.
    hca_nodes: BTreeMap<String, u32>,
    /// Those behind a translating IOMMU.
    translated_hcas: BTreeSet<String>,
    /// How GPU memory is mapped, and the granularity of its backend, bytes; `None` without one.
    pub(crate) gpu_memory: Option<(MemoryKind, u64)>,
}

/// What a request for memory comes down to.
pub(crate) struct Resolved {
    pub(crate) place: Place,
    pub(crate) hcas: Arc<[HcaIndex]>,
    pub(crate) granularity_bytes: u64,
}

impl Host {
    pub(crate) fn new(hcas: &[Arc<str>], gpu_memory: Option<(MemoryKind, u64)>, plan: &HostPlan) -> Self {
        let hcas = hcas.iter().map(|name| HcaState { name: Arc::clone(name), gone: None }).collect();
        let (hca_nodes, translated_hcas) = (BTreeMap::new(), BTreeSet::new());
        let mut host = Self { gpus: Vec::new(), hcas, hca_nodes, translated_hcas, gpu_memory };
        host.update(plan, &BTreeMap::new());
        host
    }

    /// Takes another plan: GPUs keep their index by UUID, new ones are added, lost already where they are `unserved`; none
    /// is removed.
    pub(crate) fn update(&mut self, plan: &HostPlan, unserved: &BTreeMap<GpuUuid, String>) {
        self.hca_nodes.clone_from(&plan.hca_nodes);
        self.translated_hcas.clone_from(&plan.translated_hcas);
        for planned in &plan.gpus {
            let hcas: Arc<[HcaIndex]> = planned.hcas.iter().filter_map(|name| self.hca_index(name)).collect();
            if let Some(gpu) = self.gpus.iter_mut().find(|gpu| gpu.planned.uuid == planned.uuid) {
                gpu.planned = planned.clone();
                gpu.hcas = hcas;
            } else if self.gpus.len() < usize::from(u16::MAX) {
                let lost = unserved.get(&planned.uuid).cloned();
                self.gpus.push(Gpu { planned: planned.clone(), hcas, has_node: false, lost });
            }
        }
    }

    /// Takes one more HCA, and pairs GPUs anew with those of their names.
    pub(crate) fn add_hca(&mut self, name: Arc<str>) {
        self.hcas.push(HcaState { name, gone: None });
        for at in 0..self.gpus.len() {
            let Some(names) = self.gpus.get(at).map(|gpu| &gpu.planned.hcas) else { continue };
            let hcas = names.iter().filter_map(|name| self.hca_index(name)).collect();
            if let Some(gpu) = self.gpus.get_mut(at) {
                gpu.hcas = hcas;
            }
        }
    }

    /// Names of those that are not gone.
    pub(crate) fn served_hcas(&self) -> impl Iterator<Item = &str> {
        self.hcas.iter().filter(|hca| hca.gone.is_none()).map(|hca| &*hca.name)
    }

    pub(crate) fn gpu(&self, index: GpuIndex) -> Option<&Gpu> {
        self.gpus.get(usize::from(index.0))
    }

    pub(crate) fn gpu_mut(&mut self, index: GpuIndex) -> Option<&mut Gpu> {
        self.gpus.get_mut(usize::from(index.0))
    }

    pub(crate) fn hca(&self, index: HcaIndex) -> Option<&HcaState> {
        self.hcas.get(usize::from(index.0))
    }

    /// Why a GPU cannot be used, or that it can.
    pub(crate) fn set_lost(&mut self, index: GpuIndex, lost: Option<String>) {
        if let Some(gpu) = self.gpu_mut(index) {
            gpu.lost = lost;
        }
    }

    /// Notes which GPUs have a device node.
    pub(crate) fn note_nodes(&mut self, with_node: &BTreeSet<GpuIndex>) {
        for (at, gpu) in (0..=u16::MAX).zip(&mut self.gpus) {
            gpu.has_node = with_node.contains(&GpuIndex(at));
        }
    }

    /// A GPU by name, UUID or BDF.
    pub(crate) fn find_gpu(&self, name: &str) -> Result<GpuIndex, EngineError> {
        let fits = |gpu: &Gpu| {
            gpu.planned.name == name || gpu.planned.uuid.0 == name || gpu.planned.bdf.eq_ignore_ascii_case(name)
        };
        let index = self.gpus.iter().position(fits).and_then(|at| u16::try_from(at).ok());
        // The name comes from outside: only so much of it is repeated.
        index.map(GpuIndex).ok_or_else(|| EngineError::UnknownGpu { gpu: shown(name) })
    }

    /// A GPU by UUID.
    pub(crate) fn gpu_by_uuid(&self, uuid: &GpuUuid) -> Option<GpuIndex> {
        let at = self.gpus.iter().position(|gpu| gpu.planned.uuid == *uuid)?;
        u16::try_from(at).ok().map(GpuIndex)
    }

    /// The latest of that name: those before it are gone.
    fn hca_index(&self, name: &str) -> Option<HcaIndex> {
        let at = self.hcas.iter().rposition(|hca| &*hca.name == name)?;
        u16::try_from(at).ok().map(HcaIndex)
    }

    /// An HCA by name.
    pub(crate) fn find_hca(&self, name: &str) -> Result<HcaIndex, EngineError> {
        self.hca_index(name).ok_or_else(|| EngineError::UnknownHca { hca: shown(name) })
    }

    /// Where a request's memory goes and which HCAs it is registered with; all of them usable.
    pub(crate) fn resolve(&self, request: &AcquireRequest, max_hcas: u32) -> Result<Resolved, EngineError> {
        let (place, paired, granularity_bytes) = match &request.place {
            MemoryPlace::Gpu(name) => {
                let gpu = self.find_gpu(name)?;
                let Some((_, granularity_bytes)) = self.gpu_memory else {
                    let problem = "this daemon has no backend for it; see 'gdrctl stats'".to_owned();
                    return Err(EngineError::Absent { what: "gpu memory", problem });
                };
                self.usable_gpu(gpu)?;
                (Place::Gpu(gpu), Some(gpu), granularity_bytes)
            }
            MemoryPlace::Host { near_gpu: Some(name) } => {
                let gpu = self.find_gpu(name)?;
                let node = self.gpu(gpu).and_then(|gpu| gpu.planned.numa_node);
                (Place::Host(node), Some(gpu), HOST_GRANULARITY_BYTES)
            }
            MemoryPlace::Host { near_gpu: None } => (Place::Host(None), None, HOST_GRANULARITY_BYTES),
        };
        let hcas = self.named_or_paired(&request.hcas, paired, max_hcas)?;
        for hca in hcas.iter() {
            self.usable_hca(*hca)?;
        }
        let place = match place {
            Place::Host(None) => Place::Host(self.node_of(&hcas)),
            known => known,
        };
        Ok(Resolved { place, hcas, granularity_bytes })
    }

    /// Whether an IOMMU translates what this HCA accesses.
    pub(crate) fn is_translated(&self, index: HcaIndex) -> bool {
        self.hca(index).is_some_and(|hca| self.translated_hcas.contains(&*hca.name))
    }

    /// The NUMA node that all of these HCAs are on.
    fn node_of(&self, hcas: &[HcaIndex]) -> Option<u32> {
        let mut nodes = hcas.iter().map(|hca| self.hca_nodes.get(&*self.hca(*hca)?.name).copied());
        let first = nodes.next()??;
        nodes.all(|node| node == Some(first)).then_some(first)
    }

    /// The HCAs of these names, or those that the GPU is paired with where there is none.
    pub(crate) fn named_or_paired(
        &self,
        names: &[String],
        paired: Option<GpuIndex>,
        max_hcas: u32,
    ) -> Result<Arc<[HcaIndex]>, EngineError> {
        if names.is_empty() {
            let Some(gpu) = paired.and_then(|gpu| self.gpu(gpu)) else {
                let problem = "empty; memory that is of no gpu and near none needs at least one".to_owned();
                return Err(EngineError::BadArgument { what: "hcas", problem });
            };
            if gpu.hcas.is_empty() {
                let problem = format!("{} is paired with none that this daemon serves", gpu.planned.name);
                return Err(EngineError::Absent { what: "hca", problem });
            }
            return Ok(Arc::clone(&gpu.hcas));
        }
        if names.len() > max_hcas as usize {
            let problem = format!("{} named, at most {max_hcas} are allowed", names.len());
            return Err(EngineError::BadArgument { what: "hcas", problem });
        }
        let mut hcas = Vec::with_capacity(names.len());
        for name in names {
            let hca = self.find_hca(name)?;
            // Named twice is registered once.
            if !hcas.contains(&hca) {
                hcas.push(hca);
            }
        }
        Ok(hcas.into())
    }

    fn usable_gpu(&self, index: GpuIndex) -> Result<(), EngineError> {
        match self.gpu(index).and_then(|gpu| gpu.lost.as_ref().map(|why| (gpu, why))) {
            Some((gpu, why)) => Err(EngineError::DeviceLost { problem: loss(&gpu.planned.uuid, why) }),
            None => Ok(()),
        }
    }

    /// Whether the HCA can be used.
    pub(crate) fn usable_hca(&self, index: HcaIndex) -> Result<(), EngineError> {
        match self.hca(index).and_then(|hca| hca.gone.as_ref().map(|why| (hca, why))) {
            Some((hca, why)) => Err(EngineError::DeviceLost { problem: format!("hca {} is gone: {why}", hca.name) }),
            None => Ok(()),
        }
    }
}

/// Longest piece of an unknown name that is repeated in an error, characters.
const MAX_SHOWN: usize = 64;

/// The start of a name from outside, without control characters.
fn shown(name: &str) -> String {
    name.chars().take(MAX_SHOWN).filter(|c| !c.is_control()).collect()
}

/// The size class of a length: the next power of two, at least the granularity.
pub(crate) fn size_class(size_bytes: u64, granularity_bytes: u64) -> Option<u64> {
    let least = granularity_bytes.checked_next_power_of_two()?;
    Some(size_bytes.checked_next_power_of_two()?.max(least))
}

/// Says why a GPU is not served: it is drained, or lost.
pub(super) fn loss(uuid: &GpuUuid, why: &str) -> String {
    if why.starts_with(DRAINED) { format!("gpu {uuid} was {why}") } else { format!("gpu {uuid} is lost: {why}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_classes_are_powers_of_two_from_the_granularity() {
        let granularity = 2 << 20;
        for (size, class) in [(1, 2 << 20), (2 << 20, 2 << 20), ((2 << 20) + 1, 4 << 20), (5 << 20, 8 << 20)] {
            assert_eq!(size_class(size, granularity), Some(class));
        }
        assert_eq!(size_class(u64::MAX, granularity), None);
    }

    #[test]
    fn names_from_outside_are_repeated_only_in_part() {
        assert_eq!(shown(&"x".repeat(1000)).len(), MAX_SHOWN);
        assert_eq!(shown("a\nb\u{1b}[31m"), "ab[31m");
    }
}
