//! The suite of gdrd-hal on real GPU memory, moved by simulated HCAs.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use gdrd_client::{Gpu, Mapping};
use gdrd_cuda::WorkerPool;
use gdrd_hal::conformance::{CASES, Fixture, run};
use gdrd_hal::{Gid, GidEntry, GidType, GpuMemory, GpuUuid, Hca, LinkLayer, PortState};
use gdrd_sim::{Provider, SimHca, SimHost, SimOptions, SimPort, SimSpec, Timing};
use rustix::fs::{MemfdFlags, SealFlags};

use crate::Check;
use crate::host::Host;

/// What the capabilities rule out.
const SKIPPED: &[&str] = &[
    "the_provider_sets_the_iova",
    "dma_bufs_are_refused_where_the_capability_says_so",
    "rc_is_refused_where_the_capability_says_so",
    "ud_is_refused_where_the_capability_says_so",
    "atomics_are_refused_where_the_capability_says_so",
];

/// Longest allocation of the suite, in units of 2 MiB.
const MAX_GRANULES: u64 = 8;

/// Idle time that no case sees the end of.
const IDLE_S: u64 = 600;

struct CudaFixture {
    pool: Arc<WorkerPool>,
    host: SimHost,
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
            run(case.name, &CudaFixture::new(host, pool)?, SKIPPED);
            Ok(())
        };
        (format!("conformance on cuda: {}", case.name), Box::new(check) as _)
    })
}

impl CudaFixture {
    fn new(host: &Host, pool: Arc<WorkerPool>) -> anyhow::Result<Self> {
        let hca = |index: u8| SimHca {
            name: format!("sim_{index}"),
            capabilities: Provider::Mlx5.capabilities(),
            ports: vec![SimPort {
                state: PortState::Active,
                link_layer: LinkLayer::Ethernet,
                rate_gbps: 100.0,
                lid: 0,
                mtu_bytes: 1024,
                gids: vec![GidEntry { gid_index: 0, gid: Gid([index + 1; 16]), gid_type: GidType::RoceV2 }],
            }],
        };
        let timing = Timing { retry_exceeded: Duration::from_millis(50), ..Timing::default() };
        let options = SimOptions { timing, gpu_copies: Some(pool.clone()), ..SimOptions::default() };
        let sim = SimHost::with_options(SimSpec { gpus: Vec::new(), hcas: vec![hca(0), hca(1)] }, options)?;
        let own = Arc::clone(&host.own);
        Ok(Self { pool, host: sim, gpu: host.uuid(), own })
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
        let hcas = self.host.hcas();
        [Arc::clone(&hcas[0]), Arc::clone(&hcas[1])]
    }

    fn host_memory(&self, len_bytes: u64) -> OwnedFd {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("host memory", flags).expect("a memfd can be made");
        rustix::fs::ftruncate(&fd, len_bytes).expect("a memfd can be long");
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).expect("it seals");
        fd
    }

    fn gpu(&self) -> Option<(Arc<dyn GpuMemory>, GpuUuid)> {
        Some((self.pool.clone(), self.gpu.clone()))
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
