//! A topology as the only input.

use std::collections::BTreeMap;

use crate::bdf::Bdf;
use crate::level::Level;
use crate::link::Link;
use crate::model::{
    GivenLevel, HcaOrigin, LinkLayer, NvLinkRemote, PciClass, PciFunction, Port, PortState, RawHca, RawHost, RawNvLink,
};
use crate::nccl_xml::{NcclTopology, Net, Pci};
use crate::source::{SourceKind, Sourced};

const SOURCE: SourceKind = SourceKind::NcclXml;

pub(super) fn host(topology: &NcclTopology) -> RawHost {
    let mut raw = RawHost::new(SOURCE);
    raw.name.clone_from(&topology.name);
    raw.cpu.clone_from(&topology.cpu_kind);
    raw.numa_nodes = topology.numa_nodes();
    raw.functions = topology.pcis.iter().map(|pci| function(topology, pci)).collect();
    raw.stated_gpus = topology.pcis.iter().filter(|pci| pci.has_gpu).map(|pci| pci.bdf).collect();
    raw.warnings.clone_from(&topology.warnings);
    raw.hcas = hcas(topology, &mut raw.warnings);
    raw.nvlinks = nvlinks(topology);
    raw.given_levels = levels_without_pci(topology);
    // What holds a gpu or a net element tells what it is.
    let nets: Vec<Option<usize>> = topology.nets.iter().map(|net| net.pci).collect();
    let is_told = |place: usize, pci: &Pci| pci.has_gpu || pci.class().is_some() || nets.contains(&Some(place));
    let classless = topology.pcis.iter().enumerate().filter(|(place, pci)| !is_told(*place, pci)).count();
    if classless > 0 {
        raw.warnings.push(format!(
            "{} no class, so GPUs and NICs among them cannot be told apart: read the text as an override over the host's \
             own tree",
            if classless == 1 { "1 function has".to_owned() } else { format!("{classless} functions have") }
        ));
    }
    raw
}

pub(super) fn function(topology: &NcclTopology, pci: &Pci) -> PciFunction {
    let mut function = PciFunction::new(pci.bdf, SOURCE);
    function.class = pci.class();
    // Ids of all ones are how clouds write a bridge that they made up, not one that no longer answers.
    let is_made_up = function.is_bridge() && pci.vendor == Some(u16::MAX);
    if !is_made_up {
        function.vendor = pci.vendor;
        function.device = pci.device;
        function.subsystem = pci.subsystem;
    }
    function.upstream = topology.upstream(pci);
    function.link = Link { current: None, max: pci.link };
    function.numa = topology.numa(pci.cpu).map(|numa| Sourced::new(numa, SOURCE));
    function
}

/// The NICs: all `net` elements, else, in a text without any, all functions of a network class. Such a text
/// (Azure and AWS ship them) lists nothing but what NCCL is to use.
pub(super) fn hcas(topology: &NcclTopology, warnings: &mut Vec<String>) -> Option<Vec<RawHca>> {
    if topology.nets.is_empty() {
        return assumed(topology, warnings);
    }
    let mut hcas: Vec<RawHca> = Vec::new();
    let mut places: BTreeMap<&str, (usize, Option<usize>)> = BTreeMap::new();
    for net in &topology.nets {
        let (place, pci) = *places.entry(&net.name).or_insert_with(|| {
            hcas.push(hca(topology, net));
            (hcas.len() - 1, net.pci)
        });
        if pci != net.pci {
            warnings.push(format!("net {}: listed at two places, the first one is kept", net.name));
        } else if let Some(hca) = hcas.get_mut(place).filter(|_| net.port_num > 0)
            && hca.ports.iter().all(|port| port.port_num != net.port_num)
        {
            hca.ports.push(port(net));
        }
    }
    Some(hcas)
}

fn hca(topology: &NcclTopology, net: &Net) -> RawHca {
    RawHca {
        name: net.name.clone(),
        bdf: net.pci.and_then(|place| topology.pcis.get(place)).map(|pci| pci.bdf),
        // NCCL's `guid` is the one that all functions of an adapter share (`sys_image_guid`,
        // nccl:src/transport/net_ib/init.cc).
        sys_image_guid: net.guid,
        origin: Some(if net.port_num == 0 { HcaOrigin::Socket } else { HcaOrigin::Hardware }),
        numa: topology.numa(net.cpu),
        ..RawHca::default()
    }
}

fn port(net: &Net) -> Port {
    Port {
        port_num: net.port_num,
        state: PortState::Unknown,
        link_layer: LinkLayer::Unknown,
        rate_gbps: net.rate_mbps.map(|mbps| f64::from(mbps) / 1000.0),
        gids: Vec::new(),
    }
}

fn is_network(pci: &Pci) -> bool {
    let subclass = pci.class().map_or(0, PciClass::subclass);
    subclass >> 8 == NETWORK_BASE_CLASS || subclass == PciClass::SERIAL_INFINIBAND
}

const NETWORK_BASE_CLASS: u32 = 0x02;

fn assumed(topology: &NcclTopology, warnings: &mut Vec<String>) -> Option<Vec<RawHca>> {
    let nics = topology.pcis.iter().filter(|pci| is_network(pci) && !pci.has_gpu);
    let hcas: Vec<RawHca> = nics
        .map(|pci| RawHca {
            name: pci.bdf.to_string(),
            bdf: Some(pci.bdf),
            origin: Some(HcaOrigin::Assumed),
            ..RawHca::default()
        })
        .collect();
    if hcas.is_empty() {
        return None;
    }
    warnings.push(match hcas.len() {
        1 => "lists no net: its function of a network class is taken for the RDMA NIC".to_owned(),
        many => format!("lists no net: its {many} functions of a network class are taken for the RDMA NICs"),
    });
    Some(hcas)
}

/// Links by pair. Both ends list a link, so the greater number of the two counts, not the sum; links to
/// several switches of one fabric add up.
pub(super) fn nvlinks(topology: &NcclTopology) -> Vec<RawNvLink> {
    let mut direct: BTreeMap<(Bdf, Bdf), [u8; 2]> = BTreeMap::new();
    let mut links = Vec::new();
    for link in &topology.links {
        match link.remote {
            remote @ (NvLinkRemote::Switch | NvLinkRemote::Cpu) => {
                let link_gbps = link.link_mbps.map(|mbps| f64::from(mbps) / 1000.0);
                links.push(RawNvLink { gpu: link.gpu, remote, links: link.links, link_gbps });
            }
            NvLinkRemote::Gpu(peer) => {
                let pair = direct.entry((link.gpu.min(peer), link.gpu.max(peer))).or_default();
                let [lower, upper] = pair;
                let end = if link.gpu < peer { lower } else { upper };
                *end = end.saturating_add(link.links);
            }
        }
    }
    links.extend(direct.into_iter().map(|((gpu, peer), ends)| RawNvLink {
        gpu,
        remote: NvLinkRemote::Gpu(peer),
        links: ends.into_iter().max().unwrap_or(0),
        link_gbps: None,
    }));
    links
}

/// Levels of NICs that hang right below a `cpu` element: PHB to what hangs below the same one, else SYS.
fn levels_without_pci(topology: &NcclTopology) -> Vec<GivenLevel> {
    let level = |a: usize, b: usize| if a == b { Level::Phb } else { Level::Sys };
    let mut levels = Vec::new();
    for (place, net) in topology.nets.iter().enumerate().filter(|(_, net)| net.pci.is_none()) {
        let mut add = |other: String, cpu: usize| {
            levels.push(GivenLevel { a: net.name.clone(), b: other, level: level(net.cpu, cpu), source: SOURCE });
        };
        for pci in topology.pcis.iter().filter(|pci| !pci.has_children) {
            add(pci.bdf.to_string(), pci.cpu);
        }
        for (_, other) in topology.nets.iter().enumerate().filter(|(at, other)| *at > place || other.pci.is_some()) {
            if other.name != net.name {
                add(other.name.clone(), other.cpu);
            }
        }
    }
    levels
}
