//! What PCI configuration space tells of a port: its ACS capability.
//!
//! Layout: PCI Express Base Specification 6.0, 7.6 (chain of extended capabilities) and 7.7.11 (ACS); numbers as in
//! Linux `include/uapi/linux/pci_regs.h`. Everyone may read the first 64 bytes, root all 4096.

use crate::acs::{Acs, AcsControl};
use crate::sysfs::tree::Tree;

/// Extended capabilities begin here.
const EXTENDED: usize = 256;
/// All of it.
const MAX_BYTES: usize = 4096;
/// As much as a first read takes: where most devices have the capability. Each dword is a transaction on the bus.
const FIRST_BYTES: usize = 512;
const ACS_ID: u32 = 0x000d;
/// Of the control register, in the capability.
const ACS_CONTROL: usize = 6;

/// ACS of the function in a folder; `None` where its space is not there or only its first part may be read.
pub(super) fn acs(tree: &Tree, folder: &str) -> Option<Acs> {
    let path = (folder, "config");
    match acs_in(&tree.bytes(path, FIRST_BYTES).ok()?) {
        Found::Answer(acs) => Some(acs),
        Found::Beyond => match acs_in(&tree.bytes(path, MAX_BYTES).ok()?) {
            Found::Answer(acs) => Some(acs),
            Found::Beyond | Found::Unreadable => None,
        },
        Found::Unreadable => None,
    }
}

#[derive(Debug, PartialEq)]
enum Found {
    Answer(Acs),
    /// The chain leads beyond what was read.
    Beyond,
    /// There is no extended space, or the function does not answer.
    Unreadable,
}

/// Walks the chain of extended capabilities.
fn acs_in(space: &[u8]) -> Found {
    if space.len() <= EXTENDED || space.starts_with(&[0xff, 0xff]) {
        return Found::Unreadable;
    }
    let bytes = |at: usize, len: usize| space.get(at..at.checked_add(len)?);
    let mut at = EXTENDED;
    // Each capability has a dword at least, so that a cyclic chain ends here.
    for _ in 0..(MAX_BYTES - EXTENDED) / 4 {
        let Some(header) = bytes(at, 4).and_then(|bytes| bytes.try_into().ok()).map(u32::from_le_bytes) else {
            return Found::Beyond;
        };
        if header == 0 || header == u32::MAX {
            return Found::Answer(Acs::Absent);
        }
        if header & 0xffff == ACS_ID {
            let control = bytes(at + ACS_CONTROL, 2).and_then(|bytes| bytes.try_into().ok()).map(u16::from_le_bytes);
            return control.map_or(Found::Beyond, |control| Found::Answer(Acs::Control(AcsControl(control))));
        }
        at = usize::try_from(header >> 20).unwrap_or(0) & 0xffc;
        if at < EXTENDED {
            return Found::Answer(Acs::Absent);
        }
    }
    Found::Unreadable
}

/// A space that says this much and no more, for trees that are written out.
pub(super) fn space_with(acs: Acs) -> Vec<u8> {
    const BYTES: usize = EXTENDED + 64;
    let mut space = vec![0; BYTES];
    if let Acs::Control(control) = acs {
        let header = (ACS_ID | 1 << 16).to_le_bytes();
        let parts = header.into_iter().chain([0x7f, 0]).chain(control.0.to_le_bytes());
        space.iter_mut().skip(EXTENDED).zip(parts).for_each(|(byte, part)| *byte = part);
    }
    space
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(capabilities: &[(usize, u32, usize)]) -> Vec<u8> {
        let mut space = vec![0; MAX_BYTES];
        for (at, id, next) in capabilities {
            let next = u32::try_from(*next).unwrap();
            space[*at..at + 4].copy_from_slice(&(id | 1 << 16 | next << 20).to_le_bytes());
        }
        space
    }

    #[test]
    fn the_control_register_is_found_wherever_the_capability_is() {
        for (at, first) in [(0x148, FIRST_BYTES), (0x300, FIRST_BYTES)] {
            let mut space = chain(&[(0x100, 1, 0x120), (0x120, 0x19, at), (at, ACS_ID, 0x400)]);
            space[at + 6] = 0x1d;
            let expected = Found::Answer(Acs::Control(AcsControl(0x1d)));
            assert_eq!(acs_in(&space), expected);
            assert_eq!(acs_in(&space[..first]), if at < first { expected } else { Found::Beyond });
        }
    }

    #[test]
    fn a_chain_without_it_is_absent_and_a_short_or_dead_space_unknown() {
        let absent = Found::Answer(Acs::Absent);
        assert_eq!(acs_in(&chain(&[(0x100, 1, 0)])), absent);
        assert_eq!(acs_in(&vec![0; MAX_BYTES]), absent);
        for len in [0, 64, 256] {
            assert_eq!(acs_in(&vec![0; len]), Found::Unreadable, "{len}");
        }
        assert_eq!(acs_in(&vec![0xff; MAX_BYTES]), Found::Unreadable);
        assert_eq!(acs_in(&chain(&[(0x100, 1, 0x100)])), Found::Unreadable, "a ring");
        assert_eq!(acs_in(&chain(&[(0x100, 1, 0xffc), (0xffc, ACS_ID, 0)])), Found::Beyond, "cut");
    }

    #[test]
    fn what_is_written_is_read_back() {
        for acs in [Acs::Absent, Acs::Control(AcsControl(0)), Acs::Control(AcsControl(0x5d))] {
            assert_eq!(acs_in(&space_with(acs)), Found::Answer(acs));
        }
    }
}
