//! Pairs that stay: a new snapshot moves only those whose NIC is gone.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::model::{GpuId, HcaId, Host, Snapshot};
use crate::plan::contract::{GpuPlan, Plan};
use crate::plan::{Pairing, PlanOptions, is_too_large, plan};

/// A plan made from the one before.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Replan {
    /// The plan to use: pairs of before, but where their NIC is gone.
    pub plan: Plan,
    /// GPUs whose NICs changed.
    pub moved: Vec<Move>,
    /// What a plan from nothing would be, if it differs from `plan`. Never in force until it is applied.
    pub better: Option<Plan>,
}

/// A GPU whose NICs changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Move {
    /// Name of the GPU in the new snapshot.
    pub gpu: String,
    /// NICs before, by their names then.
    pub from: Vec<String>,
    /// NICs now.
    pub to: Vec<String>,
}

/// Plans a new snapshot, keeping the pairs of `previous` whose NIC is still there. Renamed NICs are known by
/// their address, GPUs by uuid, else address, else name.
#[must_use]
pub fn replan(previous: &Plan, snapshot: &Snapshot, options: &PlanOptions) -> Replan {
    let host = &snapshot.host;
    let fresh = plan(snapshot, options);
    if is_too_large(host) {
        return Replan { plan: fresh, moved: Vec::new(), better: None };
    }
    let kept_plan = Pairing::of(host, options, &still_there(previous, host)).plan(snapshot);
    let moved = moves(previous, host, &kept_plan);
    let same = |a: &Plan, b: &Plan| {
        let pairs = |plan: &Plan| -> Vec<Vec<String>> { plan.gpus.iter().map(|gpu| gpu.assigned.clone()).collect() };
        pairs(a) == pairs(b)
    };
    let better = Some(fresh).filter(|fresh| !same(fresh, &kept_plan));
    Replan { plan: kept_plan, moved, better }
}

/// Plans a snapshot anew, whatever stuck: the plan, and the GPUs whose NICs it changes. `None` where it changes none.
#[must_use]
pub fn adopt(previous: &Plan, snapshot: &Snapshot, options: &PlanOptions) -> Option<(Plan, Vec<Move>)> {
    let fresh = plan(snapshot, options);
    let moved = moves(previous, &snapshot.host, &fresh);
    (!moved.is_empty()).then_some((fresh, moved))
}

impl Replan {
    /// What a better plan would change and how to have it, in a sentence; `None` where the one to use is the best.
    #[must_use]
    pub fn advice(&self) -> Option<String> {
        let better = self.better.as_ref()?;
        let differs = |gpu: &&GpuPlan| self.plan.gpu(&gpu.name).is_some_and(|now| now.assigned != gpu.assigned);
        let names = |nics: &[String]| if nics.is_empty() { "no NIC".to_owned() } else { nics.join(",") };
        let change = |gpu: &GpuPlan| {
            let now = self.plan.gpu(&gpu.name).map_or(&[][..], |now| &now.assigned);
            format!("{}: {} instead of {}", gpu.name, names(&gpu.assigned), names(now))
        };
        let changes: Vec<String> = better.gpus.iter().filter(differs).map(change).collect();
        Some(format!("another pairing would be better ({}); gdrctl plan --apply puts it in force", changes.join("; ")))
    }
}

/// NICs of each GPU by a plan, as far as GPU and NIC are on the host. A GPU that lost all of its NICs, or had
/// none, is left out: it is planned anew.
pub(super) fn still_there(previous: &Plan, host: &Host) -> BTreeMap<GpuId, Vec<HcaId>> {
    let mut kept = BTreeMap::new();
    for gpu in &previous.gpus {
        let nics: Vec<HcaId> = gpu.assigned.iter().filter_map(|name| nic_now(previous, host, name)).collect();
        if let Some(id) = gpu_now(host, gpu).filter(|_| !nics.is_empty()) {
            kept.insert(id, nics);
        }
    }
    kept
}

fn gpu_now(host: &Host, gpu: &GpuPlan) -> Option<GpuId> {
    match (&gpu.uuid, gpu.bdf) {
        (Some(uuid), _) if host.gpus.iter().any(|now| now.uuid().is_some()) => host.find_gpu(uuid),
        (_, Some(bdf)) => host.find_gpu(&bdf.to_string()),
        _ => host.find_gpu(&gpu.name),
    }
}

fn nic_now(previous: &Plan, host: &Host, name: &str) -> Option<HcaId> {
    let bdf = previous.nics.iter().find(|nic| nic.name == name).and_then(|nic| nic.bdf);
    let Some(bdf) = bdf else {
        return host.hcas.iter().position(|hca| hca.name == name).map(HcaId);
    };
    // Sub-functions share an address, so the name decides among those at one.
    let at = |same_name: bool| {
        host.hcas.iter().position(|hca| hca.bdf == Some(bdf) && (!same_name || hca.name == name)).map(HcaId)
    };
    at(true).or_else(|| at(false))
}

fn moves(previous: &Plan, host: &Host, now: &Plan) -> Vec<Move> {
    let mut moved = Vec::new();
    for (place, gpu) in now.gpus.iter().enumerate() {
        let before = previous.gpus.iter().find(|before| gpu_now(host, before) == Some(GpuId(place)));
        let from = before.map_or_else(Vec::new, |before| before.assigned.clone());
        let renamed =
            |name: &String| nic_now(previous, host, name).and_then(|id| host.hca(id)).map(|hca| hca.name.clone());
        let mut kept: Vec<String> = from.iter().filter_map(renamed).collect();
        let mut to = gpu.assigned.clone();
        kept.sort_unstable();
        to.sort_unstable();
        if kept != to || kept.len() != from.len() {
            moved.push(Move { gpu: gpu.name.clone(), from, to: gpu.assigned.clone() });
        }
    }
    moved
}
