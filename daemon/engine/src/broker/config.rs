//! What the broker is started with.

use std::time::Duration;

use crate::config::NumaCpus;

/// Where one broker thread runs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Placement {
    /// CPUs that it may run on; empty for any.
    pub cpus: Vec<usize>,
    /// NUMA node that it is near; queue pairs on HCAs of that node prefer it.
    pub numa_node: Option<u32>,
}

impl Placement {
    /// So many threads, on `nodes` in turn, so that the HCAs of each find one near. Where all CPUs are of one node, or
    /// nothing is known of nodes, they run anywhere.
    #[must_use]
    pub fn near(nodes: &[NumaCpus], threads: usize) -> Vec<Self> {
        let with_cpus: Vec<_> = nodes.iter().filter(|node| !node.cpus.is_empty()).collect();
        if with_cpus.len() < 2 {
            return vec![Self::default(); threads];
        }
        let place = |node: &&NumaCpus| Self { cpus: node.cpus.clone(), numa_node: Some(node.node) };
        with_cpus.iter().cycle().take(threads).map(place).collect()
    }
}

/// How the broker works.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// One entry a broker thread; at least one, at most [`Config::MAX_THREADS`].
    pub threads: Vec<Placement>,
    /// How long a thread spins after its last work before it sleeps.
    pub spin: Duration,
    /// How long posted work of a queue pair in ERR may take to flush before the queue pair is destroyed.
    pub drain: Duration,
    /// Entries of each completion queue, within what the HCA can do: the sum of the depths of the queue
    /// pairs that one thread serves on one HCA.
    pub cq_entries: u32,
}

impl Config {
    /// Most broker threads.
    pub const MAX_THREADS: usize = 64;
    /// Threads on this host when the operator names no number: one up to 4 CPUs, else one for every 8.
    #[must_use]
    pub fn threads_for(cpus: usize) -> usize {
        cpus.div_ceil(8).clamp(1, Self::MAX_THREADS)
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            threads: vec![Placement::default()],
            spin: Duration::from_micros(50),
            drain: Duration::from_secs(2),
            cq_entries: 65_536,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(node: u32, cpus: &[usize]) -> NumaCpus {
        NumaCpus { node, cpus: cpus.to_vec() }
    }

    #[test]
    fn threads_go_to_the_nodes_in_turn_and_never_to_one_without_cpus() {
        let nodes = [node(4, &[8, 9]), node(0, &[0, 1]), node(7, &[])];
        let placed = Placement::near(&nodes, 3);
        let found: Vec<_> = placed.iter().map(|place| (place.numa_node, place.cpus.as_slice())).collect();
        assert_eq!(found, [(Some(4), &[8, 9][..]), (Some(0), &[0, 1][..]), (Some(4), &[8, 9][..])]);
    }

    #[test]
    fn on_one_node_threads_run_anywhere() {
        for nodes in [vec![], vec![node(0, &[0, 1])], vec![node(0, &[0, 1]), node(1, &[])]] {
            assert_eq!(Placement::near(&nodes, 2), vec![Placement::default(); 2]);
        }
    }
}
