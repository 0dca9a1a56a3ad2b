//! The daemon under a stand-in for systemd: what it says on NOTIFY_SOCKET, and sockets it is handed.

mod support;

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Stdio;

use gdrd_client::{AcquireOptions, ClientOptions, RuntimeDir};
use nix::sys::ptrace;
use nix::sys::wait::{WaitPidFlag, waitpid};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with};
use rustix::process::Signal;
use support::{Daemon, Stage, block_on, names_in, until};

fn seqpacket() -> OwnedFd {
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).expect("a socket")
}

fn session_listener(path: &Path) -> Stdio {
    let socket = seqpacket();
    bind(&socket, &SocketAddrUnix::new(path).expect("a short path")).expect("a free name");
    listen(&socket, 16).expect("it listens");
    Stdio::from(socket)
}

fn grpc_listener(path: &Path) -> Stdio {
    Stdio::from(OwnedFd::from(UnixListener::bind(path).expect("a free name")))
}

fn accepts_sessions(path: &Path) -> bool {
    connect(seqpacket(), &SocketAddrUnix::new(path).expect("a short path")).is_ok()
}

fn end(daemon: Daemon) {
    daemon.signal(Signal::TERM);
    assert!(daemon.wait().success());
}

#[test]
fn readiness_comes_with_a_status_and_the_end_is_announced() {
    let stage = Stage::new();
    let daemon = Daemon::from(stage.command(&["--sim", "dgx-a100"]).spawn().expect("it starts"));
    let said = stage.heard();
    assert!(said.contains("READY=1"), "{said}");
    assert!(said.contains("STATUS=simulated host dgx-a100: 8 gpus"), "{said}");
    assert_eq!(stage.status().sim_profile, "dgx-a100");
    daemon.signal(Signal::TERM);
    assert!(stage.heard().contains("STOPPING=1"));
    assert!(daemon.wait().success());
    assert_eq!(names_in(&stage.runtime_dir()), ["gdrd.lock"], "the sockets are gone");
}

#[test]
fn interrupt_ends_it_as_well() {
    let stage = Stage::new();
    let daemon = stage.start_simulated();
    daemon.signal(Signal::INT);
    assert!(daemon.wait().success());
}

#[test]
fn signals_that_mean_nothing_are_logged_and_do_not_end_it() {
    let stage = Stage::new();
    let daemon = stage.start_simulated();
    for (signal, name) in [(Signal::HUP, "SIGHUP"), (Signal::USR1, "SIGUSR1"), (Signal::USR2, "SIGUSR2")] {
        daemon.signal(signal);
        until(&format!("a line about {name}"), || stage.log().contains(name));
    }
    end(daemon);
}

#[test]
fn watchdog_is_fed_when_systemd_asks_for_it() {
    let stage = Stage::new();
    let mut command = stage.command(&["--sim", "dgx-a100"]);
    command.env("WATCHDOG_USEC", "100000");
    let daemon = stage.start(command);
    for _ in 0..3 {
        assert!(stage.heard().contains("WATCHDOG=1"));
    }
    end(daemon);
}

/// Threads of the daemon that hang for as long as this lives, while the others run on.
struct Hanging(Vec<nix::unistd::Pid>);

impl Hanging {
    fn threads(daemon: &Daemon, name: &str) -> Self {
        let mut threads: Vec<_> = daemon.threads(name).into_iter().map(nix::unistd::Pid::from_raw).collect();
        // Those that block for the server end by themselves.
        threads.retain(|thread| ptrace::seize(*thread, ptrace::Options::empty()).is_ok());
        for thread in &threads {
            ptrace::interrupt(*thread).expect("traced");
            waitpid(*thread, Some(WaitPidFlag::__WALL)).expect("it stops");
        }
        Self(threads)
    }
}

impl Drop for Hanging {
    fn drop(&mut self) {
        for thread in &self.0 {
            // It may have been killed.
            let _ = ptrace::detach(*thread, None);
        }
    }
}

#[test]
fn each_thread_that_hangs_starves_the_watchdog_by_itself() {
    let stage = Stage::new();
    let path = stage.path("gdrd.toml");
    std::fs::write(&path, "[executor]\nthreads = 1\ncalls_per_device = 1\n").expect("written");
    let mut command = stage.command(&["--sim", "dgx-a100", "--config", &path.to_string_lossy()]);
    command.env("WATCHDOG_USEC", "20000");
    let daemon = stage.start(command);
    // Threads for driver calls start when there are any, those that nobody waits for too.
    let options = ClientOptions::default().runtime_dir(RuntimeDir::new(stage.runtime_dir()));
    block_on(async {
        let session = options.connect().await.expect("it listens").open_session("test").await.expect("the same user");
        session.acquire(AcquireOptions::on_gpu("GPU0", 1 << 21)).await.expect("it simulates");
    });
    for name in ["gdrd-server", "gdrd-timer", "gdrd-devices", "gdrd-broker-0", "gdrd-exec-", "gdrd-idle-"] {
        // What it was at meanwhile may be a driver call, which may take its time.
        until(&format!("a watchdog that starves because {name} hangs"), || {
            let _hanging = Hanging::threads(&daemon, name);
            stage.falls_silent()
        });
        assert!(stage.heard().contains("WATCHDOG=1"), "{name} goes on");
    }
    end(daemon);
}

#[test]
fn driver_calls_that_take_long_do_not_starve_the_watchdog() {
    let stage = Stage::new();
    let (config, faults) = (stage.path("gdrd.toml"), stage.path("faults"));
    std::fs::write(&config, "[executor]\nthreads = 1\ncalls_per_device = 1\n").expect("written");
    std::fs::write(&faults, "register: delay 60s\n").expect("written");
    let (config, faults) = (config.to_string_lossy(), faults.to_string_lossy());
    let mut command = stage.command(&["--sim", "dgx-a100", "--config", &config, "--fault-script", &faults]);
    command.env("WATCHDOG_USEC", "20000");
    let daemon = stage.start(command);
    let options = ClientOptions::default().runtime_dir(RuntimeDir::new(stage.runtime_dir()));
    block_on(async {
        let session = options.connect().await.expect("it listens").open_session("test").await.expect("the same user");
        let acquiring = tokio::spawn(async move { session.acquire(AcquireOptions::on_gpu("GPU0", 1 << 21)).await });
        let fed = tokio::task::spawn_blocking(move || {
            // From then on the only thread for calls is in one, or about to be.
            until("it to start", || !daemon.threads("gdrd-exec-").is_empty());
            (0..50).all(|_| stage.heard().contains("WATCHDOG=1"))
        });
        assert!(fed.await.expect("no panic"));
        acquiring.abort();
    });
}

#[test]
fn both_sockets_of_systemd_are_served_whatever_their_order() {
    for reversed in [false, true] {
        let stage = Stage::new();
        std::fs::create_dir(stage.runtime_dir()).expect("a folder");
        let (grpc_path, session_path) =
            (stage.runtime_dir().join("gdrd.sock"), stage.runtime_dir().join("session.sock"));
        let (grpc, session) = (grpc_listener(&grpc_path), session_listener(&session_path));
        let command = if reversed {
            stage.activated(session, Some(grpc), "sess:grpc", &["--sim", "dgx-a100"])
        } else {
            stage.activated(grpc, Some(session), "grpc:sess", &["--sim", "dgx-a100"])
        };
        let daemon = stage.start(command);
        assert_eq!(stage.status().sim_profile, "dgx-a100");
        assert!(accepts_sessions(&session_path));
        end(daemon);
        assert_eq!(names_in(&stage.runtime_dir()), ["gdrd.lock", "gdrd.sock", "session.sock"], "they are systemd's");
    }
}

#[test]
fn socket_that_systemd_does_not_have_is_bound() {
    let stage = Stage::new();
    std::fs::create_dir(stage.runtime_dir()).expect("a folder");
    let session_path = stage.runtime_dir().join("session.sock");
    let command = stage.activated(session_listener(&session_path), None, "sess", &["--sim", "dgx-a100"]);
    let daemon = stage.start(command);
    assert_eq!(stage.status().sim_profile, "dgx-a100");
    assert!(accepts_sessions(&session_path));
    // What it bound it binds again; what is systemd's it leaves to systemd, which is seen once the other is there.
    std::fs::remove_file(&session_path).expect("it is there");
    let grpc_path = stage.runtime_dir().join("gdrd.sock");
    std::fs::remove_file(&grpc_path).expect("it is there");
    until("the socket to be bound anew", || grpc_path.exists());
    end(daemon);
    assert_eq!(names_in(&stage.runtime_dir()), ["gdrd.lock"]);
}

#[test]
fn descriptor_that_means_nothing_is_closed_with_a_line() {
    let stage = Stage::new();
    let file = Stdio::from(File::open("/dev/null").expect("it opens"));
    let daemon = stage.start(stage.activated(file, None, "oops!", &["--sim", "dgx-a100"]));
    assert!(stage.log().contains("means nothing to it and is closed name=\"oops!\""), "{}", stage.log());
    end(daemon);
}

#[test]
fn second_socket_of_a_kind_is_refused_by_name() {
    let stage = Stage::new();
    let (one, other) = (session_listener(&stage.path("one")), session_listener(&stage.path("other")));
    let status = stage.activated(one, Some(other), "sess:more", &["--sim", "dgx-a100"]).status().expect("it starts");
    assert_eq!(status.code(), Some(1));
    assert!(stage.log().contains("more is a second seqpacket socket"), "{}", stage.log());
}

#[test]
fn sockets_meant_for_another_process_are_left_alone() {
    let stage = Stage::new();
    let mut command = stage.command(&["--sim", "dgx-a100"]);
    command.env("LISTEN_FDS", "2").env("LISTEN_PID", "1");
    let daemon = stage.start(command);
    assert_eq!(stage.status().sim_profile, "dgx-a100");
    end(daemon);
}
