//! Which hardware the daemon serves: a simulated host, or this machine.
//!
//! Role: reads the topology and picks the backends. A backend that is absent says why; leases it would have served
//! are refused with that reason. Must not know: sockets, clients.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use gdrd_engine::{GpuProof, GpuUuid, Hardware, HostPlan, MemoryKind, PlannedGpu};
use gdrd_hal::GpuFact;
use gdrd_server::{Backend, Topology};
use gdrd_sim::fault::MAX_SCRIPT_BYTES;
use gdrd_sim::{SimHost, SimOptions};
use gdrd_topology::assemble::ReadOptions;
use gdrd_topology::model::Snapshot;
use gdrd_topology::{profile, read_input, read_live, read_root};

use crate::arguments::Arguments;
use crate::config::TopologyKeys;

/// Where the topology comes from, and comes from again at each rescan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Origin {
    /// A profile, which never changes.
    Simulated,
    /// The `/sys` of this machine.
    Live,
    /// A captured tree.
    Captured(PathBuf),
}

/// What was chosen.
#[derive(Debug)]
pub(crate) struct Chosen {
    /// Where topology comes from.
    pub(crate) origin: Origin,
    /// Topology and plan.
    pub(crate) topology: Topology,
    /// For the engine.
    pub(crate) hardware: Hardware,
    /// For whoever asks what the daemon has.
    pub(crate) backends: Vec<Backend>,
    /// Name of the simulated host; empty with hardware.
    pub(crate) sim_profile: String,
    /// How a session proves its right to a GPU unless the configuration says otherwise.
    pub(crate) gpu_proof: GpuProof,
}

/// Chooses by the arguments.
///
/// # Errors
/// When the profile, the fault script or the host cannot be read.
pub(crate) fn choose(arguments: &Arguments, keys: &TopologyKeys) -> anyhow::Result<Chosen> {
    match &arguments.sim {
        Some(name) => simulated(name, arguments.fault_script.as_deref(), keys),
        None => real(arguments.sysfs_root.clone(), keys),
    }
}

fn simulated(name: &str, fault_script: Option<&Path>, keys: &TopologyKeys) -> anyhow::Result<Chosen> {
    let snapshot = profile_snapshot(name, &keys.read_options()?)?;
    let sim = SimHost::from_host_with(&snapshot.host, SimOptions::default())
        .with_context(|| format!("simulate host profile {name}"))?;
    if let Some(path) = fault_script {
        let text = read_script(path)?;
        sim.inject_text(&text).with_context(|| format!("fault script {}", path.display()))?;
    }
    let facts = sim.gpu_facts().gpus().context("list the simulated gpus")?;
    let found = format!("simulates {} gpus and {} hcas of profile {name}", facts.len(), sim.hcas().len());
    let topology = Topology::new(snapshot, keys.plan_options()?);
    let hardware = Hardware {
        gpu_memory: Some(sim.gpu_memory()),
        gpu_memory_kind: MemoryKind::Memfd,
        gpu_facts: Some(sim.gpu_facts()),
        hcas: sim.hcas(),
        plan: host_plan(&topology, &facts),
    };
    let mut backends = vec![Backend { name: "sim", present: true, reason: found }];
    backends.extend(absent("the host is simulated"));
    Ok(Chosen {
        origin: Origin::Simulated,
        topology,
        hardware,
        backends,
        sim_profile: name.to_owned(),
        gpu_proof: GpuProof::None,
    })
}

fn real(sysfs_root: Option<PathBuf>, keys: &TopologyKeys) -> anyhow::Result<Chosen> {
    let origin = sysfs_root.map_or(Origin::Live, Origin::Captured);
    let topology = Topology::new(read(&origin, &keys.read_options()?)?, keys.plan_options()?);
    let hardware = Hardware {
        gpu_memory: None,
        gpu_memory_kind: MemoryKind::CudaPosixFd,
        gpu_facts: None,
        hcas: Vec::new(),
        plan: host_plan(&topology, &[]),
    };
    let mut backends = vec![Backend { name: "sim", present: false, reason: "started without --sim".to_owned() }];
    backends.extend(absent("this build does not contain it"));
    Ok(Chosen { origin, topology, hardware, backends, sim_profile: String::new(), gpu_proof: GpuProof::DeviceNode })
}

/// The backends for hardware, none of which this build has.
fn absent(reason: &str) -> impl Iterator<Item = Backend> {
    let backend = |name| Backend { name, present: false, reason: reason.to_owned() };
    ["verbs", "cuda", "nvml"].into_iter().map(backend)
}

/// Reads the host again.
///
/// # Errors
/// When it cannot be read.
pub(crate) fn read(origin: &Origin, options: &ReadOptions) -> anyhow::Result<Snapshot> {
    match origin {
        Origin::Simulated => bail!("a simulated host is read once"),
        Origin::Live => read_live(options).context("read the topology of this machine"),
        Origin::Captured(root) => {
            read_root(root, options).with_context(|| format!("read the topology below {}", root.display()))
        }
    }
}

/// A built-in profile by name, else a file.
fn profile_snapshot(name: &str, options: &ReadOptions) -> anyhow::Result<Snapshot> {
    if profile::builtin_names().contains(&name) {
        return Ok(profile::builtin(name)?);
    }
    let path = Path::new(name);
    ensure!(path.exists(), "no host profile {name}: neither a file nor one of {}", profile::builtin_names().join(", "));
    read_input(path, options).with_context(|| format!("host profile {name}"))
}

fn read_script(path: &Path) -> anyhow::Result<String> {
    let limit = u64::try_from(MAX_SCRIPT_BYTES)?;
    let mut text = String::new();
    let context = || format!("fault script {}", path.display());
    File::open(path).and_then(|file| file.take(limit + 1).read_to_string(&mut text)).with_context(context)?;
    Ok(text)
}

/// What the engine needs of the plan. A GPU without a UUID, as on a host without NVML, goes by its address.
pub(crate) fn host_plan(topology: &Topology, facts: &[GpuFact]) -> HostPlan {
    let by_address: HashMap<String, &GpuUuid> = facts.iter().map(|fact| (fact.bdf.to_string(), &fact.uuid)).collect();
    let view = topology.current();
    let gpu = |gpu: &gdrd_topology::plan::contract::GpuPlan| {
        let bdf = gpu.bdf.map(|bdf| bdf.to_string()).unwrap_or_default();
        let known = by_address.get(&bdf).map(|uuid| (*uuid).clone());
        let uuid = known.or_else(|| gpu.uuid.clone().map(GpuUuid)).unwrap_or_else(|| GpuUuid(bdf.clone()));
        PlannedGpu {
            name: gpu.name.clone(),
            uuid,
            bdf,
            numa_node: gpu.numa.map(|numa| u32::from(numa.0)),
            hcas: gpu.assigned.clone(),
        }
    };
    HostPlan { generation: view.generation(), gpus: view.plan().gpus.iter().map(gpu).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_built_in_profile_can_be_simulated() {
        for name in profile::builtin_names() {
            let chosen =
                simulated(name, None, &TopologyKeys::default()).unwrap_or_else(|error| panic!("{name}: {error:#}"));
            assert_eq!(chosen.sim_profile, name);
            assert!(!chosen.hardware.plan.gpus.is_empty(), "{name}");
        }
    }

    #[test]
    fn unknown_profile_is_told_the_known_ones() {
        let message = format!("{:#}", simulated("dgx-z9", None, &TopologyKeys::default()).expect_err("unknown"));
        assert!(message.contains("dgx-z9") && message.contains("dgx-a100"), "{message}");
    }

    #[test]
    fn host_without_backends_says_so_for_each_and_has_no_memory() {
        let chosen = real(None, &TopologyKeys::default()).expect("this machine has a /sys");
        assert!(chosen.backends.iter().all(|backend| !backend.present && !backend.reason.is_empty()));
        assert!(chosen.hardware.gpu_memory.is_none());
        assert_eq!(chosen.gpu_proof, GpuProof::DeviceNode);
    }
}
