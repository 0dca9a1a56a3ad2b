//! What is drawn where: frames in frames, and the cells of devices in them.

use std::collections::BTreeMap;

use super::{CELL_WIDTH, CHARACTER, GAP};
use crate::bdf::{Bdf, RootBus};
use crate::model::{Drive, Gpu, Hca, Host, NumaId, PciFunction, PciRole, PortState};
use crate::words;

/// Which row a device is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CellKind {
    Drive,
    Nic,
    Gpu,
}

/// A device.
#[derive(Debug)]
pub(super) struct Cell {
    pub(super) kind: CellKind,
    /// Its place in the host's list of its kind.
    pub(super) place: usize,
    /// Name, address, rate.
    pub(super) lines: Vec<String>,
    /// A link below its maximum.
    pub(super) is_slow: bool,
    /// No port that carries traffic.
    pub(super) is_bad: bool,
    pub(super) x: f64,
    /// How far below the first band it lies.
    pub(super) below: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FrameKind {
    Numa,
    Root,
    Switch,
}

/// A NUMA node, a host bridge or a switch, with what is below it.
#[derive(Debug)]
pub(super) struct Frame {
    kind: FrameKind,
    pub(super) title: String,
    pub(super) note: String,
    pub(super) frames: Vec<Frame>,
    pub(super) cells: Vec<Cell>,
    pub(super) x: f64,
    pub(super) width: f64,
    /// How far below the first band it lies.
    pub(super) below: f64,
}

pub(super) fn text_width(text: &str) -> f64 {
    // A line of text is far shorter than where a float loses whole numbers.
    #[expect(clippy::cast_precision_loss, reason = "a count of characters")]
    let characters = text.chars().count() as f64;
    characters * CHARACTER
}

impl Frame {
    fn new(kind: FrameKind, title: String, note: String) -> Self {
        Self { kind, title, note, frames: Vec::new(), cells: Vec::new(), x: 0.0, width: 0.0, below: 0.0 }
    }

    /// Fill and stroke.
    pub(super) fn colours(&self) -> (&'static str, &'static str) {
        match self.kind {
            FrameKind::Numa => ("#fafafa", "#8c8c8c"),
            FrameKind::Root => ("#f1f3f7", "#a9b2c3"),
            FrameKind::Switch => ("#e6eaf2", "#8794ad"),
        }
    }

    /// Frames in one another, itself counted.
    pub(super) fn depth(&self) -> usize {
        1 + self.frames.iter().map(Self::depth).max().unwrap_or(0)
    }

    pub(super) fn has(&self, kind: CellKind) -> bool {
        self.cells.iter().any(|cell| cell.kind == kind) || self.frames.iter().any(|frame| frame.has(kind))
    }

    pub(super) fn find(&self, kind: CellKind, place: usize) -> Option<&Cell> {
        let own = self.cells.iter().find(|cell| cell.kind == kind && cell.place == place);
        own.or_else(|| self.frames.iter().find_map(|frame| frame.find(kind, place)))
    }

    /// Gives everything its place from `x` on. Returns the width.
    pub(super) fn place(&mut self, x: f64) -> f64 {
        self.x = x;
        let mut right = x + GAP;
        for frame in &mut self.frames {
            right += frame.place(right) + GAP;
        }
        let start = right;
        for kind in [CellKind::Drive, CellKind::Nic, CellKind::Gpu] {
            let mut at = start;
            for cell in self.cells.iter_mut().filter(|cell| cell.kind == kind) {
                cell.x = at;
                at += CELL_WIDTH + GAP;
                right = right.max(at);
            }
        }
        let title = (text_width(&self.title) * 1.1).max(text_width(&self.note)) + 16.0;
        let content = right - x;
        self.width = content.max(title);
        self.centre((self.width - content) / 2.0);
        self.width
    }

    /// Moves the whole down into another band.
    pub(super) fn lower(&mut self, by: f64) {
        self.below = by;
        self.cells.iter_mut().for_each(|cell| cell.below = by);
        self.frames.iter_mut().for_each(|frame| frame.lower(by));
    }

    /// Moves what is inside to the middle of a frame that its title made wider.
    fn centre(&mut self, by: f64) {
        if by <= 0.0 {
            return;
        }
        self.cells.iter_mut().for_each(|cell| cell.x += by);
        for frame in &mut self.frames {
            frame.x += by;
            frame.centre(by);
        }
    }
}

/// Outermost frames: NUMA nodes in order, then what has no known place.
pub(super) fn frames(host: &Host) -> Vec<Frame> {
    let mut roots: BTreeMap<(Option<NumaId>, Option<RootBus>), Branch> = BTreeMap::new();
    for (bdf, cell) in cells(host) {
        let function = bdf.and_then(|bdf| host.function(bdf));
        let root = function.and_then(|function| host.root_bus(function.bdf));
        let numa = match function {
            Some(function) => function.numa_id(),
            None => numa_without_tree(host, &cell),
        };
        let branch = roots.entry((numa, root)).or_default();
        let switches: Vec<Bdf> = match function {
            Some(function) => host.bridges_above(function.bdf).filter(|f| is_drawn(f)).map(|f| f.bdf).collect(),
            None => Vec::new(),
        };
        branch.insert(switches.iter().rev().copied(), cell);
    }
    let mut nodes: BTreeMap<(bool, Option<NumaId>), Frame> = BTreeMap::new();
    for ((numa, root), branch) in roots {
        let title = numa.map_or_else(|| "NUMA node unknown".to_owned(), |numa| format!("NUMA node {numa}"));
        let note = cpus(host, numa);
        let node = nodes.entry((numa.is_none(), numa)).or_insert_with(|| Frame::new(FrameKind::Numa, title, note));
        let (title, note) = match root {
            Some(root) if root.is_invented() => ("root complex".to_owned(), String::new()),
            Some(root) => (format!("host bridge {}", short_root(root)), String::new()),
            None => ("no place in the PCI tree".to_owned(), String::new()),
        };
        let mut frame = Frame::new(FrameKind::Root, title, note);
        branch.fill(host, &mut frame);
        node.frames.push(frame);
    }
    nodes.into_values().collect()
}

fn is_drawn(function: &PciFunction) -> bool {
    matches!(function.role, PciRole::SwitchUpstream | PciRole::Switch)
}

fn numa_without_tree(host: &Host, cell: &Cell) -> Option<NumaId> {
    match cell.kind {
        CellKind::Gpu => host.gpus.get(cell.place)?.numa,
        CellKind::Nic => host.hcas.get(cell.place)?.numa,
        CellKind::Drive => None,
    }
}

/// Longest list of CPUs that a title holds.
const CPU_CHARACTERS: usize = 28;

fn cpus(host: &Host, numa: Option<NumaId>) -> String {
    let node = host.numa_nodes.iter().find(|node| Some(node.id) == numa);
    let list = node.and_then(|node| node.cpus.clone()).filter(|list| !list.is_empty());
    list.filter(|list| list.len() <= CPU_CHARACTERS).map_or_else(String::new, |list| format!("CPUs {list}"))
}

/// Devices below a host bridge, by the switches above them.
#[derive(Default)]
struct Branch {
    switches: BTreeMap<Bdf, Branch>,
    cells: Vec<Cell>,
}

impl Branch {
    fn insert(&mut self, mut path: impl Iterator<Item = Bdf>, cell: Cell) {
        match path.next() {
            Some(switch) => self.switches.entry(switch).or_default().insert(path, cell),
            None => self.cells.push(cell),
        }
    }

    /// A switch with nothing but one switch below it is drawn as one frame with that.
    fn fill(self, host: &Host, frame: &mut Frame) {
        frame.cells = self.cells;
        for (bdf, mut branch) in self.switches {
            let gbps = host.function(bdf).and_then(|function| function.link.gbps());
            let mut note = gbps.map_or_else(String::new, |rate| format!("{} Gbit/s up", words::gbps(rate)));
            while branch.cells.is_empty() && branch.switches.len() == 1 {
                let Some((inner, below)) = branch.switches.pop_first() else { break };
                note = format!("› {} {note}", short(inner)).trim_end().to_owned();
                branch = below;
            }
            let title = format!("switch {}", short(bdf));
            let mut switch = Frame::new(FrameKind::Switch, title, note);
            branch.fill(host, &mut switch);
            frame.frames.push(switch);
        }
    }
}

/// An address without the domain that most hosts have only one of.
fn short(bdf: Bdf) -> String {
    let full = bdf.to_string();
    full.strip_prefix("0000:").map(str::to_owned).unwrap_or(full)
}

fn short_root(root: RootBus) -> String {
    let full = root.to_string();
    full.strip_prefix("pci").map(str::to_owned).unwrap_or(full)
}

fn cells(host: &Host) -> Vec<(Option<Bdf>, Cell)> {
    let gpus = host.gpus.iter().enumerate().map(|(place, gpu)| (gpu.bdf, gpu_cell(host, place, gpu)));
    let nics = host.hcas.iter().enumerate().map(|(place, hca)| (hca.bdf, nic_cell(host, place, hca)));
    let drives = host.drives.iter().enumerate().map(|(place, drive)| (drive.bdf, drive_cell(host, place, drive)));
    let mut cells: Vec<(Option<Bdf>, Cell)> = drives.chain(nics).chain(gpus).collect();
    cells.sort_by_key(|(bdf, _)| (bdf.is_none(), *bdf));
    cells
}

fn cell(host: &Host, kind: CellKind, place: usize, name: &str, bdf: Option<Bdf>) -> Cell {
    let address = bdf.map_or_else(|| "no address".to_owned(), short);
    let is_slow = bdf.and_then(|bdf| host.function(bdf)).is_some_and(|function| function.link.is_below_max());
    Cell { kind, place, lines: vec![name.to_owned(), address], is_slow, is_bad: false, x: 0.0, below: 0.0 }
}

fn link(host: &Host, bdf: Option<Bdf>) -> Option<String> {
    let link = host.function(bdf?)?.link;
    let rate = link.current.or(link.max)?;
    Some(format!("{rate} · {} Gbit/s", words::gbps(rate.gbps())))
}

fn gpu_cell(host: &Host, place: usize, gpu: &Gpu) -> Cell {
    let mut cell = cell(host, CellKind::Gpu, place, &gpu.name, gpu.bdf);
    cell.lines.extend(link(host, gpu.bdf));
    cell
}

fn nic_cell(host: &Host, place: usize, hca: &Hca) -> Cell {
    let mut cell = cell(host, CellKind::Nic, place, &hca.name, hca.bdf);
    let rate = hca.rate_gbps().map(|gbps| format!("{gbps} Gbit/s"));
    let works = |state: PortState| matches!(state, PortState::Active | PortState::ActiveDefer | PortState::Unknown);
    cell.is_bad = !hca.ports.is_empty() && !hca.ports.iter().any(|port| works(port.state));
    let state = hca.ports.first().filter(|_| cell.is_bad).map(|port| port.state.to_string());
    let words: Vec<String> = rate.into_iter().chain(state).collect();
    if !words.is_empty() {
        cell.lines.push(words.join(" · "));
    }
    cell
}

fn drive_cell(host: &Host, place: usize, drive: &Drive) -> Cell {
    let mut cell = cell(host, CellKind::Drive, place, &drive.name, drive.bdf);
    if let (None, Some(netdev)) = (drive.bdf, &drive.netdev) {
        cell.lines = vec![drive.name.clone(), format!("over {netdev}")];
    }
    if let Some(transport) = drive.transport.as_ref().filter(|transport| *transport != "pcie") {
        cell.lines.push(transport.clone());
    } else {
        cell.lines.extend(link(host, drive.bdf));
    }
    cell
}
