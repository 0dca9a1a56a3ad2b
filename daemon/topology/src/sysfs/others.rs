//! Interfaces, drives, NUMA nodes and kernel modules.

use std::collections::BTreeSet;

use crate::bdf::Bdf;
use crate::model::{CpuKind, Drive, Kernel, Netdev, NumaId, NumaNode, PciClass, PciFunction};
use crate::source::SourceKind;
use crate::sysfs::fabric;
use crate::sysfs::pci::device_path;
use crate::sysfs::place::last_step;
use crate::sysfs::tree::Tree;

const NODES: &str = "sys/devices/system/node";

/// Kernel modules that let an RDMA NIC reach GPU memory (NVIDIA's peer memory module under its two names;
/// AMD's driver brings its own).
const PEER_MEMORY_MODULES: [&str; 3] = ["nvidia_peermem", "nv_peer_mem", "amdgpu"];

fn bdf_of(tree: &Tree, entry: &str) -> Option<Bdf> {
    let path = device_path(tree, entry)?;
    last_step(&path).map(|step| step.bdf)
}

/// Network interfaces of class/net.
pub(super) fn netdevs(tree: &Tree, source: SourceKind) -> Vec<Netdev> {
    let routed = default_routes(tree);
    let mut netdevs = Vec::new();
    for name in tree.list_or_warn("sys/class/net") {
        let entry = format!("sys/class/net/{name}");
        if !tree.is_dir(&entry) {
            // The bonding driver keeps a plain file among the interfaces (bonding_masters).
            continue;
        }
        netdevs.push(Netdev {
            bdf: bdf_of(tree, &entry),
            master: tree.target_name(&format!("{entry}/master")),
            is_bond: tree.is_dir(&format!("{entry}/bonding")),
            has_default_route: routed.contains(&name),
            name,
            source,
        });
    }
    netdevs
}

/// Interfaces that carry a default route (proc(5): `/proc/net/route`, `/proc/net/ipv6_route`).
fn default_routes(tree: &Tree) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for line in tree.table("proc/net/route") {
        let words: Vec<&str> = line.split_whitespace().collect();
        if let [name, "00000000", _, _, _, _, _, "00000000", ..] = words.as_slice() {
            names.insert((*name).to_owned());
        }
    }
    for line in tree.table("proc/net/ipv6_route") {
        let words: Vec<&str> = line.split_whitespace().collect();
        // Loopback holds an unreachable default route on hosts without IPv6.
        if let [target, "00", .., name] = words.as_slice()
            && target.bytes().all(|digit| digit == b'0')
            && *name != "lo"
        {
            names.insert((*name).to_owned());
        }
    }
    names
}

/// NVMe controllers of class/nvme.
pub(super) fn drives(tree: &Tree, source: SourceKind) -> Vec<Drive> {
    let mut drives = Vec::new();
    for name in tree.list_or_warn("sys/class/nvme") {
        let entry = format!("sys/class/nvme/{name}");
        let bdf = bdf_of(tree, &entry);
        let address = if bdf.is_none() { tree.text(&format!("{entry}/address")) } else { None };
        drives.push(Drive {
            bdf,
            numa: None,
            transport: tree.text(&format!("{entry}/transport")),
            netdev: address.and_then(|address| fabric::netdev_towards(tree, &address)),
            name,
            source,
        });
    }
    drives
}

/// What the first CPU takes of `/proc/cpuinfo`, and more: all are of one kind, and the kernel asks each CPU that is read of
/// for its clock.
const MAX_CPUINFO_BYTES: usize = 4096;

/// Kind of CPU, from proc(5) `/proc/cpuinfo`.
pub(super) fn cpu(tree: &Tree) -> Option<CpuKind> {
    let text = tree.bytes("proc/cpuinfo", MAX_CPUINFO_BYTES).unwrap_or_default();
    CpuKind::of_cpuinfo(String::from_utf8_lossy(&text).lines())
}

/// Kernel, from proc(5) `/proc/sys/kernel/osrelease` and `/proc/cmdline`, and of the IOMMU groups of display devices
/// their type (Linux `Documentation/ABI/testing/sysfs-kernel-iommu_groups`).
pub(super) fn kernel(tree: &Tree, functions: &[PciFunction]) -> Option<Kernel> {
    let release = tree.text("proc/sys/kernel/osrelease").filter(|release| !release.is_empty())?;
    let iommu_passthrough = by_group(tree, functions).or_else(|| by_command_line(tree));
    Some(Kernel { release, iommu_passthrough })
}

fn by_group(tree: &Tree, functions: &[PciFunction]) -> Option<bool> {
    let is_display = |function: &&PciFunction| {
        matches!(function.subclass(), PciClass::VGA | PciClass::CONTROLLER_3D | PciClass::DISPLAY_OTHER)
    };
    let of =
        |function: &PciFunction| tree.quiet_text(&format!("sys/bus/pci/devices/{}/iommu_group/type", function.bdf));
    let types: Vec<String> = functions.iter().filter(is_display).filter_map(of).collect();
    (!types.is_empty()).then(|| types.iter().any(|kind| kind == "identity"))
}

/// Linux `Documentation/admin-guide/kernel-parameters.txt`: `iommu.passthrough`, and `iommu=pt` of x86.
fn by_command_line(tree: &Tree) -> Option<bool> {
    let line = tree.quiet_text("proc/cmdline")?;
    let mut told = line.split_whitespace().rev().filter_map(|word| match word.split_once('=')? {
        ("iommu.passthrough", value) => Some(matches!(value, "1" | "y" | "Y" | "on")),
        ("iommu", "pt") => Some(true),
        ("iommu", "nopt") => Some(false),
        _ => None,
    });
    told.next()
}

/// NUMA nodes that are on line. Ids need not start at 0.
pub(super) fn numa_nodes(tree: &Tree) -> Vec<NumaNode> {
    let mut nodes = Vec::new();
    for name in tree.list_or_warn(NODES) {
        let Some(id) = name.strip_prefix("node").and_then(|id| id.parse().ok()) else { continue };
        let cpus = tree.text(&format!("{NODES}/{name}/cpulist"));
        let distances = tree.text(&format!("{NODES}/{name}/distance")).unwrap_or_default();
        nodes.push(NumaNode {
            id: NumaId(id),
            has_cpus: cpus.as_ref().is_none_or(|cpus| !cpus.is_empty()),
            cpus,
            distances: distances.split_whitespace().map_while(|word| word.parse().ok()).collect(),
        });
    }
    nodes
}

/// Loaded modules that bear on GPUDirect RDMA.
pub(super) fn peer_memory_modules(tree: &Tree) -> Vec<String> {
    let is_loaded = |name: &&str| tree.is_dir(&format!("sys/module/{name}"));
    PEER_MEMORY_MODULES.into_iter().filter(is_loaded).map(str::to_owned).collect()
}
