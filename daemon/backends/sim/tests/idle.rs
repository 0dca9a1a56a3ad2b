//! What an idle simulated host costs. A binary of its own, so that no other test's threads or memory are seen.
#![forbid(unsafe_code)]

mod support;

use gdrd_hal::WorkStatus;
use gdrd_sim::{GRANULARITY_BYTES, SimHost};

fn timer_threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").expect("there is a /proc");
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
    names.filter(|name| name.trim() == "sim-timer").count()
}

/// What the process has in memory, but for pages of its own executable, which come as code is first run.
fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("there is a /proc");
    let field = |name: &str| {
        let value = status.lines().find_map(|line| line.strip_prefix(name)).expect("the kernel tells it");
        value.split_whitespace().next().and_then(|kib| kib.parse::<u64>().ok()).expect("it is a number")
    };
    field("RssAnon:") + field("RssShmem:")
}

#[test]
fn ordinary_work_starts_no_thread_and_allocations_take_no_memory() {
    let host = support::patient_host();
    let (mut a, b) = support::pair(&host);
    for wr_id in 0..100 {
        let write = a.write(wr_id, &b, 0, 8);
        a.send(write);
        assert_eq!(a.next(), (wr_id, WorkStatus::Success));
    }
    assert_eq!(timer_threads(), 0);

    let profile = gdrd_topology::profile::builtin("dgx-a100").unwrap().host;
    let before = resident_kib();
    let dgx = SimHost::from_host(&profile).unwrap();
    let memory = dgx.gpu_memory();
    let facts = dgx.gpu_facts().gpus().unwrap();
    let pool: Vec<_> = facts
        .iter()
        .flat_map(|fact| (0..8).map(|_| memory.allocate(&fact.uuid, 16 * GRANULARITY_BYTES).unwrap()))
        .collect();
    for allocation in &pool {
        allocation.scrub().unwrap();
    }
    let grown = resident_kib().saturating_sub(before);
    assert!(grown < 4096, "{} allocations of 32 MiB took {grown} KiB", pool.len());
}
