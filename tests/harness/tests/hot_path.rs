//! What a broker thread must not do while a client is at work, and a client that finds a registration, seen from outside of
//! their processes.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use gdrd_client::{
    AcquireOptions, ClientOptions, LocalSpan, Operation, QueuePair, QueuePairOptions, RemoteSpan, RuntimeDir, Source,
    Status,
};
use gdrd_harness::script::Command;
use gdrd_harness::{Daemon, DaemonOptions, PATIENCE, Puppet, wait_until};
use nix::sys::ptrace;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

/// Long enough that a client which loses its CPU for a while is not taken for an idle one.
const CONFIG: &str = "[broker]\nspin_us = 1000000\n";
/// Of a window. Where client and broker share a CPU with others, each takes milliseconds.
const WRITES: u64 = 2_000;
/// A client that loses its CPU for more than a second lets the broker sleep, which is a system call. One window
/// without any proves that writes need none.
const WINDOWS: u32 = 20;

/// The thread of that name.
fn thread(process: u32, name: &str) -> Pid {
    let tasks = std::fs::read_dir(format!("/proc/{process}/task")).expect("the process runs");
    let is_it =
        |task: &std::path::Path| std::fs::read_to_string(task.join("comm")).is_ok_and(|comm| comm.trim() == name);
    let found = tasks.map(|task| task.expect("readable").path()).find(|task| is_it(task));
    let tid = found.and_then(|task| task.file_name()?.to_str()?.parse().ok());
    Pid::from_raw(tid.expect("the thread is there"))
}

fn write_on(queue_pair: &QueuePair, local: LocalSpan, remote: RemoteSpan) {
    queue_pair.post(0, Operation::Write { source: Source::Local(local), remote, imm: None }).expect("room");
    let completion = queue_pair.poll_busy(PATIENCE).expect("open").expect("a completion comes");
    assert_eq!(completion.status, Status::Success);
}

/// A thread that stops at each of its system calls, for as long as this lives on the thread that made it.
struct Traced(Pid);

impl Traced {
    fn seize(thread: Pid) -> Self {
        ptrace::seize(thread, ptrace::Options::PTRACE_O_TRACESYSGOOD).expect("a child may be traced");
        let traced = Self(thread);
        traced.stop();
        traced.go_on();
        traced
    }

    /// Stops it wherever it is.
    fn stop(&self) {
        ptrace::interrupt(self.0).expect("traced");
        let stopped = waitpid(self.0, Some(WaitPidFlag::__WALL)).expect("traced");
        assert!(!matches!(stopped, WaitStatus::Exited(..) | WaitStatus::Signaled(..)), "{stopped:?}");
    }

    /// On to the next system call.
    fn go_on(&self) {
        ptrace::syscall(self.0, None).expect("stopped");
    }

    /// Whether it has come to a system call; it goes on then.
    fn made_a_call(&self) -> bool {
        let flags = WaitPidFlag::__WALL | WaitPidFlag::WNOHANG;
        match waitpid(self.0, Some(flags)).expect("traced") {
            WaitStatus::StillAlive => false,
            stopped => {
                self.go_on();
                // It stops for what else reaches its process too, a SIGCONT for one.
                matches!(stopped, WaitStatus::PtraceSyscall(_))
            }
        }
    }
}

impl Drop for Traced {
    fn drop(&mut self) {
        // It may have ended by itself.
        if ptrace::interrupt(self.0).is_ok() && waitpid(self.0, Some(WaitPidFlag::__WALL)).is_ok() {
            let _ = ptrace::detach(self.0, None);
        }
    }
}

/// Sets a flag at the end of its scope, also when that is a panic.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Whether a window of so many writes passes without a system call of the thread.
fn quiet_window(traced: &Traced, done: &AtomicU64) -> bool {
    let start = done.load(Ordering::Relaxed);
    let mut quiet = true;
    while done.load(Ordering::Relaxed) < start + WRITES {
        // Goes on to the end of the window in any case, so that the writer is never left waiting.
        quiet &= !traced.made_a_call();
        std::thread::yield_now();
    }
    quiet
}

#[test]
fn a_broker_thread_makes_no_system_call_while_clients_are_at_work() {
    let daemon = DaemonOptions::default().config(CONFIG).start();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("threads");
    let (_session, from, to, sender, receiver) = runtime.block_on(async {
        let dir = RuntimeDir::new(daemon.runtime_dir());
        let client = ClientOptions::default().runtime_dir(dir).connect().await.expect("it serves");
        let session = client.open_session("hot-path").await.expect("allowed");
        let from = session.acquire(AcquireOptions::on_gpu("GPU0", 1 << 20)).await.expect("a buffer");
        let to = session.acquire(AcquireOptions::on_gpu("GPU1", 1 << 20)).await.expect("a buffer");
        let sender = session.create_queue_pair(QueuePairOptions::near_gpu("GPU0")).await.expect("a queue pair");
        let receiver = session.create_queue_pair(QueuePairOptions::near_gpu("GPU1")).await.expect("a queue pair");
        sender.connect(receiver.endpoint()).await.expect("reachable");
        receiver.connect(sender.endpoint()).await.expect("reachable");
        (session, from, to, sender, receiver)
    });
    let local = from.registration(sender.hca()).expect("registered").span(0, 8).expect("in range");
    let remote = to.registration(receiver.hca()).expect("registered").remote().span(0, 8).expect("in range");
    let (stop, done) = (AtomicBool::new(false), AtomicU64::new(0));
    let quiet = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                write_on(&sender, local, remote);
                done.fetch_add(1, Ordering::Relaxed);
            }
        });
        // However this ends: a scope waits for its threads.
        let _stopped = StopOnDrop(&stop);
        // Commands that attached the queue pairs are obeyed by then.
        while done.load(Ordering::Relaxed) < WRITES {
            std::thread::yield_now();
        }
        let traced = Traced::seize(thread(daemon.pid(), "gdrd-broker-0"));
        (0..WINDOWS).any(|_| quiet_window(&traced, &done))
    });
    assert!(quiet, "none of {WINDOWS} windows of {WRITES} writes passed without a system call");
}

#[test]
fn a_cached_registration_is_found_without_a_system_call() {
    const HITS: u64 = 100_000;
    let daemon = Daemon::start();
    let mut puppet = Puppet::connected(&daemon);
    puppet.run(Command::Adopt { memory: "m".into(), size: 1 << 20, gpu: "GPU0".into() });
    let process = puppet.pid();
    let mut found = || puppet.run(Command::Hits { memory: "m".into() }).as_u64().expect("a number");
    // What a thread calls when it starts is over by then.
    wait_until("the thread finds it", || if found() > 0 { Ok(()) } else { Err(()) });
    let traced = Traced::seize(thread(process, "hits"));
    let (end, mut calls) = (found() + HITS, 0);
    wait_until("the thread has found it so often", || {
        calls += u32::from(traced.made_a_call());
        if calls > 0 || found() >= end { Ok(()) } else { Err(()) }
    });
    assert_eq!(calls, 0);
}
