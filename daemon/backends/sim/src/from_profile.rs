//! From a host model to the devices that are simulated for it.
//!
//! What the model does not tell is made up the same way each time, so that two starts on one profile agree.

use std::net::Ipv6Addr;

use gdrd_hal::{DeviceNumber, Gid, GidEntry, GidType, GpuUuid, LinkLayer, PortState};
use gdrd_topology::bdf::Bdf;
use gdrd_topology::model::{self, GpuId, HcaOrigin, Host};

use crate::host::SimError;
use crate::provider::Provider;
use crate::spec::{SimGpu, SimHca, SimPort, SimSpec};

/// Memory of a GPU whose profile does not tell.
const DEFAULT_GPU_BYTES: u64 = 16 << 30;
/// MTU of InfiniBand ports, and of Ethernet ports whose interface has the usual 1500 bytes.
const INFINIBAND_MTU_BYTES: u32 = 4096;
const ETHERNET_MTU_BYTES: u32 = 1024;
/// Rate of a port whose profile does not tell.
const DEFAULT_RATE_GBPS: f64 = 100.0;

impl SimSpec {
    /// The devices of a host: every GPU, and every RDMA device but socket transports. InfiniBand ports
    /// get LIDs in order, which hold once they are active.
    ///
    /// # Errors
    /// `NoAddress` for a GPU without PCI address (a host read from a level matrix).
    pub fn from_host(host: &Host) -> Result<Self, SimError> {
        let gpus: Result<_, _> =
            host.gpus.iter().enumerate().map(|(place, gpu)| simulated_gpu(host, GpuId(place), gpu)).collect();
        let mut next_lid = 1;
        let devices = host.hcas.iter().filter(|hca| hca.origin != HcaOrigin::Socket);
        let hcas = devices.map(|hca| simulated_hca(host, hca, &mut next_lid)).collect();
        Ok(Self { gpus: gpus?, hcas })
    }
}

fn simulated_gpu(host: &Host, id: GpuId, gpu: &model::Gpu) -> Result<SimGpu, SimError> {
    let bdf = gpu.bdf.ok_or_else(|| SimError::NoAddress { gpu: gpu.name.clone() })?;
    let device_id = host.function(bdf).and_then(|function| function.device);
    let mut detail = host.gpu_facts(id).map(|facts| facts.detail).unwrap_or_default();
    let made_up = || device_id.map_or("simulated GPU".to_owned(), |id| format!("simulated GPU {id:04x}"));
    detail.product.get_or_insert_with(made_up);
    Ok(SimGpu {
        name: gpu.name.clone(),
        uuid: GpuUuid(gpu.uuid().map_or_else(|| uuid_of(bdf), str::to_owned)),
        bdf,
        device_node: gpu
            .device_node
            .as_ref()
            .map(|node| DeviceNumber { major: node.value.major, minor: node.value.minor }),
        memory_bytes: gpu.memory_bytes.as_ref().map_or(DEFAULT_GPU_BYTES, |bytes| bytes.value),
        detail,
    })
}

/// A UUID in NVML's form, made of the address.
fn uuid_of(bdf: Bdf) -> String {
    format!("GPU-{:08x}-{:02x}{:02x}-{:04x}-0000-000000000000", bdf.domain, bdf.bus, bdf.device, bdf.function)
}

fn simulated_hca(host: &Host, hca: &model::Hca, next_lid: &mut u16) -> SimHca {
    let function = hca.bdf.and_then(|bdf| host.function(bdf));
    let mut ports: Vec<_> = hca.ports.iter().map(|port| simulated_port(hca, port, next_lid)).collect();
    if ports.is_empty() {
        // Guessed devices have no class/infiniband to read ports from.
        let guessed = model::Port {
            port_num: 1,
            state: model::PortState::Active,
            link_layer: model::LinkLayer::Ethernet,
            rate_gbps: None,
            gids: Vec::new(),
        };
        ports.push(simulated_port(hca, &guessed, next_lid));
    }
    SimHca { name: hca.name.clone(), capabilities: Provider::of(hca, function).capabilities(), ports }
}

fn simulated_port(hca: &model::Hca, port: &model::Port, next_lid: &mut u16) -> SimPort {
    let state = match port.state {
        model::PortState::Active | model::PortState::ActiveDefer => PortState::Active,
        model::PortState::Down | model::PortState::Nop => PortState::Down,
        model::PortState::Init => PortState::Init,
        model::PortState::Armed => PortState::Armed,
        model::PortState::Unknown => PortState::Unknown,
    };
    let link_layer = match port.link_layer {
        model::LinkLayer::InfiniBand => LinkLayer::InfiniBand,
        model::LinkLayer::Ethernet => LinkLayer::Ethernet,
        model::LinkLayer::Unknown => LinkLayer::Unknown,
    };
    let mut lid = 0;
    if link_layer == LinkLayer::InfiniBand {
        lid = *next_lid;
        *next_lid = next_lid.saturating_add(1);
    }
    let mut gids: Vec<_> = port.gids.iter().map(|gid| gid_entry(gid, link_layer)).collect();
    if gids.is_empty() {
        gids.push(made_up_gid(hca, port.port_num, link_layer));
    }
    SimPort {
        state,
        link_layer,
        rate_gbps: port.rate_gbps.unwrap_or(DEFAULT_RATE_GBPS),
        lid,
        mtu_bytes: if link_layer == LinkLayer::InfiniBand { INFINIBAND_MTU_BYTES } else { ETHERNET_MTU_BYTES },
        gids,
    }
}

fn gid_entry(gid: &model::Gid, link_layer: LinkLayer) -> GidEntry {
    let gid_type = match (gid.kind, link_layer) {
        (_, LinkLayer::InfiniBand) => GidType::Ib,
        (Some(model::GidKind::RoceV2), _) => GidType::RoceV2,
        _ => GidType::RoceV1,
    };
    GidEntry { gid_index: gid.gid_index, gid: Gid(gid.gid.octets()), gid_type }
}

/// A link-local GID of the device's name: FNV-1a, 64 bits, which is short and spreads well enough for names.
fn made_up_gid(hca: &model::Hca, port_num: u8, link_layer: LinkLayer) -> GidEntry {
    let bytes = hca.name.bytes().chain([port_num]);
    let interface = bytes
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3));
    let address = Ipv6Addr::from(0xfe80_u128 << 112 | u128::from(interface));
    let gid_type = if link_layer == LinkLayer::InfiniBand { GidType::Ib } else { GidType::RoceV2 };
    GidEntry { gid_index: 0, gid: Gid(address.octets()), gid_type }
}
