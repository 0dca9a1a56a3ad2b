//! Submission and completion rings and the generation page, on shared memory.
//!
//! Role: how a client process posts work to a queue pair that the daemon owns, and learns what came
//! of it, without a system call on the hot path. One sealed segment per brokered queue pair holds
//! both rings; one segment per tenant holds the generation page.
//!
//! Owner of state: [`ClientRing`] and [`BrokerRing`] each own one side. All that a side relies on
//! (indices, geometry, reservations) is private to it; the segment holds only what the other side
//! needs to see, and every word read from it is checked. A submission entry is copied out once and
//! the copy is checked, so a client that rewrites it meanwhile changes nothing.
//!
//! It must not know what a queue pair is, who the tenant is, or what a registration slot names:
//! the engine checks those on the decoded [`Submission`].
//!
//! Wake-ups. Broker to client: a futex word in the ring, touched only when the client said that it
//! waits. Client to broker: [`ClientRing::flush`] answers [`Wake::Needed`] when the broker said
//! that it sleeps; the caller then writes the eventfd that it was given with the ring.
#![forbid(unsafe_code)]

pub mod abi;
mod bell;
mod broker;
mod client;
mod completion;
mod cursor;
mod error;
mod generation;
mod geometry;
#[cfg(test)]
mod model;
mod refusal_reason;
mod submission;
mod unanswered;

pub use abi::{INLINE_MAX_BYTES, RING_VERSION};
pub use broker::{BrokerRing, Submitted, end_lost_ring};
pub use client::{ClientRing, WaitTicket, Wake};
pub use completion::{Completion, CompletionOpcode, Status};
pub use error::{Corrupt, GenerationError, NotOutstanding, OpenError, RingError, SubmitError};
pub use generation::{GENERATION_PAGE_VERSION, GenerationReader, GenerationWriter, MAX_SLOTS};
pub use geometry::{Geometry, GeometryError, MAX_DEPTH};
pub use refusal_reason::RefusalReason;
pub use submission::{
    InlineData, InlineTooLong, LocalSpan, Operation, Queue, Refusal, RemoteSpan, Source, Submission, SubmissionFlags,
};
