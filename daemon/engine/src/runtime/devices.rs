//! Events of devices: a thread that sleeps until an HCA has one, and GPU facts when asked for.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use gdrd_hal::{GpuFact, GpuFacts, GpuHealth, GpuUuid, HcaEvent};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::Errno;

use super::{Runtime, lock};
use crate::broker::BrokerEvent;
use crate::core::{GpuIndex, HcaIndex, Host, Input};
use crate::gpu_memory::GpuMemoryUse;
use crate::ids::DeviceNumber;

use super::executor::Lane;

/// What wakes the thread to stop.
#[derive(Debug)]
pub(super) struct Devices {
    stop: OwnedFd,
    stopping: AtomicBool,
}

impl Devices {
    pub(super) fn new() -> Result<Self, Errno> {
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { stop, stopping: AtomicBool::new(false) })
    }

    pub(super) fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
        // It is private and empty, so the write neither fails nor blocks.
        let _ = rustix::io::write(&self.stop, &1_u64.to_ne_bytes());
    }
}

/// Runs until it is stopped. Makes no wake-up without an event.
pub(super) fn run(runtime: &Arc<Runtime>) {
    let devices = &runtime.devices;
    let mut watched: Vec<(HcaIndex, usize)> = (0..runtime.hcas.len())
        .filter_map(|at| u16::try_from(at).ok().map(|index| (HcaIndex(index), at)))
        .filter(|(_, at)| runtime.hcas.get(*at).is_some_and(|hca| hca.event_fd().is_some()))
        .collect();
    while !devices.stopping.load(Ordering::Acquire) {
        let mut fds = vec![PollFd::from_borrowed_fd(devices.stop.as_fd(), PollFlags::IN)];
        let ready_fds = watched.iter().filter_map(|(_, at)| runtime.hcas.get(*at).and_then(|hca| hca.event_fd()));
        fds.extend(ready_fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        match poll(&mut fds, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => {
                tracing::error!(%errno, "events of hcas cannot be waited for");
                return;
            }
        }
        let ready: Vec<PollFlags> = fds.iter().skip(1).map(PollFd::revents).collect();
        drop(fds);
        let mut ready = ready.into_iter();
        watched.retain(|(index, at)| {
            let flags = ready.next().unwrap_or(PollFlags::empty());
            if flags.contains(PollFlags::IN) {
                take_events(runtime, *index, *at);
            }
            // A broken fd would wake us without end.
            !flags.intersects(PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL)
        });
    }
}

fn take_events(runtime: &Arc<Runtime>, index: HcaIndex, at: usize) {
    let Some(hca) = runtime.hcas.get(at) else { return };
    for event in hca.take_events() {
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
            _ => {}
        }
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
    /// Asks the GPU driver again. Blocks on it.
    pub(crate) fn refresh_gpus(self: &Arc<Self>) {
        for fact in facts_of(self.gpu_facts.as_deref()) {
            let index = self.state().core.host().gpu_by_uuid(&fact.uuid);
            let Some(gpu) = index else { continue };
            if lock(&self.drained).contains(&fact.uuid) {
                continue;
            }
            match fact.health {
                GpuHealth::Healthy => self.input(Input::GpuHealthy { gpu }),
                GpuHealth::Lost(message) => self.input(Input::GpuLost { gpu, message }),
                _ => {}
            }
        }
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
        self.executor.submit(Lane::Unbounded, move || match event {
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
