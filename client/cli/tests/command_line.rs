//! gdrctl as people and scripts run it, without a daemon: inputs, exit codes, formats, edges.

use std::path::Path;
use std::process::{Command, Output, Stdio};

use gdrd_topology::profile;
use serde_json::Value;

fn gdrctl(arguments: &[&str]) -> Output {
    // A folder without sockets: no daemon of this machine takes part.
    let nowhere = tempfile::tempdir().expect("a folder without a daemon");
    let mut command = Command::new(env!("CARGO_BIN_EXE_gdrctl"));
    command.args(arguments).env("GDRD_RUNTIME_DIR", nowhere.path()).stdin(Stdio::null());
    command.output().expect("gdrctl starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("gdrctl prints UTF-8")
}

fn json(output: &Output) -> Value {
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("--format json prints one document")
}

/// A sysfs tree of a built-in profile, on disk.
fn tree(profile: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder for a tree");
    let host = profile::builtin(profile).expect("the profile is built in").host;
    gdrd_topology::sysfs::build::build(&host, folder.path()).expect("the tree can be written");
    folder
}

#[test]
fn a_sysfs_tree_gives_the_plan_of_the_profile_it_was_built_from() {
    for name in profile::builtin_names() {
        let folder = tree(name);
        let of_tree = json(&gdrctl(&["plan", "--format", "json", "--input", &folder.path().to_string_lossy()]));
        let of_profile = json(&gdrctl(&["plan", "--format", "json", "--input", name]));
        assert_eq!(of_tree["schema"], "gdrd.plan/v1");
        assert_eq!(of_tree["source"]["kind"], "sysfs");
        assert_eq!(of_profile["source"]["kind"], "profile");
        let assigned = |plan: &Value| -> Vec<(Value, Value)> {
            let gpus = plan["gpus"].as_array().expect("gpus is a list").iter();
            gpus.map(|gpu| (gpu["bdf"].clone(), gpu["assigned"].clone())).collect()
        };
        assert!(!assigned(&of_tree).is_empty());
        assert_eq!(assigned(&of_tree), assigned(&of_profile), "{name}");
    }
}

#[test]
fn every_topology_verb_reads_an_input_in_both_formats() {
    let verbs: [&[&str]; 4] = [&["topo"], &["topo", "--tree"], &["explain", "GPU0"], &["place", "--gpus", "2"]];
    for verb in verbs {
        let with_input = [verb, &["--input", "dgx-a100"]].concat();
        let shown = gdrctl(&with_input);
        assert!(shown.status.success(), "{verb:?}: {}", text(&shown.stderr));
        assert!(text(&shown.stdout).contains("GPU0"), "{verb:?}");
        assert!(shown.stderr.is_empty(), "{verb:?}: {}", text(&shown.stderr));
        let document = json(&gdrctl(&[&with_input[..], &["--format", "json"]].concat()));
        assert!(document["schema"].as_str().is_some_and(|schema| schema.starts_with("gdrd.")), "{verb:?}");
    }
}

#[test]
fn without_daemon_and_input_the_live_host_is_read_and_that_is_said() {
    let shown = gdrctl(&["plan", "--format", "json"]);
    assert_eq!(json(&shown)["source"]["kind"], "live");
    let said = text(&shown.stderr);
    assert!(said.contains("no gdrd found") && said.contains("reading /sys"), "{said}");
}

#[test]
fn exit_codes_tell_usage_from_an_absent_daemon() {
    let code = |arguments: &[&str]| gdrctl(arguments).status.code();
    assert_eq!(code(&["buffers"]), Some(3));
    assert_eq!(code(&["plan", "--runtime-dir", "/nonexistent"]), Some(3));
    assert_eq!(code(&["no-such-verb"]), Some(2));
    assert_eq!(code(&["plan", "--input", "/nonexistent"]), Some(2));
    assert_eq!(code(&["plan", "--input", "dgx-a100", "--max-level", "FAR"]), Some(2));
    assert_eq!(code(&["explain", "GPU99", "--input", "dgx-a100"]), Some(2));
    assert_eq!(code(&["place", "--gpus", "0", "--input", "dgx-a100"]), Some(2));
    assert_eq!(code(&["--help"]), Some(0));
}

#[test]
fn errors_name_the_next_step() {
    let absent = text(&gdrctl(&["buffers"]).stderr);
    assert!(absent.contains("start the daemon") && absent.contains("GDRD_RUNTIME_DIR"), "{absent}");
    let unknown = text(&gdrctl(&["topo", "--input", "dgx-a1000"]).stderr);
    assert!(unknown.contains("built-in profile") && unknown.contains("dgx-a100"), "{unknown}");
}

#[test]
fn truncated_and_binary_inputs_are_errors_or_partial_results_and_never_a_crash() {
    let folder = tree("dgx-a100");
    let device = folder.path().join("sys/devices");
    assert!(device.exists());
    cut_every_file(&device);
    let shown = gdrctl(&["plan", "--format", "json", "--input", &folder.path().to_string_lossy()]);
    let code = shown.status.code().expect("gdrctl ends by itself");
    assert!(code == 0 || code == 2, "{code}: {}", text(&shown.stderr));
    let garbage = folder.path().join("garbage");
    std::fs::write(&garbage, [0xff, 0, 0xfe, 7]).expect("a file of bytes");
    let refused = gdrctl(&["plan", "--input", &garbage.to_string_lossy()]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(text(&refused.stderr).contains("garbage"), "the error names the path");
}

/// Leaves one byte of each file that can be written.
fn cut_every_file(folder: &Path) {
    for entry in std::fs::read_dir(folder).expect("a folder of the tree") {
        let entry = entry.expect("an entry of the tree");
        let kind = entry.file_type().expect("its type");
        if kind.is_dir() {
            cut_every_file(&entry.path());
        } else if kind.is_file() {
            std::fs::write(entry.path(), "0").expect("a file of the tree");
        }
    }
}

#[test]
fn output_into_a_pipe_has_no_colours() {
    let shown = gdrctl(&["plan", "--input", "two-socket-2gpu", "--max-level", "PIX"]);
    assert!(!shown.stdout.contains(&0x1b), "{}", text(&shown.stdout));
    assert!(!gdrctl(&["buffers"]).stderr.contains(&0x1b));
}

#[test]
fn a_reader_that_leaves_early_is_no_failure() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_gdrctl"))
        .args(["topo", "--input", "dgx-a100", "--format", "json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("gdrctl starts");
    drop(child.stdout.take());
    let ended = child.wait_with_output().expect("gdrctl ends");
    assert!(ended.status.success() && ended.stderr.is_empty(), "{:?}: {}", ended.status, text(&ended.stderr));
}

#[test]
fn completions_and_manual_pages_name_every_verb() {
    let help = text(&gdrctl(&["--help"]).stdout);
    for shell in ["bash", "zsh", "fish"] {
        let script = text(&gdrctl(&["completions", shell]).stdout);
        assert!(script.contains("queue-pairs"), "{shell}");
    }
    let folder = tempfile::tempdir().expect("a folder for manual pages");
    assert!(gdrctl(&["man", &folder.path().to_string_lossy()]).status.success());
    for verb in ["topo", "plan", "explain", "place", "buffers", "queue-pairs", "stats", "status", "bench"] {
        assert!(help.contains(verb), "{verb} is not in the help");
        assert!(folder.path().join(format!("gdrctl-{verb}.1")).is_file(), "{verb} has no page");
    }
}
