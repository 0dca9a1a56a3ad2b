//! Which data-direct function belongs to which NIC: by what both say of themselves in their Vital Product Data.
//!
//! A NIC with data direct has a second PCI function (15b3:2100, ConnectX-8 on) below the GPU's own root, through which it
//! reads and writes GPU memory. Nothing in the tree joins the two. The kernel pairs them by the VUID, keyword `VU` of the
//! function's read-only VPD (linux:drivers/infiniband/hw/mlx5/data_direct.c), against what the NIC's firmware tells; sysfs
//! has only the NIC's own VPD, so that here an equal VUID counts, else one serial number. VPD takes root to read, and a
//! bus transaction a dword, so it is only looked at on hosts that have such functions.
//!
//! Layout: PCI Express Base Specification 6.0, 6.27.

use std::collections::BTreeMap;

use crate::bdf::Bdf;
use crate::model::{PciFunction, RawHca};
use crate::sysfs::tree::Tree;

const MELLANOX: u16 = 0x15b3;
const DATA_DIRECT: u16 = 0x2100;
/// As much of a VPD as is read: real ones of NICs have 256 to 512 bytes.
const MAX_BYTES: usize = 1024;
/// What stands before the part of a VUID that tells functions of one card apart (`…MLNXS0D0F0`).
const VUID_MARK: &str = "MLNX";

const READ_ONLY: u8 = 0x90;
/// Bit of a tag that has its length in two bytes after it.
const LARGE: u8 = 0x80;
const END: u8 = 0x78;

/// What a VPD tells of who a function is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Vpd {
    /// Keyword `SN`, else the first part of the VUID.
    pub(super) serial: Option<String>,
    /// Keyword `VU`.
    pub(super) vuid: Option<String>,
}

impl Vpd {
    /// Reads the VPD of the function in a folder; `None` if it is not there or takes more rights.
    pub(super) fn read(tree: &Tree, folder: &str) -> Option<Self> {
        let vpd = Self::parse(&tree.bytes(&format!("{folder}/vpd"), MAX_BYTES).ok()?);
        (vpd.serial.is_some() || vpd.vuid.is_some()).then_some(vpd)
    }

    fn parse(bytes: &[u8]) -> Self {
        let mut vpd = Self::default();
        let mut rest = bytes;
        // Each resource takes a byte at least.
        while let [tag, after @ ..] = rest {
            let (length, body) = match (tag & LARGE != 0, after) {
                (true, [low, high, body @ ..]) => (usize::from(u16::from_le_bytes([*low, *high])), body),
                (false, body) if *tag != END => (usize::from(tag & 0x07), body),
                _ => break,
            };
            let resource = body.get(..length.min(body.len())).unwrap_or_default();
            if *tag == READ_ONLY {
                vpd.keywords(resource);
            }
            rest = body.get(length..).unwrap_or_default();
        }
        if vpd.serial.is_none() {
            let card = vpd.vuid.as_deref().and_then(|vuid| vuid.split_once(VUID_MARK)).map(|(card, _)| card.to_owned());
            vpd.serial = card.filter(|card| !card.is_empty());
        }
        vpd
    }

    fn keywords(&mut self, mut rest: &[u8]) {
        while let [a, b, length, body @ ..] = rest {
            let value = body.get(..usize::from(*length).min(body.len())).unwrap_or_default();
            let text = || {
                Some(String::from_utf8_lossy(value).trim_matches(['\0', ' ']).to_owned())
                    .filter(|text| !text.is_empty())
            };
            match [*a, *b] {
                [b'S', b'N'] => self.serial = text(),
                [b'V', b'U'] => self.vuid = text(),
                _ => {}
            }
            rest = body.get(usize::from(*length)..).unwrap_or_default();
        }
    }

    /// A VPD that says this much and no more.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut body = Vec::new();
        for (keyword, value) in [("SN", &self.serial), ("VU", &self.vuid)] {
            let Some(value) = value else { continue };
            let value = value.as_bytes().get(..value.len().min(usize::from(u8::MAX))).unwrap_or_default();
            body.extend(keyword.bytes());
            body.push(u8::try_from(value.len()).unwrap_or(u8::MAX));
            body.extend(value);
        }
        let length = u16::try_from(body.len()).unwrap_or(u16::MAX).to_le_bytes();
        [&[READ_ONLY][..], &length, &body, &[END]].concat()
    }
}

pub(super) fn is_data_direct(function: &PciFunction) -> bool {
    function.vendor == Some(MELLANOX) && function.device == Some(DATA_DIRECT)
}

fn folder(bdf: Bdf) -> String {
    format!("sys/bus/pci/devices/{bdf}")
}

/// Names the data-direct function of each NIC that has one.
pub(super) fn link(tree: &Tree, functions: &[PciFunction], hcas: &mut [RawHca]) {
    let mut directs: Vec<(Bdf, Vpd)> = Vec::new();
    for bdf in functions.iter().filter(|function| is_data_direct(function)).map(|function| function.bdf) {
        match Vpd::read(tree, &folder(bdf)) {
            Some(vpd) => directs.push((bdf, vpd)),
            None => tree.warn(
                &folder(bdf),
                "a data-direct function of a NIC, and not known of which: its VPD cannot be read, which takes root",
            ),
        }
    }
    if directs.is_empty() {
        return;
    }
    directs.sort_by_key(|(bdf, _)| *bdf);
    let is_whole = |hca: &RawHca| {
        let function = hca.bdf.and_then(|bdf| functions.iter().find(|function| function.bdf == bdf));
        hca.sub_function.is_none()
            && function.is_some_and(|f| f.vendor == Some(MELLANOX) && f.physical_function.is_none())
    };
    let mut nics: Vec<(usize, Bdf, Vpd)> = Vec::new();
    for (place, hca) in hcas.iter().enumerate().filter(|(_, hca)| is_whole(hca)) {
        let Some(bdf) = hca.bdf else { continue };
        nics.extend(Vpd::read(tree, &folder(bdf)).map(|vpd| (place, bdf, vpd)));
    }
    nics.sort_by_key(|(_, bdf, _)| *bdf);
    for (place, direct) in pairs(&nics, &directs) {
        if let Some(hca) = hcas.get_mut(place) {
            hca.data_direct = Some(direct);
        }
    }
    for (bdf, _) in directs.iter().filter(|(bdf, _)| !hcas.iter().any(|hca| hca.data_direct == Some(*bdf))) {
        tree.warn(&folder(*bdf), "a data-direct function whose VPD is that of no NIC here");
    }
}

/// Pairs by equal VUID, else by card: of a card the first function with the first, or all NICs with its only one.
fn pairs(nics: &[(usize, Bdf, Vpd)], directs: &[(Bdf, Vpd)]) -> BTreeMap<usize, Bdf> {
    let mut found: BTreeMap<usize, Bdf> = BTreeMap::new();
    for (place, _, vpd) in nics {
        let same = directs.iter().find(|(_, direct)| vpd.vuid.is_some() && direct.vuid == vpd.vuid);
        found.extend(same.map(|(bdf, _)| (*place, *bdf)));
    }
    let mut cards: BTreeMap<&str, (Vec<usize>, Vec<Bdf>)> = BTreeMap::new();
    for (place, _, vpd) in nics.iter().filter(|(place, ..)| !found.contains_key(place)) {
        cards.entry(vpd.serial.as_deref().unwrap_or_default()).or_default().0.push(*place);
    }
    for (bdf, vpd) in directs.iter().filter(|(bdf, _)| !found.values().any(|taken| taken == bdf)) {
        cards.entry(vpd.serial.as_deref().unwrap_or_default()).or_default().1.push(*bdf);
    }
    for (_, (places, bdfs)) in cards.into_iter().filter(|(serial, _)| !serial.is_empty()) {
        match bdfs.as_slice() {
            [only] => found.extend(places.into_iter().map(|place| (place, *only))),
            several if several.len() == places.len() => found.extend(places.into_iter().zip(several.iter().copied())),
            _ => {}
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vpd(serial: &str, vuid: &str) -> Vpd {
        let some = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
        Vpd { serial: some(serial), vuid: some(vuid) }
    }

    #[test]
    fn keywords_are_found_between_other_resources_and_cut_ones_end() {
        let own = vpd("MT2244XZ00VN", "MT2244XZ00VNMLNXS0D0F0");
        let name = [&[0x82_u8, 4, 0][..], b"NIC8"].concat();
        let mut bytes = [name, own.to_bytes()].concat();
        assert_eq!(Vpd::parse(&bytes), own);
        bytes.truncate(20);
        assert_eq!(Vpd::parse(&bytes).vuid, None);
        assert_eq!(Vpd::parse(&vpd("", "MT1MLNXS0D0F0").to_bytes()).serial.as_deref(), Some("MT1"));
        for bytes in [&[][..], &[0x90], &[0x90, 0xff, 0xff, b'S'], &[0x78], &[0; 64], &[0xff; 64]] {
            assert_eq!(Vpd::parse(bytes), Vpd::default(), "{bytes:?}");
        }
    }

    #[test]
    fn functions_pair_by_vuid_and_else_by_card() {
        let bdf = |text: &str| text.parse::<Bdf>().unwrap();
        let (a, b) = (bdf("0006:01:00.0"), bdf("0016:01:00.0"));
        let nic = |place: usize, vpd: Vpd| (place, bdf("0000:03:00.0"), vpd);
        let by_vuid = pairs(&[nic(0, vpd("s", "y")), nic(1, vpd("s", "x"))], &[(a, vpd("s", "x")), (b, vpd("s", "y"))]);
        assert_eq!(by_vuid, BTreeMap::from([(0, b), (1, a)]));
        let by_card = pairs(&[nic(0, vpd("s", "1")), nic(1, vpd("t", "2"))], &[(a, vpd("t", "3")), (b, vpd("s", "4"))]);
        assert_eq!(by_card, BTreeMap::from([(0, b), (1, a)]));
        let in_turn = pairs(&[nic(0, vpd("s", "")), nic(1, vpd("s", ""))], &[(a, vpd("s", "")), (b, vpd("s", ""))]);
        assert_eq!(in_turn, BTreeMap::from([(0, a), (1, b)]));
        let only = pairs(&[nic(0, vpd("s", "")), nic(1, vpd("s", ""))], &[(a, vpd("s", ""))]);
        assert_eq!(only, BTreeMap::from([(0, a), (1, a)]));
        assert_eq!(pairs(&[nic(0, vpd("", ""))], &[(a, vpd("", ""))]), BTreeMap::new(), "nothing in common");
        let uneven = pairs(&[nic(0, vpd("s", ""))], &[(a, vpd("s", "")), (b, vpd("s", ""))]);
        assert_eq!(uneven, BTreeMap::new(), "not told which");
    }
}
