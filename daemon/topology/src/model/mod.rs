//! The host model: what every reader gives and everything else asks.
//!
//! Plain data, complete and immutable once assembled. It knows nothing of files, of pairing or of leases.

mod cpu;
mod device;
mod driver;
mod kernel;
mod nvlink;
mod pci;
mod raw;

use serde::{Deserialize, Serialize};

pub use cpu::CpuKind;
pub use device::{
    DeviceNode, Drive, Gid, GidKind, Gpu, GpuId, Hca, HcaId, HcaOrigin, LinkLayer, Netdev, Port, PortState,
};
pub use driver::{DriverFacts, Fabric, FabricState, GpuDetail, GpuFacts, Mig, MigSlice, NvLinkBundle, NvLinkRemote};
pub use kernel::Kernel;
pub(crate) use nvlink::RawNvLink;
pub use nvlink::{NvLink, NvLinkEnd, NvLinkKind};
pub use pci::{NumaId, NumaNode, PciClass, PciFunction, PciRole, Upstream};
pub use raw::{GivenLevel, NamedGpu, RawHca, RawHost};

use crate::bdf::Bdf;
use crate::source::Source;

/// One reading of a host. Never changes; a change of the host gives a new snapshot with a higher generation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Counts from 1; a later snapshot of the same host has a higher number.
    pub generation: u64,
    /// What was read.
    pub source: Source,
    /// What was found.
    pub host: Host,
}

/// The devices of one host and how they hang together.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Host {
    /// Name of the machine kind, where the input gives one.
    pub name: Option<String>,
    /// Kind of its CPUs, where known.
    pub cpu: Option<CpuKind>,
    /// Its kernel, where known.
    #[serde(default)]
    pub kernel: Option<Kernel>,
    /// NUMA nodes by id. Ids are sparse and some nodes have no CPUs.
    pub numa_nodes: Vec<NumaNode>,
    /// All PCI functions by address.
    pub functions: Vec<PciFunction>,
    /// GPUs in PCI order; `GpuId` is the place in this list.
    pub gpus: Vec<Gpu>,
    /// RDMA devices in PCI order, those without PCI function last; `HcaId` is the place in this list.
    pub hcas: Vec<Hca>,
    /// Network interfaces by name.
    pub netdevs: Vec<Netdev>,
    /// NVMe drives by name.
    pub drives: Vec<Drive>,
    /// NVLinks between GPUs and to switches.
    pub nvlinks: Vec<NvLink>,
    /// Levels that the input states itself, for devices without a place in a PCI tree. Each pair once, its
    /// names in order, the pairs in order of both.
    pub given_levels: Vec<GivenLevel>,
    /// Loaded kernel modules that let an RDMA NIC reach GPU memory (`nvidia_peermem`, `amdgpu`).
    pub peer_memory_modules: Vec<String>,
    /// What could not be read or was left out, each naming its path or device.
    pub warnings: Vec<String>,
}

impl Host {
    /// The function at an address.
    #[must_use]
    pub fn function(&self, bdf: Bdf) -> Option<&PciFunction> {
        let place = self.functions.binary_search_by_key(&bdf, |f| f.bdf).ok()?;
        self.functions.get(place)
    }

    /// The GPU with this id.
    #[must_use]
    pub fn gpu(&self, id: GpuId) -> Option<&Gpu> {
        self.gpus.get(id.0)
    }

    /// The RDMA device with this id.
    #[must_use]
    pub fn hca(&self, id: HcaId) -> Option<&Hca> {
        self.hcas.get(id.0)
    }

    /// GPU by name (`GPU0`), uuid or PCI address in any padding.
    #[must_use]
    pub fn find_gpu(&self, name: &str) -> Option<GpuId> {
        let bdf: Option<Bdf> = name.parse().ok();
        let matches = |gpu: &Gpu| {
            gpu.name.eq_ignore_ascii_case(name)
                || gpu.uuid().is_some_and(|uuid| uuid == name)
                || (bdf.is_some() && gpu.bdf == bdf)
        };
        self.gpus.iter().position(matches).map(GpuId)
    }

    /// RDMA device by name or PCI address.
    #[must_use]
    pub fn find_hca(&self, name: &str) -> Option<HcaId> {
        let bdf: Option<Bdf> = name.parse().ok();
        let by_name = self.hcas.iter().position(|hca| hca.name == name);
        by_name.or_else(|| self.hcas.iter().position(|hca| bdf.is_some() && hca.bdf == bdf)).map(HcaId)
    }

    /// Bridges above a function, nearest first. Ends at the root bus or where the tree is not known.
    pub fn bridges_above(&self, bdf: Bdf) -> impl Iterator<Item = &PciFunction> {
        self.function(bdf).into_iter().flat_map(|function| self.bridges_of(function))
    }

    /// The same of a function that has been found.
    pub(crate) fn bridges_of<'a>(&'a self, function: &'a PciFunction) -> impl Iterator<Item = &'a PciFunction> {
        let above = move |function: &PciFunction| match function.upstream {
            Upstream::Bridge(bridge) => self.function(bridge),
            Upstream::Root(_) | Upstream::Unknown => None,
        };
        // Assembly breaks cycles, so the walk ends; the bound keeps that true for hand-made hosts.
        std::iter::successors(above(function), move |f| above(f)).take(MAX_BRIDGE_DEPTH)
    }

    /// Whether both hosts have the same devices at the same places in the same state. What changes by itself
    /// from reading to reading (the speed a link happens to run at, warnings) is left aside.
    #[must_use]
    pub fn is_same_as(&self, other: &Self) -> bool {
        let steady = |host: &Self| {
            let mut host = host.clone();
            host.functions.iter_mut().for_each(|function| function.link.current = None);
            host.warnings.clear();
            host
        };
        self == other || steady(self) == steady(other)
    }

    /// The only NUMA node with CPUs, if there is exactly one: every device is on it.
    #[must_use]
    pub fn sole_numa_node(&self) -> Option<NumaId> {
        let mut with_cpus = self.numa_nodes.iter().filter(|node| node.has_cpus);
        let first = with_cpus.next()?;
        with_cpus.next().is_none().then_some(first.id)
    }
}

/// Most bridges on the way from a device to its root bus; PCI itself allows at most 256 buses a domain.
pub const MAX_BRIDGE_DEPTH: usize = 256;
