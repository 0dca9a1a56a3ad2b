//! What a client needs of libcuda: memory by descriptor, mapped into its own address space, and order with a stream; and of
//! libibverbs, to import a context that the daemon opened for it.
//!
//! Role: imports what the daemon lends, and exports what a client made itself. libcuda is loaded at the first use and
//! only then, so that programs start on every host; each function is looked up once, and one that is missing is an
//! error with its name.
//!
//! Owner of state: a [`Gpu`] holds the device's primary context, which PyTorch and the CUDA runtime use too; a
//! [`Mapping`] holds its address range. Calls leave the thread's current context as it was.
//!
//! Must not know: the daemon, its protocol, sessions.
#![allow(unsafe_code)]

#[cfg(test)]
mod abi;
mod allocation;
mod bounce;
mod gpu;
#[cfg(feature = "ipc")]
pub mod ipc;
mod mapping;
mod table;
pub mod verbs;

pub use allocation::{Allocation, buffer_id};
pub use bounce::BounceBuffer;
pub use gpu::{Gpu, Stream};
pub use mapping::Mapping;

/// Why a call came to nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// No libcuda, or one without a function that is needed.
    #[error("{what} is not in this process' libcuda.so.1; install an nvidia driver of CUDA 11.7 or later")]
    Absent {
        /// The library or the function.
        what: String,
    },
    /// The driver shows no GPU of that UUID to this process.
    #[error("the driver shows no gpu {uuid} to this process; see CUDA_VISIBLE_DEVICES")]
    UnknownGpu {
        /// The UUID.
        uuid: String,
    },
    /// A GPU that does not reach the memory of another.
    #[error(
        "gpu {from} does not reach the memory of gpu {to}, neither by nvlink nor by pcie; copy through host memory"
    )]
    NoWay {
        /// The GPU that would use the memory.
        from: String,
        /// The GPU that has it.
        to: String,
    },
    /// A range that is not in the memory.
    #[error("{len_bytes} bytes at offset {offset} are outside memory of {whole_bytes} bytes")]
    Range {
        /// Where it begins, bytes.
        offset: u64,
        /// Its length, bytes.
        len_bytes: u64,
        /// Length of the memory, bytes.
        whole_bytes: u64,
    },
    /// The driver refused or failed.
    #[error("{call}: {reason} ({code})")]
    Driver {
        /// The call.
        call: &'static str,
        /// Name of the result.
        reason: String,
        /// Number of the result (`CUresult`, cuda.h).
        code: u32,
    },
}
