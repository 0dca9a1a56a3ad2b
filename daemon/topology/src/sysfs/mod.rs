//! Reader of sysfs trees: the live `/sys`, or a captured one below any folder.
//!
//! Lists facts only; conclusions are [`crate::assemble`]'s. Nothing outside the root is opened, every read is
//! bounded, and what cannot be read becomes a warning that names its path.

pub(crate) mod archive;
pub mod build;
pub mod capture;
mod config;
mod disk;
mod driver;
mod fabric;
mod ids;
mod memory;
mod others;
mod parallel;
mod pci;
mod place;
mod rdma;
mod tree;
mod vpd;

use std::path::Path;

use sysfs_class::{PciDevice, SysClass};

use crate::assemble::GpuIds;
use crate::error::TopologyError;
use crate::model::RawHost;
use crate::source::SourceKind;
use tree::Tree;

/// Lists the facts of a sysfs tree below `root`, which holds `sys/` or is it; functions with `gpu_ids` are read as GPUs.
///
/// # Errors
/// The root cannot be opened, holds no sysfs tree, or a folder has more entries than any host.
pub fn read(root: &Path, source: SourceKind, gpu_ids: &GpuIds) -> Result<RawHost, TopologyError> {
    facts(&Tree::open(root)?, source, gpu_ids)
}

/// Lists the facts of a tree.
fn facts(tree: &Tree, source: SourceKind, gpu_ids: &GpuIds) -> Result<RawHost, TopologyError> {
    let mut raw = RawHost::new(source);
    raw.cpu = others::cpu(tree);
    raw.numa_nodes = others::numa_nodes(tree);
    raw.hcas = rdma::read(tree)?;
    raw.gpus = driver::gpus(tree);
    raw.drives = others::drives(tree, source);
    let of_hcas = raw.hcas.iter().flatten().filter_map(|hca| hca.bdf);
    let of_others = raw.gpus.iter().map(|gpu| gpu.bdf).chain(raw.drives.iter().filter_map(|drive| drive.bdf));
    let matter = pci::Matter { gpu_ids, listed: of_hcas.chain(of_others).collect() };
    raw.functions = pci::read(tree, source, &matter)?;
    raw.kernel = others::kernel(tree, &raw.functions);
    vpd::link(tree, &raw.functions, raw.hcas.as_deref_mut().unwrap_or_default());
    if source == SourceKind::Sysfs {
        raw.driver = driver::captured(tree);
    }
    raw.netdevs = others::netdevs(tree, source);
    raw.peer_memory_modules = others::peer_memory_modules(tree);
    raw.warnings = tree.take_warnings();
    Ok(raw)
}

/// Lists the facts of this machine, and checks the list of PCI functions against another reader's.
///
/// # Errors
/// As [`read`].
pub fn read_live(gpu_ids: &GpuIds) -> Result<RawHost, TopologyError> {
    let mut raw = read(Path::new("/"), SourceKind::Live, gpu_ids)?;
    // A second opinion on the list alone: that crate's getters trust the content of the files.
    if let Ok(devices) = PciDevice::all() {
        let (ours, theirs) = (raw.functions.len(), devices.len());
        if ours != theirs {
            raw.warnings.push(format!("sys/bus/pci/devices: read {ours} functions, a second listing has {theirs}"));
        }
    }
    Ok(raw)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::assemble::ReadOptions;
    use crate::profile;

    /// A host of so many groups of a switch with a GPU, a NIC and a drive.
    fn host(groups: usize) -> crate::model::Host {
        let mut text = "gdrd-host-profile 1\nnuma 0\n".to_owned();
        for group in 0..groups {
            text += &format!(
                "pci {group:04x}:00:00.0 1000:c010 060400 pci{group:04x}:00 32x16 numa=0\n\
                 pci {group:04x}:01:00.0 10de:2330 030200 {group:04x}:00:00.0 32x16\n\
                 pci {group:04x}:01:01.0 15b3:1021 020700 {group:04x}:00:00.0 32x16\n\
                 pci {group:04x}:01:02.0 144d:a80a 010802 {group:04x}:00:00.0 32x4\n\
                 hca mlx5_{group} {group:04x}:01:01.0\n\
                 port mlx5_{group} 1 ACTIVE InfiniBand 400\n\
                 drive nvme{group} {group:04x}:01:02.0\n"
            );
        }
        profile::snapshot(&text, None, &ReadOptions::default()).unwrap().host
    }

    fn asked(groups: usize) -> usize {
        let folder = tempfile::tempdir().unwrap();
        build::build(&host(groups), folder.path()).unwrap();
        let tree = Tree::open(folder.path()).unwrap();
        let raw = facts(&tree, SourceKind::Sysfs, &GpuIds::default()).unwrap();
        assert_eq!(raw.functions.len(), groups * 4);
        tree.asked()
    }

    #[test]
    fn each_device_more_costs_the_same_and_little() {
        let [few, twice, many] = [asked(8), asked(16), asked(64)];
        let group = (twice - few) / 8;
        assert_eq!((many - twice) / 48, group, "{few} {twice} {many}");
        assert_eq!((many - twice) % 48, 0, "no group costs more than another: {few} {twice} {many}");
        assert!(group / 4 <= 14, "{group} files, links and folders for four functions, a port and a drive");
    }
}
