//! The PCI tree of a host, as far as it leads to GPUs, NICs, drives and NVSwitches.

use std::collections::BTreeMap;
use std::fmt::Write;

use crate::acs::Acs;
use crate::bdf::{Bdf, RootBus};
use crate::model::{Drive, Gpu, Hca, Host, LinkLayer, NvLinkEnd, PciClass, PciFunction, PciRole, PortState, Upstream};
use crate::plan::contract::Plan;
use crate::words::counted;

/// What a piece of the tree's text is, for who paints it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// A host bridge or another heading.
    Heading,
    /// A bridge or a part of a switch.
    Bridge,
    /// A GPU with its NICs.
    Gpu,
    /// A NIC that carries traffic.
    Nic,
    /// A NIC without a usable port.
    DownNic,
    /// A drive.
    Drive,
    /// An address, a link, the lines of the tree.
    Faint,
    /// A link below its maximum.
    SlowLink,
}

/// The tree, a function a line, with the NICs of each GPU if a plan is given.
#[must_use]
pub fn tree(host: &Host, plan: Option<&Plan>) -> String {
    painted_tree(host, plan, &|_, text| text.to_owned())
}

/// The tree with each part of its text as `paint` gives it back.
#[must_use]
pub fn painted_tree(host: &Host, plan: Option<&Plan>, paint: &dyn Fn(Part, &str) -> String) -> String {
    let mut out = String::new();
    // Writing to a String cannot fail.
    let _ = Printer::new(host, plan, paint).print(&mut out);
    out
}

struct Printer<'a> {
    host: &'a Host,
    plan: Option<&'a Plan>,
    paint: &'a dyn Fn(Part, &str) -> String,
    shown: BTreeMap<Bdf, &'a PciFunction>,
    below: BTreeMap<Option<Bdf>, Vec<Bdf>>,
}

/// Bridge devices of NVIDIA in the "other bridge" class are NVSwitches.
fn is_nvswitch(function: &PciFunction) -> bool {
    function.vendor == Some(0x10de) && function.subclass() == PciClass::NVSWITCH
}

impl<'a> Printer<'a> {
    fn new(host: &'a Host, plan: Option<&'a Plan>, paint: &'a dyn Fn(Part, &str) -> String) -> Self {
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
        Self { host, plan, paint, shown, below }
    }

    fn print(&self, out: &mut String) -> std::fmt::Result {
        let host = self.host;
        if self.shown.is_empty() && host.gpus.is_empty() && host.hcas.is_empty() && host.drives.is_empty() {
            return writeln!(out, "no GPU, NIC or drive was found");
        }
        let mut roots: BTreeMap<Option<RootBus>, Vec<Bdf>> = BTreeMap::new();
        for top in self.below.get(&None).into_iter().flatten() {
            roots.entry(self.host.root_bus(*top)).or_default().push(*top);
        }
        for (root, tops) in &roots {
            match root {
                Some(root) => writeln!(out, "{}{}", self.heading(&root_name(*root)), self.numa_of_root(tops))?,
                None => writeln!(out, "{}", self.heading("place unknown"))?,
            }
            self.children(out, tops, "")?;
        }
        self.without_pci(out)?;
        self.nvlinks(out)
    }

    fn heading(&self, text: &str) -> String {
        (self.paint)(Part::Heading, text)
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
                let lines = (self.paint)(Part::Faint, &format!("{indent}{branch}"));
                writeln!(out, "{lines}{}", self.describe(function))?;
            }
            let below = self.below.get(&Some(*bdf)).map_or(&[][..], Vec::as_slice);
            self.children(out, below, &format!("{indent}{more}"))?;
        }
        Ok(())
    }

    fn describe(&self, function: &PciFunction) -> String {
        let bdf = function.bdf;
        let paint = self.paint;
        let mut words = vec![paint(Part::Faint, &bdf.to_string())];
        words.extend(self.host.gpus.iter().filter(|gpu| gpu.bdf == Some(bdf)).map(|gpu| self.gpu(gpu)));
        words.extend(self.host.hcas.iter().filter(|hca| hca.bdf == Some(bdf)).map(|hca| self.nic(hca)));
        words.extend(self.host.drives.iter().filter(|drive| drive.bdf == Some(bdf)).map(|drive| self.drive(drive)));
        if words.len() == 1 {
            words.push(paint(Part::Bridge, role(function)));
        }
        if let Some(rate) = function.link.current.or(function.link.max) {
            words.push(match function.link.is_below_max() {
                true => paint(Part::SlowLink, &format!("[{rate} (below its maximum)]")),
                false => paint(Part::Faint, &format!("[{rate}]")),
            });
        }
        if function.acs.is_some_and(Acs::redirects) {
            words.push(paint(Part::SlowLink, "ACS redirects"));
        }
        words.join("  ")
    }

    fn gpu(&self, gpu: &Gpu) -> String {
        let plan = self.plan.and_then(|plan| plan.gpus.iter().find(|planned| planned.name == gpu.name));
        let nics = plan.map(|plan| &plan.assigned).filter(|nics| !nics.is_empty());
        let text = nics.map_or_else(|| gpu.name.clone(), |nics| format!("{} -> {}", gpu.name, nics.join(", ")));
        (self.paint)(Part::Gpu, &text)
    }

    fn nic(&self, hca: &Hca) -> String {
        let works = |state: PortState| matches!(state, PortState::Active | PortState::ActiveDefer | PortState::Unknown);
        let is_up = hca.ports.is_empty() || hca.ports.iter().any(|port| works(port.state));
        (self.paint)(if is_up { Part::Nic } else { Part::DownNic }, &nic(hca))
    }

    fn drive(&self, drive: &Drive) -> String {
        let over = drive.netdev.as_ref().map_or_else(String::new, |netdev| format!(" over {netdev}"));
        (self.paint)(Part::Drive, &format!("drive {}{over}", drive.name))
    }

    fn without_pci(&self, out: &mut String) -> std::fmt::Result {
        let nowhere = |bdf: Option<Bdf>| bdf.is_none_or(|bdf| self.host.function(bdf).is_none());
        let gpus = self.host.gpus.iter().filter(|gpu| nowhere(gpu.bdf)).map(|device| self.gpu(device));
        let nics = self.host.hcas.iter().filter(|hca| nowhere(hca.bdf)).map(|hca| self.nic(hca));
        let drives = self.host.drives.iter().filter(|drive| nowhere(drive.bdf)).map(|drive| self.drive(drive));
        let lines: Vec<String> = gpus.chain(nics).chain(drives).collect();
        if !lines.is_empty() {
            writeln!(out, "{}", self.heading("no PCI function"))?;
        }
        lines.iter().try_for_each(|line| writeln!(out, "   {line}"))
    }

    fn nvlinks(&self, out: &mut String) -> std::fmt::Result {
        if !self.host.nvlinks.is_empty() {
            writeln!(out, "{}", self.heading(self.host.gpu_link_word()))?;
        }
        for link in &self.host.nvlinks {
            let name = |id| self.host.gpu(id).map_or("?", |gpu| gpu.name.as_str());
            let end = match link.end {
                NvLinkEnd::Switch => "switch",
                NvLinkEnd::Cpu => "cpu",
                NvLinkEnd::Gpu(peer) => name(peer),
            };
            writeln!(out, "   {} - {end}: {}", name(link.gpu), counted(link.links.into(), "link"))?;
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

/// A root bus by its address, unless that only stands for one.
fn root_name(root: RootBus) -> String {
    if root.is_invented() { "root complex".to_owned() } else { root.to_string() }
}

fn nic(hca: &Hca) -> String {
    let ports = hca.ports.iter().map(|port| {
        let state = Some(port.state.to_string()).filter(|_| port.state != PortState::Unknown);
        let layer = Some(port.link_layer.to_string()).filter(|_| port.link_layer != LinkLayer::Unknown);
        let rate = port.rate_gbps.map(|rate| format!("{rate} Gbit/s"));
        let known: Vec<String> = [state, layer, rate].into_iter().flatten().collect();
        let known = if known.is_empty() { "unknown".to_owned() } else { known.join(" ") };
        format!("{}: {known}", port.port_num)
    });
    let ports: Vec<String> = ports.collect();
    if ports.is_empty() { hca.name.clone() } else { format!("{} ({})", hca.name, ports.join(", ")) }
}
