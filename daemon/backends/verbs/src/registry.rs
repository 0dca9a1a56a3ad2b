//! What the event thread of a context must find: completion queues, shared receive queues and
//! queue pairs by address.
//!
//! It holds raw pointers and no owners, so that no object ever ends on the event thread. An object leaves the registry
//! before it is destroyed, under the same lock under which the thread uses it.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use gdrd_hal::{CqId, HcaEvent, SrqId};

use crate::completion::CqHandle;
use crate::shared_receive::SrqHandle;

/// Most events of single objects that wait for [`gdrd_hal::Hca::take_events`]. Those of ports and of the device always find room:
/// none waits twice, and there are few of them.
const MAX_WAITING_EVENTS: usize = 1024;

/// A queue pair as the event thread sees it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct QueuePairEntry {
    pub(crate) qp_num: u32,
    /// Address of its completion queue.
    pub(crate) cq: usize,
}

/// A completion queue.
#[derive(Debug)]
pub(crate) struct CqEntry {
    pub(crate) id: CqId,
    pub(crate) dead: Arc<AtomicBool>,
    pub(crate) handle: Weak<CqHandle>,
}

/// A shared receive queue.
#[derive(Debug)]
pub(crate) struct SrqEntry {
    pub(crate) id: SrqId,
    pub(crate) handle: Weak<SrqHandle>,
}

#[derive(Debug, Default)]
pub(crate) struct Objects {
    /// By address of the `ibv_qp`.
    pub(crate) queue_pairs: HashMap<usize, QueuePairEntry>,
    /// By address of the `ibv_cq`.
    pub(crate) cqs: HashMap<usize, CqEntry>,
    /// By address of the `ibv_srq`.
    pub(crate) srqs: HashMap<usize, SrqEntry>,
}

/// Of one context.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    objects: Mutex<Objects>,
    events: Mutex<VecDeque<HcaEvent>>,
    gone: AtomicBool,
}

impl Registry {
    pub(crate) fn objects(&self) -> MutexGuard<'_, Objects> {
        self.objects.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The owner of a completion queue that its user still has.
    pub(crate) fn cq(&self, id: CqId) -> Option<Arc<CqHandle>> {
        let objects = self.objects();
        objects.cqs.values().find(|entry| entry.id == id)?.handle.upgrade()
    }

    /// The owner of a shared receive queue that its user still has.
    pub(crate) fn srq(&self, id: SrqId) -> Option<Arc<SrqHandle>> {
        let objects = self.objects();
        objects.srqs.values().find(|entry| entry.id == id)?.handle.upgrade()
    }

    pub(crate) fn note(&self, event: HcaEvent) {
        let of_an_object = |event: &HcaEvent| match event {
            HcaEvent::DeviceFatal
            | HcaEvent::PortActive { .. }
            | HcaEvent::PortDown { .. }
            | HcaEvent::GidChange { .. } => false,
            // Kinds to come are bounded until somebody says that they are few.
            _ => true,
        };
        let mut events = self.waiting();
        // The later one counts: a port that went down, came up and went down again is down.
        events.retain(|waiting| *waiting != event);
        if !of_an_object(&event) || events.iter().filter(|e| of_an_object(e)).count() < MAX_WAITING_EVENTS {
            events.push_back(event);
        }
    }

    pub(crate) fn take_events(&self) -> Vec<HcaEvent> {
        self.waiting().drain(..).collect()
    }

    fn waiting(&self) -> MutexGuard<'_, VecDeque<HcaEvent>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn set_gone(&self) {
        self.gone.store(true, Ordering::Release);
    }

    pub(crate) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_events_wait_once_and_all_are_bounded() {
        let registry = Registry::default();
        for _ in 0..3 {
            registry.note(HcaEvent::GidChange { port_num: 1 });
        }
        for qp_num in 0..5000 {
            registry.note(HcaEvent::QueuePairFatal { qp_num });
        }
        let events = registry.take_events();
        assert_eq!(events[..2], [HcaEvent::GidChange { port_num: 1 }, HcaEvent::QueuePairFatal { qp_num: 0 }]);
        assert_eq!(events.len(), 1 + MAX_WAITING_EVENTS);
        assert!(registry.take_events().is_empty());
    }

    #[test]
    fn the_last_thing_told_of_a_port_is_what_it_is_now() {
        let registry = Registry::default();
        let (up, down) = (HcaEvent::PortActive { port_num: 1 }, HcaEvent::PortDown { port_num: 1 });
        for event in [&down, &up, &down] {
            registry.note(event.clone());
        }
        assert_eq!(registry.take_events(), [up, down]);
    }

    #[test]
    fn what_is_told_of_the_device_and_its_ports_finds_room_behind_any_number_of_queue_pairs() {
        let registry = Registry::default();
        for qp_num in 0..5000 {
            registry.note(HcaEvent::LastSharedReceive { qp_num });
        }
        let of_all = [
            HcaEvent::PortDown { port_num: 1 },
            HcaEvent::GidChange { port_num: 1 },
            HcaEvent::PortActive { port_num: 1 },
            HcaEvent::DeviceFatal,
        ];
        of_all.iter().for_each(|event| registry.note(event.clone()));
        assert_eq!(registry.take_events()[MAX_WAITING_EVENTS..], of_all);
    }
}
