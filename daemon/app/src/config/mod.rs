//! `gdrd.toml`: read whole, checked whole, before anything is done.
//!
//! Role: from text to a [`Config`] whose every value is within its range. Unknown keys are refused, units are in the
//! key names, and an error names key, value and what is allowed. Must not know: sockets, hardware, the environment.

mod cache;
mod file;
mod range;
mod tables;
mod together;
mod topology;
mod verbs;
mod who;

use std::path::{Path, PathBuf};

use gdrd_engine::{EngineConfig, GpuProof, Policy, Prewarm, Quota, Rule, Traffic};
use gdrd_server::ServerLimits;
use thiserror::Error;

pub(crate) use file::{Config, LogFormat};
use file::{GpuProofKey, LeaseRule, QuotaKeys, TrafficKeys};
use range::Ranges;
pub(crate) use tables::GpuKeys;
pub(crate) use topology::TopologyKeys;

/// Longest configuration file, bytes.
const MAX_CONFIG_BYTES: u64 = 1024 * 1024;

/// Why a configuration is refused. Nothing was done by then.
#[derive(Debug, Error)]
#[non_exhaustive]
pub(crate) enum ConfigError {
    /// The file cannot be read.
    #[error("configuration {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A folder, FIFO or device.
    #[error("{}: not a regular file", path.display())]
    NotAFile {
        /// What is no file.
        path: PathBuf,
    },
    /// The file is longer than any configuration.
    #[error("{}: longer than {MAX_CONFIG_BYTES} bytes", path.display())]
    TooLong {
        /// The file.
        path: PathBuf,
    },
    /// No TOML, an unknown key, or a value of another type.
    #[error("{}: {problem}", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// Line, key and what is wrong.
        problem: String,
    },
    /// A value out of its range.
    #[error("{key} = {value} is not allowed; {allowed}")]
    Value {
        /// The key with its table.
        key: String,
        /// As given.
        value: String,
        /// The range.
        allowed: String,
    },
    /// Values that are each in range but do not go together.
    #[error("{0}")]
    Together(String),
}

impl Config {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// Any of [`ConfigError`].
    pub(crate) fn read(path: &Path) -> Result<Self, ConfigError> {
        use std::io::Read as _;
        let failed = |source| ConfigError::Read { path: path.to_owned(), source };
        // Opening a FIFO without NONBLOCK waits for a writer that may never come.
        let flags = rustix::fs::OFlags::NONBLOCK | rustix::fs::OFlags::CLOEXEC;
        let file = rustix::fs::open(path, flags, rustix::fs::Mode::empty()).map_err(|error| failed(error.into()))?;
        let file = std::fs::File::from(file);
        if !file.metadata().map_err(failed)?.is_file() {
            return Err(ConfigError::NotAFile { path: path.to_owned() });
        }
        let mut text = String::new();
        file.take(MAX_CONFIG_BYTES + 1).read_to_string(&mut text).map_err(failed)?;
        if u64::try_from(text.len()).is_ok_and(|len_bytes| len_bytes > MAX_CONFIG_BYTES) {
            return Err(ConfigError::TooLong { path: path.to_owned() });
        }
        Self::parse(&text, path)
    }

    /// Parses and checks a text; `path` is for messages.
    ///
    /// # Errors
    /// `Parse`, `Value`.
    pub(crate) fn parse(text: &str, path: &Path) -> Result<Self, ConfigError> {
        let problem = |error: toml::de::Error| error.to_string().trim_end().to_owned();
        let config: Self = toml::from_str(text)
            .map_err(|error| ConfigError::Parse { path: path.to_owned(), problem: problem(error) })?;
        config.check()?;
        Ok(config)
    }

    /// Every range, so that the parts below can be built without failing.
    fn check(&self) -> Result<(), ConfigError> {
        let mut ranges = Ranges::default();
        self.limits.check(&mut ranges);
        self.pool.check(&mut ranges);
        self.cache.check(&mut ranges);
        self.broker.check(&mut ranges);
        self.executor.check(&mut ranges);
        self.gpu.check(&mut ranges);
        self.server.check(&mut ranges);
        self.verbs.check(&mut ranges);
        for (index, rule) in self.policy.lease.iter().enumerate() {
            rule.check(&format!("policy.lease[{index}]"), &mut ranges);
        }
        self.topology.check(&mut ranges)?;
        together::check(self, &mut ranges);
        ranges.finish()?;
        let whole = self.engine(Policy::default(), GpuProof::None).validate();
        whole.map_err(|refusal| ConfigError::Together(refusal.to_string()))
    }

    /// The engine's part.
    pub(crate) fn engine(&self, policy: Policy, default_proof: GpuProof) -> EngineConfig {
        EngineConfig {
            policy,
            gpu_proof: self.gpu_proof.map_or(default_proof, GpuProof::from),
            limits: self.limits.settings(),
            pool: self.pool.settings(),
            cache: self.cache.settings(),
            timeouts: self.executor.timeouts(),
            broker: self.broker.settings(),
            executor_threads: self.executor.threads,
            calls_per_device: self.executor.calls_per_device,
            direct: self.verbs.direct,
            // The daemon knows it only once it has its folder.
            drains: None,
        }
    }

    /// The server's part.
    pub(crate) fn server(&self) -> ServerLimits {
        self.server.settings()
    }

    /// The rules with names resolved to numbers; a name that this host does not know gives a warning and no right.
    pub(crate) fn policy(&self, daemon_uid: u32) -> (Policy, Vec<String>) {
        let mut warnings = Vec::new();
        let mut policy = Policy::default();
        for LeaseRule { who, quota, traffic, prewarm } in &self.policy.lease {
            match who.subject(daemon_uid) {
                Ok(subject) => policy.leases.push(Rule {
                    subject,
                    quota: quota.quota(),
                    traffic: traffic.traffic(),
                    prewarm: prewarm.iter().map(Prewarm::from).collect(),
                }),
                Err(problem) => warnings.push(format!("lease rule for {who}: {problem}")),
            }
        }
        for who in &self.policy.admins {
            match who.subject(daemon_uid) {
                Ok(subject) => policy.admins.push(subject),
                Err(problem) => warnings.push(format!("administrator {who}: {problem}")),
            }
        }
        (policy, warnings)
    }
}

impl From<GpuProofKey> for GpuProof {
    fn from(key: GpuProofKey) -> Self {
        match key {
            GpuProofKey::DeviceNode => Self::DeviceNode,
            GpuProofKey::None => Self::None,
        }
    }
}

impl LeaseRule {
    fn check(&self, at: &str, ranges: &mut Ranges) {
        let mut within = |key: &str, value, least, most| ranges.within(&format!("{at}.{key}"), value, least, most);
        within("max_bytes", self.quota.max_bytes, 0, 1 << 50);
        within("max_registrations", self.quota.max_registrations.into(), 0, 1 << 20);
        within("max_queue_pairs", self.quota.max_queue_pairs.into(), 0, 65_536);
        within("max_sessions", self.quota.max_sessions.into(), 0, 65_536);
        within("weight", self.traffic.weight.into(), 1, 1000);
        within("operations_per_s", self.traffic.operations_per_s, 0, 100_000_000);
        within("bytes_per_s", self.traffic.bytes_per_s, 0, 1 << 40);
        for prewarm in &self.prewarm {
            within("prewarm.size_bytes", prewarm.size_bytes, 1, 1 << 40);
            within("prewarm.count", prewarm.count.into(), 1, 4096);
        }
    }
}

impl QuotaKeys {
    fn quota(&self) -> Quota {
        Quota {
            max_bytes: self.max_bytes,
            max_registrations: self.max_registrations,
            max_queue_pairs: self.max_queue_pairs,
            max_sessions: self.max_sessions,
        }
    }
}

impl TrafficKeys {
    fn traffic(&self) -> Traffic {
        Traffic { weight: self.weight, operations_per_s: self.operations_per_s, bytes_per_s: self.bytes_per_s }
    }
}

impl From<&file::PrewarmKeys> for Prewarm {
    fn from(keys: &file::PrewarmKeys) -> Self {
        Self { gpu: keys.gpu.clone(), size_bytes: keys.size_bytes, count: keys.count }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHIPPED: &str = include_str!("../../../../config/gdrd.toml");

    fn parse(text: &str) -> Result<Config, String> {
        Config::parse(text, Path::new("gdrd.toml")).map_err(|error| error.to_string())
    }

    #[test]
    fn shipped_file_says_what_the_code_does_anyway() {
        assert_eq!(parse(SHIPPED), Ok(Config::default()));
    }

    #[test]
    fn shipped_file_names_every_key() {
        let keys: toml::Table = toml::from_str(SHIPPED).expect("it parses");
        let defaults = toml::Table::try_from(Config::default()).expect("it serializes");
        for (table, value) in &defaults {
            let shown = keys.get(table).unwrap_or_else(|| panic!("[{table}] is missing"));
            for key in value.as_table().expect("only tables at the top").keys() {
                assert!(shown.get(key).is_some(), "{table}.{key} is missing");
            }
        }
    }

    #[test]
    fn empty_file_gives_the_defaults_of_engine_and_server() {
        let config = parse("").expect("empty is valid");
        let engine = config.engine(EngineConfig::default().policy, GpuProof::DeviceNode);
        assert_eq!(engine, EngineConfig::default());
        assert_eq!(config.server(), ServerLimits::default());
    }

    #[test]
    fn default_policy_is_root_the_daemon_and_the_two_groups() {
        let config = Config::default();
        let who: Vec<String> = config.policy.lease.iter().map(|rule| rule.who.to_string()).collect();
        assert_eq!(who, ["uid:0", "daemon", "group:gdrd", "group:gdrd-admin"]);
        assert!(config.policy.lease.iter().all(|rule| rule.quota.quota() == Quota::default()));
        let (policy, _) = config.policy(990);
        assert!(policy.leases.iter().any(|rule| rule.subject == gdrd_engine::Subject::Uid(990)));
        assert!(policy.admins.contains(&gdrd_engine::Subject::Uid(0)));
    }

    #[test]
    fn unknown_key_is_named_with_its_line() {
        let message = parse("[limits]\nmax_sesions = 3\n").expect_err("a typo");
        assert!(message.contains("max_sesions"), "{message}");
        assert!(message.contains("line 2"), "{message}");
        assert!(parse("[limts]\n").expect_err("a typo").contains("limts"));
        let rule = "[[policy.lease]]\nwho = \"anyone\"\nmax_byte = 1\n";
        assert!(parse(rule).expect_err("a typo").contains("max_byte"));
    }

    #[test]
    fn value_out_of_range_names_key_value_and_range() {
        let message = parse("[pool]\nidle_s = 0\n").expect_err("out of range");
        assert_eq!(message, "pool.idle_s = 0 is not allowed; 1 to 86400 is");
        let message = parse("[limits]\nregistration_slots = 100\n").expect_err("no power of two");
        assert!(message.starts_with("limits.registration_slots = 100 is not allowed"), "{message}");
        let message = parse("[topology]\nrescan_interval_s = 5\n").expect_err("too often");
        assert!(message.contains("30 to 86400"), "{message}");
        let message = parse("[[policy.lease]]\nwho = \"anyone\"\nmax_sessions = 100000\n").expect_err("out of range");
        assert!(message.starts_with("policy.lease[0].max_sessions = 100000"), "{message}");
    }

    #[test]
    fn traffic_of_a_rule_reaches_the_engine_and_is_checked() {
        let rule = "[[policy.lease]]\nwho = \"uid:7\"\nweight = 3\noperations_per_s = 1000\nbytes_per_s = 5_000_000\n";
        let (policy, _) = parse(rule).expect("valid").policy(0);
        assert_eq!(policy.leases[0].traffic, Traffic { weight: 3, operations_per_s: 1000, bytes_per_s: 5_000_000 });
        for wrong in
            ["weight = 0", "weight = 1001", "operations_per_s = 100_000_001", "bytes_per_s = 2_000_000_000_000"]
        {
            let text = format!("[[policy.lease]]\nwho = \"uid:7\"\n{wrong}\n");
            let key = wrong.split(' ').next().expect("a key");
            let message = parse(&text).expect_err(wrong);
            assert!(message.starts_with(&format!("policy.lease[0].{key} = ")), "{message}");
        }
    }

    #[test]
    fn making_more_buffers_ready_than_are_kept_is_refused() {
        let message = parse("[pool]\nready_target_per_class = 65\n").expect_err("64 are kept");
        assert!(message.starts_with("pool.ready_target_per_class = 65 is not allowed"), "{message}");
        assert!(message.contains("at most pool.ready_max_per_class, 64"), "{message}");
        assert!(parse("[pool]\nready_target_per_class = 65\nready_max_per_class = 65\n").is_ok());
        assert!(parse("[pool]\nready_max_per_class = 0\n").is_err(), "2 are made ahead by default");
    }

    #[test]
    fn several_faults_are_told_one_by_one_and_nothing_is_half_taken() {
        assert!(parse("[pool]\nidle_s = 0\n[broker]\nthreads = 1000\n").is_err());
        assert!(parse("[pool]\nidle_s = -1\n").expect_err("negative").contains("idle_s"));
        assert!(parse("not toml").is_err());
    }

    #[test]
    fn names_unknown_to_the_host_give_no_right() {
        let text = "[policy]\nadmins = [\"group:no-such-group-here\"]\n";
        let (policy, warnings) = parse(text).expect("valid").policy(0);
        assert!(policy.admins.is_empty());
        assert!(warnings.iter().any(|warning| warning.contains("no-such-group-here")), "{warnings:?}");
    }

    #[test]
    fn file_that_is_not_there_is_named() {
        let message = Config::read(Path::new("/nonexistent/gdrd.toml")).expect_err("absent").to_string();
        assert!(message.contains("/nonexistent/gdrd.toml"), "{message}");
    }
}
