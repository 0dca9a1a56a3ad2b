//! gRPC over a real socket: what is open to all, and what is refused to whom.

mod support;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use gdrd_proto::v1::buffers_client::BuffersClient;
use gdrd_proto::v1::host_client::HostClient;
use gdrd_proto::v1::topology_client::TopologyClient;
use gdrd_proto::{SESSION_TOKEN_KEY, v1};
use gdrd_server::ServerLimits;
use support::{PROFILE, TestServer, reason};
use tonic::metadata::MetadataValue;
use tonic::{Code, Request, Status};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

#[tokio::test(flavor = "multi_thread")]
async fn status_tells_versions_backends_and_profile() {
    let server = TestServer::start();
    let status = HostClient::new(server.channel().await).status(v1::StatusRequest {}).await;
    let status = status.expect("open to all").into_inner();
    assert_eq!(status.sim_profile, PROFILE);
    assert_eq!(status.versions, Some(support::versions()));
    assert_eq!(status.backends.first().map(|backend| (backend.name.as_str(), backend.present)), Some(("sim", true)));
    assert_eq!(status.topology_generation, 1);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn topology_comes_with_its_plan_and_reads_back() {
    let server = TestServer::start();
    let topology = TopologyClient::new(server.channel().await).get(v1::GetTopologyRequest {}).await;
    let topology = topology.expect("open to all").into_inner();
    let plan = topology.plan.expect("a plan");
    assert_eq!(plan.gpus.len(), 8);
    assert!(plan.gpus.iter().all(|gpu| !gpu.assigned.is_empty()));
    assert_eq!(plan.source.expect("a source").kind, "profile");
    let options = gdrd_topology::assemble::ReadOptions::default();
    let again = gdrd_topology::profile::snapshot(&topology.host_profile, None, &options).expect("it reads back");
    assert_eq!(again.host.gpus.len(), 8);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn watcher_gets_the_present_and_then_each_change() {
    let server = TestServer::start();
    let watch = TopologyClient::new(server.channel().await).watch(v1::WatchTopologyRequest {}).await;
    let mut watch = watch.expect("open to all").into_inner();
    let first = watch.message().await.expect("a message").expect("the present");
    assert_eq!(first.generation, 1);
    let mut snapshot = server.topology.current().snapshot().clone();
    snapshot.host.hcas.pop();
    let _change = server.topology.update(snapshot);
    let second = watch.message().await.expect("a message").expect("the change");
    assert_eq!(second.generation, 2);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn explanation_names_winners_first_and_why_each_other_lost() {
    let server = TestServer::start();
    let mut client = TopologyClient::new(server.channel().await);
    let explained = client.explain(v1::ExplainRequest { gpu: "GPU0".to_owned() }).await.expect("open to all");
    let explained = explained.into_inner();
    assert_eq!(explained.gpu, "GPU0");
    assert!(explained.candidates.first().is_some_and(|candidate| candidate.assigned));
    let losers: Vec<_> = explained.candidates.iter().filter(|candidate| !candidate.assigned).collect();
    assert!(!losers.is_empty() && losers.iter().all(|loser| !loser.reason.is_empty()));
    let refused = client.explain(v1::ExplainRequest { gpu: "GPU99".to_owned() }).await.expect_err("no such gpu");
    assert_eq!((refused.code(), reason(&refused).as_str()), (Code::NotFound, "GPU_UNKNOWN"));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn placement_gives_each_gpu_a_nic_and_avoids_what_is_taken() {
    let server = TestServer::start();
    let mut client = TopologyClient::new(server.channel().await);
    let request = v1::PlaceRequest { gpus: 2, exclude_gpus: vec!["GPU0".to_owned()], ..Default::default() };
    let placed = client.place(request).await.expect("open to all").into_inner();
    let best = placed.placements.first().expect("a free set");
    assert_eq!((best.gpus.len(), best.nics.len()), (2, 2));
    assert!(placed.placements.iter().all(|set| !set.gpus.contains(&"GPU0".to_owned())));
    assert!(placed.placements.is_sorted_by(|a, b| a.score >= b.score));
    let none = client.place(v1::PlaceRequest { gpus: 9, ..Default::default() }).await.expect("an answer").into_inner();
    assert!(none.placements.is_empty() && !none.reason.is_empty());
    let refused = client.place(v1::PlaceRequest::default()).await.expect_err("no gpu wanted");
    assert_eq!((refused.code(), reason(&refused).as_str()), (Code::InvalidArgument, "BAD_ARGUMENT"));
    let request = v1::PlaceRequest { gpus: 1, exclude_nics: vec!["mlx9".to_owned()], ..Default::default() };
    let refused = client.place(request).await.expect_err("no such nic");
    assert_eq!((refused.code(), reason(&refused).as_str()), (Code::NotFound, "NIC_UNKNOWN"));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn leases_need_a_session() {
    let server = TestServer::start();
    let mut buffers = BuffersClient::new(server.channel().await);
    let refused = buffers.release(v1::ReleaseRequest::default()).await.expect_err("no token");
    assert_eq!((refused.code(), reason(&refused).as_str()), (Code::Unauthenticated, "SESSION_TOKEN_MISSING"));
    for token in [&[7; 31][..], b""] {
        let mut request = Request::new(v1::ReleaseRequest::default());
        request.metadata_mut().insert_bin(SESSION_TOKEN_KEY, MetadataValue::from_bytes(token));
        let refused = buffers.release(request).await.expect_err("no token");
        assert_eq!((refused.code(), reason(&refused).as_str()), (Code::Unauthenticated, "SESSION_TOKEN_INVALID"));
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn oversized_message_is_refused_and_the_connection_stays() {
    let server = TestServer::start();
    let mut client = TopologyClient::new(server.channel().await);
    let refused = client.explain(v1::ExplainRequest { gpu: "x".repeat(1 << 20) }).await.expect_err("too long");
    assert_eq!(refused.code(), Code::OutOfRange);
    assert!(client.get(v1::GetTopologyRequest {}).await.is_ok());
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn advice_on_a_path_names_its_kind_its_carriers_and_the_next_best_way() {
    use v1::advise_path_request::To;
    let server = TestServer::start();
    let mut topology = TopologyClient::new(server.channel().await);
    let mut ask = async |from: &str, to: Option<To>| {
        let request = v1::AdvisePathRequest { from: from.to_owned(), to };
        topology.advise_path(request).await.map(tonic::Response::into_inner)
    };
    let remote = ask("GPU0", Some(To::Remote(v1::RemoteHost {}))).await.expect("GPU0 has a NIC");
    assert_eq!((remote.kind.as_str(), remote.to.as_str(), remote.generation), ("gpudirect-rdma", "remote", 1));
    assert!(!remote.via.is_empty() && remote.gbps.is_some() && !remote.reason.is_empty());
    assert_eq!(remote.fallback.expect("a next best way").kind, "staged");
    let drive = ask("GPU0", Some(To::Drive(String::new()))).await.expect("the nearest drive");
    assert_eq!(drive.kind, "gpudirect-storage");
    for (from, to, wanted) in [
        ("GPU99", Some(To::Remote(v1::RemoteHost {})), (Code::NotFound, "GPU_UNKNOWN")),
        ("GPU0", Some(To::Gpu("GPU99".to_owned())), (Code::NotFound, "GPU_UNKNOWN")),
        ("GPU0", Some(To::Drive("nvme99".to_owned())), (Code::NotFound, "DRIVE_UNKNOWN")),
        ("GPU0", None, (Code::InvalidArgument, "BAD_ARGUMENT")),
    ] {
        let refused = ask(from, to).await.expect_err("there is no such way");
        assert_eq!((refused.code(), reason(&refused).as_str()), wanted);
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn health_and_reflection_answer() {
    let server = TestServer::start();
    let channel = server.channel().await;
    let check = HealthCheckRequest { service: "gdrd.v1.Buffers".to_owned() };
    let health = HealthClient::new(channel.clone()).check(check).await.expect("health answers").into_inner();
    assert_eq!(health.status(), ServingStatus::Serving);
    let mut reflection = tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient::new(channel);
    let list = tonic_reflection::pb::v1::ServerReflectionRequest {
        host: String::new(),
        message_request: Some(tonic_reflection::pb::v1::server_reflection_request::MessageRequest::ListServices(
            String::new(),
        )),
    };
    let answers = reflection.server_reflection_info(tokio_stream::once(list)).await.expect("reflection answers");
    let answer = answers.into_inner().message().await.expect("a message").expect("an answer");
    assert!(format!("{answer:?}").contains("gdrd.v1.QueuePairs"));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_beyond_the_bound_are_refused_by_name_and_others_go_on() {
    // Nobody's time is up meanwhile.
    let hello_timeout = Duration::from_secs(3600);
    let server = TestServer::with_limits(ServerLimits {
        max_grpc_connections_per_uid: 2,
        hello_timeout,
        ..ServerLimits::default()
    });
    let mut client = HostClient::new(server.channel().await);
    client.status(v1::StatusRequest {}).await.expect("the first connection");
    // Half-open: takes the second place and says nothing.
    let silent = UnixStream::connect(server.grpc_path()).expect("it is accepted");
    let mut third = UnixStream::connect(server.grpc_path()).expect("it is accepted");
    let mut heard = Vec::new();
    third.read_to_end(&mut heard).expect("the third makes no call, is told, and closed");
    assert!(String::from_utf8_lossy(&heard).contains("CONNECTIONS_EXHAUSTED: uid "), "{heard:?}");
    let mut refused = Status::ok("");
    // One whose call comes too late for an answer is closed without a name.
    for _ in 0..20 {
        let mut other = HostClient::new(server.channel().await);
        refused = other.status(v1::StatusRequest {}).await.expect_err("one too many");
        if refused.code() == Code::ResourceExhausted {
            break;
        }
    }
    assert_eq!((refused.code(), reason(&refused).as_str()), (Code::ResourceExhausted, "CONNECTIONS_EXHAUSTED"));
    client.status(v1::StatusRequest {}).await.expect("the first goes on");
    drop(silent);
    server.stop().await;
}

/// Whether the server has more connections than these, beside the one that asks; also where that one was too slow to ask.
async fn has_more_connections_than(server: &TestServer, others: f64) -> bool {
    // A new one each time: nothing it did before can end it.
    let stats = HostClient::new(server.channel().await).stats(v1::StatsRequest {}).await;
    let Ok(stats) = stats else { return true };
    let stats = stats.into_inner().stats;
    stats.iter().find(|stat| stat.name == "gdrd_grpc_connections").expect("a gauge").value > others + 1.0
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_that_begin_no_call_in_time_give_their_places_back() {
    let hello_timeout = Duration::from_secs(1);
    let server = TestServer::with_limits(ServerLimits { hello_timeout, ..ServerLimits::default() });
    let mut silent: Vec<_> = (0..8).map(|_| UnixStream::connect(server.grpc_path()).expect("it is accepted")).collect();
    // Half of them get as far as the preface and settings of HTTP/2 (RFC 9113, 3.4).
    for polite in silent.iter_mut().take(4) {
        polite.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").expect("it is sent");
    }
    for mut connection in silent {
        let mut heard = Vec::new();
        let _ = connection.read_to_end(&mut heard);
    }
    while has_more_connections_than(&server, 0.0).await {}
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_connection_is_closed_and_made_again_but_never_while_it_watches() {
    let (grpc_idle, hello_timeout) = (Duration::from_millis(20), Duration::from_secs(5));
    let server = TestServer::with_limits(ServerLimits { grpc_idle, hello_timeout, ..ServerLimits::default() });
    let mut watch = TopologyClient::new(server.channel().await).watch(v1::WatchTopologyRequest {}).await;
    let watch = watch.as_mut().expect("open to all").get_mut();
    assert_eq!(watch.message().await.expect("a message").expect("the present").generation, 1);
    let mut idle = HostClient::new(server.channel().await);
    idle.status(v1::StatusRequest {}).await.expect("open to all");
    // The watch and whoever asks are left; by then the watch has lived for far longer than an idle connection.
    while has_more_connections_than(&server, 1.0).await {}
    // A client that has yet to see the end of its connection asks twice.
    if idle.status(v1::StatusRequest {}).await.is_err() {
        idle.status(v1::StatusRequest {}).await.expect("it connects again by itself");
    }
    let mut snapshot = server.topology.current().snapshot().clone();
    snapshot.host.hcas.pop();
    let _change = server.topology.update(snapshot);
    assert_eq!(watch.message().await.expect("a message").expect("the change").generation, 2);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn garbage_on_the_grpc_socket_ends_that_connection_alone() {
    let server = TestServer::start();
    let mut client = HostClient::new(server.channel().await);
    let mut garbage = UnixStream::connect(server.grpc_path()).expect("it is accepted");
    garbage.write_all(&[0xff; 4096]).expect("it is sent");
    let mut answer = Vec::new();
    // Whatever HTTP/2 says to it, it ends.
    let _ = garbage.read_to_end(&mut answer);
    client.status(v1::StatusRequest {}).await.expect("others go on");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn page_token_that_no_response_gave_is_refused() {
    let server = TestServer::start();
    let mut buffers = BuffersClient::new(server.channel().await);
    let request = v1::ListLeasesRequest { page_size: 0, page_token: "../etc".to_owned() };
    let refused = buffers.list(request).await.expect_err("no such page");
    assert_eq!((refused.code(), reason(&refused).as_str()), (Code::InvalidArgument, "BAD_ARGUMENT"));
    server.stop().await;
}
