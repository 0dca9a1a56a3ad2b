//! The simulated host passes the suite of gdrd-hal, once for each kind of provider it can be.
#![forbid(unsafe_code)]

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use gdrd_hal::conformance::Fixture;
use gdrd_hal::{GidEntry, GidType, GpuMemory, GpuUuid, Hca, HcaCapabilities, LinkLayer, PortState, QueuePairType};
use gdrd_shm::Segment;
use gdrd_sim::{Provider, SimGpu, SimHca, SimHost, SimOptions, SimPort, SimSpec, Timing};
use gdrd_topology::model::GpuDetail;

struct SimFixture {
    host: SimHost,
    gpu: GpuUuid,
    has_gpu: bool,
    is_alone: bool,
}

/// Two HCAs of a provider on one link layer, and a GPU.
fn fixture(capabilities: &HcaCapabilities, link_layer: LinkLayer) -> SimFixture {
    let gpu = GpuUuid("GPU-11111111-2222-3333-4444-555555555555".to_owned());
    let port = |lid: u8| SimPort {
        state: PortState::Active,
        link_layer,
        rate_gbps: 100.0,
        lid: if link_layer == LinkLayer::InfiniBand { u16::from(lid) } else { 0 },
        mtu_bytes: 1024,
        gids: vec![GidEntry {
            gid_index: 3,
            gid: gdrd_hal::Gid([0xfe, 0x80, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, lid]),
            gid_type: if link_layer == LinkLayer::InfiniBand { GidType::Ib } else { GidType::RoceV2 },
        }],
    };
    let hca =
        |name: &str, lid| SimHca { name: name.to_owned(), capabilities: capabilities.clone(), ports: vec![port(lid)] };
    let spec = SimSpec {
        gpus: vec![SimGpu {
            name: "GPU0".to_owned(),
            uuid: gpu.clone(),
            bdf: "0000:01:00.0".parse().expect("it is an address"),
            detail: GpuDetail::default(),
            device_node: None,
            memory_bytes: 256 << 20,
        }],
        hcas: vec![hca("sim_0", 1), hca("sim_1", 2)],
    };
    // Short, so that the suite does not wait for peers that are gone; what is asserted does not depend on it.
    let timing = Timing { retry_exceeded: Duration::from_millis(5), ..Timing::default() };
    let options = SimOptions { timing, ..SimOptions::default() };
    let host = SimHost::with_options(spec, options).expect("the description is sound");
    SimFixture { host, gpu, has_gpu: true, is_alone: false }
}

impl Fixture for SimFixture {
    fn hcas(&self) -> [Arc<dyn Hca>; 2] {
        let hcas = self.host.hcas();
        let second = if self.is_alone { 0 } else { 1 };
        [Arc::clone(&hcas[0]), Arc::clone(&hcas[second])]
    }

    fn host_memory(&self, len_bytes: u64) -> OwnedFd {
        let segment = Segment::create("host memory", len_bytes).expect("a segment can be made");
        segment.try_clone_fd().expect("the test process has a descriptor left")
    }

    fn gpu(&self) -> Option<(Arc<dyn GpuMemory>, GpuUuid)> {
        self.has_gpu.then(|| (self.host.gpu_memory(), self.gpu.clone()))
    }
}

mod connectx_on_infiniband {
    use super::*;

    gdrd_hal::conformance_suite! {
        fixture(&Provider::Mlx5.capabilities(), LinkLayer::InfiniBand),
        skipped: &[
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
        ]
    }
}

mod connectx_talking_to_itself {
    use super::*;

    gdrd_hal::conformance_suite! {
        SimFixture { is_alone: true, ..fixture(&Provider::Mlx5.capabilities(), LinkLayer::Ethernet) },
        skipped: &[
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
        ]
    }
}

mod soft_roce {
    use super::*;

    gdrd_hal::conformance_suite! {
        fixture(&Provider::Rxe.capabilities(), LinkLayer::Ethernet),
        skipped: &[
            "the_provider_sets_the_iova",
            "host_memory_is_no_dma_buf",
            "rc_is_refused_where_the_capability_says_so",
            "ud_is_refused_where_the_capability_says_so",
            "atomics_are_refused_where_the_capability_says_so",
            "gpu_memory_is_written_and_read_as_dma_buf",
            "a_region_keeps_gpu_memory_reachable_after_its_allocation",
            "a_shared_receive_serves_whichever_queue_pair_a_message_comes_for",
            "a_message_waits_for_a_shared_receive",
            "a_shared_receive_queue_fills_up_and_polling_makes_room",
            "a_shared_receive_queue_that_runs_low_says_so_once",
            "a_queue_pair_that_ends_leaves_shared_receives_to_the_others",
            "queue_pairs_keep_their_shared_receive_queue",
            "shared_receive_queues_out_of_bounds_are_refused",
        ]
    }
}

/// A provider with queue pairs of one type alone.
fn only(qp_type: QueuePairType, provider: Provider) -> HcaCapabilities {
    HcaCapabilities { queue_pair_types: vec![qp_type], no_queue_pairs: None, ..provider.capabilities() }
}

mod rc_with_iovas_of_its_own_without_gpu {
    use super::*;

    gdrd_hal::conformance_suite! {
        SimFixture { has_gpu: false, ..fixture(&only(QueuePairType::Rc, Provider::Siw), LinkLayer::Ethernet) },
        skipped: &[
            "the_iova_asked_for_holds",
            "pieces_of_one_memory_are_registered_at_once_and_each_opens_its_own_bytes",
            "an_iova_that_wraps_is_refused",
            "an_iova_at_another_place_in_its_page_is_refused",
            "host_memory_is_no_dma_buf",
            "dma_bufs_are_refused_where_the_capability_says_so",
            "rc_is_refused_where_the_capability_says_so",
            "fetch_add_returns_the_old_value_and_adds",
            "compare_swap_stores_only_on_equality",
            "gpu_memory_is_written_and_read_as_dma_buf",
            "a_region_keeps_gpu_memory_reachable_after_its_allocation",
            "a_remote_atomic_needs_its_right",
            "a_misaligned_atomic_is_an_invalid_request",
            "a_datagram_lands_behind_room_for_the_route_header",
            "a_datagram_without_a_receive_is_dropped",
            "a_datagram_longer_than_the_mtu_is_not_delivered",
            "datagram_queue_pairs_take_sends_only",
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
            "a_shared_receive_serves_whichever_queue_pair_a_message_comes_for",
            "a_message_waits_for_a_shared_receive",
            "a_shared_receive_queue_fills_up_and_polling_makes_room",
            "a_shared_receive_queue_that_runs_low_says_so_once",
            "a_queue_pair_that_ends_leaves_shared_receives_to_the_others",
            "queue_pairs_keep_their_shared_receive_queue",
            "shared_receive_queues_out_of_bounds_are_refused",
        ]
    }
}

mod datagrams_only {
    use super::*;

    gdrd_hal::conformance_suite! {
        fixture(&only(QueuePairType::Ud, Provider::Efa), LinkLayer::Ethernet),
        skipped: &[
            "the_fd_may_be_closed_after_registration",
            "a_range_in_the_middle_of_a_client_s_memory_is_reached_and_no_byte_beside_it",
            "what_its_owner_writes_after_registration_is_what_a_peer_reads",
            "regions_of_one_range_keep_their_own_rights",
            "the_end_of_a_region_is_not_that_of_another_over_the_same_bytes",
            "the_iova_asked_for_holds",
            "pieces_of_one_memory_are_registered_at_once_and_each_opens_its_own_bytes",
            "the_provider_sets_the_iova",
            "dma_bufs_are_refused_where_the_capability_says_so",
            "a_fresh_queue_pair_is_in_reset_and_takes_nothing",
            "init_takes_receives_and_no_sends",
            "states_are_not_skipped_or_repeated",
            "an_endpoint_is_there_from_init_on",
            "connecting_across_link_layers_is_refused",
            "connecting_with_an_unknown_mtu_is_refused",
            "an_address_that_nobody_has_leaves_the_queue_pair_as_it_was",
            "to_error_flushes_receives_in_order",
            "to_error_flushes_waiting_sends_in_order",
            "posts_in_error_are_flushed",
            "queue_pairs_out_of_bounds_are_refused",
            "a_queue_pair_needs_a_completion_queue_that_is_there",
            "ud_is_refused_where_the_capability_says_so",
            "a_write_lands_where_it_says_and_nowhere_else",
            "writes_of_all_sizes_and_offsets_land",
            "a_large_write_lands_whole",
            "an_inline_write_needs_no_lkey",
            "a_read_fetches",
            "a_send_lands_in_the_first_receive",
            "messages_arrive_in_the_order_of_posting",
            "immediate_data_arrives_with_a_send",
            "a_write_with_immediate_consumes_a_receive",
            "a_write_is_visible_before_a_later_message_arrives",
            "a_flush_completes_after_earlier_writes",
            "empty_messages_arrive",
            "a_message_waits_for_a_receive",
            "fetch_add_returns_the_old_value_and_adds",
            "compare_swap_stores_only_on_equality",
            "atomics_are_refused_where_the_capability_says_so",
            "both_ends_send_at_once",
            "a_queue_pair_can_be_its_own_peer",
            "gpu_memory_is_written_and_read_as_dma_buf",
            "a_region_keeps_gpu_memory_reachable_after_its_allocation",
            "a_wrong_rkey_is_a_remote_access_error",
            "a_wrong_lkey_is_a_local_protection_error",
            "an_lkey_of_another_domain_is_refused",
            "an_rkey_of_another_domain_is_refused",
            "remote_ranges_past_either_end_are_refused",
            "remote_ranges_that_wrap_are_refused",
            "local_ranges_past_the_end_or_wrapping_are_refused",
            "each_operation_needs_its_remote_right",
            "a_remote_atomic_needs_its_right",
            "results_need_local_write",
            "a_receive_needs_local_write",
            "a_misaligned_atomic_is_an_invalid_request",
            "nothing_reaches_memory_after_deregistration",
            "a_too_short_receive_fails_at_both_ends",
            "an_error_flushes_what_was_posted_behind_it",
            "an_unsignaled_failure_is_reported",
            "a_peer_that_is_gone_is_a_retry_error",
            "a_peer_that_is_not_connected_back_is_a_retry_error",
            "an_unsignaled_success_is_silent",
            "sends_fill_up_and_polling_makes_room",
            "unsignaled_sends_alone_fill_the_queue",
            "receives_fill_up_and_polling_makes_room",
            "a_batch_stops_at_the_first_refused_request",
            "opcodes_of_completions_cannot_be_posted",
            "more_inline_bytes_than_asked_for_are_refused",
            "an_overrun_completion_queue_is_dead",
            "an_event_comes_for_a_completion_after_arming",
            "a_queue_pair_can_be_destroyed_with_work_posted",
            "children_outlive_their_parents",
            "queue_pairs_share_a_completion_queue",
            "a_shared_receive_serves_whichever_queue_pair_a_message_comes_for",
            "a_message_waits_for_a_shared_receive",
            "a_shared_receive_queue_fills_up_and_polling_makes_room",
            "a_shared_receive_queue_that_runs_low_says_so_once",
            "a_queue_pair_that_ends_leaves_shared_receives_to_the_others",
            "queue_pairs_keep_their_shared_receive_queue",
            "shared_receive_queues_out_of_bounds_are_refused",
        ]
    }
}

mod efa {
    use super::*;

    gdrd_hal::conformance_suite! {
        fixture(&Provider::Efa.capabilities(), LinkLayer::Ethernet),
        skipped: &[
            "the_fd_may_be_closed_after_registration",
            "a_range_in_the_middle_of_a_client_s_memory_is_reached_and_no_byte_beside_it",
            "what_its_owner_writes_after_registration_is_what_a_peer_reads",
            "regions_of_one_range_keep_their_own_rights",
            "the_end_of_a_region_is_not_that_of_another_over_the_same_bytes",
            "the_iova_asked_for_holds",
            "pieces_of_one_memory_are_registered_at_once_and_each_opens_its_own_bytes",
            "the_provider_sets_the_iova",
            "dma_bufs_are_refused_where_the_capability_says_so",
            "a_fresh_queue_pair_is_in_reset_and_takes_nothing",
            "init_takes_receives_and_no_sends",
            "states_are_not_skipped_or_repeated",
            "an_endpoint_is_there_from_init_on",
            "connecting_across_link_layers_is_refused",
            "connecting_with_an_unknown_mtu_is_refused",
            "an_address_that_nobody_has_leaves_the_queue_pair_as_it_was",
            "to_error_flushes_receives_in_order",
            "to_error_flushes_waiting_sends_in_order",
            "posts_in_error_are_flushed",
            "queue_pairs_out_of_bounds_are_refused",
            "a_queue_pair_needs_a_completion_queue_that_is_there",
            "a_write_lands_where_it_says_and_nowhere_else",
            "writes_of_all_sizes_and_offsets_land",
            "a_large_write_lands_whole",
            "an_inline_write_needs_no_lkey",
            "a_read_fetches",
            "a_send_lands_in_the_first_receive",
            "messages_arrive_in_the_order_of_posting",
            "immediate_data_arrives_with_a_send",
            "a_write_with_immediate_consumes_a_receive",
            "a_write_is_visible_before_a_later_message_arrives",
            "a_flush_completes_after_earlier_writes",
            "empty_messages_arrive",
            "a_message_waits_for_a_receive",
            "fetch_add_returns_the_old_value_and_adds",
            "compare_swap_stores_only_on_equality",
            "atomics_are_refused_where_the_capability_says_so",
            "both_ends_send_at_once",
            "a_queue_pair_can_be_its_own_peer",
            "gpu_memory_is_written_and_read_as_dma_buf",
            "a_region_keeps_gpu_memory_reachable_after_its_allocation",
            "a_wrong_rkey_is_a_remote_access_error",
            "a_wrong_lkey_is_a_local_protection_error",
            "an_lkey_of_another_domain_is_refused",
            "an_rkey_of_another_domain_is_refused",
            "remote_ranges_past_either_end_are_refused",
            "remote_ranges_that_wrap_are_refused",
            "local_ranges_past_the_end_or_wrapping_are_refused",
            "each_operation_needs_its_remote_right",
            "a_remote_atomic_needs_its_right",
            "results_need_local_write",
            "a_receive_needs_local_write",
            "a_misaligned_atomic_is_an_invalid_request",
            "nothing_reaches_memory_after_deregistration",
            "a_too_short_receive_fails_at_both_ends",
            "an_error_flushes_what_was_posted_behind_it",
            "an_unsignaled_failure_is_reported",
            "a_peer_that_is_gone_is_a_retry_error",
            "a_peer_that_is_not_connected_back_is_a_retry_error",
            "an_unsignaled_success_is_silent",
            "sends_fill_up_and_polling_makes_room",
            "unsignaled_sends_alone_fill_the_queue",
            "receives_fill_up_and_polling_makes_room",
            "a_batch_stops_at_the_first_refused_request",
            "opcodes_of_completions_cannot_be_posted",
            "more_inline_bytes_than_asked_for_are_refused",
            "an_overrun_completion_queue_is_dead",
            "an_event_comes_for_a_completion_after_arming",
            "a_queue_pair_can_be_destroyed_with_work_posted",
            "children_outlive_their_parents",
            "queue_pairs_share_a_completion_queue",
            "a_datagram_lands_behind_room_for_the_route_header",
            "a_datagram_without_a_receive_is_dropped",
            "a_datagram_longer_than_the_mtu_is_not_delivered",
            "datagram_queue_pairs_take_sends_only",
            "a_shared_receive_serves_whichever_queue_pair_a_message_comes_for",
            "a_message_waits_for_a_shared_receive",
            "a_shared_receive_queue_fills_up_and_polling_makes_room",
            "a_shared_receive_queue_that_runs_low_says_so_once",
            "a_queue_pair_that_ends_leaves_shared_receives_to_the_others",
            "queue_pairs_keep_their_shared_receive_queue",
            "shared_receive_queues_out_of_bounds_are_refused",
        ]
    }
}

mod an_unknown_provider {
    use super::*;

    gdrd_hal::conformance_suite! {
        fixture(&Provider::Other.capabilities(), LinkLayer::Ethernet),
        skipped: &[
            "the_provider_sets_the_iova",
            "host_memory_is_no_dma_buf",
            "rc_is_refused_where_the_capability_says_so",
            "ud_is_refused_where_the_capability_says_so",
            "fetch_add_returns_the_old_value_and_adds",
            "compare_swap_stores_only_on_equality",
            "gpu_memory_is_written_and_read_as_dma_buf",
            "a_region_keeps_gpu_memory_reachable_after_its_allocation",
            "a_remote_atomic_needs_its_right",
            "a_misaligned_atomic_is_an_invalid_request",
            "a_shared_receive_serves_whichever_queue_pair_a_message_comes_for",
            "a_message_waits_for_a_shared_receive",
            "a_shared_receive_queue_fills_up_and_polling_makes_room",
            "a_shared_receive_queue_that_runs_low_says_so_once",
            "a_queue_pair_that_ends_leaves_shared_receives_to_the_others",
            "queue_pairs_keep_their_shared_receive_queue",
            "shared_receive_queues_out_of_bounds_are_refused",
        ]
    }
}
