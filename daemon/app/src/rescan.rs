//! Keeps an eye on the host: reads it again when the kernel or the GPU driver tells of devices, when an RDMA device has an
//! event, and at each interval, since none tells all; and puts what has changed in force.

use std::sync::Arc;
use std::time::Duration;

use futures_util::{Stream, StreamExt as _};
use gdrd_engine::Engine;
use gdrd_server::{Backends, Change, Topology};
use gdrd_topology::assemble::ReadOptions;
use tracing::{info, warn};

use crate::failure;
use crate::hardware::{self, Machine, Origin};
use crate::probes::ProbeFile;
use crate::reprobe::Reprobe;
use crate::uevents::{self, Uevents};

/// What keeps an eye on the host.
#[derive(Debug)]
pub(crate) struct Rescan {
    /// Where it is read.
    pub(crate) origin: Origin,
    /// What this machine has beside its topology.
    pub(crate) machine: Machine,
    /// How it is read.
    pub(crate) options: ReadOptions,
    /// How often; zero for never.
    pub(crate) interval: Duration,
    /// Where it is put in force.
    pub(crate) topology: Topology,
    /// Who follows it.
    pub(crate) engine: Engine,
    /// What is told of the backends.
    pub(crate) backends: Backends,
    /// What was proven is proven again.
    pub(crate) reprobe: Arc<Reprobe>,
    /// What was proven is kept for the next daemon.
    pub(crate) probes: Arc<ProbeFile>,
}

impl Rescan {
    /// Runs for ever; wakes for nothing where nobody wants the host read.
    pub(crate) async fn run(self) {
        let hca_events = self.engine.watch_hcas();
        // Of what is in doubt since before this daemon.
        self.probe_again();
        tokio::join!(self.watch(hca_events), self.keep_probes(), self.follow_plan());
    }

    async fn watch(&self, mut hca_events: impl Stream<Item = ()> + Unpin) {
        let uevents = self.uevents();
        if self.origin == Origin::Simulated {
            // What happened between the first reading and the watch was told to nobody, and there may be no interval.
            self.once().await;
        }
        let devices_change = async || match &uevents {
            Some(uevents) => uevents.changed().await,
            None => std::future::pending().await,
        };
        loop {
            tokio::select! {
                () = self.interval() => {}
                () = self.machine.news() => self.refresh_gpus().await,
                () = devices_change() => {}
                Some(()) = hca_events.next() => tokio::time::sleep(uevents::SETTLE).await,
            }
            self.once().await;
        }
    }

    /// What the kernel tells of devices; nothing where they are not its own.
    fn uevents(&self) -> Option<Uevents> {
        if self.origin != Origin::Live {
            return None;
        }
        let told = Uevents::open().inspect_err(|error| {
            info!(%error, "the kernel does not tell this process of devices; the host is read at intervals only");
        });
        told.ok()
    }

    /// Writes down what probes found, whenever that changes.
    async fn keep_probes(&self) {
        let mut views = self.topology.subscribe();
        while views.changed().await.is_ok() {
            let (probes, topology) = (Arc::clone(&self.probes), self.topology.clone());
            if let Err(error) = tokio::task::spawn_blocking(move || probes.save(&topology)).await {
                warn!(%error, "what probes found was not written down");
            }
        }
    }

    /// Tells the engine of a plan that an administrator put in force.
    async fn follow_plan(&self) {
        let pairs = || -> Vec<Vec<String>> {
            self.topology.current().plan().gpus.iter().map(|gpu| gpu.assigned.clone()).collect()
        };
        let mut views = self.topology.subscribe();
        let mut told = pairs();
        while views.changed().await.is_ok() {
            let now = pairs();
            if now != told {
                told = now;
                self.tell_engine().await;
            }
        }
    }

    /// Has the engine follow the plan, and the plan say which GPUs are drained: among them may be some that have come.
    async fn tell_engine(&self) {
        let (engine, topology, machine) = (self.engine.clone(), self.topology.clone(), self.machine.clone());
        let tell = move || {
            engine.update_plan(|| hardware::host_plan(&topology, &machine));
            topology.note_drained(|| engine.drained_gpus());
        };
        if let Err(error) = tokio::task::spawn_blocking(tell).await {
            warn!(%error, "the engine does not follow the plan");
        }
    }

    async fn interval(&self) {
        if self.interval.is_zero() {
            return std::future::pending().await;
        }
        tokio::time::sleep(self.interval).await;
    }

    /// Has the engine ask which GPUs are lost.
    async fn refresh_gpus(&self) {
        let engine = self.engine.clone();
        if let Err(error) = tokio::task::spawn_blocking(move || engine.refresh_gpus()).await {
            warn!(%error, "the gpu driver was not asked");
        }
    }

    /// Reads the host again. What cannot be read leaves everything as it is.
    async fn once(&self) {
        let (origin, options, machine) = (self.origin.clone(), self.options.clone(), self.machine.clone());
        match tokio::task::spawn_blocking(move || hardware::read(&origin, &options, &machine)).await {
            Ok(Ok(snapshot)) => {
                self.apply(self.topology.update(snapshot)).await;
                self.follow_gpu_driver().await;
                self.follow_rdma_devices().await;
                self.probe_again();
                self.write_what_could_not_be_written();
            }
            Ok(Err(error)) => warn!("topology is as before: {}", failure::text_of(&error)),
            Err(error) => warn!(%error, "the topology reader ended by itself"),
        }
    }

    /// For the next daemon. Nothing else may happen here that would have it tried.
    fn write_what_could_not_be_written(&self) {
        let engine = self.engine.clone();
        drop(tokio::task::spawn_blocking(move || engine.restore_files()));
    }

    /// Device nodes of GPUs come, or are made again with other numbers, without a word of the driver. A simulated driver says
    /// nothing by itself.
    async fn follow_gpu_driver(&self) {
        if self.origin == Origin::Simulated {
            self.refresh_gpus().await;
        }
        if self.machine.have_nodes_changed() {
            info!("gpus have other device nodes than before");
            self.refresh_gpus().await;
        }
        if self.origin == Origin::Live
            && let Some(told) = self.machine.late_driver()
        {
            let told = hardware::backend("nvml", Err(told));
            if !self.backends.list().contains(&told) {
                warn!("{}", told.reason);
                self.backends.set(told);
            }
        }
    }

    /// Serves RDMA devices that have come since.
    async fn follow_rdma_devices(&self) {
        let Some(rdma) = self.machine.rdma.clone() else { return };
        let (view, engine) = (self.topology.current(), self.engine.clone());
        match tokio::task::spawn_blocking(move || rdma.follow(&view.snapshot().host, &engine)).await {
            Ok(told) => self.backends.set(told),
            Err(error) => warn!(%error, "opening rdma devices ended by itself"),
        }
    }

    /// In the background: it takes a while, and nobody waits for it.
    fn probe_again(&self) {
        let (reprobe, topology, engine) = (Arc::clone(&self.reprobe), self.topology.clone(), self.engine.clone());
        drop(tokio::task::spawn_blocking(move || reprobe.follow(&topology, &engine)));
    }

    async fn apply(&self, change: Change) {
        let Change::Replanned(replan) = change else { return };
        info!(generation = self.topology.current().generation(), "the host has changed");
        for moved in &replan.moved {
            info!(gpu = moved.gpu, from = moved.from.join(","), to = moved.to.join(","), "gpu has other nics");
        }
        if replan.better.is_some() {
            info!("another pairing would be better than the one in force");
        }
        self.tell_engine().await;
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use gdrd_engine::{EngineConfig, Hardware, MemoryKind, ProbeOutcome};
    use gdrd_sim::SimHost;
    use gdrd_topology::model::{Host, PortState};
    use gdrd_topology::plan::PlanOptions;
    use gdrd_topology::profile;
    use gdrd_topology::sysfs::build::build;

    use super::*;
    use crate::rdma::RdmaDevices;
    use crate::rdma::tests::Slot;
    use crate::simulated::Simulated;

    fn host() -> Host {
        profile::builtin("dgx-a100").expect("a built-in profile").host
    }

    fn rescan(root: &Path) -> Rescan {
        rescan_with(root, EngineConfig::default())
    }

    fn rescan_with(root: &Path, config: EngineConfig) -> Rescan {
        let (origin, options, machine) =
            (Origin::Captured(root.to_owned()), ReadOptions::default(), Machine::default());
        let snapshot = hardware::read(&origin, &options, &machine).expect("a tree");
        let topology = Topology::new(snapshot, PlanOptions::default());
        let hardware = Hardware {
            gpu_memory: None,
            gpu_memory_kind: MemoryKind::CudaPosixFd,
            gpu_facts: None,
            hcas: Vec::new(),
            plan: hardware::host_plan(&topology, &machine),
        };
        let engine = Engine::start(config, hardware).expect("it starts");
        let backends = Backends::default();
        Rescan {
            origin,
            machine,
            options,
            interval: Duration::ZERO,
            topology,
            engine,
            backends,
            reprobe: Arc::default(),
            probes: Arc::new(ProbeFile::new(root, "captured", None, Machine::default())),
        }
    }

    #[tokio::test]
    async fn a_link_that_went_and_came_is_probed_again() {
        let folder = tempfile::tempdir().expect("a folder");
        let snapshot = profile::builtin("dgx-a100").expect("a built-in profile");
        let sim = SimHost::from_host(&snapshot.host).expect("it can be simulated");
        let machine = Machine::simulated(Simulated { profile: snapshot.clone(), sim: sim.clone() });
        let topology = Topology::new(snapshot, PlanOptions::default());
        let hardware = Hardware {
            gpu_memory: Some(sim.gpu_memory()),
            gpu_memory_kind: MemoryKind::Memfd,
            gpu_facts: Some(sim.gpu_facts()),
            hcas: sim.hcas(),
            plan: hardware::host_plan(&topology, &machine),
        };
        let engine = Engine::start(EngineConfig::default(), hardware).expect("it starts");
        let hca = topology.current().plan().gpus.first().expect("a gpu").assigned.first().expect("a nic").clone();
        let rescan = Rescan {
            origin: Origin::Simulated,
            machine: machine.clone(),
            options: ReadOptions::default(),
            interval: Duration::ZERO,
            topology: topology.clone(),
            engine: engine.clone(),
            backends: Backends::default(),
            reprobe: Arc::default(),
            probes: Arc::new(ProbeFile::new(folder.path(), "simulated", None, Machine::default())),
        };
        for gpu in ["GPU0", ""] {
            topology.prove(&engine.probe_again(gpu, &hca).expect("it can be probed"));
        }
        let (mut views, mut hosts) = (topology.subscribe(), topology.subscribe());
        let running = tokio::spawn(rescan.run());
        let mut state = async |wanted: PortState| {
            let of =
                |host: &Host| host.hcas.iter().find(|known| known.name == hca)?.ports.first().map(|port| port.state);
            hosts.wait_for(|view| of(&view.snapshot().host) == Some(wanted)).await.map(drop)
        };
        let mut until = async |wanted: fn(&ProbeOutcome) -> bool| {
            while !topology.probed().iter().all(|probed| wanted(&probed.outcome)) {
                views.changed().await.expect("the topology lives");
            }
            topology.probed().len()
        };
        assert_eq!(until(|outcome| matches!(outcome, ProbeOutcome::Proven(_))).await, 2);
        sim.inject_text(&format!("hca {hca}: link-down port 1")).expect("a script");
        assert_eq!(until(|outcome| matches!(outcome, ProbeOutcome::NotTried(_))).await, 2);
        state(PortState::Down).await.expect("the topology tells it too");
        sim.inject_text(&format!("hca {hca}: link-up port 1")).expect("a script");
        assert_eq!(until(|outcome| matches!(outcome, ProbeOutcome::Proven(_))).await, 2);
        state(PortState::Active).await.expect("the topology tells it too");
        running.abort();
        assert!(running.await.is_err_and(|error| error.is_cancelled()));
    }

    #[tokio::test]
    async fn a_device_that_no_event_told_of_is_served_at_the_next_reading() {
        let folder = tempfile::tempdir().expect("a folder");
        build(&host(), folder.path()).expect("a tree");
        let mut rescan = rescan(folder.path());
        let name = rescan.topology.current().snapshot().host.hcas.first().expect("it has some").name.clone();
        let slot = Slot::new(&name);
        let devices = RdmaDevices::by(Box::new(slot.clone()), gdrd_verbs::Options::default());
        rescan.machine.rdma = Some(Arc::new(devices));
        rescan.once().await;
        assert!(rescan.engine.hca_names().is_empty());
        slot.fill();
        rescan.once().await;
        assert_eq!(rescan.engine.hca_names(), [name]);
    }

    #[tokio::test]
    async fn unchanged_host_stays_the_first_generation() {
        let folder = tempfile::tempdir().expect("a folder");
        build(&host(), folder.path()).expect("a tree");
        let rescan = rescan(folder.path());
        rescan.once().await;
        assert_eq!(rescan.topology.current().generation(), 1);
    }

    #[tokio::test]
    async fn nic_that_is_gone_gives_the_next_generation_and_another_pairing() {
        let folder = tempfile::tempdir().expect("a folder");
        build(&host(), folder.path()).expect("a tree");
        let rescan = rescan(folder.path());
        let first = rescan.topology.current().plan().gpus.first().expect("a gpu").assigned.clone();
        let mut less = host();
        less.hcas.retain(|hca| !first.contains(&hca.name));
        let changed = folder.path().join("changed");
        std::fs::create_dir(&changed).expect("a folder");
        build(&less, &changed).expect("a tree");
        let rescan = Rescan { origin: Origin::Captured(changed), ..rescan };
        rescan.once().await;
        assert_eq!(rescan.topology.current().generation(), 2);
        let plan = rescan.engine.plan();
        assert_eq!(plan.generation, 2, "the engine follows");
        assert!(plan.gpus.first().is_some_and(|gpu| !gpu.hcas.is_empty() && gpu.hcas != first));
    }

    #[tokio::test]
    async fn gpu_that_comes_and_was_drained_before_is_drained_in_the_plan() {
        let folder = tempfile::tempdir().expect("a folder");
        let (whole, less, drains) = (folder.path().join("whole"), folder.path().join("less"), folder.path().join("d"));
        let mut without = host();
        let bdf = without.gpus.remove(0).bdf.expect("an address").to_string();
        for (root, host) in [(&whole, &host()), (&less, &without)] {
            std::fs::create_dir(root).expect("a folder");
            build(host, root).expect("a tree");
        }
        // Without a driver a GPU goes by its address.
        std::fs::write(&drains, format!("boot {}\n{bdf}\nend\n", gdrd_engine::boot_id())).expect("written");
        let rescan = rescan_with(&less, EngineConfig { drains: Some(drains), ..EngineConfig::default() });
        let drained = |rescan: &Rescan| rescan.topology.current().plan().drained();
        assert!(drained(&rescan).is_empty());
        let rescan = Rescan { origin: Origin::Captured(whole), ..rescan };
        rescan.once().await;
        let of_engine: Vec<String> = rescan.engine.drained_gpus().into_iter().map(|gpu| gpu.name).collect();
        assert_eq!((drained(&rescan), of_engine.len()), (of_engine, 1));
    }

    #[tokio::test]
    async fn host_that_cannot_be_read_changes_nothing() {
        let folder = tempfile::tempdir().expect("a folder");
        build(&host(), folder.path()).expect("a tree");
        let rescan = rescan(folder.path());
        let rescan = Rescan { origin: Origin::Captured(folder.path().join("gone")), ..rescan };
        rescan.once().await;
        assert_eq!(rescan.topology.current().generation(), 1);
    }
}
