//! Things by id, found in the same time however many there are.
//!
//! Role: what every call looks into several times, such as leases and memory. Ids are numbers that this daemon gave, one after
//! the other, so that nobody can choose them to collide. Must not know: what the things are.
//!
//! Whoever walks a table gets it in order of id, at the cost of sorting: what the state machine decides must not depend on where
//! a hash puts things.

use std::hash::Hash;

use rustc_hash::FxHashMap;

/// Room that is kept whatever is removed, entries.
const LEAST_ROOM: usize = 64;
/// A table with room for so many times its entries gives room back.
const MOST_SLACK: usize = 8;

/// A map by id.
#[derive(Debug)]
pub(crate) struct Table<K, V>(FxHashMap<K, V>);

impl<K, V> Default for Table<K, V> {
    fn default() -> Self {
        Self(FxHashMap::default())
    }
}

impl<K: Copy + Ord + Hash, V> Table<K, V> {
    pub(crate) fn get(&self, id: &K) -> Option<&V> {
        self.0.get(id)
    }

    pub(crate) fn get_mut(&mut self, id: &K) -> Option<&mut V> {
        self.0.get_mut(id)
    }

    pub(crate) fn contains_key(&self, id: &K) -> bool {
        self.0.contains_key(id)
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn insert(&mut self, id: K, value: V) -> Option<V> {
        self.0.insert(id, value)
    }

    /// Takes one out. Room that many left behind is given back, a part each time that so few are left, so that the cost stays
    /// the same on average.
    pub(crate) fn remove(&mut self, id: &K) -> Option<V> {
        let removed = self.0.remove(id);
        let room = self.0.capacity();
        if room > LEAST_ROOM && room / MOST_SLACK > self.0.len() {
            self.0.shrink_to((2 * self.0.len()).max(LEAST_ROOM / 2));
        }
        removed
    }

    /// All of them in no order: for sums, and for what holds of any or of all.
    pub(crate) fn values(&self) -> impl Iterator<Item = &V> {
        self.0.values()
    }

    /// All of them in order of id.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        let mut all: Vec<(&K, &V)> = self.0.iter().collect();
        all.sort_unstable_by_key(|(id, _)| **id);
        all.into_iter()
    }

    /// The first of those from an id on that are wanted, in order of id, at the cost of one look at each and of sorting a few.
    pub(crate) fn first_from(&self, start: K, most: usize, wanted: impl Fn(&V) -> bool) -> Vec<(&K, &V)> {
        let mut all: Vec<(&K, &V)> = self.0.iter().filter(|(id, value)| **id >= start && wanted(value)).collect();
        if all.len() > most {
            all.select_nth_unstable_by_key(most, |(id, _)| **id);
            all.truncate(most);
        }
        all.sort_unstable_by_key(|(id, _)| **id);
        all
    }
}

/// A set of ids.
#[derive(Debug)]
pub(crate) struct Ids<K>(Table<K, ()>);

impl<K> Default for Ids<K> {
    fn default() -> Self {
        Self(Table::default())
    }
}

impl<K: Copy + Ord + Hash> Ids<K> {
    pub(crate) fn insert(&mut self, id: K) {
        self.0.insert(id, ());
    }

    /// Whether it was there.
    pub(crate) fn remove(&mut self, id: &K) -> bool {
        self.0.remove(id).is_some()
    }

    #[cfg(test)]
    pub(crate) fn contains(&self, id: &K) -> bool {
        self.0.contains_key(id)
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// All of them in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = K> {
        self.0.iter().map(|(id, ())| *id)
    }
}

#[cfg(test)]
impl<K: Copy + Ord + Hash, V> std::ops::Index<&K> for Table<K, V> {
    type Output = V;

    fn index(&self, id: &K) -> &V {
        self.get(id).expect("tests ask for what is there")
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn a_table_is_a_map_in_order_of_id(steps in prop::collection::vec((any::<bool>(), 0_u64..300), 0..600)) {
            let mut table = Table::default();
            let mut map = std::collections::BTreeMap::new();
            for (insert, id) in steps {
                if insert {
                    prop_assert_eq!(table.insert(id, id + 1), map.insert(id, id + 1));
                } else {
                    prop_assert_eq!(table.remove(&id), map.remove(&id));
                }
            }
            prop_assert!(table.iter().eq(map.iter()));
            for most in [0, 1, 7, 300] {
                let even = map.range(100..).filter(|(_, value)| **value % 2 == 0).take(most);
                prop_assert!(table.first_from(100, most, |value| value % 2 == 0).into_iter().eq(even));
            }
            prop_assert_eq!((table.len(), table.is_empty()), (map.len(), map.is_empty()));
        }
    }

    #[test]
    fn room_that_many_left_behind_is_given_back() {
        let mut table = Table::default();
        (0..10_000_u64).for_each(|id| assert!(table.insert(id, [0_u8; 64]).is_none()));
        (10..10_000).for_each(|id| assert!(table.remove(&id).is_some()));
        assert!(table.0.capacity() <= 2 * LEAST_ROOM, "{}", table.0.capacity());
        assert!((0..10).all(|id| table.contains_key(&id)));
    }
}
