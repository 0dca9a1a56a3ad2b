//! Ways to get a snapshot: this machine, a captured tree, a file of any known kind.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use crate::assemble::{ReadOptions, assemble};
use crate::error::TopologyError;
use crate::model::Snapshot;
use crate::profile;
use crate::source::{Source, SourceKind};
use crate::sysfs;

/// Reads this machine from its `/sys`, as generation 1. Takes milliseconds; sets [`Snapshot::generation`]
/// for the caller to raise.
///
/// # Errors
/// `/sys` is absent or cannot be listed.
pub fn read_live(options: &ReadOptions) -> Result<Snapshot, TopologyError> {
    let source = Source { kind: SourceKind::Live, path: None };
    Ok(Snapshot { generation: 1, source, host: assemble(sysfs::read_live()?, options) })
}

/// Reads a captured sysfs tree below a folder that holds `sys/` or is it.
///
/// # Errors
/// The folder cannot be read or holds no sysfs tree.
pub fn read_root(root: &Path, options: &ReadOptions) -> Result<Snapshot, TopologyError> {
    let source = Source { kind: SourceKind::Sysfs, path: Some(root.to_owned()) };
    let raw = sysfs::read(root, SourceKind::Sysfs)?;
    Ok(Snapshot { generation: 1, source, host: assemble(raw, options) })
}

/// Reads an input by what it is: a folder is a sysfs tree, a text that begins so a host profile.
///
/// # Errors
/// The input cannot be read, or is of no known kind.
pub fn read_input(path: &Path, options: &ReadOptions) -> Result<Snapshot, TopologyError> {
    let failed = |source| TopologyError::Read { path: path.to_owned(), source };
    let kind = std::fs::metadata(path).map_err(failed)?;
    if kind.is_dir() {
        return read_root(path, options);
    }
    if !kind.is_file() {
        return Err(TopologyError::UnknownInput { path: path.to_owned(), reason: "neither a folder nor a file" });
    }
    let text = read_text(path, profile::MAX_PROFILE_BYTES)?;
    let is_comment = |line: &&str| line.trim().is_empty() || line.trim_start().starts_with('#');
    let first = text.lines().find(|line| !is_comment(line));
    if first.is_some_and(|line| line.trim_start().starts_with(profile::MAGIC)) {
        return profile::snapshot(&text, Some(path.to_owned()), options);
    }
    Err(TopologyError::UnknownInput { path: path.to_owned(), reason: "neither a folder with sys/ nor a host profile" })
}

/// Text of a file of at most `limit` bytes.
fn read_text(path: &Path, limit: usize) -> Result<String, TopologyError> {
    let failed = |source| TopologyError::Read { path: path.to_owned(), source };
    let mut bytes = Vec::new();
    let most = u64::try_from(limit).unwrap_or(u64::MAX).saturating_add(1);
    File::open(path).and_then(|file| file.take(most).read_to_end(&mut bytes)).map_err(failed)?;
    if bytes.len() > limit {
        return Err(TopologyError::TooLarge { path: path.to_owned(), limit, unit: "bytes" });
    }
    let not_text = "not text, and no archive or capture is read in this form";
    String::from_utf8(bytes).map_err(|_| TopologyError::UnknownInput { path: path.to_owned(), reason: not_text })
}
