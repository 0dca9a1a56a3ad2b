//! Shared-memory segments with checked volatile copies and futex wake.
//!
//! Role: the one place where gdrd maps memory that another process may change at any time. It
//! hands out bytes only by copy and words only as atomics, never a reference to shared bytes, so
//! that its users need no unsafe code and no peer can break their invariants.
//!
//! Owner of state: each [`Segment`] owns its file descriptor and its mapping, and unmaps in `Drop`;
//! [`SharedU32`], [`SharedU64`] and [`SharedSlots`] keep their segment alive; [`ForkMark`] owns a page of its own.
//!
//! It must not know what the bytes mean: rings, buffers and generations live in its users.
#![allow(unsafe_code)]

mod error;
mod fork;
mod futex;
mod node;
pub mod pingpong;
mod raw;
mod seal;
mod segment;
mod shared;
mod zero;

pub use error::ShmError;
pub use fork::ForkMark;
pub use futex::{WaitOutcome, futex_wait, futex_wake};
pub use node::{NodeRule, on_node};
pub use seal::{Seals, add_seals, seals};
pub use segment::{Access, MapOptions, Segment, SegmentOptions};
pub use shared::{SharedSlots, SharedU32, SharedU64};
pub use zero::zero_by_kernel;
