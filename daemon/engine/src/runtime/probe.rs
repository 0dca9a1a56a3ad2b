//! Probes that an administrator asks for: which pairs, with what memory.

use std::sync::Arc;

use gdrd_hal::{Hca, MemorySource, PortState};

use super::host_memory::HostMemory;
use super::{Runtime, lock};
use crate::core::Seen;
use crate::error::EngineError;
use crate::plan::PlannedGpu;
use crate::probe::{PROBED_BYTES, ProbeOutcome, Probed, probe};
use crate::session::Viewer;

impl Runtime {
    /// Probes for an administrator. Blocks on drivers.
    pub(crate) fn probe_for(&self, viewer: &Viewer, gpu: &str, hca: &str) -> Result<Vec<Probed>, EngineError> {
        {
            let state = self.state();
            if !matches!(self.seen(&state.core, viewer)?, Seen::All) {
                return Err(EngineError::NotAdmin { what: "probe" });
            }
        }
        let gpus = self.gpus_to_probe(gpu)?;
        let hcas = self.hcas_to_probe(hca)?;
        // A pair that was named is probed whether or not it is in the plan.
        let is_named = !gpu.is_empty() && !hca.is_empty();
        Ok(self.probe_all(&hcas, gpu.is_empty(), |hca| {
            gpus.iter().filter(|gpu| is_named || gpu.hcas.iter().any(|name| name == hca)).collect()
        }))
    }

    /// Probes one pair; without a GPU, a host buffer. Blocks on drivers.
    pub(crate) fn probe_again(&self, gpu: &str, hca: &str) -> Result<Vec<Probed>, EngineError> {
        let gpus = if gpu.is_empty() { Vec::new() } else { self.gpus_to_probe(gpu)? };
        let hcas = self.hcas_to_probe(hca)?;
        Ok(self.probe_all(&hcas, gpu.is_empty(), |_| gpus.iter().collect()))
    }

    /// Each active port with a host buffer, if that is wanted, and with these GPUs, one after the other.
    fn probe_all<'g>(
        &self,
        hcas: &[Arc<dyn Hca>],
        with_host: bool,
        gpus_of: impl Fn(&str) -> Vec<&'g PlannedGpu>,
    ) -> Vec<Probed> {
        // Two at a time would measure each other.
        let _turn = lock(&self.probing);
        let mut probed = Vec::new();
        for device in hcas {
            let ports = device.ports().unwrap_or_default();
            let active = ports.iter().filter(|port| port.state == PortState::Active);
            for port_num in active.map(|port| port.port_num) {
                let tell = |gpu: &str, outcome| Probed {
                    gpu: gpu.to_owned(),
                    hca: device.name().to_owned(),
                    port_num,
                    outcome,
                };
                if with_host {
                    probed.push(tell("", probe_host(&**device, port_num)));
                }
                for planned in gpus_of(device.name()) {
                    probed.push(tell(&planned.name, self.probe_gpu(&**device, port_num, planned)));
                }
            }
        }
        probed
    }

    fn hcas_to_probe(&self, hca: &str) -> Result<Vec<Arc<dyn Hca>>, EngineError> {
        let mut hcas: Vec<Arc<dyn Hca>> = self.hcas.all().into_iter().map(|(_, hca)| hca).collect();
        if !hca.is_empty() {
            self.state().core.host().find_hca(hca)?;
            hcas.retain(|known| known.name() == hca);
        }
        Ok(hcas)
    }

    fn gpus_to_probe(&self, gpu: &str) -> Result<Vec<PlannedGpu>, EngineError> {
        let state = self.state();
        if state.stopping {
            return Err(EngineError::ShuttingDown);
        }
        let host = state.core.host();
        if gpu.is_empty() {
            return Ok(host.gpus.iter().map(|gpu| gpu.planned.clone()).collect());
        }
        let index = host.find_gpu(gpu)?;
        Ok(host.gpu(index).map(|gpu| gpu.planned.clone()).into_iter().collect())
    }

    fn out_of_use(&self, gpu: &PlannedGpu) -> Option<String> {
        let state = self.state();
        state.core.host().gpus.iter().find(|known| known.planned.uuid == gpu.uuid)?.lost.clone()
    }

    fn probe_gpu(&self, hca: &dyn Hca, port_num: u8, gpu: &PlannedGpu) -> ProbeOutcome {
        let Some(memory) = &self.gpu_memory else {
            return ProbeOutcome::NotTried("this daemon has no backend for gpu memory".to_owned());
        };
        // A drained one too: whoever resets it must find nothing of this daemon there.
        if let Some(reason) = self.out_of_use(gpu) {
            return ProbeOutcome::NotTried(reason);
        }
        let granularity = memory.capabilities().granularity_bytes.max(1);
        let len_bytes = PROBED_BYTES.next_multiple_of(granularity);
        let allocation = match memory.allocate(&gpu.uuid, len_bytes) {
            Ok(allocation) => allocation,
            Err(error) => return ProbeOutcome::NotTried(error.to_string()),
        };
        match allocation.dma_buf_fd() {
            Some(fd) => probe(hca, port_num, MemorySource::DmaBuf { fd, offset: 0, len_bytes: PROBED_BYTES }),
            None => ProbeOutcome::NotTried("the gpu backend exports no dma-buf that an hca could register".to_owned()),
        }
    }
}

fn probe_host(hca: &dyn Hca, port_num: u8) -> ProbeOutcome {
    match HostMemory::ordinary(PROBED_BYTES) {
        Ok(memory) => {
            let target = MemorySource::Host { fd: memory.own_fd(), offset: 0, len_bytes: PROBED_BYTES };
            probe(hca, port_num, target)
        }
        Err(errno) => ProbeOutcome::NotTried(format!("host memory: {errno}")),
    }
}
