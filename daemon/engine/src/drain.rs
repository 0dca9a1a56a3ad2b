//! Draining GPUs, for an administrator: the calls. What becomes of them is decided in `runtime/drain.rs`.

use gdrd_hal::GpuUuid;

use crate::engine::Engine;
use crate::error::EngineError;
use crate::session::Viewer;

/// What the reason begins with why a drained GPU is not served.
pub(crate) const DRAINED: &str = "drained by an administrator";

/// A GPU that an administrator has drained.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DrainedGpu {
    /// Identity.
    pub uuid: GpuUuid,
    /// Name in the plan.
    pub name: String,
    /// PCI address as the plan has it; empty where it is not known.
    pub bdf: String,
}

/// What is under way on a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnderWay {
    /// The GPU.
    pub uuid: GpuUuid,
    /// Kind of call, such as `allocate` or `scrub`.
    pub call: &'static str,
    /// On so many buffers.
    pub buffers: u32,
}

/// What a drain came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Drained {
    /// GPUs that are drained.
    pub uuids: Vec<GpuUuid>,
    /// What was still under way on them when the time for that was over. Such a GPU must not be reset yet.
    pub under_way: Vec<UnderWay>,
}

impl Engine {
    /// Drains a GPU (by name, UUID or BDF; empty for all) for an administrator: leases on it are revoked, pools given up
    /// and the driver let go of, until it is resumed. A revoked lease keeps its memory until its holders release it.
    /// Waits [`crate::Timeouts::let_go`] for what is under way there, and tells what still is. Blocks on the driver.
    ///
    /// # Errors
    /// `NotAdmin`, `UnknownGpu`, `Absent`, `SessionEnded`, `ShuttingDown`; `NotKept` where it is done, and the next daemon will
    /// not know.
    pub fn drain_gpus(&self, viewer: &Viewer, gpu: &str) -> Result<Drained, EngineError> {
        self.runtime().drain_gpus(viewer, gpu)
    }

    /// GPUs of this host that are drained: also by an earlier daemon, where [`crate::EngineConfig::drains`] names a file.
    #[must_use]
    pub fn drained_gpus(&self) -> Vec<DrainedGpu> {
        self.runtime().drained_gpus()
    }

    /// Names of the GPUs that are lost, but for those that are drained.
    #[must_use]
    pub fn lost_gpus(&self) -> Vec<String> {
        self.runtime().lost_gpus()
    }

    /// Serves drained GPUs again; one that the driver says is lost stays lost, and so do all while it does not answer. Returns
    /// those that were drained. Blocks on the driver.
    ///
    /// # Errors
    /// As [`Engine::drain_gpus`].
    pub fn resume_gpus(&self, viewer: &Viewer, gpu: &str) -> Result<Vec<GpuUuid>, EngineError> {
        self.runtime().resume_gpus(viewer, gpu)
    }
}
