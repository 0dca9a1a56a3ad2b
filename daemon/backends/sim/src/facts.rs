//! What the driver of the simulated GPUs would tell.

use std::sync::Arc;

use gdrd_hal::{GpuFact, GpuFacts, GpuHealth, GpuMemoryError, GpuMemoryFact};

use crate::fabric::Fabric;
use crate::gpu::GpuCore;

/// Facts of all GPUs of a host.
pub(crate) struct SimGpuFacts(pub(crate) Arc<Fabric>);

impl GpuFacts for SimGpuFacts {
    fn gpus(&self) -> Result<Vec<GpuFact>, GpuMemoryError> {
        Ok(self.0.gpus.iter().map(|gpu| fact(gpu)).collect())
    }
}

fn fact(gpu: &GpuCore) -> GpuFact {
    let usage = gpu.usage();
    GpuFact {
        uuid: gpu.spec.uuid.clone(),
        bdf: gpu.spec.bdf,
        device_node: gpu.spec.device_node,
        health: gpu.lost_reason().map_or(GpuHealth::Healthy, GpuHealth::Lost),
        memory: Some(GpuMemoryFact {
            total_bytes: usage.total_bytes,
            reserved_bytes: 0,
            used_bytes: usage.total_bytes - usage.free_bytes,
            context_bytes: 0,
            bar1: None,
        }),
        detail: gpu.spec.detail.clone(),
    }
}
