//! iWARP in software: a provider that connects through rdma_cm only. The suite of gdrd-hal on it, and a daemon that says
//! what it does not do there. The last of its guest: it puts a second device on the only NIC.
#![forbid(unsafe_code)]

mod common;

use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock};

use common::daemon;
use gdrd_hal::conformance::Fixture;
use gdrd_hal::{GpuMemory, GpuUuid, Hca};
use gdrd_harness::script::Command;
use gdrd_harness::{Puppet, User};
use gdrd_vm::{NETDEV, open_hca_named, run};

const SIW: &str = "siw0";

/// The device, made by the first who asks.
fn siw() -> Arc<dyn Hca> {
    static HCA: OnceLock<Arc<dyn Hca>> = OnceLock::new();
    let make = || {
        run("modprobe", &["siw"]);
        run("rdma", &["link", "add", SIW, "type", "siw", "netdev", NETDEV]);
        open_hca_named(SIW)
    };
    Arc::clone(HCA.get_or_init(make))
}

struct Siw;

impl Fixture for Siw {
    fn hcas(&self) -> [Arc<dyn Hca>; 2] {
        [siw(), siw()]
    }

    fn host_memory(&self, len_bytes: u64) -> OwnedFd {
        gdrd_vm::host_memory(len_bytes)
    }

    fn gpu(&self) -> Option<(Arc<dyn GpuMemory>, GpuUuid)> {
        None
    }
}

gdrd_hal::conformance_suite! {
    Siw,
    only: &[
        "a_region_tells_what_it_was_made_with",
        "registering_nothing_or_past_the_end_is_refused",
        "remote_write_or_atomic_without_local_write_is_refused",
        "host_memory_must_be_a_sealed_memfd",
        "keys_are_never_those_of_the_region_before",
        "keys_differ_between_live_regions",
        "rc_is_refused_where_the_capability_says_so",
        "ud_is_refused_where_the_capability_says_so",
        "completion_queues_out_of_bounds_are_refused",
        "shared_receives_are_refused_where_the_capability_says_so",
    ]
}

#[test]
fn a_daemon_registers_with_it_and_refuses_queue_pairs_with_the_reason() {
    siw();
    let daemon = daemon();
    assert!(daemon.log().contains(SIW), "{}", daemon.log());
    let mut puppet = Puppet::connected_as(&daemon, User::Uid(1001));
    let lease = puppet.run(Command::AcquireHost { buffer: "b".into(), hca: SIW.into(), size: 2 << 20 });
    assert!(lease["lease_id"].is_u64(), "{lease}");
    let (queue_pair, gpu) = ("q".into(), String::new());
    let refused = puppet.refused(Command::QueuePair { queue_pair, gpu, hca: SIW.into(), depth: 8 });
    assert!(refused.message.contains("rdma_cm"), "{refused:?}");
    assert_eq!(refused.reason, "UNSUPPORTED");
}
