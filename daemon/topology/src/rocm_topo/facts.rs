//! What the tables and lines of a text say, by GPU.

use std::collections::{BTreeMap, BTreeSet};

use crate::bdf::Bdf;
use crate::pasted::{self, Speakers};
use crate::rocm_topo::{BadRocmTopo, MAX_ROCM_GPUS};

/// What the lines say, by GPU number: that of `GPU0`, or the place of an address among those of the text. In capitals.
#[derive(Debug, Default)]
pub(super) struct Facts {
    pub(super) gpus: BTreeSet<usize>,
    pub(super) node: BTreeMap<usize, String>,
    pub(super) affinity: BTreeMap<usize, String>,
    pub(super) addresses: Vec<Bdf>,
    pub(super) weight: Pairs,
    pub(super) hops: Pairs,
    pub(super) link: Pairs,
}

type Pairs = BTreeMap<(usize, usize), String>;

/// Tables of the output, by their titles (`showHwTopology`, rocm_smi.py of ROCm/rocm_smi_lib; `topology`,
/// amdsmi_commands.py of ROCm/amdsmi).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Table {
    #[default]
    Other,
    Weight,
    Hops,
    LinkType,
    /// Lines of NUMA nodes.
    Nodes,
}

/// One table as it is read.
#[derive(Debug, Default)]
struct Part {
    table: Table,
    columns: Vec<usize>,
    facts: Facts,
}

/// The parts of a text laid together.
#[derive(Debug, Default)]
struct Reader {
    whole: Facts,
    addresses: Vec<Bdf>,
    part: Part,
    warnings: Vec<String>,
}

impl Facts {
    /// # Errors
    /// A table names more GPUs than any host has, or one twice.
    pub(super) fn of(text: &str, warnings: &mut Vec<String>) -> Result<Self, BadRocmTopo> {
        let mut reader = Reader::default();
        let mut speakers = Speakers::default();
        for line in pasted::plain_lines(text).lines() {
            let line = pasted::clean(line);
            let (speaker, line) = pasted::split_prefix(&line);
            let line = line.to_ascii_uppercase();
            if speakers.listens_to(speaker, || title(&line).is_some() || topology_line(&line).is_some()) {
                reader.line(&line)?;
            }
        }
        reader.end(Table::Other);
        warnings.append(&mut reader.warnings);
        warnings.extend(speakers.warning());
        Ok(Self { addresses: reader.addresses, ..reader.whole })
    }

    fn pairs(&mut self, table: Table) -> Option<&mut Pairs> {
        match table {
            Table::Weight => Some(&mut self.weight),
            Table::Hops => Some(&mut self.hops),
            Table::LinkType => Some(&mut self.link),
            Table::Other | Table::Nodes => None,
        }
    }

    /// Whether nothing that both say differs.
    fn agrees(&self, other: &Self) -> bool {
        fn agree<K: Ord>(one: &BTreeMap<K, String>, other: &BTreeMap<K, String>) -> bool {
            other.iter().all(|(key, value)| one.get(key).is_none_or(|known| known == value))
        }
        self.gpus == other.gpus
            && agree(&self.node, &other.node)
            && agree(&self.affinity, &other.affinity)
            && agree(&self.weight, &other.weight)
            && agree(&self.hops, &other.hops)
            && agree(&self.link, &other.link)
    }

    fn extend(&mut self, other: Self) {
        self.gpus.extend(other.gpus);
        self.node.extend(other.node);
        self.affinity.extend(other.affinity);
        self.weight.extend(other.weight);
        self.hops.extend(other.hops);
        self.link.extend(other.link);
    }
}

impl Table {
    fn name(self) -> &'static str {
        match self {
            Self::Weight => "table of weights",
            Self::Hops => "table of hops",
            Self::LinkType => "table of link types",
            Self::Nodes | Self::Other => "list of NUMA nodes",
        }
    }
}

impl Reader {
    fn line(&mut self, line: &str) -> Result<(), BadRocmTopo> {
        if let Some(table) = title(line) {
            self.end(table);
        } else if let Some((gpu, key, value)) = topology_line(line) {
            self.node(bounded(gpu)?, key == "NUMA NODE", value);
        } else if self.part.table != Table::Other {
            self.table_line(line)?;
        }
        Ok(())
    }

    /// Lays a part to those before it, the first of which tells of which GPUs.
    fn end(&mut self, next: Table) {
        let part = std::mem::replace(&mut self.part, Part { table: next, ..Part::default() });
        let name = part.table.name();
        if part.facts.gpus.is_empty() {
            if !matches!(part.table, Table::Other | Table::Nodes) {
                self.warnings.push(format!("the {name} has no row that can be read"));
            }
        } else if self.whole.gpus.is_empty() || self.whole.agrees(&part.facts) {
            self.whole.extend(part.facts);
        } else {
            let why = if self.whole.gpus == part.facts.gpus { "says otherwise than" } else { "is of other GPUs than" };
            self.warnings.push(format!("a {name} {why} what comes before: left out, use the text of one host"));
        }
    }

    fn node(&mut self, gpu: usize, is_node: bool, value: &str) {
        let known = |facts: &Facts| if is_node { facts.node.get(&gpu) } else { facts.affinity.get(&gpu) }.is_some();
        // A list that begins anew is another's.
        if self.part.table != Table::Nodes || known(&self.part.facts) {
            self.end(Table::Nodes);
        }
        let facts = &mut self.part.facts;
        facts.gpus.insert(gpu);
        let target = if is_node { &mut facts.node } else { &mut facts.affinity };
        target.insert(gpu, value.to_owned());
    }

    fn table_line(&mut self, line: &str) -> Result<(), BadRocmTopo> {
        // Quoting and logs put words before a line.
        let is_gpu = |word: &&str| gpu_word(word);
        let words: Vec<&str> = line.split_whitespace().skip_while(|word| !is_gpu(word)).collect();
        let Some((first, cells)) = words.split_first() else { return Ok(()) };
        let is_header = self.part.columns.is_empty() || !cells.is_empty();
        if is_header && words.iter().all(is_gpu) {
            self.part.columns = self.header(&words)?;
            return Ok(());
        }
        let Some(row) = self.number(first).filter(|row| self.part.columns.contains(row)) else { return Ok(()) };
        let Part { table, columns, facts } = &mut self.part;
        let Some(target) = facts.pairs(*table) else { return Ok(()) };
        for (column, cell) in columns.iter().zip(cells).filter(|(column, _)| **column != row) {
            target.entry((row, *column)).or_insert_with(|| (*cell).to_owned());
        }
        facts.gpus.extend(columns.iter().copied());
        Ok(())
    }

    /// The GPUs of a header, a line of names or addresses alone. Addresses that are new get the next numbers.
    fn header(&mut self, words: &[&str]) -> Result<Vec<usize>, BadRocmTopo> {
        let mut columns = Vec::new();
        for word in words {
            let address = word.parse::<Bdf>().ok().filter(|bdf| !self.addresses.contains(bdf));
            self.addresses.extend(address.filter(|_| self.addresses.len() <= MAX_ROCM_GPUS));
            let Some(gpu) = self.number(word) else { continue };
            if columns.contains(&bounded(gpu)?) {
                return Err(BadRocmTopo(format!("a table names {} twice", word.to_ascii_lowercase())));
            }
            columns.push(gpu);
        }
        Ok(columns)
    }

    /// The number of a GPU named `GPU0` or by an address that a header listed.
    fn number(&self, word: &str) -> Option<usize> {
        match word.strip_prefix("GPU") {
            Some(number) => number.parse().ok(),
            None => word.parse().ok().and_then(|bdf: Bdf| self.addresses.iter().position(|address| *address == bdf)),
        }
    }
}

fn gpu_word(word: &str) -> bool {
    word.strip_prefix("GPU").is_some_and(|number| number.parse::<usize>().is_ok()) || word.parse::<Bdf>().is_ok()
}

/// The table that a title begins; of no interest here where it is none of those that are read.
fn title(line: &str) -> Option<Table> {
    let is_any = |titles: [&str; 2]| titles.iter().any(|title| line.contains(title));
    if !line.contains("BETWEEN TWO GPUS") && !line.contains("====") && !line.contains(" TABLE:") {
        None
    } else if is_any(["WEIGHT BETWEEN TWO GPUS", "WEIGHT TABLE:"]) {
        Some(Table::Weight)
    } else if is_any(["HOPS BETWEEN TWO GPUS", "HOPS TABLE:"]) {
        Some(Table::Hops)
    } else if is_any(["LINK TYPE BETWEEN TWO GPUS", "LINK TYPE TABLE:"]) {
        Some(Table::LinkType)
    } else {
        Some(Table::Other)
    }
}

fn bounded(gpu: usize) -> Result<usize, BadRocmTopo> {
    if gpu < MAX_ROCM_GPUS { Ok(gpu) } else { Err(BadRocmTopo(format!("names GPU {gpu}, of at most {MAX_ROCM_GPUS}"))) }
}

/// `GPU[0] : (Topology) Numa Node: 3` in capitals, also as documents retype it, `GPU 0 : …`.
fn topology_line(line: &str) -> Option<(usize, &str, &str)> {
    let (gpu, rest) = line.split_once("(TOPOLOGY)")?;
    let (_, number) = gpu.rsplit_once("GPU")?;
    let number = number.trim_matches(|c: char| c.is_whitespace() || "[]:".contains(c));
    let (key, value) = rest.split_once(':')?;
    let key = key.trim();
    matches!(key, "NUMA NODE" | "NUMA AFFINITY").then_some(())?;
    Some((number.parse().ok()?, key, value.trim()))
}
