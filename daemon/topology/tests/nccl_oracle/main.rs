//! Our pairs against NCCL's own choice, on every captured machine: never farther, never narrower, never fewer NICs.
//!
//! The oracle (`rules`) shares no code with gdrd-topology's levels and pairing: of a captured tree it takes functions and what is
//! above each, of texts their own words. It is first held against what NCCL
//! itself logged in public threads (`logged`), then our pairs are held against it (here).
#![allow(
    clippy::panic,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "helpers of tests, which clippy does not know as such"
)]

#[path = "../common/mod.rs"]
mod common;
mod hosts;
mod logged;
mod rules;

use std::cmp::Ordering;
use std::collections::BTreeMap;

use common::tables::{Form, print, table};
use common::{case_text, sections};
use gdrd_topology::assemble::{GpuIds, ReadOptions};
use gdrd_topology::model::Snapshot;
use gdrd_topology::plan::{PlanOptions, plan};
use gdrd_topology::{profile, read_root, read_text, sysfs};
use rules::{Kind, Table};

/// What a GPU gets while all GPUs use theirs: the type of the farthest of its paths; GB/s of the narrowest, each as wide
/// as the path or its share of the port; and how many NICs, one that is shared being so much less.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Lot {
    kind: Kind,
    bw: f64,
    nics: f64,
}

/// Ports of each GPU, and GPUs of each port.
struct Shares {
    nets: BTreeMap<usize, Vec<String>>,
    users: BTreeMap<String, usize>,
}

impl Shares {
    fn of(nets: impl Iterator<Item = (usize, Vec<String>)>) -> Self {
        let nets: BTreeMap<usize, Vec<String>> = nets.collect();
        let mut users: BTreeMap<String, usize> = BTreeMap::new();
        nets.values().flatten().for_each(|net| *users.entry(net.clone()).or_default() += 1);
        Self { nets, users }
    }

    fn lot(&self, table: &Table, gpu: usize) -> Option<Lot> {
        let path = |net: &String| {
            let path = table.path(gpu, net).unwrap_or_else(|| panic!("no path of GPU {gpu} to {net}"));
            let users = f64::from(u32::try_from(self.users[net]).unwrap());
            (path.kind, path.bw.min(table.port_bw(net) / users), 1.0 / users)
        };
        let paths: Vec<(Kind, f64, f64)> = self.nets[&gpu].iter().map(path).collect();
        let bw = paths.iter().map(|(_, bw, _)| *bw).reduce(f64::min)?;
        Some(Lot {
            kind: paths.iter().map(|(kind, ..)| *kind).max()?,
            bw,
            nics: paths.iter().map(|(.., nics)| nics).sum(),
        })
    }
}

impl Lot {
    /// Level first, then bandwidth, then the number of NICs.
    fn is_worse_than(self, other: Self) -> bool {
        const EQUAL: f64 = 0.01;
        let more =
            |own: f64, other: f64| if (own - other).abs() < EQUAL { Ordering::Equal } else { other.total_cmp(&own) };
        self.kind.cmp(&other.kind).then(more(self.bw, other.bw)).then(more(self.nics, other.nics)).is_gt()
    }
}

/// GPUs whose lot is worse than NCCL's, ours against theirs. `our` gives the ports we assign to a GPU.
fn worse(table: &Table, our: impl Fn(usize) -> Vec<String>) -> Vec<String> {
    // Of parts of a matrix nothing is known of some GPUs.
    let gpus = || table.gpus.iter().filter(|(_, paths)| paths.iter().any(Option::is_some)).map(|(gpu, _)| *gpu);
    let ours = Shares::of(gpus().map(|gpu| (gpu, our(gpu))));
    let theirs = Shares::of(gpus().map(|gpu| (gpu, table.choice(gpu))));
    let is_worse = |gpu: &usize| match (ours.lot(table, *gpu), theirs.lot(table, *gpu)) {
        (Some(own), Some(other)) => own.is_worse_than(other),
        (own, other) => own.is_none() && other.is_some(),
    };
    let told = |gpu: usize| {
        let one = |shares: &Shares| {
            let lot = shares.lot(table, gpu).map(|lot| format!("{:?} at {}, {}: ", lot.kind, lot.bw, lot.nics));
            format!("{}{}", lot.unwrap_or_default(), shares.nets[&gpu].join(" "))
        };
        format!("GPU{gpu}: {} against {}", one(&ours), one(&theirs))
    };
    gpus().filter(is_worse).map(told).collect()
}

fn assigned(snapshot: &Snapshot) -> BTreeMap<String, Vec<String>> {
    let plan = plan(snapshot, &PlanOptions::default());
    let by_name = |gpu: gdrd_topology::plan::contract::GpuPlan| {
        let address = gpu.bdf.map_or_else(|| gpu.name.clone(), |bdf| bdf.to_string());
        (address, gpu.assigned)
    };
    plan.gpus.into_iter().map(by_name).collect()
}

/// Cases in which our lot is worse, and why: of which GPUs, and ours against theirs. Ours is as near and as wide, of fewer NICs.
const EXCUSED: [Excused; 2] = [
    Excused { case: "lspci-v100-vfs", gpus: &V100_VFS, why: VIRTUAL_FUNCTIONS },
    Excused { case: "r760xa-l40s-1gpu-10nic-vfs", gpus: &R760XA, why: VIRTUAL_FUNCTIONS },
];
struct Excused {
    case: &'static str,
    gpus: &'static [&'static str],
    why: &'static str,
}
/// Three GPUs for two physical functions, so the first two share one; to NCCL six virtual functions are as good.
const V100_VFS: [&str; 2] = [
    "GPU0: Pix at 6.25, 0.5: mlx5_0 against Pix at 6.25, 3: mlx5_0 mlx5_2 mlx5_3 mlx5_4",
    "GPU1: Pix at 6.25, 0.5: mlx5_0 against Pix at 6.25, 3: mlx5_1 mlx5_5 mlx5_6 mlx5_7",
];
const R760XA: [&str; 1] = ["GPU0: Phb at 1, 2: mlx5_0 mlx5_1 against Phb at 1, 10: \
    mlx5_0 mlx5_1 mlx5_2 mlx5_3 mlx5_4 mlx5_5 mlx5_6 mlx5_7 mlx5_8 mlx5_9"];
const VIRTUAL_FUNCTIONS: &str = "NCCL takes virtual functions beside their physical one for NICs of their own, though they share \
                                 its wire (NVIDIA/nccl#687, #748): we leave them out";

fn assert_none_is_worse(case: &str, table: &Table, our: impl Fn(usize) -> Vec<String>) {
    let found = worse(table, &our);
    let excused = EXCUSED.iter().find(|excused| excused.case == case);
    let (known, why) = excused.map_or((&[][..], "nothing excuses it"), |excused| (excused.gpus, excused.why));
    assert_eq!(found, known, "{case}: {why}");
}

#[test]
fn on_every_host_known_by_ncclxml_our_pairs_are_no_worse() {
    let mut compared = 0;
    for (name, _) in sections(&case_text("nccl-xml.answers")) {
        let text = case_text(&format!("nccl-xml/{name}.xml"));
        let (graph, gpus) = hosts::of_xml(&text);
        let table = graph.table();
        let ours = assigned(&read_text(&text, name.as_ref(), &ReadOptions::default()).unwrap());
        if table.nets.is_empty() {
            continue;
        }
        assert_none_is_worse(name, &table, |gpu| ours.get(&gpus[&gpu]).cloned().unwrap_or_default());
        compared += table.gpus.len();
    }
    assert_eq!(compared, 164, "GPUs compared");
}

#[test]
fn on_every_host_known_by_its_tree_our_pairs_are_no_worse() {
    let folder = format!("{}/../../tests/fixtures/hosts", env!("CARGO_MANIFEST_DIR"));
    let mut names: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    names.sort();
    let mut compared = 0;
    for path in names {
        let options =
            ReadOptions { gpu_ids: GpuIds::parse(["1bcf:001c", "8086:225c"]).unwrap(), ..ReadOptions::default() };
        let described = profile::snapshot(&std::fs::read_to_string(&path).unwrap(), None, &options).unwrap().host;
        let folder = tempfile::tempdir().unwrap();
        sysfs::build::build(&described, folder.path()).unwrap();
        let snapshot = read_root(folder.path(), &options).unwrap();
        let table = hosts::of_tree(&snapshot.host).table();
        let ours = plan(&snapshot, &PlanOptions::default());
        let name = path.file_stem().unwrap().to_str().unwrap();
        if table.nets.is_empty() {
            continue;
        }
        assert_none_is_worse(name, &table, |gpu| ours.gpus[gpu].assigned.clone());
        compared += table.gpus.len();
    }
    assert_eq!(compared, 116, "GPUs compared");
}

#[test]
fn on_every_host_known_by_its_matrix_our_pairs_are_no_worse() {
    let mut compared = 0;
    for (name, lines) in sections(&case_text("topo-m.tables")) {
        let matrix = table(&lines);
        let snapshot = read_text(&print(&matrix, Form::default()), name.as_ref(), &ReadOptions::default()).unwrap();
        let table = hosts::of_matrix(&matrix);
        let ours = plan(&snapshot, &PlanOptions::default());
        assert_none_is_worse(name, &table, |gpu| ours.gpus[gpu].assigned.clone());
        compared += table.gpus.len();
    }
    assert_eq!(compared, 203, "GPUs compared");
}

/// The comparison itself: NICs of the neighbour, or one where there are two, are told as worse.
#[test]
fn a_worse_choice_is_found() {
    let host = |name: &str| {
        let tables = case_text("topo-m.tables");
        let lines = sections(&tables).into_iter().find(|(known, _)| *known == name).unwrap().1;
        let matrix = table(&lines);
        let snapshot = read_text(&print(&matrix, Form::default()), name.as_ref(), &ReadOptions::default()).unwrap();
        (hosts::of_matrix(&matrix), plan(&snapshot, &PlanOptions::default()))
    };
    let (levels, ours) = host("hgx-h100-8nic-pix");
    assert_eq!(worse(&levels, |gpu| ours.gpus[gpu].assigned.clone()), Vec::<String>::new());
    assert_eq!(worse(&levels, |gpu| ours.gpus[(gpu + 1) % 8].assigned.clone()).len(), 8);
    assert_eq!(worse(&levels, |_| vec!["mlx5_0".to_owned()]).len(), 8);
    assert_eq!(worse(&levels, |gpu| if gpu == 3 { Vec::new() } else { ours.gpus[gpu].assigned.clone() }).len(), 1);
    let (levels, ours) = host("hgx-18nic-2pix-per-gpu-part");
    assert!(!worse(&levels, |gpu| ours.gpus[gpu].assigned.iter().take(1).cloned().collect()).is_empty());
}
