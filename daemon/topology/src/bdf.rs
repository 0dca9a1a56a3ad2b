//! PCI addresses. Parsed once, compared as numbers, printed one way: NVML pads the domain to eight digits,
//! sysfs to four, so text is never compared.

use std::cmp::Ordering;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Address of one PCI function: domain, bus, device and function number.
///
/// The domain has 32 bits (Linux gives virtual root ports such as VMD domains from 0x10000 on).
/// Prints as sysfs does, lower-case, the domain with at least four digits: `0000:07:00.0`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Bdf {
    /// PCI domain (segment), 32 bits.
    pub domain: u32,
    /// Bus number, 0-255.
    pub bus: u8,
    /// Device (slot) number, 0-31.
    pub device: u8,
    /// Function number, 0-7.
    pub function: u8,
}

/// First of the PCI domains that no host has (Linux counts up from 0, and gives virtual root ports those from 0x10000
/// on): their addresses stand for places that an input lists without one.
pub const INVENTED_DOMAINS: u32 = 0xffff_fffe;

impl Bdf {
    /// Domain, bus, device and function as one number: what the order goes by, cheap to compare.
    fn number(self) -> u64 {
        u64::from(self.domain) << 24
            | u64::from(self.bus) << 16
            | u64::from(self.device) << 8
            | u64::from(self.function)
    }

    /// Whether it only stands for a place in this program, and is no address of the host: never to be shown as one.
    #[must_use]
    pub fn is_invented(self) -> bool {
        self.domain >= INVENTED_DOMAINS
    }
}

/// A root bus: the bus directly below a host bridge. Prints as the sysfs folder, `pci0000:00`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RootBus {
    /// PCI domain (segment), 32 bits.
    pub domain: u32,
    /// Bus number, 0-255.
    pub bus: u8,
}

impl Ord for Bdf {
    fn cmp(&self, other: &Self) -> Ordering {
        self.number().cmp(&other.number())
    }
}

impl PartialOrd for Bdf {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl RootBus {
    /// As [`Bdf::is_invented`].
    #[must_use]
    pub fn is_invented(self) -> bool {
        self.domain >= INVENTED_DOMAINS
    }
}

/// Text that is not a PCI address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is no PCI {wanted}")]
pub struct ParseBdfError {
    text: String,
    wanted: &'static str,
}

/// Most characters of a refused text that an error repeats.
const ECHO_CHARS: usize = 64;

impl ParseBdfError {
    fn new(text: &str, wanted: &'static str) -> Self {
        Self { text: text.chars().take(ECHO_CHARS).collect(), wanted }
    }
}

/// A hexadecimal field of `least` to `most` digits, no sign, no prefix.
fn hex(text: &str, least: usize, most: usize) -> Option<u32> {
    let digits_only = text.bytes().all(|byte| byte.is_ascii_hexdigit());
    if text.len() < least || text.len() > most || !digits_only {
        return None;
    }
    u32::from_str_radix(text, 16).ok()
}

/// `DDDD:BB`, the part that a function address and a root bus share.
fn domain_and_bus(text: &str) -> Option<(u32, u8)> {
    let (domain, bus) = text.split_once(':')?;
    Some((hex(domain, 4, 8)?, u8::try_from(hex(bus, 2, 2)?).ok()?))
}

fn parse_bdf(text: &str) -> Option<Bdf> {
    let (head, tail) = text.rsplit_once(':')?;
    let (domain, bus) = domain_and_bus(head)?;
    let (device, function) = tail.split_once('.')?;
    let device = u8::try_from(hex(device, 2, 2)?).ok()?;
    let function = u8::try_from(hex(function, 1, 1)?).ok()?;
    (device < 32 && function < 8).then_some(Bdf { domain, bus, device, function })
}

fn parse_root_bus(text: &str) -> Option<RootBus> {
    let (domain, bus) = domain_and_bus(text.strip_prefix("pci")?)?;
    Some(RootBus { domain, bus })
}

/// One part of a path of sysfs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PathPart {
    RootBus(RootBus),
    Function(Bdf),
    Other,
}

impl PathPart {
    /// What a part is; most are neither, so that no error is made of it.
    pub(crate) fn of(text: &str) -> Self {
        let root = parse_root_bus(text).map(Self::RootBus);
        root.or_else(|| parse_bdf(text).map(Self::Function)).unwrap_or(Self::Other)
    }
}

impl FromStr for Bdf {
    type Err = ParseBdfError;

    /// Takes `DDDD:BB:DD.F` with four to eight domain digits, in either case. An address without a
    /// domain is refused: it would join devices of different domains.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        parse_bdf(text).ok_or_else(|| ParseBdfError::new(text, "address (want DDDD:BB:DD.F)"))
    }
}

impl FromStr for RootBus {
    type Err = ParseBdfError;

    /// Takes the sysfs folder name, `pciDDDD:BB`.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        parse_root_bus(text).ok_or_else(|| ParseBdfError::new(text, "root bus (want pciDDDD:BB)"))
    }
}

impl fmt::Display for Bdf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{:x}", self.domain, self.bus, self.device, self.function)
    }
}

impl fmt::Display for RootBus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pci{:04x}:{:02x}", self.domain, self.bus)
    }
}

/// Debug prints what Display prints, and serde writes and reads it: an address has one form.
macro_rules! text_form {
    ($name:ident) => {
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }

        impl Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = String::deserialize(deserializer)?;
                text.parse().map_err(serde::de::Error::custom)
            }
        }
    };
}

text_form!(Bdf);
text_form!(RootBus);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_print_as_sysfs_does_whatever_the_padding() {
        for (given, printed) in [
            ("0000:07:00.0", "0000:07:00.0"),
            ("00000000:B7:1F.7", "0000:b7:1f.7"),
            ("10000:00:04.0", "10000:00:04.0"),
            ("ffffffff:ff:1f.7", "ffffffff:ff:1f.7"),
        ] {
            let bdf: Bdf = given.parse().unwrap();
            assert_eq!(bdf.to_string(), printed);
        }
    }

    #[test]
    fn malformed_addresses_are_refused() {
        for bad in [
            "",
            "07:00.0",
            "0000:07:00",
            "0000:07:20.0",
            "0000:07:00.8",
            "0000:7:00.0",
            "0000:07:00.0 ",
            "+000:07:00.0",
            "100000000:00:00.0",
            "pci0000:00",
            "::.",
            "日本:07:00.0",
        ] {
            assert!(bad.parse::<Bdf>().is_err(), "{bad}");
        }
    }

    #[test]
    fn root_buses_use_the_folder_name() {
        let root: RootBus = "pci10000:e0".parse().unwrap();
        assert_eq!(root.domain, 0x10000);
        assert_eq!(root.to_string(), "pci10000:e0");
        assert!("0000:00".parse::<RootBus>().is_err());
    }
}
