//! A hit cache played from bytes: regions come and go, are looked up and held, and every answer is that of a plain list.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

use gdrd_client::{EntryId, Hit, HitCache, NotInserted, Region};
use gdrd_ring::{GenerationReader, GenerationWriter};

const SLOTS: u32 = 8;
const MAX_REGIONS: u32 = 40;
/// Hits held at a time at the most.
const MAX_HELD: usize = 64;

/// What a run came to.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Seen {
    /// Regions taken.
    pub(crate) inserted: u32,
    /// Lookups that found one.
    pub(crate) hits: u32,
    /// Removals of regions that were held.
    pub(crate) held: u32,
    /// Regions that a newer generation ended.
    pub(crate) stale: u32,
    /// Lookups that found a region whose memory was freed.
    pub(crate) freed: u32,
}

thread_local! {
    /// The one allocation that has every address.
    static ALLOCATION: Cell<u64> = const { Cell::new(1) };
}

struct Listed {
    region: Region,
    entry: EntryId,
    payload: Rc<()>,
}

/// Plays `data`.
///
/// # Panics
/// When the cache answers otherwise than a list of its regions does.
pub(crate) fn drive(data: &[u8]) -> Seen {
    let page = GenerationWriter::create(SLOTS).expect("a page");
    let reader = GenerationReader::open(page.fd().try_clone_to_owned().expect("a descriptor")).expect("our page");
    let cache = HitCache::new(Arc::new(reader), MAX_REGIONS).expect("a cache");
    let cache = cache.identified_by(|_| Some(ALLOCATION.get()));
    ALLOCATION.set(1);
    let mut seen = Seen::default();
    let mut list: Vec<Listed> = Vec::new();
    let mut held: Vec<(Hit<'_, Rc<()>>, Rc<()>)> = Vec::new();
    for step in data.chunks_exact(4) {
        let [what, a, b, c] = [step[0], step[1], step[2], step[3]];
        let (address, len_bytes) = (u64::from(a) * 16 + u64::from(c % 16), u64::from(b));
        match what % 6 {
            0 | 1 => {
                let slot = u32::from(c) % SLOTS;
                let generation = page.current(slot).expect("a slot");
                // Half of all memory can be freed behind the cache's back.
                let identity = if c < 128 { 0 } else { ALLOCATION.get() };
                let region = Region { address, len_bytes, slot, generation, slot_offset: u64::from(b), identity };
                insert(&cache, &page, &mut list, region, &mut seen);
            }
            2 => {
                let hit = cache.get(address, len_bytes);
                let found = covering(&list, address, len_bytes).filter(|listed| is_current(&page, listed));
                if let Some(freed) = found.filter(|listed| is_freed(listed)).map(|listed| listed.entry) {
                    assert!(hit.is_none(), "memory that was freed is a hit");
                    seen.freed += 1;
                    list.retain(|listed| listed.entry != freed);
                    continue;
                }
                assert_eq!(hit.is_some(), found.is_some(), "{address:#x} {len_bytes}");
                if let (Some(hit), Some(listed)) = (hit, found) {
                    seen.hits += 1;
                    assert_eq!(hit.slot(), listed.region.slot);
                    assert_eq!(hit.offset(), listed.region.slot_offset + address - listed.region.address);
                    if held.len() < MAX_HELD {
                        held.push((hit, Rc::clone(&listed.payload)));
                    }
                }
            }
            3 if !list.is_empty() => {
                let listed = list.swap_remove(usize::from(a) % list.len());
                let is_held = held.iter().any(|(_, payload)| Rc::ptr_eq(payload, &listed.payload));
                seen.held += u32::from(is_held);
                let free = cache.remove(listed.entry);
                assert_eq!(free.iter().any(|payload| Rc::ptr_eq(payload, &listed.payload)), !is_held);
            }
            4 if !held.is_empty() => drop(held.swap_remove(usize::from(a) % held.len())),
            5 if a % 8 == 0 => {
                page.bump(u32::from(b) % SLOTS).expect("a slot");
            }
            5 if a % 8 == 1 => ALLOCATION.set(ALLOCATION.get() + 1),
            5 => {
                drop(cache.remove_within(address, len_bytes));
                let end = address.saturating_add(len_bytes);
                list.retain(|l| {
                    l.region.address >= end && l.region.address != address
                        || l.region.address + l.region.len_bytes <= address
                });
            }
            _ => {}
        }
        assert_eq!(cache.len(), list.len());
    }
    drop(held);
    let kept: Vec<Rc<()>> = list.iter().map(|listed| Rc::clone(&listed.payload)).collect();
    list.iter().for_each(|listed| drop(cache.remove(listed.entry)));
    drop(list);
    assert!(kept.iter().all(|payload| Rc::strong_count(payload) == 1), "a payload is left");
    seen
}

fn insert(cache: &HitCache<Rc<()>>, page: &GenerationWriter, list: &mut Vec<Listed>, region: Region, seen: &mut Seen) {
    let end = region.address + region.len_bytes;
    let mut covered = false;
    while let Some(listed) = covering(list, region.address, region.len_bytes).filter(|_| region.len_bytes > 0) {
        covered = is_current(page, listed) && listed.region.identity == region.identity;
        if covered {
            break;
        }
        // Ended, or of other memory: it gives way.
        seen.stale += 1;
        let entry = listed.entry;
        list.retain(|listed| listed.entry != entry);
    }
    let payload = Rc::new(());
    match cache.insert(region, Rc::clone(&payload)) {
        Ok(inserted) => {
            assert!(region.len_bytes > 0 && !covered);
            seen.inserted += 1;
            list.retain(|l| l.region.address < region.address || l.region.address + l.region.len_bytes > end);
            if list.len() >= MAX_REGIONS as usize {
                let oldest = list.iter().map(|listed| listed.entry).min().expect("a full list");
                list.retain(|listed| listed.entry != oldest);
            }
            list.push(Listed { region, entry: inserted.entry, payload });
        }
        Err(NotInserted::Covered(_)) => assert!(covered),
        Err(NotInserted::NoRange(_)) => assert_eq!(region.len_bytes, 0),
        Err(other) => unreachable!("{other:?}"),
    }
}

/// The region with the greatest start that covers the range: no region of the list lies within another.
fn covering(list: &[Listed], address: u64, len_bytes: u64) -> Option<&Listed> {
    let covers =
        |l: &&Listed| l.region.address <= address && address + len_bytes <= l.region.address + l.region.len_bytes;
    list.iter().filter(covers).max_by_key(|listed| listed.region.address)
}

fn is_current(page: &GenerationWriter, listed: &Listed) -> bool {
    page.current(listed.region.slot) == Some(listed.region.generation)
}

fn is_freed(listed: &Listed) -> bool {
    listed.region.identity != 0 && listed.region.identity != ALLOCATION.get()
}
