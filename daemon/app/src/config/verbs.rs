//! Table `verbs`: how queue pairs of real RDMA devices address their packets.

use gdrd_verbs::Options;
use serde::{Deserialize, Serialize};

use super::range::Ranges;

/// Keys of the table; the defaults are those of the backend.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct VerbsKeys {
    /// Row of the GID table; unset chooses.
    #[serde(skip_serializing_if = "Option::is_none")]
    gid_index: Option<u16>,
    traffic_class: u8,
    service_level: u8,
    pkey_index: u16,
    mtu: u32,
    ack_timeout: u8,
    retry_count: u8,
    /// Whether sessions may have contexts of their own.
    pub(super) direct: bool,
}

impl Default for VerbsKeys {
    fn default() -> Self {
        let options = Options::default();
        Self {
            gid_index: options.gid_index,
            traffic_class: options.traffic_class,
            service_level: options.service_level,
            pkey_index: options.pkey_index,
            mtu: options.mtu_bytes,
            ack_timeout: options.ack_timeout_exponent,
            retry_count: options.retry_count,
            direct: false,
        }
    }
}

impl VerbsKeys {
    pub(super) fn check(&self, ranges: &mut Ranges) {
        // `sgid_index` of struct ibv_global_route has 8 bits.
        ranges.within("verbs.gid_index", self.gid_index.unwrap_or(0).into(), 0, 255);
        ranges.within("verbs.service_level", self.service_level.into(), 0, 15);
        ranges.within("verbs.mtu", self.mtu.into(), 256, 4096);
        ranges.power_of_two("verbs.mtu", self.mtu);
        // 0 would wait for a dead peer without end.
        ranges.within("verbs.ack_timeout", self.ack_timeout.into(), 1, 31);
        ranges.within("verbs.retry_count", self.retry_count.into(), 0, 7);
    }

    pub(crate) fn options(&self) -> Options {
        Options {
            gid_index: self.gid_index,
            traffic_class: self.traffic_class,
            service_level: self.service_level,
            pkey_index: self.pkey_index,
            mtu_bytes: self.mtu,
            ack_timeout_exponent: self.ack_timeout,
            retry_count: self.retry_count,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mtu_is_one_of_verbs_and_reaches_the_backend() {
        let keys = |mtu| VerbsKeys { mtu, ..VerbsKeys::default() };
        let check = |mtu| {
            let mut ranges = Ranges::default();
            keys(mtu).check(&mut ranges);
            ranges.finish()
        };
        for mtu in [256, 1024, 4096] {
            check(mtu).expect("it is one");
            assert_eq!(keys(mtu).options().mtu_bytes, mtu);
        }
        for mtu in [0, 128, 1500, 8192] {
            assert!(check(mtu).expect_err("it is none").to_string().contains("verbs.mtu"), "{mtu}");
        }
    }
}
