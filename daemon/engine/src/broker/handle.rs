//! The engine's handle on the broker.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use gdrd_hal::{Hca, QueuePairParts};
use gdrd_ring::{BrokerRing, Geometry};
use rustix::thread::{CpuSet, sched_setaffinity};

use super::cold::{Cold, Job};
use super::command::{Command, Gather, Inbox};
use super::config::{Config, Placement};
use super::error::{BrokerError, BrokerEvent};
use super::hca::HcaShare;
pub use super::hca::Reservation;
use super::landing::FlushLanding;
use super::queue_pair::{Pieces, QueuePair};
use super::registry::{Detach, Registry};
use super::request::QueuePairLimits;
use super::share::Share;
use super::slots::{HcaIndex, SlotTable};
use super::stats::{BrokerStats, QueuePairCounters, ThreadCounters};
use super::worker::{Clock, EventSink, Setup, Worker};
use crate::ids::{QueuePairId, SlotId};
use crate::pulse::Beat;

/// A queue pair for the broker to serve.
pub struct QueuePairSetup {
    /// Its id, unique while it is attached.
    pub id: QueuePairId,
    /// The daemon's side of its ring, with the depths that the queue pair was made with.
    pub ring: BrokerRing,
    /// The eventfd that the client writes to wake the broker; a dup of what the client has. Nonblocking
    /// or not makes no difference here: it is only watched.
    pub doorbell: OwnedFd,
    /// The queue pair, made on [`Reservation::cq`]. The broker destroys it: others keep only a
    /// `Weak` of its control side.
    pub parts: QueuePairParts,
    /// Registration slots of the tenant.
    pub slots: Arc<SlotTable>,
    /// Weight and rates of the tenant, the same for all its queue pairs.
    pub share: Arc<Share>,
    /// What it can carry.
    pub limits: QueuePairLimits,
    /// For flushes, in the queue pair's protection domain; without it they are refused. Let go of once
    /// the queue pair is destroyed.
    pub landing: Option<Arc<FlushLanding>>,
}

impl std::fmt::Debug for QueuePairSetup {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("QueuePairSetup").field("id", &self.id).field("parts", &self.parts).finish_non_exhaustive()
    }
}

struct ThreadHandle {
    inbox: Arc<Inbox>,
    counters: Arc<ThreadCounters>,
    numa_node: Option<u32>,
    /// Reservations made so far, to spread them.
    chosen: AtomicU32,
}

/// The thread that blocks on the driver of one HCA.
struct ColdThread {
    hca: HcaIndex,
    /// `None` once the HCA is forgotten: it ends when the last queue pair has.
    mailbox: Option<Cold>,
    thread: JoinHandle<()>,
}

/// The broker's threads. Shut down when dropped.
pub struct Broker {
    config: Config,
    threads: Vec<ThreadHandle>,
    registry: Arc<Registry>,
    /// `None` for one that was forgotten: its number is never used again.
    hcas: Mutex<BTreeMap<HcaIndex, Option<Arc<HcaShare>>>>,
    workers: Mutex<Vec<JoinHandle<()>>>,
    cold: Mutex<Vec<ColdThread>>,
}

impl std::fmt::Debug for Broker {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Broker").field("config", &self.config).finish_non_exhaustive()
    }
}

impl Broker {
    /// Starts the threads. `events` is called on them and must neither block nor call back.
    ///
    /// # Errors
    /// [`BrokerError::Threads`], [`BrokerError::System`].
    pub fn start(config: Config, events: impl Fn(BrokerEvent) + Send + Sync + 'static) -> Result<Self, BrokerError> {
        let asked = config.threads.len();
        if asked == 0 || asked > Config::MAX_THREADS {
            return Err(BrokerError::Threads { asked, most: Config::MAX_THREADS });
        }
        let mut broker = Self::without_threads(config);
        let started = Instant::now();
        let clock: Clock = Arc::new(move || u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX));
        let events: EventSink = Arc::new(events);
        for (index, placement) in broker.config.threads.clone().into_iter().enumerate() {
            let worker = broker.add_worker(&placement, &events, &clock)?;
            broker.start_thread(index, placement, worker)?;
        }
        Ok(broker)
    }

    /// A broker whose threads do not run: a test takes their turns.
    #[cfg(test)]
    pub(crate) fn by_hand(
        config: Config,
        clock: Clock,
        events: impl Fn(BrokerEvent) + Send + Sync + 'static,
    ) -> Result<(Self, Vec<Worker>), BrokerError> {
        let mut broker = Self::without_threads(config);
        let events: EventSink = Arc::new(events);
        let threads = broker.config.threads.clone();
        let workers: Result<_, _> =
            threads.iter().map(|placement| broker.add_worker(placement, &events, &clock)).collect();
        Ok((broker, workers?))
    }

    fn without_threads(config: Config) -> Self {
        Self {
            threads: Vec::with_capacity(config.threads.len()),
            registry: Arc::default(),
            hcas: Mutex::default(),
            workers: Mutex::default(),
            cold: Mutex::default(),
            config,
        }
    }

    fn add_worker(&mut self, placement: &Placement, events: &EventSink, clock: &Clock) -> Result<Worker, BrokerError> {
        let inbox = Arc::new(Inbox::new()?);
        let counters = Arc::new(ThreadCounters::default());
        let worker = Worker::new(Setup {
            inbox: Arc::clone(&inbox),
            registry: Arc::clone(&self.registry),
            counters: Arc::clone(&counters),
            events: Arc::clone(events),
            clock: Arc::clone(clock),
            spin: self.config.spin,
            drain: self.config.drain,
        })?;
        let numa_node = placement.numa_node;
        self.threads.push(ThreadHandle { inbox, counters, numa_node, chosen: AtomicU32::new(0) });
        Ok(worker)
    }

    fn start_thread(&mut self, index: usize, placement: Placement, worker: Worker) -> Result<(), BrokerError> {
        let thread = std::thread::Builder::new()
            .name(format!("gdrd-broker-{index}"))
            .spawn(move || {
                settle_on(&placement);
                worker.run();
            })
            .map_err(|source| BrokerError::System { call: "spawn", source })?;
        lock(&self.workers).push(thread);
        Ok(())
    }

    /// Room for one queue pair of `depths` on a completion queue of `device`, on the thread nearest to
    /// `numa_node`. The queue pair is then made on [`Reservation::cq`]. May block on the driver.
    ///
    /// # Errors
    /// [`BrokerError::Exhausted`], [`BrokerError::Gone`], [`BrokerError::CompletionQueue`], [`BrokerError::System`],
    /// [`BrokerError::ShutDown`].
    pub fn reserve(
        &self,
        hca: HcaIndex,
        device: &dyn Hca,
        depths: Geometry,
        numa_node: Option<u32>,
    ) -> Result<Reservation, BrokerError> {
        let share = self.share_of(hca, device)?;
        let order = self.by_preference(numa_node);
        let threads: Vec<_> =
            order.into_iter().filter_map(|index| Some((index, &self.threads.get(index)?.inbox))).collect();
        let reservation = share.reserve(device, &threads, entries_of(depths), self.config.cq_entries)?;
        if let Some(thread) = self.threads.get(reservation.share.thread) {
            thread.chosen.fetch_add(1, Ordering::Relaxed);
        }
        Ok(reservation)
    }

    /// Hands a queue pair to its thread, which serves its ring from here on.
    ///
    /// # Errors
    /// [`BrokerError::Depth`], [`BrokerError::Attached`], [`BrokerError::ShutDown`]; the setup is dropped.
    pub fn attach(&self, reservation: Reservation, setup: QueuePairSetup) -> Result<(), BrokerError> {
        let QueuePairSetup { id, ring, doorbell, parts, slots, share, limits, landing } = setup;
        let wanted = entries_of(ring.geometry());
        if wanted > reservation.entries {
            return Err(BrokerError::Depth { id, wanted, reserved: reservation.entries });
        }
        let counters = Arc::new(QueuePairCounters::default());
        let thread = reservation.share.thread;
        if !self.registry.enter(id, thread, Arc::clone(&counters)) {
            return Err(BrokerError::Attached { id });
        }
        let pieces = Pieces { id, ring, doorbell, parts, slots, share, limits, landing, reservation, counters };
        self.send(thread, Command::Attach(Box::new(QueuePair::new(pieces)))).inspect_err(|_| self.registry.ended(id))
    }

    /// Ends a queue pair: it goes to ERR, what it has posted flushes or is given up after
    /// [`Config::drain`], it is destroyed and its ring closed; then `done` is called, on a thread of
    /// the broker, and must not block for long. At once if the queue pair is not attached. Does not block.
    pub fn detach(&self, id: QueuePairId, done: impl FnOnce() + Send + 'static) {
        match self.registry.detach(id, Box::new(done)) {
            Detach::Absent(done) => done(),
            Detach::Waits => {}
            Detach::Tell(thread) => {
                // A thread that has stopped has ended all its queue pairs.
                let _ = self.send(thread, Command::Detach(id));
            }
        }
    }

    /// Moves a queue pair to ERR and keeps it attached: what is posted flushes, what is submitted later
    /// completes as flushed. Nothing if it is not attached. Does not block.
    pub fn fail(&self, id: QueuePairId) {
        if let Some(thread) = self.registry.thread_of(id) {
            // A thread that has stopped has ended all its queue pairs.
            let _ = self.send(thread, Command::Fail(id));
        }
    }

    /// Moves to ERR every queue pair that has work in flight on `slot`, so that a pending
    /// [`SlotTable::quiesce`] ends, within [`Config::drain`] and the driver's time. Does not block.
    pub fn flush_users(&self, table: &Arc<SlotTable>, slot: SlotId) {
        for thread in 0..self.threads.len() {
            // A thread that has stopped has ended all its queue pairs.
            let _ = self.send(thread, Command::FlushUsers(Arc::clone(table), slot));
        }
    }

    /// Names the queue pairs that have receives posted on `slot`, in order of id. `reply` is called on
    /// a broker thread. Ask [`SlotTable::posted_receives`] first: it costs nothing.
    pub fn receive_users(
        &self,
        table: &Arc<SlotTable>,
        slot: SlotId,
        reply: impl FnOnce(Vec<QueuePairId>) + Send + Sync + 'static,
    ) {
        let gather = Gather::new(reply);
        for thread in 0..self.threads.len() {
            // A thread that has stopped has none.
            let _ = self.send(thread, Command::ReceiveUsers(Arc::clone(table), slot, Arc::clone(&gather)));
        }
    }

    /// Lets go of an HCA that went away: what is posted on it ends as fatal. Its queue pairs go to ERR and stay attached
    /// until they are detached; with the last of them its thread ends. Nothing is reserved on it from here on.
    pub fn forget_hca(&self, hca: HcaIndex) {
        let known = lock(&self.hcas).insert(hca, None).flatten();
        if let Some(share) = known {
            share.forget();
            for thread in 0..self.threads.len() {
                // A thread that has stopped has none.
                let _ = self.send(thread, Command::ForgetHca(hca));
            }
            let mut cold = lock(&self.cold);
            cold.retain(|cold| !cold.thread.is_finished());
            cold.iter_mut().filter(|cold| cold.hca == hca).for_each(|cold| cold.mailbox = None);
        }
    }

    /// Sends a sign of life through each thread.
    pub(crate) fn pulse(&self, beat: &Beat) {
        for thread in 0..self.threads.len() {
            // A thread that has stopped does so because all end.
            let _ = self.send(thread, Command::Pulse(beat.clone()));
        }
    }

    /// All counters.
    #[must_use]
    pub fn stats(&self) -> BrokerStats {
        let threads = self.threads.iter().enumerate();
        BrokerStats {
            threads: threads.map(|(index, thread)| thread.counters.read(self.registry.count(index))).collect(),
            queue_pairs: self.registry.stats(),
        }
    }

    /// Ends all queue pairs and joins all threads, or unless `patient` all but those that are in a driver call. Does
    /// nothing the second time.
    pub fn shutdown(&self, patient: bool) {
        for thread in &self.threads {
            // A closed mailbox means that the thread has stopped.
            let _ = thread.inbox.send(Command::Stop);
        }
        let workers = std::mem::take(&mut *lock(&self.workers));
        join(workers.into_iter());
        lock(&self.hcas).clear();
        let cold = std::mem::take(&mut *lock(&self.cold));
        for mailbox in cold.iter().filter_map(|cold| cold.mailbox.as_ref()) {
            mailbox.send(Job::Stop);
        }
        join(cold.into_iter().map(|cold| cold.thread).filter(|thread| patient || thread.is_finished()));
    }

    fn share_of(&self, hca: HcaIndex, device: &dyn Hca) -> Result<Arc<HcaShare>, BrokerError> {
        let mut hcas = lock(&self.hcas);
        if let Some(share) = hcas.get(&hca) {
            return share.clone().ok_or_else(|| BrokerError::Gone { hca: device.name().to_owned() });
        }
        let (cold, thread) = Cold::start(hca)?;
        let share = Arc::new(HcaShare::new(hca, cold.clone(), self.threads.len()));
        lock(&self.cold).push(ColdThread { hca, mailbox: Some(cold), thread });
        hcas.insert(hca, Some(Arc::clone(&share)));
        Ok(share)
    }

    /// Threads, those near `numa_node` first, then those with the fewest reservations.
    fn by_preference(&self, numa_node: Option<u32>) -> Vec<usize> {
        let mut order: Vec<_> = (0..self.threads.len()).collect();
        order.sort_by_key(|index| {
            self.threads.get(*index).map(|thread| {
                let far = numa_node.is_some() && thread.numa_node != numa_node;
                (far, thread.chosen.load(Ordering::Relaxed))
            })
        });
        order
    }

    fn send(&self, thread: usize, command: Command) -> Result<(), BrokerError> {
        let sent = self.threads.get(thread).map(|thread| thread.inbox.send(command));
        sent.and_then(Result::ok).ok_or(BrokerError::ShutDown)
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        self.shutdown(true);
    }
}

fn entries_of(depths: Geometry) -> u32 {
    depths.sq_depth() + depths.rq_depth()
}

fn settle_on(placement: &Placement) {
    if placement.cpus.is_empty() {
        return;
    }
    let mut cpus = CpuSet::new();
    for cpu in placement.cpus.iter().filter(|cpu| **cpu < CpuSet::MAX_CPU) {
        cpus.set(*cpu);
    }
    if let Err(reason) = sched_setaffinity(None, &cpus) {
        tracing::warn!(cpus = ?placement.cpus, %reason, "broker thread runs on any CPU");
    }
}

/// Joins threads but the calling one, which a callback of the broker may be.
fn join(threads: impl Iterator<Item = JoinHandle<()>>) {
    let me = std::thread::current().id();
    for thread in threads.filter(|thread| thread.thread().id() != me) {
        if thread.join().is_err() {
            tracing::error!("a thread of the broker panicked");
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each change is one call on a collection, so a panic elsewhere leaves it whole.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
