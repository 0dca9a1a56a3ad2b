//! What the host's kernel says that bears on GPUs and the IOMMU.

use serde::{Deserialize, Serialize};

/// Kernel of the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kernel {
    /// Release as `uname -r` prints it.
    pub release: String,
    /// Whether DMA of its GPUs passes the IOMMU untranslated: by the type of their groups, else by the command
    /// line. `None` if neither tells.
    pub iommu_passthrough: Option<bool>,
}

impl Kernel {
    /// Major and minor number of the release.
    #[must_use]
    pub fn version(&self) -> Option<(u32, u32)> {
        let mut numbers = self.release.split(|c: char| !c.is_ascii_digit()).map(str::parse);
        Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_numbers_and_not_text() {
        let version = |release: &str| Kernel { release: release.to_owned(), iommu_passthrough: None }.version();
        assert_eq!(version("6.8.0-1010-nvidia-64k"), Some((6, 8)));
        assert!(version("6.11-rc3") > version("6.8.0"));
        assert_eq!(version("6"), None);
        assert_eq!(version("next-6.8"), None);
    }
}
