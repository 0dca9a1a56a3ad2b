//! `gdrd.plan/v1`: the plan as users read it. The order of fields is part of the contract.

use serde::{Deserialize, Serialize};

use crate::acs::PeerAcs;
use crate::bdf::Bdf;
use crate::gdr::Gdr;
use crate::level::Level;
use crate::model::{LinkLayer, NumaId, NvLinkKind, PortState};
use crate::source::Source;

/// Name and version of the contract.
pub const SCHEMA: &str = "gdrd.plan/v1";

/// Which GPU uses which NICs, and why. Self-contained: names, uuids and addresses, no ids of a snapshot.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Always [`SCHEMA`].
    pub schema: String,
    /// Generation of the snapshot that was planned.
    pub generation: u64,
    /// What the snapshot was read from.
    pub source: Source,
    /// GPUs in PCI order.
    pub gpus: Vec<GpuPlan>,
    /// NICs in PCI order.
    pub nics: Vec<NicPlan>,
    /// NVLinks of the host.
    pub nvlink: NvLinkPlan,
    /// What the reader of the plan should know.
    pub warnings: Vec<String>,
}

/// A GPU and its NICs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GpuPlan {
    /// `GPU` and its place in PCI order.
    pub name: String,
    /// `GPU-…`, where known.
    pub uuid: Option<String>,
    /// PCI address, where known.
    pub bdf: Option<Bdf>,
    /// NUMA node; `None` is unknown.
    pub numa: Option<NumaId>,
    /// NICs it should use, best first.
    pub assigned: Vec<String>,
    /// Rail of the first of them.
    pub rail: Option<u32>,
    /// Why these, or why none.
    pub reason: String,
    /// Whether an administrator has had the daemon let go of it; only a daemon knows. Absent is no.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub drained: bool,
    /// All NICs, nearest first.
    pub nics: Vec<PairPlan>,
}

/// A GPU and one NIC.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PairPlan {
    /// Name of the NIC.
    pub name: String,
    /// PCI address, where known.
    pub bdf: Option<Bdf>,
    /// P2P level; `None` for devices without a known place.
    pub level: Option<Level>,
    /// Narrowest part of the path, Gbit/s.
    pub gbps: Option<f64>,
    /// GPUDirect RDMA between the two.
    pub gdr: Gdr,
    /// Whether ACS sends traffic between the two up to the root; `None` where no switch joins them.
    #[serde(default)]
    pub acs: Option<PeerAcs>,
}

/// A NIC.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NicPlan {
    /// RDMA device, else netdev, else address.
    pub name: String,
    /// PCI address, where known.
    pub bdf: Option<Bdf>,
    /// NUMA node; `None` is unknown.
    pub numa: Option<NumaId>,
    /// Lowest address of the adapter's functions; equal for NICs of one card.
    pub card: Option<Bdf>,
    /// Rate of its fastest usable port, Gbit/s.
    pub rate_gbps: Option<f64>,
    /// Its ports.
    pub ports: Vec<PortPlan>,
    /// GPUs that use it, in PCI order.
    pub gpus: Vec<String>,
}

/// A port of a NIC.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PortPlan {
    /// Counted from 1.
    pub port_num: u8,
    /// Logical state.
    pub state: PortState,
    /// Network it speaks.
    pub link_layer: LinkLayer,
    /// Gbit/s.
    pub rate_gbps: Option<f64>,
}

/// NVLinks of a host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NvLinkPlan {
    /// Their shape; `None` if the input does not tell.
    pub kind: Option<NvLinkKind>,
}

impl Plan {
    /// The plan as JSON, indented.
    #[must_use]
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("a plan holds only strings, numbers and lists of them")
    }

    /// Names of the GPUs that are drained.
    #[must_use]
    pub fn drained(&self) -> Vec<String> {
        self.gpus.iter().filter(|gpu| gpu.drained).map(|gpu| gpu.name.clone()).collect()
    }

    /// The entry of a GPU, by name, uuid or address.
    #[must_use]
    pub fn gpu(&self, name: &str) -> Option<&GpuPlan> {
        let bdf: Option<Bdf> = name.parse().ok();
        self.gpus.iter().find(|gpu| {
            gpu.name.eq_ignore_ascii_case(name)
                || gpu.uuid.as_deref() == Some(name)
                || (bdf.is_some() && gpu.bdf == bdf)
        })
    }
}
