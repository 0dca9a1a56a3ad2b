//! Async Rust client of gdrd: topology and pairing, registered buffers, brokered queue pairs.
//!
//! ```no_run
//! # async fn example() -> Result<(), gdrd_client::ClientError> {
//! use gdrd_client::{AcquireOptions, Client};
//!
//! let client = Client::connect().await?;
//! let session = client.open_session("example").await?;
//! let buffer = session.acquire(AcquireOptions::on_gpu("GPU0", 2 << 20)).await?;
//! buffer.write_from(0, b"already registered")?;
//! buffer.release().await?;
//! # Ok(())
//! # }
//! ```
//!
//! Role: a [`Client`] is a connection that finds the daemon again after a restart. A [`Session`] is the lifeline of
//! what this process leases: when it ends, its buffers and queue pairs are gone, and calls on them say so with
//! [`ClientError::SessionEnded`].
//!
//! Owner of state: the session's task alone reads the session socket; buffers and queue pairs own their mappings.
//!
//! It must not know how the daemon works inside, and links neither libibverbs nor libcuda: it starts on every host, and loads libcuda at
//! the first use of a CUDA GPU's memory.
#![forbid(unsafe_code)]

mod adopted;
mod buffer;
mod bytes;
mod calls;
mod client;
mod device_memory;
mod direct;
mod error;
mod finish;
mod hits;
mod kept;
mod leases;
mod options;
mod parting;
mod queue_pair;
mod registered;
mod registration_cache;
mod remote;
mod runtime_dir;
mod session;
mod stream_order;
mod topology;

pub use adopted::{AdoptOptions, AdoptedMemory};
pub use buffer::{Buffer, MemoryKind, Registration};
pub use client::{Client, ClientOptions};
pub use direct::{DirectContext, ImportedContext, VerbsError};
pub use error::ClientError;
pub use gdrd_client_sys::{Allocation, BounceBuffer, CudaError, Gpu, Mapping, Stream, buffer_id};
pub use gdrd_ring::{
    Completion, CompletionOpcode, InlineData, LocalSpan, Operation, RefusalReason, RemoteSpan, Source, Status,
    Submission, SubmissionFlags,
};
pub use hits::{EntryId, Hit, HitCache, Identify, Inserted, NotInserted, Region};
pub use leases::LeaseWatch;
pub use options::{AcquireOptions, QueuePairOptions};
pub use queue_pair::{Endpoint, QueuePair};
pub use registered::{RangeOf, RegisterOptions, RegisteredRange};
pub use registration_cache::{RegistrationCache, RegistrationHit};
pub use remote::RemoteBuffer;
pub use runtime_dir::{GRPC_SOCKET, RuntimeDir, SESSION_SOCKET};
pub use session::{Session, SessionEnd};
pub use topology::TopologyWatch;

/// Messages of gdrd.v1 as the daemon sends them: what lists, watches and topology calls return.
pub use gdrd_proto::v1;
