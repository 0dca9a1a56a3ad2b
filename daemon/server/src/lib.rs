//! gRPC services, peer credentials and the session socket.
//!
//! Role: the edge between client processes and the engine. It knows who is at the other end of a socket and speaks
//! `gdrd.v1`; it decides nothing about leases. Owner of state: connections, sessions' channels, the topology shown.
//!
//! Must not know: which backend serves the hardware, configuration files, systemd.
#![forbid(unsafe_code)]

mod admission;
mod grpc;
mod leases;
mod limits;
pub mod peer;
mod proofs;
mod readiness;
mod server;
mod session;
mod status;
mod topology;

pub use grpc::{Backend, Backends, HostFacts};
pub use limits::ServerLimits;
pub use server::{Rebinding, Server, ServerConfig, ServerError, Sockets};
pub use status::{REASON_KEY, code_of};
pub use topology::{Change, Topology, View};
