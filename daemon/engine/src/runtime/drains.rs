//! Which GPUs an administrator has drained, here and in a file for the next daemon: a drain lasts until it is lifted, whatever
//! becomes of the daemon meanwhile.
//!
//! Role: owns the set and the file. GPUs that are not there now stay in it, for they may come back.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

use gdrd_hal::GpuUuid;

use super::lock;
use crate::error::EngineError;
use crate::state_file::{boot_id, is_missing, read_state_file, replace_state_file};

/// Longest file that is read, bytes: a thousand GPUs.
const MAX_FILE_BYTES: u64 = 64 << 10;
const BOOT: &str = "boot ";
const END: &str = "end";

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

    pub(super) fn insert(&self, uuids: impl IntoIterator<Item = GpuUuid>) {
        self.lock().extend(uuids);
    }

    /// Whether it was drained.
    pub(super) fn remove(&self, uuid: &GpuUuid) -> bool {
        self.lock().remove(uuid)
    }

    /// Forgets those that are none of these.
    pub(super) fn forget_others(&self, of: &BTreeSet<GpuUuid>) {
        self.lock().retain(|uuid| of.contains(uuid));
    }

    /// Has the next daemon know.
    ///
    /// # Errors
    /// `NotKept`, where the file cannot be written.
    pub(super) fn keep(&self) -> Result<(), EngineError> {
        let Some(path) = &self.file else { return Ok(()) };
        let uuids = self.lock();
        write(path, &uuids).map_err(|error| {
            tracing::error!(path = %path.display(), %error, "the next daemon does not know which gpus are drained");
            EngineError::NotKept {
                what: "which gpus are drained",
                path: path.display().to_string(),
                problem: error.to_string(),
            }
        })
    }

    /// Writes the file anew where somebody has deleted it.
    ///
    /// # Errors
    /// `NotKept`, where it cannot be written.
    pub(super) fn restore(&self) -> Result<(), EngineError> {
        if self.file.as_deref().is_some_and(is_missing) && !self.lock().is_empty() { self.keep() } else { Ok(()) }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeSet<GpuUuid>> {
        lock(&self.uuids)
    }
}

/// The boot, a UUID a line, and a last word, so that a file that was cut is seen to be. Drains of another boot are over.
fn read(path: &Path) -> io::Result<BTreeSet<GpuUuid>> {
    let Some(bytes) = read_state_file(path, MAX_FILE_BYTES)? else { return Ok(BTreeSet::new()) };
    let invalid = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what);
    let text = std::str::from_utf8(&bytes).map_err(|_| invalid("it is no text"))?;
    let mut lines = text.lines();
    let boot = lines.next().and_then(|line| line.strip_prefix(BOOT)).ok_or_else(|| invalid("it names no boot"))?;
    if lines.next_back() != Some(END) {
        return Err(invalid("its end is missing"));
    }
    Ok(if boot == boot_id() { lines.map(|line| GpuUuid(line.to_owned())).collect() } else { BTreeSet::new() })
}

fn write(path: &Path, uuids: &BTreeSet<GpuUuid>) -> io::Result<()> {
    let lines = uuids.iter().map(|uuid| format!("{uuid}\n"));
    let text: String = std::iter::once(format!("{BOOT}{}\n", boot_id())).chain(lines).collect();
    replace_state_file(path, format!("{text}{END}\n").as_bytes())
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
        first.insert([uuid("GPU-a"), uuid("GPU-b")]);
        assert!(first.remove(&uuid("GPU-a")) && !first.remove(&uuid("GPU-a")));
        first.keep().unwrap();
        assert_eq!(read().all(), BTreeSet::from([uuid("GPU-b")]));
        std::fs::remove_file(&path).unwrap();
        first.restore().unwrap();
        assert_eq!(read().all(), BTreeSet::from([uuid("GPU-b")]), "it was deleted, and written anew");
        let second = read();
        assert!(second.remove(&uuid("GPU-b")));
        second.keep().unwrap();
        assert_eq!(read().all(), BTreeSet::new());
    }

    #[test]
    fn a_file_that_is_none_or_was_cut_is_told_and_drains_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("drained");
        write(&path, &BTreeSet::from([uuid("GPU-a")])).unwrap();
        let whole = std::fs::read(&path).unwrap();
        for cut in 0..whole.len() - 1 {
            std::fs::write(&path, &whole[..cut]).unwrap();
            assert!(super::read(&path).is_err(), "{cut} bytes");
        }
        for bytes in [vec![0xff; 16], vec![b'a'; 1 << 20]] {
            std::fs::write(&path, bytes).unwrap();
            assert_eq!(Drains::read(Some(path.clone())).all(), BTreeSet::new());
        }
    }

    #[test]
    fn a_host_that_was_booted_again_drains_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("drained");
        std::fs::write(&path, "boot another\nGPU-a\nend\n").unwrap();
        assert_eq!(super::read(&path).unwrap(), BTreeSet::new());
    }

    #[test]
    fn whoever_drains_is_told_that_the_next_daemon_will_not_know() {
        let folder = tempfile::tempdir().unwrap();
        let drains = Drains::read(Some(folder.path().join("no").join("drained")));
        drains.insert([uuid("GPU-a")]);
        assert!(matches!(drains.keep(), Err(EngineError::NotKept { .. })));
        assert!(drains.contains(&uuid("GPU-a")));
    }
}
