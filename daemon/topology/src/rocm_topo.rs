//! Text of `rocm-smi --showtopo` and `--showtoponuma`, and of `amd-smi topology`: NUMA nodes of GPUs and the links
//! between them.
//!
//! No NICs; addresses of GPUs in the second alone. Lines that are no part of it are skipped.

use std::collections::{BTreeMap, BTreeSet};

use crate::bdf::Bdf;
use crate::level::Level;
use crate::model::{GivenLevel, NamedGpu, NumaId, RawHost};
use crate::pasted;
use crate::source::SourceKind;

const SOURCE: SourceKind = SourceKind::RocmTopo;

/// Largest text that is read, in bytes.
pub const MAX_ROCM_BYTES: usize = 1 << 20;
/// Most GPUs of a host.
pub const MAX_ROCM_GPUS: usize = 256;

/// Why a text is no such output.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct BadRocmTopo(String);

/// What the lines say, by GPU number: that of `GPU0`, or the place of an address among those of the text.
#[derive(Debug, Default)]
struct Facts {
    node: BTreeMap<usize, String>,
    affinity: BTreeMap<usize, String>,
    /// GPUs that have a row.
    rows: BTreeSet<usize>,
    addresses: Vec<Bdf>,
    weight: BTreeMap<(usize, usize), String>,
    hops: BTreeMap<(usize, usize), String>,
    link: BTreeMap<(usize, usize), String>,
}

/// Tables of the output, by their titles (`showHwTopology`, rocm_smi.py of ROCm/rocm_smi_lib; `topology`,
/// amdsmi_commands.py of ROCm/amdsmi).
#[derive(Clone, Copy, PartialEq, Eq)]
enum Table {
    Other,
    Weight,
    Hops,
    LinkType,
}

/// Whether a text looks like such output.
#[must_use]
pub fn is_rocm_topo(text: &str) -> bool {
    text.len() <= MAX_ROCM_BYTES
        && !text.trim_start().starts_with('{')
        && (text.contains("(Topology) Numa")
            || text.contains("Link Type between two GPUs")
            || text.contains("Hops between two GPUs")
            || text.contains("LINK TYPE TABLE:")
            || text.contains("HOPS TABLE:"))
}

/// Reads the output.
///
/// # Errors
/// It names no GPU, or more than any host has.
pub fn parse(text: &str) -> Result<RawHost, BadRocmTopo> {
    if text.len() > MAX_ROCM_BYTES {
        return Err(BadRocmTopo(format!("has more than {MAX_ROCM_BYTES} bytes")));
    }
    let facts = facts(text)?;
    let mut raw = RawHost::new(SOURCE);
    let pairs = facts.link.keys().chain(facts.hops.keys()).flat_map(|(a, b)| [*a, *b]);
    let nodes = facts.node.keys().chain(facts.affinity.keys());
    let gpus: BTreeSet<usize> = nodes.chain(&facts.rows).copied().chain(pairs).collect();
    if gpus.is_empty() {
        return Err(BadRocmTopo("names no GPU, neither in a table nor as `GPU[0] : (Topology) Numa Node`".to_owned()));
    }
    let numa = numa(&facts, &mut raw.warnings);
    for gpu in &gpus {
        raw.named_gpus.push(NamedGpu { name: format!("GPU{gpu}"), numa: numa.get(gpu).copied() });
    }
    if !facts.addresses.is_empty() {
        let named = facts.addresses.iter().enumerate().map(|(gpu, address)| format!("GPU{gpu} is {address}"));
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

    /// The number of a GPU named `GPU0` or by an address that a header listed.
    fn number(&self, word: &str) -> Option<usize> {
        match word.strip_prefix("GPU") {
            Some(number) => number.parse().ok(),
            None => word.parse().ok().and_then(|bdf: Bdf| self.addresses.iter().position(|address| *address == bdf)),
        }
    }

    /// The GPUs of a header, a line of names or addresses alone. Addresses that are new get the next numbers.
    fn header(&mut self, words: &[&str]) -> Option<Vec<usize>> {
        let addresses: Option<Vec<Bdf>> = words.iter().map(|word| word.parse().ok()).collect();
        for bdf in addresses.unwrap_or_default() {
            if !self.addresses.contains(&bdf) && self.addresses.len() <= MAX_ROCM_GPUS {
                self.addresses.push(bdf);
            }
        }
        words.iter().map(|word| self.number(word)).collect::<Option<Vec<usize>>>().filter(|gpus| !gpus.is_empty())
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

fn facts(text: &str) -> Result<Facts, BadRocmTopo> {
    let mut facts = Facts::default();
    let mut table = Table::Other;
    let mut columns: Vec<usize> = Vec::new();
    for line in text.lines().map(pasted::clean) {
        if line.contains("between two GPUs") || line.contains("====") || line.contains(" TABLE:") {
            table = title(&line);
            columns.clear();
            continue;
        }
        if let Some((gpu, key, value)) = topology_line(&line) {
            let target = if key == "Numa Node" { &mut facts.node } else { &mut facts.affinity };
            target.entry(bounded(gpu)?).or_insert_with(|| value.to_owned());
            continue;
        }
        let words: Vec<&str> = line.split_whitespace().collect();
        if let Some(gpus) = facts.header(&words) {
            columns = gpus;
            continue;
        }
        let Some((row, cells)) = words.split_first().filter(|_| table != Table::Other) else { continue };
        let Some(row) = facts.number(row).filter(|row| columns.contains(row)) else { continue };
        facts.rows.insert(bounded(row)?);
        let target = match table {
            Table::Weight => &mut facts.weight,
            Table::Hops => &mut facts.hops,
            Table::LinkType => &mut facts.link,
            Table::Other => continue,
        };
        for (column, cell) in columns.iter().zip(cells).filter(|(column, _)| **column != row) {
            target.insert((bounded(row)?, bounded(*column)?), (*cell).to_owned());
        }
    }
    Ok(facts)
}

fn title(line: &str) -> Table {
    let is_any = |titles: [&str; 2]| titles.iter().any(|title| line.contains(title));
    if is_any(["Weight between two GPUs", "WEIGHT TABLE:"]) {
        Table::Weight
    } else if is_any(["Hops between two GPUs", "HOPS TABLE:"]) {
        Table::Hops
    } else if is_any(["Link Type between two GPUs", "LINK TYPE TABLE:"]) {
        Table::LinkType
    } else {
        Table::Other
    }
}

fn bounded(gpu: usize) -> Result<usize, BadRocmTopo> {
    if gpu < MAX_ROCM_GPUS { Ok(gpu) } else { Err(BadRocmTopo(format!("names GPU {gpu}, of at most {MAX_ROCM_GPUS}"))) }
}

/// `GPU[0] : (Topology) Numa Node: 3`, also as documents retype it, `GPU 0 : …`.
fn topology_line(line: &str) -> Option<(usize, &str, &str)> {
    let (gpu, rest) = line.split_once("(Topology)")?;
    let (_, number) = gpu.split_once("GPU")?;
    let number = number.trim_matches(|c: char| c.is_whitespace() || "[]:".contains(c));
    let (key, value) = rest.split_once(':')?;
    let key = key.trim();
    matches!(key, "Numa Node" | "Numa Affinity").then_some(())?;
    Some((number.parse().ok()?, key, value.trim()))
}
