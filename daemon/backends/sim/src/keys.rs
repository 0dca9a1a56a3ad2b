//! Keys of an HCA: random, of one number space for lkeys and rkeys, and not given again for a while.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::{Arc, RwLock};

use crate::region::{Region, RegionSeed};
use crate::sync::{read, write};

/// Keys that were deregistered last and are not given out again yet.
const RETIRED_KEYS: usize = 4096;

/// What a key may be used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum KeyKind {
    Local,
    Remote,
}

/// Keys are random already, so one multiplication spreads them over the table.
#[derive(Debug, Default)]
struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u32(u32::from(*byte));
        }
    }

    fn write_u32(&mut self, value: u32) {
        // 2^64 divided by the golden ratio, odd (Knuth, The Art of Computer Programming, vol. 3, 6.4).
        self.0 = (self.0 ^ u64::from(value)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

/// What a key stands for; `None`: retired.
type Entry = Option<(KeyKind, Arc<Region>)>;

#[derive(Default)]
struct Table {
    keys: HashMap<u32, Entry, BuildHasherDefault<KeyHasher>>,
    retired: VecDeque<u32>,
    regions: u32,
}

/// The key table of one HCA.
pub(crate) struct KeyTable {
    table: RwLock<Table>,
    max_regions: u32,
}

impl KeyTable {
    pub(crate) fn new(max_regions: u32) -> Self {
        Self { table: RwLock::new(Table::default()), max_regions }
    }

    /// The region that `key` names as a key of that kind.
    pub(crate) fn find(&self, kind: KeyKind, key: u32) -> Option<Arc<Region>> {
        let table = read(&self.table);
        let (found, region) = table.keys.get(&key)?.as_ref()?;
        (*found == kind).then(|| Arc::clone(region))
    }

    /// Makes a region with two fresh keys; `None` when the HCA has no room for one more.
    pub(crate) fn insert(&self, seed: RegionSeed) -> Option<Arc<Region>> {
        let mut table = write(&self.table);
        if table.regions >= self.max_regions {
            return None;
        }
        let lkey = table.fresh(None);
        let rkey = table.fresh(Some(lkey));
        let region = Arc::new(Region::new(seed, lkey, rkey));
        table.keys.insert(lkey, Some((KeyKind::Local, Arc::clone(&region))));
        table.keys.insert(rkey, Some((KeyKind::Remote, Arc::clone(&region))));
        table.regions += 1;
        Some(region)
    }

    pub(crate) fn remove(&self, region: &Region) {
        let mut table = write(&self.table);
        for key in [region.lkey, region.rkey] {
            table.keys.insert(key, None);
            table.retired.push_back(key);
        }
        table.regions -= 1;
        while table.retired.len() > RETIRED_KEYS {
            if let Some(key) = table.retired.pop_front() {
                table.keys.remove(&key);
            }
        }
    }
}

impl Table {
    /// A key that is neither 0, in use, retired nor `taken`. At most 2^25 of 2^32 are, so few draws are enough.
    fn fresh(&self, taken: Option<u32>) -> u32 {
        loop {
            let key: u32 = rand::random();
            if key != 0 && Some(key) != taken && !self.keys.contains_key(&key) {
                return key;
            }
        }
    }
}
