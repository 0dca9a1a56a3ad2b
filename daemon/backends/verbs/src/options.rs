//! What an operator may choose for all devices.

/// Settings of queue pairs; the defaults fit most fabrics.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
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
}
