//! Captured sysfs trees in archives: tar, plain or packed with xz, zst, gz or bz2.
//!
//! Unpacked into memory, never to disk, so no name or link in it can reach a file of this machine. Only
//! what can be part of a sysfs or proc tree is held. All that grows with the input has a bound; together
//! they keep the reader below 64 MiB.

mod packing;
mod tape;

use std::io::{self, Read};
use std::path::Path;

use crate::assemble::GpuIds;
use crate::error::TopologyError;
use crate::model::RawHost;
use crate::source::SourceKind;
use crate::sysfs::tree::Tree;

pub(crate) use packing::{HEAD_BYTES, Packing};

/// Lists the facts of the tree in an archive. `head` is what was read of it to tell its kind.
///
/// # Errors
/// It does not unpack, is larger than any capture, holds what no sysfs tree has (names that leave the
/// archive, devices), or no sysfs tree.
pub(crate) fn read(
    packing: Packing,
    head: &[u8],
    rest: impl Read,
    path: &Path,
    gpu_ids: &GpuIds,
) -> Result<RawHost, TopologyError> {
    let whole = io::Cursor::new(head.to_vec()).chain(rest);
    let bad = |message: String| TopologyError::BadInput { path: Some(path.to_owned()), what: packing.name(), message };
    let unpacked = packing.unpack(whole, head).map_err(|error| bad(chain(&error)))?;
    let (memory, warnings) = tape::read(unpacked).map_err(|error| bad(chain(&error)))?;
    let tree = Tree::in_memory(memory, path)?;
    let mut raw = super::facts(&tree, SourceKind::Sysfs, gpu_ids)?;
    raw.warnings.extend(warnings);
    Ok(raw)
}

/// An error with what caused it, each once.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        if !text.ends_with(&next) {
            text = format!("{text}: {next}");
        }
        cause = error.source();
    }
    text
}
