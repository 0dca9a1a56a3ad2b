//! What `make test` and `make setup` say at their edges, with stand-ins for cargo and rustc.

use std::env;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Output};

use gdrd_house::root;
use tempfile::TempDir;

/// A folder at the head of PATH whose programs stand in for the real ones.
struct StandIns(TempDir);

impl StandIns {
    fn new(programs: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().expect("the temporary folder is writable");
        for (name, body) in programs {
            let path = folder.path().join(name);
            fs::write(&path, format!("#!/bin/sh\n{body}\n")).expect("the folder is writable");
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("the file is ours");
        }
        Self(folder)
    }

    fn run(&self, script: &str) -> Output {
        let mut path = self.0.path().as_os_str().to_owned();
        path.push(":");
        path.push(env::var_os("PATH").unwrap_or_default());
        // A target folder of its own: the logs of the run that runs this test stay as they are.
        let target = self.0.path().join("target");
        let mut command = Command::new(root().join(script));
        command.env("PATH", path).env("CARGO_TARGET_DIR", target).output().expect("bash runs the script")
    }
}

fn last_line(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).lines().next_back().unwrap_or_default().to_owned()
}

/// What `scripts/test.sh` ends with when `cargo build` succeeds and `cargo test` does as `body` says.
fn summary_of(body: &str) -> (String, bool) {
    let cargo = format!("if [ \"$1\" = build ]; then exit 0; fi\n{body}");
    let output = StandIns::new(&[("cargo", &cargo)]).run("scripts/test.sh");
    (last_line(&output), output.status.success())
}

#[test]
fn the_summary_adds_up_every_test_binary() {
    let body = "echo 'test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured; 2 filtered out; finished in 0.1s'
        echo 'test result: ok. 4 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.1s'";
    assert_eq!(summary_of(body), ("7 passed, 0 failed".to_owned(), true));
}

#[test]
fn failed_tests_are_counted_and_fail_the_run() {
    let body = "echo 'test result: FAILED. 3 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.1s'
        exit 101";
    assert_eq!(summary_of(body), ("3 passed, 2 failed".to_owned(), false));
}

#[test]
fn a_test_binary_that_dies_without_a_word_is_one_failure() {
    let body = "echo 'test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.1s'
        echo 'error: test failed (signal: 6, SIGABRT)' >&2
        exit 101";
    assert_eq!(summary_of(body), ("3 passed, 1 failed".to_owned(), false));
}

#[test]
fn a_run_without_any_test_fails() {
    assert_eq!(summary_of("exit 0"), ("0 passed, 0 failed".to_owned(), false));
}

#[test]
fn code_that_does_not_build_is_one_failure() {
    let output = StandIns::new(&[("cargo", "exit 101")]).run("scripts/test.sh");
    assert_eq!(last_line(&output), "0 passed, 1 failed");
    assert!(!output.status.success());
}

#[test]
fn an_old_rust_is_refused_with_both_versions() {
    let stand_ins = StandIns::new(&[("cargo", "exit 0"), ("rustc", "echo 'rustc 1.9.0 (abc 2016-05-26)'")]);
    let output = stand_ins.run("scripts/setup.sh");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success());
    assert!(said.contains("gdrd needs Rust 1.") && said.contains("or later and found 1.9.0"), "{said}");
}

#[test]
fn a_rust_that_is_new_enough_passes_without_a_word() {
    for version in ["1.100.0", "2.0.0", "1.99.0-nightly"] {
        let rustc = format!("echo 'rustc {version} (abc 2030-01-01)'");
        let output = StandIns::new(&[("cargo", "exit 0"), ("rustc", &rustc)]).run("scripts/setup.sh");
        assert!(output.status.success(), "{version}: {}", String::from_utf8_lossy(&output.stderr));
        assert!(output.stdout.is_empty() && output.stderr.is_empty());
    }
}

#[test]
fn a_rust_that_does_not_run_is_told_apart_from_none() {
    let output = StandIns::new(&[("cargo", "exit 0"), ("rustc", "echo 'no default toolchain' >&2; exit 1")])
        .run("scripts/setup.sh");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success());
    assert!(said.starts_with("no default toolchain\n") && said.contains("rustc does not run"), "{said}");
}
