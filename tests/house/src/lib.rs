//! House rules that run as tests: layers, unsafe, sources, documents, units.
//!
//! The rules are plain functions over plain data, so that a made-up workspace can show that each one bites; `tests/`
//! applies them to this workspace. Nothing here is linked into a shipped binary, and nothing here knows what the crates do.
#![forbid(unsafe_code)]

pub mod layers;
pub mod rust_text;
pub mod sources;
pub mod workspace;

use std::path::{Path, PathBuf};

/// The root folder of this workspace.
#[must_use]
pub fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).expect("this crate lies two folders below the root").to_path_buf()
}
