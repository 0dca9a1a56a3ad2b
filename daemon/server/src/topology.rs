//! The topology in force: snapshot, plan, and who waits for the next one.
//!
//! Role: holds what the daemon last read, ready to be sent. The plan sticks: a new snapshot moves only pairs whose
//! NIC is gone. Must not know: how a host is read, or what is leased.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gdrd_engine::{DrainedGpu, Probed};
use gdrd_proto::v1;
use gdrd_topology::model::Snapshot;
use gdrd_topology::plan::contract::Plan;
use gdrd_topology::plan::{Move, PlanOptions, Replan, adopt, plan, replan};
use gdrd_topology::profile;
use tokio::sync::watch;

use crate::grpc::wire_plan;
use crate::proofs::Proofs;

/// One generation of the topology.
#[derive(Debug)]
pub struct View {
    snapshot: Snapshot,
    /// The plan by the host alone.
    bare: Plan,
    plan: Plan,
    response: v1::GetTopologyResponse,
}

impl View {
    fn new(snapshot: Snapshot, mut plan: Plan, known: &Known) -> Self {
        let Known { proofs, drained } = known;
        let bare = plan.clone();
        for gpu in &mut plan.gpus {
            // The daemon may know a GPU's UUID from elsewhere; its place is the same.
            let bdf = gpu.bdf.map(|bdf| bdf.to_string()).unwrap_or_default();
            let is_it = |known: &DrainedGpu| known.bdf == bdf && (!bdf.is_empty() || known.name == gpu.name);
            gpu.drained = drained.iter().any(is_it);
            for nic in &mut gpu.nics {
                if let Some(found) = proofs.gdr(&gpu.name, &nic.name, &nic.gdr) {
                    nic.gdr = found;
                }
            }
        }
        let response = v1::GetTopologyResponse {
            generation: snapshot.generation,
            host_profile: profile::render(&snapshot.host),
            plan: Some(wire_plan(&plan)),
        };
        Self { snapshot, bare, plan, response }
    }

    /// Counts from 1.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.snapshot.generation
    }

    /// What was read.
    #[must_use]
    pub fn snapshot(&self) -> &Snapshot {
        &self.snapshot
    }

    /// The pairing in force.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// As the wire has it.
    pub(crate) fn response(&self) -> &v1::GetTopologyResponse {
        &self.response
    }
}

/// The plan to use, which tells of a better one.
fn told(replanned: Replan) -> Plan {
    let advice = replanned.advice();
    let mut plan = replanned.plan;
    plan.warnings.extend(advice);
    plan
}

/// What a new reading of the host changed.
#[derive(Debug, Clone, PartialEq)]
pub enum Change {
    /// Nothing; the generation stays.
    None,
    /// The host, and with it the snapshot.
    Replanned(Box<Replan>),
}

/// What stands in every plan, whatever is read of the host.
#[derive(Debug, Clone, Default, PartialEq)]
struct Known {
    /// What probes found, while GPU and HCA are there.
    proofs: Proofs,
    drained: Vec<DrainedGpu>,
}

/// The topology in force. Clones are one.
#[derive(Debug, Clone)]
pub struct Topology {
    options: Arc<PlanOptions>,
    current: Arc<watch::Sender<Arc<View>>>,
    /// Held while another view is made.
    known: Arc<Mutex<Known>>,
}

impl Topology {
    /// Plans the first snapshot, as generation 1.
    #[must_use]
    pub fn new(mut snapshot: Snapshot, options: PlanOptions) -> Self {
        snapshot.generation = 1;
        let plan = plan(&snapshot, &options);
        let current = Arc::new(watch::Sender::new(Arc::new(View::new(snapshot, plan, &Known::default()))));
        Self { options: Arc::new(options), current, known: Arc::default() }
    }

    /// The generation in force.
    #[must_use]
    pub fn current(&self) -> Arc<View> {
        Arc::clone(&self.current.borrow())
    }

    /// What the operator said about pairing.
    #[must_use]
    pub fn options(&self) -> &PlanOptions {
        &self.options
    }

    /// Puts a new reading in force, as the next generation, unless it shows what is known already. Warnings that come and
    /// go make no generation and wake nobody, but whoever asks is told the latest.
    pub fn update(&self, mut snapshot: Snapshot) -> Change {
        let mut known = self.known();
        let before = self.current();
        if before.snapshot.host.is_same_as(&snapshot.host) {
            if before.snapshot.host.warnings != snapshot.host.warnings {
                snapshot.generation = before.generation();
                let plan = told(replan(&before.plan, &snapshot, &self.options));
                let view = Arc::new(View::new(snapshot, plan, &known));
                self.current.send_if_modified(|current| {
                    *current = view;
                    false
                });
            }
            return Change::None;
        }
        snapshot.generation = before.generation() + 1;
        let replanned = replan(&before.plan, &snapshot, &self.options);
        // A device that went took what was proven of it along: one that comes back is another.
        let place = |plan: &Plan, gpu: &str| plan.gpu(gpu).map(|gpu| gpu.bdf);
        known.proofs.retain(|gpu, hca| {
            snapshot.host.hcas.iter().any(|known| known.name == hca)
                && place(&before.plan, gpu) == place(&replanned.plan, gpu)
        });
        self.current.send_replace(Arc::new(View::new(snapshot, told(replanned.clone()), &known)));
        Change::Replanned(Box::new(replanned))
    }

    /// Puts in force the plan that would be made anew, as the next generation unless it is the one in force. Returns the GPUs
    /// whose NICs it changes.
    pub fn adopt(&self) -> Vec<Move> {
        let known = self.known();
        let before = self.current();
        let mut snapshot = before.snapshot.clone();
        snapshot.generation += 1;
        let Some((plan, moved)) = adopt(&before.plan, &snapshot, &self.options) else { return Vec::new() };
        self.current.send_replace(Arc::new(View::new(snapshot, plan, &known)));
        moved
    }

    /// Puts what probes found into the plan, as the next generation if that changes it.
    pub fn prove(&self, found: &[Probed]) {
        self.change(|known| known.proofs.note(found));
    }

    /// Goes on with what an earlier daemon's probes found; not tried means that it is in doubt.
    pub fn restore(&self, kept: Vec<Probed>) {
        self.change(|known| known.proofs.restore(kept));
    }

    /// Takes back what probes found through this HCA, for this reason, until it is found anew.
    pub fn doubt(&self, hca: &str, reason: &str) {
        self.change(|known| known.proofs.doubt(hca, reason));
    }

    /// Marks the GPUs that are drained now, and no others, as the next generation if that changes any. `drained` is asked
    /// when nobody else can note any: of two calls the later answer stays.
    pub fn note_drained(&self, drained: impl FnOnce() -> Vec<DrainedGpu>) {
        self.change(|known| known.drained = drained());
    }

    fn change(&self, change: impl FnOnce(&mut Known)) {
        let mut known = self.known();
        let before = known.clone();
        change(&mut known);
        if *known == before {
            return;
        }
        let view = self.current();
        let mut snapshot = view.snapshot.clone();
        snapshot.generation += 1;
        let mut plan = view.bare.clone();
        plan.generation = snapshot.generation;
        self.current.send_replace(Arc::new(View::new(snapshot, plan, &known)));
    }

    /// What probes found; not tried means that it is in doubt.
    #[must_use]
    pub fn probed(&self) -> Vec<Probed> {
        self.known().proofs.list()
    }

    /// What could not be tried of that of which nothing was found, and why.
    #[must_use]
    pub fn untried(&self) -> Vec<Probed> {
        self.known().proofs.untried()
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        // Each change leaves it whole.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The generation in force and each later one; one that is not taken in time is passed over for a newer one.
    #[must_use]
    pub fn subscribe(&self) -> watch::Receiver<Arc<View>> {
        self.current.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use gdrd_engine::{ProbeFigures, ProbeOutcome};
    use gdrd_topology::gdr::GdrState;

    use super::*;

    fn topology() -> Topology {
        let snapshot = profile::builtin("dgx-a100").expect("a built-in profile");
        Topology::new(snapshot, PlanOptions::default())
    }

    #[test]
    fn new_warnings_are_told_to_who_asks_and_wake_nobody() {
        let topology = topology();
        let watcher = topology.subscribe();
        let mut snapshot = profile::builtin("dgx-a100").expect("a built-in profile");
        snapshot.host.warnings.push("GPU-1: xid 31 since gdrd started".to_owned());
        assert_eq!(topology.update(snapshot), Change::None);
        let view = topology.current();
        assert_eq!(view.generation(), 1);
        assert!(view.plan().warnings.iter().any(|warning| warning.contains("xid 31")));
        assert!(!watcher.has_changed().expect("it is open"));
    }

    #[test]
    fn same_host_read_again_is_no_new_generation() {
        let topology = topology();
        assert_eq!(topology.update(profile::builtin("dgx-a100").expect("a built-in profile")), Change::None);
        assert_eq!(topology.current().generation(), 1);
    }

    #[test]
    fn what_a_probe_found_stands_in_the_plan_until_the_device_goes() {
        let topology = topology();
        let (gpu, hca) = {
            let view = topology.current();
            let gpu = view.plan().gpus.first().expect("a gpu");
            (gpu.name.clone(), gpu.assigned.first().expect("a nic").clone())
        };
        let state = |topology: &Topology| {
            let view = topology.current();
            let of_gpu = view.plan().gpu(&gpu).expect("planned").clone();
            of_gpu.nics.into_iter().find(|nic| nic.name == hca).map(|nic| nic.gdr.state)
        };
        let outcome = ProbeOutcome::Proven(ProbeFigures { gbps: 1.0, latency_us: 2.0 });
        let found = Probed { gpu: gpu.clone(), hca: hca.clone(), port_num: 1, outcome };
        topology.prove(std::slice::from_ref(&found));
        assert_eq!((state(&topology), topology.current().generation()), (Some(GdrState::Proven), 2));
        topology.prove(std::slice::from_ref(&found));
        assert_eq!(topology.current().generation(), 2, "nothing new");
        let untried = Probed { outcome: ProbeOutcome::NotTried("no memory".to_owned()), ..found };
        topology.prove(std::slice::from_ref(&untried));
        assert_eq!((state(&topology), topology.current().generation()), (Some(GdrState::Proven), 2));

        let whole = profile::builtin("dgx-a100").expect("a built-in profile");
        let mut less = whole.clone();
        less.host.hcas.retain(|known| known.name != hca);
        topology.update(less);
        topology.update(whole);
        assert_ne!(state(&topology), Some(GdrState::Proven), "a device that comes back is another");
    }

    #[test]
    fn what_could_not_be_probed_is_told_with_the_latest_reason() {
        let topology = topology();
        let reason = |topology: &Topology| topology.current().plan().gpus[0].nics[0].gdr.reason.clone();
        let (gpu, hca) = {
            let view = topology.current();
            (view.plan().gpus[0].name.clone(), view.plan().gpus[0].nics[0].name.clone())
        };
        let bare = reason(&topology);
        for why in ["no memory", "no descriptors"] {
            let outcome = ProbeOutcome::NotTried(why.to_owned());
            topology.prove(&[Probed { gpu: gpu.clone(), hca: hca.clone(), port_num: 1, outcome }]);
            assert_eq!(reason(&topology), bare.replace("not probed", &format!("not probed: {why}")));
        }
        assert!(bare.contains("not probed") && topology.probed().is_empty() && topology.untried().len() == 1);
    }

    #[test]
    fn pairs_stay_when_a_nic_comes_back_until_the_better_plan_is_adopted() {
        let whole = || profile::builtin("dgx-a100").expect("a built-in profile");
        let topology = topology();
        let assigned = |topology: &Topology| topology.current().plan().gpus[0].assigned.clone();
        let advises = |topology: &Topology| {
            let view = topology.current();
            view.plan().warnings.iter().any(|warning| warning.contains("gdrctl plan --apply"))
        };
        let (first, gpu) = (assigned(&topology), topology.current().plan().gpus[0].name.clone());
        assert_eq!((topology.adopt(), topology.current().generation()), (Vec::new(), 1), "nothing is better");

        let mut less = whole();
        less.host.hcas.retain(|hca| !first.contains(&hca.name));
        topology.update(less);
        let second = assigned(&topology);
        assert!(second != first && !advises(&topology));

        topology.update(whole());
        assert_eq!((assigned(&topology), topology.current().generation()), (second.clone(), 3));
        assert!(advises(&topology), "{:?}", topology.current().plan().warnings);

        let moved = topology.adopt();
        assert!(moved.iter().any(|moved| moved.gpu == gpu && moved.from == second && moved.to == first), "{moved:?}");
        assert_eq!((assigned(&topology), topology.current().generation()), (first, 4));
        assert!(!advises(&topology));
        assert_eq!((topology.adopt(), topology.current().generation()), (Vec::new(), 4));
    }

    #[test]
    fn changed_host_is_the_next_generation_and_watchers_see_it() {
        let topology = topology();
        let mut watcher = topology.subscribe();
        watcher.mark_unchanged();
        let mut snapshot = profile::builtin("dgx-a100").expect("a built-in profile");
        snapshot.host.hcas.pop();
        assert!(matches!(topology.update(snapshot), Change::Replanned(_)));
        assert_eq!(topology.current().generation(), 2);
        assert!(watcher.has_changed().expect("the sender lives"));
        assert_eq!(topology.current().response().plan.as_ref().map(|plan| plan.generation), Some(2));
    }
}
