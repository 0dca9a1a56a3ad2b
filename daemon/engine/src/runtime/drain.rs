//! Draining GPUs: an administrator has the daemon let go of them.
//!
//! To the state machine a drained GPU is a lost one, with another reason. The set of drained ones (`drains`) is kept beside it,
//! so that a healthy answer of the driver does not resume them, nor another daemon. Whoever changes the set, or tells the
//! state machine of GPUs by it, does so in a turn of its own (`draining`): else one could undo half of what another does.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, MutexGuard, PoisonError};

use gdrd_hal::{GpuHealth, GpuUuid};

use super::{Runtime, State, lock};
use crate::core::{GpuIndex, Host, Input};
use crate::drain::{DRAINED, Drained, DrainedGpu, UnderWay};
use crate::error::EngineError;
use crate::plan::HostPlan;
use crate::session::Viewer;

/// Why a GPU is not served.
fn reason(gpu: &GpuUuid) -> String {
    format!("{DRAINED}; 'gdrctl drain {gpu} --resume' serves it again")
}

impl Runtime {
    pub(crate) fn drain_gpus(self: &Arc<Self>, viewer: &Viewer, gpu: &str) -> Result<Drained, EngineError> {
        let turn = self.turn_of_admin(viewer)?;
        let named = self.named(gpu)?;
        // Written down before anything is done: the daemon may die in between.
        self.drains.insert(named.iter().map(|(_, uuid)| uuid.clone()));
        let kept = self.drains.keep();
        for (index, uuid) in &named {
            self.input(Input::GpuLost { gpu: *index, message: reason(uuid) });
            self.let_go_of(uuid);
            tracing::info!(gpu = %uuid, "drained");
        }
        kept?;
        // Others may have their turn meanwhile.
        drop(turn);
        let under_way = self.wait_for_calls_on(&named);
        Ok(Drained { uuids: named.into_iter().map(|(_, uuid)| uuid).collect(), under_way })
    }

    /// Waits until nothing is under way on these GPUs, for as long as that may take, and returns what still is.
    fn wait_for_calls_on(&self, gpus: &[(GpuIndex, GpuUuid)]) -> Vec<UnderWay> {
        let mut state = self.state();
        state.draining += 1;
        let is_at_work = |state: &mut State| gpus.iter().any(|(gpu, _)| !state.core.under_way_on(*gpu).is_empty());
        let waited = self.empty.wait_timeout_while(state, self.config.timeouts.let_go, is_at_work);
        state = waited.unwrap_or_else(PoisonError::into_inner).0;
        state.draining -= 1;
        let of_gpu = |(gpu, uuid): &(GpuIndex, GpuUuid)| {
            let calls = state.core.under_way_on(*gpu).into_iter();
            calls.map(|(call, buffers)| UnderWay { uuid: uuid.clone(), call, buffers }).collect::<Vec<_>>()
        };
        gpus.iter().flat_map(of_gpu).collect()
    }

    pub(crate) fn resume_gpus(self: &Arc<Self>, viewer: &Viewer, gpu: &str) -> Result<Vec<GpuUuid>, EngineError> {
        let _turn = self.turn_of_admin(viewer)?;
        let named = self.named(gpu)?;
        let mut resumed = Vec::new();
        if gpu.is_empty() {
            // Those that are not there now too.
            self.drains.forget_others(&named.iter().map(|(_, uuid)| uuid.clone()).collect());
        }
        for (index, uuid) in named {
            // One that was not drained may be lost for another reason.
            if !self.drains.remove(&uuid) {
                continue;
            }
            if let Some(Err(error)) = self.gpu_memory.as_ref().map(|memory| memory.resume(&uuid)) {
                tracing::warn!(%error, "a drained gpu has no backend");
            }
            resumed.push((index, uuid));
        }
        let driver = self.lost_by_driver();
        for (gpu, uuid) in &resumed {
            let lost = driver.as_ref().map_or_else(|error| Some(error.clone()), |lost| lost.get(uuid).cloned());
            tracing::info!(gpu = %uuid, lost, "resumed");
            self.input(Input::GpuResumed { gpu: *gpu, lost });
        }
        self.drains.keep()?;
        Ok(resumed.into_iter().map(|(_, uuid)| uuid).collect())
    }

    /// Which are drained of those that the host has.
    pub(crate) fn drained_gpus(&self) -> Vec<DrainedGpu> {
        let drained = self.drains.all();
        let state = self.state();
        let planned = state.core.host().gpus.iter().map(|gpu| &gpu.planned);
        let planned = planned.filter(|gpu| drained.contains(&gpu.uuid));
        planned.map(|gpu| DrainedGpu { uuid: gpu.uuid.clone(), name: gpu.name.clone(), bdf: gpu.bdf.clone() }).collect()
    }

    pub(crate) fn lost_gpus(&self) -> Vec<String> {
        let drained = self.drains.all();
        let state = self.state();
        let lost = state.core.host().gpus.iter().filter(|gpu| gpu.lost.is_some());
        let lost = lost.filter(|gpu| !drained.contains(&gpu.planned.uuid));
        lost.map(|gpu| gpu.planned.name.clone()).collect()
    }

    /// Has the backend let go of GPUs that were drained before this engine was.
    pub(super) fn let_go_of_drained(&self) {
        for gpu in self.drained_gpus() {
            tracing::info!(gpu = %gpu.uuid, "{}", reason(&gpu.uuid));
            self.let_go_of(&gpu.uuid);
        }
    }

    /// GPUs that come with the plan may have been drained before: they are not served for a moment.
    pub(crate) fn update_plan(self: &Arc<Self>, plan: impl FnOnce() -> HostPlan) {
        let _turn = self.drain_turn();
        let plan = plan();
        *lock(&self.plan) = Arc::new(plan.clone());
        let known = self.drained_gpus();
        let unserved: BTreeMap<_, _> =
            self.drains.all().into_iter().map(|uuid| (uuid.clone(), reason(&uuid))).collect();
        self.input(Input::Plan { plan, unserved });
        for came in self.drained_gpus().iter().filter(|gpu| !known.iter().any(|known| known.uuid == gpu.uuid)) {
            self.let_go_of(&came.uuid);
        }
    }

    /// Held by who changes what is drained, or tells the state machine of GPUs by it.
    pub(super) fn drain_turn(&self) -> MutexGuard<'_, ()> {
        lock(&self.draining)
    }

    /// Those that the driver says are lost, and why; or why it does not answer.
    fn lost_by_driver(&self) -> Result<BTreeMap<GpuUuid, String>, String> {
        let Some(facts) = &self.gpu_facts else { return Ok(BTreeMap::new()) };
        let facts = facts.gpus().map_err(|error| format!("its driver cannot be asked how it is: {error}"))?;
        let lost = facts.into_iter().filter_map(|fact| match fact.health {
            GpuHealth::Lost(why) => Some((fact.uuid, why)),
            _ => None,
        });
        Ok(lost.collect())
    }

    fn let_go_of(&self, uuid: &GpuUuid) {
        if let Some(Err(error)) = self.gpu_memory.as_ref().map(|memory| memory.drain(uuid)) {
            tracing::warn!(%error, "a drained gpu has no backend");
        }
    }

    fn turn_of_admin(&self, viewer: &Viewer) -> Result<MutexGuard<'_, ()>, EngineError> {
        // Nobody else may wait for a turn.
        self.require_admin(viewer, "drain")?;
        Ok(self.drain_turn())
    }

    fn named(&self, gpu: &str) -> Result<Vec<(GpuIndex, GpuUuid)>, EngineError> {
        let state = self.state();
        if state.stopping {
            return Err(EngineError::ShuttingDown);
        }
        let host = state.core.host();
        let named = |index: GpuIndex| host.gpu(index).map(|gpu| (index, gpu.planned.uuid.clone()));
        match gpu {
            "" => Ok((0..=u16::MAX).map(GpuIndex).map_while(named).collect()),
            name => Ok(named(host.find_gpu(name)?).into_iter().collect()),
        }
    }
}

/// Notes in a host which GPUs are drained, before anything else is done with it.
pub(super) fn note_drained(drained: &BTreeSet<GpuUuid>, host: &mut Host) {
    for gpu in host.gpus.iter_mut().filter(|gpu| drained.contains(&gpu.planned.uuid)) {
        gpu.lost.get_or_insert_with(|| reason(&gpu.planned.uuid));
    }
}
