//! Pasted `nvidia-smi topo -m` matrices: every machine of tests/cases, printed in the ways people paste it,
//! against its answer.
#![allow(clippy::panic, clippy::unwrap_used, reason = "helpers of tests, which clippy does not know as such")]

mod common;

use common::tables::{FORMS, Form, Table, print, table};
use common::{Answer, answers, assert_plan_keeps_the_rules, by_level, case_text, sections};
use gdrd_topology::advise::{Destination, advise_path};
use gdrd_topology::assemble::{ReadOptions, assemble};
use gdrd_topology::export::{env, mooncake_matrix};
use gdrd_topology::level::Level;
use gdrd_topology::model::{GpuId, HcaId, Host, NumaId, NvLinkKind, Snapshot};
use gdrd_topology::place::{PlaceRequest, place};
use gdrd_topology::plan::{PlanOptions, plan};
use gdrd_topology::source::{Source, SourceKind};
use gdrd_topology::topo_m;

fn read(text: &str) -> Host {
    assemble(topo_m::parse(text).unwrap(), &ReadOptions::default())
}

fn snapshot(host: Host) -> Snapshot {
    Snapshot { generation: 1, source: Source { kind: SourceKind::TopoM, path: None }, host }
}

fn cases() -> Vec<(String, Table, Vec<Answer>)> {
    let (tables, all) = (case_text("topo-m.tables"), case_text("topo-m.answers"));
    let all = sections(&all);
    let answer = |name: &str| all.iter().find(|(known, _)| *known == name).map(|(_, lines)| answers(lines)).unwrap();
    sections(&tables).into_iter().map(|(name, lines)| (name.to_owned(), table(&lines), answer(name))).collect()
}

fn case(name: &str) -> Table {
    cases().into_iter().find(|(known, _, _)| known == name).unwrap().1
}

fn assert_answers(case: &str, host: &Host, answers: &[Answer], with_numa: bool) {
    for answer in answers {
        for name in &answer.gpus {
            let gpu = host.find_gpu(name).unwrap_or_else(|| panic!("{case}: no {name}"));
            if with_numa {
                assert_eq!(host.gpu(gpu).unwrap().numa, answer.numa, "{case} {name}");
            }
            let found: Vec<_> = by_level(host, gpu).into_iter().collect();
            let right: Vec<_> = answer.groups.iter().map(|group| (group.level, group.nics.clone())).collect();
            assert_eq!(found, right, "{case} {name}");
        }
    }
}

/// deepseek-ai/DeepEP#145: the rows of GPU4 to GPU7 were not posted. What is near to the others is not theirs.
#[test]
fn gpus_of_which_no_level_is_known_take_what_the_others_leave() {
    let snapshot = snapshot(read(&print(&case("hgx-18nic-4per-2gpu-part"), Form::default())));
    let plan = plan(&snapshot, &PlanOptions::default());
    let given: Vec<_> =
        plan.gpus.iter().map(|gpu| gpu.assigned.iter().map(String::as_str).collect::<Vec<_>>()).collect();
    assert_eq!(given[..4], [["mlx5_0", "mlx5_1"], ["mlx5_2", "mlx5_3"], ["mlx5_6", "mlx5_7"], ["mlx5_8", "mlx5_9"]]);
    let near: Vec<&str> = given[..4].concat();
    assert!(given[4..].iter().flatten().all(|nic| !near.contains(nic)), "{given:?}");
}

#[test]
fn every_case_has_its_levels_in_every_form() {
    let cases = cases();
    assert_eq!(cases.len(), 32);
    for (name, table, answers) in &cases {
        assert!(!answers.is_empty(), "{name}");
        for (form_name, form) in FORMS {
            let what = format!("{name}, {form_name}");
            let host = read(&print(table, form));
            // Between blanks an empty CPU affinity cannot be told from an empty NUMA affinity.
            assert_answers(&what, &host, answers, !form.spaces && !form.bars && form.wrapped.is_none());
            assert_eq!(host.hcas.len(), table.nics.len(), "{what}");
        }
    }
}

#[test]
fn every_case_is_paired_by_the_rules() {
    for (name, table, _) in cases() {
        let snapshot = snapshot(read(&print(&table, Form::default())));
        // GPUs without a row have levels to no NIC, so nothing can be held against their pairs.
        if table.rows.iter().filter(|row| row.name.starts_with("GPU")).count() == snapshot.host.gpus.len() {
            assert_plan_keeps_the_rules(&name, &snapshot, &plan(&snapshot, &PlanOptions::default()));
        }
    }
}

fn assigned(table: &Table) -> Vec<Vec<String>> {
    let snapshot = snapshot(read(&print(table, Form::default())));
    plan(&snapshot, &PlanOptions::default()).gpus.into_iter().map(|gpu| gpu.assigned).collect()
}

#[test]
fn gpus_of_one_switch_take_different_nics() {
    let a800 = assigned(&case("a800-8bond-2per-switch"));
    let right: Vec<Vec<String>> = (0..8).map(|nic| vec![format!("mlx5_bond_{nic}")]).collect();
    assert_eq!(a800, right);
    let dgx = assigned(&case("dgx-a100-12nic"));
    assert_eq!(dgx[..4], [["mlx5_0"], ["mlx5_1"], ["mlx5_2"], ["mlx5_3"]]);
    assert_eq!(dgx[4..], [["mlx5_6"], ["mlx5_7"], ["mlx5_8"], ["mlx5_9"]]);
}

#[test]
fn a_nic_that_is_the_nearest_of_two_gpus_goes_to_both() {
    let right = ["mlx5_2", "mlx5_2", "mlx5_3", "mlx5_3", "mlx5_4", "mlx5_4", "mlx5_5", "mlx5_5"];
    assert_eq!(assigned(&case("h200-4nic-baremetal")), right.map(|nic| vec![nic.to_owned()]));
}

/// A driver that cannot tell prints N/A: nothing is said of what lies between.
#[test]
fn of_an_unknown_place_no_warning_claims_to_know_the_way() {
    let snapshot =
        snapshot(read("\tGPU0\tGPU1\tNIC0\nGPU0\t X \tN/A\tN/A\nGPU1\tN/A\t X \tPIX\nNIC0\tN/A\tPIX\t X \n"));
    let plan = plan(&snapshot, &PlanOptions::default());
    assert!(plan.warnings.contains(&"GPU0-NIC0: at an unknown place".to_owned()), "{:?}", plan.warnings);
}

/// Nine entries, one wire: only one is offered. Of a bonded card it is the bond.
#[test]
fn a_crowd_of_functions_is_one_card() {
    let (cards, right) = (case("r760xa-l40s-1gpu-10nic-vfs"), vec![vec!["mlx5_0".to_owned(), "mlx5_1".to_owned()]]);
    assert_eq!(assigned(&cards), right);
    let bonds = assigned(&case("hgx-36nic-vf-and-bond"));
    for (gpu, bond) in [(0, "mlx5_bond_3"), (2, "mlx5_bond_2"), (4, "mlx5_bond_0"), (6, "mlx5_bond_1")] {
        assert_eq!(bonds[gpu], [bond], "GPU{gpu}");
    }
    for (gpu, node) in [(1, ["mlx5_bond_2", "mlx5_bond_3"]), (5, ["mlx5_bond_0", "mlx5_bond_1"])] {
        assert!(node.contains(&bonds[gpu][0].as_str()) && bonds[gpu].len() == 1, "GPU{gpu}: {:?}", bonds[gpu]);
    }
    // Two and four functions may well be ports of one card, or four cards on one switch.
    assert_eq!(assigned(&case("hgx-18nic-2pix-per-gpu-part"))[1], ["mlx5_2", "mlx5_3"]);
}

/// GPUs of one node whose NICs are all as near: no card is split between them. Both ports of one are a whole card.
#[test]
fn on_a_flat_host_each_gpu_has_cards_of_its_own() {
    let given = assigned(&case("epyc-4gpu-5nic-flat-pci"));
    let ports = ["roceo12399", "roceo12409"].map(str::to_owned);
    for gpu in &given[..2] {
        let own = ports.iter().filter(|port| gpu.contains(port)).count();
        assert!(own == 0 || own == 2, "{given:?}");
        assert!(!gpu.is_empty());
    }
    assert_eq!(given[2..], [["rocep181s0f0"], ["rocep181s0f0"]]);
}

#[test]
fn names_and_order_of_nics_do_not_decide() {
    let reversed: Vec<Vec<String>> = (1..=8).rev().map(|nic| vec![format!("mlx5_{nic}")]).collect();
    assert_eq!(assigned(&case("h100-guest-9nic-reversed")), reversed);
    let by_one: Vec<Vec<String>> = (1..=8).map(|nic| vec![format!("mlx5_{nic}")]).collect();
    assert_eq!(assigned(&case("h800-kvm-guest-pix-phb")), by_one);
}

#[test]
fn nvlinks_come_from_the_counts() {
    let kind = |name: &str| read(&print(&case(name), Form::default())).nvlink_kind();
    assert_eq!(kind("hgx-h100-8nic-pix"), Some(NvLinkKind::Switched));
    assert_eq!(kind("dgx2-16gpu-10nic-part"), Some(NvLinkKind::Switched));
    assert_eq!(kind("epyc-4gpu-5nic-flat-pci"), None);
    let b200 = read(&print(&case("b200-12nic-gpu2-nvlink-down-part"), Form::default()));
    assert_eq!(b200.gpu_level(GpuId(0), GpuId(2)), Some(Level::Node));
    assert_eq!(b200.gpu_level(GpuId(2), GpuId(4)), Some(Level::Sys));
    assert_eq!(b200.gpu_level(GpuId(0), GpuId(7)), Some(Level::nvlink(18)));
}

/// gpu-own-nic-rest-sys-part: all but each GPU's own NIC is SYS, yet the second choice must be of its node.
#[test]
fn nics_are_on_the_node_of_the_gpus_nearest_to_them() {
    let host = read(&print(&case("gpu-own-nic-rest-sys-part"), Form::default()));
    let numa = |name: &str| host.hca(host.find_hca(name).unwrap()).unwrap().numa;
    assert_eq!([numa("mlx5_3"), numa("mlx5_4"), numa("mlx5_9")], [Some(NumaId(0)), Some(NumaId(1)), None]);
    // Every pair is NODE although the GPUs are on two nodes: that says nothing of the NIC.
    let grace = read(&print(&case("gb200-4gpu-6nic-all-node"), Form::default()));
    assert!(grace.hcas.iter().all(|hca| hca.numa.is_none()));
}

#[test]
fn a_matrix_whose_header_was_cut_off_is_read_by_its_rows() {
    for name in ["b200-12nic-gpu2-nvlink-down-part", "hgx-h100-8nic-pix"] {
        let (_, table, answers) = cases().into_iter().find(|(known, _, _)| known == name).unwrap();
        let text = print(&table, Form::default());
        let host = read(text.split_once('\n').unwrap().1);
        assert_answers(name, &host, &answers, true);
        assert!(host.warnings.iter().any(|warning| warning.contains("the rest is assumed")));
    }
}

#[test]
fn without_a_legend_nics_go_by_their_column() {
    let text = "\tGPU0\tNIC0\tNIC1\tCPU Affinity\nGPU0\t X \tPIX\tSYS\t0-15\nNIC0\tPIX\t X \tSYS\n";
    let host = read(text);
    assert_eq!(by_level(&host, GpuId(0))[&Level::Pix].iter().next().unwrap(), "NIC0");
    let twice = format!("{text}NIC0: mlx5_0\nNIC1: mlx5_0\n");
    let host = read(&twice);
    assert_eq!(host.hcas.iter().map(|hca| hca.name.as_str()).collect::<Vec<_>>(), ["mlx5_0", "NIC1"]);
}

fn nic_names(host: &Host) -> Vec<&str> {
    host.hcas.iter().map(|hca| hca.name.as_str()).collect()
}

#[test]
fn a_legend_names_nics_whatever_stands_around_the_names() {
    let matrix = "\tGPU0\tNIC0\tNIC1\tCPU Affinity\nGPU0\t X \tPIX\tSYS\t0-15\n";
    for legend in [
        "NIC0: mlx5_0 (Up)\nNIC1: mlx5_1 (Down)\n",
        "NIC0: mlx5_0 port 1 ==> ib0 (Up)\nNIC1: mlx5_1 port 1 ==> ib1 (Up)\n",
        "NIC0: mlx5_0 (0000:18:00.0)\nNIC1: mlx5_1(0000:2a:00.0)\n",
        "NIC0:mlx5_0\nNIC1:mlx5_1\n",
        "NIC0 : mlx5_0\nNIC1 : mlx5_1\n",
        "  NIC0: mlx5_0  NIC1: mlx5_1\n",
        "NIC0: mlx5_0, NIC1: mlx5_1.\n",
        "- `NIC0`: `mlx5_0`\n- **NIC1**: \"mlx5_1\",\n",
        "NIC0: mlx5_0\nNIC1: mlx5_1\nNIC0: is down since noon\n",
    ] {
        let host = read(&format!("{matrix}\nNIC Legend:\n\n{legend}"));
        assert_eq!(nic_names(&host), ["mlx5_0", "mlx5_1"], "{legend}");
        assert!(host.warnings.iter().all(|warning| !warning.contains("placeholder")), "{:?}", host.warnings);
    }
}

/// `NCCL_IB_HCA==NIC0:1` matches no device, and NCCL goes by sockets without a word.
#[test]
fn placeholders_are_told_and_never_exported() {
    let matrix = "\tGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\nGPU0\t X \tSYS\tPIX\tSYS\t0-15\n\
                  GPU1\tSYS\t X \tSYS\tPIX\t16-31\n";
    for (legend, list, exported) in
        [("", "NIC0, NIC1: placeholders", false), ("NIC0: mlx5_0\n", "NIC1: placeholders", true)]
    {
        let snapshot = snapshot(read(&format!("{matrix}{legend}")));
        assert!(snapshot.host.warnings.iter().any(|warning| warning.starts_with(list)), "{:?}", snapshot.host.warnings);
        let made = env(&snapshot.host, &plan(&snapshot, &PlanOptions::default()), None);
        assert!(made.notes.iter().any(|note| note.starts_with(list)), "{:?}", made.notes);
        let variables: Vec<_> = made.gpus.iter().flat_map(|gpu| &gpu.variables).chain(&made.host).collect();
        assert!(variables.iter().all(|variable| !variable.value.contains("NIC")), "{variables:?}");
        assert_eq!(variables.iter().any(|variable| variable.value == "=mlx5_0:1"), exported, "{variables:?}");
        let refused = mooncake_matrix(&snapshot.host, &plan(&snapshot, &PlanOptions::default())).unwrap_err();
        assert!(refused.to_string().starts_with(list) && refused.to_string().contains("legend"), "{refused}");
    }
}

const P2P: &str = " \tGPU0\tGPU1\tGPU2\n GPU0\tX\tOK\tCNS\n GPU1\tOK\tX\tNS\n GPU2\tTNS\tGNS\tX\n\nLegend:\n\n\
                   X    = Self\n  OK   = Status Ok\n  CNS  = Chipset not supported\n";

#[test]
fn what_comes_before_the_matrix_does_not_hide_it() {
    let matrix =
        "\tGPU0\tGPU1\tNIC0\tCPU Affinity\nGPU0\t X \tNV4\tPIX\t0-15\nGPU1\tNV4\t X \tSYS\t16-31\nNIC0: mlx5_0\n";
    let right = read(matrix);
    for before in
        [P2P, "GPU0 X\n", "GPU0 X\n\tGPU0\tGPU1\n", "\tGPU0\nGPU0\t X \n", " \tGPU0\tGPU1\tGPU2\nGPU0 X OK OK\n"]
    {
        assert_eq!(read(&format!("{before}\n{matrix}")), right, "{before}");
    }
    let after = read(&format!("{matrix}\nuser@host:~$ nvidia-smi topo -p2p r\n{P2P}"));
    assert_eq!((&after.gpus, &after.hcas), (&right.gpus, &right.hcas));
}

#[test]
fn a_lone_gpu_is_a_matrix_whatever_follows() {
    let host = read("\tGPU0\tCPU Affinity\nGPU0\t X \t0-15\n\nGPU0 GPU1\n");
    assert_eq!(host.gpus.len(), 1);
}

#[test]
fn a_matrix_of_peer_access_is_named_and_refused() {
    assert!(topo_m::parse(P2P).unwrap_err().to_string().contains("topo -p2p"));
    let error = gdrd_topology::read_text(P2P, "a".as_ref(), &ReadOptions::default()).unwrap_err().to_string();
    assert!(error.contains("topo -p2p") && error.contains("topo -m`"), "{error}");
}

#[test]
fn mig_instances_are_left_out_and_shift_nothing() {
    for (first, second) in [("GPU0-MIG0", "GPU0-MIG1"), ("MIG 0/7/0", "MIG 0/8/0"), ("GPU0:MIG1", "MIG-0/8/0")] {
        let text = format!(
            "\tGPU0\t{first}\t{second}\tGPU1\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tPIX\tPIX\tSYS\tPXB\tSYS\t0-15\t0\n\
             {first}\tPIX\t X \tPIX\tSYS\tPXB\tSYS\t0-15\t0\n{second}\tPIX\tPIX\t X \tSYS\tPXB\tSYS\t0-15\t0\n\
             GPU1\tSYS\tSYS\tSYS\t X \tSYS\tPXB\t16-31\t1\nNIC0: mlx5_0\nNIC1: mlx5_1\n"
        );
        let host = read(&text);
        assert_eq!((host.gpus.len(), nic_names(&host)), (2, vec!["mlx5_0", "mlx5_1"]), "{text}");
        for gpu in [0, 1] {
            let nearest = &by_level(&host, GpuId(gpu))[&Level::Pxb];
            assert_eq!(nearest.iter().collect::<Vec<_>>(), [&format!("mlx5_{gpu}")], "{text}");
        }
        assert_eq!(host.gpu_level(GpuId(0), GpuId(1)), Some(Level::Sys));
        assert!(host.warnings.iter().any(|warning| warning.contains("MIG instances, left out")), "{:?}", host.warnings);
    }
}

/// `nvidia-smi topo -m -nvme`: in one matrix, or behind it in one of their own (newer drivers).
#[test]
fn drives_are_no_nics_and_have_levels() {
    let legend = "NIC Legend:\n\n  NIC0: mlx5_0\n";
    let drives = "NVMe Legend:\n\n  NVMe0: nvme0n1\n  NVMe1: nvme3n1\n";
    let one = format!(
        "\tGPU0\tGPU1\tNIC0\tNVMe0\tNVMe1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tSYS\tPIX\tSYS\tPIX\t0-15\t0\n\
         GPU1\tSYS\t X \tSYS\tPHB\tSYS\t16-31\t1\nNIC0\tPIX\tSYS\t X \tSYS\tPIX\nNVMe0\tSYS\tPHB\tSYS\t X \tSYS\n{legend}{drives}"
    );
    let two = format!(
        "\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tSYS\tPIX\t0-15\t0\nGPU1\tSYS\t X \tSYS\t16-31\t1\n\
         NIC0\tPIX\tSYS\t X \n{legend}\n\u{1b}[4mNVMe0\tNVMe1\t\u{1b}[0m\nGPU0\tSYS\tPIX\t\nGPU1\tPHB\tSYS\t\n{drives}"
    );
    for text in [one, two] {
        let host = read(&text);
        assert_eq!(nic_names(&host), ["mlx5_0"], "{text}");
        assert_eq!(host.drives.iter().map(|drive| drive.name.as_str()).collect::<Vec<_>>(), ["nvme0", "nvme3"]);
        assert_eq!(host.gpus.iter().map(|gpu| gpu.numa).collect::<Vec<_>>(), [Some(NumaId(0)), Some(NumaId(1))]);
        assert_eq!(host.warnings, Vec::<String>::new(), "{text}");
        let snapshot = snapshot(host);
        let plan = plan(&snapshot, &PlanOptions::default());
        for (gpu, drive, level) in [
            ("GPU0", None, Level::Pix),
            ("GPU0", Some("nvme3n1"), Level::Pix),
            ("GPU1", None, Level::Phb),
            ("GPU1", Some("nvme3"), Level::Sys),
        ] {
            let to = Destination::Drive(drive.map(str::to_owned));
            let advice = advise_path(&snapshot, &plan, gpu, &to).unwrap();
            assert_eq!(advice.level, Some(level), "{text}");
        }
    }
}

/// GB200: the node of the CPUs, then those of the GPU's memory. Two nodes of CPUs are no answer.
#[test]
fn the_nodes_of_a_gpus_own_memory_do_not_hide_that_of_its_cpus() {
    let numa = |affinity: &str| {
        read(&format!(
            "\tGPU0\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \tNODE\t72-143\t{affinity}\t\tN/A\n"
        ))
        .gpus[0]
            .numa
    };
    for (affinity, right) in
        [("1,18-33", Some(1)), ("0", Some(0)), ("0-1", None), ("0,1", None), ("0,8,252-255", None), ("N/A", None)]
    {
        assert_eq!(numa(affinity), right.map(NumaId), "{affinity}");
    }
}

/// 8 GPUs and 260 virtual functions, with and without the header's end.
#[test]
fn hundreds_of_nics_are_read() {
    let names: Vec<String> = (0..8).map(|at| format!("GPU{at}")).chain((0..260).map(|at| format!("NIC{at}"))).collect();
    let row = |at: usize| {
        let cells: Vec<&str> = (0..names.len()).map(|other| if other == at { "X" } else { "SYS" }).collect();
        format!("{}\t{}\n", names[at], cells.join("\t"))
    };
    let rows: String = (0..names.len()).map(row).collect();
    for header in [names.len(), 200] {
        let host = read(&format!("\t{}\n{rows}", names[..header].join("\t")));
        assert_eq!((host.gpus.len(), host.hcas.len()), (8, 260));
        assert_eq!(host.hcas[259].name, "NIC259");
    }
}

/// pdsh, mpirun, docker compose and logs put a name or a time before each line, also where no affinities end the header.
#[test]
fn a_matrix_is_found_behind_prefixes() {
    let table = case("hgx-h100-8nic-pix");
    let whole = print(&table, Form::default());
    let right = read(&whole);
    let short = "\tGPU0\tGPU1\tNIC0\nGPU0\t X \tSYS\tPIX\nGPU1\tSYS\t X \tSYS\nNIC0\tPIX\tSYS\t X \n\nNIC Legend:\n\n  NIC0: mlx5_0\n";
    let short_right = read(short);
    for prefix in [
        "node-1: ",
        "gpu-node-1.example.com: ",
        "0: ",
        "[1,0]<stdout>:",
        "[1,0]<stdout>: ",
        "gpu-pod-0 | ",
        "gpu-pod-0  | ",
        "\u{1b}[36mgpu-pod-0  |\u{1b}[0m ",
        "gpu-pod-0 | 2026-11-29T18:00:00.123456789Z ",
        "2026-11-29T18:00:00Z ",
        "2026-11-29 18:00:00,123 ",
        "18:00:00 node1: ",
        "[root@node-1 my dir]$ ",
        "(base) user@node-1:~/a b$ ",
    ] {
        let prefixed = |text: &str| text.lines().map(|line| format!("{prefix}{line}\n")).collect::<String>();
        assert_eq!(read(&prefixed(&whole)), right, "{prefix}");
        assert_eq!(read(&prefixed(short)), short_right, "{prefix}");
    }
}

#[test]
fn a_mistyped_cell_is_named_and_costs_its_own_level_alone() {
    let text = |cell: &str| {
        format!(
            "\tGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\n\
             GPU0\t X \tNV12\t{cell}\tSYS\t0-63\t1\nGPU1\tNV12\t X \tSYS\tPIX\t0-63\t1\n"
        )
    };
    for cell in ["P1X", "NV99999999999"] {
        let host = read(&text(cell));
        let levels: Vec<_> = (0..2).map(|nic| host.gpu_hca_level(GpuId(0), HcaId(nic))).collect();
        assert_eq!(levels, [None, Some(Level::Sys)], "{cell}");
        assert_eq!(host.gpus[0].numa, Some(NumaId(1)));
        let told = format!("row GPU0, column NIC0: '{cell}' is no level, unknown");
        assert!(host.warnings.iter().any(|warning| warning.contains(&told)), "{:?}", host.warnings);
    }
    let cut = read("\tGPU0\tNIC0\tCPU Affinity\nGPU0\t X \tP1X\t0-63\n");
    assert!(cut.warnings.iter().any(|warning| warning.contains("then comes 'P1X'")), "{:?}", cut.warnings);
}

/// NVLink joins all GPUs of such a host: which of them a PCIe switch joins too, their NICs tell.
#[test]
fn a_job_gets_gpus_of_one_switch_also_where_nvlink_hides_it() {
    let dgx = snapshot(read(&print(&case("a100-10nic-sys-within-numa"), Form::default())));
    let request = PlaceRequest { gpus: 2, same_switch: true, ..PlaceRequest::default() };
    let sets = place(&dgx, &PlanOptions::default(), &request).unwrap().sets;
    let gpus: Vec<_> = sets.into_iter().map(|set| set.gpus).collect();
    assert_eq!(gpus, [["GPU0", "GPU1"], ["GPU2", "GPU3"], ["GPU4", "GPU5"], ["GPU6", "GPU7"]]);
    let flat = snapshot(read(&print(&case("gb200-4gpu-6nic-all-node"), Form::default())));
    let sets =
        place(&flat, &PlanOptions::default(), &PlaceRequest { gpus: 2, ..PlaceRequest::default() }).unwrap().sets;
    assert!(sets.iter().flat_map(|set| &set.reasons).all(|reason| !reason.contains("switch")), "{sets:?}");
}

/// pdsh and clush print the lines of several hosts as they come.
#[test]
fn of_lines_of_several_hosts_those_of_the_first_count() {
    let one = "\tGPU0\tGPU1\tNIC0\nGPU0\t X \tSYS\tPIX\nGPU1\tSYS\t X \tSYS\n\nNIC Legend:\n\n  NIC0: mlx5_0\n";
    let other = one.replace("mlx5_0", "mlx5_7").replace("\tPIX", "\tSYS").replace("SYS\n", "PIX\n");
    let (mut mixed, right) = (String::new(), read(one));
    for (place, (one, other)) in one.lines().zip(other.lines()).enumerate() {
        let lines = [format!("node1: {one}\n"), format!("node2: {other}\n")];
        mixed.extend(if place % 3 == 1 { [&lines[1], &lines[0]] } else { [&lines[0], &lines[1]] }.map(String::as_str));
    }
    let mixed = read(&format!("warning: GPU0 SYS\n{mixed}"));
    assert_eq!((&mixed.given_levels, &mixed.hcas, &mixed.gpus), (&right.given_levels, &right.hcas, &right.gpus));
    let warning = "the text has lines of node2 too: those of node1 count";
    assert!(mixed.warnings.iter().any(|told| told == warning), "{:?}", mixed.warnings);
}

#[test]
fn words_of_older_versions_are_understood() {
    let host = read("\tGPU0\tGPU1\tmlx4_0\tCPU Affinity\nGPU0\t X \tSOC\tPHB\t0-9\nGPU1\tSOC\t X \tSOC\t10-19\n");
    assert_eq!(host.gpu_level(GpuId(0), GpuId(1)), Some(Level::Sys));
    assert_eq!(by_level(&host, GpuId(0))[&Level::Phb].iter().next().unwrap(), "mlx4_0");
}

#[test]
fn rows_that_contradict_each_other_are_told() {
    let host = read("\tGPU0\tNIC0\nGPU0\t X \tSYS\nNIC0\tPIX\t X \n");
    assert_eq!(by_level(&host, GpuId(0)).keys().next(), Some(&Level::Pix));
    assert!(host.warnings.iter().any(|warning| warning.contains("the rows say SYS and PIX")), "{:?}", host.warnings);
}

#[test]
fn text_without_a_matrix_is_refused() {
    for text in
        ["", "hello GPU0\n", "\tGPU0\tGPU1\tCPU Affinity\n", "GPU0\nX\n", "  X    = Self\n  PIX  = Connection\n"]
    {
        assert!(!topo_m::is_topo_m(text), "{text:?}");
        assert!(topo_m::parse(text).unwrap_err().to_string().contains("no row of a matrix"), "{text:?}");
    }
    let wide = format!("GPU0 X {}", "SYS ".repeat(1100));
    assert!(topo_m::parse(&wide).unwrap_err().to_string().contains("1024"));
    let error = gdrd_topology::read_text(&wide, "a".as_ref(), &ReadOptions::default()).unwrap_err().to_string();
    assert!(error.contains("1024"), "{error}");
    let long = "GPU0 X\n".repeat(1 << 18);
    assert!(topo_m::parse(&long).unwrap_err().to_string().contains("bytes"));
}
