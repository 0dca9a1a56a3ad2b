//! Answers of tests/cases, and what every pairing must keep to.
#![allow(dead_code, reason = "each test binary uses its part")]
#![allow(clippy::panic, clippy::unwrap_used, reason = "helpers of tests, which clippy does not know as such")]

pub(crate) mod memory;
pub(crate) mod tables;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use gdrd_topology::level::Level;
use gdrd_topology::model::{GpuId, HcaId, HcaOrigin, Host, NumaId, Snapshot};
use gdrd_topology::plan::contract::Plan;

/// NICs that are equally near to a GPU.
#[derive(Debug, Clone)]
pub(crate) struct Group {
    pub(crate) level: Level,
    pub(crate) nics: BTreeSet<String>,
}

/// What is right for some GPUs of a case.
#[derive(Debug, Clone)]
pub(crate) struct Answer {
    /// Names or addresses.
    pub(crate) gpus: Vec<String>,
    /// `None` is unknown, or more than one node.
    pub(crate) numa: Option<NumaId>,
    /// Nearest first.
    pub(crate) groups: Vec<Group>,
}

pub(crate) fn case_path(relative: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/cases")).join(relative)
}

pub(crate) fn case_text(relative: &str) -> String {
    let path = case_path(relative);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Sections of a file of cases: what follows each `### NAME` line.
pub(crate) fn sections(text: &str) -> Vec<(&str, Vec<&str>)> {
    let mut sections: Vec<(&str, Vec<&str>)> = Vec::new();
    for line in text.lines() {
        if let Some(name) = line.strip_prefix("### ") {
            sections.push((name, Vec::new()));
        } else if let Some((_, lines)) = sections.last_mut() {
            lines.push(line);
        }
    }
    sections
}

pub(crate) fn answers(lines: &[&str]) -> Vec<Answer> {
    lines.iter().filter_map(|line| line.strip_prefix("- GPU")).map(answer).collect()
}

/// ` 0f:00.0,15:00.0 (numa 3): PIX a,b | farther PXB c` or `0,1 (numa 0): …`.
fn answer(line: &str) -> Answer {
    let (head, levels) = line.split_once("): ").expect("an answer has levels");
    let (gpus, numa) = head.split_once(" (numa ").expect("an answer names the NUMA node");
    let gpu = |word: &str| match word.matches(':').count() {
        0 => format!("GPU{word}"),
        1 => format!("0000:{word}"),
        _ => word.to_owned(),
    };
    let groups = levels.split(" | ").map(|group| {
        let (level, nics) = group.trim_start_matches("farther ").split_once(' ').expect("a level and NICs");
        let nics = nics.split(',').flat_map(range).collect();
        Group { level: Level::parse(level).expect("a level"), nics }
    });
    Answer {
        gpus: gpus.trim().split(',').map(gpu).collect(),
        numa: numa.parse().ok().map(NumaId),
        groups: groups.collect(),
    }
}

/// `mlx5_0..3` as four names.
fn range(word: &str) -> Vec<String> {
    let Some((first, last)) = word.split_once("..") else { return vec![word.to_owned()] };
    let digits = first.rfind(|c: char| !c.is_ascii_digit()).map_or(0, |at| at + 1);
    let (stem, from) = first.split_at(digits);
    let (from, to): (u32, u32) = (from.parse().unwrap(), last.parse().unwrap());
    (from..=to).map(|number| format!("{stem}{number}")).collect()
}

/// NICs of a GPU by level.
pub(crate) fn by_level(host: &Host, gpu: GpuId) -> BTreeMap<Level, BTreeSet<String>> {
    let mut levels: BTreeMap<Level, BTreeSet<String>> = BTreeMap::new();
    for (place, hca) in host.hcas.iter().enumerate() {
        if let Some(level) = host.gpu_hca_level(gpu, HcaId(place)) {
            levels.entry(level).or_default().insert(hca.name.clone());
        }
    }
    levels
}

/// Asserts what holds for the plan of any host: GPUs get NICs of their best level alone, a NIC is shared only
/// where no GPU that uses it has a free one as near, equal GPUs get equal shares, sockets get none.
pub(crate) fn assert_plan_keeps_the_rules(case: &str, snapshot: &Snapshot, plan: &Plan) {
    let host = &snapshot.host;
    let is_socket = |name: &str| host.hcas.iter().any(|hca| hca.name == name && hca.origin == HcaOrigin::Socket);
    let is_left_out = |name: &str| {
        let told = plan.warnings.iter().filter_map(|warning| warning.split_once(" not assigned: "));
        let mut virtual_functions = told.filter(|(_, reason)| reason.contains("virtual function"));
        is_socket(name) || virtual_functions.any(|(names, _)| names.split([',', ' ']).any(|word| word == name))
    };
    let mut users: BTreeMap<String, usize> = BTreeMap::new();
    for nic in plan.gpus.iter().flat_map(|gpu| &gpu.assigned) {
        *users.entry(nic.clone()).or_default() += 1;
    }
    let mut shares: BTreeMap<BTreeSet<String>, Vec<usize>> = BTreeMap::new();
    for (place, gpu) in plan.gpus.iter().enumerate() {
        let levels = by_level(host, GpuId(place));
        let best = levels
            .values()
            .map(|nics| nics.iter().filter(|nic| !is_left_out(nic)).cloned().collect::<BTreeSet<_>>())
            .find(|nics| !nics.is_empty())
            .unwrap_or_default();
        let assigned: BTreeSet<String> = gpu.assigned.iter().cloned().collect();
        assert_eq!(assigned.len(), gpu.assigned.len(), "{case} {}: a NIC twice", gpu.name);
        assert!(assigned.is_subset(&best), "{case} {}: {assigned:?} of {best:?}", gpu.name);
        assert_eq!(assigned.is_empty(), best.is_empty(), "{case} {}: {assigned:?} of {best:?}", gpu.name);
        let free: Vec<&String> = best.iter().filter(|nic| !users.contains_key(*nic)).collect();
        let is_shared = gpu.assigned.iter().any(|nic| users.get(nic).is_some_and(|count| *count > 1));
        assert!(!is_shared || free.is_empty(), "{case} {}: shares {assigned:?} beside free {free:?}", gpu.name);
        shares.entry(best).or_default().push(gpu.assigned.len());
    }
    for (best, counts) in shares {
        let (least, most) = (counts.iter().min().unwrap(), counts.iter().max().unwrap());
        assert!(most - least <= 1, "{case}: shares {counts:?} of {best:?}");
    }
}
