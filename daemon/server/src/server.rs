//! Puts the two sockets to work and takes them out of it.

use std::os::fd::OwnedFd;

use gdrd_engine::{Engine, SessionResumed};
use thiserror::Error;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::admission::Admission;
use crate::grpc::{self, HostFacts};
use crate::limits::ServerLimits;
use crate::session::{Listener, Sessions};
use crate::topology::Topology;

/// The two listening sockets, however they came to be.
#[derive(Debug)]
pub struct Sockets {
    /// gRPC: SOCK_STREAM.
    pub grpc: std::os::unix::net::UnixListener,
    /// Sessions: SOCK_SEQPACKET.
    pub session: OwnedFd,
}

/// Everything a server needs.
#[derive(Debug)]
pub struct ServerConfig {
    /// What it serves.
    pub engine: Engine,
    /// The topology it tells of.
    pub topology: Topology,
    /// What it says of itself.
    pub facts: HostFacts,
    /// Its bounds.
    pub limits: ServerLimits,
    /// Sessions of an earlier daemon that go on.
    pub resumed: Vec<SessionResumed>,
}

/// Why a server does not serve.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ServerError {
    /// A socket could not be put under watch.
    #[error("{socket} socket")]
    Socket {
        /// gRPC or session.
        socket: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
    /// gRPC ended by itself.
    #[error("gRPC server")]
    Grpc(#[from] tonic::transport::Error),
}

/// Gives a running server other sockets in place of those that it has. Clones are one.
#[derive(Debug, Clone)]
pub struct Rebinding {
    grpc: mpsc::Sender<std::os::unix::net::UnixListener>,
    session: mpsc::Sender<OwnedFd>,
}

impl Rebinding {
    /// Another socket for gRPC. Connections stay. Does nothing once the server has ended.
    pub async fn grpc(&self, socket: std::os::unix::net::UnixListener) {
        let _ = self.grpc.send(socket).await;
    }

    /// Another socket for sessions. Sessions stay. Does nothing once the server has ended.
    pub async fn session(&self, socket: OwnedFd) {
        let _ = self.session.send(socket).await;
    }
}

/// A server whose sockets answer once it runs.
#[derive(Debug)]
pub struct Server {
    grpc: grpc::Listening,
    listener: Listener,
    rebinding: Rebinding,
    parts: grpc::Parts,
    limits: ServerLimits,
    stop: CancellationToken,
}

impl Server {
    /// Puts the sockets under the runtime's watch; must be called within it. `stop` ends the server.
    ///
    /// # Errors
    /// `Socket`.
    pub fn new(sockets: Sockets, config: ServerConfig, stop: CancellationToken) -> Result<Self, ServerError> {
        let ServerConfig { engine, topology, facts, limits, resumed } = config;
        let failed = |socket| move |source| ServerError::Socket { socket, source };
        let (grpc_sender, grpc_replaced) = mpsc::channel(1);
        let (session_sender, session_replaced) = mpsc::channel(1);
        let rebinding = Rebinding { grpc: grpc_sender, session: session_sender };
        let grpc = grpc::Listening::new(sockets.grpc, grpc_replaced).map_err(failed("gRPC"))?;
        let sessions = Sessions::default();
        let admission = Admission::new(limits.max_session_connections, limits.max_session_connections_per_uid);
        let session_connections = std::sync::Arc::clone(&admission);
        let listener = Listener::new(
            (sockets.session, session_replaced),
            admission,
            engine.clone(),
            sessions.clone(),
            limits.clone(),
            stop.clone(),
        );
        let listener = listener.map_err(failed("session"))?;
        listener.resume(resumed);
        let parts = grpc::Parts { engine, sessions, topology, facts, session_connections };
        Ok(Self { grpc, listener, rebinding, parts, limits, stop })
    }

    /// For whoever finds that its sockets have lost their names.
    #[must_use]
    pub fn rebinding(&self) -> Rebinding {
        self.rebinding.clone()
    }

    /// Serves until told to stop; then sessions are told goodbye and calls in flight have the drain timeout.
    ///
    /// # Errors
    /// `Grpc`.
    pub async fn run(self) -> Result<(), ServerError> {
        let stop_all = self.stop.clone().drop_guard();
        let sessions = tokio::spawn(self.listener.run());
        let served = grpc::run(self.grpc, self.parts, &self.limits, self.stop).await;
        // gRPC that failed takes the sessions with it.
        drop(stop_all);
        if let Err(error) = sessions.await {
            tracing::error!(%error, "the session listener ended by itself");
        }
        Ok(served?)
    }
}
