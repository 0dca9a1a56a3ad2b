//! What other software is told of this host: the same plan in each one's own words.
//!
//! Each writer says in its head which document or source of that project fixes the syntax. They know the
//! snapshot and the plan, and nothing of who asks.

pub mod env;
mod mooncake;
mod nccl_topo;

use crate::model::{Hca, Host};
use crate::topo_m;

pub use env::{Env, GpuEnv, Variable, env};
pub use mooncake::mooncake_matrix;
pub use nccl_topo::nccl_topo;

/// A NIC that a pasted matrix numbers and does not name. A library told of it would find no device.
fn is_placeholder(hca: &Hca) -> bool {
    hca.bdf.is_none() && topo_m::is_placeholder(&hca.name)
}

/// Which of some NICs have no name, and what to do about it.
#[must_use]
pub fn nameless(host: &Host, among: impl Fn(&Hca) -> bool) -> Option<String> {
    let names: Vec<&str> =
        host.hcas.iter().filter(|hca| is_placeholder(hca) && among(hca)).map(|hca| hca.name.as_str()).collect();
    (!names.is_empty()).then(|| {
        format!(
            "{}: placeholders of the matrix, no RDMA devices; add its NIC legend (`NIC0: mlx5_0`) to the text",
            names.join(", ")
        )
    })
}
