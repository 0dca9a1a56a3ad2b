//! The pool of workers passes the suite of gdrd-hal with a fake device, and the simulated HCA with it as GPU memory.
//! On a GPU the same suite runs in `make device-test`.
#![forbid(unsafe_code)]

mod support;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use gdrd_cuda::WorkerPool;
use gdrd_hal::conformance::Fixture;
use gdrd_hal::{GpuMemory, GpuUuid, Hca};
use gdrd_sim::conformance::OverGpuMemory;

struct FakeFixture(OverGpuMemory<WorkerPool>);

fn fixture() -> FakeFixture {
    let (pool, _) = support::pool(1, Duration::from_secs(3600));
    FakeFixture(OverGpuMemory::new(Arc::new(pool), Duration::from_millis(5)))
}

impl Fixture for FakeFixture {
    fn hcas(&self) -> [Arc<dyn Hca>; 2] {
        self.0.hcas()
    }

    fn host_memory(&self, len_bytes: u64) -> OwnedFd {
        OverGpuMemory::<WorkerPool>::host_memory(len_bytes)
    }

    fn gpu(&self) -> Option<(Arc<dyn GpuMemory>, GpuUuid)> {
        Some((self.0.backend.clone(), support::uuid(0)))
    }
}

gdrd_hal::conformance_suite! {
    fixture(),
    skipped: OverGpuMemory::<WorkerPool>::SKIPPED
}
