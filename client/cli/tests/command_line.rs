//! gdrctl as people and scripts run it, without a daemon: inputs, exit codes, formats, edges.

use std::fs::{File, Permissions};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
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

/// Runs gdrctl with `input` as its standard input.
fn fed(arguments: &[&str], input: &[u8]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gdrctl"));
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("gdrctl starts");
    // It may have seen enough before the end.
    let _ = child.stdin.take().expect("it is piped").write_all(input);
    child.wait_with_output().expect("gdrctl ends")
}

#[test]
fn every_kind_of_input_is_read_from_standard_input_too() {
    let case = |path: &str| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests").join(path);
        std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    };
    let matrix =
        "$ nvidia-smi topo -m\n\tGPU0\tNIC0\nGPU0\t X \tPIX\nNIC0\tPIX\t X \n\nNIC Legend:\n\n  NIC0: mlx5_3\n";
    for (input, kind, gpus) in [
        (case("cases/sysfs/ghw-kvm-p100-numa-minus1.tar.xz"), "sysfs", 1),
        (case("cases/nccl-xml/azure-ndv4-topo.xml"), "nccl-xml", 8),
        (case("fixtures/hosts/two-socket-2gpu.host"), "profile", 2),
        (matrix.as_bytes().to_vec(), "topo-m", 1),
    ] {
        let plan = json(&fed(&["plan", "--format", "json", "--input", "-"], &input));
        assert_eq!((&plan["source"]["kind"], &plan["source"]["path"]), (&kind.into(), &"standard input".into()));
        assert_eq!(plan["gpus"].as_array().map(Vec::len), Some(gpus), "{kind}");
    }
    let svg = fed(&["topo", "--format", "svg", "--input", "-"], matrix.as_bytes());
    assert!(text(&svg.stdout).starts_with("<svg"), "{}", text(&svg.stderr));
}

#[test]
fn standard_input_that_is_no_input_is_refused_by_name() {
    for (input, reason) in [
        (&b""[..], "is empty"),
        (b"\n  \n", "is empty"),
        (b"hello\n", "nvidia-smi topo -m"),
        (&[0xff, 0, 1, 2], "neither text nor an archive"),
        (&[0x1f, 0x8b, 8, 0, 0], "gzip archive"),
    ] {
        let refused = fed(&["plan", "--input", "-"], input);
        assert_eq!(refused.status.code(), Some(2), "{input:?}");
        let message = text(&refused.stderr);
        assert!(message.contains("standard input") && message.contains(reason), "{message}");
    }
}

/// Slurm's and Kubernetes' scripts ask by the exit code alone.
#[test]
fn a_placement_that_does_not_exist_is_a_code_of_its_own() {
    let found = gdrctl(&["place", "--gpus", "8", "--input", "dgx-a100"]);
    assert_eq!(found.status.code(), Some(0), "{}", text(&found.stderr));
    for (arguments, reason) in
        [(&["--gpus", "9"][..], "9 GPUs wanted"), (&["--gpus", "3", "--same-switch"][..], "no set of free devices")]
    {
        let none = gdrctl(&[&["place", "--input", "dgx-a100"][..], arguments].concat());
        assert_eq!(none.status.code(), Some(5), "{}", text(&none.stderr));
        assert!(text(&none.stdout).starts_with("none: "), "{}", text(&none.stdout));
        let none = gdrctl(&[&["place", "--input", "dgx-a100", "--format", "json"][..], arguments].concat());
        assert_eq!(none.status.code(), Some(5));
        let view: Value = serde_json::from_slice(&none.stdout).expect("the answer is printed all the same");
        assert!(view["reason"].as_str().is_some_and(|text| text.contains(reason)), "{view}");
    }
}

#[test]
fn accelerators_of_other_makers_are_gpus_where_the_operator_says_so() {
    let input = format!("{}/../../tests/fixtures/hosts/ve8-2hca-plx.host", env!("CARGO_MANIFEST_DIR"));
    let plan = |more: &[&str]| json(&gdrctl(&[&["plan", "--format", "json", "--input", &input][..], more].concat()));
    let gpus = |plan: &Value| plan["gpus"].as_array().map_or(0, Vec::len);
    assert_eq!([gpus(&plan(&[])), gpus(&plan(&["--gpu-ids", "1bcf:001c,8086:225c"]))], [0, 8]);
    for verb in [
        &["topo"][..],
        &["explain", "GPU7"],
        &["path", "GPU7", "remote"],
        &["place", "--gpus", "1"],
        &["export", "env"],
    ] {
        let output = gdrctl(&[verb, &["--input", &input, "--gpu-ids", "1bcf:001c"][..]].concat());
        assert!(output.status.success(), "{verb:?}: {}", text(&output.stderr));
    }
    let bad = gdrctl(&["plan", "--input", &input, "--gpu-ids", "1bcf"]);
    assert_eq!(bad.status.code(), Some(2));
    assert!(text(&bad.stderr).contains("--gpu-ids") && text(&bad.stderr).contains("1bcf"), "{}", text(&bad.stderr));
}

#[test]
fn every_topology_verb_reads_an_input_in_both_formats() {
    let verbs: [&[&str]; 6] = [
        &["topo"],
        &["plan"],
        &["explain", "GPU0"],
        &["path", "GPU0", "remote"],
        &["place", "--gpus", "2"],
        &["export", "env"],
    ];
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
    assert_eq!(code(&["place", "--gpus", "1", "--exclusive", "--input", "dgx-a100"]), Some(2), "only a daemon knows");
    assert_eq!(code(&["path", "GPU0", "GPU99", "--input", "dgx-a100"]), Some(2));
    assert_eq!(code(&["plan", "--format", "svg", "--input", "dgx-a100"]), Some(2));
    assert_eq!(code(&["export", "mooncake", "--rank", "0", "--input", "dgx-a100"]), Some(2));
    assert_eq!(code(&["export", "env", "--rank", "8", "--input", "dgx-a100"]), Some(2));
    assert_eq!(code(&["export", "env", "--topo-file", "a b", "--input", "dgx-a100"]), Some(2));
    assert_eq!(code(&["capture", "-o", "host.zip"]), Some(2));
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
fn what_has_a_form_of_its_own_refuses_another() {
    let folder = tempfile::tempdir().expect("a folder for manual pages");
    let folder = folder.path().join("pages");
    let exports = ["nccl-topo", "mooncake", "profile"].map(|what| vec!["export", what, "--input", "dgx-a100"]);
    let others = [vec!["completions", "bash"], vec!["man", folder.to_str().expect("a plain path")]];
    for verb in exports.into_iter().chain(others) {
        let output = gdrctl(&[&verb[..], &["--format", "json"]].concat());
        assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(2), ""), "{verb:?}");
        assert!(text(&output.stderr).contains("form of their own"), "{verb:?}: {}", text(&output.stderr));
    }
    assert!(!folder.exists());
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
    for verb in [
        "topo",
        "plan",
        "explain",
        "path",
        "export",
        "capture",
        "place",
        "buffers",
        "queue-pairs",
        "stats",
        "status",
        "bench",
    ] {
        assert!(help.contains(verb), "{verb} is not in the help");
        assert!(folder.path().join(format!("gdrctl-{verb}.1")).is_file(), "{verb} has no page");
    }
}

#[test]
fn a_measurement_that_fails_is_named_as_it_is_asked_for() {
    let output = gdrctl(&["--runtime-dir", "/no/such/folder", "bench", "--only", "idle"]);
    assert!(text(&output.stderr).starts_with("error: measure idle: "), "{}", text(&output.stderr));
}

#[test]
fn topo_draws_a_tree_a_picture_and_a_graph_of_any_input() {
    let folder = tree("dgx-a100");
    let input = folder.path().to_string_lossy().into_owned();
    for (format, begin) in [("tree", "pci0000:00"), ("svg", "<svg "), ("dot", "graph host {")] {
        let shown = gdrctl(&["topo", "--format", format, "--input", &input]);
        assert!(shown.status.success(), "{format}: {}", text(&shown.stderr));
        assert!(text(&shown.stdout).starts_with(begin), "{format}");
        assert!(!shown.stdout.contains(&0x1b), "no colours into a pipe");
    }
}

#[test]
fn an_exported_topology_is_an_input_that_gives_the_same_pairs() {
    let folder = tempfile::tempdir().expect("a folder");
    for (kind, name) in [("nccl-topo", "topo.xml"), ("profile", "machine.host")] {
        let file = folder.path().join(name).to_string_lossy().into_owned();
        let written = gdrctl(&["export", kind, "--input", "dgx-a100", "-o", &file]);
        assert!(written.status.success() && written.stdout.is_empty(), "{}", text(&written.stderr));
        let pairs = |input: &str| -> Vec<Value> {
            let plan = json(&gdrctl(&["plan", "--format", "json", "--input", input]));
            plan["gpus"].as_array().expect("gpus is a list").iter().map(|gpu| gpu["assigned"].clone()).collect()
        };
        assert_eq!(pairs(&file), pairs("dgx-a100"), "{kind}");
    }
    assert_eq!(std::fs::read_dir(folder.path()).expect("the folder").count(), 2, "nothing else is left behind");
}

/// Exports a profile to `output`, and says what it should then hold.
fn exported(output: &Path) -> (Output, String) {
    let export = ["export", "profile", "--input", "two-socket-2gpu"];
    let done = gdrctl(&[&export[..], &["-o", &output.to_string_lossy()]].concat());
    (done, text(&gdrctl(&export).stdout))
}

#[test]
fn output_replaces_the_file_that_a_link_leads_to_and_keeps_its_mode() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    std::fs::write(at("file"), "before").expect("a file");
    std::fs::set_permissions(at("file"), Permissions::from_mode(0o640)).expect("its mode");
    for (target, link) in [("file", "link"), ("link", "link-to-link"), ("new", "dangling")] {
        std::os::unix::fs::symlink(target, at(link)).expect("a link");
    }
    for (link, target) in [("link", "file"), ("link-to-link", "file"), ("dangling", "new")] {
        let (done, wanted) = exported(&at(link));
        assert!(done.status.success(), "{}", text(&done.stderr));
        assert!(std::fs::symlink_metadata(at(link)).expect("the link").is_symlink(), "{link}");
        assert_eq!(std::fs::read_to_string(at(target)).expect("the target"), wanted, "{link}");
    }
    assert_eq!(std::fs::metadata(at("file")).expect("the file").permissions().mode() & 0o7777, 0o640);
    std::os::unix::fs::symlink("loop", at("loop")).expect("a link to itself");
    let (failed, _) = exported(&at("loop"));
    assert_eq!(failed.status.code(), Some(1));
    assert!(text(&failed.stderr).contains("loop"), "{}", text(&failed.stderr));
    let (failed, _) = exported(folder.path());
    assert_eq!(failed.status.code(), Some(1), "a folder is nothing to write into");
    assert_eq!(std::fs::read_dir(folder.path()).expect("the folder").count(), 6, "nothing else is left behind");
}

#[test]
fn output_goes_into_a_fifo_and_to_standard_output_which_stay_what_they_are() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("fifo");
    rustix::fs::mkfifoat(rustix::fs::CWD, &path, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR).expect("a fifo");
    // For both, so that neither end waits for the other (fifo(7)).
    let mut fifo = File::options().read(true).write(true).open(&path).expect("the fifo opens");
    let (done, wanted) = exported(&path);
    assert!(done.status.success(), "{}", text(&done.stderr));
    assert!(std::fs::metadata(&path).expect("the fifo").file_type().is_fifo());
    let mut got = vec![0; wanted.len()];
    fifo.read_exact(&mut got).expect("what was written");
    assert_eq!(text(&got), wanted);
    // As /dev/stdout is one.
    let link = folder.path().join("stdout");
    std::os::unix::fs::symlink("/proc/self/fd/1", &link).expect("a link");
    let (done, wanted) = exported(&link);
    assert_eq!(text(&done.stdout), wanted, "{}", text(&done.stderr));
    assert!(std::fs::symlink_metadata(&link).expect("the link").is_symlink());
    assert_eq!(std::fs::read_dir(folder.path()).expect("the folder").count(), 2, "nothing else is left behind");
}

#[test]
fn an_empty_topology_file_is_refused() {
    let refused = gdrctl(&["export", "env", "--topo-file", "", "--input", "dgx-a100"]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(text(&refused.stderr).contains("--topo-file"), "{}", text(&refused.stderr));
}

#[test]
fn a_shell_takes_the_exported_variables_as_they_are() {
    let lines = text(&gdrctl(&["export", "env", "--rank", "1", "--topo-file", "/t.xml", "--input", "dgx-a100"]).stdout);
    let script =
        format!("set -eu\n{lines}\nprintf '%s %s %s' \"$NCCL_IB_HCA\" \"$UCX_NET_DEVICES\" \"$NCCL_TOPO_FILE\"");
    let shell = Command::new("sh").arg("-c").arg(&script).env_clear().output().expect("a shell");
    assert_eq!(text(&shell.stdout), "=mlx5_0:1 mlx5_0:1 /t.xml", "{}", text(&shell.stderr));
    let document = json(&gdrctl(&["export", "env", "--gpu", "gpu1", "--format", "json", "--input", "dgx-a100"]));
    assert_eq!((document["schema"].as_str(), document["rank"].as_u64()), (Some("gdrd.env/v1"), Some(1)));
}

#[test]
fn a_capture_is_an_input_of_every_topology_verb() {
    let folder = tree("two-socket-2gpu");
    let root = folder.path().to_string_lossy().into_owned();
    for name in ["host.tar.zst", "host.tar.gz", "host.tar"] {
        let file = folder.path().join(name).to_string_lossy().into_owned();
        let taken = json(&gdrctl(&["capture", "-o", &file, "--sysfs-root", &root, "--format", "json"]));
        assert_eq!(taken["schema"], "gdrd.capture/v1");
        assert!(taken["len_bytes"].as_u64().is_some_and(|len| len > 0));
        let of = |input: &str| json(&gdrctl(&["plan", "--format", "json", "--input", input]))["gpus"].clone();
        let assigned = |gpus: Value| -> Vec<Value> {
            gpus.as_array().expect("gpus is a list").iter().map(|gpu| gpu["assigned"].clone()).collect()
        };
        assert_eq!(assigned(of(&file)), assigned(of("two-socket-2gpu")), "{name}");
        assert!(gdrctl(&["path", "GPU0", "GPU1", "--input", &file]).status.success());
    }
}

#[test]
fn tree_and_another_format_contradict_each_other() {
    for format in ["json", "svg", "dot"] {
        let refused = gdrctl(&["topo", "--input", "dgx-a100", "--tree", "--format", format]);
        assert_eq!((refused.status.code(), text(&refused.stdout)), (Some(2), String::new()), "{format}");
        assert!(text(&refused.stderr).contains("--tree is --format tree"), "{}", text(&refused.stderr));
    }
    assert!(gdrctl(&["topo", "--input", "dgx-a100", "--tree", "--format", "tree"]).status.success());
}

#[test]
fn a_host_without_gpus_and_nics_has_no_matrix() {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::create_dir_all(folder.path().join("sys/bus/pci/devices")).expect("a tree");
    let shown = gdrctl(&["topo", "--input", &folder.path().to_string_lossy()]);
    assert_eq!(text(&shown.stdout), "no GPU and no RDMA NIC was found\n", "{}", text(&shown.stderr));
}

#[test]
fn a_path_to_a_nic_is_told_where_paths_lead() {
    let refused = gdrctl(&["path", "GPU0", "mlx5_0", "--input", "dgx-a100"]);
    assert_eq!(refused.status.code(), Some(2));
    let said = text(&refused.stderr);
    assert!(said.contains("mlx5_0 is a NIC") && said.contains("remote"), "{said}");
}

#[test]
fn a_host_read_without_a_daemon_says_whether_its_driver_was_asked() {
    // Which of the three it is, is up to the machine.
    let said = text(&gdrctl(&["topo"]).stderr);
    assert!(said.contains("reading /sys of this host instead") && said.contains("note: nvml "), "{said}");
    let given = text(&gdrctl(&["topo", "--input", "dgx-a100"]).stderr);
    assert!(!given.contains("nvml"), "{given}");
}
