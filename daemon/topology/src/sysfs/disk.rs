//! A tree on disk, never left: whatever links it holds, nothing outside the root is opened.

use std::cell::RefCell;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{CWD, Dir, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use crate::sysfs::tree::At;

/// More than most attributes have: fewer come in one read.
const SHORT_BYTES: usize = 512;
/// Room for the text of most links.
const LINK_BYTES: usize = 512;
/// Most links followed on one path where the kernel cannot be asked to stay inside.
const MAX_LINKS: usize = 40;

/// A folder, opened once. Paths are relative to it.
#[derive(Debug)]
pub(super) struct Disk {
    root: OwnedFd,
    last: RefCell<Last>,
}

/// The folder last looked into: a reader asks for many files of one folder.
#[derive(Debug, Default)]
struct Last {
    path: String,
    /// The folder, or why it cannot be opened; nothing before it is worth it.
    opened: Option<Result<OwnedFd, Errno>>,
}

impl Disk {
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self { root: rustix::fs::openat(CWD, path, flags, Mode::empty())?, last: RefCell::default() })
    }

    /// The same root, with nothing of it open.
    pub(super) fn another(&self) -> io::Result<Self> {
        Ok(Self { root: self.root.try_clone()?, last: RefCell::default() })
    }

    /// Puts the first `limit` bytes of a regular file into `bytes`.
    pub(super) fn read(&self, path: At<'_>, limit: usize, bytes: &mut Vec<u8>) -> io::Result<()> {
        let file = self.open_file(path).map_err(told)?;
        // A captured tree may hold fifos and device nodes: never read those.
        if FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode) != FileType::RegularFile {
            return Err(io::Error::other("is no regular file"));
        }
        bytes.clear();
        bytes.resize(limit.min(SHORT_BYTES), 0);
        let mut length = 0;
        while let Some(room) = bytes.get_mut(length..).filter(|room| !room.is_empty()) {
            let read = rustix::io::read(&file, room)?;
            length += read;
            // sysfs fills in an attribute at once: so short a one has met its end.
            if read == 0 || length < SHORT_BYTES {
                break;
            }
            bytes.resize(limit, 0);
        }
        bytes.truncate(length);
        Ok(())
    }

    fn open_file(&self, path: At<'_>) -> Result<OwnedFd, Errno> {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        if self.is_another_folder(path.folder) {
            return self.open_at(&path.to_string(), flags);
        }
        let here =
            self.beside(path, |folder, name| rustix::fs::openat(folder, name, flags | OFlags::NOFOLLOW, Mode::empty()));
        // No attribute of a live host is a link, but a captured tree may hold one.
        if here.as_ref().is_err_and(|error| *error == Errno::LOOP) {
            self.open_at(&path.to_string(), flags)
        } else {
            here
        }
    }

    /// Whether nothing of this folder was asked before. To open a folder pays from its second file on.
    fn is_another_folder(&self, folder: &str) -> bool {
        let mut last = self.last.borrow_mut();
        let is_another = last.path != folder;
        if is_another {
            last.path.clear();
            last.path.push_str(folder);
            last.opened = None;
        }
        is_another
    }

    /// The first `limit` names in a folder, `None` for each that is no text.
    pub(super) fn names(&self, path: &str, limit: usize) -> io::Result<Vec<Option<String>>> {
        let folder = self.open_at(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC).map_err(told)?;
        let mut names = Vec::new();
        for entry in Dir::new(folder)? {
            match entry?.file_name().to_str() {
                Ok("." | "..") => {}
                name => names.push(name.ok().map(str::to_owned)),
            }
            if names.len() >= limit {
                break;
            }
        }
        Ok(names)
    }

    pub(super) fn is_dir(&self, path: &str) -> bool {
        self.open_at(path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC).is_ok()
    }

    /// Puts the text of a link into `bytes`.
    pub(super) fn link(&self, path: At<'_>, bytes: &mut Vec<u8>) -> io::Result<()> {
        self.is_another_folder(path.folder);
        bytes.clear();
        bytes.reserve(LINK_BYTES);
        self.beside(path, |folder, name| {
            let length = rustix::fs::readlinkat_raw(folder, name, rustix::buffer::spare_capacity(bytes))?;
            // What fills the room may have been cut.
            if length < LINK_BYTES {
                return Ok(());
            }
            *bytes = rustix::fs::readlinkat(folder, name, Vec::new())?.into_bytes();
            Ok(())
        })
        .map_err(told)
    }

    /// Does something by name in the folder that was asked for last, which stays open for what is asked next. Nothing may be
    /// followed there: the kernel is not asked to stay inside.
    fn beside<T>(&self, path: At<'_>, act: impl FnOnce(&OwnedFd, &str) -> Result<T, Errno>) -> Result<T, Errno> {
        if matches!(path.name, "" | "." | "..") || path.name.contains('/') {
            return Err(Errno::INVAL);
        }
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let mut last = self.last.borrow_mut();
        let opened = last.opened.get_or_insert_with(|| self.open_at(path.folder, flags));
        opened.as_ref().map_err(|error| *error).and_then(|folder| act(folder, path.name))
    }

    fn open_at(&self, path: &str, flags: OFlags) -> Result<OwnedFd, Errno> {
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        match rustix::fs::openat2(&self.root, path, flags, Mode::empty(), resolve) {
            Err(Errno::NOSYS | Errno::PERM) => walk(&self.root, path, flags),
            opened => opened,
        }
    }
}

/// An error of the kernel in the words of this reader.
fn told(error: Errno) -> io::Error {
    match error {
        Errno::XDEV => io::Error::other("links out of the tree, refused"),
        error => error.into(),
    }
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

    /// Both ways to open must agree, so each case asks both.
    fn both(disk: &Disk, path: &str) -> [bool; 2] {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        [disk.open_at(path, flags).is_ok(), walk(&disk.root, path, flags).is_ok()]
    }

    #[test]
    fn a_file_that_is_a_link_is_read_where_the_link_stays_inside() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(folder.path().join("sys/a")).unwrap();
        std::fs::write(folder.path().join("sys/value"), "7").unwrap();
        symlink("../value", folder.path().join("sys/a/inside")).unwrap();
        symlink("/etc/hostname", folder.path().join("sys/a/outside")).unwrap();
        symlink(format!("{}x", "./".repeat(600)), folder.path().join("sys/a/long")).unwrap();
        let disk = Disk::open(folder.path()).unwrap();
        let mut bytes = Vec::new();
        // The second time the folder is open, and nothing else may come of it.
        for _ in 0..2 {
            disk.read(At { folder: "sys/a", name: "inside" }, 9, &mut bytes).unwrap();
            assert_eq!(bytes, b"7");
            let outside = disk.read(At { folder: "sys/a", name: "outside" }, 9, &mut bytes).unwrap_err();
            assert!(outside.to_string().contains("out of the tree"), "{outside}");
            disk.link(At { folder: "sys/a", name: "inside" }, &mut bytes).unwrap();
            assert_eq!(bytes, b"../value");
            disk.link(At { folder: "sys/a", name: "long" }, &mut bytes).unwrap();
            assert_eq!(bytes.len(), 1201);
            let gone = disk.read(At { folder: "sys/gone", name: "value" }, 9, &mut bytes).unwrap_err();
            assert_eq!(gone.kind(), io::ErrorKind::NotFound);
        }
    }

    #[test]
    fn no_more_is_read_of_a_file_than_asked_for() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("sys")).unwrap();
        std::fs::write(folder.path().join("sys/long"), vec![b'7'; 3 * SHORT_BYTES]).unwrap();
        let disk = Disk::open(folder.path()).unwrap();
        let mut bytes = Vec::new();
        for limit in [1, SHORT_BYTES, SHORT_BYTES + 1, 2 * SHORT_BYTES, 4 * SHORT_BYTES] {
            disk.read(At { folder: "sys", name: "long" }, limit, &mut bytes).unwrap();
            assert_eq!(bytes.len(), limit.min(3 * SHORT_BYTES));
        }
    }

    #[test]
    fn links_inside_the_root_are_followed_and_links_out_of_it_are_refused() {
        let (folder, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        std::fs::create_dir_all(folder.path().join("sys/devices/a")).unwrap();
        std::fs::write(folder.path().join("sys/devices/a/value"), "7").unwrap();
        std::fs::write(outside.path().join("secret"), "x").unwrap();
        let disk = Disk::open(folder.path()).unwrap();
        let at = |name: &str| folder.path().join("sys/devices").join(name);
        symlink("a/../a", at("inside")).unwrap();
        symlink(outside.path(), at("absolute")).unwrap();
        symlink("../../../../../../../etc", at("upwards")).unwrap();
        symlink("ring", at("ring")).unwrap();
        assert_eq!(both(&disk, "sys/devices/inside/value"), [true, true]);
        assert_eq!(both(&disk, "sys/devices/absolute/secret"), [false, false]);
        assert_eq!(both(&disk, "sys/devices/upwards/hostname"), [false, false]);
        assert_eq!(both(&disk, "sys/devices/ring"), [false, false]);
        assert_eq!(both(&disk, "sys/devices/a/value"), [true, true]);
    }
}
