//! Table `cache`: registrations of clients' memory.

use std::time::Duration;

use gdrd_engine::{CacheConfig, EngineConfig};
use serde::{Deserialize, Serialize};

use super::range::Ranges;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct CacheKeys {
    pub(crate) max_regions: u32,
    pub(crate) max_idle_regions: u32,
    pub(crate) max_idle_bytes: u64,
    pub(crate) idle_s: u64,
    pub(crate) merge_gap_bytes: u64,
    /// 0 for what the GPU driver tells.
    pub(crate) bar1_bytes: u64,
    pub(crate) max_memories_per_session: u32,
    pub(crate) max_registrations_per_session: u32,
}

impl Default for CacheKeys {
    fn default() -> Self {
        let defaults = EngineConfig::default().cache;
        Self {
            max_regions: defaults.max_regions,
            max_idle_regions: defaults.max_idle_regions,
            max_idle_bytes: defaults.max_idle_bytes,
            idle_s: defaults.idle.as_secs(),
            merge_gap_bytes: defaults.merge_gap_bytes,
            bar1_bytes: defaults.bar1_bytes.unwrap_or(0),
            max_memories_per_session: defaults.max_memories_per_session,
            max_registrations_per_session: defaults.max_registrations_per_session,
        }
    }
}

impl CacheKeys {
    pub(super) fn check(&self, ranges: &mut Ranges) {
        ranges.within("cache.max_regions", self.max_regions.into(), 1, 32_768);
        ranges.within("cache.max_idle_regions", self.max_idle_regions.into(), 0, 32_768);
        ranges.within("cache.max_idle_bytes", self.max_idle_bytes, 0, 1 << 50);
        ranges.within("cache.idle_s", self.idle_s, 1, 24 * 3600);
        ranges.within("cache.merge_gap_bytes", self.merge_gap_bytes, 0, 1 << 40);
        ranges.within("cache.bar1_bytes", self.bar1_bytes, 0, 1 << 50);
        ranges.within("cache.max_memories_per_session", self.max_memories_per_session.into(), 0, 65_536);
        ranges.within("cache.max_registrations_per_session", self.max_registrations_per_session.into(), 0, 1 << 20);
    }

    pub(super) fn settings(&self) -> CacheConfig {
        CacheConfig {
            max_regions: self.max_regions,
            max_idle_regions: self.max_idle_regions,
            max_idle_bytes: self.max_idle_bytes,
            idle: Duration::from_secs(self.idle_s),
            merge_gap_bytes: self.merge_gap_bytes,
            bar1_bytes: (self.bar1_bytes > 0).then_some(self.bar1_bytes),
            max_memories_per_session: self.max_memories_per_session,
            max_registrations_per_session: self.max_registrations_per_session,
            ..CacheConfig::default()
        }
    }
}
