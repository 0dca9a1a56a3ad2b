//! The simulated host: GPUs and HCAs that come and go together, and the handle to break them.

use std::io;
use std::sync::Arc;

use gdrd_hal::{GpuCopies, GpuFacts, GpuMemory, Hca};
use gdrd_topology::model::Host;

use crate::fabric::{Fabric, Timing};
use crate::facts::SimGpuFacts;
use crate::fault::{FaultEvent, FaultRule, FaultScript, ScriptError};
use crate::gpu::{GpuCore, SimGpuMemory};
use crate::hca::{HcaCore, HcaHandle};
use crate::spec::SimSpec;

/// Why a simulated host could not be made, or a fault not injected.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SimError {
    /// Two devices of one name or UUID.
    #[error("{what} {name} is there twice in the simulated host")]
    Duplicate {
        /// Kind of name.
        what: &'static str,
        /// The name.
        name: String,
    },
    /// A GPU without PCI address.
    #[error("{gpu} has no pci address, so it cannot be simulated; describe the host by a profile")]
    NoAddress {
        /// The GPU.
        gpu: String,
    },
    /// A fault script that does not parse.
    #[error(transparent)]
    Script(#[from] ScriptError),
    /// A fault names a device that is not there, or of the other kind.
    #[error("the simulated host has no {what} {name}; it has {known}")]
    UnknownDevice {
        /// Kind of device.
        what: &'static str,
        /// The name asked for.
        name: String,
        /// What there is.
        known: String,
    },
    /// More rules than [`crate::fault::MAX_RULES`] at work at once.
    #[error("too many fault rules at work; they end by `times`")]
    TooManyRules,
    /// The process has no file descriptor left.
    #[error("making the simulated host's descriptors")]
    Descriptors(#[source] io::Error),
}

/// How a simulated host departs from its description.
#[derive(Clone)]
pub struct SimOptions {
    /// How long queue pairs wait for peers.
    pub timing: Timing,
    /// Faults in force from the start.
    pub faults: FaultScript,
    /// Whether GPU allocations carry a dma-buf.
    pub gpu_dma_buf: bool,
    /// Memory of real GPUs: the HCAs register its dma-bufs too, and its bytes are moved by copies on the device.
    pub gpu_copies: Option<Arc<dyn GpuCopies>>,
}

impl std::fmt::Debug for SimOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SimOptions")
            .field("timing", &self.timing)
            .field("faults", &self.faults)
            .field("gpu_dma_buf", &self.gpu_dma_buf)
            .field("gpu_copies", &self.gpu_copies.is_some())
            .finish()
    }
}

impl Default for SimOptions {
    fn default() -> Self {
        Self { timing: Timing::default(), faults: FaultScript::default(), gpu_dma_buf: true, gpu_copies: None }
    }
}

/// A simulated host. Clones are handles of the same host; what lives on it keeps it alive.
#[derive(Clone)]
pub struct SimHost {
    fabric: Arc<Fabric>,
    hcas: Vec<Arc<HcaCore>>,
    gpu_dma_buf: bool,
}

impl std::fmt::Debug for SimHost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let hcas: Vec<_> = self.hcas.iter().map(|hca| &hca.name).collect();
        f.debug_struct("SimHost").field("gpus", &self.fabric.gpus.len()).field("hcas", &hcas).finish_non_exhaustive()
    }
}

impl SimHost {
    /// Simulates all GPUs and RDMA devices of a host model, with default options.
    ///
    /// # Errors
    /// As [`SimHost::from_host_with`].
    pub fn from_host(host: &Host) -> Result<Self, SimError> {
        Self::from_host_with(host, SimOptions::default())
    }

    /// Simulates all GPUs and RDMA devices of a host model.
    ///
    /// # Errors
    /// `NoAddress`, and as [`SimHost::with_options`].
    pub fn from_host_with(host: &Host, options: SimOptions) -> Result<Self, SimError> {
        Self::with_options(SimSpec::from_host(host)?, options)
    }

    /// A host of exactly these devices, with default options.
    ///
    /// # Errors
    /// As [`SimHost::with_options`].
    pub fn new(spec: SimSpec) -> Result<Self, SimError> {
        Self::with_options(spec, SimOptions::default())
    }

    /// A host of exactly these devices.
    ///
    /// # Errors
    /// `Duplicate`, `Descriptors`; for the fault script as [`SimHost::inject`].
    pub fn with_options(spec: SimSpec, options: SimOptions) -> Result<Self, SimError> {
        check_unique("gpu", spec.gpus.iter().map(|gpu| gpu.name.as_str()))?;
        check_unique("gpu uuid", spec.gpus.iter().map(|gpu| gpu.uuid.0.as_str()))?;
        check_unique("hca", spec.hcas.iter().map(|hca| hca.name.as_str()))?;
        let gpus = spec.gpus.into_iter().map(GpuCore::new).collect();
        let fabric = Arc::new(Fabric::new(gpus, options.timing, options.gpu_copies));
        let hcas: Result<_, _> = spec.hcas.into_iter().map(|hca| HcaCore::new(hca, Arc::clone(&fabric))).collect();
        let hcas = hcas.map_err(SimError::Descriptors)?;
        let host = Self { fabric, hcas, gpu_dma_buf: options.gpu_dma_buf };
        host.inject(options.faults)?;
        Ok(host)
    }

    /// Memory of all GPUs.
    #[must_use]
    pub fn gpu_memory(&self) -> Arc<dyn GpuMemory> {
        Arc::new(SimGpuMemory { fabric: Arc::clone(&self.fabric), dma_buf: self.gpu_dma_buf })
    }

    /// What the driver tells of all GPUs.
    #[must_use]
    pub fn gpu_facts(&self) -> Arc<dyn GpuFacts> {
        Arc::new(SimGpuFacts(Arc::clone(&self.fabric)))
    }

    /// All HCAs, in the order of the description.
    #[must_use]
    pub fn hcas(&self) -> Vec<Arc<dyn Hca>> {
        self.hcas.iter().map(|hca| Arc::new(HcaHandle(Arc::clone(hca))) as Arc<dyn Hca>).collect()
    }

    /// Parses a fault script and puts it in force.
    ///
    /// # Errors
    /// `Script`, and as [`SimHost::inject`].
    pub fn inject_text(&self, text: &str) -> Result<(), SimError> {
        self.inject(text.parse()?)
    }

    /// Puts faults in force, beside those that are. All names are checked first: a refused script does nothing.
    ///
    /// # Errors
    /// `UnknownDevice`, `TooManyRules`.
    pub fn inject(&self, script: FaultScript) -> Result<(), SimError> {
        for rule in &script.rules {
            self.check_rule(rule)?;
        }
        let mut kick = false;
        for rule in script.rules {
            match rule {
                FaultRule::Now(event) => kick |= self.fabric.fire(&event),
                FaultRule::AtOps { hca, ops, event } => self.hca(&hca)?.schedule_fault(ops, event),
                FaultRule::OnCall { call, target, after, effect, times } => {
                    let target = match target {
                        Some(name) if call.is_on_gpu() => Some(self.gpu(&name)?.spec.uuid.0.clone()),
                        target => target,
                    };
                    if !self.fabric.faults.add(call, target, after, effect, times) {
                        return Err(SimError::TooManyRules);
                    }
                }
            }
        }
        if kick {
            self.fabric.kick();
        }
        Ok(())
    }

    fn check_rule(&self, rule: &FaultRule) -> Result<(), SimError> {
        match rule {
            FaultRule::Now(event) => self.check_event(event),
            FaultRule::AtOps { hca, event, .. } => self.hca(hca).and_then(|_| self.check_event(event)),
            FaultRule::OnCall { target: None, .. } => Ok(()),
            FaultRule::OnCall { call, target: Some(name), .. } => match call.is_on_gpu() {
                true => self.gpu(name).map(drop),
                false => self.hca(name).map(drop),
            },
        }
    }

    fn check_event(&self, event: &FaultEvent) -> Result<(), SimError> {
        match event {
            FaultEvent::GpuLost { gpu } | FaultEvent::GpuHealthy { gpu } | FaultEvent::GpuGoesOn { gpu } => {
                self.gpu(gpu).map(drop)
            }
            FaultEvent::DeviceFatal { hca } | FaultEvent::HcaGoesOn { hca } => self.hca(hca).map(drop),
            FaultEvent::LinkDown { hca, port_num }
            | FaultEvent::LinkUp { hca, port_num }
            | FaultEvent::GidChange { hca, port_num } => match self.hca(hca)?.port(*port_num) {
                Some(_) => Ok(()),
                None => {
                    let name = format!("{hca}:{port_num}");
                    Err(SimError::UnknownDevice { what: "port", name, known: "ports counted from 1".to_owned() })
                }
            },
        }
    }

    fn hca(&self, name: &str) -> Result<&Arc<HcaCore>, SimError> {
        self.hcas.iter().find(|hca| hca.name == name).ok_or_else(|| {
            let known: Vec<_> = self.hcas.iter().map(|hca| hca.name.as_str()).collect();
            SimError::UnknownDevice { what: "hca", name: name.to_owned(), known: known.join(", ") }
        })
    }

    fn gpu(&self, name: &str) -> Result<&Arc<GpuCore>, SimError> {
        self.fabric.gpus.iter().find(|gpu| gpu.is_named(name)).ok_or_else(|| {
            let known: Vec<_> = self.fabric.gpus.iter().map(|gpu| gpu.spec.name.as_str()).collect();
            SimError::UnknownDevice { what: "gpu", name: name.to_owned(), known: known.join(", ") }
        })
    }
}

fn check_unique<'a>(what: &'static str, names: impl Iterator<Item = &'a str>) -> Result<(), SimError> {
    let mut seen = std::collections::HashSet::new();
    for name in names {
        if !seen.insert(name) {
            return Err(SimError::Duplicate { what, name: name.to_owned() });
        }
    }
    Ok(())
}
