//! Pictures, trees and bandwidth of built-in machines.

use std::path::Path;

use gdrd_topology::advise::{Destination, advise_path};
use gdrd_topology::assemble::ReadOptions;
use gdrd_topology::bandwidth::{matches, of_gpu};
use gdrd_topology::model::Snapshot;
use gdrd_topology::plan::contract::Plan;
use gdrd_topology::plan::{PlanOptions, plan};
use gdrd_topology::{profile, read_text, render};

fn planned(name: &str) -> (Snapshot, Plan) {
    let snapshot = profile::builtin(name).expect("the profile is built in");
    let plan = plan(&snapshot, &PlanOptions::default());
    (snapshot, plan)
}

#[test]
fn a_picture_is_well_formed_and_holds_every_device_pair_and_link() {
    for name in profile::builtin_names() {
        let (snapshot, plan) = planned(name);
        let text = render::svg(&snapshot, &plan);
        let document = roxmltree::Document::parse(&text).expect("an SVG is XML");
        assert_eq!(document.root_element().tag_name().name(), "svg");
        let elements = document.descendants().filter(roxmltree::Node::is_element);
        let texts: Vec<&str> = elements.filter_map(|node| node.text()).collect();
        let gpus = snapshot.host.gpus.iter().map(|gpu| gpu.name.as_str());
        let nics = snapshot.host.hcas.iter().map(|hca| hca.name.as_str());
        for device in gpus.chain(nics).chain(snapshot.host.drives.iter().map(|drive| drive.name.as_str())) {
            assert!(texts.iter().any(|text| text.starts_with(device)), "{name}: {device}");
        }
        let pairs = plan.gpus.iter().map(|gpu| gpu.assigned.len()).sum::<usize>();
        let lines = texts.iter().filter(|text| text.starts_with("GPU") && text.contains(" - ")).count();
        let direct = snapshot.host.nvlinks.iter().filter(|link| link.end != gdrd_topology::model::NvLinkEnd::Switch);
        assert_eq!(lines, pairs + direct.count(), "{name}");
        let is_switched = plan.nvlink.kind == Some(gdrd_topology::model::NvLinkKind::Switched);
        assert_eq!(texts.iter().any(|text| text.starts_with("NVLink switch")), is_switched, "{name}");
    }
}

#[test]
fn a_picture_lies_within_its_borders_and_its_cells_apart() {
    for name in profile::builtin_names() {
        let (snapshot, plan) = planned(name);
        let text = render::svg(&snapshot, &plan);
        let document = roxmltree::Document::parse(&text).unwrap();
        let number = |node: &roxmltree::Node<'_, '_>, name: &str| -> f64 {
            node.attribute(name).and_then(|text| text.parse().ok()).unwrap_or(0.0)
        };
        let svg = document.root_element();
        let (width, height) = (number(&svg, "width"), number(&svg, "height"));
        let boxes: Vec<(f64, f64, f64, f64)> = document
            .descendants()
            .filter(|node| node.tag_name().name() == "rect" && node.attribute("x").is_some())
            .map(|node| (number(&node, "x"), number(&node, "y"), number(&node, "width"), number(&node, "height")))
            .collect();
        assert!(boxes.iter().all(|(x, y, w, h)| *x >= 0.0 && x + w <= width && y + h <= height), "{name}");
        let cells: Vec<_> = boxes.iter().filter(|(_, _, w, h)| (*w, *h) == (108.0, 50.0)).collect();
        for (place, a) in cells.iter().enumerate() {
            for b in cells.iter().skip(place + 1) {
                let apart = a.0 + a.2 <= b.0 || b.0 + b.2 <= a.0 || a.1 + a.3 <= b.1 || b.1 + b.3 <= a.1;
                assert!(apart, "{name}: {a:?} {b:?}");
            }
        }
    }
}

#[test]
fn a_wide_host_goes_on_in_another_band_and_stays_legible() {
    let input = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/hosts/hwloc-aws-p5.host");
    let many = gdrd_topology::read_input(input.as_ref(), &ReadOptions::default()).expect("a profile");
    let many_plan = plan(&many, &PlanOptions::default());
    let (dgx, dgx_plan) = planned("dgx-a100");
    for (snapshot, plan, switches) in [(&many, &many_plan, 0), (&dgx, &dgx_plan, 2)] {
        let text = render::svg(snapshot, plan);
        let document = roxmltree::Document::parse(&text).unwrap();
        let svg = document.root_element();
        let size = |name: &str| svg.attribute(name).and_then(|text| text.parse::<f64>().ok()).unwrap();
        assert!(size("width") < 2200.0 && size("height") < 1400.0, "{} x {}", size("width"), size("height"));
        // Each band shows the switches, and says that they are the same.
        let elements = document.descendants().filter(roxmltree::Node::is_element);
        let bars = elements.filter_map(|node| node.text()).filter(|text| text.contains("NVLink switch"));
        assert_eq!(bars.count(), switches);
    }
}

#[test]
fn names_from_outside_cannot_break_a_picture_or_a_graph() {
    let (mut snapshot, _) = planned("two-socket-2gpu");
    snapshot.host.hcas[0].name = "<script>&\"\u{1}\u{1b}[31m".to_owned();
    snapshot.host.name = Some("]]><x".to_owned());
    let plan = plan(&snapshot, &PlanOptions::default());
    let text = render::svg(&snapshot, &plan);
    let document = roxmltree::Document::parse(&text).expect("an SVG is XML");
    assert!(document.descendants().all(|node| node.tag_name().name() != "script"));
    let graph = render::dot(&snapshot.host, &plan);
    assert!(graph.contains("<script>&\\\" "), "{graph}");
}

#[test]
fn inputs_without_addresses_are_drawn_too() {
    let text = "\tGPU0\tGPU1\tNIC0\nGPU0\tX\tNV4\tPIX\nGPU1\tNV4\tX\tSYS\n";
    let path = std::path::Path::new("matrix.txt");
    let snapshot = gdrd_topology::read_stream(text.as_bytes(), path, &ReadOptions::default()).unwrap();
    let plan = plan(&snapshot, &PlanOptions::default());
    let picture = render::svg(&snapshot, &plan);
    assert!(picture.contains("no place in the PCI tree") && picture.contains(">GPU1<"));
    assert!(render::dot(&snapshot.host, &plan).contains("\"GPU0\""));
}

#[test]
fn a_graph_joins_every_device_to_its_root_bus() {
    let (snapshot, plan) = planned("dgx-a100");
    let graph = render::dot(&snapshot.host, &plan);
    assert!(graph.starts_with("graph host {") && graph.ends_with("}\n"));
    assert_eq!(graph.matches("style=bold").count(), 8);
    assert!(graph.contains("\"pci0000:00\" -- \"0000:00:01.1\"") || graph.contains("\"pci0000:00\" -- "));
}

#[test]
fn a_painted_tree_is_the_plain_one_with_each_part_as_the_painter_gives_it() {
    let (snapshot, plan) = planned("dgx-a100");
    let plain = render::tree(&snapshot.host, Some(&plan));
    let painted =
        render::painted_tree(&snapshot.host, Some(&plan), &|part, text| format!("\u{1}{part:?}\u{2}{text}\u{3}"));
    let mut stripped = String::new();
    let mut is_mark = false;
    for character in painted.chars() {
        match character {
            '\u{1}' => is_mark = true,
            '\u{2}' => is_mark = false,
            '\u{3}' => {}
            character if !is_mark => stripped.push(character),
            _ => {}
        }
    }
    assert_eq!(stripped, plain);
    for part in ["Heading", "Bridge", "Gpu", "Nic", "Drive", "Faint"] {
        assert!(painted.contains(&format!("\u{1}{part}\u{2}")), "{part}");
    }
}

#[test]
fn a_gpu_link_wider_than_its_nic_is_said_to_be_unused_in_part() {
    let (snapshot, plan) = planned("dgx-a100");
    let found = of_gpu(&snapshot.host, &plan, "GPU0").unwrap();
    // 16 GT/s x16 after 128b/130b, against HDR.
    assert_eq!(found.gpu_gbps.map(f64::round), Some(252.0));
    assert_eq!(found.usable_gbps.map(f64::round), Some(200.0));
    assert!(found.findings.iter().any(|line| line.contains("52 of the link unused")), "{:?}", found.findings);
    let uplink = found.uplink.unwrap();
    assert_eq!((uplink.gpus, uplink.nics, uplink.nics_gbps), (2, 2, Some(400.0)));
    assert!(found.findings.iter().any(|line| line.contains("not between GPU and NIC below it")));
    assert_eq!(matches(&snapshot.host, &plan).len(), 8);
}

#[test]
fn ports_behind_narrow_links_and_nics_beyond_a_gpu_are_waste() {
    let text = "gdrd-host-profile 1\nnuma 0\n\
        pci 0000:00:01.0 1000:c010 060400 pci0000:00 16x16 numa=0\n\
        pci 0000:01:00.0 1000:c010 060400 0000:00:01.0 16x16\n\
        pci 0000:02:00.0 1000:c010 060400 0000:01:00.0 16x8\n\
        pci 0000:02:01.0 1000:c010 060400 0000:01:00.0 32x16\n\
        pci 0000:03:00.0 10de:2330 030200 0000:02:00.0 16x8\n\
        pci 0000:04:00.0 15b3:1021 020700 0000:02:01.0 16x16/32x16\n\
        hca mlx5_0 0000:04:00.0\nport mlx5_0 1 ACTIVE InfiniBand 400\n";
    let snapshot = profile::snapshot(text, None, &ReadOptions::default()).unwrap();
    let found = of_gpu(&snapshot.host, &plan(&snapshot, &PlanOptions::default()), "GPU0").unwrap();
    assert!(found.findings[0].starts_with("mlx5_0: port of 400 Gbit/s behind a link of 252: 148"), "{found:?}");
    assert!(found.findings[1].contains("against NIC of 252: 126 of the NIC wasted"), "{found:?}");
    let text = render::matrix(&snapshot.host, Some(&plan(&snapshot, &PlanOptions::default())));
    assert!(text.contains("Bandwidth:") && text.contains("of the port wasted"), "{text}");
}

#[test]
fn nics_that_gpus_share_count_by_their_share() {
    let (mut snapshot, _) = planned("dgx-a100");
    snapshot.host.hcas.retain(|hca| ["mlx5_0", "mlx5_2", "mlx5_6", "mlx5_8"].contains(&hca.name.as_str()));
    let plan = plan(&snapshot, &PlanOptions::default());
    let found = of_gpu(&snapshot.host, &plan, "GPU1").unwrap();
    assert_eq!((found.nics[0].gpus, found.usable_gbps), (2, Some(100.0)));
}

/// One GPU below a switch whose uplink carries 63, and below it an adapter of two functions on one link of 126.
fn two_functions_of_one_slot(rate: &str) -> Snapshot {
    let text = format!(
        "gdrd-host-profile 1\nnuma 0\n\
         pci 0000:00:01.0 1000:c010 060400 pci0000:00 8x8 numa=0\n\
         pci 0000:01:00.0 1000:c010 060400 0000:00:01.0 8x8\n\
         pci 0000:02:00.0 1000:c010 060400 0000:01:00.0 16x16\n\
         pci 0000:02:01.0 1000:c010 060400 0000:01:00.0 8x16\n\
         pci 0000:03:00.0 10de:2330 030200 0000:02:00.0 16x16\n\
         pci 0000:04:00.0 15b3:1019 020700 0000:02:01.0 8x16\n\
         pci 0000:04:00.1 15b3:1019 020700 0000:02:01.0 8x16\n\
         hca mlx5_0 0000:04:00.0\nport mlx5_0 1 ACTIVE InfiniBand {rate}\n\
         hca mlx5_1 0000:04:00.1\nport mlx5_1 1 ACTIVE InfiniBand {rate}\n"
    );
    profile::snapshot(&text, None, &ReadOptions::default()).expect("a profile")
}

#[test]
fn functions_of_one_slot_carry_no_more_together_than_its_link() {
    let snapshot = two_functions_of_one_slot("100");
    let plan = plan(&snapshot, &PlanOptions::default());
    let found = of_gpu(&snapshot.host, &plan, "GPU0").unwrap();
    assert_eq!((found.nics.len(), found.usable_gbps.map(f64::round)), (2, Some(126.0)), "{found:?}");
    let uplink = found.uplink.unwrap();
    assert_eq!((uplink.nics, uplink.nics_gbps.map(f64::round)), (2, Some(126.0)));
    assert_eq!(found.findings[0], "NICs of 200 Gbit/s on one link or port of 126: 74 of them wasted together");
    // Between GPU and NICs no uplink is in the way; through host memory it is.
    let way = advise_path(&snapshot, &plan, "GPU0", &Destination::Remote).unwrap();
    assert_eq!((way.via.len(), way.gbps.map(f64::round)), (2, Some(126.0)), "{way:?}");
    assert_eq!(way.fallback.and_then(|next| next.gbps).map(f64::round), Some(63.0));
}

#[test]
fn a_host_without_devices_says_so_and_prints_no_empty_line() {
    let empty = profile::snapshot("gdrd-host-profile 1\nnuma 0\n", None, &ReadOptions::default()).unwrap();
    assert_eq!(render::tree(&empty.host, None), "no GPU, NIC or drive was found\n");
}

/// -1 in sysfs is unknown (DESIGN: never node 0), also where there is but one node it could be.
#[test]
fn an_unknown_numa_node_is_unknown_in_every_text() {
    let text = "gdrd-host-profile 1\nnuma 0 cpus=0-7\npci 0000:00:01.0 1000:c010 060400 pci0000:00 8x8\n\
                pci 0000:01:00.0 10de:2330 030200 0000:00:01.0 16x16\n";
    let snapshot = profile::snapshot(text, None, &ReadOptions::default()).unwrap();
    let plan = plan(&snapshot, &PlanOptions::default());
    assert_eq!((plan.gpus[0].numa, snapshot.host.gpus[0].numa), (None, None));
    let matrix = render::matrix(&snapshot.host, Some(&plan));
    let row: Vec<&str> = matrix.lines().nth(1).unwrap().split_whitespace().collect();
    assert_eq!(row, ["GPU0", "X", "0-7", "N/A"]);
    assert!(!render::svg(&snapshot, &plan).contains("NUMA 0"));
    let way = advise_path(&snapshot, &plan, "GPU0", &Destination::Remote).unwrap();
    assert!(!way.reason.contains("NUMA") && way.fallback.is_none_or(|next| !next.reason.contains("NUMA")));
}

#[test]
fn functions_of_one_slot_that_two_gpus_are_given_share_its_link() {
    let mut snapshot = two_functions_of_one_slot("100");
    let mut beside = snapshot.host.gpus[0].clone();
    beside.name = "GPU1".to_owned();
    snapshot.host.gpus.push(beside);
    let planned = plan(&snapshot, &PlanOptions::default());
    for (gpu, nic) in [("GPU0", "mlx5_0"), ("GPU1", "mlx5_1")] {
        assert_eq!(planned.gpu(gpu).unwrap().assigned, [nic]);
        let found = of_gpu(&snapshot.host, &planned, gpu).unwrap();
        assert_eq!(found.usable_gbps.map(f64::round), Some(63.0), "{found:?}");
    }
}

#[test]
fn nics_of_unknown_rate_are_counted_and_their_sum_is_unknown() {
    let snapshot = two_functions_of_one_slot("-");
    let found = of_gpu(&snapshot.host, &plan(&snapshot, &PlanOptions::default()), "GPU0").unwrap();
    let uplink = found.uplink.unwrap();
    assert_eq!((uplink.nics, uplink.nics_gbps), (2, None));
    assert!(!found.findings.iter().any(|line| line.contains("uplink")), "{:?}", found.findings);
    let (mut without, _) = planned("dgx-a100");
    without.host.hcas.clear();
    let uplink = of_gpu(&without.host, &plan(&without, &PlanOptions::default()), "GPU0").unwrap().uplink.unwrap();
    let nothing = uplink.nics_gbps.expect("no NICs carry nothing");
    assert!(uplink.nics == 0 && nothing == 0.0 && nothing.is_sign_positive());
}

/// NCCL XML has no host bridges and no port states: nothing is made up for them, and AMD's links have AMD's name.
#[test]
fn what_an_input_lacks_is_not_printed_as_if_it_were_there() {
    let text = include_str!("../../../tests/cases/nccl-xml/rccl-mi300x-8gpu-8nic.xml");
    let snapshot = read_text(text, Path::new("topo.xml"), &ReadOptions::default()).unwrap();
    let plan = plan(&snapshot, &PlanOptions::default());
    let tree = render::tree(&snapshot.host, Some(&plan));
    assert!(tree.starts_with("root complex  NUMA 0\n"), "{tree}");
    assert!(tree.contains("  mlx5_0 (1: 400 Gbit/s)  [32x16]\n"), "{tree}");
    assert!(tree.contains("\nxGMI\n   GPU0 - GPU1: 1 link\n"), "{tree}");
    let way = advise_path(&snapshot, &plan, "GPU0", &Destination::Gpu("GPU1".to_owned())).unwrap();
    assert_eq!(way.reason, "1 xGMI link joins them");
    let texts = [tree, render::dot(&snapshot.host, &plan), render::topo(&snapshot, &plan).to_json()];
    assert!(texts.iter().all(|text| !text.contains("fffffffe")), "{texts:?}");
    assert!(render::matrix(&snapshot.host, None).contains("NV#  = # bonded xGMI links\n"));
}
