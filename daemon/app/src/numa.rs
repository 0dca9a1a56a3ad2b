//! The NUMA nodes of this machine with their CPUs, for broker threads that stay near the NICs.

use std::collections::BTreeMap;
use std::path::Path;

use gdrd_engine::NumaCpus;

/// Where Linux lists the nodes (Documentation/ABI/stable/sysfs-devices-node).
const NODES: &str = "/sys/devices/system/node";

/// CPUs that a list may name; no machine has as many, and a wrong list must not take all memory.
const MAX_CPU: usize = 1 << 16;

/// Nodes of this machine, those with the most HCAs first. None where the kernel lists none.
pub(crate) fn nodes(hca_nodes: &BTreeMap<String, u32>) -> Vec<NumaCpus> {
    let mut nodes = read(Path::new(NODES));
    let hcas = |node: &NumaCpus| hca_nodes.values().filter(|of_hca| **of_hca == node.node).count();
    nodes.sort_by_key(|node| (std::cmp::Reverse(hcas(node)), node.node));
    nodes
}

fn read(folder: &Path) -> Vec<NumaCpus> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let node = |entry: std::fs::DirEntry| {
        let node = entry.file_name().to_str()?.strip_prefix("node")?.parse().ok()?;
        let cpus = std::fs::read_to_string(entry.path().join("cpulist")).ok()?;
        Some(NumaCpus { node, cpus: cpu_list(cpus.trim())? })
    };
    entries.filter_map(|entry| node(entry.ok()?)).collect()
}

/// `0-3,8,10-11`, as cpuset(7) "List format"; `None` for anything else.
fn cpu_list(text: &str) -> Option<Vec<usize>> {
    let mut cpus = Vec::new();
    for part in text.split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        if last >= MAX_CPU {
            return None;
        }
        cpus.extend(first..=last);
    }
    Some(cpus)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_cpus_are_read_as_the_kernel_writes_them() {
        assert_eq!(cpu_list("0-3,8,10-11"), Some(vec![0, 1, 2, 3, 8, 10, 11]));
        assert_eq!(cpu_list(""), Some(vec![]));
        for wrong in ["a", "1-", "0-99999999999", "0-70000", "-1"] {
            assert_eq!(cpu_list(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn nodes_come_by_folder_and_what_is_no_node_is_left_out() {
        let folder = tempfile::tempdir().expect("a folder");
        for (name, cpus) in [("node0", "0-1\n"), ("node8", "\n"), ("nodex", "2\n"), ("power", "3\n")] {
            std::fs::create_dir(folder.path().join(name)).expect("new");
            std::fs::write(folder.path().join(name).join("cpulist"), cpus).expect("new");
        }
        let mut found = read(folder.path());
        found.sort_by_key(|node| node.node);
        assert_eq!(found, [NumaCpus { node: 0, cpus: vec![0, 1] }, NumaCpus { node: 8, cpus: vec![] }]);
        assert!(read(&folder.path().join("absent")).is_empty());
    }

    #[test]
    fn this_machine_has_a_cpu_in_some_node_or_lists_no_nodes() {
        let nodes = nodes(&BTreeMap::new());
        assert!(nodes.is_empty() || nodes.iter().any(|node| !node.cpus.is_empty()), "{nodes:?}");
    }
}
