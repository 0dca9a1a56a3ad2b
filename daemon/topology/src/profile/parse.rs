//! Text to facts, with the line named in every error.

use std::collections::BTreeMap;
use std::net::Ipv6Addr;

use crate::acs::Acs;
use crate::bdf::{Bdf, RootBus};
use crate::level::Level;
use crate::link::{Link, LinkRate, LinkSpeed, LinkWidth};
use crate::model::{
    CpuKind, Drive, Gid, GidKind, GivenLevel, HcaOrigin, Kernel, LinkLayer, NamedGpu, Netdev, NumaId, NumaNode,
    NvLinkRemote, PciClass, PciFunction, Port, PortState, RawHca, RawHost, RawNvLink, Upstream,
};
use crate::profile::gpu;
use crate::profile::line::Line;
use crate::profile::{MAGIC, MAX_PROFILE_BYTES, VERSION};
use crate::source::{SourceKind, Sourced};

use crate::profile::line::BadLine;

const SOURCE: SourceKind = SourceKind::Profile;

/// Reads a profile.
///
/// # Errors
/// The first line that is wrong, and why.
pub fn parse(text: &str) -> Result<RawHost, BadLine> {
    if text.len() > MAX_PROFILE_BYTES {
        let message = format!("the profile has more than {MAX_PROFILE_BYTES} bytes");
        return Err(BadLine { line: 1, message });
    }
    let mut reader = Reader::new();
    for (place, text) in text.lines().enumerate() {
        if let Some(line) = Line::split(text) {
            reader.line(line).map_err(|message| BadLine { line: place + 1, message })?;
        }
    }
    if !reader.has_magic {
        let message = format!("a host profile begins with `{MAGIC} {VERSION}`");
        return Err(BadLine { line: 1, message });
    }
    Ok(reader.finish())
}

struct Reader {
    has_magic: bool,
    raw: RawHost,
    hcas: Vec<RawHca>,
    hca_place: BTreeMap<String, usize>,
    has_rdma_class: bool,
    root_numa: BTreeMap<RootBus, NumaId>,
}

impl Reader {
    fn new() -> Self {
        Self {
            has_magic: false,
            raw: RawHost::new(SOURCE),
            hcas: Vec::new(),
            hca_place: BTreeMap::new(),
            has_rdma_class: true,
            root_numa: BTreeMap::new(),
        }
    }

    fn line(&mut self, mut line: Line<'_>) -> Result<(), String> {
        if line.keyword() == MAGIC {
            let version: u32 = line.parsed("format version")?;
            if version != VERSION {
                return Err(format!("format version {version} is not known, only {VERSION}"));
            }
            self.has_magic = true;
            return line.finish();
        }
        if !self.has_magic {
            return Err(format!("a host profile begins with `{MAGIC} {VERSION}`"));
        }
        match line.keyword() {
            "name" => self.raw.name = Some(line.name("a name")?),
            "about" => drop(line.rest()),
            "numa" => self.numa(&mut line)?,
            "root" => self.root(&mut line)?,
            "pci" => self.pci(&mut line)?,
            "gpu" => self.gpu(&mut line)?,
            "fabric" => gpu::fabric(&mut line, &mut self.raw.gpus)?,
            "mig" => gpu::mig(&mut line, &mut self.raw.gpus)?,
            "slice" => gpu::slice(&mut line, &mut self.raw.gpus)?,
            "gpu-name" => self.gpu_name(&mut line)?,
            "level" => self.level(&mut line)?,
            "hca" => self.hca(&mut line)?,
            "port" => self.port(&mut line)?,
            "gid" => self.gid(&mut line)?,
            "no-class-infiniband" => self.has_rdma_class = false,
            "cpu" => {
                self.raw.cpu = Some(CpuKind {
                    arch: line.name("an architecture")?,
                    vendor: line.take_name("vendor")?,
                    family: line.take_parsed("family")?,
                    model: line.take_parsed("model")?,
                });
            }
            "kernel" => {
                let release = line.name("a release")?;
                let iommu_passthrough = line.take("iommu_passthrough").map(yes_or_no).transpose()?;
                self.raw.kernel = Some(Kernel { release, iommu_passthrough });
            }
            "module" => self.raw.peer_memory_modules.push(line.name("a module")?),
            "net" => self.net(&mut line)?,
            "drive" => self.drive(&mut line)?,
            "nvlink" => self.nvlink(&mut line)?,
            other => return Err(format!("`{other}` is no keyword of a host profile")),
        }
        line.finish()
    }

    fn numa(&mut self, line: &mut Line<'_>) -> Result<(), String> {
        let id = NumaId(line.parsed("NUMA node number")?);
        if self.raw.numa_nodes.iter().any(|node| node.id == id) {
            return Err(format!("NUMA node {id} is described twice"));
        }
        let distances = line.take("distances").unwrap_or_default();
        let distances = distances
            .split(',')
            .filter(|word| !word.is_empty())
            .map(|word| word.parse().map_err(|_| format!("`{word}` is no NUMA distance")))
            .collect::<Result<_, String>>()?;
        let cpus = line.take_name("cpus")?;
        self.raw.numa_nodes.push(NumaNode {
            id,
            has_cpus: cpus.as_ref().is_none_or(|cpus| !cpus.is_empty()),
            cpus,
            distances,
        });
        Ok(())
    }

    fn root(&mut self, line: &mut Line<'_>) -> Result<(), String> {
        let root: RootBus = line.parsed("root bus (pciDDDD:BB)")?;
        if let Some(numa) = numa(line)?.flatten() {
            self.root_numa.insert(root, numa);
        }
        Ok(())
    }

    fn pci(&mut self, line: &mut Line<'_>) -> Result<(), String> {
        let bdf: Bdf = line.parsed("PCI address (DDDD:BB:DD.F)")?;
        let mut function = PciFunction::new(bdf, SOURCE);
        (function.vendor, function.device) = match line.word("ids (VVVV:DDDD or `-`)")? {
            "-" => (None, None),
            word => known_ids(word)?,
        };
        function.class = match line.word("class (CCCCCC or `-`)")? {
            "-" => None,
            word => Some(PciClass(hex(word, 6)?)),
        };
        function.upstream = upstream(line.word("parent (bridge, root bus or `?`)")?)?;
        function.link = link(line.word("link (GT/s x lanes, or `-`)")?)?;
        function.numa = numa(line)?.flatten().map(|numa| Sourced::new(numa, SOURCE));
        function.driver = line.take_name("driver")?;
        function.subsystem = line.take("sub").map(ids).transpose()?;
        function.physical_function = line.take_parsed("physfn")?;
        function.acs = line.take("acs").map(acs).transpose()?;
        if line.flag("whole-switch") {
            // Only NCCL lists switches so; assembly knows them by it.
            function.source = SourceKind::NcclXml;
        }
        self.raw.functions.push(function);
        Ok(())
    }

    fn gpu(&mut self, line: &mut Line<'_>) -> Result<(), String> {
        let (facts, is_stated) = gpu::gpu(line)?;
        if is_stated {
            self.raw.stated_gpus.push(facts.bdf);
        }
        self.raw.gpus.push(facts);
        Ok(())
    }

    fn gpu_name(&mut self, line: &mut Line<'_>) -> Result<(), String> {
        let gpu = NamedGpu { name: line.name("a name")?, numa: numa(line)?.flatten() };
        self.raw.named_gpus.push(gpu);
        Ok(())
    }

    fn level(&mut self, line: &mut Line<'_>) -> Result<(), String> {
        let (a, b) = (line.name("a device")?, line.name("another device")?);
        let word = line.word("a P2P level")?;
        let level = Level::parse(word).ok_or_else(|| format!("`{word}` is no P2P level"))?;
        self.raw.given_levels.push(GivenLevel { a, b, level, source: SOURCE });
        Ok(())
    }

    fn hca(&mut self, line: &mut Line<'_>) -> Result<(), String> {
        let name = line.name("a name")?;
        let hca = RawHca {
            name: name.clone(),
            bdf: line.bdf_or_none()?,
            data_direct: line.take_parsed("data_direct")?,
            sub_function: line.take_name("sf")?,
            parent_netdev: line.take_name("parent")?,
            node_guid: line.take("node_guid").map(guid).transpose()?,
            sys_image_guid: line.take("sys_image_guid").map(guid).transpose()?,
            has_uverbs: line.flag("no-uverbs").then_some(false),
            origin: line.take("kind").map(origin).transpose()?,
            numa: numa(line)?.flatten(),
            ..RawHca::default()
        };
        if self.hca_place.insert(name, self.hcas.len()).is_some() {
            return Err(format!("hca `{}` is described twice", hca.name));
        }
        self.hcas.push(hca);
        Ok(())
    }

    fn port(&mut self, line: &mut Line<'_>) -> Result<(), String> {
        let name = line.name("an hca")?;
        let port = Port {
            port_num: line.parsed("port number (1-255)")?,
            state: PortState::parse(line.word("a state")?),
            link_layer: LinkLayer::parse(line.word("a link layer")?),
            rate_gbps: rate(line.word("a rate in Gbit/s or `-`")?)?,
            gids: Vec::new(),
        };
        let hca = self.hca_named(&name)?;
        if hca.ports.iter().any(|known| known.port_num == port.port_num) || port.port_num == 0 {
            return Err(format!("port {} of `{name}` is 0 or described twice", port.port_num));
        }
        hca.ports.push(port);
        Ok(())
    }

    fn gid(&mut self, line: &mut Line<'_>) -> Result<(), String> {
        let name = line.name("an hca")?;
        let port_num: u8 = line.parsed("port number")?;
        let gid_index = line.parsed("GID index")?;
        let gid: Ipv6Addr = line.parsed("GID")?;
        let kind = match line.take("type") {
            None => None,
            Some("v1") => Some(GidKind::IbOrRoceV1),
            Some("v2") => Some(GidKind::RoceV2),
            Some(other) => return Err(format!("type=`{other}`: want v1 or v2")),
        };
        let netdev = line.take_name("netdev")?;
        let hca = self.hca_named(&name)?;
        let port = hca.ports.iter_mut().find(|port| port.port_num == port_num);
        let port = port.ok_or_else(|| format!("`{name}` has no port {port_num} so far"))?;
        port.gids.push(Gid { gid_index, gid, kind, netdev });
        Ok(())
    }

    fn hca_named(&mut self, name: &str) -> Result<&mut RawHca, String> {
        let place = self.hca_place.get(name).copied();
        place.and_then(|place| self.hcas.get_mut(place)).ok_or_else(|| format!("no hca `{name}` so far"))
    }

    fn net(&mut self, line: &mut Line<'_>) -> Result<(), String> {
        let netdev = Netdev {
            name: line.name("a name")?,
            bdf: line.bdf_or_none()?,
            master: line.take_name("master")?,
            is_bond: line.flag("bond"),
            has_default_route: line.flag("default-route"),
            source: SOURCE,
        };
        self.raw.netdevs.push(netdev);
        Ok(())
    }

    fn drive(&mut self, line: &mut Line<'_>) -> Result<(), String> {
        let drive = Drive {
            name: line.name("a name")?,
            bdf: line.bdf_or_none()?,
            numa: None,
            transport: line.take_name("transport")?,
            netdev: line.take_name("netdev")?,
            source: SOURCE,
        };
        self.raw.drives.push(drive);
        Ok(())
    }

    fn nvlink(&mut self, line: &mut Line<'_>) -> Result<(), String> {
        let gpu = line.parsed("PCI address of a GPU")?;
        let remote = match line.word("the far GPU, `switch` or `cpu`")? {
            "switch" => NvLinkRemote::Switch,
            "cpu" => NvLinkRemote::Cpu,
            word => NvLinkRemote::Gpu(word.parse().map_err(|e: crate::bdf::ParseBdfError| e.to_string())?),
        };
        let links = line.parsed("number of links (0-255)")?;
        let link_gbps = line.take("gbps").map(rate).transpose()?.flatten();
        self.raw.nvlinks.push(RawNvLink { gpu, remote, links, link_gbps });
        Ok(())
    }

    fn finish(mut self) -> RawHost {
        for function in &mut self.raw.functions {
            if let (None, Upstream::Root(root)) = (&function.numa, function.upstream) {
                let numa = self.root_numa.get(&root);
                function.numa = numa.map(|numa| Sourced::new(*numa, SOURCE));
            }
        }
        self.raw.hcas = self.has_rdma_class.then_some(self.hcas);
        self.raw
    }
}

fn yes_or_no(word: &str) -> Result<bool, String> {
    match word {
        "yes" => Ok(true),
        "no" => Ok(false),
        other => Err(format!("`{other}`: want yes or no")),
    }
}

fn acs(word: &str) -> Result<Acs, String> {
    Acs::parse(word)
        .ok_or_else(|| format!("acs=`{word}`: want none, off, or names as lspci has them, as in ReqRedir,CmpltRedir"))
}

fn origin(word: &str) -> Result<HcaOrigin, String> {
    Ok(match word {
        "hardware" => HcaOrigin::Hardware,
        "assumed" => HcaOrigin::Assumed,
        "socket" => HcaOrigin::Socket,
        other => return Err(format!("kind=`{other}`: want hardware, assumed or socket")),
    })
}

/// `numa=N`, or `numa=-` for unknown; `None` if the key is absent.
fn numa(line: &mut Line<'_>) -> Result<Option<Option<NumaId>>, String> {
    Ok(match line.take("numa") {
        None => None,
        Some("-" | "-1") => Some(None),
        Some(word) => {
            let id = word.parse().map_err(|_| format!("numa=`{word}`: no NUMA node number"))?;
            Some(Some(NumaId(id)))
        }
    })
}

fn hex(word: &str, digits: usize) -> Result<u32, String> {
    let is_hex = word.len() == digits && word.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_hex
        .then(|| u32::from_str_radix(word, 16).ok())
        .flatten()
        .ok_or_else(|| format!("`{word}` is not {digits} hexadecimal digits"))
}

fn ids(word: &str) -> Result<(u16, u16), String> {
    let (vendor, device) = known_ids(word)?;
    vendor.zip(device).ok_or_else(|| format!("`{word}` is no vendor:device pair"))
}

/// As [`ids`], with `-` for the one that is not known.
fn known_ids(word: &str) -> Result<(Option<u16>, Option<u16>), String> {
    let (vendor, device) = word.split_once(':').ok_or_else(|| format!("`{word}` is no vendor:device pair"))?;
    let id = |text| match text {
        "-" => Ok(None),
        text => hex(text, 4).and_then(|id| u16::try_from(id).map(Some).map_err(|e| e.to_string())),
    };
    Ok((id(vendor)?, id(device)?))
}

fn upstream(word: &str) -> Result<Upstream, String> {
    if word == "?" {
        return Ok(Upstream::Unknown);
    }
    let root = word.parse().map(Upstream::Root);
    root.or_else(|_| word.parse().map(Upstream::Bridge))
        .map_err(|_| format!("`{word}` is no parent: want a bridge's address, pciDDDD:BB or `?`"))
}

/// `16x16` for current and maximum alike, `16x8/16x16` where they differ, `-` where unknown.
fn link(word: &str) -> Result<Link, String> {
    let (current, max) = word.split_once('/').unwrap_or((word, word));
    Ok(Link { current: link_rate(current)?, max: link_rate(max)? })
}

fn link_rate(word: &str) -> Result<Option<LinkRate>, String> {
    if word == "-" {
        return Ok(None);
    }
    let rate = word.split_once('x').and_then(|(speed, lanes)| {
        Some(LinkRate { speed: LinkSpeed::parse(speed)?, width: LinkWidth::from_lanes(lanes.parse().ok()?)? })
    });
    rate.map(Some).ok_or_else(|| format!("`{word}` is no PCIe link such as 16x8 (GT/s x lanes)"))
}

/// Gbit/s, `-` where unknown.
fn rate(word: &str) -> Result<Option<f64>, String> {
    if word == "-" {
        return Ok(None);
    }
    let rate: Option<f64> = word.parse().ok();
    rate.filter(|gbps| gbps.is_finite() && *gbps > 0.0)
        .map(Some)
        .ok_or_else(|| format!("`{word}` is no rate in Gbit/s"))
}

/// GUID as sysfs prints it: four groups of four digits.
fn guid(word: &str) -> Result<u64, String> {
    crate::guid::parse(word).ok_or_else(|| format!("`{word}` is no GUID (xxxx:xxxx:xxxx:xxxx)"))
}
