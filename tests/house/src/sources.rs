//! Rules about source text: size, unsafe at crate roots, words that may not stay, paths of one machine.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Most lines a source file may have, its trailing test module left out.
pub const MAX_SOURCE_LINES: usize = 500;

/// Crates whose roots may allow unsafe code.
pub const UNSAFE_CRATES: &[&str] =
    &["gdrd-shm", "gdrd-ring", "gdrd-verbs", "gdrd-cuda", "gdrd-nvml", "gdrd-client-sys", "gdrd-capi", "gdrd-python"];

/// Names of folders and files, at any depth, that hold none of our words: what tools make, and what was captured elsewhere.
const FOREIGN_NAMES: &[&str] = &["target", ".git", "__pycache__", ".venv", "fixtures"];

/// One text file of the tree.
#[derive(Clone, Debug)]
pub struct Source {
    /// Path below the root.
    pub path: PathBuf,
    /// Its text.
    pub text: String,
}

/// Reads every text file of ours below `root`, in no order; what is no UTF-8 is no text and is left out.
///
/// # Errors
/// When a folder or a file cannot be read.
pub fn read_tree(root: &Path) -> io::Result<Vec<Source>> {
    let mut found = Vec::new();
    let mut open = vec![root.to_path_buf()];
    while let Some(folder) = open.pop() {
        for entry in fs::read_dir(&folder)? {
            let entry = entry?;
            let path = entry.path();
            let kind = entry.file_type()?;
            if FOREIGN_NAMES.iter().any(|foreign| entry.file_name() == *foreign) {
                continue;
            }
            if kind.is_dir() {
                open.push(path);
            } else if kind.is_file()
                && let Ok(text) = String::from_utf8(fs::read(&path)?)
            {
                let path = path.strip_prefix(root).expect("the walk started at root").to_path_buf();
                found.push(Source { path, text });
            }
        }
    }
    Ok(found)
}

/// Lines of a Rust file without its trailing test module.
#[must_use]
pub fn lines_without_tests(text: &str) -> usize {
    let lines: Vec<&str> = text.lines().collect();
    let is_test_module = |window: &[&str]| {
        window[0].starts_with("#[cfg(") && window[0].contains("test") && window[1].ends_with("mod tests {")
    };
    lines.windows(2).position(is_test_module).unwrap_or(lines.len())
}

/// Whether the root of crate `name` treats unsafe code as the rules ask.
#[must_use]
pub fn root_guards_unsafe(name: &str, text: &str) -> bool {
    let forbids = text.lines().any(|line| line == "#![forbid(unsafe_code)]");
    let allows = text.contains("allow(unsafe_code");
    if UNSAFE_CRATES.contains(&name) { forbids || allows } else { forbids && !allows }
}

/// Every line of `text` that holds a reminder instead of finished work, counted from 1.
#[must_use]
pub fn reminders(text: &str) -> Vec<usize> {
    // Spelled in two parts, so that this file does not find itself.
    let words = [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("XX", "X"), concat!("todo", "!(")];
    matching_lines(text, |line| words.iter().any(|word| has_word(line, word)))
}

/// Every line of `text` that names a folder of one developer's machine, counted from 1.
#[must_use]
pub fn machine_paths(text: &str) -> Vec<usize> {
    let folders = [concat!("/ro", "ot/"), concat!("/wo", "rk/"), concat!("/ho", "me/")];
    matching_lines(text, |line| folders.iter().any(|folder| names_absolute(line, folder)))
}

/// Every line that calls memory shared for rings a region: a memory region is an MR, and nothing else.
#[must_use]
pub fn shared_regions(text: &str) -> Vec<usize> {
    let wrong = [concat!("shared ", "region"), concat!("shared memory ", "region"), concat!("Shm", "Region")];
    matching_lines(text, |line| wrong.iter().any(|words| line.contains(words)))
}

fn matching_lines(text: &str, wrong: impl Fn(&str) -> bool) -> Vec<usize> {
    text.lines().enumerate().filter(|(_, line)| wrong(line)).map(|(index, _)| index + 1).collect()
}

/// Whether `line` holds `word` with no letter, digit or underscore on either side.
fn has_word(line: &str, word: &str) -> bool {
    let part_of_word = |c: char| c.is_alphanumeric() || c == '_';
    line.match_indices(word).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        let after = line[at + word.len()..].chars().next();
        !before.is_some_and(part_of_word) && (word.ends_with('(') || !after.is_some_and(part_of_word))
    })
}

/// Whether `line` holds `folder` as the start of an absolute path, not as a part of a longer one.
fn names_absolute(line: &str, folder: &str) -> bool {
    line.match_indices(folder).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        !before.is_some_and(|c| c.is_alphanumeric() || matches!(c, '_' | '.' | '-' | '}' | ')' | '*' | '~'))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trailing_test_module_does_not_count() {
        assert_eq!(lines_without_tests("a\nb\n#[cfg(test)]\nmod tests {\n}\n"), 2);
        assert_eq!(lines_without_tests("a\n#[cfg(all(test, not(loom)))]\nmod tests {\n}\n"), 1);
        assert_eq!(lines_without_tests("a\nb\nc"), 3);
    }

    #[test]
    fn only_named_crates_may_allow_unsafe() {
        assert!(root_guards_unsafe("gdrd-shm", "#![allow(unsafe_code)]\n"));
        assert!(root_guards_unsafe("gdrd-hal", "//! Doc.\n#![forbid(unsafe_code)]\n"));
        assert!(!root_guards_unsafe("gdrd-hal", "#![allow(unsafe_code)]\n"));
        assert!(!root_guards_unsafe("gdrd-hal", "//! Doc.\n"));
        assert!(!root_guards_unsafe("gdrd-hal", "// #![forbid(unsafe_code)]\n"));
    }

    #[test]
    fn reminders_are_found_as_whole_words() {
        assert_eq!(reminders(concat!("fine\n// TO", "DO: later\n")), [2]);
        assert_eq!(reminders(concat!("    todo", "!()")), [1]);
        assert_eq!(reminders(concat!("MY_TO", "DO_LIST, mktemp -d /tmp/a.XX", "XXXX")), Vec::<usize>::new());
    }

    #[test]
    fn machine_paths_are_found_only_at_their_start() {
        assert_eq!(machine_paths(concat!("x\nopen(\"/ro", "ot/a\")")), [2]);
        assert_eq!(machine_paths(concat!("tests/wo", "rk/a and ${dir}/ho", "me/a")), Vec::<usize>::new());
    }

    #[test]
    fn a_shared_segment_called_region_is_found() {
        assert_eq!(shared_regions(concat!("the shared ", "region of the ring")), [1]);
        assert_eq!(shared_regions("a memory region (MR)"), Vec::<usize>::new());
    }
}
