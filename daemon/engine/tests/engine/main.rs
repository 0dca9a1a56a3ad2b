//! The engine on a simulated host: leases, isolation, faults, queue pairs, as the server uses it.

mod counted;
mod dma_bufs;
mod drains;
mod drivers;
mod faults;
mod in_use;
mod isolation;
mod queue_pairs;
mod registrations;
mod restart;
mod rounds;
mod sessions;
mod watches;
mod wire;
mod world;
