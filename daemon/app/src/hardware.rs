//! Which hardware the daemon serves: a simulated host, or this machine.
//!
//! Role: reads the topology and picks the backends. A backend that is absent says why; leases it would have served
//! are refused with that reason. Must not know: sockets, clients.

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use gdrd_engine::{GpuProof, GpuUuid, Hardware, HostPlan, MemoryKind, PlannedGpu};
use gdrd_hal::{GpuCopies, GpuFacts, GpuMemory};
use gdrd_server::{Backend, Topology};
use gdrd_sim::fault::MAX_SCRIPT_BYTES;
use gdrd_sim::{SimHost, SimOptions, Timing};
use gdrd_topology::assemble::ReadOptions;
use gdrd_topology::model::Snapshot;
use gdrd_topology::{profile, read_input, read_live, read_root};

use crate::arguments::Arguments;
use crate::config::{Config, TopologyKeys};
use crate::failure::{self, Misconfigured};
use crate::gpus::{self, NvmlFacts};
use crate::iommu;
use crate::rdma::RdmaDevices;
use crate::simulated::Simulated;

/// Where the topology comes from, and comes from again at each rescan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Origin {
    /// A profile, and what has become of its devices since.
    Simulated,
    /// The `/sys` of this machine.
    Live,
    /// A captured tree.
    Captured(PathBuf),
}

/// What a machine has beside what its topology says. Empty for captured hosts.
#[derive(Debug, Clone, Default)]
pub(crate) struct Machine {
    /// The simulated host, if it is one.
    simulated: Option<Arc<Simulated>>,
    nvml: Option<Arc<NvmlFacts>>,
    /// Simulated HCAs over real GPU memory.
    sim_hcas: Vec<String>,
    /// Where RDMA devices that come later are opened.
    pub(crate) rdma: Option<Arc<RdmaDevices>>,
}

impl Machine {
    /// One that is simulated.
    pub(crate) fn simulated(simulated: Simulated) -> Self {
        Self { simulated: Some(Arc::new(simulated)), ..Self::default() }
    }

    /// Whether HCAs are simulated, so that the daemon itself moves the bytes.
    pub(crate) fn has_sim_hcas(&self) -> bool {
        !self.sim_hcas.is_empty()
    }

    /// Version of the GPU driver; empty without one.
    pub(crate) fn driver_version(&self) -> String {
        self.nvml.as_ref().map(|nvml| nvml.report().driver_version).unwrap_or_default()
    }

    /// Whether its GPUs have other device nodes than at the last look.
    pub(crate) fn have_nodes_changed(&self) -> bool {
        self.nvml.as_ref().is_some_and(|nvml| nvml.have_nodes_changed())
    }

    /// What to say of a GPU driver that was not there at the start, and is now.
    pub(crate) fn late_driver(&self) -> Option<String> {
        if self.nvml.is_some() { None } else { gpus::came_later() }
    }

    /// Returns when its GPU driver has reported something; never without one. Cancel-safe.
    pub(crate) async fn news(&self) {
        match &self.nvml {
            Some(nvml) => nvml.health.news().await,
            None => std::future::pending().await,
        }
    }
}

/// What was chosen.
#[derive(Debug)]
pub(crate) struct Chosen {
    /// Where topology comes from.
    pub(crate) origin: Origin,
    /// What this machine has beside its topology.
    pub(crate) machine: Machine,
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
/// [`Misconfigured`] when the profile, the fault script or the captured tree cannot be used; anything else when this machine
/// cannot be read.
pub(crate) fn choose(arguments: &Arguments, config: &Config) -> anyhow::Result<Chosen> {
    match (&arguments.sim, &arguments.sysfs_root, arguments.sim_hca) {
        (Some(name), ..) => {
            let simulated = simulated(name, arguments.fault_script.as_deref(), &config.topology);
            simulated.map_err(|error| Misconfigured::because(error).into())
        }
        (None, Some(root), None) => captured(root.clone(), &config.topology),
        (None, Some(root), Some(count)) => live(Origin::Captured(root.clone()), count, config),
        (None, None, count) => live(Origin::Live, count.unwrap_or(0), config),
    }
}

/// Whether the host that is to be simulated can be, with its fault script. Looks at no hardware.
pub(crate) fn check_simulation(arguments: &Arguments, config: &Config) -> Result<(), Misconfigured> {
    let Some(name) = &arguments.sim else { return Ok(()) };
    let simulated = simulated(name, arguments.fault_script.as_deref(), &config.topology);
    simulated.map(drop).map_err(Misconfigured::because)
}

fn simulated(name: &str, fault_script: Option<&Path>, keys: &TopologyKeys) -> anyhow::Result<Chosen> {
    let snapshot = profile_snapshot(name, &keys.read_options()?)?;
    let sim = SimHost::from_host_with(&snapshot.host, SimOptions::default())
        .with_context(|| format!("simulate host profile {name}"))?;
    if let Some(path) = fault_script {
        let text = read_script(path)?;
        sim.inject_text(&text).with_context(|| format!("fault script {}", path.display()))?;
    }
    let gpus = snapshot.host.gpus.len();
    let found = format!("simulates {gpus} gpus and {} hcas of profile {name}", sim.hcas().len());
    let simulated = Simulated { profile: snapshot, sim: sim.clone() };
    let topology = Topology::new(simulated.read()?, keys.plan_options()?);
    let machine = Machine::simulated(simulated);
    let hardware = Hardware {
        gpu_memory: Some(sim.gpu_memory()),
        gpu_memory_kind: MemoryKind::Memfd,
        gpu_facts: Some(sim.gpu_facts()),
        hcas: sim.hcas(),
        plan: host_plan(&topology, &machine),
    };
    let mut backends = vec![backend("sim", Ok(found))];
    backends.extend(absent("the host is simulated"));
    Ok(Chosen {
        origin: Origin::Simulated,
        machine,
        topology,
        hardware,
        backends,
        sim_profile: name.to_owned(),
        gpu_proof: GpuProof::None,
    })
}

fn captured(root: PathBuf, keys: &TopologyKeys) -> anyhow::Result<Chosen> {
    let mut chosen = without_backends(Origin::Captured(root), Machine::default(), keys)?;
    chosen.backends.extend(absent("the host is a captured one"));
    Ok(chosen)
}

/// The drivers of this machine, with its own tree or another.
fn live(origin: Origin, sim_hcas: u8, config: &Config) -> anyhow::Result<Chosen> {
    let found = gpus::find(&config.gpu);
    let nvml = found.as_ref().ok().map(|gpus| Arc::clone(&gpus.facts));
    let report = nvml.as_ref().map(|nvml| nvml.report()).unwrap_or_default();
    let pool = match &found {
        Ok(gpus) => gpus.pool.clone(),
        Err(_) => Err("without nvml it is not known which gpus may be used".to_owned()),
    };
    let hcas = match &pool {
        _ if sim_hcas == 0 => Vec::new(),
        Ok(pool) => {
            SimHost::over_gpu_memory(Arc::clone(pool) as Arc<dyn GpuCopies>, sim_hcas, Timing::default())?.hcas()
        }
        Err(reason) => bail!("--sim-hca needs gpu memory, and there is none: {reason}"),
    };
    let (rdma_devices, rdma, verbs) = RdmaDevices::open(config.verbs.options());
    let sim_hcas = hcas.iter().map(|hca| hca.name().to_owned()).collect();
    let machine = Machine { simulated: None, nvml: nvml.clone(), sim_hcas, rdma: rdma_devices.map(Arc::new) };
    let mut chosen = without_backends(origin, machine, &config.topology)?;
    if !hcas.is_empty() {
        chosen.backends = vec![backend("sim", Ok(format!("{} simulated hcas that copy on the gpu", hcas.len())))];
    }
    let served = report.gpus.iter().filter(|gpu| gpu.skip_reason().is_none()).count();
    let of_all = format!("{served} of {} gpus, a worker process each", report.gpus.len());
    let driver = format!("driver {}, {} gpus", report.driver_version, report.gpus.len());
    chosen.backends.extend([
        verbs,
        backend("cuda", pool.as_ref().map(|_| of_all).map_err(Clone::clone)),
        backend("nvml", found.map(|_| driver).map_err(|error| failure::text_of(&error))),
    ]);
    chosen.hardware.hcas = hcas.into_iter().chain(rdma).collect();
    chosen.hardware.gpu_memory = pool.ok().map(|pool| pool as Arc<dyn GpuMemory>);
    chosen.hardware.gpu_facts = nvml.map(|nvml| nvml as Arc<dyn GpuFacts>);
    Ok(chosen)
}

/// This machine or a captured one with nothing that could serve it, but that there is no simulated host.
fn without_backends(origin: Origin, machine: Machine, keys: &TopologyKeys) -> anyhow::Result<Chosen> {
    let snapshot = read(&origin, &keys.read_options()?, &machine).map_err(|error| match &origin {
        Origin::Captured(_) => Misconfigured::because(error).into(),
        Origin::Simulated | Origin::Live => error,
    })?;
    let topology = Topology::new(snapshot, keys.plan_options()?);
    let hardware = Hardware {
        gpu_memory: None,
        gpu_memory_kind: MemoryKind::CudaPosixFd,
        gpu_facts: None,
        hcas: Vec::new(),
        plan: host_plan(&topology, &machine),
    };
    let backends = vec![backend("sim", Err("started without --sim".to_owned()))];
    let (sim_profile, gpu_proof) = (String::new(), GpuProof::DeviceNode);
    Ok(Chosen { origin, machine, topology, hardware, backends, sim_profile, gpu_proof })
}

/// What it found, or why it is absent.
pub(crate) fn backend(name: &'static str, told: Result<String, String>) -> Backend {
    let present = told.is_ok();
    Backend { name, present, reason: told.unwrap_or_else(|reason| reason) }
}

/// The backends for hardware, none of which serves this host.
fn absent(reason: &str) -> impl Iterator<Item = Backend> {
    ["verbs", "cuda", "nvml"].into_iter().map(|name| backend(name, Err(reason.to_owned())))
}

/// Reads the host again.
///
/// # Errors
/// When it cannot be read.
pub(crate) fn read(origin: &Origin, options: &ReadOptions, machine: &Machine) -> anyhow::Result<Snapshot> {
    let driver = machine.nvml.as_ref().map(|nvml| gpus::driver_facts(nvml));
    let options = ReadOptions { driver, ..options.clone() };
    match origin {
        Origin::Simulated => machine.simulated.as_ref().context("no host is simulated")?.read(),
        Origin::Live => read_live(&options).context("read the topology of this machine"),
        Origin::Captured(root) => {
            read_root(root, &options).with_context(|| format!("read the topology below {}", root.display()))
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

/// BAR1 of a GPU where it is smaller than its memory, so that it bounds what NICs can reach at a time.
fn small_bar1(snapshot: &Snapshot, name: &str) -> Option<u64> {
    let gpu = snapshot.host.gpus.iter().find(|gpu| gpu.name == name)?;
    let (bar1, memory) = (gpu.bar1_bytes.as_ref()?.value, gpu.memory_bytes.as_ref()?.value);
    (bar1 < memory).then_some(bar1)
}

/// What the engine needs of the plan. A GPU without a UUID, as on a host without NVML, goes by its address. Simulated
/// HCAs, which the topology does not have, are dealt out in turn.
pub(crate) fn host_plan(topology: &Topology, machine: &Machine) -> HostPlan {
    let by_address = machine.simulated.as_ref().map(|simulated| simulated.uuids()).unwrap_or_default();
    let view = topology.current();
    let mut sim_hcas = machine.sim_hcas.iter().cycle();
    let gpu = |gpu: &gdrd_topology::plan::contract::GpuPlan| {
        let bdf = gpu.bdf.map(|bdf| bdf.to_string()).unwrap_or_default();
        let known = by_address.get(&bdf).cloned();
        let uuid = known.or_else(|| gpu.uuid.clone().map(GpuUuid)).unwrap_or_else(|| GpuUuid(bdf.clone()));
        PlannedGpu {
            name: gpu.name.clone(),
            uuid,
            bdf,
            numa_node: gpu.numa.map(|numa| u32::from(numa.0)),
            bar1_bytes: small_bar1(view.snapshot(), &gpu.name),
            hcas: sim_hcas.next().map_or_else(|| gpu.assigned.clone(), |sim| vec![sim.clone()]),
        }
    };
    let node = |hca: &gdrd_topology::model::Hca| Some((hca.name.clone(), u32::from(hca.numa?.0)));
    let hca_nodes = view.snapshot().host.hcas.iter().filter_map(node).collect();
    // Only of this machine's own devices.
    let translated = machine.rdma.is_some().then(|| iommu::translated(&view.snapshot().host));
    HostPlan {
        generation: view.generation(),
        gpus: view.plan().gpus.iter().map(gpu).collect(),
        hca_nodes,
        translated_hcas: translated.unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use gdrd_topology::source::{SourceKind, Sourced};

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
    fn a_bar1_bounds_registrations_where_it_is_smaller_than_the_memory_and_only_there() {
        let told = |bar1: Option<u64>, memory: Option<u64>| {
            let mut snapshot = profile::builtin("dgx-a100").expect("a built-in profile");
            let fact = |bytes: Option<u64>| bytes.map(|value| Sourced { value, source: SourceKind::Nvml });
            let gpu = snapshot.host.gpus.iter_mut().find(|gpu| gpu.name == "GPU3").expect("it has eight");
            (gpu.bar1_bytes, gpu.memory_bytes) = (fact(bar1), fact(memory));
            small_bar1(&snapshot, "GPU3")
        };
        // A T4, and a card whose BAR1 covers all of its memory.
        assert_eq!(told(Some(256 << 20), Some(15 << 30)), Some(256 << 20));
        assert_eq!(told(Some(256 << 30), Some(141 << 30)), None);
        assert_eq!((told(None, Some(15 << 30)), told(Some(256 << 20), None)), (None, None), "not known");
    }

    #[test]
    fn unknown_profile_is_told_the_known_ones() {
        let message = format!("{:#}", simulated("dgx-z9", None, &TopologyKeys::default()).expect_err("unknown"));
        assert!(message.contains("dgx-z9") && message.contains("dgx-a100"), "{message}");
    }
}
