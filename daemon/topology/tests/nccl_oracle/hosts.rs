//! What NCCL would see of a host: its own XML, a PCI tree as it walks it, or levels alone.

use std::collections::BTreeMap;

use gdrd_topology::model::{HcaOrigin, Host, PciFunction, PortState, Upstream};
use roxmltree::Node as Xml;

use crate::common::tables::Table as Matrix;
use crate::rules::{Graph, Kind, Node, Path, Table, cpu_bw, pci_bw};

fn number(node: Xml<'_, '_>, name: &str) -> u64 {
    let text = node.attribute(name).unwrap_or_default();
    text.strip_prefix("0x").map_or_else(|| text.parse(), |hex| u64::from_str_radix(hex, 16)).unwrap_or(0)
}

/// The graph of an NCCL topology text, and the GPUs' addresses by number. Ports without RDMA are left out.
pub(crate) fn of_xml(text: &str) -> (Graph, BTreeMap<usize, String>) {
    let document = roxmltree::Document::parse(text).expect("the case is XML");
    let mut reader = OfXml { graph: Graph::default(), gpus: BTreeMap::new() };
    let mut between_cpus = 5000.0;
    for cpu in document.root_element().children().filter(|node| node.has_tag_name("cpu")) {
        let word = |name: &str| cpu.attribute(name).unwrap_or_default();
        let id = |name: &str| u32::try_from(number(cpu, name)).expect("a small number");
        between_cpus = cpu_bw(word("arch"), word("vendor"), id("familyid"), id("modelid"));
        let node = reader.graph.add(Node::Cpu);
        cpu.children().for_each(|child| reader.device(child, node));
    }
    reader.graph.join_cpus(between_cpus);
    reader.graph.flatten_broadcom();
    (reader.graph, reader.gpus)
}

struct OfXml {
    graph: Graph,
    gpus: BTreeMap<usize, String>,
}

impl OfXml {
    fn device(&mut self, xml: Xml<'_, '_>, above: usize) {
        match xml.tag_name().name() {
            "pci" => self.pci(xml, above),
            // A NIC that hangs right below a CPU has no PCI element.
            "nic" => {
                let nic = self.graph.add(Node::Nic);
                self.graph.pci(nic, above, 12.0);
                self.nets(xml, nic);
            }
            _ => {}
        }
    }

    fn pci(&mut self, xml: Xml<'_, '_>, above: usize) {
        let sub = |name: &str| xml.children().find(|node| node.has_tag_name(name));
        let class = number(xml, "class") >> 16;
        let width = u32::try_from(number(xml, "link_width")).expect("a small number");
        let bw = pci_bw(xml.attribute("link_speed").unwrap_or_default(), width);
        let ids = ["vendor", "device", "subsystem_vendor", "subsystem_device"];
        let ids = ids.iter().fold(0, |all, name| all << 16 | number(xml, name) & 0xffff);
        let node = if let Some(nic) = sub("nic") {
            let node = self.graph.add(Node::Nic);
            self.nets(nic, node);
            node
        } else if sub("gpu").is_some() || matches!(class, 0x03 | 0x12) {
            let told = sub("gpu").and_then(|gpu| gpu.attribute("dev")).and_then(|dev| dev.parse().ok());
            let dev = told.filter(|dev| !self.gpus.contains_key(dev)).unwrap_or(self.gpus.len());
            self.gpus.insert(dev, xml.attribute("busid").unwrap_or_default().to_owned());
            self.graph.add(Node::Gpu(dev))
        } else if class == 0x02 {
            // Texts of clouds list NICs without their ports, which NCCL fills in.
            let node = self.graph.add(Node::Nic);
            let net = self.graph.add(Node::Net(xml.attribute("busid").unwrap_or_default().to_owned()));
            self.graph.net(net, node, 25.0);
            node
        } else {
            let node = self.graph.add(Node::Switch(ids));
            xml.children().for_each(|child| self.device(child, node));
            node
        };
        self.graph.pci(node, above, bw);
    }

    fn nets(&mut self, nic: Xml<'_, '_>, node: usize) {
        for net in nic.children().filter(|net| net.has_tag_name("net") && net.attribute("port") != Some("0")) {
            let speed = u32::try_from(number(net, "speed")).expect("a rate");
            let place = self.graph.add(Node::Net(net.attribute("name").unwrap_or_default().to_owned()));
            self.graph.net(place, node, f64::from(if speed == 0 { 10_000 } else { speed }) / 8000.0);
        }
    }
}

/// The graph of a PCI tree: NCCL takes every second folder on the way up, the ones that are switches, and hangs what
/// has no such folder above it below the CPU of its NUMA node (`xml.cc`, ncclTopoGetXmlFromSys). Ports that carry
/// traffic, of hardware, are its NICs. GPUs are numbered by address.
pub(crate) fn of_tree(host: &Host) -> Graph {
    let mut reader = OfTree { host, graph: Graph::default(), cpus: BTreeMap::new(), switches: BTreeMap::new() };
    for (dev, bdf) in host.gpus.iter().enumerate().filter_map(|(dev, gpu)| Some((dev, gpu.bdf?))) {
        let node = reader.graph.add(Node::Gpu(dev));
        reader.hang(node, host.function(bdf).expect("a GPU has a function"));
    }
    for hca in host.hcas.iter().filter(|hca| matches!(hca.origin, HcaOrigin::Hardware | HcaOrigin::Assumed)) {
        let carries = |state: PortState| matches!(state, PortState::Active | PortState::Unknown);
        let is_up = hca.ports.is_empty() || hca.ports.iter().any(|port| carries(port.state));
        let Some(function) = hca.bdf.and_then(|bdf| host.function(bdf)).filter(|_| is_up) else { continue };
        let node = reader.graph.add(Node::Nic);
        reader.hang(node, function);
        let net = reader.graph.add(Node::Net(hca.name.clone()));
        reader.graph.net(net, node, hca.rate_gbps().unwrap_or(100.0) / 8.0);
    }
    let cpu = host.cpu.as_ref();
    let intel = cpu_bw("x86_64", "GenuineIntel", 6, 0x55);
    let told = |cpu: &gdrd_topology::model::CpuKind| {
        let vendor = cpu.vendor.as_deref().unwrap_or_default();
        cpu_bw(&cpu.arch, vendor, cpu.family.unwrap_or(0), cpu.model.unwrap_or(0))
    };
    reader.graph.join_cpus(cpu.map_or(intel, told));
    reader.graph.flatten_broadcom();
    reader.graph
}

struct OfTree<'a> {
    host: &'a Host,
    graph: Graph,
    cpus: BTreeMap<Option<u16>, usize>,
    switches: BTreeMap<gdrd_topology::bdf::Bdf, usize>,
}

impl OfTree<'_> {
    fn above(&self, function: &PciFunction) -> Option<&PciFunction> {
        match function.upstream {
            Upstream::Bridge(bridge) => self.host.function(bridge),
            Upstream::Root(_) | Upstream::Unknown => None,
        }
    }

    fn hang(&mut self, node: usize, function: &PciFunction) {
        let host = self.host;
        let port = self.above(function).and_then(|port| host.function(port.bdf));
        let bw = [Some(function), port].into_iter().map(|end| {
            let rate = end.and_then(|end| end.link.max.or(end.link.current));
            rate.map(|rate| {
                pci_bw(&format!("{}", f64::from(rate.speed.mega_transfers()) / 1000.0), rate.width.lanes().into())
            })
        });
        let bw = bw.flatten().fold(f64::INFINITY, f64::min);
        let bw = if bw.is_finite() { bw } else { pci_bw("", 0) };
        let switch = port.and_then(|port| self.above(port)).map(|switch| switch.bdf);
        let above = match switch {
            None => {
                let numa = function.numa_id().map(|numa| numa.0);
                let graph = &mut self.graph;
                *self.cpus.entry(numa).or_insert_with(|| graph.add(Node::Cpu))
            }
            Some(bdf) => self.switch(bdf),
        };
        self.graph.pci(node, above, bw);
    }

    fn switch(&mut self, bdf: gdrd_topology::bdf::Bdf) -> usize {
        if let Some(known) = self.switches.get(&bdf) {
            return *known;
        }
        let host = self.host;
        let function = host.function(bdf).expect("bridges are listed");
        let subsystem = function.subsystem.unwrap_or_default();
        let ids = [function.vendor, function.device, Some(subsystem.0), Some(subsystem.1)];
        let node = self.graph.add(Node::Switch(ids.iter().fold(0, |all, id| all << 16 | u64::from(id.unwrap_or(0)))));
        self.switches.insert(bdf, node);
        self.hang(node, function);
        node
    }
}

/// A table of levels alone, as nvidia-smi prints it, from its own cells: all links and ports alike. A GPU without a row of its
/// own has the cells of the NICs' rows.
pub(crate) fn of_matrix(matrix: &Matrix) -> Table {
    let column = |name: &str| matrix.columns.iter().position(|column| column == name);
    let cell = |row: &str, at: &str| {
        let row = matrix.rows.iter().find(|known| known.name == row)?;
        row.cells.get(column(at)?).map(String::as_str)
    };
    let path = |gpu: &str, nic: &str| {
        let kind = match cell(gpu, nic).or_else(|| cell(nic, gpu))? {
            "PIX" => Kind::Pix,
            "PXB" => Kind::Pxb,
            "PHB" | "NODE" => Kind::Phb,
            "SYS" => Kind::Sys,
            other => panic!("{gpu} {nic}: {other}"),
        };
        Some(Path { hops: 0, bw: 1.0, kind })
    };
    let (gpus, nics): (Vec<&String>, Vec<&String>) = matrix.columns.iter().partition(|name| name.starts_with("GPU"));
    let row = |gpu: &String| nics.iter().map(|nic| path(gpu, nic)).collect();
    Table {
        nets: matrix.nics.clone(),
        port_bw: vec![1.0; nics.len()],
        gpus: gpus.iter().enumerate().map(|(place, gpu)| (place, row(gpu))).collect(),
    }
}
