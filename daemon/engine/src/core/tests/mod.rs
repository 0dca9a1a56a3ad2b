//! Tests of the state machine by inputs and effects, without hardware, threads or time.

mod acquire;
mod bounds;
mod cache;
mod faults;
mod hardware;
mod invariants;
mod lifetime;
pub(crate) mod queue_pairs;
mod random;
mod restart;
mod rig;
