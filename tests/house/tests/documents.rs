//! The documents of this tree say what they must.

use std::fs;

use gdrd_house::{root, sources, workspace};

fn document(name: &str) -> String {
    fs::read_to_string(root().join(name)).expect("the document is there")
}

#[test]
fn the_readme_opens_with_the_two_commands() {
    let readme = document("README.md");
    let first: Vec<&str> = readme.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).take(2).collect();
    assert!(first[0].starts_with("`make demo`"), "first line: {}", first[0]);
    assert!(first[1].starts_with("`make test`"), "second line: {}", first[1]);
}

#[test]
fn the_readme_names_the_least_rust_version_of_the_manifest() {
    let least = workspace::read(&root()).expect("cargo metadata reads this workspace").least_rust;
    let words = format!("Rust {}.{} or later", least.major, least.minor);
    assert!(document("README.md").contains(&words), "the README does not say '{words}'");
}

#[test]
fn the_changelog_has_an_unreleased_section() {
    assert!(document("CHANGELOG.md").lines().any(|line| line == "## Unreleased"));
}

#[test]
fn the_architecture_names_every_crate_with_its_folder() {
    let workspace = workspace::read(&root()).expect("cargo metadata reads this workspace");
    let architecture = document("ARCHITECTURE.md");
    for member in &workspace.members {
        let folder = member.folder.strip_prefix(root()).expect("members lie below the root");
        let row = format!("| {} | {} |", member.name, folder.display());
        assert!(architecture.contains(&row), "ARCHITECTURE.md has no table row that starts '{row}'");
    }
}

#[test]
fn every_link_of_a_document_leads_somewhere() {
    let root = root();
    let documents = sources::read_tree(&root).expect("this tree is readable");
    for source in documents.iter().filter(|source| source.path.extension().is_some_and(|extension| extension == "md")) {
        let folder = root.join(&source.path).parent().expect("a file has a folder").to_path_buf();
        for target in source.text.split("](").skip(1).filter_map(|rest| rest.split([')', '#']).next()) {
            let elsewhere = target.contains("://") || target.is_empty();
            assert!(elsewhere || folder.join(target).exists(), "{} links to {target}", source.path.display());
        }
    }
}
