//! Hosts of public threads, and what NCCL itself logged of them: the oracle must say the same.

use crate::hosts::of_xml;
use crate::rules::{Graph, Kind, Table};

/// A switch of PCIe 5.0 x16, and what hangs below it.
fn switch(below: &str) -> String {
    format!(
        "<pci class=\"0x060400\" vendor=\"0x1000\" device=\"0xc030\" subsystem_vendor=\"0x1000\" subsystem_device=\"0x100b\" link_speed=\"32.0 GT/s PCIe\" link_width=\"16\">{below}</pci>"
    )
}

fn gpu(dev: usize, link: &str) -> String {
    format!("<pci busid=\"gpu{dev}\" class=\"0x030200\" {link}><gpu dev=\"{dev}\"/></pci>")
}

fn nic(nets: &str, mbps: u32, link: &str) -> String {
    let nets: String =
        nets.split(',').map(|net| format!("<net name=\"{net}\" speed=\"{mbps}\" port=\"1\"/>")).collect();
    format!("<pci class=\"0x020700\" {link}><nic>{nets}</nic></pci>")
}

fn cpu(kind: &str, below: &str) -> String {
    format!("<cpu {kind}>{below}</cpu>")
}

fn table(cpus: &[String]) -> Table {
    let graph: Graph = of_xml(&format!("<system>{}</system>", cpus.concat())).0;
    graph.table()
}

const SKYLAKE: &str = "arch=\"x86_64\" vendor=\"GenuineIntel\" familyid=\"6\" modelid=\"143\"";
const GEN5: &str = "link_speed=\"32.0 GT/s PCIe\" link_width=\"16\"";
const GEN4: &str = "link_speed=\"16.0 GT/s PCIe\" link_width=\"16\"";
const GEN3: &str = "link_speed=\"8 GT/s\" link_width=\"16\"";

/// As NCCL prints a path: hops, GB/s, type.
fn assert_path(table: &Table, gpu: usize, net: &str, hops: usize, bw: f64, kind: Kind) {
    let path = table.path(gpu, net).unwrap();
    assert_eq!((path.hops, path.kind), (hops, kind), "GPU{gpu} {net}");
    assert!((path.bw - bw).abs() < 0.05, "GPU{gpu} {net}: {}", path.bw);
}

/// NVIDIA/nccl#1189, H20 host: paths, and the rings `NET/3 GPU/0 GPU/1 NET/2` and `NET/2 GPU/1 GPU/0 NET/3`. Its CPUs
/// are of the kind that the NCCL of that log gives 10 GB/s.
#[test]
fn an_h20_host_with_a_storage_nic() {
    let with_gpu = |dev, net| switch(&format!("{}{}", gpu(dev, GEN5), nic(net, 400_000, GEN5)));
    let alone = |net| switch(&nic(net, 400_000, GEN5));
    let kind = SKYLAKE.replace("143", "85");
    let near = [with_gpu(0, "3"), nic("8", 200_000, GEN5), with_gpu(1, "2"), alone("1"), alone("0")].concat();
    let far = [alone("5"), alone("4"), alone("7"), alone("6")].concat();
    let table = table(&[cpu(&kind, &near), cpu(&kind, &far)]);
    assert_path(&table, 0, "3", 3, 48.0, Kind::Pix);
    assert_path(&table, 1, "3", 5, 48.0, Kind::Phb);
    assert_path(&table, 0, "8", 4, 25.0, Kind::Phb);
    assert_path(&table, 1, "2", 3, 48.0, Kind::Pix);
    assert_path(&table, 0, "1", 5, 48.0, Kind::Phb);
    assert_path(&table, 0, "4", 6, 10.0, Kind::Sys);
    assert_eq!([table.choice(0), table.choice(1)], [["3"], ["2"]]);
}

/// NVIDIA/nccl#601, four GPUs on two CPUs, a NIC of two 10 Gbit/s ports on each: paths.
#[test]
fn slow_ports_make_all_paths_as_narrow() {
    let narrow = "link_speed=\"8 GT/s\" link_width=\"4\"";
    let kind = SKYLAKE.replace("143", "79");
    let side = |first: usize, nets: &str| {
        cpu(&kind, &format!("{}{}{}", gpu(first, GEN3), gpu(first + 1, GEN3), nic(nets, 10_000, narrow)))
    };
    let table = table(&[side(0, "0,1"), side(2, "2,3")]);
    assert_path(&table, 0, "3", 4, 1.25, Kind::Sys);
    assert_path(&table, 2, "3", 3, 1.25, Kind::Phb);
    assert_path(&table, 3, "2", 3, 1.25, Kind::Phb);
}

/// NVIDIA/nccl#1153, a guest of eight H800: paths.
#[test]
fn a_guest_with_a_switch_per_gpu() {
    let kind = SKYLAKE.replace("143", "85");
    let side = |from: usize| {
        let pair = |dev: usize| switch(&format!("{}{}", gpu(dev, GEN5), nic(&dev.to_string(), 400_000, GEN5)));
        cpu(&kind, &(from..from + 4).map(pair).collect::<String>())
    };
    let table = table(&[side(0), side(4)]);
    assert_path(&table, 0, "0", 3, 48.0, Kind::Pix);
    assert_path(&table, 0, "2", 5, 48.0, Kind::Phb);
    assert_path(&table, 4, "2", 6, 10.0, Kind::Sys);
    for dev in 0..8 {
        assert_eq!(table.choice(dev), [dev.to_string()]);
    }
}

/// NVIDIA/nccl#1519, a guest of Google's cloud: the front-end NIC hangs right on the CPU, the others two below a switch
/// of their own: paths. What its log calls ports are sockets.
#[test]
fn a_guest_whose_nics_have_switches_of_their_own() {
    let switch = |below: &str| switch(below).replace("32.0", "16.0");
    let kind = SKYLAKE.replace("143", "85");
    let two = |first: usize| switch(&format!("{}{}", gpu(first, GEN4), gpu(first + 1, GEN4)));
    let nics = |a: &str, b: &str| switch(&format!("{}{}", nic(a, 200_000, GEN4), nic(b, 200_000, GEN4)));
    let first = [nic("0", 200_000, GEN3), two(0), two(2), nics("1", "2"), nics("3", "4")].concat();
    let second = [two(4), two(6), nics("5", "6"), switch(&nic("7", 200_000, GEN4))].concat();
    let table = table(&[cpu(&kind, &first), cpu(&kind, &second)]);
    assert_path(&table, 1, "0", 4, 12.0, Kind::Phb);
    assert_path(&table, 1, "1", 5, 24.0, Kind::Phb);
    assert_path(&table, 1, "5", 6, 10.0, Kind::Sys);
    assert_path(&table, 4, "0", 5, 10.0, Kind::Sys);
    assert_path(&table, 7, "5", 5, 24.0, Kind::Phb);
}

/// NVIDIA/nccl-tests#256, an AMD guest whose virtual switches say 2.5 GT/s x1: links as printed (0.2, 48, 50 and 16).
#[test]
fn a_slow_virtual_switch_narrows_what_passes_it_alone() {
    let pair = |dev: usize| {
        let net = dev.to_string();
        switch(&format!("{}{}", nic(&net, 400_000, GEN5), gpu(dev, GEN5))).replacen(
            "32.0 GT/s PCIe\" link_width=\"16",
            "2.5 GT/s\" link_width=\"1",
            1,
        )
    };
    let kind = "arch=\"x86_64\" vendor=\"AuthenticAMD\" familyid=\"23\" modelid=\"1\"";
    let table = table(&[cpu(kind, &[pair(0), pair(1)].concat()), cpu(kind, &pair(2))]);
    assert_path(&table, 0, "0", 3, 48.0, Kind::Pix);
    assert_path(&table, 0, "1", 5, 0.2, Kind::Phb);
    assert_path(&table, 0, "2", 6, 0.2, Kind::Sys);
    assert_eq!(table.choice(0), ["0"]);
}

/// NVIDIA/nccl#1313: the GPUs hang right on the CPUs but for the first and the last, which have a switch with a NIC. The
/// maintainer: data from and to NET 0 goes by GPU 0, that of NET 1 by GPU 7.
#[test]
fn the_gpu_beside_a_nic_is_the_one_that_serves_it() {
    let with_nic = |dev, net| switch(&format!("{}{}", gpu(dev, GEN5), nic(net, 400_000, GEN5)));
    let bare = |devs: std::ops::Range<usize>| devs.map(|dev| gpu(dev, GEN5)).collect::<String>();
    let first = format!("{}{}", with_nic(0, "0"), bare(1..4));
    let second = format!("{}{}", bare(4..7), with_nic(7, "1"));
    let table = table(&[cpu(SKYLAKE, &first), cpu(SKYLAKE, &second)]);
    assert_eq!([table.gpus_of("0"), table.gpus_of("1")], [[0], [7]]);
    assert_eq!([table.choice(0), table.choice(7)], [["0"], ["1"]]);
}

/// NVIDIA/nccl#1667: one GPU and one NIC right on a CPU; the graph that was dumped has NET 0 by PHB.
#[test]
fn a_flat_host_is_phb() {
    let table = table(&[cpu(SKYLAKE, &format!("{}{}", nic("0", 400_000, GEN5), gpu(0, GEN4)))]);
    assert_path(&table, 0, "0", 3, 24.0, Kind::Phb);
    assert_eq!(table.choice(0), ["0"]);
}

/// The bug of NVIDIA/nccl#820 and its fix: a PEX88096 shows as two levels, which made one NIC look nearer to each GPU;
/// made one, both NICs are equal and the two GPUs take one each.
#[test]
fn two_levels_of_one_broadcom_switch_are_one() {
    let pex = |below: &str| {
        format!(
            "<pci class=\"0x060400\" vendor=\"0x1000\" device=\"0xc010\" subsystem_vendor=\"0x1000\" subsystem_device=\"0xa096\" {GEN4}>{below}</pci>"
        )
    };
    let host = |pex: &dyn Fn(&str) -> String| {
        let first = pex(&format!("{}{}", gpu(0, GEN4), nic("1", 200_000, GEN4)));
        let second = pex(&format!("{}{}", gpu(1, GEN4), nic("0", 200_000, GEN4)));
        table(&[cpu(SKYLAKE, &pex(&format!("{first}{second}")))])
    };
    let flat = host(&pex);
    assert_path(&flat, 0, "0", 3, 24.0, Kind::Pix);
    assert_path(&flat, 0, "1", 3, 24.0, Kind::Pix);
    let mut both = [flat.choice(0), flat.choice(1)].concat();
    both.sort();
    assert_eq!(both, ["0", "1"]);
    let other = host(&|below| pex(below).replace("0xa096", "0x0001"));
    assert_path(&other, 0, "0", 5, 24.0, Kind::Pxb);
    assert_eq!([other.choice(0), other.choice(1)], [["1"], ["0"]]);
}
