//! The connection to a daemon: topology and host calls, which need no session and survive a restart of the daemon.

use std::io;
use std::path::Path;
use std::time::Duration;

use gdrd_proto::v1;
use gdrd_proto::v1::host_client::HostClient;
use gdrd_proto::v1::topology_client::TopologyClient;
use gdrd_stream::Stream;
use hyper_util::rt::TokioIo;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Response, Status};
use tower::service_fn;

use crate::calls::CallContext;
use crate::error::ClientError;
use crate::options::DEFAULT_DEADLINE;
use crate::runtime_dir::RuntimeDir;
use crate::session::Session;
use crate::topology::TopologyWatch;

/// How to connect.
#[derive(Debug, Clone)]
pub struct ClientOptions {
    runtime_dir: Option<RuntimeDir>,
    deadline: Duration,
    kept_mappings_bytes: u64,
}

/// Memory that a session keeps mapped after its release where the caller says nothing.
const KEPT_MAPPINGS_BYTES: u64 = 4 << 30;

/// Pause between two tries to connect to a daemon whose backlog is full.
const BACKLOG_PAUSE: Duration = Duration::from_millis(10);

impl Default for ClientOptions {
    fn default() -> Self {
        Self { runtime_dir: None, deadline: DEFAULT_DEADLINE, kept_mappings_bytes: KEPT_MAPPINGS_BYTES }
    }
}

impl ClientOptions {
    /// Uses this runtime folder instead of looking for one.
    #[must_use]
    pub fn runtime_dir(mut self, dir: RuntimeDir) -> Self {
        self.runtime_dir = Some(dir);
        self
    }

    /// Longest time that any one call may take; 30 s by default.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// How much released memory each session keeps mapped, bytes, for the case that it is lent again: that saves importing
    /// and mapping it, which takes longer than a warm acquire. 4 GiB by default, 0 for none. The daemon tells when it frees such
    /// memory, and then it is unmapped: by this process' tokio runtime, so that a GPU's memory stays in use for as long as
    /// the runtime does not run.
    #[must_use]
    pub fn kept_mappings(mut self, bytes: u64) -> Self {
        self.kept_mappings_bytes = bytes;
        self
    }

    /// Connects and checks that the daemon speaks this client's API version.
    ///
    /// # Errors
    /// As [`Client::status`]; [`ClientError::NoDaemon`] where no folder is given and none has a daemon,
    /// [`ClientError::Version`], [`ClientError::Refused`] where there are too many connections;
    /// [`ClientError::InvalidArgument`] for a folder whose name is too long.
    pub async fn connect(self) -> Result<Client, ClientError> {
        let dir = self.runtime_dir.map_or_else(RuntimeDir::locate, Ok)?;
        let socket = dir.grpc_socket();
        dir.check_length()?;
        let target = socket.clone();
        let connector = service_fn(move |_| {
            let path = target.clone();
            async move { connect_patiently(&path).await.map(TokioIo::new) }
        });
        // The socket is the connector's to know; an authority is what HTTP/2 asks for.
        let endpoint = Endpoint::from_static("http://localhost").connect_timeout(self.deadline);
        // Lazy, so that the channel connects again by itself when the daemon comes back.
        let channel = endpoint.connect_with_connector_lazy(connector);
        let kept = self.kept_mappings_bytes;
        let client = Client { channel, context: CallContext { deadline: self.deadline, socket }, dir, kept };
        let status = client.status().await?;
        check_api(status.versions.unwrap_or_default().api)?;
        Ok(client)
    }
}

/// Connects, also where the daemon's backlog is full: no poll event tells when it has room. The endpoint bounds the time.
async fn connect_patiently(path: &Path) -> io::Result<Stream> {
    loop {
        match Stream::connect(path).await {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => tokio::time::sleep(BACKLOG_PAUSE).await,
            connected => return connected,
        }
    }
}

fn check_api(daemon: u32) -> Result<(), ClientError> {
    let client = gdrd_proto::API_VERSION;
    if daemon == client { Ok(()) } else { Err(ClientError::Version { what: "API", daemon, client }) }
}

/// A connection to the daemon. Cheap to clone; clones share it.
#[derive(Debug, Clone)]
pub struct Client {
    channel: Channel,
    context: CallContext,
    dir: RuntimeDir,
    /// Memory that each session keeps mapped, bytes.
    kept: u64,
}

impl Client {
    /// Connects to the daemon that [`RuntimeDir::locate`] finds.
    ///
    /// # Errors
    /// As [`ClientOptions::connect`].
    pub async fn connect() -> Result<Self, ClientError> {
        ClientOptions::default().connect().await
    }

    /// The daemon's runtime folder.
    #[must_use]
    pub fn runtime_dir(&self) -> &RuntimeDir {
        &self.dir
    }

    /// The gRPC channel, for calls that this crate does not wrap.
    #[must_use]
    pub fn channel(&self) -> Channel {
        self.channel.clone()
    }

    /// Opens a session: the lifeline of buffers and queue pairs. `name` is shown in lists, at most 64 bytes.
    ///
    /// # Errors
    /// [`ClientError::Unreachable`], [`ClientError::NotPermitted`], [`ClientError::ConnectionLost`], [`ClientError::Version`],
    /// [`ClientError::SessionRefused`], [`ClientError::Deadline`], [`ClientError::Io`].
    pub async fn open_session(&self, name: &str) -> Result<Session, ClientError> {
        let socket = self.dir.session_socket();
        Session::open(&socket, name, self.channel.clone(), self.context.clone(), self.kept).await
    }

    /// What the daemon is, which backends it has, and why others are absent.
    ///
    /// # Errors
    /// [`ClientError::Unreachable`], [`ClientError::NotPermitted`], [`ClientError::ConnectionLost`], [`ClientError::Deadline`],
    /// [`ClientError::Refused`], [`ClientError::Io`] where this process lacks what a connection needs.
    pub async fn status(&self) -> Result<v1::StatusResponse, ClientError> {
        self.ask("Host.Status", v1::StatusRequest {}, async |channel, request| {
            HostClient::new(channel).status(request).await
        })
        .await
    }

    /// The daemon's counters and gauges.
    ///
    /// # Errors
    /// As [`Client::status`].
    pub async fn stats(&self) -> Result<Vec<v1::Stat>, ClientError> {
        let answer = self.ask("Host.Stats", v1::StatsRequest {}, async |channel, request| {
            HostClient::new(channel).stats(request).await
        });
        Ok(answer.await?.stats)
    }

    /// Whose the memory of each GPU is, in PCI order.
    ///
    /// # Errors
    /// As [`Client::status`].
    pub async fn gpu_memory(&self) -> Result<Vec<v1::GpuMemoryUse>, ClientError> {
        let answer = self.ask("Host.GpuMemory", v1::GpuMemoryRequest {}, async |channel, request| {
            HostClient::new(channel).gpu_memory(request).await
        });
        Ok(answer.await?.gpus)
    }

    /// Has the daemon let go of a GPU (name, UUID or BDF; empty for all), or serve it again. The answer has the UUIDs, and
    /// what was still under way on them after the 3 s that the daemon waits. For root and gdrd-admin.
    ///
    /// # Errors
    /// As [`Client::status`]; [`ClientError::Refused`] for others and for an unknown GPU.
    pub async fn drain(&self, gpu: &str, resume: bool) -> Result<v1::DrainResponse, ClientError> {
        let request = v1::DrainRequest { gpu: gpu.to_owned(), resume };
        self.ask("Host.Drain", request, async |channel, request| HostClient::new(channel).drain(request).await).await
    }

    /// Has the daemon put in force the pairing that it would make anew, where pairs that stuck are worse. For root and
    /// gdrd-admin.
    ///
    /// # Errors
    /// As [`Client::status`]; [`ClientError::Refused`] for others.
    pub async fn apply_plan(&self) -> Result<v1::ApplyPlanResponse, ClientError> {
        let request = v1::ApplyPlanRequest {};
        self.ask("Host.ApplyPlan", request, async |channel, request| HostClient::new(channel).apply_plan(request).await)
            .await
    }

    /// Has the daemon prove by loopback transfers that HCAs move memory of GPUs and of the host. For administrators.
    ///
    /// # Errors
    /// As [`Client::status`]; [`ClientError::Refused`] for others and for unknown names.
    pub async fn probe(&self, gpu: &str, hca: &str) -> Result<Vec<v1::ProbedPair>, ClientError> {
        self.ask_probe(v1::ProbeRequest { gpu: gpu.to_owned(), hca: hca.to_owned(), known: false }).await
    }

    /// What earlier probes found; probes nothing.
    ///
    /// # Errors
    /// As [`Client::status`].
    pub async fn probed(&self, gpu: &str, hca: &str) -> Result<Vec<v1::ProbedPair>, ClientError> {
        self.ask_probe(v1::ProbeRequest { gpu: gpu.to_owned(), hca: hca.to_owned(), known: true }).await
    }

    async fn ask_probe(&self, request: v1::ProbeRequest) -> Result<Vec<v1::ProbedPair>, ClientError> {
        let answer =
            self.ask("Host.Probe", request, async |channel, request| HostClient::new(channel).probe(request).await);
        Ok(answer.await?.pairs)
    }

    /// The current topology and plan.
    ///
    /// # Errors
    /// As [`Client::status`].
    pub async fn topology(&self) -> Result<v1::GetTopologyResponse, ClientError> {
        self.ask("Topology.Get", v1::GetTopologyRequest {}, async |channel, request| {
            TopologyClient::new(channel).get(request).await
        })
        .await
    }

    /// The current topology, then each later one, across restarts of the daemon.
    #[must_use]
    pub fn watch_topology(&self) -> TopologyWatch {
        TopologyWatch::new(self.channel.clone(), self.context.clone())
    }

    /// Why a GPU, named by name, UUID or BDF, has the NICs it has.
    ///
    /// # Errors
    /// As [`Client::status`]; refused for an unknown GPU.
    pub async fn explain(&self, gpu: &str) -> Result<v1::ExplainResponse, ClientError> {
        let request = v1::ExplainRequest { gpu: gpu.to_owned() };
        self.ask("Topology.Explain", request, async |channel, request| {
            TopologyClient::new(channel).explain(request).await
        })
        .await
    }

    /// The way that data should go from a GPU, and why.
    ///
    /// # Errors
    /// As [`Client::status`]; refused for an unknown GPU or drive.
    pub async fn advise_path(&self, request: v1::AdvisePathRequest) -> Result<v1::AdvisePathResponse, ClientError> {
        self.ask("Topology.AdvisePath", request, async |channel, request| {
            TopologyClient::new(channel).advise_path(request).await
        })
        .await
    }

    /// Scored sets of GPUs and NICs, best first.
    ///
    /// # Errors
    /// As [`Client::status`]; refused for more GPUs than there are.
    pub async fn place(&self, request: v1::PlaceRequest) -> Result<v1::PlaceResponse, ClientError> {
        self.ask("Topology.Place", request, async |channel, request| TopologyClient::new(channel).place(request).await)
            .await
    }

    /// An empty call: neither side does any work but the call itself. The floor of every measurement of calls.
    ///
    /// # Errors
    /// As [`Client::status`].
    pub async fn ping(&self) -> Result<(), ClientError> {
        const CALL: &str = "Health.Check";
        let refused = |status| self.context.error(CALL, status);
        let mut grpc = tonic::client::Grpc::new(self.channel.clone());
        let not_ready = |source| ClientError::of_connection(&self.context, CALL, Box::new(source));
        grpc.ready().await.map_err(not_ready)?;
        // grpc/health/v1/health.proto: an empty request asks for the whole server; the reply's one field is skipped.
        let codec = tonic_prost::ProstCodec::<(), ()>::default();
        let path = tonic::codegen::http::uri::PathAndQuery::from_static("/grpc.health.v1.Health/Check");
        grpc.unary(self.context.request(()), path, codec).await.map(drop).map_err(refused)
    }

    /// Makes a call that comes to the same when it is made twice, as a drain does and a probe. It is tried twice: the first
    /// may meet the dead connection to a daemon that has been restarted since.
    async fn ask<Q: Clone, A>(
        &self,
        call: &'static str,
        message: Q,
        send: impl AsyncFn(Channel, Request<Q>) -> Result<Response<A>, Status>,
    ) -> Result<A, ClientError> {
        let attempt = async || {
            let answer = send(self.channel.clone(), self.context.request(message.clone())).await;
            answer.map(Response::into_inner).map_err(|status| self.context.error(call, status))
        };
        match attempt().await {
            Err(error) if error.is_lost_connection() => attempt().await,
            answer => answer,
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

    use super::*;

    #[tokio::test]
    async fn a_full_backlog_is_waited_for_until_the_deadline() {
        let folder = tempfile::tempdir().unwrap();
        let dir = RuntimeDir::new(folder.path());
        let address = SocketAddrUnix::new(dir.grpc_socket()).unwrap();
        let socket = || {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap()
        };
        let daemon = socket();
        rustix::net::bind(&daemon, &address).unwrap();
        rustix::net::listen(&daemon, 0).unwrap();
        let first = socket();
        rustix::net::connect(&first, &address).unwrap();
        let options = ClientOptions::default().runtime_dir(dir.clone()).deadline(Duration::from_millis(50));
        let error = options.connect().await.unwrap_err();
        assert!(matches!(error, ClientError::Deadline { .. }), "{error:?}");
        // With room again it connects, and is not answered.
        let connecting = tokio::spawn(async move { connect_patiently(&dir.grpc_socket()).await });
        tokio::task::yield_now().await;
        drop(rustix::net::accept(&daemon).unwrap());
        connecting.await.unwrap().unwrap();
    }
}
