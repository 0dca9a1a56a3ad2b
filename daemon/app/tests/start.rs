//! How the daemon starts, refuses to start, and starts again.

mod support;

use gdrd_client::{AcquireOptions, ClientOptions, RuntimeDir};
use gdrd_proto::v1;
use gdrd_proto::v1::buffers_client::BuffersClient;
use gdrd_proto::v1::host_client::HostClient;
use rustix::net::{AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv, socket_with};
use rustix::process::Signal;
use support::{Stage, block_on, channel, names_in, raw_session, run, until};
use tonic::metadata::MetadataValue;

#[test]
fn second_daemon_in_the_same_folder_is_refused_and_the_first_goes_on() {
    let stage = Stage::new();
    let first = stage.start_simulated();
    let (code, text) = run(stage.command(&["--sim", "dgx-a100"]));
    assert_eq!(code, Some(1));
    assert!(text.contains(&format!("in use by gdrd with pid {}", first.pid())), "{text}");
    assert_eq!(stage.status().sim_profile, "dgx-a100");
}

#[test]
fn daemon_starts_over_the_sockets_of_one_that_was_killed() {
    let stage = Stage::new();
    let first = stage.start_simulated();
    first.signal(Signal::KILL);
    assert!(!first.wait().success());
    assert_eq!(names_in(&stage.runtime_dir()), ["gdrd.lock", "gdrd.sock", "session.sock"]);
    let _second = stage.start_simulated();
    assert_eq!(stage.status().sim_profile, "dgx-a100");
}

#[test]
fn what_was_probed_is_known_to_the_next_daemon_and_to_none_of_another_host() {
    let stage = Stage::new();
    let (config, own) = (stage.path("gdrd.toml"), rustix::process::geteuid().as_raw());
    std::fs::write(&config, format!("[policy]\nadmins = [\"uid:{own}\"]\n")).expect("written");
    let config = config.to_string_lossy();
    let start = |profile| stage.start(stage.command(&["--sim", profile, "--config", &config]));
    let probe = |known| {
        let path = stage.runtime_dir().join("gdrd.sock");
        block_on(async move {
            let request = v1::ProbeRequest { hca: "mlx5_0".to_owned(), known, ..Default::default() };
            let pairs = HostClient::new(channel(path).await).probe(request).await;
            pairs.expect("an administrator may").into_inner().pairs
        })
    };
    let end = |daemon: support::Daemon| {
        daemon.signal(Signal::TERM);
        assert!(daemon.wait().success());
        // It has said that it is stopping.
        stage.heard();
    };
    let first = start("dgx-a100");
    assert_eq!(probe(true), []);
    let found = probe(false);
    assert!(found.len() > 1 && found.iter().all(|pair| pair.state == "proven"), "{found:?}");
    end(first);
    let second = start("dgx-a100");
    assert_eq!(probe(true), found);
    end(second);
    let _other = start("two-socket-2gpu");
    assert_eq!(probe(true), []);
}

#[test]
fn what_is_deleted_from_the_runtime_folder_is_made_again_and_the_folder_stays_taken() {
    let stage = Stage::new();
    let daemon = stage.start_simulated();
    let names = ["gdrd.lock", "gdrd.sock", "session.sock"];
    let (before, _token) = raw_session(&stage.runtime_dir().join("session.sock"));
    for whole in [false, true, false] {
        if whole {
            // At once: what is deleted one by one may be back before the last is gone.
            std::fs::rename(stage.runtime_dir(), stage.path("gone")).expect("it is ours");
        } else {
            for name in names {
                std::fs::remove_file(stage.runtime_dir().join(name)).expect("it is there");
            }
        }
        let accepts = |name: &str| {
            let kind = if name == "gdrd.sock" { SocketType::STREAM } else { SocketType::SEQPACKET };
            let socket = socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).expect("a socket");
            connect(socket, &SocketAddrUnix::new(stage.runtime_dir().join(name)).expect("a short path")).is_ok()
        };
        // Not by connecting alone: so many would be too many for one user.
        until("the sockets to be there", || names.iter().all(|name| stage.runtime_dir().join(name).exists()));
        until("them to listen", || accepts("session.sock") && accepts("gdrd.sock"));
        assert_eq!(stage.status().sim_profile, "dgx-a100");
        let _another = raw_session(&stage.runtime_dir().join("session.sock"));
        let (code, text) = run(stage.command(&["--sim", "dgx-a100"]));
        assert_eq!(code, Some(1), "{text}");
        assert!(text.contains(&format!("in use by gdrd with pid {}", daemon.pid())), "{text}");
    }
    let mut seen = [0; 8];
    let still = recv(&before, &mut seen[..], RecvFlags::DONTWAIT);
    assert_eq!(still.map(|(_, len)| len), Err(rustix::io::Errno::WOULDBLOCK), "the session goes on");
    daemon.signal(Signal::TERM);
    assert!(daemon.wait().success());
    assert_eq!(names_in(&stage.runtime_dir()), ["gdrd.lock"], "in the end they are gone");
}

#[test]
fn folder_that_cannot_be_made_again_at_once_is_made_when_it_can() {
    let stage = Stage::new();
    let (parent, gone) = (stage.path("parent"), stage.path("gone"));
    std::fs::create_dir(&parent).expect("a folder");
    let mut command = stage.bare_command(&["--sim", "dgx-a100"]);
    command.arg("--runtime-dir").arg(parent.join("run"));
    let _daemon = stage.start(command);
    std::fs::rename(&parent, &gone).expect("it is ours");
    // The watch is on the folder, which has not moved in its parent.
    std::fs::rename(gone.join("run"), gone.join("moved")).expect("it is ours");
    until("the daemon to say so", || stage.log().contains("looked at again in 1s"));
    std::fs::create_dir(&parent).expect("the name is free");
    let accepts = || std::os::unix::net::UnixStream::connect(parent.join("run").join("gdrd.sock")).is_ok();
    until("the sockets to be there", || parent.join("run").join("session.sock").exists() && accepts());
}

#[test]
fn wrong_configuration_is_a_usage_error_before_any_effect() {
    let stage = Stage::new();
    let path = stage.path("gdrd.toml");
    std::fs::write(&path, "[limits]\nmax_sesions = 1\n").expect("written");
    let config = path.to_string_lossy();
    let (code, text) = run(stage.command(&["--sim", "dgx-a100", "--config", &config]));
    assert_eq!(code, Some(2));
    assert!(text.contains("max_sesions"), "{text}");
    assert!(!stage.runtime_dir().exists());
}

#[test]
fn check_config_says_whether_it_is_valid_and_does_nothing() {
    let stage = Stage::new();
    let path = stage.path("gdrd.toml");
    std::fs::write(&path, "[pool]\nidle_s = 30\n").expect("written");
    let config = path.to_string_lossy();
    assert_eq!(run(stage.command(&["--check-config", "--config", &config])).0, Some(0));
    std::fs::write(&path, "[pool]\nidle_s = 0\n").expect("written");
    let (code, text) = run(stage.command(&["--check-config", "--config", &config]));
    assert_eq!(code, Some(2));
    assert!(text.contains("pool.idle_s = 0 is not allowed; 1 to 86400 is"), "{text}");
    let faults = stage.path("faults");
    std::fs::write(&faults, "register: delay 1 fortnight\n").expect("written");
    let faults = faults.to_string_lossy();
    for simulation in [&["--sim", "dgx-z900"][..], &["--sim", "dgx-a100", "--fault-script", &faults]] {
        let (code, text) = run(stage.command(&[&["--check-config"], simulation].concat()));
        assert_eq!(code, Some(2), "{text}");
    }
    assert!(!stage.runtime_dir().exists());
}

#[test]
fn profiles_are_listed() {
    let (code, text) = run(Stage::new().command(&["--list-profiles"]));
    assert_eq!(code, Some(0));
    assert!(text.lines().any(|line| line == "dgx-a100"), "{text}");
}

#[test]
fn output_that_cannot_be_written_is_an_error_and_no_panic() {
    for option in ["--list-profiles", "--check-config"] {
        let full = std::fs::File::options().write(true).open("/dev/full").expect("every Linux has it (full(4))");
        let mut command = Stage::new().command(&[option]);
        let output = command.stdout(full).stderr(std::process::Stdio::piped()).output().expect("it starts");
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(text.contains("standard output") && !text.contains("panicked"), "{text}");
    }
}

#[test]
fn errors_that_cannot_be_written_leave_the_exit_code_as_it_is() {
    let full = std::fs::File::options().write(true).open("/dev/full").expect("every Linux has it (full(4))");
    let status = Stage::new().command(&["--sim", "dgx-z9"]).stderr(full).status().expect("it starts");
    assert_eq!(status.code(), Some(2));
}

#[test]
fn unknown_profile_names_the_known_ones() {
    let (code, text) = run(Stage::new().command(&["--sim", "dgx-z9"]));
    assert_eq!(code, Some(2));
    assert!(text.contains("dgx-z9") && text.contains("dgx-a100"), "{text}");
}

#[test]
fn what_was_asked_for_and_cannot_be_had_ends_a_keeper_too() {
    let stage = Stage::new();
    let absent = stage.path("absent").to_string_lossy().into_owned();
    let long = stage.path(&"x".repeat(100)).to_string_lossy().into_owned();
    let wrong: [&[&str]; 6] = [
        &["--sim", "dgx-z9"],
        &["--sim", "dgx-a100", "--fault-script", &absent],
        &["--sysfs-root", &absent],
        &["--config", &absent],
        &["--no-such-option"],
        &["--sim", "dgx-a100", "--runtime-dir", &long],
    ];
    for arguments in wrong {
        for keeper in [&[][..], &["keeper", "--"]] {
            let mut command = stage.bare_command(&[keeper, arguments].concat());
            if !arguments.contains(&"--runtime-dir") {
                command.arg("--runtime-dir").arg(stage.runtime_dir());
            }
            let (code, text) = run(command);
            assert_eq!(code, Some(2), "{keeper:?} {arguments:?}: {text}");
            assert!(!stage.runtime_dir().exists());
        }
    }
    // The keeper's own configuration, as the daemon's.
    assert_eq!(run(stage.bare_command(&["--config", &absent, "keeper"])).0, Some(2));
}

#[test]
fn a_cause_is_said_once() {
    let stage = Stage::new();
    std::fs::write(stage.runtime_dir(), "no folder").expect("written");
    let (code, text) = run(stage.command(&["--sim", "dgx-a100"]));
    assert_eq!(code, Some(2), "nothing but another folder helps");
    assert_eq!(text.matches("is not a folder").count(), 1, "{text}");
    let absent = stage.path("absent").to_string_lossy().into_owned();
    let (_, text) = run(stage.command(&["--sysfs-root", &absent]));
    assert_eq!(text.matches("No such file").count(), 1, "{text}");
}

#[test]
fn fault_script_is_checked_before_anything_is_served() {
    let stage = Stage::new();
    let path = stage.path("faults");
    std::fs::write(&path, "register on mlx5_99: fail enomem\n").expect("written");
    let script = path.to_string_lossy();
    let (code, text) = run(stage.command(&["--sim", "dgx-a100", "--fault-script", &script]));
    assert_eq!(code, Some(2));
    assert!(text.contains("mlx5_99"), "{text}");
}

#[test]
fn without_simulation_the_daemon_serves_topology_and_says_why_it_has_no_backend() {
    let stage = Stage::new();
    let _daemon = stage.start(stage.command(&[]));
    let status = stage.status();
    assert_eq!(status.sim_profile, "");
    let backends: Vec<_> = status.backends.iter().map(|b| (b.name.as_str(), b.present, b.reason.as_str())).collect();
    let [sim, verbs, cuda, nvml] = backends[..] else { panic!("{backends:?}") };
    assert_eq!(sim, ("sim", false, "started without --sim"));
    // Whether there is an RDMA device is up to the machine too; the reason says what to load or install, or what it serves.
    let of_verbs = ["install rdma-core", "load ib_uverbs", "lists no rdma device", "not ", "serves "];
    assert!(verbs.0 == "verbs" && of_verbs.iter().any(|words| verbs.2.contains(words)), "{verbs:?}");
    // Whether there is a driver is up to the machine; where there is none, both say what to do about it.
    assert_eq!((cuda.0, nvml.0), ("cuda", "nvml"));
    assert!(nvml.1 || (nvml.2.contains("install the nvidia driver") && cuda.2.contains("nvml")), "{backends:?}");
}

#[test]
fn a_verbs_library_that_cannot_be_loaded_is_named_with_what_to_install_and_the_daemon_serves() {
    let stage = Stage::new();
    let library = stage.path("libibverbs.so.1");
    std::fs::write(&library, "no library").expect("written");
    let mut command = stage.command(&[]);
    // Looked at before the machine's own (ld.so(8)).
    command.env("LD_LIBRARY_PATH", library.parent().expect("a folder"));
    let _daemon = stage.start(command);
    let status = stage.status();
    let verbs = status.backends.iter().find(|backend| backend.name == "verbs").expect("it is told of");
    assert!(!verbs.present, "{verbs:?}");
    for words in ["libibverbs.so.1 cannot be loaded", "install rdma-core (libibverbs1, ibverbs-providers)"] {
        assert!(verbs.reason.contains(words), "{verbs:?}");
    }
}

#[test]
fn host_with_gpus_but_no_backend_shows_them_and_refuses_leases_with_the_reason() {
    let stage = Stage::new();
    let host = gdrd_topology::profile::builtin("dgx-a100").expect("a built-in profile").host;
    let tree = stage.path("tree");
    std::fs::create_dir(&tree).expect("a folder");
    gdrd_topology::sysfs::build::build(&host, &tree).expect("a captured tree");
    let root = tree.to_string_lossy();
    let _daemon = stage.start(stage.command(&["--sysfs-root", &root]));
    let options = ClientOptions::default().runtime_dir(RuntimeDir::new(stage.runtime_dir()));
    let (plan, refused) = block_on(async move {
        let client = options.connect().await.expect("it listens");
        let plan = client.topology().await.expect("open to all").plan.expect("a plan");
        let session = client.open_session("test").await.expect("the same user");
        (plan, session.acquire(AcquireOptions::on_gpu("GPU0", 1 << 21)).await.expect_err("no memory to lease"))
    });
    assert_eq!(plan.gpus.len(), 8);
    assert_eq!(plan.source.map(|source| source.kind), Some("sysfs".to_owned()));
    assert_eq!(refused.reason(), Some("HARDWARE_ABSENT"), "{refused}");
}

#[test]
fn open_sessions_hear_of_the_end_and_do_not_hold_it_up() {
    let stage = Stage::new();
    let daemon = stage.start_simulated();
    let options = ClientOptions::default().runtime_dir(RuntimeDir::new(stage.runtime_dir()));
    let ended = block_on(async move {
        let session = options.connect().await.expect("it listens").open_session("test").await.expect("the same user");
        let _buffer = session.acquire(AcquireOptions::on_gpu("GPU0", 1 << 21)).await.expect("it simulates");
        daemon.signal(Signal::TERM);
        let ended = session.ended().await;
        assert!(daemon.wait().success());
        ended
    });
    assert_eq!(ended.reason, "SHUTTING_DOWN");
}

#[test]
fn json_log_is_one_object_a_line() {
    let stage = Stage::new();
    let daemon = stage.start(stage.command(&["--sim", "dgx-a100", "--log-format", "json"]));
    daemon.signal(Signal::TERM);
    assert!(daemon.wait().success());
    let log = stage.log();
    assert!(!log.is_empty());
    for line in log.lines() {
        serde_json::from_str::<serde_json::Value>(line).expect(line);
    }
}

#[test]
fn most_talkative_log_shows_no_token() {
    let stage = Stage::new();
    let daemon = stage.start(stage.command(&["--sim", "dgx-a100", "--log", "trace"]));
    let (session, token) = raw_session(&stage.runtime_dir().join("session.sock"));
    let header = MetadataValue::from_bytes(&token);
    let shown = String::from_utf8(header.as_encoded_bytes().to_vec()).expect("base64");
    let path = stage.runtime_dir().join("gdrd.sock");
    let memory = v1::acquire_request::Memory::Gpu("GPU0".to_owned());
    let mut request =
        tonic::Request::new(v1::AcquireRequest { size_bytes: 1 << 21, memory: Some(memory), ..Default::default() });
    request.metadata_mut().insert_bin(gdrd_proto::SESSION_TOKEN_KEY, header);
    let lease = block_on(async move { BuffersClient::new(channel(path).await).acquire(request).await });
    let lease = lease.expect("it simulates").into_inner();
    drop(session);
    daemon.signal(Signal::TERM);
    assert!(daemon.wait().success());
    let log = stage.log();
    assert!(log.contains("session opened"), "the log is on");
    assert!(!log.contains(&shown), "the token is in the log");
    for registration in lease.registrations {
        assert!(!log.contains(&registration.rkey.to_string()), "an rkey is in the log");
    }
}
