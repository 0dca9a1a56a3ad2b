//! What a caller may ask for.

use std::time::Duration;

use gdrd_proto::v1;
use gdrd_proto::v1::acquire_request::Memory;

/// Time that a call may take where the caller says nothing: a cold acquire allocates and registers memory.
pub(crate) const DEFAULT_DEADLINE: Duration = Duration::from_secs(30);

/// A buffer to acquire.
#[derive(Debug, Clone, PartialEq)]
pub struct AcquireOptions(v1::AcquireRequest);

impl AcquireOptions {
    /// `size_bytes` of the memory of a GPU, named by name (`GPU0`), UUID or BDF, registered with its paired NICs.
    #[must_use]
    pub fn on_gpu(gpu: impl Into<String>, size_bytes: u64) -> Self {
        Self(v1::AcquireRequest { size_bytes, memory: Some(Memory::Gpu(gpu.into())), ..Default::default() })
    }

    /// `size_bytes` of host memory near a GPU, registered with the GPU's NICs.
    #[must_use]
    pub fn on_host_near(gpu: impl Into<String>, size_bytes: u64) -> Self {
        let memory = Some(Memory::Host(v1::HostMemory { near_gpu: gpu.into() }));
        Self(v1::AcquireRequest { size_bytes, memory, ..Default::default() })
    }

    /// `size_bytes` of host memory, registered with the named HCAs.
    #[must_use]
    pub fn on_host(hcas: impl IntoIterator<Item = String>, size_bytes: u64) -> Self {
        let memory = Some(Memory::Host(v1::HostMemory::default()));
        Self(v1::AcquireRequest { size_bytes, memory, hcas: hcas.into_iter().collect(), ..Default::default() })
    }

    /// Registers with these HCAs instead of those paired with the GPU.
    #[must_use]
    pub fn hcas(mut self, hcas: impl IntoIterator<Item = String>) -> Self {
        self.0.hcas = hcas.into_iter().collect();
        self
    }

    /// A buffer polled as a signal: registered without relaxed ordering.
    #[must_use]
    pub fn signal(mut self) -> Self {
        self.0.signal = true;
        self
    }

    /// Shown in lists; at most 64 bytes.
    #[must_use]
    pub fn label(mut self, label: impl Into<String>) -> Self {
        self.0.label = label.into();
        self
    }

    pub(crate) fn into_request(self) -> v1::AcquireRequest {
        self.0
    }
}

/// A brokered queue pair to create: RC unless told otherwise, on the first active port, with the daemon's default depths.
#[derive(Debug, Clone, PartialEq)]
pub struct QueuePairOptions(v1::CreateQueuePairRequest);

impl QueuePairOptions {
    /// On the HCA of this name.
    #[must_use]
    pub fn on_hca(hca: impl Into<String>) -> Self {
        Self(v1::CreateQueuePairRequest { hca: hca.into(), ..Default::default() }).rc()
    }

    /// On the first NIC paired with this GPU.
    #[must_use]
    pub fn near_gpu(gpu: impl Into<String>) -> Self {
        Self(v1::CreateQueuePairRequest { gpu: gpu.into(), ..Default::default() }).rc()
    }

    /// On this port of the HCA, counted from 1.
    #[must_use]
    pub fn port_num(mut self, port_num: u32) -> Self {
        self.0.port_num = port_num;
        self
    }

    /// Most requests outstanding in each direction; the daemon rounds up to powers of two.
    #[must_use]
    pub fn depths(mut self, send: u32, recv: u32) -> Self {
        self.0.send_depth = send;
        self.0.recv_depth = recv;
        self
    }

    /// Datagrams instead (UD): it carries sends only, each of at most the path MTU, which may be lost, to the one
    /// address that it is connected to. What it receives, from anyone, begins with 40 bytes of room for a route header
    /// (ibv_post_recv(3)).
    #[must_use]
    pub fn ud(mut self) -> Self {
        self.0.r#type = v1::QueuePairType::Ud.into();
        self
    }

    fn rc(mut self) -> Self {
        self.0.r#type = v1::QueuePairType::Rc.into();
        self
    }

    pub(crate) fn into_request(self) -> v1::CreateQueuePairRequest {
        self.0
    }
}
