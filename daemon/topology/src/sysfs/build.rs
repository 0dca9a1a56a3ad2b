//! A host written out as a sysfs tree, so that the real reader reads a described machine.
//!
//! What neither sysfs nor the NVIDIA driver's files in `/proc` hold (GPU memory, NVLinks) is left out.

use std::fmt::Write as _;
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use crate::bdf::Bdf;
use crate::guid;
use crate::link::{Link, LinkRate};
use crate::model::{Drive, Gid, GidKind, Gpu, Hca, HcaOrigin, Host, LinkLayer, Netdev, PciFunction, Port, Upstream};
use crate::sysfs::vpd::Vpd;
use crate::sysfs::{config, driver};

/// Writes `host` below `root` as `sys/` and `proc/`. The folder may exist, what is written must not.
///
/// # Errors
/// The first file that cannot be written. A name that would leave its folder is invalid input.
pub fn build(host: &Host, root: &Path) -> io::Result<()> {
    let writer = Writer { host, root };
    for folder in ["sys/bus/pci/devices", "sys/bus/pci/drivers", "sys/class/net", "sys/class/nvme"] {
        writer.folder(folder)?;
    }
    for function in &host.functions {
        writer.function(function)?;
    }
    if !host.hcas.iter().any(|hca| hca.origin == HcaOrigin::Assumed) {
        writer.folder("sys/class/infiniband")?;
        for hca in &host.hcas {
            writer.hca(hca)?;
        }
    }
    for netdev in &host.netdevs {
        writer.netdev(netdev)?;
    }
    for drive in &host.drives {
        writer.drive(drive)?;
    }
    for gpu in &host.gpus {
        writer.gpu(gpu)?;
    }
    for name in &host.peer_memory_modules {
        writer.folder(&format!("sys/module/{}", single(name)?))?;
    }
    writer.numa_nodes()?;
    writer.cpu()?;
    writer.kernel()?;
    writer.routes()
}

/// A name that is one path part.
fn single(name: &str) -> io::Result<&str> {
    if name.is_empty() || name.contains('/') || name == "." || name == ".." {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("`{name}` is no file name")));
    }
    Ok(name)
}

struct Writer<'a> {
    host: &'a Host,
    root: &'a Path,
}

impl Writer<'_> {
    fn folder(&self, path: &str) -> io::Result<()> {
        fs::create_dir_all(self.root.join(path))
    }

    fn file(&self, path: &str, text: impl AsRef<str>) -> io::Result<()> {
        fs::write(self.root.join(path), format!("{}\n", text.as_ref()))
    }

    /// A relative link, as sysfs has them.
    fn link(&self, at: &str, to: &str) -> io::Result<()> {
        let ups = at.split('/').count() - 1;
        let target: PathBuf = std::iter::repeat_n("..", ups).chain([to]).collect();
        symlink(target, self.root.join(at))
    }

    /// Path of a function's folder, relative to the root.
    fn path_of(&self, bdf: Bdf) -> String {
        let mut parts = vec![bdf.to_string()];
        parts.extend(self.host.bridges_above(bdf).map(|bridge| bridge.bdf.to_string()));
        match self.host.root_bus(bdf) {
            Some(root) => {
                parts.push(root.to_string());
                parts.reverse();
                format!("sys/devices/{}", parts.join("/"))
            }
            // A place that is not known is shown by a folder where others have a link.
            None => format!("sys/bus/pci/devices/{bdf}"),
        }
    }

    /// Folder of a device below its function, else among the virtual devices.
    fn device_folder(&self, bdf: Option<Bdf>, class: &str, name: &str) -> io::Result<String> {
        let above = bdf.map_or_else(|| "sys/devices/virtual".to_owned(), |bdf| self.path_of(bdf));
        let path = format!("{above}/{class}/{}", single(name)?);
        self.folder(&path)?;
        self.link(&format!("sys/class/{class}/{name}"), &path)?;
        if let Some(bdf) = bdf {
            self.link(&format!("{path}/device"), &self.path_of(bdf))?;
        }
        Ok(path)
    }

    fn function(&self, function: &PciFunction) -> io::Result<()> {
        let path = self.path_of(function.bdf);
        self.folder(&path)?;
        if function.upstream != Upstream::Unknown && self.host.root_bus(function.bdf).is_some() {
            self.link(&format!("sys/bus/pci/devices/{}", function.bdf), &path)?;
        }
        let id = |name: &str, id: Option<u16>| match id {
            Some(id) => self.file(&format!("{path}/{name}"), format!("0x{id:04x}")),
            None => Ok(()),
        };
        id("vendor", function.vendor)?;
        id("device", function.device)?;
        id("subsystem_vendor", function.subsystem.map(|ids| ids.0))?;
        id("subsystem_device", function.subsystem.map(|ids| ids.1))?;
        if let Some(class) = function.class {
            self.file(&format!("{path}/class"), format!("0x{:06x}", class.0))?;
        }
        let numa = function.numa_id().map_or_else(|| "-1".to_owned(), |numa| numa.to_string());
        self.file(&format!("{path}/numa_node"), numa)?;
        self.file(&format!("{path}/uevent"), uevent(function))?;
        self.link_files(&path, function.link)?;
        if let Some(acs) = function.acs {
            fs::write(self.root.join(format!("{path}/config")), config::space_with(acs))?;
        }
        if let Some(physical) = function.physical_function {
            self.link(&format!("{path}/physfn"), &self.path_of(physical))?;
        }
        if let Some(driver) = &function.driver {
            let driver = format!("sys/bus/pci/drivers/{}", single(driver)?);
            self.folder(&driver)?;
            self.link(&format!("{path}/driver"), &driver)?;
        }
        Ok(())
    }

    fn link_files(&self, path: &str, link: Link) -> io::Result<()> {
        if link == Link::default() {
            return Ok(());
        }
        let one = |which: &str, rate: Option<LinkRate>| {
            let Some(rate) = rate else {
                self.file(&format!("{path}/{which}_link_speed"), "Unknown")?;
                return self.file(&format!("{path}/{which}_link_width"), "0");
            };
            let (whole, tenths) = (rate.speed.mega_transfers() / 1000, rate.speed.mega_transfers() % 1000 / 100);
            self.file(&format!("{path}/{which}_link_speed"), format!("{whole}.{tenths} GT/s PCIe"))?;
            self.file(&format!("{path}/{which}_link_width"), rate.width.lanes().to_string())
        };
        one("current", link.current)?;
        one("max", link.max)
    }

    fn hca(&self, hca: &Hca) -> io::Result<()> {
        let (path, parent) = match &hca.origin {
            HcaOrigin::Soft { netdev } => (self.device_folder(None, "infiniband", &hca.name)?, netdev.clone()),
            _ => (self.hardware_hca(hca)?, None),
        };
        self.vpd(hca)?;
        if let Some(parent) = parent {
            self.file(&format!("{path}/parent"), parent)?;
        }
        for (name, value) in [("node_guid", hca.node_guid), ("sys_image_guid", hca.sys_image_guid)] {
            if let Some(value) = value {
                self.file(&format!("{path}/{name}"), guid::print(value))?;
            }
        }
        // Which uverbs devices there are only tells something where some device has none.
        if hca.has_uverbs != Some(false) && self.host.hcas.iter().any(|hca| hca.has_uverbs == Some(false)) {
            let number = self.host.hcas.iter().position(|other| other.name == hca.name).unwrap_or_default();
            let folder = format!("sys/class/infiniband_verbs/uverbs{number}");
            self.folder(&folder)?;
            self.file(&format!("{folder}/ibdev"), &hca.name)?;
        }
        hca.ports.iter().try_for_each(|port| self.port(&path, port))
    }

    fn hardware_hca(&self, hca: &Hca) -> io::Result<String> {
        let (Some(bdf), Some(sub_function)) = (hca.bdf, &hca.sub_function) else {
            return self.device_folder(hca.bdf, "infiniband", &hca.name);
        };
        let path = format!("{}/{}/infiniband/{}", self.path_of(bdf), single(sub_function)?, single(&hca.name)?);
        self.folder(&path)?;
        self.link(&format!("sys/class/infiniband/{}", hca.name), &path)?;
        Ok(path)
    }

    /// The VPD by which a NIC and its data-direct function are known to be one.
    fn vpd(&self, hca: &Hca) -> io::Result<()> {
        let Some((bdf, direct)) = hca.bdf.zip(hca.data_direct) else { return Ok(()) };
        let vpd = Vpd { serial: None, vuid: Some(format!("{bdf}MLNX{direct}")) }.to_bytes();
        [bdf, direct].iter().try_for_each(|end| fs::write(self.root.join(format!("{}/vpd", self.path_of(*end))), &vpd))
    }

    fn gpu(&self, gpu: &Gpu) -> io::Result<()> {
        let Some(bdf) = gpu.bdf.filter(|_| gpu.uuid.is_some() || gpu.device_node.is_some()) else { return Ok(()) };
        let folder = format!("{}/{bdf}", driver::GPUS);
        self.folder(&folder)?;
        let mut lines = vec![format!("Bus Location: \t {bdf}")];
        lines.extend(gpu.uuid().map(|uuid| format!("GPU UUID: \t {uuid}")));
        lines.extend(gpu.device_node.as_ref().map(|node| format!("Device Minor: \t {}", node.value.minor)));
        self.file(&format!("{folder}/information"), lines.join("\n"))
    }

    fn port(&self, hca: &str, port: &Port) -> io::Result<()> {
        let path = format!("{hca}/ports/{}", port.port_num);
        for folder in ["gids", "gid_attrs/types", "gid_attrs/ndevs"] {
            self.folder(&format!("{path}/{folder}"))?;
        }
        if let Some(number) = port.state.number() {
            self.file(&format!("{path}/state"), format!("{number}: {}", port.state))?;
        }
        if port.link_layer != LinkLayer::Unknown {
            self.file(&format!("{path}/link_layer"), port.link_layer.to_string())?;
        }
        if let Some(rate) = port.rate_gbps {
            self.file(&format!("{path}/rate"), format!("{rate} Gb/sec"))?;
        }
        port.gids.iter().try_for_each(|gid| self.gid(&path, gid))
    }

    fn gid(&self, port: &str, gid: &Gid) -> io::Result<()> {
        let index = gid.gid_index;
        let groups: Vec<String> = gid.gid.segments().iter().map(|group| format!("{group:04x}")).collect();
        self.file(&format!("{port}/gids/{index}"), groups.join(":"))?;
        if let Some(kind) = gid.kind {
            let kind = match kind {
                GidKind::IbOrRoceV1 => "IB/RoCE v1",
                GidKind::RoceV2 => "RoCE v2",
            };
            self.file(&format!("{port}/gid_attrs/types/{index}"), kind)?;
        }
        match &gid.netdev {
            Some(netdev) => self.file(&format!("{port}/gid_attrs/ndevs/{index}"), netdev),
            None => Ok(()),
        }
    }

    fn netdev(&self, netdev: &Netdev) -> io::Result<()> {
        let path = self.device_folder(netdev.bdf, "net", &netdev.name)?;
        if netdev.is_bond {
            self.folder(&format!("{path}/bonding"))?;
        }
        match &netdev.master {
            Some(master) => {
                self.link(&format!("{path}/master"), &format!("sys/devices/virtual/net/{}", single(master)?))
            }
            None => Ok(()),
        }
    }

    fn drive(&self, drive: &Drive) -> io::Result<()> {
        // Drives named by their address have no class entry.
        if drive.bdf.is_some_and(|bdf| bdf.to_string() == drive.name) {
            return Ok(());
        }
        let path = self.device_folder(drive.bdf, "nvme", &drive.name)?;
        if let Some(netdev) = &drive.netdev {
            self.file(&format!("{path}/address"), format!("traddr=192.0.2.1,trsvcid=4420,host_iface={netdev}"))?;
        }
        match &drive.transport {
            Some(transport) => self.file(&format!("{path}/transport"), transport),
            None => Ok(()),
        }
    }

    fn numa_nodes(&self) -> io::Result<()> {
        for node in &self.host.numa_nodes {
            let path = format!("sys/devices/system/node/node{}", node.id);
            self.folder(&path)?;
            if let Some(cpus) = &node.cpus {
                self.file(&format!("{path}/cpulist"), cpus)?;
            }
            if !node.distances.is_empty() {
                let distances: Vec<String> = node.distances.iter().map(u16::to_string).collect();
                self.file(&format!("{path}/distance"), distances.join(" "))?;
            }
        }
        Ok(())
    }

    fn cpu(&self) -> io::Result<()> {
        let Some(cpu) = &self.host.cpu else { return Ok(()) };
        self.folder("proc")?;
        let number = |name: &str, number: Option<u32>| number.map(|number| format!("{name}\t: {number}"));
        let lines = match cpu.arch.as_str() {
            "arm64" => vec!["CPU implementer\t: 0x41".to_owned()],
            "ppc64" => vec!["cpu\t\t: POWER9".to_owned()],
            _ => {
                let vendor = cpu.vendor.as_ref().map(|vendor| format!("vendor_id\t: {vendor}"));
                [vendor, number("cpu family", cpu.family), number("model", cpu.model)].into_iter().flatten().collect()
            }
        };
        self.file("proc/cpuinfo", lines.join("\n"))
    }

    fn kernel(&self) -> io::Result<()> {
        let Some(kernel) = &self.host.kernel else { return Ok(()) };
        self.folder("proc/sys/kernel")?;
        self.file("proc/sys/kernel/osrelease", &kernel.release)?;
        match kernel.iommu_passthrough {
            Some(yes) => self.file("proc/cmdline", format!("iommu.passthrough={}", u8::from(yes))),
            None => Ok(()),
        }
    }

    fn routes(&self) -> io::Result<()> {
        let mut table = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT".to_owned();
        for netdev in self.host.netdevs.iter().filter(|netdev| netdev.has_default_route) {
            // Writing to a String cannot fail.
            let _ = write!(table, "\n{}\t00000000\t0100000A\t0003\t0\t0\t100\t00000000\t0\t0\t0", netdev.name);
        }
        self.folder("proc/net")?;
        self.file("proc/net/route", table)
    }
}

fn uevent(function: &PciFunction) -> String {
    let mut lines = Vec::new();
    if let Some(driver) = &function.driver {
        lines.push(format!("DRIVER={driver}"));
    }
    if let Some(class) = function.class {
        lines.push(format!("PCI_CLASS={:X}", class.0));
    }
    if let Some((vendor, device)) = function.vendor.zip(function.device) {
        lines.push(format!("PCI_ID={vendor:04X}:{device:04X}"));
    }
    if let Some((vendor, device)) = function.subsystem {
        lines.push(format!("PCI_SUBSYS_ID={vendor:04X}:{device:04X}"));
    }
    lines.push(format!("PCI_SLOT_NAME={}", function.bdf));
    lines.join("\n")
}
