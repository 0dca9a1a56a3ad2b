//! Links of a GPU to its CPU besides PCIe: NVLink-C2C of Grace, NVLinks of Power9.
#![allow(clippy::unwrap_used, reason = "helpers of tests, which clippy does not know as such")]

use std::path::Path;

use gdrd_topology::advise::{Destination, PathAdvice, PathKind, advise_path};
use gdrd_topology::assemble::ReadOptions;
use gdrd_topology::bandwidth;
use gdrd_topology::export::nccl_topo;
use gdrd_topology::model::{DriverFacts, GpuId, HcaId, NvLinkEnd, NvLinkKind, Snapshot};
use gdrd_topology::plan::{PlanOptions, plan};
use gdrd_topology::read_text;
use gdrd_topology::source::SourceKind;

/// A DGX Spark (GB10) as NCCL dumped it in a public report: the GPU's PCIe link is a formality of 2.5 GT/s, its 8 C2C links
/// carry 43.125 GB/s each, its NIC has two functions of four lanes.
const GB10: &str = r#"<system version="1"><cpu numaid="0" arch="arm64">
<pci busid="0000:01:00.0" class="0x020000" vendor="0x15b3" device="0x1021" link_speed="32.0 GT/s PCIe" link_width="4">
  <nic><net name="rocep1s0f0" port="1" speed="200000"/></nic></pci>
<pci busid="0002:01:00.0" class="0x020000" vendor="0x15b3" device="0x1021" link_speed="32.0 GT/s PCIe" link_width="4">
  <nic><net name="roceP2p1s0f0" port="1" speed="200000"/></nic></pci>
<pci busid="000f:01:00.0" class="0x030000" vendor="0x10de" device="0x2e12" link_speed="2.5 GT/s PCIe" link_width="16">
  <gpu dev="0" sm="121"><c2c bw="43125" count="8"/></gpu></pci>
</cpu></system>"#;
const C2C_GBPS: f64 = 2760.0;
const FOUR_LANES_GBPS: f64 = 126.0;

fn read(text: &str) -> Snapshot {
    read_text(text, Path::new("topo.xml"), &ReadOptions::default()).unwrap()
}

fn rounded(gbps: Option<f64>) -> Option<f64> {
    gbps.map(f64::round)
}

fn remote(snapshot: &Snapshot) -> PathAdvice {
    advise_path(snapshot, &plan(snapshot, &PlanOptions::default()), "GPU0", &Destination::Remote).unwrap()
}

#[test]
fn what_passes_the_cpu_takes_the_links_to_it_and_not_the_gpus_pcie_link() {
    let snapshot = read(GB10);
    let host = &snapshot.host;
    let link = &host.nvlinks[0];
    assert_eq!((link.end, link.links, link.link_gbps), (NvLinkEnd::Cpu, 8, Some(345.0)));
    for (nic, name) in [(0, "0000:01:00.0"), (1, "0002:01:00.0")] {
        let narrowest = host.gpu_hca_bottleneck(GpuId(0), HcaId(nic)).unwrap();
        assert_eq!((narrowest.gbps.round(), narrowest.hop.as_str()), (FOUR_LANES_GBPS, name));
    }
    assert_eq!(rounded(host.gpu_memory_bottleneck(GpuId(0)).map(|part| part.gbps)), Some(C2C_GBPS));
    let way = remote(&snapshot);
    assert_eq!((way.kind, rounded(way.gbps)), (PathKind::Staged, Some(252.0)), "GB10 has no GPUDirect RDMA");
    let matched = bandwidth::of_gpu(host, &plan(&snapshot, &PlanOptions::default()), "GPU0").unwrap();
    assert_eq!((rounded(matched.gpu_gbps), rounded(matched.usable_gbps)), (Some(C2C_GBPS), Some(252.0)));
}

#[test]
fn the_links_to_the_cpu_may_be_the_narrowest_part() {
    let snapshot = read(&GB10.replace("bw=\"43125\" count=\"8\"", "bw=\"10000\" count=\"1\"").replace("2e12", "2342"));
    let narrowest = snapshot.host.gpu_hca_bottleneck(GpuId(0), HcaId(0)).unwrap();
    assert_eq!((narrowest.gbps, narrowest.hop.as_str()), (80.0, "GPU0 to the CPU"));
    assert_eq!(remote(&snapshot).gbps, Some(80.0), "both NICs have them once");
}

/// Without a rate nothing is known of the GPU's side; its PCIe link is still not the way.
#[test]
fn links_of_unknown_rate_still_stand_for_the_pcie_link() {
    let snapshot = read(&GB10.replace("bw=\"43125\" ", ""));
    let host = &snapshot.host;
    assert_eq!(host.gpu_hca_bottleneck(GpuId(0), HcaId(0)).unwrap().hop, "0000:01:00.0");
    assert_eq!(host.gpu_memory_bottleneck(GpuId(0)), None);
    let matched = bandwidth::of_gpu(host, &plan(&snapshot, &PlanOptions::default()), "GPU0").unwrap();
    assert_eq!(matched.gpu_gbps, None);
}

/// A NIC below the GPU's own switch, such as the data-direct function of a GB300, is reached by PCIe.
#[test]
fn below_a_common_switch_the_pcie_link_counts() {
    let host = read(
        r#"<system version="1"><cpu numaid="0" arch="arm64">
        <pci busid="0000:01:00.0" class="0x060400" vendor="0x15b3" device="0x197b" link_speed="64.0 GT/s PCIe" link_width="16">
        <pci busid="0000:03:00.0" class="0x020700" vendor="0x15b3" device="0x1023" link_speed="64.0 GT/s PCIe" link_width="16">
          <nic><net name="mlx5_0" port="1" speed="800000"/></nic></pci>
        <pci busid="0000:04:00.0" class="0x030200" vendor="0x10de" device="0x31c2" link_speed="32.0 GT/s PCIe" link_width="16">
          <gpu dev="0" sm="103"><c2c bw="44712" count="5"/></gpu></pci>
        </pci></cpu></system>"#,
    )
    .host;
    let narrowest = host.gpu_hca_bottleneck(GpuId(0), HcaId(0)).unwrap();
    assert_eq!((narrowest.gbps.round(), narrowest.hop.as_str()), (504.0, "0000:04:00.0"));
}

#[test]
fn links_to_the_cpu_are_written_for_nccl_as_it_writes_them() {
    let snapshot = read(GB10);
    let text = nccl_topo(&snapshot.host).unwrap();
    assert!(text.contains("<c2c bw=\"43125\" count=\"8\"/>"), "{text}");
    assert!(!text.contains("nvlink"), "{text}");
    assert_eq!(read(&text).host.nvlinks, snapshot.host.nvlinks);
    // NCCL knows the NVLinks of Power by the class of the CPU's end.
    let power = nccl_topo(&read(&GB10.replace("arm64", "ppc64")).host).unwrap();
    assert!(power.contains("tclass=\"0x068001\"") && !power.contains("c2c"), "{power}");
}

/// A driver that tells of NVLinks alone does not take away what another input tells of C2C.
#[test]
fn a_driver_without_word_of_them_leaves_them() {
    let told = read(GB10).host.gpu_facts(GpuId(0)).unwrap();
    let merged = |links_too: bool| {
        let mut gpu = told.clone();
        if !links_too {
            gpu.detail.nvlinks = Some(Vec::new());
        }
        let driver = DriverFacts { source: SourceKind::Nvml, gpus: vec![gpu], warnings: Vec::new() };
        let options = ReadOptions { driver: Some(driver), ..ReadOptions::default() };
        read_text(GB10, Path::new("topo.xml"), &options).unwrap().host
    };
    for host in [merged(true), merged(false)] {
        assert_eq!(host.nvlinks.len(), 1);
        assert_eq!((host.nvlinks[0].links, host.nvlinks[0].link_gbps), (8, Some(345.0)));
        assert_eq!(host.nvlink_kind(), Some(NvLinkKind::None));
        assert!(!host.warnings.iter().any(|warning| warning.contains("nvlinks")), "{:?}", host.warnings);
    }
}

#[test]
fn a_number_of_links_that_is_none_is_told() {
    for count in ["0", "-1", "x", "256", ""] {
        let host = read(&GB10.replace("count=\"8\"", &format!("count=\"{count}\""))).host;
        assert_eq!(host.nvlinks, [], "{count}");
        assert!(host.warnings.iter().any(|warning| warning.contains("c2c links of 000f:01:00.0")), "{count}");
    }
}
