//! How data should go from a GPU to somewhere else: the way, what it carries, and why.

use serde::{Deserialize, Serialize};

use crate::error::TopologyError;
use crate::gdr::GdrState;
use crate::level::Level;
use crate::model::{Drive, GpuId, Host, Snapshot};
use crate::plan::contract::Plan;

/// A way for data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PathKind {
    /// A copy inside one GPU.
    SameGpu,
    /// NVLink between two GPUs.
    Nvlink,
    /// PCIe from GPU to GPU without host memory.
    PcieP2p,
    /// Through host memory.
    Staged,
    /// A NIC reads and writes GPU memory itself.
    GpudirectRdma,
    /// A drive reads and writes GPU memory itself.
    GpudirectStorage,
    /// Through host memory, from or to a drive.
    Bounce,
}

/// Where the data goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Destination {
    /// A GPU of this host, by name, uuid or address.
    Gpu(String),
    /// A GPU of another host.
    Remote,
    /// A drive of this host by name, or the nearest one.
    Drive(Option<String>),
}

/// What to do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PathAdvice {
    /// Name of the GPU.
    pub from: String,
    /// Name of the far end; `remote` for another host.
    pub to: String,
    /// The way.
    pub kind: PathKind,
    /// NICs or drive that carry it.
    pub via: Vec<String>,
    /// Level between the GPU and the far end, or the first that carries.
    pub level: Option<Level>,
    /// Estimate in one direction, Gbit/s: the narrowest part of the way.
    pub gbps: Option<f64>,
    /// Why this way.
    pub reason: String,
}

/// Longest name that an error repeats.
const ECHO_CHARS: usize = 64;

fn gpu_named(host: &Host, name: &str) -> Result<GpuId, TopologyError> {
    let echo = || name.chars().take(ECHO_CHARS).collect();
    host.find_gpu(name).ok_or_else(|| TopologyError::NoSuchDevice { what: "GPU", name: echo() })
}

/// Advises on the way from a GPU. `plan` is the plan in force: remote traffic goes by its pairs.
///
/// # Errors
/// A device that is not on this host.
pub fn advise_path(
    snapshot: &Snapshot,
    plan: &Plan,
    from: &str,
    to: &Destination,
) -> Result<PathAdvice, TopologyError> {
    let host = &snapshot.host;
    let id = gpu_named(host, from)?;
    match to {
        Destination::Gpu(name) => Ok(to_gpu(host, id, gpu_named(host, name)?)),
        Destination::Remote => Ok(to_remote(host, plan, id)),
        Destination::Drive(name) => to_drive(host, id, name.as_deref()),
    }
}

fn name(host: &Host, gpu: GpuId) -> String {
    host.gpu(gpu).map_or_else(String::new, |gpu| gpu.name.clone())
}

fn advice(host: &Host, from: GpuId, to: String, kind: PathKind, reason: impl Into<String>) -> PathAdvice {
    PathAdvice { from: name(host, from), to, kind, via: Vec::new(), level: None, gbps: None, reason: reason.into() }
}

/// Same-host traffic never goes through a NIC.
fn to_gpu(host: &Host, from: GpuId, to: GpuId) -> PathAdvice {
    let level = host.gpu_level(from, to);
    let bdfs = host.gpu(from).and_then(|gpu| gpu.bdf).zip(host.gpu(to).and_then(|gpu| gpu.bdf));
    let pcie = bdfs.and_then(|(a, b)| host.pci_bottleneck(a, b)).map(|narrowest| narrowest.gbps);
    let (kind, gbps, reason) = match level {
        Some(Level::Same) => (PathKind::SameGpu, None, "one GPU: a copy in its own memory".to_owned()),
        Some(Level::NvLink(links)) => {
            (PathKind::Nvlink, host.nvlink_gbps(from, to), format!("{} bonded NVLinks join them", links.0))
        }
        Some(level @ (Level::Pix | Level::Pxb)) => (
            PathKind::PcieP2p,
            pcie,
            format!("{level}: a switch joins them, peer traffic stays below it unless ACS redirects it"),
        ),
        Some(Level::Phb) => {
            (PathKind::PcieP2p, pcie, "PHB: one root bus joins them, peer traffic passes the CPU".to_owned())
        }
        Some(level) => {
            (PathKind::Staged, pcie, format!("{level}: peer traffic between root complexes is not to be relied on"))
        }
        None => (PathKind::Staged, None, "the place of a GPU is not known".to_owned()),
    };
    PathAdvice { level, gbps, ..advice(host, from, name(host, to), kind, reason) }
}

fn to_remote(host: &Host, plan: &Plan, from: GpuId) -> PathAdvice {
    let remote = "remote".to_owned();
    let gpu_name = name(host, from);
    let Some(gpu) = plan.gpus.iter().find(|gpu| gpu.name == gpu_name) else {
        return advice(host, from, remote, PathKind::Staged, "the plan does not know this GPU");
    };
    let pairs: Vec<_> = gpu.nics.iter().filter(|pair| gpu.assigned.contains(&pair.name)).collect();
    let Some(first) = pairs.first() else {
        return advice(host, from, remote, PathKind::Staged, format!("no NIC is assigned: {}", gpu.reason));
    };
    let works = !matches!(first.gdr.state, GdrState::Impossible | GdrState::Failed);
    let level = first.level.map_or_else(|| "at an unknown place".to_owned(), |level| level.to_string());
    let reason = if works {
        format!("{} is {level}; GPUDirect RDMA is {}: {}", first.name, state(first.gdr.state), first.gdr.reason)
    } else {
        format!("GPUDirect RDMA with {} is {}: {}", first.name, state(first.gdr.state), first.gdr.reason)
    };
    let rates: Option<Vec<f64>> = pairs.iter().map(|pair| pair.gbps).collect();
    PathAdvice {
        via: pairs.iter().map(|pair| pair.name.clone()).collect(),
        level: first.level,
        gbps: rates.map(|rates| rates.iter().sum()),
        ..advice(host, from, remote, if works { PathKind::GpudirectRdma } else { PathKind::Staged }, reason)
    }
}

fn state(state: GdrState) -> &'static str {
    match state {
        GdrState::Unknown => "not known to work",
        GdrState::Possible => "possible",
        GdrState::Proven => "proven",
        GdrState::Failed => "failed",
        GdrState::Impossible => "impossible",
    }
}

fn to_drive(host: &Host, from: GpuId, wanted: Option<&str>) -> Result<PathAdvice, TopologyError> {
    let bdf = host.gpu(from).and_then(|gpu| gpu.bdf);
    let level = |drive: &Drive| bdf.zip(drive.bdf).and_then(|(gpu, drive)| host.pci_level(gpu, drive));
    let far = |drive: &&Drive| (level(drive).is_none(), level(drive));
    let drive = match wanted {
        Some(name) => host.drives.iter().find(|drive| drive.name == name),
        None => host.drives.iter().min_by_key(far),
    };
    let missing = || wanted.map_or_else(|| "any".to_owned(), |name| name.chars().take(ECHO_CHARS).collect());
    let drive = drive.ok_or_else(|| TopologyError::NoSuchDevice { what: "drive", name: missing() })?;
    let level = level(drive);
    let (kind, reason) = match level {
        Some(near @ (Level::Pix | Level::Pxb)) => {
            (PathKind::GpudirectStorage, format!("{near}: a switch joins the GPU and the drive"))
        }
        Some(far) => (PathKind::Bounce, format!("{far}: no switch joins the GPU and the drive")),
        None => (PathKind::Bounce, "the drive is not on this host's PCI tree, or its place is not known".to_owned()),
    };
    let narrowest = bdf.zip(drive.bdf).and_then(|(gpu, drive)| host.pci_bottleneck(gpu, drive));
    Ok(PathAdvice {
        via: vec![drive.name.clone()],
        level,
        gbps: narrowest.map(|narrowest| narrowest.gbps),
        ..advice(host, from, drive.name.clone(), kind, reason)
    })
}
