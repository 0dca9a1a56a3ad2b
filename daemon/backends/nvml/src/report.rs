//! The report as data, and what follows from it.

use std::collections::BTreeMap;

use gdrd_hal::{Bar1Fact, DeviceNumber, GpuFact, GpuHealth, GpuMemoryFact, GpuUuid};
use gdrd_topology::bdf::Bdf;
use gdrd_topology::link::{Link, LinkRate, LinkSpeed, LinkWidth};
use gdrd_topology::model::{Fabric, FabricState, GpuDetail, Mig, MigSlice, NvLinkBundle, NvLinkRemote};
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
    /// Its memory.
    pub memory: Option<Memory>,
    /// Processes with a context on it.
    pub processes: Vec<ProcessMemory>,
    /// The window for the CPU and peers.
    pub bar1: Option<Bar1>,
    /// Whether MIG mode is on; `None` where the GPU has no such mode.
    pub mig: Option<bool>,
    /// Its slices, with MIG mode on.
    pub slices: Vec<Slice>,
    /// Who may make contexts on it.
    pub compute_mode: Option<ComputeMode>,
    /// PCIe link now.
    pub pcie_now: Option<PcieLink>,
    /// PCIe link at best.
    pub pcie_best: Option<PcieLink>,
    /// Active NVLinks by far end.
    pub nvlinks: Vec<Links>,
    /// What the library says of the fabric.
    pub fabric: Option<FabricReport>,
    /// ECC errors since the driver was loaded that could not be corrected.
    pub uncorrected_ecc_errors: Option<u64>,
    /// What the driver says when the GPU is lost.
    pub lost: Option<String>,
    /// What the driver says that it takes to have the GPU work again (`a reset of the gpu`); `None` where it takes nothing,
    /// and with drivers that do not tell.
    pub remedy: Option<String>,
}

/// Memory of a GPU, bytes, as nvidia-smi shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// All of it.
    pub total_bytes: u64,
    /// What the driver keeps for itself; no part of what is used.
    pub reserved_bytes: u64,
    /// What is in use, with or without a process.
    pub used_bytes: u64,
}

/// What a process uses of a GPU's memory: its context and what it made itself, but not what it imported.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessMemory {
    /// Its number, in the pid namespace of the driver.
    pub pid: u32,
    /// Bytes; `None` where the driver does not tell.
    pub used_bytes: Option<u64>,
}

/// A MIG slice.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Slice {
    /// `MIG-…`.
    pub uuid: String,
    /// GPU instance.
    pub gpu_instance: u32,
    /// Compute instance in it.
    pub compute_instance: u32,
    /// As the library names it (`NVIDIA H200 MIG 1g.18gb`).
    pub name: String,
    /// Its memory, bytes.
    pub memory_bytes: Option<u64>,
}

/// The GPU's registration with the NVSwitch fabric, in the numbers of `nvmlGpuFabricInfo_v2_t`, nvml.h.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FabricReport {
    /// `NVML_GPU_FABRIC_STATE_*`.
    pub state: u32,
    /// Result of a registration that is completed (`nvmlReturn_t`).
    pub status: u32,
    /// The NVLink domain; all zero inside of one host.
    pub cluster_uuid: [u8; 16],
    /// Part of the domain.
    pub clique_id: u32,
    /// `NVML_GPU_FABRIC_HEALTH_MASK_*`.
    pub health_mask: u32,
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

/// What is at the far end of NVLinks.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FarEnd {
    /// A GPU.
    Gpu {
        /// Its address, as NVML pads it.
        bdf: String,
    },
    /// An NVSwitch, wherever it is: a virtual machine does not see those that it uses.
    Switch,
    /// The CPU (Power9).
    Cpu,
    /// The library does not tell; for a moment only, see [`Report`].
    Unknown {
        /// Its address, where that is told.
        bdf: Option<String>,
    },
}

/// NVLinks to one far end; all switches are one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Links {
    /// What is there.
    pub far: FarEnd,
    /// How many are active.
    pub links: u8,
    /// What one carries in one direction, Gbit/s.
    pub link_gbps: Option<u32>,
}

impl PcieLink {
    fn rate(self) -> Option<LinkRate> {
        let speed = LinkSpeed::from_generation(self.generation)?;
        Some(LinkRate { speed, width: LinkWidth::from_lanes(u8::try_from(self.width).ok()?)? })
    }
}

impl Slice {
    fn told(&self) -> MigSlice {
        MigSlice {
            uuid: self.uuid.clone(),
            gpu_instance: self.gpu_instance,
            compute_instance: self.compute_instance,
            profile: self.name.rsplit_once("MIG ").map(|(_, profile)| profile.to_owned()),
            memory_bytes: self.memory_bytes,
        }
    }
}

impl Links {
    fn bundle(&self) -> Option<NvLinkBundle> {
        let remote = match &self.far {
            FarEnd::Gpu { bdf } => NvLinkRemote::Gpu(bdf.parse().ok()?),
            FarEnd::Switch | FarEnd::Unknown { .. } => NvLinkRemote::Switch,
            FarEnd::Cpu => NvLinkRemote::Cpu,
        };
        Some(NvLinkBundle { remote, links: self.links, link_gbps: self.link_gbps.map(f64::from) })
    }
}

/// What the bits of the health mask say when they are 1, by place (`NVML_GPU_FABRIC_HEALTH_MASK_*`, nvml.h): two bits each,
/// of which 1 is yes.
const FABRIC_PROBLEMS: [(u32, &str); 4] = [
    (0, "degraded bandwidth"),
    (2, "route recovery under way"),
    (4, "unhealthy route"),
    (6, "recovery from access timeouts under way"),
];

impl FabricReport {
    /// `None` for a GPU that has no fabric.
    fn fabric(&self) -> Option<Fabric> {
        let state = match self.state {
            1 => FabricState::NotStarted,
            2 => FabricState::InProgress,
            3 if self.status == 0 => FabricState::Completed,
            3 => FabricState::Failed,
            _ => return None,
        };
        let bit = |place: u32| self.health_mask >> place & 0b11 == 1;
        let hex: String = self.cluster_uuid.iter().map(|byte| format!("{byte:02x}")).collect();
        let part = |from: usize, to: usize| hex.get(from..to).unwrap_or_default();
        let uuid = [part(0, 8), part(8, 12), part(12, 16), part(16, 20), part(20, 32)].join("-");
        Some(Fabric {
            state,
            cluster_uuid: Some(uuid).filter(|_| self.cluster_uuid != [0; 16]),
            clique_id: Some(self.clique_id),
            problems: FABRIC_PROBLEMS.iter().filter(|(at, _)| bit(*at)).map(|(_, told)| (*told).to_owned()).collect(),
        })
    }
}

impl Report {
    /// Ends that the library does not name are GPUs of this host by their address, else switches.
    pub(crate) fn tell_far_ends(&mut self) {
        let gpus: Vec<String> = self.gpus.iter().map(|gpu| gpu.bdf.clone()).collect();
        for gpu in &mut self.gpus {
            let mut known: BTreeMap<FarEnd, Links> = BTreeMap::new();
            for links in gpu.nvlinks.drain(..) {
                let far = match links.far {
                    FarEnd::Unknown { bdf: Some(bdf) } if gpus.contains(&bdf) => FarEnd::Gpu { bdf },
                    FarEnd::Unknown { .. } => FarEnd::Switch,
                    told => told,
                };
                let empty = Links { far: far.clone(), links: 0, link_gbps: None };
                let bundle = known.entry(far).or_insert(empty);
                bundle.links = bundle.links.saturating_add(links.links);
                bundle.link_gbps = bundle.link_gbps.or(links.link_gbps);
            }
            gpu.nvlinks = known.into_values().collect();
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
        Some(GpuFact { uuid, bdf, device_node: node, health, memory: self.memory_fact(), detail: self.detail() })
    }

    /// Contexts of the daemon's processes, and BAR1 at its start, are for the daemon to fill in.
    fn memory_fact(&self) -> Option<GpuMemoryFact> {
        let memory = self.memory?;
        let bar1 = |bar1: Bar1| Bar1Fact {
            total_bytes: bar1.total_bytes,
            used_bytes: bar1.used_bytes,
            used_at_start_bytes: bar1.used_bytes,
        };
        Some(GpuMemoryFact {
            total_bytes: memory.total_bytes,
            reserved_bytes: memory.reserved_bytes,
            used_bytes: memory.used_bytes,
            context_bytes: 0,
            bar1: self.bar1.map(bar1),
        })
    }

    fn detail(&self) -> GpuDetail {
        GpuDetail {
            product: Some(self.product.clone()).filter(|product| !product.is_empty()),
            memory_bytes: self.memory.map(|memory| memory.total_bytes),
            bar1_bytes: self.bar1.map(|bar1| bar1.total_bytes),
            link: Link {
                current: self.pcie_now.and_then(PcieLink::rate),
                max: self.pcie_best.and_then(PcieLink::rate),
            },
            nvlinks: Some(self.nvlinks.iter().filter_map(Links::bundle).collect()),
            fabric: self.fabric.and_then(|fabric| fabric.fabric()),
            mig: self.mig.map(|enabled| Mig { enabled, slices: self.slices.iter().map(Slice::told).collect() }),
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
            memory: Some(Memory { total_bytes: 150_754_820_096, reserved_bytes: 644_939_776, used_bytes: 0 }),
            processes: vec![ProcessMemory { pid: 7, used_bytes: Some(543_162_368) }],
            bar1: Some(Bar1 { total_bytes: 1 << 38, used_bytes: 1 << 20 }),
            mig: Some(false),
            slices: Vec::new(),
            compute_mode: Some(ComputeMode::Shared),
            pcie_now: Some(PcieLink { generation: 5, width: 16 }),
            pcie_best: Some(PcieLink { generation: 5, width: 16 }),
            nvlinks: vec![Links { far: FarEnd::Switch, links: 18, link_gbps: Some(200) }],
            fabric: Some(fabric(3, 0)),
            uncorrected_ecc_errors: Some(0),
            lost: None,
            remedy: None,
        }
    }

    fn fabric(state: u32, health_mask: u32) -> FabricReport {
        FabricReport { state, status: 0, cluster_uuid: [0; 16], clique_id: 0, health_mask }
    }

    #[test]
    fn a_healthy_shared_gpu_is_served() {
        let node = DeviceNumber { major: 195, minor: 0 };
        let fact = gpu().fact(Some(node)).expect("the address parses");
        assert_eq!((fact.bdf.to_string().as_str(), fact.health), ("0000:00:06.0", GpuHealth::Healthy));
        assert_eq!(gpu().skip_reason(), None);
        let links = fact.detail.nvlinks.expect("they were asked for");
        assert_eq!(links, [NvLinkBundle { remote: NvLinkRemote::Switch, links: 18, link_gbps: Some(200.0) }]);
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
    fn unnamed_far_ends_are_gpus_of_this_host_by_address_and_else_the_switches() {
        let links = |far: FarEnd, links| Links { far, links, link_gbps: None };
        let at = |bdf: &str| Some(bdf.to_owned());
        let peer = || FarEnd::Gpu { bdf: "00000000:01:00.0".to_owned() };
        let mut near = gpu();
        near.nvlinks = vec![
            links(FarEnd::Unknown { bdf: at("00000000:01:00.0") }, 2),
            links(FarEnd::Unknown { bdf: at("00000000:aa:00.0") }, 4),
            links(FarEnd::Unknown { bdf: None }, 3),
            links(FarEnd::Switch, 2),
        ];
        let far = GpuReport { bdf: "00000000:01:00.0".to_owned(), nvlinks: Vec::new(), ..gpu() };
        let mut report = Report { gpus: vec![near, far], ..Report::default() };
        report.tell_far_ends();
        assert_eq!(report.gpus[0].nvlinks, [links(peer(), 2), links(FarEnd::Switch, 9)]);
        assert_eq!(report.gpus[1].nvlinks, []);
    }

    #[test]
    fn fabric_states_and_problems_have_names() {
        assert_eq!(fabric(0, 0).fabric(), None);
        let told = |state, mask| fabric(state, mask).fabric().expect("a gpu with a fabric");
        assert_eq!(told(3, 0).state, FabricState::Completed);
        assert_eq!(told(2, 0).state, FabricState::InProgress);
        assert_eq!(told(3, 0b01_10_01).problems, ["degraded bandwidth", "unhealthy route"]);
        let failed = FabricReport { status: 1, ..fabric(3, 0) };
        assert_eq!(failed.fabric().map(|fabric| fabric.state), Some(FabricState::Failed));
        let named = FabricReport { cluster_uuid: [0xab; 16], ..fabric(3, 0) }.fabric().expect("it has one");
        assert_eq!(named.cluster_uuid.as_deref(), Some("abababab-abab-abab-abab-abababababab"));
    }

    #[test]
    fn a_report_travels_as_json() {
        let report = Report { driver_version: "580".to_owned(), gpus: vec![gpu()], warnings: Vec::new() };
        let text = serde_json::to_string(&report).expect("it is plain data");
        assert_eq!(serde_json::from_str::<Report>(&text).expect("it was written just now"), report);
    }
}
