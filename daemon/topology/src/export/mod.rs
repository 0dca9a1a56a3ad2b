//! What other software is told of this host: the same plan in each one's own words.
//!
//! Each writer says in its head which document or source of that project fixes the syntax. They know the
//! snapshot and the plan, and nothing of who asks.

pub mod env;
mod mooncake;
mod nccl_topo;

pub use env::{Env, GpuEnv, Variable, env};
pub use mooncake::mooncake_matrix;
pub use nccl_topo::nccl_topo;
