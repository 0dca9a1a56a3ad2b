//! Deadlines of waiting work. The thread starts with the first deadline and sleeps without end while there is none.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Instant;

use crate::sync::lock;

/// Something that wants to be called once a moment has passed.
pub(crate) trait Due: Send + Sync {
    fn due(self: Arc<Self>);
}

struct Deadline {
    at: Instant,
    target: Weak<dyn Due>,
}

impl PartialEq for Deadline {
    fn eq(&self, other: &Self) -> bool {
        self.at == other.at
    }
}

impl Eq for Deadline {}

impl PartialOrd for Deadline {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Deadline {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.at.cmp(&other.at)
    }
}

#[derive(Default)]
struct State {
    deadlines: BinaryHeap<Reverse<Deadline>>,
    thread: Option<JoinHandle<()>>,
    stopped: bool,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

/// Calls targets at their deadlines. Each target keeps at most one deadline here, so the heap is bounded by
/// the number of queue pairs and completion queues.
#[derive(Default)]
pub(crate) struct Timer {
    shared: Arc<Shared>,
}

impl Timer {
    pub(crate) fn schedule(&self, at: Instant, target: Weak<dyn Due>) {
        let mut state = lock(&self.shared.state);
        state.deadlines.push(Reverse(Deadline { at, target }));
        if state.thread.is_none() {
            let shared = Arc::clone(&self.shared);
            let spawned = std::thread::Builder::new().name("sim-timer".to_owned()).spawn(move || run(&shared));
            // Without a thread, deadlines are still met by the next post or poll; the next schedule tries again.
            state.thread = spawned.ok();
        }
        self.shared.changed.notify_one();
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        let thread = {
            let mut state = lock(&self.shared.state);
            state.stopped = true;
            state.deadlines.clear();
            state.thread.take()
        };
        self.shared.changed.notify_one();
        // The last owner of a simulated host may be a target that this very thread just upgraded.
        if let Some(thread) = thread.filter(|thread| thread.thread().id() != std::thread::current().id()) {
            // A panic there has been reported by the panic hook; there is nothing to add.
            let _ = thread.join();
        }
    }
}

fn run(shared: &Shared) {
    let mut state = lock(&shared.state);
    while !state.stopped {
        let now = Instant::now();
        let next = state.deadlines.peek().map(|next| next.0.at);
        state = match next {
            None => shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            Some(at) if at > now => {
                let waited = shared.changed.wait_timeout(state, at - now);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
            Some(_) => {
                let due = state.deadlines.pop();
                drop(state);
                if let Some(target) = due.and_then(|due| due.0.target.upgrade()) {
                    target.due();
                }
                lock(&shared.state)
            }
        };
    }
}
