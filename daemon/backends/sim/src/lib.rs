//! A simulated host: GPU memory as memfds, and HCAs that really move bytes and really refuse.
//!
//! Role: implements the traits of `gdrd-hal` without hardware, for tests, demonstrations and
//! `gdrd --sim`. Protection domains, keys, ranges, rights, queue pair states, order, queue limits
//! and waiting are enforced as the least capable real provider does; where a profile says that a
//! provider cannot do something, it is refused here too. A fake kinder than hardware is a bug.
//! **What ran only here is seen in simulation only**: it says nothing about speed, ordering on
//! PCIe, drivers or firmware of real devices.
//!
//! Owner of state: a [`SimHost`] owns its GPUs, HCAs and the fabric between them. Work executes on
//! the thread that posts it; what must wait goes on when the cause is gone, or by a timer thread that
//! exists only once there was a deadline and sleeps while there is none.
//!
//! Must not know: tenants, sessions, leases, pools, rings, gRPC.
#![forbid(unsafe_code)]

mod bytes;
mod completion;
#[cfg(feature = "conformance")]
pub mod conformance;
mod direct;
mod domain;
mod event_fd;
mod fabric;
mod facts;
pub mod fault;
mod from_profile;
mod gpu;
mod hca;
mod host;
mod keys;
mod memory;
mod over_gpu;
mod provider;
mod queue_pair;
mod region;
mod spec;
mod sync;
mod timer;

pub use fabric::Timing;
pub use gpu::GRANULARITY_BYTES;
pub use host::{SimError, SimHost, SimOptions};
pub use provider::Provider;
pub use spec::{SimGpu, SimHca, SimPort, SimSpec};
