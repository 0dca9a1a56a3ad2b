//! Registrations by address: of each session, one hit cache for each HCA and set of rights that is asked for.
//!
//! Owner of state: [`Mappings`] knows where the session's memory is mapped in this process, and takes entries of memory
//! that goes out of every cache before it is unmapped.

use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gdrd_client_sys::buffer_id;
use gdrd_proto::v1;
use gdrd_ring::{GenerationReader, LocalSpan};

use crate::error::ClientError;
use crate::hits::{Hit, HitCache, NotInserted, Region};
use crate::registered::{ALL, MemoryName, RangeOf, RegisterOptions, Registered};
use crate::remote::RemoteBuffer;
use crate::session::Session;

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

/// Memory of the session in this process.
#[derive(Debug, Clone, Copy)]
struct Mapped {
    len_bytes: u64,
    memory: MemoryName,
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
    /// Each mapping by its address.
    by_address: BTreeMap<u64, Mapped>,
    caches: Vec<RegistrationCache>,
    /// Where the next look for freed memory begins.
    next_look: u64,
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
    state: Mutex<State>,
}

impl Mappings {
    pub(crate) fn new(page: Arc<GenerationReader>) -> Result<Self, ClientError> {
        let default = RegistrationCache::new("", ALL, &page)?;
        let state = State { caches: vec![default.clone()], ..State::default() };
        Ok(Self { page, default, state: Mutex::new(state) })
    }

    /// Memory is mapped there from now on.
    pub(crate) fn add(&self, address: u64, len_bytes: u64, memory: MemoryName) {
        self.lock().by_address.insert(address, Mapped { len_bytes, memory, identity: 0 });
    }

    /// The same of CUDA memory, which is believed to be there only while the driver has the same number for it. Returns what
    /// was there before, and so was freed.
    fn add_cuda(&self, address: u64, len_bytes: u64, memory: MemoryName) -> Result<Vec<MemoryName>, ClientError> {
        let identity = buffer_id(address)?;
        let last = address.checked_add(len_bytes - u64::from(len_bytes > 0)).map(buffer_id).transpose()?;
        if last != Some(identity) {
            let what = format!("{len_bytes} bytes at {address:#x} are not of one allocation; adopt each by itself");
            return Err(ClientError::InvalidArgument { what });
        }
        let new = Mapped { len_bytes, memory, identity: identity.get() };
        let mut state = self.lock();
        let before = state.by_address.range(..address.saturating_add(len_bytes));
        let overlaps = |(start, old): &(&u64, &Mapped)| {
            old.identity != 0 && old.identity != new.identity && start.saturating_add(old.len_bytes) > address
        };
        let freed = before.filter(overlaps).map(|(_, old)| old.memory).collect();
        state.by_address.insert(address, new);
        Ok(freed)
    }

    /// Adopted memory among some that is mapped, another part at each call, that its owner has freed; no cache finds it from
    /// here on.
    fn take_freed(&self, most: usize) -> Vec<u64> {
        let freed = {
            let mut state = self.lock();
            let (after, before) =
                (state.by_address.range(state.next_look..), state.by_address.range(..state.next_look));
            let some: Vec<(u64, Mapped)> = after.chain(before).take(most).map(|(at, mapped)| (*at, *mapped)).collect();
            state.next_look = some.last().map_or(0, |(address, _)| address + 1);
            some
        };
        // The driver is asked without the lock.
        let freed: Vec<_> = freed.into_iter().filter(|(address, mapped)| mapped.is_freed(*address)).collect();
        freed.iter().for_each(|(_, mapped)| self.forget(mapped.memory));
        let adopted = |(_, mapped): &(u64, Mapped)| match mapped.memory {
            MemoryName::Adopted(id) => Some(id),
            MemoryName::Lease(_) => None,
        };
        freed.iter().filter_map(adopted).collect()
    }

    /// Memory is about to go: no cache finds a range of it from here on. A hit that is held keeps its registration.
    pub(crate) fn forget(&self, memory: MemoryName) {
        let (ranges, caches) = {
            let mut state = self.lock();
            let of_memory = state.by_address.iter().filter(|(_, mapped)| mapped.memory == memory);
            let ranges: Vec<(u64, u64)> = of_memory.map(|(address, mapped)| (*address, mapped.len_bytes)).collect();
            state.by_address.retain(|_, mapped| mapped.memory != memory);
            (ranges, state.caches.clone())
        };
        for (address, len_bytes) in ranges {
            for cache in &caches {
                drop(cache.hits.remove_within(address, len_bytes));
            }
        }
    }

    /// The memory of a range of addresses, and where the range starts in it.
    fn find(&self, address: u64, len_bytes: u64) -> Option<(Mapped, u64)> {
        let state = self.lock();
        let (start, mapped) = state.by_address.range(..=address).next_back()?;
        let at = address - start;
        at.checked_add(len_bytes).is_some_and(|end| end <= mapped.len_bytes).then_some((*mapped, at))
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

impl RegistrationCache {
    fn new(hca: &str, access: v1::Access, page: &Arc<GenerationReader>) -> Result<Self, ClientError> {
        let hits = HitCache::new(Arc::clone(page), MAX_REGIONS)?.identified_by(identify);
        Ok(Self { hca: hca.into(), access, hits: Arc::new(hits) })
    }

    /// The registration that covers `len_bytes` at `address`, pinned until the hit is dropped. No system call and no
    /// lock; `None` when there is none, or the daemon has ended it.
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
        let found = session.mappings().find(address, len_bytes);
        if let Some((freed, _)) = found.filter(|(mapped, _)| mapped.is_freed(address)) {
            session.give_up(freed.memory);
            let what = format!("the memory that was adopted at {address:#x} was freed; adopt what is there now");
            return Err(ClientError::InvalidArgument { what });
        }
        let (Mapped { memory, identity, .. }, offset) = found.ok_or_else(|| ClientError::InvalidArgument {
            what: format!("{len_bytes} bytes at {address:#x} are not in one buffer or adopted memory of this session"),
        })?;
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
        let inserted = session.mappings().if_mapped(memory, address, || self.hits.insert(region, registered));
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
    fn if_mapped<T>(&self, memory: MemoryName, address: u64, then: impl FnOnce() -> T) -> Option<T> {
        let state = self.lock();
        let (_, mapped) = state.by_address.range(..=address).next_back()?;
        (mapped.memory == memory).then(then)
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
    pub(crate) fn add_cuda(&self, address: u64, len_bytes: u64, memory: MemoryName) -> Result<(), ClientError> {
        let freed = self.mappings().add_cuda(address, len_bytes, memory)?;
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
    /// [`Session::registration_or_register`] left there. No system call and no lock.
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
