//! Registrations by address: of each session, one hit cache for each HCA and set of rights that is asked for.
//!
//! Owner of state: [`Mappings`] knows where the session's memory is mapped in this process, and takes entries of memory
//! that goes out of every cache before it is unmapped.

use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gdrd_client_sys::buffer_id;
use gdrd_proto::v1;
use gdrd_ring::{GenerationReader, LocalSpan};

use crate::adopted::CudaPlace;
use crate::error::ClientError;
use crate::hits::{Hit, HitCache, NotInserted, Region};
use crate::registered::{ALL, MemoryName, RangeOf, RegisterOptions, Registered};
use crate::remote::RemoteBuffer;
use crate::session::Session;
use crate::stream_order::GpuSlots;

/// Regions that one cache of a session holds.
const MAX_REGIONS: u32 = 65_536;
/// Caches of one session: one for each HCA and set of rights.
const MAX_CACHES: usize = 256;
/// Pieces of memory that are looked at for whether they were freed, each time a range is registered.
const LOOKED_AT: usize = 8;

/// Registrations of one HCA with one set of rights, by address. Cheap to clone; clones share it.
#[derive(Debug, Clone)]
pub struct RegistrationCache {
    hca: Arc<str>,
    access: v1::Access,
    hits: Arc<HitCache<Arc<Registered>>>,
}

/// A registration in use: while it lives, the registration is not given back.
#[derive(Debug)]
pub struct RegistrationHit<'a> {
    hit: Hit<'a, Arc<Registered>>,
    hca: &'a str,
}

impl RegistrationHit<'_> {
    /// Slot of the registration.
    #[must_use]
    #[inline]
    pub fn slot(&self) -> u32 {
        self.hit.slot()
    }

    /// Local address of the whole range, for a queue pair of the HCA; `None` for a range too long for one request.
    #[must_use]
    #[inline]
    pub fn span(&self) -> Option<LocalSpan> {
        let len_bytes = u32::try_from(self.hit.len_bytes()).ok()?;
        let (slot, generation, offset) = (self.hit.slot(), self.hit.generation(), self.hit.offset());
        Some(LocalSpan { slot, generation, offset, len_bytes })
    }

    /// What a peer needs to read and write the range. Takes a lock.
    ///
    /// # Errors
    /// [`ClientError::Protocol`] when the daemon's answer was not whole.
    pub fn remote(&self) -> Result<RemoteBuffer, ClientError> {
        let registered = self.hit.payload();
        let remote = registered.and_then(|r| r.remote(self.hca, self.hit.offset(), self.hit.len_bytes()));
        remote.ok_or_else(|| ClientError::protocol("a registration without its hca"))
    }
}

/// An address of this process, and whose memory is mapped there.
type Place = (u64, MemoryName);

/// Memory of the session in this process.
#[derive(Debug, Clone, Copy)]
struct Mapped {
    len_bytes: u64,
    /// Number of its allocation where its owner frees it by a call of CUDA, which nobody tells of; else 0.
    identity: u64,
}

impl Mapped {
    /// Whether the memory was freed, as far as the driver tells.
    fn is_freed(&self, address: u64) -> bool {
        self.identity != 0 && identify(address) != Some(self.identity)
    }
}

#[derive(Debug, Default)]
struct State {
    /// Each mapping by its address; of two adoptions of the same bytes each has its own.
    mapped: BTreeMap<Place, Mapped>,
    caches: Vec<RegistrationCache>,
    /// The last one that was looked at for whether it was freed.
    last_look: Option<Place>,
}

impl State {
    /// What covers a range of addresses, the nearest start first.
    fn covering(&self, address: u64, len_bytes: u64) -> impl Iterator<Item = (Place, Mapped)> {
        let before = self.mapped.range(..=(address, MemoryName::LAST)).rev().map(|(place, mapped)| (*place, *mapped));
        before.filter(move |((start, _), mapped)| {
            (address - start).checked_add(len_bytes).is_some_and(|end| end <= mapped.len_bytes)
        })
    }
}

/// Number of the CUDA allocation that has an address now.
fn identify(address: u64) -> Option<u64> {
    buffer_id(address).ok().map(NonZeroU64::get)
}

/// Where memory of a session is mapped in this process, and what caches know of it.
#[derive(Debug)]
pub(crate) struct Mappings {
    page: Arc<GenerationReader>,
    /// The cache of [`Session::registration`].
    default: RegistrationCache,
    /// Which registrations are of GPU memory.
    gpu_slots: GpuSlots,
    state: Mutex<State>,
}

impl Mappings {
    pub(crate) fn new(page: Arc<GenerationReader>) -> Result<Self, ClientError> {
        let default = RegistrationCache::new("", ALL, &page)?;
        let state = State { caches: vec![default.clone()], ..State::default() };
        Ok(Self { page, default, gpu_slots: GpuSlots::default(), state: Mutex::new(state) })
    }

    pub(crate) fn gpu_slots(&self) -> &GpuSlots {
        &self.gpu_slots
    }

    /// Registrations of memory were told, as slot and generation.
    pub(crate) fn registered(&self, memory: MemoryName, registrations: impl Iterator<Item = (u32, u64)>) {
        self.gpu_slots.registered(memory, registrations, self.page.slots());
    }

    /// Memory is mapped there from now on.
    pub(crate) fn add(&self, address: u64, len_bytes: u64, memory: MemoryName) {
        self.lock().mapped.insert((address, memory), Mapped { len_bytes, identity: 0 });
    }

    /// The same of CUDA memory, which is believed to be there only while the driver has the same number for it. Returns what
    /// was there before, and so was freed.
    fn add_cuda(&self, place: CudaPlace, len_bytes: u64, memory: MemoryName) -> Result<Vec<MemoryName>, ClientError> {
        let CudaPlace { address, identity, .. } = place;
        self.refuse_lent(address, len_bytes)?;
        let (identity, now) = (identity?, buffer_id(address)?);
        if now != identity {
            let what = format!("the memory at {address:#x} was freed while it was adopted; adopt what is there now");
            return Err(ClientError::InvalidArgument { what });
        }
        let last = address.checked_add(len_bytes - u64::from(len_bytes > 0)).map(buffer_id).transpose()?;
        if last != Some(identity) {
            let what = format!("{len_bytes} bytes at {address:#x} are not of one allocation; adopt each by itself");
            return Err(ClientError::InvalidArgument { what });
        }
        let new = Mapped { len_bytes, identity: identity.get() };
        let mut state = self.lock();
        let before = state.mapped.range(..(address.saturating_add(len_bytes), MemoryName::FIRST));
        let overlaps = |((start, _), old): &(&Place, &Mapped)| {
            old.identity != 0 && old.identity != new.identity && start.saturating_add(old.len_bytes) > address
        };
        let freed = before.filter(overlaps).map(|((_, memory), _)| *memory).collect();
        state.mapped.insert((address, memory), new);
        Ok(freed)
    }

    /// Memory of a lease is mapped there: adopted, it would be reached after the lease by what was registered of it.
    pub(crate) fn refuse_lent(&self, address: u64, len_bytes: u64) -> Result<(), ClientError> {
        let state = self.lock();
        let before = state.mapped.range(..(address.saturating_add(len_bytes.max(1)), MemoryName::FIRST));
        let mut lent = before.filter_map(|((start, memory), mapped)| match memory {
            MemoryName::Lease(lease) if start.saturating_add(mapped.len_bytes) > address => Some(lease),
            _ => None,
        });
        let Some(lease) = lent.next() else { return Ok(()) };
        let what = format!("the memory at {address:#x} is of lease {lease}; register ranges of the lease");
        Err(ClientError::InvalidArgument { what })
    }

    /// Adopted memory among some that is mapped, another part at each call, that its owner has freed; no cache finds it from
    /// here on.
    fn take_freed(&self, most: usize) -> Vec<u64> {
        let some: Vec<(Place, Mapped)> = {
            let mut state = self.lock();
            let begin = state.last_look.map_or(Bound::Unbounded, Bound::Excluded);
            let after = state.mapped.range((begin, Bound::Unbounded));
            let before = state.last_look.map(|last| state.mapped.range(..=last)).into_iter().flatten();
            let some = after.chain(before).take(most).map(|(place, mapped)| (*place, *mapped)).collect::<Vec<_>>();
            state.last_look = some.last().map(|(place, _)| *place);
            some
        };
        // The driver is asked without the lock.
        let freed = some.into_iter().filter(|((address, _), mapped)| mapped.is_freed(*address));
        let freed: Vec<MemoryName> = freed.map(|((_, memory), _)| memory).collect();
        freed.iter().for_each(|memory| self.forget(*memory));
        let adopted = |memory: &MemoryName| match memory {
            MemoryName::Adopted(id) => Some(*id),
            MemoryName::Lease(_) => None,
        };
        freed.iter().filter_map(adopted).collect()
    }

    /// Memory is about to go: no cache finds a range of it from here on. A hit that is held keeps its registration.
    pub(crate) fn forget(&self, memory: MemoryName) {
        self.forget_those(|(_, mapped)| *mapped == memory);
    }

    /// The same of one mapping of it.
    pub(crate) fn forget_at(&self, address: u64, memory: MemoryName) {
        self.forget_those(|place| *place == (address, memory));
    }

    fn forget_those(&self, is_it: impl Fn(&Place) -> bool) {
        let (ranges, caches) = {
            let mut state = self.lock();
            let mut ranges = Vec::new();
            state.mapped.retain(|place, mapped| {
                let goes = is_it(place);
                if goes {
                    ranges.push((place.0, mapped.len_bytes));
                }
                !goes
            });
            (ranges, state.caches.clone())
        };
        for (address, len_bytes) in ranges {
            for cache in &caches {
                drop(cache.hits.remove_within(address, len_bytes));
            }
        }
    }

    /// The memory of a range of addresses, and where the range starts in it.
    fn find(&self, address: u64, len_bytes: u64) -> Option<(MemoryName, Mapped, u64)> {
        let ((start, memory), mapped) = self.lock().covering(address, len_bytes).next()?;
        Some((memory, mapped, address - start))
    }

    fn cache(&self, hca: &str, access: v1::Access) -> Result<RegistrationCache, ClientError> {
        let mut state = self.lock();
        if let Some(cache) = state.caches.iter().find(|cache| &*cache.hca == hca && cache.access == access) {
            return Ok(cache.clone());
        }
        if state.caches.len() >= MAX_CACHES {
            let what = format!("a session has at most {MAX_CACHES} caches of registrations");
            return Err(ClientError::InvalidArgument { what });
        }
        let cache = RegistrationCache::new(hca, access, &self.page)?;
        state.caches.push(cache.clone());
        Ok(cache)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Each change is complete before anything can panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why nothing is registered at an address.
fn unknown(address: u64, len_bytes: u64, was_freed: bool) -> ClientError {
    let what = match was_freed {
        true => format!("the memory that was adopted at {address:#x} was freed; adopt what is there now"),
        false => {
            format!("{len_bytes} bytes at {address:#x} are not in one buffer or adopted memory of this session")
        }
    };
    ClientError::InvalidArgument { what }
}

impl RegistrationCache {
    fn new(hca: &str, access: v1::Access, page: &Arc<GenerationReader>) -> Result<Self, ClientError> {
        let hits = HitCache::new(Arc::clone(page), MAX_REGIONS)?.identified_by(identify);
        Ok(Self { hca: hca.into(), access, hits: Arc::new(hits) })
    }

    /// The registration that covers `len_bytes` at `address`, pinned until the hit is dropped. No system call and no
    /// lock, but for adopted CUDA memory, of which the driver is asked whether it is still there; `None` when there is
    /// none, or the daemon has ended it.
    #[must_use]
    #[inline]
    pub fn get(&self, address: u64, len_bytes: u64) -> Option<RegistrationHit<'_>> {
        self.hits.get(address, len_bytes).map(|hit| RegistrationHit { hit, hca: &self.hca })
    }

    /// The same, registered by a call where it is missing.
    ///
    /// # Errors
    /// [`ClientError::InvalidArgument`] for addresses that are not in one piece of memory of the session, and as
    /// [`Session::register`].
    pub async fn get_or_register(
        &self,
        session: &Session,
        address: u64,
        len_bytes: u64,
    ) -> Result<RegistrationHit<'_>, ClientError> {
        // A call may be overtaken by the end of its registration; more than a few in a row is no race.
        const TRIES: usize = 4;
        for _ in 0..TRIES {
            if let Some(hit) = self.get(address, len_bytes) {
                return Ok(hit);
            }
            self.register(session, address, len_bytes).await?;
        }
        let what = format!("the registration of {len_bytes} bytes at {address:#x} ends as soon as it is made");
        Err(ClientError::InvalidArgument { what })
    }

    async fn register(&self, session: &Session, address: u64, len_bytes: u64) -> Result<(), ClientError> {
        session.check_ours()?;
        let mut was_freed = false;
        let (memory, identity, offset) = loop {
            match session.mappings().find(address, len_bytes) {
                Some((memory, mapped, _)) if mapped.is_freed(address) => {
                    session.give_up(memory);
                    was_freed = true;
                }
                Some((memory, mapped, offset)) => break (memory, mapped.identity, offset),
                None => return Err(unknown(address, len_bytes, was_freed)),
            }
        };
        session.give_up_freed(LOOKED_AT);
        let hcas = if self.hca.is_empty() { Vec::new() } else { vec![self.hca.to_string()] };
        let options = RegisterOptions::new().access(self.access).hcas(hcas);
        let range = RangeOf::new(memory, offset, len_bytes);
        let registered = session.register_inner(vec![range], options).await?.pop().map(Arc::new);
        let registered = registered.ok_or_else(|| ClientError::protocol("a registration without a range"))?;
        let Some((registration, slot_offset)) = registered.slot(&self.hca) else {
            return Err(ClientError::protocol("a registration without its hca"));
        };
        let (slot, generation) = (registration.slot, registration.generation);
        let region = Region { address, len_bytes, slot, generation, slot_offset, identity };
        // Looked up again: memory that went meanwhile must not be found by what is inserted now.
        let insert = || self.hits.insert(region, registered);
        let inserted = session.mappings().if_mapped(memory, address, len_bytes, insert);
        match inserted {
            Some(Ok(inserted)) => drop(inserted.parted),
            Some(Err(NotInserted::Covered(_))) => {}
            Some(Err(_)) => {
                return Err(ClientError::InvalidArgument { what: "this process was forked from the session's".into() });
            }
            None => {
                return Err(ClientError::InvalidArgument { what: "the memory went while it was registered".into() });
            }
        }
        Ok(())
    }

    /// Ranges that it holds.
    #[must_use]
    pub fn len(&self) -> usize {
        self.hits.len()
    }

    /// Whether it holds none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Mappings {
    /// Runs `then` if the memory is still mapped there, and keeps it from being forgotten meanwhile.
    fn if_mapped<T>(&self, memory: MemoryName, address: u64, len_bytes: u64, then: impl FnOnce() -> T) -> Option<T> {
        let state = self.lock();
        state.covering(address, len_bytes).any(|((_, covering), _)| covering == memory).then(then)
    }
}

impl Session {
    /// Gives up all adopted CUDA memory that its owner has freed, and says how much that was. Each registration by a cache looks
    /// at some of it; this looks at all, for who frees much and registers little. Some microseconds a piece.
    pub fn give_up_freed_memory(&self) -> usize {
        self.give_up_freed(usize::MAX)
    }

    fn give_up_freed(&self, most: usize) -> usize {
        let freed = self.mappings().take_freed(most);
        freed.iter().for_each(|id| self.parting().disown(*id));
        freed.len()
    }

    /// CUDA memory of this process was adopted.
    pub(crate) fn add_cuda(&self, place: CudaPlace, len_bytes: u64, memory: MemoryName) -> Result<(), ClientError> {
        let freed = self.mappings().add_cuda(place, len_bytes, memory)?;
        freed.into_iter().for_each(|memory| self.give_up(memory));
        Ok(())
    }

    fn give_up(&self, memory: MemoryName) {
        self.mappings().forget(memory);
        if let MemoryName::Adopted(id) = memory {
            self.parting().disown(id);
        }
    }

    /// The cache of registrations with an HCA and all rights.
    ///
    /// # Errors
    /// [`ClientError::InvalidArgument`] for more caches than a session may have, [`ClientError::Memory`].
    pub fn registration_cache(&self, hca: &str) -> Result<RegistrationCache, ClientError> {
        self.mappings().cache(hca, ALL)
    }

    /// The cache of registrations with an HCA and these rights.
    ///
    /// # Errors
    /// As [`Session::registration_cache`].
    pub fn registration_cache_with(&self, hca: &str, access: v1::Access) -> Result<RegistrationCache, ClientError> {
        self.mappings().cache(hca, access)
    }

    /// The registration, with the nearest HCA and all rights, that covers `len_bytes` at `address`: what
    /// [`Session::registration_or_register`] left there. Costs what [`RegistrationCache::get`] does.
    #[must_use]
    #[inline]
    pub fn registration(&self, address: u64, len_bytes: u64) -> Option<RegistrationHit<'_>> {
        self.mappings().default.get(address, len_bytes)
    }

    /// The same, registered by a call where it is missing.
    ///
    /// # Errors
    /// As [`RegistrationCache::get_or_register`].
    pub async fn registration_or_register(
        &self,
        address: u64,
        len_bytes: u64,
    ) -> Result<RegistrationHit<'_>, ClientError> {
        self.mappings().default.get_or_register(self, address, len_bytes).await
    }
}

#[cfg(test)]
mod tests {
    use gdrd_ring::GenerationWriter;

    use super::*;

    fn mappings() -> Mappings {
        let page = GenerationWriter::create(1).unwrap();
        Mappings::new(Arc::new(GenerationReader::open(page.fd().try_clone_to_owned().unwrap()).unwrap())).unwrap()
    }

    #[test]
    fn of_memory_adopted_twice_each_adoption_is_found_until_it_is_given_up() {
        let mappings = mappings();
        let (whole, part) = (MemoryName::Adopted(1), MemoryName::Adopted(2));
        mappings.add(0x1000, 0x4000, whole);
        mappings.add(0x1000, 0x1000, part);
        let found = |address, len_bytes| mappings.find(address, len_bytes).map(|(memory, _, offset)| (memory, offset));
        assert_eq!(found(0x1000, 0x1000), Some((part, 0)));
        assert_eq!(found(0x1800, 0x1000), Some((whole, 0x800)), "the nearer one is too short");
        assert_eq!(found(0x3000, 0x2001), None);
        mappings.add(0x2000, 0x1000, part);
        assert_eq!(found(0x2100, 8), Some((part, 0x100)));
        assert_eq!(mappings.if_mapped(whole, 0x2100, 8, || ()), Some(()), "below the other");
        mappings.forget(part);
        assert_eq!(found(0x2100, 8), Some((whole, 0x1100)));
        mappings.forget(whole);
        assert_eq!(found(0x2100, 8), None);
    }

    #[test]
    fn memory_of_a_lease_is_not_to_be_adopted_in_any_part() {
        let mappings = mappings();
        mappings.add(0x1000, 0x2000, MemoryName::Lease(5));
        mappings.add(0x8000, 0x1000, MemoryName::Adopted(1));
        for (address, len_bytes) in [(0x1000, 0x2000), (0x800, 0x801), (0x2fff, 1), (0x800, 0x9000)] {
            let refused = mappings.refuse_lent(address, len_bytes).unwrap_err().to_string();
            assert!(refused.contains("of lease 5; register ranges of the lease"), "{refused}");
        }
        for (address, len_bytes) in [(0x800, 0x800), (0x3000, 1), (0x8000, 0x1000), (u64::MAX, 1)] {
            mappings.refuse_lent(address, len_bytes).unwrap();
        }
    }

    #[test]
    fn of_a_lease_mapped_twice_one_mapping_may_go_alone() {
        let mappings = mappings();
        let lease = MemoryName::Lease(5);
        mappings.add(0x1000, 0x1000, lease);
        mappings.add(0x9000, 0x1000, lease);
        mappings.forget_at(0x1000, lease);
        assert!(mappings.find(0x1000, 8).is_none());
        assert!(mappings.find(0x9000, 8).is_some());
    }

    #[test]
    fn every_mapping_is_looked_at_in_its_turn() {
        let mappings = mappings();
        // No driver of this machine has any of them.
        for at in 1..=5 {
            let mapped = Mapped { len_bytes: 8, identity: 9 };
            mappings.lock().mapped.insert((at * 0x1000, MemoryName::Adopted(at)), mapped);
        }
        assert_eq!(mappings.take_freed(2), [1, 2]);
        assert_eq!(mappings.take_freed(2), [3, 4]);
        assert_eq!(mappings.take_freed(2), [5]);
        assert!(mappings.take_freed(2).is_empty());
    }
}
