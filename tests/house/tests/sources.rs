//! The rules of `gdrd_house::sources` against every file of this tree.

use std::path::Path;

use gdrd_house::sources::{self, Source};
use gdrd_house::{root, workspace};

/// Files that may be longer than the limit, each with its reason. This list only ever shrinks.
const LONG_FILES: &[(&str, &str)] = &[];

fn tree() -> Vec<Source> {
    sources::read_tree(&root()).expect("this tree is readable")
}

fn is_rust(source: &Source) -> bool {
    source.path.extension().is_some_and(|extension| extension == "rs")
}

fn findings(rule: fn(&str) -> Vec<usize>, applies: fn(&Source) -> bool) -> Vec<String> {
    let sources = tree();
    let wrong = sources
        .iter()
        .filter(|source| applies(source))
        .flat_map(|source| rule(&source.text).into_iter().map(move |line| format!("{}:{line}", source.path.display())));
    wrong.collect()
}

#[test]
fn no_source_file_is_longer_than_the_limit() {
    let sources = tree();
    let long: Vec<String> = sources
        .iter()
        .filter(|source| is_rust(source) && !LONG_FILES.iter().any(|(path, _)| source.path == Path::new(path)))
        .map(|source| (source, sources::lines_without_tests(&source.text)))
        .filter(|(_, lines)| *lines > sources::MAX_SOURCE_LINES)
        .map(|(source, lines)| format!("{}: {lines} lines", source.path.display()))
        .collect();
    assert_eq!(long, Vec::<String>::new(), "split these where there is a seam");
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
fn no_file_holds_a_reminder_instead_of_finished_work() {
    assert_eq!(findings(sources::reminders, |_| true), Vec::<String>::new());
}

#[test]
fn no_file_names_a_folder_of_one_machine() {
    assert_eq!(findings(sources::machine_paths, |_| true), Vec::<String>::new());
}

#[test]
fn shared_memory_is_called_a_segment() {
    assert_eq!(findings(sources::shared_regions, |_| true), Vec::<String>::new());
}

#[test]
fn no_test_is_ignored() {
    let ignored: fn(&str) -> Vec<usize> = |text| {
        let lines = text.lines().enumerate();
        lines.filter(|(_, line)| line.trim_start().starts_with("#[ignore")).map(|(index, _)| index + 1).collect()
    };
    assert_eq!(findings(ignored, is_rust), Vec::<String>::new());
}
