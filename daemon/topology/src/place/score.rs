//! How well a set of GPUs and NICs hangs together.

use std::collections::BTreeMap;

use pathfinding::prelude::{Matrix, kuhn_munkres_min};

use crate::level::Level;
use crate::model::{GpuId, HcaId, Host, NumaId};
use crate::pair::Ways;
use crate::place::{PlaceRequest, PlaceSet};
use crate::words::counted;

/// A set with what it costs; less is better.
#[derive(Debug)]
pub(super) struct Scored {
    pub(super) gpus: Vec<GpuId>,
    pub(super) nics: Vec<HcaId>,
    /// 0 (all beside each other) to 1 (all as far as can be).
    pub(super) cost: f64,
    /// Free GPUs left behind next to the set: taking these apart spoils a larger set for the next request.
    pub(super) spoilt: usize,
    /// Farthest level between two GPUs, and between a GPU or NIC and the nearest of the other kind in the set.
    farthest: (Option<Level>, Option<Level>),
}

/// Levels between all free devices, read once.
pub(super) struct Scorer<'a> {
    host: &'a Host,
    gpus: Vec<GpuId>,
    nics: Vec<HcaId>,
    gpu_levels: Vec<Vec<Option<Level>>>,
    nic_levels: Vec<Vec<Option<Level>>>,
    /// Of each GPU, the NICs that the plan gives it.
    planned: Vec<Vec<usize>>,
}

/// Steps from near to far, 0 to [`FARTHEST`].
fn steps(level: Option<Level>) -> u32 {
    match level {
        Some(Level::Same | Level::NvLink(_) | Level::Pix) => 0,
        Some(Level::Pxb) => 1,
        Some(Level::Phb) => 3,
        Some(Level::Node) => 4,
        Some(Level::Sys) => 6,
        None => FARTHEST,
    }
}

const FARTHEST: u32 = 7;

/// Whether a level says that one PCIe switch joins two devices.
fn is_below_switch(level: Option<Level>) -> bool {
    matches!(level, Some(Level::Same | Level::Pix | Level::Pxb))
}

/// Most steps of the Hungarian method over all sets; beyond it each GPU in turn takes its nearest free NIC.
const MAX_EXACT_STEPS: usize = 1 << 26;

/// A GPU pair: NVLink is nearer than any switch, and more links are nearer.
fn pair_cost(level: Option<Level>) -> f64 {
    match level {
        Some(Level::NvLink(links)) => 0.5 / f64::from(links.0.max(1)),
        level => f64::from(steps(level)) + 0.5,
    }
}

impl<'a> Scorer<'a> {
    pub(super) fn new(host: &'a Host, gpus: &[GpuId], nics: &[HcaId], planned: &BTreeMap<String, Vec<String>>) -> Self {
        let to_gpus = |a: &GpuId| gpus.iter().map(|b| host.gpu_level(*a, *b)).collect();
        let ways = Ways::of(host);
        let level = |gpu: GpuId, nic: HcaId| ways.pair(gpu, nic).and_then(|pair| pair.level());
        let to_nics = |gpu: &GpuId| nics.iter().map(|nic| level(*gpu, *nic)).collect();
        let place_of = |name: &String| nics.iter().position(|nic| host.hca(*nic).is_some_and(|hca| hca.name == *name));
        let planned = |gpu: &GpuId| {
            let names = host.gpu(*gpu).and_then(|gpu| planned.get(&gpu.name));
            names.into_iter().flatten().filter_map(place_of).collect()
        };
        Self {
            host,
            planned: gpus.iter().map(planned).collect(),
            gpu_levels: gpus.iter().map(to_gpus).collect(),
            nic_levels: gpus.iter().map(to_nics).collect(),
            gpus: gpus.to_vec(),
            nics: nics.to_vec(),
        }
    }

    pub(super) fn gpus(&self) -> usize {
        self.gpus.len()
    }

    fn gpu_level(&self, a: usize, b: usize) -> Option<Level> {
        self.gpu_levels.get(a)?.get(b).copied().flatten()
    }

    fn nic_level(&self, gpu: usize, nic: usize) -> Option<Level> {
        self.nic_levels.get(gpu)?.get(nic).copied().flatten()
    }

    pub(super) fn gpu_cost(&self, a: usize, b: usize) -> f64 {
        pair_cost(self.gpu_level(a, b))
    }

    /// The set with its best NICs and its cost; `None` if it breaks a constraint.
    pub(super) fn score(&self, set: &[usize], request: &PlaceRequest, exact: bool) -> Option<Scored> {
        let nics = self.choose_nics(set, request.nics, exact);
        let pairs = || set.iter().enumerate().flat_map(|(place, a)| set.iter().skip(place + 1).map(move |b| (*a, *b)));
        if !self.fulfils(set, &nics, request, pairs()) {
            return None;
        }
        let worst = f64::from(FARTHEST) + 0.5;
        let between = average(pairs().map(|(a, b)| self.gpu_cost(a, b) / worst));
        let to_nics = average(self.nearest(set, &nics).map(|level| f64::from(steps(level)) / f64::from(FARTHEST)));
        let cost = match (set.len() > 1, nics.is_empty()) {
            (true, false) => f64::midpoint(between, to_nics),
            (true, true) => between,
            (false, _) => to_nics,
        };
        let mut chosen: Vec<HcaId> = nics.iter().filter_map(|nic| self.nics.get(*nic).copied()).collect();
        chosen.sort_unstable();
        Some(Scored {
            gpus: set.iter().filter_map(|gpu| self.gpus.get(*gpu).copied()).collect(),
            nics: chosen,
            cost,
            spoilt: self.spoilt(set),
            farthest: (
                pairs().filter_map(|(a, b)| self.gpu_level(a, b)).max(),
                self.nearest(set, &nics).flatten().max(),
            ),
        })
    }

    /// Of each GPU its nearest NIC, then of each NIC its nearest GPU, all of one set. Empty without NICs.
    fn nearest(&self, set: &[usize], nics: &[usize]) -> impl Iterator<Item = Option<Level>> {
        let near = |levels: &mut dyn Iterator<Item = Option<Level>>| levels.min_by_key(|level| (steps(*level), *level));
        let of_gpu = move |gpu: &usize| near(&mut nics.iter().map(|nic| self.nic_level(*gpu, *nic)));
        let of_nic = move |nic: &usize| near(&mut set.iter().map(|gpu| self.nic_level(*gpu, *nic)));
        set.iter().filter_map(of_gpu).chain(nics.iter().filter_map(of_nic))
    }

    /// Whether the NICs of that many sets of `size` GPUs may be chosen exactly.
    pub(super) fn may_be_exact(&self, sets: usize, size: usize, wanted: usize) -> bool {
        let steps = wanted.saturating_mul(wanted.max(size)).saturating_mul(self.nics.len());
        steps.saturating_mul(sets) <= MAX_EXACT_STEPS
    }

    /// NICs of a set, all distinct: as many for each GPU as there are for all, then the rest where most is gained.
    fn choose_nics(&self, set: &[usize], wanted: usize, exact: bool) -> Vec<usize> {
        if wanted == 0 || set.is_empty() || wanted > self.nics.len() {
            return Vec::new();
        }
        if !exact {
            return self.nics_in_turn(set, wanted);
        }
        let turns: Vec<usize> = set.iter().copied().cycle().take(wanted - wanted % set.len()).collect();
        let mut chosen = self.nics_of_turns(&turns);
        while chosen.len() < wanted {
            let Some(next) = self.next_nic(set, &chosen) else { break };
            chosen.push(next);
        }
        chosen
    }

    /// Distance first, then what the plan says, then the place in PCI order, so that the answer is one.
    fn nic_cost(&self, gpu: usize, nic: usize) -> i64 {
        let far = steps(self.nic_level(gpu, nic));
        let unplanned = i64::from(!self.is_planned(gpu, nic)) << 24;
        (i64::from(far) << 40) + unplanned + i64::try_from(nic).unwrap_or(i64::MAX >> 40)
    }

    fn is_planned(&self, gpu: usize, nic: usize) -> bool {
        self.planned.get(gpu).is_some_and(|nics| nics.contains(&nic))
    }

    /// One NIC for each turn of a GPU, least distance together.
    fn nics_of_turns(&self, turns: &[usize]) -> Vec<usize> {
        if turns.is_empty() {
            return Vec::new();
        }
        let costs = Matrix::from_fn(turns.len(), self.nics.len(), |(turn, nic)| {
            turns.get(turn).map_or(i64::MAX >> 8, |gpu| self.nic_cost(*gpu, nic))
        });
        kuhn_munkres_min(&costs).1
    }

    /// The NIC that leaves all GPUs nearest to theirs, then the one nearest to a GPU itself. Where levels come of one
    /// tree, taking such a NIC time and again is optimal: what a NIC gains is the GPUs below the bridges newly reached.
    fn next_nic(&self, set: &[usize], chosen: &[usize]) -> Option<usize> {
        let far = |gpu: usize, nic: usize| steps(self.nic_level(gpu, nic));
        let now: Vec<(usize, u32)> =
            set.iter().map(|gpu| (*gpu, chosen.iter().map(|nic| far(*gpu, *nic)).min().unwrap_or(FARTHEST))).collect();
        let open = (0..self.nics.len()).filter(|nic| !chosen.contains(nic));
        open.min_by_key(|nic| {
            let left: u32 = now.iter().map(|(gpu, now)| far(*gpu, *nic).min(*now)).sum();
            let planned = set.iter().any(|gpu| self.is_planned(*gpu, *nic));
            (left, now.iter().map(|(gpu, _)| far(*gpu, *nic)).min(), !planned, *nic)
        })
    }

    /// Each GPU in turn takes its nearest free NIC.
    fn nics_in_turn(&self, set: &[usize], wanted: usize) -> Vec<usize> {
        let mut free: Vec<usize> = (0..self.nics.len()).collect();
        let take = |gpu: &usize| {
            let (place, _) = free.iter().enumerate().min_by_key(|(_, nic)| self.nic_cost(*gpu, **nic))?;
            Some(free.swap_remove(place))
        };
        set.iter().cycle().take(wanted).map_while(take).collect()
    }

    fn fulfils(
        &self,
        set: &[usize],
        nics: &[usize],
        request: &PlaceRequest,
        mut pairs: impl Iterator<Item = (usize, usize)> + Clone,
    ) -> bool {
        if request.nvlink && !pairs.clone().all(|(a, b)| matches!(self.gpu_level(a, b), Some(Level::NvLink(_)))) {
            return false;
        }
        if request.same_numa && !self.is_on_one_node(set, nics) {
            return false;
        }
        if !request.same_switch {
            return true;
        }
        let joined = pairs.all(|(a, b)| self.share_switch(a, b));
        joined && nics.iter().all(|nic| set.iter().all(|gpu| is_below_switch(self.nic_level(*gpu, *nic))))
    }

    /// Whether two GPUs hang below one PCIe switch. Where NVLink hides that, a NIC that is below one with both tells.
    fn share_switch(&self, a: usize, b: usize) -> bool {
        let bdf = |place: usize| self.host.gpu(*self.gpus.get(place)?)?.bdf;
        let level = match (bdf(a), bdf(b)) {
            (Some(a), Some(b)) => self.host.pci_level(a, b),
            _ => self.gpu_level(a, b),
        };
        let with_both = |nic| [a, b].into_iter().all(|gpu| is_below_switch(self.nic_level(gpu, nic)));
        is_below_switch(level) || matches!(level, Some(Level::NvLink(_)) | None) && (0..self.nics.len()).any(with_both)
    }

    fn is_on_one_node(&self, set: &[usize], nics: &[usize]) -> bool {
        let sole = self.host.sole_numa_node();
        let gpus = set.iter().map(|gpu| self.gpus.get(*gpu).and_then(|gpu| self.host.gpu(*gpu)?.numa));
        let nics = nics.iter().map(|nic| self.nics.get(*nic).and_then(|nic| self.host.hca(*nic)?.numa));
        let mut nodes: Vec<Option<NumaId>> = gpus.chain(nics).map(|numa| numa.or(sole)).collect();
        nodes.sort_unstable();
        nodes.dedup();
        matches!(nodes.as_slice(), [Some(_)])
    }

    fn spoilt(&self, set: &[usize]) -> usize {
        let is_beside = |other: &usize| set.iter().any(|gpu| self.share_switch(*gpu, *other));
        (0..self.gpus.len()).filter(|other| !set.contains(other)).filter(is_beside).count()
    }

    pub(super) fn describe(&self, set: &Scored) -> PlaceSet {
        let mut reasons = Vec::new();
        if set.gpus.len() > 1 {
            let level = set.farthest.0.map_or_else(|| "unknown".to_owned(), |level| level.to_string());
            reasons.push(format!("farthest two GPUs: {level}"));
        }
        if !set.nics.is_empty() {
            let level = set.farthest.1.map_or_else(|| "unknown".to_owned(), |level| level.to_string());
            reasons.push(format!("farthest GPU and NIC: {level}"));
        }
        if set.spoilt > 0 {
            reasons.push(format!("leaves {} of the same switch behind", counted(set.spoilt, "free GPU")));
        }
        PlaceSet {
            gpus: set.gpus.iter().filter_map(|id| self.host.gpu(*id)).map(|gpu| gpu.name.clone()).collect(),
            nics: set.nics.iter().filter_map(|id| self.host.hca(*id)).map(|hca| hca.name.clone()).collect(),
            score: ((1.0 - set.cost) * 1000.0).round() / 10.0,
            reasons,
        }
    }
}

fn average(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0.0), |(sum, count), value| (sum + value, count + 1.0));
    if count > 0.0 { sum / count } else { 0.0 }
}
