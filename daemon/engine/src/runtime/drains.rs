//! Which GPUs an administrator has drained, here and in a file for the next daemon: a drain lasts until it is lifted, whatever
//! becomes of the daemon meanwhile.
//!
//! Role: owns the set and the file. GPUs that are not there now stay in it, for they may come back.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

use gdrd_hal::GpuUuid;

use super::lock;

/// Longest file that is read, bytes: a thousand GPUs.
const MAX_FILE_BYTES: u64 = 64 << 10;
/// Of the daemon's user alone.
const MODE: u32 = 0o600;

/// The drained GPUs.
#[derive(Debug)]
pub(super) struct Drains {
    file: Option<PathBuf>,
    /// Held while the file is written, so that the last change is what stands there.
    uuids: Mutex<BTreeSet<GpuUuid>>,
}

impl Drains {
    /// What the file says, where there is one. One that cannot be read drains nothing, and is told.
    pub(super) fn read(file: Option<PathBuf>) -> Self {
        let uuids = match file.as_deref().map(read) {
            Some(Ok(uuids)) => uuids,
            None => BTreeSet::new(),
            Some(Err(error)) => {
                let path = file.as_deref().map(Path::display);
                tracing::error!(path = path.map(tracing::field::display), %error, "no gpu counts as drained");
                BTreeSet::new()
            }
        };
        Self { file, uuids: Mutex::new(uuids) }
    }

    pub(super) fn contains(&self, uuid: &GpuUuid) -> bool {
        self.lock().contains(uuid)
    }

    pub(super) fn all(&self) -> BTreeSet<GpuUuid> {
        self.lock().clone()
    }

    pub(super) fn insert(&self, uuid: &GpuUuid) {
        self.change(|uuids| uuids.insert(uuid.clone()));
    }

    /// Whether it was drained.
    pub(super) fn remove(&self, uuid: &GpuUuid) -> bool {
        self.change(|uuids| uuids.remove(uuid))
    }

    /// Forgets those that are none of these.
    pub(super) fn forget_others(&self, of: &BTreeSet<GpuUuid>) {
        self.change(|uuids| {
            let before = uuids.len();
            uuids.retain(|uuid| of.contains(uuid));
            uuids.len() != before
        });
    }

    fn change(&self, change: impl FnOnce(&mut BTreeSet<GpuUuid>) -> bool) -> bool {
        let mut uuids = self.lock();
        let changed = change(&mut uuids);
        if changed
            && let Some(path) = &self.file
            && let Err(error) = write(path, &uuids)
        {
            tracing::error!(path = %path.display(), %error, "the next daemon does not know of this drain");
        }
        changed
    }

    fn lock(&self) -> MutexGuard<'_, BTreeSet<GpuUuid>> {
        lock(&self.uuids)
    }
}

/// A UUID a line.
fn read(path: &Path) -> io::Result<BTreeSet<GpuUuid>> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeSet::new()),
        Err(error) => return Err(error),
    };
    let mut text = String::new();
    file.take(MAX_FILE_BYTES + 1).read_to_string(&mut text)?;
    if text.len() as u64 > MAX_FILE_BYTES {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("longer than {MAX_FILE_BYTES} bytes")));
    }
    Ok(text.lines().filter(|line| !line.is_empty()).map(|line| GpuUuid(line.to_owned())).collect())
}

/// Whole or not at all.
fn write(path: &Path, uuids: &BTreeSet<GpuUuid>) -> io::Result<()> {
    let new = path.with_extension("new");
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(MODE).open(&new)?;
    for uuid in uuids {
        writeln!(file, "{uuid}")?;
    }
    fs::rename(&new, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uuid(name: &str) -> GpuUuid {
        GpuUuid(name.to_owned())
    }

    #[test]
    fn what_is_drained_is_known_to_the_next_until_it_is_lifted() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("drained");
        let read = || Drains::read(Some(path.clone()));
        let first = read();
        first.insert(&uuid("GPU-a"));
        first.insert(&uuid("GPU-b"));
        assert!(first.remove(&uuid("GPU-a")) && !first.remove(&uuid("GPU-a")));
        assert_eq!(read().all(), BTreeSet::from([uuid("GPU-b")]));
        assert!(read().remove(&uuid("GPU-b")));
        assert_eq!(read().all(), BTreeSet::new());
    }

    #[test]
    fn a_file_that_is_none_drains_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("drained");
        for bytes in [vec![0xff; 16], vec![b'a'; 1 << 20]] {
            fs::write(&path, bytes).unwrap();
            assert_eq!(Drains::read(Some(path.clone())).all(), BTreeSet::new());
        }
    }
}
