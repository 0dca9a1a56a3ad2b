//! Text of `rocm-smi --showtopo` and `--showtoponuma`, and of `amd-smi topology`: NUMA nodes of GPUs and the links
//! between them.
//!
//! No NICs; addresses of GPUs in the second alone. Lines that are no part of it are skipped. Tables are read one by one and
//! laid together where they are of the same GPUs and agree: a text may hold what several hosts printed.

mod facts;

use std::collections::{BTreeMap, BTreeSet};

use crate::level::Level;
use crate::model::{GivenLevel, NamedGpu, NumaId, RawHost};
use crate::pasted;
use crate::source::SourceKind;
use facts::Facts;

const SOURCE: SourceKind = SourceKind::RocmTopo;

/// Largest text that is read, in bytes.
pub const MAX_ROCM_BYTES: usize = 1 << 20;
/// Most GPUs of a host.
pub const MAX_ROCM_GPUS: usize = 256;

/// Why a text is no such output.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct BadRocmTopo(String);

/// Whether a text looks like such output.
#[must_use]
pub fn is_rocm_topo(text: &str) -> bool {
    const SIGNS: [&str; 5] =
        ["(TOPOLOGY) NUMA", "LINK TYPE BETWEEN TWO GPUS", "HOPS BETWEEN TWO GPUS", "LINK TYPE TABLE:", "HOPS TABLE:"];
    text.len() <= MAX_ROCM_BYTES && !text.trim_start().starts_with('{') && {
        let capitals = text.to_ascii_uppercase();
        SIGNS.iter().any(|sign| capitals.contains(sign))
    }
}

/// Reads the output.
///
/// # Errors
/// It names no GPU, or more than any host has.
pub fn parse(text: &str) -> Result<RawHost, BadRocmTopo> {
    if text.len() > MAX_ROCM_BYTES {
        return Err(BadRocmTopo(format!("has more than {MAX_ROCM_BYTES} bytes")));
    }
    let mut raw = RawHost::new(SOURCE);
    let facts = Facts::of(text, &mut raw.warnings)?;
    if facts.gpus.is_empty() {
        return Err(BadRocmTopo("names no GPU, neither in a table nor as `GPU[0] : (Topology) Numa Node`".to_owned()));
    }
    let numa = numa(&facts, &mut raw.warnings);
    for gpu in &facts.gpus {
        raw.named_gpus.push(NamedGpu { name: format!("GPU{gpu}"), numa: numa.get(gpu).copied() });
    }
    if !facts.addresses.is_empty() {
        let own = facts.addresses.iter().enumerate().filter(|(gpu, _)| facts.gpus.contains(gpu));
        let named = own.map(|(gpu, address)| format!("GPU{gpu} is {address}"));
        raw.warnings.push(format!("the text has addresses and no tree: {}", named.collect::<Vec<_>>().join(", ")));
    }
    let pairs: BTreeSet<&(usize, usize)> = facts.link.keys().chain(facts.hops.keys()).filter(|(a, b)| a < b).collect();
    for (a, b) in pairs {
        let nodes = numa.get(a).copied().zip(numa.get(b).copied());
        if let Some(level) = facts.level((*a, *b), nodes) {
            raw.given_levels.push(GivenLevel { a: format!("GPU{a}"), b: format!("GPU{b}"), level, source: SOURCE });
        }
    }
    Ok(raw)
}

/// Nodes of GPUs. Versions before ROCm 6.4 mix up the lines of partitioned GPUs (change log of ROCm/rocm_smi_lib), also
/// those of GPUs whose two lines agree: where one contradicts itself, none is believed.
fn numa(facts: &Facts, warnings: &mut Vec<String>) -> BTreeMap<usize, NumaId> {
    let differs = |(gpu, node): (&usize, &String)| {
        let affinity = facts.affinity.get(gpu).filter(|affinity| *affinity != node)?;
        Some(format!("GPU{gpu} has NUMA node {node} but affinity {affinity}"))
    };
    if let Some(first) = facts.node.iter().find_map(differs) {
        warnings.push(format!("{first}: the NUMA nodes of all GPUs are taken as unknown"));
        return BTreeMap::new();
    }
    let told = facts.affinity.iter().chain(&facts.node);
    told.filter_map(|(gpu, text)| Some((*gpu, NumaId(pasted::sole_number(text)?)))).collect()
}

/// Weight of one xGMI link; each further one on the way adds as much (`weight` of KFD's io_link).
const XGMI_WEIGHT: u32 = 15;

impl Facts {
    /// One xGMI link is a link of their own. All else goes by PCIe or through other GPUs: the nodes tell how far
    /// that is at most, not whether there is a switch in common. Hops count steps and no links: 1 is xGMI, also through
    /// other GPUs, 2 PCIe within a node, 3 between nodes (MI200 system optimization guide of AMD); the weight tells
    /// whether a link is direct (ROCm/rocm-systems#5763, open-mpi/hwloc#775).
    fn level(&self, pair: (usize, usize), nodes: Option<(NumaId, NumaId)>) -> Option<Level> {
        let [link, hops, weight] = [&self.link, &self.hops, &self.weight].map(|of| of.get(&pair).map(String::as_str));
        let weight: Option<u32> = weight.and_then(|weight| weight.parse().ok());
        level(link, hops, weight.is_none_or(|weight| weight <= XGMI_WEIGHT), nodes)
    }
}

fn level(link: Option<&str>, hops: Option<&str>, is_direct: bool, nodes: Option<(NumaId, NumaId)>) -> Option<Level> {
    match (link, hops, nodes) {
        (Some("XGMI"), None | Some("1"), _) | (None, Some("1"), _) if is_direct => Some(Level::nvlink(1)),
        (_, _, Some((a, b))) => Some(if a == b { Level::Node } else { Level::Sys }),
        (Some("PCIE") | None, Some("2"), None) => Some(Level::Node),
        (Some("PCIE") | None, Some("3"), None) => Some(Level::Sys),
        _ => None,
    }
}
