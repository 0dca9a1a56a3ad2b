//! A snapshot for people and for programs: matrix, tree, JSON.
//!
//! Text only: no colour, no terminal, nothing concluded that the model does not say.

mod json;
mod matrix;
mod tree;

pub use json::{Levels, TOPO_SCHEMA, Topo, TopoLink, topo};
pub use matrix::matrix;
pub use tree::tree;
