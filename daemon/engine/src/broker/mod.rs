//! The broker: posts on the daemon's queue pairs for clients that speak to it by rings in shared memory.
//!
//! Role: takes requests out of each ring, tenant by tenant as their weights and rates say, checks every one against
//! the tenant's registration slots, posts them, and hands completions back in the order of posting. Broker threads spin while there
//! is work and sleep in epoll when there is none; on the way from a request to its completion they
//! allocate nothing, take no lock, make no system call (but a futex wake for a client that sleeps)
//! and write no log line.
//!
//! Owner of state: each broker thread owns its completion queues, and the posting side, ring and
//! books of its queue pairs; the engine owns the [`SlotTable`] of each tenant and speaks to threads
//! through [`Broker`]. Driver calls that may block (to ERR, destroy) run on one more thread per HCA.
//!
//! Must not know: sessions, leases, pools, which backend serves the HCA. No descriptor whose file
//! description a client shares is read or written here, since a client can make that block: the
//! doorbell is only watched, edge-triggered, and clients are woken by futex.

mod cold;
mod command;
mod config;
mod error;
mod gate;
mod handle;
mod hca;
mod landing;
mod ledger;
mod queue_pair;
mod refusal;
mod registry;
mod request;
mod schedule;
mod share;
mod sleep;
mod slots;
mod stats;
mod status;
mod tag;
#[cfg(test)]
pub(crate) mod tests;
mod worker;

pub use config::{Config, Placement};
pub use error::{BrokerError, BrokerEvent};
pub use handle::{Broker, QueuePairSetup, Reservation};
pub use landing::{FlushLanding, LandingError};
pub use request::QueuePairLimits;
pub use share::Share;
pub use slots::{HcaIndex, MAX_SLOTS, SlotEntry, SlotError, SlotTable};
pub use stats::{BrokerStats, QueuePairStats, ThreadStats};
