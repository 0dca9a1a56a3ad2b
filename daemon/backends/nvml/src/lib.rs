//! What NVML knows of the GPUs of a host: identity, place, links, modes, health.
//!
//! Role: asks the library once and gives plain data that travels as JSON. NVML keeps the device files open while it is
//! loaded, so the daemon has a short-lived process ask. Every question may fail by itself: what a GPU does not answer is
//! absent in its report, and only a GPU that does not say who it is is left out, with a warning.
//!
//! [`watch`] is the other part: it stays loaded and tells Xid and ECC errors of a GPU as they come, in the GPU's worker.
//!
//! Must not know: CUDA, leases, the topology's conclusions. Unsafe code is in `raw` alone.

mod ask;
#[allow(unsafe_code)]
mod raw;
mod report;
mod watch;

pub use ask::{read, read_from};
pub use report::{
    Bar1, ComputeMode, FabricReport, FarEnd, GpuReport, Links, Memory, PcieLink, ProcessMemory, Report, Slice,
};
pub use watch::{HealthEvent, watch};

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NvmlError {
    /// The library is not there or does not start.
    #[error("nvml does not start: {0}; install the nvidia driver and load its kernel module")]
    Start(#[source] nvml_wrapper::error::NvmlError),
    /// It started and does not list the GPUs.
    #[error("nvml does not list the gpus: {0}")]
    List(#[source] nvml_wrapper::error::NvmlError),
    /// It does not tell events.
    #[error("nvml tells no events: {0}; xid errors are in the kernel log only")]
    Watch(#[source] nvml_wrapper::error::NvmlError),
}
