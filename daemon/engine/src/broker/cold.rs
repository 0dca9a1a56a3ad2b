//! Driver calls that may block: to ERR, destroy. One thread per HCA, so that neither the data path nor
//! another HCA waits for a stuck driver.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use gdrd_hal::{CompletionQueue, QueuePair as HalQueuePair, QueuePairParts};
use gdrd_ring::BrokerRing;

use super::command::{Command, Inbox};
use super::error::BrokerError;
use super::hca::Reservation;
use super::landing::FlushLanding;
use super::registry::Registry;
use super::slots::{HcaIndex, SlotTable};
use crate::ids::QueuePairId;

/// Requests whose end will never be known, still counted in on their slots; they leave on drop, which
/// must come after the queue pair is destroyed.
pub(crate) struct Held {
    pub(crate) table: Arc<SlotTable>,
    /// Slot, and whether it is a receive.
    pub(crate) slots: Vec<(u32, bool)>,
}

impl Drop for Held {
    fn drop(&mut self) {
        for (slot, receive) in self.slots.drain(..) {
            self.table.leave(slot, receive);
        }
    }
}

/// A queue pair of the HCA with what it may still touch.
pub(crate) struct Destroyed {
    pub(crate) parts: QueuePairParts,
    pub(crate) held: Held,
    pub(crate) landing: Option<Arc<FlushLanding>>,
}

impl Destroyed {
    /// First the queue pair is destroyed, then the memory is free of it.
    fn destroy(self) {
        let Self { parts, held, landing } = self;
        drop(parts);
        drop(held);
        drop(landing);
    }
}

/// All that is left of an attached queue pair.
pub(crate) struct Ended {
    pub(crate) id: QueuePairId,
    pub(crate) hardware: Option<Destroyed>,
    pub(crate) ring: Option<BrokerRing>,
    pub(crate) doorbell: OwnedFd,
    pub(crate) reservation: Reservation,
    pub(crate) registry: Arc<Registry>,
}

/// A job that may block.
pub(crate) enum Job {
    /// To ERR; a refusal is answered with [`Command::StopRefused`].
    ToError(Arc<dyn HalQueuePair>, QueuePairId, Arc<Inbox>),
    /// Destroy the HCA's side, and go on serving the ring.
    Destroy(Box<Destroyed>),
    /// Destroy all, tell who waits.
    End(Box<Ended>),
    /// Destroy a completion queue.
    DropCq(Box<dyn CompletionQueue>),
    /// End the thread.
    Stop,
}

/// Hands jobs to the thread of one HCA, which ends with [`Job::Stop`] or the last handle.
#[derive(Debug, Clone)]
pub(crate) struct Cold(Sender<Job>);

impl Cold {
    /// Starts the thread.
    pub(crate) fn start(hca: HcaIndex) -> Result<(Self, JoinHandle<()>), BrokerError> {
        let (sender, receiver) = channel();
        let thread = std::thread::Builder::new()
            .name(format!("gdrd-hca-{}", hca.0))
            .spawn(move || run(&receiver))
            .map_err(|source| BrokerError::System { call: "spawn", source })?;
        Ok((Self(sender), thread))
    }

    /// Queues a job. After the thread has been stopped the job is done here.
    pub(crate) fn send(&self, job: Job) {
        if let Err(back) = self.0.send(job) {
            do_job(back.0);
        }
    }
}

fn run(jobs: &Receiver<Job>) {
    while let Ok(job) = jobs.recv() {
        if matches!(job, Job::Stop) {
            return;
        }
        do_job(job);
    }
}

fn do_job(job: Job) {
    match job {
        Job::ToError(control, id, inbox) => to_error(&*control, id, &inbox),
        Job::Destroy(destroyed) => destroyed.destroy(),
        Job::End(ended) => end(*ended),
        Job::DropCq(queue) => drop(queue),
        Job::Stop => {}
    }
}

fn to_error(control: &dyn HalQueuePair, id: QueuePairId, inbox: &Inbox) {
    if let Err(reason) = control.to_error() {
        tracing::warn!(queue_pair = %id, %reason, "queue pair cannot be moved to ERR, it will be destroyed");
        // A closed inbox means that the thread has given up the queue pair already.
        let _ = inbox.send(Command::StopRefused(id));
    }
}

fn end(ended: Ended) {
    let Ended { id, hardware, ring, doorbell, reservation, registry } = ended;
    if let Some(hardware) = hardware {
        hardware.destroy();
    }
    if let Some(Err(reason)) = ring.map(BrokerRing::close) {
        tracing::warn!(queue_pair = %id, %reason, "client of a closed ring was not woken");
    }
    drop(doorbell);
    drop(reservation);
    registry.ended(id);
}
