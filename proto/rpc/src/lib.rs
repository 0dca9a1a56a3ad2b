//! Generated code of the gdrd.v1 API: messages, clients and servers. Nothing is written by hand here
//! but the version of the API and the names that both sides must agree on.
#![forbid(unsafe_code)]

/// Version of gdrd.v1 that this build speaks; exchanged when a session opens.
pub const API_VERSION: u32 = 1;

/// gRPC metadata key that carries the session token.
pub const SESSION_TOKEN_KEY: &str = "gdrd-session-bin";

/// Longest packet on the session socket, bytes: a lease with registrations on 64 HCAs of the longest names fits.
pub const MAX_SESSION_PACKET_BYTES: usize = 8192;

/// Encoded `FileDescriptorSet`, for reflection.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

/// Package `gdrd.v1`.
#[allow(missing_docs, clippy::all, clippy::pedantic)]
pub mod v1 {
    tonic::include_proto!("gdrd.v1");
}
