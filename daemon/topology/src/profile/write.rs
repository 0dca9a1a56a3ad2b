//! A host as profile text: what [`super::parse`] reads back.

use std::collections::BTreeMap;
use std::fmt::Write;

use crate::bdf::{Bdf, RootBus};
use crate::guid;
use crate::link::{Link, LinkRate};
use crate::model::{Gid, GidKind, Hca, HcaOrigin, Host, NumaId, NvLink, NvLinkEnd, PciFunction, PciRole, Upstream};
use crate::profile::gpu;
use crate::profile::word::encode;
use crate::profile::{MAGIC, VERSION};
use crate::source::SourceKind;

/// Writes a host as a profile. Facts that the format has no word for (warnings, sources) are left out.
#[must_use]
pub fn render(host: &Host) -> String {
    let mut out = String::new();
    // Writing to a String cannot fail.
    let _ = write_all(&mut out, host);
    out
}

fn write_all(out: &mut String, host: &Host) -> std::fmt::Result {
    writeln!(out, "{MAGIC} {VERSION}")?;
    if let Some(name) = &host.name {
        writeln!(out, "name {}", encode(name))?;
    }
    if let Some(cpu) = &host.cpu {
        let number = |name: &str, number: Option<u32>| key(name, number.map(|number| number.to_string()));
        let (family, model) = (number("family", cpu.family), number("model", cpu.model));
        writeln!(out, "cpu {}{}{family}{model}", encode(&cpu.arch), name_key("vendor", cpu.vendor.as_deref()))?;
    }
    if let Some(kernel) = &host.kernel {
        let passthrough = kernel.iommu_passthrough.map(|yes| if yes { "yes" } else { "no" }.to_owned());
        writeln!(out, "kernel {}{}", encode(&kernel.release), key("iommu_passthrough", passthrough))?;
    }
    for node in &host.numa_nodes {
        write!(out, "numa {}", node.id)?;
        if let Some(cpus) = &node.cpus {
            write!(out, " cpus={}", encode(cpus))?;
        }
        if !node.distances.is_empty() {
            let distances: Vec<String> = node.distances.iter().map(u16::to_string).collect();
            write!(out, " distances={}", distances.join(","))?;
        }
        writeln!(out)?;
    }
    for module in &host.peer_memory_modules {
        writeln!(out, "module {}", encode(module))?;
    }
    let roots = root_numa(host);
    for (root, numa) in &roots {
        writeln!(out, "root {root}{}", key("numa", numa.map(|numa| numa.to_string())))?;
    }
    for function in &host.functions {
        write_function(out, function, numa_above(host, function, &roots))?;
    }
    for gpu in &host.gpus {
        gpu::write(out, host, gpu)?;
    }
    for gpu in host.gpus.iter().filter(|gpu| gpu.bdf.is_none()) {
        writeln!(out, "gpu-name {}{}", encode(&gpu.name), key("numa", gpu.numa.map(|numa| numa.to_string())))?;
    }
    // What the PCI ids let assume is assumed anew by whoever reads this.
    let by_ids = |hca: &&Hca| hca.origin == HcaOrigin::Assumed && hca.source != SourceKind::NcclXml;
    if host.hcas.iter().any(|hca| by_ids(&hca)) {
        writeln!(out, "no-class-infiniband")?;
    }
    for hca in host.hcas.iter().filter(|hca| !by_ids(hca)) {
        write_hca(out, hca)?;
    }
    write_rest(out, host)
}

/// NUMA node of each root bus, where its functions agree.
fn root_numa(host: &Host) -> BTreeMap<RootBus, Option<NumaId>> {
    let mut roots: BTreeMap<RootBus, Option<NumaId>> = BTreeMap::new();
    for function in &host.functions {
        if let Upstream::Root(root) = function.upstream {
            let numa = roots.entry(root).or_insert_with(|| function.numa_id());
            if *numa != function.numa_id() {
                *numa = None;
            }
        }
    }
    roots
}

pub(super) fn name_key(name: &str, value: Option<&str>) -> String {
    key(name, value.map(encode))
}

fn or_dash(word: Option<String>) -> String {
    word.unwrap_or_else(|| "-".to_owned())
}

pub(super) fn key(name: &str, value: Option<String>) -> String {
    value.map_or_else(String::new, |value| format!(" {name}={value}"))
}

/// NUMA node that the line of what a function hangs below already gives it.
fn numa_above(host: &Host, function: &PciFunction, roots: &BTreeMap<RootBus, Option<NumaId>>) -> Option<NumaId> {
    match function.upstream {
        Upstream::Root(root) => roots.get(&root).copied().flatten(),
        Upstream::Bridge(bridge) => host.function(bridge)?.numa_id(),
        Upstream::Unknown => None,
    }
}

fn write_function(out: &mut String, function: &PciFunction, above: Option<NumaId>) -> std::fmt::Result {
    let parent = match function.upstream {
        Upstream::Root(root) => root.to_string(),
        Upstream::Bridge(bridge) => bridge.to_string(),
        Upstream::Unknown => "?".to_owned(),
    };
    let numa = function.numa_id().filter(|numa| Some(*numa) != above);
    let id = |id: Option<u16>| or_dash(id.map(|id| format!("{id:04x}")));
    let has_ids = function.vendor.or(function.device).is_some();
    let ids = has_ids.then(|| format!("{}:{}", id(function.vendor), id(function.device)));
    let class = function.class.map(|class| format!("{class:?}"));
    write!(out, "pci {} {} {} {parent} {}", function.bdf, or_dash(ids), or_dash(class), link(function.link))?;
    let subsystem = function.subsystem.map(|(vendor, device)| format!("{vendor:04x}:{device:04x}"));
    writeln!(
        out,
        "{}{}{}{}{}{}",
        key("numa", numa.map(|numa| numa.to_string())),
        name_key("driver", function.driver.as_deref()),
        key("sub", subsystem),
        key("physfn", function.physical_function.map(|bdf| bdf.to_string())),
        key("acs", function.acs.map(|acs| acs.to_string())),
        if function.role == PciRole::Switch { " whole-switch" } else { "" },
    )
}

fn link(link: Link) -> String {
    let one = |rate: Option<LinkRate>| rate.map_or_else(|| "-".to_owned(), |rate| rate.to_string());
    if link.current == link.max { one(link.current) } else { format!("{}/{}", one(link.current), one(link.max)) }
}

fn write_hca(out: &mut String, hca: &Hca) -> std::fmt::Result {
    let parent = match &hca.origin {
        HcaOrigin::Soft { netdev } => netdev.as_deref(),
        _ => None,
    };
    let is_soft = matches!(hca.origin, HcaOrigin::Soft { .. });
    let kind = match hca.origin {
        HcaOrigin::Socket => Some("socket"),
        HcaOrigin::Assumed => Some("assumed"),
        HcaOrigin::Hardware if hca.bdf.is_none() => Some("hardware"),
        _ => None,
    };
    let numa = hca.numa.filter(|_| hca.bdf.is_none());
    let name = encode(&hca.name);
    writeln!(
        out,
        "hca {name} {}{}{}{}{}{}{}{}{}",
        dash(hca.bdf.filter(|_| !is_soft)),
        key("data_direct", hca.data_direct.map(|bdf| bdf.to_string())),
        name_key("sf", hca.sub_function.as_deref()),
        name_key("parent", parent),
        key("node_guid", hca.node_guid.map(guid::print)),
        key("sys_image_guid", hca.sys_image_guid.map(guid::print)),
        key("kind", kind.map(str::to_owned)),
        key("numa", numa.map(|numa| numa.to_string())),
        if hca.has_uverbs == Some(false) { " no-uverbs" } else { "" },
    )?;
    for port in &hca.ports {
        let rate = port.rate_gbps.map_or_else(|| "-".to_owned(), |rate| rate.to_string());
        writeln!(out, "port {name} {} {} {} {rate}", port.port_num, port.state, port.link_layer)?;
        for gid in &port.gids {
            write_gid(out, &name, port.port_num, gid)?;
        }
    }
    Ok(())
}

fn write_gid(out: &mut String, hca: &str, port_num: u8, gid: &Gid) -> std::fmt::Result {
    let kind = gid.kind.map(|kind| match kind {
        GidKind::IbOrRoceV1 => "v1".to_owned(),
        GidKind::RoceV2 => "v2".to_owned(),
    });
    writeln!(
        out,
        "gid {hca} {port_num} {} {}{}{}",
        gid.gid_index,
        gid.gid,
        key("type", kind),
        name_key("netdev", gid.netdev.as_deref()),
    )
}

fn write_rest(out: &mut String, host: &Host) -> std::fmt::Result {
    for netdev in &host.netdevs {
        writeln!(
            out,
            "net {} {}{}{}{}",
            encode(&netdev.name),
            dash(netdev.bdf),
            name_key("master", netdev.master.as_deref()),
            if netdev.is_bond { " bond" } else { "" },
            if netdev.has_default_route { " default-route" } else { "" },
        )?;
    }
    for drive in &host.drives {
        // Drives named by their address come from the class code and need no line.
        if drive.bdf.is_none_or(|bdf| bdf.to_string() != drive.name) {
            let transport = name_key("transport", drive.transport.as_deref());
            let netdev = name_key("netdev", drive.netdev.as_deref());
            writeln!(out, "drive {} {}{transport}{netdev}", encode(&drive.name), dash(drive.bdf))?;
        }
    }
    for given in &host.given_levels {
        writeln!(out, "level {} {} {}", encode(&given.a), encode(&given.b), given.level)?;
    }
    // Links of GPUs without an address follow from the levels.
    let has_address = |link: &&NvLink| host.gpu(link.gpu).is_some_and(|gpu| gpu.bdf.is_some());
    for link in host.nvlinks.iter().filter(has_address) {
        let bdf = |id| host.gpu(id).and_then(|gpu| gpu.bdf);
        let peer = match link.end {
            NvLinkEnd::Switch => "switch".to_owned(),
            NvLinkEnd::Cpu => "cpu".to_owned(),
            NvLinkEnd::Gpu(peer) => dash(bdf(peer)),
        };
        let gbps = key("gbps", link.link_gbps.map(|gbps| gbps.to_string()));
        writeln!(out, "nvlink {} {peer} {}{gbps}", dash(bdf(link.gpu)), link.links)?;
    }
    Ok(())
}

fn dash(bdf: Option<Bdf>) -> String {
    bdf.map_or_else(|| "-".to_owned(), |bdf| bdf.to_string())
}
