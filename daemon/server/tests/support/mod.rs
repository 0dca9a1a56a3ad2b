//! A server on sockets of its own, over a simulated host, and raw clients that may behave as badly as they like.

#![allow(dead_code, reason = "each test file uses its part")]
#![allow(clippy::panic, reason = "what ends a test")]

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;

use gdrd_engine::{Engine, EngineConfig, GpuProof, GpuUuid, Hardware, HostPlan, PlannedGpu, Policy};
use gdrd_proto::v1::{self, client_message, daemon_message};
use gdrd_proto::{API_VERSION, MAX_SESSION_PACKET_BYTES};
use gdrd_server::{Backend, Backends, HostFacts, Server, ServerConfig, ServerLimits, Sockets, Topology};
use gdrd_sim::{SimHost, SimOptions};
use gdrd_topology::assemble::ReadOptions;
use gdrd_topology::model::Snapshot;
use gdrd_topology::plan::PlanOptions;
use gdrd_topology::profile;
use hyper_util::rt::TokioIo;
use prost::Message;
use rustix::io::retry_on_intr;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, recvmsg, sendmsg, socket_with, sockopt,
};
use tempfile::TempDir;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint};

/// Ends a test that would otherwise wait for ever; nothing is measured against it.
const WATCHDOG: std::time::Duration = std::time::Duration::from_secs(60);

/// Profile of the simulated host.
pub(crate) const PROFILE: &str = "dgx-a100";

/// A running server.
pub(crate) struct TestServer {
    pub(crate) engine: Engine,
    pub(crate) topology: Topology,
    pub(crate) sim: SimHost,
    stop: CancellationToken,
    running: JoinHandle<()>,
    folder: TempDir,
}

impl TestServer {
    /// Starts one with default limits.
    pub(crate) fn start() -> Self {
        Self::with(ServerLimits::default(), EngineConfig::default(), "")
    }

    /// Starts one with these limits of the server.
    pub(crate) fn with_limits(limits: ServerLimits) -> Self {
        Self::with(limits, EngineConfig::default(), "")
    }

    /// Starts one with faults in its simulated host.
    pub(crate) fn with_faults(script: &str) -> Self {
        Self::with(ServerLimits::default(), EngineConfig::default(), script)
    }

    /// Starts one in which whoever runs the test may lease.
    fn with(limits: ServerLimits, config: EngineConfig, script: &str) -> Self {
        let policy = Policy::new(rustix::process::geteuid().as_raw(), None, None);
        Self::with_all(limits, policy, config, script)
    }

    /// Starts one with this policy.
    pub(crate) fn with_policy(policy: Policy, config: EngineConfig) -> Self {
        Self::with_all(ServerLimits::default(), policy, config, "")
    }

    /// Starts one whose GPU0 has this device node, and whose sessions must prove their GPUs by device nodes.
    pub(crate) fn with_proof(major: u32, minor: u32) -> Self {
        let text = profile::builtin_text(PROFILE).expect("a built-in profile");
        assert!(text.contains(" dev=char:195:0"), "the profile says which node GPU0 has");
        let text = text.replace(" dev=char:195:0\n", &format!(" dev=char:{major}:{minor}\n"));
        let snapshot = profile::snapshot(&text, None, &ReadOptions::default()).expect("a profile");
        let policy = Policy::new(rustix::process::geteuid().as_raw(), None, None);
        let config = EngineConfig { policy, gpu_proof: GpuProof::DeviceNode, ..EngineConfig::default() };
        Self::over(snapshot, ServerLimits::default(), config, "")
    }

    /// Starts one over the built-in profile; sessions prove no GPU.
    fn with_all(limits: ServerLimits, policy: Policy, config: EngineConfig, script: &str) -> Self {
        let snapshot = profile::builtin(PROFILE).expect("a built-in profile");
        let config = EngineConfig { policy, gpu_proof: GpuProof::None, ..config };
        Self::over(snapshot, limits, config, script)
    }

    fn over(snapshot: Snapshot, limits: ServerLimits, config: EngineConfig, script: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let sim = SimHost::from_host_with(&snapshot.host, SimOptions::default()).expect("it simulates");
        sim.inject_text(script).expect("a script of the test");
        let topology = Topology::new(snapshot, PlanOptions::default());
        let hardware = Hardware {
            gpu_memory: Some(sim.gpu_memory()),
            gpu_memory_kind: gdrd_engine::MemoryKind::Memfd,
            gpu_facts: Some(sim.gpu_facts()),
            hcas: sim.hcas(),
            plan: host_plan(&topology),
        };
        let engine = Engine::start(config, hardware).expect("the engine starts");
        let facts = HostFacts {
            backends: Backends::new(vec![Backend { name: "sim", present: true, reason: "a test".to_owned() }]),
            sim_profile: PROFILE.to_owned(),
            runtime_dir: folder.path().display().to_string(),
        };
        let server =
            ServerConfig { engine: engine.clone(), topology: topology.clone(), facts, limits, resumed: Vec::new() };
        let stop = CancellationToken::new();
        let server = Server::new(sockets(&folder), server, stop.clone()).expect("its sockets are good");
        let running = tokio::spawn(async move { server.run().await.expect("it serves") });
        Self { engine, topology, sim, stop, running, folder }
    }

    pub(crate) fn grpc_path(&self) -> PathBuf {
        self.folder.path().join("gdrd.sock")
    }

    /// A raw connection to the session socket.
    pub(crate) fn session(&self) -> RawSession {
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let socket = socket.expect("a socket");
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(WATCHDOG)).expect("a watchdog");
        let address = SocketAddrUnix::new(self.folder.path().join("session.sock")).expect("a short path");
        connect(&socket, &address).expect("the server listens");
        RawSession { socket }
    }

    /// A session that has been welcomed, and its token.
    pub(crate) fn welcomed(&self) -> (RawSession, v1::Welcome) {
        let session = self.session();
        session.send(&hello(), &[]);
        let (message, fds) = session.receive().expect("an answer");
        let daemon_message::Message::Welcome(welcome) = message else { panic!("no welcome but {message:?}") };
        assert_eq!(fds.len(), 1, "the generation page comes with the welcome");
        (session, welcome)
    }

    /// A gRPC channel.
    pub(crate) async fn channel(&self) -> Channel {
        let path = self.grpc_path();
        let connector = tower::service_fn(move |_| {
            let path = path.clone();
            async move { tokio::net::UnixStream::connect(path).await.map(TokioIo::new) }
        });
        let endpoint = Endpoint::from_static("http://gdrd.invalid");
        endpoint.connect_with_connector(connector).await.expect("the server listens")
    }

    /// Stops it and waits for its end.
    pub(crate) async fn stop(self) {
        self.stop.cancel();
        self.running.await.expect("it ends well");
        tokio::task::block_in_place(|| self.engine.shutdown());
    }
}

fn sockets(folder: &TempDir) -> Sockets {
    let grpc = UnixListener::bind(folder.path().join("gdrd.sock")).expect("a socket");
    let session = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
    let session = session.expect("a socket");
    let address = SocketAddrUnix::new(folder.path().join("session.sock")).expect("a short path");
    bind(&session, &address).expect("a free name");
    listen(&session, 16).expect("it listens");
    Sockets { grpc, session }
}

fn host_plan(topology: &Topology) -> HostPlan {
    let view = topology.current();
    let gpu = |gpu: &gdrd_topology::plan::contract::GpuPlan| PlannedGpu {
        name: gpu.name.clone(),
        uuid: GpuUuid(gpu.uuid.clone().expect("a profile with uuids")),
        bdf: gpu.bdf.map(|bdf| bdf.to_string()).unwrap_or_default(),
        numa_node: gpu.numa.map(|numa| u32::from(numa.0)),
        hcas: gpu.assigned.clone(),
        bar1_bytes: None,
    };
    let node = |hca: &gdrd_topology::model::Hca| Some((hca.name.clone(), u32::from(hca.numa?.0)));
    let hca_nodes = view.snapshot().host.hcas.iter().filter_map(node).collect();
    HostPlan {
        generation: view.generation(),
        gpus: view.plan().gpus.iter().map(gpu).collect(),
        hca_nodes,
        ..HostPlan::default()
    }
}

/// Versions of this build.
pub(crate) fn versions() -> v1::Versions {
    v1::Versions {
        api: API_VERSION,
        ring: gdrd_ring::RING_VERSION,
        generation_page: gdrd_ring::GENERATION_PAGE_VERSION,
    }
}

pub(crate) fn hello() -> client_message::Message {
    client_message::Message::Hello(v1::Hello { versions: Some(versions()), client_name: "test".to_owned() })
}

pub(crate) fn ack(delivery_id: u64) -> client_message::Message {
    client_message::Message::Ack(v1::Ack { delivery_id })
}

/// A connection to the session socket, without manners.
pub(crate) struct RawSession {
    socket: OwnedFd,
}

impl RawSession {
    pub(crate) fn send(&self, message: &client_message::Message, fds: &[BorrowedFd<'_>]) {
        let message = v1::ClientMessage { message: Some(message.clone()) };
        self.send_bytes(&message.encode_to_vec(), fds).expect("the server takes packets");
    }

    pub(crate) fn send_bytes(&self, packet: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        }
        sendmsg(&self.socket, &[IoSlice::new(packet)], &mut control, SendFlags::NOSIGNAL)?;
        Ok(())
    }

    /// The next message and its fds; `None` at the end of the connection.
    pub(crate) fn receive(&self) -> Option<(daemon_message::Message, Vec<OwnedFd>)> {
        let mut buffer = [0; MAX_SESSION_PACKET_BYTES];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC;
        let mut into = [IoSliceMut::new(&mut buffer)];
        // Interrupted: the test was stopped and goes on.
        let received = match retry_on_intr(|| recvmsg(&self.socket, &mut into, &mut control, flags)) {
            Ok(received) => received,
            Err(rustix::io::Errno::CONNRESET) => return None,
            Err(error) => panic!("the server neither answers nor closes: {error}"),
        };
        let mut fds = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        let packet = buffer.get(..received.bytes).filter(|packet| !packet.is_empty())?;
        let message = v1::DaemonMessage::decode(packet).expect("a message of the protocol");
        Some((message.message.expect("a known message"), fds))
    }

    /// Whether nothing has arrived by now.
    pub(crate) fn is_silent(&self) -> bool {
        let mut buffer = [0; 1];
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        matches!(rustix::net::recv(&self.socket, &mut buffer, flags), Err(rustix::io::Errno::AGAIN))
    }

    /// The next delivery and its fds.
    pub(crate) fn delivery(&self) -> (v1::Delivery, Vec<OwnedFd>) {
        match self.receive() {
            Some((daemon_message::Message::Delivery(delivery), fds)) => (delivery, fds),
            other => panic!("no delivery but {other:?}"),
        }
    }

    /// The goodbye that ends the connection, passing over what came before.
    pub(crate) fn goodbye(&self) -> v1::Goodbye {
        loop {
            match self.receive() {
                Some((daemon_message::Message::Goodbye(goodbye), _)) => {
                    assert!(self.receive().is_none(), "nothing comes after a goodbye");
                    return goodbye;
                }
                Some(_) => {}
                None => panic!("the connection ended without a goodbye"),
            }
        }
    }
}

/// A pipe whose reader sees the end once every copy of its writer is closed, wherever it was sent.
pub(crate) struct Tracer {
    reader: OwnedFd,
    pub(crate) writer: OwnedFd,
}

impl Tracer {
    pub(crate) fn new() -> Self {
        let (reader, writer) = rustix::pipe::pipe().expect("a pipe");
        Self { reader, writer }
    }

    /// Waits until no copy of the writer is left.
    pub(crate) fn await_closed(self) {
        drop(self.writer);
        let mut byte = [0];
        assert_eq!(rustix::io::read(&self.reader, &mut byte).expect("a pipe reads"), 0);
    }
}

impl AsFd for Tracer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.writer.as_fd()
    }
}

/// The stable reason of a refusal.
pub(crate) fn reason(status: &tonic::Status) -> String {
    let reason = status.metadata().get(gdrd_server::REASON_KEY);
    reason.and_then(|reason| reason.to_str().ok()).unwrap_or_default().to_owned()
}

/// A request that carries a session's token.
pub(crate) fn with_token<T>(message: T, welcome: &v1::Welcome) -> tonic::Request<T> {
    let mut request = tonic::Request::new(message);
    let token = tonic::metadata::MetadataValue::from_bytes(&welcome.token);
    request.metadata_mut().insert_bin(gdrd_proto::SESSION_TOKEN_KEY, token);
    request
}
