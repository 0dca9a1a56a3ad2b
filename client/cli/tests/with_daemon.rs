//! gdrctl against a running daemon: it shows what the daemon has, and the daemon's answers agree with its own.

use std::path::Path;
use std::process::{Command, Output};

use gdrd_harness::script::Command as Tell;
use gdrd_harness::{Daemon, DaemonOptions, Puppet, User, as_root_of_a_user_namespace};
use serde_json::Value;

fn gdrctl(daemon: &Daemon, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gdrctl"));
    command.args(arguments).env("GDRD_RUNTIME_DIR", daemon.runtime_dir());
    command.output().expect("gdrctl starts")
}

fn json(daemon: &Daemon, arguments: &[&str]) -> Value {
    let output = gdrctl(daemon, &[arguments, &["--format", "json"]].concat());
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("--format json prints one document")
}

fn text(daemon: &Daemon, arguments: &[&str]) -> String {
    let output = gdrctl(daemon, arguments);
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("gdrctl prints UTF-8")
}

fn acquire(puppet: &mut Puppet) -> Value {
    puppet.run(Tell::Acquire { buffer: "of-a-test".into(), gpu: "GPU3".into(), size: 2 << 20, host: false })
}

#[test]
fn the_daemons_topology_is_that_of_the_profile_it_simulates() {
    let daemon = Daemon::start();
    let asked = json(&daemon, &["plan"]);
    let read = json(&daemon, &["plan", "--input", "dgx-a100"]);
    for key in ["schema", "gpus", "nics", "nvlink", "warnings"] {
        assert_eq!(asked[key], read[key], "{key}");
    }
    assert_eq!(json(&daemon, &["topo"])["levels"], json(&daemon, &["topo", "--input", "dgx-a100"])["levels"]);
    let explained = json(&daemon, &["explain", "GPU0"]);
    assert_eq!(explained["candidates"].as_array().map(Vec::len), asked["nics"].as_array().map(Vec::len));
    let placed = json(&daemon, &["place", "--gpus", "2"]);
    assert_eq!(placed["placements"], json(&daemon, &["place", "--gpus", "2", "--input", "dgx-a100"])["placements"]);
}

#[test]
fn a_plan_that_is_the_best_stays_when_it_is_applied() {
    let daemon = Daemon::start();
    let before = json(&daemon, &["plan"]);
    let applied = json(&daemon, &["plan", "--apply"]);
    assert_eq!((&applied["schema"], &applied["moved"]), (&"gdrd.apply/v1".into(), &Value::Array(Vec::new())));
    assert_eq!((&applied["generation"], &json(&daemon, &["plan"])), (&before["generation"], &before));
    assert!(text(&daemon, &["plan", "--apply"]).starts_with("no pairing is better"));
    assert_eq!(gdrctl(&daemon, &["plan", "--apply", "--input", "dgx-a100"]).status.code(), Some(2));
}

#[test]
fn the_daemons_advice_and_exports_are_those_of_the_profile_it_simulates() {
    let daemon = Daemon::start();
    let both =
        |arguments: &[&str]| (json(&daemon, arguments), json(&daemon, &[arguments, &["--input", "dgx-a100"]].concat()));
    for to in ["GPU7", "remote", "drive", "nvme3n1"] {
        let (asked, read) = both(&["path", "GPU0", to]);
        for key in ["schema", "from", "to", "kind", "via", "level", "gbps", "fallback"] {
            assert_eq!(asked[key], read[key], "{to}: {key}");
        }
    }
    let (asked, read) = both(&["explain", "GPU0"]);
    assert_eq!(asked["bandwidth"], read["bandwidth"]);
    let (asked, read) = both(&["export", "env"]);
    assert_eq!(asked, read);
    let (asked, read) = (["export", "nccl-topo"], ["export", "nccl-topo", "--input", "dgx-a100"]);
    assert_eq!(text(&daemon, &asked), text(&daemon, &read));
}

#[test]
fn a_wish_that_the_daemon_does_not_hold_is_planned_on_its_host() {
    let daemon = Daemon::start();
    let first = json(&daemon, &["plan"])["gpus"][0]["assigned"][0].as_str().expect("GPU0 has a NIC").to_owned();
    let without = text(&daemon, &["plan", "--nics", &format!("^={first}"), "--format", "json"]);
    let without: Value = serde_json::from_str(&without).expect("a plan");
    assert_ne!(without["gpus"][0]["assigned"][0], first.as_str());
}

#[test]
fn leases_and_queue_pairs_show_while_they_live() {
    let daemon = Daemon::start();
    assert_eq!(text(&daemon, &["buffers"]), "no buffers are leased\n");
    let mut puppet = Puppet::connected(&daemon);
    let lease = acquire(&mut puppet);
    let made =
        puppet.run(Tell::QueuePair { queue_pair: "q".into(), gpu: "GPU3".into(), hca: String::new(), depth: 16 });
    let buffers = json(&daemon, &["buffers"]);
    assert_eq!(buffers["buffers"][0]["lease_id"], lease["lease_id"]);
    assert_eq!(buffers["buffers"][0]["label"], "of-a-test");
    assert!(text(&daemon, &["buffers"]).contains("2 MiB"));
    let by_gpu = json(&daemon, &["buffers", "--by-gpu"]);
    for gpu in by_gpu["gpus"].as_array().expect("a list") {
        let figure = |name: &str| gpu[name].as_u64().expect("a figure");
        let buffers = ["leased_bytes", "ready_bytes", "clean_bytes", "changing_bytes"].map(figure).iter().sum::<u64>();
        let driver = |name: &str| gpu["driver"][name].as_u64().expect("a figure");
        assert!(buffers + driver("context_bytes") + driver("others_bytes") >= driver("used_bytes"), "{gpu}");
    }
    assert!(text(&daemon, &["buffers", "--by-gpu"]).contains("GPU0"));
    let queue_pairs = json(&daemon, &["queue-pairs"]);
    assert_eq!(queue_pairs["queue_pairs"][0]["queue_pair_id"], made["id"]);
    assert_eq!(queue_pairs["queue_pairs"][0]["send_depth"], 16);
    assert!(text(&daemon, &["queue-pairs"]).contains("RC"));
    puppet.run(Tell::Destroy { queue_pair: "q".into() });
    assert_eq!(text(&daemon, &["queue-pairs"]), "there are no queue pairs\n");
}

#[test]
fn status_says_what_is_simulated_and_what_is_absent() {
    let daemon = Daemon::start();
    let status = json(&daemon, &["status"]);
    assert_eq!(status["simulated"], "dgx-a100");
    let backends = status["backends"].as_array().expect("a list of backends");
    assert!(backends.iter().any(|backend| backend["name"] == "sim" && backend["present"] == true));
    let absent = backends.iter().filter(|backend| backend["present"] == false);
    assert!(absent.clone().count() > 0 && absent.clone().all(|backend| backend["reason"] != ""));
    assert!(text(&daemon, &["status"]).contains("simulated host dgx-a100"));
}

#[test]
fn stats_are_found_by_a_part_of_their_name() {
    let daemon = Daemon::start();
    let all = json(&daemon, &["stats"]);
    assert!(all["stats"].as_array().is_some_and(|stats| stats.len() > 10));
    let some = json(&daemon, &["stats", "sessions_opened"]);
    assert_eq!(some["stats"].as_array().map(Vec::len), Some(1));
}

#[test]
fn bench_measures_every_figure_and_gives_everything_back() {
    let daemon = Daemon::start();
    // Bounds are no matter of a test: a debug build on a busy machine may break them, which is code 1.
    let arguments = ["bench", "--rounds", "20", "--idle", "0.1", "--format", "json"];
    let output = gdrctl(&daemon, &arguments);
    assert!(matches!(output.status.code(), Some(0 | 1)), "{}", String::from_utf8_lossy(&output.stderr));
    let document: Value = serde_json::from_slice(&output.stdout).expect("one document");
    assert_eq!(document["simulated"], "dgx-a100");
    let figures = document["figures"].as_array().expect("a list of figures");
    assert_eq!(figures.len(), 8, "{figures:?}");
    assert!(figures.iter().all(|figure| figure["value"].as_f64().is_some_and(f64::is_finite)), "{figures:?}");
    assert_eq!(text(&daemon, &["buffers"]), "no buffers are leased\n");
    assert_eq!(text(&daemon, &["queue-pairs"]), "there are no queue pairs\n");
}

#[test]
fn bench_measures_the_daemon_and_not_who_keeps_its_sockets() {
    let daemon = DaemonOptions::default().kept().start();
    let output = gdrctl(&daemon, &["bench", "--only", "idle", "--idle", "0.1", "--format", "json"]);
    let document: Value = serde_json::from_slice(&output.stdout).expect("one document");
    let note = document["figures"][0]["note"].as_str().expect("where it was read");
    assert!(note.contains(&format!("/proc/{}/", daemon.daemon_pid())), "{note}, the keeper is {}", daemon.pid());
}

#[test]
fn what_the_daemon_refuses_is_a_code_of_its_own_with_the_reason() {
    let daemon = Daemon::start();
    let refused = gdrctl(&daemon, &["explain", "GPU99"]);
    assert_eq!(refused.status.code(), Some(4));
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(said.contains("GPU99") && said.contains("GPU_UNKNOWN"), "{said}");
}

#[test]
fn another_user_sees_topology_and_no_foreign_lease() {
    as_root_of_a_user_namespace("another_user_sees_topology_and_no_foreign_lease", || {
        let daemon = Daemon::start();
        let mut puppet = Puppet::connected(&daemon);
        acquire(&mut puppet);
        let as_other = |arguments: &[&str]| {
            let program = User::Uid(1003).program(Path::new(env!("CARGO_BIN_EXE_gdrctl")));
            let mut command = User::Uid(1003).command(&program);
            command.args(arguments).env("GDRD_RUNTIME_DIR", daemon.runtime_dir());
            command.output().expect("gdrctl starts")
        };
        assert!(as_other(&["plan"]).status.success());
        assert_eq!(as_other(&["plan", "--apply"]).status.code(), Some(4), "for administrators");
        let listed = as_other(&["buffers", "--format", "json"]);
        assert!(!String::from_utf8_lossy(&listed.stdout).contains("of-a-test"));
    });
}

#[test]
fn a_drain_outlives_the_daemon_and_is_seen_until_it_is_lifted() {
    let mut daemon = Daemon::start();
    let drained = json(&daemon, &["drain", "GPU0"])["drained"].clone();
    let uuid = drained[0].as_str().expect("its UUID").to_owned();
    let before = json(&daemon, &["plan"])["generation"].as_u64();
    assert_eq!(before, Some(2), "watchers are told");
    for _ in 0..2 {
        let status = json(&daemon, &["status"]);
        assert_eq!(status["drained"], serde_json::json!([{ "gpu": "GPU0", "gpu_uuid": uuid }]));
        assert!(text(&daemon, &["status"]).contains("gdrctl drain GPU0 --resume"));
        let plan = json(&daemon, &["plan"]);
        assert_eq!((&plan["gpus"][0]["drained"], &plan["gpus"][1]["drained"]), (&true.into(), &Value::Null));
        assert!(text(&daemon, &["plan"]).contains("drained; else "));
        assert_eq!(json(&daemon, &["topo"])["drained"], serde_json::json!(["GPU0"]));
        assert!(text(&daemon, &["topo"]).contains("Drained, and lent to nobody: GPU0"));
        let placed = json(&daemon, &["place", "--gpus", "1", "--max-results", "64"]);
        let placements = placed["placements"].as_array().expect("a list");
        assert_eq!(placements.len(), 7);
        assert!(placements.iter().all(|placement| placement["gpus"] != serde_json::json!(["GPU0"])));
        let none = gdrctl(&daemon, &["place", "--gpus", "8"]);
        assert_eq!(none.status.code(), Some(5));
        let said = String::from_utf8_lossy(&none.stdout).into_owned();
        assert!(said.contains("8 GPUs wanted, 7 of 8 free; drained: GPU0"), "{said}");
        let mut puppet = Puppet::connected(&daemon);
        let refused =
            puppet.refused(Tell::Acquire { buffer: "a".into(), gpu: "GPU0".into(), size: 2 << 20, host: false });
        assert_eq!(refused.reason, "DEVICE_LOST");
        drop(puppet);
        daemon.kill();
        daemon.start_again();
    }
    assert_eq!(json(&daemon, &["drain", "--all", "--resume"])["resumed"], drained);
    assert_eq!(json(&daemon, &["status"])["drained"], Value::Array(Vec::new()));
    daemon.kill();
    daemon.start_again();
    assert_eq!(json(&daemon, &["plan"])["gpus"][0]["drained"], Value::Null);
    assert!(gdrctl(&daemon, &["place", "--gpus", "8"]).status.success());
}

#[test]
fn a_probe_that_cannot_be_tried_fails_and_the_plan_says_why() {
    let faults = "allocate: fail enomem\nregister: fail enomem\n";
    let daemon = DaemonOptions::default().fault_script(faults).start();
    let one = ["probe", "--gpu", "GPU0", "--nic", "mlx5_0", "--format", "json"];
    let output = gdrctl(&daemon, &one);
    assert_eq!(output.status.code(), Some(1), "{}", String::from_utf8_lossy(&output.stderr));
    let told: Value = serde_json::from_slice(&output.stdout).expect("one document");
    let why = told["pairs"][0]["reason"].as_str().expect("it is told why").to_owned();
    assert_eq!(told["pairs"][0]["state"], "not-tried", "{told}");
    let plan = json(&daemon, &["plan"]);
    let rows = plan["gpus"][0]["nics"].as_array().expect("the plan lists NICs");
    let gdr = rows.iter().find(|row| row["name"] == "mlx5_0").map(|row| &row["gdr"]).expect("the pair");
    assert!(gdr["reason"].as_str().is_some_and(|reason| reason.contains(&format!("not probed: {why}"))), "{gdr}");
    let known = json(&daemon, &["probe", "--known"]);
    assert_eq!((&known["pairs"][0]["state"], &known["pairs"][0]["reason"]), (&"not-tried".into(), &why.into()));
}

#[test]
fn a_resumed_gpu_that_is_lost_is_told_with_the_reason() {
    let daemon = DaemonOptions::default().fault_script("gpu GPU1: lost\n").start();
    let drained = json(&daemon, &["drain", "--all"]);
    assert!(drained["drained"].is_array() && drained.get("unserved").is_none(), "{drained}");
    let resumed = json(&daemon, &["drain", "GPU1", "--resume"]);
    let uuid = &resumed["resumed"][0];
    assert_eq!(resumed["unserved"][0]["gpu_uuid"], *uuid, "{resumed}");
    assert!(resumed["unserved"][0]["reason"].as_str().is_some_and(|reason| reason.contains("bus")), "{resumed}");
    let others = text(&daemon, &["drain", "--all", "--resume"]);
    assert_eq!(others.lines().filter(|line| line.starts_with("resumed GPU-")).count(), 7, "{others}");
    assert!(!others.contains("not served"), "{others}");
}

#[test]
fn a_probe_proves_each_gpu_with_its_nics_and_the_plan_says_so() {
    let daemon = Daemon::start();
    let state = |gpu: &Value, nic: &Value| {
        let rows = gpu["nics"].as_array().expect("the plan lists NICs");
        rows.iter().find(|row| row["name"] == *nic).map(|row| row["gdr"]["state"].clone())
    };
    let before = json(&daemon, &["plan"]);
    assert!(
        before["gpus"]
            .as_array()
            .is_some_and(|gpus| gpus.iter().all(|gpu| state(gpu, &gpu["assigned"][0]) != Some("proven".into())))
    );
    let probed = json(&daemon, &["probe", "--timeout", "120"]);
    let pairs = probed["pairs"].as_array().expect("a list");
    assert!(pairs.iter().all(|pair| pair["state"] == "proven" && pair["gbps"].as_f64() > Some(0.0)), "{probed}");
    let nics = before["nics"].as_array().map_or(0, Vec::len);
    assert_eq!(pairs.iter().filter(|pair| pair["gpu"].is_null()).count(), nics, "a host buffer with each");
    let after = json(&daemon, &["plan"]);
    for gpu in after["gpus"].as_array().expect("the plan lists GPUs") {
        assert_eq!(state(gpu, &gpu["assigned"][0]), Some("proven".into()), "{gpu}");
    }
    assert!(after["generation"].as_u64() > before["generation"].as_u64(), "watchers are told");
    let one = json(&daemon, &["probe", "--gpu", "GPU0", "--nic", "mlx5_7"]);
    assert_eq!(one["pairs"].as_array().map(Vec::len), Some(1), "{one}");
    assert_eq!(gdrctl(&daemon, &["probe", "--gpu", "GPU99"]).status.code(), Some(4));
    assert!(text(&daemon, &["stats", "gdrd_leases"]).contains('0'));
}
