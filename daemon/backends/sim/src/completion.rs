//! Completion queues: bounded, in order, with overrun as a lasting error and an eventfd for sleepers.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use gdrd_hal::{CompletionQueue, CqId, HcaError, WorkCompletion};

use crate::event_fd;
use crate::fault::{Call, Effect};
use crate::hca::HcaCore;
use crate::queue_pair::{Credits, QueuePairCore};
use crate::sync::lock;
use crate::timer::Due;

/// Which slots of its queue pair a completion gives back once it is polled. Work queue slots come back by
/// polling only, as the providers' own tails move (`mlx5_poll_one`, rdma-core providers/mlx5/cq.c).
#[derive(Debug, Clone, Copy)]
pub(crate) enum Frees {
    /// All sends up to this count since creation.
    Sends(u64),
    /// One receive.
    Receive,
}

/// A completion on its way to the poller.
pub(crate) struct Entry {
    pub(crate) completion: WorkCompletion,
    /// The queue pair's place in the list of users.
    pub(crate) slot: usize,
    pub(crate) frees: Frees,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Health {
    Live,
    Overrun,
    DeviceGone,
    Closed,
}

struct State {
    ready: VecDeque<Entry>,
    /// Held back by the fault script, in order, each with the moment it becomes ready.
    delayed: VecDeque<(Instant, Entry)>,
    /// A deadline for the head of `delayed` lies with the timer.
    timed: bool,
    armed: bool,
    signalled: bool,
    health: Health,
    /// Queue pairs that report here. Places are taken again once their queue pair is forgotten.
    users: Vec<Option<User>>,
}

struct User {
    credits: Arc<Credits>,
    queue_pair: Weak<QueuePairCore>,
}

/// A completion queue as queue pairs see it.
pub(crate) struct CqCore {
    pub(crate) id: CqId,
    hca: Arc<HcaCore>,
    depth: usize,
    /// Not 0 when a poll has something to find: entries, or an error.
    interest: AtomicUsize,
    state: Mutex<State>,
    event: OwnedFd,
}

impl CqCore {
    pub(crate) fn new(hca: Arc<HcaCore>, depth: u32, id: CqId) -> std::io::Result<Self> {
        let state = State {
            ready: VecDeque::new(),
            delayed: VecDeque::new(),
            timed: false,
            armed: false,
            signalled: false,
            health: Health::Live,
            users: Vec::new(),
        };
        let depth = usize::try_from(depth).unwrap_or(usize::MAX);
        Ok(Self { id, hca, depth, interest: AtomicUsize::new(0), state: Mutex::new(state), event: event_fd::new()? })
    }

    /// Takes a place for a queue pair that is about to be made.
    pub(crate) fn reserve(&self, credits: Arc<Credits>) -> usize {
        let mut state = lock(&self.state);
        let user = Some(User { credits, queue_pair: Weak::new() });
        match state.users.iter().position(Option::is_none) {
            Some(slot) => {
                state.users[slot] = user;
                slot
            }
            None => {
                state.users.push(user);
                state.users.len() - 1
            }
        }
    }

    /// Names the queue pair of a reserved place, so that an overrun reaches it.
    pub(crate) fn attach(&self, slot: usize, queue_pair: Weak<QueuePairCore>) {
        if let Some(Some(user)) = lock(&self.state).users.get_mut(slot) {
            user.queue_pair = queue_pair;
        }
    }

    /// Takes a completion, or overruns. May be called with work queue locks held: it takes none.
    pub(crate) fn push(self: &Arc<Self>, entry: Entry) {
        let mut state = lock(&self.state);
        if state.health != Health::Live {
            return;
        }
        if state.ready.len() + state.delayed.len() >= self.depth {
            self.overrun(&mut state);
            return;
        }
        match self.hold_back(&state) {
            Some(ready_at) => {
                state.delayed.push_back((ready_at, entry));
                self.time_delayed(&mut state);
            }
            None => {
                state.ready.push_back(entry);
                self.signal(&mut state);
            }
        }
        self.publish_interest(&state);
    }

    /// When the fault script, or an earlier held-back completion, holds the next one back: until when.
    fn hold_back(&self, state: &State) -> Option<Instant> {
        let delay = match self.hca.fabric.faults.on_call(Call::Completion, &self.hca.name) {
            Some(Effect::Delay(delay)) => Some(delay),
            _ => None,
        };
        let last = state.delayed.back().map(|(ready_at, _)| *ready_at);
        if delay.is_none() && last.is_none() {
            return None;
        }
        let own = Instant::now() + delay.unwrap_or(Duration::ZERO);
        Some(last.map_or(own, |last| last.max(own)))
    }

    fn time_delayed(self: &Arc<Self>, state: &mut State) {
        let Some((ready_at, _)) = state.delayed.front() else { return };
        if !state.timed {
            state.timed = true;
            let weak = Arc::downgrade(self);
            self.hca.fabric.timer.schedule(*ready_at, weak);
        }
    }

    fn release_delayed(&self, state: &mut State) {
        if state.delayed.is_empty() {
            return;
        }
        let now = Instant::now();
        while state.delayed.front().is_some_and(|(ready_at, _)| *ready_at <= now) {
            if let Some((_, entry)) = state.delayed.pop_front() {
                state.ready.push_back(entry);
                self.signal(state);
            }
        }
    }

    /// A full queue loses completions, so it is dead for good, and so are the queue pairs that report to it
    /// (IBV_EVENT_CQ_ERR, ibv_get_async_event(3)).
    fn overrun(&self, state: &mut State) {
        state.health = Health::Overrun;
        state.ready.clear();
        state.delayed.clear();
        for user in state.users.iter().flatten() {
            if let Some(queue_pair) = user.queue_pair.upgrade() {
                queue_pair.die_of_completion_queue();
            }
        }
        self.signal(state);
        self.publish_interest(state);
    }

    pub(crate) fn device_gone(&self) {
        let mut state = lock(&self.state);
        if state.health == Health::Live {
            state.health = Health::DeviceGone;
        }
        self.signal(&mut state);
        self.publish_interest(&state);
    }

    fn signal(&self, state: &mut State) {
        if state.armed {
            state.armed = false;
            state.signalled = true;
            event_fd::set(&self.event);
        }
    }

    fn publish_interest(&self, state: &State) {
        let error = usize::from(state.health != Health::Live);
        self.interest.store(state.ready.len() + state.delayed.len() + error, Ordering::Release);
    }

    fn check(&self, state: &State) -> Result<(), HcaError> {
        let reason = match state.health {
            Health::Live | Health::Closed => return Ok(()),
            Health::Overrun => format!("completion queue of {} entries was overrun", self.depth),
            Health::DeviceGone => "the device is fatal".to_owned(),
        };
        Err(HcaError::Gone { hca: self.hca.name.clone(), reason })
    }

    fn poll(&self, out: &mut [WorkCompletion]) -> Result<usize, HcaError> {
        if self.interest.load(Ordering::Acquire) == 0 {
            return Ok(0);
        }
        let mut state = lock(&self.state);
        self.check(&state)?;
        self.release_delayed(&mut state);
        let State { ready, users, .. } = &mut *state;
        let count = ready.len().min(out.len());
        for (to, entry) in out.iter_mut().zip(ready.drain(..count)) {
            if let Some(Some(user)) = users.get(entry.slot) {
                user.credits.give_back(entry.frees);
            }
            *to = entry.completion;
        }
        self.publish_interest(&state);
        Ok(count)
    }

    fn arm(&self) -> Result<(), HcaError> {
        let mut state = lock(&self.state);
        self.check(&state)?;
        if std::mem::take(&mut state.signalled) {
            event_fd::clear(&self.event);
        }
        state.armed = true;
        Ok(())
    }

    /// Forgets what a destroyed queue pair left behind, as `mlx5_cq_clean` does: nobody may poll a completion
    /// of a queue pair that is no more.
    pub(crate) fn forget(&self, slot: usize) {
        let mut state = lock(&self.state);
        state.ready.retain(|entry| entry.slot != slot);
        state.delayed.retain(|(_, entry)| entry.slot != slot);
        if let Some(user) = state.users.get_mut(slot) {
            *user = None;
        }
        self.publish_interest(&state);
    }

    fn close(&self) {
        let mut state = lock(&self.state);
        state.health = Health::Closed;
        state.ready.clear();
        state.delayed.clear();
    }
}

impl Due for CqCore {
    fn due(self: Arc<Self>) {
        let mut state = lock(&self.state);
        state.timed = false;
        self.release_delayed(&mut state);
        self.time_delayed(&mut state);
        self.publish_interest(&state);
    }
}

/// The owner's handle of a completion queue.
pub(crate) struct CqHandle(pub(crate) Arc<CqCore>);

impl CompletionQueue for CqHandle {
    fn id(&self) -> CqId {
        self.0.id
    }

    fn poll(&mut self, out: &mut [WorkCompletion]) -> Result<usize, HcaError> {
        self.0.poll(out)
    }

    fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.0.event.as_fd())
    }

    fn arm(&mut self) -> Result<(), HcaError> {
        self.0.arm()
    }
}

impl Drop for CqHandle {
    fn drop(&mut self) {
        self.0.close();
        self.0.hca.forget_cq(self.0.id);
    }
}
