//! Regions in order of their start, in two levels of shared words: a root of leaves, each leaf with its regions.
//!
//! Readers search it while a writer may change it, so they trust nothing they read before the sequence number says
//! that it was of one piece: indices are checked, loops are bounded. Searches take no branch that depends on an address,
//! since a random one is mispredicted half of the time.
//!
//! Owner of state: the writer keeps the plain form ([`Plain`]) and writes what readers see from it.

use std::hint::select_unpredictable;
use std::sync::OnceLock;
use std::sync::atomic::Ordering;

use super::word::Word;

/// Regions of one leaf: their starts fill two cache lines, which are loaded side by side.
pub(crate) const LEAF: usize = 16;
/// Two neighbouring leaves that have no more than this together become one, so that no two stay sparse.
const MERGE_AT: usize = 12;
/// Leaves that are allocated together, so that finding one takes no load of its own.
const SLAB: usize = 32;
/// Start of no region.
const NOWHERE: u64 = u64::MAX;

/// What readers get of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) start: u64,
    pub(crate) len_bytes: u64,
    pub(crate) generation: u64,
    /// Where the region starts in its slot's registration, bytes.
    pub(crate) slot_offset: u64,
    pub(crate) slot: u32,
    /// The writer's index of the entry.
    pub(crate) entry: u32,
    /// Number of the allocation that it is of; 0 for memory that is not asked about.
    pub(crate) identity: u64,
}

/// The words of a record but its start: half a cache line.
#[derive(Debug)]
#[repr(align(32))]
struct Shown<W>([W; 4]);

#[derive(Debug)]
#[repr(align(64))]
struct Leaf<W> {
    starts: [W; LEAF],
    shown: [Shown<W>; LEAF],
}

impl<W: Word> Leaf<W> {
    fn new() -> Self {
        Self {
            starts: std::array::from_fn(|_| W::new(NOWHERE)),
            shown: std::array::from_fn(|_| Shown(std::array::from_fn(|_| W::new(0)))),
        }
    }

    /// The region with the greatest start up to `address`. `identities` are those of its regions, if any has one.
    #[inline]
    fn find(&self, address: u64, identities: Option<&Identities<W>>) -> Option<Record> {
        let at = last_up_to(&self.starts, address);
        let start = self.starts.get(at)?.load(Ordering::Relaxed);
        if start > address {
            return None;
        }
        let identity = identities.and_then(|all| all.get(at)).map_or(0, |word| word.load(Ordering::Relaxed));
        let [len_bytes, generation, slot_offset, ids] = &self.shown.get(at)?.0;
        let [s0, s1, s2, s3, e0, e1, e2, e3] = ids.load(Ordering::Relaxed).to_le_bytes();
        Some(Record {
            start,
            len_bytes: len_bytes.load(Ordering::Relaxed),
            generation: generation.load(Ordering::Relaxed),
            slot_offset: slot_offset.load(Ordering::Relaxed),
            slot: u32::from_le_bytes([s0, s1, s2, s3]),
            entry: u32::from_le_bytes([e0, e1, e2, e3]),
            identity,
        })
    }

    /// Shows the records from place `from` on; there were `before` of them.
    fn show(&self, records: &[Record], from: usize, before: usize) {
        let places = self.starts.iter().zip(&self.shown).enumerate();
        for (at, (start, shown)) in places.take(before.max(records.len())).skip(from) {
            let Some(record) = records.get(at) else {
                start.store(NOWHERE, Ordering::Relaxed);
                continue;
            };
            start.store(record.start, Ordering::Relaxed);
            let ids = u64::from(record.slot) | u64::from(record.entry) << 32;
            let words = [record.len_bytes, record.generation, record.slot_offset, ids];
            shown.0.iter().zip(words).for_each(|(to, from)| to.store(from, Ordering::Relaxed));
        }
    }
}

/// Numbers of the allocations of a leaf's regions.
type Identities<W> = [W; LEAF];

/// Leaves, made when the first is needed. The identities are apart, and made with the first region that has one: looking up
/// memory that has none touches no more lines than before.
#[derive(Debug)]
struct Slab<W> {
    leaves: OnceLock<Box<[Leaf<W>]>>,
    identities: OnceLock<Box<[Identities<W>]>>,
}

impl<W: Word> Slab<W> {
    fn new() -> Self {
        Self { leaves: OnceLock::new(), identities: OnceLock::new() }
    }

    fn show(&self, at: usize, records: &[Record], from: usize, before: usize) {
        let leaves = self.leaves.get_or_init(|| std::iter::repeat_with(Leaf::new).take(SLAB).collect());
        if let Some(leaf) = leaves.get(at) {
            leaf.show(records, from, before);
        }
        if self.identities.get().is_none() && records.iter().all(|record| record.identity == 0) {
            return;
        }
        let none = || std::array::from_fn(|_| W::new(0));
        let identities = self.identities.get_or_init(|| std::iter::repeat_with(none).take(SLAB).collect());
        let places = identities.get(at).into_iter().flatten().zip(records);
        places.for_each(|(word, record)| word.store(record.identity, Ordering::Relaxed));
    }
}

/// Where in the root an address may be: the span of all leaves' starts, cut into equal parts.
#[derive(Debug)]
#[repr(align(64))]
struct Head<W> {
    leaf_count: W,
    /// Start of the first leaf.
    base: W,
    /// Log2 of the length of a part.
    shift: W,
    /// The last part's number.
    last_part: W,
}

/// What readers see.
#[derive(Debug)]
pub(crate) struct Tree<W> {
    head: Head<W>,
    /// For each part, and one past the last: place of the last leaf that starts no later than the part does.
    parts: Box<[W]>,
    /// Start of each leaf's first region, in order; the first leaf may have earlier ones.
    root_starts: Box<[W]>,
    /// Number of that leaf.
    root_leaves: Box<[W]>,
    slabs: Box<[Slab<W>]>,
}

impl<W: Word> Tree<W> {
    pub(crate) fn new(max_regions: usize) -> Self {
        // At the worst, of each two neighbours one region more than MERGE_AT; one leaf more while splitting.
        let leaves = 2 * max_regions.div_ceil(MERGE_AT) + 2;
        let words = |count, value| std::iter::repeat_with(move || W::new(value)).take(count).collect();
        Self {
            head: Head { leaf_count: W::new(0), base: W::new(0), shift: W::new(0), last_part: W::new(0) },
            parts: words(2 * leaves.next_power_of_two() + 1, 0),
            root_starts: words(leaves, NOWHERE),
            root_leaves: words(leaves, 0),
            slabs: std::iter::repeat_with(Slab::new).take(leaves.div_ceil(SLAB)).collect(),
        }
    }

    /// The region with the greatest start up to `address`, if what was read is of one piece.
    #[inline]
    pub(crate) fn find(&self, address: u64) -> Option<Record> {
        let head = &self.head;
        let count = index(head.leaf_count.load(Ordering::Relaxed));
        let shift = head.shift.load(Ordering::Relaxed) & 63;
        let distance = address.saturating_sub(head.base.load(Ordering::Relaxed));
        let part = index((distance >> shift).min(head.last_part.load(Ordering::Relaxed)));
        let low = index(self.parts.get(part)?.load(Ordering::Relaxed));
        let high = index(self.parts.get(part + 1)?.load(Ordering::Relaxed));
        let starts = self.root_starts.get(low..=high).filter(|_| high < count)?;
        let leaf = index(self.root_leaves.get(low + last_up_to(starts, address))?.load(Ordering::Relaxed));
        let (slab, at) = (self.slabs.get(leaf / SLAB)?, leaf % SLAB);
        let identities = slab.identities.get().and_then(|all| all.get(at));
        slab.leaves.get()?.get(at)?.find(address, identities)
    }

    fn show_root(&self, order: &[usize], leaves: &[Vec<Record>]) {
        let starts: Vec<u64> = order
            .iter()
            .map(|leaf| leaves.get(*leaf).and_then(|records| records.first()).map_or(NOWHERE, |first| first.start))
            .collect();
        for (at, (start, leaf)) in starts.iter().zip(order).enumerate() {
            if let (Some(shown), Some(number)) = (self.root_starts.get(at), self.root_leaves.get(at)) {
                shown.store(*start, Ordering::Relaxed);
                number.store(*leaf as u64, Ordering::Relaxed);
            }
        }
        let (base, last) = (starts.first().copied().unwrap_or(0), starts.last().copied().unwrap_or(0));
        let span = last - base;
        let most = 2 * starts.len().next_power_of_two() as u64;
        let shift = (0..63).find(|shift| span >> shift < most).unwrap_or(63);
        self.head.leaf_count.store(starts.len() as u64, Ordering::Relaxed);
        self.head.base.store(base, Ordering::Relaxed);
        self.head.shift.store(shift, Ordering::Relaxed);
        self.head.last_part.store(span >> shift, Ordering::Relaxed);
        let mut place = 0;
        for (part, shown) in (0..=(span >> shift) + 1).zip(&self.parts) {
            let start = u128::from(base) + (u128::from(part) << shift);
            while starts.get(place + 1).is_some_and(|next| u128::from(*next) <= start) {
                place += 1;
            }
            shown.store(place as u64, Ordering::Relaxed);
        }
    }

    fn show_leaf(&self, leaf: usize, records: &[Record], from: usize, before: usize) {
        if let Some(slab) = self.slabs.get(leaf / SLAB) {
            slab.show(leaf % SLAB, records, from, before);
        }
    }
}

/// Place of the last of the ascending words that is no greater than `address`; 0 where there is none.
#[inline]
fn last_up_to<W: Word>(words: &[W], address: u64) -> usize {
    let (mut base, mut left) = (0, words.len());
    while left > 1 {
        let half = left / 2;
        let probe = words.get(base + half).map_or(NOWHERE, |word| word.load(Ordering::Relaxed));
        base = select_unpredictable(probe <= address, base + half, base);
        left -= half;
    }
    base
}

/// A place read from shared words: no more than what is looked up with it next.
#[inline]
fn index(word: u64) -> usize {
    usize::try_from(word).unwrap_or(usize::MAX)
}

/// The same regions as the writer has them.
#[derive(Debug, Default)]
pub(crate) struct Plain {
    leaves: Vec<Vec<Record>>,
    /// Leaves in order of their regions.
    order: Vec<usize>,
    free: Vec<usize>,
}

impl Plain {
    /// The region with the greatest start up to `address`.
    pub(crate) fn find(&self, address: u64) -> Option<Record> {
        let records = self.leaves.get(*self.order.get(self.place_of(address))?)?;
        let at = records.partition_point(|record| record.start <= address).checked_sub(1)?;
        records.get(at).copied()
    }

    /// The region with the least start from `address` on.
    pub(crate) fn find_from(&self, address: u64) -> Option<Record> {
        let place = self.place_of(address);
        let records = self.leaves.get(*self.order.get(place)?)?;
        let at = records.partition_point(|record| record.start < address);
        let next = || self.leaves.get(*self.order.get(place + 1)?)?.first();
        records.get(at).or_else(next).copied()
    }

    /// Place in `order` of the leaf that `address` belongs to.
    fn place_of(&self, address: u64) -> usize {
        let first = |leaf: &usize| self.leaves.get(*leaf).and_then(|records| records.first()).map_or(0, |r| r.start);
        self.order.partition_point(|leaf| first(leaf) <= address).saturating_sub(1)
    }

    /// Adds a region. None of that start is there.
    pub(crate) fn insert<W: Word>(&mut self, tree: &Tree<W>, record: Record) {
        if self.order.is_empty() {
            let leaf = self.new_leaf();
            // It may still show what it held before it was given up.
            tree.show_leaf(leaf, &[], 0, LEAF);
            self.order.push(leaf);
        }
        let place = self.place_of(record.start);
        let Some(leaf) = self.order.get(place).copied() else { return };
        let Some(records) = self.leaves.get_mut(leaf) else { return };
        let at = records.partition_point(|other| other.start < record.start);
        if records.len() < LEAF {
            records.insert(at, record);
            tree.show_leaf(leaf, records, at, records.len());
            if records.len() == 1 {
                tree.show_root(&self.order, &self.leaves);
            }
            return;
        }
        // Ascending starts, as when many regions are registered at once, fill leaves to the brim.
        let split = if at == LEAF { LEAF } else { LEAF / 2 };
        let upper = records.split_off(split);
        let (target, at) = if at >= split { (1, at - split) } else { (0, at) };
        let new = self.new_leaf();
        if let Some(records) = self.leaves.get_mut(new) {
            *records = upper;
        }
        self.order.insert(place + 1, new);
        let target = if target == 1 { new } else { leaf };
        if let Some(records) = self.leaves.get_mut(target) {
            records.insert(at, record);
        }
        self.show(tree, &[leaf, new]);
    }

    /// Takes out the region that starts there.
    pub(crate) fn remove<W: Word>(&mut self, tree: &Tree<W>, start: u64) {
        let place = self.place_of(start);
        let Some(leaf) = self.order.get(place).copied() else { return };
        let Some(records) = self.leaves.get_mut(leaf) else { return };
        let Ok(at) = records.binary_search_by_key(&start, |record| record.start) else { return };
        records.remove(at);
        if records.is_empty() {
            self.order.remove(place);
            self.free.push(leaf);
            return tree.show_root(&self.order, &self.leaves);
        }
        tree.show_leaf(leaf, records, at, records.len() + 1);
        let lower = place.saturating_sub(1);
        let merged = self.merge(tree, place) || lower != place && self.merge(tree, lower);
        if at == 0 && !merged {
            tree.show_root(&self.order, &self.leaves);
        }
    }

    /// Puts the leaf at `place` and the next one together if they are sparse.
    fn merge<W: Word>(&mut self, tree: &Tree<W>, place: usize) -> bool {
        let (Some(lower), Some(upper)) = (self.order.get(place).copied(), self.order.get(place + 1).copied()) else {
            return false;
        };
        let len = |leaf: usize| self.leaves.get(leaf).map_or(0, Vec::len);
        if len(lower) + len(upper) > MERGE_AT {
            return false;
        }
        let moved = self.leaves.get_mut(upper).map(std::mem::take).unwrap_or_default();
        if let Some(records) = self.leaves.get_mut(lower) {
            records.extend(moved);
        }
        self.order.remove(place + 1);
        self.free.push(upper);
        self.show(tree, &[lower]);
        true
    }

    fn show<W: Word>(&self, tree: &Tree<W>, changed: &[usize]) {
        for leaf in changed {
            tree.show_leaf(*leaf, self.leaves.get(*leaf).map_or(&[], Vec::as_slice), 0, LEAF);
        }
        tree.show_root(&self.order, &self.leaves);
    }

    #[cfg(test)]
    pub(crate) fn leaves_made(&self) -> usize {
        self.leaves.len()
    }

    fn new_leaf(&mut self) -> usize {
        self.free.pop().unwrap_or_else(|| {
            self.leaves.push(Vec::with_capacity(LEAF));
            self.leaves.len() - 1
        })
    }
}
