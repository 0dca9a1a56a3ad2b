//! Mooncake's NIC priority matrix: an object from location to `[preferred, others]`, both lists of RDMA
//! devices (`Topology::parse`, kvcache-ai/Mooncake `mooncake-transfer-engine/src/topology.cpp`; a file of it is
//! named by `MC_CUSTOM_TOPO_JSON`).
//!
//! Locations are `cpu:N` by NUMA node and `cuda:N` by CUDA ordinal, `hip:N` in its ROCm build
//! (`include/gpu_vendor/hip.h`).

use serde_json::{Map, Value, json};

use crate::error::TopologyError;
use crate::model::{GpuId, Hca, HcaId, HcaOrigin, Host, NumaId};
use crate::plan::contract::Plan;

const AMD: u16 = 0x1002;

/// The matrix as indented JSON. GPUs are numbered in PCI order, as CUDA does with `CUDA_DEVICE_ORDER=PCI_BUS_ID`.
/// Only NICs that the plan gives to some GPU are listed: the others are no compute NICs or must not be used.
///
/// # Errors
/// A NIC of the plan is a placeholder of a pasted matrix, which no transfer engine would find.
pub fn mooncake_matrix(host: &Host, plan: &Plan) -> Result<String, TopologyError> {
    let is_given = |hca: &Hca| plan.nics.iter().any(|nic| nic.name == hca.name && !nic.gpus.is_empty());
    if let Some(message) = super::nameless(host, is_given) {
        return Err(TopologyError::BadRequest { message });
    }
    let used: Vec<(HcaId, &str)> = plan
        .nics
        .iter()
        .filter(|nic| !nic.gpus.is_empty())
        .filter_map(|nic| host.find_hca(&nic.name).map(|id| (id, nic.name.as_str())))
        .filter(|(id, _)| host.hca(*id).is_some_and(|hca| hca.origin != HcaOrigin::Socket))
        .collect();
    let entry = |preferred: &dyn Fn(HcaId, &str) -> bool| {
        let (near, far): (Vec<_>, Vec<_>) = used.iter().copied().partition(|(id, name)| preferred(*id, name));
        let names = |nics: Vec<(HcaId, &str)>| nics.into_iter().map(|(_, name)| name.to_owned()).collect::<Vec<_>>();
        json!([names(near), names(far)])
    };
    let mut matrix = Map::new();
    for node in host.numa_nodes.iter().filter(|node| node.has_cpus) {
        let on_node = |id: HcaId, _: &str| nic_numa(host, id) == Some(node.id);
        // Without a NIC of its own a node may use any.
        let is_served = used.iter().any(|(id, name)| on_node(*id, name));
        matrix.insert(format!("cpu:{}", node.id), entry(&|id, name| !is_served || on_node(id, name)));
    }
    for (place, gpu) in plan.gpus.iter().enumerate() {
        matrix.insert(
            format!("{}:{place}", prefix(host, GpuId(place))),
            entry(&|_, name| gpu.assigned.iter().any(|own| own == name)),
        );
    }
    Ok(format!("{:#}\n", Value::Object(matrix)))
}

fn nic_numa(host: &Host, nic: HcaId) -> Option<NumaId> {
    let hca = host.hca(nic)?;
    hca.bdf.and_then(|bdf| host.numa_of(bdf)).or(hca.numa)
}

fn prefix(host: &Host, gpu: GpuId) -> &'static str {
    let vendor = host.gpu(gpu).and_then(|gpu| host.function(gpu.bdf?)).and_then(|function| function.vendor);
    if vendor == Some(AMD) { "hip" } else { "cuda" }
}
