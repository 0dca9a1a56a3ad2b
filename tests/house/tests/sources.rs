//! The rules of `gdrd_house::sources` and `gdrd_house::rust_text` against every file of this tree.

use std::path::Path;

use gdrd_house::sources::{self, Source};
use gdrd_house::{root, rust_text, workspace};

/// Files that may be longer than the limit, each with its reason. This list only ever shrinks.
const LONG_FILES: &[(&str, &str)] = &[];

const NOTHING: &[String] = &[];

fn tree() -> Vec<Source> {
    sources::read_tree(&root()).expect("this tree is readable")
}

fn rust_files() -> Vec<Source> {
    let rust = |source: &Source| source.path.extension().is_some_and(|extension| extension == "rs");
    tree().into_iter().filter(rust).collect()
}

/// Each `path:line` at which `rule` finds something.
fn findings(sources: &[Source], rule: impl Fn(&Source) -> Vec<usize>) -> Vec<String> {
    let in_file = |source: &Source| -> Vec<String> {
        rule(source).into_iter().map(|line| format!("{}:{line}", source.path.display())).collect()
    };
    sources.iter().flat_map(in_file).collect()
}

#[test]
fn no_source_file_is_longer_than_the_limit() {
    let long: Vec<String> = rust_files()
        .iter()
        .filter(|source| !LONG_FILES.iter().any(|(path, _)| source.path == Path::new(path)))
        .map(|source| (source, sources::lines_without_tests(&source.text)))
        .filter(|(_, lines)| *lines > sources::MAX_SOURCE_LINES)
        .map(|(source, lines)| format!("{}: {lines} lines", source.path.display()))
        .collect();
    assert_eq!(long, NOTHING, "split these where there is a seam");
}

#[test]
fn every_excused_long_file_is_still_long() {
    let sources = tree();
    for (path, reason) in LONG_FILES {
        let source = sources.iter().find(|source| source.path == Path::new(path));
        let lines = source.map(|source| sources::lines_without_tests(&source.text));
        assert!(lines > Some(sources::MAX_SOURCE_LINES), "{path} ({reason}) needs no excuse any more");
    }
}

#[test]
fn every_crate_root_forbids_unsafe_unless_it_may_hold_it() {
    let workspace = workspace::read(&root()).expect("cargo metadata reads this workspace");
    for member in &workspace.members {
        for path in &member.roots {
            let text = std::fs::read_to_string(path).expect("cargo names existing roots");
            assert!(
                sources::root_guards_unsafe(&member.name, &text),
                "{} must say #![forbid(unsafe_code)]",
                path.display()
            );
        }
    }
}

#[test]
fn every_module_opens_with_what_it_is() {
    let bare: Vec<String> = rust_files()
        .iter()
        .filter(|source| !rust_text::opens_with_doc(&source.text))
        .map(|source| source.path.display().to_string())
        .collect();
    assert_eq!(bare, NOTHING, "these need a //! on their first line");
}

#[test]
fn every_public_error_enum_is_non_exhaustive() {
    assert_eq!(findings(&rust_files(), |source| rust_text::exhaustive_errors(&source.text)), NOTHING);
}

#[test]
fn no_error_message_is_worded_like_a_sentence() {
    assert_eq!(findings(&rust_files(), |source| rust_text::worded_like_sentences(&source.text)), NOTHING);
}

#[test]
fn the_environment_is_read_by_programs_and_clients_alone() {
    assert_eq!(findings(&rust_files(), |source| rust_text::environment_reads(&source.path, &source.text)), NOTHING);
}

#[test]
fn no_test_sleeps() {
    assert_eq!(findings(&rust_files(), |source| rust_text::sleeping_tests(&source.path, &source.text)), NOTHING);
}

#[test]
fn no_test_is_ignored() {
    assert_eq!(findings(&rust_files(), |source| rust_text::ignored_tests(&source.text)), NOTHING);
}

#[test]
fn no_file_holds_a_reminder_instead_of_finished_work() {
    assert_eq!(findings(&tree(), |source| sources::reminders(&source.text)), NOTHING);
}

#[test]
fn no_file_names_a_folder_of_one_machine() {
    assert_eq!(findings(&tree(), |source| sources::machine_paths(&source.text)), NOTHING);
}

#[test]
fn shared_memory_is_called_a_segment() {
    assert_eq!(findings(&tree(), |source| sources::shared_regions(&source.text)), NOTHING);
}
