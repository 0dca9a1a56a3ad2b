//! All cases with their needs, and the macro that makes one test of each.

use super::{Case, Need, adopted, datagram, errors, gpu, queues, registration, shared_receive, states, transfer};

macro_rules! suite {
    (($dollar:tt) $($module:ident { $($name:ident [$($need:ident)*])* })*) => {
        /// All cases.
        pub const CASES: &[Case] = &[
            $($(Case { name: stringify!($name), needs: &[$(Need::$need),*], run: $module::$name },)*)*
        ];

        /// Makes a `#[test]` of every case of [`crate::conformance`], for the fixture that the first expression makes;
        /// the second is the list of the cases that its capabilities rule out, or where these are most of them, `only`
        /// and the list of the others.
        #[macro_export]
        macro_rules! conformance_suite {
            ($dollar fixture:expr, skipped: $dollar skipped:expr) => {
                $($(
                    #[test]
                    fn $name() {
                        $dollar crate::conformance::run(stringify!($name), &$dollar fixture, $dollar skipped);
                    }
                )*)*

                #[test]
                fn the_list_of_skipped_cases_names_cases_once() {
                    $dollar crate::conformance::check_listed($dollar skipped);
                }
            };
            ($dollar fixture:expr, only: $dollar only:expr) => {
                $($(
                    #[test]
                    fn $name() {
                        $dollar crate::conformance::run_only(stringify!($name), &$dollar fixture, $dollar only);
                    }
                )*)*

                #[test]
                fn the_list_of_cases_names_cases_once() {
                    $dollar crate::conformance::check_listed($dollar only);
                }
            };
        }
    };
}

suite! {
    ($)
    registration {
        a_region_tells_what_it_was_made_with []
        registering_nothing_or_past_the_end_is_refused []
        remote_write_or_atomic_without_local_write_is_refused []
        host_memory_must_be_a_sealed_memfd []
        keys_are_never_those_of_the_region_before []
        keys_differ_between_live_regions []
        the_fd_may_be_closed_after_registration [Rc]
        the_iova_asked_for_holds [Iova Rc]
        an_iova_that_wraps_is_refused [Iova]
        an_iova_at_another_place_in_its_page_is_refused [Iova]
        pieces_of_one_memory_are_registered_at_once_and_each_opens_its_own_bytes [Iova Rc]
        the_provider_sets_the_iova [NoIova Rc]
        host_memory_is_no_dma_buf [DmaBuf]
        dma_bufs_are_refused_where_the_capability_says_so [NoDmaBuf]
    }
    adopted {
        a_range_in_the_middle_of_a_client_s_memory_is_reached_and_no_byte_beside_it [Rc]
        what_its_owner_writes_after_registration_is_what_a_peer_reads [Rc]
        regions_of_one_range_keep_their_own_rights [Rc]
        the_end_of_a_region_is_not_that_of_another_over_the_same_bytes [Rc]
    }
    states {
        a_fresh_queue_pair_is_in_reset_and_takes_nothing [Rc]
        init_takes_receives_and_no_sends [Rc]
        states_are_not_skipped_or_repeated [Rc]
        an_endpoint_is_there_from_init_on [Rc]
        connecting_across_link_layers_is_refused [Rc]
        connecting_with_an_unknown_mtu_is_refused [Rc]
        an_address_that_nobody_has_leaves_the_queue_pair_as_it_was [Rc]
        to_error_flushes_receives_in_order [Rc]
        to_error_flushes_waiting_sends_in_order [Rc]
        posts_in_error_are_flushed [Rc]
        queue_pairs_out_of_bounds_are_refused [Rc]
        a_queue_pair_needs_a_completion_queue_that_is_there [Rc]
        rc_is_refused_where_the_capability_says_so [NoRc]
        ud_is_refused_where_the_capability_says_so [NoUd]
    }
    transfer {
        a_write_lands_where_it_says_and_nowhere_else [Rc]
        writes_of_all_sizes_and_offsets_land [Rc]
        a_large_write_lands_whole [Rc]
        an_inline_write_needs_no_lkey [Rc]
        a_read_fetches [Rc]
        a_send_lands_in_the_first_receive [Rc]
        messages_arrive_in_the_order_of_posting [Rc]
        immediate_data_arrives_with_a_send [Rc]
        a_write_with_immediate_consumes_a_receive [Rc]
        a_write_is_visible_before_a_later_message_arrives [Rc]
        a_flush_completes_after_earlier_writes [Rc]
        empty_messages_arrive [Rc]
        a_message_waits_for_a_receive [Rc]
        fetch_add_returns_the_old_value_and_adds [Rc Atomics]
        compare_swap_stores_only_on_equality [Rc Atomics]
        atomics_are_refused_where_the_capability_says_so [Rc NoAtomics]
        both_ends_send_at_once [Rc]
        a_queue_pair_can_be_its_own_peer [Rc]
        gpu_memory_is_written_and_read_as_dma_buf [Rc DmaBuf]
        a_region_keeps_gpu_memory_reachable_after_its_allocation [Rc DmaBuf]
    }
    errors {
        a_wrong_rkey_is_a_remote_access_error [Rc]
        a_wrong_lkey_is_a_local_protection_error [Rc]
        an_lkey_of_another_domain_is_refused [Rc]
        an_rkey_of_another_domain_is_refused [Rc]
        remote_ranges_past_either_end_are_refused [Rc]
        remote_ranges_that_wrap_are_refused [Rc]
        local_ranges_past_the_end_or_wrapping_are_refused [Rc]
        each_operation_needs_its_remote_right [Rc]
        a_remote_atomic_needs_its_right [Rc Atomics]
        results_need_local_write [Rc]
        a_receive_needs_local_write [Rc]
        a_misaligned_atomic_is_an_invalid_request [Rc Atomics]
        nothing_reaches_memory_after_deregistration [Rc]
        a_too_short_receive_fails_at_both_ends [Rc]
        an_error_flushes_what_was_posted_behind_it [Rc]
        an_unsignaled_failure_is_reported [Rc]
        a_peer_that_is_gone_is_a_retry_error [Rc]
        a_peer_that_is_not_connected_back_is_a_retry_error [Rc]
    }
    queues {
        completion_queues_out_of_bounds_are_refused []
        an_unsignaled_success_is_silent [Rc]
        sends_fill_up_and_polling_makes_room [Rc]
        unsignaled_sends_alone_fill_the_queue [Rc]
        receives_fill_up_and_polling_makes_room [Rc]
        a_batch_stops_at_the_first_refused_request [Rc]
        opcodes_of_completions_cannot_be_posted [Rc]
        more_inline_bytes_than_asked_for_are_refused [Rc]
        an_overrun_completion_queue_is_dead [Rc]
        an_event_comes_for_a_completion_after_arming [Rc EventFd]
        a_queue_pair_can_be_destroyed_with_work_posted [Rc]
        children_outlive_their_parents [Rc]
        queue_pairs_share_a_completion_queue [Rc]
    }
    shared_receive {
        a_shared_receive_serves_whichever_queue_pair_a_message_comes_for [Rc SharedReceives]
        a_message_waits_for_a_shared_receive [Rc SharedReceives]
        a_shared_receive_queue_fills_up_and_polling_makes_room [Rc SharedReceives]
        a_shared_receive_queue_that_runs_low_says_so_once [Rc SharedReceives]
        a_queue_pair_that_ends_leaves_shared_receives_to_the_others [Rc SharedReceives]
        queue_pairs_keep_their_shared_receive_queue [Rc SharedReceives]
        shared_receive_queues_out_of_bounds_are_refused [Rc SharedReceives]
        shared_receives_are_refused_where_the_capability_says_so [NoSharedReceives]
    }
    datagram {
        a_datagram_lands_behind_room_for_the_route_header [Ud]
        a_datagram_without_a_receive_is_dropped [Ud]
        a_datagram_longer_than_the_mtu_is_not_delivered [Ud]
        datagram_queue_pairs_take_sends_only [Ud]
    }
    gpu {
        lengths_off_the_granularity_are_refused [Gpu]
        unknown_gpus_are_refused [Gpu]
        memory_goes_on_from_its_kept_descriptors [Gpu]
        memory_is_zero_at_birth [Gpu]
        memory_can_be_used_by_its_fd [Gpu]
        allocations_do_not_overlap [Gpu]
        a_scrub_zeroes_every_byte_for_all_holders [Gpu]
        memory_lives_while_an_fd_is_held [Gpu]
        usage_counts_allocations [Gpu]
        out_of_memory_tells_the_numbers [Gpu]
        a_dma_buf_comes_where_the_capability_says_so [Gpu]
    }
}
