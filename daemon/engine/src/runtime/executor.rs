//! Threads for calls that may block on a driver.
//!
//! Threads are started when work waits and none is idle, up to a bound, and then stay, asleep. Each
//! device has a bound of its own, and one call of each may always run: beyond the bound of all a thread
//! is started for it, which ends once it finds no work. So drivers that hang hold up no other device,
//! however many they are. What nobody waits for runs on threads of lower priority, or every release
//! would compete with the call after it.

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
            self.executor.shared.wake(lock(&self.executor.shared.queue));
        }
    }
}

/// A task that waits.
struct Waiting {
    lane: Lane,
    /// Kind of call, for people.
    what: &'static str,
    task: Task,
}

/// A task that runs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Running {
    pub(crate) lane: Lane,
    pub(crate) what: &'static str,
    pub(crate) began: Instant,
    /// Whether [`Executor::long_calls`] has told of it.
    told: bool,
}

#[derive(Default)]
struct Queue {
    tasks: VecDeque<Waiting>,
    /// By number, in the order of their beginning.
    running: BTreeMap<u64, Running>,
    begun: u64,
    idle: u32,
    threads: u32,
    /// Pulses, which the next thread that looks for work lets go.
    beats: Vec<Beat>,
    stopping: bool,
}

struct Shared {
    queue: Mutex<Queue>,
    work: Condvar,
    most: u32,
    per_device: u32,
    priority: Priority,
    handles: Mutex<Vec<JoinHandle<()>>>,
}

/// The threads.
pub(crate) struct Executor {
    shared: Arc<Shared>,
}

impl Executor {
    pub(crate) fn new(most: u32, per_device: u32, priority: Priority) -> Self {
        let (queue, work, handles) = (Mutex::default(), Condvar::new(), Mutex::default());
        Self { shared: Arc::new(Shared { queue, work, most, per_device, priority, handles }) }
    }

    /// Runs `task`, a call of the kind `what`, on one of the threads, in order of submission as far as its lane allows. After
    /// the end it is dropped.
    pub(crate) fn submit(&self, lane: Lane, what: &'static str, task: impl FnOnce() + Send + 'static) {
        let mut queue = lock(&self.shared.queue);
        if queue.stopping {
            return;
        }
        queue.tasks.push_back(Waiting { lane, what, task: Box::new(task) });
        if WILL_LOOK.get() == self.shared.address() {
            WILL_LOOK.set(0);
            return;
        }
        if HELD_BACK.get() != self.shared.address() {
            self.shared.wake(queue);
        }
    }

    /// Holds back what this thread adds, so that an answer can be written before another thread competes with it.
    pub(crate) fn hold_back(&self) -> HeldBack<'_> {
        HeldBack { executor: self, before: HELD_BACK.replace(self.shared.address()), _stays: PhantomData }
    }

    /// Sends a sign of life through a thread that has nothing to do, or the one that comes for what waits. Where all are in
    /// calls, and what waits does so for calls on its own device, there is nobody to ask: what hangs there are drivers.
    pub(crate) fn pulse(&self, beat: Beat) {
        let mut queue = lock(&self.shared.queue);
        if queue.idle > 0 || self.shared.next(&queue).is_some() {
            queue.beats.push(beat);
            self.shared.wake(queue);
        }
    }

    /// Calls that have taken so long and were not told of yet; and when to ask again, while there are others.
    pub(crate) fn long_calls(&self, long: Duration) -> (Vec<Running>, Option<Instant>) {
        let mut queue = lock(&self.shared.queue);
        let now = Instant::now();
        let mut next = (!queue.tasks.is_empty()).then_some(now + long);
        let mut told = Vec::new();
        for call in queue.running.values_mut().filter(|call| !call.told) {
            let due = call.began + long;
            if due <= now {
                call.told = true;
                told.push(*call);
            } else {
                next = Some(next.map_or(due, |next| next.min(due)));
            }
        }
        (told, next)
    }

    /// Calls that run, in the order of their beginning.
    pub(crate) fn running(&self) -> Vec<Running> {
        lock(&self.shared.queue).running.values().copied().collect()
    }

    /// Threads that there are.
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
            let handles = std::mem::take(&mut *lock(&self.shared.handles));
            join(handles);
        }
    }
}

impl Shared {
    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// Has a thread come for what waits and may begin; when it has taken that, it sees to the next.
    fn wake(self: &Arc<Self>, mut queue: MutexGuard<'_, Queue>) {
        if queue.idle > 0 {
            // After the lock, on which the woken thread would only wait.
            drop(queue);
            return self.work.notify_one();
        }
        let in_calls = u32::try_from(queue.running.len()).unwrap_or(u32::MAX);
        if queue.stopping || queue.threads > in_calls || self.next(&queue).is_none() {
            // Or one has just ended a call, or has yet to begin one.
            return;
        }
        queue.threads += 1;
        let index = queue.threads;
        drop(queue);
        self.start_thread(index);
    }

    fn start_thread(self: &Arc<Self>, index: u32) {
        let shared = Arc::clone(self);
        let class = match self.priority {
            Priority::Normal => "exec",
            Priority::Background => "idle",
        };
        let thread = std::thread::Builder::new().name(format!("gdrd-{class}-{index}")).spawn(move || shared.run());
        match thread {
            Ok(thread) => {
                let mut handles = lock(&self.handles);
                handles.retain(|handle| !handle.is_finished());
                handles.push(thread);
            }
            Err(error) => {
                tracing::error!(%error, "an executor thread could not be started");
                lock(&self.queue).threads -= 1;
            }
        }
    }

    fn run(self: &Arc<Self>) {
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
            let Some((number, task)) = self.take(&mut queue) else {
                if queue.threads > self.most {
                    queue.threads -= 1;
                    return;
                }
                queue.idle += 1;
                queue = self.work.wait(queue).unwrap_or_else(std::sync::PoisonError::into_inner);
                queue.idle -= 1;
                continue;
            };
            if self.next(&queue).is_some() {
                self.wake(queue);
            } else {
                drop(queue);
            }
            WILL_LOOK.set(self.address());
            task();
            WILL_LOOK.set(0);
            queue = lock(&self.queue);
            queue.running.remove(&number);
        }
    }

    /// Place of the first task that may begin: its device has room, and there is room in all, or none runs on its device.
    fn next(&self, queue: &Queue) -> Option<usize> {
        if queue.tasks.is_empty() {
            return None;
        }
        let mut on_lanes = BTreeMap::<Lane, u32>::new();
        queue.running.values().for_each(|call| *on_lanes.entry(call.lane).or_insert(0) += 1);
        let has_room_in_all = queue.running.len() < self.most as usize;
        queue.tasks.iter().position(|waiting| match on_lanes.get(&waiting.lane) {
            None => true,
            Some(running) => has_room_in_all && (waiting.lane == Lane::Unbounded || *running < self.per_device),
        })
    }

    fn take(&self, queue: &mut Queue) -> Option<(u64, Task)> {
        let at = self.next(queue)?;
        let Waiting { lane, what, task } = queue.tasks.remove(at)?;
        queue.begun += 1;
        queue.running.insert(queue.begun, Running { lane, what, began: Instant::now(), told: false });
        Some((queue.begun, task))
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
        executor.submit(slow, "test", move || blocked.recv().unwrap_or_default());
        for index in 0..3 {
            let tell = tell.clone();
            executor.submit(slow, "test", move || tell.send(format!("slow {index}")).unwrap());
        }
        let tell_fast = tell.clone();
        executor.submit(Lane::Gpu(GpuIndex(1)), "test", move || tell_fast.send("fast".to_owned()).unwrap());
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
        executor.submit(Lane::Fabric, "test", move || blocked.recv().unwrap_or_default());
        for index in 0..3 {
            let tell = tell.clone();
            executor.submit(Lane::Fabric, "test", move || tell.send(format!("connection {index}")).unwrap());
        }
        executor.submit(Lane::Hca(HcaIndex(0)), "test", move || tell.send("registration".to_owned()).unwrap());
        assert_eq!(told.recv().unwrap(), "registration");
        unblock.send(()).unwrap();
        assert_eq!(told.iter().count(), 3);
        executor.stop(true);
    }

    /// Tasks of one device that all run, until what comes back is dropped.
    fn hang(executor: &Executor, lane: Lane, tasks: u32) -> Vec<std::sync::mpsc::Sender<()>> {
        let (tell, told) = channel();
        let unblock = (0..tasks).map(|_| {
            let (unblock, blocked) = channel::<()>();
            let tell = tell.clone();
            executor.submit(lane, "hang", move || {
                tell.send(()).unwrap();
                blocked.recv().unwrap_or_default();
            });
            unblock
        });
        let unblock = unblock.collect();
        drop(tell);
        assert_eq!(told.iter().take(tasks as usize).count(), tasks as usize);
        unblock
    }

    #[test]
    fn devices_that_hang_hold_up_no_other_however_many_they_are() {
        let executor = Executor::new(4, 2, Priority::Normal);
        let mut hanging = Vec::new();
        // The third finds no room in all, and has the one call that each device may have.
        for (hca, calls) in [(0, 2), (1, 2), (2, 1)] {
            hanging.push(hang(&executor, Lane::Hca(HcaIndex(hca)), calls));
        }
        let (tell, told) = channel();
        for lane in
            [Lane::Hca(HcaIndex(2)), Lane::Gpu(GpuIndex(0)), Lane::Gpu(GpuIndex(0)), Lane::Host, Lane::Unbounded]
        {
            let tell = tell.clone();
            executor.submit(lane, "test", move || tell.send(lane).unwrap());
        }
        let mut ran: Vec<_> = told.iter().take(4).collect();
        ran.sort_unstable();
        assert_eq!(ran, [Lane::Gpu(GpuIndex(0)), Lane::Gpu(GpuIndex(0)), Lane::Host, Lane::Unbounded]);
        drop(hanging);
        assert_eq!(told.recv().unwrap(), Lane::Hca(HcaIndex(2)));
        while executor.threads() > 4 {
            std::thread::yield_now();
        }
        executor.stop(true);
    }

    #[test]
    fn a_call_that_takes_long_is_told_of_once() {
        let executor = Executor::new(2, 1, Priority::Normal);
        let gpu = Lane::Gpu(GpuIndex(3));
        let hanging = hang(&executor, gpu, 1);
        let (told, again) = executor.long_calls(Duration::from_secs(3600));
        assert!(told.is_empty() && again.is_some(), "it may become one");
        let (told, again) = executor.long_calls(Duration::ZERO);
        assert!(matches!(&told[..], [Running { lane, what: "hang", .. }] if *lane == gpu));
        assert_eq!(again, None);
        assert!(executor.long_calls(Duration::ZERO).0.is_empty());
        assert_eq!(executor.running().len(), 1);
        drop(hanging);
        executor.stop(true);
        assert!(executor.running().is_empty());
    }

    #[test]
    fn a_pulse_waits_for_no_driver() {
        let executor = Executor::new(1, 2, Priority::Normal);
        let pulse = || {
            let (beat, over) = Beat::new();
            executor.pulse(beat);
            over
        };
        let is_over = |over: &mut oneshot::Receiver<()>| over.try_recv() == Ok(Some(()));
        assert!(is_over(&mut pulse()), "nothing runs, and what comes would");
        let hanging = hang(&executor, Lane::Host, 1);
        assert!(is_over(&mut pulse()), "a driver may take its time");
        executor.submit(Lane::Host, "test", || ());
        assert!(is_over(&mut pulse()), "what waits does so for its device");
        drop(hanging);
        let mut at_rest = pulse();
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
        executor.submit(Lane::Host, "test", move || {
            for index in 0..5 {
                let tell = tell.clone();
                inner.submit(Lane::Host, "test", move || tell.send(index).unwrap());
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
                executor.submit(Lane::Host, "test", move || tell.send(index).unwrap());
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
        executor.submit(Lane::Host, "test", move || {
            let being_joined = || inner.shared.handles.try_lock().map_or(true, |handles| handles.is_empty());
            while !lock(&inner.shared.queue).stopping || !being_joined() {
                std::thread::yield_now();
            }
            inner.shared.start_thread(2);
        });
        executor.stop(true);
        assert!(lock(&executor.shared.handles).len() <= 1);
    }

    #[test]
    fn a_task_of_one_executor_wakes_the_threads_of_another() {
        let (normal, background) =
            (Arc::new(Executor::new(1, 1, Priority::Normal)), Executor::new(1, 1, Priority::Background));
        let (tell, told) = channel();
        // The other's thread sleeps by then, or has yet to start: it must be woken either way.
        normal.submit(Lane::Host, "test", || ());
        let inner = Arc::clone(&normal);
        background.submit(Lane::Host, "test", move || inner.submit(Lane::Host, "test", move || tell.send(()).unwrap()));
        told.recv().unwrap();
        background.stop(true);
        normal.stop(true);
    }
}
