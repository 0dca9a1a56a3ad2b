//! Placement and path advice on built-in machines.

use std::collections::BTreeSet;

use gdrd_topology::advise::{Destination, PathKind, advise_path};
use gdrd_topology::assemble::ReadOptions;
use gdrd_topology::gdr::GdrState;
use gdrd_topology::level::Level;
use gdrd_topology::model::Snapshot;
use gdrd_topology::place::{PlaceRequest, Placement, place, planned};
use gdrd_topology::plan::{PlanOptions, plan};
use gdrd_topology::profile;

fn dgx() -> Snapshot {
    profile::builtin("dgx-a100").expect("the profile is built in")
}

fn placed(snapshot: &Snapshot, request: PlaceRequest) -> Placement {
    place(snapshot, &PlanOptions::default(), &request).expect("the request is valid")
}

#[test]
fn a_host_without_drives_says_where_drives_are_listed() {
    let mut snapshot = dgx();
    snapshot.host.drives.clear();
    let plan = plan(&snapshot, &PlanOptions::default());
    for wanted in [None, Some("nvme0n1".to_owned())] {
        let refused = advise_path(&snapshot, &plan, "GPU0", &Destination::Drive(wanted)).unwrap_err().to_string();
        assert!(refused.contains("no drive") && refused.contains("class/nvme"), "{refused}");
    }
}

#[test]
fn a_gpu_gets_the_nic_that_the_plan_gives_it_among_those_as_near_unless_it_is_taken() {
    let plan = plan(&dgx(), &PlanOptions::default());
    let request = PlaceRequest { max_sets: 64, planned: planned(&plan), ..PlaceRequest::default() };
    let answer = placed(&dgx(), request.clone());
    assert_eq!(answer.sets.len(), 8);
    for set in &answer.sets {
        let gpu = plan.gpus.iter().find(|gpu| gpu.name == set.gpus[0]).expect("it is in the plan");
        assert_eq!(set.nics, gpu.assigned[..1], "{}", gpu.name);
    }
    let busy_nics = vec![plan.gpus[0].assigned[0].clone()];
    let answer = placed(&dgx(), PlaceRequest { busy_nics: busy_nics.clone(), ..request });
    let of_first = answer.sets.iter().find(|set| set.gpus == ["GPU0"]).expect("it has another near NIC");
    assert_ne!(of_first.nics, busy_nics);
}

#[test]
fn two_gpus_and_two_nics_come_from_one_switch() {
    let answer = placed(&dgx(), PlaceRequest { gpus: 2, nics: 2, ..PlaceRequest::default() });
    assert_eq!(answer.sets.len(), 8);
    for (set, (gpus, nics)) in answer.sets.iter().zip([
        (["GPU0", "GPU1"], ["mlx5_0", "mlx5_1"]),
        (["GPU2", "GPU3"], ["mlx5_2", "mlx5_3"]),
        (["GPU4", "GPU5"], ["mlx5_6", "mlx5_7"]),
        (["GPU6", "GPU7"], ["mlx5_8", "mlx5_9"]),
    ]) {
        assert_eq!(
            (set.gpus.as_slice(), set.nics.as_slice()),
            (&gpus.map(str::to_owned)[..], &nics.map(str::to_owned)[..])
        );
    }
    assert!(answer.sets[0].score >= answer.sets[4].score && answer.sets[0].score > 80.0);
}

#[test]
fn every_gpu_counts_by_its_nearest_nic_of_the_set() {
    let ask = |gpus, nics| placed(&dgx(), PlaceRequest { gpus, nics, max_sets: 64, ..PlaceRequest::default() });
    // Two GPUs are below the switch of the NIC, two are on its node, and the other socket has four.
    let one = ask(8, 1);
    assert!(one.sets[0].reasons.contains(&"farthest GPU and NIC: SYS".to_owned()), "{one:?}");
    let scores: Vec<f64> = [1, 2, 3, 4, 8].into_iter().map(|nics| ask(8, nics).sets[0].score).collect();
    assert!(scores.is_sorted() && scores[0] < scores[3], "{scores:?}");
    // One NIC of each switch leaves every GPU as near as eight NICs do.
    assert_eq!(ask(8, 4).sets[0].nics, ["mlx5_0", "mlx5_2", "mlx5_6", "mlx5_8"]);
    assert_eq!(scores[3], scores[4]);
}

#[test]
fn mirror_images_score_alike() {
    for nics in 1..4 {
        let request = PlaceRequest { gpus: 3, nics, max_sets: 64, ..PlaceRequest::default() };
        let answer = placed(&dgx(), request);
        // Two GPUs of one switch and one of its neighbour, whichever of them comes first in PCI order.
        let of = |gpus: [&str; 3]| answer.sets.iter().find(|set| set.gpus == gpus).expect("the set is listed").score;
        let first = of(["GPU0", "GPU1", "GPU4"]);
        for gpus in [["GPU0", "GPU4", "GPU5"], ["GPU2", "GPU3", "GPU6"], ["GPU2", "GPU6", "GPU7"]] {
            assert_eq!(of(gpus), first, "{nics} NICs, {gpus:?}");
        }
    }
}

#[test]
fn busy_devices_are_left_out_and_broken_switches_used_first() {
    let busy = PlaceRequest {
        busy_gpus: vec!["GPU2".to_owned(), "0000:07:00.0".to_owned()],
        busy_nics: vec!["mlx5_3".to_owned()],
        ..PlaceRequest::default()
    };
    let answer = placed(&dgx(), busy);
    // GPU1 and GPU3 have lost their neighbours: taking them spoils no pair.
    assert_eq!(answer.sets[0].gpus, ["GPU1"]);
    assert_eq!(answer.sets[1].gpus, ["GPU3"]);
    assert_eq!(answer.sets[1].nics, ["mlx5_2"]);
    assert!(answer.sets[2].reasons.iter().any(|reason| reason.contains("leaves 1 free GPU of")));
}

#[test]
fn constraints_are_kept_and_an_empty_answer_says_why() {
    let snapshot = dgx();
    let switch = PlaceRequest { gpus: 2, nics: 2, same_switch: true, max_sets: 64, ..PlaceRequest::default() };
    assert_eq!(placed(&snapshot, switch.clone()).sets.len(), 4);
    assert_eq!(placed(&snapshot, PlaceRequest { same_switch: false, same_numa: true, ..switch.clone() }).sets.len(), 4);
    let three = placed(&snapshot, PlaceRequest { gpus: 3, ..switch });
    assert_eq!(three.sets, []);
    assert_eq!(three.reason.as_deref(), Some("no set of free devices fulfils the constraints"));
    let many = placed(&snapshot, PlaceRequest { gpus: 9, ..PlaceRequest::default() });
    assert_eq!(many.reason.as_deref(), Some("9 GPUs wanted, 8 of 8 free"));
    let all = placed(&snapshot, PlaceRequest { gpus: 8, nics: 8, nvlink: true, ..PlaceRequest::default() });
    assert_eq!(all.sets.len(), 1);
    assert!(!all.sets[0].nics.contains(&"mlx5_4".to_owned()));
}

#[test]
fn impossible_requests_and_unknown_devices_are_errors() {
    let snapshot = dgx();
    let ask = |request: PlaceRequest| place(&snapshot, &PlanOptions::default(), &request);
    assert!(ask(PlaceRequest { gpus: 0, ..PlaceRequest::default() }).unwrap_err().to_string().contains("gpus is 0"));
    assert!(ask(PlaceRequest { max_sets: 65, ..PlaceRequest::default() }).is_err());
    let drained = vec!["GPU0".to_owned(), "GPU2".to_owned()];
    let request = PlaceRequest { gpus: 7, nics: 0, drained_gpus: drained, ..PlaceRequest::default() };
    let found = place(&snapshot, &PlanOptions::default(), &request).unwrap();
    assert_eq!(found.reason.as_deref(), Some("7 GPUs wanted, 6 of 8 free; drained: GPU0, GPU2"));
    let lost = PlaceRequest { gpus: 8, nics: 0, lost_gpus: vec!["GPU4".to_owned()], ..PlaceRequest::default() };
    assert_eq!(ask(lost).unwrap().reason.as_deref(), Some("8 GPUs wanted, 7 of 8 free; lost: GPU4"));
    let busy = PlaceRequest { busy_gpus: vec!["GPU9".to_owned()], ..PlaceRequest::default() };
    assert!(ask(busy).unwrap_err().to_string().contains("GPU9"));
}

#[test]
fn a_rack_of_72_gpus_is_placed_from_each_gpu() {
    // Trays of four, each with a node of its own: what shares one is nearer.
    let mut text = "gdrd-host-profile 1\n".to_owned();
    (0..18).for_each(|tray| text += &format!("numa {tray}\n"));
    for domain in 0..72 {
        let tray = domain / 4;
        text += &format!(
            "pci {domain:04x}:00:00.0 1000:c010 060400 pci{domain:04x}:00 32x16 numa={tray}\n\
             pci {domain:04x}:01:00.0 10de:2941 030200 {domain:04x}:00:00.0 32x16\n\
             nvlink {domain:04x}:01:00.0 switch 18\n"
        );
    }
    let snapshot = profile::snapshot(&text, None, &ReadOptions::default()).unwrap();
    let answer = placed(&snapshot, PlaceRequest { gpus: 8, nics: 0, nvlink: true, ..PlaceRequest::default() });
    assert_eq!(answer.sets.len(), 8);
    assert!(answer.sets.iter().all(|set| set.gpus.len() == 8 && set.nics.is_empty()));
    let numa = |gpu: &String| snapshot.host.gpu(snapshot.host.find_gpu(gpu).unwrap()).unwrap().numa.unwrap().0;
    let trays: BTreeSet<u16> = answer.sets[0].gpus.iter().map(numa).collect();
    assert_eq!(trays.len(), 2, "eight of two trays before eight of more: {:?}", answer.sets[0]);
    let four = placed(&snapshot, PlaceRequest { gpus: 4, nics: 0, same_numa: true, ..PlaceRequest::default() });
    assert!(four.sets.iter().all(|set| set.gpus.iter().map(numa).collect::<BTreeSet<_>>().len() == 1));
}

#[test]
fn large_requests_on_large_hosts_stay_within_bounds() {
    let mut text = "gdrd-host-profile 1\nnuma 0\n".to_owned();
    for domain in 0..160 {
        text += &format!(
            "pci {domain:04x}:00:00.0 1000:c010 060400 pci{domain:04x}:00 32x16 numa=0\n\
             pci {domain:04x}:01:00.0 10de:2941 030200 {domain:04x}:00:00.0 32x16\n\
             pci {domain:04x}:01:00.1 15b3:1021 020700 {domain:04x}:00:00.0 32x16\n\
             hca ib{domain} {domain:04x}:01:00.1\n"
        );
    }
    let snapshot = profile::snapshot(&text, None, &ReadOptions::default()).unwrap();
    let answer = placed(&snapshot, PlaceRequest { gpus: 16, nics: 64, max_sets: 2, ..PlaceRequest::default() });
    assert_eq!(answer.sets.len(), 2);
    assert_eq!(answer.sets[0].nics.len(), 64);
}

#[test]
fn same_host_traffic_takes_nvlink_then_a_switch_then_host_memory() {
    let snapshot = dgx();
    let dgx_plan = plan(&snapshot, &PlanOptions::default());
    let to = |snapshot: &Snapshot, from: &str, to: &str| {
        let plan = plan(snapshot, &PlanOptions::default());
        advise_path(snapshot, &plan, from, &Destination::Gpu(to.to_owned())).unwrap()
    };
    let nvlink = to(&snapshot, "GPU0", "GPU7");
    assert_eq!((nvlink.kind, nvlink.gbps, nvlink.via.len()), (PathKind::Nvlink, Some(0.88 * 2400.0), 0));
    assert_eq!(to(&snapshot, "GPU0", "GPU0").kind, PathKind::SameGpu);
    let plain = profile::builtin("two-socket-2gpu").unwrap();
    let staged = to(&plain, "GPU0", "GPU1");
    assert_eq!((staged.kind, staged.level), (PathKind::Staged, Some(Level::Sys)));
    let mut without = snapshot.clone();
    without.host.nvlinks.clear();
    let p2p = to(&without, "GPU0", "GPU1");
    assert_eq!((p2p.kind, p2p.gbps.map(f64::round)), (PathKind::PcieP2p, Some(202.0)));
    assert!(advise_path(&snapshot, &dgx_plan, "GPU0", &Destination::Gpu("GPU8".to_owned())).is_err());
}

#[test]
fn remote_traffic_goes_by_the_paired_nic_unless_gpudirect_cannot_work() {
    let snapshot = dgx();
    let mut plan = plan(&snapshot, &PlanOptions::default());
    let remote = advise_path(&snapshot, &plan, "GPU1", &Destination::Remote).unwrap();
    assert_eq!((remote.kind, remote.via.as_slice()), (PathKind::GpudirectRdma, &["mlx5_0".to_owned()][..]));
    assert_eq!(remote.gbps, Some(200.0));
    plan.gpus[1].nics[0].gdr.state = GdrState::Failed;
    assert_eq!(advise_path(&snapshot, &plan, "GPU1", &Destination::Remote).unwrap().kind, PathKind::Staged);
    plan.gpus[1].assigned.clear();
    let none = advise_path(&snapshot, &plan, "GPU1", &Destination::Remote).unwrap();
    assert_eq!((none.kind, none.via.len()), (PathKind::Staged, 0));
}

#[test]
fn storage_goes_straight_to_the_near_drive_and_bounces_to_a_far_one() {
    let snapshot = dgx();
    let plan = plan(&snapshot, &PlanOptions::default());
    let near = advise_path(&snapshot, &plan, "GPU0", &Destination::Drive(None)).unwrap();
    assert_eq!((near.kind, near.to.as_str(), near.level), (PathKind::GpudirectStorage, "nvme0", Some(Level::Pxb)));
    let far = advise_path(&snapshot, &plan, "GPU0", &Destination::Drive(Some("nvme3".to_owned()))).unwrap();
    assert_eq!((far.kind, far.level), (PathKind::Bounce, Some(Level::Sys)));
    let missing = advise_path(&snapshot, &plan, "GPU0", &Destination::Drive(Some("nvme99".to_owned())));
    assert!(missing.unwrap_err().to_string().contains("nvme99"));
}

/// A DGX with volumes of three kinds over its storage NIC and one that it does not know the NIC of.
fn with_volumes(kind_of_gpu: &str) -> Snapshot {
    let text = profile::builtin_text("dgx-a100").expect("it is built in").replace("10de:20b0", kind_of_gpu);
    let snapshot = profile::snapshot(&text, None, &ReadOptions::default()).expect("a profile");
    let hca = snapshot.host.hcas.iter().find(|hca| !hca.netdevs.is_empty()).expect("a RoCE NIC").netdevs[0].clone();
    let text = format!(
        "{text}\ndrive nvme90 - transport=rdma netdev={hca}\ndrive nvme91 - transport=tcp netdev={hca}.100\n\
         drive nvme92 - transport=rdma\ndrive nvme93 - transport=tcp netdev=eno77\n"
    );
    profile::snapshot(&text, None, &ReadOptions::default()).expect("a profile")
}

#[test]
fn a_volume_over_rdma_rides_on_the_nic_of_its_interface_and_one_over_tcp_bounces() {
    let snapshot = with_volumes("10de:20b0");
    let plan = plan(&snapshot, &PlanOptions::default());
    let to = |drive: &str| {
        advise_path(&snapshot, &plan, "GPU0", &Destination::Drive(Some(drive.to_owned()))).expect("the drive is there")
    };
    let rdma = to("nvme90n1");
    assert_eq!(rdma.kind, PathKind::GpudirectStorage);
    assert_eq!(rdma.via.len(), 2);
    assert_eq!(rdma.via[1], "nvme90");
    assert!(rdma.reason.contains(&rdma.via[0]) && rdma.gbps.is_some(), "{rdma:?}");
    assert_eq!(rdma.fallback.as_ref().map(|next| next.kind), Some(PathKind::Bounce));
    let tcp = to("/dev/nvme91n2p1");
    assert_eq!((tcp.kind, &tcp.via[0]), (PathKind::Bounce, &rdma.via[0]));
    assert_eq!((to("nvme92").kind, to("nvme92").via.len()), (PathKind::Bounce, 0));
    assert_eq!((to("nvme93").kind, to("nvme93").via), (PathKind::Bounce, vec!["eno77".to_owned()]));
}

#[test]
fn a_gpu_that_offers_no_memory_to_nics_is_staged_everywhere() {
    let snapshot = with_volumes("10de:2e12");
    let plan = plan(&snapshot, &PlanOptions::default());
    let remote = advise_path(&snapshot, &plan, "GPU0", &Destination::Remote).unwrap();
    assert_eq!(remote.kind, PathKind::Staged);
    assert!(remote.reason.contains("GB10") && !remote.via.is_empty() && remote.gbps.is_some(), "{remote:?}");
    let volume = advise_path(&snapshot, &plan, "GPU0", &Destination::Drive(Some("nvme90".to_owned()))).unwrap();
    assert_eq!(volume.kind, PathKind::Bounce);
}

#[test]
fn every_direct_way_names_what_is_left_without_it() {
    let snapshot = dgx();
    let plan = plan(&snapshot, &PlanOptions::default());
    let next = |to: Destination| advise_path(&snapshot, &plan, "GPU0", &to).unwrap().fallback.expect("a next best way");
    assert_eq!(next(Destination::Gpu("GPU1".to_owned())).kind, PathKind::PcieP2p);
    assert_eq!(next(Destination::Gpu("GPU7".to_owned())).kind, PathKind::Staged);
    let remote = next(Destination::Remote);
    assert_eq!((remote.kind, remote.via.len()), (PathKind::Staged, 1));
    assert!(remote.gbps.is_some_and(|gbps| gbps <= 200.0) && remote.reason.contains("NUMA node 3"), "{remote:?}");
    assert_eq!(next(Destination::Drive(None)).kind, PathKind::Bounce);
}
