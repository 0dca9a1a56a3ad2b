//! Names of a machine and of its parts, each replaced by one of the same form, the same one by the same one.
//!
//! Numbers go by order of first sight, so that a capture tells nothing of the original beyond what is equal and
//! what is adjacent: the last byte of GUIDs and MACs is kept, since ports of one card count in it.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Shortest host name that is looked for inside other texts; shorter ones are parts of ordinary words.
const MIN_HOST_NAME: usize = 4;
const HOST_NAME: &str = "captured-host";

/// Replacements so far.
#[derive(Debug, Default)]
pub(super) struct Pseudonyms {
    host: Vec<String>,
    guids: BTreeMap<u64, u64>,
    gpus: BTreeMap<String, u64>,
    macs: BTreeMap<u64, u64>,
    subnets_v4: BTreeMap<u32, u32>,
    subnets_v6: BTreeMap<u64, u64>,
    words: BTreeMap<String, String>,
}

/// The next number for a key.
fn number<K: Ord>(known: &mut BTreeMap<K, u64>, key: K) -> u64 {
    let next = u64::try_from(known.len()).unwrap_or(u64::MAX).saturating_add(1);
    *known.entry(key).or_insert(next)
}

impl Pseudonyms {
    /// `host` is the name of the machine, with or without its domain.
    pub(super) fn new(host: Option<String>) -> Self {
        let full = host.unwrap_or_default();
        let short = full.split('.').next().unwrap_or_default().to_owned();
        let host = [full, short].into_iter().filter(|name| name.len() >= MIN_HOST_NAME && name != "localhost");
        Self { host: host.collect(), ..Self::default() }
    }

    /// A GUID, EUI-64 or PCI device serial number: `02` and a number, the last byte kept. Zero stays zero.
    pub(super) fn guid(&mut self, guid: u64) -> u64 {
        if guid == 0 || guid == u64::MAX {
            return guid;
        }
        let card = number(&mut self.guids, guid >> 8) & 0x00ff_ffff_ffff;
        0x0200_0000_0000_0000 | card << 8 | guid & 0xff
    }

    /// A GPU's UUID, as one that counts.
    pub(super) fn gpu_uuid(&mut self, uuid: &str) -> String {
        let number = number(&mut self.gpus, uuid.to_owned());
        format!("GPU-00000000-0000-0000-0000-{number:012x}")
    }

    /// A text of four groups, `0200:0000:0001:00a0`, or with `0x`; anything else as a whole.
    pub(super) fn guid_text(&mut self, text: &str) -> String {
        match crate::guid::parse(text) {
            Some(guid) => crate::guid::print(self.guid(guid)),
            // The parser takes all zeros for no GUID.
            None if text.bytes().all(|byte| byte == b'0' || byte == b':') => text.to_owned(),
            None => self.word("guid", text),
        }
    }

    /// A MAC `aa:bb:…` of 6 bytes, or an IPoIB address of 20, whose last 8 are a GUID.
    pub(super) fn hardware_address(&mut self, text: &str) -> String {
        let bytes: Option<Vec<u8>> = text.split(':').map(|byte| u8::from_str_radix(byte, 16).ok()).collect();
        let print = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().join(":");
        match bytes.as_deref() {
            Some(mac) if mac.iter().all(|byte| *byte == 0) => text.to_owned(),
            Some([a, b, c, d, e, f]) => {
                let mac = u64::from_be_bytes([0, 0, *a, *b, *c, *d, *e, *f]);
                print(self.mac(mac).to_be_bytes().get(2..).unwrap_or_default())
            }
            Some(long) if long.len() == 20 => {
                let mut replaced = vec![0_u8; 12];
                let tail: [u8; 8] = long.get(12..).and_then(|tail| tail.try_into().ok()).unwrap_or_default();
                replaced.extend(self.guid(u64::from_be_bytes(tail)).to_be_bytes());
                print(&replaced)
            }
            _ => self.word("address", text),
        }
    }

    /// A MAC: locally administered, a number, the last byte kept.
    fn mac(&mut self, mac: u64) -> u64 {
        let card = number(&mut self.macs, mac >> 8) & 0xffff_ffff;
        0x0200_0000_0000 | card << 8 | mac & 0xff
    }

    /// An address: subnets are numbered, in networks that are kept for tests and documents (RFC 2544, 3849).
    pub(super) fn address(&mut self, address: IpAddr) -> IpAddr {
        match address {
            IpAddr::V4(address) => IpAddr::V4(self.v4(address)),
            IpAddr::V6(address) => IpAddr::V6(self.v6(address)),
        }
    }

    fn v4(&mut self, address: Ipv4Addr) -> Ipv4Addr {
        if address.is_unspecified() || address.is_loopback() {
            return address;
        }
        let bits = address.to_bits();
        let next = u32::try_from(self.subnets_v4.len()).unwrap_or(u32::MAX);
        let subnet = *self.subnets_v4.entry(bits >> 8).or_insert(next) & 0x1ff;
        Ipv4Addr::from_bits(Ipv4Addr::new(198, 18, 0, 0).to_bits() | subnet << 8 | bits & 0xff)
    }

    fn v6(&mut self, address: Ipv6Addr) -> Ipv6Addr {
        if let Some(mapped) = address.to_ipv4_mapped() {
            return self.v4(mapped).to_ipv6_mapped();
        }
        if address.is_unspecified() || address.is_loopback() {
            return address;
        }
        const LINK_LOCAL: u64 = 0xfe80 << 48;
        const DOCUMENTS: u64 = 0x2001_0db8 << 32;
        let bits = address.to_bits();
        let (prefix, id) =
            (u64::try_from(bits >> 64).unwrap_or(0), u64::try_from(bits & u128::from(u64::MAX)).unwrap_or(0));
        let prefix = if prefix == LINK_LOCAL { prefix } else { DOCUMENTS | number(&mut self.subnets_v6, prefix) };
        Ipv6Addr::from_bits(u128::from(prefix) << 64 | u128::from(self.guid(id)))
    }

    /// Any other name, such as a serial number: its kind and a number.
    pub(super) fn word(&mut self, kind: &str, text: &str) -> String {
        if text.is_empty() {
            return String::new();
        }
        let next = self.words.len() + 1;
        self.words.entry(text.to_owned()).or_insert_with(|| format!("{kind}-{next}")).clone()
    }

    /// Name of an interface: systemd makes some of the MAC (`enx` and twelve digits).
    pub(super) fn interface(&mut self, name: &str) -> String {
        let replaced = ["enx", "wlx", "ibx"].into_iter().find_map(|kind| {
            let digits = name.strip_prefix(kind).filter(|digits| digits.len() == 12)?;
            let mac = u64::from_str_radix(digits, 16).ok()?;
            Some(format!("{kind}{:012x}", self.mac(mac)))
        });
        let name = replaced.unwrap_or_else(|| name.to_owned());
        self.without_host_name(&name)
    }

    /// A path whose parts may be names of interfaces.
    pub(super) fn path(&mut self, path: &str) -> String {
        let parts: Vec<String> = path.split('/').map(|part| self.interface(part)).collect();
        parts.join("/")
    }

    /// A text without the name of the machine.
    pub(super) fn without_host_name(&self, text: &str) -> String {
        self.host.iter().fold(text.to_owned(), |text, name| text.replace(name.as_str(), HOST_NAME))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_stays_equal_and_ports_of_one_card_stay_adjacent() {
        let mut names = Pseudonyms::new(None);
        let first = names.guid_text("b83f:d203:00aa:bb10");
        assert_eq!(names.guid_text("b83f:d203:00aa:bb10"), first);
        let second = names.guid_text("b83f:d203:00aa:bb11");
        assert_eq!((first.as_str(), second.as_str()), ("0200:0000:0000:0110", "0200:0000:0000:0111"));
        assert_ne!(names.guid_text("b83f:d203:00aa:cc10"), first);
        assert_eq!(names.guid_text("0000:0000:0000:0000"), "0000:0000:0000:0000");
        assert_eq!(names.hardware_address("b8:3f:d2:aa:bb:10"), "02:00:00:00:01:10");
        assert_eq!(names.interface("enxb83fd2aabb10"), "enx020000000110");
        assert_eq!(names.interface("ens1np0"), "ens1np0");
    }

    #[test]
    fn addresses_keep_their_subnets_and_their_kind() {
        let mut names = Pseudonyms::new(None);
        let mut of = |text: &str| names.address(text.parse().unwrap()).to_string();
        assert_eq!(of("10.17.3.4"), "198.18.0.4");
        assert_eq!(of("10.17.3.9"), "198.18.0.9");
        assert_eq!(of("10.18.3.9"), "198.18.1.9");
        assert_eq!(of("::ffff:10.17.3.4"), "::ffff:198.18.0.4");
        assert!(of("fe80::b83f:d203:aa:bb10").starts_with("fe80::200:"));
        assert!(of("2a01:4f8::1").starts_with("2001:db8:"));
        assert_eq!(of("::"), "::");
    }

    #[test]
    fn the_name_of_the_machine_is_nowhere() {
        let names = Pseudonyms::new(Some("gpu-017.cluster.example".to_owned()));
        assert_eq!(names.without_host_name("gpu-017 mlx5_0"), "captured-host mlx5_0");
        assert_eq!(names.without_host_name("x gpu-017.cluster.example"), "x captured-host");
    }
}
