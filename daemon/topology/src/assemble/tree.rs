//! The PCI tree: order, parents that exist, no cycles, roles, NUMA nodes taken from above.

use std::collections::BTreeMap;

use crate::bdf::Bdf;
use crate::model::{MAX_BRIDGE_DEPTH, PciFunction, PciRole, Upstream};
use crate::source::{SourceKind, Sourced};

/// Sorts the functions by address and settles what hangs below what.
pub(super) fn place(listed: Vec<PciFunction>, warnings: &mut Vec<String>) -> Vec<PciFunction> {
    let mut functions: BTreeMap<Bdf, PciFunction> = BTreeMap::new();
    for function in listed {
        let bdf = function.bdf;
        if functions.insert(bdf, function).is_some() {
            warnings.push(format!("{bdf}: listed twice, the last one is kept"));
        }
    }
    cut_unknown_parents(&mut functions, warnings);
    cut_cycles(&mut functions, warnings);
    let mut functions: Vec<PciFunction> = functions.into_values().collect();
    conclude(&mut functions);
    functions
}

fn cut_unknown_parents(functions: &mut BTreeMap<Bdf, PciFunction>, warnings: &mut Vec<String>) {
    let missing: Vec<(Bdf, Bdf)> = functions
        .values()
        .filter_map(|function| match function.upstream {
            Upstream::Bridge(parent) if !functions.contains_key(&parent) => Some((function.bdf, parent)),
            _ => None,
        })
        .collect();
    for (bdf, parent) in missing {
        warnings.push(format!("{bdf}: the bridge {parent} above it is not listed"));
        if let Some(function) = functions.get_mut(&bdf) {
            function.upstream = Upstream::Unknown;
        }
    }
}

/// Each function is walked at most once: a walk ends at one that is known to reach a top.
fn cut_cycles(functions: &mut BTreeMap<Bdf, PciFunction>, warnings: &mut Vec<String>) {
    let mut depth: BTreeMap<Bdf, usize> = BTreeMap::new();
    let all: Vec<Bdf> = functions.keys().copied().collect();
    for start in all {
        let mut path: Vec<Bdf> = Vec::new();
        let mut at = start;
        let base = loop {
            if let Some(known) = depth.get(&at) {
                break *known;
            }
            path.push(at);
            match functions.get(&at).map(|function| function.upstream) {
                Some(Upstream::Bridge(parent)) if path.contains(&parent) => {
                    break cut(functions, at, "the bridges above it form a ring", warnings);
                }
                Some(Upstream::Bridge(_)) if path.len() > MAX_BRIDGE_DEPTH => {
                    break cut(functions, at, "too many bridges above it", warnings);
                }
                Some(Upstream::Bridge(parent)) => at = parent,
                _ => break 0,
            }
        };
        for (steps, bdf) in path.iter().rev().enumerate() {
            let depth_here = base + steps + 1;
            if depth_here > MAX_BRIDGE_DEPTH {
                cut(functions, *bdf, "too many bridges above it", warnings);
                depth.insert(*bdf, 1);
                break;
            }
            depth.insert(*bdf, depth_here);
        }
    }
}

fn cut(functions: &mut BTreeMap<Bdf, PciFunction>, bdf: Bdf, why: &str, warnings: &mut Vec<String>) -> usize {
    warnings.push(format!("{bdf}: {why}, its place is taken as unknown"));
    if let Some(function) = functions.get_mut(&bdf) {
        function.upstream = Upstream::Unknown;
    }
    0
}

/// Roles and inherited NUMA nodes, from the top down.
fn conclude(functions: &mut [PciFunction]) {
    let index: BTreeMap<Bdf, usize> =
        functions.iter().enumerate().map(|(place, function)| (function.bdf, place)).collect();
    let mut settled = vec![false; functions.len()];
    for start in 0..functions.len() {
        let mut path = vec![start];
        while let Some(parent) = path
            .last()
            .and_then(|at| parent_place(functions, &index, *at))
            .filter(|parent| !settled.get(*parent).copied().unwrap_or(true))
        {
            path.push(parent);
        }
        while let Some(at) = path.pop() {
            let parent = parent_place(functions, &index, at)
                .and_then(|parent| functions.get(parent))
                .map(|parent| (parent.role, parent.numa.clone()));
            if let Some(function) = functions.get_mut(at) {
                settle(function, parent);
            }
            if let Some(done) = settled.get_mut(at) {
                *done = true;
            }
        }
    }
}

fn parent_place(functions: &[PciFunction], index: &BTreeMap<Bdf, usize>, at: usize) -> Option<usize> {
    match functions.get(at)?.upstream {
        Upstream::Bridge(parent) => index.get(&parent).copied(),
        Upstream::Root(_) | Upstream::Unknown => None,
    }
}

type Parent = (PciRole, Option<Sourced<crate::model::NumaId>>);

fn settle(function: &mut PciFunction, parent: Option<Parent>) {
    let (above, numa) = parent.map_or((None, None), |(role, numa)| (Some(role), numa));
    if function.numa.is_none() {
        function.numa = numa.map(|numa| Sourced::new(numa.value, SourceKind::Derived));
    }
    let is_collapsed = function.source == SourceKind::NcclXml;
    function.role = match (function.is_bridge(), above, function.upstream) {
        (false, _, _) => PciRole::Endpoint,
        // NCCL walks two folders a step (`ncclTopoGetXmlFromSys`, nccl:src/graph/xml.cc): root ports and
        // downstream ports never get an element.
        (true, _, _) if is_collapsed => PciRole::Switch,
        (true, None, Upstream::Root(_)) => PciRole::RootPort,
        (true, Some(PciRole::RootPort | PciRole::SwitchDownstream), _) => PciRole::SwitchUpstream,
        (true, Some(PciRole::SwitchUpstream | PciRole::Switch), _) => PciRole::SwitchDownstream,
        (true, _, _) => PciRole::Bridge,
    };
}
