//! GPUs, RDMA devices with their ports, network interfaces and drives.

use std::fmt;
use std::net::Ipv6Addr;

use serde::{Deserialize, Serialize};

use crate::bdf::Bdf;
use crate::model::{Fabric, Mig, NumaId};
use crate::source::{SourceKind, Sourced};

/// A GPU's place in `Host::gpus`. Means nothing in another snapshot: identity is the uuid, else the address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct GpuId(pub usize);

/// An RDMA device's place in `Host::hcas`. Means nothing in another snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct HcaId(pub usize);

/// A character device by number, as `st_rdev` gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DeviceNode {
    /// Major number.
    pub major: u32,
    /// Minor number.
    pub minor: u32,
}

impl fmt::Display for DeviceNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "char:{}:{}", self.major, self.minor)
    }
}

/// A GPU, or another accelerator that the configuration names.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Gpu {
    /// `GPU` and its place in PCI order, from 0. NVML index and CUDA ordinal may differ.
    pub name: String,
    /// PCI address; `None` for inputs without addresses.
    pub bdf: Option<Bdf>,
    /// NUMA node; `None` is unknown.
    pub numa: Option<NumaId>,
    /// `GPU-…` as NVML prints it.
    pub uuid: Option<Sourced<String>>,
    /// Device memory in bytes.
    pub memory_bytes: Option<Sourced<u64>>,
    /// The device node that proves the right to this GPU.
    pub device_node: Option<Sourced<DeviceNode>>,
    /// Product name.
    pub product: Option<Sourced<String>>,
    /// Size of BAR1, the window for the CPU and for peers, in bytes.
    pub bar1_bytes: Option<Sourced<u64>>,
    /// Registration with the NVSwitch fabric; `None` for GPUs without one, or where nobody tells.
    pub fabric: Option<Sourced<Fabric>>,
    /// MIG; `None` for GPUs that cannot be sliced, or where nobody tells.
    pub mig: Option<Sourced<Mig>>,
    /// Which input listed it.
    pub source: SourceKind,
}

impl Gpu {
    /// The uuid without its source.
    #[must_use]
    pub fn uuid(&self) -> Option<&str> {
        self.uuid.as_ref().map(|uuid| uuid.value.as_str())
    }
}

/// How an RDMA device came into the list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum HcaOrigin {
    /// A device of class/infiniband (or its like in another input) on a PCI function.
    Hardware,
    /// A device of class/infiniband without PCI function: rxe, siw and other virtual ones.
    Soft {
        /// The interface below it, where it says so (rxe does, siw does not).
        netdev: Option<String>,
    },
    /// No class/infiniband in the input: taken for one by its PCI class or id.
    Assumed,
    /// A socket transport that the input lists as a NIC. It moves no memory by itself.
    Socket,
}

/// An RDMA device as verbs names it (`mlx5_0`), or what stands for one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Hca {
    /// Verbs name, else netdev, else address.
    pub name: String,
    /// How it came into the list.
    pub origin: HcaOrigin,
    /// Its PCI function; for a sub-function the one that carries it.
    pub bdf: Option<Bdf>,
    /// Its data-direct function, a second path of the same NIC (15b3:2100).
    pub data_direct: Option<Bdf>,
    /// Name of the auxiliary device, if it is a sub-function.
    pub sub_function: Option<String>,
    /// NUMA node; `None` is unknown.
    pub numa: Option<NumaId>,
    /// Ports by number. Empty if the input does not list them.
    pub ports: Vec<Port>,
    /// Interfaces of the same function.
    pub netdevs: Vec<String>,
    /// The bond it belongs to.
    pub bond: Option<String>,
    /// Whether it is one of several RDMA devices below that bond rather than the bond's own device.
    pub is_bond_slave: bool,
    /// The adapter: lowest address of its functions.
    pub card: Option<Bdf>,
    /// Node GUID, 64 bits, where known and not zero.
    pub node_guid: Option<u64>,
    /// GUID that all functions of one adapter share, where known and not zero.
    pub sys_image_guid: Option<u64>,
    /// Whether this system can open it by verbs: a container may see devices of which it has no uverbs node.
    /// `None` if the input does not tell.
    #[serde(default)]
    pub has_uverbs: Option<bool>,
    /// Which input listed it.
    pub source: SourceKind,
}

impl Hca {
    /// Rate of its fastest usable port in Gbit/s: among active ports, else among all.
    #[must_use]
    pub fn rate_gbps(&self) -> Option<f64> {
        let fastest = |active_only: bool| {
            self.ports
                .iter()
                .filter(|port| !active_only || port.state == PortState::Active)
                .filter_map(|port| port.rate_gbps)
                .max_by(f64::total_cmp)
        };
        fastest(true).or_else(|| fastest(false))
    }

    /// Link layer of its first active port, else of its first port that tells.
    #[must_use]
    pub fn link_layer(&self) -> LinkLayer {
        let known = |port: &&Port| port.link_layer != LinkLayer::Unknown;
        let active = |port: &&Port| port.state == PortState::Active;
        let told = self.ports.iter().filter(known);
        told.clone().find(active).or_else(|| told.clone().next()).map_or(LinkLayer::Unknown, |port| port.link_layer)
    }
}

/// One port of an HCA.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Port {
    /// Counted from 1.
    pub port_num: u8,
    /// Logical state.
    pub state: PortState,
    /// Which network it speaks.
    pub link_layer: LinkLayer,
    /// Rate in Gbit/s as the driver reports it.
    pub rate_gbps: Option<f64>,
    /// GIDs in use; empty if the input has none.
    pub gids: Vec<Gid>,
}

/// Logical port state (`enum ib_port_state`, Linux `include/rdma/ib_verbs.h`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum PortState {
    /// 0.
    Nop,
    /// 1: no link.
    Down,
    /// 2: link without a configured subnet.
    Init,
    /// 3.
    Armed,
    /// 4: carries traffic.
    Active,
    /// 5.
    ActiveDefer,
    /// Not told, or a state this program does not know.
    Unknown,
}

impl PortState {
    const NAMES: [(Self, &'static str); 6] = [
        (Self::Nop, "NOP"),
        (Self::Down, "DOWN"),
        (Self::Init, "INIT"),
        (Self::Armed, "ARMED"),
        (Self::Active, "ACTIVE"),
        (Self::ActiveDefer, "ACTIVE_DEFER"),
    ];

    /// Reads `ACTIVE` or the sysfs form `4: ACTIVE`; anything else is unknown.
    #[must_use]
    pub fn parse(text: &str) -> Self {
        let name = text.split_once(':').map_or(text, |(_, name)| name).trim();
        Self::NAMES
            .iter()
            .find(|(_, known)| known.eq_ignore_ascii_case(name))
            .map_or(Self::Unknown, |(state, _)| *state)
    }

    /// The kernel's number of the state, `None` if unknown.
    #[must_use]
    pub fn number(self) -> Option<usize> {
        Self::NAMES.iter().position(|(state, _)| *state == self)
    }
}

impl fmt::Display for PortState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known = Self::NAMES.iter().find(|(state, _)| state == self);
        f.write_str(known.map_or("UNKNOWN", |(_, name)| name))
    }
}

/// Network that a port speaks (`ports/N/link_layer`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum LinkLayer {
    /// InfiniBand.
    InfiniBand,
    /// Ethernet: RoCE or iWARP.
    Ethernet,
    /// Not told.
    Unknown,
}

impl LinkLayer {
    /// Reads the kernel's word; anything else is unknown.
    #[must_use]
    pub fn parse(text: &str) -> Self {
        match text.trim() {
            "InfiniBand" => Self::InfiniBand,
            "Ethernet" => Self::Ethernet,
            _ => Self::Unknown,
        }
    }
}

impl fmt::Display for LinkLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::InfiniBand => "InfiniBand",
            Self::Ethernet => "Ethernet",
            Self::Unknown => "Unknown",
        })
    }
}

/// One entry of a port's GID table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gid {
    /// Place in the table.
    pub gid_index: u16,
    /// The address.
    pub gid: Ipv6Addr,
    /// Its type; `None` if the table does not tell.
    pub kind: Option<GidKind>,
    /// Interface behind it.
    pub netdev: Option<String>,
}

/// GID type (`gid_attrs/types/N`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum GidKind {
    /// `IB/RoCE v1`.
    IbOrRoceV1,
    /// `RoCE v2`.
    RoceV2,
}

/// A network interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Netdev {
    /// Interface name.
    pub name: String,
    /// Its PCI function, if it has one.
    pub bdf: Option<Bdf>,
    /// The bond or bridge it belongs to.
    pub master: Option<String>,
    /// Whether it is itself a bond.
    pub is_bond: bool,
    /// Whether the default route leaves by it.
    pub has_default_route: bool,
    /// Which input listed it.
    pub source: SourceKind,
}

/// An NVMe controller.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Drive {
    /// Controller name (`nvme0`), else its address.
    pub name: String,
    /// Its PCI function; `None` for fabrics controllers.
    pub bdf: Option<Bdf>,
    /// NUMA node; `None` is unknown.
    pub numa: Option<NumaId>,
    /// Transport, `pcie`, `rdma`, `tcp` …, where known.
    pub transport: Option<String>,
    /// For a fabrics controller, the interface by which it reaches its target, where known.
    pub netdev: Option<String>,
    /// Which input listed it.
    pub source: SourceKind,
}
