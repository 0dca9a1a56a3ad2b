//! Counters, and gauges drawn from the state.

use super::allocation::Stage;
use super::{Core, GpuIndex, Place};
use crate::gpu_memory::BufferBytes;
use crate::stats::Stat;

/// What happened since the start.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Counters {
    pub(crate) sessions_opened: u64,
    pub(crate) sessions_resumed: u64,
    pub(crate) leases_resumed: u64,
    pub(crate) acquires_warm: u64,
    pub(crate) acquires_cold: u64,
    pub(crate) leases_started: u64,
    pub(crate) leases_ended: u64,
    pub(crate) leases_revoked: u64,
    pub(crate) grants_undone: u64,
    pub(crate) allocations: u64,
    pub(crate) allocation_failures: u64,
    pub(crate) registrations: u64,
    pub(crate) registration_failures: u64,
    pub(crate) deregistrations: u64,
    pub(crate) deregistration_failures: u64,
    pub(crate) scrubs: u64,
    pub(crate) scrub_failures: u64,
    pub(crate) frees: u64,
    pub(crate) idle_dropped: u64,
    pub(crate) drains_overdue: u64,
    pub(crate) queue_pairs_created: u64,
    pub(crate) queue_pairs_destroyed: u64,
    pub(crate) queue_pairs_failed: u64,
    pub(crate) gpus_lost: u64,
    pub(crate) hcas_lost: u64,
    pub(crate) memories_adopted: u64,
    pub(crate) regions_asked: u64,
    pub(crate) regions_missed: u64,
    pub(crate) regions_registered: u64,
    pub(crate) region_failures: u64,
    pub(crate) regions_evicted: u64,
    pub(crate) regions_deregistered: u64,
    pub(crate) unexpected_inputs: u64,
}

impl Core {
    /// Every figure, in a fixed order.
    pub(crate) fn stats(&self) -> Vec<Stat> {
        let c = &self.counters;
        let of = |name, help, value| Stat { name, labels: Vec::new(), value, help };
        let total = |name, help, value: u64| of(name, help, as_f64(value));
        let mut stats = vec![
            total("gdrd_sessions_opened_total", "Sessions opened.", c.sessions_opened),
            total("gdrd_sessions_resumed_total", "Sessions taken up from an earlier daemon.", c.sessions_resumed),
            total("gdrd_leases_resumed_total", "Leases taken up from an earlier daemon.", c.leases_resumed),
            total("gdrd_acquires_warm_total", "Acquires served from a ready pool.", c.acquires_warm),
            total("gdrd_acquires_cold_total", "Acquires that found the ready pool dry.", c.acquires_cold),
            total("gdrd_leases_started_total", "Leases begun.", c.leases_started),
            total("gdrd_leases_ended_total", "Leases ended.", c.leases_ended),
            total("gdrd_leases_revoked_total", "Leases whose NIC access ended early.", c.leases_revoked),
            total("gdrd_grants_undone_total", "Grants taken back because nobody took them.", c.grants_undone),
            total("gdrd_allocations_total", "Allocations made.", c.allocations),
            total("gdrd_allocation_failures_total", "Allocations refused by the backend.", c.allocation_failures),
            total("gdrd_registrations_total", "Memory regions registered.", c.registrations),
            total("gdrd_registration_failures_total", "Registrations refused by the backend.", c.registration_failures),
            total("gdrd_deregistrations_total", "Memory regions deregistered.", c.deregistrations),
            total("gdrd_deregistration_failures_total", "Deregistrations with an error.", c.deregistration_failures),
            total("gdrd_scrubs_total", "Buffers zeroed after a lease.", c.scrubs),
            total("gdrd_scrub_failures_total", "Buffers that could not be zeroed and were freed.", c.scrub_failures),
            total("gdrd_frees_total", "Allocations freed.", c.frees),
            total("gdrd_idle_dropped_total", "Idle buffers given up for room or age.", c.idle_dropped),
            total("gdrd_drains_overdue_total", "Leases whose requests had to be flushed.", c.drains_overdue),
            total("gdrd_queue_pairs_created_total", "Queue pairs made.", c.queue_pairs_created),
            total("gdrd_queue_pairs_destroyed_total", "Queue pairs destroyed.", c.queue_pairs_destroyed),
            total("gdrd_queue_pairs_failed_total", "Queue pairs that went into error.", c.queue_pairs_failed),
            total("gdrd_gpus_lost_total", "Times a GPU that was served was lost or drained.", c.gpus_lost),
            total("gdrd_hcas_lost_total", "HCAs lost.", c.hcas_lost),
            total("gdrd_unexpected_inputs_total", "Inputs that fit no state: bugs of the daemon.", c.unexpected_inputs),
        ];
        self.push_cache(&mut stats);
        self.push_gauges(&mut stats);
        stats
    }

    /// Buffers on a GPU by state.
    pub(crate) fn buffers_on(&self, gpu: GpuIndex) -> BufferBytes {
        let mut bytes = BufferBytes::default();
        for allocation in self.allocations.values().filter(|allocation| allocation.place == Place::Gpu(gpu)) {
            let of = match allocation.stage {
                Stage::Clean => &mut bytes.clean,
                Stage::Ready => &mut bytes.ready,
                _ if allocation.lease.is_some() => &mut bytes.leased,
                // There is nothing yet, or nothing any more.
                Stage::Allocating | Stage::Starved => continue,
                _ => &mut bytes.changing,
            };
            *of += allocation.len_bytes;
        }
        bytes
    }

    /// The registration cache.
    fn push_cache(&self, stats: &mut Vec<Stat>) {
        let c = &self.counters;
        let mut push = |name, help, labels, value| stats.push(Stat { name, labels, value, help });
        let adopted_bytes: u64 = self.adopted.values().map(|adopted| adopted.len_bytes).sum();
        let idle = || self.regions.iter().filter(|(_, region)| region.idle.is_some());
        let idle_bytes: u64 = idle().map(|(_, region)| region.len_bytes()).sum();
        let leaving = self.regions.iter().filter(|(_, region)| region.is_leaving()).count();
        let (all, idle) = (self.regions.len(), idle().count());
        for (name, help, value) in [
            ("gdrd_memories_adopted_total", "Pieces of clients' memory adopted.", c.memories_adopted),
            ("gdrd_adopted_memories", "Pieces of clients' memory that are adopted.", self.adopted.len() as u64),
            ("gdrd_adopted_bytes", "Bytes of those.", adopted_bytes),
            ("gdrd_cache_asked_total", "Parts of ranges that clients registered.", c.regions_asked),
            ("gdrd_cache_misses_total", "Regions that had to be made for them.", c.regions_missed),
            ("gdrd_cache_registered_total", "Cached regions registered.", c.regions_registered),
            ("gdrd_cache_failures_total", "Cached regions refused by the backend.", c.region_failures),
            ("gdrd_cache_evicted_total", "Idle regions given up for room or age.", c.regions_evicted),
            ("gdrd_cache_deregistered_total", "Cached regions deregistered.", c.regions_deregistered),
            ("gdrd_registered_ranges", "Ranges that clients hold registered.", self.registrations.len() as u64),
            ("gdrd_cache_idle_bytes", "Bytes of regions that nobody holds.", idle_bytes),
        ] {
            push(name, help, Vec::new(), as_f64(value));
        }
        for (state, count) in [("held", all - idle - leaving), ("idle", idle), ("leaving", leaving)] {
            let labels = vec![("state", state.to_owned())];
            push("gdrd_cache_regions", "Cached regions by state.", labels, as_f64(count as u64));
        }
        for (size, count, total_ns) in self.costs.by_size() {
            let labels = || vec![("size", size.to_owned())];
            push("gdrd_registration_seconds_count", "Timed registrations, by size up to.", labels(), as_f64(count));
            let seconds = as_f64(total_ns) / 1e9;
            push("gdrd_registration_seconds_sum", "Time that they took the driver, by size up to.", labels(), seconds);
        }
    }

    fn push_gauges(&self, stats: &mut Vec<Stat>) {
        let mut gauge = |name, help, value: u64| {
            stats.push(Stat { name, labels: Vec::new(), value: as_f64(value), help });
        };
        let (mut bytes, mut registrations) = ([0; 4], 0);
        for allocation in self.allocations.values() {
            let kind = match allocation.stage {
                Stage::Clean => 0,
                Stage::Ready => 1,
                _ if allocation.lease.is_some() => 2,
                _ => 3,
            };
            bytes[kind] += allocation.len_bytes;
            let registered =
                matches!(allocation.stage, Stage::Ready | Stage::Leased | Stage::Quiescing | Stage::Deregistering);
            registrations += if registered { u64::from(allocation.registration_count()) } else { 0 };
        }
        gauge(
            "gdrd_tenants",
            "Tenants with a session, a lease or something being given back.",
            self.tenants.len() as u64,
        );
        gauge("gdrd_sessions", "Open sessions.", self.sessions.len() as u64);
        gauge("gdrd_leases", "Leases.", self.leases.len() as u64);
        gauge("gdrd_waiting_acquires", "Acquires that wait for a buffer.", self.waiting.len() as u64);
        let out_of_use = self.host.gpus.iter().filter(|gpu| gpu.lost.is_some()).count();
        gauge("gdrd_gpus_out_of_use", "GPUs that are lost or drained now.", out_of_use as u64);
        gauge("gdrd_queue_pairs", "Queue pairs.", self.queue_pairs.len() as u64);
        gauge("gdrd_registrations", "Memory regions of buffers that an HCA can reach.", registrations);
        for (state, bytes) in ["clean", "ready", "leased", "changing"].into_iter().zip(bytes) {
            stats.push(Stat {
                name: "gdrd_buffer_bytes",
                labels: vec![("state", state.to_owned())],
                value: as_f64(bytes),
                help: "Bytes of buffers by state.",
            });
        }
    }
}

/// Counts as Prometheus has them. Exact up to 2^53.
#[allow(clippy::cast_precision_loss)]
fn as_f64(value: u64) -> f64 {
    value as f64
}
