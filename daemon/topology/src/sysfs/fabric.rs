//! The interface by which an NVMe-oF controller reaches its target.
//!
//! The controller names it, or its own address, or only the target's; then the routing table tells.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::sysfs::tree::Tree;

const GID_FOLDER: &str = "sys/class/infiniband";

/// Interface for the `address` of a fabrics controller, `traddr=…,trsvcid=…[,host_traddr=…][,host_iface=…]`
/// (`nvmf_get_address`, Linux `drivers/nvme/host/fabrics.c`; TCP adds `src_addr`).
pub(super) fn netdev_towards(tree: &Tree, address: &str) -> Option<String> {
    let field = |name: &str| address.split(',').find_map(|field| field.trim().strip_prefix(name)?.strip_prefix('='));
    if let Some(name) = field("host_iface").filter(|name| !name.is_empty()) {
        return Some(name.to_owned());
    }
    let parse = |name: &str| field(name).and_then(|text| text.parse::<IpAddr>().ok());
    let own = parse("host_traddr").or_else(|| parse("src_addr"));
    own.and_then(|own| netdev_with(tree, own)).or_else(|| route(tree, parse("traddr")?))
}

/// The interface whose RoCE port has this address in its GID table: sysfs holds addresses nowhere else.
fn netdev_with(tree: &Tree, own: IpAddr) -> Option<String> {
    let own = to_v6(own);
    for hca in tree.list_or_warn(GID_FOLDER) {
        for port in tree.list_or_warn(&format!("{GID_FOLDER}/{hca}/ports")) {
            let port = format!("{GID_FOLDER}/{hca}/ports/{port}");
            for index in tree.list_or_warn(&format!("{port}/gids")).into_iter().take(super::rdma::MAX_GIDS) {
                let gid = tree.quiet_text(&format!("{port}/gids/{index}")).and_then(|text| text.parse().ok());
                if gid == Some(own) {
                    return tree.quiet_text(&format!("{port}/gid_attrs/ndevs/{index}")).filter(|name| !name.is_empty());
                }
            }
        }
    }
    None
}

fn to_v6(address: IpAddr) -> Ipv6Addr {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped(),
        IpAddr::V6(address) => address,
    }
}

/// The interface of the most specific route (proc(5): `/proc/net/route`, `/proc/net/ipv6_route`).
fn route(tree: &Tree, target: IpAddr) -> Option<String> {
    match target {
        IpAddr::V4(target) => route_v4(&tree.table("proc/net/route"), target),
        IpAddr::V6(target) => route_v6(&tree.table("proc/net/ipv6_route"), target),
    }
}

/// The kernel prints these addresses as numbers of the host's own byte order, which on every machine with
/// GPUs is little-endian.
fn route_v4(table: &[String], target: Ipv4Addr) -> Option<String> {
    let number = |word: &str| u32::from_str_radix(word, 16).ok().map(u32::swap_bytes);
    let fits = |line: &String| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [name, destination, _, _, _, _, _, mask, ..] = words.as_slice() else { return None };
        let (destination, mask) = (number(destination)?, number(mask)?);
        (target.to_bits() & mask == destination).then(|| (mask.count_ones(), (*name).to_owned()))
    };
    table.iter().filter_map(fits).max_by_key(|(bits, _)| *bits).map(|(_, name)| name)
}

fn route_v6(table: &[String], target: Ipv6Addr) -> Option<String> {
    let fits = |line: &String| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [destination, length, .., name] = words.as_slice() else { return None };
        let destination = u128::from_str_radix(destination, 16).ok()?;
        let length = u32::from_str_radix(length, 16).ok().filter(|length| *length <= 128)?;
        let mask = if length == 0 { 0 } else { u128::MAX << (128 - length) };
        (*name != "lo" && target.to_bits() & mask == destination).then(|| (length, (*name).to_owned()))
    };
    table.iter().filter_map(fits).max_by_key(|(bits, _)| *bits).map(|(_, name)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Vec<String> {
        text.lines().map(str::to_owned).collect()
    }

    #[test]
    fn the_most_specific_route_wins() {
        let table = lines(
            "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n\
             eno1 00000000 0100000A 0003 0 0 100 00000000 0 0 0\n\
             ens1 0000110A 00000000 0001 0 0 0 0000FFFF 0 0 0\n\
             ens2 0001110A 00000000 0001 0 0 0 00FFFFFF 0 0 0",
        );
        let by = |target: [u8; 4]| route_v4(&table, Ipv4Addr::from(target));
        assert_eq!(by([10, 17, 1, 9]).as_deref(), Some("ens2"));
        assert_eq!(by([10, 17, 2, 9]).as_deref(), Some("ens1"));
        assert_eq!(by([8, 8, 8, 8]).as_deref(), Some("eno1"));
        assert_eq!(route_v4(&lines("x y"), Ipv4Addr::LOCALHOST), None);
    }

    #[test]
    fn ipv6_routes_are_read_and_loopback_is_none() {
        let table = lines(
            "fd000000000000010000000000000000 40 00000000000000000000000000000000 00 0 0 0 0 0 ens3\n\
             00000000000000000000000000000000 00 00000000000000000000000000000000 00 0 0 0 0 0 lo",
        );
        assert_eq!(route_v6(&table, "fd00:0:0:1::7".parse().unwrap()).as_deref(), Some("ens3"));
        assert_eq!(route_v6(&table, "fd00:0:0:2::7".parse().unwrap()), None);
    }

    #[test]
    fn a_controller_is_found_by_its_interface_its_own_address_or_the_route_to_its_target() {
        let folder = tempfile::tempdir().unwrap();
        let at = |path: &str, text: &str| {
            let path = folder.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        at("sys/class/infiniband/mlx5_0/ports/1/gids/3", "0000:0000:0000:0000:0000:ffff:0a11:0001\n");
        at("sys/class/infiniband/mlx5_0/ports/1/gid_attrs/ndevs/3", "ens1np0\n");
        at("proc/net/route", "ens7 0000110A 00000000 0001 0 0 0 0000FFFF 0 0 0\n");
        let tree = Tree::open(folder.path()).unwrap();
        let of = |address: &str| netdev_towards(&tree, address);
        assert_eq!(of("traddr=10.17.0.9,trsvcid=4420,host_iface=bond0").as_deref(), Some("bond0"));
        assert_eq!(of("traddr=10.17.0.9,trsvcid=4420,host_traddr=10.17.0.1").as_deref(), Some("ens1np0"));
        assert_eq!(of("traddr=10.17.0.9,trsvcid=4420,src_addr=10.17.0.77").as_deref(), Some("ens7"));
        assert_eq!(of("traddr=nn-0x1:pn-0x2"), None);
    }
}
