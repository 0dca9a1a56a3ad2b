//! Finding the matrix in a text: header, rows, legend.

use std::collections::{BTreeMap, BTreeSet};

use crate::level::Level;
use crate::model::NumaId;
use crate::pasted;
use crate::topo_m::{BadTopoM, MAX_TOPO_M_COLUMNS};

/// A device of the header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Column {
    /// `GPU0`, `NIC0`, or the device's own name in older versions.
    pub(super) name: String,
}

impl Column {
    pub(super) fn is_gpu(&self) -> bool {
        numbered(&self.name, "GPU")
    }

    fn is_mig(&self) -> bool {
        is_mig(&self.name)
    }
}

/// A row, as far as it goes.
#[derive(Clone, Debug)]
pub(super) struct Row {
    /// Place of its device among the columns.
    pub(super) column: usize,
    /// By column; `None` for a cell that is no level.
    pub(super) levels: Vec<Option<Level>>,
    /// NUMA affinity as printed.
    pub(super) numa: String,
}

#[derive(Debug, Default)]
pub(super) struct Matrix {
    pub(super) columns: Vec<Column>,
    pub(super) rows: Vec<Row>,
    /// NIC to device name.
    pub(super) legend: BTreeMap<String, String>,
    pub(super) warnings: Vec<String>,
    /// Whether the text holds a matrix of `nvidia-smi topo -p2p`, which has no levels.
    pub(super) has_p2p: bool,
}

/// A line that begins as a row does.
struct RawRow {
    name: String,
    levels: Vec<String>,
    rest: String,
}

impl RawRow {
    fn has_x(&self) -> bool {
        self.levels.iter().any(|word| level(word) == Some(Level::Same))
    }
}

/// Whose lines count of a text in which those of several hosts are mixed: of the first that has a line of a matrix.
#[derive(Default)]
struct Speakers {
    first: Option<String>,
    others: BTreeSet<String>,
}

/// Longest piece of a word that a warning repeats, characters.
const MAX_SHOWN: usize = 32;
/// Most other hosts that a warning names.
const MAX_SPEAKERS: usize = 4;

impl Speakers {
    fn listens_to(&mut self, speaker: Option<&str>, is_of_matrix: impl FnOnce() -> bool) -> bool {
        let Some(speaker) = speaker else { return true };
        match &self.first {
            Some(first) if first == speaker => true,
            Some(_) => {
                if self.others.len() < MAX_SPEAKERS && is_of_matrix() {
                    self.others.insert(speaker.to_owned());
                }
                false
            }
            None => {
                if is_of_matrix() {
                    self.first = Some(speaker.to_owned());
                }
                true
            }
        }
    }

    fn warning(&self) -> Option<String> {
        let first = self.first.as_ref().filter(|_| !self.others.is_empty())?;
        let name = |speaker: &String| speaker.trim_end_matches(':').to_owned();
        let others: Vec<String> = self.others.iter().map(name).collect();
        Some(format!("the text has lines of {} too: those of {} count", others.join(", "), name(first)))
    }
}

/// Whether a line alone is of a matrix: a row with its X, or a header of several devices.
fn is_of_matrix(line: &str) -> bool {
    raw_row(line).is_some_and(|row| row.has_x()) || header(line, false).is_some_and(|columns| columns.len() > 1)
}

/// Whether rows are of a matrix for certain: one with its X has a level too.
fn is_told(rows: &[RawRow]) -> bool {
    let has_level = |row: &RawRow| row.levels.iter().any(|word| level(word).is_some_and(|level| level != Level::Same));
    rows.iter().any(|row| row.has_x() && has_level(row))
}

/// `GPU0  X  OK  CNS`: a row of `nvidia-smi topo -p2p`, by the words of its legend.
fn is_p2p_row(line: &str) -> bool {
    const STATES: [&str; 7] = ["OK", "CNS", "GNS", "TNS", "NS", "DR", "U"];
    let mut words = line.split_whitespace().skip_while(|word| is_prefix(word));
    if !words.next().is_some_and(|name| numbered(name, "GPU")) {
        return false;
    }
    let cells: Vec<&str> = words.collect();
    let is_state = |word: &&str| STATES.contains(word);
    cells.iter().any(is_state) && cells.iter().all(|word| *word == "X" || is_state(word))
}

/// `GPU` or `NIC` and a number.
pub(super) fn numbered(name: &str, kind: &str) -> bool {
    let digits = name.strip_prefix(kind);
    digits.is_some_and(|digits| !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit()))
}

/// An instance of a GPU: `GPU0-MIG0`, or `MIG 0/7/0` as [`Matrix::find`] joins it.
fn is_mig(word: &str) -> bool {
    let kind = word
        .strip_prefix("GPU")
        .map_or(word, |rest| rest.trim_start_matches(|c: char| "-:/".contains(c) || c.is_ascii_digit()));
    kind.strip_prefix("MIG").is_some_and(|rest| {
        rest.bytes().any(|byte| byte.is_ascii_digit())
            && rest.bytes().all(|byte| byte.is_ascii_digit() || b"-:/.".contains(&byte))
    })
}

/// Makes one word of `MIG 0/7/0`.
fn join_mig(line: String) -> String {
    if !line.contains("MIG ") {
        return line;
    }
    let mut out = String::with_capacity(line.len());
    let mut rest = line.as_str();
    while let Some((before, after)) = rest.split_once("MIG ") {
        out.push_str(before);
        let number = after.trim_start_matches(' ');
        let is_instance = number.starts_with(|c: char| c.is_ascii_digit());
        out.push_str(if is_instance { "MIG-" } else { "MIG " });
        rest = number;
    }
    out + rest
}

/// A name that a column can have: devices all have a number in theirs.
fn is_device(word: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | '+');
    is_mig(word)
        || word.starts_with(|c: char| c.is_ascii_alphabetic())
            && word.chars().all(plain)
            && word.bytes().any(|byte| byte.is_ascii_digit())
            && level(word).is_none()
}

/// What a cell says. `SOC` is what versions before 2017 print for SYS.
fn level(word: &str) -> Option<Level> {
    match word {
        "SOC" => Some(Level::Sys),
        word => Level::parse(word),
    }
}

fn is_cell(word: &str) -> bool {
    level(word).is_some() || matches!(word, "N/A" | "-" | "--" | "?")
}

impl Matrix {
    /// The first matrix with a level in it, else the first that has at least a row.
    pub(super) fn find(text: &str) -> Result<Self, BadTopoM> {
        let mut matrix = Self::default();
        let mut rows: Vec<RawRow> = Vec::new();
        let mut bare: Option<(Vec<Column>, Vec<RawRow>)> = None;
        let mut header_is_open = false;
        let mut speakers = Speakers::default();
        for line in text.lines() {
            let line = join_mig(pasted::clean(pasted::without_service(line, is_cell)));
            let (speaker, line) = pasted::split_prefix(&line);
            if !speakers.listens_to(speaker, || is_of_matrix(line)) {
                continue;
            }
            if matrix.legend_line(line) {
                continue;
            }
            let width = matrix.columns.len();
            if is_p2p_row(line) {
                matrix.has_p2p = true;
                header_is_open = false;
                if !is_told(&rows) {
                    rows.clear();
                    matrix.columns.clear();
                }
            } else if let Some(row) = raw_row(line) {
                header_is_open = false;
                rows.push(row);
            } else if let Some(columns) = header(line, header_is_open) {
                if is_told(&rows) {
                    matrix.warnings.push("a second matrix in the text is left out".to_owned());
                    break;
                }
                // Prose may speak of `GPU1 SYS`, but only rows have an X, and of these only a lone GPU's nothing else.
                if rows.iter().any(RawRow::has_x) {
                    bare.get_or_insert((std::mem::take(&mut matrix.columns), std::mem::take(&mut rows)));
                }
                rows.clear();
                if !header_is_open || columns.iter().any(|column| matrix.columns.contains(column)) {
                    matrix.columns.clear();
                }
                header_is_open = true;
                matrix.columns.extend(columns);
            } else if let Some(row) = rows.last_mut().filter(|row| row.levels.len() < width) {
                go_on(row, line);
            }
            if matrix.columns.len() > MAX_TOPO_M_COLUMNS || rows.len() > MAX_TOPO_M_COLUMNS {
                return Err(BadTopoM(format!("has more than {MAX_TOPO_M_COLUMNS} columns or rows")));
            }
        }
        matrix.warnings.extend(speakers.warning());
        if let Some((columns, first)) = bare.filter(|_| !rows.iter().any(RawRow::has_x)) {
            matrix.columns = columns;
            rows = first;
        }
        matrix.settle(rows)?;
        matrix.leave_out_instances();
        Ok(matrix)
    }

    /// `NIC0: mlx5_0`, whatever stands behind the name, also several of them. Whether there is one.
    fn legend_line(&mut self, line: &str) -> bool {
        let entries = legend_entries(line);
        let has_entry = !entries.is_empty();
        for (nic, name) in entries {
            if self.legend.len() < MAX_TOPO_M_COLUMNS {
                self.legend.insert(nic, name);
            }
        }
        has_entry
    }

    fn settle(&mut self, rows: Vec<RawRow>) -> Result<(), BadTopoM> {
        if rows.is_empty() {
            return Ok(());
        }
        let mut names = BTreeSet::new();
        if let Some(twice) = self.columns.iter().find(|column| !names.insert(&column.name)) {
            return Err(BadTopoM(format!("its header names {} twice", twice.name)));
        }
        self.complete_columns(&rows)?;
        for raw in rows {
            let Some(column) = self.columns.iter().position(|column| column.name == raw.name) else {
                self.warnings.push(format!("row {}: no such column, left out", raw.name));
                continue;
            };
            if self.rows.iter().any(|row| row.column == column) {
                self.warnings.push(format!("row {}: listed twice, the first one is kept", raw.name));
                continue;
            }
            if raw.levels.len() < self.columns.len() {
                let (has, of) = (raw.levels.len(), self.columns.len());
                let then = raw.rest.split_whitespace().next().map(|word| format!("; then comes '{}'", shown(word)));
                let then = then.unwrap_or_default();
                self.warnings.push(format!("row {}: has {has} of {of} levels, the rest is unknown{then}", raw.name));
            }
            for (word, at) in raw.levels.iter().zip(&self.columns).filter(|(word, _)| !is_cell(word)) {
                let word = shown(word);
                self.warnings.push(format!("row {}, column {}: '{word}' is no level, unknown", raw.name, at.name));
            }
            let levels: Vec<Option<Level>> = raw.levels.iter().map(|word| level(word)).collect();
            if levels.get(column).copied().flatten().is_some_and(|level| level != Level::Same) {
                self.warnings.push(format!("row {}: its own column says no X, left out", raw.name));
                continue;
            }
            self.rows.push(Row { column, levels, numa: numa_affinity(&raw.rest) });
        }
        Ok(())
    }

    /// MIG instances are parts of GPUs that are listed themselves: they only hold places in the header.
    fn leave_out_instances(&mut self) {
        let places: Vec<usize> =
            (0..self.columns.len()).filter(|at| !self.columns.get(*at).is_some_and(Column::is_mig)).collect();
        let is_mig = |column: &&Column| column.is_mig();
        let instances: Vec<&str> = self.columns.iter().filter(is_mig).map(|column| column.name.as_str()).collect();
        if instances.is_empty() {
            return;
        }
        self.warnings.push(format!(
            "{}: MIG instances, left out; the GPUs they are parts of stand for them",
            instances.join(", ")
        ));
        let rows = std::mem::take(&mut self.rows).into_iter().filter_map(|row| {
            let column = places.binary_search(&row.column).ok()?;
            let levels = places.iter().map_while(|at| row.levels.get(*at).copied()).collect();
            Some(Row { column, levels, ..row })
        });
        self.rows = rows.collect();
        self.columns.retain(|column| !column.is_mig());
    }

    /// Columns that a cut header does not name: GPUs by their rows and by NVLinks, which only GPUs have,
    /// the rest of the widest row as NICs.
    fn complete_columns(&mut self, rows: &[RawRow]) -> Result<(), BadTopoM> {
        let width = rows.iter().map(|row| row.levels.len()).max().unwrap_or(0);
        if width <= self.columns.len() {
            return Ok(());
        }
        if width > MAX_TOPO_M_COLUMNS {
            return Err(BadTopoM(format!("has a row of more than {MAX_TOPO_M_COLUMNS} levels")));
        }
        let is_nvlink = |word: &String| matches!(level(word), Some(Level::NvLink(_)));
        let gpu_rows = rows.iter().filter(|row| numbered(&row.name, "GPU"));
        let gpus = gpu_rows.clone().filter_map(|row| row.name.get(3..)?.parse::<usize>().ok()?.checked_add(1));
        let linked = gpu_rows.filter_map(|row| row.levels.iter().rposition(is_nvlink)).map(|last| last + 1);
        let gpus = gpus.chain(linked).max().unwrap_or(0);
        self.warnings.push(format!("the header names {} of {width} columns, the rest is assumed", self.columns.len()));
        let taken: BTreeSet<String> = self.columns.iter().map(|column| column.name.clone()).collect();
        let mut numbers: BTreeMap<&str, usize> = BTreeMap::new();
        for place in self.columns.len()..width {
            let has_nics = self.columns.iter().any(|column| !column.is_gpu());
            let kind = if place < gpus && !has_nics { "GPU" } else { "NIC" };
            let names = (numbers.get(kind).copied().unwrap_or(0)..).map(|number| (number, format!("{kind}{number}")));
            if let Some((number, name)) = names.take(MAX_TOPO_M_COLUMNS).find(|(_, name)| !taken.contains(name)) {
                numbers.insert(kind, number + 1);
                self.columns.push(Column { name });
            }
        }
        Ok(())
    }

    /// The NUMA node of a column's device, if its row names exactly one.
    pub(super) fn numa(&self, column: usize) -> Option<NumaId> {
        let row = self.rows.iter().find(|row| row.column == column)?;
        pasted::sole_number(&row.numa).map(NumaId)
    }
}

/// Pairs of a NIC's column and its name, free of the quoting and lists that people put around them.
fn legend_entries(line: &str) -> Vec<(String, String)> {
    if !line.contains("NIC") {
        return Vec::new();
    }
    let plain = line.replace(['`', '\'', '"', '*', ',', ';'], " ").replace(':', " : ").replace('(', " (");
    let words: Vec<&str> = plain.split_whitespace().collect();
    let entry = |at: usize| {
        let nic = words.get(at).filter(|word| numbered(word, "NIC"))?;
        words.get(at + 1).filter(|word| **word == ":")?;
        let name = words.get(at + 2)?.trim_end_matches('.');
        // `NIC0: is down` is prose: device names have a number, or stand alone.
        let is_alone = words.get(at + 3).is_none_or(|word| !word.starts_with(|c: char| c.is_ascii_alphanumeric()));
        let is_name = name.starts_with(|c: char| c.is_ascii_alphabetic()) && !numbered(name, "NIC");
        (is_name && (is_device(name) || is_alone)).then(|| ((*nic).to_owned(), name.to_owned()))
    };
    (0..words.len()).filter_map(entry).collect()
}

/// A word that may stand before a row: quoting, a time of day, a log's `[name]`.
fn is_prefix(word: &str) -> bool {
    !word.bytes().any(|byte| byte.is_ascii_alphabetic()) || (word.starts_with('[') && word.ends_with(']'))
}

/// A device, then levels, then what else the row holds.
fn raw_row(line: &str) -> Option<RawRow> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let at = words.iter().position(|word| !is_prefix(word))?;
    let name = words.get(at).filter(|name| is_device(name))?;
    let cells = words.get(at + 1..).unwrap_or_default();
    // A word among levels is a mistyped one; only rows have an X.
    let has_x = cells.contains(&"X");
    let is_mistyped = |place: usize| has_x && cells.get(place + 1).is_some_and(|next| level(next).is_some());
    let levels = cells.iter().enumerate().take_while(|(place, word)| is_cell(word) || is_mistyped(*place));
    let levels: Vec<String> = levels.map(|(_, word)| (*word).to_owned()).collect();
    // `PIX = Connection …` and the like explain levels, they are no row.
    if words.get(at + 2).is_some_and(|word| *word == "=") {
        return None;
    }
    let rest = after_words(line, at + 1 + levels.len());
    let row = trimmed(RawRow { name: (*name).to_owned(), levels, rest: rest.to_owned() });
    (!row.levels.is_empty()).then_some(row)
}

/// A word of the input as a message repeats it.
fn shown(word: &str) -> String {
    word.chars().take(MAX_SHOWN).collect()
}

/// `N/A` behind the levels is of another column: affinities come last and are no cells.
fn trimmed(mut row: RawRow) -> RawRow {
    while row.levels.last().is_some_and(|word| level(word).is_none()) {
        if let Some(word) = row.levels.pop() {
            row.rest = format!("\t{word}{}", row.rest);
        }
    }
    row
}

/// The line behind its first `count` words, blanks kept.
fn after_words(line: &str, count: usize) -> &str {
    let mut rest = line;
    for _ in 0..count {
        rest = rest.trim_start();
        rest = rest.find(char::is_whitespace).and_then(|end| rest.get(end..)).unwrap_or_default();
    }
    rest
}

/// A line that a narrow terminal broke off: more levels, then the affinities.
fn go_on(row: &mut RawRow, line: &str) {
    let words: Vec<&str> = line.split_whitespace().collect();
    let more: Vec<String> =
        words.iter().take_while(|word| level(word).is_some()).map(|word| (*word).to_owned()).collect();
    if more.is_empty() || words.get(1).is_some_and(|word| *word == "=") {
        return;
    }
    row.rest = after_words(line, more.len()).to_owned();
    row.levels.extend(more);
}

/// Device columns of a header line. `goes_on` if the line before was one, of which this may be the rest.
fn header(line: &str, goes_on: bool) -> Option<Vec<Column>> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let end = words.iter().position(|word| *word == "CPU" || *word == "Affinity");
    // Words before the first GPU can only be told from prose if the affinities follow.
    let first = words.iter().position(|word| numbered(word, "GPU"));
    let first = first.filter(|first| *first == 0 || end.is_some()).or(goes_on.then_some(0))?;
    let names = words.get(first..end.unwrap_or(words.len()))?;
    let is_header = names.iter().all(|word| is_device(word)) && words.len() > first;
    is_header.then(|| names.iter().map(|name| Column { name: (*name).to_owned() }).collect())
}

/// NUMA affinity out of what follows the levels: `CPU affinity, NUMA affinity, GPU NUMA ID`. Between tabs a
/// cell may be empty; where a paste lost the tabs the words themselves must tell.
fn numa_affinity(rest: &str) -> String {
    let rest = rest.trim_end_matches([' ', '\r']);
    if let Some(cells) = rest.trim_start_matches(' ').strip_prefix('\t') {
        return cells.split('\t').nth(1).unwrap_or_default().trim().to_owned();
    }
    let words: Vec<&str> = rest.split_whitespace().filter(|word| *word != "N/A").collect();
    match words.as_slice() {
        [_, numa, ..] => (*numa).to_owned(),
        // One word is the CPUs if it is a range: a host has more than one CPU.
        [one] if !one.contains(['-', ',']) => (*one).to_owned(),
        _ => String::new(),
    }
}
