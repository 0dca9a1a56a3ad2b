//! Pairing: which NICs each GPU should use.
//!
//! Deterministic and optimal over the whole host by the rules of docs/topology.md. Pure: the same snapshot
//! and options give the same plan. Knows nothing of leases, of probing or of who asks.

mod assign;
mod candidates;
mod choose;
pub mod contract;
mod explain;
mod filter;
mod sticky;
mod wording;

use std::collections::BTreeMap;

use crate::acs::PeerAcs;
use crate::bdf::Bdf;
use crate::gdr::Gdr;
use crate::level::Level;
use crate::model::{GpuId, HcaId, Host, Snapshot};
use crate::pair::Ways;
use crate::words::counted;
use candidates::Candidates;
use choose::Choice;
use contract::{GpuPlan, NicPlan, NvLinkPlan, PairPlan, Plan, PortPlan, SCHEMA};

pub use explain::{Explanation, Loser, Winner, explain};
pub use filter::{BadFilter, NicFilter};
pub use sticky::{Move, Replan, adopt, replan};

/// What the operator may say about pairing; the operator has the last word.
#[derive(Clone, Debug, PartialEq)]
pub struct PlanOptions {
    /// NICs that may be used, as in NCCL_IB_HCA.
    pub filter: Option<NicFilter>,
    /// GPUs with NICs fixed by hand.
    pub pins: Vec<Pin>,
    /// Farthest level that is still assigned.
    pub max_level: Level,
    /// Rails by NIC name, over those by PCI order.
    pub rails: BTreeMap<String, u32>,
    /// What probing found, by GPU (uuid, else address, else name) and NIC name.
    pub gdr: BTreeMap<(String, String), Gdr>,
}

impl Default for PlanOptions {
    fn default() -> Self {
        Self { filter: None, pins: Vec::new(), max_level: Level::Sys, rails: BTreeMap::new(), gdr: BTreeMap::new() }
    }
}

/// A GPU whose NICs the operator fixes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pin {
    /// GPU by name, uuid or address.
    pub gpu: String,
    /// NICs by name or address.
    pub nics: Vec<String>,
}

/// Pairs the GPUs of a snapshot with its NICs.
#[must_use]
pub fn plan(snapshot: &Snapshot, options: &PlanOptions) -> Plan {
    if is_too_large(&snapshot.host) {
        return too_large(snapshot);
    }
    Pairing::of(&snapshot.host, options, &BTreeMap::new()).plan(snapshot)
}

fn is_too_large(host: &Host) -> bool {
    host.gpus.len().saturating_mul(host.hcas.len()) > MAX_PAIRS
}

/// A plan that gives nothing, for inputs with more devices than any host.
fn too_large(snapshot: &Snapshot) -> Plan {
    let (gpus, nics) = (snapshot.host.gpus.len(), snapshot.host.hcas.len());
    let why = format!(
        "{} and {} are more than {MAX_PAIRS} pairs, none is planned",
        counted(gpus, "GPU"),
        counted(nics, "NIC")
    );
    let without = Host { gpus: Vec::new(), hcas: Vec::new(), ..snapshot.host.clone() };
    let mut plan = Pairing::of(&without, &PlanOptions::default(), &BTreeMap::new()).plan(snapshot);
    plan.warnings.push(why);
    plan
}

/// Most pairs of GPU and NIC that are planned; the largest hosts have some ten thousand.
pub const MAX_PAIRS: usize = 1 << 17;

/// NICs that may be given automatically under these options, in PCI order.
pub(crate) fn usable_nics(host: &Host, options: &PlanOptions) -> Vec<HcaId> {
    let candidates = Candidates::usable(host, options);
    candidates.into_iter().zip(0..).filter(|(usable, _)| *usable).map(|(_, place)| HcaId(place)).collect()
}

/// A choice with everything it rests on.
struct Pairing<'a> {
    host: &'a Host,
    options: &'a PlanOptions,
    ways: Ways<'a>,
    candidates: Candidates,
    choice: Choice,
    rails: BTreeMap<HcaId, u32>,
}

/// Rail of each NIC that has one: its place among the compute NICs in PCI order, or the operator's label.
/// NICs that are given in spite of coming after their equals are compute NICs too.
fn rails(host: &Host, options: &PlanOptions, candidates: &Candidates, choice: &Choice) -> BTreeMap<HcaId, u32> {
    let given = (0..host.hcas.len()).map(HcaId).filter(|nic| choice.users(*nic).next().is_some());
    let mut nics: Vec<HcaId> = candidates.compute_nics().into_iter().chain(given).collect();
    nics.sort_unstable();
    nics.dedup();
    let label = |nic: HcaId| host.hca(nic).and_then(|hca| options.rails.get(&hca.name)).copied();
    nics.into_iter().zip(0..).map(|(nic, place)| (nic, label(nic).unwrap_or(place))).collect()
}

/// Rates as whole Mbit/s, to compare and to count with; never 0.
fn mbps(gbps: f64) -> u64 {
    // Bounded on both sides first, so the conversion cannot lose the value.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped to 1..=1e9 before")]
    let whole = (gbps * 1000.0).round().clamp(1.0, 1e9) as u64;
    whole
}

impl<'a> Pairing<'a> {
    /// Chooses NICs for all GPUs but those of `kept`, which have theirs.
    fn of(host: &'a Host, options: &'a PlanOptions, kept: &BTreeMap<GpuId, Vec<HcaId>>) -> Self {
        let ways = Ways::of(host);
        let candidates = Candidates::of(host, &ways, options);
        let choice = Choice::make(host, options, &candidates, kept);
        let rails = rails(host, options, &candidates, &choice);
        Self { host, options, ways, candidates, choice, rails }
    }

    fn plan(&self, snapshot: &Snapshot) -> Plan {
        Plan {
            schema: SCHEMA.to_owned(),
            generation: snapshot.generation,
            source: snapshot.source.clone(),
            gpus: (0..self.host.gpus.len()).map(GpuId).filter_map(|gpu| self.gpu_plan(gpu)).collect(),
            nics: (0..self.host.hcas.len()).map(HcaId).filter_map(|hca| self.nic_plan(hca)).collect(),
            nvlink: NvLinkPlan { kind: self.host.nvlink_kind() },
            warnings: self.warnings(),
        }
    }

    fn name(&self, id: HcaId) -> String {
        self.host.hca(id).map_or_else(String::new, |hca| hca.name.clone())
    }

    fn gpu_plan(&self, id: GpuId) -> Option<GpuPlan> {
        let gpu = self.host.gpu(id)?;
        let assigned = self.choice.of_gpu(id);
        Some(GpuPlan {
            name: gpu.name.clone(),
            uuid: gpu.uuid().map(str::to_owned),
            bdf: shown(gpu.bdf),
            numa: gpu.numa,
            assigned: assigned.iter().map(|nic| self.name(*nic)).collect(),
            rail: assigned.first().and_then(|nic| self.rails.get(nic)).copied(),
            reason: self.reason(id),
            drained: false,
            nics: self.by_nearness(id).into_iter().filter_map(|nic| self.pair_plan(id, nic)).collect(),
        })
    }

    /// All NICs of a GPU, nearest first; among equals those it is given, then by rail and PCI order.
    fn by_nearness(&self, gpu: GpuId) -> Vec<HcaId> {
        let assigned = self.choice.of_gpu(gpu);
        let mut nics: Vec<HcaId> = (0..self.host.hcas.len()).map(HcaId).collect();
        nics.sort_by_key(|nic| {
            let order = self.candidates.nic(*nic).map(|candidate| candidate.order);
            (self.candidates.nearness(gpu, *nic), !assigned.contains(nic), order)
        });
        nics
    }

    fn pair_plan(&self, gpu: GpuId, nic: HcaId) -> Option<PairPlan> {
        let hca = self.host.hca(nic)?;
        let pair = self.ways.pair(gpu, nic)?;
        let acs = pair.acs();
        Some(PairPlan {
            name: hca.name.clone(),
            bdf: shown(hca.bdf),
            level: pair.level(),
            gbps: pair.bottleneck().map(|narrowest| round(narrowest.gbps)),
            gdr: self.gdr(gpu, nic, acs.as_ref()),
            acs,
        })
    }

    /// What probing found, else what the host's facts say.
    fn gdr(&self, gpu: GpuId, nic: HcaId, acs: Option<&PeerAcs>) -> Gdr {
        let probed = self.host.gpu(gpu).and_then(|gpu| {
            let key = gpu.uuid().map(str::to_owned).or_else(|| gpu.bdf.map(|bdf| bdf.to_string()));
            self.options.gdr.get(&(key.unwrap_or_else(|| gpu.name.clone()), self.name(nic)))
        });
        probed.cloned().unwrap_or_else(|| self.host.gdr_with(gpu, nic, acs))
    }

    fn nic_plan(&self, id: HcaId) -> Option<NicPlan> {
        let hca = self.host.hca(id)?;
        let ports = hca.ports.iter().map(|port| PortPlan {
            port_num: port.port_num,
            state: port.state,
            link_layer: port.link_layer,
            rate_gbps: port.rate_gbps,
        });
        let users = (0..self.host.gpus.len()).map(GpuId).filter(|gpu| self.choice.of_gpu(*gpu).contains(&id));
        Some(NicPlan {
            name: hca.name.clone(),
            bdf: shown(hca.bdf),
            numa: hca.numa,
            card: shown(hca.card),
            rate_gbps: hca.rate_gbps(),
            ports: ports.collect(),
            gpus: users.filter_map(|gpu| self.host.gpu(gpu)).map(|gpu| gpu.name.clone()).collect(),
        })
    }
}

/// An address as the contract has it: what only stands for a place is none.
fn shown(bdf: Option<Bdf>) -> Option<Bdf> {
    bdf.filter(|bdf| !bdf.is_invented())
}

/// Rates print with at most two digits after the point.
pub(crate) fn round(gbps: f64) -> f64 {
    (gbps * 100.0).round() / 100.0
}
