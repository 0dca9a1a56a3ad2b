//! Pasted `rocm-smi --showtopo` and `--showtoponuma`. Answers: the NUMA lists of tests/cases, by machine.
#![allow(clippy::panic, clippy::unwrap_used, reason = "helpers of tests, which clippy does not know as such")]

use gdrd_topology::assemble::{ReadOptions, assemble};
use gdrd_topology::level::Level;
use gdrd_topology::model::{GpuId, Host, NumaId, NvLinkKind};
use gdrd_topology::rocm_topo;

fn read(text: &str) -> Host {
    assemble(rocm_topo::parse(text).unwrap(), &ReadOptions::default())
}

/// `--showtoponuma` of GPUs on these nodes, by what the tool calls node and affinity.
fn showtoponuma(nodes: &[(u16, u16)]) -> String {
    let lines = nodes.iter().enumerate().map(|(gpu, (node, affinity))| {
        format!("GPU[{gpu}]\t\t: (Topology) Numa Node: {node}\nGPU[{gpu}]\t\t: (Topology) Numa Affinity: {affinity}\n")
    });
    format!("======================= Numa Nodes =======================\n{}", lines.collect::<String>())
}

fn nodes(host: &Host) -> Vec<Option<u16>> {
    host.gpus.iter().map(|gpu| gpu.numa.map(|numa| numa.0)).collect()
}

#[test]
fn gpus_are_on_the_nodes_that_are_listed() {
    for (machine, right) in [
        // ROCm/rccl issue text.
        ("4 PCIe GPUs", &[7, 1, 7, 1][..]),
        // Public user notes of a LUMI-like machine, and public HPC documents.
        ("MI250X, 4 nodes", &[3, 3, 1, 1, 0, 0, 2, 2]),
        ("MI250X, 8 nodes", &[3, 2, 1, 0, 7, 6, 5, 4]),
        // Change log of ROCm/rocm_smi_lib: three partitions each.
        ("MI300A, 12 partitions", &[0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]),
    ] {
        let listed: Vec<(u16, u16)> = right.iter().map(|node| (*node, *node)).collect();
        let host = read(&showtoponuma(&listed));
        assert_eq!(nodes(&host), right.iter().map(|node| Some(*node)).collect::<Vec<_>>(), "{machine}");
        assert_eq!(host.warnings, Vec::<String>::new(), "{machine}");
    }
}

/// The known issue of the same change log: the machine is the last of the list above, so GPU5, GPU9 and GPU10 are on other
/// nodes than both of their lines say. Only other GPUs' lines give the list away.
#[test]
fn of_a_list_that_contradicts_itself_nothing_is_believed() {
    let mixed_up = [(0, 0), (0, 0), (0, 1), (0, 2), (0, 3), (0, 0), (0, 1), (0, 2), (0, 3), (1, 1), (2, 2), (3, 3)];
    let host = read(&showtoponuma(&mixed_up));
    assert_eq!(nodes(&host), [None; 12]);
    let warning = "GPU2 has NUMA node 0 but affinity 1: the NUMA nodes of all GPUs are taken as unknown";
    assert_eq!(host.warnings, [warning]);
}

/// One of the two lines is enough.
#[test]
fn a_node_alone_or_an_affinity_alone_is_believed() {
    let text = "GPU[0] : (Topology) Numa Node: 1\nGPU[1] : (Topology) Numa Affinity: 2\n";
    assert_eq!(nodes(&read(text)), [Some(1), Some(2)]);
}

const SHOWTOPO: &str = "\
============================ ROCm System Management Interface ============================
================================ Weight between two GPUs =================================
       GPU0         GPU1         GPU2
GPU0   0            15           72
GPU1   15           0            72
GPU2   72           72           0

================================= Hops between two GPUs ==================================
       GPU0         GPU1         GPU2
GPU0   0            1            3
GPU1   1            0            2
GPU2   3            2            0

=============================== Link Type between two GPUs ===============================
       GPU0         GPU1         GPU2
GPU0   0            XGMI         PCIE
GPU1   XGMI         0            PCIE
GPU2   PCIE         PCIE         0

======================================= Numa Nodes =======================================
GPU[0]\t\t: (Topology) Numa Node: 0
GPU[0]\t\t: (Topology) Numa Affinity: 0
GPU[1]\t\t: (Topology) Numa Node: 1
GPU[1]\t\t: (Topology) Numa Affinity: 1
GPU[2]\t\t: (Topology) Numa Node: 1
GPU[2]\t\t: (Topology) Numa Affinity: 1
================================== End of ROCm SMI Log ===================================
";

#[test]
fn one_hop_of_xgmi_is_a_link_and_pcie_goes_by_nodes() {
    for text in [SHOWTOPO.to_owned(), SHOWTOPO.replace('\n', "\r\n"), format!("$ rocm-smi --showtopo\n{SHOWTOPO}")] {
        let host = read(&text);
        let level = |a, b| host.gpu_level(GpuId(a), GpuId(b));
        assert_eq!(level(0, 1), Some(Level::nvlink(1)));
        assert_eq!(level(0, 2), Some(Level::Sys));
        assert_eq!(level(2, 1), Some(Level::Node));
        assert_eq!(host.gpus[2].numa, Some(NumaId(1)));
        assert_eq!(host.nvlink_kind(), Some(NvLinkKind::Linear));
        assert_eq!(host.hcas, []);
    }
}

/// `--showtopohops` alone: 1 is xGMI, 2 PCIe within a node, 3 between nodes (MI200 optimization guide of AMD).
#[test]
fn hops_alone_tell_levels() {
    let (hops, _) = SHOWTOPO.split_once("\n\n=============================== Link").unwrap();
    let host = read(hops);
    let level = |a, b| host.gpu_level(GpuId(a), GpuId(b));
    let levels = [level(0, 1), level(1, 2), level(0, 2)];
    assert_eq!(levels, [Some(Level::nvlink(1)), Some(Level::Node), Some(Level::Sys)]);
}

/// MI250 (vllm-project/vllm#16840): every pair says XGMI and one hop, and only the weight tells whose link is their own.
#[test]
fn a_way_through_other_gpus_is_no_link() {
    let table = |title: &str, cells: [[&str; 3]; 3]| {
        let row = |(gpu, cells): (usize, [&str; 3])| format!("GPU{gpu}   {}\n", cells.join("   "));
        let rows: String = cells.into_iter().enumerate().map(row).collect();
        format!("==== {title} between two GPUs ====\n       GPU0   GPU1   GPU2\n{rows}\n")
    };
    let weight = table("Weight", [["0", "15", "30"], ["15", "0", "15"], ["30", "15", "0"]]);
    let hops = table("Hops", [["0", "1", "1"], ["1", "0", "1"], ["1", "1", "0"]]);
    let link = table("Link Type", [["0", "XGMI", "XGMI"], ["XGMI", "0", "XGMI"], ["XGMI", "XGMI", "0"]]);
    for (text, far) in [
        (format!("{weight}{hops}{link}"), None),
        (format!("{weight}{hops}{link}{}", showtoponuma(&[(3, 3), (1, 1), (3, 3)])), Some(Level::Node)),
        (format!("{hops}{link}"), Some(Level::nvlink(1))),
    ] {
        let host = read(&text);
        let level = |a, b| host.gpu_level(GpuId(a), GpuId(b));
        assert_eq!([level(0, 1), level(1, 2)], [Some(Level::nvlink(1)); 2], "{text}");
        assert_eq!(level(0, 2), far, "{text}");
    }
}

/// `amd-smi topology` names GPUs by address and has no tree.
#[test]
fn tables_of_amd_smi_are_read() {
    let table = |title: &str, own: &str, near: &str, far: &str| {
        format!(
            "{title} TABLE:\n             0000:05:00.0 0000:26:00.0 0000:c1:00.0\n0000:05:00.0 {own}   {near}   {far}\n\
             0000:26:00.0 {near}   {own}   {far}\n0000:c1:00.0 {far}   {far}   {own}\n"
        )
    };
    let access = table("ACCESS", "ENABLED", "ENABLED", "DISABLED");
    let tables =
        [table("WEIGHT", "0", "15", "40"), table("HOPS", "0", "1", "2"), table("LINK TYPE", "SELF", "XGMI", "PCIE")];
    let rest = table("NUMA BW", "N/A", "50000-50000", "N/A");
    for text in [format!("$ amd-smi topology\n{access}{}{rest}", tables.concat()), tables[1].clone()] {
        let host = gdrd_topology::read_text(&text, "a".as_ref(), &ReadOptions::default()).unwrap().host;
        let names: Vec<&str> = host.gpus.iter().map(|gpu| gpu.name.as_str()).collect();
        assert_eq!(names, ["GPU0", "GPU1", "GPU2"], "{text}");
        let level = |a, b| host.gpu_level(GpuId(a), GpuId(b));
        assert_eq!([level(0, 1), level(0, 2)], [Some(Level::nvlink(1)), Some(Level::Node)], "{text}");
        assert!(host.warnings.iter().any(|warning| warning.contains("GPU2 is 0000:c1:00.0")), "{:?}", host.warnings);
    }
    let error = gdrd_topology::read_text(&access, "a".as_ref(), &ReadOptions::default()).unwrap_err().to_string();
    assert!(error.contains("amd-smi topology"), "{error}");
}

fn lines(text: &str, form: impl Fn(&str) -> String) -> String {
    text.lines().map(|line| form(line) + "\n").collect()
}

#[test]
fn tables_are_read_behind_prefixes_and_in_small_letters() {
    let right = read(SHOWTOPO);
    for before in ["> ", "h1: ", "18:00:00 ", "INFO smi | ", "+ ", "topo.txt:", "12:"] {
        assert_eq!(read(&lines(SHOWTOPO, |line| format!("{before}{line}"))), right, "{before}");
    }
    assert_eq!(read(&SHOWTOPO.to_lowercase()), right);
    let amd = "LINK TYPE TABLE:\n             0000:05:00.0 0000:26:00.0\n0000:05:00.0 SELF         XGMI\n0000:26:00.0 XGMI         SELF\n";
    let right = read(amd);
    assert_eq!(right.gpu_level(GpuId(0), GpuId(1)), Some(Level::nvlink(1)));
    for before in ["> ", "h1: ", "", "h1:  "] {
        assert_eq!(read(&lines(amd, |line| format!("{before}{line}"))), right, "{before}");
    }
    let small = gdrd_topology::read_text(&amd.to_lowercase(), "a".as_ref(), &ReadOptions::default()).unwrap().host;
    assert_eq!(small, right);
}

#[test]
fn a_table_without_rows_is_told() {
    let text = SHOWTOPO.replace("GPU0   0            1 ", "gpu-a  0            1 ").replace("GPU1   1", "gpu-b  1");
    let host = read(&text.replace("GPU2   3 ", "gpu-c  3 "));
    assert_eq!(host.warnings, ["the table of hops has no row that can be read"]);
}

#[test]
fn what_two_hosts_printed_is_not_merged() {
    let right = read(SHOWTOPO);
    let other = SHOWTOPO.replace("XGMI         0            PCIE", "PCIE         0            PCIE");
    assert_eq!(read(&format!("{SHOWTOPO}\n{SHOWTOPO}")), right, "twice the same is one");
    let nodes = showtoponuma(&[(7, 7), (1, 1), (7, 7), (1, 1)]);
    for (after, told) in [
        (other.as_str(), "a table of link types says otherwise than what comes before"),
        (&nodes, "a list of NUMA nodes is of other GPUs than what comes before"),
        (&showtoponuma(&[(0, 0), (1, 1), (0, 0)]), "a list of NUMA nodes says otherwise"),
    ] {
        let both = read(&format!("{SHOWTOPO}{after}"));
        assert_eq!((&both.gpus, &both.given_levels), (&right.gpus, &right.given_levels), "{after}");
        assert!(both.warnings.iter().any(|warning| warning.starts_with(told)), "{:?}", both.warnings);
    }
    let mixed: String = SHOWTOPO.lines().zip(other.lines()).map(|(a, b)| format!("h1: {a}\nh2: {b}\n")).collect();
    let mixed = read(&mixed);
    assert_eq!(mixed.given_levels, right.given_levels);
    assert_eq!(mixed.warnings, ["the text has lines of h2 too: those of h1 count"]);
}

#[test]
fn a_table_that_names_a_gpu_twice_is_refused() {
    let text = "HOPS TABLE:\n             0000:05:00.0 0000:05:00.0\n0000:05:00.0 0            1\n";
    let error = gdrd_topology::read_text(text, "a".as_ref(), &ReadOptions::default()).unwrap_err().to_string();
    assert!(error.contains("names 0000:05:00.0 twice"), "{error}");
}

/// Public documents retype `GPU[0]` as `GPU 0`; one GPU has a table of one cell (sglang's report of a guest).
#[test]
fn gpus_are_found_however_they_are_written() {
    let retyped = read(&showtoponuma(&[(1, 1), (0, 0)]).replace("GPU[", "GPU ").replace(']', "   "));
    assert_eq!(nodes(&retyped), [Some(1), Some(0)]);
    let alone = read("=== Link Type between two GPUs ===\n       GPU0\nGPU0   0\n=== End of ROCm SMI Log ===\n");
    assert_eq!(nodes(&alone), [None]);
}

#[test]
fn text_without_gpus_is_refused() {
    for text in ["", "Hops between two GPUs\n", "GPU0 GPU1\nGPU0 X PIX\n"] {
        assert!(rocm_topo::parse(text).unwrap_err().to_string().contains("names no GPU"), "{text:?}");
    }
    let far = "GPU[99999999999999999999] : (Topology) Numa Node: 0\nGPU[300] : (Topology) Numa Node: 0\n";
    assert!(rocm_topo::parse(far).unwrap_err().to_string().contains("300"));
}
