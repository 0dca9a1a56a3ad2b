//! The wire between all HCAs of one simulated host, and what they share.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, RwLock, Weak};
use std::time::Duration;

use gdrd_hal::{ACK_TIMEOUT_EXPONENT, Endpoint, Gid, GpuCopies, RETRY_COUNT};

use crate::fault::{FaultEvent, FaultRules};
use crate::gpu::GpuCore;
use crate::hca::HcaCore;
use crate::sync::{read, write};
use crate::timer::Timer;

/// How long queue pairs wait for peers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    /// From the first try of a request that nobody answers to RETRY_EXC_ERR.
    pub retry_exceeded: Duration,
    /// From the first try of a message without a receive to RNR_RETRY_EXC_ERR; `None`: never (RNR retry 7).
    pub receiver_not_ready: Option<Duration>,
}

impl Default for Timing {
    /// The first try and all retries of [`RETRY_COUNT`] by [`ACK_TIMEOUT_EXPONENT`]: 537 ms; RNR without end.
    fn default() -> Self {
        let tries = u32::from(RETRY_COUNT) + 1;
        let ack_timeout = Duration::from_nanos(4096) * (1 << ACK_TIMEOUT_EXPONENT);
        Self { retry_exceeded: ack_timeout * tries, receiver_not_ready: None }
    }
}

/// Shared by all HCAs of one host.
pub(crate) struct Fabric {
    hcas: RwLock<Vec<Weak<HcaCore>>>,
    pub(crate) gpus: Vec<Arc<GpuCore>>,
    pub(crate) faults: FaultRules,
    pub(crate) timer: Timer,
    pub(crate) timing: Timing,
    /// Memory of real GPUs, where there is some.
    pub(crate) gpu_copies: Option<Arc<dyn GpuCopies>>,
    next_id: AtomicU64,
}

impl Fabric {
    pub(crate) fn new(gpus: Vec<Arc<GpuCore>>, timing: Timing, gpu_copies: Option<Arc<dyn GpuCopies>>) -> Self {
        Self {
            hcas: RwLock::new(Vec::new()),
            gpus,
            faults: FaultRules::default(),
            timer: Timer::default(),
            timing,
            gpu_copies,
            next_id: AtomicU64::new(1),
        }
    }

    /// A number that no other object of the host has.
    pub(crate) fn new_id(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn attach(&self, hca: &Arc<HcaCore>) {
        write(&self.hcas).push(Arc::downgrade(hca));
    }

    pub(crate) fn hcas(&self) -> Vec<Arc<HcaCore>> {
        read(&self.hcas).iter().filter_map(Weak::upgrade).collect()
    }

    /// The HCA whose port has this address: its GID, or its LID where the GID is zero. Captured hosts may have an
    /// address twice (bonds); then the one that has the queue pair.
    pub(crate) fn resolve(&self, endpoint: &Endpoint) -> Option<Arc<HcaCore>> {
        let by_lid = endpoint.gid == Gid::default();
        let has_address = |hca: &Arc<HcaCore>| {
            hca.port(endpoint.port_num).is_some_and(|port| match by_lid {
                true => endpoint.lid != 0 && port.lid() == endpoint.lid,
                false => port.has_gid(endpoint.gid),
            })
        };
        let mut found: Vec<_> = self.hcas().into_iter().filter(has_address).collect();
        let with_queue_pair = found.iter().position(|hca| hca.find_queue_pair(endpoint.qp_num).is_some());
        let index = with_queue_pair.unwrap_or(0);
        (index < found.len()).then(|| found.swap_remove(index))
    }

    /// Makes something happen to an HCA or a GPU; true when waiting work may go on, so that [`Fabric::kick`] is
    /// due. May be called with queue pair locks held, unlike it.
    pub(crate) fn fire(&self, event: &FaultEvent) -> bool {
        let gpu = |name: &str| self.gpus.iter().find(|gpu| gpu.is_named(name));
        let hca = |name: &str| self.hcas().into_iter().find(|hca| hca.name == name);
        match event {
            FaultEvent::GpuLost { gpu: name } => {
                gpu(name).inspect(|gpu| gpu.lose());
            }
            FaultEvent::GpuHealthy { gpu: name } => {
                gpu(name).inspect(|gpu| gpu.recover());
            }
            FaultEvent::LinkDown { hca: name, port_num } => {
                hca(name).inspect(|hca| hca.set_link(*port_num, false));
            }
            FaultEvent::LinkUp { hca: name, port_num } => {
                return hca(name).inspect(|hca| hca.set_link(*port_num, true)).is_some();
            }
            FaultEvent::GidChange { hca: name, port_num } => {
                hca(name).inspect(|hca| hca.change_gids(*port_num));
            }
            FaultEvent::DeviceFatal { hca: name } => {
                hca(name).inspect(|hca| hca.become_fatal());
            }
            FaultEvent::HcaGoesOn { hca } => self.faults.go_on(hca),
            FaultEvent::GpuGoesOn { gpu: name } => {
                gpu(name).inspect(|gpu| self.faults.go_on(&gpu.spec.uuid.0));
            }
        }
        false
    }

    /// Gives all waiting work another try, after something came back.
    pub(crate) fn kick(&self) {
        for hca in self.hcas() {
            for queue_pair in hca.queue_pairs() {
                queue_pair.progress();
            }
        }
    }
}
