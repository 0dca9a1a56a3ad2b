//! Adopted memory: this process's own, known to the daemon so that ranges of it can be registered.

use std::num::NonZeroU64;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use gdrd_client_sys::{CudaError, Gpu, buffer_id};
use gdrd_proto::v1;
use gdrd_proto::v1::registrations_client::RegistrationsClient;
use gdrd_shm::{Access, Segment};

use crate::error::ClientError;
use crate::finish::FinishOnDrop;
use crate::registered::MemoryName;
use crate::session::Session;

/// The daemon's reason for memory that it does not have.
const UNKNOWN: &str = "MEMORY_UNKNOWN";

/// Memory to adopt.
#[derive(Debug)]
pub struct AdoptOptions {
    fd: OwnedFd,
    other_mapping: Option<OwnedFd>,
    gpu: String,
    maps: bool,
    cuda: Option<CudaPlace>,
}

/// Where memory of CUDA is in this process.
#[derive(Debug)]
pub(crate) struct CudaPlace {
    pub(crate) address: u64,
    /// Number of the allocation that was there before the memory was exported, or as far back as is known: a later look may
    /// meet another one at the address.
    pub(crate) identity: Result<NonZeroU64, CudaError>,
    /// The GPU that has it, whose work is waited for.
    gpu: Option<Arc<Gpu>>,
}

impl AdoptOptions {
    /// Host memory: a memfd made with MFD_ALLOW_SEALING. It is sealed against resizing, and mapped here.
    #[must_use]
    pub fn memfd(fd: OwnedFd) -> Self {
        Self { fd, other_mapping: None, gpu: String::new(), maps: true, cuda: None }
    }

    /// Memory of a GPU (name, UUID or BDF) by its dma-buf (`cuMemGetHandleForAddressRange`). Memory of cudaMalloc and
    /// cuMemCreate has one; managed memory and memory of cudaHostRegister have none.
    #[must_use]
    pub fn dma_buf(fd: OwnedFd, gpu: impl Into<String>) -> Self {
        Self { fd, other_mapping: None, gpu: gpu.into(), maps: false, cuda: None }
    }

    /// `len_bytes` of CUDA memory at `address`, exported here: of cuMemAlloc or cudaMalloc, or mapped by cuMemMap as a whole.
    /// Both are multiples of the host's page size. See [`AdoptOptions::cuda_at`]. Where the GPU is coherent with the CPU it is exported
    /// both ways, as by [`AdoptOptions::other_mapping`].
    ///
    /// # Errors
    /// [`ClientError::Cuda`] for what has no dma-buf.
    pub fn cuda(gpu: &Arc<Gpu>, address: u64, len_bytes: u64) -> Result<Self, ClientError> {
        let identity = Ok(buffer_id(address)?);
        let dma_buf = gpu.export_dma_buf(address, len_bytes)?;
        let other_mapping = gpu.export_dma_buf_by_pcie(address, len_bytes)?;
        let place = CudaPlace { address, identity, gpu: Some(Arc::clone(gpu)) };
        Ok(Self { other_mapping, cuda: Some(place), ..Self::dma_buf(dma_buf, gpu.uuid()) })
    }

    /// The dma-buf is of one CUDA allocation that is at this address of this process: [`Session::registration`] and the caches
    /// find ranges of it. Each hit asks the driver whether the same allocation is still there (`BUFFER_ID`), since nothing
    /// tells of a free: memory that was freed is never found, and it is given up when that is seen. Still, disown what you
    /// free: a range that is in use by a NIC while it is freed is beyond any check.
    #[must_use]
    pub fn cuda_at(mut self, address: u64) -> Self {
        self.cuda = Some(CudaPlace { address, identity: buffer_id(address), gpu: Gpu::of(address).ok() });
        self
    }

    /// The same memory exported with its other kind of mapping (`CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE`), for NICs
    /// that do not take the first.
    #[must_use]
    pub fn other_mapping(mut self, fd: OwnedFd) -> Self {
        self.other_mapping = Some(fd);
        self
    }

    /// A GPU that host memory is near to: registrations that name no HCA use those paired with it.
    #[must_use]
    pub fn near(mut self, gpu: impl Into<String>) -> Self {
        self.gpu = gpu.into();
        self
    }
}

/// Memory that the daemon knows. Dropped, it is given up in the background; await [`AdoptedMemory::disown`] to know that
/// no NIC reaches it any more, before it is freed.
#[derive(Debug)]
pub struct AdoptedMemory {
    session: Session,
    id: u64,
    size_bytes: u64,
    kind: String,
    memory: Option<Segment>,
    /// Posts from it wait for this one's work.
    gpu: Option<Arc<Gpu>>,
    owned: bool,
}

impl Session {
    /// Adopts memory.
    ///
    /// # Errors
    /// [`ClientError::NotAdopted`] with the daemon's reason and the alternative, [`ClientError::Memory`] when a memfd
    /// cannot be mapped, [`ClientError::Cuda`] and [`ClientError::InvalidArgument`] when there is no one allocation at the
    /// address that was given, [`ClientError::SessionEnded`], [`ClientError::Deadline`], [`ClientError::Io`].
    pub async fn adopt(&self, options: AdoptOptions) -> Result<AdoptedMemory, ClientError> {
        let mut adopted = self.adopt_all(vec![options]).await?;
        adopted.pop().ok_or_else(|| ClientError::protocol("no memory was adopted"))
    }

    /// Adopts several pieces of memory in one message of at most 32 descriptors, all or none.
    ///
    /// # Errors
    /// As [`Session::adopt`].
    pub async fn adopt_all(&self, options: Vec<AdoptOptions>) -> Result<Vec<AdoptedMemory>, ClientError> {
        let session = self.clone();
        let call = async move {
            let item = |options: &AdoptOptions| v1::AdoptItem {
                gpu: options.gpu.clone(),
                has_other_mapping: options.other_mapping.is_some(),
            };
            let items: Vec<v1::AdoptItem> = options.iter().map(item).collect();
            let all = options.iter().flat_map(|options| [Some(&options.fd), options.other_mapping.as_ref()]);
            let fds: Vec<BorrowedFd<'_>> = all.flatten().map(AsFd::as_fd).collect();
            let (items, all) = (&items, &fds[..]);
            let adopt = |session: Session| async move { session.send_adoption(items.clone(), all).await };
            let adopted = session.across_restarts(adopt).await?;
            drop(fds);
            // Held from here on: what fails now gives up the rest by its drop.
            let mut memories: Vec<AdoptedMemory> =
                adopted.into_iter().map(|adopted| AdoptedMemory::new(&session, adopted)).collect();
            for (memory, options) in memories.iter_mut().zip(options) {
                if options.maps {
                    memory.map(options.fd)?;
                } else if let Some(mut place) = options.cuda {
                    memory.is_used_by(place.gpu.take());
                    session.add_cuda(place, memory.size_bytes, memory.name())?;
                }
            }
            Ok(memories)
        };
        FinishOnDrop::new(self.runtime(), call).await
    }
}

impl AdoptedMemory {
    fn new(session: &Session, adopted: v1::AdoptedMemory) -> Self {
        let v1::AdoptedMemory { memory_id, size_bytes, kind } = adopted;
        Self { session: session.clone(), id: memory_id, size_bytes, kind, memory: None, gpu: None, owned: true }
    }

    fn map(&mut self, fd: OwnedFd) -> Result<(), ClientError> {
        let segment = Segment::map(fd, Access::ReadWrite)?;
        self.session.mappings().add(segment.address(), segment.len_bytes(), MemoryName::Adopted(self.id));
        self.memory = Some(segment);
        Ok(())
    }

    /// Its registrations are of memory of that GPU.
    fn is_used_by(&mut self, gpu: Option<Arc<Gpu>>) {
        if let Some(gpu) = &gpu {
            let slots = self.session.mappings().gpu_slots();
            slots.hold(self.name());
            slots.mapped(self.name(), gpu);
        }
        self.gpu = gpu;
    }

    /// Its number.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Length, bytes, as the kernel told the daemon.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// `memfd` or `dma-buf`.
    #[must_use]
    pub fn kind(&self) -> &str {
        &self.kind
    }

    /// A memfd's memory, mapped.
    ///
    /// # Errors
    /// [`ClientError::NotMappable`] for a dma-buf, whose memory its owner has mapped.
    pub fn memory(&self) -> Result<&Segment, ClientError> {
        self.memory.as_ref().ok_or_else(|| ClientError::NotMappable { kind: self.kind.clone() })
    }

    /// Lets [`Session::registration`] and the caches find ranges of device memory by where it is mapped in this process.
    /// From there on the memory must not be unmapped before this value is dropped or disowned: nobody checks, so use
    /// [`AdoptOptions::cuda_at`] for memory of CUDA.
    pub fn is_mapped_at(&self, address: u64) {
        self.session.mappings().add(address, self.size_bytes, MemoryName::Adopted(self.id));
    }

    pub(crate) fn name(&self) -> MemoryName {
        MemoryName::Adopted(self.id)
    }

    /// Gives the memory up. When this returns no NIC reaches it, whoever held registrations of it, and the daemon has no
    /// descriptor of it.
    ///
    /// # Errors
    /// [`ClientError::SessionEnded`], [`ClientError::Deadline`], [`ClientError::Unreachable`]; the memory is given up in
    /// the background all the same.
    pub async fn disown(mut self) -> Result<(), ClientError> {
        self.session.check_ours()?;
        self.session.mappings().forget(self.name());
        let memory_id = self.id;
        let disown = |session: Session| async move {
            let request = session.request(v1::DisownRequest { memory_id });
            let answer = RegistrationsClient::new(session.channel()).disown(request).await;
            answer.map_err(|status| session.error("Registrations.Disown", status))
        };
        match self.session.across_restarts(disown).await {
            // Given up before, when it was seen that the memory had been freed.
            Err(error) if error.reason() == Some(UNKNOWN) => {}
            answer => drop(answer?),
        }
        self.owned = false;
        Ok(())
    }
}

impl Drop for AdoptedMemory {
    fn drop(&mut self) {
        if !self.session.is_ours() {
            return;
        }
        self.session.mappings().forget(self.name());
        if self.gpu.is_some() {
            self.session.mappings().gpu_slots().part(self.name());
        }
        if self.owned && self.session.end().is_none() {
            Arc::clone(self.session.parting()).disown(self.id);
        }
    }
}
