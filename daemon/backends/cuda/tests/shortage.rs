//! A worker that cannot be watched is ended. In a file of its own, since the shortage is the whole process'.
#![forbid(unsafe_code)]

use std::sync::Arc;

use gdrd_cuda::{Launch, PoolConfig, ProcessLauncher, ServedGpu, WorkerPool};
use gdrd_hal::{GpuMemory as _, GpuUuid};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, WaitOptions, getrlimit, setrlimit, wait};

/// Room for a child to be started, and for no stack of a thread (2 MiB).
const ROOM_BYTES: u64 = 1 << 20;

fn virtual_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("proc(5)");
    let pages: u64 = statm.split(' ').next().and_then(|pages| pages.parse().ok()).expect("the first field is its size");
    pages * rustix::param::page_size() as u64
}

#[test]
fn a_worker_for_whom_no_thread_can_wait_is_ended_and_leaves_no_zombie() {
    let launcher: Arc<dyn Launch> =
        Arc::new(ProcessLauncher::new("/bin/sh".into(), ["-c", "exec sleep 3600"].map(Into::into).to_vec()));
    let uuid = GpuUuid("GPU-00000000-0000-0000-0000-000000000000".to_owned());
    let served = vec![ServedGpu { uuid: uuid.clone(), skipped: None }];
    let pool = WorkerPool::new(served, &launcher, PoolConfig::default());
    let before = getrlimit(Resource::As);
    setrlimit(Resource::As, Rlimit { current: Some(virtual_bytes() + ROOM_BYTES), maximum: before.maximum })
        .expect("a limit may be lowered");
    let refused = pool.usage(&uuid);
    setrlimit(Resource::As, before).expect("the hard limit is as it was");
    let told = refused.expect_err("nobody waits for a worker").to_string();
    assert!(told.contains("start a worker") && told.contains("os error 11"), "not for want of a thread: {told}");
    assert_eq!(wait(WaitOptions::NOHANG).map(drop), Err(Errno::CHILD), "a child is left");
}
