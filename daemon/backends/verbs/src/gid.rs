//! Which row of a GID table a queue pair uses.

use std::collections::BTreeSet;

use gdrd_hal::{GidEntry, GidType, LinkLayer};

/// Last row that a queue pair can name: `sgid_index` of `struct ibv_global_route` (verbs.h) has 8 bits.
pub(crate) const LAST_ROW: u16 = 255;

/// The row for traffic that may be routed: RoCE v2 before v1 on Ethernet, an address before a link-local one, IPv4
/// before IPv6, a link-local one that is its netdev's now before others, then the lowest row; the lowest row of its type on
/// InfiniBand. A row that the operator asks for is taken whatever it is. `None`: no row up to 255 is filled, or not the one
/// asked for. `current`: rows whose address is made of what their netdev's hardware address is now.
///
/// The table may have gaps and may change at any time: rows are found by their index, never by their place.
#[must_use]
pub fn choose_gid(
    entries: &[GidEntry],
    link_layer: LinkLayer,
    asked: Option<u16>,
    current: &BTreeSet<u16>,
) -> Option<GidEntry> {
    let filled = entries.iter().filter(|entry| entry.gid.0 != [0; 16] && entry.gid_index <= LAST_ROW);
    if let Some(gid_index) = asked {
        return filled.copied().find(|entry| entry.gid_index == gid_index);
    }
    let is_candidate = |entry: &&GidEntry| match link_layer {
        LinkLayer::InfiniBand => entry.gid_type == GidType::Ib,
        _ => matches!(entry.gid_type, GidType::RoceV2 | GidType::RoceV1),
    };
    filled.filter(is_candidate).min_by_key(|entry| rank(entry, link_layer, current)).copied()
}

/// Less is better.
fn rank(entry: &GidEntry, link_layer: LinkLayer, current: &BTreeSet<u16>) -> (bool, bool, bool, bool, u16) {
    if link_layer == LinkLayer::InfiniBand {
        return (false, false, false, false, entry.gid_index);
    }
    let (is_v1, is_link_local) = (entry.gid_type != GidType::RoceV2, is_link_local(&entry.gid.0));
    let may_be_stale = is_link_local && !current.contains(&entry.gid_index);
    (is_v1, is_link_local, !is_ipv4(&entry.gid.0), may_be_stale, entry.gid_index)
}

/// Whether this is the link-local address that follows from a hardware address (RFC 4291, appendix A), as the kernel's own row of
/// a port does (`make_default_gid`, drivers/infiniband/core/roce_gid_mgmt.c).
pub(crate) fn follows_from(gid: &[u8; 16], hardware: [u8; 6]) -> bool {
    let [a, b, c, d, e, f] = hardware;
    *gid == [0xfe, 0x80, 0, 0, 0, 0, 0, 0, a ^ 2, b, c, 0xff, 0xfe, d, e, f]
}

/// fe80::/10 (RFC 4291, 2.5.6).
fn is_link_local(gid: &[u8; 16]) -> bool {
    gid[0] == 0xfe && gid[1] & 0xc0 == 0x80
}

/// ::ffff:0:0/96 (RFC 4291, 2.5.5.2).
fn is_ipv4(gid: &[u8; 16]) -> bool {
    gid[..10] == [0; 10] && gid[10..12] == [0xff; 2]
}

#[cfg(test)]
mod tests {
    use gdrd_hal::Gid;

    use super::*;

    fn entry(gid_index: u16, address: &str, gid_type: GidType) -> GidEntry {
        let address: std::net::Ipv6Addr = address.parse().expect("it is an address");
        GidEntry { gid_index, gid: Gid(address.octets()), gid_type }
    }

    fn chosen(entries: &[GidEntry]) -> Option<u16> {
        choose_gid(entries, LinkLayer::Ethernet, None, &BTreeSet::new()).map(|entry| entry.gid_index)
    }

    #[test]
    fn roce_v2_comes_before_v1_and_ipv4_before_ipv6() {
        let table = [
            entry(0, "fe80::1", GidType::RoceV1),
            entry(1, "fe80::1", GidType::RoceV2),
            entry(2, "2001:db8::1", GidType::RoceV2),
            entry(3, "::ffff:10.0.0.1", GidType::RoceV1),
            entry(4, "::ffff:10.0.0.1", GidType::RoceV2),
        ];
        assert_eq!(chosen(&table), Some(4));
        assert_eq!(chosen(&table[..4]), Some(2));
        assert_eq!(chosen(&table[..2]), Some(1));
        assert_eq!(chosen(&table[..1]), Some(0));
    }

    #[test]
    fn gaps_and_order_of_the_table_do_not_matter() {
        let table = [entry(250, "::ffff:10.0.0.1", GidType::RoceV2), entry(3, "::ffff:10.0.0.2", GidType::RoceV2)];
        assert_eq!(chosen(&table), Some(3));
    }

    #[test]
    fn empty_tables_and_zero_rows_give_nothing() {
        assert_eq!(chosen(&[]), None);
        assert_eq!(chosen(&[entry(0, "::", GidType::RoceV2)]), None);
        assert_eq!(chosen(&[entry(0, "fe80::1", GidType::Ib)]), None, "not a GID of Ethernet");
    }

    /// NVIDIA/nccl#1333, kvcache-ai/Mooncake#2878: the row of an address moves when a link comes back.
    #[test]
    fn an_address_that_moved_to_another_row_is_found_there() {
        let before = [entry(1, "fe80::1", GidType::RoceV2), entry(3, "::ffff:10.0.0.1", GidType::RoceV2)];
        let after = [entry(1, "fe80::1", GidType::RoceV2), entry(5, "::ffff:10.0.0.1", GidType::RoceV2)];
        assert_eq!((chosen(&before), chosen(&after)), (Some(3), Some(5)));
    }

    /// NVIDIA/NV-Kernels#358: the link-local row is still that of the address which the interface had before.
    #[test]
    fn a_link_local_row_of_an_old_mac_gives_way_to_a_routable_one_whatever_its_row() {
        let stale = entry(0, "fe80::5254:ff:fe00:dead", GidType::RoceV2);
        let table = [stale, entry(9, "2001:db8::2", GidType::RoceV2)];
        assert_eq!(chosen(&table), Some(9));
    }

    /// The same without any routable row: the one of the address that the interface has now is higher up.
    #[test]
    fn a_link_local_row_of_an_old_mac_gives_way_to_that_of_the_present_one() {
        let table =
            [entry(0, "fe80::5254:ff:fe00:dead", GidType::RoceV2), entry(1, "fe80::5254:ff:fe00:1", GidType::RoceV2)];
        let present = |gid: &GidEntry| follows_from(&gid.gid.0, [0x50, 0x54, 0, 0, 0, 1]);
        let current: BTreeSet<u16> = table.iter().filter(|row| present(row)).map(|row| row.gid_index).collect();
        assert_eq!(current, [1].into());
        let found = choose_gid(&table, LinkLayer::Ethernet, None, &current);
        assert_eq!(found.map(|entry| entry.gid_index), Some(1));
        assert_eq!(chosen(&table), Some(0), "where nothing is known of the netdev, the first");
    }

    #[test]
    fn rows_that_no_queue_pair_can_name_are_left_out() {
        let table = [entry(256, "::ffff:10.0.0.1", GidType::RoceV2), entry(255, "fe80::1", GidType::RoceV2)];
        assert_eq!(chosen(&table), Some(255));
        assert_eq!(chosen(&table[..1]), None);
        assert_eq!(choose_gid(&table, LinkLayer::Ethernet, Some(256), &BTreeSet::new()), None);
    }

    #[test]
    fn infiniband_takes_its_first_row() {
        let table = [entry(1, "fe80::2", GidType::Ib), entry(0, "fe80::1", GidType::Ib)];
        let found = choose_gid(&table, LinkLayer::InfiniBand, None, &BTreeSet::new());
        assert_eq!(found.map(|entry| entry.gid_index), Some(0));
    }

    #[test]
    fn row_asked_for_is_taken_or_nothing_is() {
        let table = [entry(1, "fe80::1", GidType::RoceV1), entry(4, "::ffff:10.0.0.1", GidType::RoceV2)];
        let asked = |gid_index| choose_gid(&table, LinkLayer::Ethernet, Some(gid_index), &BTreeSet::new());
        let asked = |gid_index| asked(gid_index).map(|entry| entry.gid_index);
        assert_eq!(asked(1), Some(1));
        assert_eq!(asked(2), None);
    }
}
