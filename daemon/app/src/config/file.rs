//! The tables and keys of `gdrd.toml` with their defaults. config/gdrd.toml is the same for readers, held equal by a test.

use gdrd_engine::{Quota, Traffic};
use serde::{Deserialize, Serialize};

use super::cache::CacheKeys;
use super::tables::{BrokerKeys, ExecutorKeys, GpuKeys, LimitKeys, PoolKeys, ServerKeys};
use super::topology::TopologyKeys;
use super::verbs::VerbsKeys;
use super::who::Who;

/// The whole file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Config {
    /// How sessions prove their right to a GPU; unset: by device node with hardware, not at all in simulation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) gpu_proof: Option<GpuProofKey>,
    pub(crate) policy: PolicyKeys,
    pub(crate) limits: LimitKeys,
    pub(crate) pool: PoolKeys,
    pub(crate) cache: CacheKeys,
    pub(crate) broker: BrokerKeys,
    pub(crate) executor: ExecutorKeys,
    pub(crate) gpu: GpuKeys,
    pub(crate) server: ServerKeys,
    pub(crate) topology: TopologyKeys,
    pub(crate) verbs: VerbsKeys,
    pub(crate) log: LogKeys,
}

/// Values of `gpu_proof`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum GpuProofKey {
    DeviceNode,
    None,
}

/// Table `policy`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct PolicyKeys {
    pub(crate) admins: Vec<Who>,
    pub(crate) lease: Vec<LeaseRule>,
}

impl Default for PolicyKeys {
    fn default() -> Self {
        let group = |name: &str| Who::Group(name.to_owned());
        let rule =
            |who| LeaseRule { who, quota: QuotaKeys::default(), traffic: TrafficKeys::default(), prewarm: Vec::new() };
        let lease = [Who::Uid(0), Who::Daemon, group("gdrd"), group("gdrd-admin")].into_iter().map(rule).collect();
        Self { admins: vec![Who::Uid(0), group("gdrd-admin")], lease }
    }
}

/// One `[[policy.lease]]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "LeaseRuleKeys", into = "LeaseRuleKeys")]
pub(crate) struct LeaseRule {
    pub(crate) who: Who,
    pub(crate) quota: QuotaKeys,
    pub(crate) traffic: TrafficKeys,
    pub(crate) prewarm: Vec<PrewarmKeys>,
}

/// A lease rule as it is written: the keys of quota and traffic stand beside `who`. Spelled out, since serde cannot refuse unknown
/// keys of a flattened table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct LeaseRuleKeys {
    who: Who,
    #[serde(default = "default_max_bytes")]
    max_bytes: u64,
    #[serde(default = "default_max_registrations")]
    max_registrations: u32,
    #[serde(default = "default_max_queue_pairs")]
    max_queue_pairs: u32,
    #[serde(default = "default_max_sessions")]
    max_sessions: u32,
    #[serde(default = "default_weight")]
    weight: u32,
    #[serde(default)]
    operations_per_s: u64,
    #[serde(default)]
    bytes_per_s: u64,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    prewarm: Vec<PrewarmKeys>,
}

fn default_max_bytes() -> u64 {
    Quota::default().max_bytes
}

fn default_max_registrations() -> u32 {
    Quota::default().max_registrations
}

fn default_max_queue_pairs() -> u32 {
    Quota::default().max_queue_pairs
}

fn default_max_sessions() -> u32 {
    Quota::default().max_sessions
}

fn default_weight() -> u32 {
    Traffic::default().weight
}

impl From<LeaseRuleKeys> for LeaseRule {
    fn from(keys: LeaseRuleKeys) -> Self {
        let LeaseRuleKeys { who, max_bytes, max_registrations, max_queue_pairs, max_sessions, .. } = keys;
        let LeaseRuleKeys { weight, operations_per_s, bytes_per_s, prewarm, .. } = keys;
        let quota = QuotaKeys { max_bytes, max_registrations, max_queue_pairs, max_sessions };
        Self { who, quota, traffic: TrafficKeys { weight, operations_per_s, bytes_per_s }, prewarm }
    }
}

impl From<LeaseRule> for LeaseRuleKeys {
    fn from(rule: LeaseRule) -> Self {
        let LeaseRule { who, quota, traffic, prewarm } = rule;
        let QuotaKeys { max_bytes, max_registrations, max_queue_pairs, max_sessions } = quota;
        let TrafficKeys { weight, operations_per_s, bytes_per_s } = traffic;
        Self {
            who,
            max_bytes,
            max_registrations,
            max_queue_pairs,
            max_sessions,
            weight,
            operations_per_s,
            bytes_per_s,
            prewarm,
        }
    }
}

/// What one tenant of a rule may have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct QuotaKeys {
    pub(crate) max_bytes: u64,
    pub(crate) max_registrations: u32,
    pub(crate) max_queue_pairs: u32,
    pub(crate) max_sessions: u32,
}

impl Default for QuotaKeys {
    fn default() -> Self {
        let Quota { max_bytes, max_registrations, max_queue_pairs, max_sessions } = Quota::default();
        Self { max_bytes, max_registrations, max_queue_pairs, max_sessions }
    }
}

/// What the brokered queue pairs of one tenant of a rule may send together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TrafficKeys {
    pub(crate) weight: u32,
    pub(crate) operations_per_s: u64,
    pub(crate) bytes_per_s: u64,
}

impl Default for TrafficKeys {
    fn default() -> Self {
        let Traffic { weight, operations_per_s, bytes_per_s } = Traffic::default();
        Self { weight, operations_per_s, bytes_per_s }
    }
}

/// Buffers made ready when a tenant of the rule opens its first session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PrewarmKeys {
    pub(crate) gpu: String,
    pub(crate) size_bytes: u64,
    pub(crate) count: u32,
}

/// Values of `log.format`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum LogFormat {
    /// Lines for people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

/// Table `log`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct LogKeys {
    pub(crate) format: LogFormat,
    /// Directives of tracing-subscriber's `EnvFilter`.
    pub(crate) filter: String,
}

impl Default for LogKeys {
    fn default() -> Self {
        Self { format: LogFormat::default(), filter: "info".to_owned() }
    }
}
