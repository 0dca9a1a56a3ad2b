//! gdrctl where it has no answer: each reason has its exit code and its words.

use std::fs::Permissions;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, Output};
use std::thread;

use gdrd_harness::{Daemon, DaemonOptions, User, as_root_of_a_user_namespace};

fn ended(output: &Output) -> (Option<i32>, String) {
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// A verb of gdrctl, with its options, with the daemon of this folder.
fn gdrctl(runtime_dir: &Path, verb: &str, options: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gdrctl"));
    command.arg(verb).args(options).arg("--runtime-dir").arg(runtime_dir);
    ended(&command.output().expect("gdrctl starts"))
}

/// A folder with a socket on which this test listens.
fn listening() -> (tempfile::TempDir, UnixListener) {
    let folder = tempfile::tempdir().expect("a folder");
    let listener = UnixListener::bind(folder.path().join("gdrd.sock")).expect("a free name");
    (folder, listener)
}

#[test]
fn nobody_who_listens_is_no_daemon() {
    let (folder, listener) = listening();
    drop(listener);
    for folder in [folder.path(), &folder.path().join("absent")] {
        let (code, said) = gdrctl(folder, "status", &[]);
        assert_eq!(code, Some(3), "{said}");
        assert!(said.contains("is the daemon running?"), "{said}");
    }
}

#[test]
fn a_daemon_that_says_nothing_in_time_has_failed() {
    let (folder, _listener) = listening();
    let (code, said) = gdrctl(folder.path(), "status", &["--timeout", "0.5"]);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("had no answer within 500ms"), "{said}");
}

#[test]
fn a_connection_that_breaks_is_a_failure_and_no_absent_daemon() {
    let (folder, listener) = listening();
    // Whatever was sent to it and not read is a reset.
    thread::spawn(move || listener.incoming().for_each(drop));
    for verb in ["status", "topo"] {
        let (code, said) = gdrctl(folder.path(), verb, &[]);
        assert_eq!(code, Some(1), "{said}");
        assert!(said.contains("broke before it answered") && !said.contains("is the daemon running"), "{said}");
    }
}

#[test]
fn a_connection_that_this_side_cannot_make_is_told_by_its_cause() {
    let file = tempfile::NamedTempFile::new().expect("a file");
    let (code, said) = gdrctl(file.path(), "status", &[]);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("connect to ") && said.contains("Not a directory"), "{said}");
    assert!(!said.contains("broke before it answered"), "{said}");
}

#[test]
fn one_connection_too_many_is_a_refusal_by_name() {
    let config = "[server]\nmax_grpc_connections_per_uid = 1\nhello_timeout_ms = 600000\n";
    let daemon = DaemonOptions::default().config(config).start();
    // It takes the only place. Bytes that are no HTTP/2 would end it.
    let mut silent = UnixStream::connect(daemon.runtime_dir().join("gdrd.sock")).expect("it listens");
    silent.write_all(b"PRI").expect("it reads");
    for verb in ["status", "topo", "buffers"] {
        let (code, said) = gdrctl(&daemon.runtime_dir(), verb, &[]);
        assert_eq!(code, Some(4), "{said}");
        assert!(said.contains("(CONNECTIONS_EXHAUSTED)"), "{said}");
    }
    drop(silent);
}

#[test]
fn a_socket_that_is_closed_to_this_user_is_a_refusal_and_topology_is_read_without_it() {
    as_root_of_a_user_namespace(
        "a_socket_that_is_closed_to_this_user_is_a_refusal_and_topology_is_read_without_it",
        || {
            let daemon = Daemon::start();
            let socket = daemon.runtime_dir().join("gdrd.sock");
            std::fs::set_permissions(socket, Permissions::from_mode(0o600)).expect("it is ours");
            let program = User::Uid(1003).program(Path::new(env!("CARGO_BIN_EXE_gdrctl")));
            let run = |verb: &str| {
                let mut command = User::Uid(1003).command(&program);
                command.arg(verb).env("GDRD_RUNTIME_DIR", daemon.runtime_dir());
                ended(&command.output().expect("gdrctl starts"))
            };
            let (code, said) = run("status");
            assert_eq!(code, Some(4), "{said}");
            assert!(said.contains("SOCKET_NOT_PERMITTED") && said.contains("Permission denied"), "{said}");
            let (code, said) = run("topo");
            assert_eq!(code, Some(0), "{said}");
            assert!(said.contains("reading /sys of this host instead"), "{said}");
            // Found by no look at all.
            std::fs::set_permissions(daemon.runtime_dir(), Permissions::from_mode(0o700)).expect("it is ours");
            let (code, said) = run("status");
            assert_eq!(code, Some(4), "{said}");
            assert!(said.contains("SOCKET_NOT_PERMITTED") && said.contains("Permission denied"), "{said}");
        },
    );
}

#[test]
fn a_folder_too_long_for_a_socket_is_wrong_usage_and_told_the_limit() {
    let folder = format!("/tmp/{}", "x".repeat(120));
    let (code, said) = gdrctl(Path::new(&folder), "status", &[]);
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains(&folder) && said.contains("107"), "{said}");
}
