//! What an operator may choose for all devices.

use gdrd_hal::{ACK_TIMEOUT_EXPONENT, RETRY_COUNT};

/// Settings of queue pairs; the defaults fit most fabrics.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Row of the GID table to use on every port; `None` chooses as [`crate::choose_gid`] says.
    pub gid_index: Option<u16>,
    /// Traffic class of routed traffic: on RoCE v2 the DSCP in its upper six bits and ECN (`traffic_class` of
    /// `struct ibv_global_route`, ibv_modify_qp(3)).
    pub traffic_class: u8,
    /// Service level (`sl` of `struct ibv_ah_attr`), 0 to 15.
    pub service_level: u8,
    /// Row of the port's P_Key table.
    pub pkey_index: u16,
    /// Largest path MTU, bytes: 256, 512, 1024, 2048 or 4096. The smaller of this and of both ports' is used.
    pub mtu_bytes: u32,
    /// Time to an acknowledgement before a try is made anew: 4.096 us times two to this, 1 to 31 (`timeout`, ibv_modify_qp(3)).
    /// Devices may take up to four times as long (InfiniBand specification vol. 1, 9.7.6.1.3).
    pub ack_timeout_exponent: u8,
    /// Tries after the first before a request fails, 0 to 7 (`retry_cnt`). Soft RoCE takes 7 for without end.
    pub retry_count: u8,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            gid_index: None,
            traffic_class: 0,
            service_level: 0,
            pkey_index: 0,
            mtu_bytes: 4096,
            ack_timeout_exponent: ACK_TIMEOUT_EXPONENT,
            retry_count: RETRY_COUNT,
        }
    }
}
