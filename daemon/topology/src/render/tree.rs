//! The PCI tree of a host, as far as it leads to GPUs, NICs, drives and NVSwitches.

use std::collections::BTreeMap;
use std::fmt::Write;

use crate::bdf::{Bdf, RootBus};
use crate::model::{Drive, Gpu, Hca, Host, NvLinkEnd, PciFunction, PciRole, Upstream};
use crate::plan::contract::Plan;

/// The tree, a function a line, with the NICs of each GPU if a plan is given.
#[must_use]
pub fn tree(host: &Host, plan: Option<&Plan>) -> String {
    let mut out = String::new();
    // Writing to a String cannot fail.
    let _ = Printer::new(host, plan).print(&mut out);
    out
}

struct Printer<'a> {
    host: &'a Host,
    plan: Option<&'a Plan>,
    shown: BTreeMap<Bdf, &'a PciFunction>,
    below: BTreeMap<Option<Bdf>, Vec<Bdf>>,
}

/// Bridge devices of NVIDIA in the "other bridge" class are NVSwitches.
fn is_nvswitch(function: &PciFunction) -> bool {
    function.vendor == Some(0x10de) && function.subclass() == 0x0680
}

impl<'a> Printer<'a> {
    fn new(host: &'a Host, plan: Option<&'a Plan>) -> Self {
        let devices = host.gpus.iter().map(|gpu| gpu.bdf);
        let devices = devices.chain(host.hcas.iter().map(|hca| hca.bdf));
        let devices = devices.chain(host.drives.iter().map(|drive| drive.bdf)).flatten();
        let switches = host.functions.iter().filter(|function| is_nvswitch(function)).map(|function| function.bdf);
        let mut shown = BTreeMap::new();
        for bdf in devices.chain(switches) {
            for function in host.function(bdf).into_iter().chain(host.bridges_above(bdf)) {
                shown.insert(function.bdf, function);
            }
        }
        let mut below: BTreeMap<Option<Bdf>, Vec<Bdf>> = BTreeMap::new();
        for function in shown.values() {
            let parent = match function.upstream {
                Upstream::Bridge(bridge) => Some(bridge),
                Upstream::Root(_) | Upstream::Unknown => None,
            };
            below.entry(parent).or_default().push(function.bdf);
        }
        Self { host, plan, shown, below }
    }

    fn print(&self, out: &mut String) -> std::fmt::Result {
        let mut roots: BTreeMap<Option<RootBus>, Vec<Bdf>> = BTreeMap::new();
        for top in self.below.get(&None).into_iter().flatten() {
            roots.entry(self.host.root_bus(*top)).or_default().push(*top);
        }
        for (root, tops) in &roots {
            match root {
                Some(root) => writeln!(out, "{root}{}", self.numa_of_root(tops))?,
                None => writeln!(out, "place unknown")?,
            }
            self.children(out, tops, "")?;
        }
        self.without_pci(out)?;
        self.nvlinks(out)
    }

    fn numa_of_root(&self, tops: &[Bdf]) -> String {
        let numa = tops.first().and_then(|bdf| self.host.function(*bdf)).and_then(PciFunction::numa_id);
        numa.map_or_else(String::new, |numa| format!("  NUMA {numa}"))
    }

    fn children(&self, out: &mut String, children: &[Bdf], indent: &str) -> std::fmt::Result {
        for (place, bdf) in children.iter().enumerate() {
            let is_last = place + 1 == children.len();
            let (branch, more) = if is_last { ("└─ ", "   ") } else { ("├─ ", "│  ") };
            if let Some(function) = self.shown.get(bdf) {
                writeln!(out, "{indent}{branch}{}", self.describe(function))?;
            }
            let below = self.below.get(&Some(*bdf)).map_or(&[][..], Vec::as_slice);
            self.children(out, below, &format!("{indent}{more}"))?;
        }
        Ok(())
    }

    fn describe(&self, function: &PciFunction) -> String {
        let bdf = function.bdf;
        let mut words = vec![bdf.to_string()];
        words.extend(self.host.gpus.iter().filter(|gpu| gpu.bdf == Some(bdf)).map(|gpu| self.gpu(gpu)));
        words.extend(self.host.hcas.iter().filter(|hca| hca.bdf == Some(bdf)).map(nic));
        words.extend(self.host.drives.iter().filter(|drive| drive.bdf == Some(bdf)).map(drive));
        if words.len() == 1 {
            words.push(role(function).to_owned());
        }
        if let Some(rate) = function.link.current.or(function.link.max) {
            let narrow = if function.link.is_below_max() { " (below its maximum)" } else { "" };
            words.push(format!("[{rate}{narrow}]"));
        }
        words.join("  ")
    }

    fn gpu(&self, gpu: &Gpu) -> String {
        let plan = self.plan.and_then(|plan| plan.gpus.iter().find(|planned| planned.name == gpu.name));
        let nics = plan.map(|plan| &plan.assigned).filter(|nics| !nics.is_empty());
        nics.map_or_else(|| gpu.name.clone(), |nics| format!("{} -> {}", gpu.name, nics.join(", ")))
    }

    fn without_pci(&self, out: &mut String) -> std::fmt::Result {
        let nowhere = |bdf: Option<Bdf>| bdf.is_none_or(|bdf| self.host.function(bdf).is_none());
        let gpus = self.host.gpus.iter().filter(|gpu| nowhere(gpu.bdf)).map(|device| self.gpu(device));
        let nics = self.host.hcas.iter().filter(|hca| nowhere(hca.bdf)).map(nic);
        let drives = self.host.drives.iter().filter(|drive| nowhere(drive.bdf)).map(drive);
        let lines: Vec<String> = gpus.chain(nics).chain(drives).collect();
        if !lines.is_empty() {
            writeln!(out, "no PCI function")?;
        }
        lines.iter().try_for_each(|line| writeln!(out, "   {line}"))
    }

    fn nvlinks(&self, out: &mut String) -> std::fmt::Result {
        if !self.host.nvlinks.is_empty() {
            writeln!(out, "NVLink")?;
        }
        for link in &self.host.nvlinks {
            let name = |id| self.host.gpu(id).map_or("?", |gpu| gpu.name.as_str());
            let end = match link.end {
                NvLinkEnd::Switch => "switch",
                NvLinkEnd::Gpu(peer) => name(peer),
            };
            writeln!(out, "   {} - {end}: {} links", name(link.gpu), link.links)?;
        }
        Ok(())
    }
}

fn role(function: &PciFunction) -> &'static str {
    match function.role {
        PciRole::RootPort => "root port",
        PciRole::SwitchUpstream => "switch, upstream port",
        PciRole::SwitchDownstream => "switch, downstream port",
        PciRole::Switch => "switch",
        PciRole::Bridge => "bridge",
        PciRole::Endpoint if is_nvswitch(function) => "NVSwitch",
        PciRole::Endpoint => "device",
    }
}

fn nic(hca: &Hca) -> String {
    let ports = hca.ports.iter().map(|port| {
        let rate = port.rate_gbps.map_or_else(String::new, |rate| format!(" {rate} Gbit/s"));
        format!("{}: {} {}{rate}", port.port_num, port.state, port.link_layer)
    });
    let ports: Vec<String> = ports.collect();
    if ports.is_empty() { hca.name.clone() } else { format!("{} ({})", hca.name, ports.join(", ")) }
}

fn drive(drive: &Drive) -> String {
    format!("drive {}", drive.name)
}
