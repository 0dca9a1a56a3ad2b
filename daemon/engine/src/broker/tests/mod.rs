//! Tests of the broker: parts alone, against an HCA driven by hand, and between real rings on the simulator.

mod by_hand;
mod endings;
mod fairness;
pub(crate) mod fake;
mod gate;
mod hostile;
mod operations;
mod placement;
mod sleeping;
mod slots;
mod world;
