//! gRPC `gdrd.v1` on a unix socket, with health and reflection.
//!
//! Role: turns messages into calls of the engine and answers back into messages. Bounds what a connection may send
//! and how much of it is worked on at a time. Must not know: what is allowed; how hardware works.

mod activity;
mod buffers;
mod caller;
mod connection;
mod goaway;
mod host;
mod page;
mod queue_pairs;
mod registrations;
mod topology;

use std::sync::Arc;
use std::time::Duration;

use gdrd_engine::Engine;
use gdrd_proto::FILE_DESCRIPTOR_SET;
use gdrd_proto::v1::buffers_server::BuffersServer;
use gdrd_proto::v1::host_server::HostServer;
use gdrd_proto::v1::queue_pairs_server::QueuePairsServer;
use gdrd_proto::v1::registrations_server::RegistrationsServer;
use gdrd_proto::v1::topology_server::TopologyServer;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tonic::transport::server::Router;
use tonic::transport::{Error, Server};
use tower::layer::util::{Identity, Stack};

pub(crate) use connection::Listening;
pub use host::{Backend, Backends, HostFacts};
pub(crate) use topology::wire_plan;

use activity::{CountCalls, Patience};

use crate::admission::Admission;
use crate::limits::{
    MAX_BATCH_REQUEST_BYTES, MAX_HEADER_BYTES, MAX_PLACEMENTS_AT_ONCE, MAX_REQUEST_BYTES, MAX_RESPONSE_BYTES,
    ServerLimits,
};
use crate::session::Sessions;
use crate::topology::Topology;

/// What the services are made of.
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) engine: Engine,
    pub(crate) sessions: Sessions,
    pub(crate) topology: Topology,
    pub(crate) facts: HostFacts,
    pub(crate) session_connections: Arc<Admission>,
}

/// Serves until `stop`; then no call is taken and those in flight have the drain timeout.
///
/// # Errors
/// When a service cannot be assembled or its socket fails for good.
pub(crate) async fn run(
    listener: Listening,
    parts: Parts,
    limits: &ServerLimits,
    stop: CancellationToken,
) -> Result<(), Error> {
    let admission = Admission::new(limits.max_grpc_connections, limits.max_grpc_connections_per_uid);
    let engine = parts.engine.clone();
    let router = router(parts, limits, &admission, &stop).await;
    let patience = Patience { first: limits.hello_timeout, idle: limits.grpc_idle };
    let connections = connection::incoming(listener, admission, patience, engine);
    let serving = router.serve_with_incoming_shutdown(connections, stop.clone().cancelled_owned());
    tokio::select! {
        served = serving => served,
        () = deadline(&stop, limits.drain_timeout) => {
            tracing::warn!("calls were still in flight at the drain timeout; their connections are closed");
            Ok(())
        }
    }
}

/// Passes some time after the daemon was told to stop.
async fn deadline(stop: &CancellationToken, timeout: Duration) {
    stop.cancelled().await;
    tokio::time::sleep(timeout).await;
}

async fn router(
    parts: Parts,
    limits: &ServerLimits,
    admission: &Arc<Admission>,
    stop: &CancellationToken,
) -> Router<Stack<CountCalls, Identity>> {
    let Parts { engine, sessions, topology, facts, session_connections } = parts;
    let calls = limits.max_calls_per_connection;
    let host = host::Host {
        engine: engine.clone(),
        topology: topology.clone(),
        facts: Arc::new(facts),
        grpc_connections: Arc::clone(admission),
        session_connections,
    };
    let placing = Arc::new(Semaphore::new(MAX_PLACEMENTS_AT_ONCE));
    let topology = topology::TopologyService { topology, engine: engine.clone(), stop: stop.clone(), placing };
    let buffers = buffers::Buffers { engine: engine.clone(), sessions: sessions.clone(), stop: stop.clone() };
    let registrations = registrations::Registrations { engine: engine.clone() };
    let queue_pairs = queue_pairs::QueuePairs { engine, sessions };
    let (reporter, health) = tonic_health::server::health_reporter();
    reporter.set_serving::<TopologyServer<topology::TopologyService>>().await;
    reporter.set_serving::<BuffersServer<buffers::Buffers>>().await;
    reporter.set_serving::<RegistrationsServer<registrations::Registrations>>().await;
    reporter.set_serving::<QueuePairsServer<queue_pairs::QueuePairs>>().await;
    reporter.set_serving::<HostServer<host::Host>>().await;
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(FILE_DESCRIPTOR_SET)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .build_v1()
        .expect("the descriptors were written by this build");
    macro_rules! bounded {
        ($service:expr) => {
            $service.max_decoding_message_size(MAX_REQUEST_BYTES).max_encoding_message_size(MAX_RESPONSE_BYTES)
        };
    }
    Server::builder()
        .layer(CountCalls)
        .concurrency_limit_per_connection(usize::try_from(calls).unwrap_or(usize::MAX))
        .max_concurrent_streams(calls)
        .http2_max_header_list_size(MAX_HEADER_BYTES)
        .add_service(bounded!(TopologyServer::new(topology)))
        .add_service(bounded!(BuffersServer::new(buffers)))
        .add_service(
            bounded!(RegistrationsServer::new(registrations)).max_decoding_message_size(MAX_BATCH_REQUEST_BYTES),
        )
        .add_service(bounded!(QueuePairsServer::new(queue_pairs)))
        .add_service(bounded!(HostServer::new(host)))
        .add_service(health)
        .add_service(reflection)
}
