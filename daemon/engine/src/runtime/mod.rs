//! The runtime: carries out what the state machine decides, on the objects of `gdrd-hal`.
//!
//! Role: owns the clock, threads, descriptors, hardware objects, secrets and replies. Inputs are
//! applied under one lock; slots are opened and closed and watchers told under that lock too, so
//! that no two threads can swap the order of a publish and a retire; everything else happens after it.
//! What may block on a driver runs on the executor's threads, and comes back as an input.
//!
//! Lock order: `draining`, the state machine, then tables and sessions; only the first is held across a driver call.
//!
//! Must not know: why anything is decided. It never looks at a lease to choose what to do.

mod adoption;
mod calls;
mod devices;
mod direct;
mod domains;
mod drain;
mod drains;
mod executor;
mod failure;
mod hcas;
mod host_memory;
mod jobs;
mod objects;
mod probe;
mod pulse;
mod regions;
mod replies;
mod restart;
mod sessions;
mod timer;
mod view;
mod watch;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread::JoinHandle;

use gdrd_hal::{GpuFacts, GpuMemory};
use rustix::time::{ClockId, clock_gettime};

use crate::broker::{self, Broker, SlotEntry};
use crate::config::EngineConfig;
use crate::core::{AllocationId, Answer, CallId, Core, Effect, Host, Input, Job, Settings, TenantId};
use crate::engine::Hardware;
use crate::error::EngineError;
use crate::ids::{DeviceNumber, Generation, QueuePairId, SlotId};
use crate::keep::Keeper;
use crate::plan::HostPlan;

use devices::Devices;
use direct::Directs;
use drains::Drains;
pub use executor::HeldBack;
use executor::{Executor, Lane, Priority};
use hcas::Hcas;
pub(crate) use host_memory::HostMemory;
use objects::Objects;
pub(crate) use objects::possible;
use replies::Replies;
pub(crate) use replies::{Answered, Replier};
use restart::Keeping;
use sessions::Sessions;
use timer::Timer;
use watch::Watchers;

/// The running engine.
pub(crate) struct Runtime {
    pub(crate) config: EngineConfig,
    core: Mutex<State>,
    /// Told when the state machine has nothing left, while shutting down, after each input while a GPU is drained, and when all leases of an earlier daemon are
    /// registered again.
    empty: Condvar,
    objects: Objects,
    directs: Directs,
    replies: Replies,
    sessions: Sessions,
    executor: Executor,
    /// For what nobody waits for.
    background: Executor,
    timer: Timer,
    devices: Devices,
    broker: Broker,
    gpu_memory: Option<Arc<dyn GpuMemory>>,
    gpu_facts: Option<Arc<dyn GpuFacts>>,
    drains: Drains,
    /// Held while what is drained and what the state machine takes for lost are brought together. Taken before all others,
    /// and held across driver calls.
    draining: Mutex<()>,
    hcas: Hcas,
    /// Held by whoever probes.
    probing: Mutex<()>,
    /// GPUs by device node, as they were when they were last looked at.
    nodes: Mutex<BTreeMap<DeviceNumber, gdrd_hal::GpuUuid>>,
    plan: Mutex<Arc<HostPlan>>,
    /// What outlives this process, where anything does.
    keeping: Option<Keeping>,
    last_call: AtomicU64,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// What the one lock guards.
struct State {
    core: Core,
    watchers: Watchers,
    stopping: bool,
    /// Until the leases of an earlier daemon are registered again.
    restoring: bool,
    /// How many wait for what is under way on GPUs that are drained.
    draining: u32,
}

impl Runtime {
    pub(crate) fn start(
        config: EngineConfig,
        hardware: Hardware,
        keeper: Option<Arc<dyn Keeper>>,
    ) -> Result<Arc<Self>, EngineError> {
        config.validate()?;
        let facts = devices::facts_of(hardware.gpu_facts.as_deref());
        let names: Vec<Arc<str>> = hardware.hcas.iter().map(|hca| Arc::from(hca.name())).collect();
        let memory = hardware.gpu_memory.as_ref();
        let memory = memory.map(|memory| (hardware.gpu_memory_kind, memory.capabilities().granularity_bytes));
        let mut host = Host::new(&names, memory, &hardware.plan);
        let nodes = devices::nodes_of(&facts, &mut host);
        let drains = Drains::read(config.drains.clone());
        drain::note_drained(&drains.all(), &mut host);
        let events = Arc::new(OnceLock::<Weak<Self>>::new());
        let sink = Arc::clone(&events);
        let broker = Broker::start(broker_config(&config), move |event| {
            if let Some(runtime) = sink.get().and_then(Weak::upgrade) {
                runtime.broker_event(event);
            }
        })
        .map_err(|error| internal("start the broker", &error))?;
        let settings = Settings::new(&config);
        let runtime = Arc::new(Self {
            core: Mutex::new(State {
                core: Core::new(if keeper.is_some() { settings.journaling() } else { settings }, host),
                watchers: Watchers::new(&config.limits),
                stopping: false,
                restoring: false,
                draining: 0,
            }),
            empty: Condvar::new(),
            objects: Objects::default(),
            directs: Directs::default(),
            replies: Replies::default(),
            sessions: Sessions::default(),
            executor: Executor::new(config.executor_threads, config.calls_per_device, Priority::Normal),
            background: Executor::new(config.executor_threads, config.calls_per_device, Priority::Background),
            timer: Timer::default(),
            devices: Devices::new().map_err(|error| internal("make an eventfd", &error))?,
            broker,
            gpu_memory: hardware.gpu_memory,
            gpu_facts: hardware.gpu_facts,
            drains,
            draining: Mutex::default(),
            hcas: Hcas::new(hardware.hcas),
            probing: Mutex::default(),
            nodes: Mutex::new(nodes),
            plan: Mutex::new(Arc::new(hardware.plan)),
            keeping: keeper.map(Keeping::new),
            last_call: AtomicU64::new(0),
            threads: Mutex::default(),
            config,
        });
        // Set once, here.
        let _ = events.set(Arc::downgrade(&runtime));
        runtime.let_go_of_drained();
        let timer = spawn("gdrd-timer", Arc::clone(&runtime), timer::run)?;
        let watcher = spawn("gdrd-devices", Arc::clone(&runtime), devices::run)?;
        lock(&runtime.threads).extend([timer, watcher]);
        Ok(runtime)
    }

    /// Applies an input for a call that is answered at once.
    pub(crate) fn ask(self: &Arc<Self>, input: impl FnOnce(CallId) -> Input) -> Result<Answered, EngineError> {
        let call = self.next_call();
        match self.apply(input(call), Some(call), None) {
            Some(answer) => self.answered(answer),
            None => Err(EngineError::Internal { problem: "a call was not answered at once".into() }),
        }
    }

    /// Applies an input for a call that may be answered later: then through `replier`.
    pub(crate) fn ask_later(
        self: &Arc<Self>,
        replier: Replier,
        input: impl FnOnce(CallId) -> Input,
    ) -> (CallId, Option<Result<Answered, EngineError>>) {
        let call = self.next_call();
        let answer = self.apply(input(call), Some(call), Some(replier));
        (call, answer.map(|answer| self.answered(answer)))
    }

    pub(crate) fn hold_back(&self) -> HeldBack<'_> {
        self.background.hold_back()
    }

    fn next_call(&self) -> CallId {
        CallId(self.last_call.fetch_add(1, Ordering::Relaxed) + 1)
    }

    /// Applies an input that nobody waits for.
    pub(crate) fn input(self: &Arc<Self>, input: Input) {
        self.apply(input, None, None);
    }

    /// CLOCK_MONOTONIC, ns: the same for every process of this boot, so that a deadline in the journal means something.
    fn now(&self) -> u64 {
        let now = clock_gettime(ClockId::Monotonic);
        let (seconds, nanos) = (u64::try_from(now.tv_sec), u64::try_from(now.tv_nsec));
        seconds.unwrap_or(0).saturating_mul(1_000_000_000).saturating_add(nanos.unwrap_or(0))
    }

    /// Applies an input and carries out its effects. Returns the answer to `call`, if it is among them; else its
    /// replier is kept for the answer to come.
    fn apply(
        self: &Arc<Self>,
        input: Input,
        call: Option<CallId>,
        replier: Option<Replier>,
    ) -> Option<Result<Answer, EngineError>> {
        let mut effects = Vec::with_capacity(8);
        let awaited = {
            let mut state = self.state();
            state.core.apply(input, self.now(), &mut effects);
            if let (Some(call), Some(replier)) = (call, replier) {
                let answered = effects.iter().any(|e| matches!(e, Effect::Answer { call: c, .. } if *c == call));
                if !answered {
                    // Under the lock: another thread may answer as soon as it is free.
                    self.replies.wait(call, replier);
                }
            }
            effects.retain_mut(|effect| !self.carry_out_locked(&mut state, effect));
            self.timer.set(state.core.next_deadline());
            self.shorten_journal(&state);
            if state.draining > 0
                || (state.stopping && state.core.is_empty())
                || (state.restoring && !state.core.is_remaking())
            {
                self.empty.notify_all();
            }
            state.stopping || state.restoring || state.core.is_awaited()
        };
        let mut answer = None;
        for effect in effects {
            match effect {
                Effect::Answer { call: answered, answer: this } if call == Some(answered) => answer = Some(this),
                effect => self.carry_out(effect, awaited),
            }
        }
        answer
    }

    /// Carries out what must not be swapped with what another thread does; true if the effect was such a one.
    fn carry_out_locked(self: &Arc<Self>, state: &mut State, effect: &mut Effect) -> bool {
        match effect {
            Effect::Record(record) => self.write_down(record),
            Effect::CreateTenant { tenant } => {
                self.objects.create_tenant(*tenant, self.config.slots());
            }
            Effect::Publish { tenant, allocation, slots } => self.publish(*tenant, *allocation, slots),
            Effect::PublishRegion { tenant, region, slot, generation } => {
                self.publish_region(*tenant, *region, *slot, *generation);
            }
            Effect::Retire { tenant, slots } => self.retire(*tenant, slots),
            Effect::Tell { tenant, change } => {
                let State { core, watchers, .. } = state;
                watchers.tell(core, &self.objects, *tenant, change);
                let watched = watchers.is_watched();
                if !watched {
                    core.apply(Input::Watched { watched }, 0, &mut Vec::new());
                }
            }
            Effect::NicDown { hca, port_num } => state.watchers.nic_down(hca, *port_num),
            Effect::TellSession { session, event } => self.sessions.tell(*session, event),
            Effect::MemoryGone { session, allocation } => self.sessions.tell_memory_gone(*session, allocation.0),
            Effect::SessionGone { session } => {
                self.sessions.remove(*session);
                self.end_directs_of(*session);
            }
            _ => return false,
        }
        true
    }

    /// `awaited`: whether some call may wait for what is started here.
    fn carry_out(self: &Arc<Self>, effect: Effect, awaited: bool) {
        match effect {
            Effect::Answer { call, answer } => {
                self.replies.answer(call, self.answered(answer));
            }
            Effect::DropTenant { tenant } => {
                // Its protection domains end with it, and that may block on the driver.
                let gone = self.objects.remove_tenant(tenant);
                self.submit(&self.background, Lane::Unbounded, "end protection domains", move || drop(gone));
            }
            Effect::Unkeep { name } => self.unkeep(name),
            Effect::Quiesce { tenant, allocation, slots } => {
                self.quiesce(tenant, &slots, Input::Quiesced { allocation });
            }
            Effect::QuiesceRegion { tenant, region, slot } => {
                self.quiesce(tenant, &[slot], Input::RegionQuiesced { region });
            }
            Effect::Shed { tenant, allocation, hca, slot } => {
                let memory = self.objects.memory(allocation);
                let region = memory.and_then(|memory| memory.take_region(hca, slot));
                let runtime = Arc::clone(self);
                self.submit(&self.executor, Lane::Hca(hca), "deregister", move || {
                    drop(region);
                    runtime.quiesce(tenant, &[slot], Input::Shed { tenant, slot });
                });
            }
            Effect::ForgetHca { hca } => {
                self.end_directs_on(hca);
                self.forget_hca(hca);
            }
            Effect::FlushUsers { tenant, slots } => {
                if let Some(tenant) = self.objects.tenant(tenant) {
                    slots.iter().for_each(|slot| self.broker.flush_users(&tenant.slots, *slot));
                }
            }
            Effect::Start(Job::DestroyQueuePair { queue_pair }) => self.destroy_queue_pair(queue_pair),
            Effect::Start(job) => self.start_job(job, awaited),
            // Carried out under the lock.
            Effect::Record(_)
            | Effect::CreateTenant { .. }
            | Effect::Publish { .. }
            | Effect::PublishRegion { .. }
            | Effect::Retire { .. }
            | Effect::Tell { .. }
            | Effect::NicDown { .. }
            | Effect::TellSession { .. }
            | Effect::MemoryGone { .. }
            | Effect::SessionGone { .. } => {}
        }
    }

    fn start_job(self: &Arc<Self>, job: Job, awaited: bool) {
        let runtime = Arc::clone(self);
        let is_call =
            matches!(job, Job::CreateQueuePair { .. } | Job::ConnectQueuePair { .. } | Job::RegisterRegion { .. });
        let executor = if awaited || is_call { &self.executor } else { &self.background };
        self.submit(executor, jobs::lane_of(&job, &self.objects), jobs::name_of(&job), move || {
            let result = jobs::run(&runtime, job);
            runtime.input(result);
        });
    }

    /// Opens the allocation's slots for requests.
    fn publish(&self, tenant: TenantId, allocation: AllocationId, slots: &[(SlotId, Generation)]) {
        let (Some(tenant), Some(memory)) = (self.objects.tenant(tenant), self.objects.memory(allocation)) else {
            return;
        };
        for (slot, generation) in slots {
            let Some((hca, entry)) = memory.slot_entry(*slot) else { continue };
            let entry = SlotEntry { hca, ..entry };
            let published = tenant.slots.publish(*slot, entry);
            let shown = tenant.page.set(slot.0, generation.0);
            if published.as_ref().ok() != Some(generation) || shown.is_err() {
                tracing::error!(%slot, %generation, ?published, ?shown, "slot was not published as decided");
            }
        }
    }

    /// Closes slots. The page follows: who reads an old number there is still refused by the table.
    fn retire(&self, tenant: TenantId, slots: &[(SlotId, Generation)]) {
        let Some(tenant) = self.objects.tenant(tenant) else { return };
        for (slot, generation) in slots {
            let retired = tenant.slots.retire(*slot);
            let shown = tenant.page.set(slot.0, generation.0);
            if retired.as_ref().ok() != Some(generation) || shown.is_err() {
                tracing::error!(%slot, %generation, ?retired, ?shown, "slot was not retired as decided");
            }
        }
    }

    /// Applies `then` once the slots are quiet: at once if they are.
    fn quiesce(self: &Arc<Self>, tenant: TenantId, slots: &[SlotId], then: Input) {
        let Some(tenant) = self.objects.tenant(tenant) else { return self.input(then) };
        // One more than slots, for this thread: whoever comes last goes on.
        let left = Arc::new(AtomicUsize::new(slots.len() + 1));
        for slot in slots {
            let (runtime, counted, then) = (Arc::clone(self), Arc::clone(&left), then.clone());
            let done = move || {
                if counted.fetch_sub(1, Ordering::AcqRel) == 1 {
                    // On a broker thread, which must not wait for our lock.
                    let told = Arc::clone(&runtime);
                    runtime.executor.submit(Lane::Unbounded, "note the end of requests", move || told.input(then));
                }
            };
            if let Err(error) = tenant.slots.quiesce(*slot, done) {
                tracing::error!(%slot, %error, "slot cannot be waited for");
                left.fetch_sub(1, Ordering::AcqRel);
            }
        }
        if left.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.input(then);
        }
    }

    fn destroy_queue_pair(self: &Arc<Self>, queue_pair: QueuePairId) {
        self.objects.remove_queue_pair(queue_pair);
        let runtime = Arc::clone(self);
        self.broker.detach(queue_pair, move || {
            let told = Arc::clone(&runtime);
            let told = move || told.input(Input::QueuePairDestroyed { queue_pair });
            runtime.executor.submit(Lane::Unbounded, "note the end of a queue pair", told);
        });
    }

    /// Ends everything and joins all threads but those that hang in a driver call.
    pub(crate) fn shutdown(self: &Arc<Self>) {
        {
            let mut state = self.state();
            if std::mem::replace(&mut state.stopping, true) {
                return;
            }
        }
        self.input(Input::Shutdown);
        let within = self.config.timeouts.shutdown;
        let state = self.state();
        let waited = self.empty.wait_timeout_while(state, within, |state| !state.core.is_empty());
        let (mut state, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        state.watchers.end();
        drop(state);
        if timeout.timed_out() {
            tracing::warn!(?within, "not everything was given back in time; the kernel does the rest at exit");
        }
        self.broker.shutdown(!timeout.timed_out());
        self.timer.stop();
        self.devices.stop();
        self.replies.end();
        let threads = std::mem::take(&mut *lock(&self.threads));
        executor::join(threads);
        self.executor.stop(!timeout.timed_out());
        self.background.stop(!timeout.timed_out());
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.core)
    }
}

/// A mutex whose data stays whole when a holder panics: each change is complete before anything can panic, or the
/// panic itself is the bug to be seen.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn spawn(
    name: &str,
    runtime: Arc<Runtime>,
    run: impl FnOnce(&Arc<Runtime>) + Send + 'static,
) -> Result<JoinHandle<()>, EngineError> {
    let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || run(&runtime));
    thread.map_err(|error| internal("start a thread", &error))
}

fn internal(what: &str, error: &dyn std::fmt::Display) -> EngineError {
    EngineError::Internal { problem: format!("{what}: {error}") }
}

fn broker_config(config: &EngineConfig) -> broker::Config {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = match config.broker.threads {
        0 => broker::Config::threads_for(cpus),
        threads => threads as usize,
    };
    broker::Config {
        threads: broker::Placement::near(&config.broker.nodes, threads),
        spin: config.broker.spin,
        drain: config.timeouts.drain,
        ..broker::Config::default()
    }
}
