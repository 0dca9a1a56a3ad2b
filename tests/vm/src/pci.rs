//! PCI functions of the guest as /sys lists them, without the reader that is tested.

use std::fs;
use std::path::{Path, PathBuf};

/// A function of some class.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Function {
    /// `0000:23:00.0`.
    pub address: String,
    /// Its place in the tree.
    pub path: PathBuf,
}

impl Function {
    /// Whether both hang below one switch: the function above is a downstream port, the one above that the switch.
    #[must_use]
    pub fn shares_switch_with(&self, other: &Self) -> bool {
        let switch = |of: &Self| of.path.ancestors().nth(2).map(Path::to_owned);
        switch(self) == switch(other)
    }

    /// The root bus that it is below, `pci0000:20`.
    #[must_use]
    pub fn root(&self) -> String {
        let mut parts = self.path.iter().map(|part| part.to_string_lossy());
        parts.find(|part| part.starts_with("pci")).map(String::from).unwrap_or_default()
    }

    /// Names of the network interfaces of the function, or of the virtio device that is its only child.
    #[must_use]
    pub fn netdevs(&self) -> Vec<String> {
        let children = fs::read_dir(&self.path).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
        let virtio =
            children.filter(|path| path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"virtio")));
        let places = [self.path.clone()].into_iter().chain(virtio).map(|path| path.join("net"));
        let entries = places.filter_map(|place| fs::read_dir(place).ok()).flatten();
        entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect()
    }
}

/// Functions whose class begins so, in order of their addresses.
///
/// # Panics
/// When the guest has no PCI.
#[must_use]
pub fn functions(class: &str) -> Vec<Function> {
    let entries = fs::read_dir("/sys/bus/pci/devices").expect("the guest has PCI");
    let paths = entries.filter_map(|entry| fs::canonicalize(entry.ok()?.path()).ok());
    let is_of_class = |path: &PathBuf| fs::read_to_string(path.join("class")).is_ok_and(|text| text.starts_with(class));
    let mut found: Vec<Function> = paths
        .filter(is_of_class)
        .map(|path| Function { address: path.file_name().unwrap_or_default().to_string_lossy().into_owned(), path })
        .collect();
    found.sort_by(|a, b| a.address.cmp(&b.address));
    found
}
