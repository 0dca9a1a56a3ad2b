//! The reader against trees that the builder wrote, whole and damaged.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use gdrd_topology::assemble::ReadOptions;
use gdrd_topology::level::Level;
use gdrd_topology::model::{Host, Snapshot};
use gdrd_topology::source::{SourceKind, Sourced};
use gdrd_topology::sysfs::build::build;
use gdrd_topology::{TopologyError, profile, read_input, read_root};
use tempfile::TempDir;

fn tree_of(host: &Host) -> TempDir {
    let folder = tempfile::tempdir().expect("the temporary folder is writable");
    build(host, folder.path()).expect("the folder is empty and writable");
    folder
}

fn read(root: &Path) -> Snapshot {
    read_root(root, &ReadOptions::default()).expect("the root holds sys/")
}

/// A host as sysfs can tell it: without sources, and without what sysfs does not hold.
fn plain(mut host: Host) -> Host {
    host.name = None;
    host.nvlinks.clear();
    for function in &mut host.functions {
        function.source = SourceKind::Sysfs;
        function.numa = function.numa.take().map(|numa| Sourced::new(numa.value, SourceKind::Sysfs));
    }
    for gpu in &mut host.gpus {
        gpu.source = SourceKind::Sysfs;
        gpu.uuid = None;
        gpu.memory_bytes = None;
        gpu.device_node = None;
    }
    host.hcas.iter_mut().for_each(|hca| hca.source = SourceKind::Sysfs);
    host.netdevs.iter_mut().for_each(|netdev| netdev.source = SourceKind::Sysfs);
    host.drives.iter_mut().for_each(|drive| drive.source = SourceKind::Sysfs);
    host
}

#[test]
fn every_builtin_profile_survives_the_way_through_a_sysfs_tree() {
    for name in profile::builtin_names() {
        let host = profile::builtin(name).unwrap().host;
        let read = read(tree_of(&host).path()).host;
        let (expected, read) = (plain(host), plain(read));
        // The assumed list warns where it is read from a tree and where from a profile alike.
        assert_eq!(read.functions, expected.functions, "{name}");
        assert_eq!(read, expected, "{name}");
    }
}

#[test]
fn the_sys_folder_itself_is_a_root_too() {
    let tree = tree_of(&profile::builtin("two-socket-2gpu").unwrap().host);
    assert_eq!(read(&tree.path().join("sys")).host, read(tree.path()).host);
    assert_eq!(read_input(tree.path(), &ReadOptions::default()).unwrap(), read(tree.path()));
}

#[test]
fn a_host_without_bus_pci_is_read_from_class_links() {
    let host = profile::builtin("two-socket-2gpu").unwrap().host;
    let tree = tree_of(&host);
    fs::remove_dir_all(tree.path().join("sys/bus/pci")).unwrap();
    let read = read(tree.path()).host;
    assert_eq!(read.hcas.len(), 2);
    assert_eq!(read.hca_level(gdrd_topology::model::HcaId(0), gdrd_topology::model::HcaId(1)), Some(Level::Sys));
    assert!(read.warnings.iter().any(|warning| warning.contains("sys/bus/pci/devices")), "{:?}", read.warnings);
}

#[test]
fn damaged_attributes_leave_the_rest_of_the_host_intact() {
    let host = profile::builtin("dgx-a100").unwrap().host;
    let tree = tree_of(&host);
    let at = |bdf: &str, file: &str| tree.path().join(format!("sys/bus/pci/devices/{bdf}/{file}"));
    fs::write(at("0000:07:00.0", "current_link_speed"), "Unknown speed\n").unwrap();
    fs::write(at("0000:07:00.0", "current_link_width"), "255\n").unwrap();
    fs::write(at("0000:0f:00.0", "current_link_width"), "0\n").unwrap();
    fs::remove_file(at("0000:0f:00.0", "numa_node")).unwrap();
    fs::write(at("0000:47:00.0", "numa_node"), [0xff, 0, 1]).unwrap();
    fs::write(at("0000:4e:00.0", "uevent"), "").unwrap();
    fs::write(at("0000:87:00.0", "uevent"), [0xff; 9000]).unwrap();
    let state = tree.path().join("sys/class/infiniband/mlx5_0/ports/1/state");
    fs::write(state, "9: SOMETHING\n").unwrap();
    let read = read(tree.path()).host;
    assert_eq!(read.gpus.len(), 8);
    assert_eq!(read.gpus[0].numa.unwrap().0, 3);
    assert_eq!(read.function("0000:07:00.0".parse().unwrap()).unwrap().link.current, None);
    // The bridge above still knows the node.
    assert_eq!(read.gpus[1].numa.unwrap().0, 3);
    assert!(read.warnings.iter().any(|warning| warning.contains("0000:47:00.0/numa_node")), "{:?}", read.warnings);
    assert!(read.warnings.iter().any(|warning| warning.contains("0000:87:00.0/uevent")), "{:?}", read.warnings);
}

#[test]
fn links_that_leave_the_tree_or_run_in_a_ring_do_not_stop_the_reader() {
    let tree = tree_of(&profile::builtin("two-socket-2gpu").unwrap().host);
    let devices = tree.path().join("sys/bus/pci/devices");
    symlink("/etc", devices.join("0000:f0:00.0")).unwrap();
    symlink("../../../../../../../../etc", devices.join("0000:f1:00.0")).unwrap();
    symlink("0000:f2:00.0", devices.join("0000:f2:00.0")).unwrap();
    fs::write(devices.join("not-an-address"), "").unwrap();
    let read = read(tree.path()).host;
    assert_eq!(read.gpus.len(), 2);
    for name in ["0000:f0:00.0", "0000:f1:00.0", "not-an-address"] {
        assert!(read.warnings.iter().any(|warning| warning.contains(name)), "{name}: {:?}", read.warnings);
    }
}

#[test]
fn a_second_folder_of_the_same_address_is_not_taken_for_the_device() {
    let host = profile::builtin("two-socket-2gpu").unwrap().host;
    let tree = tree_of(&host);
    let copy = tree.path().join("sys/devices/pci0000:16/0000:16:02.0/0000:b1:00.0");
    fs::create_dir_all(&copy).unwrap();
    fs::write(copy.join("class"), "0x030200\n").unwrap();
    assert_eq!(plain(read(tree.path()).host), plain(host));
}

#[test]
fn an_empty_tree_is_an_empty_host() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir_all(folder.path().join("sys/class")).unwrap();
    let host = read(folder.path()).host;
    assert_eq!((host.gpus.len(), host.hcas.len(), host.functions.len()), (0, 0, 0));
    assert_eq!(host.warnings, Vec::<String>::new());
}

#[test]
fn inputs_of_no_known_kind_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("picture.bin");
    fs::write(&file, [0xff, 0xd8, 0xff]).unwrap();
    for path in [folder.path().to_owned(), file, folder.path().join("absent")] {
        let error = read_input(&path, &ReadOptions::default()).unwrap_err();
        assert!(error.to_string().contains(&path.display().to_string()), "{error}");
    }
    let profile = folder.path().join("host");
    fs::write(&profile, "# a host\ngdrd-host-profile 1\npci 0000:00:00.0 nonsense\n").unwrap();
    match read_input(&profile, &ReadOptions::default()).unwrap_err() {
        TopologyError::Profile { line, path, .. } => assert_eq!((line, path), (3, Some(profile))),
        other => panic!("{other}"),
    }
}
