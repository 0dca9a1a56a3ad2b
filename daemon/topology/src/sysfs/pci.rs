//! PCI functions: bus/pci/devices, or without it what the class folders link to.

use std::collections::BTreeMap;

use crate::bdf::{Bdf, PathPart, RootBus};
use crate::error::TopologyError;
use crate::link::{Link, LinkRate, LinkSpeed, LinkWidth};
use crate::model::{NumaId, PciFunction, Upstream};
use crate::source::{SourceKind, Sourced};
use crate::sysfs::config;
use crate::sysfs::ids::Ids;
use crate::sysfs::place::{Step, last_step, steps};
use crate::sysfs::tree::Tree;

const DEVICES: &str = "sys/bus/pci/devices";
/// Class folders whose links show PCI functions where bus/pci is hidden, as in sandboxes.
const CLASSES: [&str; 5] = ["infiniband", "net", "nvme", "drm", "infiniband_verbs"];

/// Reads all functions of the tree.
pub(super) fn read(tree: &Tree, source: SourceKind) -> Result<Vec<PciFunction>, TopologyError> {
    let found = match tree.list(DEVICES)? {
        Some(names) => listed(tree, names),
        None => linked(tree),
    };
    let mut reader = Reader { tree, source, numa_of_roots: BTreeMap::new() };
    Ok(found.into_iter().map(|step| reader.function(&step)).collect())
}

/// Functions of bus/pci/devices. Only these links count: a tree may hold folders of the same name at
/// several places.
fn listed(tree: &Tree, names: Vec<String>) -> Vec<Step> {
    let mut found = Vec::with_capacity(names.len());
    for name in names {
        let entry = || format!("{DEVICES}/{name}");
        let PathPart::Function(bdf) = PathPart::of(&name) else {
            tree.warn(&entry(), "is no PCI address, left out");
            continue;
        };
        let last = tree.target((DEVICES, name.as_str())).and_then(|target| last_step(&target));
        match last {
            Some(step) if step.bdf == bdf => found.push(step),
            Some(step) => {
                tree.warn(&entry(), format_args!("leads to {}, its place is taken as unknown", step.bdf));
                found.push(unplaced(bdf, entry()));
            }
            None => found.push(unplaced(bdf, entry())),
        }
    }
    found
}

fn unplaced(bdf: Bdf, path: String) -> Step {
    Step { bdf, upstream: Upstream::Unknown, path }
}

fn linked(tree: &Tree) -> Vec<Step> {
    let mut found: BTreeMap<Bdf, Step> = BTreeMap::new();
    for class in CLASSES {
        let folder = format!("sys/class/{class}");
        for name in tree.list_or_warn(&folder) {
            let path = device_path(tree, &format!("{folder}/{name}"));
            for step in path.iter().flat_map(|path| steps(path)) {
                found.entry(step.bdf).or_insert(step);
            }
        }
    }
    if !found.is_empty() {
        tree.warn(DEVICES, format_args!("is absent: {} functions taken from class links", found.len()));
    }
    found.into_values().collect()
}

/// Real path of a class entry: where it links to, else where its `device` link leads.
pub(super) fn device_path(tree: &Tree, entry: &str) -> Option<String> {
    if let Some(path) = tree.target(entry) {
        if !steps(&path).is_empty() {
            return Some(path);
        }
        return tree.target(&format!("{path}/device")).or(Some(path));
    }
    tree.target(&format!("{entry}/device"))
}

struct Reader<'a> {
    tree: &'a Tree,
    source: SourceKind,
    numa_of_roots: BTreeMap<RootBus, Option<NumaId>>,
}

impl Reader<'_> {
    fn function(&mut self, step: &Step) -> PciFunction {
        let (tree, folder) = (self.tree, step.path.as_str());
        let ids = Ids::read(tree, folder);
        let function = PciFunction {
            vendor: ids.vendor,
            device: ids.device,
            subsystem: ids.subsystem,
            class: ids.class,
            upstream: step.upstream,
            ..PciFunction::new(step.bdf, self.source)
        };
        let sourced = |numa: NumaId| Sourced::new(numa, self.source);
        if let Upstream::Root(root) = step.upstream
            && is_inside_cpu(&ids)
        {
            // The kernel gives all functions of a bus the node of the bus (`pci_device_add`, Linux drivers/pci/probe.c).
            let numa = *self.numa_of_roots.entry(root).or_insert_with(|| numa(tree, folder));
            return PciFunction { numa: numa.map(sourced), driver: ids.driver, ..function };
        }
        PciFunction {
            link: link(tree, folder),
            numa: numa(tree, folder).map(sourced),
            driver: ids.driver.or_else(|| if ids.are_whole { None } else { tree.target_name((folder, "driver")) }),
            physical_function: tree.target_name((folder, "physfn")).and_then(|name| name.parse().ok()),
            // Peer traffic turns at ports, so that of other functions it does not matter.
            acs: ids.class.filter(|class| class.is_bridge()).and_then(|_| config::acs(tree, folder)),
            ..function
        }
    }
}

/// Intel and AMD: who makes CPUs with PCI functions of their own.
const CPU_VENDORS: [u16; 2] = [0x8086, 0x1022];
/// Base classes of what data comes from and goes to: storage, network, display, processors, InfiniBand of old cards and
/// accelerators.
const DATA_CLASSES: [u32; 7] = [0x01, 0x02, 0x03, 0x0b, 0x0c, 0x12, 0x40];

/// Whether a function on a root bus is one of the many by which a CPU shows its inside (counters, memory controllers, buses
/// of the board): these have no link, and asking each for all would be most of the work on large hosts.
fn is_inside_cpu(ids: &Ids) -> bool {
    let is_of_cpu = ids.vendor.is_some_and(|vendor| CPU_VENDORS.contains(&vendor));
    let class = ids.class.filter(|_| is_of_cpu);
    class.is_some_and(|class| !class.is_bridge() && !DATA_CLASSES.contains(&(class.0 >> 16)))
}

fn numa(tree: &Tree, folder: &str) -> Option<NumaId> {
    let id = |text: &str| if text == "-1" { Some(None) } else { text.parse().ok().map(|id| Some(NumaId(id))) };
    tree.number((folder, "numa_node"), "NUMA node", id).flatten()
}

/// The link above a function. Guests and dead links print "Unknown", width 0 or 255: all unknown.
fn link(tree: &Tree, folder: &str) -> Link {
    let rate = |speed: &str, width: &str| {
        let speed = tree.parse((folder, speed), LinkSpeed::parse)?;
        let width = tree.parse((folder, width), |text| LinkWidth::from_lanes(text.parse().ok()?))?;
        Some(LinkRate { speed, width })
    };
    Link { current: rate("current_link_speed", "current_link_width"), max: rate("max_link_speed", "max_link_width") }
}
