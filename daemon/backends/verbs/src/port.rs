//! Ports and their GID tables as the device has them now.

use std::collections::BTreeSet;
use std::mem::{MaybeUninit, size_of};

use gdrd_hal::{Gid, GidEntry, GidType, HcaError, LinkLayer, PortAttributes, PortState};
use rdma_sys::{
    IBV_GID_TYPE_IB, IBV_GID_TYPE_ROCE_V1, IBV_GID_TYPE_ROCE_V2, ibv_context, ibv_gid_entry, ibv_mtu, ibv_port_attr,
    ibv_port_state,
};
use rustix::net::{AddressFamily, SocketType};

use crate::context::Context;
use crate::error::{Failed, errno, status};
use crate::gid::follows_from;
use crate::library::Library;
use crate::options::Options;

/// Most rows that are read of all GID tables of a device; bnxt_re has 256 a port, mlx5 at most 4096.
const MAX_GIDS: usize = 1 << 16;

const QUERY: &str = "ibv_query_port";

/// `IBV_LINK_LAYER_*` (verbs.h).
const LINK_LAYER_INFINIBAND: u8 = 1;
const LINK_LAYER_ETHERNET: u8 = 2;

/// Every port, in order.
///
/// # Errors
/// `Gone`, `Driver`.
pub(crate) fn all(context: &Context) -> Result<Vec<PortAttributes>, HcaError> {
    context.check_alive()?;
    let mut raw = Vec::new();
    for port_num in 1..=context.ports() {
        raw.push((port_num, query(context, port_num)?));
    }
    let rows: usize = raw.iter().map(|(_, attr)| usize::try_from(attr.gid_tbl_len).unwrap_or(0)).sum();
    let gids = gids(context, rows.min(MAX_GIDS))?;
    Ok(raw.into_iter().map(|(port_num, attr)| attributes(port_num, &attr, &gids)).collect())
}

fn query(context: &Context, port_num: u8) -> Result<ibv_port_attr, HcaError> {
    // SAFETY: the context is open.
    let attr = unsafe { query_raw(context.library(), context.raw(), port_num) };
    attr.map_err(|errno| context.failed(QUERY, "memory").with(errno))
}

/// The port's attributes; an errno on failure.
///
/// # Safety
/// `raw` must be an open context.
unsafe fn query_raw(library: &Library, raw: *mut ibv_context, port_num: u8) -> Result<ibv_port_attr, i32> {
    // SAFETY: integers only (struct ibv_port_attr, verbs.h); zero is valid. The function writes at most this
    // structure, since older libraries know a prefix of it.
    let mut attr: ibv_port_attr = unsafe { MaybeUninit::zeroed().assume_init() };
    let query = library.ibv_query_port;
    // SAFETY: the context is open (above), and the structure is written during the call only.
    status(unsafe { query(raw, port_num, &raw mut attr) })?;
    Ok(attr)
}

/// Longest message that each port takes, bytes.
///
/// # Safety
/// `raw` must be an open context.
///
/// # Errors
/// As [`all`].
pub(crate) unsafe fn messages(
    library: &Library,
    raw: *mut ibv_context,
    opening: Failed<'_>,
    ports: u8,
) -> Result<Vec<u32>, HcaError> {
    let longest = |port_num| {
        // SAFETY: the caller's.
        unsafe { query_raw(library, raw, port_num) }.map(|attr| attr.max_msg_sz)
    };
    let messages: Result<_, i32> = (1..=ports).map(longest).collect();
    messages.map_err(|errno| Failed { call: QUERY, ..opening }.with(errno))
}

/// A filled row with its port, and the index of its netdev, 0 for none.
type Row = (u32, GidEntry, u32);

/// Rows of a port with a link-local address that follows from the hardware address which their netdev has now.
pub(crate) fn current_link_locals(context: &Context, port_num: u8) -> Result<BTreeSet<u16>, HcaError> {
    let rows = usize::try_from(query(context, port_num)?.gid_tbl_len).unwrap_or(0);
    let of_port = gids(context, rows.saturating_mul(usize::from(context.ports())).min(MAX_GIDS))?;
    let of_port = of_port.into_iter().filter(|(port, ..)| *port == u32::from(port_num));
    let is_current = |gid: &Gid, netdev| hardware_address(netdev).is_some_and(|address| follows_from(&gid.0, address));
    Ok(of_port
        .filter(|(_, entry, netdev)| is_current(&entry.gid, *netdev))
        .map(|(_, entry, _)| entry.gid_index)
        .collect())
}

/// The hardware address of a netdev (Documentation/ABI/testing/sysfs-class-net); `None` for one of another network namespace.
fn hardware_address(netdev: u32) -> Option<[u8; 6]> {
    // Any socket will do (netdevice(7)).
    let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::DGRAM, None).ok()?;
    let name = rustix::net::netdevice::index_to_name(&socket, netdev).ok()?;
    parse_address(&std::fs::read_to_string(format!("/sys/class/net/{name}/address")).ok()?)
}

fn parse_address(text: &str) -> Option<[u8; 6]> {
    let bytes: Option<Vec<u8>> = text.trim().split(':').map(|byte| u8::from_str_radix(byte, 16).ok()).collect();
    bytes?.try_into().ok()
}

fn gids(context: &Context, rows: usize) -> Result<Vec<Row>, HcaError> {
    if rows == 0 {
        return Ok(Vec::new());
    }
    let mut table: Vec<ibv_gid_entry> = Vec::with_capacity(rows);
    let query = context.library()._ibv_query_gid_table;
    // SAFETY: the context is open; room for `rows` entries of the size that is passed was reserved.
    let found = unsafe { query(context.raw(), table.as_mut_ptr(), rows, 0, size_of::<ibv_gid_entry>()) };
    let failed = context.failed("ibv_query_gid_table", "memory");
    let filled = usize::try_from(found).map_err(|_| {
        // It returns a negative errno (ibv_query_gid_table(3)), and older libraries set errno.
        let number = i32::try_from(-found).ok().filter(|number| *number > 1).unwrap_or_else(errno);
        failed.with(number)
    })?;
    // SAFETY: the function has written that many entries, never more than asked for.
    unsafe { table.set_len(filled.min(rows)) };
    Ok(table.iter().filter_map(row).collect())
}

/// Rows of a type that is not known are left out, as are indices that no port has.
fn row(entry: &ibv_gid_entry) -> Option<Row> {
    let gid_type = match entry.gid_type {
        IBV_GID_TYPE_IB => GidType::Ib,
        IBV_GID_TYPE_ROCE_V1 => GidType::RoceV1,
        IBV_GID_TYPE_ROCE_V2 => GidType::RoceV2,
        _ => return None,
    };
    // SAFETY: both members of the union are 16 plain bytes (union ibv_gid), all written by the library.
    let raw = unsafe { entry.gid.raw };
    let gid = GidEntry { gid_index: u16::try_from(entry.gid_index).ok()?, gid: Gid(raw), gid_type };
    Some((entry.port_num, gid, entry.ndev_ifindex))
}

fn attributes(port_num: u8, attr: &ibv_port_attr, gids: &[Row]) -> PortAttributes {
    PortAttributes {
        port_num,
        state: match attr.state {
            ibv_port_state::IBV_PORT_DOWN => PortState::Down,
            ibv_port_state::IBV_PORT_INIT => PortState::Init,
            ibv_port_state::IBV_PORT_ARMED => PortState::Armed,
            ibv_port_state::IBV_PORT_ACTIVE => PortState::Active,
            _ => PortState::Unknown,
        },
        link_layer: match attr.link_layer {
            LINK_LAYER_INFINIBAND => LinkLayer::InfiniBand,
            LINK_LAYER_ETHERNET => LinkLayer::Ethernet,
            _ => LinkLayer::Unknown,
        },
        rate_gbps: lanes(attr.active_width) * lane_gbps(attr.active_speed),
        lid: attr.lid,
        mtu_bytes: mtu_bytes(attr.active_mtu),
        gids: gids.iter().filter(|(port, ..)| *port == u32::from(port_num)).map(|(_, entry, _)| *entry).collect(),
    }
}

/// `active_width` (ibv_query_port(3)); 0 for a width that is not known.
fn lanes(width: u8) -> f64 {
    match width {
        1 => 1.0,
        2 => 4.0,
        4 => 8.0,
        8 => 12.0,
        16 => 2.0,
        _ => 0.0,
    }
}

/// `active_speed` (ibv_query_port(3)) in Gbit/s a lane, as the kernel's `rate` file gives it.
fn lane_gbps(speed: u8) -> f64 {
    match speed {
        1 => 2.5,
        2 => 5.0,
        4 | 8 => 10.0,
        16 => 14.0,
        32 => 25.0,
        64 => 50.0,
        128 => 100.0,
        _ => 0.0,
    }
}

const MTUS: [(ibv_mtu::Type, u32); 5] = [
    (ibv_mtu::IBV_MTU_256, 256),
    (ibv_mtu::IBV_MTU_512, 512),
    (ibv_mtu::IBV_MTU_1024, 1024),
    (ibv_mtu::IBV_MTU_2048, 2048),
    (ibv_mtu::IBV_MTU_4096, 4096),
];

/// 0 for an MTU that is not known.
fn mtu_bytes(mtu: ibv_mtu::Type) -> u32 {
    MTUS.iter().find(|(known, _)| *known == mtu).map_or(0, |(_, bytes)| *bytes)
}

/// What an endpoint tells of its port; 0 for an MTU that is not known.
pub(crate) fn path_mtu_bytes(of_port: u32, options: &Options) -> u32 {
    of_port.min(options.mtu_bytes)
}

/// `None` for lengths that are no MTU of RDMA.
pub(crate) fn mtu_of(bytes: u32) -> Option<ibv_mtu::Type> {
    MTUS.iter().find(|(_, known)| *known == bytes).map(|(mtu, _)| *mtu)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mtus_have_two_names_and_no_others() {
        assert_eq!(mtu_of(1024), Some(3));
        assert_eq!(mtu_bytes(5), 4096);
        assert_eq!(mtu_of(1500), None);
        assert_eq!(mtu_bytes(99), 0);
    }

    #[test]
    fn the_smaller_of_the_port_s_mtu_and_the_one_chosen_is_told() {
        let chosen = |mtu_bytes| Options { mtu_bytes, ..Options::default() };
        assert_eq!(path_mtu_bytes(4096, &Options::default()), 4096);
        assert_eq!(path_mtu_bytes(4096, &chosen(1024)), 1024);
        assert_eq!(path_mtu_bytes(1024, &chosen(2048)), 1024);
        assert_eq!(path_mtu_bytes(0, &chosen(1024)), 0, "one that is not known is none");
    }

    #[test]
    fn hardware_addresses_are_read_as_sysfs_has_them() {
        assert_eq!(parse_address("52:54:00:ab:00:01\n"), Some([0x52, 0x54, 0, 0xab, 0, 1]));
        // InfiniBand has 20 bytes, some virtual netdevs none.
        for other in ["", "\n", "00:00:10:29:fe:80:00:00:00:00:00:00", "52:54:00:ab:00:zz"] {
            assert_eq!(parse_address(other), None, "{other}");
        }
        assert_eq!(hardware_address(0), None, "no netdev has this index");
    }

    #[test]
    fn values_that_a_driver_invents_are_told_as_unknown() {
        // SAFETY: integers only; zero is valid.
        let mut attr: ibv_port_attr = unsafe { MaybeUninit::zeroed().assume_init() };
        (attr.state, attr.link_layer, attr.active_width, attr.active_speed, attr.active_mtu) = (99, 99, 99, 99, 99);
        let port = attributes(2, &attr, &[]);
        assert_eq!((port.state, port.link_layer, port.mtu_bytes), (PortState::Unknown, LinkLayer::Unknown, 0));
        assert!(port.rate_gbps.abs() < f64::EPSILON);
    }

    #[test]
    fn rows_go_to_their_port_and_rows_of_unknown_type_nowhere() {
        // SAFETY: integers and a union of them; zero is valid.
        let mut entry: ibv_gid_entry = unsafe { MaybeUninit::zeroed().assume_init() };
        (entry.port_num, entry.gid_index, entry.gid_type) = (2, 200, IBV_GID_TYPE_ROCE_V2);
        let rows: Vec<Row> = row(&entry).into_iter().collect();
        // SAFETY: integers only; zero is valid.
        let attr: ibv_port_attr = unsafe { MaybeUninit::zeroed().assume_init() };
        assert_eq!(attributes(2, &attr, &rows).gids.len(), 1);
        assert!(attributes(1, &attr, &rows).gids.is_empty());
        entry.gid_type = 77;
        assert!(row(&entry).is_none());
        (entry.gid_type, entry.gid_index) = (IBV_GID_TYPE_ROCE_V2, u32::MAX);
        assert!(row(&entry).is_none());
    }
}
