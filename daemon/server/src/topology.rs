//! The topology in force: snapshot, plan, and who waits for the next one.
//!
//! Role: holds what the daemon last read, ready to be sent. The plan sticks: a new snapshot moves only pairs whose
//! NIC is gone. Must not know: how a host is read, or what is leased.

use std::sync::Arc;

use gdrd_proto::v1;
use gdrd_topology::model::Snapshot;
use gdrd_topology::plan::contract::Plan;
use gdrd_topology::plan::{PlanOptions, Replan, plan, replan};
use gdrd_topology::profile;
use tokio::sync::watch;

use crate::grpc::wire_plan;

/// One generation of the topology.
#[derive(Debug)]
pub struct View {
    snapshot: Snapshot,
    plan: Plan,
    response: v1::GetTopologyResponse,
}

impl View {
    fn new(snapshot: Snapshot, plan: Plan) -> Self {
        let response = v1::GetTopologyResponse {
            generation: snapshot.generation,
            host_profile: profile::render(&snapshot.host),
            plan: Some(wire_plan(&plan)),
        };
        Self { snapshot, plan, response }
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

/// What a new reading of the host changed.
#[derive(Debug, Clone, PartialEq)]
pub enum Change {
    /// Nothing; the generation stays.
    None,
    /// The host, and with it the snapshot.
    Replanned(Box<Replan>),
}

/// The topology in force. Clones are one.
#[derive(Debug, Clone)]
pub struct Topology {
    options: Arc<PlanOptions>,
    current: Arc<watch::Sender<Arc<View>>>,
}

impl Topology {
    /// Plans the first snapshot, as generation 1.
    #[must_use]
    pub fn new(mut snapshot: Snapshot, options: PlanOptions) -> Self {
        snapshot.generation = 1;
        let plan = plan(&snapshot, &options);
        let current = Arc::new(watch::Sender::new(Arc::new(View::new(snapshot, plan))));
        Self { options: Arc::new(options), current }
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
        let before = self.current();
        if before.snapshot.host.is_same_as(&snapshot.host) {
            if before.snapshot.host.warnings != snapshot.host.warnings {
                snapshot.generation = before.generation();
                let plan = replan(&before.plan, &snapshot, &self.options).plan;
                let view = Arc::new(View::new(snapshot, plan));
                self.current.send_if_modified(|current| {
                    *current = view;
                    false
                });
            }
            return Change::None;
        }
        snapshot.generation = before.generation() + 1;
        let replanned = replan(&before.plan, &snapshot, &self.options);
        self.current.send_replace(Arc::new(View::new(snapshot, replanned.plan.clone())));
        Change::Replanned(Box::new(replanned))
    }

    /// The generation in force and each later one; one that is not taken in time is passed over for a newer one.
    pub(crate) fn subscribe(&self) -> watch::Receiver<Arc<View>> {
        self.current.subscribe()
    }
}

#[cfg(test)]
mod tests {
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
