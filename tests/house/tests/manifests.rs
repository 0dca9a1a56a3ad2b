//! Every manifest takes what it shares from the workspace.

use std::fs;

use gdrd_house::root;
use gdrd_house::workspace::{self, Kind};

/// Lines that each member's manifest holds, whole.
const INHERITED: &[&str] = &[
    "version.workspace = true",
    "edition.workspace = true",
    "rust-version.workspace = true",
    "license.workspace = true",
    "[lints]\nworkspace = true",
];

#[test]
fn every_crate_inherits_versions_licence_and_lints() {
    let workspace = workspace::read(&root()).expect("cargo metadata reads this workspace");
    for member in &workspace.members {
        let path = member.folder.join("Cargo.toml");
        let text = fs::read_to_string(&path).expect("cargo names existing manifests");
        for line in INHERITED {
            assert!(text.contains(line), "{} lacks '{line}'", path.display());
        }
    }
}

/// Crates that end in a person's terminal, or in a test's (gdrd-harness, for its puppet, gdrd-bench and gdrd-device-test); all others have errors that a
/// program can tell apart.
const MAY_USE_ANYHOW: &[&str] = &["gdrd", "gdrctl", "gdrd-bench", "gdrd-harness", "gdrd-device-test"];

#[test]
fn only_programs_use_errors_without_a_type() {
    let workspace = workspace::read(&root()).expect("cargo metadata reads this workspace");
    let ours = |name: &str| workspace.members.iter().any(|member| member.name == name);
    let wrong: Vec<&str> = workspace
        .arrows
        .iter()
        .filter(|arrow| arrow.to == "anyhow" && arrow.kind == Kind::Normal && ours(&arrow.from))
        .map(|arrow| arrow.from.as_str())
        .filter(|from| !MAY_USE_ANYHOW.contains(from))
        .collect();
    assert_eq!(wrong, Vec::<&str>::new());
}

#[test]
fn no_dependency_asks_for_a_later_rust_than_ours() {
    let workspace = workspace::read(&root()).expect("cargo metadata reads this workspace");
    let later: Vec<String> = workspace
        .foreign_rust
        .iter()
        .filter(|(_, version)| *version > workspace.least_rust)
        .map(|(name, version)| format!("{name} asks for Rust {version}, the workspace for {}", workspace.least_rust))
        .collect();
    assert_eq!(later, Vec::<String>::new());
}
