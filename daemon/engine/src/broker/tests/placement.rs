//! Where broker threads run, and which of them a queue pair gets.

use std::time::Instant;

use gdrd_ring::Geometry;
use rustix::thread::{CpuSet, sched_getaffinity};

use super::world::{PATIENCE, World};
use crate::broker::{Config, HcaIndex, Placement};

fn on(nodes: &[u32]) -> Config {
    let place = |node: &u32| Placement { cpus: Vec::new(), numa_node: Some(*node) };
    Config { threads: nodes.iter().map(place).collect(), ..Config::default() }
}

#[test]
fn a_queue_pair_gets_the_least_used_thread_of_its_hcas_node() {
    let world = World::with(on(&[0, 1, 0]));
    let depths = Geometry::new(4, 4).unwrap();
    let thread_near = |node| {
        let reserved = world.broker.reserve(HcaIndex(0), &*world.hcas[0], depths, node).unwrap();
        reserved.share.thread
    };
    // The far thread has the fewest from the second on.
    assert_eq!([(); 3].map(|()| thread_near(Some(0))), [0, 2, 0]);
    assert_eq!([(); 2].map(|()| thread_near(Some(1))), [1, 1]);
    assert_eq!(thread_near(None), 2, "anywhere");
    assert_eq!(
        [(); 2].map(|()| thread_near(Some(7))),
        [0, 1],
        "on a node without a thread all are far: of three, the first has two"
    );
}

/// CPUs that the thread of this process with that name may run on (proc_pid_status(5)).
fn cpus_of(name: &str) -> Option<String> {
    let tasks = std::fs::read_dir("/proc/self/task").ok()?.flatten();
    let named = tasks
        .map(|task| task.path())
        .find(|task| std::fs::read_to_string(task.join("comm")).is_ok_and(|comm| comm.trim() == name))?;
    let status = std::fs::read_to_string(named.join("status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    Some(line.trim().to_owned())
}

#[test]
fn a_thread_runs_on_the_cpus_that_it_is_placed_on() {
    let all = sched_getaffinity(None).unwrap();
    let last = (0..CpuSet::MAX_CPU).rfind(|cpu| all.is_set(*cpu)).unwrap();
    // So many that no other test of this process has a thread of the last one's name.
    let mut threads = vec![Placement::default(); 33];
    threads[32].cpus = vec![last];
    let _world = World::with(Config { threads, ..Config::default() });
    let started = Instant::now();
    while cpus_of("gdrd-broker-32") != Some(last.to_string()) {
        assert!(started.elapsed() < PATIENCE, "{:?} and not {last}", cpus_of("gdrd-broker-32"));
        std::thread::yield_now();
    }
    if all.count() > 1 {
        assert_ne!(cpus_of("gdrd-broker-31"), Some(last.to_string()), "it may run anywhere");
    }
}
