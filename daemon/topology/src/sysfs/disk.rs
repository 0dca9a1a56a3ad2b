//! A tree on disk, never left: whatever links it holds, nothing outside the root is opened.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{CWD, Dir, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

/// Bytes of a first read, more than most attributes have.
const READ_BYTES: usize = 512;
/// Most links followed on one path where the kernel cannot be asked to stay inside.
const MAX_LINKS: usize = 40;

/// A folder, opened once. Paths are relative to it.
#[derive(Debug)]
pub(super) struct Disk {
    root: OwnedFd,
}

impl Disk {
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self { root: rustix::fs::openat(CWD, path, flags, Mode::empty())? })
    }

    /// The first `limit` bytes of a regular file.
    pub(super) fn bytes(&self, path: &str, limit: usize) -> io::Result<Vec<u8>> {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file = self.open_at(path, flags)?;
        // A captured tree may hold fifos and device nodes: never read those.
        if FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode) != FileType::RegularFile {
            return Err(io::Error::other("is no regular file"));
        }
        // sysfs fills in an attribute at once, so that a read that leaves room has met the end.
        let mut bytes = Vec::with_capacity(READ_BYTES);
        let first = rustix::io::read(&file, rustix::buffer::spare_capacity(&mut bytes))?;
        if first < READ_BYTES {
            return Ok(bytes);
        }
        let rest = limit.saturating_sub(first);
        File::from(file).take(u64::try_from(rest).unwrap_or(u64::MAX)).read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    /// The first `limit` names in a folder, `None` for each that is no text.
    pub(super) fn names(&self, path: &str, limit: usize) -> io::Result<Vec<Option<String>>> {
        let folder = self.open_at(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC)?;
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

    /// The text of a link.
    pub(super) fn link(&self, path: &str) -> io::Result<String> {
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
