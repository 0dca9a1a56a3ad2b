//! What a GPU driver tells of its GPUs, beyond what PCI says of them.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::bdf::Bdf;
use crate::link::Link;
use crate::model::{DeviceNode, GpuId, Host, NvLink, NvLinkEnd};
use crate::source::SourceKind;

/// The answer of a GPU driver, to lay over what another input says (`ReadOptions::driver`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DriverFacts {
    /// Which library told it.
    pub source: SourceKind,
    /// Its GPUs, in any order.
    pub gpus: Vec<GpuFacts>,
    /// What it could not be asked, each naming its GPU.
    pub warnings: Vec<String>,
}

/// What an input knows of a GPU beyond its PCI function.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GpuFacts {
    /// Its address.
    pub bdf: Bdf,
    /// `GPU-…`.
    pub uuid: Option<String>,
    /// Device node.
    pub device_node: Option<DeviceNode>,
    /// The rest.
    pub detail: GpuDetail,
}

/// What the driver of a GPU knows besides who it is. Each part may be unknown: libraries differ in what they
/// answer, and so do GPUs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GpuDetail {
    /// Product name (`NVIDIA H200`).
    pub product: Option<String>,
    /// Device memory in bytes.
    pub memory_bytes: Option<u64>,
    /// Size of BAR1, the window for the CPU and for peers, in bytes.
    pub bar1_bytes: Option<u64>,
    /// PCIe link: now, and the best that GPU and host can do together.
    pub link: Link,
    /// Active NVLinks by far end, each end once; `None` if not told, empty if there are none.
    pub nvlinks: Option<Vec<NvLinkBundle>>,
    /// Registration with the NVSwitch fabric; `None` for GPUs that have none.
    pub fabric: Option<Fabric>,
    /// MIG; `None` for GPUs that cannot be sliced.
    pub mig: Option<Mig>,
}

/// Active NVLinks of a GPU to one far end.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NvLinkBundle {
    /// Far end.
    pub remote: NvLinkRemote,
    /// How many are active.
    pub links: u8,
    /// Gbit/s of one link in one direction, where known.
    pub link_gbps: Option<f64>,
}

impl Host {
    /// What is known of a GPU as its driver would tell it; `None` without such a GPU or without its address.
    #[must_use]
    pub fn gpu_facts(&self, id: GpuId) -> Option<GpuFacts> {
        let gpu = self.gpu(id)?;
        let bdf = gpu.bdf?;
        let bundle = |link: &NvLink| {
            let remote = match link.end {
                NvLinkEnd::Switch if link.gpu == id => NvLinkRemote::Switch,
                NvLinkEnd::Cpu if link.gpu == id => NvLinkRemote::Cpu,
                NvLinkEnd::Gpu(far) if link.gpu == id => NvLinkRemote::Gpu(self.gpu(far)?.bdf?),
                NvLinkEnd::Gpu(far) if far == id => NvLinkRemote::Gpu(self.gpu(link.gpu)?.bdf?),
                _ => return None,
            };
            Some(NvLinkBundle { remote, links: link.links, link_gbps: link.link_gbps })
        };
        let detail = GpuDetail {
            product: gpu.product.as_ref().map(|product| product.value.clone()),
            memory_bytes: gpu.memory_bytes.as_ref().map(|bytes| bytes.value),
            bar1_bytes: gpu.bar1_bytes.as_ref().map(|bytes| bytes.value),
            link: self.function(bdf).map(|function| function.link).unwrap_or_default(),
            nvlinks: (!self.nvlinks.is_empty()).then(|| self.nvlinks.iter().filter_map(bundle).collect()),
            fabric: gpu.fabric.as_ref().map(|fabric| fabric.value.clone()),
            mig: gpu.mig.as_ref().map(|mig| mig.value.clone()),
        };
        let device_node = gpu.device_node.as_ref().map(|node| node.value);
        Some(GpuFacts { bdf, uuid: gpu.uuid().map(str::to_owned), device_node, detail })
    }
}

/// What is at the far end of NVLinks, by address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NvLinkRemote {
    /// A GPU of this host.
    Gpu(Bdf),
    /// An NVSwitch, of this host or of the rack. All switches are one far end.
    Switch,
    /// The CPU (Power9).
    Cpu,
}

/// Where a GPU stands with the NVSwitch fabric (`nvmlGpuFabricInfoV_t`, nvml.h).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fabric {
    /// State of its registration.
    pub state: FabricState,
    /// The NVLink domain: GPUs of one cluster and clique reach each other by NVLink, across hosts too.
    pub cluster_uuid: Option<String>,
    /// Part of the cluster.
    pub clique_id: Option<u32>,
    /// What the driver says is not well with it (`degraded bandwidth`).
    pub problems: Vec<String>,
}

/// State of a GPU's registration with the fabric (`NVML_GPU_FABRIC_STATE_*`, nvml.h).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum FabricState {
    /// Nobody has begun: the fabric manager does not run.
    NotStarted,
    /// Under way.
    InProgress,
    /// Done: NVLinks to switches carry traffic.
    Completed,
    /// Ended with an error.
    Failed,
}

impl FabricState {
    const NAMES: [(Self, &'static str); 4] = [
        (Self::NotStarted, "not-started"),
        (Self::InProgress, "in-progress"),
        (Self::Completed, "completed"),
        (Self::Failed, "failed"),
    ];

    /// Reads what this type prints.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        Self::NAMES.iter().find(|(_, name)| *name == text).map(|(state, _)| *state)
    }
}

impl fmt::Display for FabricState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Self::NAMES.iter().find(|(state, _)| state == self);
        f.pad(name.map_or("unknown", |(_, name)| name))
    }
}

/// Multi-instance GPU: whether it is on, and the slices there are.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mig {
    /// Whether the mode is on: the GPU as a whole takes no work then.
    pub enabled: bool,
    /// Slices, by GPU instance and compute instance.
    pub slices: Vec<MigSlice>,
}

/// One slice of a GPU, as a job gets it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigSlice {
    /// `MIG-…`.
    pub uuid: String,
    /// GPU instance.
    pub gpu_instance: u32,
    /// Compute instance in it.
    pub compute_instance: u32,
    /// Its kind, as in `1g.18gb`, where known.
    pub profile: Option<String>,
    /// Its memory in bytes, where known.
    pub memory_bytes: Option<u64>,
}
