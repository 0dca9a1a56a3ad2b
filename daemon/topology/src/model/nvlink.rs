//! NVLink edges and the shape they form.

use serde::{Deserialize, Serialize};

use crate::bdf::Bdf;
use crate::model::{FabricState, GpuId, Host, NvLinkRemote};
use crate::source::SourceKind;

/// Far end of NVLinks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NvLinkEnd {
    /// Another GPU.
    Gpu(GpuId),
    /// The switched fabric of the host.
    Switch,
    /// The CPU: NVLinks of Power9, NVLink-C2C of Grace. Host memory and NICs are reached by these instead of PCIe.
    Cpu,
}

/// NVLinks between a GPU and one far end, bundled.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NvLink {
    /// Near end. For links between two GPUs it is the one first in PCI order.
    pub gpu: GpuId,
    /// Far end.
    pub end: NvLinkEnd,
    /// Active links in the bundle.
    pub links: u8,
    /// Gbit/s of one link in one direction, where known.
    pub link_gbps: Option<f64>,
    /// Which input listed it.
    pub source: SourceKind,
}

impl NvLink {
    /// Gbit/s of the bundle in one direction, where known.
    #[must_use]
    pub fn gbps(&self) -> Option<f64> {
        self.link_gbps.map(|gbps| gbps * f64::from(self.links))
    }
}

/// Shape of the NVLinks of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NvLinkKind {
    /// No links.
    None,
    /// Chains: no GPU has more than two neighbours and there is no ring.
    Linear,
    /// Some pairs linked, as the hybrid cube mesh.
    PartialMesh,
    /// Every pair linked directly.
    FullMesh,
    /// Links end at switches.
    Switched,
}

impl Host {
    /// What its GPUs call the links between them: `NVLink`, AMD's `xGMI`.
    #[must_use]
    pub fn gpu_link_word(&self) -> &'static str {
        let first = self.gpus.iter().find_map(|gpu| self.function(gpu.bdf?));
        if first.and_then(|function| function.vendor) == Some(AMD) { "xGMI" } else { "NVLink" }
    }

    /// One of them.
    pub(crate) fn gpu_link_noun(&self) -> &'static str {
        if self.gpu_link_word() == "xGMI" { "xGMI link" } else { "NVLink" }
    }
}

/// PCI vendor id of AMD's GPUs.
const AMD: u16 = 0x1002;

/// NVLinks as an input lists them, by address, before GPUs have ids.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RawNvLink {
    pub(crate) gpu: Bdf,
    pub(crate) remote: NvLinkRemote,
    pub(crate) links: u8,
    pub(crate) link_gbps: Option<f64>,
}

impl Host {
    /// NVLinks bonded between two GPUs: direct ones, else the fewer of both ends' links to the switches, where
    /// the fabric lets them reach each other.
    /// 0 if there are none.
    #[must_use]
    pub fn nvlinks_between(&self, a: GpuId, b: GpuId) -> u8 {
        let count = |near: GpuId, far: NvLinkEnd| -> u8 {
            self.nvlinks
                .iter()
                .filter(|link| link.gpu == near && link.end == far)
                .fold(0, |sum, link| sum.saturating_add(link.links))
        };
        if a == b {
            return 0;
        }
        let direct = count(a, NvLinkEnd::Gpu(b)).saturating_add(count(b, NvLinkEnd::Gpu(a)));
        if direct > 0 {
            return direct;
        }
        if !self.share_fabric(a, b) {
            return 0;
        }
        count(a, NvLinkEnd::Switch).min(count(b, NvLinkEnd::Switch))
    }

    /// Whether nothing is known that keeps two GPUs on switches apart: a registration that is not completed, or another
    /// cluster or clique.
    fn share_fabric(&self, a: GpuId, b: GpuId) -> bool {
        let fabric = |id| self.gpu(id).and_then(|gpu| gpu.fabric.as_ref()).map(|fabric| &fabric.value);
        let (a, b) = (fabric(a), fabric(b));
        let is_ready = [a, b].into_iter().flatten().all(|fabric| fabric.state == FabricState::Completed);
        let is_one = a.zip(b).is_none_or(|(a, b)| a.cluster_uuid == b.cluster_uuid && a.clique_id == b.clique_id);
        is_ready && is_one
    }

    /// Shape of the NVLinks; `None` if the input says nothing of NVLinks (sysfs does not).
    #[must_use]
    pub fn nvlink_kind(&self) -> Option<NvLinkKind> {
        if self.nvlinks.is_empty() {
            return None;
        }
        let active = || self.nvlinks.iter().filter(|link| link.links > 0);
        if active().any(|link| link.end == NvLinkEnd::Switch) {
            return Some(NvLinkKind::Switched);
        }
        let mut edges: Vec<(GpuId, GpuId)> = active()
            .filter_map(|link| match link.end {
                NvLinkEnd::Gpu(peer) => Some((link.gpu.min(peer), link.gpu.max(peer))),
                NvLinkEnd::Switch | NvLinkEnd::Cpu => None,
            })
            .collect();
        edges.sort_unstable();
        edges.dedup();
        Some(mesh_kind(&edges, self.gpus.len()))
    }
}

/// Shape of a graph of GPUs given as distinct edges.
fn mesh_kind(edges: &[(GpuId, GpuId)], gpus: usize) -> NvLinkKind {
    if edges.is_empty() {
        return NvLinkKind::None;
    }
    if edges.len() == gpus * gpus.saturating_sub(1) / 2 {
        return NvLinkKind::FullMesh;
    }
    let mut degree = vec![0_usize; gpus];
    let mut group: Vec<usize> = (0..gpus).collect();
    let mut has_ring = false;
    for (a, b) in edges {
        for end in [a.0, b.0] {
            if let Some(count) = degree.get_mut(end) {
                *count += 1;
            }
        }
        let (from, to) = (group.get(a.0).copied(), group.get(b.0).copied());
        has_ring |= from == to;
        for member in &mut group {
            if Some(*member) == from {
                *member = to.unwrap_or(*member);
            }
        }
    }
    if !has_ring && degree.iter().all(|count| *count <= 2) { NvLinkKind::Linear } else { NvLinkKind::PartialMesh }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn edges(pairs: &[(usize, usize)]) -> Vec<(GpuId, GpuId)> {
        pairs.iter().map(|(a, b)| (GpuId(*a), GpuId(*b))).collect()
    }

    #[test]
    fn meshes_are_told_apart() {
        type Case<'a> = (&'a [(usize, usize)], usize, NvLinkKind);
        let cases: [Case<'_>; 6] = [
            (&[], 4, NvLinkKind::None),
            (&[(0, 1)], 2, NvLinkKind::FullMesh),
            (&[(0, 1), (2, 3)], 4, NvLinkKind::Linear),
            (&[(0, 1), (1, 2), (2, 3)], 4, NvLinkKind::Linear),
            (&[(0, 1), (1, 2), (2, 3), (0, 3)], 4, NvLinkKind::PartialMesh),
            (&[(0, 1), (0, 2), (0, 3)], 4, NvLinkKind::PartialMesh),
        ];
        for (pairs, gpus, kind) in cases {
            assert_eq!(mesh_kind(&edges(pairs), gpus), kind, "{pairs:?}");
        }
    }
}
