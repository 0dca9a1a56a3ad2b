//! The text form of fault scripts, and what is refused.
#![forbid(unsafe_code)]

mod support;

use std::time::Duration;

use gdrd_sim::SimError;
use gdrd_sim::fault::{Call, Effect, FaultEvent, FaultRule, FaultScript, MAX_RULES, MAX_SCRIPT_BYTES};
use support::patient_host;

#[test]
fn every_form_of_a_rule_is_read() {
    let text = "
        # what breaks
        at 100 ops on mlx5_0: link-down port 1
        at 200 ops on mlx5_0: gpu GPU0 lost   # and this too
        hca mlx5_1: gid-change port 2
        hca mlx5_1: fatal
        gpu GPU1: healthy
        register on mlx5_0: fail enomem times 2
        register on mlx5_0 after 3: fail eio
        completion: delay 5ms
        connect on mlx5_0: hang times 1
        hca mlx5_0: go-on
        gpu GPU0: go-on
    ";
    let script: FaultScript = text.parse().unwrap();
    let hca = || "mlx5_0".to_owned();
    let on_call =
        |call, target: Option<String>, after, effect, times| FaultRule::OnCall { call, target, after, effect, times };
    let wanted = [
        FaultRule::AtOps { hca: hca(), ops: 100, event: FaultEvent::LinkDown { hca: hca(), port_num: 1 } },
        FaultRule::AtOps { hca: hca(), ops: 200, event: FaultEvent::GpuLost { gpu: "GPU0".to_owned() } },
        FaultRule::Now(FaultEvent::GidChange { hca: "mlx5_1".to_owned(), port_num: 2 }),
        FaultRule::Now(FaultEvent::DeviceFatal { hca: "mlx5_1".to_owned() }),
        FaultRule::Now(FaultEvent::GpuHealthy { gpu: "GPU1".to_owned() }),
        on_call(Call::Register, Some(hca()), 0, Effect::Fail(12), Some(2)),
        on_call(Call::Register, Some(hca()), 3, Effect::Fail(5), None),
        on_call(Call::Completion, None, 0, Effect::Delay(Duration::from_millis(5)), None),
        on_call(Call::Connect, Some(hca()), 0, Effect::Hang, Some(1)),
        FaultRule::Now(FaultEvent::HcaGoesOn { hca: hca() }),
        FaultRule::Now(FaultEvent::GpuGoesOn { gpu: "GPU0".to_owned() }),
    ];
    assert_eq!(script.rules, wanted);
}

#[test]
fn what_is_wrong_is_told_with_its_line() {
    for (rule, wanted) in [
        ("register", "no `: `"),
        ("regist: fail enomem", "`regist` is no trigger"),
        ("register: fail", "an error is missing"),
        ("register: fail exdev", "`exdev` is no error"),
        ("register: explode", "`explode` is none of fail, delay, hang and cost"),
        ("register: delay 20", "no unit"),
        ("register: delay ms", "no duration"),
        ("register: delay 61s", "more than 60 s"),
        ("register: fail eio times", "count of times is missing"),
        ("register: fail eio times 0", "never happens"),
        ("register: fail eio times -1", "`-1` is no count of times"),
        ("register: fail eio times 1 2", "`2` is one word too many"),
        ("register on: fail eio", "a device is missing"),
        ("completion: fail eio", "delayed, not failed"),
        ("completion on mlx5_0: hang", "do not hang"),
        ("register: hang", "wanted on one device"),
        ("at ten ops on mlx5_0: fatal", "`ten` is no count of operations"),
        ("at 10 calls on mlx5_0: fatal", "`calls` stands where `ops` is wanted"),
        ("at 10 ops on mlx5_0: link-down", "`port` is missing"),
        ("at 10 ops on mlx5_0: link-down port 256", "`256` is no port number"),
        ("at 10 ops on mlx5_0: lost", "`lost` is no event"),
        ("gpu GPU0: broken", "`broken` is none of lost, healthy and go-on"),
        ("hca: fatal", "an hca is missing"),
    ] {
        let error = format!("# first line\n\n{rule}\n").parse::<FaultScript>().unwrap_err();
        assert_eq!(error.line, 3, "{rule}");
        assert!(error.reason.contains(wanted), "{rule}: {error}");
    }
}

#[test]
fn scripts_are_bounded() {
    let many = "gpu GPU0: lost\n".repeat(MAX_RULES + 1);
    assert!(many.parse::<FaultScript>().unwrap_err().reason.contains("more than"));
    let long = "#".repeat(MAX_SCRIPT_BYTES + 1);
    assert!(long.parse::<FaultScript>().unwrap_err().reason.contains("bytes"));
    let host = patient_host();
    let full = "register: delay 1us\n".repeat(MAX_RULES);
    host.inject_text(&full).unwrap();
    assert!(matches!(host.inject_text("register: delay 1us"), Err(SimError::TooManyRules)));
}

#[test]
fn a_script_with_an_unknown_device_does_nothing_at_all() {
    let host = patient_host();
    for (second, wanted) in [
        ("hca mlx5_7: fatal", "mlx5_7"),
        ("hca mlx5_0: link-down port 2", "mlx5_0:2"),
        ("hca mlx5_0: link-down port 0", "mlx5_0:0"),
        ("gpu GPU9: lost", "GPU9"),
        ("gpu mlx5_0: lost", "mlx5_0"),
        ("register on GPU0: fail eio", "GPU0"),
        ("allocate on mlx5_0: fail eio", "mlx5_0"),
        ("at 5 ops on mlx5_9: fatal", "mlx5_9"),
        ("at 5 ops on mlx5_0: gpu GPU9 lost", "GPU9"),
    ] {
        let error = host.inject_text(&format!("gpu GPU0: lost\n{second}")).unwrap_err();
        assert!(matches!(error, SimError::UnknownDevice { .. }), "{second}: {error}");
        assert!(error.to_string().contains(wanted), "{second}: {error}");
    }
    let facts = host.gpu_facts().gpus().unwrap();
    assert_eq!(facts[0].health, gdrd_hal::GpuHealth::Healthy);
}

#[test]
fn no_text_makes_the_parser_panic() {
    use rand::seq::IndexedRandom;
    const PIECES: [&str; 24] = [
        "at",
        "on",
        "after",
        "times",
        "ops",
        "hca",
        "gpu",
        "register",
        "completion",
        "fail",
        "delay",
        "enomem",
        "port",
        "link-down",
        "lost",
        ":",
        ": ",
        "1",
        "99999999999999999999",
        "5ms",
        "\u{b5}s",
        "#",
        "\n",
        "\0",
    ];
    let mut random = rand::rng();
    for _ in 0..5000 {
        let words = (0..8).map(|_| *PIECES.choose(&mut random).unwrap());
        let text = words.collect::<Vec<_>>().join(if rand::random() { " " } else { "" });
        if let Err(error) = text.parse::<FaultScript>() {
            assert!((1..=9).contains(&error.line), "{text:?}: {error}");
        }
    }
}

#[test]
fn the_documented_script_is_read() {
    let document = include_str!("../../../../docs/simulated-host.md");
    let (_, after) = document.split_once("```text\n").unwrap();
    let (script, _) = after.split_once("```").unwrap();
    assert_eq!(script.parse::<FaultScript>().unwrap().rules.len(), script.lines().count());
    patient_host().inject_text(script).unwrap();
}
