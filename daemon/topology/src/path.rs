//! What a path between two devices carries, and what limits it.

use serde::{Deserialize, Serialize};

use crate::bdf::Bdf;
use crate::model::{GpuId, HcaId, Host, NvLink, NvLinkEnd, PciFunction};
use crate::pair::Pair;
use crate::paths::Paths;
use crate::together::{Part, Way};
use crate::words;

/// The narrowest part of a path.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Bottleneck {
    /// What it carries in each direction, Gbit/s.
    pub gbps: f64,
    /// The part: a PCIe link by the function it belongs to, a port as `mlx5_0:1`, or the links of `GPU0 to the CPU`.
    pub hop: String,
}

impl Bottleneck {
    pub(crate) fn narrower(self, other: Self) -> Self {
        if other.gbps < self.gbps { other } else { self }
    }
}

/// Bridges that hypervisors make up: what they say of speed and width is not true of the hardware below.
/// QEMU's own vendor id, and the TI switch and Intel root port that it imitates.
pub(crate) fn is_emulated(function: &PciFunction) -> bool {
    matches!(
        (function.vendor, function.device),
        (Some(0x1b36), _) | (Some(0x104c), Some(0x8232 | 0x8233)) | (Some(0x8086), Some(0x3420))
    )
}

/// What the link of a function carries; `None` where that is unknown or made up.
pub(crate) fn link_gbps(function: &PciFunction) -> Option<f64> {
    if is_emulated(function) { None } else { function.link.gbps() }
}

/// The narrowest of these links, the first of equals; `None` if none is known.
fn narrowest<'a>(links: impl Iterator<Item = &'a PciFunction>) -> Option<Bottleneck> {
    let known = links.filter_map(|function| Some((function.bdf, link_gbps(function)?)));
    let (bdf, gbps) = known.reduce(|a, b| if b.1 < a.1 { b } else { a })?;
    Some(Bottleneck { gbps, hop: bdf.to_string() })
}

/// The narrowest known link between two functions.
fn narrowest_on(paths: &Paths<'_>) -> Option<Bottleneck> {
    narrowest(paths.links_of_a().chain(paths.links_of_b()))
}

impl Host {
    /// Functions whose links lie between a device and where its path meets that of another, the device first: those that
    /// traffic between them takes on its side.
    pub(crate) fn links_towards(&self, from: Bdf, other: Bdf) -> impl Iterator<Item = &PciFunction> {
        let paths = Paths::of(self, from, other);
        paths.map(|paths| paths.links_of_a().collect::<Vec<_>>()).unwrap_or_default().into_iter()
    }

    /// Narrowest known PCIe link between two functions; `None` if no link on the way is known.
    #[must_use]
    pub fn pci_bottleneck(&self, a: Bdf, b: Bdf) -> Option<Bottleneck> {
        narrowest_on(&Paths::of(self, a, b)?)
    }

    /// Narrowest known PCIe link between a function and its root bus, which is the way to host memory.
    #[must_use]
    pub fn root_bottleneck(&self, bdf: Bdf) -> Option<Bottleneck> {
        narrowest(self.function(bdf).into_iter().chain(self.bridges_above(bdf)))
    }

    /// Links of a GPU to its CPU besides PCIe (NVLinks of Power9, NVLink-C2C of Grace), where it has any. All that passes the CPU
    /// takes these: the GPU's memory is the CPU's to address, and the PCIe link may be no more than a formality.
    pub(crate) fn cpu_links(&self, gpu: GpuId) -> Option<&NvLink> {
        self.nvlinks.iter().find(|link| link.gpu == gpu && link.end == NvLinkEnd::Cpu && link.links > 0)
    }

    fn cpu_links_bottleneck(&self, link: &NvLink) -> Option<Bottleneck> {
        Some(Bottleneck { gbps: link.gbps()?, hop: format!("{} to the CPU", self.gpu(link.gpu)?.name) })
    }

    /// Narrowest known part of the paths of a GPU, the first of the two, and another function.
    pub(crate) fn narrowest_of_gpu(&self, gpu: GpuId, paths: &Paths<'_>) -> Option<Bottleneck> {
        match self.cpu_links(gpu).filter(|_| paths.pass_cpu()) {
            Some(link) => {
                let far = narrowest(paths.links_of_b());
                far.into_iter().chain(self.cpu_links_bottleneck(link)).reduce(Bottleneck::narrower)
            }
            None => narrowest_on(paths),
        }
    }

    /// A GPU's side of the way to another function: its parts with what they carry.
    pub(crate) fn gpu_side(&self, gpu: GpuId, other: Bdf) -> Way {
        let near = self.gpu(gpu).and_then(|gpu| gpu.bdf);
        let Some(paths) = near.and_then(|near| Paths::of(self, near, other)) else { return Way::new() };
        match self.cpu_links(gpu).filter(|_| paths.pass_cpu()) {
            Some(link) => link.gbps().map(|gbps| (Part::ToCpu(gpu), gbps)).into_iter().collect(),
            None => {
                let part = |function: &PciFunction| Some((Part::GpuSide(function.bdf), link_gbps(function)?));
                paths.links_of_a().filter_map(part).collect()
            }
        }
    }

    /// Narrowest known part between a GPU and host memory.
    #[must_use]
    pub fn gpu_memory_bottleneck(&self, gpu: GpuId) -> Option<Bottleneck> {
        match self.cpu_links(gpu) {
            Some(link) => self.cpu_links_bottleneck(link),
            None => self.root_bottleneck(self.gpu(gpu)?.bdf?),
        }
    }

    /// The fastest usable port of an HCA.
    #[must_use]
    pub fn port_bottleneck(&self, id: HcaId) -> Option<Bottleneck> {
        let hca = self.hca(id)?;
        let gbps = hca.rate_gbps()?;
        let port = hca.ports.iter().find(|port| port.rate_gbps == Some(gbps))?;
        Some(Bottleneck { gbps, hop: format!("{}:{}", hca.name, port.port_num) })
    }

    /// Narrowest part between a GPU and the wire of an HCA: every link on the way and the port.
    /// By the better path where the HCA has a data-direct function.
    #[must_use]
    pub fn gpu_hca_bottleneck(&self, gpu: GpuId, hca: HcaId) -> Option<Bottleneck> {
        Pair::of(self, gpu, hca)?.bottleneck()
    }

    /// Narrowest part of the NIC's own side of that path: what it could give several GPUs together.
    pub(crate) fn nic_side_gbps(&self, gpu: GpuId, hca: HcaId) -> Option<f64> {
        let (near, far) = (self.gpu(gpu)?.bdf, self.hca(hca)?.bdf);
        let links = near.zip(far).into_iter().flat_map(|(a, b)| self.links_towards(b, a));
        links.filter_map(link_gbps).chain(self.hca(hca)?.rate_gbps()).min_by(f64::total_cmp)
    }

    /// Gbit/s of the NVLinks bonded between two GPUs in one direction; `None` without NVLink or rate.
    #[must_use]
    pub fn nvlink_gbps(&self, a: GpuId, b: GpuId) -> Option<f64> {
        let links = self.nvlinks_between(a, b);
        let is_of_pair = |gpu: GpuId, end: NvLinkEnd| {
            (gpu == a && (end == NvLinkEnd::Gpu(b) || end == NvLinkEnd::Switch))
                || (gpu == b && end == NvLinkEnd::Gpu(a))
        };
        let link = self.nvlinks.iter().find(|link| is_of_pair(link.gpu, link.end))?;
        (links > 0).then(|| link.link_gbps.map(|gbps| gbps * f64::from(links))).flatten()
    }

    /// Sentences on links of GPUs, NICs and the bridges above them that run below what they could.
    #[must_use]
    pub fn slow_links(&self) -> Vec<String> {
        let devices = self.gpus.iter().map(|gpu| gpu.bdf).chain(self.hcas.iter().map(|hca| hca.bdf));
        let mut slow: Vec<&PciFunction> = devices
            .flatten()
            .flat_map(|bdf| self.function(bdf).into_iter().chain(self.bridges_above(bdf)))
            .filter(|function| function.link.is_below_max() && !is_emulated(function))
            .collect();
        slow.sort_by_key(|function| function.bdf);
        slow.dedup_by_key(|function| function.bdf);
        slow.into_iter().filter_map(|function| self.slow_link(function)).collect()
    }

    fn slow_link(&self, function: &PciFunction) -> Option<String> {
        let (current, max) = function.link.current.zip(function.link.max)?;
        let is_gpu = self.gpus.iter().any(|gpu| gpu.bdf == Some(function.bdf));
        let only_slower = current.width == max.width;
        let hint = if is_gpu && only_slower { "; idle GPUs lower their link speed" } else { "" };
        Some(format!(
            "{}: link runs at {current} of {max} ({} of {} Gbit/s){hint}",
            function.bdf,
            words::gbps(current.gbps()),
            words::gbps(max.gbps())
        ))
    }
}
