//! Access Control Services: whether peer traffic below a switch stays there, or goes up to the root complex.
//!
//! What each control does is PCI Express Base Specification 6.0, section 6.12; the capability itself 7.7.11; the
//! names are those of lspci. A fact beside the P2P level, never part of it, and of no weight in pairing.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::bdf::Bdf;
use crate::model::{GpuId, HcaId, Host, PciFunction};
use crate::pair::Pair;
use crate::paths::Paths;

/// The control register of a function's ACS capability, as its configuration space has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct AcsControl(pub u16);

impl AcsControl {
    /// Peer requests go up to the root (bit 2).
    pub const REQUEST_REDIRECT: u16 = 1 << 2;
    /// Peer completions go up to the root (bit 3).
    pub const COMPLETION_REDIRECT: u16 = 1 << 3;
    /// What a vector of the port says is blocked or redirected (bit 5).
    pub const EGRESS_CONTROL: u16 = 1 << 5;
    const NAMES: [&'static str; 7] =
        ["SrcValid", "TransBlk", "ReqRedir", "CmpltRedir", "UpstreamFwd", "EgressCtrl", "DirectTrans"];

    /// Reads names as lspci has them, `ReqRedir,CmpltRedir`; `off` is none of them.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        if text == "off" {
            return Some(Self(0));
        }
        let bit = |name: &str| Self::NAMES.iter().position(|known| *known == name);
        text.split(',').try_fold(Self(0), |control, name| Some(Self(control.0 | 1 << bit(name)?)))
    }

    /// Whether peer requests or completions are sent up.
    #[must_use]
    pub fn redirects(self) -> bool {
        self.0 & (Self::REQUEST_REDIRECT | Self::COMPLETION_REDIRECT) != 0
    }
}

impl fmt::Display for AcsControl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_set = |(bit, name): (usize, &'static str)| (self.0 >> bit & 1 == 1).then_some(name);
        let names: Vec<&str> = Self::NAMES.into_iter().enumerate().filter_map(is_set).collect();
        f.write_str(if names.is_empty() { "off" } else { "" })?;
        f.write_str(&names.join(","))
    }
}

/// ACS of one function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Acs {
    /// Its configuration space has no such capability: it redirects nothing.
    Absent,
    /// What its capability is set to.
    Control(AcsControl),
}

impl Acs {
    /// Reads `none` or the names of [`AcsControl`].
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        if text == "none" { Some(Self::Absent) } else { AcsControl::parse(text).map(Self::Control) }
    }

    /// Whether the function sends peer traffic up.
    #[must_use]
    pub fn redirects(self) -> bool {
        matches!(self, Self::Control(control) if control.redirects())
    }

    fn has_egress_control(self) -> bool {
        matches!(self, Self::Control(control) if control.0 & AcsControl::EGRESS_CONTROL != 0)
    }
}

impl fmt::Display for Acs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent => f.write_str("none"),
            Self::Control(control) => control.fmt(f),
        }
    }
}

/// Which way peer traffic between two devices below one switch takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PeerWay {
    /// The ports on the way are not known.
    Unknown,
    /// It stays below the bridge where the paths meet.
    Direct,
    /// ACS sends it up to the root port and down again.
    Redirected,
}

/// The way of peer traffic, and the evidence.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerAcs {
    /// The way.
    pub state: PeerWay,
    /// The ports that it rests on.
    pub reason: String,
}

impl PeerAcs {
    /// Whether ACS is known to send the traffic up.
    #[must_use]
    pub fn is_redirected(&self) -> bool {
        self.state == PeerWay::Redirected
    }
}

fn names(ports: &[&PciFunction]) -> String {
    let name = |port: &&PciFunction| port.acs.map(|acs| format!("{} ({acs})", port.bdf));
    ports.iter().filter_map(name).collect::<Vec<_>>().join(" and ")
}

/// What decides the way of peer traffic, with the ports that it rests on.
enum Turn<'a> {
    /// These redirect, of the ports where it turns.
    Redirected(Vec<&'a PciFunction>),
    /// These may block by an egress vector.
    Egress(Vec<&'a PciFunction>),
    /// These redirect nothing.
    Direct(Vec<&'a PciFunction>),
    /// These redirect, above the ports where it turns, which are not known.
    RedirectedAbove(Vec<&'a PciFunction>),
    /// Nothing is known.
    NotRead,
}

impl<'a> Paths<'a> {
    /// Whether ACS is known to send peer traffic up to the root.
    pub(crate) fn redirects(&self) -> bool {
        matches!(self.turn(), Some(Turn::Redirected(_) | Turn::RedirectedAbove(_)))
    }

    /// Which way peer traffic takes; `None` where no switch joins the two or no port lies between them.
    pub(crate) fn acs(&self) -> Option<PeerAcs> {
        let turn = self.turn()?;
        let top = self.common().last()?.bdf;
        let (state, reason) = match &turn {
            Turn::Redirected(ports) => {
                (PeerWay::Redirected, format!("ACS of {} sends peer traffic up to {top}", names(ports)))
            }
            Turn::Egress(ports) => {
                (PeerWay::Unknown, format!("what the egress vector of {} blocks is not known", names(ports)))
            }
            Turn::Direct(ports) => (PeerWay::Direct, format!("ACS of {} redirects nothing", names(ports))),
            Turn::RedirectedAbove(ports) => (
                PeerWay::Redirected,
                format!(
                    "ACS of {} above the switch redirects, and Linux sets it alike at all ports: peer traffic goes up to {top}",
                    names(ports)
                ),
            ),
            Turn::NotRead => {
                (PeerWay::Unknown, "the ports' configuration space was not read, which takes root".to_owned())
            }
        };
        Some(PeerAcs { state, reason })
    }

    fn turn(&self) -> Option<Turn<'a>> {
        let common = self.common();
        let ports = self.turning_ports();
        if common.is_empty() || ports.clone().next().is_none() {
            return None;
        }
        let that = |test: fn(Acs) -> bool| -> Vec<&'a PciFunction> {
            ports.clone().filter(|port| port.acs.is_some_and(test)).collect()
        };
        let own = that(Acs::redirects);
        if !own.is_empty() {
            return Some(Turn::Redirected(own));
        }
        if ports.clone().all(|port| port.acs.is_some()) {
            let egress = that(Acs::has_egress_control);
            return Some(if egress.is_empty() { Turn::Direct(ports.collect()) } else { Turn::Egress(egress) });
        }
        // Linux sets ACS alike at all ports that have it (`pci_enable_acs`, linux:drivers/pci/pci.c), so that what is
        // known of those above speaks for them.
        let above: Vec<_> = common.iter().copied().filter(|port| port.acs.is_some_and(Acs::redirects)).collect();
        Some(if above.is_empty() { Turn::NotRead } else { Turn::RedirectedAbove(above) })
    }
}

impl Host {
    /// Which way peer traffic between two functions takes; `None` where no switch joins them, so that ACS changes
    /// nothing, or where no port lies between them.
    #[must_use]
    pub fn peer_acs(&self, a: Bdf, b: Bdf) -> Option<PeerAcs> {
        Paths::of(self, a, b)?.acs()
    }

    /// Which way traffic between a GPU and an HCA takes, by the better of the HCA's paths.
    #[must_use]
    pub fn gpu_hca_acs(&self, gpu: GpuId, hca: HcaId) -> Option<PeerAcs> {
        Pair::of(self, gpu, hca)?.acs()
    }

    /// Whether this is a guest: it has devices that only hypervisors make up.
    #[must_use]
    pub fn is_guest(&self) -> bool {
        self.functions.iter().any(|function| function.vendor.is_some_and(|id| HYPERVISORS.contains(&id)))
    }
}

/// PCI vendor ids of Red Hat (QEMU, virtio), VMware and Xen, all of whose devices are emulated.
const HYPERVISORS: [u16; 4] = [0x1b36, 0x1af4, 0x15ad, 0x5853];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn controls_print_as_they_are_read() {
        for (text, control) in [("off", 0), ("SrcValid,ReqRedir,CmpltRedir,UpstreamFwd", 0x1d), ("DirectTrans", 0x40)] {
            assert_eq!(Acs::parse(text), Some(Acs::Control(AcsControl(control))));
            assert_eq!(Acs::Control(AcsControl(control)).to_string(), text);
        }
        assert_eq!(Acs::parse("none").map(|acs| acs.to_string()).as_deref(), Some("none"));
        for bad in ["", "ReqRedir+", "reqredir", "off,ReqRedir"] {
            assert_eq!(Acs::parse(bad), None, "{bad}");
        }
    }
}
