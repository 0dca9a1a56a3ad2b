//! The reader against trees that the builder wrote, whole and damaged.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use gdrd_topology::advise::{Destination, advise_path};
use gdrd_topology::assemble::ReadOptions;
use gdrd_topology::level::Level;
use gdrd_topology::model::{Host, Snapshot};
use gdrd_topology::plan::{PlanOptions, plan};
use gdrd_topology::source::{SourceKind, Sourced};
use gdrd_topology::sysfs::build::build;
use gdrd_topology::sysfs::capture::{Packed, capture, pack};
use gdrd_topology::{TopologyError, profile, read_input, read_root, read_stream, render};
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

/// A host with one of each odd device.
const ODD: &str = "gdrd-host-profile 1
numa 0 cpus=0-3 distances=10,40
numa 8 cpus=4-7 distances=40,10
numa 252 cpus=
root pci0000:00 numa=8
pci 0000:00:01.0 8086:347a 060400 pci0000:00 16x16 driver=pcieport
pci 0000:01:00.0 15b3:1021 020000 0000:00:01.0 16x8/16x16 driver=mlx5_core sub=15b3:0053
pci 0000:01:00.1 15b3:1021 020000 0000:00:01.0 16x8/16x16 driver=mlx5_core
pci 0000:01:00.2 15b3:101e 020000 0000:00:01.0 - driver=vfio-pci physfn=0000:01:00.0
pci 10000:e1:00.0 144d:a80a 010802 ? -/16x4 driver=nvme
hca mlx5_bond_0 0000:01:00.0 node_guid=b8ce:f603:0000:0001 sys_image_guid=b8ce:f603:0000:0001
port mlx5_bond_0 1 ACTIVE Ethernet 400
gid mlx5_bond_0 1 3 ::ffff:10.0.0.1 type=v2 netdev=bond0
port mlx5_bond_0 2 DOWN Unknown -
hca mlx5_3 0000:01:00.0 sf=mlx5_core.sf.4
hca siw0 -
hca rxe0 - parent=ens1f1
net bond0 - bond default-route
net ens1f0 0000:01:00.0 master=bond0
net ens1f1 0000:01:00.1 master=bond0
net lo -
drive nvme0 10000:e1:00.0 transport=pcie
drive nvme1 - transport=rdma
module nvidia_peermem
";

#[test]
fn bonds_sub_functions_soft_devices_and_unknown_places_survive_the_way_through_a_tree() {
    let host = profile::snapshot(ODD, None, &ReadOptions::default()).unwrap().host;
    let tree = tree_of(&host);
    let read = read(tree.path()).host;
    assert_eq!(plain(read.clone()), plain(host));
    let hca = |name: &str| read.hca(read.find_hca(name).unwrap()).unwrap();
    assert_eq!(hca("mlx5_3").sub_function.as_deref(), Some("mlx5_core.sf.4"));
    assert_eq!(hca("rxe0").bdf.unwrap().to_string(), "0000:01:00.1");
    assert_eq!(hca("siw0").bdf, None);
    assert_eq!(hca("mlx5_bond_0").bond.as_deref(), Some("bond0"));
    assert_eq!(hca("mlx5_bond_0").numa.unwrap().0, 8);
    assert_eq!(read.root_bus("10000:e1:00.0".parse().unwrap()), None);
}

/// A GB300 tray in small: each NIC hangs on a root of its own, and a data-direct function of it below the GPU's.
const DATA_DIRECT: &str = "gdrd-host-profile 1
numa 0 cpus=0-71
numa 1 cpus=72-143
root pci0000:00 numa=0
pci 0000:00:00.0 10de:22b1 060400 pci0000:00 32x16
pci 0000:03:00.0 15b3:1023 020700 0000:00:00.0 64x16
root pci0010:00 numa=1
pci 0010:00:00.0 10de:22b1 060400 pci0010:00 32x16
pci 0010:03:00.0 15b3:1023 020700 0010:00:00.0 64x16
root pci0006:00 numa=0
pci 0006:00:00.0 10de:22b8 060400 pci0006:00 64x16
pci 0006:01:00.0 15b3:197c 060400 0006:00:00.0 64x16
pci 0006:02:00.0 15b3:197c 060400 0006:01:00.0 64x16
pci 0006:02:01.0 15b3:197c 060400 0006:01:00.0 64x16
pci 0006:03:00.0 10de:31c2 030200 0006:02:00.0 64x16
pci 0006:04:00.0 15b3:2100 080000 0006:02:01.0 64x16
root pci0016:00 numa=1
pci 0016:00:00.0 10de:22b8 060400 pci0016:00 64x16
pci 0016:01:00.0 15b3:197c 060400 0016:00:00.0 64x16
pci 0016:02:00.0 15b3:197c 060400 0016:01:00.0 64x16
pci 0016:02:01.0 15b3:197c 060400 0016:01:00.0 64x16
pci 0016:03:00.0 10de:31c2 030200 0016:02:00.0 64x16
pci 0016:04:00.0 15b3:2100 080000 0016:02:01.0 64x16
hca mlx5_0 0000:03:00.0 data_direct=0006:04:00.0
hca mlx5_1 0010:03:00.0 data_direct=0016:04:00.0
port mlx5_0 1 ACTIVE InfiniBand 800
port mlx5_1 1 ACTIVE InfiniBand 800
gpu 0006:03:00.0 uuid=GPU-5f5e6a7b-1111-2222-3333-000000000001 dev=char:195:0
gpu 0016:03:00.0 uuid=GPU-5f5e6a7b-1111-2222-3333-000000000002 dev=char:195:1
";

fn directs(host: &Host) -> Vec<Option<String>> {
    host.hcas.iter().map(|hca| hca.data_direct.map(|bdf| bdf.to_string())).collect()
}

#[test]
fn a_data_direct_function_is_known_by_the_vital_product_data_of_its_nic() {
    let host = profile::snapshot(DATA_DIRECT, None, &ReadOptions::default()).unwrap().host;
    let tree = tree_of(&host);
    let snapshot = read(tree.path());
    let right = vec![Some("0006:04:00.0".to_owned()), Some("0016:04:00.0".to_owned())];
    assert_eq!(directs(&snapshot.host), right);
    for (gpu, nic) in [("0006:03:00.0", "mlx5_0"), ("0016:03:00.0", "mlx5_1")] {
        let ids = (snapshot.host.find_gpu(gpu).unwrap(), snapshot.host.find_hca(nic).unwrap());
        assert_eq!(snapshot.host.gpu_hca_level(ids.0, ids.1), Some(Level::Pix), "by the better path");
        assert_eq!(plan(&snapshot, &PlanOptions::default()).gpu(gpu).unwrap().assigned, [nic]);
    }
    let archive = pack(&capture(tree.path(), None).unwrap(), Packed::Plain).unwrap();
    let again = read_stream(archive.as_slice(), Path::new("host.tar"), &ReadOptions::default()).unwrap().host;
    assert_eq!(directs(&again), right, "a capture keeps it");
    // Only root may read a VPD.
    let vpd = "sys/bus/pci/devices/0006:04:00.0/vpd";
    fs::remove_file(tree.path().join(vpd)).unwrap();
    let without = read(tree.path()).host;
    assert_eq!(directs(&without), [None, Some("0016:04:00.0".to_owned())]);
    let warned = without.warnings.iter().any(|warning| warning.contains("0006:04:00.0") && warning.contains("VPD"));
    assert!(warned, "{:?}", without.warnings);
}

#[test]
fn uuids_and_device_nodes_come_from_the_files_of_the_driver() {
    let host = profile::snapshot(DATA_DIRECT, None, &ReadOptions::default()).unwrap().host;
    let tree = tree_of(&host);
    let read_back = read(tree.path()).host;
    let told = |host: &Host| -> Vec<_> {
        host.gpus
            .iter()
            .map(|gpu| (gpu.uuid().map(str::to_owned), gpu.device_node.as_ref().map(|node| node.value)))
            .collect()
    };
    assert_eq!(told(&read_back), told(&host));
    assert_eq!(read_back.find_gpu("GPU-5f5e6a7b-1111-2222-3333-000000000002").unwrap().0, 1);
    assert_eq!(read_back.gpus[0].uuid.as_ref().unwrap().source, SourceKind::Sysfs);
    let archive = pack(&capture(tree.path(), None).unwrap(), Packed::Plain).unwrap();
    assert!(!archive.windows(8).any(|window| window == b"5f5e6a7b"), "a capture names no GPU");
    let again = read_stream(archive.as_slice(), Path::new("host.tar"), &ReadOptions::default()).unwrap().host;
    let uuids: Vec<&str> = again.gpus.iter().filter_map(|gpu| gpu.uuid()).collect();
    assert_eq!(uuids, ["GPU-00000000-0000-0000-0000-000000000001", "GPU-00000000-0000-0000-0000-000000000002"]);
    assert_eq!(again.gpus[1].device_node.as_ref().unwrap().value.minor, 1);
}

#[test]
fn rdma_devices_may_be_plain_folders_and_gid_slots_may_be_empty_or_unreadable() {
    let tree = tempfile::tempdir().unwrap();
    let port = tree.path().join("sys/class/infiniband/hfi1_0/ports/1");
    for folder in ["gids", "gid_attrs/types/2"] {
        fs::create_dir_all(port.join(folder)).unwrap();
    }
    for (index, gid) in
        ["fe80:0000:0000:0000:0011:2233:4455:6677", "0000:0000:0000:0000:0000:0000:0000:0000"].iter().enumerate()
    {
        fs::write(port.join(format!("gids/{index}")), format!("{gid}\n")).unwrap();
    }
    fs::write(port.join("gids/2"), "fe80:0000:0000:0000:0000:0000:0000:0001\n").unwrap();
    fs::write(port.join("gids/3"), "fe80:0000:0000:0000:0000:0000:0000:0000\n").unwrap();
    fs::write(port.join("state"), "4: ACTIVE\n").unwrap();
    fs::write(port.join("rate"), "quick\n").unwrap();
    fs::create_dir_all(tree.path().join("sys/class/infiniband/hfi1_0/ports/zero")).unwrap();
    let host = read(tree.path()).host;
    let hca = &host.hcas[0];
    assert_eq!((hca.name.as_str(), hca.bdf, hca.ports.len()), ("hfi1_0", None, 1));
    let slots: Vec<u16> = hca.ports[0].gids.iter().map(|gid| gid.gid_index).collect();
    assert_eq!(slots, [0, 2]);
    assert_eq!(hca.ports[0].rate_gbps, None);
    for part in ["rate `quick` is not understood", "ports/zero"] {
        assert!(host.warnings.iter().any(|warning| warning.contains(part)), "{part}: {:?}", host.warnings);
    }
}

#[test]
fn a_folder_with_more_entries_than_any_host_is_refused_by_name() {
    let tree = tempfile::tempdir().unwrap();
    let devices = tree.path().join("sys/bus/pci/devices");
    fs::create_dir_all(&devices).unwrap();
    for name in 0..=65_536 {
        symlink("x", devices.join(name.to_string())).unwrap();
    }
    let error = read_root(tree.path(), &ReadOptions::default()).unwrap_err().to_string();
    assert!(error.contains("sys/bus/pci/devices") && error.contains("65536 entries"), "{error}");
}

#[test]
fn a_link_that_runs_slower_for_a_while_is_no_other_host() {
    let host = profile::builtin("dgx-a100").unwrap().host;
    let mut idle = host.clone();
    idle.functions[0].link.current = None;
    idle.warnings.push("later".to_owned());
    assert!(host.is_same_as(&idle));
    idle.hcas[0].ports[0].state = gdrd_topology::model::PortState::Down;
    assert!(!host.is_same_as(&idle));
}

#[test]
fn this_machine_is_read_and_its_list_agrees_with_a_second_reader() {
    let snapshot = gdrd_topology::read_live(&ReadOptions::default()).unwrap();
    assert_eq!(snapshot.source.kind, SourceKind::Live);
    assert_eq!(snapshot.source.path, None);
    let second = snapshot.host.warnings.iter().find(|warning| warning.contains("a second listing has"));
    assert_eq!(second, None);
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
    for name in ["0000:f0:00.0", "0000:f1:00.0", "0000:f2:00.0", "not-an-address"] {
        let told = read.warnings.iter().filter(|warning| warning.contains(name));
        assert_eq!(told.count(), 1, "one warning a link, not one a file behind it: {:?}", read.warnings);
    }
}

#[test]
fn a_file_in_place_of_the_list_of_devices_is_an_error_that_names_it() {
    let tree = tree_of(&profile::builtin("two-socket-2gpu").unwrap().host);
    let devices = tree.path().join("sys/bus/pci/devices");
    fs::remove_dir_all(&devices).unwrap();
    fs::write(&devices, "").unwrap();
    match read_root(tree.path(), &ReadOptions::default()).unwrap_err() {
        TopologyError::Read { path, source } => {
            assert_eq!((path, source.kind()), (devices, std::io::ErrorKind::NotADirectory));
        }
        other => panic!("{other}"),
    }
}

#[test]
fn control_characters_of_names_reach_nothing_that_is_printed() {
    let tree = tree_of(&profile::builtin("two-socket-2gpu").unwrap().host);
    let class = tree.path().join("sys/class");
    for (folder, from, to) in
        [("infiniband", "mlx5_0", "mlx5\u{1b}[2J_0"), ("net", "ens1np0", "ens\n1"), ("nvme", "nvme0", "nvme\u{9b}31m0")]
    {
        fs::rename(class.join(folder).join(from), class.join(folder).join(to)).unwrap();
    }
    fs::write(tree.path().join("sys/bus/pci/devices/odd\u{7}name"), "").unwrap();
    let snapshot = read(tree.path());
    let plan = plan(&snapshot, &PlanOptions::default());
    let path = |to: Destination| advise_path(&snapshot, &plan, "GPU0", &to).unwrap().reason;
    let texts = [
        render::matrix(&snapshot.host, Some(&plan)),
        render::tree(&snapshot.host, Some(&plan)),
        render::svg(&snapshot, &plan),
        render::dot(&snapshot.host, &plan),
        plan.warnings.join("\n"),
        path(Destination::Remote),
        path(Destination::Drive(None)),
    ];
    for text in texts {
        assert!(!text.chars().any(|c| c.is_control() && c != '\n'), "{text:?}");
    }
    let names: Vec<&str> = snapshot.host.hcas.iter().map(|hca| hca.name.as_str()).collect();
    assert_eq!(names, ["mlx5?[2J_0", "mlx5_1"]);
    assert!(plan.warnings.iter().any(|warning| warning.contains("odd?name")), "{:?}", plan.warnings);
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
fn a_tree_without_uevent_files_gives_the_same_from_modalias() {
    let host = profile::builtin("two-socket-2gpu").unwrap().host;
    let tree = tree_of(&host);
    for function in &host.functions {
        let folder = tree.path().join(format!("sys/bus/pci/devices/{}", function.bdf));
        fs::remove_file(folder.join("uevent")).unwrap();
        let id = |id: Option<u16>| u32::from(id.unwrap());
        let (subsystem, class) = (function.subsystem.unwrap_or_default(), function.class.unwrap().0);
        let alias = format!(
            "pci:v{:08X}d{:08X}sv{:08X}sd{:08X}bc{:02X}sc{:02X}i{:02X}\n",
            id(function.vendor),
            id(function.device),
            subsystem.0,
            subsystem.1,
            class >> 16,
            class >> 8 & 0xff,
            class & 0xff
        );
        fs::write(folder.join("modalias"), alias).unwrap();
        for file in ["vendor", "device", "class"] {
            fs::remove_file(folder.join(file)).unwrap();
        }
    }
    // Drivers of ports are told by uevent alone.
    let without = |host: Host| {
        let mut host = plain(host);
        host.functions.iter_mut().filter(|function| function.is_bridge()).for_each(|bridge| bridge.driver = None);
        host
    };
    assert_eq!(without(read(tree.path()).host), without(host));
}

#[test]
fn a_virtual_function_has_no_link_of_its_own_and_a_usb_controller_is_asked_for_none() {
    let host = profile::snapshot(
        "gdrd-host-profile 1\npci 0000:00:01.0 8086:352a 060400 pci0000:00 32x16 numa=0\n\
         pci 0000:01:00.0 15b3:101e 020000 0000:00:01.0 32x16\n\
         pci 0000:01:00.1 15b3:101e 020000 0000:00:01.0 32x16 physfn=0000:01:00.0\n\
         pci 0000:01:01.0 1b73:1100 0c0330 0000:00:01.0 8x1\n",
        None,
        &ReadOptions::default(),
    );
    let read = read(tree_of(&host.unwrap().host).path()).host;
    let function = |bdf: &str| read.function(bdf.parse().unwrap()).unwrap().clone();
    assert!(function("0000:01:00.0").link.current.is_some());
    let unlinked = ["0000:01:00.1", "0000:01:01.0"].map(function);
    assert!(unlinked.iter().all(|function| function.link.current.is_none()), "{unlinked:?}");
    assert!(unlinked.iter().all(|function| function.numa_id().is_some()), "that of the bus");
    assert_eq!(unlinked[0].physical_function, Some("0000:01:00.0".parse().unwrap()));
}

#[test]
fn functions_of_one_model_in_a_slot_share_the_link_of_the_first_but_not_on_a_root_bus() {
    let host = profile::snapshot(
        "gdrd-host-profile 1\n\
         pci 0000:00:01.0 8086:352a 060400 pci0000:00 32x16\n\
         pci 0000:00:02.0 15b3:1021 020700 pci0000:00 32x8\n\
         pci 0000:00:02.1 15b3:1021 020700 pci0000:00 -\n\
         pci 0000:01:00.0 15b3:1021 020700 0000:00:01.0 16x8/32x16\n\
         pci 0000:01:00.1 15b3:101e 020700 0000:00:01.0 -\n\
         pci 0000:01:00.2 15b3:1021 020700 0000:00:01.0 -\n\
         pci 0000:01:01.0 15b3:1021 020700 0000:00:01.0 -\n",
        None,
        &ReadOptions::default(),
    );
    let read = read(tree_of(&host.unwrap().host).path()).host;
    let link = |bdf: &str| {
        let link = read.function(bdf.parse().unwrap()).unwrap().link;
        (link.current.map(|rate| rate.to_string()), link.max.map(|rate| rate.to_string()))
    };
    assert_eq!(link("0000:01:00.2"), link("0000:01:00.0"));
    assert!(link("0000:01:00.0").0.is_some() && link("0000:00:02.0").0.is_some());
    for unlinked in ["0000:00:02.1", "0000:01:00.1", "0000:01:01.0"] {
        assert_eq!(link(unlinked), (None, None), "{unlinked}");
    }
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

#[test]
fn a_rate_beyond_any_port_is_unknown_with_a_warning() {
    let root = tree_of(&profile::builtin("dgx-a100").expect("the profile is built in").host);
    let rate = root.path().join("sys/class/infiniband/mlx5_0/ports/1/rate");
    fs::write(&rate, "99999999999999999999 Gb/sec (4X HDR)\n").expect("the tree is ours");
    let host = read(root.path()).host;
    let id = host.find_hca("mlx5_0").expect("the NIC is listed");
    assert_eq!(host.hca(id).and_then(|hca| hca.rate_gbps()), None);
    assert!(host.warnings.iter().any(|w| w.starts_with("mlx5_0: rate of port 1 is ")), "{:?}", host.warnings);
}
