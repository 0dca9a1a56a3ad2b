//! The measurements, one a file. A new one is a file here and a line in [`ALL`]; what limits its figure goes into
//! docs/performance.md, under its ids (a test asks for them).

mod batch;
mod cache_hits;
mod clients;
mod idle;
pub(crate) mod lease_round;
mod live_leases;
mod place;
mod read;
mod rounds;
pub(crate) mod write_latency;
pub(crate) mod write_rate;

use crate::frame::Group;

/// All measurements, in the order of the table. The idle daemon first: nothing of the rest is then still settling.
pub(crate) const ALL: &[Group] = &[
    idle::GROUP,
    write_latency::GROUP,
    write_latency::RINGS,
    write_rate::GROUP,
    lease_round::GROUP,
    live_leases::GROUP,
    clients::GROUP,
    read::GROUP,
    read::LARGE,
    place::GROUP,
    cache_hits::GROUP,
    cache_hits::IDENTIFIED,
    batch::GROUP,
    batch::LIST_GROUP,
    rounds::GROUP,
];
