//! PCI functions: bus/pci/devices, or without it what the class folders link to.
//!
//! Of functions that data of ours neither comes from nor goes through (those inside of CPUs, USB and the like) only who they
//! are is asked, and of virtual functions no link, since they have none: on large hosts these are most.

use std::collections::{BTreeMap, BTreeSet};

use crate::assemble::GpuIds;
use crate::bdf::{Bdf, PathPart, RootBus};
use crate::error::TopologyError;
use crate::link::{Link, LinkRate, LinkSpeed, LinkWidth};
use crate::model::{NumaId, PciClass, PciFunction, Upstream};
use crate::source::{SourceKind, Sourced};
use crate::sysfs::config;
use crate::sysfs::ids::{Ids, IdsFile};
use crate::sysfs::parallel;
use crate::sysfs::place::{Step, last_step, steps};
use crate::sysfs::tree::Tree;
use crate::sysfs::vpd;
use crate::words::counted;

const DEVICES: &str = "sys/bus/pci/devices";
/// Class folders whose links show PCI functions where bus/pci is hidden, as in sandboxes.
const CLASSES: [&str; 5] = ["infiniband", "net", "nvme", "drm", "infiniband_verbs"];

/// Which functions matter whatever their class.
#[derive(Debug)]
pub(super) struct Matter<'a> {
    /// By id: what the operator calls a GPU.
    pub(super) gpu_ids: &'a GpuIds,
    /// By address: those of RDMA devices, drives and GPUs that the tree lists as such.
    pub(super) listed: BTreeSet<Bdf>,
}

impl Matter<'_> {
    /// Whether a GPU, a NIC or a drive may hang at a function, or below it.
    fn includes(&self, function: &PciFunction) -> bool {
        self.listed.contains(&function.bdf)
            || function.class.is_none_or(|class| class.is_bridge() || DATA_CLASSES.contains(&base_class(class)))
            || matches!(function.subclass(), PciClass::NVME | PciClass::SERIAL_INFINIBAND)
            || vpd::is_data_direct(function)
            || self.gpu_ids.contains(function)
    }
}

/// Base classes of what data comes from and goes to: network, display, processors, accelerators and co-processors.
const DATA_CLASSES: [u32; 5] = [0x02, 0x03, 0x0b, 0x12, 0x40];

fn base_class(class: PciClass) -> u32 {
    class.0 >> 16
}

/// Reads all functions of the tree.
pub(super) fn read(tree: &Tree, source: SourceKind, matter: &Matter<'_>) -> Result<Vec<PciFunction>, TopologyError> {
    let functions = |tree: &Tree, steps: &[Step]| -> Vec<PciFunction> {
        let (numa_of_roots, ids_file) = (BTreeMap::new(), IdsFile::Uevent);
        let mut reader = Reader { tree, source, matter, numa_of_roots, ids_file, link_before: None };
        steps.iter().map(|step| reader.function(step)).collect()
    };
    Ok(match tree.list(DEVICES)? {
        Some(names) => {
            let of_one_device = |a: &String, b: &String| device_of(a) == device_of(b);
            parallel::by_parts(tree, &names, of_one_device, |tree, part| functions(tree, &listed(tree, part)))
        }
        None => functions(tree, &linked(tree)),
    })
}

/// What the names of a device's functions begin with.
fn device_of(name: &str) -> &str {
    name.rsplit_once('.').map_or(name, |(device, _function)| device)
}

/// Functions of bus/pci/devices. Only these links count: a tree may hold folders of the same name at
/// several places.
fn listed(tree: &Tree, names: &[String]) -> Vec<Step> {
    let mut found = Vec::with_capacity(names.len());
    for name in names {
        let entry = || format!("{DEVICES}/{name}");
        let PathPart::Function(bdf) = PathPart::of(name) else {
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
        tree.warn(DEVICES, format_args!("is absent: {} taken from class links", counted(found.len(), "function")));
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

/// Vendor and device.
type Model = (Option<u16>, Option<u16>);

struct Reader<'a> {
    tree: &'a Tree,
    source: SourceKind,
    matter: &'a Matter<'a>,
    numa_of_roots: BTreeMap<RootBus, Option<NumaId>>,
    /// Where the ids of the function before were.
    ids_file: IdsFile,
    /// The last function 0 whose link was read, what it is, and the link: those of one device come one after the other.
    link_before: Option<(Bdf, Model, Upstream, Link)>,
}

impl Reader<'_> {
    fn function(&mut self, step: &Step) -> PciFunction {
        let (tree, folder) = (self.tree, step.path.as_str());
        let ids = Ids::read(tree, folder, &mut self.ids_file);
        let function = PciFunction {
            vendor: ids.vendor,
            device: ids.device,
            subsystem: ids.subsystem,
            class: ids.class,
            upstream: step.upstream,
            ..PciFunction::new(step.bdf, self.source)
        };
        let source = self.source;
        let sourced = |numa: NumaId| Sourced::new(numa, source);
        if !self.matter.includes(&function) {
            // The kernel gives all functions of a bus the node of the bus (`pci_device_add`, Linux drivers/pci/probe.c).
            let numa = match step.upstream {
                Upstream::Root(root) => *self.numa_of_roots.entry(root).or_insert_with(|| numa(tree, folder)),
                Upstream::Bridge(_) | Upstream::Unknown => None,
            };
            return PciFunction { numa: numa.map(sourced), driver: ids.driver, ..function };
        }
        if function.is_bridge() {
            return PciFunction {
                link: link(tree, folder),
                numa: numa(tree, folder).map(sourced),
                driver: ids.driver,
                // Peer traffic turns at ports, so that of other functions it does not matter.
                acs: config::acs(tree, folder),
                ..function
            };
        }
        let physical = tree.target_name((folder, "physfn")).and_then(|name| name.parse().ok());
        PciFunction {
            // A virtual function's registers of its link read zero (PCIe Base Specification 6.0, 9.3.5).
            link: if physical.is_some() {
                Link::default()
            } else {
                self.link_of_endpoint(step, (ids.vendor, ids.device))
            },
            numa: numa(tree, folder).map(sourced),
            driver: ids.driver.or_else(|| if ids.are_whole { None } else { tree.target_name((folder, "driver")) }),
            physical_function: physical,
            ..function
        }
    }

    /// The link above a function that is no bridge. All functions of a device behind a bridge share its one link, and report the
    /// same of it (PCIe Base Specification 6.0, 7.5.3.6 and 7.5.3.8); on a root bus each function stands for itself. In a guest
    /// the functions of a slot may be of several devices, so that only those of one model share.
    fn link_of_endpoint(&mut self, step: &Step, model: Model) -> Link {
        if let Some((bdf, model_before, upstream, link)) = self.link_before
            && (model_before, upstream) == (model, step.upstream)
            && is_one_device(bdf, step.bdf)
        {
            return link;
        }
        let link = link(self.tree, &step.path);
        // What one function leaves out another may tell.
        let is_whole = link.current.is_some() && link.max.is_some();
        if is_whole && step.bdf.function == 0 && matches!(step.upstream, Upstream::Bridge(_)) {
            self.link_before = Some((step.bdf, model, step.upstream, link));
        }
        link
    }
}

fn is_one_device(a: Bdf, b: Bdf) -> bool {
    Bdf { function: 0, ..a } == Bdf { function: 0, ..b }
}

fn numa(tree: &Tree, folder: &str) -> Option<NumaId> {
    let id = |text: &str| if text == "-1" { Some(None) } else { text.parse().ok().map(|id| Some(NumaId(id))) };
    tree.number((folder, "numa_node"), "NUMA node", id).flatten()
}

/// The link above a function. Guests and dead links print "Unknown", width 0 or 255: all unknown.
fn link(tree: &Tree, folder: &str) -> Link {
    let width = |file: &str| tree.parse((folder, file), |text| LinkWidth::from_lanes(text.parse().ok()?));
    let rate = |speed: Option<LinkSpeed>, file: &str| {
        let speed = speed?;
        Some(LinkRate { speed, width: width(file)? })
    };
    // The kernel shows all four or none (`pcie_dev_attrs_are_visible`, Linux drivers/pci/pci-sysfs.c).
    let Some(current) = tree.parse_found((folder, "current_link_speed"), LinkSpeed::parse) else {
        return Link::default();
    };
    let max = tree.parse((folder, "max_link_speed"), LinkSpeed::parse);
    Link { current: rate(current, "current_link_width"), max: rate(max, "max_link_width") }
}
