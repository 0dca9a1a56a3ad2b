//! Tests of the state machine by inputs and effects, without hardware, threads or time.

#[allow(dead_code)]
mod hardware;
mod invariants;
mod random;
#[allow(dead_code)]
mod rig;
