//! From candidates to a choice: pins first, then one NIC for each GPU, then even shares of what is left.

use std::collections::{BTreeMap, BTreeSet};

use crate::bdf::Bdf;
use crate::model::{GpuId, HcaId, Host};
use crate::plan::assign::{Edge, Problem, Slot};
use crate::plan::candidates::{Candidates, Nearness};
use crate::plan::{PlanOptions, mbps};

/// NICs of each GPU.
#[derive(Debug, Default)]
pub(super) struct Choice {
    given: BTreeMap<GpuId, Vec<HcaId>>,
    /// GPUs whose NICs the operator fixed.
    pub(super) pinned: BTreeSet<GpuId>,
    /// Pins that name no device of this host.
    pub(super) bad_pins: Vec<String>,
}

/// Assumed where no rate is known at all; only its being equal for all matters.
const UNKNOWN_GBPS: f64 = 1.0;

impl Choice {
    pub(super) fn make(
        host: &Host,
        options: &PlanOptions,
        candidates: &Candidates,
        kept: &BTreeMap<GpuId, Vec<HcaId>>,
    ) -> Self {
        let mut choice = Self { given: kept.clone(), ..Self::default() };
        choice.pin(host, options);
        // GPUs of which the input tells no level (part of a matrix) take what the others leave.
        for has_level in [true, false] {
            let rounds = Rounds::new(host, options, candidates, &choice, has_level);
            rounds.first(&mut choice);
            rounds.shares(&mut choice);
        }
        for nics in choice.given.values_mut() {
            nics.sort_by_key(|nic| candidates.nic(*nic).map(|candidate| candidate.order));
        }
        choice
    }

    pub(super) fn of_gpu(&self, gpu: GpuId) -> &[HcaId] {
        self.given.get(&gpu).map_or(&[], Vec::as_slice)
    }

    /// GPUs that have a NIC.
    pub(super) fn users(&self, nic: HcaId) -> impl Iterator<Item = GpuId> {
        self.given.iter().filter(move |(_, nics)| nics.contains(&nic)).map(|(gpu, _)| *gpu)
    }

    fn load(&self, nic: HcaId) -> u64 {
        u64::try_from(self.users(nic).count()).unwrap_or(u64::MAX)
    }

    fn pin(&mut self, host: &Host, options: &PlanOptions) {
        for pin in &options.pins {
            let Some(gpu) = host.find_gpu(&pin.gpu) else {
                self.bad_pins.push(format!("pin of {}: no such GPU on this host", pin.gpu));
                continue;
            };
            let mut nics = Vec::new();
            for name in &pin.nics {
                match host.find_hca(name) {
                    Some(nic) => nics.push(nic),
                    None => self.bad_pins.push(format!("pin of {}: no NIC {name} on this host", pin.gpu)),
                }
            }
            if nics.is_empty() && !pin.nics.is_empty() {
                continue;
            }
            self.pinned.insert(gpu);
            self.given.insert(gpu, nics);
        }
    }
}

/// The GPUs that still want NICs, with their nearest ones.
struct Rounds<'a> {
    host: &'a Host,
    candidates: &'a Candidates,
    rows: Vec<Row>,
    /// By HCA: how near it is to the GPU it is nearest to.
    nearest_gpu: Vec<Option<Nearness>>,
    /// By HCA: what it has to share out, the least over the GPUs it is nearest to.
    slot_mbps: Vec<u64>,
    /// By HCA: a number for its card; HCAs without one are cards of their own.
    cards: Vec<usize>,
    /// Mbit/s assumed of NICs whose rate is not known.
    usual_mbps: u64,
    deepest: u64,
}

struct Row {
    gpu: GpuId,
    nearest: Vec<HcaId>,
    /// Place in rail order where the GPU's share begins.
    share_at: usize,
}

impl<'a> Rounds<'a> {
    /// Rounds for the GPUs that have no NICs yet, those with a known level to some NIC or those without.
    fn new(
        host: &'a Host,
        options: &PlanOptions,
        candidates: &'a Candidates,
        choice: &Choice,
        has_level: bool,
    ) -> Self {
        let mut rows = Vec::new();
        for gpu in (0..host.gpus.len()).map(GpuId) {
            if !choice.given.contains_key(&gpu) {
                let mut nearest = candidates.nearest(gpu, |_, nic| nic.exclusion.is_none());
                let is_known = |nic: &HcaId| candidates.nearness(gpu, *nic).is_some_and(|near| !near.has_no_level);
                if nearest.first().is_some_and(is_known) != has_level {
                    continue;
                }
                nearest.retain(|nic| is_within(host, options, gpu, *nic));
                rows.push(Row { gpu, nearest, share_at: 0 });
            }
        }
        place_shares(&mut rows);
        let known = host.hcas.iter().filter_map(|hca| hca.rate_gbps()).max_by(f64::total_cmp);
        let depths = host.functions.iter().filter(|f| f.is_bridge()).map(|f| host.bridges_above(f.bdf).count() + 1);
        let mut rounds = Self {
            host,
            candidates,
            nearest_gpu: vec![None; host.hcas.len()],
            slot_mbps: Vec::new(),
            cards: cards(host),
            rows,
            usual_mbps: mbps(known.unwrap_or(UNKNOWN_GBPS)),
            deepest: depths.max().map_or(0, widen),
        };
        rounds.look_from_nics();
        rounds
    }

    /// Fills what is known by HCA, once for all rounds.
    fn look_from_nics(&mut self) {
        let mut least: Vec<Option<u64>> = vec![None; self.host.hcas.len()];
        for row in &self.rows {
            for nic in &row.nearest {
                let (near, rate) = (self.candidates.nearness(row.gpu, *nic), self.mbps(row.gpu, *nic));
                if let Some(known) = self.nearest_gpu.get_mut(nic.0) {
                    *known = [*known, near].into_iter().flatten().min();
                }
                if let Some(known) = least.get_mut(nic.0) {
                    *known = Some(known.map_or(rate, |known| known.min(rate)));
                }
            }
        }
        self.slot_mbps = least.into_iter().map(|rate| rate.unwrap_or(self.usual_mbps)).collect();
    }

    /// One NIC for every GPU, shared only where there is no other way or sharing gives more.
    fn first(&self, choice: &mut Choice) {
        let problem = self.problem(choice, |_, _| true, 0);
        let answer = problem.solve(true);
        for (row, nic) in self.rows.iter().zip(answer) {
            let nics = nic.map(HcaId).into_iter().collect();
            choice.given.insert(row.gpu, nics);
        }
    }

    /// Free NICs that are as good as the first, one more for all GPUs that compete for them or for none.
    fn shares(&self, choice: &mut Choice) {
        for round in 1..=self.host.hcas.len() {
            let contenders = self.contenders(choice);
            if contenders.values().all(Vec::is_empty) {
                return;
            }
            let wanted = |row: &Row, nic: HcaId| contenders.get(&row.gpu).is_some_and(|nics| nics.contains(&nic));
            let answer = self.problem(choice, wanted, round).solve(false);
            let unserved = self.rows.iter().zip(&answer).filter(|(_, nic)| nic.is_none()).map(|(row, _)| row.gpu);
            let uneven =
                competing(&contenders, unserved.filter(|gpu| contenders.get(gpu).is_some_and(|n| !n.is_empty())));
            let mut has_given = false;
            for (row, nic) in self.rows.iter().zip(answer) {
                if let Some(nic) = nic.filter(|_| !uneven.contains(&row.gpu)) {
                    choice.given.entry(row.gpu).or_default().push(HcaId(nic));
                    has_given = true;
                }
            }
            if !has_given {
                return;
            }
        }
    }

    /// Free equals that each GPU may claim: of the NICs nearest to it, those to which no other GPU is nearer.
    fn contenders(&self, choice: &Choice) -> BTreeMap<GpuId, Vec<HcaId>> {
        let mut free: BTreeMap<GpuId, Vec<HcaId>> = BTreeMap::new();
        for row in &self.rows {
            let own = choice.of_gpu(row.gpu);
            let shares = own.iter().any(|nic| choice.load(*nic) > 1);
            let least = own.iter().map(|nic| self.mbps(row.gpu, *nic)).max();
            let claims = row.nearest.iter().copied().filter(|nic| {
                let is_equal = self.candidates.nic(*nic).is_some_and(|nic| !nic.demotion.is_apart());
                let as_fast = least.is_some_and(|least| self.mbps(row.gpu, *nic) >= least);
                !shares && is_equal && as_fast && choice.load(*nic) == 0 && self.is_owner(row, *nic)
            });
            free.insert(row.gpu, claims.collect());
        }
        free
    }

    fn is_owner(&self, row: &Row, nic: HcaId) -> bool {
        self.candidates.nearness(row.gpu, nic) == self.nearest_gpu.get(nic.0).copied().flatten()
    }

    fn problem(&self, choice: &Choice, allows: impl Fn(&Row, HcaId) -> bool, round: usize) -> Problem {
        let slots = self.host.hcas.iter().enumerate().map(|(place, _)| Slot {
            card: self.cards.get(place).copied().unwrap_or(place),
            mbps: self.slot_mbps.get(place).copied().unwrap_or(self.usual_mbps),
            demotion: self.candidates.nics.get(place).map_or(0, |nic| nic.demotion.weight()),
            load: choice.load(HcaId(place)),
        });
        let edges = self.rows.iter().map(|row| {
            let mut edges = vec![None; self.host.hcas.len()];
            for (order, nic) in row.nearest.iter().enumerate().filter(|(_, nic)| allows(row, **nic)) {
                if let Some(edge) = edges.get_mut(nic.0) {
                    *edge = Some(self.edge(choice, row, *nic, order.abs_diff(row.share_at + round)));
                }
            }
            edges
        });
        Problem { slots: slots.collect(), edges: edges.collect() }
    }

    fn edge(&self, choice: &Choice, row: &Row, nic: HcaId, off_rail: usize) -> Edge {
        let bdfs = self.host.gpu(row.gpu).and_then(|gpu| gpu.bdf).zip(self.host.hca(nic).and_then(|hca| hca.bdf));
        let depth = bdfs.and_then(|(gpu, nic)| self.host.meeting(gpu, nic)).map_or(0, |meeting| widen(meeting.depth));
        let card = self.host.hca(nic).and_then(|hca| hca.card);
        let is_on_card = |id: &HcaId| card.is_some() && self.host.hca(*id).and_then(|hca| hca.card) == card;
        let own = choice.of_gpu(row.gpu).iter().any(is_on_card);
        let taken = choice.given.iter().any(|(gpu, nics)| *gpu != row.gpu && nics.iter().any(is_on_card));
        let off_rail = widen(off_rail);
        Edge {
            shallow: self.deepest.saturating_sub(depth),
            off_rail: off_rail.saturating_mul(off_rail),
            splits_card: u64::from(taken && !own),
        }
    }

    fn mbps(&self, gpu: GpuId, nic: HcaId) -> u64 {
        let has_rate = self.host.hca(nic).is_some_and(|hca| hca.rate_gbps().is_some());
        let known = self.host.nic_side_gbps(gpu, nic).map(mbps);
        match (known, has_rate) {
            (Some(known), true) => known,
            (Some(known), false) => known.min(self.usual_mbps),
            (None, _) => self.usual_mbps,
        }
    }
}

/// A number for the card of each HCA.
fn cards(host: &Host) -> Vec<usize> {
    let mut first: BTreeMap<Bdf, usize> = BTreeMap::new();
    let numbered = host.hcas.iter().enumerate();
    numbered.map(|(place, hca)| hca.card.map_or(place, |card| *first.entry(card).or_insert(place))).collect()
}

/// GPUs with the same nearest NICs take blocks of these in order: the first block the first GPU.
fn place_shares(rows: &mut [Row]) {
    let mut groups: BTreeMap<Vec<HcaId>, usize> = BTreeMap::new();
    for row in rows.iter() {
        *groups.entry(row.nearest.clone()).or_insert(0) += 1;
    }
    let mut next: BTreeMap<Vec<HcaId>, usize> = BTreeMap::new();
    for row in rows {
        let gpus = groups.get(&row.nearest).copied().unwrap_or(1).max(1);
        let place = next.entry(row.nearest.clone()).or_insert(0);
        row.share_at = *place * row.nearest.len() / gpus;
        *place += 1;
    }
}

fn is_within(host: &Host, options: &PlanOptions, gpu: GpuId, nic: HcaId) -> bool {
    match host.gpu_hca_level(gpu, nic) {
        Some(level) => level <= options.max_level,
        None => options.max_level >= crate::level::Level::Sys,
    }
}

/// GPUs that compete, directly or through others, with one of `seeds`.
fn competing(contenders: &BTreeMap<GpuId, Vec<HcaId>>, seeds: impl Iterator<Item = GpuId>) -> BTreeSet<GpuId> {
    let mut found: BTreeSet<GpuId> = BTreeSet::new();
    let mut open: Vec<GpuId> = seeds.collect();
    while let Some(gpu) = open.pop() {
        if found.insert(gpu) {
            let nics = contenders.get(&gpu).map_or(&[][..], Vec::as_slice);
            let rivals = contenders.iter().filter(|(_, theirs)| theirs.iter().any(|nic| nics.contains(nic)));
            open.extend(rivals.map(|(rival, _)| *rival));
        }
    }
    found
}

fn widen(count: usize) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}
