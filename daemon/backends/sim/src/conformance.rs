//! What the suites of backends of GPU memory share: two simulated HCAs that move it.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use gdrd_hal::{GpuCopies, GpuMemory, Hca};
use gdrd_shm::Segment;

use crate::{SimHost, Timing};

/// A backend of GPU memory with two HCAs over it, for [`gdrd_hal::conformance::Fixture`].
#[derive(Debug)]
pub struct OverGpuMemory<P> {
    /// The backend.
    pub backend: Arc<P>,
    host: SimHost,
}

impl<P: GpuMemory + GpuCopies + 'static> OverGpuMemory<P> {
    /// Cases that the capabilities of these HCAs rule out.
    pub const SKIPPED: &'static [&'static str] = &[
        "the_provider_sets_the_iova",
        "dma_bufs_are_refused_where_the_capability_says_so",
        "rc_is_refused_where_the_capability_says_so",
        "ud_is_refused_where_the_capability_says_so",
        "atomics_are_refused_where_the_capability_says_so",
        "a_shared_receive_serves_whichever_queue_pair_a_message_comes_for",
        "a_message_waits_for_a_shared_receive",
        "a_shared_receive_queue_fills_up_and_polling_makes_room",
        "a_shared_receive_queue_that_runs_low_says_so_once",
        "a_queue_pair_that_ends_leaves_shared_receives_to_the_others",
        "queue_pairs_keep_their_shared_receive_queue",
        "shared_receive_queues_out_of_bounds_are_refused",
    ];

    /// HCAs whose requests without an answer fail after `retry_exceeded`.
    ///
    /// # Panics
    /// Never: the description of the host is sound.
    #[must_use]
    pub fn new(backend: Arc<P>, retry_exceeded: Duration) -> Self {
        let copies = Arc::clone(&backend) as Arc<dyn GpuCopies>;
        let timing = Timing { retry_exceeded, ..Timing::default() };
        let host = SimHost::over_gpu_memory(copies, 2, timing).expect("the description of the host is sound");
        Self { backend, host }
    }

    /// Both HCAs.
    #[must_use]
    pub fn hcas(&self) -> [Arc<dyn Hca>; 2] {
        let hcas = self.host.hcas();
        [Arc::clone(&hcas[0]), Arc::clone(&hcas[1])]
    }

    /// Zeroed host memory.
    ///
    /// # Panics
    /// When the process has no memory or descriptor left.
    #[must_use]
    pub fn host_memory(len_bytes: u64) -> OwnedFd {
        let segment = Segment::create("host memory", len_bytes).expect("a segment can be made");
        segment.try_clone_fd().expect("the test process has a descriptor left")
    }
}
