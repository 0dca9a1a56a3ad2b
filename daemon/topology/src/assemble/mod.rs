//! From listed facts to the model: the same conclusions for every reader.
//!
//! Pure and total: contradictions in the facts become warnings, never errors, and no input can make it loop.

mod adapters;
mod driver;
mod given;
mod gpus;
mod health;
mod plain;
mod tree;

use std::collections::{BTreeMap, BTreeSet};

use crate::bdf::Bdf;
use crate::model::{
    Drive, DriverFacts, GpuId, Hca, HcaOrigin, Host, NumaId, NvLink, NvLinkEnd, NvLinkRemote, PciClass, PciFunction,
    RawHca, RawHost,
};
use crate::nccl_xml::NcclTopology;
use crate::source::SourceKind;
use crate::words::counted;

pub use gpus::GpuIds;
pub(crate) use gpus::is_gpu;

/// What the operator may say about reading a host.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ReadOptions {
    /// More PCI ids that count as GPU (`gpu_ids`), such as 1bcf:001c.
    pub gpu_ids: GpuIds,
    /// NCCL topology to lay over what is read, as NCCL does with NCCL_TOPO_FILE. Inputs that are such a text
    /// themselves, or that have no addresses, stay as they are.
    pub nccl_topology: Option<NcclTopology>,
    /// What the GPU driver tells, to lay over what is read. Inputs without addresses stay as they are.
    pub driver: Option<DriverFacts>,
}

/// Most warnings kept in a model; the rest is counted.
const MAX_WARNINGS: usize = 200;

/// Builds the model from the facts of one input.
#[must_use]
pub fn assemble(mut raw: RawHost, options: &ReadOptions) -> Host {
    if let Some(topology) = options.nccl_topology.as_ref().filter(|_| raw.source != SourceKind::NcclXml)
        && !raw.functions.is_empty()
    {
        topology.lay_over(&mut raw);
    }
    let captured = raw.driver.take();
    let driver = options.driver.as_ref().or(captured.as_ref()).filter(|_| !raw.functions.is_empty());
    if let Some(driver) = driver {
        // What its driver calls a GPU is one, whatever its class and place.
        let listed: BTreeSet<Bdf> = raw.functions.iter().map(|function| function.bdf).collect();
        let told = driver.gpus.iter().map(|gpu| gpu.bdf);
        raw.stated_gpus.extend(told.filter(|bdf| listed.contains(bdf)));
    }
    let mut warnings = raw.warnings;
    let functions = tree::place(raw.functions, &mut warnings);
    let mut numa_nodes = raw.numa_nodes;
    numa_nodes.sort_by_key(|node| node.id);
    // A capture may hold folders of one number (`node0`, `node00`), as no host does: the first counts.
    numa_nodes.dedup_by_key(|node| node.id);
    let mut netdevs = raw.netdevs;
    netdevs.sort_by(|a, b| a.name.cmp(&b.name));
    let mut host = Host {
        name: raw.name,
        cpu: raw.cpu,
        kernel: raw.kernel,
        numa_nodes,
        functions,
        netdevs,
        peer_memory_modules: raw.peer_memory_modules,
        ..Host::default()
    };
    let listed = gpus::Listed { facts: &raw.gpus, stated: &raw.stated_gpus, named: raw.named_gpus };
    host.gpus = gpus::find(&host, listed, options, raw.source, &mut warnings);
    host.hcas = match raw.hcas {
        Some(listed) => hcas(&host, listed, raw.source, &mut warnings),
        None => assumed_hcas(&host, &mut warnings),
    };
    adapters::group(&mut host);
    host.drives = drives(&host, raw.drives);
    host.nvlinks = nvlinks(&host, raw.nvlinks, raw.source, &mut warnings);
    given::settle(&mut host, raw.given_levels);
    if let Some(driver) = driver {
        driver::lay_over(&mut host, driver, &mut warnings);
    }
    health::judge(&host, &mut warnings);
    host.warnings = bounded(warnings);
    plain::make(&mut host);
    host
}

fn bounded(mut warnings: Vec<String>) -> Vec<String> {
    if warnings.len() > MAX_WARNINGS {
        let more = warnings.len() - MAX_WARNINGS;
        warnings.truncate(MAX_WARNINGS);
        warnings.push(format!("{} left out", counted(more, "more warning")));
    }
    warnings
}

fn numa_of(host: &Host, bdf: Option<Bdf>) -> Option<NumaId> {
    host.function(bdf?)?.numa_id()
}

/// Interfaces of a function, by name.
fn netdevs_of(host: &Host, bdf: Option<Bdf>) -> Vec<String> {
    host.netdevs.iter().filter(|netdev| bdf.is_some() && netdev.bdf == bdf).map(|netdev| netdev.name.clone()).collect()
}

fn hcas(host: &Host, listed: Vec<RawHca>, source: SourceKind, warnings: &mut Vec<String>) -> Vec<Hca> {
    let mut hcas: Vec<Hca> = listed.into_iter().map(|raw| hca(host, raw, source, warnings)).collect();
    // PCI order, a virtual function at the place of its physical one: addresses of virtual functions differ
    // between hosts of a kind. The name only orders devices of one function. Those without one come last, as listed.
    hcas.sort_by_cached_key(|hca| {
        let physical = hca.bdf.and_then(|bdf| host.function(bdf)).and_then(|function| function.physical_function);
        (hca.bdf.is_none(), physical.or(hca.bdf), hca.bdf, hca.bdf.map(|_| hca.name.clone()))
    });
    hcas
}

/// Fastest port that is believed, Gbit/s. Ports of 800 (InfiniBand XDR) are the fastest sold and IEEE 802.3dj defines 1,600:
/// two more doublings are believed, and not slips of a unit (Mbit/s read as Gbit/s).
const MAX_PORT_GBPS: f64 = 10_000.0;

fn hca(host: &Host, raw: RawHca, source: SourceKind, warnings: &mut Vec<String>) -> Hca {
    let below = raw
        .parent_netdev
        .as_ref()
        .and_then(|name| host.netdevs.iter().find(|netdev| netdev.name == *name).and_then(|netdev| netdev.bdf));
    if let Some(bdf) = raw.bdf.filter(|bdf| host.function(*bdf).is_none()) {
        warnings.push(format!("{}: its PCI function {bdf} is not listed", raw.name));
    }
    let by_function = match raw.bdf {
        Some(_) => HcaOrigin::Hardware,
        None => HcaOrigin::Soft { netdev: raw.parent_netdev },
    };
    let origin = raw.origin.unwrap_or(by_function);
    let bdf = raw.bdf.or(below);
    let mut ports = raw.ports;
    ports.retain(|port| port.port_num > 0);
    ports.sort_by_key(|port| port.port_num);
    ports.dedup_by_key(|port| port.port_num);
    for port in &mut ports {
        if let Some(rate) = port.rate_gbps.filter(|rate| *rate > MAX_PORT_GBPS) {
            warnings.push(format!("{}: rate of port {} is {rate} Gbit/s, taken as unknown", raw.name, port.port_num));
            port.rate_gbps = None;
        }
    }
    Hca {
        name: raw.name,
        origin,
        bdf,
        data_direct: raw.data_direct,
        sub_function: raw.sub_function,
        numa: numa_of(host, bdf).or(raw.numa),
        ports,
        netdevs: netdevs_of(host, bdf),
        bond: None,
        is_bond_slave: false,
        card: None,
        node_guid: raw.node_guid.filter(|guid| *guid != 0),
        sys_image_guid: raw.sys_image_guid.filter(|guid| *guid != 0),
        has_uverbs: raw.has_uverbs,
        source,
    }
}

/// PCI vendor id of Amazon, and the device ids of its EFA functions (`efa*` in hexadecimal).
const AMAZON: u16 = 0x1d0f;
const EFA_IDS: std::ops::RangeInclusive<u16> = 0xefa0..=0xefaf;

fn looks_like_rdma(function: &PciFunction) -> bool {
    let by_class = matches!(function.subclass(), PciClass::NET_INFINIBAND | PciClass::SERIAL_INFINIBAND);
    let is_efa = function.vendor == Some(AMAZON) && function.device.is_some_and(|id| EFA_IDS.contains(&id));
    (by_class || is_efa) && !function.fell_off_the_bus()
}

/// Without class/infiniband: functions of InfiniBand class and EFA. Ethernet functions may or may not
/// speak RoCE, so they are left out.
fn assumed_hcas(host: &Host, warnings: &mut Vec<String>) -> Vec<Hca> {
    let assumed: Vec<Hca> = host
        .functions
        .iter()
        .filter(|function| looks_like_rdma(function))
        .map(|function| {
            let mut raw = RawHca { bdf: Some(function.bdf), ..RawHca::default() };
            let netdevs = netdevs_of(host, raw.bdf);
            raw.name = netdevs.first().cloned().unwrap_or_else(|| function.bdf.to_string());
            let mut hca = hca(host, raw, function.source, warnings);
            hca.origin = HcaOrigin::Assumed;
            hca
        })
        .collect();
    if !assumed.is_empty() {
        warnings.push(format!(
            "class/infiniband is absent: {} taken from PCI class or id, Ethernet functions left out",
            counted(assumed.len(), "NIC")
        ));
    }
    assumed
}

fn drives(host: &Host, listed: Vec<Drive>) -> Vec<Drive> {
    let mut by_name: BTreeMap<String, Drive> = BTreeMap::new();
    for mut drive in listed {
        drive.numa = numa_of(host, drive.bdf);
        by_name.insert(drive.name.clone(), drive);
    }
    let named: Vec<Option<Bdf>> = by_name.values().map(|drive| drive.bdf).collect();
    // Drives whose driver is not loaded or whose class folder is absent are known by class code.
    for function in &host.functions {
        if function.subclass() == PciClass::NVME && !named.contains(&Some(function.bdf)) {
            let name = function.bdf.to_string();
            by_name.insert(
                name.clone(),
                Drive {
                    name,
                    bdf: Some(function.bdf),
                    numa: function.numa_id(),
                    transport: Some("pcie".to_owned()),
                    netdev: None,
                    source: function.source,
                },
            );
        }
    }
    by_name.into_values().collect()
}

fn nvlinks(
    host: &Host,
    listed: Vec<crate::model::RawNvLink>,
    source: SourceKind,
    warnings: &mut Vec<String>,
) -> Vec<NvLink> {
    let id = |bdf: Bdf| host.gpus.iter().position(|gpu| gpu.bdf == Some(bdf)).map(GpuId);
    let mut links = Vec::new();
    for raw in listed {
        let far = match raw.remote {
            NvLinkRemote::Switch => Some(NvLinkEnd::Switch),
            NvLinkRemote::Cpu => Some(NvLinkEnd::Cpu),
            NvLinkRemote::Gpu(bdf) => id(bdf).map(NvLinkEnd::Gpu),
        };
        match (id(raw.gpu), far) {
            (Some(gpu), Some(NvLinkEnd::Gpu(far))) if gpu != far => {
                links.push((gpu.min(far), NvLinkEnd::Gpu(gpu.max(far)), raw));
            }
            (Some(gpu), Some(end @ (NvLinkEnd::Switch | NvLinkEnd::Cpu))) => links.push((gpu, end, raw)),
            _ => warnings.push(format!("nvlink of {}: an end of it is no GPU", raw.gpu)),
        }
    }
    links.sort_by_key(|(gpu, end, _)| (*gpu, *end));
    links
        .into_iter()
        .map(|(gpu, end, raw)| NvLink { gpu, end, links: raw.links, link_gbps: raw.link_gbps, source })
        .collect()
}
