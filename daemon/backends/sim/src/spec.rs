//! What a simulated host is made of, before it lives.

use gdrd_hal::{DeviceNumber, GidEntry, GpuUuid, HcaCapabilities, LinkLayer, PortState};
use gdrd_topology::bdf::Bdf;
use gdrd_topology::model::GpuDetail;

/// GPUs and HCAs of a simulated host.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SimSpec {
    /// GPUs in PCI order.
    pub gpus: Vec<SimGpu>,
    /// HCAs, all on one fabric.
    pub hcas: Vec<SimHca>,
}

/// One simulated GPU.
#[derive(Debug, Clone, PartialEq)]
pub struct SimGpu {
    /// Name in fault scripts and messages (`GPU0`).
    pub name: String,
    /// Identity.
    pub uuid: GpuUuid,
    /// PCI function.
    pub bdf: Bdf,
    /// Device node that proves the right to it.
    pub device_node: Option<DeviceNumber>,
    /// Memory that can be allocated, bytes. It is a limit: nothing is taken before it is touched.
    pub memory_bytes: u64,
    /// What its driver tells besides.
    pub detail: GpuDetail,
}

/// One simulated HCA.
#[derive(Debug, Clone, PartialEq)]
pub struct SimHca {
    /// RDMA device name (`mlx5_0`).
    pub name: String,
    /// What its provider can do.
    pub capabilities: HcaCapabilities,
    /// Ports, the first has number 1.
    pub ports: Vec<SimPort>,
}

/// One simulated port.
#[derive(Debug, Clone, PartialEq)]
pub struct SimPort {
    /// State at start.
    pub state: PortState,
    /// Link layer.
    pub link_layer: LinkLayer,
    /// Rate in Gbit/s; told, not enforced.
    pub rate_gbps: f64,
    /// LID that it has once it is active, 0 on Ethernet.
    pub lid: u16,
    /// Path MTU, bytes.
    pub mtu_bytes: u32,
    /// Filled rows of the GID table.
    pub gids: Vec<GidEntry>,
}
