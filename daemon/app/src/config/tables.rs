//! The tables whose keys are settings of the engine or the server, one for one, with their ranges. Defaults are taken
//! from there, so that they cannot differ.

use std::time::Duration;

use gdrd_engine::{BrokerConfig, EngineConfig, HugePages, Limits, PoolConfig, Timeouts};
use gdrd_server::ServerLimits;
use serde::{Deserialize, Serialize};

use super::range::Ranges;

fn in_ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

fn in_us(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// Table `limits`: bounds on what clients make the daemon hold.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct LimitKeys {
    pub(crate) max_sessions: u32,
    pub(crate) max_leases_per_session: u32,
    pub(crate) max_waiting_acquires_per_session: u32,
    pub(crate) max_queue_pairs_per_session: u32,
    pub(crate) max_lease_bytes: u64,
    pub(crate) max_label_bytes: u32,
    pub(crate) max_hcas_per_lease: u32,
    pub(crate) max_ttl_s: u64,
    pub(crate) max_list_page: u32,
    pub(crate) max_watches: u32,
    pub(crate) watch_queue: u32,
    pub(crate) registration_slots: u32,
    pub(crate) default_queue_depth: u32,
    pub(crate) max_queue_depth: u32,
}

impl Default for LimitKeys {
    fn default() -> Self {
        let defaults = EngineConfig::default().limits;
        Self {
            max_sessions: defaults.max_sessions,
            max_leases_per_session: defaults.max_leases_per_session,
            max_waiting_acquires_per_session: defaults.max_waiting_acquires_per_session,
            max_queue_pairs_per_session: defaults.max_queue_pairs_per_session,
            max_lease_bytes: defaults.max_lease_bytes,
            max_label_bytes: defaults.max_label_bytes,
            max_hcas_per_lease: defaults.max_hcas_per_lease,
            max_ttl_s: defaults.max_ttl.as_secs(),
            max_list_page: defaults.max_list_page,
            max_watches: defaults.max_watches,
            watch_queue: defaults.watch_queue,
            registration_slots: defaults.registration_slots,
            default_queue_depth: defaults.default_queue_depth,
            max_queue_depth: defaults.max_queue_depth,
        }
    }
}

impl LimitKeys {
    pub(super) fn check(&self, ranges: &mut Ranges) {
        ranges.within("limits.max_sessions", self.max_sessions.into(), 1, 65_536);
        ranges.within("limits.max_leases_per_session", self.max_leases_per_session.into(), 1, 65_536);
        ranges.within("limits.max_waiting_acquires_per_session", self.max_waiting_acquires_per_session.into(), 1, 4096);
        ranges.within("limits.max_queue_pairs_per_session", self.max_queue_pairs_per_session.into(), 1, 4096);
        ranges.within("limits.max_lease_bytes", self.max_lease_bytes, 1 << 20, 1 << 40);
        ranges.within("limits.max_label_bytes", self.max_label_bytes.into(), 1, 256);
        ranges.within("limits.max_hcas_per_lease", self.max_hcas_per_lease.into(), 1, 64);
        ranges.within("limits.max_ttl_s", self.max_ttl_s, 1, 30 * 24 * 3600);
        ranges.within("limits.max_list_page", self.max_list_page.into(), 1, 500);
        ranges.within("limits.max_watches", self.max_watches.into(), 1, 4096);
        ranges.within("limits.watch_queue", self.watch_queue.into(), 1, 65_536);
        ranges.within("limits.registration_slots", self.registration_slots.into(), 16, 32_768);
        ranges.within("limits.default_queue_depth", self.default_queue_depth.into(), 1, 4096);
        ranges.within("limits.max_queue_depth", self.max_queue_depth.into(), 1, 32_768);
        ranges.at_most_other(
            ("limits.default_queue_depth", self.default_queue_depth.into()),
            ("limits.max_queue_depth", self.max_queue_depth.into()),
        );
        ranges.power_of_two("limits.registration_slots", self.registration_slots);
    }

    pub(super) fn settings(&self) -> Limits {
        Limits {
            // The daemon knows it only once it has raised its RLIMIT_NOFILE, and the next from whoever keeps them.
            max_descriptors: u32::MAX,
            max_kept_descriptors: u32::MAX,
            max_sessions: self.max_sessions,
            max_leases_per_session: self.max_leases_per_session,
            max_waiting_acquires_per_session: self.max_waiting_acquires_per_session,
            max_queue_pairs_per_session: self.max_queue_pairs_per_session,
            max_lease_bytes: self.max_lease_bytes,
            max_label_bytes: self.max_label_bytes,
            max_hcas_per_lease: self.max_hcas_per_lease,
            max_ttl: Duration::from_secs(self.max_ttl_s),
            max_list_page: self.max_list_page,
            max_watches: self.max_watches,
            watch_queue: self.watch_queue,
            registration_slots: self.registration_slots,
            default_queue_depth: self.default_queue_depth,
            max_queue_depth: self.max_queue_depth,
        }
    }
}

/// Table `pool`: how many buffers are kept at hand.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct PoolKeys {
    pub(crate) ready_target_per_class: u32,
    pub(crate) ready_max_per_class: u32,
    pub(crate) ready_max_bytes_per_class: u64,
    pub(crate) clean_target_per_class: u32,
    pub(crate) clean_max_bytes: u64,
    pub(crate) headroom_bytes: u64,
    pub(crate) headroom_percent: u8,
    pub(crate) idle_s: u64,
    pub(crate) host_huge_pages: HugePagesKey,
}

/// Values of `pool.host_huge_pages`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum HugePagesKey {
    Off,
    #[default]
    Try,
    Require,
}

impl Default for PoolKeys {
    fn default() -> Self {
        let defaults = EngineConfig::default().pool;
        Self {
            ready_target_per_class: defaults.ready_target_per_class,
            ready_max_per_class: defaults.ready_max_per_class,
            ready_max_bytes_per_class: defaults.ready_max_bytes_per_class,
            clean_target_per_class: defaults.clean_target_per_class,
            clean_max_bytes: defaults.clean_max_bytes,
            headroom_bytes: defaults.headroom_bytes,
            headroom_percent: defaults.headroom_percent,
            idle_s: defaults.idle.as_secs(),
            host_huge_pages: HugePagesKey::default(),
        }
    }
}

impl PoolKeys {
    pub(super) fn check(&self, ranges: &mut Ranges) {
        ranges.within("pool.ready_target_per_class", self.ready_target_per_class.into(), 0, 4096);
        ranges.within("pool.ready_max_per_class", self.ready_max_per_class.into(), 0, 4096);
        // What is made ahead beyond what is kept would be made and destroyed for ever.
        ranges.at_most_other(
            ("pool.ready_target_per_class", self.ready_target_per_class.into()),
            ("pool.ready_max_per_class", self.ready_max_per_class.into()),
        );
        ranges.within("pool.ready_max_bytes_per_class", self.ready_max_bytes_per_class, 0, 1 << 40);
        ranges.within("pool.clean_target_per_class", self.clean_target_per_class.into(), 0, 4096);
        ranges.within("pool.clean_max_bytes", self.clean_max_bytes, 0, 1 << 40);
        ranges.within("pool.headroom_bytes", self.headroom_bytes, 0, 1 << 40);
        ranges.within("pool.headroom_percent", self.headroom_percent.into(), 0, 100);
        ranges.within("pool.idle_s", self.idle_s, 1, 24 * 3600);
    }

    pub(super) fn settings(&self) -> PoolConfig {
        PoolConfig {
            ready_target_per_class: self.ready_target_per_class,
            ready_max_per_class: self.ready_max_per_class,
            ready_max_bytes_per_class: self.ready_max_bytes_per_class,
            clean_target_per_class: self.clean_target_per_class,
            clean_max_bytes: self.clean_max_bytes,
            headroom_bytes: self.headroom_bytes,
            headroom_percent: self.headroom_percent,
            idle: Duration::from_secs(self.idle_s),
            host_huge_pages: match self.host_huge_pages {
                HugePagesKey::Off => HugePages::Off,
                HugePagesKey::Try => HugePages::Try,
                HugePagesKey::Require => HugePages::Require,
            },
        }
    }
}

/// Table `broker`: the threads that post for clients.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct BrokerKeys {
    pub(crate) threads: u32,
    pub(crate) spin_us: u64,
}

impl Default for BrokerKeys {
    fn default() -> Self {
        let defaults = EngineConfig::default().broker;
        Self { threads: defaults.threads, spin_us: in_us(defaults.spin) }
    }
}

impl BrokerKeys {
    pub(super) fn check(&self, ranges: &mut Ranges) {
        ranges.within("broker.threads", self.threads.into(), 0, 64);
        ranges.within("broker.spin_us", self.spin_us, 0, 1_000_000);
    }

    pub(super) fn settings(&self) -> BrokerConfig {
        BrokerConfig {
            threads: self.threads,
            spin: Duration::from_micros(self.spin_us),
            // Known only once the host has been read.
            nodes: Vec::new(),
        }
    }
}

/// Table `gpu`: the processes in which the GPU driver's library lives.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct GpuKeys {
    pub(crate) worker_idle_s: u64,
    pub(crate) call_timeout_s: u64,
}

impl Default for GpuKeys {
    fn default() -> Self {
        Self { worker_idle_s: 30, call_timeout_s: 60 }
    }
}

impl GpuKeys {
    pub(super) fn check(&self, ranges: &mut Ranges) {
        ranges.within("gpu.worker_idle_s", self.worker_idle_s, 1, 24 * 3600);
        ranges.within("gpu.call_timeout_s", self.call_timeout_s, 1, 600);
    }
}

/// Table `server`: connections, messages and waiting.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct ServerKeys {
    pub(crate) max_grpc_connections: u32,
    pub(crate) max_grpc_connections_per_uid: u32,
    pub(crate) max_calls_per_connection: u32,
    pub(crate) max_session_connections: u32,
    pub(crate) max_session_connections_per_uid: u32,
    pub(crate) hello_timeout_ms: u64,
    pub(crate) grpc_idle_s: u64,
    pub(crate) proof_timeout_ms: u64,
    pub(crate) max_queued_deliveries: u32,
    pub(crate) drain_timeout_ms: u64,
}

impl Default for ServerKeys {
    fn default() -> Self {
        let defaults = ServerLimits::default();
        Self {
            max_grpc_connections: defaults.max_grpc_connections,
            max_grpc_connections_per_uid: defaults.max_grpc_connections_per_uid,
            max_calls_per_connection: defaults.max_calls_per_connection,
            max_session_connections: defaults.max_session_connections,
            max_session_connections_per_uid: defaults.max_session_connections_per_uid,
            hello_timeout_ms: in_ms(defaults.hello_timeout),
            grpc_idle_s: defaults.grpc_idle.as_secs(),
            proof_timeout_ms: in_ms(defaults.proof_timeout),
            max_queued_deliveries: defaults.max_queued_deliveries,
            drain_timeout_ms: in_ms(defaults.drain_timeout),
        }
    }
}

impl ServerKeys {
    pub(super) fn check(&self, ranges: &mut Ranges) {
        ranges.within("server.max_grpc_connections", self.max_grpc_connections.into(), 1, 65_536);
        ranges.within("server.max_grpc_connections_per_uid", self.max_grpc_connections_per_uid.into(), 1, 65_536);
        ranges.within("server.max_calls_per_connection", self.max_calls_per_connection.into(), 1, 65_536);
        ranges.within("server.max_session_connections", self.max_session_connections.into(), 1, 131_072);
        ranges.within(
            "server.max_session_connections_per_uid",
            self.max_session_connections_per_uid.into(),
            1,
            131_072,
        );
        ranges.within("server.hello_timeout_ms", self.hello_timeout_ms, 10, 600_000);
        ranges.within("server.grpc_idle_s", self.grpc_idle_s, 1, 24 * 3600);
        ranges.within("server.proof_timeout_ms", self.proof_timeout_ms, 10, 600_000);
        ranges.within("server.max_queued_deliveries", self.max_queued_deliveries.into(), 1, 65_536);
        ranges.within("server.drain_timeout_ms", self.drain_timeout_ms, 1, 600_000);
    }

    pub(super) fn settings(&self) -> ServerLimits {
        ServerLimits {
            max_grpc_connections: self.max_grpc_connections,
            max_grpc_connections_per_uid: self.max_grpc_connections_per_uid,
            max_calls_per_connection: self.max_calls_per_connection,
            max_session_connections: self.max_session_connections,
            max_session_connections_per_uid: self.max_session_connections_per_uid,
            hello_timeout: Duration::from_millis(self.hello_timeout_ms),
            grpc_idle: Duration::from_secs(self.grpc_idle_s),
            proof_timeout: Duration::from_millis(self.proof_timeout_ms),
            max_queued_deliveries: self.max_queued_deliveries,
            drain_timeout: Duration::from_millis(self.drain_timeout_ms),
        }
    }
}

/// Table `executor`: calls that may block on a driver, and waiting for them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct ExecutorKeys {
    pub(crate) threads: u32,
    pub(crate) calls_per_device: u32,
    pub(crate) lease_drain_ms: u64,
}

impl Default for ExecutorKeys {
    fn default() -> Self {
        let defaults = EngineConfig::default();
        Self {
            threads: defaults.executor_threads,
            calls_per_device: defaults.calls_per_device,
            lease_drain_ms: in_ms(defaults.timeouts.drain),
        }
    }
}

impl ExecutorKeys {
    pub(super) fn check(&self, ranges: &mut Ranges) {
        ranges.within("executor.threads", self.threads.into(), 1, 256);
        ranges.within("executor.calls_per_device", self.calls_per_device.into(), 1, 64);
        ranges.within("executor.lease_drain_ms", self.lease_drain_ms, 1, 60_000);
    }

    pub(super) fn timeouts(&self) -> Timeouts {
        Timeouts { drain: Duration::from_millis(self.lease_drain_ms), ..Timeouts::default() }
    }
}
