//! Files that `--output` names: where a file stands or nothing does, it is written whole or not at all; what
//! else has the name (a device, a FIFO, standard output) is written into and stays what it is.

use std::fs::{self, File, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;

/// What a new file may grant before the umask takes from it (creat(2), as shells call it).
const NEW_FILE_MODE: u32 = 0o666;

/// Writes `bytes` to what `path` names, links followed.
///
/// # Errors
/// It cannot be created or written; a file that stood there is then as it was.
pub(crate) fn write(path: &Path, bytes: impl AsRef<[u8]>) -> anyhow::Result<()> {
    let written = match target(path) {
        Ok(Target::Stream) => {
            File::options().append(true).open(path).and_then(|mut file| file.write_all(bytes.as_ref()))
        }
        Ok(Target::File { path, mode }) => replace(&path, mode, bytes.as_ref()),
        Err(error) => Err(error),
    };
    written.with_context(|| format!("write {}", path.display()))
}

/// What a path leads to.
enum Target {
    /// Only to be written into.
    Stream,
    /// To be put in place whole; with the mode of the file that it replaces, if one is there.
    File { path: PathBuf, mode: Option<Permissions> },
}

fn target(path: &Path) -> io::Result<Target> {
    // Through all links, so that no loop of them is walked below.
    let mode = match fs::metadata(path) {
        Ok(found) if !found.is_file() => return Ok(Target::Stream),
        Ok(found) => Some(found.permissions()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(error),
    };
    let mut path = path.to_owned();
    while fs::symlink_metadata(&path).is_ok_and(|found| found.is_symlink()) {
        // Links of /proc/PID/fd stand for an open file (proc_pid_fd(5)), which has a reader at its other end or
        // is appended to, as standard output may be.
        if fs::canonicalize(folder(&path))?.starts_with("/proc") {
            return Ok(Target::Stream);
        }
        path = folder(&path).join(fs::read_link(&path)?);
    }
    Ok(Target::File { path, mode })
}

/// A job that starts meanwhile never reads half of a file.
fn replace(path: &Path, mode: Option<Permissions>, bytes: &[u8]) -> io::Result<()> {
    let mut builder = tempfile::Builder::new();
    if mode.is_none() {
        builder.permissions(Permissions::from_mode(NEW_FILE_MODE));
    }
    let mut part = builder.prefix(".gdrctl-").tempfile_in(folder(path))?;
    part.write_all(bytes)?;
    if let Some(mode) = mode {
        part.as_file().set_permissions(mode)?;
    }
    part.persist(path)?;
    Ok(())
}

fn folder(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}
