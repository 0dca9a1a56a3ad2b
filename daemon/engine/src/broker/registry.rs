//! Which queue pairs are attached, to which thread, and who waits for their end. Never touched on the busy path.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::stats::{QueuePairCounters, QueuePairStats};
use crate::ids::QueuePairId;

pub(crate) type Done = Box<dyn FnOnce() + Send>;

struct Attached {
    thread: usize,
    counters: Arc<QueuePairCounters>,
    /// `Some` once detaching has begun.
    waiting: Option<Vec<Done>>,
}

/// What a call to detach has to do.
pub(crate) enum Detach {
    /// Not attached: nothing to wait for.
    Absent(Done),
    /// The first call: this thread must be told.
    Tell(usize),
    /// Under way already.
    Waits,
}

/// All attached queue pairs.
#[derive(Default)]
pub(crate) struct Registry {
    attached: Mutex<BTreeMap<QueuePairId, Attached>>,
}

impl Registry {
    /// Enters a queue pair; false if its id is there already.
    pub(crate) fn enter(&self, id: QueuePairId, thread: usize, counters: Arc<QueuePairCounters>) -> bool {
        let mut attached = self.lock();
        if attached.contains_key(&id) {
            return false;
        }
        attached.insert(id, Attached { thread, counters, waiting: None });
        true
    }

    /// Notes that `done` waits for the end of `id`.
    pub(crate) fn detach(&self, id: QueuePairId, done: Done) -> Detach {
        let mut attached = self.lock();
        let Some(entry) = attached.get_mut(&id) else {
            return Detach::Absent(done);
        };
        match &mut entry.waiting {
            Some(waiting) => {
                waiting.push(done);
                Detach::Waits
            }
            None => {
                entry.waiting = Some(vec![done]);
                Detach::Tell(entry.thread)
            }
        }
    }

    /// The queue pair is gone: whoever waits is told.
    pub(crate) fn ended(&self, id: QueuePairId) {
        let entry = self.lock().remove(&id);
        for done in entry.and_then(|entry| entry.waiting).into_iter().flatten() {
            done();
        }
    }

    /// The thread that serves `id`.
    pub(crate) fn thread_of(&self, id: QueuePairId) -> Option<usize> {
        self.lock().get(&id).map(|entry| entry.thread)
    }

    /// Queue pairs of `thread`.
    pub(crate) fn count(&self, thread: usize) -> usize {
        self.lock().values().filter(|entry| entry.thread == thread).count()
    }

    pub(crate) fn stats(&self) -> Vec<QueuePairStats> {
        self.lock().iter().map(|(id, entry)| entry.counters.read(*id)).collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<QueuePairId, Attached>> {
        // Each change is one call on the map, so a panic elsewhere leaves it whole.
        self.attached.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
