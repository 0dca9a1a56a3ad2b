//! NCCL topology XML: every text of tests/cases against its answer, alone and over another tree.
#![allow(clippy::panic, clippy::unwrap_used, reason = "helpers of tests, which clippy does not know as such")]

mod common;

use common::{Answer, answers, assert_plan_keeps_the_rules, by_level, case_text, sections};
use gdrd_topology::advise::{Destination, PathKind, advise_path};
use gdrd_topology::assemble::{ReadOptions, assemble};
use gdrd_topology::level::Level;
use gdrd_topology::model::{GpuId, HcaId, HcaOrigin, Host, NvLinkKind, Snapshot};
use gdrd_topology::nccl_xml::NcclTopology;
use gdrd_topology::plan::{PlanOptions, plan};
use gdrd_topology::source::{Source, SourceKind};

fn snapshot(host: Host) -> Snapshot {
    Snapshot { generation: 1, source: Source { kind: SourceKind::NcclXml, path: None }, host }
}

fn read(text: &str) -> Host {
    assemble(NcclTopology::parse(text).unwrap().host(), &ReadOptions::default())
}

fn case(name: &str) -> Host {
    read(&case_text(&format!("nccl-xml/{name}.xml")))
}

fn assert_answer(case: &str, snapshot: &Snapshot, answer: &Answer) {
    let host = &snapshot.host;
    let plan = plan(snapshot, &PlanOptions::default());
    for name in &answer.gpus {
        let gpu = host.find_gpu(name).unwrap_or_else(|| panic!("{case}: no GPU {name}"));
        assert_eq!(host.gpu(gpu).unwrap().numa, answer.numa, "{case} {name}");
        let (level, nearest) =
            by_level(host, gpu).into_iter().next().unwrap_or_else(|| panic!("{case} {name}: no NIC"));
        let expected = answer.groups.iter().flat_map(|group| group.nics.clone()).collect();
        assert_eq!((level, nearest), (answer.groups[0].level, expected), "{case} {name}");
        // Of several groups of one level the first is nearer: by fewer bridges.
        let given = plan.gpu(name).unwrap().assigned.clone();
        let is_first = |nic: &String| answer.groups[0].nics.contains(nic);
        assert!(given.iter().all(is_first), "{case} {name}: {given:?}");
    }
}

#[test]
fn the_kind_of_the_cpus_is_kept_through_reading_and_writing() {
    let host = case("azure-ndv4-topo");
    let cpu = host.cpu.clone().expect("the text tells");
    assert_eq!((cpu.arch.as_str(), cpu.vendor.as_deref()), ("x86_64", Some("AuthenticAMD")));
    assert_eq!((cpu.family, cpu.model), (Some(23), Some(49)));
    let bent = r#"<system version="1"><cpu numaid="0" arch="x&quot;86" vendor="a b" familyid="x"/></system>"#;
    let bent = gdrd_topology::read_text(bent, "bent".as_ref(), &ReadOptions::default()).expect("it is read");
    assert_eq!(bent.host.cpu, None);
}

/// AWS ships p4d.24xlarge so (aws-ofi-nccl, topology/p4d-24xl-topo.xml).
#[test]
fn a_bridge_made_up_with_ids_of_all_ones_is_no_lost_device() {
    let host = read(
        "<system version=\"1\"><cpu numaid=\"0\">\
         <pci busid=\"ffff:ff:01.0\" class=\"0x060400\" vendor=\"0xffff\" device=\"0xffff\" link_speed=\"8 GT/s\" link_width=\"16\">\
         <pci busid=\"0000:10:1c.0\" class=\"0x030200\" vendor=\"0x10de\" device=\"0x20b0\"/>\
         <pci busid=\"0000:10:1b.0\" class=\"0x020000\" vendor=\"0x1d0f\" device=\"0xefa0\"/></pci></cpu></system>",
    );
    assert!(host.warnings.iter().all(|warning| !warning.contains("does not answer")), "{:?}", host.warnings);
    assert_eq!(by_level(&host, GpuId(0)).keys().next(), Some(&Level::Pix));
}

#[test]
fn every_case_has_its_nearest_nics() {
    let text = case_text("nccl-xml.answers");
    let mut checked = 0;
    for (name, lines) in sections(&text) {
        let snapshot = snapshot(case(name));
        for answer in answers(&lines) {
            assert_answer(name, &snapshot, &answer);
            checked += answer.gpus.len();
        }
        assert_plan_keeps_the_rules(name, &snapshot, &plan(&snapshot, &PlanOptions::default()));
    }
    assert_eq!(checked, 202, "GPUs with an answer");
}

fn sockets(host: &Host) -> Vec<&str> {
    host.hcas.iter().filter(|hca| hca.origin == HcaOrigin::Socket).map(|hca| hca.name.as_str()).collect()
}

#[test]
fn socket_transports_are_listed_with_their_level_and_never_given() {
    for (name, nics) in [("azure-ncv4-topo", &["eth0"][..]), ("gcp-a3-high-first-switch-part", &["enp0s12", "enp6s0"])]
    {
        let snapshot = snapshot(case(name));
        assert_eq!(sockets(&snapshot.host), nics, "{name}");
        let plan = plan(&snapshot, &PlanOptions::default());
        assert!(plan.gpus.iter().all(|gpu| gpu.assigned.is_empty()), "{name}");
    }
    let gcp = case("gcp-a3-high-first-switch-part");
    assert_eq!(gcp.gpu_hca_level(GpuId(0), gcp.find_hca("enp6s0").unwrap()), Some(Level::Pix));
    assert_eq!(gcp.gpu_hca_level(GpuId(0), gcp.find_hca("enp0s12").unwrap()), Some(Level::Phb));
}

#[test]
fn a_text_without_classes_says_that_it_needs_the_hosts_own_tree() {
    let host = case("aws-g5.48xl-topo");
    assert_eq!((host.gpus.len(), host.hcas.len()), (0, 0));
    assert!(host.warnings.iter().any(|warning| warning.contains("9 functions have no class")), "{:?}", host.warnings);
}

/// DGX Spark lists functions without class (a public report of its dump): what they hold tells what they are.
#[test]
fn functions_without_class_are_what_they_hold() {
    let text = "<system version=\"1\"><cpu numaid=\"0\" arch=\"arm64\">\
                <pci busid=\"0000:01:00.0\" link_speed=\"32.0 GT/s PCIe\" link_width=\"4\"><nic>\
                <net name=\"rocep1s0f0\" speed=\"200000\" gdr=\"0\" net=\"1\" gin=\"1\"/></nic></pci>\
                <pci busid=\"000f:01:00.0\"><gpu dev=\"0\" sm=\"121\"><c2c bw=\"43125\" count=\"8\"/></gpu></pci></cpu></system>";
    let host = read(text);
    assert_eq!((host.gpus.len(), host.hcas.len()), (1, 1));
    assert_eq!(host.warnings, Vec::<String>::new());
}

/// VR200 (`mlopart`) and ranks that share a GPU: several elements of one GPU, each with all of its links.
#[test]
fn several_gpu_elements_of_one_function_are_one_gpu() {
    let text = |first: &str, second: &str| {
        let gpu = |dev: &str| {
            format!("<gpu dev=\"{dev}\"><nvlink target=\"fffffff:ff:ff.0\" count=\"36\" tclass=\"0x068000\"/></gpu>")
        };
        format!(
            "<system version=\"1\"><cpu numaid=\"0\"><pci busid=\"0002:81:00.0\" class=\"0x030200\">{}{}</pci></cpu></system>",
            gpu(first),
            gpu(second)
        )
    };
    let shared = read(&text("0", "0"));
    assert_eq!(shared.nvlinks.iter().map(|link| link.links).collect::<Vec<_>>(), [36]);
    assert_eq!((shared.gpus.len(), shared.warnings.len()), (1, 0));
    let mistaken = read(&text("0", "1"));
    assert!(mistaken.warnings[0].contains("0002:81:00.0: holds several gpu elements"), "{:?}", mistaken.warnings);
}

#[test]
fn a_nic_without_net_is_told() {
    let text = "<system version=\"1\"><cpu numaid=\"0\"><pci busid=\"0000:01:00.0\" class=\"0x020700\">\
                <nic dev=\"mlx5_0\" speed=\"200\"/></pci><pci busid=\"0000:02:00.0\" class=\"0x020700\"><nic/></pci></cpu></system>";
    let warnings = read(text).warnings;
    assert_eq!(warnings.iter().filter(|warning| warning.contains("`net` element")).count(), 1, "{warnings:?}");
    assert!(warnings.iter().any(|warning| warning.starts_with("nic mlx5_0: ")), "{warnings:?}");
}

#[test]
fn flat_guests_make_every_pair_phb() {
    let host = case("nccl-tests256-h200-vm-flat-part");
    assert_eq!(host.gpu_hca_level(GpuId(0), HcaId(0)), Some(Level::Phb));
    assert_eq!(host.gpus[0].numa, None);
    assert_eq!(host.numa_nodes, []);
}

#[test]
fn links_between_gpus_are_counted_once_and_those_to_switches_added_up() {
    let mi250 = case("rccl-mi250-8gcd-8nic");
    let gpu = |host: &Host, name: &str| host.find_gpu(name).unwrap();
    let pair = |a: &str, b: &str| mi250.nvlinks_between(gpu(&mi250, a), gpu(&mi250, b));
    assert_eq!(pair("0000:32:00.0", "0000:35:00.0"), 4);
    assert_eq!(pair("0000:32:00.0", "0000:8e:00.0"), 2);
    assert_eq!(pair("0000:32:00.0", "0000:93:00.0"), 0);
    assert_eq!(mi250.nvlink_kind(), Some(NvLinkKind::PartialMesh));
    let h100 = case("oci-H100-topology");
    assert_eq!(h100.nvlink_kind(), Some(NvLinkKind::Switched));
    assert_eq!(h100.gpu_level(GpuId(0), GpuId(7)), Some(Level::nvlink(18)));
    // The four guests of ncv4 list links of each GPU to itself: nothing is known of where they lead.
    assert_eq!(case("azure-ncv4-topo").nvlinks, []);
}

#[test]
fn ports_of_one_function_are_nics_of_one_card() {
    let host = case("oci-H100-topology");
    let (a, b) = (host.find_hca("mlx5_0").unwrap(), host.find_hca("mlx5_1").unwrap());
    let (a, b) = (host.hca(a).unwrap(), host.hca(b).unwrap());
    assert_eq!((a.card, a.ports[0].port_num, a.ports[0].rate_gbps), (b.card, 1, Some(180.0)));
    assert_eq!(b.ports[0].port_num, 2);
    assert!(a.card.is_some());
}

#[test]
fn traffic_below_one_switch_does_not_count_its_uplink() {
    let snapshot = snapshot(case("oci-H100-topology"));
    let plan = plan(&snapshot, &PlanOptions::default());
    let way = advise_path(&snapshot, &plan, "GPU0", &Destination::Remote).unwrap();
    assert_eq!((way.kind, way.via.len(), way.gbps), (PathKind::GpudirectRdma, 2, Some(360.0)));
    assert_eq!(way.fallback.and_then(|next| next.gbps).map(f64::round), Some(64.0));
}

#[test]
fn switches_of_one_address_stay_apart() {
    let host = case("rccl-4p4h-16gpu-16nic");
    assert_eq!(host.gpu_hca_level(GpuId(0), host.find_hca("mlx5_12").unwrap()), Some(Level::Pix));
    assert_eq!(host.gpu_hca_level(GpuId(0), host.find_hca("mlx5_11").unwrap()), Some(Level::Pxb));
    assert!(host.warnings.iter().any(|warning| warning.contains("0000:c5:00.0` is listed more than once")));
}

#[test]
fn cpus_and_numa_nodes_come_from_the_cpu_elements() {
    let host = case("azure-ndv4-topo");
    let cpus: Vec<_> = host.numa_nodes.iter().map(|node| node.cpus.clone().unwrap()).collect();
    assert_eq!(cpus, ["0-23", "24-47", "48-71", "72-95"]);
}

#[test]
fn what_is_no_topology_is_refused_by_its_reason() {
    let deep = format!("<system>{}</system>", "<pci>".repeat(100_000));
    let bomb = "<!DOCTYPE x [<!ENTITY a \"aaaaaaaaaa\"><!ENTITY b \"&a;&a;&a;&a;\">]><system name=\"&b;\"/>";
    let many_cpus = format!("<system>{}</system>", "<cpu numaid=\"0\"/>".repeat(257));
    let many_nets = format!("<system><cpu><nic>{}</nic></cpu></system>", "<net name=\"a\"/>".repeat(257));
    let wide = format!("<system>{}</system>", "<a/>".repeat(70_000));
    let long = format!("<system name=\"{}\"/>", "a".repeat(5 << 20));
    for (text, reason) in [
        ("", "root"),
        ("<system>", "never closed"),
        ("<graphs version=\"1\"/>", "`graphs`"),
        ("<system/><system/>", ""),
        (bomb, "DTD"),
        (deep.as_str(), ""),
        (many_cpus.as_str(), "256 cpu"),
        (many_nets.as_str(), "256 net"),
        (wide.as_str(), "nodes"),
        (long.as_str(), "bytes"),
    ] {
        let error = NcclTopology::parse(text).unwrap_err().to_string();
        assert!(error.contains(reason), "{reason}: {error}");
    }
}

#[test]
fn odd_elements_are_left_out_with_a_warning() {
    let host = read(
        "<system version=\"1\"><cpu numaid=\"x\"><pci busid=\"nonsense\" class=\"0x060400\">\
         <pci busid=\"0000:01:00.0\" class=\"0x030200\"><gpu/></pci><pci busid=\"0000:02:00.0\"><nic><net/></nic></pci>\
         <thing/></pci></cpu><pci busid=\"0000:03:00.0\"/></system>",
    );
    assert_eq!(host.gpu_hca_level(GpuId(0), HcaId(0)), Some(Level::Pix));
    let warned = |text: &str| host.warnings.iter().any(|warning| warning.contains(text));
    assert!(
        warned("`nonsense` is no PCI address") && warned("thing in pci") && warned("numaid"),
        "{:?}",
        host.warnings
    );
}

/// What is no address in the text is none in the answers: what stands for it inside is never shown.
#[test]
fn a_busid_that_is_no_address_is_null_for_programs() {
    let snapshot = snapshot(read(
        "<system version=\"1\"><cpu numaid=\"0\"><pci busid=\"switch-a\" class=\"0x060400\">\
         <pci busid=\"gpu-a\" class=\"0x030200\"><gpu/></pci><pci busid=\"nic-a\" class=\"0x020700\"><nic><net name=\"mlx5_0\"/></nic></pci>\
         </pci></cpu></system>",
    ));
    let plan = plan(&snapshot, &PlanOptions::default());
    assert_eq!((plan.gpus[0].bdf, plan.nics[0].bdf, plan.nics[0].card), (None, None, None));
    assert_eq!(plan.gpus[0].nics[0].bdf, None);
    assert_eq!(plan.gpus[0].assigned, ["mlx5_0"]);
    assert_eq!(plan.gpus[0].nics[0].level, Some(Level::Pix), "its place is known all the same");
    let topo = gdrd_topology::render::topo(&snapshot, &plan);
    assert_eq!((topo.gpus[0].bdf, topo.nics[0].bdf, topo.nics[0].card), (None, None, None));
    let json: serde_json::Value = serde_json::from_str(&plan.to_json()).unwrap();
    assert!(json["gpus"][0]["bdf"].is_null() && json["gpus"][0]["nics"][0]["bdf"].is_null());
}

#[test]
fn a_second_host_of_a_fused_text_is_left_out() {
    let host = read(
        "<system><cpu host_hash=\"0x1\" numaid=\"0\"><pci busid=\"0000:01:00.0\" class=\"0x030200\"/></cpu>\
         <cpu host_hash=\"0x2\" numaid=\"0\"><pci busid=\"0000:01:00.0\" class=\"0x030200\"/></cpu></system>",
    );
    assert_eq!(host.gpus.len(), 1);
    assert!(host.warnings.iter().any(|warning| warning.contains("second host")), "{:?}", host.warnings);
}

/// A flat guest as sysfs shows it: every function right below the one virtual root.
const FLAT_GUEST: &str = "gdrd-host-profile 1
name flat
numa 0 cpus=0-47
numa 1 cpus=48-95
root pci0000:00
pci 0000:00:15.0 1d0f:efa1 020000 pci0000:00 -
pci 0000:00:16.0 10de:2237 030200 pci0000:00 2.5x1/16x16
pci 0000:00:1a.0 10de:2237 030200 pci0000:00 16x16
pci 0000:00:1f.0 1d0f:8061 010802 pci0000:00 -
hca rdmap0s21 0000:00:15.0
port rdmap0s21 1 ACTIVE Ethernet 100
";

fn over(profile: &str, xml: &str) -> Host {
    let mut raw = gdrd_topology::profile::parse(profile).unwrap();
    NcclTopology::parse(xml).unwrap().lay_over(&mut raw);
    assemble(raw, &ReadOptions::default())
}

fn level(host: &Host, gpu: &str, hca: &str) -> Level {
    host.gpu_hca_level(host.find_gpu(gpu).unwrap(), host.find_hca(hca).unwrap()).unwrap()
}

/// tests/cases says "all PHB to the EFA (one cpu element)", but the text has two cpu elements and the EFA in the
/// second: its own four GPUs are PHB, those of the other element SYS, as NCCL would have it.
#[test]
fn a_text_of_addresses_alone_places_what_the_host_lists() {
    let host = over(FLAT_GUEST, &case_text("nccl-xml/aws-g5.48xl-topo.xml"));
    assert_eq!(host.gpus.len(), 2);
    assert_eq!(level(&host, "0000:00:1a.0", "rdmap0s21"), Level::Phb);
    assert_eq!(level(&host, "0000:00:16.0", "rdmap0s21"), Level::Sys);
    assert_eq!(host.gpus[1].numa.map(|numa| numa.0), Some(1));
    // What the text does not name stays where the host has it; what the host does not have is told.
    assert!(host.function("0000:00:1f.0".parse().unwrap()).is_some());
    assert!(host.warnings.iter().any(|w| w.starts_with("0000:00:17.0: in the NCCL topology but not on this host")));
}

#[test]
fn made_up_switches_of_a_text_come_with_what_is_below_them() {
    let xml = "<system version=\"1\"><cpu numaid=\"0\">\
        <pci busid=\"ffff:ff:01.0\" class=\"0x060400\" link_speed=\"16 GT/s\" link_width=\"16\">\
        <pci busid=\"0000:00:16.0\" link_speed=\"16 GT/s\" link_width=\"16\"/><pci busid=\"0000:00:15.0\"/></pci>\
        <pci busid=\"ffff:ff:02.0\" class=\"0x060400\"><pci busid=\"0000:00:1a.0\"/></pci>\
        <pci busid=\"ffff:ff:03.0\" class=\"0x060400\"><pci busid=\"0000:00:19.0\"/></pci></cpu></system>";
    let host = over(FLAT_GUEST, xml);
    assert_eq!(level(&host, "0000:00:16.0", "rdmap0s21"), Level::Pix);
    assert_eq!(level(&host, "0000:00:1a.0", "rdmap0s21"), Level::Phb);
    let gpu = host.function("0000:00:16.0".parse().unwrap()).unwrap();
    assert_eq!(gpu.link.gbps().map(f64::round), Some(252.0), "the link of the text, not the guest's 2.5 GT/s");
    assert!(host.function("ffff:ff:03.0".parse().unwrap()).is_none(), "nothing of it is on this host");
}

#[test]
fn a_nic_named_right_is_placed_whatever_its_address_in_the_text() {
    let xml = "<system version=\"1\"><cpu numaid=\"0\"><pci busid=\"ffff:ff:01.0\" class=\"0x060400\">\
        <pci busid=\"0000:00:16.0\"/><pci busid=\"0101:00:00.0\"><nic><net name=\"rdmap0s21\" port=\"1\"/></nic></pci>\
        </pci></cpu></system>";
    assert_eq!(level(&over(FLAT_GUEST, xml), "0000:00:16.0", "rdmap0s21"), Level::Pix);
    let at_cpu = "<system version=\"1\"><cpu numaid=\"1\"><pci busid=\"0000:00:1a.0\"/>\
        <nic><net name=\"rdmap0s21\" port=\"1\"/></nic></cpu></system>";
    let host = over(FLAT_GUEST, at_cpu);
    assert_eq!(level(&host, "0000:00:1a.0", "rdmap0s21"), Level::Phb);
    assert_eq!(host.hcas[0].numa.map(|numa| numa.0), Some(1));
}

/// The real tree below a switch that a partial text moves: the downstream port, which NCCL's texts never list,
/// must not count twice.
#[test]
fn a_partial_text_moves_a_switch_with_all_that_is_below_it() {
    let base = "gdrd-host-profile 1
numa 0
numa 1
root pci0000:00 numa=0
root pci0000:80 numa=1
pci 0000:00:01.0 8086:0001 060400 pci0000:00 16x16
pci 0000:01:00.0 1000:c030 060400 0000:00:01.0 16x16
pci 0000:02:00.0 1000:c030 060400 0000:01:00.0 16x16
pci 0000:02:01.0 1000:c030 060400 0000:01:00.0 16x16
pci 0000:03:00.0 10de:2335 030200 0000:02:00.0 16x16
pci 0000:04:00.0 15b3:1021 020700 0000:02:01.0 16x16
pci 0000:04:00.1 15b3:1021 020700 0000:02:01.0 16x16
pci 0000:81:00.0 15b3:1021 020700 pci0000:80 16x16
hca mlx5_0 0000:04:00.0
hca mlx5_1 0000:04:00.1
hca mlx5_2 0000:81:00.0
";
    let bare = over(base, "<system version=\"1\"/>");
    assert_eq!([level(&bare, "GPU0", "mlx5_0"), level(&bare, "GPU0", "mlx5_2")], [Level::Pix, Level::Sys]);
    let moved = "<system version=\"1\"><cpu numaid=\"1\"><pci busid=\"0000:01:00.0\" class=\"0x060400\"/>\
        <pci busid=\"0000:81:00.0\"/></cpu></system>";
    let host = over(base, moved);
    assert_eq!([level(&host, "GPU0", "mlx5_0"), level(&host, "GPU0", "mlx5_2")], [Level::Pix, Level::Phb]);
    // NCCL knows a card by its function 0: the second port goes where that one goes.
    let one_function = "<system version=\"1\"><cpu numaid=\"1\"><pci busid=\"0000:04:00.0\"/></cpu></system>";
    let host = over(base, one_function);
    assert_eq!(level(&host, "GPU0", "mlx5_0"), level(&host, "GPU0", "mlx5_1"));
    assert_eq!(level(&host, "GPU0", "mlx5_0"), Level::Sys);
}

#[test]
fn rates_beyond_any_port_are_unknown_with_a_warning() {
    for speed in ["200000000", "99999999999"] {
        let text =
            case_text("nccl-xml/oci-H100-topology.xml").replacen("speed=\"180000\"", &format!("speed=\"{speed}\""), 1);
        let host = read(&text);
        assert_eq!((host.hcas[0].rate_gbps(), host.hcas[1].rate_gbps()), (None, Some(180.0)));
        let told: Vec<_> = host.warnings.iter().filter(|w| w.starts_with("mlx5_0: rate of port 1 is ")).collect();
        assert_eq!(told.len(), 1, "{:?}", host.warnings);
    }
}
