//! Rules about Rust text that neither the compiler nor clippy has: how a module opens, how errors are declared and worded,
//! how tests wait.

use std::path::Path;

use crate::sources::lines_without_tests;

/// Whether a module opens by saying what it is.
#[must_use]
pub fn opens_with_doc(text: &str) -> bool {
    text.starts_with("//!")
}

/// Every public error enum (it derives `Error`) that lacks `#[non_exhaustive]`, as the line of its name, counted from 1.
#[must_use]
pub fn exhaustive_errors(text: &str) -> Vec<usize> {
    let mut found = Vec::new();
    let mut attributes = String::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.starts_with("#[") || line.starts_with("///") {
            attributes.push_str(line);
        } else {
            let is_error = derives_error(&attributes);
            if line.starts_with("pub enum ") && is_error && !attributes.contains("#[non_exhaustive]") {
                found.push(index + 1);
            }
            attributes.clear();
        }
    }
    found
}

fn derives_error(attributes: &str) -> bool {
    let derives = attributes.split("#[derive(").skip(1).filter_map(|rest| rest.split(")]").next());
    derives.flat_map(|list| list.split(',')).any(|name| matches!(name.trim(), "Error" | "thiserror::Error"))
}

/// Every error message that opens like a sentence or ends like one, counted from 1. A name such as HCA may open it.
#[must_use]
pub fn worded_like_sentences(text: &str) -> Vec<usize> {
    let mut found = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let Some(message) = line.trim().strip_prefix("#[error(\"") else { continue };
        let mut first = message.chars();
        let capitalised = first.next().is_some_and(char::is_uppercase) && first.next().is_some_and(char::is_lowercase);
        if capitalised || message.contains(".\")") || message.contains(".\",") {
            found.push(index + 1);
        }
    }
    found
}

/// Every line of test code that sleeps, counted from 1: a test waits for what it needs, with no guess of how long.
#[must_use]
pub fn sleeping_tests(path: &Path, text: &str) -> Vec<usize> {
    let sleeps = [concat!("thread::sl", "eep("), concat!("time::sl", "eep("), concat!("sl", "eep_ms(")];
    // Programs that lie there: a bench watches something for a span of time.
    let programs = ["tests/harness/src", "tests/bench/src"];
    let all_tests = path.components().any(|part| part.as_os_str() == "tests")
        && !programs.iter().any(|folder| path.starts_with(folder));
    let first = if all_tests { 0 } else { lines_without_tests(text) };
    let lines = text.lines().enumerate().skip(first);
    lines.filter(|(_, line)| sleeps.iter().any(|call| line.contains(call))).map(|(index, _)| index + 1).collect()
}

/// Folders of code that takes all it needs as arguments: the environment of the process is read above them.
const WITHOUT_ENVIRONMENT: &[&str] = &[
    "proto/ring/src",
    "proto/shm/src",
    "daemon/topology/src",
    "daemon/hal/src",
    "daemon/backends",
    "daemon/engine/src",
    "daemon/server/src",
];

/// Every line of a crate below the daemon's main that reads the environment, counted from 1; its tests may.
#[must_use]
pub fn environment_reads(path: &Path, text: &str) -> Vec<usize> {
    if !WITHOUT_ENVIRONMENT.iter().any(|folder| path.starts_with(folder)) {
        return Vec::new();
    }
    let lines = text.lines().enumerate().take(lines_without_tests(text));
    lines.filter(|(_, line)| line.contains("env::var")).map(|(index, _)| index + 1).collect()
}

/// Every test that is switched off, as the line of the attribute, counted from 1.
#[must_use]
pub fn ignored_tests(text: &str) -> Vec<usize> {
    let lines = text.lines().enumerate();
    lines.filter(|(_, line)| line.trim_start().starts_with("#[ignore")).map(|(index, _)| index + 1).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exhaustive_error_is_found_by_its_derive() {
        let open = "/// Why.\n#[derive(Debug, thiserror::Error)]\n#[non_exhaustive]\npub enum A {\n";
        let closed = "/// Why.\n#[derive(Debug, Error)]\npub enum A {\n";
        let no_error = "/// ErrorKind.\n#[derive(Debug, Eq)]\npub enum A {\n";
        assert_eq!(exhaustive_errors(open), Vec::<usize>::new());
        assert_eq!(exhaustive_errors(closed), [3]);
        assert_eq!(exhaustive_errors(no_error), Vec::<usize>::new());
    }

    #[test]
    fn messages_are_no_sentences() {
        assert_eq!(worded_like_sentences("    #[error(\"Cannot open {path}\")]"), [1]);
        assert_eq!(worded_like_sentences("    #[error(\"cannot open {path}.\")]"), [1]);
        assert_eq!(worded_like_sentences("    #[error(\"HCA {name} is gone: {source}\")]"), Vec::<usize>::new());
    }

    #[test]
    fn the_environment_is_read_only_where_a_process_starts() {
        let text = "let a = std::env::var_os(name);\nlet b = env!(\"CARGO_MANIFEST_DIR\");";
        assert_eq!(environment_reads(Path::new("daemon/engine/src/lib.rs"), text), [1]);
        assert_eq!(environment_reads(Path::new("daemon/app/src/main.rs"), text), Vec::<usize>::new());
    }

    #[test]
    fn a_test_that_is_switched_off_is_found() {
        assert_eq!(ignored_tests("#[test]\n    #[ignore = \"slow\"]\nfn a() {}"), [2]);
    }

    #[test]
    fn a_sleep_is_found_in_tests_alone() {
        let text = concat!("std::thread::sl", "eep(x);\n#[cfg(test)]\nmod tests {\nstd::thread::sl", "eep(x);\n}\n");
        assert_eq!(sleeping_tests(Path::new("daemon/a/src/lib.rs"), text), [4]);
        assert_eq!(sleeping_tests(Path::new("daemon/a/tests/a.rs"), text), [1, 4]);
    }
}
