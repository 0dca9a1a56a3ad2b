//! The choice itself: GPUs to NICs, optimal over all GPUs that compete, as numbers alone.
//!
//! Each GPU may only get one of its nearest NICs. Among all ways to do that, the best is, in this order:
//! most bandwidth where NICs are shared, fewest shared NICs, fewest NICs that come after their equals,
//! fewest cards split between GPUs, deepest common bridges, and places in rail order. The sum of these over
//! the GPUs is minimised exactly (Hungarian method) for each group of GPUs that compete for the same NICs.

use pathfinding::prelude::{Matrix, kuhn_munkres_min};

/// A NIC to choose from.
#[derive(Clone, Debug)]
pub(super) struct Slot {
    /// NICs of one card have one number.
    pub(super) card: usize,
    /// Mbit/s that the GPUs on it share; never 0.
    pub(super) mbps: u64,
    /// Weight of what puts it after its equals.
    pub(super) demotion: u64,
    /// GPUs that have it already.
    pub(super) load: u64,
}

/// What choosing a NIC would mean to a GPU.
#[derive(Clone, Copy, Debug)]
pub(super) struct Edge {
    /// Levels between the deepest bridge of all and the common one.
    pub(super) shallow: u64,
    /// Squared distance from the place in rail order that is the GPU's share.
    pub(super) off_rail: u64,
    /// 1 if the NIC's card is already another GPU's.
    pub(super) splits_card: u64,
}

/// GPUs (rows) and NICs (columns); `None` where the NIC is not among the GPU's nearest.
#[derive(Debug, Default)]
pub(super) struct Problem {
    pub(super) slots: Vec<Slot>,
    pub(super) edges: Vec<Vec<Option<Edge>>>,
}

/// Most steps (GPUs² × columns) of an exact solution; beyond it (hundreds of GPUs that all compete for the same
/// hundreds of NICs, as no host has) each GPU in turn takes what is best then.
const MAX_EXACT_STEPS: usize = 1 << 26;
/// Bits that packed costs may take, so that sums of them stay far from overflow.
const MAX_COST_BITS: u32 = 100;
/// Time units that stand for one Mbit/s: bandwidth counts as the time one byte takes, which adds up.
const TIME_SCALE: u64 = 1 << 40;

/// A column: the `turn`-th GPU on a NIC.
#[derive(Clone, Copy)]
struct Column {
    slot: usize,
    /// GPUs on the NIC with this one.
    load: u64,
    /// GPUs that this round puts on the card before this one.
    on_card: u64,
}

type Cost = [u64; 6];

impl Problem {
    /// NIC of each GPU, by place; `None` for a GPU without any. `may_share` allows several GPUs on one NIC.
    pub(super) fn solve(&self, may_share: bool) -> Vec<Option<usize>> {
        let mut answer = vec![None; self.edges.len()];
        for (rows, slots) in self.groups() {
            let columns = self.columns(&slots, if may_share { rows.len() } else { 1 });
            let solved = self.exact(&rows, &columns).unwrap_or_else(|| self.in_turn(&rows, &columns));
            for (row, slot) in rows.into_iter().zip(solved) {
                if let Some(place) = answer.get_mut(row) {
                    *place = slot;
                }
            }
        }
        answer
    }

    /// GPUs that compete, directly or through others, with the NICs they compete for.
    fn groups(&self) -> Vec<(Vec<usize>, Vec<usize>)> {
        let mut group_of_slot: Vec<Option<usize>> = vec![None; self.slots.len()];
        let mut members: Vec<Vec<usize>> = Vec::new();
        for (row, edges) in self.edges.iter().enumerate() {
            let own: Vec<usize> = edges.iter().enumerate().filter_map(|(slot, edge)| edge.map(|_| slot)).collect();
            if own.is_empty() {
                continue;
            }
            let new = members.len();
            members.push(vec![row]);
            for slot in own {
                match group_of_slot.get(slot).copied().flatten() {
                    Some(old) if old != new => {
                        let moved = members.get_mut(old).map(std::mem::take).unwrap_or_default();
                        members.last_mut().into_iter().for_each(|rows| rows.extend(&moved));
                        group_of_slot.iter_mut().filter(|g| **g == Some(old)).for_each(|g| *g = Some(new));
                    }
                    _ => group_of_slot.get_mut(slot).into_iter().for_each(|g| *g = Some(new)),
                }
            }
        }
        let slots_of = |group: usize| {
            let all = group_of_slot.iter().enumerate();
            all.filter(move |(_, g)| **g == Some(group)).map(|(slot, _)| slot).collect()
        };
        let groups = members.into_iter().enumerate().filter(|(_, rows)| !rows.is_empty());
        groups
            .map(|(group, mut rows)| {
                rows.sort_unstable();
                (rows, slots_of(group))
            })
            .collect()
    }

    /// Columns card by card: the NICs of a card in turn, best first, so that costs rise from column to column
    /// of a card and a card fills up in that order.
    fn columns(&self, slots: &[usize], turns: usize) -> Vec<Column> {
        let mut by_card: std::collections::BTreeMap<usize, Vec<(usize, &Slot)>> = std::collections::BTreeMap::new();
        for slot in slots {
            if let Some(found) = self.slots.get(*slot) {
                by_card.entry(found.card).or_default().push((*slot, found));
            }
        }
        let mut columns = Vec::new();
        for nics in by_card.values_mut() {
            nics.sort_by_key(|(place, slot)| (std::cmp::Reverse(slot.mbps), slot.demotion, *place));
            let mut on_card = 0;
            for turn in 1..=turns {
                for (place, slot) in nics.iter() {
                    let load = slot.load + u64::try_from(turn).unwrap_or(u64::MAX);
                    columns.push(Column { slot: *place, load, on_card });
                    on_card += 1;
                }
            }
        }
        columns
    }

    fn cost(&self, row: usize, column: &Column) -> Option<Cost> {
        let edge = (*self.edges.get(row)?.get(column.slot)?)?;
        let slot = self.slots.get(column.slot)?;
        Some([
            (TIME_SCALE / slot.mbps.max(1)).saturating_mul(column.load),
            column.load - 1,
            slot.demotion,
            column.on_card + edge.splits_card,
            edge.shallow,
            edge.off_rail,
        ])
    }

    /// The least sum of costs, compared field by field; `None` if the group is too large.
    fn exact(&self, rows: &[usize], columns: &[Column]) -> Option<Vec<Option<usize>>> {
        if rows.len().checked_mul(rows.len())?.checked_mul(columns.len())? > MAX_EXACT_STEPS {
            return None;
        }
        let costs: Vec<Vec<Option<Cost>>> =
            rows.iter().map(|row| columns.iter().map(|column| self.cost(*row, column)).collect()).collect();
        let radices = radices(&costs, rows.len())?;
        let forbidden = radices.iter().try_fold(1_i128, |product, radix| product.checked_mul(*radix))?;
        if forbidden.checked_ilog2()? > MAX_COST_BITS {
            return None;
        }
        // At least one column a row; the added ones stand for getting nothing.
        let width = columns.len() + rows.len();
        let matrix = Matrix::from_fn(rows.len(), width, |(row, column)| {
            let cost = costs.get(row).and_then(|row| row.get(column).copied().flatten());
            cost.map_or(forbidden, |cost| pack(&cost, &radices))
        });
        let (_, chosen) = kuhn_munkres_min(&matrix);
        let given = |(row, column): (usize, usize)| {
            costs.get(row)?.get(column).copied().flatten()?;
            columns.get(column).map(|column| column.slot)
        };
        Some(chosen.into_iter().enumerate().map(given).collect())
    }

    /// Each GPU in turn takes what is best then.
    fn in_turn(&self, rows: &[usize], columns: &[Column]) -> Vec<Option<usize>> {
        let mut taken = vec![false; columns.len()];
        let mut chosen = Vec::with_capacity(rows.len());
        for row in rows {
            let free = columns.iter().enumerate().filter(|(place, _)| taken.get(*place) == Some(&false));
            let best = free.filter_map(|(place, column)| Some((self.cost(*row, column)?, place, column.slot))).min();
            if let Some((_, place, _)) = best {
                taken.get_mut(place).into_iter().for_each(|taken| *taken = true);
            }
            chosen.push(best.map(|(_, _, slot)| slot));
        }
        chosen
    }
}

/// For each field one more than its sum over all rows can be.
fn radices(costs: &[Vec<Option<Cost>>], rows: usize) -> Option<[i128; 6]> {
    let mut most = [0_u64; 6];
    for cost in costs.iter().flatten().flatten() {
        for (most, field) in most.iter_mut().zip(cost) {
            *most = (*most).max(*field);
        }
    }
    let rows = i128::try_from(rows).ok()?;
    let mut radices = [0_i128; 6];
    for (radix, most) in radices.iter_mut().zip(most) {
        *radix = i128::from(most).checked_mul(rows)?.checked_add(1)?;
    }
    Some(radices)
}

fn pack(cost: &Cost, radices: &[i128; 6]) -> i128 {
    cost.iter().zip(radices).fold(0, |packed, (field, radix)| packed * radix + i128::from(*field))
}
