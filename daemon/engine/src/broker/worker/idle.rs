//! What a broker thread does while it finds nothing to do: it spins, leaves its CPU to who needs it, and sleeps. It knows no
//! requests.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::{Notice, Worker};
use crate::broker::hca::{Cq, CqShare};

/// How often a completion queue without event fd is polled while work is posted.
const POLL_ONLY_INTERVAL: Duration = Duration::from_millis(1);

impl Worker {
    /// Lets the kernel's threads have this CPU where they are what is waited for. Not for hardware: whoever else had the CPU
    /// then would keep it for a time slice.
    pub(super) fn give_way(&self) {
        if self.cqs.iter().any(Cq::needs_the_cpu) {
            self.setup.counters.yields.add(1);
            thread::yield_now();
        }
    }

    /// Sleeps until there may be work, unless there is some already.
    pub(super) fn fall_asleep(&mut self) {
        self.drop_unused_cqs();
        let announced = self.announce_sleep();
        let quiet = announced && self.arm() && !self.poll();
        if quiet && self.notices.is_empty() {
            self.setup.counters.sleeps.add(1);
            let timeout = self.timeout();
            self.sleeper.sleep(timeout);
        }
        for queue_pair in self.queue_pairs.iter_mut().flatten() {
            queue_pair.finish_sleep();
        }
    }

    /// Asks all clients for a wake-up; false if one has posted meanwhile.
    fn announce_sleep(&mut self) -> bool {
        // Rings of tenants that wait for their rate are not waited for: the refill ends the sleep.
        for index in self.schedule.open_places() {
            let Some(Some(queue_pair)) = self.queue_pairs.get_mut(index) else { continue };
            match queue_pair.prepare_sleep() {
                Ok(true) => {}
                Ok(false) => return false,
                Err(corrupt) => {
                    self.notices.push(Notice::Corrupt(index, corrupt));
                    return false;
                }
            }
        }
        true
    }

    /// Asks all completion queues for an event; false if one refused.
    fn arm(&mut self) -> bool {
        for (index, cq) in self.cqs.iter_mut().enumerate() {
            if !cq.is_in_use() {
                continue;
            }
            if let Err(reason) = cq.queue.arm() {
                cq.share.set_failed();
                self.notices.push(Notice::CqFailed(index, reason));
                return false;
            }
        }
        true
    }

    /// How long to sleep at most; for ever on an idle host.
    fn timeout(&self) -> Option<Duration> {
        let now = Instant::now();
        let refill =
            self.schedule.next_refill_ns().map(|at| Duration::from_nanos(at.saturating_sub((self.setup.clock)())));
        let posted = self.queue_pairs.iter().flatten().filter(|queue_pair| queue_pair.has_posted());
        posted
            .filter_map(|queue_pair| {
                let drain = queue_pair.drain_deadline().map(|deadline| deadline.saturating_duration_since(now));
                let poll = self.is_poll_only(&queue_pair.reservation.share).then_some(POLL_ONLY_INTERVAL);
                drain.into_iter().chain(poll).min()
            })
            .chain(refill)
            .min()
    }

    fn is_poll_only(&self, share: &Arc<CqShare>) -> bool {
        self.cqs.iter().any(|cq| Arc::ptr_eq(&cq.share, share) && cq.queue.event_fd().is_none())
    }
}
