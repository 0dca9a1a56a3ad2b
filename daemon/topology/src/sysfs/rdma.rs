//! RDMA devices: class/infiniband.

use std::collections::BTreeSet;
use std::net::Ipv6Addr;

use crate::error::TopologyError;
use crate::guid;
use crate::model::{Gid, GidKind, LinkLayer, Port, PortState, RawHca};
use crate::sysfs::pci::device_path;
use crate::sysfs::place::{last_step, sub_function};
use crate::sysfs::tree::{Tree, short};

const CLASS: &str = "sys/class/infiniband";
const VERBS_CLASS: &str = "sys/class/infiniband_verbs";
const NODES: &str = "dev/infiniband";
/// Most ports of one device; verbs numbers them from 1 in 8 bits, real ones have one or two.
const MAX_PORTS: usize = 64;
/// Most GID table entries read of one port.
pub(super) const MAX_GIDS: usize = 1024;

/// Reads all RDMA devices; `None` if the tree has no class/infiniband.
pub(super) fn read(tree: &Tree) -> Result<Option<Vec<RawHca>>, TopologyError> {
    let names = tree.list(CLASS)?;
    let uverbs = uverbs(tree);
    let read =
        |name: String| RawHca { has_uverbs: uverbs.as_ref().map(|known| known.contains(&name)), ..hca(tree, name) };
    Ok(names.map(|names| names.into_iter().map(read).collect()))
}

/// Devices that this system can open: class/infiniband_verbs names the uverbs device of each, and where
/// `/dev/infiniband` is there (as on the live host) its node must be too. `None` if the tree names none.
fn uverbs(tree: &Tree) -> Option<BTreeSet<String>> {
    let nodes = tree.is_dir(NODES).then(|| tree.list_or_warn(NODES));
    let mut names = BTreeSet::new();
    let mut is_known = false;
    for entry in tree.list_or_warn(VERBS_CLASS) {
        let Some(name) = tree.text(&format!("{VERBS_CLASS}/{entry}/ibdev")) else { continue };
        is_known = true;
        if nodes.as_ref().is_none_or(|nodes| nodes.contains(&entry)) {
            names.insert(name);
        }
    }
    is_known.then_some(names)
}

fn hca(tree: &Tree, name: String) -> RawHca {
    let entry = format!("{CLASS}/{name}");
    let path = device_path(tree, &entry);
    let bdf = path.as_ref().and_then(|path| last_step(path)).map(|step| step.bdf);
    let read_guid = |file: &str| tree.text(&format!("{entry}/{file}")).and_then(|text| guid::parse(&text));
    RawHca {
        bdf,
        sub_function: path.as_deref().and_then(sub_function),
        parent_netdev: tree.text(&format!("{entry}/parent")).filter(|_| bdf.is_none()),
        ports: ports(tree, &entry),
        node_guid: read_guid("node_guid"),
        sys_image_guid: read_guid("sys_image_guid"),
        name,
        ..RawHca::default()
    }
}

fn ports(tree: &Tree, entry: &str) -> Vec<Port> {
    let folder = format!("{entry}/ports");
    let mut ports = Vec::new();
    for name in tree.list_or_warn(&folder) {
        let path = format!("{folder}/{name}");
        match name.parse() {
            Ok(port_num) if port_num > 0 && ports.len() < MAX_PORTS => ports.push(port(tree, port_num, &path)),
            _ => tree.warn(&path, "is no port number, left out"),
        }
    }
    ports
}

fn port(tree: &Tree, port_num: u8, path: &str) -> Port {
    let state = tree.parse((path, "state"), |state| Some(PortState::parse(state)));
    let link_layer = tree.parse((path, "link_layer"), |layer| Some(LinkLayer::parse(layer)));
    let link_layer = link_layer.unwrap_or(LinkLayer::Unknown);
    Port {
        port_num,
        state: state.unwrap_or(PortState::Unknown),
        link_layer,
        rate_gbps: tree.text((path, "rate")).and_then(|rate| rate_gbps(tree, path, &rate)),
        gids: gids(tree, path, link_layer),
    }
}

/// Reads `200 Gb/sec (4X HDR)`.
fn rate_gbps(tree: &Tree, path: &str, text: &str) -> Option<f64> {
    let mut words = text.split_whitespace();
    let number: Option<f64> = words.next().and_then(|word| word.parse().ok());
    let rate = number.filter(|rate| rate.is_finite() && *rate > 0.0 && words.next() == Some("Gb/sec"));
    if rate.is_none() {
        tree.warn(path, format_args!("rate `{}` is not understood", short(text)));
    }
    rate
}

/// Empty slots have no interface id; InfiniBand fills in the subnet prefix all the same.
fn is_in_use(gid: &Ipv6Addr) -> bool {
    gid.octets()[8..].iter().any(|byte| *byte != 0)
}

/// GIDs in use. Tables of RoCE are sparse: empty slots are zero, and their type gives EINVAL. Those of InfiniBand are
/// filled from the front, so that of their hundreds of slots two or three are read.
fn gids(tree: &Tree, port: &str, link_layer: LinkLayer) -> Vec<Gid> {
    let folder = format!("{port}/gids");
    let names = tree.list_or_warn(&folder).into_iter().take(MAX_GIDS);
    let mut slots: Vec<(u16, String)> = names.filter_map(|name| Some((name.parse().ok()?, name))).collect();
    slots.sort_unstable();
    let mut used: Vec<(u16, String, Ipv6Addr)> = Vec::new();
    for (gid_index, name) in slots {
        let gid: Option<Ipv6Addr> = tree.quiet_parse((folder.as_str(), name.as_str()), |text| text.parse().ok());
        match gid.filter(is_in_use) {
            Some(gid) => used.push((gid_index, name, gid)),
            None if link_layer == LinkLayer::InfiniBand => break,
            None => {}
        }
    }
    let (types, netdevs) = (format!("{port}/gid_attrs/types"), format!("{port}/gid_attrs/ndevs"));
    let gid = |(gid_index, name, gid): (u16, String, Ipv6Addr)| Gid {
        gid_index,
        gid,
        kind: tree.quiet_parse((types.as_str(), name.as_str()), |kind| match kind {
            "IB/RoCE v1" => Some(GidKind::IbOrRoceV1),
            "RoCE v2" => Some(GidKind::RoceV2),
            _ => None,
        }),
        netdev: tree.quiet_text((netdevs.as_str(), name.as_str())).filter(|name| !name.is_empty()),
    };
    used.into_iter().map(gid).collect()
}
