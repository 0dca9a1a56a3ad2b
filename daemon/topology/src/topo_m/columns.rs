//! Columns that a cut header does not name: what rows and the legend tell of them, and no more.

use std::collections::{BTreeMap, BTreeSet};

use crate::level::Level;
use crate::topo_m::line::{Column, RawRow, is_drive, level, next, numbered};
use crate::topo_m::matrix::{Matrix, shown};
use crate::topo_m::{BadTopoM, MAX_TOPO_M_COLUMNS};

impl Matrix {
    /// Names the columns up to the widest row.
    ///
    /// # Errors
    /// Nothing tells which of them are GPUs, or there are more than any host has.
    pub(super) fn complete_columns(&mut self, rows: &[RawRow]) -> Result<(), BadTopoM> {
        self.complete_last();
        let (named, width) = (self.columns.len(), rows.iter().map(|row| row.levels.len()).max().unwrap_or(0));
        if width <= named {
            return Ok(());
        }
        if width > MAX_TOPO_M_COLUMNS {
            return Err(BadTopoM(format!("has a row of more than {MAX_TOPO_M_COLUMNS} levels")));
        }
        if named == 0 && !has_end(rows, width) {
            self.cut_column = width.checked_sub(1);
        }
        let own = self.own_columns(rows);
        let gpus = match self.columns.iter().position(|column| !column.is_gpu()) {
            Some(_) => named,
            None => self.gpus(rows, &own, width).ok_or_else(|| {
                BadTopoM(format!(
                    "its header names {named} of {width} columns, and neither rows nor a NIC legend tell which of the rest \
                     are GPUs: add the header"
                ))
            })?,
        };
        self.warnings.push(format!("the header names {named} of {width} columns, the rest is assumed"));
        let legend = self.legend_nics();
        let has_nics = self.columns.iter().any(|column| !column.is_gpu());
        let mut taken: BTreeSet<String> = self.columns.iter().map(|column| column.name.clone()).collect();
        taken.extend(own.values().cloned());
        for place in named..width {
            // The legend has them in the same order.
            let by_legend = || legend.get(place.checked_sub(gpus)?).filter(|_| !has_nics).cloned();
            let free = |name: &String| !taken.contains(name);
            let name = own.get(&place).cloned().or_else(|| by_legend().filter(free)).unwrap_or_else(|| {
                let before = self.columns.last().map(|column| column.name.as_str());
                let first = if place < gpus { "GPU0" } else { "NIC0" };
                let is_of_kind = |name: &&str| numbered(name, first.trim_end_matches('0'));
                let begin = before.filter(is_of_kind).and_then(next).unwrap_or_else(|| first.to_owned());
                std::iter::successors(Some(begin), |name| next(name)).find(free).unwrap_or_default()
            });
            taken.insert(name.clone());
            self.columns.push(Column { name });
        }
        Ok(())
    }

    /// The column within whose name the header ends. Behind `C`, of `CPU Affinity`, there is none.
    fn complete_last(&mut self) {
        let Some((cut, last)) = self.cut.take().zip(self.columns.last()) else { return };
        let following = next(&last.name).filter(|name| name.starts_with(&cut));
        let first = || self.legend_nics().first().cloned().unwrap_or_else(|| "NIC0".to_owned());
        let name = following.or_else(|| (last.is_gpu() && "NIC".starts_with(&cut)).then(first));
        let cut = shown(&cut);
        match name.filter(|name| self.columns.iter().all(|column| column.name != *name)) {
            Some(name) => {
                self.warnings.push(format!("the header ends within a word, `{cut}`: taken as {name}"));
                self.cut_column = Some(self.columns.len());
                self.columns.push(Column { name });
            }
            None => self.warnings.push(format!("the header ends within a word, `{cut}`: left out")),
        }
    }

    /// Unnamed columns that rows tell by their X, which is in their own.
    fn own_columns(&self, rows: &[RawRow]) -> BTreeMap<usize, String> {
        let mut own = BTreeMap::new();
        for row in rows.iter().filter(|row| self.columns.iter().all(|column| column.name != row.name)) {
            if let Some(place) = row.x().filter(|place| *place >= self.columns.len()) {
                own.entry(place).or_insert_with(|| row.name.clone());
            }
        }
        own
    }

    /// How many columns are GPUs, where the header names no other: the NICs of the legend are all the rest of whole
    /// rows, and the first NIC's row tells its own place. NVLinks tell of some GPUs only.
    fn gpus(&self, rows: &[RawRow], own: &BTreeMap<usize, String>, width: usize) -> Option<usize> {
        let legend = self.legend_nics();
        let is_nvlink = |word: &String| matches!(level(word), Some(Level::NvLink(_)));
        let gpu_rows = || rows.iter().filter(|row| numbered(&row.name, "GPU"));
        let linked = gpu_rows().filter_map(|row| row.levels.iter().rposition(is_nvlink)).map(|last| last + 1).max();
        let listed = gpu_rows().filter_map(RawRow::x).map(|place| place + 1).max();
        let least = linked.max(listed).max(Some(self.columns.len()))?;
        let first_nic = own.iter().find(|(_, name)| !numbered(name, "GPU"));
        let fits = |gpus: &usize| *gpus >= least && first_nic.is_none_or(|(place, _)| gpus <= place);
        let is_first = |name: &str| legend.first().map_or("NIC0", String::as_str) == name;
        let by_row = first_nic.filter(|(_, name)| is_first(name)).map(|(place, _)| *place);
        let is_legend = has_end(rows, width) && !legend.is_empty() && !self.legend.keys().any(|name| is_drive(name));
        let by_legend = is_legend.then(|| width.checked_sub(legend.len())).flatten();
        let between = first_nic.map(|(place, _)| *place).filter(|place| *place == least);
        let all = (least == width).then_some(width);
        [by_row, by_legend, between, all].into_iter().flatten().find(fits)
    }

    /// NICs of the legend, in order of their numbers.
    pub(super) fn legend_nics(&self) -> Vec<String> {
        let number = |name: &String| name.strip_prefix("NIC")?.parse::<usize>().ok();
        let mut nics: Vec<(usize, &String)> =
            self.legend.keys().filter_map(|name| Some((number(name)?, name))).collect();
        nics.sort_unstable();
        nics.into_iter().map(|(_, name)| name.clone()).collect()
    }
}

/// Whether CPUs follow the last level of a whole row, so that it is not cut there.
fn has_end(rows: &[RawRow], width: usize) -> bool {
    let mut gpus = rows.iter().filter(|row| numbered(&row.name, "GPU") && row.levels.len() == width);
    gpus.any(|row| row.rest.trim_start().starts_with(|first: char| first.is_ascii_digit()))
}
