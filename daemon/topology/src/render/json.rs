//! `gdrd.topo/v1`: the topology for programs. The order of fields is part of the contract; readers ignore
//! unknown keys.

use serde::{Deserialize, Serialize};

use crate::bandwidth::{self, BandwidthMatch};
use crate::bdf::Bdf;
use crate::level::Level;
use crate::link::LinkRate;
use crate::model::{Drive, Gpu, Hca, NumaNode, NvLink, NvLinkKind, PciRole, Snapshot, Upstream};
use crate::plan::contract::Plan;
use crate::render::matrix::Device;
use crate::source::Source;

/// Name and version of the contract.
pub const TOPO_SCHEMA: &str = "gdrd.topo/v1";

/// A snapshot as the contract has it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Topo {
    /// Always [`TOPO_SCHEMA`].
    pub schema: String,
    /// Generation of the snapshot.
    pub generation: u64,
    /// What it was read from.
    pub source: Source,
    /// Name of the machine kind.
    pub name: Option<String>,
    /// NUMA nodes.
    pub numa_nodes: Vec<NumaNode>,
    /// GPUs in PCI order.
    pub gpus: Vec<Gpu>,
    /// NICs in PCI order.
    pub nics: Vec<Hca>,
    /// Drives.
    pub drives: Vec<Drive>,
    /// PCI functions with their place and link.
    pub functions: Vec<TopoLink>,
    /// NVLinks.
    pub nvlinks: Vec<NvLink>,
    /// Their shape.
    pub nvlink_kind: Option<NvLinkKind>,
    /// P2P levels between all GPUs and NICs.
    pub levels: Levels,
    /// Each GPU's link against its NICs, by the plan that was given.
    pub bandwidth: Vec<BandwidthMatch>,
    /// GPUs that an administrator has had the daemon let go of; absent where there is none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub drained: Vec<String>,
    /// What could not be read.
    pub warnings: Vec<String>,
}

/// The matrix of P2P levels.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Levels {
    /// Names of rows and columns: GPUs, then NICs.
    pub devices: Vec<String>,
    /// Levels by row and column; null where nothing is known.
    pub rows: Vec<Vec<Option<Level>>>,
}

/// A PCI function with its place and link.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TopoLink {
    /// Its address.
    pub bdf: Bdf,
    /// Vendor and device id, as in `10de:20b0`.
    pub ids: Option<String>,
    /// Class, six hexadecimal digits.
    pub class: Option<String>,
    /// Address of the bridge above it, or the root bus.
    pub parent: Option<String>,
    /// Its role in the tree.
    pub role: PciRole,
    /// What the link carries now, Gbit/s in each direction.
    pub gbps: Option<f64>,
    /// What it could carry.
    pub max_gbps: Option<f64>,
    /// ACS of a bridge: `none` without the capability, else what is on, as lspci names it (`off`,
    /// `ReqRedir,CmpltRedir`); null where it is not known.
    #[serde(default)]
    pub acs: Option<String>,
}

/// A snapshot and the plan in force as `gdrd.topo/v1`.
#[must_use]
pub fn topo(snapshot: &Snapshot, plan: &Plan) -> Topo {
    let host = &snapshot.host;
    let functions = host.functions.iter().map(|function| TopoLink {
        bdf: function.bdf,
        ids: function.vendor.zip(function.device).map(|(vendor, device)| format!("{vendor:04x}:{device:04x}")),
        class: function.class.map(|class| format!("{class:?}")),
        parent: match function.upstream {
            Upstream::Root(root) => Some(root).filter(|root| !root.is_invented()).map(|root| root.to_string()),
            Upstream::Bridge(bridge) => Some(bridge.to_string()),
            Upstream::Unknown => None,
        },
        role: function.role,
        gbps: function.link.current.map(LinkRate::gbps),
        max_gbps: function.link.max.map(LinkRate::gbps),
        acs: function.acs.map(|acs| acs.to_string()),
    });
    Topo {
        schema: TOPO_SCHEMA.to_owned(),
        generation: snapshot.generation,
        source: snapshot.source.clone(),
        name: host.name.clone(),
        numa_nodes: host.numa_nodes.clone(),
        gpus: host.gpus.iter().map(gpu).collect(),
        nics: host.hcas.iter().map(nic).collect(),
        drives: host.drives.clone(),
        functions: functions.collect(),
        nvlinks: host.nvlinks.clone(),
        nvlink_kind: host.nvlink_kind(),
        levels: levels(snapshot),
        bandwidth: bandwidth::matches(host, plan),
        drained: plan.drained(),
        warnings: host.warnings.clone(),
    }
}

/// As the model has it, but for an address that only stands for a place.
fn gpu(gpu: &Gpu) -> Gpu {
    Gpu { bdf: gpu.bdf.filter(|bdf| !bdf.is_invented()), ..gpu.clone() }
}

fn nic(hca: &Hca) -> Hca {
    let real = |bdf: Option<Bdf>| bdf.filter(|bdf| !bdf.is_invented());
    Hca { bdf: real(hca.bdf), card: real(hca.card), ..hca.clone() }
}

fn levels(snapshot: &Snapshot) -> Levels {
    let host = &snapshot.host;
    let devices = Device::all(host);
    let gpus = host.gpus.iter().map(|gpu| gpu.name.clone());
    Levels {
        devices: gpus.chain(host.hcas.iter().map(|hca| hca.name.clone())).collect(),
        rows: devices.iter().map(|a| devices.iter().map(|b| a.level(*b, host)).collect()).collect(),
    }
}

impl Topo {
    /// The topology as JSON, indented.
    #[must_use]
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("a topology holds only strings, numbers and lists of them")
    }
}
