//! From XML text to elements. Unknown elements and unreadable attributes are warnings, as NCCL ignores them.

use std::collections::{BTreeSet, HashMap};

use roxmltree::{Document, Node, NodeId, ParsingOptions};

use crate::bdf::Bdf;
use crate::link::{LinkRate, LinkSpeed, LinkWidth};
use crate::model::{CpuKind, NumaId, NvLinkRemote, PciClass};
use crate::nccl_xml::{
    Cpu, GpuLink, INVENTED_DOMAIN, MAX_XML_BYTES, MAX_XML_CPUS, MAX_XML_DEVICES, MAX_XML_NODES, NcclTopology, Net, Pci,
};

/// Why a text is no NCCL topology.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct BadNcclXml(String);

pub(super) fn parse(text: &str) -> Result<NcclTopology, BadNcclXml> {
    if text.len() > MAX_XML_BYTES {
        return Err(BadNcclXml(format!("has more than {MAX_XML_BYTES} bytes")));
    }
    let options = ParsingOptions { allow_dtd: false, nodes_limit: MAX_XML_NODES, ..ParsingOptions::default() };
    let document = Document::parse_with_options(text, options).map_err(|error| BadNcclXml(error.to_string()))?;
    let root = document.root_element();
    if root.tag_name().name() != "system" {
        let found = clipped(root.tag_name().name());
        return Err(BadNcclXml(format!("its root element is `{found}`, a topology has `system`")));
    }
    let mut reader = Reader::default();
    for node in root.descendants().skip(1).filter(Node::is_element) {
        reader.element(&node)?;
    }
    Ok(reader.finish(root.attribute("name")))
}

/// Where elements below an element belong.
#[derive(Clone, Copy)]
struct Place {
    cpu: usize,
    pci: Option<usize>,
    /// Below a further `gpu` element of one function, whose links the first lists as well.
    is_again: bool,
}

/// Most characters of a refused text that a message repeats.
const ECHO_CHARS: usize = 64;

fn clipped(text: &str) -> String {
    text.chars().take(ECHO_CHARS).collect()
}

#[derive(Default)]
struct Reader {
    topology: NcclTopology,
    places: HashMap<NodeId, Place>,
    addresses: BTreeSet<Bdf>,
    invented: u16,
    gpus: usize,
    first_host: Option<String>,
    unknown: BTreeSet<String>,
}

impl Reader {
    /// Elements come parents first. One whose parent has no place here is left out, with all below it.
    fn element(&mut self, node: &Node<'_, '_>) -> Result<(), BadNcclXml> {
        let Some(parent) = node.parent_element() else { return Ok(()) };
        let (tag, above) = (node.tag_name().name(), parent.tag_name().name());
        let place = self.places.get(&parent.id()).copied();
        match (tag, above, place) {
            ("cpu", "system", _) => self.cpu(node),
            ("pci", "cpu" | "pci", Some(place)) => {
                self.pci(node, place);
                Ok(())
            }
            ("nic", "cpu" | "pci", Some(place)) => {
                self.nic(node, place);
                Ok(())
            }
            ("net", "nic" | "cpu" | "pci", Some(place)) => self.net(node, place),
            ("gpu", "pci", Some(place)) => self.gpu(node, place),
            ("nvlink" | "xgmi", "gpu", Some(place)) => {
                self.gpu_link(node, place);
                Ok(())
            }
            ("c2c", "gpu", Some(place)) => {
                self.c2c(node, place);
                Ok(())
            }
            _ => {
                self.unknown.insert(format!("{} in {}", clipped(tag), clipped(above)));
                Ok(())
            }
        }
    }

    fn warn(&mut self, text: String) {
        self.topology.warnings.push(text);
    }

    fn cpu(&mut self, node: &Node<'_, '_>) -> Result<(), BadNcclXml> {
        let host = node.attribute("host_hash").unwrap_or_default().to_owned();
        if *self.first_host.get_or_insert_with(|| host.clone()) != host {
            // NCCL fuses the hosts of one NVLink domain into one text; a topology here is of one host.
            self.unknown.insert("a second host (host_hash)".to_owned());
            return Ok(());
        }
        if self.topology.cpus.len() >= MAX_XML_CPUS {
            return Err(BadNcclXml(format!("has more than {MAX_XML_CPUS} cpu elements")));
        }
        let number = node.attribute("numaid").map(|text| text.trim().parse::<i32>());
        if !matches!(number, Some(Ok(_))) {
            self.warn("a cpu element has no number in `numaid`, its NUMA node is taken as unknown".to_owned());
        }
        let numa = number.and_then(Result::ok).and_then(|number| u16::try_from(number).ok()).map(NumaId);
        // All CPUs of a host are of one kind.
        self.topology.cpu_kind = self.topology.cpu_kind.take().or_else(|| cpu_kind(node));
        let place = Place { cpu: self.topology.cpus.len(), pci: None, is_again: false };
        self.topology.cpus.push(Cpu { numa, cpus: node.attribute("affinity").and_then(cpu_list) });
        self.places.insert(node.id(), place);
        Ok(())
    }

    fn pci(&mut self, node: &Node<'_, '_>, place: Place) {
        let Some(bdf) = self.address(node.attribute("busid")) else { return };
        let id = |name: &str| node.attribute(name).and_then(|text| hex(text, 4)).and_then(|id| u16::try_from(id).ok());
        let link = node.attribute("link_speed").and_then(LinkSpeed::parse);
        let width = node.attribute("link_width").and_then(|text| text.trim().parse().ok());
        let pci = Pci {
            bdf,
            cpu: place.cpu,
            parent: place.pci,
            class: node.attribute("class").and_then(class),
            vendor: id("vendor"),
            device: id("device"),
            subsystem: id("subsystem_vendor").zip(id("subsystem_device")),
            link: link.zip(width.and_then(LinkWidth::from_lanes)).map(|(speed, width)| LinkRate { speed, width }),
            has_gpu: false,
            has_children: false,
        };
        if let Some(parent) = place.pci.and_then(|parent| self.topology.pcis.get_mut(parent)) {
            parent.has_children = true;
        }
        self.places.insert(node.id(), Place { pci: Some(self.topology.pcis.len()), ..place });
        self.topology.pcis.push(pci);
    }

    /// The address of a `pci` element. RCCL's models list one switch several times under one address, each
    /// with devices of its own: to NCCL these are different switches.
    fn address(&mut self, busid: Option<&str>) -> Option<Bdf> {
        let listed = busid.and_then(|text| text.trim().parse::<Bdf>().ok());
        if let Some(bdf) = listed.filter(|bdf| self.addresses.insert(*bdf)) {
            return Some(bdf);
        }
        let shown = clipped(busid.unwrap_or_default());
        let why = if listed.is_some() { "is listed more than once" } else { "is no PCI address" };
        loop {
            let Some(next) = self.invented.checked_add(1) else {
                self.warn(format!("pci busid `{shown}` {why}, left out"));
                return None;
            };
            let [bus, devfn] = self.invented.to_be_bytes();
            self.invented = next;
            let bdf = Bdf { domain: INVENTED_DOMAIN, bus, device: devfn >> 3, function: devfn & 7 };
            if self.addresses.insert(bdf) {
                self.warn(format!("pci busid `{shown}` {why}, shown as {bdf}"));
                return Some(bdf);
            }
        }
    }

    /// A `nic` only holds `net` elements. People who write one by hand give it what is theirs.
    fn nic(&mut self, node: &Node<'_, '_>, place: Place) {
        let named = ["name", "net", "dev"].iter().find_map(|key| node.attribute(*key));
        let has_net = node.children().any(|child| child.tag_name().name() == "net");
        if let Some(name) = named.filter(|_| !has_net) {
            self.warn(format!(
                "nic {}: has no `net` element, left out (NCCL takes no NIC without one either)",
                clipped(name)
            ));
        }
        self.places.insert(node.id(), place);
    }

    fn net(&mut self, node: &Node<'_, '_>, place: Place) -> Result<(), BadNcclXml> {
        if self.topology.nets.len() >= MAX_XML_DEVICES {
            return Err(BadNcclXml(format!("has more than {MAX_XML_DEVICES} net elements")));
        }
        let number = |name: &str| node.attribute(name).and_then(|text| text.trim().parse::<i64>().ok());
        let unnamed = || format!("net{}", node.attribute("dev").map_or_else(|| "?".to_owned(), clipped));
        let name = node.attribute("name").map(str::trim).filter(|name| !name.is_empty());
        self.topology.nets.push(Net {
            name: name.map_or_else(unnamed, str::to_owned),
            cpu: place.cpu,
            pci: place.pci,
            // Ports count from 1, and a text without the number has RDMA in mind: only sockets say 0.
            port_num: number("port").and_then(|port| u8::try_from(port).ok()).unwrap_or(1),
            rate_mbps: number("speed").filter(|speed| *speed > 0).map(|speed| u32::try_from(speed).unwrap_or(u32::MAX)),
            guid: node.attribute("guid").and_then(|text| hex(text, 16)).filter(|guid| *guid != 0),
        });
        Ok(())
    }

    fn gpu(&mut self, node: &Node<'_, '_>, place: Place) -> Result<(), BadNcclXml> {
        self.gpus += 1;
        if self.gpus > MAX_XML_DEVICES {
            return Err(BadNcclXml(format!("has more than {MAX_XML_DEVICES} gpu elements")));
        }
        let Some(pci) = place.pci.and_then(|pci| self.topology.pcis.get_mut(pci)) else { return Ok(()) };
        let is_again = std::mem::replace(&mut pci.has_gpu, true);
        let bdf = pci.bdf;
        // Ranks that share a GPU, and halves of one (`mlopart`), are elements of one `dev`.
        let dev = |node: &Node<'_, '_>| node.attribute("dev").map(str::to_owned);
        let first = node.prev_siblings().skip(1).filter(|other| other.tag_name().name() == "gpu").last();
        if first.is_some_and(|first| dev(&first) != dev(node)) {
            self.warn(format!("{bdf}: holds several gpu elements; a function is one GPU, the first counts"));
        }
        self.places.insert(node.id(), Place { is_again, ..place });
        Ok(())
    }

    fn gpu_link(&mut self, node: &Node<'_, '_>, place: Place) {
        if place.is_again {
            return;
        }
        let Some(gpu) = place.pci.and_then(|pci| self.topology.pcis.get(pci)).map(|pci| pci.bdf) else { return };
        let target = node.attribute("target").and_then(|text| text.trim().parse::<Bdf>().ok());
        let class = node.attribute("tclass").and_then(class);
        let remote = match (class.map(|class| class.0), target) {
            // The class that Power9 CPUs show, an end that is no GPU (`kvDictPciClass`, nccl:src/graph/topo.cc).
            (Some(NVLINK_CPU), _) => NvLinkRemote::Cpu,
            (Some(NVSWITCH), _) | (_, None) => NvLinkRemote::Switch,
            (_, Some(target)) => NvLinkRemote::Gpu(target),
        };
        // A virtual machine that is shown its switches as nothing lists links of a GPU to itself.
        if remote == NvLinkRemote::Gpu(gpu) {
            return;
        }
        let links = node.attribute("count").and_then(|text| text.trim().parse().ok()).unwrap_or(1);
        self.topology.links.push(GpuLink { gpu, remote, links, link_mbps: None });
    }

    /// Links of a GPU to its coherent CPU: how many, and MB/s of each (`ncclTopoAddC2c`, nccl:src/graph/topo.cc).
    fn c2c(&mut self, node: &Node<'_, '_>, place: Place) {
        let Some(gpu) = place.pci.and_then(|pci| self.topology.pcis.get(pci)).map(|pci| pci.bdf) else { return };
        let number = |name: &str| node.attribute(name).and_then(|text| text.trim().parse::<u32>().ok());
        let Some(links) = number("count").and_then(|count| u8::try_from(count).ok()).filter(|count| *count > 0) else {
            self.warn(format!("c2c links of {gpu}: `count` is no number of links, left out"));
            return;
        };
        let link_mbps = number("bw").filter(|bw| *bw > 0).map(|bw| bw.saturating_mul(8));
        self.topology.links.push(GpuLink { gpu, remote: NvLinkRemote::Cpu, links, link_mbps });
    }

    fn finish(mut self, name: Option<&str>) -> NcclTopology {
        if !self.unknown.is_empty() {
            let unknown: Vec<String> = self.unknown.iter().take(ECHO_CHARS).cloned().collect();
            self.warn(format!("left out, not known here: {}", unknown.join(", ")));
        }
        self.topology.name = name.map(clipped);
        self.topology
    }
}

/// Classes that `tclass` holds for ends of NVLinks that are no GPU.
const NVSWITCH: u32 = 0x06_80_00;
const NVLINK_CPU: u32 = 0x06_80_01;

/// A hexadecimal number of at most `digits` digits, with or without `0x`.
fn hex(text: &str, digits: usize) -> Option<u64> {
    let text = text.trim();
    let text = text.strip_prefix("0x").unwrap_or(text);
    let is_hex = (1..=digits).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_hex.then(|| u64::from_str_radix(text, 16).ok()).flatten()
}

/// A class code of six digits; the shorter ones that NCCL sets by default (`0x03`, `0x02`) say too little.
fn class(text: &str) -> Option<PciClass> {
    let digits = text.trim().trim_start_matches("0x").len();
    hex(text, 6).filter(|_| digits == 6).and_then(|code| u32::try_from(code).ok()).map(PciClass)
}

/// Most groups of a CPU mask: 8,192 CPUs, as many as Linux allows.
const MAX_MASK_GROUPS: usize = 256;

/// A CPU mask of groups of 32 bits, the highest first (`cpumap`, Linux
/// `Documentation/ABI/stable/sysfs-devices-node`), as a list of ranges.
fn cpu_list(mask: &str) -> Option<String> {
    let groups: Vec<u64> = mask.split(',').map(|group| hex(group, 8)).collect::<Option<_>>()?;
    if groups.len() > MAX_MASK_GROUPS {
        return None;
    }
    let bits = groups.iter().rev().flat_map(|group| (0..32).map(move |bit| group >> bit & 1 == 1));
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    for (cpu, _) in bits.enumerate().filter(|(_, is_set)| *is_set) {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == cpu => *last = cpu,
            _ => ranges.push((cpu, cpu)),
        }
    }
    let print = |(first, last): (usize, usize)| {
        if first == last { first.to_string() } else { format!("{first}-{last}") }
    };
    Some(ranges.into_iter().map(print).collect::<Vec<_>>().join(","))
}

/// Longest name of an architecture or vendor; CPUID has 12 characters.
const MAX_CPU_NAME: usize = 32;

/// Kind of the CPUs, as `ncclTopoGetXmlFromCpu` writes it (nccl:src/graph/xml.cc).
fn cpu_kind(node: &Node<'_, '_>) -> Option<CpuKind> {
    let is_plain = |text: &&str| {
        let is_word = text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
        is_word && (1..=MAX_CPU_NAME).contains(&text.len())
    };
    let name = |name: &str| node.attribute(name).filter(is_plain).map(str::to_owned);
    let number = |name: &str| node.attribute(name).and_then(|text| text.trim().parse().ok());
    Some(CpuKind { arch: name("arch")?, vendor: name("vendor"), family: number("familyid"), model: number("modelid") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_become_lists() {
        for (mask, list) in [
            ("00000000,00ffffff", Some("0-23")),
            ("0000ffff,ff000000", Some("24-47")),
            ("fff0000,00000001", Some("0,48-59")),
            ("0", Some("")),
            ("", None),
            ("123456789", None),
            ("x", None),
        ] {
            assert_eq!(cpu_list(mask).as_deref(), list, "{mask}");
        }
    }

    #[test]
    fn class_codes_have_six_digits() {
        assert_eq!(class("0x030200"), Some(PciClass(0x03_02_00)));
        assert_eq!(class("0x03"), None);
        assert_eq!(class(""), None);
    }
}
