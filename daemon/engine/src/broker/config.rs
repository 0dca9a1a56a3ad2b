//! What the broker is started with.

use std::time::Duration;

/// Where one broker thread runs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Placement {
    /// CPUs that it may run on; empty for any.
    pub cpus: Vec<usize>,
    /// NUMA node that it is near; queue pairs on HCAs of that node prefer it.
    pub numa_node: Option<u32>,
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
