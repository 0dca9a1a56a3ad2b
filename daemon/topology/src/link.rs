//! PCIe link speed, width and what they carry after encoding.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Transfer rate of one PCIe lane in MT/s: 2500, 5000, 8000, 16000, 32000 or 64000.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LinkSpeed {
    mega_transfers: u32,
}

/// Lanes of a PCIe link: 1-32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LinkWidth(u8);

/// The speeds that PCI Express defines, generations 1 to 6, in MT/s.
const SPEEDS: [u32; 6] = [2_500, 5_000, 8_000, 16_000, 32_000, 64_000];

impl LinkSpeed {
    /// The speed for a rate in MT/s, if PCI Express defines it.
    #[must_use]
    pub fn from_mega_transfers(mega_transfers: u32) -> Option<Self> {
        SPEEDS.contains(&mega_transfers).then_some(Self { mega_transfers })
    }

    /// Reads `16`, `2.5`, `16.0 GT/s PCIe` or `8 GT/s` (`current_link_speed`, Linux
    /// `Documentation/ABI/testing/sysfs-bus-pci`). "Unknown speed" and anything else is `None`.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let number = text.split_whitespace().next()?;
        let (whole, tenths) = number.split_once('.').unwrap_or((number, "0"));
        let whole: u32 = whole.parse().ok()?;
        let tenths: u32 = match tenths.len() {
            1 => tenths.parse().ok()?,
            _ => return None,
        };
        Self::from_mega_transfers(whole.checked_mul(1000)?.checked_add(tenths * 100)?)
    }

    /// The speed of a PCI Express generation, 1 to 6.
    #[must_use]
    pub fn from_generation(generation: u32) -> Option<Self> {
        let place = usize::try_from(generation).ok()?.checked_sub(1)?;
        SPEEDS.get(place).map(|speed| Self { mega_transfers: *speed })
    }

    /// Rate in MT/s.
    #[must_use]
    pub fn mega_transfers(self) -> u32 {
        self.mega_transfers
    }

    /// Gbit/s of one lane after encoding: 8b/10b for generations 1 and 2, 128b/130b for 3 to 5,
    /// none counted from 6 on (as `PCIE_SPEED2MBS_ENC` in Linux `drivers/pci/pci.h`).
    #[must_use]
    pub fn lane_gbps(self) -> f64 {
        let raw = f64::from(self.mega_transfers) / 1000.0;
        match self.mega_transfers {
            0..=5_000 => raw * 8.0 / 10.0,
            5_001..=32_000 => raw * 128.0 / 130.0,
            _ => raw,
        }
    }
}

impl fmt::Display for LinkSpeed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (whole, tenths) = (self.mega_transfers / 1000, self.mega_transfers % 1000 / 100);
        if tenths == 0 { write!(f, "{whole}") } else { write!(f, "{whole}.{tenths}") }
    }
}

impl LinkWidth {
    /// A width in lanes. 0 and more than 32 (a dead link reads 255) are no width.
    #[must_use]
    pub fn from_lanes(lanes: u8) -> Option<Self> {
        (1..=32).contains(&lanes).then_some(Self(lanes))
    }

    /// Number of lanes.
    #[must_use]
    pub fn lanes(self) -> u8 {
        self.0
    }
}

/// Speed and width of one direction of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkRate {
    /// Rate of each lane.
    pub speed: LinkSpeed,
    /// Number of lanes.
    pub width: LinkWidth,
}

impl LinkRate {
    /// Gbit/s in each direction after encoding.
    #[must_use]
    pub fn gbps(self) -> f64 {
        self.speed.lane_gbps() * f64::from(self.width.lanes())
    }
}

impl fmt::Display for LinkRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}", self.speed, self.width.lanes())
    }
}

/// The link of a PCI function: above it, for root and downstream ports below. Unknown parts are `None`, never 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Link {
    /// What it runs at now.
    pub current: Option<LinkRate>,
    /// What the function could do.
    pub max: Option<LinkRate>,
}

impl Link {
    /// Gbit/s the link carries now, else what it could.
    #[must_use]
    pub fn gbps(&self) -> Option<f64> {
        self.current.or(self.max).map(LinkRate::gbps)
    }

    /// Whether the link is known to run below what the function could do.
    #[must_use]
    pub fn is_below_max(&self) -> bool {
        match (self.current, self.max) {
            (Some(current), Some(max)) => current.speed < max.speed || current.width < max.width,
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate(speed: &str, lanes: u8) -> LinkRate {
        LinkRate { speed: LinkSpeed::parse(speed).unwrap(), width: LinkWidth::from_lanes(lanes).unwrap() }
    }

    #[test]
    fn rates_count_the_encoding_of_their_generation() {
        for (speed, lanes, gbps) in [
            ("2.5 GT/s PCIe", 1, 2.0),
            ("5.0 GT/s PCIe", 8, 32.0),
            ("8.0 GT/s PCIe", 16, 126.030_769),
            ("16.0 GT/s PCIe", 16, 252.061_538),
            ("32.0 GT/s PCIe", 16, 504.123_077),
            ("64.0 GT/s PCIe", 16, 1024.0),
        ] {
            assert!((rate(speed, lanes).gbps() - gbps).abs() < 1e-6, "{speed}");
        }
    }

    #[test]
    fn unknown_speeds_and_impossible_widths_are_none() {
        for text in ["Unknown", "Unknown speed", "", "0.0 GT/s", "7", "16.00", "-8", "99999999999"] {
            assert_eq!(LinkSpeed::parse(text), None, "{text}");
        }
        assert_eq!(LinkWidth::from_lanes(0), None);
        assert_eq!(LinkWidth::from_lanes(255), None);
    }

    #[test]
    fn a_link_below_its_maximum_is_seen() {
        let full = Link { current: Some(rate("16", 16)), max: Some(rate("16", 16)) };
        let narrow = Link { current: Some(rate("16", 8)), ..full };
        let unknown = Link { current: None, ..full };
        assert!(!full.is_below_max() && narrow.is_below_max() && !unknown.is_below_max());
    }
}
