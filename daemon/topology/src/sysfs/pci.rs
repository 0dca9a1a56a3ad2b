//! PCI functions: bus/pci/devices, or without it what the class folders link to.

use std::collections::BTreeMap;

use crate::bdf::Bdf;
use crate::error::TopologyError;
use crate::link::{Link, LinkRate, LinkSpeed, LinkWidth};
use crate::model::{NumaId, PciClass, PciFunction, Upstream};
use crate::source::{SourceKind, Sourced};
use crate::sysfs::config;
use crate::sysfs::place::{Step, steps};
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
    Ok(found.into_iter().map(|step| function(tree, step, source)).collect())
}

/// Functions of bus/pci/devices. Only these links count: a tree may hold folders of the same name at
/// several places.
fn listed(tree: &Tree, names: Vec<String>) -> Vec<Step> {
    let mut found = Vec::with_capacity(names.len());
    for name in names {
        let entry = format!("{DEVICES}/{name}");
        let Ok(bdf) = name.parse::<Bdf>() else {
            tree.warn(&entry, "is no PCI address, left out");
            continue;
        };
        let last = tree.target(&entry).and_then(|target| steps(&target).pop());
        match last {
            Some(step) if step.bdf == bdf => found.push(step),
            Some(step) => {
                tree.warn(&entry, format_args!("leads to {}, its place is taken as unknown", step.bdf));
                found.push(unplaced(bdf, entry));
            }
            None => found.push(unplaced(bdf, entry)),
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

fn function(tree: &Tree, step: Step, source: SourceKind) -> PciFunction {
    let at = |name: &str| format!("{}/{name}", step.path);
    let uevent = Uevent::read(tree, &at("uevent"));
    // The kernel writes these lines together: what a uevent with ids leaves out is not there.
    let is_whole = uevent.ids.is_some();
    let id = |given: Option<u32>, file: &str| {
        let id = given.or_else(|| if is_whole { None } else { hex(tree, &at(file)) })?;
        u16::try_from(id).ok()
    };
    let (vendor, device) = uevent.ids.unzip();
    let (sub_vendor, sub_device) = uevent.subsystem.unzip();
    let class = uevent.class.or_else(|| hex(tree, &at("class")));
    let class = class.filter(|class| *class <= 0xff_ffff).map(PciClass);
    PciFunction {
        vendor: id(vendor, "vendor"),
        device: id(device, "device"),
        subsystem: id(sub_vendor, "subsystem_vendor").zip(id(sub_device, "subsystem_device")),
        class,
        upstream: step.upstream,
        link: link(tree, &step.path),
        numa: numa(tree, &at("numa_node")).map(|numa| Sourced::new(numa, source)),
        driver: uevent.driver.or_else(|| tree.target_name(&at("driver"))),
        physical_function: tree.target_name(&at("physfn")).and_then(|name| name.parse().ok()),
        // Peer traffic turns at ports, so that of other functions it does not matter.
        acs: class.filter(|class| class.is_bridge()).and_then(|_| config::acs(tree, &step.path)),
        ..PciFunction::new(step.bdf, source)
    }
}

/// What `uevent` tells in one read; captured trees may lack it, or lines of it.
#[derive(Default)]
struct Uevent {
    class: Option<u32>,
    ids: Option<(u32, u32)>,
    subsystem: Option<(u32, u32)>,
    driver: Option<String>,
}

impl Uevent {
    fn read(tree: &Tree, path: &str) -> Self {
        let mut uevent = Self::default();
        let text = tree.text(path).unwrap_or_default();
        let number = |text: &str| u32::from_str_radix(text, 16).ok();
        let pair = |text: &str| text.split_once(':').and_then(|(a, b)| number(a).zip(number(b)));
        for (key, value) in text.lines().filter_map(|line| line.split_once('=')) {
            match key {
                "DRIVER" => uevent.driver = Some(value.to_owned()),
                "PCI_CLASS" => uevent.class = number(value),
                "PCI_ID" => uevent.ids = pair(value),
                "PCI_SUBSYS_ID" => uevent.subsystem = pair(value),
                _ => {}
            }
        }
        uevent
    }
}

/// A number that sysfs prints as `0x10de`; anything else is a warning.
fn hex(tree: &Tree, path: &str) -> Option<u32> {
    let text = tree.text(path)?;
    let number = text.strip_prefix("0x").and_then(|digits| u32::from_str_radix(digits, 16).ok());
    if number.is_none() {
        tree.warn(path, format_args!("`{}` is no hexadecimal number", short(&text)));
    }
    number
}

fn numa(tree: &Tree, path: &str) -> Option<NumaId> {
    let text = tree.text(path)?;
    if text == "-1" {
        return None;
    }
    let id = text.parse().ok().map(NumaId);
    if id.is_none() {
        tree.warn(path, format_args!("`{}` is no NUMA node", short(&text)));
    }
    id
}

/// The link above a function. Guests and dead links print "Unknown", width 0 or 255: all unknown.
fn link(tree: &Tree, folder: &str) -> Link {
    let rate = |which: &str| {
        let speed = tree.text(&format!("{folder}/{which}_link_speed"))?;
        let width = tree.text(&format!("{folder}/{which}_link_width"))?;
        let width = LinkWidth::from_lanes(width.parse().ok()?)?;
        Some(LinkRate { speed: LinkSpeed::parse(&speed)?, width })
    };
    Link { current: rate("current"), max: rate("max") }
}

/// Most characters of a bad value that a warning repeats.
const ECHO_CHARS: usize = 40;

pub(super) fn short(text: &str) -> String {
    text.chars().take(ECHO_CHARS).collect()
}
