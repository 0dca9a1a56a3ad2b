//! NCCL topology XML: how clouds describe flattened virtual machines, and what NCCL_TOPO_DUMP_FILE writes.
//!
//! Read as a whole input, or laid over the facts of another one as NCCL lays NCCL_TOPO_FILE over `/sys`.
//! Elements and attributes: `src/graph/xml.cc` and `topo.cc` of NVIDIA/nccl, `src/graph/xml.cc` of ROCm/rccl.
//! Knows nothing of pairing; what a level is follows from the tree, except for NICs without a PCI element.

mod overlay;
mod parse;
mod whole;

use crate::bdf::{Bdf, INVENTED_DOMAINS, RootBus};
use crate::link::LinkRate;
use crate::model::{CpuKind, NumaId, NumaNode, NvLinkRemote, PciClass, RawHost, Upstream};

pub use parse::BadNcclXml;

/// Largest XML text that is read, in bytes. A dump of a 16-GPU host has some 30 kB.
pub const MAX_XML_BYTES: usize = 4 << 20;
/// Most nodes of a document, blanks between elements counted.
pub const MAX_XML_NODES: u32 = 65_536;
/// Most `net` elements, and most `gpu` elements.
pub const MAX_XML_DEVICES: usize = 256;
/// Most `cpu` elements: each is a root bus, which has eight bits.
pub const MAX_XML_CPUS: usize = 256;

/// Domain of the root buses that stand for `cpu` elements, which have no address.
const CPU_DOMAIN: u32 = INVENTED_DOMAINS;
/// Domain of the addresses given to elements that have none of their own.
const INVENTED_DOMAIN: u32 = INVENTED_DOMAINS + 1;

/// The topology that an XML text describes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NcclTopology {
    name: Option<String>,
    cpus: Vec<Cpu>,
    pcis: Vec<Pci>,
    nets: Vec<Net>,
    /// NVLinks, xGMI and C2C links of the `gpu` elements.
    links: Vec<GpuLink>,
    /// Kind of the CPUs, where a `cpu` element tells.
    cpu_kind: Option<CpuKind>,
    warnings: Vec<String>,
}

/// A `cpu` element: what NCCL takes for the root complex of a NUMA node.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Cpu {
    /// `None` for -1 and for no number.
    numa: Option<NumaId>,
    /// CPUs in list form, where the element tells.
    cpus: Option<String>,
}

/// A `pci` element: a whole switch if others are below it, else a device.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Pci {
    /// Its address, or an invented one if it has none or one that is taken.
    bdf: Bdf,
    /// Place of the `cpu` element above.
    cpu: usize,
    /// Place of the `pci` element right above; `None` right below the `cpu`.
    parent: Option<usize>,
    class: Option<PciClass>,
    vendor: Option<u16>,
    device: Option<u16>,
    subsystem: Option<(u16, u16)>,
    /// NCCL notes the most that both ends of the link can do.
    link: Option<LinkRate>,
    has_gpu: bool,
    has_children: bool,
}

/// A `net` element.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Net {
    name: String,
    /// Place of the `cpu` element above.
    cpu: usize,
    /// Place of the `pci` element above; `None` for a NIC right below the `cpu`.
    pci: Option<usize>,
    /// 0 is NCCL's socket transport.
    port_num: u8,
    rate_mbps: Option<u32>,
    guid: Option<u64>,
}

/// An `nvlink`, `xgmi` or `c2c` element.
#[derive(Clone, Debug, PartialEq, Eq)]
struct GpuLink {
    gpu: Bdf,
    remote: NvLinkRemote,
    links: u8,
    /// Mbit/s of one, where told.
    link_mbps: Option<u32>,
}

impl NcclTopology {
    /// Reads an XML text.
    ///
    /// # Errors
    /// It is no well-formed XML, is larger than any topology, or its root is no `system` element. Entities
    /// and document types are refused.
    pub fn parse(text: &str) -> Result<Self, BadNcclXml> {
        parse::parse(text)
    }

    /// The facts of the host it describes.
    #[must_use]
    pub fn host(&self) -> RawHost {
        whole::host(self)
    }

    /// Lays it over the facts of another input: functions found here by address get their place and link
    /// from here, the rest stays. Devices that the host does not have are left out with a warning.
    pub fn lay_over(&self, raw: &mut RawHost) {
        overlay::lay_over(self, raw);
    }

    fn root(&self, cpu: usize) -> RootBus {
        // The number of elements is bounded where they are read.
        RootBus { domain: CPU_DOMAIN, bus: u8::try_from(cpu).unwrap_or(u8::MAX) }
    }

    fn upstream(&self, pci: &Pci) -> Upstream {
        let parent = pci.parent.and_then(|place| self.pcis.get(place));
        parent.map_or_else(|| Upstream::Root(self.root(pci.cpu)), |parent| Upstream::Bridge(parent.bdf))
    }

    fn numa(&self, cpu: usize) -> Option<NumaId> {
        self.cpus.get(cpu).and_then(|cpu| cpu.numa)
    }

    fn numa_nodes(&self) -> Vec<NumaNode> {
        let mut nodes: Vec<NumaNode> = Vec::new();
        for cpu in &self.cpus {
            let Some(id) = cpu.numa.filter(|id| nodes.iter().all(|node| node.id != *id)) else { continue };
            let has_cpus = cpu.cpus.as_ref().is_none_or(|list| !list.is_empty());
            nodes.push(NumaNode { id, cpus: cpu.cpus.clone(), has_cpus, distances: Vec::new() });
        }
        nodes
    }
}

impl Pci {
    /// Class code; an element with others below it forwards to them, whatever it says.
    fn class(&self) -> Option<PciClass> {
        let bridge = PciClass(PciClass::BRIDGE_PCI << 8);
        if self.has_children { self.class.filter(|class| class.is_bridge()).or(Some(bridge)) } else { self.class }
    }
}
