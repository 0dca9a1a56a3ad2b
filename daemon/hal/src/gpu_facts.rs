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
