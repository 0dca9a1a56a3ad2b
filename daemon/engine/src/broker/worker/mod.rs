//! The loop of one broker thread.

mod idle;

use std::collections::VecDeque;
use std::hint;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gdrd_hal::{HcaError, WorkCompletion};
use gdrd_ring::{Corrupt, Status};

use crate::broker::cold::Job;
use crate::broker::command::{Command, Inbox};
use crate::broker::error::{BrokerError, BrokerEvent};
use crate::broker::hca::{Cq, CqSetup};
use crate::broker::queue_pair::{QueuePair, Scratch};
use crate::broker::registry::Registry;
use crate::broker::schedule::{Schedule, Spent};
use crate::broker::sleep::Sleeper;
use crate::broker::slots::HcaIndex;
use crate::broker::stats::ThreadCounters;
use crate::broker::tag::{MAX_QUEUE_PAIRS, Tag};
use crate::ids::QueuePairId;

/// Completions taken from one completion queue at a time.
const POLL_BATCH: usize = 64;
/// Batches taken from one completion queue before anything else is looked at: more than what is posted in a turn, or
/// the queue would be what shares out the work.
const POLL_BATCHES: usize = 64;
/// Idle turns between two looks at the clock, which costs as much as a turn.
const TURNS_PER_LOOK: u32 = 16;

/// Who is told of events.
pub(crate) type EventSink = Arc<dyn Fn(BrokerEvent) + Send + Sync>;

/// Nanoseconds since the broker's start, the same on all its threads.
pub(crate) type Clock = Arc<dyn Fn() -> u64 + Send + Sync>;

/// What a worker is made with.
pub(crate) struct Setup {
    pub(crate) inbox: Arc<Inbox>,
    pub(crate) registry: Arc<Registry>,
    pub(crate) counters: Arc<ThreadCounters>,
    pub(crate) events: EventSink,
    pub(crate) clock: Clock,
    pub(crate) spin: Duration,
    pub(crate) drain: Duration,
}

/// Something that the busy path met and the rest of the loop deals with.
enum Notice {
    Failed(QueuePairId, Status),
    Corrupt(usize, Corrupt),
    CqFailed(usize, HcaError),
}

/// One broker thread.
pub(crate) struct Worker {
    setup: Setup,
    sleeper: Sleeper,
    queue_pairs: Vec<Option<Box<QueuePair>>>,
    schedule: Schedule,
    /// Places of queue pairs with completions that their clients cannot see yet; empty between polls.
    unpublished: Vec<usize>,
    cqs: Vec<Cq>,
    scratch: Scratch,
    completions: Box<[WorkCompletion]>,
    notices: Vec<Notice>,
    epoch: u16,
    /// Queue pairs may have a drain deadline or may be about to end.
    ending: bool,
    stopped: bool,
}

impl Worker {
    pub(crate) fn new(setup: Setup) -> Result<Self, BrokerError> {
        let sleeper = Sleeper::new()?;
        sleeper
            .watch(&*setup.inbox)
            .map_err(|source| BrokerError::System { call: "epoll_ctl", source: source.into() })?;
        Ok(Self {
            setup,
            sleeper,
            queue_pairs: Vec::new(),
            schedule: Schedule::default(),
            unpublished: Vec::new(),
            cqs: Vec::new(),
            scratch: Scratch::new(),
            completions: vec![WorkCompletion::EMPTY; POLL_BATCH].into(),
            notices: Vec::new(),
            epoch: 0,
            ending: false,
            stopped: false,
        })
    }

    /// Serves until told to stop.
    pub(crate) fn run(mut self) {
        let mut idle_since = Instant::now();
        let mut idle_turns: u32 = 0;
        while !self.stopped {
            if self.turn() {
                idle_turns = 0;
                continue;
            }
            if idle_turns == 0 {
                idle_since = Instant::now();
            }
            idle_turns = idle_turns.wrapping_add(1);
            if !idle_turns.is_multiple_of(TURNS_PER_LOOK) {
                hint::spin_loop();
                continue;
            }
            if idle_since.elapsed() < self.setup.spin {
                self.give_way();
                continue;
            }
            self.fall_asleep();
            idle_turns = 0;
        }
        self.shut_down();
    }

    /// One look at everything; whether there was anything to do.
    pub(crate) fn turn(&mut self) -> bool {
        let commands = self.setup.inbox.take();
        let mut busy = !commands.is_empty();
        self.obey(commands);
        busy |= self.poll();
        busy |= self.serve();
        if !self.notices.is_empty() {
            self.deal_with_notices();
        }
        if self.ending {
            self.end_what_can();
        }
        busy
    }

    /// Takes what has completed, and shows it to the clients.
    fn poll(&mut self) -> bool {
        let mut busy = false;
        for (index, cq) in self.cqs.iter_mut().enumerate() {
            if !cq.is_in_use() {
                continue;
            }
            for _ in 0..POLL_BATCHES {
                let count = match cq.queue.poll(&mut self.completions) {
                    Ok(count) => count,
                    Err(reason) => {
                        cq.share.set_failed();
                        self.notices.push(Notice::CqFailed(index, reason));
                        break;
                    }
                };
                busy |= count > 0;
                for completion in self.completions.iter().take(count) {
                    let notices = &mut self.notices;
                    if let Some(place) = deliver(&mut self.queue_pairs, completion, notices, &self.setup.counters) {
                        self.unpublished.push(place);
                    }
                }
                if count < POLL_BATCH {
                    break;
                }
            }
        }
        for place in self.unpublished.drain(..) {
            if let Some(Some(queue_pair)) = self.queue_pairs.get_mut(place) {
                queue_pair.publish();
            }
        }
        busy
    }

    /// One lap of the schedule.
    fn serve(&mut self) -> bool {
        let Self { schedule, queue_pairs, scratch, notices, setup, .. } = self;
        let lap = schedule.lap(&*setup.clock, |place, allowance| {
            let Some(Some(queue_pair)) = queue_pairs.get_mut(place) else { return Spent::default() };
            let turn = queue_pair.turn(scratch, allowance);
            if let Some(status) = turn.failure {
                notices.push(Notice::Failed(queue_pair.id, status));
            }
            if let Some(corrupt) = turn.corrupt {
                notices.push(Notice::Corrupt(place, corrupt));
            }
            turn.spent
        });
        if lap.throttled > 0 {
            setup.counters.throttled.add(lap.throttled);
        }
        lap.busy
    }

    fn deal_with_notices(&mut self) {
        for notice in std::mem::take(&mut self.notices) {
            match notice {
                Notice::Failed(id, status) => self.fail(id, status),
                Notice::Corrupt(index, corrupt) => self.end_ring(index, corrupt),
                Notice::CqFailed(index, reason) => self.fail_cq(index, reason),
            }
        }
    }

    fn tell(&self, event: BrokerEvent) {
        (self.setup.events)(event);
    }

    /// A queue pair failed by itself: its other half, such as posted receives, must follow to ERR.
    fn fail(&mut self, id: QueuePairId, status: Status) {
        if self.stop(id) {
            self.tell(BrokerEvent::QueuePairFailed { id, status });
        }
    }

    /// Starts the way to ERR; false if it is not here or on its way.
    fn stop(&mut self, id: QueuePairId) -> bool {
        let deadline = Instant::now() + self.setup.drain;
        self.ending = true;
        let inbox = Arc::clone(&self.setup.inbox);
        self.find(id).is_some_and(|queue_pair| queue_pair.stop(deadline, &inbox))
    }

    fn end_ring(&mut self, index: usize, corrupt: Corrupt) {
        let Some(Some(queue_pair)) = self.queue_pairs.get_mut(index) else { return };
        let id = queue_pair.id;
        queue_pair.close_ring();
        self.stop(id);
        self.tell(BrokerEvent::RingCorrupt { id, corrupt });
    }

    /// No completion will come any more: all posted work on the queue ends as fatal, its slots stay
    /// counted until the queue pairs are destroyed.
    fn fail_cq(&mut self, index: usize, reason: HcaError) {
        let Some(cq) = self.cqs.get_mut(index) else { return };
        cq.leaving = true;
        cq.share.set_failed();
        let (hca, share) = (cq.hca, Arc::clone(&cq.share));
        let queue_pairs = self.ids(|queue_pair| Arc::ptr_eq(&queue_pair.reservation.share, &share));
        queue_pairs.iter().for_each(|id| self.strand(*id));
        self.tell(BrokerEvent::CompletionQueueFailed { hca, reason, queue_pairs });
    }

    /// No completion reaches a queue pair any more.
    fn strand(&mut self, id: QueuePairId) {
        self.stop(id);
        if let Some(queue_pair) = self.find(id) {
            queue_pair.abandon(Status::FatalErr);
        }
    }

    /// Ends closing queue pairs that have nothing posted, and gives up what has not flushed in time.
    fn end_what_can(&mut self) {
        let now = Instant::now();
        let mut waiting = false;
        for index in 0..self.queue_pairs.len() {
            let Some(Some(queue_pair)) = self.queue_pairs.get_mut(index) else { continue };
            if queue_pair.drain_deadline().is_some_and(|deadline| deadline <= now) {
                queue_pair.abandon(Status::WrFlushErr);
            }
            if queue_pair.may_end() {
                self.end(index);
            } else if queue_pair.drain_deadline().is_some() {
                waiting = true;
            }
        }
        self.ending = waiting;
    }

    fn end(&mut self, index: usize) {
        let Some(queue_pair) = self.queue_pairs.get_mut(index).and_then(Option::take) else { return };
        self.schedule.leave(index);
        if let Err(reason) = self.sleeper.forget(&queue_pair.doorbell) {
            tracing::error!(queue_pair = %queue_pair.id, %reason, "doorbell was not watched");
        }
        queue_pair.end(Arc::clone(&self.setup.registry));
    }

    fn obey(&mut self, commands: VecDeque<Command>) {
        if commands.is_empty() {
            return;
        }
        for command in commands {
            self.obey_one(command);
        }
        self.drop_unused_cqs();
    }

    fn obey_one(&mut self, command: Command) {
        match command {
            Command::AddCq(setup) => self.add_cq(setup),
            Command::ForgetHca(hca) => self.forget_hca(hca),
            // All commands are followed by that look.
            Command::CqUnused => {}
            Command::Attach(queue_pair) => self.attach(queue_pair),
            Command::Detach(id) => {
                self.stop(id);
                if let Some(queue_pair) = self.find(id) {
                    queue_pair.close();
                }
            }
            Command::Fail(id) => self.fail(id, Status::WrFlushErr),
            Command::FlushUsers(table, slot) => {
                for id in self.ids(|queue_pair| queue_pair.uses(&table, slot.0, false)) {
                    self.fail(id, Status::WrFlushErr);
                }
            }
            Command::ReceiveUsers(table, slot, gather) => {
                for id in self.ids(|queue_pair| queue_pair.uses(&table, slot.0, true)) {
                    gather.add(id);
                }
            }
            Command::Pulse(beat) => drop(beat),
            Command::StopRefused(id) => {
                if let Some(queue_pair) = self.find(id) {
                    queue_pair.abandon(Status::FatalErr);
                    self.ending = true;
                }
            }
            Command::Stop => self.stopped = true,
        }
    }

    fn add_cq(&mut self, setup: CqSetup) {
        let cq = Cq::new(setup);
        if let Some(Err(reason)) = cq.queue.event_fd().map(|fd| self.sleeper.watch(fd)) {
            // It still works, at the pace of a queue without event fd: that is what `timeout` sees.
            tracing::error!(hca = cq.hca.0, %reason, "events of a completion queue cannot be watched");
        }
        self.cqs.push(cq);
    }

    /// Nothing will complete there any more, whatever the driver says of its queues.
    fn forget_hca(&mut self, hca: HcaIndex) {
        for index in 0..self.cqs.len() {
            if self.cqs.get(index).is_some_and(|cq| cq.hca == hca && !cq.leaving) {
                let reason = "the hca was given up".to_owned();
                self.fail_cq(index, HcaError::Gone { hca: format!("hca {}", hca.0), reason });
            }
        }
    }

    fn attach(&mut self, mut queue_pair: Box<QueuePair>) {
        // Completions that a destroyed queue pair left behind must not take the room of the new one's.
        while self.poll() {}
        let free = self.queue_pairs.iter().position(Option::is_none);
        let index = free.unwrap_or(self.queue_pairs.len());
        let Some(place) = u16::try_from(index).ok().filter(|_| index < MAX_QUEUE_PAIRS) else {
            return self.turn_away(queue_pair, "no place for one more queue pair on this thread");
        };
        if self.sleeper.watch(&queue_pair.doorbell).is_err() {
            return self.turn_away(queue_pair, "its doorbell cannot be watched");
        }
        self.epoch = self.epoch.wrapping_add(1);
        queue_pair.tag = Tag::new(place, self.epoch);
        self.schedule.enter(&queue_pair.share, index);
        let (id, share) = (queue_pair.id, Arc::clone(&queue_pair.reservation.share));
        match self.queue_pairs.get_mut(index) {
            Some(slot) => *slot = Some(queue_pair),
            None => self.queue_pairs.push(Some(queue_pair)),
        }
        // So that nothing is allocated while they are served.
        self.notices.reserve(2 * self.queue_pairs.len() + self.cqs.len());
        self.unpublished.reserve(self.queue_pairs.len());
        // A completion queue that failed before has told of those that were on it then.
        if self.cqs.iter().any(|cq| cq.leaving && Arc::ptr_eq(&cq.share, &share)) {
            self.strand(id);
            self.tell(BrokerEvent::QueuePairFailed { id, status: Status::FatalErr });
        }
    }

    /// Ends a queue pair that could not be served; its owner sees it fail.
    fn turn_away(&self, queue_pair: Box<QueuePair>, reason: &str) {
        let id = queue_pair.id;
        tracing::error!(queue_pair = %id, reason, "queue pair cannot be served");
        queue_pair.end(Arc::clone(&self.setup.registry));
        self.tell(BrokerEvent::QueuePairFailed { id, status: Status::GeneralErr });
    }

    fn find(&mut self, id: QueuePairId) -> Option<&mut QueuePair> {
        self.queue_pairs.iter_mut().flatten().find(|queue_pair| queue_pair.id == id).map(|found| &mut **found)
    }

    fn ids(&self, wanted: impl Fn(&QueuePair) -> bool) -> Vec<QueuePairId> {
        self.queue_pairs.iter().flatten().filter(|queue_pair| wanted(queue_pair)).map(|found| found.id).collect()
    }

    fn drop_unused_cqs(&mut self) {
        for index in (0..self.cqs.len()).rev() {
            if self.cqs.get(index).is_some_and(Cq::may_go) {
                let cq = self.cqs.swap_remove(index);
                cq.cold.send(Job::DropCq(cq.queue));
            }
        }
    }

    fn shut_down(mut self) {
        let rest = self.setup.inbox.close();
        self.obey(rest);
        for id in self.ids(|_| true) {
            self.stop(id);
        }
        for index in 0..self.queue_pairs.len() {
            self.end(index);
        }
        for cq in self.cqs {
            cq.cold.send(Job::DropCq(cq.queue));
        }
    }
}

/// Gives a completion to its queue pair; its place, if it now has completions to show.
fn deliver(
    queue_pairs: &mut [Option<Box<QueuePair>>],
    completion: &WorkCompletion,
    notices: &mut Vec<Notice>,
    counters: &ThreadCounters,
) -> Option<usize> {
    let (tag, queue, position) = Tag::decode(completion.wr_id);
    let Some(owner) = queue_pairs.get_mut(tag.index()).and_then(Option::as_mut).filter(|owner| owner.tag == tag) else {
        counters.unexpected.add(1);
        return None;
    };
    let was_staged = owner.staged;
    let mut failure = None;
    if !owner.completed(queue, position, completion, &mut failure) {
        counters.unexpected.add(1);
    }
    if let Some(status) = failure {
        notices.push(Notice::Failed(owner.id, status));
    }
    (owner.staged && !was_staged).then_some(tag.index())
}
