//! Access Control Services: what configuration space says of ports, and what follows for peer traffic.
#![allow(clippy::panic, clippy::unwrap_used, reason = "helpers of tests, which clippy does not know as such")]

use std::path::Path;

use gdrd_topology::acs::{Acs, AcsControl, PeerWay};
use gdrd_topology::advise::{Destination, PathKind, advise_path};
use gdrd_topology::assemble::ReadOptions;
use gdrd_topology::gdr::GdrState;
use gdrd_topology::level::Level;
use gdrd_topology::model::Snapshot;
use gdrd_topology::plan::contract::{PairPlan, Plan};
use gdrd_topology::plan::{PlanOptions, explain, plan};
use gdrd_topology::sysfs::capture::{Packed, capture, pack};
use gdrd_topology::{profile, read_root, read_stream, render, sysfs};

fn read(lines: &str) -> Snapshot {
    let text = format!("gdrd-host-profile 1\n{lines}\n");
    profile::snapshot(&text, None, &ReadOptions::default()).unwrap()
}

/// The same by way of a sysfs tree, whose `config` files tell ACS.
fn read_as_tree(lines: &str) -> Snapshot {
    let folder = tempfile::tempdir().unwrap();
    sysfs::build::build(&read(lines).host, folder.path()).unwrap();
    read_root(folder.path(), &ReadOptions::default()).unwrap()
}

/// The tree by way of an archive of it.
fn captured(root: &Path) -> Snapshot {
    let archive = pack(&capture(root, None).unwrap(), Packed::Gzip).unwrap();
    read_stream(archive.as_slice(), Path::new("host.tar.gz"), &ReadOptions::default()).unwrap()
}

fn planned(snapshot: &Snapshot) -> Plan {
    plan(snapshot, &PlanOptions::default())
}

fn pair<'a>(plan: &'a Plan, gpu: &str, nic: &str) -> &'a PairPlan {
    plan.gpu(gpu).unwrap().nics.iter().find(|pair| pair.name == nic).unwrap()
}

/// A switch with two GPUs, a NIC and a drive, its downstream ports set as given; the uplink is narrower.
fn below_one_switch(gpu_port: &str, nic_port: &str) -> String {
    format!(
        "module nvidia_peermem\nroot pci0000:10\npci 0000:10:01.0 8086:352a 060400 pci0000:10 16x8\n\
         pci 0000:11:00.0 1000:c030 060400 0000:10:01.0 16x8\n\
         pci 0000:12:00.0 1000:c030 060400 0000:11:00.0 32x16 {gpu_port}\n\
         pci 0000:12:01.0 1000:c030 060400 0000:11:00.0 32x16 {gpu_port}\n\
         pci 0000:12:02.0 1000:c030 060400 0000:11:00.0 32x16 {nic_port}\n\
         pci 0000:12:03.0 1000:c030 060400 0000:11:00.0 32x4 {nic_port}\n\
         pci 0000:13:00.0 10de:2330 030200 0000:12:00.0 32x16\npci 0000:14:00.0 10de:2330 030200 0000:12:01.0 32x16\n\
         pci 0000:15:00.0 15b3:1021 020700 0000:12:02.0 32x16\npci 0000:16:00.0 1e0f:0010 010802 0000:12:03.0 32x4\n\
         hca mlx5_0 0000:15:00.0\nport mlx5_0 1 ACTIVE InfiniBand 400"
    )
}

const ON: &str = "acs=SrcValid,ReqRedir,CmpltRedir,UpstreamFwd";

/// ROCm/rccl#547 (EPYC Rome, 2x MI100): GPUs and NIC are below one switch, and peer traffic goes up all the same.
#[test]
fn acs_of_the_root_port_is_told_with_the_pairs_of_the_mi100_host() {
    let path = format!("{}/../../tests/fixtures/hosts/lspci-mi100.host", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(path).unwrap();
    let lines = text.split_once('\n').unwrap().1;
    for snapshot in [read(lines), read_as_tree(lines)] {
        let port = snapshot.host.function("0000:40:01.1".parse().unwrap()).unwrap();
        assert_eq!(port.acs, Some(Acs::Control(AcsControl(0b001_1101))));
        let plan = planned(&snapshot);
        for gpu in ["0000:4a:00.0", "0000:50:00.0"] {
            let pair = pair(&plan, gpu, "mlx5_0");
            assert_eq!(pair.level, Some(Level::Pxb), "the level is as nvidia-smi has it");
            let acs = pair.acs.as_ref().unwrap();
            assert_eq!(acs.state, PeerWay::Redirected);
            assert!(acs.reason.contains("0000:40:01.1") && acs.reason.contains("ReqRedir"), "{acs:?}");
            assert!(plan.gpu(gpu).unwrap().reason.contains("peer traffic goes up to 0000:40:01.1"));
        }
        assert!(
            plan.warnings.iter().any(|warning| warning.contains("GPU0-mlx5_0, GPU1-mlx5_0: no traffic stays below"))
        );
        let way = advise_path(&snapshot, &plan, "GPU0", &Destination::Gpu("GPU1".to_owned())).unwrap();
        assert_eq!(way.kind, PathKind::PcieP2p);
        assert!(way.reason.contains("goes up to 0000:40:01.1"), "{}", way.reason);
    }
}

#[test]
fn redirected_traffic_is_as_narrow_as_the_uplink_and_direct_traffic_is_not() {
    for (gpu_port, nic_port, state, gbps) in [
        ("acs=off", "acs=none", PeerWay::Direct, 400.0),
        ("acs=SrcValid,UpstreamFwd", "acs=off", PeerWay::Direct, 400.0),
        (ON, ON, PeerWay::Redirected, 126.03),
        ("acs=off", "acs=ReqRedir", PeerWay::Redirected, 126.03),
        ("acs=CmpltRedir", "acs=off", PeerWay::Redirected, 126.03),
        ("acs=EgressCtrl", "acs=off", PeerWay::Unknown, 400.0),
        ("acs=off", "", PeerWay::Unknown, 400.0),
        ("", "", PeerWay::Unknown, 400.0),
    ] {
        let snapshot = read_as_tree(&below_one_switch(gpu_port, nic_port));
        let plan = planned(&snapshot);
        let case = format!("{gpu_port} {nic_port}");
        let found = pair(&plan, "GPU0", "mlx5_0");
        assert_eq!(found.acs.as_ref().unwrap().state, state, "{case}");
        assert_eq!((found.level, found.gbps), (Some(Level::Pix), Some(gbps)), "{case}");
        assert_eq!(found.gdr.state, GdrState::Possible, "it works, only slower: {case}");
        let is_told = |text: &str| text.contains("sends peer traffic up to 0000:10:01.0");
        let redirected = state == PeerWay::Redirected;
        assert_eq!(is_told(&found.gdr.reason), redirected, "{case}: {}", found.gdr.reason);
        let story = explain(&snapshot, &PlanOptions::default(), None, "GPU0").unwrap();
        assert_eq!(is_told(&story.reason), redirected, "{case}: {}", story.reason);
        let remote = advise_path(&snapshot, &plan, "GPU0", &Destination::Remote).unwrap();
        assert_eq!((is_told(&remote.reason), remote.gbps), (redirected, Some(gbps)), "{case}");
    }
}

#[test]
fn drives_and_other_gpus_below_the_switch_are_told_too() {
    let snapshot = read_as_tree(&below_one_switch(ON, ON));
    let plan = planned(&snapshot);
    let to = |to: &Destination| advise_path(&snapshot, &plan, "GPU0", to).unwrap();
    let drive = to(&Destination::Drive(None));
    assert_eq!((drive.kind, drive.gbps.map(f64::round)), (PathKind::GpudirectStorage, Some(126.0)));
    assert!(drive.reason.contains("sends peer traffic up to 0000:10:01.0"), "{}", drive.reason);
    let peer = to(&Destination::Gpu("GPU1".to_owned()));
    assert_eq!((peer.kind, peer.gbps.map(f64::round)), (PathKind::PcieP2p, Some(101.0)));
    assert!(peer.reason.contains("sends peer traffic up"), "{}", peer.reason);
    let direct = read(&below_one_switch("acs=off", "acs=off"));
    let peer = advise_path(&direct, &planned(&direct), "GPU0", &Destination::Gpu("GPU1".to_owned())).unwrap();
    assert!(peer.reason.contains("stays below it"), "{}", peer.reason);
}

/// sgl-project/sglang#8324: in this guest the NIC of the other switch cannot reach the GPU at all.
#[test]
fn in_a_guest_a_pair_that_acs_sends_up_is_unverified() {
    let lines = below_one_switch(ON, ON).replace("1000:c030", "104c:8233").replace("8086:352a", "1b36:000c");
    let snapshot = read_as_tree(&lines);
    let found = planned(&snapshot);
    let gdr = &pair(&found, "GPU0", "mlx5_0").gdr;
    assert_eq!(gdr.state, GdrState::Unknown, "although the module is loaded");
    assert!(gdr.reason.starts_with("unverified: ACS of "), "{}", gdr.reason);
    let off = read_as_tree(&lines.replace(ON, "acs=off"));
    assert_eq!(pair(&planned(&off), "GPU0", "mlx5_0").gdr.state, GdrState::Possible);
}

#[test]
fn acs_changes_no_pair_and_means_nothing_where_no_switch_joins() {
    let assigned = |acs: &str| {
        let plan = planned(&read(&below_one_switch(acs, acs)));
        plan.gpus.into_iter().map(|gpu| gpu.assigned).collect::<Vec<_>>()
    };
    assert_eq!(assigned(ON), assigned("acs=off"));
    let flat = read(
        "root pci0000:10\npci 0000:10:01.0 8086:352a 060400 pci0000:10 - acs=ReqRedir\n\
         pci 0000:10:02.0 8086:352a 060400 pci0000:10 - acs=ReqRedir\npci 0000:11:00.0 10de:2330 030200 0000:10:01.0 -\n\
         pci 0000:12:00.0 15b3:1021 020700 0000:10:02.0 -\nhca mlx5_0 0000:12:00.0",
    );
    assert_eq!(pair(&planned(&flat), "GPU0", "mlx5_0").acs, None);
}

#[test]
fn programs_read_acs_of_ports_and_pairs() {
    let snapshot = read_as_tree(&below_one_switch("acs=none", ON));
    let plan = planned(&snapshot);
    let json: serde_json::Value = serde_json::from_str(&plan.to_json()).unwrap();
    assert_eq!(json["gpus"][0]["nics"][0]["acs"]["state"], "redirected");
    let topo = render::topo(&snapshot, &plan);
    let acs = |bdf: &str| topo.functions.iter().find(|f| f.bdf == bdf.parse().unwrap()).unwrap().acs.clone();
    assert_eq!(acs("0000:12:00.0").as_deref(), Some("none"));
    assert_eq!(acs("0000:12:02.0").as_deref(), Some("SrcValid,ReqRedir,CmpltRedir,UpstreamFwd"));
    assert_eq!(acs("0000:10:01.0"), None, "not read");
    assert!(render::tree(&snapshot.host, None).contains("ACS redirects"));
    let older = plan.to_json().replace("\"acs\"", "\"later\"");
    assert_eq!(
        serde_json::from_str::<Plan>(&older).unwrap().gpus[0].nics[0].acs,
        None,
        "a plan without it still reads"
    );
}

/// A capture keeps what ACS is judged by, also that a port has no such capability.
#[test]
fn captures_keep_acs_through_an_archive() {
    let folder = tempfile::tempdir().unwrap();
    sysfs::build::build(&read(&below_one_switch("acs=none", ON)).host, folder.path()).unwrap();
    let host = captured(folder.path()).host;
    let acs = |bdf: &str| host.function(bdf.parse().unwrap()).unwrap().acs.map(|acs| acs.to_string());
    assert_eq!(acs("0000:12:00.0").as_deref(), Some("none"));
    assert_eq!(acs("0000:12:02.0").as_deref(), Some("SrcValid,ReqRedir,CmpltRedir,UpstreamFwd"));
}

/// NVIDIA/nodewright-packages#121, NVIDIA/NV-Kernels#20: Grace with untranslated DMA and ACS on an older kernel.
#[test]
fn an_arm_kernel_that_cannot_give_the_gpu_a_pasid_is_a_warning_of_the_host() {
    let lines = |arch: &str, kernel: &str, acs: &str| {
        format!(
            "cpu {arch}\nkernel {kernel}\n{}",
            below_one_switch(acs, "acs=off")
                .replace("060400 pci0000:10 16x8", &format!("060400 pci0000:10 16x8 {acs}"))
        )
    };
    let warned = |arch: &str, kernel: &str, acs: &str| {
        let text = lines(arch, kernel, acs);
        let both = [read(&text), read_as_tree(&text)].map(|snapshot| {
            let warnings = snapshot.host.warnings;
            warnings.into_iter().find(|warning| warning.contains("no CUDA context"))
        });
        assert_eq!(both[0], both[1]);
        both[0].clone()
    };
    let on = warned("arm64", "6.8.0-1010-nvidia-64k iommu_passthrough=yes", ON).unwrap();
    assert!(on.contains("6.8.0-1010-nvidia-64k") && on.contains("and ACS on") && on.contains("6.11"), "{on}");
    let unknown = warned("arm64", "6.8.0 iommu_passthrough=yes", "").unwrap();
    assert!(unknown.contains("if it is"), "{unknown}");
    for (arch, kernel, acs) in [
        ("arm64", "6.11.0 iommu_passthrough=yes", ON),
        ("arm64", "6.8.0 iommu_passthrough=no", ON),
        ("arm64", "6.8.0", ON),
        ("x86_64 vendor=GenuineIntel", "6.8.0 iommu_passthrough=yes", ON),
    ] {
        assert_eq!(warned(arch, kernel, acs), None, "{arch} {kernel}");
    }
}

/// The type of the GPU's IOMMU group is what is in force; the command line is only what was asked for.
#[test]
fn the_type_of_the_iommu_group_comes_before_the_command_line() {
    let folder = tempfile::tempdir().unwrap();
    let lines = format!("cpu arm64\nkernel 6.8.0 iommu_passthrough=yes\n{}", below_one_switch(ON, ON));
    sysfs::build::build(&read(&lines).host, folder.path()).unwrap();
    let passthrough = || {
        let host = read_root(folder.path(), &ReadOptions::default()).unwrap().host;
        host.kernel.unwrap().iommu_passthrough
    };
    assert_eq!(passthrough(), Some(true));
    for (line, answer) in [
        ("ro iommu.passthrough=y quiet", Some(true)),
        ("iommu.passthrough=1 iommu.passthrough=0", Some(false)),
        ("iommu=pt", Some(true)),
        ("quiet", None),
    ] {
        std::fs::write(folder.path().join("proc/cmdline"), line).unwrap();
        assert_eq!(passthrough(), answer, "{line}");
    }
    let group = folder.path().join("sys/kernel/iommu_groups/7");
    std::fs::create_dir_all(&group).unwrap();
    let gpu = folder.path().join("sys/bus/pci/devices/0000:13:00.0");
    std::os::unix::fs::symlink("../../../../../../kernel/iommu_groups/7", gpu.join("iommu_group")).unwrap();
    for (kind, answer) in [("identity", true), ("DMA-FQ", false)] {
        std::fs::write(group.join("type"), format!("{kind}\n")).unwrap();
        assert_eq!(passthrough(), Some(answer), "{kind}");
    }
    assert_eq!(captured(folder.path()).host.kernel.unwrap().iommu_passthrough, Some(false), "a capture keeps it");
}
