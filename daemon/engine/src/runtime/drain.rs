//! Draining GPUs: an administrator has the daemon let go of them.
//!
//! To the state machine a drained GPU is a lost one, with another reason. The set of drained ones is kept here, so that a
//! healthy answer of the driver does not resume them.

use std::sync::Arc;

use gdrd_hal::GpuUuid;

use super::{Runtime, lock};
use crate::core::{GpuIndex, Input, Seen};
use crate::error::EngineError;
use crate::session::Viewer;

const REASON: &str = "drained by an administrator; 'gdrctl drain --resume' serves it again";

impl Runtime {
    pub(crate) fn drain_gpus(self: &Arc<Self>, viewer: &Viewer, gpu: &str) -> Result<Vec<GpuUuid>, EngineError> {
        let named = self.named_by_admin(viewer, gpu)?;
        for (index, uuid) in &named {
            lock(&self.drained).insert(uuid.clone());
            self.input(Input::GpuLost { gpu: *index, message: REASON.to_owned() });
            if let Some(Err(error)) = self.gpu_memory.as_ref().map(|memory| memory.drain(uuid)) {
                tracing::warn!(%error, "a drained gpu has no backend");
            }
            tracing::info!(gpu = %uuid, "drained");
        }
        Ok(named.into_iter().map(|(_, uuid)| uuid).collect())
    }

    pub(crate) fn resume_gpus(self: &Arc<Self>, viewer: &Viewer, gpu: &str) -> Result<Vec<GpuUuid>, EngineError> {
        let named = self.named_by_admin(viewer, gpu)?;
        let mut resumed = Vec::new();
        for (index, uuid) in named {
            // One that was not drained may be lost for another reason.
            if !lock(&self.drained).remove(&uuid) {
                continue;
            }
            if let Some(Err(error)) = self.gpu_memory.as_ref().map(|memory| memory.resume(&uuid)) {
                tracing::warn!(%error, "a drained gpu has no backend");
            }
            self.input(Input::GpuHealthy { gpu: index });
            tracing::info!(gpu = %uuid, "resumed");
            resumed.push(uuid);
        }
        Ok(resumed)
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
