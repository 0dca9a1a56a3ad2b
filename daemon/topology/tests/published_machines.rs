//! Machines known by hwloc exports, lspci listings and lists of pairs: facts in tests/fixtures/hosts or here, each
//! with the answer that was worked out before there was a reader.
#![allow(clippy::panic, clippy::unwrap_used, reason = "helpers of tests, which clippy does not know as such")]

mod common;

use std::collections::BTreeSet;

use common::{assert_plan_keeps_the_rules, by_level};
use gdrd_topology::assemble::ReadOptions;
use gdrd_topology::gdr::GdrState;
use gdrd_topology::level::Level;
use gdrd_topology::model::{GpuId, Snapshot};
use gdrd_topology::plan::contract::Plan;
use gdrd_topology::plan::{PlanOptions, explain, plan};
use gdrd_topology::profile;

fn read(text: &str) -> (Snapshot, Plan) {
    let snapshot = profile::snapshot(text, None, &ReadOptions::default()).unwrap();
    let plan = plan(&snapshot, &PlanOptions::default());
    (snapshot, plan)
}

fn fixture(name: &str) -> String {
    let path = format!("{}/../../tests/fixtures/hosts/{name}.host", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(path).unwrap()
}

fn machine(name: &str) -> (Snapshot, Plan) {
    let (snapshot, plan) = read(&fixture(name));
    assert_plan_keeps_the_rules(name, &snapshot, &plan);
    (snapshot, plan)
}

/// Addresses of the NICs nearest to a GPU, with their level.
fn nearest(snapshot: &Snapshot, gpu: &str) -> (Level, Vec<String>) {
    let host = &snapshot.host;
    let (level, names) = by_level(host, host.find_gpu(gpu).unwrap()).into_iter().next().unwrap();
    let address = |name: &String| host.hca(host.find_hca(name).unwrap()).unwrap().bdf.unwrap().to_string();
    let mut addresses: Vec<String> = names.iter().map(address).collect();
    addresses.sort();
    (level, addresses)
}

/// `0000:BB:00.0` for each bus.
fn at(buses: &[u8]) -> Vec<String> {
    buses.iter().map(|bus| format!("0000:{bus:02x}:00.0")).collect()
}

#[test]
fn an_aws_p5_has_four_efa_below_the_switch_of_each_gpu() {
    let (snapshot, plan) = machine("hwloc-aws-p5");
    assert_eq!((snapshot.host.gpus.len(), snapshot.host.hcas.len()), (8, 32));
    let right: [(u8, [u8; 4], u16); 8] = [
        (0x53, [0x4f, 0x50, 0x51, 0x52], 0),
        (0x64, [0x60, 0x61, 0x62, 0x63], 0),
        (0x75, [0x71, 0x72, 0x73, 0x74], 0),
        (0x86, [0x82, 0x83, 0x84, 0x85], 0),
        (0x97, [0x93, 0x94, 0x95, 0x96], 1),
        (0xa8, [0xa4, 0xa5, 0xa6, 0xa7], 1),
        (0xb9, [0xb5, 0xb6, 0xb7, 0xb8], 1),
        (0xca, [0xc6, 0xc7, 0xc8, 0xc9], 1),
    ];
    for (gpu, efa, numa) in right {
        let gpu = &at(&[gpu])[0];
        assert_eq!(nearest(&snapshot, gpu), (Level::Pix, at(&efa)), "{gpu}");
        let planned = plan.gpu(gpu).unwrap();
        assert_eq!((planned.assigned.len(), planned.numa.map(|numa| numa.0)), (4, Some(numa)), "{gpu}");
    }
}

#[test]
fn an_aws_p4d_without_switches_pairs_by_root_bus_as_its_vendor_has_it() {
    let (snapshot, _) = machine("hwloc-aws-p4d");
    for (root, numa) in [("10", 0), ("20", 0), ("90", 1), ("a0", 1)] {
        for device in ["1c", "1d"] {
            let gpu = format!("0000:{root}:{device}.0");
            assert_eq!(nearest(&snapshot, &gpu), (Level::Phb, vec![format!("0000:{root}:1b.0")]));
            let id = snapshot.host.find_gpu(&gpu).unwrap();
            assert_eq!(snapshot.host.gpu(id).unwrap().numa.map(|numa| numa.0), Some(numa));
        }
    }
}

#[test]
fn one_nic_on_one_node_is_node_to_its_half_and_sys_to_the_other() {
    let (snapshot, plan) = machine("hwloc-aws-g6");
    for (gpus, level) in [([0x9f, 0xa1, 0xa3, 0xa5], Level::Node), ([0xae, 0xb0, 0xb2, 0xb4], Level::Sys)] {
        for gpu in at(&gpus) {
            assert_eq!(nearest(&snapshot, &gpu), (level, at(&[0x96])), "{gpu}");
        }
    }
    assert!(plan.gpus.iter().all(|gpu| gpu.assigned == ["rdmap150s0"]));
}

#[test]
fn a_root_bus_of_both_nodes_makes_every_pair_phb_and_the_node_of_the_nic_unknown() {
    for name in ["hwloc-aws-g5", "hwloc-aws-p3dn"] {
        let (snapshot, _) = machine(name);
        assert_eq!(snapshot.host.gpus.len(), 8, "{name}");
        for device in 0x16..=0x1d {
            let nearest = nearest(&snapshot, &format!("0000:00:{device:02x}.0"));
            assert_eq!(nearest, (Level::Phb, vec!["0000:00:15.0".to_owned()]), "{name}");
        }
        assert_eq!(snapshot.host.hcas[0].numa, None, "{name}");
    }
    let (snapshot, plan) = machine("hwloc-aws-c5n");
    assert_eq!((plan.gpus.len(), snapshot.host.hcas.len(), snapshot.host.hcas[0].numa), (0, 1, None));
}

#[test]
fn a_dgx2_has_its_gpus_in_pairs_and_leaves_out_what_fell_off_the_bus() {
    let (snapshot, _) = machine("hwloc-dgx2");
    let host = &snapshot.host;
    let gpu = |bus: u8| host.find_gpu(&at(&[bus])[0]).unwrap();
    for (a, b) in
        [(0x34, 0x36), (0x39, 0x3b), (0x57, 0x59), (0x5c, 0x5e), (0xb7, 0xb9), (0xbc, 0xbe), (0xe0, 0xe2), (0xe5, 0xe7)]
    {
        assert_eq!(host.gpu_level(gpu(a), gpu(b)), Some(Level::Pix), "{a:x} {b:x}");
    }
    assert_eq!(host.gpu_level(gpu(0x34), gpu(0x39)), Some(Level::Pxb));
    assert_eq!(host.gpu_level(gpu(0x34), gpu(0x57)), Some(Level::Node));
    assert_eq!(host.gpu_level(gpu(0x34), gpu(0xb7)), Some(Level::Sys));
    assert_eq!(host.gpus.len(), 16);
    assert!(host.warnings.iter().any(|warning| warning.contains("0000:66:00.0: does not answer")));
}

#[test]
fn an_hca_of_the_old_infiniband_class_is_phb_to_the_gpu_of_its_root_bus() {
    let (snapshot, _) = machine("hwloc-24em64t");
    assert_eq!(nearest(&snapshot, "0000:06:00.0"), (Level::Phb, at(&[0x05])));
    for gpu in ["0000:11:00.0", "0000:14:00.0"] {
        assert_eq!(nearest(&snapshot, gpu), (Level::Sys, at(&[0x05])));
    }
}

#[test]
fn hosts_with_gpus_or_functions_but_no_nic_are_read_whole() {
    let (snapshot, plan) = machine("hwloc-power8");
    let domains: Vec<u32> = snapshot.host.gpus.iter().map(|gpu| gpu.bdf.unwrap().domain).collect();
    assert_eq!(domains, [2, 3, 0xa, 0xb]);
    assert!(plan.gpus.iter().all(|gpu| gpu.reason == "no RDMA NIC on this host"));
    let (snapshot, plan) = machine("hwloc-many-vfs");
    assert_eq!((plan.gpus.len(), plan.nics.len()), (0, 0));
    assert!(snapshot.host.functions.len() > 20);
}

#[test]
fn a_gpu_behind_the_switch_of_its_own_bluefield_pairs_with_it() {
    let (snapshot, plan) = machine("lspci-a100x");
    for (gpu, card, names) in [("de", "da", ["mlx5_2", "mlx5_3"]), ("41", "3d", ["mlx5_0", "mlx5_1"])] {
        let gpu = format!("0000:{gpu}:00.0");
        let ports = vec![format!("0000:{card}:00.0"), format!("0000:{card}:00.1")];
        assert_eq!(nearest(&snapshot, &gpu), (Level::Pxb, ports));
        assert_eq!(plan.gpu(&gpu).unwrap().assigned, names);
    }
    assert_eq!(plan.nics.len(), 4, "the management function is no NIC");
}

#[test]
fn a_gpu_without_nic_on_its_switch_takes_one_of_its_node() {
    let (_, plan) = machine("lspci-h20");
    assert_eq!(plan.gpu("0001:c7:00.0").unwrap().assigned, ["mlx5_1"]);
    assert_eq!(plan.gpu("0001:c7:00.0").unwrap().nics[0].level, Some(Level::Node));
    assert_eq!(plan.gpu("0000:17:01.0").unwrap().assigned, ["mlx5_0"], "the other GPU is unaffected");
}

#[test]
fn the_near_and_the_far_gpu_of_a_switch_tree_share_its_one_nic() {
    let (snapshot, plan) = machine("lspci-h200-4nic");
    let right = [
        (0x18, 0x17, Level::Pix),
        (0x0a, 0x17, Level::Pxb),
        (0x45, 0x44, Level::Pix),
        (0x3c, 0x44, Level::Pxb),
        (0x90, 0x8f, Level::Pix),
        (0x87, 0x8f, Level::Pxb),
        (0xc2, 0xc1, Level::Pix),
        (0xb9, 0xc1, Level::Pxb),
    ];
    for (gpu, nic, level) in right {
        assert_eq!(nearest(&snapshot, &at(&[gpu])[0]), (level, at(&[nic])), "{gpu:x}");
    }
    assert!(plan.nics.iter().all(|nic| nic.gpus.len() == 2));
}

#[test]
fn virtual_switches_pair_whatever_speed_they_claim() {
    let (snapshot, plan) = machine("lspci-h200-kvm");
    let host = &snapshot.host;
    let pairs = [
        (0x68, 0x67),
        (0x6b, 0x6c),
        (0x70, 0x6f),
        (0x73, 0x74),
        (0xcc, 0xcb),
        (0xcf, 0xd0),
        (0xd3, 0xd4),
        (0xd8, 0xd7),
    ];
    for (gpu, nic) in pairs {
        let gpu = &at(&[gpu])[0];
        assert_eq!(nearest(&snapshot, gpu), (Level::Pix, at(&[nic])), "{gpu}");
        let counts: Vec<usize> = by_level(host, host.find_gpu(gpu).unwrap()).values().map(|nics| nics.len()).collect();
        assert_eq!(counts, [1, 3, 4], "PIX, PHB, SYS of {gpu}");
        // The port is the narrowest part, not the 2 Gbit/s that the made-up bridges claim.
        assert_eq!(plan.gpu(gpu).unwrap().nics[0].gbps, Some(400.0));
    }
}

#[test]
fn both_gpus_of_a_microchip_switch_have_its_nic() {
    let (snapshot, plan) = machine("lspci-mi100");
    for gpu in [0x4a, 0x50] {
        assert_eq!(nearest(&snapshot, &at(&[gpu])[0]), (Level::Pxb, at(&[0x45])));
    }
    assert_eq!(plan.nics[0].gpus, ["GPU0", "GPU1"]);
}

#[test]
fn virtual_functions_have_the_place_of_their_physical_one_and_are_not_given() {
    let (snapshot, plan) = read(&fixture("lspci-v100-vfs"));
    let host = &snapshot.host;
    for gpu in ["0000:5c:00.0", "0000:60:00.0"] {
        let levels = by_level(host, host.find_gpu(gpu).unwrap());
        assert_eq!(levels.len(), 1, "{levels:?}");
        assert_eq!(levels[&Level::Pix].len(), 8);
    }
    let (level, nearest) = nearest(&snapshot, "0000:70:00.0");
    assert_eq!(
        (level, nearest.len()),
        (Level::Pxb, 8),
        "of one card, and so for 6c, 74 and 78, which the listing leaves out"
    );
    assert!(plan.nics.iter().all(|nic| nic.card == host.hcas[0].card), "one card");
    let given: Vec<&str> = plan.nics.iter().filter(|nic| !nic.gpus.is_empty()).map(|nic| nic.name.as_str()).collect();
    assert_eq!(given, ["mlx5_0", "mlx5_1"]);
}

/// NVIDIA/k8s-launch-kit, PowerEdge-XE9680: GPU4 has a second PIX card, the front-end DPU. The rates are made up;
/// they, and the operator's word, are what tells the two apart.
#[test]
fn a_front_end_dpu_as_near_as_the_compute_nic_is_not_given() {
    let mut text = "gdrd-host-profile 1\nnuma 1\nroot pci0000:98 numa=1\n\
        pci 0000:98:01.0 8086:352a 060400 pci0000:98 -\npci 0000:99:00.0 1000:c030 060400 0000:98:01.0 -\n"
        .to_owned();
    for (port, device, ids) in [(0, "9b:00.0", "10de:2335 030200"), (1, "9c:00.0", "15b3:a2dc 020000")] {
        text += &format!(
            "pci 0000:9a:0{port}.0 1000:c030 060400 0000:99:00.0 -\npci 0000:{device} {ids} 0000:9a:0{port}.0 -\n"
        );
    }
    text += "pci 0000:9a:02.0 1000:c030 060400 0000:99:00.0 -\n\
        pci 0000:9d:00.0 15b3:a2dc 020000 0000:9a:02.0 -\npci 0000:9d:00.1 15b3:a2dc 020000 0000:9a:02.0 -\n\
        hca rocep156s0f0 0000:9c:00.0\nhca rocep157s0f0 0000:9d:00.0\n\
        net eth1 0000:9d:00.0 default-route\n";
    for (name, rate) in [("rocep156s0f0", 400), ("rocep157s0f0", 200)] {
        text += &format!("port {name} 1 ACTIVE Ethernet {rate}\n");
    }
    let (snapshot, plan) = read(&text);
    assert_eq!(nearest(&snapshot, "GPU0"), (Level::Pix, at(&[0x9c, 0x9d])));
    assert_eq!(plan.gpus[0].assigned, ["rocep156s0f0"]);
}

/// NVIDIA/NVSentinel, on-prem L40S: five NICs, all NODE; the Ethernet one carries the default route.
#[test]
fn the_nic_of_the_default_route_comes_after_its_equals() {
    let mut text = "gdrd-host-profile 1\nnuma 0\n".to_owned();
    for (bus, ids) in [(0x16, "10de:26b9 030200"), (0x38, "10de:26b9 030200")] {
        text +=
            &format!("root pci0000:{:02x} numa=0\npci 0000:{bus:02x}:00.0 {ids} pci0000:{:02x} -\n", bus - 1, bus - 1);
    }
    for nic in 0..5 {
        let (bus, class, layer) = (
            0x50 + 16 * nic,
            if nic == 0 { "020000" } else { "020700" },
            if nic == 0 { "Ethernet" } else { "InfiniBand" },
        );
        text += &format!(
            "root pci0000:{bus:02x} numa=0\npci 0000:{bus:02x}:00.0 15b3:1021 {class} pci0000:{bus:02x} -\n\
             hca mlx5_{nic} 0000:{bus:02x}:00.0\nport mlx5_{nic} 1 ACTIVE {layer} 400\n"
        );
    }
    text += "net eth0 0000:50:00.0 default-route\n";
    let (snapshot, plan) = read(&text);
    assert_eq!(nearest(&snapshot, "GPU0").1.len(), 5);
    let mut given: Vec<&str> = plan.gpus.iter().flat_map(|gpu| gpu.assigned.iter().map(String::as_str)).collect();
    given.sort_unstable();
    assert_eq!(given, ["mlx5_1", "mlx5_2", "mlx5_3", "mlx5_4"]);
    assert!(plan.gpus.iter().all(|gpu| gpu.assigned.len() == 2));
}

/// NVIDIA/k8s-launch-kit, DGX Spark: numa_node is -1 and the host has one node, so everything is on it; the NIC is one
/// card of four functions in two domains, and its GPU offers memory to no NIC.
#[test]
fn a_dgx_spark_has_one_card_in_two_domains_and_no_gpudirect() {
    let mut text =
        "gdrd-host-profile 1\nnuma 0 cpus=0-19\nroot pci000f:00\npci 000f:00:00.0 10de:22ce 060400 pci000f:00 -\n\
        pci 000f:01:00.0 10de:2e12 030000 000f:00:00.0 -\n"
            .to_owned();
    let names = [
        ("0000", 0, "rocep1s0f0"),
        ("0000", 1, "rocep1s0f1"),
        ("0002", 0, "roceP2p1s0f0"),
        ("0002", 1, "roceP2p1s0f1"),
    ];
    for domain in ["0000", "0002"] {
        text += &format!("root pci{domain}:00\npci {domain}:00:00.0 10de:22ce 060400 pci{domain}:00 -\n");
    }
    for (domain, function, name) in names {
        text += &format!(
            "pci {domain}:01:00.{function} 15b3:1021 020000 {domain}:00:00.0 32x4\nhca {name} {domain}:01:00.{function} \
             node_guid=0000:0000:{domain}:000{function} sys_image_guid=0000:0000:0000:0001\nport {name} 1 ACTIVE Ethernet 200\n"
        );
    }
    let (snapshot, plan) = read(&text);
    let levels = by_level(&snapshot.host, snapshot.host.find_gpu("GPU0").unwrap());
    assert_eq!(levels.keys().collect::<Vec<_>>(), [&Level::Node]);
    assert_eq!(plan.gpus[0].nics.len(), 4);
    assert!(plan.nics.iter().all(|nic| nic.card == plan.nics[0].card), "one card");
    assert!(plan.gpus[0].nics.iter().all(|nic| nic.gdr.state == GdrState::Impossible));
    let domains: std::collections::BTreeSet<u32> =
        plan.nics.iter().filter(|nic| !nic.gpus.is_empty()).map(|nic| nic.bdf.unwrap().domain).collect();
    assert_eq!(domains.len(), 2, "full speed needs one function of each domain");
}

/// NVIDIA/k8s-launch-kit, ThinkSystem SR675 V3, whole: addresses, nodes and names as published; bridges are made up, and so
/// are the rates.
fn lenovo_sr675(has_rates: bool) -> Snapshot {
    const CONNECTX_7: (u16, u16) = (0x1021, 200);
    const CONNECTX_6_LX: (u16, u16) = (0x101f, 25);
    const BLUEFIELD_3: (u16, u16) = (0xa2dc, 200);
    // Root bus, node, GPUs, and the card below the same switch: its bus, the first of its two names, its kind and rate.
    type Switch = (u8, u8, &'static [u8], Option<(u8, u8, (u16, u16))>);
    let switches: [Switch; 7] = [
        (0x10, 0, &[0x14, 0x15], None),
        (0x20, 0, &[], Some((0x21, 2, CONNECTX_7))),
        (0x40, 0, &[], Some((0x41, 0, CONNECTX_6_LX))),
        (0x60, 0, &[0x63, 0x64], Some((0x65, 6, CONNECTX_7))),
        (0x80, 1, &[0x83, 0x84], Some((0x85, 10, BLUEFIELD_3))),
        (0xc0, 1, &[], Some((0xc1, 8, CONNECTX_7))),
        (0xe0, 1, &[0xe3, 0xe4], Some((0xe5, 4, CONNECTX_7))),
    ];
    let mut text = "gdrd-host-profile 1\nnuma 0\nnuma 1\n".to_owned();
    for (root, numa, gpus, card) in switches {
        let (up, down) = (root + 8, root + 9);
        text += &format!(
            "root pci0000:{root:02x} numa={numa}\npci 0000:{root:02x}:01.0 1022:14ab 060400 pci0000:{root:02x} -\n\
             pci 0000:{up:02x}:00.0 1000:c030 060400 0000:{root:02x}:01.0 -\n"
        );
        for bus in gpus.iter().copied().chain(card.map(|(bus, ..)| bus)) {
            let below = format!("0000:{down:02x}:{:02x}.0", bus & 0xf);
            text += &format!("pci {below} 1000:c030 060400 0000:{up:02x}:00.0 -\n");
            if gpus.contains(&bus) {
                text += &format!("pci 0000:{bus:02x}:00.0 10de:2bb5 030200 {below} -\n");
            }
        }
        let Some((bus, first, (kind, rate))) = card else { continue };
        for function in 0..2 {
            let (name, address) = (first + function, format!("0000:{bus:02x}:00.{function}"));
            text += &format!(
                "pci {address} 15b3:{kind:04x} 020000 0000:{down:02x}:{:02x}.0 -\nhca mlx5_{name} {address}\n",
                bus & 0xf
            );
            if has_rates {
                text += &format!("port mlx5_{name} 1 ACTIVE Ethernet {rate}\n");
            }
        }
    }
    profile::snapshot(&text, None, &ReadOptions::default()).unwrap()
}

/// Both ports of a card are PIX to both GPUs of its switch, one each. GPU0 and GPU1 have no NIC on their switch: of those
/// of their node they take the compute card, and not the slow one of another kind besides.
#[test]
fn the_ports_of_a_card_go_to_the_gpus_of_its_switch_one_each() {
    for has_rates in [false, true] {
        let snapshot = lenovo_sr675(has_rates);
        let host = &snapshot.host;
        let levels = |gpu: usize, level| by_level(host, GpuId(gpu)).get(&level).cloned().unwrap_or_default();
        for gpu in [0, 1] {
            assert_eq!(levels(gpu, Level::Pix), BTreeSet::new());
            let near = ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3", "mlx5_6", "mlx5_7"].map(str::to_owned);
            assert_eq!(levels(gpu, Level::Node), BTreeSet::from(near));
        }
        let plan = plan(&snapshot, &PlanOptions::default());
        let right = ["mlx5_2", "mlx5_3", "mlx5_6", "mlx5_7", "mlx5_10", "mlx5_11", "mlx5_4", "mlx5_5"];
        for (gpu, nic) in right.into_iter().enumerate() {
            assert_eq!(plan.gpus[gpu].assigned, [nic], "GPU{gpu}, rates told: {has_rates}");
        }
        let why = explain(&snapshot, &PlanOptions::default(), Some(&plan), "GPU0").unwrap();
        let lost = why.losers.iter().find(|loser| loser.nic == "mlx5_0").unwrap();
        assert!(lost.why.starts_with("equally near, but it "), "{}", lost.why);
        assert!(lost.why.ends_with("is of another kind than most"), "{}", lost.why);
    }
}

/// The list calls mlx5_10 and mlx5_11, a DPU, north-south, and wants mlx5_8 and mlx5_9 of the node for GPU4 and GPU5. We
/// disagree: the level comes first, and NICs below the GPU's own switch do not cross the root; that they lead to another
/// network stands nowhere in the tree. Who knows it says so, and has the NICs the list wants.
#[test]
fn a_dpu_that_is_alone_on_the_switch_is_given_until_the_operator_leaves_it_out() {
    let snapshot = lenovo_sr675(true);
    let pix = ["mlx5_10", "mlx5_11"].map(str::to_owned);
    for gpu in [4, 5] {
        assert_eq!(by_level(&snapshot.host, GpuId(gpu))[&Level::Pix], BTreeSet::from(pix.clone()));
    }
    let unfiltered = plan(&snapshot, &PlanOptions::default());
    let reason = &unfiltered.gpu("GPU4").unwrap().reason;
    assert!(reason.ends_with("; mlx5_10 is of another kind than most"), "{reason}");
    let filter = Some("^=mlx5_10,mlx5_11".parse().unwrap());
    let plan = plan(&snapshot, &PlanOptions { filter, ..PlanOptions::default() });
    let right = ["mlx5_2", "mlx5_3", "mlx5_6", "mlx5_7", "mlx5_8", "mlx5_9", "mlx5_4", "mlx5_5"];
    for (gpu, nic) in right.into_iter().enumerate() {
        assert_eq!(plan.gpus[gpu].assigned, [nic], "GPU{gpu}");
    }
}
