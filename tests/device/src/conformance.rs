//! The suite of gdrd-hal on real GPU memory, moved by simulated HCAs.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use gdrd_client::{Gpu, Mapping};
use gdrd_cuda::WorkerPool;
use gdrd_hal::conformance::{CASES, Fixture, run};
use gdrd_hal::{GpuMemory, GpuUuid, Hca};
use gdrd_sim::conformance::OverGpuMemory;

use crate::Check;
use crate::host::Host;

/// Longest allocation of the suite, in units of 2 MiB.
const MAX_GRANULES: u64 = 8;

/// Idle time that no case sees the end of.
const IDLE_S: u64 = 600;

/// After which a request without an answer fails: copies go through a worker process.
const RETRY_EXCEEDED: Duration = Duration::from_millis(50);

struct CudaFixture {
    over: OverGpuMemory<WorkerPool>,
    gpu: GpuUuid,
    own: Arc<Gpu>,
}

pub(crate) fn checks() -> impl Iterator<Item = Check> {
    let pool = Arc::new(Mutex::new(None));
    CASES.iter().map(move |case| {
        let pool = Arc::clone(&pool);
        let check = move |host: &Host| {
            let mut pool = pool.lock().unwrap_or_else(PoisonError::into_inner);
            let pool = Arc::clone(pool.get_or_insert_with(|| Arc::new(host.pool(IDLE_S))));
            run(case.name, &CudaFixture::new(host, pool), OverGpuMemory::<WorkerPool>::SKIPPED);
            Ok(())
        };
        (format!("conformance on cuda: {}", case.name), Box::new(check) as _)
    })
}

impl CudaFixture {
    fn new(host: &Host, pool: Arc<WorkerPool>) -> Self {
        Self { over: OverGpuMemory::new(pool, RETRY_EXCEEDED), gpu: host.uuid(), own: Arc::clone(&host.own) }
    }

    /// Does something with memory as a client would: import, map, and unmap again. Its length is told by no fd, so the
    /// longest that the driver maps is taken.
    fn with<T>(&self, memory: BorrowedFd<'_>, mut with: impl FnMut(&Mapping) -> T) -> Option<T> {
        for len_bytes in (1..=MAX_GRANULES).rev().map(|granules| granules << 21) {
            if let Ok(mapping) = Mapping::import(&self.own, memory, len_bytes) {
                return Some(with(&mapping));
            }
        }
        None
    }
}

impl Fixture for CudaFixture {
    fn hcas(&self) -> [Arc<dyn Hca>; 2] {
        self.over.hcas()
    }

    fn host_memory(&self, len_bytes: u64) -> OwnedFd {
        OverGpuMemory::<WorkerPool>::host_memory(len_bytes)
    }

    fn gpu(&self) -> Option<(Arc<dyn GpuMemory>, GpuUuid)> {
        Some((self.over.backend.clone(), self.gpu.clone()))
    }

    fn read(&self, memory: BorrowedFd<'_>, offset: u64, to: &mut [u8]) {
        if is_memfd(memory) {
            let got = rustix::io::pread(memory, &mut *to, offset).expect("a memfd can be read");
            assert_eq!(got, to.len());
            return;
        }
        let read = self.with(memory, |mapping| mapping.read_into(offset, to)).expect("the memory can be imported");
        read.expect("imported memory can be read");
    }

    fn write(&self, memory: BorrowedFd<'_>, offset: u64, from: &[u8]) {
        if is_memfd(memory) {
            let put = rustix::io::pwrite(memory, from, offset).expect("a memfd can be written");
            assert_eq!(put, from.len());
            return;
        }
        let written = self.with(memory, |mapping| mapping.write_from(offset, from)).expect("it can be imported");
        written.expect("imported memory can be written");
    }
}

fn is_memfd(fd: BorrowedFd<'_>) -> bool {
    let link = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd())).unwrap_or_default();
    link.to_string_lossy().starts_with("/memfd:")
}
