//! PCI functions, their place in the tree and NUMA nodes.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::acs::Acs;
use crate::bdf::{Bdf, RootBus};
use crate::link::Link;
use crate::source::{SourceKind, Sourced};

/// Number of a NUMA node as Linux counts them. Sparse: the second socket may be node 8.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct NumaId(pub u16);

impl fmt::Display for NumaId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// One NUMA node (`devices/system/node/nodeN`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NumaNode {
    /// Its number.
    pub id: NumaId,
    /// CPUs of the node in list form (`0-15,128-143`), empty for memory-only nodes, `None` if unknown.
    pub cpus: Option<String>,
    /// Whether it has CPUs; nodes that do not say are taken to have some.
    pub has_cpus: bool,
    /// ACPI SLIT distances to the nodes of the host, in order of node number (10 is local). Empty if unknown.
    pub distances: Vec<u16>,
}

/// PCI class code: base class, subclass and programming interface, 24 bits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PciClass(pub u32);

impl PciClass {
    /// VGA-compatible display controller.
    pub const VGA: u32 = 0x0300;
    /// 3D controller.
    pub const CONTROLLER_3D: u32 = 0x0302;
    /// Other display controller.
    pub const DISPLAY_OTHER: u32 = 0x0380;
    /// Processing accelerator.
    pub const ACCELERATOR: u32 = 0x1200;
    /// Ethernet network controller.
    pub const NET_ETHERNET: u32 = 0x0200;
    /// InfiniBand network controller.
    pub const NET_INFINIBAND: u32 = 0x0207;
    /// InfiniBand serial bus controller.
    pub const SERIAL_INFINIBAND: u32 = 0x0c06;
    /// PCI-to-PCI bridge.
    pub const BRIDGE_PCI: u32 = 0x0604;
    /// NVM Express controller.
    pub const NVME: u32 = 0x0108;
    /// "Other" bridge: of NVIDIA, an NVSwitch.
    pub const NVSWITCH: u32 = 0x0680;

    /// Base class and subclass, 16 bits.
    #[must_use]
    pub fn subclass(self) -> u32 {
        self.0 >> 8
    }

    /// Whether it is a PCI-to-PCI bridge, the only kind that forwards between buses.
    #[must_use]
    pub fn is_bridge(self) -> bool {
        self.subclass() == Self::BRIDGE_PCI
    }
}

impl fmt::Debug for PciClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:06x}", self.0)
    }
}

/// What a function hangs below.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Upstream {
    /// A host bridge, by its root bus.
    Root(RootBus),
    /// A bridge function.
    Bridge(Bdf),
    /// The input does not tell.
    Unknown,
}

/// Role of a function in the tree, concluded from its class and place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PciRole {
    /// Bridge on a root bus.
    RootPort,
    /// Bridge below a root port or a downstream port: the root side of a switch.
    SwitchUpstream,
    /// Bridge below an upstream port: the device side of a switch.
    SwitchDownstream,
    /// A whole switch listed as one element, as NCCL does: its upstream port, the downstream ports left out.
    Switch,
    /// Bridge whose place is not known.
    Bridge,
    /// Everything that is no bridge.
    Endpoint,
}

/// One PCI function.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PciFunction {
    /// Its address.
    pub bdf: Bdf,
    /// Vendor id, `None` if unreadable.
    pub vendor: Option<u16>,
    /// Device id, `None` if unreadable.
    pub device: Option<u16>,
    /// Subsystem vendor and device id.
    pub subsystem: Option<(u16, u16)>,
    /// Class code, `None` if unreadable.
    pub class: Option<PciClass>,
    /// What it hangs below.
    pub upstream: Upstream,
    /// Its role in the tree.
    pub role: PciRole,
    /// Link above it; for root and downstream ports the link below, as sysfs shows it.
    pub link: Link,
    /// NUMA node; `None` is unknown (sysfs -1), never node 0.
    pub numa: Option<Sourced<NumaId>>,
    /// Kernel driver bound to it.
    pub driver: Option<String>,
    /// The physical function, if this is a virtual one.
    pub physical_function: Option<Bdf>,
    /// ACS, of bridges whose configuration space could be read.
    #[serde(default)]
    pub acs: Option<Acs>,
    /// Which input listed it.
    pub source: SourceKind,
}

impl PciFunction {
    /// A function of which only the address is known.
    #[must_use]
    pub fn new(bdf: Bdf, source: SourceKind) -> Self {
        Self {
            bdf,
            vendor: None,
            device: None,
            subsystem: None,
            class: None,
            upstream: Upstream::Unknown,
            role: PciRole::Endpoint,
            link: Link::default(),
            numa: None,
            driver: None,
            physical_function: None,
            acs: None,
            source,
        }
    }

    /// NUMA node without its source.
    #[must_use]
    pub fn numa_id(&self) -> Option<NumaId> {
        self.numa.as_ref().map(|numa| numa.value)
    }

    /// Base class and subclass; 0 where unknown, which is no class of any device here.
    #[must_use]
    pub fn subclass(&self) -> u32 {
        self.class.map_or(0, PciClass::subclass)
    }

    /// Whether it forwards to a bus below it.
    #[must_use]
    pub fn is_bridge(&self) -> bool {
        self.class.is_some_and(PciClass::is_bridge)
    }

    /// Whether the ids are those of a function that no longer answers (all zero or all one).
    #[must_use]
    pub fn fell_off_the_bus(&self) -> bool {
        matches!(self.vendor, Some(0 | 0xffff))
    }
}
