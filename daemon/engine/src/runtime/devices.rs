//! Events of devices: a thread that sleeps until an HCA has one, and GPU facts when asked for.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv6Addr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use futures_channel::mpsc;
use gdrd_hal::{GpuFact, GpuFacts, GpuHealth, GpuUuid, Hca, HcaEvent, LinkLayer};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::Errno;

use super::{Runtime, lock};
use crate::broker::BrokerEvent;
use crate::core::{GpuIndex, HcaIndex, Host, Input};
use crate::gpu_memory::GpuMemoryUse;
use crate::ids::DeviceNumber;
use crate::pulse::Beat;

use super::executor::Lane;

/// What wakes the thread.
#[derive(Debug)]
pub(super) struct Devices {
    wake: OwnedFd,
    stopping: AtomicBool,
    /// Who wants to know of events.
    watcher: Mutex<Option<mpsc::Sender<()>>>,
    /// Pulses that it has to pass on.
    beats: Mutex<Vec<Beat>>,
    /// Links that went down or came up, by HCA.
    link_changes: Mutex<BTreeMap<String, u64>>,
}

impl Devices {
    pub(super) fn new() -> Result<Self, Errno> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self {
            wake,
            stopping: AtomicBool::new(false),
            watcher: Mutex::default(),
            beats: Mutex::default(),
            link_changes: Mutex::default(),
        })
    }

    pub(super) fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
        self.look_again();
    }

    /// The HCAs are others than before.
    pub(super) fn look_again(&self) {
        // It is private and far from full, so the write neither fails nor blocks.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    /// Sends a sign of life through the thread.
    pub(super) fn pulse(&self, beat: Beat) {
        lock(&self.beats).push(beat);
        self.look_again();
    }

    pub(super) fn tell_watcher(&self) {
        if let Some(watcher) = &mut *lock(&self.watcher) {
            // Full: it will be told, and looks at everything then. Closed: nobody is left to tell.
            let _ = watcher.try_send(());
        }
    }

    fn take_wake(&self) {
        // Empty unless somebody has written since.
        let _ = rustix::io::read(&self.wake, &mut [0; 8]);
    }
}

/// Runs until it is stopped. Makes no wake-up without an event.
pub(super) fn run(runtime: &Arc<Runtime>) {
    let devices = &runtime.devices;
    // A broken fd would wake us without end.
    let mut broken: BTreeSet<HcaIndex> = BTreeSet::new();
    while !devices.stopping.load(Ordering::Acquire) {
        let mut hcas = runtime.hcas.all();
        hcas.retain(|(index, hca)| hca.event_fd().is_some() && !broken.contains(index));
        let mut fds = vec![PollFd::from_borrowed_fd(devices.wake.as_fd(), PollFlags::IN)];
        fds.extend(
            hcas.iter().filter_map(|(_, hca)| hca.event_fd()).map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)),
        );
        match poll(&mut fds, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => {
                tracing::error!(%errno, "events of hcas cannot be waited for");
                return;
            }
        }
        let ready: Vec<PollFlags> = fds.iter().skip(1).map(PollFd::revents).collect();
        drop(fds);
        devices.take_wake();
        lock(&devices.beats).clear();
        for ((index, hca), flags) in hcas.into_iter().zip(ready) {
            if flags.contains(PollFlags::IN) {
                take_events(runtime, index, &*hca);
            }
            if flags.intersects(PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL) {
                broken.insert(index);
            }
        }
    }
}

fn take_events(runtime: &Arc<Runtime>, index: HcaIndex, hca: &dyn Hca) {
    let events = hca.take_events();
    let is_link = |event: &&HcaEvent| matches!(event, HcaEvent::PortDown { .. } | HcaEvent::PortActive { .. });
    let changes = u64::try_from(events.iter().filter(is_link).count()).unwrap_or(u64::MAX);
    if changes > 0 {
        *lock(&runtime.devices.link_changes).entry(hca.name().to_owned()).or_default() += changes;
    }
    if !events.is_empty() {
        runtime.devices.tell_watcher();
    }
    for event in events {
        tracing::info!(hca = hca.name(), ?event, "event of an hca");
        match event {
            HcaEvent::PortDown { port_num } => runtime.input(Input::PortDown { hca: index, port_num }),
            HcaEvent::DeviceFatal => {
                runtime.input(Input::HcaGone { hca: index, message: "device fatal".to_owned() });
            }
            HcaEvent::QueuePairFatal { qp_num } => {
                if let Some(queue_pair) = runtime.objects.queue_pair_numbered(hca.name(), qp_num) {
                    runtime.broker.fail(queue_pair);
                }
            }
            HcaEvent::GidChange { port_num } => fail_without_address(runtime, hca, port_num),
            _ => {}
        }
    }
}

/// Fails the queue pairs whose row of the GID table is theirs no more. The kernel clears such a row in the device at once, and
/// fills it with nothing while a queue pair names it (`del_gid`, drivers/infiniband/core/cache.c): what they send gets nowhere,
/// and one that only waits for its peer would never hear of it. InfiniBand goes by LIDs.
fn fail_without_address(runtime: &Arc<Runtime>, hca: &dyn Hca, port_num: u8) {
    let ports = match hca.ports() {
        Ok(ports) => ports,
        Err(error) => return tracing::warn!(hca = hca.name(), %error, "a changed gid table cannot be read"),
    };
    let Some(port) = ports.into_iter().find(|port| port.port_num == port_num) else { return };
    for (queue_pair, endpoint) in runtime.objects.endpoints_on(hca.name(), port_num) {
        let is_there = port.gids.iter().any(|row| (row.gid_index, row.gid) == (endpoint.gid_index, endpoint.gid));
        let needs_it = endpoint.link_layer == LinkLayer::Ethernet && runtime.state().core.is_connected(queue_pair);
        if is_there || !needs_it {
            continue;
        }
        let (row, address) = (endpoint.gid_index, Ipv6Addr::from(endpoint.gid.0));
        let message = format!(
            "its address {address} has left row {row} of the GID table of {} port {port_num}; make a new queue pair",
            hca.name()
        );
        runtime.input(Input::QueuePairFailed { queue_pair, message });
        runtime.broker.fail(queue_pair);
    }
}

/// What the driver tells of the GPUs; nothing without one or when it cannot be asked.
pub(super) fn facts_of(facts: Option<&dyn GpuFacts>) -> Vec<GpuFact> {
    match facts.map(GpuFacts::gpus) {
        Some(Ok(facts)) => facts,
        Some(Err(error)) => {
            tracing::warn!(%error, "the gpu driver does not tell its gpus");
            Vec::new()
        }
        None => Vec::new(),
    }
}

/// The GPUs by device node; notes in `host` which have one, and which are lost.
pub(super) fn nodes_of(facts: &[GpuFact], host: &mut Host) -> BTreeMap<DeviceNumber, GpuUuid> {
    let mut nodes = BTreeMap::new();
    for fact in facts {
        let Some(gpu) = host.gpu_by_uuid(&fact.uuid).and_then(|index| host.gpu_mut(index)) else { continue };
        if let Some(node) = fact.device_node {
            gpu.has_node = true;
            nodes.insert(DeviceNumber { major: node.major, minor: node.minor }, fact.uuid.clone());
        }
        if let GpuHealth::Lost(reason) = &fact.health {
            gpu.lost = Some(reason.clone());
        }
    }
    nodes
}

impl Runtime {
    /// Events of HCAs from now on.
    pub(crate) fn watch_hcas(&self) -> mpsc::Receiver<()> {
        // The sender's own place is room for one.
        let (sender, receiver) = mpsc::channel(0);
        *lock(&self.devices.watcher) = Some(sender);
        receiver
    }

    pub(crate) fn link_changes(&self) -> BTreeMap<String, u64> {
        lock(&self.devices.link_changes).clone()
    }

    /// Asks the GPU driver again. Blocks on it.
    pub(crate) fn refresh_gpus(self: &Arc<Self>) {
        let _turn = self.drain_turn();
        let facts = facts_of(self.gpu_facts.as_deref());
        // Nothing told is nothing known.
        if !facts.is_empty() {
            self.note_nodes(&facts);
        }
        for fact in facts {
            let index = self.state().core.host().gpu_by_uuid(&fact.uuid);
            let Some(gpu) = index else { continue };
            if self.drains.contains(&fact.uuid) {
                continue;
            }
            match fact.health {
                GpuHealth::Healthy => self.input(Input::GpuHealthy { gpu }),
                GpuHealth::Lost(message) => self.input(Input::GpuLost { gpu, message }),
                _ => {}
            }
        }
    }

    /// Nodes come when a driver is loaded, and may be made again with other numbers.
    fn note_nodes(self: &Arc<Self>, facts: &[GpuFact]) {
        let mut nodes = BTreeMap::new();
        let mut with_node = BTreeSet::new();
        for fact in facts {
            let index = self.state().core.host().gpu_by_uuid(&fact.uuid);
            if let (Some(node), Some(index)) = (fact.device_node, index) {
                nodes.insert(DeviceNumber { major: node.major, minor: node.minor }, fact.uuid.clone());
                with_node.insert(index);
            }
        }
        *lock(&self.nodes) = nodes;
        self.input(Input::GpuNodes { with_node });
    }

    /// Whose the memory of each GPU is. Blocks on the GPU driver.
    pub(crate) fn gpu_memory(&self) -> Vec<GpuMemoryUse> {
        let facts = facts_of(self.gpu_facts.as_deref());
        let state = self.state();
        let gpus = (0..=u16::MAX).map(GpuIndex).map_while(|index| Some((index, state.core.host().gpu(index)?)));
        let told = gpus.map(|(index, gpu)| GpuMemoryUse {
            gpu: gpu.planned.uuid.clone(),
            name: gpu.planned.name.clone(),
            unavailable: gpu.lost.clone(),
            buffers: state.core.buffers_on(index),
            driver: facts.iter().find(|fact| fact.uuid == gpu.planned.uuid).and_then(|fact| fact.memory),
        });
        told.collect()
    }

    /// Called on broker threads: hands over and returns.
    pub(super) fn broker_event(self: &Arc<Self>, event: BrokerEvent) {
        let runtime = Arc::clone(self);
        self.executor.submit(Lane::Unbounded, "note an event", move || match event {
            BrokerEvent::RingCorrupt { id, corrupt } => {
                runtime.input(Input::QueuePairFailed { queue_pair: id, message: format!("ring corrupt: {corrupt}") });
            }
            BrokerEvent::QueuePairFailed { id, status } => {
                let message = format!("a request ended with {status:?}");
                runtime.input(Input::QueuePairFailed { queue_pair: id, message });
            }
            BrokerEvent::CompletionQueueFailed { hca, reason, queue_pairs } => {
                tracing::error!(?hca, %reason, "completion queue failed");
                for queue_pair in queue_pairs {
                    let message = format!("its completion queue failed: {reason}");
                    runtime.input(Input::QueuePairFailed { queue_pair, message });
                }
            }
        });
    }
}
