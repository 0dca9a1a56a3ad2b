//! Proves anew what was proven before a link changed.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use gdrd_engine::Engine;
use gdrd_server::{Topology, proofs};
use gdrd_topology::gdr::{Gdr, GdrState};
use gdrd_topology::model::PortState;
use tracing::{info, warn};

/// Remembers how often the link of each HCA had changed when it was last looked at.
#[derive(Debug, Default)]
pub(crate) struct Reprobe(Mutex<BTreeMap<String, u64>>);

impl Reprobe {
    /// Takes back what was found before a link changed, and probes again where the link is up. Blocks on drivers.
    pub(crate) fn follow(&self, topology: &Topology, engine: &Engine) {
        let changes = engine.link_changes();
        let view = topology.current();
        let is_up = |name: &str| {
            let nic = view.plan().nics.iter().find(|nic| nic.name == name);
            nic.is_some_and(|nic| nic.ports.iter().any(|port| port.state == PortState::Active))
        };
        for (gpu, hca) in topology.probed() {
            let now = changes.get(&hca).copied().unwrap_or(0);
            if self.seen(&hca) == now {
                continue;
            }
            let stale = Gdr {
                state: GdrState::Possible,
                reason: "its link has changed since it was probed; it is probed again once the link is up".to_owned(),
            };
            topology.prove([((gpu.clone(), hca.clone()), stale)]);
            if !is_up(&hca) {
                continue;
            }
            match engine.probe_again(&gpu, &hca) {
                Ok(probed) => {
                    info!(gpu, hca, "probed again after its link has changed");
                    topology.prove(proofs(&probed));
                }
                Err(error) => warn!(gpu, hca, "not probed again: {error}"),
            }
        }
        // Of those that are down the change stays to be dealt with.
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        seen.extend(changes.into_iter().filter(|(hca, _)| is_up(hca)));
    }

    fn seen(&self, hca: &str) -> u64 {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(hca).copied().unwrap_or(0)
    }
}
