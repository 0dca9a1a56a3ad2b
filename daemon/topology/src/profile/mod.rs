//! Host profiles: a machine as a compact text table. Format: docs/host-profile.md.
//!
//! One profile serves as simulated host, as input of the command line and as test fixture. This module
//! knows the text only; what the facts mean is settled by [`crate::assemble`].

mod gpu;
mod line;
mod parse;
mod word;
mod write;

use std::path::PathBuf;

use crate::assemble::{ReadOptions, assemble};
use crate::error::TopologyError;
use crate::model::Snapshot;
use crate::source::{Source, SourceKind};

pub use line::BadLine;
pub use parse::parse;
pub use write::render;

/// First word of every profile, followed by the version of the format.
pub const MAGIC: &str = "gdrd-host-profile";
/// Version of the format that this program reads and writes.
pub const VERSION: u32 = 1;
/// Largest profile that is read, in bytes.
pub const MAX_PROFILE_BYTES: usize = 4 << 20;

macro_rules! builtin {
    ($($name:literal),+ $(,)?) => {
        /// Names and texts of the built-in profiles, in the order they are listed to users.
        const BUILTIN: &[(&str, &str)] = &[
            $(($name, include_str!(concat!("../../../../tests/fixtures/hosts/", $name, ".host")))),+
        ];
    };
}

builtin!["dgx-a100", "two-socket-2gpu", "gb200", "aws-p5en", "flat-vm"];

/// Names of the built-in profiles.
#[must_use]
pub fn builtin_names() -> Vec<&'static str> {
    BUILTIN.iter().map(|(name, _)| *name).collect()
}

/// Text of a built-in profile.
#[must_use]
pub fn builtin_text(name: &str) -> Option<&'static str> {
    BUILTIN.iter().find(|(known, _)| *known == name).map(|(_, text)| *text)
}

/// A built-in profile as a snapshot of generation 1.
///
/// # Errors
/// Lists the names there are if `name` is none of them.
pub fn builtin(name: &str) -> Result<Snapshot, TopologyError> {
    let text = builtin_text(name)
        .ok_or_else(|| TopologyError::NoSuchProfile { name: name.to_owned(), known: builtin_names() })?;
    snapshot(text, Some(PathBuf::from(name)), &ReadOptions::default())
}

/// A profile's text as a snapshot of generation 1.
///
/// # Errors
/// Names the line and what is wrong with it.
pub fn snapshot(text: &str, path: Option<PathBuf>, options: &ReadOptions) -> Result<Snapshot, TopologyError> {
    let raw = parse(text).map_err(|bad| TopologyError::Profile {
        path: path.clone(),
        line: bad.line,
        message: bad.message,
    })?;
    Ok(Snapshot { generation: 1, source: Source { kind: SourceKind::Profile, path }, host: assemble(raw, options) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_builtin_profile_reads_without_a_warning() {
        for name in builtin_names() {
            let snapshot = builtin(name).unwrap();
            assert_eq!(snapshot.host.name.as_deref(), Some(name));
            assert_eq!(snapshot.host.warnings, Vec::<String>::new(), "{name}");
        }
    }

    #[test]
    fn an_unknown_name_is_answered_with_the_known_ones() {
        let error = builtin("dgx-z").unwrap_err().to_string();
        assert!(error.contains("dgx-z") && error.contains("dgx-a100"), "{error}");
    }

    #[test]
    fn a_rendered_profile_reads_back_to_the_same_host() {
        for name in builtin_names() {
            let host = builtin(name).unwrap().host;
            let again = snapshot(&render(&host), None, &ReadOptions::default()).unwrap();
            assert_eq!(again.host.functions.len(), host.functions.len(), "{name}");
            assert_eq!(again.host.gpus, host.gpus, "{name}");
            assert_eq!(again.host.hcas, host.hcas, "{name}");
            assert_eq!(again.host.nvlinks, host.nvlinks, "{name}");
            assert_eq!(render(&again.host), render(&host), "{name}");
        }
    }
}
