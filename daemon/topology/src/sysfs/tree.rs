//! Bounded, contained access to a tree that holds `sys/` (and perhaps `proc/`), on disk or in memory.
//!
//! Nothing outside the root is ever opened, whatever links the tree holds; every read and listing has a
//! bound. Paths are relative to the root. Knows nothing of what the files mean.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use crate::error::TopologyError;
use crate::sysfs::disk::Disk;
use crate::sysfs::memory::Memory;

/// Most bytes read of one attribute: sysfs gives at most a page.
pub(super) const MAX_FILE_BYTES: usize = 4096;
/// Most bytes read of a table in `/proc`.
pub(super) const MAX_TABLE_BYTES: usize = 65_536;
/// Most warnings kept of one tree.
const MAX_WARNINGS: usize = 1024;
/// Most entries of one folder.
pub(super) const MAX_ENTRIES: usize = 65_536;

/// Where the files are.
#[derive(Debug)]
enum Files {
    Disk(Disk),
    Memory(Memory),
}

/// A file or link by its folder, relative to the root and without a slash at its end, and its name there. Readers that ask
/// for many files of a folder need not put paths together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct At<'a> {
    pub(super) folder: &'a str,
    pub(super) name: &'a str,
}

impl<'a> At<'a> {
    pub(super) fn whole(path: &'a str) -> Self {
        let (folder, name) = path.rsplit_once('/').unwrap_or(("", path));
        Self { folder, name }
    }
}

impl<'a> From<&'a str> for At<'a> {
    fn from(path: &'a str) -> Self {
        Self::whole(path)
    }
}

impl<'a> From<&'a String> for At<'a> {
    fn from(path: &'a String) -> Self {
        Self::whole(path)
    }
}

impl<'a> From<(&'a str, &'a str)> for At<'a> {
    fn from((folder, name): (&'a str, &'a str)) -> Self {
        Self { folder, name }
    }
}

impl fmt::Display for At<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { folder, name } = self;
        if folder.is_empty() { f.write_str(name) } else { write!(f, "{folder}/{name}") }
    }
}

/// A folder that holds `sys/`, opened once.
#[derive(Debug)]
pub(super) struct Tree {
    files: Files,
    path: PathBuf,
    warnings: RefCell<Vec<String>>,
    /// What was read last: attributes are many, small and mostly parsed at once.
    buffer: RefCell<Vec<u8>>,
    /// How often the files were asked for something: what a tree costs, whatever else the machine does.
    asked: Cell<usize>,
}

impl Tree {
    /// Opens a root: a folder that holds `sys/`, or the `sys` folder itself.
    pub(super) fn open(path: &Path) -> Result<Self, TopologyError> {
        let holds = |folder: &str| path.join(folder).is_dir();
        let is_sys = !holds("sys") && (holds("bus") || holds("class") || holds("devices"));
        let parent = if is_sys { parent_of(path)? } else { path.to_owned() };
        let disk = Disk::open(&parent).map_err(|source| TopologyError::Read { path: parent.clone(), source })?;
        let tree = Self {
            files: Files::Disk(disk),
            path: parent,
            warnings: RefCell::default(),
            buffer: RefCell::default(),
            asked: Cell::default(),
        };
        let is_sysfs = ["sys/bus", "sys/class", "sys/devices"].iter().any(|folder| tree.is_dir(folder));
        if is_sysfs { Ok(tree) } else { Err(TopologyError::NotSysfs { path: path.to_owned() }) }
    }

    /// A tree in memory, named by the file it came from.
    pub(super) fn in_memory(mut memory: Memory, path: &Path) -> Result<Self, TopologyError> {
        if !memory.settle_root() {
            return Err(TopologyError::NotSysfs { path: path.to_owned() });
        }
        Ok(Self {
            files: Files::Memory(memory),
            path: path.to_owned(),
            warnings: RefCell::default(),
            buffer: RefCell::default(),
            asked: Cell::default(),
        })
    }

    /// The same tree for another thread; `None` where it lies in memory, which is read faster than shared.
    pub(super) fn another(&self) -> Option<Self> {
        let Files::Disk(disk) = &self.files else { return None };
        Some(Self {
            files: Files::Disk(disk.another().ok()?),
            path: self.path.clone(),
            warnings: RefCell::default(),
            buffer: RefCell::default(),
            asked: Cell::default(),
        })
    }

    /// Adds what another one of the same tree was asked.
    pub(super) fn count(&self, asked: usize) {
        self.asked.set(self.asked.get().saturating_add(asked));
    }

    /// Files, links and folders asked for so far.
    pub(super) fn asked(&self) -> usize {
        self.asked.get()
    }

    /// Records what could not be read.
    pub(super) fn warn(&self, path: &str, why: impl std::fmt::Display) {
        let mut warnings = self.warnings.borrow_mut();
        let warning = format!("{path}: {why}");
        if warnings.len() < MAX_WARNINGS && !warnings.contains(&warning) {
            warnings.push(warning);
        }
    }

    /// Takes over warnings of another one of the same tree.
    pub(super) fn put_warnings(&self, more: Vec<String>) {
        let mut warnings = self.warnings.borrow_mut();
        let room = MAX_WARNINGS.saturating_sub(warnings.len());
        warnings.extend(more.into_iter().take(room));
    }

    pub(super) fn take_warnings(&self) -> Vec<String> {
        self.warnings.take()
    }

    /// Full path of a relative one, for messages.
    pub(super) fn full(&self, path: &str) -> PathBuf {
        self.path.join(path)
    }

    /// Text of an attribute without the blanks around it. A missing file is `None`; an unreadable, binary
    /// or overlong one too, with a warning.
    pub(super) fn text<'a>(&self, path: impl Into<At<'a>>) -> Option<String> {
        self.parse(path, |text| Some(text.to_owned()))
    }

    /// What `parse` makes of the text of an attribute, as in [`Self::text`], without a copy of it.
    pub(super) fn parse<'a, T>(&self, path: impl Into<At<'a>>, parse: impl FnOnce(&str) -> Option<T>) -> Option<T> {
        self.parse_found(path, parse).flatten()
    }

    /// As [`Self::parse`], with `None` where there is no such file.
    pub(super) fn parse_found<'a, T>(
        &self,
        path: impl Into<At<'a>>,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Option<Option<T>> {
        let path = path.into();
        match self.read(path, parse) {
            Ok(parsed) => Some(parsed),
            Err(error) if is_missing(&error) => None,
            Err(error) => {
                self.failed(path, &error);
                Some(None)
            }
        }
    }

    /// Warns of what cannot be read. Where the way to its folder is what fails, that is said, and once.
    fn failed(&self, path: At<'_>, error: &io::Error) {
        let mut bad = path.to_string();
        while let Some((folder, _)) = bad.rsplit_once('/').filter(|(folder, _)| !self.is_dir(folder)) {
            bad.truncate(folder.len());
        }
        self.warn(&bad, error);
    }

    /// As [`Self::parse`]; a text of which `parse` makes nothing is a warning that says what it is not.
    pub(super) fn number<'a, T>(
        &self,
        path: impl Into<At<'a>>,
        what: &str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Option<T> {
        let path = path.into();
        let parsed = self.parse(path, |text| Some(parse(text).ok_or_else(|| short(text))))?;
        parsed.map_err(|text| self.warn(&path.to_string(), format_args!("`{text}` is no {what}"))).ok()
    }

    /// Lines of a table in `/proc`, as far as they are read: the first [`MAX_TABLE_BYTES`].
    pub(super) fn table(&self, path: &str) -> Vec<String> {
        let bytes = self.bytes(path, MAX_TABLE_BYTES).unwrap_or_default();
        String::from_utf8_lossy(&bytes).lines().map(str::to_owned).collect()
    }

    /// As [`Self::text`], for attributes that fail in normal use (an empty GID slot gives EINVAL).
    pub(super) fn quiet_text<'a>(&self, path: impl Into<At<'a>>) -> Option<String> {
        self.quiet_parse(path, |text| Some(text.to_owned()))
    }

    /// As [`Self::parse`], for such attributes.
    pub(super) fn quiet_parse<'a, T>(
        &self,
        path: impl Into<At<'a>>,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Option<T> {
        self.read(path.into(), parse).ok().flatten()
    }

    fn read<T>(&self, path: At<'_>, parse: impl FnOnce(&str) -> T) -> io::Result<T> {
        let mut bytes = self.buffer.take();
        let read = self.fill(path, MAX_FILE_BYTES + 1, &mut bytes);
        let parsed = read.and_then(|()| as_text(&bytes)).map(parse);
        self.buffer.replace(bytes);
        parsed
    }

    /// The first `limit` bytes of a regular file.
    pub(super) fn bytes<'a>(&self, path: impl Into<At<'a>>, limit: usize) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.fill(path.into(), limit, &mut bytes).map(|()| bytes)
    }

    fn fill(&self, path: At<'_>, limit: usize, bytes: &mut Vec<u8>) -> io::Result<()> {
        self.count(1);
        match &self.files {
            Files::Disk(disk) => disk.read(path, limit, bytes),
            Files::Memory(memory) => memory.read(path, limit, bytes),
        }
    }

    /// Names in a folder, sorted. A missing folder is `None`. Names that are no text are left out with a
    /// warning; more than [`MAX_ENTRIES`] is an error.
    pub(super) fn list(&self, path: &str) -> Result<Option<Vec<String>>, TopologyError> {
        self.count(1);
        let failed = |source: io::Error| TopologyError::Read { path: self.full(path), source };
        let listed = match &self.files {
            Files::Disk(disk) => disk.names(path, MAX_ENTRIES + 1),
            Files::Memory(memory) => memory.names(path, MAX_ENTRIES + 1),
        };
        let listed = match listed {
            Ok(listed) if listed.len() > MAX_ENTRIES => {
                return Err(TopologyError::TooLarge { path: self.full(path), limit: MAX_ENTRIES, unit: "entries" });
            }
            Ok(listed) => listed,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed(error)),
        };
        if listed.iter().any(Option::is_none) {
            self.warn(path, "holds a name that is no text, left out");
        }
        let mut names: Vec<String> = listed.into_iter().flatten().collect();
        names.sort_unstable();
        Ok(Some(names))
    }

    /// As [`Self::list`], a folder that cannot be listed being a warning and empty.
    pub(super) fn list_or_warn(&self, path: &str) -> Vec<String> {
        self.list(path)
            .unwrap_or_else(|error| {
                match error {
                    TopologyError::Read { source, .. } => self.failed(At::whole(path), &source),
                    error => self.warn(path, error),
                }
                None
            })
            .unwrap_or_default()
    }

    /// Whether the path leads to a folder inside the root.
    pub(super) fn is_dir(&self, path: &str) -> bool {
        self.count(1);
        match &self.files {
            Files::Disk(disk) => disk.is_dir(path),
            Files::Memory(memory) => memory.is_dir(path),
        }
    }

    /// Where a link leads, as a path relative to the root. `None` if it is no link; a link out of the root
    /// is `None` with a warning.
    pub(super) fn target<'a>(&self, path: impl Into<At<'a>>) -> Option<String> {
        let path = path.into();
        let inside = self.link(path, |link| join(path.folder, link))?;
        if inside.is_none() {
            self.warn(&path.to_string(), "links out of the tree, refused");
        }
        inside
    }

    /// Last part of what a link leads to, such as the name of a driver.
    pub(super) fn target_name<'a>(&self, path: impl Into<At<'a>>) -> Option<String> {
        let name = |link: &str| {
            link.rsplit('/').find(|part| !part.is_empty() && *part != ".." && *part != ".").map(str::to_owned)
        };
        self.link(path.into(), name)?
    }

    /// What `read` makes of the text of a link; `None` if it is none, or no text.
    fn link<T>(&self, path: At<'_>, read: impl FnOnce(&str) -> T) -> Option<T> {
        self.count(1);
        let mut bytes = self.buffer.take();
        let link = match &self.files {
            Files::Disk(disk) => disk.link(path, &mut bytes),
            Files::Memory(memory) => memory.link(path, &mut bytes),
        };
        let made = link.ok().and_then(|()| std::str::from_utf8(&bytes).ok()).map(read);
        self.buffer.replace(bytes);
        made
    }
}

/// The content of an attribute as text, the blanks around it left out.
fn as_text(bytes: &[u8]) -> io::Result<&str> {
    if bytes.len() > MAX_FILE_BYTES {
        return Err(io::Error::other(format!("has more than {MAX_FILE_BYTES} bytes")));
    }
    let text = std::str::from_utf8(bytes).ok().filter(|text| !text.contains('\0'));
    text.map(str::trim).ok_or_else(|| io::Error::other("is not text"))
}

/// Most characters of a bad value that a warning repeats.
const ECHO_CHARS: usize = 40;

pub(super) fn short(text: &str) -> String {
    text.chars().take(ECHO_CHARS).collect()
}

fn parent_of(path: &Path) -> Result<PathBuf, TopologyError> {
    let full = path.canonicalize().map_err(|source| TopologyError::Read { path: path.to_owned(), source })?;
    let named_sys = full.file_name().is_some_and(|name| name == "sys");
    let parent = full.parent().filter(|_| named_sys);
    parent.map(Path::to_owned).ok_or_else(|| TopologyError::NotSysfs { path: path.to_owned() })
}

fn is_missing(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

/// A link's text relative to the folder it lies in; `None` if it leaves the root.
fn join(folder: &str, link: &str) -> Option<String> {
    if link.starts_with('/') {
        return None;
    }
    let mut path = String::with_capacity(folder.len() + link.len());
    path.push_str(folder);
    for part in link.split('/') {
        match part {
            "" | "." => {}
            ".." if path.is_empty() => return None,
            ".." => path.truncate(path.rfind('/').unwrap_or(0)),
            name => {
                if !path.is_empty() {
                    path.push('/');
                }
                path.push_str(name);
            }
        }
    }
    Some(path)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use std::fs::File;

    use rustix::fs::{CWD, Mode};

    use super::*;

    fn tree() -> (tempfile::TempDir, Tree) {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(folder.path().join("sys/devices/a")).unwrap();
        std::fs::write(folder.path().join("sys/devices/a/value"), " 7\n").unwrap();
        let tree = Tree::open(folder.path()).unwrap();
        (folder, tree)
    }

    #[test]
    fn targets_of_links_are_paths_inside_the_root() {
        let (folder, tree) = tree();
        let at = |name: &str| folder.path().join("sys/devices").join(name);
        symlink("a/../a", at("inside")).unwrap();
        symlink("../../../../../../../etc", at("upwards")).unwrap();
        assert_eq!(tree.target("sys/devices/inside").as_deref(), Some("sys/devices/a"));
        assert_eq!(tree.target("sys/devices/upwards"), None);
        assert!(tree.take_warnings().iter().any(|warning| warning.contains("sys/devices/upwards")));
    }

    #[test]
    fn attributes_that_are_no_short_text_are_none_with_a_warning_naming_them() {
        let (folder, tree) = tree();
        let at = |name: &str| folder.path().join("sys/devices").join(name);
        std::fs::write(at("binary"), [0xff, 0xfe, 0]).unwrap();
        std::fs::write(at("zeros"), "7\0").unwrap();
        std::fs::write(at("long"), vec![b'7'; MAX_FILE_BYTES + 1]).unwrap();
        File::create(at("sparse")).unwrap().set_len(4 << 30).unwrap();
        rustix::fs::mkfifoat(CWD, at("fifo"), Mode::RUSR).unwrap();
        for name in ["binary", "zeros", "long", "sparse", "fifo", "a"] {
            let path = format!("sys/devices/{name}");
            assert_eq!(tree.text(&path), None, "{name}");
            let warnings = tree.take_warnings();
            assert!(warnings.len() == 1 && warnings[0].starts_with(&path), "{warnings:?}");
        }
        assert_eq!(tree.text("sys/devices/absent"), None);
        assert_eq!(tree.text("sys/devices/a/value").as_deref(), Some("7"));
        assert_eq!(tree.take_warnings(), Vec::<String>::new());
    }

    #[test]
    fn a_folder_without_sysfs_is_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let error = Tree::open(folder.path()).unwrap_err().to_string();
        assert!(error.contains(&folder.path().display().to_string()), "{error}");
    }
}
