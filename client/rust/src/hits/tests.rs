//! The whole cache, against a naive map, against threads, and against the faults that others have reported.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use gdrd_ring::{GenerationReader, GenerationWriter};
use proptest::prelude::*;

use super::*;

const SLOTS: u32 = 64;

fn pages() -> (GenerationWriter, Arc<GenerationReader>) {
    let writer = GenerationWriter::create(SLOTS).unwrap();
    let reader = GenerationReader::open(writer.fd().try_clone_to_owned().unwrap()).unwrap();
    (writer, Arc::new(reader))
}

/// A cache and the page it believes; every slot is at generation 0.
fn cache<T>(max_regions: u32) -> (HitCache<T>, GenerationWriter) {
    let (writer, reader) = pages();
    (HitCache::new(reader, max_regions).unwrap(), writer)
}

fn region(address: u64, len_bytes: u64) -> Region {
    Region { address, len_bytes, slot: 0, generation: 0, slot_offset: 0, identity: 0 }
}

#[test]
fn a_covered_range_is_a_hit_with_its_offset() {
    let (cache, _page) = cache(8);
    let region = Region { slot: 3, slot_offset: 4096, ..region(0x10_000, 0x1000) };
    let _ = cache.insert(region, ()).unwrap();
    let hit = cache.get(0x10_800, 0x800).unwrap();
    assert_eq!((hit.slot(), hit.offset(), hit.len_bytes()), (3, 4096 + 0x800, 0x800));
    for (address, len_bytes) in [(0x10_800, 0x801), (0xffff, 2), (0x11_000, 1), (u64::MAX, 2), (0x10_000, u64::MAX)] {
        assert!(cache.get(address, len_bytes).is_none(), "{address:#x} {len_bytes:#x}");
    }
}

#[test]
fn no_region_without_bytes_or_beyond_the_address_space_is_taken() {
    let (cache, _page) = cache(8);
    assert_eq!(cache.insert(region(1, 0), 1).unwrap_err(), NotInserted::NoRange(1));
    assert_eq!(cache.insert(region(u64::MAX, 2), 2).unwrap_err(), NotInserted::NoRange(2));
    assert!(cache.is_empty());
}

#[test]
fn freed_and_used_again_an_address_is_a_miss() {
    // openucx/ucx#4269: a new allocation at the address of a freed one must not find the old key.
    let (cache, _page) = cache(8);
    let first = cache.insert(region(0x1000, 0x1000), "first").unwrap().entry;
    assert_eq!(cache.remove(first), ["first"]);
    assert!(cache.get(0x1000, 16).is_none());
    let second = cache.insert(region(0x1000, 0x1000), "second").unwrap().entry;
    assert_ne!(first, second);
    assert_eq!(cache.get(0x1000, 16).unwrap().payload(), Some("second"));
    assert!(cache.remove(first).is_empty(), "an old name removes nothing new");
    assert_eq!(cache.len(), 1);
}

thread_local! {
    /// What a driver does that calls back into the cache, as one whose frees are hooked.
    static CALLED_BACK: RefCell<Option<Arc<HitCache<u32>>>> = const { RefCell::new(None) };
}

#[test]
fn asking_what_is_at_an_address_holds_no_lock_of_the_cache() {
    // ofiwg/libfabric#9003: hook, CUDA and cache lock in two orders.
    let (cache, _page) = cache(8);
    let cache = Arc::new(cache.identified_by(|_| {
        let cache = CALLED_BACK.with_borrow(Clone::clone)?;
        // Hangs if the lock is held.
        let parted = cache.remove_within(0x8000, 0x1000);
        assert_eq!(cache.insert(region(0x8000, 0x1000), 2).map(|inserted| inserted.parted), Ok(Vec::new()));
        Some(1 + parted.len() as u64)
    }));
    let _ = cache.insert(Region { identity: 1, ..region(0x1000, 0x1000) }, 1).unwrap();
    CALLED_BACK.set(Some(Arc::clone(&cache)));
    assert!(cache.get(0x1000, 16).is_some(), "the same memory");
    assert!(cache.get(0x1000, 16).is_none(), "other memory: its entry parts, which takes the lock");
    assert!(cache.get(0x8000, 16).is_some());
    CALLED_BACK.set(None);
}

#[test]
fn a_forked_child_finds_adds_and_ends_nothing_whoever_had_the_lock() {
    let (cache, _page) = cache(8);
    let payload = Arc::new(());
    let entry = cache.insert(region(0x1000, 0x1000), Arc::clone(&payload)).unwrap().entry;
    assert!(cache.get(0x1000, 16).is_some());
    // As the kernel does for a child.
    cache.mark.wipe();
    let is_empty = || {
        assert!(cache.get(0x1000, 16).is_none(), "the slot is the parent's");
        let refused = cache.insert(region(0x8000, 0x1000), Arc::clone(&payload)).map(|inserted| inserted.entry);
        assert!(matches!(refused, Err(NotInserted::Forked(_))), "{refused:?}");
        assert_eq!((cache.remove(entry).len(), cache.remove_within(0, u64::MAX).len()), (0, 0));
        assert!(cache.is_empty());
    };
    is_empty();
    assert_eq!(Arc::strong_count(&payload), 2, "what the parent registered stays");
    // A thread that the child does not have may have been in the cache at the fork.
    let _held = cache.writer();
    is_empty();
}

/// Number of the allocation that a test says is at every address.
static ALLOCATION: AtomicU64 = AtomicU64::new(1);

#[test]
fn memory_that_was_freed_is_a_miss_whatever_is_at_its_address_now() {
    // openucx/ucx#5910, ofiwg/libfabric#8081: nothing tells of cudaFree, so a hit asks whose the address is.
    let (cache, _page) = cache(64);
    let cache = cache.identified_by(|_| Some(ALLOCATION.load(Ordering::Relaxed)).filter(|id| *id != 0));
    let payload = Arc::new(());
    for start in (0x1000..0x20_000).step_by(0x1000) {
        let identity = u64::from(start != 0x2000);
        let _ = cache.insert(Region { identity, ..region(start, 0x1000) }, Arc::clone(&payload)).unwrap();
    }
    let entries = cache.len();
    let held = cache.get(0x1000, 1).unwrap();
    ALLOCATION.store(2, Ordering::Relaxed);
    assert!(cache.get(0x1000, 1).is_none() && cache.get(0x8000, 16).is_none(), "another allocation is there");
    assert_eq!(cache.len(), entries - 2, "what was asked for in vain parts");
    assert_eq!(Arc::strong_count(&payload), entries, "all but the one that is not held");
    drop(held);
    assert_eq!(Arc::strong_count(&payload), entries - 1);
    assert!(cache.get(0x2000, 0x1000).is_some(), "memory whose end the caller tells is not asked about");
    // The new one's region takes the place of the old one's, also where nobody has looked yet.
    let newer = Region { identity: 2, slot: 7, ..region(0x9000, 0x800) };
    assert_eq!(cache.insert(newer, Arc::new(())).unwrap().parted.len(), 1);
    assert_eq!(cache.get(0x9000, 1).unwrap().slot(), 7);
    ALLOCATION.store(0, Ordering::Relaxed);
    assert!(cache.get(0x9000, 1).is_none(), "nothing is there");
}

#[test]
fn an_ended_generation_is_a_miss_and_gives_way() {
    let (cache, page) = cache(8);
    let _ = cache.insert(region(0x1000, 0x1000), 1).unwrap();
    page.set(0, 5).unwrap();
    assert!(cache.get(0x1000, 1).is_none());
    let newer = Region { generation: 5, ..region(0x1000, 0x800) };
    assert_eq!(cache.insert(newer, 2).unwrap().parted, [1]);
    assert_eq!(cache.get(0x1000, 1).unwrap().generation(), 5);
}

#[test]
fn a_pinned_payload_lives_until_its_last_hit() {
    // open-mpi/ompi#11125: invalidation beats the reference count for finding, not for giving back.
    let (cache, _page) = cache(8);
    let payload = Arc::new(());
    let entry = cache.insert(region(0x1000, 0x1000), Arc::clone(&payload)).unwrap().entry;
    let (first, second) = (cache.get(0x1000, 1).unwrap(), cache.get(0x1800, 1).unwrap());
    assert!(cache.remove(entry).is_empty());
    assert!(cache.get(0x1000, 1).is_none(), "nobody finds it from here on");
    drop(first);
    assert_eq!(Arc::strong_count(&payload), 2);
    drop(second);
    assert_eq!(Arc::strong_count(&payload), 1);
}

#[test]
fn where_pins_cannot_be_seen_no_payload_is_dropped() {
    let (mut cache, _page) = cache(8);
    cache.pins = Pins::new(Fence::Refused);
    let payload = Arc::new(());
    let entry = cache.insert(region(0x1000, 64), Arc::clone(&payload)).unwrap().entry;
    assert!(cache.remove(entry).is_empty());
    assert!(cache.get(0x1000, 64).is_none());
    assert_eq!(Arc::strong_count(&payload), 2, "somebody may hold it");
}

#[test]
fn a_wider_region_replaces_those_within_it() {
    let (cache, _page) = cache(8);
    let _ = cache.insert(region(0x1000, 0x1000), 1).unwrap();
    let _ = cache.insert(region(0x3000, 0x1000), 2).unwrap();
    let _ = cache.insert(region(0x6000, 0x1000), 3).unwrap();
    assert_eq!(cache.insert(region(0x3800, 0x100), 4).unwrap_err(), NotInserted::Covered(4));
    assert_eq!(cache.insert(region(0x1000, 0x3000), 5).unwrap().parted, [1, 2]);
    assert_eq!(cache.len(), 2);
    assert_eq!(cache.get(0x1fff, 0x1002).unwrap().payload(), Some(5));
}

#[test]
fn memory_that_goes_takes_every_region_that_reaches_into_it() {
    let (cache, _page) = cache(8);
    for (payload, start) in [(1, 0x1000), (2, 0x1400), (3, 0x1800), (4, 0x2c00), (5, 0x8000)] {
        let _ = cache.insert(region(start, 0x1000), payload).unwrap();
    }
    assert_eq!(cache.remove_within(0x1900, 0x1400).len(), 4);
    assert_eq!((cache.len(), cache.get(0x1000, 1).is_none()), (1, true));
}

#[test]
fn an_ended_region_gives_way_to_another_that_covers_the_same() {
    let (cache, page) = cache(8);
    let _ = cache.insert(region(0x1000, 0x1000), 1).unwrap();
    let _ = cache.insert(Region { slot: 1, ..region(0x1400, 0x1000) }, 2).unwrap();
    page.set(1, 5).unwrap();
    assert_eq!(cache.insert(region(0x1800, 0x100), 3).unwrap_err(), NotInserted::Covered(3));
    assert_eq!(cache.get(0x1800, 0x100).unwrap().payload(), Some(1));
}

#[test]
fn a_full_cache_gives_up_its_oldest_region() {
    // openucx/ucx#6264: distinct regions without end must not fill the process.
    let (cache, _page) = cache(100);
    for index in 0..1000_u64 {
        let inserted = cache.insert(region(0x1000 * index, 0x1000), index).unwrap();
        assert_eq!(inserted.parted, index.checked_sub(100).into_iter().collect::<Vec<_>>());
    }
    assert_eq!(cache.len(), 100);
}

#[test]
fn more_hits_at_a_time_than_there_are_pins_are_held_all_the_same() {
    let (cache, _page) = cache(8);
    let payload = Arc::new(());
    let entry = cache.insert(region(0x1000, 0x1000), Arc::clone(&payload)).unwrap().entry;
    let mut hits: Vec<_> = (0..3000).map(|_| cache.get(0x1000, 1).unwrap()).collect();
    assert!(cache.remove(entry).is_empty());
    while hits.len() > 1 {
        hits.remove(0);
    }
    assert_eq!(Arc::strong_count(&payload), 2);
    drop(hits);
    assert_eq!(Arc::strong_count(&payload), 1);
}

#[test]
fn hits_may_end_on_another_thread() {
    let (cache, _page) = cache(8);
    let payload = Arc::new(());
    let entry = cache.insert(region(0x1000, 0x1000), Arc::clone(&payload)).unwrap().entry;
    std::thread::scope(|scope| {
        let hit = cache.get(0x1000, 1).unwrap();
        assert!(cache.remove(entry).is_empty());
        scope.spawn(move || drop(hit));
    });
    assert_eq!(Arc::strong_count(&payload), 1);
}

#[test]
fn a_hundred_thousand_rounds_grow_nothing() {
    // ai-dynamo/nixl#1392: register and deregister without end must stay as cheap as at first.
    let (cache, _page) = cache(1024);
    let kept: Vec<_> = (0..500).map(|i| cache.insert(region(i << 20, 4096), i).unwrap().entry).collect();
    for round in 0..100_000_u64 {
        let entry = cache.insert(region((round % 700) << 20 | 0x8000, 4096), round).unwrap().entry;
        assert_eq!(cache.remove(entry), [round]);
    }
    assert_eq!(cache.len(), kept.len());
    let writer = cache.writer();
    assert_eq!(writer.places_made(), kept.len() + 1);
    assert!(writer.leaves_made() <= 2 * kept.len().div_ceil(tree::LEAF / 2), "{}", writer.leaves_made());
}

#[test]
fn what_was_taken_out_is_not_found_in_a_leaf_used_again() {
    let (cache, _page) = cache(1024);
    for _ in 0..3 {
        let entries: Vec<_> = (0..200).map(|i| cache.insert(region(i << 12, 4096), i).unwrap().entry).collect();
        entries.into_iter().rev().for_each(|entry| drop(cache.remove(entry)));
        let lone = cache.insert(region(0, 4096), 0).unwrap().entry;
        let found: Vec<_> = (0..200).filter(|i| cache.get(i << 12, 1).is_some()).collect();
        assert_eq!(found, [0]);
        drop(cache.remove(lone));
        assert!(cache.get(0, 1).is_none());
    }
}

/// Payload that says when it is dropped.
#[derive(Debug)]
struct Watched(Arc<AtomicBool>);

impl Drop for Watched {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

#[test]
fn readers_against_a_writer_that_frees_and_reuses_never_see_a_freed_entry() {
    const ROUNDS: u64 = 20_000;
    let (cache, _page) = cache(64);
    for neighbour in 1..40 {
        let payload = Arc::new(Watched(Arc::default()));
        let _ = cache.insert(region(0x100_000 * neighbour, 4096), payload).unwrap();
    }
    let done = AtomicBool::new(false);
    let hits = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    if let Some(hit) = cache.get(0x10_000, 16) {
                        let payload = hit.payload().unwrap();
                        let dropped = Arc::clone(&payload.0);
                        drop(payload);
                        assert!(!dropped.load(Ordering::SeqCst), "a hit whose payload is gone");
                        hits.fetch_add(1, Ordering::Relaxed);
                    }
                    assert!(cache.get(0x500_000, 16).is_some(), "a neighbour was lost");
                }
            });
        }
        for round in 0..ROUNDS {
            let dropped = Arc::new(AtomicBool::new(false));
            let payload = Arc::new(Watched(Arc::clone(&dropped)));
            let entry = cache.insert(Region { slot_offset: round, ..region(0x10_000, 4096) }, payload).unwrap().entry;
            drop(cache.remove(entry));
        }
        done.store(true, Ordering::Relaxed);
    });
    assert_eq!(cache.len(), 39);
    assert_eq!(cache.parted.load(Ordering::Relaxed), 0);
}

/// What a naive map would answer: the last region inserted that covers the range.
#[derive(Default)]
struct Naive(Vec<(Region, EntryId)>);

impl Naive {
    fn covering(&self, address: u64, len_bytes: u64) -> bool {
        self.0.iter().any(|(r, _)| r.address <= address && address + len_bytes <= r.address + r.len_bytes)
    }
}

#[derive(Debug, Clone)]
enum Step {
    Insert { address: u64, len_bytes: u64 },
    Remove { which: usize },
    Get { address: u64, len_bytes: u64 },
}

fn step() -> impl Strategy<Value = Step> {
    // Few addresses, so that regions nest, overlap and touch.
    let range = || (0..4000_u64, 1..40_u64);
    prop_oneof![
        4 => range().prop_map(|(address, len_bytes)| Step::Insert { address, len_bytes }),
        2 => any::<prop::sample::Index>().prop_map(|which| Step::Remove { which: which.index(1 << 16) }),
        4 => range().prop_map(|(address, len_bytes)| Step::Get { address, len_bytes }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn it_answers_as_a_naive_map_does(steps in prop::collection::vec(step(), 1..600)) {
        let (cache, _page) = cache(u32::MAX >> 16);
        let mut naive = Naive::default();
        for step in steps {
            match step {
                Step::Insert { address, len_bytes } => {
                    let region = region(address, len_bytes);
                    match cache.insert(region, address) {
                        Ok(inserted) => {
                            prop_assert!(!naive.covering(address, len_bytes));
                            naive.0.retain(|(r, _)| {
                                r.address < address || r.address + r.len_bytes > address + len_bytes
                            });
                            naive.0.push((region, inserted.entry));
                        }
                        Err(NotInserted::Covered(_)) => prop_assert!(naive.covering(address, len_bytes)),
                        Err(other) => prop_assert!(false, "{other:?}"),
                    }
                }
                Step::Remove { which } if !naive.0.is_empty() => {
                    let (region, entry) = naive.0.swap_remove(which % naive.0.len());
                    prop_assert_eq!(cache.remove(entry), vec![region.address]);
                }
                Step::Remove { .. } => {}
                Step::Get { address, len_bytes } => {
                    let hit = cache.get(address, len_bytes);
                    prop_assert_eq!(hit.is_some(), naive.covering(address, len_bytes));
                }
            }
            prop_assert_eq!(cache.len(), naive.0.len());
        }
    }
}
