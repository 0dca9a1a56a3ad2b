//! Who a PCI function is: vendor, device, subsystem, class and driver.
//!
//! The kernel tells all of it in one file, `uevent`, and all but the driver in another, `modalias` (`pci_uevent` and
//! `modalias_show`, Linux drivers/pci/pci-driver.c and pci-sysfs.c). Captured trees may lack either, or lines of them.

use crate::model::PciClass;
use crate::sysfs::tree::Tree;

/// What was found of a function; what is unreadable is `None`.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Ids {
    pub(super) vendor: Option<u16>,
    pub(super) device: Option<u16>,
    pub(super) subsystem: Option<(u16, u16)>,
    pub(super) class: Option<PciClass>,
    pub(super) driver: Option<String>,
    /// Whether they come from `uevent`: what it leaves out is not there, since the kernel writes its lines together.
    pub(super) are_whole: bool,
}

/// Which file tells the ids: a tree has either for all its functions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IdsFile {
    Uevent,
    Modalias,
}

impl Ids {
    /// Asks `first` before the other file, and leaves there which to ask first of the next function.
    pub(super) fn read(tree: &Tree, folder: &str, first: &mut IdsFile) -> Self {
        let ids = Self::of_file(tree, folder, *first);
        if ids.is_known() {
            return ids;
        }
        *first = match *first {
            IdsFile::Uevent => IdsFile::Modalias,
            IdsFile::Modalias => IdsFile::Uevent,
        };
        let mut ids = ids.or(Self::of_file(tree, folder, *first));
        if ids.vendor.is_none() {
            let id = |file| hex(tree, folder, file).and_then(|id| u16::try_from(id).ok());
            ids.vendor = id("vendor");
            ids.device = id("device");
            ids.subsystem = id("subsystem_vendor").zip(id("subsystem_device"));
        }
        ids.class = ids.class.or_else(|| hex(tree, folder, "class").and_then(class));
        ids
    }

    fn of_file(tree: &Tree, folder: &str, file: IdsFile) -> Self {
        let told = match file {
            IdsFile::Uevent => tree.parse((folder, "uevent"), |text| Some(of_uevent(text))),
            IdsFile::Modalias => tree.parse((folder, "modalias"), of_modalias),
        };
        told.unwrap_or_default()
    }

    fn is_known(&self) -> bool {
        self.vendor.is_some() && self.class.is_some()
    }

    fn or(self, other: Self) -> Self {
        Self {
            vendor: self.vendor.or(other.vendor),
            device: self.device.or(other.device),
            subsystem: self.subsystem.or(other.subsystem),
            class: self.class.or(other.class),
            driver: self.driver.or(other.driver),
            are_whole: self.are_whole || other.are_whole,
        }
    }
}

fn class(number: u32) -> Option<PciClass> {
    (number <= 0xff_ffff).then_some(PciClass(number))
}

fn of_uevent(text: &str) -> Ids {
    let mut ids = Ids::default();
    let pair = |text: &str| {
        let (one, other) = text.split_once(':')?;
        Some((u16::from_str_radix(one, 16).ok()?, u16::from_str_radix(other, 16).ok()?))
    };
    for (key, value) in text.lines().filter_map(|line| line.split_once('=')) {
        match key {
            "DRIVER" => ids.driver = Some(value.to_owned()),
            "PCI_CLASS" => ids.class = u32::from_str_radix(value, 16).ok().and_then(class),
            "PCI_ID" => (ids.vendor, ids.device) = pair(value).unzip(),
            "PCI_SUBSYS_ID" => ids.subsystem = pair(value),
            _ => {}
        }
    }
    ids.are_whole = ids.vendor.is_some();
    ids
}

/// `pci:v000015B3d0000101Bsv000015B3sd00000007bc02sc07i00`; `None` for anything else.
fn of_modalias(text: &str) -> Option<Ids> {
    let mut rest = text.strip_prefix("pci:")?;
    let mut field = |name: &str, digits: usize| {
        let (number, after) = rest.strip_prefix(name)?.split_at_checked(digits)?;
        rest = after;
        u32::from_str_radix(number, 16).ok()
    };
    let id = |number: u32| u16::try_from(number).ok();
    let (vendor, device) = (id(field("v", 8)?)?, id(field("d", 8)?)?);
    let subsystem = id(field("sv", 8)?).zip(id(field("sd", 8)?));
    let number = (field("bc", 2)? << 16) | (field("sc", 2)? << 8) | field("i", 2)?;
    Some(Ids {
        vendor: Some(vendor),
        device: Some(device),
        // The kernel prints none as zero.
        subsystem: subsystem.filter(|subsystem| *subsystem != (0, 0)),
        class: class(number),
        ..Ids::default()
    })
}

/// A number that sysfs prints as `0x10de`; anything else is a warning.
fn hex(tree: &Tree, folder: &str, file: &str) -> Option<u32> {
    let number = |text: &str| text.strip_prefix("0x").and_then(|digits| u32::from_str_radix(digits, 16).ok());
    tree.number((folder, file), "hexadecimal number", number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_two_files_tell_the_same() {
        let uevent = "DRIVER=mlx5_core\nPCI_CLASS=20700\nPCI_ID=15B3:101B\nPCI_SUBSYS_ID=15B3:0007\nPCI_SLOT_NAME=x\n";
        let told = of_modalias("pci:v000015B3d0000101Bsv000015B3sd00000007bc02sc07i00").unwrap();
        assert_eq!(of_uevent(uevent), Ids { driver: Some("mlx5_core".to_owned()), are_whole: true, ..told });
    }

    #[test]
    fn what_is_no_alias_of_a_pci_function_tells_nothing() {
        for text in
            ["", "pci:", "acpi:PNP0A08:", "pci:v000015B3", "pci:v0001FFFFd0000101Bsv*sd*bc02sc07i00", "pci:vé0000000d"]
        {
            assert_eq!(of_modalias(text), None, "{text}");
        }
    }
}
