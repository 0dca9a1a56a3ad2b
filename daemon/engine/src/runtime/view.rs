//! Lists, watches and figures.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use futures_channel::mpsc;
use gdrd_hal::GpuUuid;

use super::{Runtime, lock};
use crate::core::{Input, Seen};
use crate::error::EngineError;
use crate::ids::{DeviceNumber, LeaseId, QueuePairId, SessionId};
use crate::in_use::InUse;
use crate::lease::{LeaseEvent, LeaseInfo, LeasePage};
use crate::peer::TenantKey;
use crate::plan::HostPlan;
use crate::queue_pair::QueuePairPage;
use crate::session::Viewer;
use crate::stats::Stat;

/// How long a broker thread may take to name the queue pairs with receives on a slot. It answers between two
/// batches; past this the release is refused all the same, without the name.
const NAME_RECEIVERS_WITHIN: Duration = Duration::from_secs(1);

impl Runtime {
    pub(super) fn seen(&self, core: &crate::core::Core, viewer: &Viewer) -> Result<Seen, EngineError> {
        match viewer {
            Viewer::Session(session) => core.seen_by(*session),
            Viewer::Peer(peer) if self.config.policy.is_admin(peer) => Ok(Seen::All),
            Viewer::Peer(peer) => Ok(Seen::Tenant(TenantKey::of(peer))),
        }
    }

    pub(crate) fn require_admin(&self, viewer: &Viewer, what: &'static str) -> Result<(), EngineError> {
        match self.seen(&self.state().core, viewer)? {
            Seen::All => Ok(()),
            Seen::Tenant(_) => Err(EngineError::NotAdmin { what }),
        }
    }

    pub(crate) fn in_use(&self) -> InUse {
        self.state().core.in_use()
    }

    pub(crate) fn lease_with_keys(&self, session: SessionId, lease: LeaseId) -> Result<LeaseInfo, EngineError> {
        let (allocation, mut info) = self.state().core.held_info(session, lease)?;
        if let Some(memory) = self.objects.memory(allocation) {
            memory.fill_keys(&mut info.registrations);
        }
        Ok(info)
    }

    pub(crate) fn list_leases(
        &self,
        viewer: &Viewer,
        start: Option<LeaseId>,
        page: u32,
    ) -> Result<LeasePage, EngineError> {
        let state = self.state();
        let seen = self.seen(&state.core, viewer)?;
        Ok(state.core.lease_page(&seen, start, page))
    }

    pub(crate) fn list_queue_pairs(
        &self,
        viewer: &Viewer,
        start: Option<QueuePairId>,
        page: u32,
    ) -> Result<QueuePairPage, EngineError> {
        let (known, next) = {
            let state = self.state();
            let seen = self.seen(&state.core, viewer)?;
            state.core.queue_pair_page(&seen, start, page)
        };
        let info = |(id, state)| self.objects.with_queue_pair(id, |q| crate::QueuePairInfo { state, ..q.info.clone() });
        Ok(QueuePairPage { queue_pairs: known.into_iter().filter_map(info).collect(), next })
    }

    pub(crate) fn watch_leases(self: &Arc<Self>, viewer: &Viewer) -> Result<mpsc::Receiver<LeaseEvent>, EngineError> {
        let mut state = self.state();
        if state.stopping {
            return Err(EngineError::ShuttingDown);
        }
        let seen = self.seen(&state.core, viewer)?;
        let super::State { core, watchers, .. } = &mut *state;
        let events = watchers.add(core, seen)?;
        core.apply(Input::Watched { watched: true }, 0, &mut Vec::new());
        Ok(events)
    }

    /// A queue pair that has receives posted on the lease, if any.
    pub(crate) fn receives_on(&self, session: SessionId, lease: LeaseId) -> Option<QueuePairId> {
        let (tenant, slots) = {
            let state = self.state();
            let (tenant, registrations) = state.core.slots_of(session, lease)?;
            (tenant, registrations.iter().map(|r| r.slot).collect::<Vec<_>>())
        };
        let table = Arc::clone(&self.objects.tenant(tenant)?.slots);
        let slot = slots.into_iter().find(|slot| table.posted_receives(*slot) > 0)?;
        let (tell, told) = channel();
        self.broker.receive_users(&table, slot, move |users| {
            // Whoever waited may have given up.
            let _ = tell.send(users.first().copied());
        });
        match told.recv_timeout(NAME_RECEIVERS_WITHIN) {
            Ok(user) => user,
            Err(_) => Some(QueuePairId(0)),
        }
    }

    pub(crate) fn prove_gpus(
        self: &Arc<Self>,
        session: SessionId,
        nodes: &[DeviceNumber],
    ) -> Result<Vec<GpuUuid>, EngineError> {
        let mut uuids = Vec::with_capacity(nodes.len());
        for node in nodes {
            let known = lock(&self.nodes);
            let uuid = known.get(node).ok_or(EngineError::NotAGpu { major: node.major, minor: node.minor })?;
            uuids.push(uuid.clone());
        }
        let gpus = {
            let state = self.state();
            uuids.iter().filter_map(|uuid| state.core.host().gpu_by_uuid(uuid)).collect()
        };
        self.ask(|call| Input::ProveGpus { call, session, gpus })?;
        Ok(uuids)
    }

    pub(crate) fn stats(&self) -> Vec<Stat> {
        let mut stats = self.state().core.stats();
        let broker = self.broker.stats();
        let mut push = |name, labels, value: u64, help| {
            // Exact up to 2^53.
            #[allow(clippy::cast_precision_loss)]
            stats.push(Stat { name, labels, value: value as f64, help });
        };
        if let Some(kept) = self.is_written_down() {
            push("gdrd_journal_kept", vec![], u64::from(kept), "Whether a restart would keep sessions and leases.");
        }
        let threads = u64::from(self.executor.threads()) + u64::from(self.background.threads());
        push("gdrd_executor_threads", vec![], threads, "Threads for driver calls.");
        let calls = self.running_calls();
        push("gdrd_executor_threads_busy", vec![], calls.len() as u64, "Threads that are in a driver call.");
        let oldest = calls.iter().map(|call| call.began.elapsed().as_secs()).max().unwrap_or(0);
        push(
            "gdrd_executor_oldest_call_seconds",
            vec![],
            oldest,
            "How long the longest of the running driver calls runs.",
        );
        for (index, thread) in broker.threads.iter().enumerate() {
            let labels = || vec![("thread", index.to_string())];
            push("gdrd_broker_queue_pairs", labels(), thread.queue_pairs as u64, "Queue pairs of a broker thread.");
            push("gdrd_broker_sleeps_total", labels(), thread.sleeps, "Times a broker thread slept.");
            let help = "Times a broker thread let the kernel's threads of a software HCA have its CPU.";
            push("gdrd_broker_yields_total", labels(), thread.yields, help);
            push("gdrd_broker_unexpected_total", labels(), thread.unexpected, "Completions that fit no request.");
            push(
                "gdrd_broker_throttled_total",
                labels(),
                thread.throttled,
                "Times a tenant began to wait for its rate.",
            );
        }
        for queue_pair in &broker.queue_pairs {
            let labels = || vec![("queue_pair", queue_pair.id.to_string())];
            push("gdrd_requests_taken_total", labels(), queue_pair.taken, "Requests taken from a ring.");
            push("gdrd_requests_refused_total", labels(), queue_pair.refused, "Requests refused before the HCA.");
            push("gdrd_requests_completed_total", labels(), queue_pair.completed, "Requests that succeeded.");
            push("gdrd_requests_failed_total", labels(), queue_pair.failed, "Requests that the HCA ended in failure.");
            push("gdrd_client_wakes_total", labels(), queue_pair.wakes, "Times a sleeping client was woken.");
        }
        stats
    }

    /// A node, if it is one of this machine: a simulated host's are not.
    pub(super) fn own_node(&self, node: Option<u32>) -> Option<u32> {
        node.filter(|node| self.config.broker.nodes.iter().any(|own| own.node == *node))
    }

    pub(crate) fn plan(&self) -> Arc<HostPlan> {
        Arc::clone(&lock(&self.plan))
    }
}
