//! The objects behind the state machine's ids.
//!
//! Drop order: registrations before the memory and the protection domain they are of; queue pairs,
//! which the broker owns, before either.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak};

use gdrd_hal::{Access, Endpoint, GpuAllocation, GpuUuid, Hca, MemoryRegion, MemorySource, QueuePair};
use gdrd_ring::GenerationWriter;

use super::domains::{DomainCell, Domains};
use super::executor::Lane;
use super::host_memory::HostMemory;
use super::lock;
use super::regions::entry_of;
use crate::broker::{Share, SlotEntry, SlotTable};
use crate::core::{AllocationId, HcaIndex, RegionId, TenantId};
use crate::ids::{MemoryId, QueuePairId, RemoteKey, SlotId};
use crate::keep::{Keeper, Name, Watch};
use crate::lease::RegistrationInfo;
use crate::policy::Traffic;
use crate::queue_pair::QueuePairInfo;
use crate::registration::AdoptedKind;
use crate::table::Table;

/// Device and inode: which file an fd is of, however often it was duplicated or opened anew.
pub(super) type FileId = (u64, u64);

/// The file of an fd. Not to be asked of one that a client sent before it is known to be of the kernel's own.
pub(super) fn file_of(fd: BorrowedFd<'_>) -> Option<FileId> {
    let stat = rustix::fs::fstat(fd).ok()?;
    Some((stat.st_dev, stat.st_ino))
}

/// Where a buffer's bytes are.
pub(super) enum Bytes {
    Gpu(Box<dyn GpuAllocation>),
    Host(HostMemory),
}

/// One registration.
pub(super) struct Registered {
    pub(super) hca: HcaIndex,
    pub(super) slot: SlotId,
    pub(super) region: Box<dyn MemoryRegion>,
}

/// One buffer.
pub(super) struct Memory {
    registered: Mutex<Vec<Registered>>,
    bytes: Bytes,
    /// Its memory and its dma-buf.
    files: [Option<FileId>; 2],
    /// Under which it was given away to be kept for the next daemon, memory and dma-buf: what may be there is taken back.
    named: OnceLock<[Name; 2]>,
    /// Set once all of it is.
    kept: OnceLock<()>,
    /// What calls on it may block on.
    pub(super) lane: Lane,
}

impl Memory {
    pub(super) fn new(bytes: Bytes, lane: Lane) -> Self {
        let files = match &bytes {
            Bytes::Gpu(gpu) => [file_of(gpu.memory_fd()), gpu.dma_buf_fd().and_then(file_of)],
            Bytes::Host(host) => [file_of(host.own_fd()), None],
        };
        Self { registered: Mutex::default(), bytes, files, named: OnceLock::new(), kept: OnceLock::new(), lane }
    }

    /// Notes that it is kept already.
    pub(super) fn kept_as(self, names: [Name; 2]) -> Self {
        // Just made, so nobody else has set it.
        let _ = (self.named.set(names), self.kept.set(()));
        self
    }

    /// Has it kept for the next daemon, once. Returns when it is.
    pub(super) fn keep(&self, keeper: &dyn Keeper, names: [Name; 2]) -> io::Result<()> {
        if self.kept.get().is_some() {
            return Ok(());
        }
        let [memory, dma_buf] = *self.named.get_or_init(|| names);
        match &self.bytes {
            Bytes::Gpu(allocation) => {
                keeper.store(memory, allocation.memory_fd(), Watch::No)?;
                if let Some(fd) = allocation.dma_buf_fd() {
                    keeper.store(dma_buf, fd, Watch::No)?;
                }
            }
            Bytes::Host(host) => keeper.store(memory, host.own_fd(), Watch::No)?,
        }
        keeper.barrier()?;
        let _ = self.kept.set(());
        Ok(())
    }

    pub(super) fn names(&self) -> Option<[Name; 2]> {
        self.named.get().copied()
    }

    pub(super) fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// One that it is registered with.
    pub(super) fn first_hca(&self) -> Option<HcaIndex> {
        lock(&self.registered).first().map(|registered| registered.hca)
    }

    /// What a client gets.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        match &self.bytes {
            Bytes::Gpu(allocation) => allocation.memory_fd(),
            Bytes::Host(memory) => memory.shared_fd(),
        }
    }

    /// What an HCA registers; `None` where the GPU backend exports no dma-buf.
    pub(super) fn source(&self) -> Option<MemorySource<'_>> {
        match &self.bytes {
            Bytes::Gpu(allocation) => allocation.dma_buf_fd().map(|fd| MemorySource::DmaBuf {
                fd,
                offset: 0,
                len_bytes: allocation.len_bytes(),
            }),
            Bytes::Host(memory) => {
                Some(MemorySource::Host { fd: memory.own_fd(), offset: 0, len_bytes: memory.len_bytes() })
            }
        }
    }

    pub(super) fn len_bytes(&self) -> u64 {
        match &self.bytes {
            Bytes::Gpu(allocation) => allocation.len_bytes(),
            Bytes::Host(memory) => memory.len_bytes(),
        }
    }

    pub(super) fn set_registered(&self, registered: Vec<Registered>) {
        *lock(&self.registered) = registered;
    }

    pub(super) fn take_registered(&self) -> Vec<Registered> {
        std::mem::take(&mut *lock(&self.registered))
    }

    pub(super) fn take_region(&self, hca: HcaIndex, slot: SlotId) -> Option<Box<dyn MemoryRegion>> {
        let mut registered = lock(&self.registered);
        let at = registered.iter().position(|r| r.hca == hca && r.slot == slot)?;
        Some(registered.swap_remove(at).region)
    }

    /// What the broker needs to know of a slot.
    pub(super) fn slot_entry(&self, slot: SlotId) -> Option<(HcaIndex, SlotEntry)> {
        let registered = lock(&self.registered);
        let found = registered.iter().find(|registered| registered.slot == slot)?;
        let region = &found.region;
        let entry = SlotEntry {
            hca: found.hca,
            lkey: region.lkey(),
            iova: region.iova(),
            len_bytes: region.len_bytes(),
            access: region.access(),
        };
        Some((found.hca, entry))
    }

    /// Fills in the keys, which only the holder of a lease gets.
    pub(super) fn fill_keys(&self, registrations: &mut [RegistrationInfo]) {
        let registered = lock(&self.registered);
        for info in registrations {
            if let Some(found) = registered.iter().find(|registered| registered.slot == info.slot) {
                info.rkey = RemoteKey(found.region.rkey());
                info.iova = found.region.iova();
                info.access = found.region.access();
            }
        }
    }
}

/// Memory that a client brought along. Dropping it closes its descriptors, which may block.
pub(super) struct AdoptedObjects {
    pub(super) kind: AdoptedKind,
    /// The GPU that was named for it.
    pub(super) gpu: Option<GpuUuid>,
    /// One, or one for each kind of mapping.
    fds: Vec<OwnedFd>,
}

impl AdoptedObjects {
    pub(super) fn new(kind: AdoptedKind, gpu: Option<GpuUuid>, fds: Vec<OwnedFd>) -> Self {
        Self { kind, gpu, fds }
    }

    /// The descriptors by kind of mapping, that kind first.
    pub(super) fn fds_with(&self, first: Option<usize>) -> Vec<(usize, BorrowedFd<'_>)> {
        let mut fds: Vec<_> = self.fds.iter().map(AsFd::as_fd).enumerate().collect();
        fds.sort_by_key(|(kind, _)| Some(*kind) != first);
        fds
    }
}

/// Which kind of mapping each HCA took of a GPU's memory: a property of the two, found out by trying. A hint: clients name the
/// GPU, and the order of their descriptors is theirs.
#[derive(Default)]
pub(super) struct Mappings(Mutex<BTreeMap<(Option<GpuUuid>, HcaIndex), usize>>);

impl Mappings {
    pub(super) fn of(&self, gpu: Option<&GpuUuid>, hca: HcaIndex) -> Option<usize> {
        lock(&self.0).get(&(gpu.cloned(), hca)).copied()
    }

    pub(super) fn note(&self, gpu: Option<&GpuUuid>, hca: HcaIndex, kind: usize) {
        lock(&self.0).insert((gpu.cloned(), hca), kind);
    }
}

/// A cached region.
pub(super) struct RegionObjects {
    pub(super) hca: HcaIndex,
    pub(super) rkey: u32,
    pub(super) entry: SlotEntry,
    /// Until it is deregistered.
    pub(super) region: Mutex<Option<Box<dyn MemoryRegion>>>,
}

impl RegionObjects {
    pub(super) fn new(hca: HcaIndex, region: Box<dyn MemoryRegion>) -> Self {
        let (rkey, entry) = (region.rkey(), entry_of(hca, &*region));
        Self { hca, rkey, entry, region: Mutex::new(Some(region)) }
    }
}

/// What one tenant has.
pub(super) struct Tenant {
    pub(super) slots: Arc<SlotTable>,
    pub(super) share: Arc<Share>,
    pub(super) page: GenerationWriter,
    /// Whether the page is kept for the next daemon.
    pub(super) page_kept: OnceLock<()>,
    pub(super) domains: Domains,
}

impl Tenant {
    pub(super) fn new(slots: SlotTable, page: GenerationWriter) -> Self {
        Self {
            slots: Arc::new(slots),
            // Until a session brings its rule.
            share: Arc::new(Share::new(Traffic::default())),
            page,
            page_kept: OnceLock::new(),
            domains: Domains::default(),
        }
    }
}

/// What the engine keeps of a queue pair that the broker owns.
pub(super) struct QueuePairObjects {
    pub(super) info: QueuePairInfo,
    /// `None` for one of an earlier daemon.
    pub(super) control: Option<Weak<dyn QueuePair>>,
    /// For the session, until it takes them: the ring and the doorbell.
    pub(super) fds: Option<(OwnedFd, OwnedFd)>,
    /// The ring's.
    pub(super) ring_file: Option<FileId>,
}

/// All tables.
#[derive(Default)]
pub(super) struct Objects {
    memory: RwLock<Table<AllocationId, Arc<Memory>>>,
    tenants: RwLock<BTreeMap<TenantId, Arc<Tenant>>>,
    queue_pairs: Mutex<BTreeMap<QueuePairId, QueuePairObjects>>,
    adopted: RwLock<Table<MemoryId, Arc<AdoptedObjects>>>,
    regions: RwLock<Table<RegionId, Arc<RegionObjects>>>,
    pub(super) mappings: Mappings,
}

impl Objects {
    /// What every tenant had of an HCA that is gone, for the caller to drop.
    pub(super) fn leave_hca(&self, hca: HcaIndex) -> Vec<DomainCell> {
        lock(&self.mappings.0).retain(|(_, of), _| *of != hca);
        read(&self.tenants).values().filter_map(|tenant| tenant.domains.leave(hca)).collect()
    }

    /// Makes a tenant's slot table and generation page. Without them, the session that needs them is refused.
    pub(super) fn create_tenant(&self, id: TenantId, slots: u32) {
        match GenerationWriter::create(slots) {
            Ok(page) => {
                let slots = SlotTable::new(slots);
                self.insert_tenant(id, Tenant::new(slots, page));
            }
            Err(error) => tracing::error!(%error, "a tenant's generation page could not be made"),
        }
    }

    pub(super) fn insert_tenant(&self, id: TenantId, tenant: Tenant) {
        write(&self.tenants).insert(id, Arc::new(tenant));
    }

    pub(super) fn tenant(&self, id: TenantId) -> Option<Arc<Tenant>> {
        read(&self.tenants).get(&id).cloned()
    }

    pub(super) fn remove_tenant(&self, id: TenantId) -> Option<Arc<Tenant>> {
        write(&self.tenants).remove(&id)
    }

    pub(super) fn memory(&self, id: AllocationId) -> Option<Arc<Memory>> {
        read(&self.memory).get(&id).cloned()
    }

    /// The buffer whose memory this file is.
    pub(super) fn memory_of_file(&self, file: FileId) -> Option<AllocationId> {
        let memory = read(&self.memory);
        memory.iter().find(|(_, memory)| memory.files.contains(&Some(file))).map(|(id, _)| *id)
    }

    /// Whether this file is one through which the daemon and its clients talk: a generation page, or a ring.
    pub(super) fn is_shared_state(&self, file: FileId) -> bool {
        let is_page = |tenant: &Arc<Tenant>| file_of(tenant.page.fd()) == Some(file);
        read(&self.tenants).values().any(is_page)
            || lock(&self.queue_pairs).values().any(|queue_pair| queue_pair.ring_file == Some(file))
    }

    pub(super) fn insert_memory(&self, id: AllocationId, memory: Memory) {
        write(&self.memory).insert(id, Arc::new(memory));
    }

    pub(super) fn remove_memory(&self, id: AllocationId) -> Option<Arc<Memory>> {
        write(&self.memory).remove(&id)
    }

    pub(super) fn adopted(&self, id: MemoryId) -> Option<Arc<AdoptedObjects>> {
        read(&self.adopted).get(&id).cloned()
    }

    pub(super) fn insert_adopted(&self, id: MemoryId, adopted: AdoptedObjects) {
        write(&self.adopted).insert(id, Arc::new(adopted));
    }

    pub(super) fn remove_adopted(&self, id: MemoryId) -> Option<Arc<AdoptedObjects>> {
        write(&self.adopted).remove(&id)
    }

    pub(super) fn region(&self, id: RegionId) -> Option<Arc<RegionObjects>> {
        read(&self.regions).get(&id).cloned()
    }

    pub(super) fn insert_region(&self, id: RegionId, region: RegionObjects) {
        write(&self.regions).insert(id, Arc::new(region));
    }

    pub(super) fn remove_region(&self, id: RegionId) -> Option<Arc<RegionObjects>> {
        write(&self.regions).remove(&id)
    }

    pub(super) fn insert_queue_pair(&self, id: QueuePairId, objects: QueuePairObjects) {
        lock(&self.queue_pairs).insert(id, objects);
    }

    pub(super) fn remove_queue_pair(&self, id: QueuePairId) {
        lock(&self.queue_pairs).remove(&id);
    }

    pub(super) fn with_queue_pair<T>(
        &self,
        id: QueuePairId,
        with: impl FnOnce(&mut QueuePairObjects) -> T,
    ) -> Option<T> {
        lock(&self.queue_pairs).get_mut(&id).map(with)
    }

    /// The queue pairs on a port, with the endpoints that were told of them.
    pub(super) fn endpoints_on(&self, hca: &str, port_num: u8) -> Vec<(QueuePairId, Endpoint)> {
        let queue_pairs = lock(&self.queue_pairs);
        let on_it = queue_pairs.iter().filter(|(_, q)| q.info.port_num == port_num && &*q.info.hca == hca);
        on_it.map(|(id, q)| (*id, q.info.endpoint.clone())).collect()
    }

    /// The queue pair of that number on an HCA.
    pub(super) fn queue_pair_numbered(&self, hca: &str, qp_num: u32) -> Option<QueuePairId> {
        let queue_pairs = lock(&self.queue_pairs);
        let found = queue_pairs.iter().find(|(_, q)| q.info.qp_num == qp_num && &*q.info.hca == hca);
        found.map(|(id, _)| *id)
    }
}

fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    // Each change is one call on a map, so a panic elsewhere leaves it whole.
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

fn write<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}

/// Rights that an HCA can give: a provider without atomics refuses to register for them.
pub(crate) fn possible(access: Access, hca: &dyn Hca) -> Access {
    let atomics = hca.capabilities().atomics != gdrd_hal::AtomicScope::None;
    Access { remote_atomic: access.remote_atomic && atomics, ..access }
}
