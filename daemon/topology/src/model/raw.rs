//! What a reader hands to assembly: facts as listed, nothing concluded yet.

use serde::{Deserialize, Serialize};

use crate::bdf::Bdf;
use crate::level::Level;
use crate::model::DriverFacts;
use crate::model::{
    CpuKind, Drive, GpuFacts, HcaOrigin, Kernel, Netdev, NumaId, NumaNode, PciFunction, Port, RawNvLink,
};
use crate::source::SourceKind;

/// Facts about one host from one input. A reader fills what it knows and leaves the rest empty;
/// [`crate::assemble::assemble`] concludes roles, GPUs, cards and bonds the same way for all readers.
#[derive(Clone, Debug, PartialEq)]
pub struct RawHost {
    /// Kind of input.
    pub source: SourceKind,
    /// Name of the machine kind.
    pub name: Option<String>,
    /// Kind of CPU.
    pub cpu: Option<CpuKind>,
    /// Kernel.
    pub kernel: Option<Kernel>,
    /// NUMA nodes.
    pub numa_nodes: Vec<NumaNode>,
    /// PCI functions in any order; `role` is not yet meant.
    pub functions: Vec<PciFunction>,
    /// RDMA devices; `None` if the input has no list of them (no class/infiniband).
    pub hcas: Option<Vec<RawHca>>,
    /// Network interfaces.
    pub netdevs: Vec<Netdev>,
    /// NVMe controllers.
    pub drives: Vec<Drive>,
    /// What is known of GPUs beyond their PCI function.
    pub gpus: Vec<GpuFacts>,
    /// What the GPU driver told when the input was made; counts unless `ReadOptions::driver` tells it anew.
    pub driver: Option<DriverFacts>,
    /// Functions that the input itself calls GPUs, whatever their class and place.
    pub stated_gpus: Vec<Bdf>,
    /// GPUs of inputs without addresses, in the order of the input.
    pub named_gpus: Vec<NamedGpu>,
    /// NVLinks by address.
    pub(crate) nvlinks: Vec<RawNvLink>,
    /// Levels stated by the input.
    pub given_levels: Vec<GivenLevel>,
    /// Loaded kernel modules that let a NIC reach GPU memory.
    pub peer_memory_modules: Vec<String>,
    /// What could not be read.
    pub warnings: Vec<String>,
}

impl RawHost {
    /// No facts yet.
    #[must_use]
    pub fn new(source: SourceKind) -> Self {
        Self {
            source,
            name: None,
            cpu: None,
            kernel: None,
            numa_nodes: Vec::new(),
            functions: Vec::new(),
            hcas: None,
            netdevs: Vec::new(),
            drives: Vec::new(),
            gpus: Vec::new(),
            driver: None,
            stated_gpus: Vec::new(),
            named_gpus: Vec::new(),
            nvlinks: Vec::new(),
            given_levels: Vec::new(),
            peer_memory_modules: Vec::new(),
            warnings: Vec::new(),
        }
    }
}

/// An RDMA device as listed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RawHca {
    /// Verbs name.
    pub name: String,
    /// PCI function, the first above it.
    pub bdf: Option<Bdf>,
    /// Data-direct function.
    pub data_direct: Option<Bdf>,
    /// Auxiliary device, if it is a sub-function.
    pub sub_function: Option<String>,
    /// Interface that a soft device names as its parent.
    pub parent_netdev: Option<String>,
    /// Ports.
    pub ports: Vec<Port>,
    /// Node GUID.
    pub node_guid: Option<u64>,
    /// Adapter GUID.
    pub sys_image_guid: Option<u64>,
    /// Whether this system can open it (uverbs device); `None` if the input does not tell.
    pub has_uverbs: Option<bool>,
    /// How it came into the list. `None`: hardware if it has a function, else soft.
    pub origin: Option<HcaOrigin>,
    /// NUMA node, for inputs that tell it apart from the function.
    pub numa: Option<NumaId>,
}

/// A GPU of an input without addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedGpu {
    /// Its name in the input (`GPU0`).
    pub name: String,
    /// NUMA node; `None` is unknown, or more than one.
    pub numa: Option<NumaId>,
}

/// A level between two devices, by name, as an input states it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GivenLevel {
    /// One device (`GPU0`, `mlx5_0`). A reader that does not know the name of a GPU gives its address.
    pub a: String,
    /// The other.
    pub b: String,
    /// The level.
    pub level: Level,
    /// Who states it.
    pub source: SourceKind,
}
