//! What an operator can set. The defaults here are the documented ones.

use std::path::PathBuf;
use std::time::Duration;

use crate::error::EngineError;
use crate::policy::Policy;

/// How a session proves the right to a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GpuProof {
    /// By an open fd of the GPU's device node.
    DeviceNode,
    /// Not at all.
    None,
}

/// Bounds on what clients can make the daemon hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Descriptors that buffers, queue pairs and sessions may take together. Default no limit; the daemon sets it
    /// from its RLIMIT_NOFILE, so that what one tenant leases leaves room for others to connect.
    pub max_descriptors: u32,
    /// Descriptors that are kept for the next daemon, where any are. Default no limit; the daemon sets it from what its
    /// keeper takes.
    pub max_kept_descriptors: u32,
    /// Sessions of all tenants. Default 1024.
    pub max_sessions: u32,
    /// Leases held by one session. Default 4096.
    pub max_leases_per_session: u32,
    /// Acquires of one session that wait for memory. Default 64.
    pub max_waiting_acquires_per_session: u32,
    /// Queue pairs of one session. Default 128.
    pub max_queue_pairs_per_session: u32,
    /// Largest buffer, bytes. Default 16 GiB.
    pub max_lease_bytes: u64,
    /// Longest label and client name, bytes. Default 64.
    pub max_label_bytes: u32,
    /// HCAs one buffer is registered with. Default 8.
    pub max_hcas_per_lease: u32,
    /// Longest time to live of a detached lease. Default 24 h.
    pub max_ttl: Duration,
    /// Rows of a list page. Default 500.
    pub max_list_page: u32,
    /// Watch streams of all callers. Default 256.
    pub max_watches: u32,
    /// Events queued for one watcher before it must start again. Default 1024.
    pub watch_queue: u32,
    /// Registration slots of one tenant, a power of two. Default 4096.
    pub registration_slots: u32,
    /// Default depth of a queue pair's queues. Default 128.
    pub default_queue_depth: u32,
    /// Deepest queue of a queue pair. Default 4096.
    pub max_queue_depth: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_descriptors: u32::MAX,
            max_kept_descriptors: u32::MAX,
            max_sessions: 1024,
            max_leases_per_session: 4096,
            max_waiting_acquires_per_session: 64,
            max_queue_pairs_per_session: 128,
            max_lease_bytes: 16 << 30,
            max_label_bytes: 64,
            max_hcas_per_lease: 8,
            max_ttl: Duration::from_secs(24 * 3600),
            max_list_page: 500,
            max_watches: 256,
            watch_queue: 1024,
            registration_slots: 4096,
            default_queue_depth: 128,
            max_queue_depth: 4096,
        }
    }
}

/// How many buffers are kept at hand.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolConfig {
    /// Ready buffers made ahead per tenant, place and size class once the tenant has used that class. Default 2.
    pub ready_target_per_class: u32,
    /// Ready buffers kept per tenant, place and size class; what is released beyond is destroyed. Default 64.
    pub ready_max_per_class: u32,
    /// Bytes of ready buffers per tenant, place and size class, for both of the above; one buffer is always
    /// allowed to be kept. Default 1 GiB.
    pub ready_max_bytes_per_class: u64,
    /// Clean buffers kept per GPU and size class once that class has been used there. Default 1.
    pub clean_target_per_class: u32,
    /// Bytes of clean buffers per GPU. Default 256 MiB.
    pub clean_max_bytes: u64,
    /// Memory of a GPU that making buffers ahead leaves free for jobs, bytes. Default 1 GiB.
    pub headroom_bytes: u64,
    /// The same as a share of the GPU's memory, percent; the greater of the two counts. Default 0.
    pub headroom_percent: u8,
    /// Idle time after which pools of a size class shrink to nothing. Default 10 min.
    pub idle: Duration,
    /// Whether host buffers of 2 MiB and more are of huge pages. Default [`HugePages::Try`].
    pub host_huge_pages: HugePages,
}

/// Huge pages (hugetlbfs) for host buffers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum HugePages {
    /// None.
    Off,
    /// Where the pool of the node has enough, else ordinary ones.
    #[default]
    Try,
    /// Refused where it has not.
    Require,
}

impl Default for PoolConfig {
    fn default() -> Self {
        Self {
            ready_target_per_class: 2,
            ready_max_per_class: 64,
            ready_max_bytes_per_class: 1 << 30,
            clean_target_per_class: 1,
            clean_max_bytes: 256 << 20,
            headroom_bytes: 1 << 30,
            headroom_percent: 0,
            idle: Duration::from_secs(600),
            host_huge_pages: HugePages::default(),
        }
    }
}

/// The registration cache: regions of adopted memory, and of ranges of buffers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheConfig {
    /// Regions of one tenant, held or idle, and slots for them beside those of its buffers. Default 4096.
    pub max_regions: u32,
    /// Regions of one tenant that are kept though nobody holds them. Default 1024.
    pub max_idle_regions: u32,
    /// Bytes of those. Default 64 GiB.
    pub max_idle_bytes: u64,
    /// How long they are kept. Default 60 s.
    pub idle: Duration,
    /// Longest gap between two ranges of one call that one region covers, where merging is asked for, bytes. Default
    /// 64 MiB: registering it costs some tenths of a millisecond, another call to the provider two milliseconds.
    pub merge_gap_bytes: u64,
    /// BAR1 of each GPU that regions may keep mapped, bytes; by default what the GPU driver tells, where it does.
    pub bar1_bytes: Option<u64>,
    /// Pieces of adopted memory of one session. Default 1024.
    pub max_memories_per_session: u32,
    /// Registrations of one session; their parts may be so many for each HCA that a lease can have. Default 65,536.
    pub max_registrations_per_session: u32,
    /// Ranges of one call. Default 4096.
    pub max_ranges_per_call: u32,
    /// Parts that the ranges of one call come to with all HCAs and pieces. Default 32,768.
    pub max_parts_per_call: u32,
}

impl Default for CacheConfig {
    fn default() -> Self {
        Self {
            max_regions: 4096,
            max_idle_regions: 1024,
            max_idle_bytes: 64 << 30,
            idle: Duration::from_secs(60),
            merge_gap_bytes: 64 << 20,
            bar1_bytes: None,
            max_memories_per_session: 1024,
            max_registrations_per_session: 65_536,
            max_ranges_per_call: 4096,
            max_parts_per_call: 32_768,
        }
    }
}

/// How long the engine waits for others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Timeouts {
    /// For admitted requests on an ended lease to complete, before the queue pairs concerned go to ERR. Default 2 s.
    pub drain: Duration,
    /// For everything to be given back when the engine stops. Default 10 s.
    pub shutdown: Duration,
    /// For calls that are under way on a GPU that is drained. Default 3 s.
    pub let_go: Duration,
    /// For the registrations of leases that an earlier daemon left, before those that are there are served. Default 60 s.
    pub restore: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            drain: Duration::from_secs(2),
            shutdown: Duration::from_secs(10),
            let_go: Duration::from_secs(3),
            restore: Duration::from_secs(60),
        }
    }
}

/// CPUs of one NUMA node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NumaCpus {
    /// Number of the node as the kernel gives it; numbers may have gaps.
    pub node: u32,
    /// Its CPUs by number.
    pub cpus: Vec<usize>,
}

/// The threads that post for clients.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BrokerConfig {
    /// Threads; 0 for one on hosts of up to 4 cores, else one for every 8 cores. Default 0.
    pub threads: u32,
    /// How long a thread spins after its last work before it sleeps. Default 50 µs.
    pub spin: Duration,
    /// Nodes to put threads on, in turn, those with the most HCAs first; with fewer than two, threads run anywhere.
    /// Default none.
    pub nodes: Vec<NumaCpus>,
}

impl Default for BrokerConfig {
    fn default() -> Self {
        Self { threads: 0, spin: Duration::from_micros(50), nodes: Vec::new() }
    }
}

/// Everything an operator can set about the engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineConfig {
    /// Who may do what.
    pub policy: Policy,
    /// How a session proves the right to a GPU.
    pub gpu_proof: GpuProof,
    /// Bounds.
    pub limits: Limits,
    /// Pools.
    pub pool: PoolConfig,
    /// Registration cache.
    pub cache: CacheConfig,
    /// Waiting.
    pub timeouts: Timeouts,
    /// Broker threads.
    pub broker: BrokerConfig,
    /// Most threads for calls that may block on a driver, and as many again, of lower priority, for those that
    /// nobody waits for; where all are in calls, each device on which none runs has one more. Default 8.
    pub executor_threads: u32,
    /// Most of such calls on one device at a time, and of queue pairs being connected on all together. Default 4:
    /// registrations gain from that many, and more slow each other.
    pub calls_per_device: u32,
    /// Whether sessions get contexts of their own, past the broker and its policy. Default false.
    pub direct: bool,
    /// File that keeps which GPUs are drained for the next engine. Default none: a drain ends with the engine.
    pub drains: Option<PathBuf>,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            policy: Policy::new(0, None, None),
            gpu_proof: GpuProof::DeviceNode,
            limits: Limits::default(),
            pool: PoolConfig::default(),
            cache: CacheConfig::default(),
            timeouts: Timeouts::default(),
            broker: BrokerConfig::default(),
            executor_threads: 8,
            calls_per_device: 4,
            direct: false,
            drains: None,
        }
    }
}

impl EngineConfig {
    /// Slots of a tenant: those of its buffers, and those of cached regions.
    pub(crate) fn slots(&self) -> u32 {
        self.limits.registration_slots + self.cache.max_regions
    }

    /// Checks every value against its range, before any effect.
    ///
    /// # Errors
    /// `BadArgument` naming the key, the value and the allowed range.
    pub fn validate(&self) -> Result<(), EngineError> {
        let limits = &self.limits;
        let ranges = [
            ("limits.max_sessions", u64::from(limits.max_sessions), 1, 65_536),
            ("limits.max_leases_per_session", u64::from(limits.max_leases_per_session), 1, 65_536),
            ("limits.max_waiting_acquires_per_session", u64::from(limits.max_waiting_acquires_per_session), 1, 4096),
            ("limits.max_queue_pairs_per_session", u64::from(limits.max_queue_pairs_per_session), 1, 4096),
            ("limits.max_lease_bytes", limits.max_lease_bytes, 1 << 20, 1 << 40),
            ("limits.max_label_bytes", u64::from(limits.max_label_bytes), 1, 256),
            ("limits.max_hcas_per_lease", u64::from(limits.max_hcas_per_lease), 1, 64),
            ("limits.max_list_page", u64::from(limits.max_list_page), 1, 500),
            ("limits.max_watches", u64::from(limits.max_watches), 1, 4096),
            ("limits.watch_queue", u64::from(limits.watch_queue), 1, 65_536),
            ("limits.registration_slots", u64::from(limits.registration_slots), 16, 32_768),
            ("limits.default_queue_depth", u64::from(limits.default_queue_depth), 1, u64::from(gdrd_ring::MAX_DEPTH)),
            ("limits.max_queue_depth", u64::from(limits.max_queue_depth), 1, u64::from(gdrd_ring::MAX_DEPTH)),
            ("pool.ready_max_per_class", u64::from(self.pool.ready_max_per_class), 0, 4096),
            ("pool.ready_target_per_class", u64::from(self.pool.ready_target_per_class), 0, 4096),
            ("pool.clean_target_per_class", u64::from(self.pool.clean_target_per_class), 0, 4096),
            ("cache.max_regions", u64::from(self.cache.max_regions), 1, 32_768),
            ("cache.max_idle_regions", u64::from(self.cache.max_idle_regions), 0, 32_768),
            ("cache.merge_gap_bytes", self.cache.merge_gap_bytes, 0, 1 << 40),
            ("cache.max_memories_per_session", u64::from(self.cache.max_memories_per_session), 0, 65_536),
            ("cache.max_registrations_per_session", u64::from(self.cache.max_registrations_per_session), 0, 1 << 20),
            ("cache.max_ranges_per_call", u64::from(self.cache.max_ranges_per_call), 1, 4096),
            ("cache.max_parts_per_call", u64::from(self.cache.max_parts_per_call), 1, 32_768),
            ("executor_threads", u64::from(self.executor_threads), 1, 256),
            ("calls_per_device", u64::from(self.calls_per_device), 1, 64),
            ("broker.threads", u64::from(self.broker.threads), 0, 64),
        ];
        for (what, value, least, most) in ranges {
            if !(least..=most).contains(&value) {
                return Err(EngineError::BadArgument {
                    what,
                    problem: format!("{value} is not within {least} to {most}"),
                });
            }
        }
        if !limits.registration_slots.is_power_of_two() {
            let problem = format!("{} is not a power of two", limits.registration_slots);
            return Err(EngineError::BadArgument { what: "limits.registration_slots", problem });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_valid() {
        assert_eq!(EngineConfig::default().validate(), Ok(()));
    }

    #[test]
    fn a_value_out_of_range_is_named() {
        let config = EngineConfig { executor_threads: 0, ..EngineConfig::default() };
        let message = config.validate().unwrap_err().to_string();
        assert_eq!(message, "executor_threads: 0 is not within 1 to 256");
    }
}
