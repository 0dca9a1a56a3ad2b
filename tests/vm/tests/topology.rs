//! A guest with PCIe switches, NUMA nodes and real drivers: what gdrd reads in the live `/sys` is what the emulator was
//! told to build. The tests find the same facts by paths and link names alone.
#![forbid(unsafe_code)]

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::sync::Once;

use common::{daemon_with, make_rxe, nics, text};
use gdrd_harness::Puppet;
use gdrd_harness::script::Command;
use gdrd_vm::pci::{Function, functions};
use gdrd_vm::run;
use serde_json::Value;

const GPU_CLASS: &str = "0x0302";
const DRIVE_CLASS: &str = "0x0108";

/// Name of the soft RoCE device over the NIC of this address.
fn rxe_of(nic: &Function) -> String {
    format!("rxe_{}", nic.address.replace([':', '.'], "_"))
}

/// Loads the drivers, and puts a soft RoCE device on every NIC below a switch.
fn prepared() {
    static PREPARED: Once = Once::new();
    PREPARED.call_once(|| {
        for module in ["e1000e", "igb", "igbvf", "nvme"] {
            run("modprobe", &[module]);
        }
        nics().iter().for_each(|nic| make_rxe(nic, &rxe_of(nic)));
    });
}

fn json(arguments: &[&str]) -> Value {
    let told = run("gdrctl", &[arguments, &["--format", "json"]].concat());
    serde_json::from_str(&told).unwrap_or_else(|error| unreachable!("{arguments:?}: {error} in {told}"))
}

/// The level that the emulator was told to build. Both NUMA nodes are known, for both root complexes have theirs.
fn built_level(a: &Function, b: &Function) -> &'static str {
    match () {
        () if a.shares_switch_with(b) => "PIX",
        () if a.root() == b.root() => "PHB",
        () => "SYS",
    }
}

/// Row of the device with this name or address in a list of a document.
fn row<'a>(document: &'a Value, list: &str, field: &str, value: &str) -> &'a Value {
    let rows = document[list].as_array().expect("the document has the list");
    rows.iter().find(|row| row[field] == value).unwrap_or_else(|| unreachable!("no {value} in {list}: {rows:?}"))
}

#[test]
fn every_gpu_is_paired_with_the_nic_of_its_own_switch() {
    prepared();
    let plan = json(&["plan"]);
    let (gpus, nics) = (functions(GPU_CLASS), nics());
    assert_eq!((gpus.len(), nics.len(), plan["gpus"].as_array().map(Vec::len)), (4, 4, Some(4)), "{plan}");
    for (place, gpu) in gpus.iter().enumerate() {
        let planned = row(&plan, "gpus", "bdf", &gpu.address);
        assert_eq!(planned["name"], format!("GPU{place}"));
        let node = fs::read_to_string(gpu.path.join("numa_node")).expect("functions tell their node");
        assert_eq!(planned["numa"], node.trim().parse::<u64>().expect("it is known"));
        for nic in &nics {
            let seen = planned["nics"].as_array().and_then(|seen| seen.iter().find(|seen| seen["name"] == rxe_of(nic)));
            let seen = seen.unwrap_or_else(|| unreachable!("no {} in {planned}", rxe_of(nic)));
            assert_eq!((&seen["bdf"], &seen["level"]), (&nic.address.clone().into(), &built_level(gpu, nic).into()));
        }
        let near = nics.iter().find(|nic| nic.shares_switch_with(gpu)).expect("each switch has a NIC");
        assert_eq!(planned["assigned"], Value::from(vec![rxe_of(near)]));
    }
}

#[test]
fn the_matrix_and_the_drives_are_those_of_the_machine() {
    prepared();
    let topo = json(&["topo"]);
    let devices = topo["levels"]["devices"].as_array().expect("the matrix has names");
    let (gpus, nics) = (functions(GPU_CLASS), nics());
    for (place, gpu) in gpus.iter().enumerate() {
        for nic in &nics {
            let column = devices.iter().position(|name| *name == rxe_of(nic)).expect("every NIC has a column");
            assert_eq!(topo["levels"]["rows"][place][column], built_level(gpu, nic), "{} {}", gpu.address, nic.address);
        }
        for (other_place, other) in gpus.iter().enumerate().filter(|(other, _)| *other != place) {
            assert_eq!(topo["levels"]["rows"][place][other_place], built_level(gpu, other));
        }
    }
    for drive in functions(DRIVE_CLASS) {
        let gpu = gpus.iter().position(|gpu| gpu.shares_switch_with(&drive)).expect("each switch has a drive");
        let name = text(&row(&topo, "drives", "bdf", &drive.address)["name"]);
        let advised = json(&["path", &format!("GPU{gpu}"), &name]);
        assert_eq!(advised["level"], "PIX", "{advised}");
    }
    let root_ports: Vec<&Value> = rows_of_role(&topo, "root-port");
    assert!(root_ports.len() >= 4, "{root_ports:?}");
    for port in root_ports {
        assert!(port["acs"].as_str().is_some_and(|acs| acs != "none"), "root ports have ACS: {port}");
    }
    for port in rows_of_role(&topo, "switch-downstream") {
        assert_eq!(port["acs"], "none", "the emulated switch has none: {port}");
    }
}

fn rows_of_role<'a>(topo: &'a Value, role: &str) -> Vec<&'a Value> {
    let functions = topo["functions"].as_array().expect("the document lists functions");
    functions.iter().filter(|function| function["role"] == role).collect()
}

#[test]
fn host_memory_near_a_gpu_is_registered_with_the_nic_of_its_switch() {
    prepared();
    let daemon = daemon_with("");
    let mut puppet = Puppet::connected(&daemon);
    for (place, gpu) in functions(GPU_CLASS).iter().enumerate() {
        let (buffer, gpu_name) = (format!("b{place}"), format!("GPU{place}"));
        let lease = puppet.run(Command::Acquire { buffer: buffer.clone(), gpu: gpu_name, size: 1 << 20, host: true });
        let near = nics().into_iter().find(|nic| nic.shares_switch_with(gpu)).expect("each switch has a NIC");
        let registered = puppet.try_run(Command::Remote { buffer, hca: rxe_of(&near) });
        assert!(registered.is_ok(), "{lease}: {registered:?}");
    }
}

/// What a process has of host buffers by page size, as /proc tells it: bytes of a page, and pages by node.
fn host_pages(pid: u32) -> Vec<(u64, BTreeMap<String, u64>)> {
    let maps = fs::read_to_string(format!("/proc/{pid}/numa_maps")).expect("the process runs");
    let of_buffer = maps.lines().filter(|line| line.contains("/memfd:gdrd-host"));
    let pages = |line: &str| {
        let words: Vec<(&str, u64)> = line
            .split(' ')
            .filter_map(|word| word.split_once('='))
            .filter_map(|(k, v)| Some((k, v.parse().ok()?)))
            .collect();
        let page = words.iter().find(|(name, _)| *name == "kernelpagesize_kB").map_or(0, |(_, kib)| kib << 10);
        let is_node = |name: &str| name.strip_prefix('N').is_some_and(|node| node.parse::<u32>().is_ok());
        let nodes = words.into_iter().filter(|(name, _)| is_node(name));
        (page, nodes.map(|(node, count)| (node.to_owned(), count)).collect())
    };
    of_buffer.map(pages).collect()
}

#[test]
fn host_buffers_are_of_huge_pages_on_the_node_of_their_gpu_and_of_ordinary_ones_there_when_those_are_used_up() {
    prepared();
    let reserve = |node: &str, count: &str| {
        let path = format!("/sys/devices/system/node/node{node}/hugepages/hugepages-2048kB/nr_hugepages");
        fs::write(&path, count).expect("the kernel has huge pages");
    };
    // Of the wrong node there are plenty.
    reserve("0", "8");
    reserve("1", "4");
    let node_of = |gpu: &Function| fs::read_to_string(gpu.path.join("numa_node")).expect("each function has one");
    let gpu = functions(GPU_CLASS).iter().position(|gpu| node_of(gpu).trim() == "1").expect("two are on node 1");
    let daemon = daemon_with("[pool]\nready_target_per_class = 0\n");
    let mut puppet = Puppet::connected(&daemon);
    let acquire = |puppet: &mut Puppet, buffer: &str, size: u64| {
        puppet.run(Command::Acquire { buffer: buffer.into(), gpu: format!("GPU{gpu}"), size, host: true });
    };
    let on_node_1 = |count: u64| BTreeMap::from([("N1".to_owned(), count)]);
    acquire(&mut puppet, "huge", 8 << 20);
    puppet.run(Command::Fill { buffer: "huge".into(), seed: 3 });
    assert_eq!(host_pages(puppet.pid()), [(2 << 20, on_node_1(4))]);
    acquire(&mut puppet, "ordinary", 4 << 20);
    puppet.run(Command::Fill { buffer: "ordinary".into(), seed: 4 });
    let mut pages = host_pages(puppet.pid());
    pages.sort();
    assert_eq!(pages, [(4096, on_node_1(1024)), (2 << 20, on_node_1(4))]);
    // What is lent again is the same memory without its content.
    puppet.run(Command::Release { buffer: "huge".into() });
    acquire(&mut puppet, "huge", 8 << 20);
    let peek = |offset| Command::Peek { buffer: "huge".into(), offset, len: 64 };
    for offset in [0, (8 << 20) - 64] {
        assert_eq!(puppet.run(peek(offset)), "00".repeat(64));
    }
    assert!(host_pages(puppet.pid()).iter().any(|(page, _)| *page == 2 << 20));
    drop(puppet);
    let required = daemon_with("[pool]\nhost_huge_pages = \"require\"\n");
    let mut puppet = Puppet::connected(&required);
    let more = Command::Acquire { buffer: "more".into(), gpu: format!("GPU{gpu}"), size: 16 << 20, host: true };
    let refused = format!("{:?}", puppet.try_run(more));
    assert!(refused.contains("on NUMA node 1") && refused.contains("vm.nr_hugepages"), "{refused}");
}

#[test]
fn broker_threads_run_on_the_cpus_of_a_node_each() {
    prepared();
    let daemon = daemon_with("[broker]\nthreads = 2\n");
    let cpus_of_node = |node| {
        let path = format!("/sys/devices/system/node/node{node}/cpulist");
        fs::read_to_string(path).expect("the guest has two nodes").trim().to_owned()
    };
    let status_of = |name: &str| {
        let tasks = fs::read_dir(format!("/proc/{}/task", daemon.pid())).expect("the daemon runs").flatten();
        let named = tasks
            .map(|task| task.path())
            .find(|task| fs::read_to_string(task.join("comm")).is_ok_and(|comm| comm.trim() == name));
        fs::read_to_string(named.expect("the broker has two threads").join("status")).expect("it runs")
    };
    let cpus_of = |name: &str| {
        let status = status_of(name);
        let line = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
        line.map(|cpus| cpus.trim().to_owned()).unwrap_or_default()
    };
    let mut placed = ["gdrd-broker-0", "gdrd-broker-1"].map(cpus_of);
    placed.sort();
    assert_eq!(placed, [0, 1].map(cpus_of_node));
}

#[test]
fn virtual_functions_stand_below_their_physical_one() {
    prepared();
    let physical = nics().into_iter().find(|nic| nic.path.join("sriov_numvfs").exists()).expect("igb has SR-IOV");
    fs::write(physical.path.join("sriov_numvfs"), "2").expect("the NIC makes virtual functions");
    let of_physical =
        |nic: &Function| fs::canonicalize(nic.path.join("physfn")).is_ok_and(|path| path == physical.path);
    let virtuals: Vec<Function> = nics().into_iter().filter(of_physical).collect();
    assert_eq!(virtuals.len(), 2);
    virtuals.iter().for_each(|nic| make_rxe(nic, &rxe_of(nic)));
    let plan = json(&["plan"]);
    let profile = run("gdrctl", &["export", "profile"]);
    for function in &virtuals {
        let nic = row(&plan, "nics", "name", &rxe_of(function));
        assert_eq!(nic["card"], physical.address, "{nic}");
        let line = profile.lines().find(|line| line.contains(&function.address) && line.contains(&physical.address));
        assert!(line.is_some(), "{profile}");
    }
    for gpu in functions(GPU_CLASS) {
        let planned = row(&plan, "gpus", "bdf", &gpu.address);
        let level = |nic: &Function| {
            let rows = planned["nics"].as_array().expect("the plan lists NICs");
            rows.iter().find(|row| row["name"] == rxe_of(nic)).map(|row| row["level"].clone())
        };
        assert!(level(&physical).is_some());
        assert!(virtuals.iter().all(|function| level(function) == level(&physical)), "{planned}");
    }
    for function in &virtuals {
        run("rdma", &["link", "delete", &rxe_of(function)]);
    }
    fs::write(physical.path.join("sriov_numvfs"), "0").expect("the NIC takes them back");
}
