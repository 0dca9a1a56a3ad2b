//! A capture reads back to the same host, is small, and names nothing of the machine it is of.

use std::collections::BTreeSet;
use std::path::Path;

use gdrd_topology::assemble::ReadOptions;
use gdrd_topology::model::{
    DriverFacts, Fabric, FabricState, GpuDetail, GpuFacts, GpuId, Host, NvLinkBundle, NvLinkKind, NvLinkRemote,
    Snapshot,
};
use gdrd_topology::plan::{PlanOptions, plan};
use gdrd_topology::source::SourceKind;
use gdrd_topology::sysfs::capture::{Packed, capture, pack};
use gdrd_topology::{profile, read_live, read_root, read_stream};

const HOST_NAME: &str = "gpu-node-0417";

/// A tree of a built-in host as its machine would show it, with what names it.
fn tree(name: &str) -> (tempfile::TempDir, Host) {
    let folder = tempfile::tempdir().expect("a folder for a tree");
    let host = profile::builtin(name).expect("the profile is built in").host;
    gdrd_topology::sysfs::build::build(&host, folder.path()).expect("the tree can be written");
    let write = |path: &str, bytes: &[u8]| {
        let path = folder.path().join(path);
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder of the tree");
        std::fs::write(path, bytes).expect("a file of the tree");
    };
    write("proc/sys/kernel/hostname", format!("{HOST_NAME}.example.org\n").as_bytes());
    write(
        "proc/cpuinfo",
        b"processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 207\nserial\t: 77SECRET\n\n",
    );
    write("proc/cmdline", b"root=UUID=5ba8a3f1 iommu=pt intel_iommu=on hostid=0417 pci=realloc\n");
    for hca in &host.hcas {
        let path = format!("sys/class/infiniband/{}", hca.name);
        write(&format!("{path}/node_desc"), format!("{HOST_NAME} {}\n", hca.name).as_bytes());
        write(&format!("{path}/board_id"), format!("MT_0000000223 {HOST_NAME}\n").as_bytes());
    }
    for (place, drive) in host.drives.iter().enumerate() {
        write(&format!("sys/class/nvme/{}/serial", drive.name), format!("S4YPNC0T{place:06}\n").as_bytes());
        write(&format!("sys/class/nvme/{}/subsysnqn", drive.name), b"nqn.2014.08.org:S4YPNC0T\n");
    }
    for netdev in &host.netdevs {
        write(&format!("sys/class/net/{}/address", netdev.name), b"b8:3f:d2:aa:bb:10\n");
    }
    for function in &host.functions {
        write(&format!("sys/bus/pci/devices/{}/config", function.bdf), &config_space());
    }
    (folder, host)
}

/// A header with a PCI Express capability, then a serial number and ACS.
fn config_space() -> Vec<u8> {
    let mut space = vec![0_u8; 4096];
    space[0x06] = 0x10;
    space[0x34] = 0x40;
    space[0x40..0x44].copy_from_slice(&[0x10, 0, 0x42, 0]);
    space[0x100..0x104].copy_from_slice(&(0x0003_u32 | 1 << 16 | 0x140 << 20).to_le_bytes());
    space[0x104..0x10c].copy_from_slice(b"SERIAL!!");
    space[0x140..0x144].copy_from_slice(&(0x000d_u32 | 1 << 16).to_le_bytes());
    space[0x146..0x148].copy_from_slice(&0x001d_u16.to_le_bytes());
    space
}

fn packed(root: &Path, packed: Packed) -> Vec<u8> {
    pack(&capture(root, None).expect("the tree can be captured"), packed).expect("the capture can be packed")
}

fn read(bytes: &[u8]) -> Snapshot {
    read_stream(bytes, Path::new("host.tar"), &ReadOptions::default()).expect("the capture reads back")
}

/// What a capture must keep; GUIDs, GIDs and what sysfs does not hold are left aside.
fn shape(host: &Host) -> Vec<String> {
    let wanted = |class: u32| matches!(class >> 8, 0x02 | 0x03 | 0x06 | 0x12) || class == 0x0108;
    let functions = host.functions.iter().filter(|function| wanted(function.subclass()));
    let functions =
        functions.map(|f| format!("{} {:?} {:?} {:?} {:?}", f.bdf, f.upstream, f.link, f.numa_id(), f.driver));
    let gpus = host.gpus.iter().map(|gpu| format!("{} {:?}", gpu.name, gpu.bdf));
    let hcas = host.hcas.iter().map(|hca| {
        let ports: Vec<String> = hca
            .ports
            .iter()
            .map(|port| {
                format!("{} {} {} {:?} {}", port.port_num, port.state, port.link_layer, port.rate_gbps, port.gids.len())
            })
            .collect();
        format!("{} {:?} {:?} {:?} {:?} {ports:?}", hca.name, hca.bdf, hca.card, hca.netdevs, hca.bond)
    });
    let netdevs = host.netdevs.iter().map(|n| format!("{} {:?} {:?} {}", n.name, n.bdf, n.master, n.has_default_route));
    let drives = host
        .drives
        .iter()
        .map(|drive| format!("{} {:?} {:?} {:?}", drive.name, drive.bdf, drive.transport, drive.netdev));
    let modules = host.peer_memory_modules.iter().cloned().chain([format!("{:?}", host.cpu)]);
    functions.chain(gpus).chain(hcas).chain(netdevs).chain(drives).chain(modules).collect()
}

#[test]
fn a_capture_reads_back_to_the_same_host_in_every_packing() {
    for name in profile::builtin_names() {
        let (folder, _) = tree(name);
        let original = gdrd_topology::read_root(folder.path(), &ReadOptions::default()).unwrap();
        // The bytes inside are the same whatever packs them.
        let packings: &[Packed] =
            if name == "two-socket-2gpu" { &[Packed::Plain, Packed::Gzip, Packed::Zstd] } else { &[Packed::Plain] };
        for packing in packings.iter().copied() {
            let again = read(&packed(folder.path(), packing));
            assert_eq!(shape(&again.host), shape(&original.host), "{name} {packing:?}");
            let assigned = |snapshot: &Snapshot| -> Vec<Vec<String>> {
                let gpus = plan(snapshot, &PlanOptions::default()).gpus;
                gpus.into_iter().map(|gpu| gpu.assigned).collect()
            };
            assert_eq!(assigned(&again), assigned(&original), "{name}");
        }
    }
}

#[test]
fn the_capture_of_a_large_host_is_small_and_the_same_each_time() {
    let (folder, _) = tree("dgx-a100");
    for packing in [Packed::Gzip, Packed::Zstd] {
        let bytes = packed(folder.path(), packing);
        assert!(bytes.len() < 1 << 20, "{packing:?}: {} bytes", bytes.len());
        assert_eq!(bytes, packed(folder.path(), packing));
    }
}

#[test]
fn nothing_in_a_capture_names_the_machine_or_its_parts() {
    let (folder, host) = tree("dgx-a100");
    let bytes = packed(folder.path(), Packed::Plain);
    let holds = |what: &[u8]| bytes.windows(what.len()).any(|window| window == what);
    for name in [HOST_NAME, "example.org", "S4YPNC0T", "b8:3f:d2", "SERIAL!!", "5ba8a3f1", "hostid", "77SECRET"] {
        assert!(!holds(name.as_bytes()), "{name}");
    }
    let guids = host.hcas.iter().filter_map(|hca| hca.node_guid.zip(hca.sys_image_guid));
    for (node, adapter) in guids {
        for guid in [node, adapter] {
            let groups: Vec<String> =
                guid.to_be_bytes().chunks(2).map(|pair| format!("{:02x}{:02x}", pair[0], pair[1])).collect();
            // A replacement may meet an original of the same made-up form; those of the profile begin with 02 too.
            let is_made_up = groups[0] == "0200" && groups[1] == "0000";
            assert!(is_made_up || !holds(groups.join(":").as_bytes()), "{groups:?}");
        }
    }
    assert!(holds(b"iommu=pt intel_iommu=on pci=realloc"));
}

#[test]
fn adapters_stay_told_apart_and_acs_stays_readable() {
    let (folder, host) = tree("dgx-a100");
    let again = read(&packed(folder.path(), Packed::Zstd));
    let cards = |host: &Host| host.hcas.iter().map(|hca| hca.card).collect::<Vec<_>>();
    assert_eq!(cards(&again.host), cards(&host));
    let equal = |host: &Host| -> Vec<Vec<bool>> {
        let guid = |place: usize| host.hcas[place].sys_image_guid;
        let all = 0..host.hcas.len();
        all.clone().map(|a| all.clone().map(|b| guid(a) == guid(b)).collect()).collect()
    };
    assert_eq!(equal(&again.host), equal(&host));
    let taken = capture(folder.path(), None).unwrap();
    assert!(taken.functions > 30 && taken.with_extended_config == taken.functions);
    let plain = packed(folder.path(), Packed::Plain);
    let acs = [0x0d_u8, 0x00, 0x01, 0x00, 0x00, 0x00, 0x1d, 0x00];
    assert!(plain.windows(acs.len()).any(|window| window == acs));
}

#[test]
fn a_volume_over_a_fabric_keeps_its_interface_and_loses_its_addresses() {
    let (folder, _) = tree("two-socket-2gpu");
    let at = folder.path().join("sys/devices/virtual/nvme-fabrics/ctl/nvme7");
    std::fs::create_dir_all(&at).unwrap();
    std::fs::write(at.join("transport"), "rdma\n").unwrap();
    std::fs::write(at.join("address"), "traddr=10.17.0.9,trsvcid=4420,host_traddr=10.17.0.1\n").unwrap();
    let link = folder.path().join("sys/class/nvme/nvme7");
    std::os::unix::fs::symlink("../../devices/virtual/nvme-fabrics/ctl/nvme7", link).unwrap();
    let bytes = packed(folder.path(), Packed::Plain);
    assert!(!bytes.windows(6).any(|window| window == b"10.17."));
    let drive = read(&bytes).host.drives.into_iter().find(|drive| drive.name == "nvme7").unwrap();
    assert_eq!((drive.transport.as_deref(), drive.netdev.as_deref()), (Some("rdma"), Some("ens1np0")));
}

#[test]
fn what_the_gpu_driver_tells_comes_again_from_a_capture_without_its_names() {
    let (folder, host) = tree("dgx-a100");
    let of = |place: usize| {
        let detail = GpuDetail {
            nvlinks: Some(vec![NvLinkBundle { remote: NvLinkRemote::Switch, links: 12, link_gbps: Some(200.0) }]),
            fabric: Some(Fabric {
                state: FabricState::Completed,
                cluster_uuid: Some("5ec2e7aa-0000-0000-0000-000000000000".to_owned()),
                clique_id: Some(3),
                problems: Vec::new(),
            }),
            ..GpuDetail::default()
        };
        let bdf = host.gpus[place].bdf.expect("it has an address");
        GpuFacts { bdf, uuid: Some(format!("GPU-5ec2e700-{place}")), device_node: None, detail }
    };
    let warnings = vec!["GPU-5ec2e700-1: xid 31".to_owned()];
    let facts = DriverFacts { source: SourceKind::Nvml, gpus: (0..host.gpus.len()).map(of).collect(), warnings };
    let taken = capture(folder.path(), Some(&facts)).unwrap();
    let plain = pack(&taken, Packed::Plain).unwrap();
    assert!(!plain.windows(7).any(|window| window == b"5ec2e70"), "a name is left");
    let again = read(&pack(&taken, Packed::Zstd).unwrap()).host;
    assert_eq!(again.nvlink_kind(), Some(NvLinkKind::Switched));
    assert_eq!(again.nvlinks_between(GpuId(0), GpuId(7)), 12);
    assert_eq!(again.nvlink_gbps(GpuId(0), GpuId(7)), Some(2400.0));
    let uuids: BTreeSet<_> = again.gpus.iter().filter_map(|gpu| gpu.uuid()).collect();
    assert_eq!(uuids.len(), host.gpus.len(), "what differs stays different");
    let clusters: BTreeSet<_> =
        again.gpus.iter().filter_map(|gpu| gpu.fabric.as_ref()?.value.cluster_uuid.as_deref()).collect();
    assert_eq!(clusters.len(), 1, "what is equal stays equal");
}

#[test]
fn facts_that_do_not_parse_are_a_warning_that_names_the_file() {
    let (folder, _) = tree("dgx-a100");
    let place = folder.path().join("proc/driver/nvidia");
    std::fs::create_dir_all(&place).unwrap();
    std::fs::write(place.join("nvml.json"), "{ no json").unwrap();
    let host = read_root(folder.path(), &ReadOptions::default()).unwrap().host;
    assert!(host.warnings.iter().any(|warning| warning.contains("nvml.json")), "{:?}", host.warnings);
}

#[test]
fn this_machine_can_be_captured() {
    let taken = capture(Path::new("/"), None).unwrap();
    let again = read(&pack(&taken, Packed::Zstd).unwrap());
    let live = read_live(&ReadOptions::default()).unwrap();
    assert_eq!(again.host.gpus.len(), live.host.gpus.len());
    let names = |host: &Host| host.hcas.iter().map(|hca| hca.name.clone()).collect::<Vec<_>>();
    assert_eq!(names(&again.host), names(&live.host));
}
