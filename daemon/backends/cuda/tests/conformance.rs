//! The pool of workers passes the suite of gdrd-hal with a fake device, and the simulated HCA with it as GPU memory.
//! On a GPU the same suite runs in `make device-test`.
#![forbid(unsafe_code)]

mod support;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use gdrd_cuda::WorkerPool;
use gdrd_hal::conformance::Fixture;
use gdrd_hal::{Gid, GidEntry, GidType, GpuMemory, GpuUuid, Hca, LinkLayer, PortState};
use gdrd_sim::{Provider, SimHca, SimHost, SimOptions, SimPort, SimSpec, Timing};
use rustix::fs::{MemfdFlags, SealFlags};

struct FakeFixture {
    pool: Arc<WorkerPool>,
    host: SimHost,
}

fn fixture() -> FakeFixture {
    let (pool, _) = support::pool(1, Duration::from_secs(3600));
    let pool = Arc::new(pool);
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
    let timing = Timing { retry_exceeded: Duration::from_millis(5), ..Timing::default() };
    let options = SimOptions { timing, gpu_copies: Some(pool.clone()), ..SimOptions::default() };
    let spec = SimSpec { gpus: Vec::new(), hcas: vec![hca(0), hca(1)] };
    FakeFixture { pool, host: SimHost::with_options(spec, options).expect("the description is sound") }
}

impl Fixture for FakeFixture {
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
        Some((self.pool.clone(), support::uuid(0)))
    }
}

gdrd_hal::conformance_suite! {
    fixture(),
    skipped: &[
        "the_provider_sets_the_iova",
        "dma_bufs_are_refused_where_the_capability_says_so",
        "rc_is_refused_where_the_capability_says_so",
        "ud_is_refused_where_the_capability_says_so",
        "atomics_are_refused_where_the_capability_says_so",
    ]
}
