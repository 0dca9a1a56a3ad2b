//! Whether a NIC can move a GPU's memory by itself: a field of its own, never part of the level.

use serde::{Deserialize, Serialize};

use crate::acs::PeerAcs;
use crate::model::{GpuId, HcaId, HcaOrigin, Host};

/// State of GPUDirect RDMA between one GPU and one NIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GdrState {
    /// Nothing speaks for or against it.
    Unknown,
    /// What it needs is there; not tried.
    Possible,
    /// A transfer with checked content went through.
    Proven,
    /// A transfer was tried and failed.
    Failed,
    /// It cannot work.
    Impossible,
}

/// State of GPUDirect RDMA and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gdr {
    /// The state.
    pub state: GdrState,
    /// The evidence for it.
    pub reason: String,
}

impl Gdr {
    fn new(state: GdrState, reason: impl Into<String>) -> Self {
        Self { state, reason: reason.into() }
    }
}

/// What a reason says while nobody knows more.
const NOT_PROBED: &str = "not probed";

impl Gdr {
    /// The same where a probe was asked for and could not be tried.
    #[must_use]
    pub fn untried(&self, why: &str) -> Self {
        Self::new(self.state, self.reason.replace(NOT_PROBED, &format!("{NOT_PROBED}: {why}")))
    }
}

const NVIDIA: u16 = 0x10de;
const AMD: u16 = 0x1002;
/// GB10 (DGX Spark) has neither dma-buf export of GPU memory nor nvidia-peermem, since its GPU has no
/// memory of its own.
const GB10: u16 = 0x2e12;

impl Host {
    /// What the host's facts say of GPUDirect RDMA between a GPU and an HCA.
    #[must_use]
    pub fn gdr(&self, gpu: GpuId, hca: HcaId) -> Gdr {
        self.gdr_with(gpu, hca, self.gpu_hca_acs(gpu, hca).as_ref())
    }

    /// The same where the way of the traffic is known already.
    pub(crate) fn gdr_with(&self, gpu: GpuId, hca: HcaId, acs: Option<&PeerAcs>) -> Gdr {
        let told = self.gdr_by_software(gpu, hca);
        match acs.filter(|acs| acs.is_redirected()) {
            Some(acs) if told.state != GdrState::Impossible => self.through_root(&told, acs),
            _ => told,
        }
    }

    /// The same where ACS sends the traffic up. On a host of its own the root complex sends it down again, which
    /// costs bandwidth; whether it does so for a guest is up to the hypervisor.
    fn through_root(&self, told: &Gdr, acs: &PeerAcs) -> Gdr {
        if self.is_guest() {
            let reason =
                format!("unverified: {}, and the hypervisor need not let it through; {}", acs.reason, told.reason);
            return Gdr::new(GdrState::Unknown, reason);
        }
        Gdr::new(told.state, format!("{}; {}", told.reason, acs.reason))
    }

    fn gdr_by_software(&self, gpu: GpuId, hca: HcaId) -> Gdr {
        use GdrState::{Impossible, Possible, Unknown};
        let (Some(gpu), Some(hca)) = (self.gpu(gpu), self.hca(hca)) else {
            return Gdr::new(Unknown, "no such pair");
        };
        match hca.origin {
            HcaOrigin::Soft { .. } => return Gdr::new(Impossible, "software RDMA device: the CPU moves the data"),
            HcaOrigin::Socket => return Gdr::new(Impossible, "socket transport, no RDMA"),
            _ => {}
        }
        let function = gpu.bdf.and_then(|bdf| self.function(bdf));
        let (vendor, device) = function.map_or((None, None), |function| (function.vendor, function.device));
        if vendor == Some(NVIDIA) && device == Some(GB10) {
            return Gdr::new(Impossible, "GB10 offers neither dma-buf nor nvidia-peermem for its memory");
        }
        let is_loaded = |name: &&str| self.peer_memory_modules.iter().any(|module| module == name);
        let wanted: &[&str] = match vendor {
            Some(NVIDIA) => &["nvidia_peermem", "nv_peer_mem"],
            Some(AMD) => &["amdgpu"],
            _ => &[],
        };
        match wanted.iter().find(|name| is_loaded(name)) {
            Some(module) => Gdr::new(Possible, format!("module {module} is loaded; {NOT_PROBED}")),
            None => Gdr::new(Unknown, NOT_PROBED),
        }
    }
}
