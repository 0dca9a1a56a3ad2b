//! Draining GPUs: an administrator has the daemon let go of them.
//!
//! To the state machine a drained GPU is a lost one, with another reason. The set of drained ones (`drains`) is kept beside it,
//! so that a healthy answer of the driver does not resume them, nor another daemon.

use std::collections::BTreeSet;
use std::sync::Arc;

use gdrd_hal::GpuUuid;

use super::Runtime;
use crate::core::{GpuIndex, Host, Input, Seen};
use crate::drain::DrainedGpu;
use crate::error::EngineError;
use crate::session::Viewer;

/// Why a GPU is not served.
fn reason(gpu: &GpuUuid) -> String {
    format!("drained by an administrator; 'gdrctl drain {gpu} --resume' serves it again")
}

impl Runtime {
    pub(crate) fn drain_gpus(self: &Arc<Self>, viewer: &Viewer, gpu: &str) -> Result<Vec<GpuUuid>, EngineError> {
        let named = self.named_by_admin(viewer, gpu)?;
        // Written down before anything is done: the daemon may die in between.
        self.drains.insert(named.iter().map(|(_, uuid)| uuid.clone()));
        let kept = self.drains.keep();
        for (index, uuid) in &named {
            self.input(Input::GpuLost { gpu: *index, message: reason(uuid) });
            self.let_go_of(uuid);
            tracing::info!(gpu = %uuid, "drained");
        }
        kept?;
        Ok(named.into_iter().map(|(_, uuid)| uuid).collect())
    }

    pub(crate) fn resume_gpus(self: &Arc<Self>, viewer: &Viewer, gpu: &str) -> Result<Vec<GpuUuid>, EngineError> {
        let named = self.named_by_admin(viewer, gpu)?;
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
            self.input(Input::GpuHealthy { gpu: index });
            tracing::info!(gpu = %uuid, "resumed");
            resumed.push(uuid);
        }
        self.drains.keep()?;
        Ok(resumed)
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

    /// A GPU that has come may have been drained before it went.
    pub(crate) fn drain_those_that_came(self: &Arc<Self>) {
        let drained = self.drains.all();
        if drained.is_empty() {
            return;
        }
        let came: Vec<(GpuIndex, GpuUuid)> = {
            let state = self.state();
            let host = state.core.host();
            let drained = drained.into_iter().filter_map(|uuid| Some((host.gpu_by_uuid(&uuid)?, uuid)));
            drained.filter(|(index, _)| host.gpu(*index).is_some_and(|gpu| gpu.lost.is_none())).collect()
        };
        for (gpu, uuid) in came {
            self.input(Input::GpuLost { gpu, message: reason(&uuid) });
            self.let_go_of(&uuid);
        }
    }

    fn let_go_of(&self, uuid: &GpuUuid) {
        if let Some(Err(error)) = self.gpu_memory.as_ref().map(|memory| memory.drain(uuid)) {
            tracing::warn!(%error, "a drained gpu has no backend");
        }
    }

    fn named_by_admin(&self, viewer: &Viewer, gpu: &str) -> Result<Vec<(GpuIndex, GpuUuid)>, EngineError> {
        let state = self.state();
        if state.stopping {
            return Err(EngineError::ShuttingDown);
        }
        if !matches!(self.seen(&state.core, viewer)?, Seen::All) {
            return Err(EngineError::NotAdmin { what: "drain" });
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
        gpu.lost = Some(reason(&gpu.planned.uuid));
    }
}
