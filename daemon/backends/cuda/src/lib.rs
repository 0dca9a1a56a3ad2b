//! GPU memory of CUDA devices.
//!
//! Role: implements [`gdrd_hal::GpuMemory`] with CUDA's virtual memory management. libcuda keeps the device files open
//! until its process ends, a context costs about 0.5 GiB of GPU memory, and one sticky error spoils a process for good;
//! so the calls are made in a **worker process per GPU** ([`worker`]), started on first use and ended when idle,
//! drained or failed. The daemon's side ([`WorkerPool`]) speaks to it over a socket and holds the fds, which keep the
//! memory whatever becomes of the worker.
//!
//! Owner of state: the pool owns the sockets and the processes, an allocation its fds, the worker its handles and
//! mappings.
//!
//! Must not know: tenants, leases, pools of buffers, NICs. Unsafe code is in `driver` and `staging` alone.

mod allocation;
mod device;
#[allow(unsafe_code)]
mod driver;
mod launch;
mod loss;
mod pool;
mod protocol;
#[allow(unsafe_code)]
mod staging;
pub mod worker;

pub use device::{Device, DeviceError, DeviceErrorKind, DeviceFacts, DeviceMemory, Exported, Place};
pub use driver::CudaDevice;
pub use launch::{Launch, Listener, ProcessLauncher, Scope, WorkerExit, WorkerHandle};
pub use pool::{GRANULARITY_BYTES, PoolConfig, ServedGpu, WorkerPool};
pub use staging::Staging;
