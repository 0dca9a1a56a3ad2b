//! How NCCL chooses NICs, written from its published sources and apart from everything that gdrd-topology concludes:
//! a graph of CPUs, switches, GPUs and NICs, the paths in it, and the choice by paths.
//!
//! The rules and where they stand in NVIDIA/nccl, `src/graph/`: the bandwidth of a PCI link by speed and width
//! (`topo.cc`, ncclTopoAddPci), CPUs and what joins them (`topo.cc`, ncclTopoGetInterCpuBw; the figures in `topo.h`),
//! switches of Broadcom made one (`topo.cc`, ncclTopoFlattenBcmSwitches), paths and their types (`paths.cc`,
//! ncclTopoSetPaths), the local NICs of a GPU and its share of them (`topo.cc`, ncclTopoGetLocal and
//! ncclTopoGetLocalNet). NVLinks are left out: a NIC reached through another GPU (PXN) is no pair of this one.

use std::collections::BTreeMap;

/// Type of a path, nearest first. NCCL has no NODE.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    Loc,
    Pix,
    Pxb,
    Phb,
    Sys,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Node {
    Cpu,
    /// A switch, with vendor, device, subsystem vendor and device as one number.
    Switch(u64),
    /// By its number in NVML.
    Gpu(usize),
    Nic,
    /// A port of a NIC, by name.
    Net(String),
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum LinkKind {
    Pci,
    Sys,
    Net,
}

#[derive(Clone, Copy, Debug)]
struct Link {
    to: usize,
    kind: LinkKind,
    /// GB/s.
    bw: f64,
}

/// A host as NCCL sees it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Graph {
    nodes: Vec<Node>,
    links: Vec<Vec<Link>>,
}

/// A path to a NIC.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Path {
    pub(crate) hops: usize,
    /// GB/s.
    pub(crate) bw: f64,
    pub(crate) kind: Kind,
}

/// GB/s of a PCI link: 100 Mbit/s a lane by generation, and the Gen 3 x16 that stands for what is not told.
pub(crate) fn pci_bw(speed: &str, width: u32) -> f64 {
    let generations = [("2.5", 15), ("5", 30), ("8", 60), ("16", 120), ("32", 240), ("64", 480)];
    let number = speed.split_whitespace().next().unwrap_or_default().trim_end_matches(".0");
    let lane = generations.iter().find(|(known, _)| *known == number).map_or(60, |(_, lane)| *lane);
    f64::from(if width == 0 { 16 } else { width }) * f64::from(lane) / 80.0
}

/// GB/s between two CPUs, by what kind they are.
pub(crate) fn cpu_bw(arch: &str, vendor: &str, family: u32, model: u32) -> f64 {
    match (arch, vendor) {
        ("ppc64", _) => 32.0,
        ("arm64", _) => 6.0,
        ("x86_64", "GenuineIntel") => match (family, model) {
            (6, 0xcf..) => 40.0,
            (6, 0x8f..) => 22.0,
            (6, 0x55..) => 10.0,
            _ => 6.0,
        },
        // The family comes as CPUID's sum of base and extended one, or as NCCL dumps it.
        ("x86_64", "AuthenticAMD") if (0x1a..0x80).contains(&family) => 32.0,
        ("x86_64", "AuthenticAMD") if family == 0x19 => 24.0,
        ("x86_64", "AuthenticAMD") => 16.0,
        _ => 5000.0,
    }
}

impl Graph {
    pub(crate) fn add(&mut self, node: Node) -> usize {
        self.nodes.push(node);
        self.links.push(Vec::new());
        self.nodes.len() - 1
    }

    fn join(&mut self, a: usize, b: usize, kind: LinkKind, bw: f64) {
        self.links[a].push(Link { to: b, kind, bw });
        self.links[b].push(Link { to: a, kind, bw });
    }

    pub(crate) fn pci(&mut self, device: usize, above: usize, bw: f64) {
        self.join(device, above, LinkKind::Pci, bw);
    }

    pub(crate) fn net(&mut self, net: usize, nic: usize, bw: f64) {
        self.join(net, nic, LinkKind::Net, bw);
    }

    /// Joins all CPUs, each way as fast as the CPU it leaves.
    pub(crate) fn join_cpus(&mut self, bw: f64) {
        let cpus: Vec<usize> = (0..self.nodes.len()).filter(|id| self.nodes[*id] == Node::Cpu).collect();
        for (place, a) in cpus.iter().enumerate() {
            cpus[place + 1..].iter().for_each(|b| self.join(*a, *b, LinkKind::Sys, bw));
        }
    }

    /// PEX switches show as two levels of one device; the lower level is taken away.
    pub(crate) fn flatten_broadcom(&mut self) {
        let generation = |ids: u64, level: u64| match ids & !0xfff {
            0x1000_c010_1000_a000 => Some(4),
            found if found == (0x1000_c030_1000_0000 | (level * 0x1000)) => Some(5),
            _ => None,
        };
        let of = |node: &Node, level: u64| if let Node::Switch(ids) = node { generation(*ids, level) } else { None };
        // What was merged once is not merged again, as upper or as lower level.
        let mut done = vec![false; self.nodes.len()];
        for upper in 0..self.nodes.len() {
            let Some(wanted) = of(&self.nodes[upper], 0).filter(|_| !done[upper]) else { continue };
            let is_lower = |link: &Link| !done[link.to] && of(&self.nodes[link.to], 1) == Some(wanted);
            let lower: Vec<usize> =
                self.links[upper].iter().filter(|link| is_lower(link)).map(|link| link.to).collect();
            done[upper] = true;
            for sub in lower {
                done[sub] = true;
                for link in std::mem::take(&mut self.links[sub]).into_iter().filter(|link| link.to != upper) {
                    self.links[upper].push(link);
                    self.links[link.to].iter_mut().filter(|back| back.to == sub).for_each(|back| back.to = upper);
                }
                self.links[upper].retain(|link| link.to != sub);
            }
        }
    }

    /// Paths of every node to one, by breadth: a later path counts only if it is shorter than the known one and wider.
    fn paths_to(&self, base: usize) -> Vec<Option<Path>> {
        let mut paths: Vec<Option<Path>> = vec![None; self.nodes.len()];
        paths[base] = Some(Path { hops: 0, bw: 5000.0, kind: Kind::Loc });
        let mut level = vec![base];
        while !level.is_empty() {
            let mut next = Vec::new();
            for at in level {
                let Some(path) = paths[at] else { continue };
                if at != base && matches!(self.nodes[at], Node::Gpu(_)) {
                    continue;
                }
                for link in &self.links[at] {
                    let bw = path.bw.min(link.bw);
                    let is_better = paths[link.to].is_none_or(|known| known.hops > path.hops && known.bw < bw);
                    if is_better {
                        let kind = path.kind.max(self.kind(at, link));
                        paths[link.to] = Some(Path { hops: path.hops + 1, bw, kind });
                        if !next.contains(&link.to) {
                            next.push(link.to);
                        }
                    }
                }
            }
            level = next;
        }
        paths
    }

    fn kind(&self, from: usize, link: &Link) -> Kind {
        let (near, far) = (&self.nodes[from], &self.nodes[link.to]);
        match link.kind {
            LinkKind::Net => Kind::Loc,
            LinkKind::Sys => Kind::Sys,
            LinkKind::Pci if *near == Node::Cpu || *far == Node::Cpu => Kind::Phb,
            LinkKind::Pci if matches!((near, far), (Node::Switch(_), Node::Switch(_))) => Kind::Pxb,
            LinkKind::Pci => Kind::Pix,
        }
    }

    /// The paths between all GPUs and all ports.
    pub(crate) fn table(&self) -> Table {
        let nets = self.nodes.iter().enumerate().filter_map(|(id, node)| match node {
            Node::Net(name) => Some((id, name.clone())),
            _ => None,
        });
        let nets: Vec<(usize, String)> = nets.collect();
        let paths: Vec<Vec<Option<Path>>> = nets.iter().map(|(id, _)| self.paths_to(*id)).collect();
        let gpus = self.nodes.iter().enumerate().filter_map(|(id, node)| match node {
            Node::Gpu(dev) => Some((*dev, paths.iter().map(|paths| paths[id]).collect())),
            _ => None,
        });
        let wire = |id: usize| self.links[id].iter().map(|link| link.bw).fold(0.0, f64::max);
        let port_bw = nets.iter().map(|(id, _)| wire(*id)).collect();
        Table { gpus: gpus.collect(), port_bw, nets: nets.into_iter().map(|(_, name)| name).collect() }
    }
}

/// Paths of GPUs, by number, to ports, by place.
#[derive(Clone, Debug)]
pub(crate) struct Table {
    pub(crate) nets: Vec<String>,
    /// GB/s of each port.
    pub(crate) port_bw: Vec<f64>,
    pub(crate) gpus: BTreeMap<usize, Vec<Option<Path>>>,
}

/// The best by bandwidth, then by type.
fn local(paths: impl Iterator<Item = Option<Path>>) -> Vec<usize> {
    let paths: Vec<(usize, Path)> = paths.enumerate().filter_map(|(place, path)| Some((place, path?))).collect();
    let widest = paths.iter().map(|(_, path)| path.bw).fold(0.0, f64::max);
    let nearest = paths.iter().filter(|(_, path)| path.bw >= widest).map(|(_, path)| path.kind).min();
    paths
        .into_iter()
        .filter(|(_, path)| path.bw >= widest && Some(path.kind) == nearest)
        .map(|(place, _)| place)
        .collect()
}

fn mirror(value: usize, power: usize) -> usize {
    let bits = power.trailing_zeros();
    (0..bits).filter(|bit| value >> bit & 1 == 1).map(|bit| power >> (bit + 1)).sum()
}

impl Table {
    /// Ports that a GPU uses over all channels, in order of channels.
    pub(crate) fn choice(&self, gpu: usize) -> Vec<String> {
        let nets = local(self.gpus[&gpu].iter().copied());
        let Some(first) = nets.first() else { return Vec::new() };
        let sharing = local(self.gpus.values().map(|paths| paths[*first])).len();
        let share = nets.len().div_ceil(sharing);
        // Before 2.28 the number itself, from then on its remainder; what lies beyond the mirrored bits falls away in both.
        let start = if nets.len().is_power_of_two() { mirror(gpu, nets.len()) } else { gpu % sharing };
        (0..share).map(|channel| self.nets[nets[(start + channel) % nets.len()]].clone()).collect()
    }

    pub(crate) fn port_bw(&self, net: &str) -> f64 {
        self.nets.iter().position(|known| known == net).map_or(0.0, |place| self.port_bw[place])
    }

    /// GPUs that a port counts as its own.
    pub(crate) fn gpus_of(&self, net: &str) -> Vec<usize> {
        let place = self.nets.iter().position(|known| known == net).expect("a port of the host");
        let own = local(self.gpus.values().map(|paths| paths[place]));
        self.gpus.keys().copied().enumerate().filter(|(at, _)| own.contains(at)).map(|(_, gpu)| gpu).collect()
    }

    pub(crate) fn path(&self, gpu: usize, net: &str) -> Option<Path> {
        let place = self.nets.iter().position(|known| known == net)?;
        self.gpus[&gpu][place]
    }
}
