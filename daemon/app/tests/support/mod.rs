//! Starts `gdrd` as systemd would, and listens to what it says.

#![allow(dead_code, reason = "each test file uses its part")]
#![allow(clippy::panic, reason = "what ends a test")]

use std::fs::{File, Permissions};
use std::io::{ErrorKind, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use gdrd_proto::v1;
use gdrd_proto::v1::host_client::HostClient;
use hyper_util::rt::TokioIo;
use prost::Message as _;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv, send, socket_with,
};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use tonic::transport::{Channel, Endpoint};

/// Ends a test that would otherwise wait for ever; nothing is measured against it.
pub(crate) const WATCHDOG: Duration = Duration::from_secs(60);

/// A folder for one daemon, and the socket on which systemd would hear of it.
pub(crate) struct Stage {
    folder: TempDir,
    notify: UnixDatagram,
}

impl Stage {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        // Users other than the test's own pass through to the daemon's sockets.
        std::fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).expect("it is ours");
        let notify = UnixDatagram::bind(folder.path().join("notify")).expect("a socket");
        notify.set_read_timeout(Some(WATCHDOG)).expect("a watchdog");
        Self { folder, notify }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Folder of the daemon's sockets.
    pub(crate) fn runtime_dir(&self) -> PathBuf {
        self.path("run")
    }

    /// The daemon with these arguments besides its folder, heard by this stage.
    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = self.bare_command(arguments);
        command.arg("--runtime-dir").arg(self.runtime_dir());
        command
    }

    /// The daemon with these arguments alone, heard by this stage.
    pub(crate) fn bare_command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gdrd"));
        command.args(arguments);
        self.stand_in(&mut command);
        command
    }

    /// The daemon with sockets handed over: `first` becomes descriptor 3, `second` 4. A shell moves them there and
    /// knows the pid that LISTEN_PID must name.
    pub(crate) fn activated(&self, first: Stdio, second: Option<Stdio>, names: &str, arguments: &[&str]) -> Command {
        let (script, count) = match second {
            Some(_) => (r#"exec 3<&0 4<&1 </dev/null >&2; LISTEN_PID=$$ exec "$@""#, "2"),
            None => (r#"exec 3<&0 </dev/null; LISTEN_PID=$$ exec "$@""#, "1"),
        };
        let mut command = Command::new("sh");
        command.args(["-c", script, "sh", env!("CARGO_BIN_EXE_gdrd")]).args(arguments);
        command.arg("--runtime-dir").arg(self.runtime_dir());
        self.stand_in(&mut command);
        command.stdin(first).stdout(second.unwrap_or_else(Stdio::null));
        command.env("LISTEN_FDS", count).env("LISTEN_FDNAMES", names);
        command
    }

    fn stand_in(&self, command: &mut Command) {
        let log = File::create(self.path("log")).expect("a log");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        command.env("NOTIFY_SOCKET", self.path("notify"));
        for inherited in ["LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "WATCHDOG_USEC", "WATCHDOG_PID"] {
            command.env_remove(inherited);
        }
    }

    /// Starts a daemon and waits until it says that it serves.
    pub(crate) fn start(&self, mut command: Command) -> Daemon {
        let daemon = Daemon(command.spawn().expect("it starts"));
        let said = self.heard();
        assert!(said.contains("READY=1"), "not ready but {said:?}: {}", self.log());
        daemon
    }

    /// A simulated daemon with default options.
    pub(crate) fn start_simulated(&self) -> Daemon {
        self.start(self.command(&["--sim", "dgx-a100"]))
    }

    /// The next message to systemd.
    pub(crate) fn heard(&self) -> String {
        let mut buffer = [0; 4096];
        loop {
            match self.notify.recv(&mut buffer) {
                Ok(len) => return String::from_utf8_lossy(&buffer[..len]).into_owned(),
                // The test was stopped and goes on.
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return format!("nothing: {error}"),
            }
        }
    }

    /// Whether no message comes for a second, after those that were on their way.
    pub(crate) fn falls_silent(&self) -> bool {
        const ON_THEIR_WAY: u32 = 50;
        self.notify.set_read_timeout(Some(Duration::from_secs(1))).expect("a window");
        let silent = (0..ON_THEIR_WAY).any(|_| self.notify.recv(&mut [0; 4096]).is_err());
        self.notify.set_read_timeout(Some(WATCHDOG)).expect("a watchdog");
        silent
    }

    /// What the daemon wrote to standard error.
    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    /// Asks the daemon for its status, by gRPC.
    pub(crate) fn status(&self) -> v1::StatusResponse {
        let path = self.runtime_dir().join("gdrd.sock");
        block_on(async move {
            let status = HostClient::new(channel(path).await).status(v1::StatusRequest {}).await;
            status.expect("open to all").into_inner()
        })
    }
}

/// A gRPC channel to a socket.
pub(crate) async fn channel(path: PathBuf) -> Channel {
    let connector = tower::service_fn(move |_| {
        let path = path.clone();
        async move { tokio::net::UnixStream::connect(path).await.map(TokioIo::new) }
    });
    let endpoint = Endpoint::from_static("http://gdrd.invalid");
    endpoint.connect_with_connector(connector).await.expect("the daemon listens")
}

pub(crate) fn block_on<F: Future>(future: F) -> F::Output {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(future)
}

/// A daemon; killed when dropped.
pub(crate) struct Daemon(Child);

impl From<Child> for Daemon {
    fn from(child: Child) -> Self {
        Self(child)
    }
}

impl Daemon {
    pub(crate) fn pid(&self) -> u32 {
        self.0.id()
    }

    /// Numbers of the threads of that name.
    pub(crate) fn threads(&self, name: &str) -> Vec<i32> {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.pid())).expect("it runs");
        // One that ends meanwhile is none of them.
        let tasks = tasks.filter_map(|task| Some(task.ok()?.path()));
        let named = tasks
            .filter(|task| std::fs::read_to_string(task.join("comm")).is_ok_and(|comm| comm.trim().starts_with(name)));
        named.filter_map(|task| task.file_name()?.to_str()?.parse().ok()).collect()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.0.id()).ok().and_then(Pid::from_raw).expect("a pid");
        kill_process(pid, signal).expect("it runs");
    }

    pub(crate) fn wait(mut self) -> ExitStatus {
        self.0.wait().expect("it ends")
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Ended already is as good.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs a command that ends by itself; gives its code and both outputs.
pub(crate) fn run(mut command: Command) -> (Option<i32>, String) {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    let mut text = String::new();
    let mut stdout = child.stdout.take().expect("piped");
    let mut stderr = child.stderr.take().expect("piped");
    stdout.read_to_string(&mut text).expect("text");
    stderr.read_to_string(&mut text).expect("text");
    (child.wait().expect("it ends").code(), text)
}

/// Waits for a state that the daemon reaches by itself.
pub(crate) fn until(what: &str, reached: impl Fn() -> bool) {
    let start = Instant::now();
    while !reached() {
        assert!(start.elapsed() < WATCHDOG, "waited in vain for {what}");
        std::thread::yield_now();
    }
}

/// Names in a folder.
pub(crate) fn names_in(folder: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut names: Vec<String> =
        entries.filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned())).collect();
    names.sort();
    names
}

/// Shakes hands by hand: the client keeps its token to itself.
pub(crate) fn raw_session(path: &Path) -> (OwnedFd, Vec<u8>) {
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
    let socket = socket.expect("a socket");
    connect(&socket, &SocketAddrUnix::new(path).expect("a short path")).expect("it listens");
    let status = v1::Versions { api: gdrd_proto::API_VERSION, ring: 1, generation_page: 1 };
    let hello = v1::Hello { versions: Some(status), client_name: "test".to_owned() };
    let message = v1::ClientMessage { message: Some(v1::client_message::Message::Hello(hello)) };
    send(&socket, &message.encode_to_vec(), SendFlags::empty()).expect("it takes packets");
    let mut buffer = [0; 4096];
    let (_, len) = recv(&socket, &mut buffer[..], RecvFlags::empty()).expect("an answer");
    let answer = v1::DaemonMessage::decode(&buffer[..len]).expect("a message of the protocol");
    match answer.message {
        Some(v1::daemon_message::Message::Welcome(welcome)) => (socket, welcome.token),
        other => panic!("no welcome but {other:?}"),
    }
}
