//! To a GPU of another host: by the NICs that the plan gives.

use super::{
    Fallback, PathAdvice, PathKind, advice, gpu_to_memory, host_memory, lesser, level_word, name, state_word, works,
};
use crate::model::{GpuId, HcaId, Host};
use crate::plan::contract::{GpuPlan, PairPlan, Plan};
use crate::plan::round;
use crate::together::{Way, together};

pub(super) fn to_remote(host: &Host, plan: &Plan, from: GpuId) -> PathAdvice {
    let remote = "remote".to_owned();
    let gpu_name = name(host, from);
    let Some(gpu) = plan.gpus.iter().find(|gpu| gpu.name == gpu_name) else {
        return advice(host, from, remote, PathKind::Staged, "the plan does not know this GPU");
    };
    let pairs = assigned(gpu);
    let Some(first) = pairs.first() else {
        return advice(host, from, remote, PathKind::Staged, format!("no NIC is assigned: {}", gpu.reason));
    };
    let via: Vec<String> = pairs.iter().map(|pair| pair.name.clone()).collect();
    let (state, why) = (state_word(first.gdr.state), &first.gdr.reason);
    let staged_gbps = staged_gbps(host, from, &via);
    let memory = host_memory(host, from);
    if !works(first.gdr.state) {
        let reason = format!(
            "staged through {memory}, since GPUDirect RDMA with {} ({}) is {state}: {why}",
            first.name,
            level_word(first.level)
        );
        let advice = advice(host, from, remote, PathKind::Staged, reason);
        return PathAdvice { via, level: first.level, gbps: staged_gbps, ..advice };
    }
    let gbps = host.gpu_hcas_gbps(from, &ids(host, &via)).map(round);
    let reason = format!("{} is {}; GPUDirect RDMA is {state}: {why}", first.name, level_word(first.level));
    let fallback = Fallback {
        kind: PathKind::Staged,
        via: via.clone(),
        gbps: staged_gbps,
        reason: format!("where registering GPU memory with {} fails: through {memory}", first.name),
    };
    let advice = advice(host, from, remote, PathKind::GpudirectRdma, reason);
    PathAdvice { via, level: first.level, gbps, fallback: Some(fallback), ..advice }
}

fn assigned(gpu: &GpuPlan) -> Vec<&PairPlan> {
    gpu.nics.iter().filter(|pair| gpu.assigned.contains(&pair.name)).collect()
}

/// GPU to host memory, then host memory to the NICs together.
fn staged_gbps(host: &Host, from: GpuId, nics: &[String]) -> Option<f64> {
    let way = |id: &HcaId| -> Way {
        let links = host.hca(*id).and_then(|hca| hca.bdf).map(|bdf| host.nic_links(bdf, None));
        host.port_part(*id).into_iter().chain(links.unwrap_or_default()).collect()
    };
    let nics = together(&ids(host, nics).iter().map(way).collect::<Vec<Way>>());
    nics.and_then(|nics| lesser(gpu_to_memory(host, from), Some(nics)))
}

fn ids(host: &Host, names: &[String]) -> Vec<HcaId> {
    names.iter().filter_map(|name| host.find_hca(name)).collect()
}
