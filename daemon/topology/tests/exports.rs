//! What other software is told: NCCL topology XML, environment variables, Mooncake's matrix.

use std::collections::BTreeSet;
use std::path::Path;

use gdrd_topology::assemble::ReadOptions;
use gdrd_topology::export::{Env, env, mooncake_matrix, nccl_topo};
use gdrd_topology::level::Level;
use gdrd_topology::model::{GpuId, Hca, HcaId, HcaOrigin, Host, Port, PortState, Snapshot};
use gdrd_topology::plan::contract::Plan;
use gdrd_topology::plan::{PlanOptions, plan};
use gdrd_topology::{profile, read_root, read_stream};
use serde_json::{Value, json};

fn builtin(name: &str) -> Snapshot {
    profile::builtin(name).expect("the profile is built in")
}

fn planned(snapshot: &Snapshot) -> Plan {
    plan(snapshot, &PlanOptions::default())
}

fn read_back(host: &Host) -> Snapshot {
    let text = nccl_topo(host).expect("the host can be written");
    read_stream(text.as_bytes(), Path::new("topo.xml"), &ReadOptions::default()).expect("our own reader takes it")
}

/// NCCL has no NODE: root buses of one NUMA node are one root complex to it, and so are those of no known one.
fn as_nccl_has_it(host: &Host, level: Option<Level>) -> Option<Level> {
    let is_without_numa = host.gpus.iter().any(|gpu| gpu.bdf.and_then(|bdf| host.numa_of(bdf)).is_none());
    level.map(|level| match level {
        Level::Node => Level::Phb,
        Level::Sys if is_without_numa => Level::Phb,
        level => level,
    })
}

/// Every host with a GPU that has an address: the fixtures' profiles, and the captured NCCL topologies.
fn hosts() -> Vec<(String, Snapshot)> {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests");
    let mut hosts = Vec::new();
    for folder in ["fixtures/hosts", "cases/nccl-xml"] {
        for entry in std::fs::read_dir(tests.join(folder)).expect("a folder of inputs") {
            let path = entry.expect("an input").path();
            let snapshot = gdrd_topology::read_input(&path, &ReadOptions::default()).expect("an input that reads");
            if snapshot.host.gpus.iter().any(|gpu| gpu.bdf.is_some()) {
                hosts.push((path.file_name().expect("a name").to_string_lossy().into_owned(), snapshot));
            }
        }
    }
    assert!(hosts.len() > 30, "{} hosts", hosts.len());
    hosts
}

#[test]
fn a_topology_for_nccl_reads_back_to_the_same_devices_levels_rates_and_links() {
    for (name, snapshot) in hosts() {
        let again = read_back(&snapshot.host);
        let (host, back) = (&snapshot.host, &again.host);
        let bdfs = |host: &Host| host.gpus.iter().map(|gpu| gpu.bdf).collect::<Vec<_>>();
        assert_eq!(bdfs(host), bdfs(back), "{name}");
        for (gpu, other) in (0..host.gpus.len()).flat_map(|gpu| (0..host.gpus.len()).map(move |b| (gpu, b))) {
            let level = |host: &Host| host.gpu_level(GpuId(gpu), GpuId(other));
            assert_eq!(
                as_nccl_has_it(host, level(host)),
                as_nccl_has_it(host, level(back)),
                "{name}: GPU{gpu} GPU{other}"
            );
        }
        let works = |port: &Port| !matches!(port.state, PortState::Down | PortState::Init | PortState::Armed);
        let can_be_used = |hca: &&Hca| {
            let is_function = hca.bdf.is_some() && matches!(hca.origin, HcaOrigin::Hardware | HcaOrigin::Assumed);
            is_function && (hca.ports.is_empty() || hca.ports.iter().any(works))
        };
        let of = |host: &Host| host.hcas.iter().filter(can_be_used).filter_map(|hca| hca.bdf).collect::<BTreeSet<_>>();
        assert_eq!(of(back), of(host), "{name}: no NIC is lost");
        for (nic, hca) in back.hcas.iter().enumerate() {
            let is_it = |id: &HcaId| host.hca(*id).is_some_and(|known| known.bdf == hca.bdf);
            let by_name = host.find_hca(&hca.name).filter(is_it);
            let original = by_name.or_else(|| (0..host.hcas.len()).map(HcaId).find(is_it)).expect("no NIC is made up");
            assert_eq!(host.hca(original).and_then(|known| known.rate_gbps()), hca.rate_gbps(), "{name}: {}", hca.name);
            for gpu in (0..host.gpus.len()).map(GpuId) {
                let level = |host: &Host, nic| host.gpu_hca_level(gpu, nic);
                let (was, is) = (level(host, original), level(back, HcaId(nic)));
                assert_eq!(as_nccl_has_it(host, is), as_nccl_has_it(host, was), "{name}: {gpu:?} {}", hca.name);
            }
        }
        assert_eq!(host.nvlink_kind(), back.nvlink_kind(), "{name}");
        // A second round changes nothing any more.
        assert_eq!(nccl_topo(back).ok(), nccl_topo(&read_back(back).host).ok(), "{name}");
    }
}

#[test]
fn a_topology_for_nccl_gives_the_same_bottlenecks_and_pairs() {
    for name in profile::builtin_names() {
        let snapshot = builtin(name);
        let again = read_back(&snapshot.host);
        let (host, back) = (&snapshot.host, &again.host);
        for (nic, hca) in back.hcas.iter().enumerate() {
            let by_address = |id: &HcaId| host.hca(*id).is_some_and(|known| known.bdf == hca.bdf);
            let original = (0..host.hcas.len()).map(HcaId).find(by_address).expect("no NIC is made up");
            for gpu in (0..host.gpus.len()).map(GpuId) {
                let narrowest = |host: &Host, nic| host.gpu_hca_bottleneck(gpu, nic).map(|part| part.gbps);
                assert_eq!(narrowest(back, HcaId(nic)), narrowest(host, original), "{name}: {gpu:?} {}", hca.name);
            }
        }
        let assigned = |plan: &Plan| -> Vec<(Option<_>, Vec<Option<_>>)> {
            let nic = |name: &String| plan.nics.iter().find(|nic| nic.name == *name).and_then(|nic| nic.bdf);
            plan.gpus.iter().map(|gpu| (gpu.bdf, gpu.assigned.iter().map(nic).collect())).collect()
        };
        assert_eq!(assigned(&planned(&again)), assigned(&planned(&snapshot)), "{name}");
    }
}

#[test]
fn a_topology_for_nccl_keeps_to_the_limits_of_its_parser() {
    for name in profile::builtin_names() {
        let text = nccl_topo(&builtin(name).host).expect("the host can be written");
        assert!(text.starts_with("<system version=\"1\">\n"), "{name}");
        assert!(!text.contains('&') && !text.contains('\'') && !text.contains('\t'), "{name}");
        let values = text.split('"').skip(1).step_by(2);
        assert!(values.clone().all(|value| value.len() < 255), "{name}");
        let cpus: Vec<&str> = text.lines().filter(|line| line.contains("<cpu ")).collect();
        let mut ids: Vec<&str> = cpus.iter().filter_map(|line| line.split('"').nth(1)).collect();
        let all = ids.len();
        ids.dedup();
        assert_eq!(ids.len(), all, "{name}: a cpu element is known by its NUMA node alone");
        // A line an element, so its attributes can be counted; the parser takes 16.
        assert!(text.lines().all(|line| line.matches('=').count() <= 16), "{name}");
    }
}

/// NCCL 2.28 ends with an error where a network without PCI address comes below a `cpu` without `arch`.
#[test]
fn every_cpu_of_a_topology_for_nccl_says_what_kind_it_is_where_that_is_known() {
    let text = profile::builtin_text("dgx-a100").unwrap();
    let text = format!("{text}\ncpu x86_64 vendor=AuthenticAMD family=23 model=49\n");
    let host = profile::snapshot(&text, None, &ReadOptions::default()).unwrap().host;
    let kind = " arch=\"x86_64\" vendor=\"AuthenticAMD\" familyid=\"23\" modelid=\"49\"";
    let written = nccl_topo(&host).unwrap();
    assert!(written.lines().filter(|line| line.contains("<cpu ")).all(|line| line.contains(kind)), "{written}");
    let folder = tempfile::tempdir().unwrap();
    gdrd_topology::sysfs::build::build(&host, folder.path()).unwrap();
    let read = read_root(folder.path(), &ReadOptions::default()).unwrap();
    assert_eq!(read.host.cpu, host.cpu);
    let again = profile::snapshot(&profile::render(&read.host), None, &ReadOptions::default()).unwrap();
    assert_eq!(again.host.cpu, host.cpu);
    let read_back = gdrd_topology::read_text(&written, "written".as_ref(), &ReadOptions::default()).unwrap();
    assert_eq!(read_back.host.cpu, host.cpu);
}

#[test]
fn hosts_that_cannot_be_written_for_nccl_are_refused_with_the_reason() {
    let mut host = builtin("two-socket-2gpu").host;
    host.hcas[0].name = "mlx5\"0".to_owned();
    let error = nccl_topo(&host).unwrap_err().to_string();
    assert!(error.contains("mlx5") && error.contains("name"), "{error}");
    host.gpus.clear();
    assert!(nccl_topo(&host).unwrap_err().to_string().contains("no GPU"));
}

fn variables(env: &Env, gpu: Option<usize>) -> Vec<(String, String)> {
    let gpu = gpu.map(|place| &env.gpus[place]);
    env.of(gpu).into_iter().map(|variable| (variable.name, variable.value)).collect()
}

fn value(variables: &[(String, String)], name: &str) -> Option<String> {
    variables.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone())
}

#[test]
fn variables_name_whole_nics_with_their_ports() {
    let snapshot = builtin("dgx-a100");
    let plan = planned(&snapshot);
    let env = env(&snapshot.host, &plan, Some("/etc/gdrd/topo.xml"));
    let host = variables(&env, None);
    let of_host = |name: &str| value(&host, name).unwrap_or_default();
    assert_eq!(
        of_host("NCCL_IB_HCA"),
        "=mlx5_0:1,mlx5_1:1,mlx5_2:1,mlx5_3:1,mlx5_6:1,mlx5_7:1,mlx5_8:1,mlx5_9:1",
        "the storage NICs are left out"
    );
    assert_eq!(of_host("NCCL_TOPO_FILE"), "/etc/gdrd/topo.xml");
    assert_eq!(of_host("NCCL_SOCKET_IFNAME"), "=enp226s0");
    assert_eq!(of_host("GLOO_SOCKET_IFNAME"), "enp226s0");
    assert_eq!(of_host("NVSHMEM_ENABLE_NIC_PE_MAPPING"), "1");
    assert_eq!(value(&host, "UCX_NET_DEVICES"), None, "UCX is told by GPU only");
    for (place, gpu) in plan.gpus.iter().enumerate() {
        let own = variables(&env, Some(place));
        let wanted = format!("{}:1", gpu.assigned[0]);
        assert_eq!(value(&own, "UCX_NET_DEVICES"), Some(wanted.clone()));
        assert_eq!(value(&own, "NCCL_IB_HCA"), Some(format!("={wanted}")), "the GPU's own goes before the host's");
        assert_eq!(own.iter().filter(|(name, _)| name == "NCCL_IB_HCA").count(), 1);
    }
}

#[test]
fn nvshmem_counts_consecutive_pes_and_deepep_names_devices() {
    let mut snapshot = builtin("dgx-a100");
    // Two GPUs share each NIC that is left.
    snapshot.host.hcas.retain(|hca| ["mlx5_0", "mlx5_2", "mlx5_6", "mlx5_8"].contains(&hca.name.as_str()));
    let made = env(&snapshot.host, &planned(&snapshot), None);
    let host = variables(&made, None);
    assert_eq!(value(&host, "NVSHMEM_HCA_PE_MAPPING").as_deref(), Some("mlx5_0:1:2,mlx5_2:1:2,mlx5_6:1:2,mlx5_8:1:2"));
    let by_device = value(&host, "DEEP_EP_DEVICE_TO_HCA_MAPPING").unwrap();
    assert!(by_device.starts_with("0:mlx5_0:1,1:mlx5_0:1,2:mlx5_2:1"), "{by_device}");
    snapshot.host.hcas.clear();
    let none = env(&snapshot.host, &planned(&snapshot), None);
    assert_eq!(value(&variables(&none, None), "NVSHMEM_HCA_PE_MAPPING"), None);
    assert!(none.notes.iter().any(|note| note.contains("NVSHMEM")), "{:?}", none.notes);
}

#[test]
fn no_value_of_a_variable_needs_quotes_whatever_devices_are_called() {
    let mut snapshot = builtin("two-socket-2gpu");
    snapshot.host.hcas[0].name = "mlx5_0;reboot".to_owned();
    snapshot.host.netdevs.iter_mut().for_each(|netdev| netdev.name = "$(reboot)".to_owned());
    let made = env(&snapshot.host, &planned(&snapshot), None);
    let all = made.host.iter().chain(made.gpus.iter().flat_map(|gpu| &gpu.variables));
    for variable in all {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"=_-.,:".contains(&byte);
        assert!(variable.value.bytes().all(is_plain), "{variable:?}");
    }
    assert!(!made.notes.is_empty());
}

#[test]
fn mooncake_gets_preferred_and_other_nics_by_location() {
    let snapshot = builtin("two-socket-2gpu");
    let matrix: Value = serde_json::from_str(&mooncake_matrix(&snapshot.host, &planned(&snapshot)).unwrap()).unwrap();
    assert_eq!(
        matrix,
        json!({
            "cpu:0": [["mlx5_0"], ["mlx5_1"]],
            "cpu:1": [["mlx5_1"], ["mlx5_0"]],
            "cuda:0": [["mlx5_0"], ["mlx5_1"]],
            "cuda:1": [["mlx5_1"], ["mlx5_0"]],
        })
    );
    let large = builtin("dgx-a100");
    let matrix: Value = serde_json::from_str(&mooncake_matrix(&large.host, &planned(&large)).unwrap()).unwrap();
    let rows = matrix.as_object().unwrap();
    assert_eq!(rows.keys().filter(|key| key.starts_with("cuda:")).count(), 8);
    assert!(rows.values().all(|row| row.as_array().is_some_and(|row| row.len() == 2)));
    assert!(!matrix.to_string().contains("mlx5_4\""), "a NIC of no GPU is no compute NIC");
}

#[test]
fn a_profile_is_an_export_that_reads_back() {
    let folder = tempfile::tempdir().unwrap();
    let host = builtin("dgx-a100").host;
    gdrd_topology::sysfs::build::build(&host, folder.path()).unwrap();
    let read = read_root(folder.path(), &ReadOptions::default()).unwrap();
    let again = profile::snapshot(&profile::render(&read.host), None, &ReadOptions::default()).unwrap();
    assert_eq!(again.host.hcas.len(), host.hcas.len());
    assert_eq!(planned(&again).gpus.len(), 8);
}
