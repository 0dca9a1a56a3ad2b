//! P2P levels between two devices of a host, as nvidia-smi prints them.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::bdf::{Bdf, RootBus};
use crate::model::{GpuId, HcaId, Host, NumaId, PciFunction, Upstream};
use crate::pair::Pair;
use crate::paths::Paths;

/// How near two devices are, nearest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Level {
    /// The same device.
    Same,
    /// Bonded NVLinks; more links are nearer.
    NvLink(std::cmp::Reverse<u8>),
    /// A common bridge, and at most one bridge between it and each device.
    Pix,
    /// A common bridge, and more bridges below it.
    Pxb,
    /// No common bridge, one root bus.
    Phb,
    /// Different root buses of one NUMA node.
    Node,
    /// Different or unknown NUMA nodes.
    Sys,
}

impl Level {
    /// Level of a number of bonded NVLinks.
    #[must_use]
    pub fn nvlink(links: u8) -> Self {
        Self::NvLink(std::cmp::Reverse(links))
    }

    /// Reads what nvidia-smi prints: `X`, `NV12`, `PIX`, `PXB`, `PHB`, `NODE`, `SYS`.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        Some(match text {
            "X" => Self::Same,
            "PIX" => Self::Pix,
            "PXB" => Self::Pxb,
            "PHB" => Self::Phb,
            "NODE" => Self::Node,
            "SYS" => Self::Sys,
            _ => Self::nvlink(text.strip_prefix("NV")?.parse().ok()?),
        })
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Same => f.pad("X"),
            Self::NvLink(links) => f.pad(&format!("NV{}", links.0)),
            Self::Pix => f.pad("PIX"),
            Self::Pxb => f.pad("PXB"),
            Self::Phb => f.pad("PHB"),
            Self::Node => f.pad("NODE"),
            Self::Sys => f.pad("SYS"),
        }
    }
}

impl Serialize for Level {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Level {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Self::parse(&text).ok_or_else(|| serde::de::Error::custom(format!("`{text}` is no P2P level")))
    }
}

/// PCI vendor id of Broadcom's switches (PEX88000 and later, LSI's id).
const BROADCOM: u16 = 0x1000;

/// Device id of a bridge that can be a partition of a Broadcom switch.
fn partition(bridge: &PciFunction) -> Option<u16> {
    let is_broadcom = bridge.vendor == Some(BROADCOM) && bridge.subsystem.is_some_and(|(vendor, _)| vendor == BROADCOM);
    bridge.device.filter(|_| is_broadcom)
}

/// Where the paths of two functions meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Meeting {
    /// Deepest common bridge, `None` if they meet at the root bus or not at all.
    pub bridge: Option<Bdf>,
    /// Bridges from the root down to the common bridge, itself counted; 0 without one.
    pub depth: usize,
    /// Bridges between it (or the root) and the first function, ports that a whole switch stands for counted.
    pub hops_a: usize,
    /// The same for the second.
    pub hops_b: usize,
}

impl Host {
    /// Where the paths of two functions meet; `None` if one of them is not in the tree.
    #[must_use]
    pub fn meeting(&self, a: Bdf, b: Bdf) -> Option<Meeting> {
        Paths::of(self, a, b).map(|paths| paths.meeting())
    }

    /// The root bus above a function; `None` where the tree is not known that far.
    #[must_use]
    pub fn root_bus(&self, bdf: Bdf) -> Option<RootBus> {
        let top = self.bridges_above(bdf).last().or(self.function(bdf))?;
        match top.upstream {
            Upstream::Root(root) => Some(root),
            Upstream::Bridge(_) | Upstream::Unknown => None,
        }
    }

    /// PCI level between two functions, NVLink left aside; `None` if one of them is not in the tree or
    /// hangs at an unknown place.
    #[must_use]
    pub fn pci_level(&self, a: Bdf, b: Bdf) -> Option<Level> {
        self.level_on(&Paths::of(self, a, b)?)
    }

    /// The same where the paths of the two are known.
    pub(crate) fn level_on(&self, paths: &Paths<'_>) -> Option<Level> {
        let [a, b] = paths.ends();
        if a.bdf == b.bdf {
            return Some(Level::Same);
        }
        let meeting = paths.meeting();
        if meeting.bridge.is_some() {
            let near = meeting.hops_a <= 1 && meeting.hops_b <= 1;
            return Some(if near { Level::Pix } else { Level::Pxb });
        }
        if paths.share_root_bus()? {
            return Some(Level::Phb);
        }
        let numa = |function: &PciFunction| function.numa_id().or_else(|| self.sole_numa_node());
        Some(self.level_across_roots(numa(a), numa(b)))
    }

    /// NUMA node of a function, or the only node there is.
    #[must_use]
    pub fn numa_of(&self, bdf: Bdf) -> Option<NumaId> {
        self.function(bdf).and_then(|f| f.numa_id()).or_else(|| self.sole_numa_node())
    }

    fn level_across_roots(&self, a: Option<NumaId>, b: Option<NumaId>) -> Level {
        match (a, b) {
            (Some(a), Some(b)) if a == b => Level::Node,
            _ => Level::Sys,
        }
    }

    /// Level between two GPUs: NVLink where there is one, else PCI; `None` if nothing is known.
    #[must_use]
    pub fn gpu_level(&self, a: GpuId, b: GpuId) -> Option<Level> {
        if a == b {
            return Some(Level::Same);
        }
        let links = self.nvlinks_between(a, b);
        if links > 0 {
            return Some(Level::nvlink(links));
        }
        let (a, b) = (self.gpu(a)?, self.gpu(b)?);
        self.level_by(a.bdf, b.bdf, &a.name, &b.name)
    }

    /// Level between a GPU and an RDMA device, by the better of its paths; `None` for devices without
    /// PCI function, of which nothing can be said.
    #[must_use]
    pub fn gpu_hca_level(&self, gpu: GpuId, hca: HcaId) -> Option<Level> {
        Pair::of(self, gpu, hca)?.level()
    }

    /// Whether nothing but the virtual bridges of one physical switch lies between a GPU and an RDMA device.
    /// Broadcom switches divided into partitions show more than one bridge between their ports, all of one
    /// device id and with Broadcom's own subsystem vendor (as NCCL has it: `ncclTopoFlattenBcmSwitches`,
    /// nccl:src/graph/topo.cc).
    #[must_use]
    pub fn shares_one_switch(&self, gpu: GpuId, hca: HcaId) -> bool {
        let ends = self.gpu(gpu).and_then(|gpu| gpu.bdf).zip(self.hca(hca).and_then(|hca| hca.bdf));
        let Some((a, b)) = ends else { return false };
        let Some(common) = self.meeting(a, b).and_then(|meeting| meeting.bridge) else { return false };
        let Some(device) = self.function(common).and_then(partition) else { return false };
        let is_part = |end: Bdf| {
            let mut between = self.bridges_above(end).take_while(|bridge| bridge.bdf != common);
            between.all(|bridge| partition(bridge) == Some(device))
        };
        is_part(a) && is_part(b)
    }

    /// Level between two RDMA devices; `None` if nothing is known.
    #[must_use]
    pub fn hca_level(&self, a: HcaId, b: HcaId) -> Option<Level> {
        if a == b {
            return Some(Level::Same);
        }
        let (a, b) = (self.hca(a)?, self.hca(b)?);
        if a.bdf.is_some() && a.bdf == b.bdf {
            // Sub-functions of one function: nothing lies between them.
            return Some(Level::Pix);
        }
        self.level_by(a.bdf, b.bdf, &a.name, &b.name)
    }

    /// By the tree where both have an address, else as the input states it.
    fn level_by(&self, a: Option<Bdf>, b: Option<Bdf>, name_a: &str, name_b: &str) -> Option<Level> {
        a.zip(b).and_then(|(a, b)| self.pci_level(a, b)).or_else(|| self.given_level(name_a, name_b))
    }

    pub(crate) fn given_level(&self, a: &str, b: &str) -> Option<Level> {
        let wanted = (a.min(b), a.max(b));
        let place =
            self.given_levels.binary_search_by(|given| (given.a.as_str(), given.b.as_str()).cmp(&wanted)).ok()?;
        self.given_levels.get(place).map(|given| given.level)
    }
}
