//! Proves anew what was proven before a link changed, or before another daemon ended.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use gdrd_engine::{Engine, ProbeOutcome, Probed};
use gdrd_server::Topology;
use tracing::warn;

/// Why what was found does not hold for now.
pub(crate) const LINK_CHANGED: &str =
    "its link has changed since it was probed; it is probed again once the link is up";

/// Remembers how often the link of each HCA had changed when it was last looked at.
#[derive(Debug, Default)]
pub(crate) struct Reprobe {
    seen: Mutex<BTreeMap<String, u64>>,
    /// Held while it is at it.
    at_it: Mutex<()>,
    /// Asked for while it was at it.
    again: AtomicBool,
}

impl Reprobe {
    /// Takes back what was found before a link changed, and probes again what is in doubt. Where the link is not up nothing is
    /// tried, and the doubt stays. Blocks on drivers; where it is at it already, that one goes round once more.
    pub(crate) fn follow(&self, topology: &Topology, engine: &Engine) {
        self.again.store(true, Ordering::SeqCst);
        // Whoever clears `again` is at it; a failed lock is another who has yet to look at it, or has just let go.
        while self.again.load(Ordering::SeqCst) {
            let Ok(_at_it) = self.at_it.try_lock() else { return };
            while self.again.swap(false, Ordering::SeqCst) {
                self.follow_once(topology, engine);
            }
        }
    }

    fn follow_once(&self, topology: &Topology, engine: &Engine) {
        for hca in self.changed(engine.link_changes()) {
            topology.doubt(&hca, LINK_CHANGED);
        }
        let mut in_doubt = topology.probed();
        in_doubt.retain(|known| matches!(known.outcome, ProbeOutcome::NotTried(_)));
        // A pair stands there once for each port, and is probed on all.
        in_doubt.dedup_by(|a, b| (&a.gpu, &a.hca) == (&b.gpu, &b.hca));
        for Probed { gpu, hca, .. } in in_doubt {
            match engine.probe_again(&gpu, &hca) {
                Ok(probed) => topology.prove(&probed),
                Err(error) => warn!(gpu, hca, "not probed again: {error}"),
            }
        }
    }

    /// HCAs whose link has changed since the last call.
    fn changed(&self, changes: BTreeMap<String, u64>) -> Vec<String> {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let changed = changes.iter().filter(|(hca, now)| seen.get(*hca) != Some(*now));
        let changed: Vec<String> = changed.map(|(hca, _)| hca.clone()).collect();
        *seen = changes;
        changed
    }
}
