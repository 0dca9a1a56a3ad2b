//! Host profiles: what is refused, with its line, and that any host survives being written and read.

use gdrd_topology::TopologyError;
use gdrd_topology::assemble::{GpuIds, ReadOptions};
use gdrd_topology::model::{GpuId, HcaId, Host};
use gdrd_topology::profile::{MAX_PROFILE_BYTES, render, snapshot};
use proptest::prelude::*;

fn error(lines: &str) -> (usize, String) {
    let error = snapshot(lines, None, &ReadOptions::default()).expect_err("the lines are wrong");
    let TopologyError::Profile { line, message, .. } = error else { return (0, error.to_string()) };
    (line, message)
}

fn read(lines: &str) -> Host {
    let text = format!("gdrd-host-profile 1\n{lines}\n");
    snapshot(&text, None, &ReadOptions::default()).expect("the lines are a profile").host
}

#[test]
fn what_is_wrong_is_named_with_its_line() {
    for (line, part) in [
        ("pci", "`pci` wants PCI address"),
        ("pci 07:00.0 10de:20b0 030200 pci0000:00 -", "`07:00.0` is no PCI address"),
        ("pci 0000:07:00.0 10de20b0 030200 pci0000:00 -", "no vendor:device pair"),
        ("pci 0000:07:00.0 10de:20b0 0302 pci0000:00 -", "not 6 hexadecimal digits"),
        ("pci 0000:07:00.0 10de:20b0 030200 nowhere -", "`nowhere` is no parent"),
        ("pci 0000:07:00.0 10de:20b0 030200 pci0000:00 17x16", "no PCIe link"),
        ("pci 0000:07:00.0 10de:20b0 030200 pci0000:00 16x33", "no PCIe link"),
        ("pci 0000:07:00.0 10de:20b0 030200 pci0000:00 - numa=x", "numa=`x`"),
        ("pci 0000:07:00.0 10de:20b0 030200 pci0000:00 - colour=red", "`colour=red` is not known in `pci`"),
        ("hca mlx5_0", "`hca` wants a PCI address or `-`"),
        ("hca mlx5_0 - \nhca mlx5_0 -", "described twice"),
        ("port mlx5_0 1 ACTIVE Ethernet 200", "no hca `mlx5_0` so far"),
        ("hca a -\nport a 0 ACTIVE Ethernet 200", "is 0 or described twice"),
        ("hca a -\nport a 1 ACTIVE Ethernet -200", "no rate in Gbit/s"),
        ("hca a -\nport a 1 ACTIVE Ethernet NaN", "no rate in Gbit/s"),
        ("hca a - node_guid=12", "no GUID"),
        ("hca a%2 -", "two hexadecimal digits"),
        ("pci 0000:07:00.0 10de:20b0 030200 pci0000:00 - acs=on", "acs=`on`"),
        ("kernel 6.8.0 iommu_passthrough=1", "want yes or no"),
        ("gpu 0000:07:00.0 memory=99999999999GiB", "no size"),
        ("gpu 0000:07:00.0 dev=block:1:2", "no device node"),
        ("nvlink 0000:07:00.0 switch 300", "number of links"),
        ("numa 0\nnuma 0", "described twice"),
        ("teleport 1", "`teleport` is no keyword"),
    ] {
        let (at, message) = error(&format!("# head\ngdrd-host-profile 1\n{line}"));
        assert!(message.contains(part), "{line}: {message}");
        assert_eq!(at, 2 + line.lines().count(), "{line}");
    }
}

#[test]
fn the_first_line_is_the_format_and_its_version() {
    assert!(error("numa 0").1.contains("begins with `gdrd-host-profile 1`"));
    assert!(error("").1.contains("begins with"));
    assert!(error("gdrd-host-profile 2").1.contains("version 2 is not known"));
    let long = format!("gdrd-host-profile 1\n#{}", "x".repeat(MAX_PROFILE_BYTES));
    assert!(error(&long).1.contains("more than"));
}

#[test]
fn contradictions_are_warnings_and_the_rest_stands() {
    let host = read(
        "pci 0000:01:00.0 10de:20b0 030200 0000:00:01.0 -\n\
         pci 0000:02:00.0 1000:c010 060400 0000:03:00.0 -\n\
         pci 0000:03:00.0 1000:c010 060400 0000:02:00.0 -\n\
         pci 0000:04:00.0 10de:ffff 030200 0000:03:00.0 -\n\
         pci 0000:05:00.0 0000:0000 030200 pci0000:00 -\n\
         hca a 0000:99:00.0\n\
         nvlink 0000:01:00.0 0000:77:00.0 4\n\
         gpu 0000:02:00.0 uuid=GPU-x",
    );
    assert_eq!(host.gpus.len(), 2);
    for part in [
        "0000:00:01.0 above it is not listed",
        "form a ring",
        "0000:05:00.0: does not answer",
        "0000:99:00.0",
        "no GPU",
        "but is none",
    ] {
        assert!(host.warnings.iter().any(|warning| warning.contains(part)), "{part}: {:?}", host.warnings);
    }
}

#[test]
fn accelerators_of_the_operator_stay_gpus_in_a_written_profile() {
    let text = "gdrd-host-profile 1\npci 0000:01:00.0 1bcf:001c 0b4000 pci0000:00 -\n";
    let options = ReadOptions { gpu_ids: GpuIds::parse(["1bcf:001c"]).unwrap(), ..ReadOptions::default() };
    let host = snapshot(text, None, &options).unwrap().host;
    let again = snapshot(&render(&host), None, &ReadOptions::default()).unwrap().host;
    assert_eq!(again.gpus, host.gpus);
    assert_eq!(again.gpus.len(), 1);
    assert!(GpuIds::parse(["1bcf"]).unwrap_err().to_string().contains("1bcf"));
}

#[test]
fn acs_and_kernel_survive_being_written() {
    for (acs, kernel) in [
        ("none", "6.8.0%20x"),
        ("off", "6.8.0 iommu_passthrough=yes"),
        ("SrcValid,ReqRedir", "6.8.0 iommu_passthrough=no"),
    ] {
        let host = read(&format!("kernel {kernel}\npci 0000:00:01.0 8086:352a 060400 pci0000:00 - acs={acs}"));
        assert!(host.functions[0].acs.is_some() && host.kernel.is_some());
        assert_eq!(snapshot(&render(&host), None, &ReadOptions::default()).unwrap().host, host);
    }
}

#[test]
fn unknown_ids_and_classes_stay_unknown() {
    let host = read("pci 0000:01:00.0 - - ? -");
    assert_eq!((host.functions[0].vendor, host.functions[0].class), (None, None));
    assert_eq!(snapshot(&render(&host), None, &ReadOptions::default()).unwrap().host, host);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn names_of_any_characters_survive(name in "\\PC{1,12}", netdev in "[^/\\p{C}]{1,8}") {
        let mut host = read("pci 0000:01:00.0 15b3:1021 020000 pci0000:00 16x16\nhca x 0000:01:00.0\nport x 1 ACTIVE Ethernet 200\nnet y 0000:01:00.0");
        host.hcas[0].name = name;
        host.hcas[0].netdevs = vec![netdev.clone()];
        host.netdevs[0].name = netdev;
        let again = snapshot(&render(&host), None, &ReadOptions::default()).expect("what is written is a profile").host;
        prop_assert_eq!(again, host);
    }

    #[test]
    fn no_text_makes_the_parser_panic(text in "(gdrd-host-profile 1\n)?((pci|hca|port|gpu|numa|nvlink|net|gid|root|drive) [0-9a-f:. x/=%-]{0,40}\n){0,8}") {
        let _ = snapshot(&text, None, &ReadOptions::default());
    }
}

/// The daemon hands its host to clients as a profile, so what other readers know must survive it.
#[test]
fn hosts_of_every_input_survive_being_written_and_read() {
    let case = |name: &str| {
        let path = format!("{}/../../tests/cases/nccl-xml/{name}.xml", env!("CARGO_MANIFEST_DIR"));
        std::fs::read_to_string(path).unwrap()
    };
    let matrix =
        "\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tNV12\tPIX\t0-3\t1\nGPU1\tNV12\t X \tPXB\t\t\n";
    let mut texts: Vec<String> = [
        "rccl-mi250-8gcd-8nic",
        "rccl-mi300a-4gpu-4nic",
        "rccl-4p4h-16gpu-16nic",
        "azure-ncv4-topo",
        "azure-ndv4-topo",
        "oci-topo-flattened",
        "nccl-tests256-h200-vm-flat-part",
    ]
    .map(case)
    .into();
    texts.push(matrix.to_owned());
    for text in texts {
        let host = gdrd_topology::read_text(&text, "case".as_ref(), &ReadOptions::default()).unwrap().host;
        let again = snapshot(&render(&host), None, &ReadOptions::default()).unwrap().host;
        let name = text.lines().next().unwrap();
        assert_eq!((again.gpus.len(), again.hcas.len()), (host.gpus.len(), host.hcas.len()), "{name}");
        for gpu in (0..host.gpus.len()).map(GpuId) {
            assert_eq!(again.gpu(gpu).unwrap().numa, host.gpu(gpu).unwrap().numa, "{name}");
            for other in (0..host.gpus.len()).map(GpuId) {
                assert_eq!(again.gpu_level(gpu, other), host.gpu_level(gpu, other), "{name} {gpu:?} {other:?}");
            }
            for hca in (0..host.hcas.len()).map(HcaId) {
                assert_eq!(again.gpu_hca_level(gpu, hca), host.gpu_hca_level(gpu, hca), "{name} {gpu:?} {hca:?}");
            }
        }
        let told = |host: &Host| -> Vec<_> {
            host.hcas.iter().map(|hca| (hca.name.clone(), hca.origin.clone(), hca.numa, hca.ports.clone())).collect()
        };
        assert_eq!(told(&again), told(&host), "{name}");
    }
}
