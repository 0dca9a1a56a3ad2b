//! Tests of the state machine by inputs and effects, without hardware, threads or time.

mod hardware;
mod invariants;
mod random;
mod rig;
