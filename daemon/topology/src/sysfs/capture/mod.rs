//! A small copy of a sysfs tree to send to others: what the reader of trees asks for and what ACS is judged by,
//! with all that names the machine replaced.
//!
//! Reads as the reader of trees does, so that nothing outside the root is opened and every read is bounded; replaces
//! by pseudonyms, so that what was equal stays equal. What is not known to be harmless is left out.

mod config_space;
mod devices;
mod pack;
mod pseudonym;

use std::collections::BTreeMap;
use std::path::Path;

use crate::error::TopologyError;
use crate::model::DriverFacts;
use crate::sysfs::tree::Tree;
use pseudonym::Pseudonyms;

pub use pack::{Packed, PackingError, pack};

/// A captured tree in memory, by path relative to its root.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Capture {
    entries: BTreeMap<String, Entry>,
    /// PCI functions in it.
    pub functions: usize,
    /// How many of them have more than the 64 bytes of configuration space that everyone may read; ACS is
    /// known of these only.
    pub with_extended_config: usize,
    /// What could not be read.
    pub warnings: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Entry {
    Folder,
    File(Vec<u8>),
    /// Where it leads, relative to the root of the tree.
    Link(String),
}

/// Captures the tree below `root`, `/` for this machine, and what its GPU driver tells, where it was asked.
///
/// # Errors
/// The root cannot be opened, holds no sysfs tree, or a folder has more entries than any host.
pub fn capture(root: &Path, driver: Option<&DriverFacts>) -> Result<Capture, TopologyError> {
    let tree = Tree::open(root)?;
    let mut copier = Copier::new(&tree);
    devices::functions(&mut copier)?;
    devices::infiniband(&mut copier);
    devices::interfaces(&mut copier);
    devices::drives(&mut copier);
    devices::nodes(&mut copier);
    devices::modules(&mut copier);
    devices::proc(&mut copier);
    devices::driver(&mut copier);
    if let Some(facts) = driver {
        devices::told(&mut copier, facts.clone());
    }
    let mut capture = copier.capture;
    capture.warnings = tree.take_warnings();
    Ok(capture)
}

/// Takes files of a tree into a capture, their names and texts replaced.
struct Copier<'a> {
    tree: &'a Tree,
    names: Pseudonyms,
    capture: Capture,
}

impl<'a> Copier<'a> {
    fn new(tree: &'a Tree) -> Self {
        let host = tree.quiet_text("proc/sys/kernel/hostname");
        Self { tree, names: Pseudonyms::new(host), capture: Capture::default() }
    }

    fn put(&mut self, path: &str, entry: Entry) {
        let path = self.names.path(path);
        self.capture.entries.entry(path).or_insert(entry);
    }

    fn folder(&mut self, path: &str) {
        self.put(path, Entry::Folder);
    }

    fn file(&mut self, path: &str, text: &str) {
        self.put(path, Entry::File(format!("{text}\n").into_bytes()));
    }

    /// Copies attributes that say nothing of who the machine is. Missing and unreadable ones are left out.
    fn copy(&mut self, folder: &str, names: &[&str]) {
        for name in names {
            self.copy_as(folder, name, |_, text| text.to_owned());
        }
    }

    /// Copies one attribute with its text replaced.
    fn copy_as(&mut self, folder: &str, name: &str, replace: impl FnOnce(&mut Pseudonyms, &str) -> String) {
        let path = format!("{folder}/{name}");
        let Some(text) = self.tree.quiet_text(&path) else { return };
        let replaced = replace(&mut self.names, &text);
        let without_host = self.names.without_host_name(&replaced);
        self.file(&path, &without_host);
    }

    /// Copies a link that leads to a place inside the tree, and makes that place a folder.
    fn link(&mut self, path: &str) -> Option<String> {
        let target = self.tree.target(path)?;
        self.link_to(path, &target);
        Some(target)
    }

    fn link_to(&mut self, path: &str, target: &str) {
        let shown = self.names.path(target);
        self.put(path, Entry::Link(shown));
        self.folder(target);
    }
}
