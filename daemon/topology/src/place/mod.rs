//! Placement: which free GPUs and NICs belong together, best sets first.
//!
//! For schedulers. Pure: who holds what is told by the caller, and nothing is reserved here.

mod choose;
mod score;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::error::TopologyError;
use crate::model::{GpuId, HcaId, Host, Snapshot};
use crate::plan::PlanOptions;
use crate::plan::contract::Plan;
use crate::words::counted;
use choose::candidate_sets;
use score::Scorer;

/// Most GPUs in one request.
pub const MAX_GPUS: usize = 256;
/// Most NICs in one request.
pub const MAX_NICS: usize = 256;
/// Most sets in one answer.
pub const MAX_SETS: usize = 64;

/// What a scheduler asks for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlaceRequest {
    /// GPUs wanted, at least 1.
    pub gpus: usize,
    /// NICs wanted for them together; 0 for none.
    pub nics: usize,
    /// GPUs that are taken, by name, uuid or address.
    pub busy_gpus: Vec<String>,
    /// GPUs that are drained, by name, uuid or address: as good as taken, with a reason of their own.
    #[serde(default)]
    pub drained_gpus: Vec<String>,
    /// GPUs that are lost, by name, uuid or address: the same, with theirs.
    #[serde(default)]
    pub lost_gpus: Vec<String>,
    /// NICs that are taken, by name or address.
    pub busy_nics: Vec<String>,
    /// GPUs on which others hold something, by name, uuid or address, where the devices of a set shall be nobody else's: as good as
    /// taken, with a reason of their own.
    #[serde(default)]
    pub leased_gpus: Vec<String>,
    /// NICs likewise, by name or address.
    #[serde(default)]
    pub leased_nics: Vec<String>,
    /// NICs that the plan gives each GPU, by name: proposed before others that are as near.
    #[serde(default)]
    pub planned: BTreeMap<String, Vec<String>>,
    /// Every two GPUs must be joined by NVLink.
    pub nvlink: bool,
    /// All must hang below one switch.
    pub same_switch: bool,
    /// All must be on one NUMA node that is known.
    pub same_numa: bool,
    /// Most sets to answer with, 1 to [`MAX_SETS`].
    pub max_sets: usize,
}

impl Default for PlaceRequest {
    fn default() -> Self {
        Self {
            gpus: 1,
            nics: 1,
            busy_gpus: Vec::new(),
            drained_gpus: Vec::new(),
            lost_gpus: Vec::new(),
            busy_nics: Vec::new(),
            leased_gpus: Vec::new(),
            leased_nics: Vec::new(),
            planned: BTreeMap::new(),
            nvlink: false,
            same_switch: false,
            same_numa: false,
            max_sets: 8,
        }
    }
}

/// The answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Placement {
    /// Sets that fulfil the request, best first.
    pub sets: Vec<PlaceSet>,
    /// Why there is none, if so.
    pub reason: Option<String>,
}

/// GPUs and NICs that belong together.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlaceSet {
    /// GPUs by name, in PCI order.
    pub gpus: Vec<String>,
    /// NICs by name, in PCI order.
    pub nics: Vec<String>,
    /// 0 to 100, more is better: 100 is all GPUs on NVLink or one switch, each beside its NIC.
    pub score: f64,
    /// What the score rests on.
    pub reasons: Vec<String>,
}

/// NICs for a job that names no number: one a GPU, as far as the plan has NICs for GPUs.
#[must_use]
pub fn default_nics(plan: &Plan, gpus: usize) -> usize {
    plan.nics.iter().filter(|nic| !nic.gpus.is_empty()).count().min(gpus)
}

/// What a plan gives each GPU, for [`PlaceRequest::planned`].
#[must_use]
pub fn planned(plan: &Plan) -> BTreeMap<String, Vec<String>> {
    plan.gpus.iter().map(|gpu| (gpu.name.clone(), gpu.assigned.clone())).collect()
}

/// Finds sets of free GPUs and NICs for a request. NICs that are never assigned automatically (ports down,
/// bond slaves, …) are never placed either.
///
/// # Errors
/// The request asks for nothing, for more than the bounds, or names a device that is not there.
pub fn place(snapshot: &Snapshot, options: &PlanOptions, request: &PlaceRequest) -> Result<Placement, TopologyError> {
    let host = &snapshot.host;
    check(request)?;
    let gpus = free_gpus(host, request)?;
    let nics = free_nics(host, options, request)?;
    if let Some(reason) = shortage(host, request, gpus.len(), nics.len()) {
        return Ok(Placement { sets: Vec::new(), reason: Some(reason) });
    }
    let scorer = Scorer::new(host, &gpus, &nics, &request.planned);
    let sets = candidate_sets(&scorer, request.gpus);
    let exact = scorer.may_be_exact(sets.len(), request.gpus, request.nics);
    let scored = sets.iter().filter_map(|set| scorer.score(set, request, exact));
    let mut found: Vec<score::Scored> = scored.collect();
    found.sort_by(|a, b| a.cost.total_cmp(&b.cost).then(a.spoilt.cmp(&b.spoilt)).then(a.gpus.cmp(&b.gpus)));
    found.truncate(request.max_sets);
    let reason =
        found.is_empty().then(|| format!("no set of free devices fulfils the constraints{}", out_of_use(request)));
    Ok(Placement { sets: found.iter().map(|set| scorer.describe(set)).collect(), reason })
}

fn check(request: &PlaceRequest) -> Result<(), TopologyError> {
    let within = |what: &str, value: usize, least: usize, most: usize| {
        let message = format!("place: {what} is {value}, allowed are {least} to {most}");
        if (least..=most).contains(&value) { Ok(()) } else { Err(TopologyError::BadRequest { message }) }
    };
    within("gpus", request.gpus, 1, MAX_GPUS)?;
    within("nics", request.nics, 0, MAX_NICS)?;
    within("max_sets", request.max_sets, 1, MAX_SETS)
}

/// Longest name that an error repeats.
const ECHO_CHARS: usize = 64;

fn unknown(what: &'static str, name: &str) -> TopologyError {
    TopologyError::NoSuchDevice { what, name: name.chars().take(ECHO_CHARS).collect() }
}

fn free_gpus(host: &Host, request: &PlaceRequest) -> Result<Vec<GpuId>, TopologyError> {
    let out_of_use = request.drained_gpus.iter().chain(&request.lost_gpus).chain(&request.leased_gpus);
    let busy = request.busy_gpus.iter().chain(out_of_use);
    let busy = busy.map(|name| host.find_gpu(name).ok_or_else(|| unknown("GPU", name)));
    let busy = busy.collect::<Result<Vec<_>, _>>()?;
    let all = (0..host.gpus.len()).map(GpuId);
    Ok(all.filter(|gpu| !busy.contains(gpu)).take(MAX_GPUS).collect())
}

fn free_nics(host: &Host, options: &PlanOptions, request: &PlaceRequest) -> Result<Vec<HcaId>, TopologyError> {
    let busy = request.busy_nics.iter().chain(&request.leased_nics);
    let busy = busy.map(|name| host.find_hca(name).ok_or_else(|| unknown("NIC", name)));
    let busy = busy.collect::<Result<Vec<_>, _>>()?;
    if request.nics == 0 {
        return Ok(Vec::new());
    }
    let usable = crate::plan::usable_nics(host, options).into_iter();
    Ok(usable.filter(|nic| !busy.contains(nic)).take(MAX_NICS).collect())
}

/// GPUs that the caller did not name and that are not free, for the end of a sentence.
fn out_of_use(request: &PlaceRequest) -> String {
    told([("drained", &request.drained_gpus), ("lost", &request.lost_gpus), ("leased", &request.leased_gpus)])
}

fn told<const N: usize>(states: [(&str, &Vec<String>); N]) -> String {
    let some = states.into_iter().filter(|(_, names)| !names.is_empty());
    some.map(|(state, names)| format!("; {state}: {}", names.join(", "))).collect()
}

fn shortage(host: &Host, request: &PlaceRequest, gpus: usize, nics: usize) -> Option<String> {
    if gpus < request.gpus {
        let (wanted, why) = (counted(request.gpus, "GPU"), out_of_use(request));
        return Some(format!("{wanted} wanted, {gpus} of {} free{why}", host.gpus.len()));
    }
    (nics < request.nics).then(|| {
        let (wanted, why) = (counted(request.nics, "NIC"), told([("leased", &request.leased_nics)]));
        format!("{wanted} wanted, {nics} of {} free and usable{why}", host.hcas.len())
    })
}
