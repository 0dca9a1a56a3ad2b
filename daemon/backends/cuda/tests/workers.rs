//! Workers come and go: what that does to calls and to memory.
#![forbid(unsafe_code)]

mod support;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gdrd_cuda::worker::End;
use gdrd_cuda::{
    DeviceError, DeviceErrorKind, GRANULARITY_BYTES, Launch, PoolConfig, ProcessLauncher, Scope, ServedGpu,
    WorkerHandle, WorkerPool,
};
use gdrd_hal::{GpuAllocation, GpuAtomic, GpuCopies, GpuMemory, GpuMemoryError, GpuUuid, KeptMemory};
use rustix::io::Errno;
use support::{FakeGpu, Fault, TOTAL_BYTES, pool, pool_with, uuid};

const PATIENT: Duration = Duration::from_secs(3600);
const WATCHDOG: Duration = Duration::from_secs(60);
/// Long beside the pauses of a busy machine: a worker that ends between the calls of one test is no part of it.
const IDLE: Duration = Duration::from_millis(500);

/// A call of a pool.
type Call<'a> = dyn Fn() -> Result<(), GpuMemoryError> + 'a;

fn file(allocation: &dyn GpuAllocation) -> File {
    File::from(allocation.memory_fd().try_clone_to_owned().expect("a descriptor of a memfd"))
}

fn byte(allocation: &dyn GpuAllocation, offset: u64) -> u8 {
    let mut byte = [0];
    file(allocation).read_exact_at(&mut byte, offset).expect("a descriptor of a memfd");
    byte[0]
}

fn reason(error: &GpuMemoryError) -> String {
    error.to_string()
}

fn wait_until_idle(fake: &FakeGpu) {
    let since = Instant::now();
    while fake.ends.lock().expect("the fake works").is_empty() {
        assert!(since.elapsed() < WATCHDOG, "the worker does not end");
        std::thread::yield_now();
    }
    assert_eq!(fake.ends.lock().expect("the fake works")[0], End::Idle);
}

#[test]
fn a_worker_starts_at_the_first_call_and_serves_the_next_ones() {
    let (pool, fakes) = pool(2, PATIENT);
    assert_eq!(fakes[0].started(), 0);
    let first = pool.allocate(&uuid(0), GRANULARITY_BYTES).unwrap();
    let second = pool.allocate(&uuid(0), GRANULARITY_BYTES).unwrap();
    assert_eq!((fakes[0].started(), fakes[1].started()), (1, 0));
    drop((first, second));
    assert_eq!(pool.usage(&uuid(0)).unwrap().free_bytes, TOTAL_BYTES);
}

#[test]
fn memory_and_its_content_outlive_a_worker_that_dies_in_a_call() {
    let (pool, fakes) = pool(1, PATIENT);
    let kept = pool.allocate(&uuid(0), GRANULARITY_BYTES).unwrap();
    file(&*kept).write_all_at(&[7], 5000).unwrap();
    fakes[0].fail_next(Fault::Die);
    let error = pool.allocate(&uuid(0), GRANULARITY_BYTES).err().unwrap();
    assert!(matches!(&error, GpuMemoryError::Driver { call: "allocate", .. }), "{error:?}");
    assert!(reason(&error).contains("worker failed") && reason(&error).contains("next call"), "{error}");
    assert_eq!(byte(&*kept, 5000), 7);
    // The next worker takes it over by its fd.
    kept.scrub().unwrap();
    assert_eq!((byte(&*kept, 5000), fakes[0].started()), (0, 2));
}

#[test]
fn a_spoilt_context_ends_its_worker_and_the_next_call_has_a_new_one() {
    let (pool, fakes) = pool(1, PATIENT);
    let kept = pool.allocate(&uuid(0), GRANULARITY_BYTES).unwrap();
    fakes[0].fail_next(Fault::Error(DeviceErrorKind::Sticky));
    let error = kept.scrub().unwrap_err();
    assert!(reason(&error).contains("told to") && reason(&error).contains("worker ended"), "{error}");
    kept.scrub().unwrap();
    assert_eq!(fakes[0].started(), 2);
    assert!(matches!(fakes[0].ends.lock().unwrap()[0], End::Spoilt(_)));
}

#[test]
fn a_refused_call_leaves_the_worker_as_it_is() {
    let (pool, fakes) = pool(1, PATIENT);
    pool.usage(&uuid(0)).unwrap();
    fakes[0].fail_next(Fault::Error(DeviceErrorKind::Refused));
    assert!(matches!(pool.usage(&uuid(0)), Err(GpuMemoryError::Driver { .. })));
    fakes[0].fail_next(Fault::Error(DeviceErrorKind::OutOfMemory));
    assert!(matches!(pool.usage(&uuid(0)), Err(GpuMemoryError::OutOfMemory { free_bytes: TOTAL_BYTES, .. })));
    pool.usage(&uuid(0)).unwrap();
    assert_eq!(fakes[0].started(), 1);
}

#[test]
fn out_of_memory_in_any_call_tells_what_is_free_and_leaves_the_worker_as_it_is() {
    let (pool, fakes) = pool(1, PATIENT);
    let kept = pool.allocate(&uuid(0), GRANULARITY_BYTES).unwrap();
    let bytes = pool.find(kept.dma_buf_fd().unwrap()).unwrap();
    let import = || {
        // Only who has not had the memory imports it.
        let fd = |fd: std::os::fd::BorrowedFd<'_>| fd.try_clone_to_owned().unwrap();
        let kept = KeptMemory { memory: fd(kept.memory_fd()), dma_buf: None };
        pool.import(&uuid(0), GRANULARITY_BYTES, kept).and_then(|memory| memory.scrub())
    };
    let calls: [(&str, &Call<'_>); 7] = [
        ("import", &import),
        ("usage", &|| pool.usage(&uuid(0)).map(drop)),
        ("allocate", &|| pool.allocate(&uuid(0), GRANULARITY_BYTES).map(drop)),
        ("scrub", &|| kept.scrub()),
        ("read", &|| bytes.read(0, &mut [0; 8])),
        ("write", &|| bytes.write(0, &[0; 8])),
        ("atomic", &|| bytes.atomic(0, GpuAtomic::FetchAdd { operand: 1 }).map(drop)),
    ];
    for (name, call) in calls {
        fakes[0].fail_next(Fault::Error(DeviceErrorKind::OutOfMemory));
        let error = call().expect_err(name);
        let free = TOTAL_BYTES - GRANULARITY_BYTES;
        assert!(
            matches!(error, GpuMemoryError::OutOfMemory { free_bytes, .. } if free_bytes == free),
            "{name}: {error:?}"
        );
    }
    pool.usage(&uuid(0)).unwrap();
    assert_eq!(fakes[0].started(), 1);
}

#[test]
fn a_lost_gpu_is_told_as_lost() {
    let (pool, fakes) = pool(1, PATIENT);
    fakes[0].fail_next(Fault::Error(DeviceErrorKind::Lost));
    assert!(matches!(pool.allocate(&uuid(0), GRANULARITY_BYTES), Err(GpuMemoryError::Lost { .. })));
}

#[test]
fn an_idle_worker_ends_and_what_meets_its_end_is_asked_again() {
    let (pool, fakes) = pool(1, IDLE);
    let kept = pool.allocate(&uuid(0), GRANULARITY_BYTES).unwrap();
    wait_until_idle(&fakes[0]);
    file(&*kept).write_all_at(&[7], 0).unwrap();
    kept.scrub().unwrap();
    assert_eq!(byte(&*kept, 0), 0);
    assert!(fakes[0].started() > 1);
}

#[test]
fn memory_freed_after_an_idle_worker_has_ended_leaves_the_next_call_a_new_one() {
    let (pool, fakes) = pool(1, IDLE);
    let freed = pool.allocate(&uuid(0), GRANULARITY_BYTES).unwrap();
    wait_until_idle(&fakes[0]);
    drop(freed);
    pool.usage(&uuid(0)).unwrap();
    assert!(fakes[0].started() > 1);
}

#[test]
fn a_worker_that_hangs_when_memory_is_freed_answers_no_later_call() {
    let patience = PoolConfig { call_timeout: Duration::from_secs(2), ..PoolConfig::default() };
    let (pool, fakes) = pool_with(1, PATIENT, patience);
    let (freed, kept) =
        (pool.allocate(&uuid(0), GRANULARITY_BYTES).unwrap(), pool.allocate(&uuid(0), GRANULARITY_BYTES).unwrap());
    file(&*kept).write_all_at(&[7], 0).unwrap();
    fakes[0].fail_next(Fault::HangInForget);
    drop(freed);
    // What it says now is of the memory that was freed.
    fakes[0].let_go();
    kept.scrub().unwrap();
    assert_eq!((byte(&*kept, 0), fakes[0].started()), (0, 2));
}

#[test]
fn a_drained_gpu_has_no_worker_and_refuses_until_it_is_resumed() {
    let (pool, fakes) = pool(1, PATIENT);
    let kept = pool.allocate(&uuid(0), GRANULARITY_BYTES).unwrap();
    pool.drain(&uuid(0)).unwrap();
    assert_eq!(*fakes[0].ends.lock().unwrap(), [End::HungUp]);
    let error = pool.usage(&uuid(0)).unwrap_err();
    assert!(matches!(&error, GpuMemoryError::Lost { .. }) && reason(&error).contains("drained"), "{error}");
    pool.resume(&uuid(0)).unwrap();
    kept.scrub().unwrap();
    assert!(matches!(pool.drain(&uuid(9)), Err(GpuMemoryError::UnknownGpu { .. })));
}

#[test]
fn while_a_gpu_is_drained_no_worker_may_hold_its_files() {
    let (pool, fakes) = pool(2, PATIENT);
    for gpu in [0, 1] {
        pool.usage(&uuid(gpu)).unwrap();
    }
    pool.drain(&uuid(0)).unwrap();
    assert_eq!(*fakes[1].ends.lock().unwrap(), [End::HungUp], "the other's worker was started with the host's scope");
    pool.usage(&uuid(1)).unwrap();
    // Said twice, it is drained once.
    pool.drain(&uuid(0)).unwrap();
    assert_eq!(fakes[1].ends.lock().unwrap().len(), 1, "one of its own scope stays");
    pool.resume(&uuid(0)).unwrap();
    pool.drain(&uuid(1)).unwrap();
    pool.resume(&uuid(1)).unwrap();
    pool.usage(&uuid(1)).unwrap();
    assert_eq!(*fakes[1].scopes.lock().unwrap(), [Scope::Host, Scope::OwnGpu, Scope::Host]);
}

#[test]
fn a_gpu_of_which_bad_news_is_heard_is_lost_until_it_is_resumed_and_found_well() {
    let (pool, fakes) = pool(2, PATIENT);
    pool.usage(&uuid(0)).unwrap();
    pool.lose(&uuid(0), "xid 79: gpu has fallen off the bus");
    pool.lose(&uuid(0), "xid 48");
    let error = pool.usage(&uuid(0)).unwrap_err();
    assert!(matches!(&error, GpuMemoryError::Lost { .. }) && reason(&error).contains("xid 79"), "{error}");
    assert_eq!(*fakes[0].ends.lock().unwrap(), [End::HungUp]);
    assert!(pool.lost(&uuid(0)).is_some() && pool.lost(&uuid(1)).is_none());
    pool.usage(&uuid(1)).unwrap();
    // Many answer all along, so what the driver says counts from the resume on only.
    let before = Instant::now();
    pool.found_well(&uuid(0), before);
    assert!(pool.usage(&uuid(0)).is_err() && pool.last_resumed().is_none());
    pool.resume(&uuid(0)).unwrap();
    pool.found_well(&uuid(0), before);
    assert!(pool.usage(&uuid(0)).is_err() && pool.last_resumed().is_some());
    // And from the last bad news on.
    pool.lose(&uuid(0), "xid 48");
    pool.found_well(&uuid(0), Instant::now());
    assert!(pool.usage(&uuid(0)).is_err());
    pool.resume(&uuid(0)).unwrap();
    pool.found_well(&uuid(0), Instant::now());
    pool.usage(&uuid(0)).unwrap();
}

#[test]
fn what_a_worker_prints_is_heard_line_by_line() {
    let (sender, lines) = std::sync::mpsc::channel();
    let mut launcher = ProcessLauncher::new("/bin/sh".into(), vec!["-c".into(), "echo one; echo two".into()]);
    launcher.listener = Some(Arc::new(move |gpu, line| {
        // Nobody listens once the test is over.
        let _ = sender.send(format!("{gpu} {line}"));
    }));
    let launcher: Arc<dyn Launch> = Arc::new(launcher);
    let pool = WorkerPool::new(vec![ServedGpu { uuid: uuid(0), skipped: None }], &launcher, PoolConfig::default());
    assert!(pool.usage(&uuid(0)).is_err(), "a shell is no worker");
    let heard: Vec<String> = lines.iter().take(2).collect();
    assert_eq!(heard, [format!("{} one", uuid(0)), format!("{} two", uuid(0))]);
}

#[test]
fn a_gpu_that_is_skipped_says_why_and_starts_nothing() {
    let skipped = ServedGpu { uuid: uuid(0), skipped: Some("mig mode is on".to_owned()) };
    let launcher: Arc<dyn Launch> = Arc::new(ProcessLauncher::new("/nonexistent".into(), Vec::new()));
    let pool = WorkerPool::new(vec![skipped], &launcher, PoolConfig::default());
    let error = pool.allocate(&uuid(0), GRANULARITY_BYTES).err().unwrap();
    assert!(reason(&error).contains("mig mode is on"), "{error}");
}

#[test]
fn a_worker_that_cannot_start_says_why() {
    let (pool, fakes) = pool(1, PATIENT);
    *fakes[0].no_start.lock().unwrap() = Some(DeviceError::refused("dlopen", "no libcuda.so.1"));
    let error = pool.usage(&uuid(0)).unwrap_err();
    assert!(reason(&error).contains("no libcuda.so.1"), "{error}");
    *fakes[0].no_start.lock().unwrap() = None;
    pool.usage(&uuid(0)).unwrap();
}

#[test]
fn a_worker_for_which_no_descriptor_is_left_is_told_apart_from_a_driver_that_fails() {
    #[derive(Debug)]
    struct Short(Errno);
    impl Launch for Short {
        fn launch(&self, _: &GpuUuid, _: Scope, _: OwnedFd) -> io::Result<Box<dyn WorkerHandle>> {
            Err(self.0.into())
        }
    }
    let told = |errno| {
        let launcher: Arc<dyn Launch> = Arc::new(Short(errno));
        let served = vec![ServedGpu { uuid: uuid(0), skipped: None }];
        WorkerPool::new(served, &launcher, PoolConfig::default()).usage(&uuid(0)).expect_err("none can be started")
    };
    for errno in [Errno::MFILE, Errno::NFILE] {
        let error = told(errno);
        assert!(matches!(&error, GpuMemoryError::OutOfDescriptors { call: "usage", .. }), "{error:?}");
    }
    assert!(matches!(told(Errno::NOENT), GpuMemoryError::Driver { .. }));
}

#[test]
fn a_program_that_is_no_worker_is_told_with_how_it_ended() {
    let launch = |program: &str| {
        let launcher: Arc<dyn Launch> = Arc::new(ProcessLauncher::new(program.into(), Vec::new()));
        let served = vec![ServedGpu { uuid: uuid(0), skipped: None }];
        let pool = WorkerPool::new(served, &launcher, PoolConfig::default());
        reason(&pool.usage(&uuid(0)).expect_err("no worker answers"))
    };
    let told = launch("/bin/false");
    assert!(told.contains("ended at once") && told.contains("exit status: 1"), "{told}");
    let told = launch("/nonexistent");
    assert!(told.contains("start a worker"), "{told}");
}

#[test]
fn bytes_are_found_by_dma_buf_and_kept_alive_by_who_found_them() {
    let (pool, _) = pool(2, PATIENT);
    let (near, far) = (pool.allocate(&uuid(0), 4 << 20).unwrap(), pool.allocate(&uuid(1), 8 << 20).unwrap());
    let find = |allocation: &dyn GpuAllocation| pool.find(allocation.dma_buf_fd().unwrap()).unwrap();
    let (a, b) = (find(&*near), find(&*far));
    let pattern: Vec<u8> = (0..5 << 20).map(|at: u32| at.to_le_bytes()[1]).collect();
    // Longer than the staging segment, and from one GPU to another.
    b.write(1000, &pattern).unwrap();
    b.copy_to(1000, &*a, 0, 4 << 20).unwrap();
    let mut read = vec![0; 4 << 20];
    a.read(0, &mut read).unwrap();
    assert!(read == pattern[..4 << 20]);
    a.copy_to(0, &*a, 2 << 20, 4096).unwrap();
    assert_eq!(byte(&*near, (2 << 20) + 300), pattern[300]);
    assert!(a.read((4 << 20) - 1, &mut [0; 2]).is_err() && a.write(u64::MAX, &[0; 2]).is_err());
    a.write(8, &5_u64.to_ne_bytes()).unwrap();
    assert_eq!(a.atomic(8, GpuAtomic::FetchAdd { operand: 2 }).unwrap(), 5);
    assert_eq!(a.atomic(8, GpuAtomic::CompareSwap { compare: 7, operand: 9 }).unwrap(), 7);
    let other = File::open("/dev/null").unwrap();
    assert!(pool.find(other.as_fd()).is_none());
    let dma_buf = near.dma_buf_fd().unwrap().try_clone_to_owned().unwrap();
    drop(near);
    let mut word = [0; 8];
    a.read(8, &mut word).unwrap();
    assert_eq!(u64::from_ne_bytes(word), 9);
    drop(a);
    assert!(pool.find(dma_buf.as_fd()).is_none());
}
