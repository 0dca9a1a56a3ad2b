//! What went wrong in other projects, each report as a small host with the right answer beside it. Reports whose
//! machine is a case of its own (tests/cases, tests/fixtures/hosts) are tested there.
#![allow(clippy::panic, clippy::unwrap_used, reason = "helpers of tests, which clippy does not know as such")]

use std::collections::BTreeMap;

use gdrd_topology::assemble::ReadOptions;
use gdrd_topology::gdr::{Gdr, GdrState};
use gdrd_topology::level::Level;
use gdrd_topology::model::{HcaOrigin, Snapshot};
use gdrd_topology::plan::contract::Plan;
use gdrd_topology::plan::{NicFilter, PlanOptions, explain, plan};
use gdrd_topology::{profile, read_root, sysfs};

fn read(lines: &str) -> Snapshot {
    let text = format!("gdrd-host-profile 1\n{lines}\n");
    profile::snapshot(&text, None, &ReadOptions::default()).unwrap()
}

/// The same by way of a sysfs tree.
fn read_as_tree(lines: &str) -> Snapshot {
    let folder = tempfile::tempdir().unwrap();
    sysfs::build::build(&read(lines).host, folder.path()).unwrap();
    read_root(folder.path(), &ReadOptions::default()).unwrap()
}

fn planned(snapshot: &Snapshot) -> Plan {
    plan(snapshot, &PlanOptions::default())
}

fn level(snapshot: &Snapshot, gpu: &str, nic: &str) -> Option<Level> {
    snapshot.host.gpu_hca_level(snapshot.host.find_gpu(gpu).unwrap(), snapshot.host.find_hca(nic).unwrap())
}

fn assigned<'a>(plan: &'a Plan, gpu: &str) -> Vec<&'a str> {
    plan.gpu(gpu).unwrap().assigned.iter().map(String::as_str).collect()
}

/// kvcache-ai/Mooncake#581: compared as text, the paths of two devices of one switch end one part too early.
#[test]
fn devices_of_one_switch_meet_at_their_common_bridge() {
    let host = read_as_tree(
        "root pci0000:b2\n\
         pci 0000:b2:03.1 1022:1483 060400 pci0000:b2 -\n\
         pci 0000:b9:00.0 1000:c010 060400 0000:b2:03.1 -\n\
         pci 0000:ba:00.0 1000:c010 060400 0000:b9:00.0 -\n\
         pci 0000:ba:01.0 1000:c010 060400 0000:b9:00.0 -\n\
         pci 0000:bb:00.0 15b3:1021 020700 0000:ba:00.0 -\n\
         pci 0000:bc:00.0 10de:20b0 030200 0000:ba:01.0 -\n\
         hca mlx5_0 0000:bb:00.0",
    );
    assert_eq!(level(&host, "GPU0", "mlx5_0"), Some(Level::Pix));
}

/// Two nodes, each with a GPU and a NIC right on a root bus of their own, and one NIC more on the second.
const TWO_NODES: &str = "numa 0\nnuma 1\n\
    root pci0000:10 numa=0\nroot pci0000:20 numa=0\nroot pci0000:80 numa=1\nroot pci0000:90 numa=1\n\
    pci 0000:10:01.0 10de:2330 030200 pci0000:10 -\n\
    pci 0000:20:01.0 15b3:1021 020700 pci0000:20 -\n\
    pci 0000:80:01.0 10de:2330 030200 pci0000:80 -\n\
    pci 0000:90:01.0 15b3:1021 020700 pci0000:90 -\n\
    hca mlx5_0 0000:20:01.0\nhca mlx5_1 0000:90:01.0";

/// kvcache-ai/Mooncake#1086: NICs of the other node among the preferred ones, 3 to 5 times the latency.
#[test]
fn nics_of_the_other_node_are_never_among_the_preferred() {
    let plan = planned(&read(TWO_NODES));
    assert_eq!(assigned(&plan, "GPU0"), ["mlx5_0"]);
    assert_eq!(assigned(&plan, "GPU1"), ["mlx5_1"]);
    assert_eq!(plan.gpus[0].nics[1].level, Some(Level::Sys), "it is listed, as farther");
}

/// kvcache-ai/Mooncake#2015: a position in the list of NICs taken for a GPU number switched off 6 of 10 NICs.
#[test]
fn more_nics_than_gpus_all_stay_usable() {
    let mut lines = "numa 0\n".to_owned();
    for (bus, ids) in
        (0x10..0x14).map(|bus| (bus, "10de:2941 030200")).chain((0x20..0x2a).map(|bus| (bus, "15b3:1021 020700")))
    {
        lines += &format!("root pci0000:{bus:02x} numa=0\npci 0000:{bus:02x}:01.0 {ids} pci0000:{bus:02x} -\n");
        if bus >= 0x20 {
            lines += &format!("hca mlx5_{} 0000:{bus:02x}:01.0\n", bus - 0x20);
        }
    }
    let plan = planned(&read(&lines));
    assert_eq!((plan.gpus.len(), plan.nics.len()), (4, 10));
    assert!(plan.gpus.iter().all(|gpu| gpu.nics.len() == 10 && gpu.assigned.len() == 2));
    assert!(plan.warnings.iter().all(|warning| !warning.contains("never given")), "{:?}", plan.warnings);
}

/// ai-dynamo/nixl#1184: with some GPUs hidden, the place in the visible list was looked up in the list of all.
#[test]
fn a_gpu_is_asked_for_by_address_or_uuid_whatever_is_visible() {
    let all = read(&format!("{TWO_NODES}\ngpu 0000:80:01.0 uuid=GPU-b"));
    let visible = read(&TWO_NODES.replace("pci 0000:10:01.0 10de:2330 030200 pci0000:10 -\n", ""));
    for (snapshot, names) in
        [(&all, &["0000:80:01.0", "00000000:80:01.0", "GPU-b"][..]), (&visible, &["0000:80:01.0", "00000000:80:01.0"])]
    {
        for name in names {
            assert_eq!(assigned(&planned(snapshot), name), ["mlx5_1"], "{name}");
            assert_eq!(explain(snapshot, &PlanOptions::default(), None, name).unwrap().winners[0].nic, "mlx5_1");
        }
    }
}

/// NVIDIA/nccl#820: the virtual bridges of a PEX88096 make one NIC look farther; both GPUs went to the other one.
#[test]
fn virtual_bridges_of_one_switch_do_not_put_two_gpus_on_one_nic() {
    let switch = |bridge: &str, parent: &str| format!("pci {bridge} 1000:c010 060400 {parent} - sub=1000:a096\n");
    let lines = [
        "root pci0000:20\npci 0000:20:01.0 1022:1483 060400 pci0000:20 -\n".to_owned(),
        switch("0000:21:00.0", "0000:20:01.0"),
        switch("0000:22:00.0", "0000:21:00.0"),
        switch("0000:22:01.0", "0000:21:00.0"),
        switch("0000:22:02.0", "0000:21:00.0"),
        switch("0000:22:03.0", "0000:21:00.0"),
        // The extra pair, above the second NIC alone.
        switch("0000:26:00.0", "0000:22:03.0"),
        switch("0000:27:00.0", "0000:26:00.0"),
        "pci 0000:23:00.0 10de:20b0 030200 0000:22:00.0 -\npci 0000:24:00.0 10de:20b0 030200 0000:22:01.0 -\n"
            .to_owned(),
        "pci 0000:25:00.0 15b3:101b 020700 0000:22:02.0 -\npci 0000:28:00.0 15b3:101b 020700 0000:27:00.0 -\n"
            .to_owned(),
        "hca mlx5_0 0000:25:00.0\nhca mlx5_1 0000:28:00.0".to_owned(),
    ]
    .concat();
    let snapshot = read(&lines);
    let plan = planned(&snapshot);
    assert_eq!([assigned(&plan, "GPU0"), assigned(&plan, "GPU1")].concat().len(), 2);
    assert_ne!(assigned(&plan, "GPU0"), assigned(&plan, "GPU1"));
    // nvidia-smi's words for the levels stay as they are.
    assert_eq!(
        [level(&snapshot, "GPU0", "mlx5_0"), level(&snapshot, "GPU0", "mlx5_1")],
        [Some(Level::Pix), Some(Level::Pxb)]
    );
    // Bridges of another make below it are another switch: then the near NIC is the only nearest one.
    let two = lines
        .replace("0000:26:00.0 1000:c010", "0000:26:00.0 10b5:9797")
        .replace("0000:27:00.0 1000:c010", "0000:27:00.0 10b5:9797");
    let plan = planned(&read(&two));
    assert_eq!([assigned(&plan, "GPU0"), assigned(&plan, "GPU1")], [["mlx5_0"], ["mlx5_0"]]);
}

/// deepseek-ai/DeepEP#386: devices whose names did not begin with mlx5 were skipped.
#[test]
fn no_rdma_device_is_left_out_for_its_name() {
    let names = ["bnxt_re0", "ibp177s0f0", "rdmap82s0", "roce_rail0", "rocep9s0f0"];
    let mut lines = "root pci0000:10\n".to_owned();
    for (place, name) in names.iter().enumerate() {
        lines += &format!("pci 0000:10:0{place}.0 15b3:1021 020000 pci0000:10 -\nhca {name} 0000:10:0{place}.0\n");
    }
    lines += "pci 0000:10:1f.0 10de:2330 030200 pci0000:10 -";
    let snapshot = read_as_tree(&lines);
    let mut given = planned(&snapshot).gpus[0].assigned.clone();
    given.sort();
    assert_eq!(given, names);
}

/// NVIDIA/NVSentinel#1485, meta-pytorch/torchcomms#2295: a siw device made the scan fail, or was dropped.
#[test]
fn software_devices_are_listed_without_level_and_fail_nothing() {
    let snapshot =
        read_as_tree(&format!("{TWO_NODES}\nhca siw_eth0 -\nport siw_eth0 1 ACTIVE Ethernet 10\nhca scif0 -"));
    let soft: Vec<&str> = snapshot
        .host
        .hcas
        .iter()
        .filter(|hca| matches!(hca.origin, HcaOrigin::Soft { .. }))
        .map(|hca| hca.name.as_str())
        .collect();
    assert_eq!(soft, ["scif0", "siw_eth0"]);
    assert_eq!(level(&snapshot, "GPU0", "siw_eth0"), None);
    assert_eq!(assigned(&planned(&snapshot), "GPU0"), ["mlx5_0"]);
}

/// NVIDIA/nccl#856, NVIDIA/nccl#1277: hosts of one kind with other names or wiring after boot.
#[test]
fn each_host_is_paired_by_its_own_wiring() {
    let swapped = TWO_NODES
        .replace("hca mlx5_0 0000:20", "hca mlx5_x 0000:20")
        .replace("mlx5_1", "mlx5_0")
        .replace("mlx5_x", "mlx5_1");
    assert_eq!(assigned(&planned(&read(TWO_NODES)), "GPU0"), ["mlx5_0"]);
    assert_eq!(assigned(&planned(&read(&swapped)), "GPU0"), ["mlx5_1"]);
}

/// nebius/ml-cookbook#43, kvcache-ai/Mooncake#2760: DPUs, virtual and storage functions as near as the compute NIC.
#[test]
fn a_front_end_nic_as_near_is_left_to_rate_link_layer_and_the_operator() {
    let lines = "root pci0000:10\npci 0000:10:01.0 10de:2330 030200 pci0000:10 -\n\
        pci 0000:10:02.0 15b3:a2dc 020000 pci0000:10 -\npci 0000:10:03.0 15b3:a2dc 020000 pci0000:10 -\n\
        pci 0000:10:04.0 15b3:a2dc 020000 pci0000:10 -\nhca mlx5_0 0000:10:02.0\nhca mlx5_1 0000:10:03.0\nhca mlx5_2 0000:10:04.0\n\
        port mlx5_0 1 ACTIVE Ethernet 100\nport mlx5_1 1 ACTIVE Ethernet 400\nport mlx5_2 1 ACTIVE Ethernet 400";
    let snapshot = read(lines);
    assert_eq!(assigned(&planned(&snapshot), "GPU0"), ["mlx5_1", "mlx5_2"]);
    let filter: NicFilter = "^=mlx5_1".parse().unwrap();
    let options = PlanOptions { filter: Some(filter), ..PlanOptions::default() };
    assert!(!assigned(&plan(&snapshot, &options), "GPU0").contains(&"mlx5_1"));
}

/// sgl-project/sglang#8324: in this guest the NIC of the other switch cannot reach the GPU at all.
#[test]
fn a_pair_can_be_impossible_and_not_only_far() {
    let snapshot = read(TWO_NODES);
    let failed = Gdr { state: GdrState::Failed, reason: "probe: remote access error".to_owned() };
    let gdr = BTreeMap::from([(("0000:10:01.0".to_owned(), "mlx5_1".to_owned()), failed.clone())]);
    let plan = plan(&snapshot, &PlanOptions { gdr, ..PlanOptions::default() });
    let state = |nic: &str| plan.gpus[0].nics.iter().find(|pair| pair.name == nic).unwrap().gdr.clone();
    assert_eq!(state("mlx5_1"), failed);
    assert_eq!(state("mlx5_0").state, GdrState::Unknown, "not probed");
}

/// NVIDIA/nccl#489: without peer memory support NCCL reports a longer path.
#[test]
fn the_level_does_not_depend_on_gpudirect() {
    let (without, with) = (read(TWO_NODES), read(&format!("module nvidia_peermem\n{TWO_NODES}")));
    assert_eq!(level(&without, "GPU0", "mlx5_0"), level(&with, "GPU0", "mlx5_0"));
    let state = |snapshot: &Snapshot| planned(snapshot).gpus[0].nics[0].gdr.state;
    assert_eq!([state(&without), state(&with)], [GdrState::Unknown, GdrState::Possible]);
}

/// k8snetworkplumbingwg/sriov-network-operator#736: the right node but the wrong switch.
#[test]
fn the_switch_comes_before_the_node() {
    let mut lines = "numa 0\n".to_owned();
    for (place, root) in [0x10, 0x20].into_iter().enumerate() {
        lines += &format!(
            "root pci0000:{root:02x} numa=0\npci 0000:{root:02x}:01.0 8086:352a 060400 pci0000:{root:02x} -\n\
             pci 0000:{root:02x}:02.0 8086:352a 060400 pci0000:{root:02x} -\n\
             pci 0000:{:02x}:00.0 1000:c030 060400 0000:{root:02x}:01.0 -\n",
            root + 1
        );
        for (port, ids) in [(0, "10de:2330 030200"), (1, "15b3:1021 020700")] {
            lines += &format!(
                "pci 0000:{:02x}:0{port}.0 1000:c030 060400 0000:{:02x}:00.0 -\npci 0000:{:02x}:00.0 {ids} 0000:{:02x}:0{port}.0 -\n",
                root + 2,
                root + 1,
                root + 3 + port,
                root + 2
            );
        }
        // The names run against the switches.
        lines += &format!("hca mlx5_{} 0000:{:02x}:00.0\n", 1 - place, root + 4);
    }
    let plan = planned(&read(&lines));
    assert_eq!([assigned(&plan, "GPU0"), assigned(&plan, "GPU1")], [["mlx5_1"], ["mlx5_0"]]);
    assert_eq!(plan.gpus[0].nics[1].level, Some(Level::Node));
}

/// A GPU and a card of two ports with a virtual function each, the second port's at the lower address if `crossed`.
fn planes(crossed: bool, hcas: &str) -> String {
    let (first, second) = if crossed { ("00.1", "00.0") } else { ("00.0", "00.1") };
    format!(
        "root pci0000:10\npci 0000:10:01.0 8086:352a 060400 pci0000:10 -\npci 0000:10:02.0 10de:2330 030200 pci0000:10 -\n\
         pci 0000:11:00.0 15b3:1021 020000 0000:10:01.0 -\npci 0000:11:00.1 15b3:1021 020000 0000:10:01.0 -\n\
         pci 0000:11:01.0 15b3:101e 020000 0000:10:01.0 - physfn=0000:11:{first}\n\
         pci 0000:11:01.1 15b3:101e 020000 0000:10:01.0 - physfn=0000:11:{second}\n{hcas}"
    )
}

/// NVIDIA/nccl#687, NVIDIA/nccl#748: virtual functions as further NICs; bandwidth does not add up.
#[test]
fn virtual_functions_share_the_place_and_card_of_their_physical_one() {
    let all = "hca p0 0000:11:00.0\nhca p1 0000:11:00.1\nhca v0 0000:11:01.0\nhca v1 0000:11:01.1";
    let snapshot = read_as_tree(&planes(false, all));
    assert_eq!(level(&snapshot, "GPU0", "v0"), level(&snapshot, "GPU0", "p0"));
    let plan = planned(&snapshot);
    assert!(plan.nics.iter().all(|nic| nic.card == plan.nics[0].card), "one card");
    assert_eq!(assigned(&plan, "GPU0"), ["p0", "p1"]);
}

/// NVIDIA/nccl#1422: a container that sees all of /sys has the uverbs device of its virtual function alone.
#[test]
fn a_device_without_uverbs_node_here_is_not_given_and_does_not_hide_its_virtual_functions() {
    let lines = planes(false, "hca p0 0000:11:00.0 no-uverbs\nhca p1 0000:11:00.1 no-uverbs\nhca v0 0000:11:01.0");
    for snapshot in [read(&lines), read_as_tree(&lines)] {
        let plan = planned(&snapshot);
        assert_eq!(assigned(&plan, "GPU0"), ["v0"]);
        assert!(
            plan.warnings.iter().any(|warning| warning.contains("p0") && warning.contains("uverbs")),
            "{:?}",
            plan.warnings
        );
    }
}

/// As above on a live host, whose `/dev` tells it too.
#[test]
fn a_uverbs_device_without_its_node_is_none() {
    let folder = tempfile::tempdir().unwrap();
    sysfs::build::build(&read(&planes(false, "hca p0 0000:11:00.0\nhca v0 0000:11:01.0")).host, folder.path()).unwrap();
    for (device, name) in [("uverbs0", "p0"), ("uverbs1", "v0")] {
        let class = folder.path().join("sys/class/infiniband_verbs").join(device);
        std::fs::create_dir_all(&class).unwrap();
        std::fs::write(class.join("ibdev"), format!("{name}\n")).unwrap();
    }
    let usable = || {
        let host = read_root(folder.path(), &ReadOptions::default()).unwrap().host;
        host.hcas.iter().map(|hca| hca.has_uverbs.unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(usable(), [true, true], "a capture has no /dev");
    std::fs::create_dir_all(folder.path().join("dev/infiniband")).unwrap();
    std::fs::write(folder.path().join("dev/infiniband/uverbs1"), "").unwrap();
    assert_eq!(usable(), [false, true]);
}

/// NVIDIA/nccl#2244: planes taken from the addresses of virtual functions are crossed between hosts.
#[test]
fn planes_follow_the_physical_functions_on_every_host() {
    let order = |crossed: bool| {
        let hcas = if crossed {
            "hca plane1 0000:11:01.0\nhca plane0 0000:11:01.1"
        } else {
            "hca plane0 0000:11:01.0\nhca plane1 0000:11:01.1"
        };
        let plan = planned(&read(&planes(crossed, hcas)));
        (plan.nics.iter().map(|nic| nic.name.clone()).collect::<Vec<_>>(), plan.gpus[0].assigned.clone())
    };
    assert_eq!(order(false), order(true));
    assert_eq!(order(true).1, ["plane0", "plane1"]);
}

/// google/gvisor#14407, #13712, #12876: sandboxes without bus/pci, or without the folder of NUMA nodes.
#[test]
fn sandboxes_without_parts_of_sys_are_read_as_far_as_they_go() {
    let folder = tempfile::tempdir().unwrap();
    sysfs::build::build(&read(TWO_NODES).host, folder.path()).unwrap();
    std::fs::remove_dir_all(folder.path().join("sys/devices/system")).unwrap();
    let snapshot = read_root(folder.path(), &ReadOptions::default()).unwrap();
    assert_eq!(level(&snapshot, "GPU0", "mlx5_0"), Some(Level::Node), "functions still name their node");
    std::fs::remove_dir_all(folder.path().join("sys/bus")).unwrap();
    let snapshot = read_root(folder.path(), &ReadOptions::default()).unwrap();
    assert_eq!(snapshot.host.hcas.len(), 2);
    assert_eq!(snapshot.host.gpus.len(), 0, "nothing leads to them");
    assert!(snapshot.host.warnings.iter().any(|warning| warning.contains("sys/bus/pci/devices")));
    // GPUs are found by class/drm, which the driver's display part makes.
    let drm = folder.path().join("sys/class/drm");
    std::fs::create_dir_all(&drm).unwrap();
    for (card, root, gpu) in [(0, "pci0000:10", "0000:10:01.0"), (1, "pci0000:80", "0000:80:01.0")] {
        let device = folder.path().join(format!("sys/devices/{root}/{gpu}"));
        std::fs::create_dir_all(device.join(format!("drm/card{card}"))).unwrap();
        std::os::unix::fs::symlink("../..", device.join(format!("drm/card{card}/device"))).unwrap();
        let link = format!("../../devices/{root}/{gpu}/drm/card{card}");
        std::os::unix::fs::symlink(link, drm.join(format!("card{card}"))).unwrap();
    }
    let snapshot = read_root(folder.path(), &ReadOptions::default()).unwrap();
    assert_eq!(level(&snapshot, "GPU0", "mlx5_0"), Some(Level::Node));
    assert_eq!(level(&snapshot, "GPU1", "mlx5_1"), Some(Level::Node));
}

/// NVIDIA/nccl#326, NVIDIA/nccl#1519: guests without readable link speed.
#[test]
fn links_of_unknown_speed_are_unknown_and_change_no_pair() {
    let folder = tempfile::tempdir().unwrap();
    sysfs::build::build(&read(TWO_NODES).host, folder.path()).unwrap();
    let gpu = folder.path().join("sys/bus/pci/devices/0000:10:01.0");
    for (speed, width) in [("Unknown speed", "255"), ("Unknown", "0"), ("", "16"), ("2.5 GT/s", "")] {
        std::fs::write(gpu.join("current_link_speed"), speed).unwrap();
        std::fs::write(gpu.join("current_link_width"), width).unwrap();
        let snapshot = read_root(folder.path(), &ReadOptions::default()).unwrap();
        assert_eq!(
            snapshot.host.function("0000:10:01.0".parse().unwrap()).unwrap().link.current,
            None,
            "{speed} {width}"
        );
        assert_eq!(assigned(&planned(&snapshot), "GPU0"), ["mlx5_0"]);
    }
}

/// ROCm/rocm-xio#189: addresses without their domain join devices of different ones. MI300A has 01:00.0 in four.
#[test]
fn the_domain_is_part_of_an_address() {
    let mut lines = String::new();
    for domain in 0..4 {
        lines += &format!(
            "numa {domain}\nroot pci{domain:04x}:00 numa={domain}\npci {domain:04x}:00:01.0 1022:14b9 060400 pci{domain:04x}:00 -\n\
             pci {domain:04x}:01:00.0 1002:74a0 120000 {domain:04x}:00:01.0 -\npci {domain:04x}:01:00.1 1022:1498 0c0330 {domain:04x}:00:01.0 -\n\
             pci {domain:04x}:00:02.0 17db:0501 020000 pci{domain:04x}:00 -\nhca cxi{domain} {domain:04x}:00:02.0\n"
        );
    }
    let plan = planned(&read_as_tree(&lines));
    assert_eq!(plan.gpus.len(), 4, "the USB controllers are no GPUs");
    for domain in 0..4 {
        assert_eq!(assigned(&plan, &format!("{domain:04x}:01:00.0")), [format!("cxi{domain}")]);
    }
}

/// open-mpi/hwloc#712, kubewharf/katalyst-core#1196 and others: node -1 as a node or an error, and nodes of memory
/// alone counted as sockets.
#[test]
fn an_unknown_node_is_the_only_one_there_is_and_nodes_without_cpus_are_none() {
    let devices = "root pci0000:10\nroot pci0000:20\npci 0000:10:01.0 10de:2330 030200 pci0000:10 -\n\
        pci 0000:20:01.0 15b3:1021 020700 pci0000:20 -\nhca mlx5_0 0000:20:01.0\n";
    let with = |nodes: &str| level(&read_as_tree(&format!("{nodes}{devices}")), "GPU0", "mlx5_0");
    assert_eq!(with("numa 0 cpus=0-3\n"), Some(Level::Node));
    assert_eq!(with("numa 0 cpus=0-3\nnuma 1 cpus=\n"), Some(Level::Node));
    assert_eq!(with("numa 0 cpus=0-3\nnuma 1 cpus=4-7\n"), Some(Level::Sys));
    assert_eq!(with(""), Some(Level::Sys));
}

/// NVIDIA/nccl-tests#256, NVIDIA/nccl#1674 and others: guests whose devices are all on the virtual root.
#[test]
fn a_flat_guest_has_no_neighbours_and_an_even_split() {
    let mut lines = "root pci0000:00\n".to_owned();
    for device in 0..4 {
        lines += &format!(
            "pci 0000:00:0{}.0 10de:2330 030200 pci0000:00 -\npci 0000:00:1{device}.0 15b3:101e 020700 pci0000:00 -\nhca mlx5_{device} 0000:00:1{device}.0\n",
            device + 4
        );
    }
    let snapshot = read_as_tree(&lines);
    let plan = planned(&snapshot);
    for gpu in &plan.gpus {
        assert!(gpu.nics.iter().all(|nic| nic.level == Some(Level::Phb)));
        assert_eq!(gpu.assigned.len(), 1);
    }
    assert!(plan.nics.iter().all(|nic| nic.gpus.len() == 1));
    assert!(plan.warnings.iter().any(|warning| warning.contains("flat")), "{:?}", plan.warnings);
}
