//! Memory regions of the registration cache: what each is, and which covers a range.
//!
//! A region's key is its memory (by a number that is never used again), HCA and rights; an address is no part of it.
//! No region that can be found lies within another of its key: so the one with the greatest start up to an offset is the
//! only one that can cover a range there.

use std::collections::BTreeMap;
use std::ops::Range;

use gdrd_hal::Access;

use super::{AllocationId, BatchId, HcaIndex, RegionId, TenantId};
use crate::ids::{Generation, MemoryId, SlotId};

/// Memory that a region is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Source {
    Adopted(MemoryId),
    /// A buffer's memory, while it is lent.
    Leased(AllocationId),
}

/// What two regions of one table have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RegionKey {
    pub(crate) source: Source,
    pub(crate) hca: HcaIndex,
    rights: u8,
}

impl RegionKey {
    pub(crate) fn new(source: Source, hca: HcaIndex, access: Access) -> Self {
        let Access { local_write, remote_write, remote_read, remote_atomic, relaxed_ordering } = access;
        let rights = [local_write, remote_write, remote_read, remote_atomic, relaxed_ordering];
        let rights = rights.iter().fold(0, |bits, right| bits << 1 | u8::from(*right));
        Self { source, hca, rights }
    }
}

/// Where a region is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RegionStage {
    /// Waits for others to be gone, for a slot or for room in the HCA.
    Waiting,
    Registering,
    Live,
    /// Its slot is retired; requests admitted before still run.
    Quiescing,
    Deregistering,
}

/// One memory region.
#[derive(Debug)]
pub(crate) struct Region {
    pub(crate) tenant: TenantId,
    pub(crate) key: RegionKey,
    pub(crate) access: Access,
    /// In the memory, bytes.
    pub(crate) range: Range<u64>,
    pub(crate) stage: RegionStage,
    /// While it has one.
    pub(crate) slot: Option<(SlotId, Generation)>,
    pub(crate) iova: u64,
    /// Registrations that use it.
    pub(crate) holders: u32,
    /// Calls that wait until it is live.
    pub(crate) waiters: Vec<BatchId>,
    /// Found by new registrations. Once not, never again.
    pub(crate) found: bool,
    /// Its place among the idle ones, the longest unused first.
    pub(crate) idle: Option<u64>,
    /// Others were given up for it once.
    pub(crate) retried: bool,
    /// When requests on its retired slot are given up.
    pub(crate) drain_at: u64,
}

impl Region {
    /// One that waits for its turn to be registered.
    pub(crate) fn new(tenant: TenantId, key: RegionKey, access: Access, range: Range<u64>) -> Self {
        Self {
            tenant,
            key,
            access,
            range,
            stage: RegionStage::Waiting,
            slot: None,
            iova: 0,
            holders: 0,
            waiters: Vec::new(),
            found: true,
            idle: None,
            retried: false,
            drain_at: 0,
        }
    }

    pub(crate) fn len_bytes(&self) -> u64 {
        self.range.end - self.range.start
    }

    /// Whether it is on its way out.
    pub(crate) fn is_leaving(&self) -> bool {
        matches!(self.stage, RegionStage::Quiescing | RegionStage::Deregistering)
    }
}

/// All regions, by number and by what they cover.
#[derive(Debug, Default)]
pub(crate) struct Regions {
    by_id: BTreeMap<RegionId, Region>,
    by_start: BTreeMap<(RegionKey, u64), RegionId>,
}

impl Regions {
    pub(crate) fn get(&self, id: RegionId) -> Option<&Region> {
        self.by_id.get(&id)
    }

    pub(crate) fn get_mut(&mut self, id: RegionId) -> Option<&mut Region> {
        self.by_id.get_mut(&id)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (RegionId, &Region)> {
        self.by_id.iter().map(|(id, region)| (*id, region))
    }

    pub(crate) fn len(&self) -> usize {
        self.by_id.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.by_id.is_empty()
    }

    /// The region of that key that covers the range.
    pub(crate) fn covering(&self, key: RegionKey, range: &Range<u64>) -> Option<RegionId> {
        let (_, id) = self.by_start.range((key, 0)..=(key, range.start)).next_back()?;
        self.get(*id).filter(|region| region.range.end >= range.end).map(|_| *id)
    }

    /// Adds a region that nothing there covers. Those that it covers are not found any more; they are returned.
    pub(crate) fn insert(&mut self, id: RegionId, region: Region) -> Vec<RegionId> {
        let (key, range) = (region.key, region.range.clone());
        let within: Vec<RegionId> = self
            .by_start
            .range((key, range.start)..(key, range.end))
            .map(|(_, id)| *id)
            .take_while(|id| self.get(*id).is_some_and(|other| other.range.end <= range.end))
            .collect();
        within.iter().for_each(|id| self.lose(*id));
        self.by_start.insert((key, range.start), id);
        self.by_id.insert(id, region);
        within
    }

    /// New registrations do not find it from here on.
    pub(crate) fn lose(&mut self, id: RegionId) {
        let Some(region) = self.by_id.get_mut(&id) else { return };
        if std::mem::take(&mut region.found) {
            self.by_start.remove(&(region.key, region.range.start));
        }
    }

    pub(crate) fn remove(&mut self, id: RegionId) -> Option<Region> {
        self.lose(id);
        self.by_id.remove(&id)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn key(access: Access) -> RegionKey {
        RegionKey::new(Source::Adopted(MemoryId(1)), HcaIndex(0), access)
    }

    fn region(access: Access, range: Range<u64>) -> Region {
        Region { stage: RegionStage::Live, ..Region::new(TenantId(1), key(access), access, range) }
    }

    #[test]
    fn other_rights_are_another_region() {
        // openucx/ucx#11553: overlapping regions with different rights must not stand for each other.
        let mut regions = Regions::default();
        let strict = Access { relaxed_ordering: false, ..Access::DATA };
        regions.insert(RegionId(1), region(Access::DATA, 0..100));
        assert_eq!(regions.covering(key(strict), &(0..10)), None);
        assert_eq!(regions.insert(RegionId(2), region(strict, 50..150)), []);
        assert_eq!(regions.covering(key(Access::DATA), &(60..70)), Some(RegionId(1)));
        assert_eq!(regions.covering(key(strict), &(60..70)), Some(RegionId(2)));
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

        #[test]
        fn what_covers_a_range_is_found_as_by_looking_at_all(
            steps in prop::collection::vec((0..200_u64, 1..30_u64, any::<bool>()), 1..120)
        ) {
            let mut regions = Regions::default();
            let key = key(Access::DATA);
            for (number, (start, len, removes)) in (1..).zip(steps) {
                let range = start..start + len;
                let covers = |r: &Region| r.found && r.range.start <= range.start && range.end <= r.range.end;
                let naive = regions.iter().any(|(_, r)| covers(r));
                let found = regions.covering(key, &range);
                prop_assert_eq!(found.is_some(), naive);
                match found {
                    Some(id) if removes => drop(regions.remove(id)),
                    Some(_) => {}
                    None => {
                        regions.insert(RegionId(number), region(Access::DATA, range.clone()));
                        prop_assert_eq!(regions.covering(key, &range), Some(RegionId(number)));
                    }
                }
            }
        }
    }
}
