//! PCI configuration space without what names a device: the header and the capabilities that links, ACS and
//! virtual functions are judged by; the device serial number replaced; the bytes of all else zeroed.
//!
//! Layout: PCI Express Base Specification 6.0, sections 7.5 to 7.8; numbers as in Linux
//! `include/uapi/linux/pci_regs.h`.

use super::pseudonym::Pseudonyms;

/// Header that every function has and everyone may read.
pub(super) const HEADER_BYTES: usize = 64;
/// Conventional space; extended capabilities begin here.
pub(super) const EXTENDED: usize = 256;
/// All of it.
pub(super) const MAX_BYTES: usize = 4096;

const STATUS: usize = 0x06;
const STATUS_CAP_LIST: u8 = 0x10;
const CAPABILITIES: usize = 0x34;
/// Capabilities kept whole, with their bytes: power management, MSI, PCI Express.
const KEPT: [(u8, usize); 3] = [(0x01, 8), (0x05, 4), (0x10, 60)];
/// Extended capabilities kept: ACS, ATS, SR-IOV, resizable BAR, secondary PCIe, PASID, DPC, L1 substates.
const KEPT_EXTENDED: [(u16, usize); 8] =
    [(0x0d, 8), (0x0f, 8), (0x10, 64), (0x15, 52), (0x19, 12), (0x1b, 8), (0x1d, 8), (0x1e, 16)];
const SERIAL_NUMBER: u16 = 0x03;

fn byte(bytes: &[u8], at: usize) -> Option<u8> {
    bytes.get(at).copied()
}

fn dword(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at.checked_add(4)?)?.try_into().ok()?))
}

/// Copies a range as far as both have it.
fn keep(from: &[u8], to: &mut [u8], at: usize, len: usize) {
    let end = at.saturating_add(len).min(from.len());
    if let (Some(source), Some(target)) = (from.get(at..end), to.get_mut(at..end)) {
        target.copy_from_slice(source);
    }
}

/// The space with all that is not known to be harmless zeroed. Chains of capabilities stay walkable.
pub(super) fn redact(bytes: &[u8], names: &mut Pseudonyms) -> Vec<u8> {
    let mut kept = vec![0; bytes.len().min(MAX_BYTES)];
    keep(bytes, &mut kept, 0, HEADER_BYTES);
    conventional(bytes, &mut kept);
    extended(bytes, &mut kept, names);
    kept
}

fn conventional(bytes: &[u8], kept: &mut [u8]) {
    if byte(bytes, STATUS).is_none_or(|status| status & STATUS_CAP_LIST == 0) {
        return;
    }
    let mut at = usize::from(byte(bytes, CAPABILITIES).unwrap_or(0) & 0xfc);
    // A chain has at most one capability a dword; a cyclic one ends here.
    for _ in 0..(EXTENDED - HEADER_BYTES) / 4 {
        if at < HEADER_BYTES {
            return;
        }
        let Some(id) = byte(bytes, at) else { return };
        let len = KEPT.iter().find(|(known, _)| *known == id).map_or(2, |(_, len)| *len);
        keep(bytes.get(..EXTENDED.min(bytes.len())).unwrap_or_default(), kept, at, len);
        at = usize::from(byte(bytes, at + 1).unwrap_or(0) & 0xfc);
    }
}

fn extended(bytes: &[u8], kept: &mut [u8], names: &mut Pseudonyms) {
    let mut at = EXTENDED;
    for _ in 0..(MAX_BYTES - EXTENDED) / 4 {
        let Some(header) = dword(bytes, at).filter(|header| *header != 0 && *header != u32::MAX) else { return };
        let id = u16::try_from(header & 0xffff).unwrap_or(0);
        let len = KEPT_EXTENDED.iter().find(|(known, _)| *known == id).map_or(4, |(_, len)| *len);
        keep(bytes, kept, at, len);
        if id == SERIAL_NUMBER
            && let Some((low, high)) = dword(bytes, at + 4).zip(dword(bytes, at + 8))
        {
            let serial = names.guid(u64::from(high) << 32 | u64::from(low));
            if let Some(target) = kept.get_mut(at + 4..at + 12) {
                target.copy_from_slice(&serial.to_le_bytes());
            }
        }
        at = usize::try_from(header >> 20).unwrap_or(0) & 0xffc;
        if at < EXTENDED {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn space() -> Vec<u8> {
        let mut space = vec![0xee_u8; MAX_BYTES];
        space[STATUS] = STATUS_CAP_LIST;
        space[CAPABILITIES] = 0x40;
        // PCI Express, then VPD, then the end.
        space[0x40..0x42].copy_from_slice(&[0x10, 0x80]);
        space[0x80..0x82].copy_from_slice(&[0x03, 0x00]);
        // Serial number, ACS, a vendor's own, then the end.
        space[0x100..0x104].copy_from_slice(&(0x0003_u32 | 1 << 16 | 0x140 << 20).to_le_bytes());
        space[0x140..0x144].copy_from_slice(&(0x000d_u32 | 1 << 16 | 0x180 << 20).to_le_bytes());
        space[0x180..0x184].copy_from_slice(&(0x000b_u32 | 1 << 16).to_le_bytes());
        space
    }

    #[test]
    fn acs_and_links_stay_and_the_serial_number_and_vendor_bytes_go() {
        let (space, mut names) = (space(), Pseudonyms::new(None));
        let kept = redact(&space, &mut names);
        assert_eq!(kept.len(), space.len());
        assert_eq!(kept[..0x7c], space[..0x7c]);
        assert_eq!(kept[0x80..0x88], [0x03, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(kept[0x140..0x148], space[0x140..0x148]);
        assert_eq!(kept[0x104..0x10c], names.guid(0xeeee_eeee_eeee_eeee).to_le_bytes());
        assert_eq!(kept[0x184..], vec![0; MAX_BYTES - 0x184]);
        assert!(!kept[0x80..].windows(8).any(|bytes| bytes == [0xee; 8]));
    }

    #[test]
    fn truncated_and_cyclic_spaces_end() {
        let mut names = Pseudonyms::new(None);
        let mut cyclic = space();
        cyclic[0x81] = 0x40;
        cyclic[0x180..0x184].copy_from_slice(&(0x000b_u32 | 0x100 << 20).to_le_bytes());
        assert_eq!(redact(&cyclic, &mut names).len(), MAX_BYTES);
        for len in [0, 3, 63, 64, 65, 130, 257, 0x142] {
            assert_eq!(redact(&cyclic[..len], &mut names).len(), len);
        }
    }
}
