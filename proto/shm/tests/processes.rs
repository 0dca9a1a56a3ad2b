//! Two real processes on one segment: futex wakes cross, and the floor can be measured.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "helpers of tests, whose failures name the line")]

use std::fs::File;
use std::os::fd::AsRawFd;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::Duration;

use gdrd_shm::{Access, Segment, WaitOutcome, futex_wait, futex_wake, pingpong};

/// Set in the second process: the path of the segment.
const PEER: &str = "GDRD_TEST_SEGMENT";
/// A peer that is silent for so long has died.
const PATIENCE: Duration = Duration::from_secs(60);

/// The segment that the first process sent, if this is the second.
fn peers_segment() -> Option<Segment> {
    let path = std::env::var_os(PEER)?;
    let fd = File::options().read(true).write(true).open(path).expect("the first process lives");
    Some(Segment::map(fd.into(), Access::ReadWrite).expect("the segment is sealed"))
}

/// Runs the test `name` of this binary again, as the second process.
fn start_peer(segment: &Segment, name: &str) -> Child {
    let path = format!("/proc/{}/fd/{}", std::process::id(), segment.fd().as_raw_fd());
    Command::new(std::env::current_exe().expect("a test binary has a path"))
        .args(["--exact", name])
        .env(PEER, path)
        .stdout(Stdio::null())
        .spawn()
        .expect("a test binary runs")
}

#[test]
fn a_futex_wakes_a_waiter_in_another_process() {
    const TURN: u64 = 0;
    const ROUNDS: u32 = 1000;
    // Even numbers are the first process's turn, odd ones the second's.
    let play = |segment: &Segment, own: u32| {
        let turn = segment.atomic_u32(TURN).unwrap();
        loop {
            let now = turn.load(Ordering::Acquire);
            if now >= ROUNDS {
                break;
            }
            if now % 2 == own {
                turn.store(now + 1, Ordering::Release);
                futex_wake(turn, 1).unwrap();
            } else {
                let outcome = futex_wait(turn, now, Some(PATIENCE)).unwrap();
                assert_eq!(outcome, WaitOutcome::Woken, "the other process plays");
            }
        }
    };
    if let Some(segment) = peers_segment() {
        return play(&segment, 1);
    }
    let segment = Segment::create("gdrd-test", 4096).unwrap();
    let mut peer = start_peer(&segment, "a_futex_wakes_a_waiter_in_another_process");
    play(&segment, 0);
    assert!(peer.wait().unwrap().success());
    assert_eq!(segment.load_u32(TURN), Ok(ROUNDS));
}

#[test]
fn a_wait_on_another_value_returns_at_once_and_a_wait_alone_times_out() {
    let segment = Segment::create("gdrd-test", 4096).unwrap();
    let word = segment.atomic_u32(0).unwrap();
    assert_eq!(futex_wait(word, 1, None), Ok(WaitOutcome::Woken));
    assert_eq!(futex_wait(word, 0, Some(Duration::from_millis(1))), Ok(WaitOutcome::TimedOut));
    assert_eq!(futex_wake(word, 1), Ok(0));
}

/// Whether the thread sleeps in the kernel, proc_pid_stat(5).
fn is_asleep(thread: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat")).unwrap();
    stat.rsplit_once(") ").unwrap().1.starts_with('S')
}

#[test]
fn the_largest_count_wakes_every_waiter_at_once() {
    const ROUNDS: u32 = 1000;
    let segment = Segment::create("gdrd-test", 4096).unwrap();
    let word = segment.atomic_u32(0).unwrap();
    let (report, reports) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            let report = report.clone();
            scope.spawn(move || {
                report.send(rustix::thread::gettid().as_raw_nonzero().get()).unwrap();
                while word.load(Ordering::Acquire) == 0 {
                    futex_wait(word, 0, Some(PATIENCE)).unwrap();
                }
            });
        }
        let waiters: Vec<i32> = reports.iter().take(2).collect();
        // A thread is shown asleep an instant before it is in the queue, so one round may miss it.
        let woken = (0..ROUNDS).map(|_| {
            while !waiters.iter().all(|waiter| is_asleep(*waiter)) {
                std::thread::yield_now();
            }
            futex_wake(word, u32::MAX).unwrap()
        });
        let most = woken.take_while(|woken| *woken < 2).count();
        word.store(1, Ordering::Release);
        futex_wake(word, u32::MAX).unwrap();
        assert!(most < ROUNDS as usize, "one call never woke both");
    });
}

#[test]
fn the_floor_is_measured_once_a_round() {
    const ROUNDS: u32 = 200;
    if let Some(segment) = peers_segment() {
        assert_eq!(pingpong::respond(&segment, ROUNDS, PATIENCE), Ok(true));
        return;
    }
    let segment = Segment::create("gdrd-test", pingpong::SEGMENT_LEN_BYTES).unwrap();
    let mut peer = start_peer(&segment, "the_floor_is_measured_once_a_round");
    let times = pingpong::measure(&segment, ROUNDS, PATIENCE).unwrap().expect("the peer answers");
    assert_eq!(times.len(), ROUNDS as usize);
    assert!(peer.wait().unwrap().success());
}

#[test]
fn a_silent_peer_ends_the_measurement() {
    let segment = Segment::create("gdrd-test", pingpong::SEGMENT_LEN_BYTES).unwrap();
    assert_eq!(pingpong::measure(&segment, 1, Duration::ZERO), Ok(None));
    let fresh = Segment::create("gdrd-test", pingpong::SEGMENT_LEN_BYTES).unwrap();
    assert_eq!(pingpong::respond(&fresh, 1, Duration::ZERO), Ok(false));
}
