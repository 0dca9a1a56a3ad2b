//! What the engine needs to know of the host's topology: GPUs, and the HCAs each is paired with.

use std::collections::{BTreeMap, BTreeSet};

use gdrd_hal::GpuUuid;

/// One GPU and its pairing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedGpu {
    /// `GPU0`, `GPU1`, … in PCI order.
    pub name: String,
    /// Identity; what the GPU-memory backend knows it by.
    pub uuid: GpuUuid,
    /// PCI function, as the topology prints it.
    pub bdf: String,
    /// NUMA node, where known.
    pub numa_node: Option<u32>,
    /// HCAs assigned to it, best first.
    pub hcas: Vec<String>,
    /// Its BAR1, bytes, where known and smaller than its memory: what registrations can keep mapped at a time.
    pub bar1_bytes: Option<u64>,
}

/// The pairing of a host's GPUs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HostPlan {
    /// Generation of the topology it was made from.
    pub generation: u64,
    /// GPUs in PCI order.
    pub gpus: Vec<PlannedGpu>,
    /// NUMA nodes of HCAs by name, where known.
    pub hca_nodes: BTreeMap<String, u32>,
    /// HCAs whose memory accesses an IOMMU translates: long regions of theirs are registered in pieces.
    pub translated_hcas: BTreeSet<String>,
}
