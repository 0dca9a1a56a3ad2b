//! A snapshot for people and for programs: matrix, tree, picture, graph, JSON.
//!
//! No terminal and no colour of one: who prints a tree paints its parts. Nothing is concluded that the model
//! does not say.

mod dot;
mod json;
mod matrix;
mod svg;
mod tree;

pub use dot::dot;
pub use json::{Levels, TOPO_SCHEMA, Topo, TopoLink, topo};
pub use matrix::matrix;
pub use svg::svg;
pub use tree::{Part, painted_tree, tree};
