//! Finding the matrix in a text: header, rows, legend.

use std::collections::{BTreeMap, BTreeSet};

use crate::level::Level;
use crate::model::NumaId;
use crate::pasted;
use crate::topo_m::apart::apart;
use crate::topo_m::line::{
    Column, Ending, RawRow, drive_header, go_on, header, is_cell, is_p2p_row, is_rest_of_header, join_mig,
    legend_entries, level, numa_affinity, numbered, raw_row,
};
use crate::topo_m::{BadTopoM, MAX_TOPO_M_COLUMNS};

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
    /// The word within which the header ends.
    pub(super) cut: Option<String>,
    /// The column of that word, once it is named.
    pub(super) cut_column: Option<usize>,
    /// What shows that a line of the header was broken within a word.
    broken: Option<String>,
    /// How the header ends; `None` without one.
    ending: Option<Ending>,
}

/// Longest piece of a word that a warning repeats, characters.
const MAX_SHOWN: usize = 32;
/// What to do about lines that were broken.
const UNWRAPPED: &str = "use the text as it was printed, each row on one line";
/// Whether a line alone is of a matrix: a row with its X, or a header of several devices.
fn is_of_matrix(line: &str) -> bool {
    raw_row(line).is_some_and(|row| row.has_x()) || header(line, false).is_some_and(|header| header.columns.len() > 1)
}

/// Whether rows are of a matrix for certain: one with its X has a level too.
fn is_told(rows: &[RawRow]) -> bool {
    let has_level = |row: &RawRow| row.levels.iter().any(|word| level(word).is_some_and(|level| level != Level::Same));
    rows.iter().any(|row| row.has_x() && has_level(row))
}

/// Adds a row, or to the row of the same device the columns of drives, which begin at `drives_from`.
fn push(rows: &mut Vec<RawRow>, row: RawRow, drives_from: Option<usize>) {
    let known = rows.iter_mut().find(|known| known.name == row.name);
    match known.zip(drives_from).filter(|(known, from)| known.levels.len() <= *from) {
        Some((known, from)) => {
            known.levels.resize(from, "?".to_owned());
            known.levels.extend(row.levels);
        }
        None => rows.push(row),
    }
}

impl Matrix {
    /// The first matrix with a level in it, else the first that has at least a row.
    pub(super) fn find(text: &str) -> Result<Self, BadTopoM> {
        let mut matrix = Self::default();
        let mut rows: Vec<RawRow> = Vec::new();
        let mut bare: Option<(Vec<Column>, Vec<RawRow>)> = None;
        let mut header_is_open = false;
        let mut drives_from = None;
        let mut speakers = pasted::Speakers::default();
        for line in pasted::plain_lines(text).lines() {
            let line = join_mig(pasted::clean(pasted::without_service(line, is_cell)));
            let (speaker, line) = pasted::split_prefix(&line);
            let line = &*apart(line);
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
                push(&mut rows, row, drives_from);
            } else if let Some(drives) = drive_header(line).filter(|_| !header_is_open && is_told(&rows)) {
                drives_from = Some(width);
                matrix.columns.extend(drives);
            } else if let Some(header) = header(line, header_is_open) {
                let columns = header.columns;
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
                    (matrix.cut, matrix.broken) = (None, None);
                } else {
                    matrix.broken = matrix.broken.take().or(matrix.cut.take());
                }
                header_is_open = true;
                matrix.cut = header.cut;
                matrix.ending = Some(Ending::of(line));
                matrix.columns.extend(columns);
            } else if header_is_open {
                if is_rest_of_header(line) {
                    matrix.broken.get_or_insert_with(|| line.split_whitespace().next().unwrap_or_default().to_owned());
                }
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
        if let Some(word) = &self.broken {
            return Err(BadTopoM(format!("its header is broken within a word, at `{}`: {UNWRAPPED}", shown(word))));
        }
        let ending = self.ending.filter(|_| !self.columns.is_empty()).unwrap_or(Ending::NumaThenId);
        self.complete_columns(&rows)?;
        self.add_nics_of_rows(&rows);
        if !self.columns.iter().any(Column::is_gpu) {
            return Err(BadTopoM("names no GPU".to_owned()));
        }
        for raw in rows {
            if let Some(words) = &raw.broken {
                return Err(BadTopoM(format!("row {} is broken within a word, {words}: {UNWRAPPED}", raw.name)));
            }
            let Some(column) = self.columns.iter().position(|column| column.name == raw.name) else {
                if numbered(&raw.name, "GPU") {
                    return Err(BadTopoM(format!("row {} has no column in its header: {UNWRAPPED}", raw.name)));
                }
                self.warnings.push(format!("row {}: no such column, left out", raw.name));
                continue;
            };
            if self.rows.iter().any(|row| row.column == column) {
                self.warnings.push(format!("row {}: listed twice, the first one is kept", raw.name));
                continue;
            }
            // Drives may have columns of GPUs' rows alone.
            let of = self.columns.iter().position(Column::is_drive).unwrap_or(self.columns.len());
            if raw.levels.len() < of {
                let has = raw.levels.len();
                let then = raw.rest.split_whitespace().next().map(|word| format!("; then comes '{}'", shown(word)));
                let then = then.unwrap_or_default();
                self.warnings.push(format!("row {}: has {has} of {of} levels, the rest is unknown{then}", raw.name));
            }
            for (word, at) in raw.levels.iter().zip(&self.columns).filter(|(word, _)| !is_cell(word)) {
                let word = shown(word);
                self.warnings.push(format!("row {}, column {}: '{word}' is no level, unknown", raw.name, at.name));
            }
            let mut levels: Vec<Option<Level>> = raw.levels.iter().map(|word| level(word)).collect();
            // `NV1` may be the beginning of `NV18`.
            let cut = self.cut_column.and_then(|place| levels.get_mut(place));
            if let Some(level) = cut.filter(|level| matches!(level, Some(Level::NvLink(_)))) {
                *level = None;
            }
            if levels.get(column).copied().flatten().is_some_and(|level| level != Level::Same) {
                self.warnings.push(format!("row {}: its own column says no X, left out", raw.name));
                continue;
            }
            let numa = numa_affinity(&raw.rest, ending);
            self.rows.push(Row { column, levels, numa });
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

    /// NICs that have a row and no column: what the GPUs' rows lack, theirs tell.
    fn add_nics_of_rows(&mut self, rows: &[RawRow]) {
        for row in rows.iter().filter(|row| numbered(&row.name, "NIC")) {
            let is_new = self.columns.iter().all(|column| column.name != row.name);
            if is_new && self.columns.len() < MAX_TOPO_M_COLUMNS {
                self.warnings.push(format!("row {}: no such column, known by its own row alone", row.name));
                self.columns.push(Column { name: row.name.clone() });
            }
        }
    }

    /// The NUMA node of a column's device, if its row names exactly one.
    pub(super) fn numa(&self, column: usize) -> Option<NumaId> {
        let row = self.rows.iter().find(|row| row.column == column)?;
        own_node(&row.numa).map(NumaId)
    }
}

/// The one node of an affinity. On hosts whose GPUs have their memory as nodes of their own (GB200: `0,2-17`) the first
/// is that of the CPUs, the range behind it those of the GPU (NeMo-RL, `numa_utils.py`).
fn own_node(affinity: &str) -> Option<u16> {
    let Some((first, rest)) = affinity.split_once(',') else { return pasted::sole_number(affinity) };
    let is_range = rest.split_once('-').is_some_and(|(from, to)| is_node(from) && is_node(to));
    is_range.then(|| pasted::sole_number(first)).flatten()
}

fn is_node(word: &str) -> bool {
    pasted::sole_number(word).is_some()
}

/// A word of the input as a message repeats it.
pub(super) fn shown(word: &str) -> String {
    word.chars().take(MAX_SHOWN).collect()
}
