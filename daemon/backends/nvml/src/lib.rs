//! What NVML knows of the GPUs of a host: identity, place, links, modes, health.
//!
//! Role: asks the library once and gives plain data that travels as JSON. NVML keeps the device files open while it is
//! loaded, so the daemon has a short-lived process ask. Every question may fail by itself: what a GPU does not answer is
//! absent in its report, and only a GPU that does not say who it is is left out, with a warning.
//!
//! Must not know: CUDA, leases, the topology's conclusions.
#![forbid(unsafe_code)]

mod ask;
mod report;

pub use ask::read;
pub use report::{Bar1, ComputeMode, GpuReport, Links, PcieLink, Report};

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
}
