//! Backends that note which calls they get.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, PoisonError};

use gdrd_engine::{Engine, EngineConfig, GpuUuid, Hardware};
use gdrd_hal::{
    Access, CompletionQueue, CqId, GpuAllocation, GpuMemory, GpuMemoryCapabilities, GpuMemoryError, GpuMemoryUsage,
    Hca, HcaCapabilities, HcaError, HcaEvent, KeptMemory, MemoryRegion, MemorySource, PortAttributes, ProtectionDomain,
    QueuePairConfig, QueuePairParts, SharedReceiveQueue, SrqId,
};
use gdrd_sim::{SimHost, SimOptions};

use crate::world::{World, hardware, plan, spec};

/// Names of the calls that drivers got.
#[derive(Clone, Default)]
pub(crate) struct Calls(Arc<Mutex<Vec<&'static str>>>);

impl Calls {
    fn note(&self, call: &'static str) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(call);
    }

    /// Those since the last time.
    pub(crate) fn take(&self) -> Vec<&'static str> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A world of such backends.
pub(crate) fn world(config: EngineConfig) -> (World, Calls) {
    let sim = SimHost::with_options(spec(), SimOptions::default()).expect("the host is sound");
    let calls = Calls::default();
    let Hardware { gpu_memory, hcas, .. } = hardware(&sim, plan());
    let gpu_memory = gpu_memory.map(|inner| Arc::new(Counted { inner, calls: calls.clone() }) as Arc<dyn GpuMemory>);
    let counted = |inner| Arc::new(Counted { inner, calls: calls.clone() }) as Arc<dyn Hca>;
    let hcas = hcas.into_iter().map(counted).collect();
    let hardware = Hardware { gpu_memory, hcas, ..hardware(&sim, plan()) };
    let engine = Engine::start(config, hardware).expect("the engine starts");
    (World { sim, engine }, calls)
}

struct Counted<T> {
    inner: T,
    calls: Calls,
}

impl GpuMemory for Counted<Arc<dyn GpuMemory>> {
    fn capabilities(&self) -> GpuMemoryCapabilities {
        self.inner.capabilities()
    }

    fn usage(&self, gpu: &GpuUuid) -> Result<GpuMemoryUsage, GpuMemoryError> {
        self.calls.note("usage");
        self.inner.usage(gpu)
    }

    fn allocate(&self, gpu: &GpuUuid, len_bytes: u64) -> Result<Box<dyn GpuAllocation>, GpuMemoryError> {
        self.calls.note("allocate");
        self.inner.allocate(gpu, len_bytes)
    }

    fn import(
        &self,
        gpu: &GpuUuid,
        len_bytes: u64,
        kept: KeptMemory,
    ) -> Result<Box<dyn GpuAllocation>, GpuMemoryError> {
        self.calls.note("import");
        self.inner.import(gpu, len_bytes, kept)
    }

    fn is_device_memory(&self, fd: BorrowedFd<'_>) -> bool {
        self.calls.note("is_device_memory");
        self.inner.is_device_memory(fd)
    }
}

impl Hca for Counted<Arc<dyn Hca>> {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn capabilities(&self) -> HcaCapabilities {
        self.inner.capabilities()
    }

    fn ports(&self) -> Result<Vec<PortAttributes>, HcaError> {
        self.calls.note("ports");
        self.inner.ports()
    }

    fn alloc_pd(&self) -> Result<Arc<dyn ProtectionDomain>, HcaError> {
        self.calls.note("alloc_pd");
        Ok(Arc::new(Counted { inner: self.inner.alloc_pd()?, calls: self.calls.clone() }))
    }

    fn create_cq(&self, depth: u32) -> Result<Box<dyn CompletionQueue>, HcaError> {
        self.calls.note("create_cq");
        self.inner.create_cq(depth)
    }

    // The engine's own thread asks, whenever there is something.
    fn take_events(&self) -> Vec<HcaEvent> {
        self.inner.take_events()
    }

    fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.event_fd()
    }
}

impl ProtectionDomain for Counted<Arc<dyn ProtectionDomain>> {
    fn register(&self, source: MemorySource<'_>, access: Access, iova: u64) -> Result<Box<dyn MemoryRegion>, HcaError> {
        self.calls.note("register");
        Ok(Box::new(Counted { inner: self.inner.register(source, access, iova)?, calls: self.calls.clone() }))
    }

    fn create_queue_pair(&self, cq: CqId, config: &QueuePairConfig) -> Result<QueuePairParts, HcaError> {
        self.calls.note("create_queue_pair");
        self.inner.create_queue_pair(cq, config)
    }

    fn create_shared_receive_queue(&self, depth: u32) -> Result<Box<dyn SharedReceiveQueue>, HcaError> {
        self.calls.note("create_shared_receive_queue");
        self.inner.create_shared_receive_queue(depth)
    }

    fn create_queue_pair_on(&self, cq: CqId, srq: SrqId, config: &QueuePairConfig) -> Result<QueuePairParts, HcaError> {
        self.calls.note("create_queue_pair_on");
        self.inner.create_queue_pair_on(cq, srq, config)
    }
}

impl MemoryRegion for Counted<Box<dyn MemoryRegion>> {
    fn lkey(&self) -> u32 {
        self.inner.lkey()
    }

    fn rkey(&self) -> u32 {
        self.inner.rkey()
    }

    fn iova(&self) -> u64 {
        self.inner.iova()
    }

    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }

    fn access(&self) -> Access {
        self.inner.access()
    }

    fn deregister(self: Box<Self>) -> Result<(), HcaError> {
        let Self { inner, calls } = *self;
        calls.note("deregister");
        inner.deregister()
    }
}
