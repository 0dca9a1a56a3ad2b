//! The suite of gdrd-hal on soft RoCE of a real kernel.
#![forbid(unsafe_code)]

use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock};

use gdrd_hal::conformance::Fixture;
use gdrd_hal::{GpuMemory, GpuUuid, Hca, WorkStatus};

/// One device that talks to itself.
struct Rxe;

impl Fixture for Rxe {
    fn hcas(&self) -> [Arc<dyn Hca>; 2] {
        static HCA: OnceLock<Arc<dyn Hca>> = OnceLock::new();
        let hca = HCA.get_or_init(gdrd_vm::open_hca);
        [Arc::clone(hca), Arc::clone(hca)]
    }

    fn host_memory(&self, len_bytes: u64) -> OwnedFd {
        gdrd_vm::host_memory(len_bytes)
    }

    fn gives_instead_of(&self, specified: WorkStatus) -> &'static [WorkStatus] {
        // drivers/infiniband/sw/rxe of 6.12. rxe_req.c sets LOC_PROT_ERR on the request and moves the queue pair to
        // ERR, whose flush then writes over it; rxe_resp.c takes what it cannot write into a receive for a malformed
        // receive, and says so to the peer.
        match specified {
            WorkStatus::LocalProtection => &[WorkStatus::Flushed, WorkStatus::LocalQueuePairOperation],
            WorkStatus::LocalLength => &[WorkStatus::LocalQueuePairOperation],
            WorkStatus::RemoteInvalidRequest => &[WorkStatus::RemoteOperation],
            _ => &[],
        }
    }

    fn gpu(&self) -> Option<(Arc<dyn GpuMemory>, GpuUuid)> {
        None
    }
}

gdrd_hal::conformance_suite! {
    Rxe,
    skipped: &[
        "the_provider_sets_the_iova",
        "host_memory_is_no_dma_buf",
        "dma_bufs_are_refused_where_the_capability_says_so",
        "rc_is_refused_where_the_capability_says_so",
        "ud_is_refused_where_the_capability_says_so",
        "atomics_are_refused_where_the_capability_says_so",
        "shared_receives_are_refused_where_the_capability_says_so",
        "gpu_memory_is_written_and_read_as_dma_buf",
        "a_region_keeps_gpu_memory_reachable_after_its_allocation",
        "lengths_off_the_granularity_are_refused",
        "unknown_gpus_are_refused",
        "memory_goes_on_from_its_kept_descriptors",
        "memory_is_zero_at_birth",
        "memory_can_be_used_by_its_fd",
        "allocations_do_not_overlap",
        "a_scrub_zeroes_every_byte_for_all_holders",
        "memory_lives_while_an_fd_is_held",
        "usage_counts_allocations",
        "out_of_memory_tells_the_numbers",
        "a_dma_buf_comes_where_the_capability_says_so",
    ]
}
