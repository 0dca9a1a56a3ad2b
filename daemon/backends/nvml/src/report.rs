//! The report as data, and what follows from it.

use gdrd_hal::{DeviceNumber, GpuFact, GpuHealth, GpuUuid};
use gdrd_topology::bdf::Bdf;
use gdrd_topology::link::{Link, LinkRate, LinkSpeed, LinkWidth};
use gdrd_topology::model::{GpuDetail, Mig, NvLinkBundle, NvLinkRemote};
use serde::{Deserialize, Serialize};

/// All GPUs, in PCI order.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Version of the driver (`580.159.04`).
    pub driver_version: String,
    /// GPUs that say who they are.
    pub gpus: Vec<GpuReport>,
    /// What could not be asked, each naming its GPU.
    pub warnings: Vec<String>,
}

/// One GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuReport {
    /// `GPU-…`.
    pub uuid: String,
    /// PCI address, as NVML pads it.
    pub bdf: String,
    /// Product name.
    pub product: String,
    /// Minor number of its device node, `/dev/nvidia<minor>`.
    pub minor: Option<u32>,
    /// All of its memory, bytes.
    pub memory_bytes: Option<u64>,
    /// The window for the CPU and peers.
    pub bar1: Option<Bar1>,
    /// Whether MIG mode is on; `None` where the GPU has no such mode.
    pub mig: Option<bool>,
    /// Who may make contexts on it.
    pub compute_mode: Option<ComputeMode>,
    /// PCIe link now.
    pub pcie_now: Option<PcieLink>,
    /// PCIe link at best.
    pub pcie_best: Option<PcieLink>,
    /// Active NVLinks by far end.
    pub nvlinks: Vec<Links>,
    /// ECC errors since the driver was loaded that could not be corrected.
    pub uncorrected_ecc_errors: Option<u64>,
    /// What the driver says when the GPU is lost.
    pub lost: Option<String>,
}

/// BAR1, bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bar1 {
    /// All of it.
    pub total_bytes: u64,
    /// What is mapped.
    pub used_bytes: u64,
}

/// Who may make contexts on a GPU (`nvmlComputeMode_t`, nvml.h).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ComputeMode {
    /// Any process.
    Shared,
    /// One thread or process at a time.
    Exclusive,
    /// Nobody.
    Prohibited,
}

/// A PCIe link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PcieLink {
    /// Generation.
    pub generation: u32,
    /// Lanes.
    pub width: u32,
}

/// NVLinks to one far end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Links {
    /// Address of the GPU at the far end; `None` for a switch.
    pub peer: Option<String>,
    /// How many are active.
    pub links: u8,
}

impl PcieLink {
    fn rate(self) -> Option<LinkRate> {
        let speed = LinkSpeed::from_generation(self.generation)?;
        Some(LinkRate { speed, width: LinkWidth::from_lanes(u8::try_from(self.width).ok()?)? })
    }
}

impl Links {
    fn bundle(&self) -> Option<NvLinkBundle> {
        let remote = match &self.peer {
            Some(peer) => NvLinkRemote::Gpu(peer.parse().ok()?),
            None => NvLinkRemote::Switch,
        };
        Some(NvLinkBundle { remote, links: self.links, link_gbps: None })
    }
}

impl Report {
    /// Far ends that are no GPU of this host are switches. By address, since nvml-wrapper 0.13 answers `Unknown` to
    /// every question for the kind of a far end (`NvLink::remote_device_type` reads a copy).
    pub(crate) fn tell_switches(&mut self) {
        let gpus: Vec<String> = self.gpus.iter().map(|gpu| gpu.bdf.clone()).collect();
        for gpu in &mut self.gpus {
            let (direct, switched): (Vec<_>, Vec<_>) =
                gpu.nvlinks.drain(..).partition(|links| links.peer.as_ref().is_some_and(|peer| gpus.contains(peer)));
            gpu.nvlinks = direct;
            let links = switched.iter().fold(0_u8, |sum, links| sum.saturating_add(links.links));
            if links > 0 {
                gpu.nvlinks.push(Links { peer: None, links });
            }
        }
    }
}

impl GpuReport {
    /// Why the daemon lends no memory of it; `None` when it does.
    #[must_use]
    pub fn skip_reason(&self) -> Option<String> {
        if let Some(lost) = &self.lost {
            return Some(format!("the driver says: {lost}"));
        }
        if self.mig == Some(true) {
            return Some("mig mode is on, and slices are not served".to_owned());
        }
        match self.compute_mode {
            Some(ComputeMode::Exclusive) => {
                Some("its compute mode is exclusive: a worker would take the whole gpu from its job".to_owned())
            }
            Some(ComputeMode::Prohibited) => Some("its compute mode is prohibited".to_owned()),
            Some(ComputeMode::Shared) | None => None,
        }
    }

    /// For the engine; `None` when the address does not parse. `node` is the number of `/dev/nvidia<minor>`.
    #[must_use]
    pub fn fact(&self, node: Option<DeviceNumber>) -> Option<GpuFact> {
        let bdf: Bdf = self.bdf.parse().ok()?;
        let health = self.skip_reason().map_or(GpuHealth::Healthy, GpuHealth::Lost);
        let uuid = GpuUuid(self.uuid.clone());
        Some(GpuFact { uuid, bdf, device_node: node, health, detail: self.detail() })
    }

    fn detail(&self) -> GpuDetail {
        GpuDetail {
            product: Some(self.product.clone()).filter(|product| !product.is_empty()),
            memory_bytes: self.memory_bytes,
            bar1_bytes: self.bar1.map(|bar1| bar1.total_bytes),
            link: Link {
                current: self.pcie_now.and_then(PcieLink::rate),
                max: self.pcie_best.and_then(PcieLink::rate),
            },
            nvlinks: Some(self.nvlinks.iter().filter_map(Links::bundle).collect()),
            fabric: None,
            mig: self.mig.map(|enabled| Mig { enabled, slices: Vec::new() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu() -> GpuReport {
        GpuReport {
            uuid: "GPU-1".to_owned(),
            bdf: "00000000:00:06.0".to_owned(),
            product: "NVIDIA H200".to_owned(),
            minor: Some(0),
            memory_bytes: Some(150_754_820_096),
            bar1: Some(Bar1 { total_bytes: 1 << 38, used_bytes: 1 << 20 }),
            mig: Some(false),
            compute_mode: Some(ComputeMode::Shared),
            pcie_now: Some(PcieLink { generation: 5, width: 16 }),
            pcie_best: Some(PcieLink { generation: 5, width: 16 }),
            nvlinks: vec![Links { peer: None, links: 18 }],
            uncorrected_ecc_errors: Some(0),
            lost: None,
        }
    }

    #[test]
    fn a_healthy_shared_gpu_is_served() {
        let node = DeviceNumber { major: 195, minor: 0 };
        let fact = gpu().fact(Some(node)).expect("the address parses");
        assert_eq!((fact.bdf.to_string().as_str(), fact.health), ("0000:00:06.0", GpuHealth::Healthy));
        assert_eq!(gpu().skip_reason(), None);
    }

    #[test]
    fn modes_in_which_a_worker_would_harm_or_fail_are_reasons() {
        let with = |change: fn(&mut GpuReport)| {
            let mut gpu = gpu();
            change(&mut gpu);
            gpu.skip_reason().expect("it is skipped")
        };
        assert!(with(|gpu| gpu.mig = Some(true)).contains("mig"));
        assert!(with(|gpu| gpu.compute_mode = Some(ComputeMode::Exclusive)).contains("exclusive"));
        assert!(with(|gpu| gpu.compute_mode = Some(ComputeMode::Prohibited)).contains("prohibited"));
        assert!(with(|gpu| gpu.lost = Some("fell off the bus".to_owned())).contains("fell off"));
    }

    #[test]
    fn far_ends_that_are_no_gpu_are_one_bundle_to_the_switches() {
        let links = |peer: &str, links| Links { peer: Some(peer.to_owned()), links };
        let mut near = gpu();
        near.nvlinks = vec![links("00000000:01:00.0", 2), links("00000000:aa:00.0", 4), links("00000000:ab:00.0", 5)];
        let far = GpuReport { bdf: "00000000:01:00.0".to_owned(), nvlinks: Vec::new(), ..gpu() };
        let mut report = Report { gpus: vec![near, far], ..Report::default() };
        report.tell_switches();
        let told = &report.gpus[0].nvlinks;
        assert_eq!(*told, [links("00000000:01:00.0", 2), Links { peer: None, links: 9 }]);
        assert_eq!(report.gpus[1].nvlinks, []);
    }

    #[test]
    fn a_report_travels_as_json() {
        let report = Report { driver_version: "580".to_owned(), gpus: vec![gpu()], warnings: Vec::new() };
        let text = serde_json::to_string(&report).expect("it is plain data");
        assert_eq!(serde_json::from_str::<Report>(&text).expect("it was written just now"), report);
    }
}
