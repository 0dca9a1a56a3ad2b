//! Threads for calls that may block on a driver.
//!
//! Threads are started when work waits and none is idle, up to a bound, and then stay, asleep. Each
//! device has a bound of its own, so that one slow driver cannot take all threads. What nobody waits
//! for runs on threads of lower priority, or every release would compete with the call after it.

use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::marker::PhantomData;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::lock;
use crate::core::{GpuIndex, HcaIndex};
use crate::pulse::Beat;

/// What a task may block on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Lane {
    Gpu(GpuIndex),
    Hca(HcaIndex),
    Host,
    /// The fabric: on RoCE a connection first finds out who is at an address, or that nobody is, which takes seconds.
    Fabric,
    /// Nothing that blocks for long.
    Unbounded,
}

type Task = Box<dyn FnOnce() + Send>;

/// Nice value of threads for work that nobody waits for.
const BACKGROUND_NICE: i32 = 10;

/// How much a task's threads compete with others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Priority {
    Normal,
    Background,
}

thread_local! {
    /// On a thread of the executor whose `Shared` is at this address: it will look for work when its task ends, so
    /// the first task that it adds there needs no other thread to be woken. 0 elsewhere, or once that is used.
    static WILL_LOOK: Cell<usize> = const { Cell::new(0) };

    /// Address of the `Shared` for which this thread adds work without waking anybody; 0 for none.
    static HELD_BACK: Cell<usize> = const { Cell::new(0) };
}

/// While it lives, what its thread adds to the executor stays where it is, unless some thread comes by; threads are woken
/// for it when this is dropped.
#[must_use = "it holds work back only while it lives"]
pub struct HeldBack<'a> {
    executor: &'a Executor,
    before: usize,
    /// It is about one thread.
    _stays: PhantomData<*const ()>,
}

impl fmt::Debug for HeldBack<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("HeldBack").finish_non_exhaustive()
    }
}

impl Drop for HeldBack<'_> {
    fn drop(&mut self) {
        HELD_BACK.set(self.before);
        if self.before != self.executor.shared.address() {
            self.executor.wake();
        }
    }
}

#[derive(Default)]
struct Queue {
    tasks: VecDeque<(Lane, Task)>,
    running: BTreeMap<Lane, u32>,
    idle: u32,
    threads: u32,
    /// When the last task began.
    last_began: Option<Instant>,
    /// Pulses, which the next thread that looks for work lets go.
    beats: Vec<Beat>,
    stopping: bool,
}

struct Shared {
    queue: Mutex<Queue>,
    work: Condvar,
    per_device: u32,
    priority: Priority,
}

/// The threads.
pub(crate) struct Executor {
    shared: Arc<Shared>,
    most: u32,
    handles: Mutex<Vec<JoinHandle<()>>>,
}

impl Executor {
    pub(crate) fn new(most: u32, per_device: u32, priority: Priority) -> Self {
        let shared = Shared { queue: Mutex::default(), work: Condvar::new(), per_device, priority };
        Self { shared: Arc::new(shared), most, handles: Mutex::default() }
    }

    /// Runs `task` on one of the threads, in order of submission as far as its lane allows. After the end it is
    /// dropped.
    pub(crate) fn submit(&self, lane: Lane, task: impl FnOnce() + Send + 'static) {
        let mut queue = lock(&self.shared.queue);
        if queue.stopping {
            return;
        }
        queue.tasks.push_back((lane, Box::new(task)));
        if WILL_LOOK.get() == self.shared.address() {
            WILL_LOOK.set(0);
            return;
        }
        if HELD_BACK.get() != self.shared.address() {
            self.wake_for(queue, 1);
        }
    }

    /// Holds back what this thread adds, so that an answer can be written before another thread competes with it.
    pub(crate) fn hold_back(&self) -> HeldBack<'_> {
        HeldBack { executor: self, before: HELD_BACK.replace(self.shared.address()), _stays: PhantomData }
    }

    /// Sees to it that what waits is worked on.
    fn wake(&self) {
        let queue = lock(&self.shared.queue);
        let waiting = queue.tasks.len();
        if waiting > 0 && !queue.stopping {
            self.wake_for(queue, waiting);
        }
    }

    /// One idle thread wakes the next where there is more for it; new threads are started for as many tasks.
    fn wake_for(&self, mut queue: MutexGuard<'_, Queue>, tasks: usize) {
        if queue.idle > 0 {
            // After the lock, on which the woken thread would only wait.
            drop(queue);
            return self.shared.work.notify_one();
        }
        let first = queue.threads + 1;
        let more = u32::try_from(tasks).unwrap_or(u32::MAX).min(self.most - queue.threads);
        queue.threads += more;
        drop(queue);
        (first..first + more).for_each(|index| self.start_thread(index));
    }

    fn start_thread(&self, index: u32) {
        let shared = Arc::clone(&self.shared);
        let class = match shared.priority {
            Priority::Normal => "exec",
            Priority::Background => "idle",
        };
        let thread = std::thread::Builder::new().name(format!("gdrd-{class}-{index}")).spawn(move || shared.run());
        match thread {
            Ok(thread) => lock(&self.handles).push(thread),
            Err(error) => {
                tracing::error!(%error, "an executor thread could not be started");
                lock(&self.shared.queue).threads -= 1;
            }
        }
    }

    /// Sends a sign of life through a thread that has nothing to do. Where there is none but room for one more, the next task
    /// starts it. Where all are in calls, the next that ends one must come within `longest_call` of the last beginning.
    pub(crate) fn pulse(&self, beat: Beat, longest_call: Duration) {
        let mut queue = lock(&self.shared.queue);
        let may_be_at_work = queue.last_began.is_some_and(|began| began.elapsed() < longest_call);
        if queue.idle == 0 && (queue.threads < self.most || may_be_at_work) {
            return;
        }
        queue.beats.push(beat);
        drop(queue);
        self.shared.work.notify_one();
    }

    /// Threads started so far.
    pub(crate) fn threads(&self) -> u32 {
        lock(&self.shared.queue).threads
    }

    /// Drops what waits and ends the threads; waits for them if `joined`.
    pub(crate) fn stop(&self, joined: bool) {
        let dropped = {
            let mut queue = lock(&self.shared.queue);
            queue.stopping = true;
            std::mem::take(&mut queue.tasks)
        };
        drop(dropped);
        self.shared.work.notify_all();
        if joined {
            // Taken first: a thread that is joined may be starting one more, and needs the list for it.
            let handles = std::mem::take(&mut *lock(&self.handles));
            join(handles);
        }
    }
}

impl Shared {
    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    fn run(&self) {
        if self.priority == Priority::Background
            // `None` is the calling thread, setpriority(2) "C library/kernel differences".
            && let Err(errno) = rustix::process::setpriority_process(None, BACKGROUND_NICE)
        {
            tracing::debug!(%errno, "background work runs at normal priority");
        }
        let mut queue = lock(&self.queue);
        loop {
            if queue.stopping {
                return;
            }
            queue.beats.clear();
            let Some((lane, task)) = self.take(&mut queue) else {
                queue.idle += 1;
                queue = self.work.wait(queue).unwrap_or_else(std::sync::PoisonError::into_inner);
                queue.idle -= 1;
                continue;
            };
            let more = queue.idle > 0 && self.next(&queue).is_some();
            drop(queue);
            if more {
                self.work.notify_one();
            }
            WILL_LOOK.set(self.address());
            task();
            WILL_LOOK.set(0);
            queue = lock(&self.queue);
            if let Some(running) = queue.running.get_mut(&lane) {
                *running -= 1;
            }
        }
    }

    /// Place of the first task whose device has room.
    fn next(&self, queue: &Queue) -> Option<usize> {
        let has_room = |lane: &Lane| {
            *lane == Lane::Unbounded || queue.running.get(lane).is_none_or(|running| *running < self.per_device)
        };
        queue.tasks.iter().position(|(lane, _)| has_room(lane))
    }

    fn take(&self, queue: &mut Queue) -> Option<(Lane, Task)> {
        let at = self.next(queue)?;
        let (lane, task) = queue.tasks.remove(at)?;
        *queue.running.entry(lane).or_insert(0) += 1;
        queue.last_began = Some(Instant::now());
        Some((lane, task))
    }
}

/// Joins threads but the calling one.
pub(super) fn join(threads: Vec<JoinHandle<()>>) {
    let me = std::thread::current().id();
    for thread in threads.into_iter().filter(|thread| thread.thread().id() != me) {
        if thread.join().is_err() {
            tracing::error!("a thread of the engine panicked");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use futures_channel::oneshot;

    use super::*;

    #[test]
    fn a_device_that_blocks_does_not_hold_up_another() {
        let executor = Executor::new(3, 1, Priority::Normal);
        let (unblock, blocked) = channel::<()>();
        let (tell, told) = channel();
        let slow = Lane::Gpu(GpuIndex(0));
        executor.submit(slow, move || blocked.recv().unwrap_or_default());
        for index in 0..3 {
            let tell = tell.clone();
            executor.submit(slow, move || tell.send(format!("slow {index}")).unwrap());
        }
        let tell_fast = tell.clone();
        executor.submit(Lane::Gpu(GpuIndex(1)), move || tell_fast.send("fast".to_owned()).unwrap());
        assert_eq!(told.recv().unwrap(), "fast");
        unblock.send(()).unwrap();
        let rest: Vec<_> = told.iter().take(3).collect();
        assert_eq!(rest, ["slow 0", "slow 1", "slow 2"]);
        executor.stop(true);
    }

    #[test]
    fn connections_that_hang_leave_threads_for_others() {
        let executor = Executor::new(2, 1, Priority::Normal);
        let (unblock, blocked) = channel::<()>();
        let (tell, told) = channel();
        executor.submit(Lane::Fabric, move || blocked.recv().unwrap_or_default());
        for index in 0..3 {
            let tell = tell.clone();
            executor.submit(Lane::Fabric, move || tell.send(format!("connection {index}")).unwrap());
        }
        executor.submit(Lane::Hca(HcaIndex(0)), move || tell.send("registration".to_owned()).unwrap());
        assert_eq!(told.recv().unwrap(), "registration");
        unblock.send(()).unwrap();
        assert_eq!(told.iter().count(), 3);
        executor.stop(true);
    }

    #[test]
    fn a_pulse_waits_for_threads_that_hang_and_not_for_those_that_may_be_at_work() {
        let executor = Executor::new(1, 1, Priority::Normal);
        let pulse = |longest_call| {
            let (beat, over) = Beat::new();
            executor.pulse(beat, longest_call);
            over
        };
        let is_over = |over: &mut oneshot::Receiver<()>| over.try_recv() == Ok(Some(()));
        assert!(is_over(&mut pulse(Duration::ZERO)), "nothing runs, and what comes would");
        let (unblock, blocked) = channel::<()>();
        let (tell, told) = channel();
        executor.submit(Lane::Host, move || {
            tell.send(()).unwrap();
            blocked.recv().unwrap_or_default();
        });
        told.recv().unwrap();
        assert!(is_over(&mut pulse(Duration::MAX)), "a driver may take its time");
        let mut hangs = pulse(Duration::ZERO);
        for _ in 0..100 {
            std::thread::yield_now();
            assert!(!is_over(&mut hangs), "no thread has come by");
        }
        unblock.send(()).unwrap();
        while !is_over(&mut hangs) {
            std::thread::yield_now();
        }
        // Asleep by now or soon: it is woken for it.
        let mut at_rest = pulse(Duration::ZERO);
        while !is_over(&mut at_rest) {
            std::thread::yield_now();
        }
        executor.stop(true);
    }

    #[test]
    fn tasks_added_by_tasks_all_run() {
        let executor = Arc::new(Executor::new(2, 1, Priority::Background));
        let (tell, told) = channel();
        let inner = Arc::clone(&executor);
        executor.submit(Lane::Host, move || {
            for index in 0..5 {
                let tell = tell.clone();
                inner.submit(Lane::Host, move || tell.send(index).unwrap());
            }
        });
        assert_eq!(told.iter().take(5).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
        executor.stop(true);
    }

    #[test]
    fn tasks_held_back_all_run_once_they_are_let_go() {
        let executor = Executor::new(2, 2, Priority::Background);
        let (tell, told) = channel();
        for round in 0..2 {
            let held_back = executor.hold_back();
            let inner = executor.hold_back();
            for index in 0..3 {
                let tell = tell.clone();
                executor.submit(Lane::Host, move || tell.send(index).unwrap());
            }
            if round == 0 {
                assert!(told.try_recv().is_err(), "no thread runs yet, and none was started");
            }
            drop(inner);
            drop(held_back);
            let mut ran: Vec<_> = told.iter().take(3).collect();
            ran.sort_unstable();
            assert_eq!(ran, [0, 1, 2]);
        }
        executor.stop(true);
    }

    #[test]
    fn a_thread_that_starts_another_during_the_end_is_joined() {
        let executor = Arc::new(Executor::new(1, 1, Priority::Normal));
        let inner = Arc::clone(&executor);
        executor.submit(Lane::Host, move || {
            let being_joined = || inner.handles.try_lock().map_or(true, |handles| handles.is_empty());
            while !lock(&inner.shared.queue).stopping || !being_joined() {
                std::thread::yield_now();
            }
            inner.start_thread(2);
        });
        executor.stop(true);
        assert!(lock(&executor.handles).len() <= 1);
    }

    #[test]
    fn a_task_of_one_executor_wakes_the_threads_of_another() {
        let (normal, background) =
            (Arc::new(Executor::new(1, 1, Priority::Normal)), Executor::new(1, 1, Priority::Background));
        let (tell, told) = channel();
        // The other's thread sleeps by then, or has yet to start: it must be woken either way.
        normal.submit(Lane::Host, || ());
        let inner = Arc::clone(&normal);
        background.submit(Lane::Host, move || inner.submit(Lane::Host, move || tell.send(()).unwrap()));
        told.recv().unwrap();
        background.stop(true);
        normal.stop(true);
    }
}
