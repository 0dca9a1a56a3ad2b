//! NCCL topology XML (`NCCL_TOPO_FILE`), as NCCL's own parser takes it and [`crate::nccl_xml`] reads it back.
//!
//! Rules (`src/graph/xml.cc` and `topo.cc` of NVIDIA/nccl): version 1; one `cpu` a NUMA node, since it is known
//! by that number; root ports and downstream ports are left out, a switch being its upstream port; a value has
//! no entities and fewer than 256 bytes. What depends on the running job (`rank`, `sm`, `gdr`, a NIC's `dev`) is
//! left to NCCL, which fills it in for the devices it finds and drops the rest.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use crate::bdf::Bdf;
use crate::error::TopologyError;
use crate::link::LinkRate;
use crate::model::{GpuId, Hca, HcaOrigin, Host, NumaId, NvLinkEnd, PciClass, PciFunction, PciRole, Port, PortState};
use crate::path::is_emulated;

/// Longest value that NCCL's parser takes (`MAX_STR_LEN` is 255, the end counted).
const MAX_VALUE_BYTES: usize = 254;
/// What NVML calls the far end of links to a switch that it does not show.
const HIDDEN_SWITCH: &str = "fffffff:ffff:ff";
/// What NCCL calls the CPU at the far end of links (`kvDictPciClass`, nccl:src/graph/topo.cc).
const NVLINK_CPU: u32 = 0x06_80_01;
const AMD: u16 = 0x1002;
const NVIDIA: u16 = 0x10de;

/// The topology of GPUs and NICs for NCCL and RCCL. NICs that cannot be used now (no active port, software,
/// sockets) are left out. NCCL has no level NODE: what is NODE here is PHB there.
///
/// # Errors
/// The host has no GPU with an address, or a NIC's name cannot be written in such a text.
pub fn nccl_topo(host: &Host) -> Result<String, TopologyError> {
    if host.gpus.iter().all(|gpu| gpu.bdf.is_none()) {
        let message = "the input has no GPU with a PCI address, of which NCCL topology XML is made".to_owned();
        return Err(TopologyError::BadRequest { message });
    }
    let nics: Vec<&Hca> = host.hcas.iter().filter(|hca| is_listed(hca)).collect();
    for nic in &nics {
        let is_plain = nic.name.bytes().all(|byte| byte.is_ascii_graphic() && !b"\"'<>&".contains(&byte));
        if !is_plain || nic.name.len() > MAX_VALUE_BYTES {
            let message = format!("the NIC `{}` has a name that NCCL's parser does not take", nic.name.escape_debug());
            return Err(TopologyError::BadRequest { message });
        }
    }
    let mut out = String::new();
    // Writing to a String cannot fail.
    let _ = Writer::new(host, nics).system(&mut out);
    Ok(out)
}

fn is_listed(hca: &Hca) -> bool {
    let is_function = hca.bdf.is_some() && matches!(hca.origin, HcaOrigin::Hardware | HcaOrigin::Assumed);
    is_function && (hca.ports.is_empty() || hca.ports.iter().any(is_usable))
}

fn is_usable(port: &Port) -> bool {
    matches!(port.state, PortState::Active | PortState::ActiveDefer | PortState::Unknown)
}

struct Writer<'a> {
    host: &'a Host,
    nics: Vec<&'a Hca>,
    /// Elements below an element; `None` for what hangs right below a `cpu`.
    below: BTreeMap<Option<Bdf>, Vec<&'a PciFunction>>,
}

impl<'a> Writer<'a> {
    fn new(host: &'a Host, nics: Vec<&'a Hca>) -> Self {
        let gpus = host.gpus.iter().filter_map(|gpu| gpu.bdf);
        let devices: BTreeSet<Bdf> = gpus.chain(nics.iter().filter_map(|nic| nic.bdf)).collect();
        let listed = elements(host, &devices);
        let mut below: BTreeMap<Option<Bdf>, Vec<&PciFunction>> = BTreeMap::new();
        for bdf in &listed {
            let Some(function) = host.function(*bdf) else { continue };
            let parent = host.bridges_above(*bdf).map(|bridge| bridge.bdf).find(|bridge| listed.contains(bridge));
            below.entry(parent).or_default().push(function);
        }
        Self { host, nics, below }
    }

    fn system(&self, out: &mut String) -> std::fmt::Result {
        writeln!(out, "<system version=\"1\">")?;
        let mut cpus: BTreeMap<Option<NumaId>, Vec<&PciFunction>> = BTreeMap::new();
        for top in self.below.get(&None).into_iter().flatten() {
            cpus.entry(self.host.numa_of(top.bdf)).or_default().push(top);
        }
        for (numa, tops) in cpus {
            let id = numa.map_or_else(|| "-1".to_owned(), |numa| numa.to_string());
            let affinity = numa.and_then(|numa| self.affinity(numa));
            let affinity = affinity.map_or_else(String::new, |mask| format!(" affinity=\"{mask}\""));
            writeln!(out, "  <cpu numaid=\"{id}\"{affinity}{}>", self.cpu_kind())?;
            tops.into_iter().try_for_each(|top| self.pci(out, top, 4))?;
            writeln!(out, "  </cpu>")?;
        }
        writeln!(out, "</system>")
    }

    /// NCCL fills these in only for a `cpu` above a device that it finds, and fails where it puts a network
    /// without PCI address below one that has none.
    fn cpu_kind(&self) -> String {
        let is_plain = |text: &str| text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
        let Some(cpu) = self.host.cpu.as_ref().filter(|cpu| is_plain(&cpu.arch)) else { return String::new() };
        let vendor = cpu.vendor.as_ref().filter(|vendor| is_plain(vendor));
        let of = |name: &str, value: Option<String>| value.map_or_else(String::new, |v| format!(" {name}=\"{v}\""));
        let number = |number: Option<u32>| number.map(|number| number.to_string());
        [
            of("arch", Some(cpu.arch.clone())),
            of("vendor", vendor.cloned()),
            of("familyid", number(cpu.family)),
            of("modelid", number(cpu.model)),
        ]
        .concat()
    }

    fn affinity(&self, numa: NumaId) -> Option<String> {
        let node = self.host.numa_nodes.iter().find(|node| node.id == numa)?;
        mask(node.cpus.as_deref()?).filter(|mask| mask.len() <= MAX_VALUE_BYTES)
    }

    fn pci(&self, out: &mut String, function: &PciFunction, indent: usize) -> std::fmt::Result {
        let bdf = function.bdf;
        write!(out, "{:indent$}<pci busid=\"{bdf}\"", "")?;
        if let Some(class) = function.class {
            write!(out, " class=\"0x{:06x}\"", class.0)?;
        }
        let mut id = |name: &str, id: Option<u16>| match id {
            Some(id) => write!(out, " {name}=\"0x{id:04x}\""),
            None => Ok(()),
        };
        id("vendor", function.vendor)?;
        id("device", function.device)?;
        id("subsystem_vendor", function.subsystem.map(|ids| ids.0))?;
        id("subsystem_device", function.subsystem.map(|ids| ids.1))?;
        if let Some(rate) = self.rate(function) {
            write!(out, " link_speed=\"{} PCIe\" link_width=\"{}\"", speed(rate), rate.width.lanes())?;
        }
        let gpu = self.host.gpus.iter().position(|gpu| gpu.bdf == Some(bdf)).map(GpuId);
        let nics: Vec<&&Hca> =
            self.nics.iter().filter(|nic| nic.bdf == Some(bdf) && nic.origin == HcaOrigin::Hardware).collect();
        let children = self.below.get(&Some(bdf));
        if gpu.is_none() && nics.is_empty() && children.is_none() {
            return writeln!(out, "/>");
        }
        writeln!(out, ">")?;
        gpu.map_or(Ok(()), |gpu| self.gpu(out, gpu, indent + 2))?;
        if !nics.is_empty() {
            self.nic(out, &nics, indent + 2)?;
        }
        children.into_iter().flatten().try_for_each(|child| self.pci(out, child, indent + 2))?;
        writeln!(out, "{:indent$}</pci>", "")
    }

    /// As NCCL notes it: the most that both ends can do, but by the lanes in use, which do not change with
    /// power states. Ports that have no element of their own count with what is below them.
    fn rate(&self, function: &PciFunction) -> Option<LinkRate> {
        let of = |function: &PciFunction| {
            let (max, now) = (function.link.max.or(function.link.current)?, function.link.current);
            let width = now.map_or(max.width, |now| now.width.min(max.width));
            (!is_emulated(function)).then_some(LinkRate { speed: max.speed, width })
        };
        let above = self.host.bridges_above(function.bdf).next().filter(|bridge| !self.has_element(bridge.bdf));
        let ends: Vec<LinkRate> = [Some(function), above].into_iter().flatten().filter_map(of).collect();
        let speed = ends.iter().map(|end| end.speed).min()?;
        let width = ends.iter().map(|end| end.width).min()?;
        Some(LinkRate { speed, width })
    }

    fn has_element(&self, bdf: Bdf) -> bool {
        self.below.contains_key(&Some(bdf))
    }

    fn gpu(&self, out: &mut String, gpu: GpuId, indent: usize) -> std::fmt::Result {
        let (links, c2c) = (self.links(gpu), self.c2c(gpu));
        if links.is_empty() && c2c.is_none() {
            return writeln!(out, "{:indent$}<gpu/>", "");
        }
        writeln!(out, "{:indent$}<gpu>", "")?;
        let bdf = self.host.gpu(gpu).and_then(|gpu| gpu.bdf);
        let vendor = bdf.and_then(|bdf| self.host.function(bdf)).and_then(|function| function.vendor);
        let tag = if vendor == Some(AMD) { "xgmi" } else { "nvlink" };
        for (target, count, class) in links {
            writeln!(out, "{:indent$}  <{tag} target=\"{target}\" count=\"{count}\" tclass=\"0x{class:06x}\"/>", "")?;
        }
        if let Some((count, rate)) = c2c {
            writeln!(out, "{:indent$}  <c2c bw=\"{rate:.0}\" count=\"{count}\"/>", "")?;
        }
        writeln!(out, "{:indent$}</gpu>", "")
    }

    /// NVLink-C2C: how many, and MB/s of each. NCCL knows the rate of NVLinks to a CPU only of Power.
    fn c2c(&self, gpu: GpuId) -> Option<(u8, f64)> {
        let link = self.host.cpu_links(gpu).filter(|_| !self.is_power())?;
        Some((link.links, link.link_gbps? * 1000.0 / 8.0))
    }

    fn is_power(&self) -> bool {
        self.host.cpu.as_ref().is_some_and(|cpu| cpu.arch.starts_with("ppc64"))
    }

    /// Far ends of a GPU's links, as address, number and class. Both ends of a link list it.
    fn links(&self, gpu: GpuId) -> Vec<(String, u8, u32)> {
        let mut links = Vec::new();
        for link in &self.host.nvlinks {
            let peer = match link.end {
                NvLinkEnd::Switch if link.gpu == gpu => {
                    links.push((self.nvswitch(), link.links, PciClass::NVSWITCH << 8));
                    continue;
                }
                NvLinkEnd::Cpu if link.gpu == gpu && self.c2c(gpu).is_none() => {
                    links.push((HIDDEN_SWITCH.to_owned(), link.links, NVLINK_CPU));
                    continue;
                }
                NvLinkEnd::Gpu(peer) if link.gpu == gpu => peer,
                NvLinkEnd::Gpu(peer) if peer == gpu => link.gpu,
                _ => continue,
            };
            let Some(bdf) = self.host.gpu(peer).and_then(|peer| peer.bdf) else { continue };
            let class = self.host.function(bdf).and_then(|function| function.class).map_or(0x03_02_00, |class| class.0);
            links.push((bdf.to_string(), link.links, class));
        }
        links
    }

    fn nvswitch(&self) -> String {
        let is_switch =
            |function: &&PciFunction| function.vendor == Some(NVIDIA) && function.subclass() == PciClass::NVSWITCH;
        let found = self.host.functions.iter().find(is_switch);
        found.map_or_else(|| HIDDEN_SWITCH.to_owned(), |function| function.bdf.to_string())
    }

    fn nic(&self, out: &mut String, nics: &[&&Hca], indent: usize) -> std::fmt::Result {
        writeln!(out, "{:indent$}<nic>", "")?;
        for nic in nics {
            let guid = nic.sys_image_guid.map_or_else(String::new, |guid| format!(" guid=\"0x{guid:x}\""));
            let ports: Vec<&Port> = nic.ports.iter().filter(|port| is_usable(port)).collect();
            if ports.is_empty() {
                writeln!(out, "{:indent$}  <net name=\"{}\" port=\"1\"{guid}/>", "", nic.name)?;
            }
            for port in ports {
                let speed = port.rate_gbps.map_or_else(String::new, |gbps| format!(" speed=\"{:.0}\"", gbps * 1000.0));
                let number = port.port_num;
                writeln!(out, "{:indent$}  <net name=\"{}\" port=\"{number}\"{speed}{guid}/>", "", nic.name)?;
            }
        }
        writeln!(out, "{:indent$}</nic>", "")
    }
}

/// Functions that get an element: the devices, the switches above them, and other bridges where ways meet.
fn elements(host: &Host, devices: &BTreeSet<Bdf>) -> BTreeSet<Bdf> {
    let mut listed = devices.clone();
    let mut below: BTreeMap<Bdf, BTreeSet<Bdf>> = BTreeMap::new();
    for device in devices {
        let mut child = *device;
        for bridge in host.bridges_above(*device) {
            below.entry(bridge.bdf).or_default().insert(child);
            child = bridge.bdf;
        }
    }
    for (bdf, children) in below {
        let role = host.function(bdf).map(|function| function.role);
        let slots: BTreeSet<Bdf> = children.into_iter().map(|child| Bdf { function: 0, ..child }).collect();
        let is_listed = match role {
            Some(PciRole::SwitchUpstream | PciRole::Switch) => true,
            Some(PciRole::SwitchDownstream) | None => false,
            Some(_) => slots.len() > 1,
        };
        if is_listed {
            listed.insert(bdf);
        }
    }
    listed
}

/// `16.0 GT/s`, as sysfs prints it.
fn speed(rate: LinkRate) -> String {
    let transfers = rate.speed.mega_transfers();
    format!("{}.{} GT/s", transfers / 1000, transfers % 1000 / 100)
}

/// Most CPUs of a mask: as many as Linux allows.
const MAX_CPUS: usize = 8192;

/// A list of CPUs (`0-15,128`) as a mask of groups of 32 bits, the highest first.
fn mask(list: &str) -> Option<String> {
    let mut groups: Vec<u32> = vec![0];
    for range in list.split(',').map(str::trim).filter(|range| !range.is_empty()) {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        if first > last || last >= MAX_CPUS {
            return None;
        }
        for cpu in first..=last {
            if groups.len() <= cpu / 32 {
                groups.resize(cpu / 32 + 1, 0);
            }
            if let Some(group) = groups.get_mut(cpu / 32) {
                *group |= 1 << (cpu % 32);
            }
        }
    }
    let groups: Vec<String> = groups.iter().rev().map(|group| format!("{group:08x}")).collect();
    Some(groups.join(","))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_become_masks() {
        for (list, wanted) in [
            ("0-23", Some("00ffffff")),
            ("24-47", Some("0000ffff,ff000000")),
            ("0,48-59", Some("0fff0000,00000001")),
            ("", Some("00000000")),
            ("3-1", None),
            ("0-99999", None),
            ("x", None),
        ] {
            assert_eq!(mask(list).as_deref(), wanted, "{list}");
        }
    }
}
