//! Captured machines: facts in tests/fixtures/hosts, written out as sysfs trees and read by the real reader.
//! The answers are typed from what is known of each machine, never taken from our output.

use gdrd_topology::assemble::{GpuIds, ReadOptions};
use gdrd_topology::level::Level;
use gdrd_topology::model::{Host, NvLinkKind, Snapshot};
use gdrd_topology::plan::contract::Plan;
use gdrd_topology::plan::{PlanOptions, plan};
use gdrd_topology::{profile, read_root, sysfs};

fn options(gpu_ids: &[&str]) -> ReadOptions {
    ReadOptions {
        gpu_ids: GpuIds::parse(gpu_ids.iter().copied()).expect("the ids are well formed"),
        ..ReadOptions::default()
    }
}

/// Reads a fixture by way of a sysfs tree on disk.
fn machine(name: &str, gpu_ids: &[&str]) -> Snapshot {
    let path = format!("{}/../../tests/fixtures/hosts/{name}.host", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(&path).expect("the fixture is there");
    let options = options(gpu_ids);
    let described = profile::snapshot(&text, None, &options).expect("the fixture parses").host;
    let folder = tempfile::tempdir().expect("the temporary folder is writable");
    sysfs::build::build(&described, folder.path()).expect("the host is written as a tree");
    read_root(folder.path(), &options).expect("the tree is read")
}

fn planned(name: &str, gpu_ids: &[&str]) -> (Host, Plan) {
    let snapshot = machine(name, gpu_ids);
    let plan = plan(&snapshot, &PlanOptions::default());
    (snapshot.host, plan)
}

/// Names of the NICs that are at a level from a GPU, sorted.
fn at_level(plan: &Plan, gpu: &str, level: Level) -> Vec<String> {
    let gpu = plan.gpu(gpu).expect("the GPU is listed");
    let mut names: Vec<String> =
        gpu.nics.iter().filter(|nic| nic.level == Some(level)).map(|nic| nic.name.clone()).collect();
    names.sort();
    names
}

fn assigned(plan: &Plan, gpu: &str) -> Vec<String> {
    plan.gpu(gpu).expect("the GPU is listed").assigned.clone()
}

fn gpu_addresses(host: &Host) -> Vec<String> {
    host.gpus.iter().filter_map(|gpu| gpu.bdf).map(|bdf| bdf.to_string()).collect()
}

#[test]
fn dgx_a100_pairs_two_gpus_with_two_nics_of_their_switch_tree() {
    let (host, plan) = planned("dgx-a100-10port", &[]);
    assert_eq!(host.hcas.len(), 10);
    let numa: Vec<u16> = plan.gpus.iter().map(|gpu| gpu.numa.unwrap().0).collect();
    assert_eq!(numa, [3, 3, 1, 1, 7, 7, 5, 5]);
    let pairs = [
        (["0000:07:00.0", "0000:0f:00.0"], ["mlx5_0", "mlx5_1"]),
        (["0000:47:00.0", "0000:4e:00.0"], ["mlx5_2", "mlx5_3"]),
        (["0000:87:00.0", "0000:90:00.0"], ["mlx5_4", "mlx5_5"]),
        (["0000:b7:00.0", "0000:bd:00.0"], ["mlx5_6", "mlx5_7"]),
    ];
    for (gpus, nics) in pairs {
        for gpu in gpus {
            assert_eq!(at_level(&plan, gpu, Level::Pxb), nics, "{gpu}");
            assert_eq!(at_level(&plan, gpu, Level::Sys).len(), 8, "{gpu}");
        }
        // The second GPU hangs below the same inner switch as the first NIC.
        assert_eq!(assigned(&plan, gpus[1]), [nics[0]]);
        assert_eq!(assigned(&plan, gpus[0]), [nics[1]]);
    }
    let card = |name: &str| plan.nics.iter().find(|nic| nic.name == name).unwrap().card;
    assert_eq!(card("mlx5_8"), card("mlx5_9"), "the storage ports are one card");
    assert_eq!(plan.nics.iter().filter(|nic| nic.gpus.is_empty()).count(), 2);
}

#[test]
fn dgx_a100_with_twelve_ports_leaves_the_storage_cards_alone() {
    let snapshot = profile::builtin("dgx-a100").unwrap();
    let plan = plan(&snapshot, &PlanOptions::default());
    let numa: Vec<u16> = plan.gpus.iter().map(|gpu| gpu.numa.unwrap().0).collect();
    assert_eq!(numa, [3, 3, 1, 1, 7, 7, 5, 5]);
    for (gpu, pair) in [("GPU0", ["mlx5_0", "mlx5_1"]), ("GPU3", ["mlx5_2", "mlx5_3"]), ("GPU5", ["mlx5_6", "mlx5_7"])]
    {
        assert_eq!(at_level(&plan, gpu, Level::Pxb), pair);
        assert_eq!(at_level(&plan, gpu, Level::Sys).len(), 10);
    }
    assert_eq!(at_level(&plan, "GPU7", Level::Pxb), ["mlx5_8", "mlx5_9"]);
    for nic in &plan.nics {
        let is_storage = ["mlx5_4", "mlx5_5", "mlx5_10", "mlx5_11"].contains(&nic.name.as_str());
        assert_eq!(nic.gpus.len(), usize::from(!is_storage), "{}", nic.name);
    }
    let levels = |a: &str, b: &str| snapshot.host.hca_level(snapshot.host.find_hca(a)?, snapshot.host.find_hca(b)?);
    assert_eq!(levels("mlx5_4", "mlx5_5"), Some(Level::Pix));
    assert_eq!(levels("mlx5_0", "mlx5_1"), Some(Level::Pxb));
    assert_eq!(levels("mlx5_9", "mlx5_10"), Some(Level::Sys));
    assert_eq!(plan.nvlink.kind, Some(NvLinkKind::Switched));
    let host = &snapshot.host;
    let ids = [host.find_gpu("GPU0").unwrap(), host.find_gpu("GPU7").unwrap()];
    assert_eq!(host.gpu_level(ids[0], ids[1]), Some(Level::nvlink(12)));
}

#[test]
fn dgx_station_gpus_are_of_vga_class_and_have_no_nic() {
    let (host, plan) = planned("dgx-station", &[]);
    assert_eq!(gpu_addresses(&host), ["0000:07:00.0", "0000:08:00.0", "0000:0e:00.0", "0000:0f:00.0"]);
    assert_eq!(plan.nics, []);
    let level = |a: &str, b: &str| host.gpu_level(host.find_gpu(a)?, host.find_gpu(b)?);
    assert_eq!(level("0000:07:00.0", "0000:08:00.0"), Some(Level::Pix));
    assert_eq!(level("0000:0e:00.0", "0000:0f:00.0"), Some(Level::Pix));
    assert_eq!(level("0000:07:00.0", "0000:0e:00.0"), Some(Level::Phb));
    for gpu in &plan.gpus {
        assert_eq!(gpu.assigned, Vec::<String>::new());
        assert_eq!(gpu.reason, "no RDMA NIC on this host");
    }
}

#[test]
fn a_guest_with_plain_ethernet_has_neither_gpu_nor_nic() {
    for name in ["arm64-vm", "kvm-domain32", "xeon-l5640-sriov"] {
        let (host, plan) = planned(name, &[]);
        assert_eq!((host.gpus.len(), plan.nics.len()), (0, 0), "{name}");
        assert_eq!(plan.warnings, Vec::<String>::new(), "{name}");
    }
}

#[test]
fn numa_node_minus_one_is_unknown() {
    let (host, plan) = planned("kvm-p100", &[]);
    assert_eq!(gpu_addresses(&host), ["0000:06:00.0"]);
    assert_eq!(plan.gpus[0].numa, None);
    assert_eq!(plan.nics, []);
}

#[test]
fn pci_domains_may_be_wider_than_sixteen_bits() {
    let (host, _) = planned("kvm-domain32", &[]);
    for address in ["10000:00:00.0", "10000:00:04.0"] {
        let function = host.function(address.parse().unwrap()).unwrap();
        assert_eq!(host.root_bus(function.bdf).unwrap().to_string(), "pci10000:00");
    }
}

#[test]
fn functions_of_one_card_may_disagree_on_numa_and_still_hang_together() {
    let (host, _) = planned("xeon-l5640-sriov", &[]);
    let bdf = |text: &str| text.parse().unwrap();
    assert_ne!(host.numa_of(bdf("0000:05:00.0")), host.numa_of(bdf("0000:05:00.1")));
    for other in ["0000:05:00.1", "0000:05:10.0", "0000:05:11.5"] {
        assert_eq!(host.pci_level(bdf("0000:05:00.0"), bdf(other)), Some(Level::Pix), "{other}");
    }
}

#[test]
fn accelerators_named_by_the_operator_share_the_nic_of_their_switch() {
    let (host, plan) = planned("ve8-2hca-plx", &["1bcf:001c"]);
    assert_eq!(host.gpus.len(), 8);
    let sides = [(["1b", "1c", "1d", "1e"], "0000:1a:00.0"), (["3d", "3f", "40", "41"], "0000:3e:00.0")];
    for (buses, nic) in sides {
        for bus in buses {
            let gpu = format!("0000:{bus}:00.0");
            assert_eq!(at_level(&plan, &gpu, Level::Pix), [nic]);
            assert_eq!(at_level(&plan, &gpu, Level::Node).len(), 1);
            assert_eq!(assigned(&plan, &gpu), [nic]);
        }
    }
    assert!(plan.warnings.iter().any(|warning| warning.contains("class/infiniband is absent: 2 NICs")));
    let (without, _) = planned("ve8-2hca-plx", &[]);
    assert_eq!(without.gpus.len(), 0);
}

#[test]
fn machines_without_any_pci_function_are_empty() {
    for name in ["gb10-no-pci", "offline-node0"] {
        let (host, plan) = planned(name, &[]);
        assert_eq!((host.functions.len(), plan.gpus.len(), plan.nics.len()), (0, 0, 0), "{name}");
    }
    let (host, _) = planned("offline-node0", &[]);
    assert_eq!(host.sole_numa_node().unwrap().0, 1);
}

#[test]
fn an_hca_takes_its_place_and_node_from_the_link_of_bus_pci() {
    let (host, plan) = planned("qib-4package", &[]);
    let hca = host.hca(host.find_hca("qib0").unwrap()).unwrap();
    assert_eq!(hca.numa.unwrap().0, 1);
    assert_eq!(host.root_bus(hca.bdf.unwrap()).unwrap().to_string(), "pci0000:40");
    assert_eq!(plan.gpus, []);
    let (host, _) = planned("qib-2iohub", &[]);
    let hca = host.hca(host.find_hca("qib0").unwrap()).unwrap();
    assert_eq!(host.root_bus(hca.bdf.unwrap()).unwrap().to_string(), "pci0000:40");
}

#[test]
fn rdma_devices_come_from_class_infiniband_whatever_their_pci_class() {
    let (host, plan) = planned("mlx4-mic", &["8086:225c"]);
    assert_eq!(at_level(&plan, "0000:83:00.0", Level::Phb), ["mlx4_0"]);
    assert_eq!(assigned(&plan, "0000:83:00.0"), ["mlx4_0"]);
    assert_eq!(plan.gpus[0].numa.unwrap().0, 1);
    // The virtual device is listed, without level, and never preferred.
    let scif = plan.gpus[0].nics.iter().find(|nic| nic.name == "scif0").unwrap();
    assert_eq!(scif.level, None);
    assert_eq!(host.hcas.len(), 2);
}

#[test]
fn a_connectx_in_ethernet_mode_without_rdma_device_is_no_nic() {
    let (host, plan) = planned("power8-2gpu", &[]);
    assert_eq!(gpu_addresses(&host), ["0002:01:00.0", "000a:01:00.0"]);
    assert_eq!(plan.nics, []);
    assert_eq!(host.gpu_level(host.find_gpu("GPU0").unwrap(), host.find_gpu("GPU1").unwrap()), Some(Level::Sys));
    let on_nic = host.netdevs.iter().filter(|netdev| netdev.bdf.is_some_and(|bdf| bdf.to_string() == "0008:01:00.0"));
    assert_eq!(on_nic.count(), 2, "one function, two interfaces");
}

#[test]
fn rdma_devices_without_pci_function_are_listed_without_level() {
    let (host, plan) = planned("infiniband-without-pci", &[]);
    let names: Vec<&str> = plan.nics.iter().map(|nic| nic.name.as_str()).collect();
    assert_eq!(names, ["hfi1_0", "mlx4_0", "mlx5_0"]);
    assert_eq!(plan.nics[1].ports.len(), 2);
    assert_eq!(plan.nics[0].rate_gbps, Some(100.0));
    assert!(plan.nics.iter().all(|nic| nic.bdf.is_none()));
    assert_eq!(host.gpus.len(), 0);
}

/// nvidia-smi printed SYS for all of them there. We say NODE where the nodes agree: the tree says so, and it is what tells the two
/// NICs of a GPU's own CPU from the rest.
#[test]
fn gpus_and_nics_of_a_gb200_tray_belong_together_by_numa_node() {
    let (host, plan) = planned("gb200", &[]);
    for (gpus, nics, dpu) in [
        (["0008:01:00.0", "0009:01:00.0"], ["ibp3s0", "ibP2p3s0"], "roceP6p3s0"),
        (["0018:01:00.0", "0019:01:00.0"], ["ibP16p3s0", "ibP18p3s0"], "roceP22p3s0"),
    ] {
        for (gpu, nic) in gpus.iter().zip(nics) {
            assert_eq!(assigned(&plan, gpu), [nic]);
            let mut near = vec![nics[0], nics[1], dpu];
            near.sort_unstable();
            assert_eq!(at_level(&plan, gpu, Level::Node), near);
        }
    }
    let rails: Vec<Option<u32>> = plan.gpus.iter().map(|gpu| gpu.rail).collect();
    assert_eq!(rails, [Some(0), Some(1), Some(2), Some(3)], "the DPUs are no rails");
    assert_eq!(host.numa_nodes.iter().filter(|node| !node.has_cpus).count(), 2);
}

#[test]
fn each_gpu_of_an_aws_switch_gets_two_of_its_four_efa() {
    let (_, plan) = planned("aws-p5en", &[]);
    assert_eq!(assigned(&plan, "0000:59:00.0"), ["rdmap85s0", "rdmap86s0"]);
    assert_eq!(assigned(&plan, "0000:5a:00.0"), ["rdmap87s0", "rdmap88s0"]);
    for gpu in &plan.gpus {
        assert_eq!(gpu.assigned.len(), 2);
        assert_eq!(at_level(&plan, &gpu.name, Level::Pix).len(), 4);
    }
}

#[test]
fn a_flat_guest_spreads_evenly_and_says_that_nothing_is_known() {
    let (_, plan) = planned("flat-vm", &[]);
    for (place, gpu) in plan.gpus.iter().enumerate() {
        assert_eq!(gpu.assigned, [format!("mlx5_{place}")]);
        assert_eq!(at_level(&plan, &gpu.name, Level::Phb).len(), 8);
    }
    assert_eq!(plan.warnings.len(), 1);
    assert!(plan.warnings[0].contains("the PCI tree is flat"));
}

#[test]
fn a_host_without_gpu_lists_its_nics_and_their_cards() {
    let (_, plan) = planned("rdma-no-gpu", &[]);
    assert_eq!(plan.gpus, []);
    assert_eq!(plan.nics.len(), 3);
    assert_eq!(plan.nics[0].card, plan.nics[1].card);
    assert_ne!(plan.nics[0].card, plan.nics[2].card);
}
