//! Bounded, contained access to a folder that holds `sys/` (and perhaps `proc/`).
//!
//! Nothing outside the root is ever opened, whatever links the tree holds; every read and listing has a
//! bound. Paths are relative to the root. Knows nothing of what the files mean.

use std::cell::RefCell;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Dir, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use crate::error::TopologyError;

/// Most bytes read of one attribute: sysfs gives at most a page.
const MAX_FILE_BYTES: usize = 4096;
/// Most bytes read of a table in `/proc`.
const MAX_TABLE_BYTES: usize = 65_536;
/// Most entries of one folder.
pub(super) const MAX_ENTRIES: usize = 65_536;
/// Most links followed on one path where the kernel cannot be asked to stay inside.
const MAX_LINKS: usize = 40;

/// A folder that holds `sys/`, opened once.
#[derive(Debug)]
pub(super) struct Tree {
    root: OwnedFd,
    path: PathBuf,
    warnings: RefCell<Vec<String>>,
}

impl Tree {
    /// Opens a root: a folder that holds `sys/`, or the `sys` folder itself.
    pub(super) fn open(path: &Path) -> Result<Self, TopologyError> {
        let holds = |folder: &str| path.join(folder).is_dir();
        let is_sys = !holds("sys") && (holds("bus") || holds("class") || holds("devices"));
        let parent = if is_sys { parent_of(path)? } else { path.to_owned() };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::openat(CWD, &parent, flags, Mode::empty())
            .map_err(|errno| TopologyError::Read { path: parent.clone(), source: errno.into() })?;
        let tree = Self { root, path: parent, warnings: RefCell::default() };
        let is_sysfs = ["sys/bus", "sys/class", "sys/devices"].iter().any(|folder| tree.is_dir(folder));
        if is_sysfs { Ok(tree) } else { Err(TopologyError::NotSysfs { path: path.to_owned() }) }
    }

    /// Records what could not be read.
    pub(super) fn warn(&self, path: &str, why: impl std::fmt::Display) {
        self.warnings.borrow_mut().push(format!("{path}: {why}"));
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
    pub(super) fn text(&self, path: &str) -> Option<String> {
        match self.read(path) {
            Ok(text) => Some(text),
            Err(error) if is_missing(&error) => None,
            Err(error) => {
                self.warn(path, error);
                None
            }
        }
    }

    /// Lines of a table in `/proc`, as far as they are read: the first [`MAX_TABLE_BYTES`].
    pub(super) fn table(&self, path: &str) -> Vec<String> {
        let bytes = self.bytes(path, MAX_TABLE_BYTES).unwrap_or_default();
        String::from_utf8_lossy(&bytes).lines().map(str::to_owned).collect()
    }

    /// As [`Self::text`], for attributes that fail in normal use (an empty GID slot gives EINVAL).
    pub(super) fn quiet_text(&self, path: &str) -> Option<String> {
        self.read(path).ok()
    }

    fn read(&self, path: &str) -> io::Result<String> {
        let bytes = self.bytes(path, MAX_FILE_BYTES + 1)?;
        if bytes.len() > MAX_FILE_BYTES {
            return Err(io::Error::other(format!("has more than {MAX_FILE_BYTES} bytes")));
        }
        let text = String::from_utf8(bytes).map_err(|_| io::Error::other("is not text"))?;
        if text.contains('\0') {
            return Err(io::Error::other("is not text"));
        }
        Ok(text.trim().to_owned())
    }

    /// The first `limit` bytes of a regular file.
    fn bytes(&self, path: &str, limit: usize) -> io::Result<Vec<u8>> {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file = self.open_at(path, flags)?;
        // A captured tree may hold fifos and device nodes: never read those.
        if FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode) != FileType::RegularFile {
            return Err(io::Error::other("is no regular file"));
        }
        let mut bytes = Vec::with_capacity(128);
        File::from(file).take(u64::try_from(limit).unwrap_or(u64::MAX)).read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    /// Names in a folder, sorted. A missing folder is `None`. Names that are no text are left out with a
    /// warning; more than [`MAX_ENTRIES`] is an error.
    pub(super) fn list(&self, path: &str) -> Result<Option<Vec<String>>, TopologyError> {
        let failed = |source: io::Error| TopologyError::Read { path: self.full(path), source };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = match self.open_at(path, flags) {
            Ok(folder) => folder,
            Err(error) if is_missing(&error) => return Ok(None),
            Err(error) => return Err(failed(error)),
        };
        let mut names = Vec::new();
        for entry in Dir::new(folder).map_err(|errno| failed(errno.into()))? {
            let entry = entry.map_err(|errno| failed(errno.into()))?;
            match entry.file_name().to_str() {
                Ok("." | "..") => {}
                Ok(name) => names.push(name.to_owned()),
                Err(_) => self.warn(path, "holds a name that is no text, left out"),
            }
            if names.len() > MAX_ENTRIES {
                return Err(TopologyError::TooLarge { path: self.full(path), limit: MAX_ENTRIES, unit: "entries" });
            }
        }
        names.sort_unstable();
        Ok(Some(names))
    }

    /// As [`Self::list`], a folder that cannot be listed being a warning and empty.
    pub(super) fn list_or_warn(&self, path: &str) -> Vec<String> {
        self.list(path)
            .unwrap_or_else(|error| {
                self.warn(path, error);
                None
            })
            .unwrap_or_default()
    }

    /// Whether the path leads to a folder inside the root.
    pub(super) fn is_dir(&self, path: &str) -> bool {
        self.open_at(path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC).is_ok()
    }

    /// Where a link leads, as a path relative to the root. `None` if it is no link; a link out of the root
    /// is `None` with a warning.
    pub(super) fn target(&self, path: &str) -> Option<String> {
        let raw = self.raw_link(path).ok()?;
        let inside = join(parent(path), &raw);
        if inside.is_none() {
            self.warn(path, "links out of the tree, refused");
        }
        inside
    }

    /// Last part of what a link leads to, such as the name of a driver.
    pub(super) fn target_name(&self, path: &str) -> Option<String> {
        let raw = self.raw_link(path).ok()?;
        raw.rsplit('/').find(|part| !part.is_empty() && *part != ".." && *part != ".").map(str::to_owned)
    }

    fn raw_link(&self, path: &str) -> io::Result<String> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let link = self.open_at(path, flags)?;
        let target = rustix::fs::readlinkat(&link, "", Vec::new())?;
        target.into_string().map_err(|_| io::Error::other("links to a name that is no text"))
    }

    fn open_at(&self, path: &str, flags: OFlags) -> io::Result<OwnedFd> {
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        match rustix::fs::openat2(&self.root, path, flags, Mode::empty(), resolve) {
            Err(Errno::NOSYS | Errno::PERM) => walk(&self.root, path, flags).map_err(io::Error::from),
            Err(Errno::XDEV) => Err(io::Error::other("links out of the tree, refused")),
            opened => opened.map_err(io::Error::from),
        }
    }
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

fn parent(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(parent, _)| parent)
}

/// A link's text relative to the folder it lies in; `None` if it leaves the root.
fn join(folder: &str, link: &str) -> Option<String> {
    if link.starts_with('/') {
        return None;
    }
    let mut parts: Vec<&str> = folder.split('/').filter(|part| !part.is_empty()).collect();
    for part in link.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop()?;
            }
            name => parts.push(name),
        }
    }
    Some(parts.join("/"))
}

/// Opens a path part by part without following any link by the kernel, for kernels and sandboxes without
/// openat2. Links are resolved here, against the root.
fn walk(root: &OwnedFd, path: &str, flags: OFlags) -> Result<OwnedFd, Errno> {
    let step = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut rest: Vec<String> = path.split('/').rev().map(str::to_owned).collect();
    let mut folders: Vec<OwnedFd> = Vec::new();
    let mut links = 0;
    while let Some(part) = rest.pop() {
        if part.is_empty() || part == "." {
            continue;
        }
        if part == ".." {
            folders.pop().ok_or(Errno::XDEV)?;
            continue;
        }
        let here = folders.last().unwrap_or(root);
        let found = rustix::fs::openat(here, part.as_str(), step, Mode::empty())?;
        let kind = FileType::from_raw_mode(rustix::fs::fstat(&found)?.st_mode);
        let is_last = rest.is_empty();
        if kind == FileType::Symlink && !(is_last && flags.contains(OFlags::NOFOLLOW)) {
            links += 1;
            let target = rustix::fs::readlinkat(&found, "", Vec::new())?;
            let target = target.into_string().map_err(|_| Errno::ILSEQ)?;
            if links > MAX_LINKS {
                return Err(Errno::LOOP);
            }
            if target.starts_with('/') {
                return Err(Errno::XDEV);
            }
            rest.extend(target.split('/').rev().map(str::to_owned));
        } else if is_last {
            // The last part is known to be no link, and NOFOLLOW keeps it so.
            return rustix::fs::openat(here, part.as_str(), flags | OFlags::NOFOLLOW, Mode::empty());
        } else {
            folders.push(found);
        }
    }
    rustix::fs::openat(folders.last().unwrap_or(root), ".", flags, Mode::empty())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn tree() -> (tempfile::TempDir, Tree) {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(folder.path().join("sys/devices/a")).unwrap();
        std::fs::write(folder.path().join("sys/devices/a/value"), " 7\n").unwrap();
        let tree = Tree::open(folder.path()).unwrap();
        (folder, tree)
    }

    /// Both ways to open must agree, so each case asks both.
    fn both(tree: &Tree, path: &str) -> [bool; 2] {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        [tree.open_at(path, flags).is_ok(), walk(&tree.root, path, flags).is_ok()]
    }

    #[test]
    fn links_inside_the_root_are_followed_and_links_out_of_it_are_refused() {
        let (folder, tree) = tree();
        let outside = tempfile::tempdir().unwrap();
        std::fs::write(outside.path().join("secret"), "x").unwrap();
        let at = |name: &str| folder.path().join("sys/devices").join(name);
        symlink("a/../a", at("inside")).unwrap();
        symlink(outside.path(), at("absolute")).unwrap();
        symlink("../../../../../../../etc", at("upwards")).unwrap();
        symlink("ring", at("ring")).unwrap();
        assert_eq!(both(&tree, "sys/devices/inside/value"), [true, true]);
        assert_eq!(both(&tree, "sys/devices/absolute/secret"), [false, false]);
        assert_eq!(both(&tree, "sys/devices/upwards/hostname"), [false, false]);
        assert_eq!(both(&tree, "sys/devices/ring"), [false, false]);
        assert_eq!(both(&tree, "sys/devices/a/value"), [true, true]);
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
