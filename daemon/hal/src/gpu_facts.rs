//! What the GPU driver knows beyond sysfs: UUIDs, device nodes, links, health. NVML on hardware, the profile in simulation.

use gdrd_topology::bdf::Bdf;
use gdrd_topology::model::{DeviceNode, GpuDetail, GpuFacts as TopologyFacts};

use crate::{GpuMemoryError, GpuUuid};

/// Device number of a character device node (`st_rdev`, stat(2)).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DeviceNumber {
    /// Major number.
    pub major: u32,
    /// Minor number.
    pub minor: u32,
}

/// Whether a GPU can be used now.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum GpuHealth {
    /// Usable.
    Healthy,
    /// Lost or unusable, with what the driver said.
    Lost(String),
}

/// Memory of a GPU at the time of the call, as its driver's own tool shows it, bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuMemoryFact {
    /// All of it.
    pub total_bytes: u64,
    /// What the driver keeps for itself; no part of what is used.
    pub reserved_bytes: u64,
    /// What is in use by anyone, what only descriptors hold included.
    pub used_bytes: u64,
    /// Of that the contexts of this daemon's own processes.
    pub context_bytes: u64,
    /// BAR1, the window for the CPU and peers; `None` where there is none.
    pub bar1: Option<Bar1Fact>,
}

/// BAR1 of a GPU, bytes. Memory that an RDMA NIC registers is mapped there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bar1Fact {
    /// All of it.
    pub total_bytes: u64,
    /// What is mapped.
    pub used_bytes: u64,
    /// What was mapped when the daemon started, before it had made anything.
    pub used_at_start_bytes: u64,
}

/// One GPU as its driver describes it.
#[derive(Debug, Clone, PartialEq)]
pub struct GpuFact {
    /// Identity.
    pub uuid: GpuUuid,
    /// PCI function; joins these facts to the topology.
    pub bdf: Bdf,
    /// Its device node: an open fd of it proves the right to the GPU. `None` where it has none.
    pub device_node: Option<DeviceNumber>,
    /// Health at the time of the call.
    pub health: GpuHealth,
    /// Its memory; `None` where the driver does not tell.
    pub memory: Option<GpuMemoryFact>,
    /// What the topology takes from it: product, memory, links, fabric, slices.
    pub detail: GpuDetail,
}

impl GpuFact {
    /// The same as the topology merges it (`DriverFacts::gpus`).
    #[must_use]
    pub fn for_topology(&self) -> TopologyFacts {
        TopologyFacts {
            bdf: self.bdf,
            uuid: Some(self.uuid.0.clone()),
            device_node: self.device_node.map(|node| DeviceNode { major: node.major, minor: node.minor }),
            detail: self.detail.clone(),
        }
    }
}

/// Lists GPUs. Calls may block on the driver.
pub trait GpuFacts: Send + Sync {
    /// All GPUs, in PCI order.
    ///
    /// # Errors
    /// `Driver` when the driver cannot be asked.
    fn gpus(&self) -> Result<Vec<GpuFact>, GpuMemoryError>;
}
