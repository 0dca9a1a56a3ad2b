//! How data should go from a GPU to somewhere else: the way, what it carries, why, and what is left if that
//! way does not work.

mod local;
mod remote;
mod storage;

use serde::{Deserialize, Serialize};

use crate::error::TopologyError;
use crate::gdr::GdrState;
use crate::level::Level;
use crate::model::{GpuId, Host, Snapshot};
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
    /// A drive, or the NIC that a drive is reached by, reads and writes GPU memory itself.
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
    /// A drive of this host by the name of its controller or volume (`nvme0`, `nvme0n1`), or the nearest one.
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
    /// Estimate in one direction, Gbit/s: the narrowest part of the way; between GPUs of one host, what a copy reaches of
    /// it.
    pub gbps: Option<f64>,
    /// Why this way.
    pub reason: String,
    /// What is left where this way turns out not to work.
    pub fallback: Option<Fallback>,
}

/// The next best way.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Fallback {
    /// The way.
    pub kind: PathKind,
    /// NICs or drive that carry it.
    pub via: Vec<String>,
    /// Estimate in one direction, Gbit/s.
    pub gbps: Option<f64>,
    /// When it is needed, and how it goes.
    pub reason: String,
}

/// Longest name that an error repeats.
const ECHO_CHARS: usize = 64;

fn echo(name: &str) -> String {
    name.chars().take(ECHO_CHARS).collect()
}

fn gpu_named(host: &Host, name: &str) -> Result<GpuId, TopologyError> {
    host.find_gpu(name).ok_or_else(|| {
        let name = echo(name);
        if host.find_hca(&name).is_none() {
            return TopologyError::NoSuchDevice { what: "GPU", name };
        }
        let message =
            format!("{name} is a NIC: a path leads from a GPU to another, to a drive or to another host (remote)");
        TopologyError::BadRequest { message }
    })
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
        Destination::Gpu(name) => Ok(local::to_gpu(host, id, gpu_named(host, name)?)),
        Destination::Remote => Ok(remote::to_remote(host, plan, id)),
        Destination::Drive(name) => storage::to_drive(host, plan, id, name.as_deref()),
    }
}

fn name(host: &Host, gpu: GpuId) -> String {
    host.gpu(gpu).map_or_else(String::new, |gpu| gpu.name.clone())
}

fn advice(host: &Host, from: GpuId, to: String, kind: PathKind, reason: impl Into<String>) -> PathAdvice {
    PathAdvice {
        from: name(host, from),
        to,
        kind,
        via: Vec::new(),
        level: None,
        gbps: None,
        reason: reason.into(),
        fallback: None,
    }
}

/// Where a buffer in host memory for a GPU's data should be.
fn host_memory(host: &Host, gpu: GpuId) -> String {
    let numa = host.gpu(gpu).and_then(|gpu| gpu.numa);
    numa.map_or_else(|| "host memory".to_owned(), |numa| format!("host memory of NUMA node {numa}"))
}

/// The lesser of two rates, or the one that is known.
fn lesser(a: Option<f64>, b: Option<f64>) -> Option<f64> {
    [a, b].into_iter().flatten().min_by(f64::total_cmp)
}

/// What a GPU's own way to host memory carries, Gbit/s.
fn gpu_to_memory(host: &Host, gpu: GpuId) -> Option<f64> {
    host.gpu_memory_bottleneck(gpu).map(|narrowest| narrowest.gbps)
}

fn level_word(level: Option<Level>) -> String {
    level.map_or_else(|| "at an unknown place".to_owned(), |level| level.to_string())
}

fn works(state: GdrState) -> bool {
    !matches!(state, GdrState::Impossible | GdrState::Failed)
}

fn state_word(state: GdrState) -> &'static str {
    match state {
        GdrState::Unknown => "not known to work",
        GdrState::Possible => "possible",
        GdrState::Proven => "proven",
        GdrState::Failed => "failed",
        GdrState::Impossible => "impossible",
    }
}
