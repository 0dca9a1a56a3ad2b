//! Small files in the runtime folder that one daemon leaves for the next: read whole and bounded, replaced whole.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use rustix::fs::OFlags;

/// Another one each boot (random(4)).
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// Of the daemon's user alone.
pub(crate) const MODE: u32 = 0o600;

/// Identity of this boot; empty where the kernel does not tell.
#[must_use]
pub fn boot_id() -> String {
    fs::read_to_string(BOOT_ID).unwrap_or_default().trim().to_owned()
}

/// What the file holds; `None` where there is none.
///
/// # Errors
/// Whatever it is but a regular file of at most `max_bytes`: a link is not followed, and a FIFO is not waited for (open(2)).
pub fn read_state_file(path: &Path, max_bytes: u64) -> io::Result<Option<Vec<u8>>> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = match OpenOptions::new().read(true).custom_flags(flags.bits().cast_signed()).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let invalid = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
    if !file.metadata()?.is_file() {
        return Err(invalid("not a regular file".to_owned()));
    }
    let mut bytes = Vec::new();
    file.take(max_bytes.saturating_add(1)).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > max_bytes {
        true => Err(invalid(format!("longer than {max_bytes} bytes"))),
        false => Ok(Some(bytes)),
    }
}

/// Whether nothing is there; not where that cannot be told.
pub(crate) fn is_missing(path: &Path) -> bool {
    path.try_exists().is_ok_and(|exists| !exists)
}

/// Replaces the file, whole or not at all, for this user alone.
///
/// # Errors
/// That of the file system.
pub fn replace_state_file(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut new = path.as_os_str().to_owned();
    new.push(".new");
    write_new(new.as_ref(), bytes)?;
    fs::rename(&new, path).inspect_err(|_| remove(new.as_ref()))
}

/// A file of its own. What an earlier daemon left half written is replaced, not written into.
pub(crate) fn write_new(path: &Path, bytes: &[u8]) -> io::Result<File> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new().append(true).create_new(true).mode(MODE).open(path)?;
    // What is left of it would take the room that there is not.
    file.write_all(bytes).inspect_err(|_| remove(path))?;
    Ok(file)
}

/// Tidies up after an error, which says all that a second one could.
fn remove(path: &Path) {
    let _ = fs::remove_file(path);
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    #[test]
    fn what_replaced_a_file_is_read_whole_and_nobody_else_can() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        assert_eq!(read_state_file(&path, 8).unwrap(), None);
        for bytes in [&b"12345678"[..], b"short", b""] {
            replace_state_file(&path, bytes).unwrap();
            assert_eq!(read_state_file(&path, 8).unwrap().unwrap(), bytes);
        }
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, MODE);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing else is left");
    }

    #[test]
    fn whatever_else_stands_there_is_an_error_and_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name| folder.path().join(name);
        fs::write(path("long"), [0; 9]).unwrap();
        fs::create_dir(path("folder")).unwrap();
        symlink("/etc/passwd", path("link")).unwrap();
        mknodat(CWD, path("fifo"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        for name in ["long", "folder", "link", "fifo"] {
            assert!(read_state_file(&path(name), 8).is_err(), "{name}");
        }
    }
}
