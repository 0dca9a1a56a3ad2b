//! The engine on a simulated host: leases, isolation, faults, queue pairs, as the server uses it.

mod rounds;
mod world;
