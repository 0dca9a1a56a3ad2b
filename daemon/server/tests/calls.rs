//! Calls on the session socket: one packet there, one back with its fd; the same refusals as on gRPC.

#![allow(clippy::panic, reason = "what ends a test")]

mod support;

use std::os::fd::{AsFd as _, OwnedFd};

use gdrd_proto::v1::acquire_request::Memory;
use gdrd_proto::v1::buffers_client::BuffersClient;
use gdrd_proto::v1::topology_client::TopologyClient;
use gdrd_proto::v1::{self, answer, call, client_message, daemon_message};
use gdrd_server::ServerLimits;
use support::{RawSession, TestServer, Tracer, reason, with_token};
use tonic::{Code, Status};

const SIZE_BYTES: u64 = 2 << 20;

fn on_gpu(gpu: &str) -> v1::AcquireRequest {
    v1::AcquireRequest { size_bytes: SIZE_BYTES, memory: Some(Memory::Gpu(gpu.to_owned())), ..Default::default() }
}

fn release_of(lease_id: u64) -> call::Call {
    call::Call::Release(v1::ReleaseRequest { lease_id, generation: 0 })
}

fn send(session: &RawSession, call: v1::Call) {
    session.send(&client_message::Message::Call(call), &[]);
}

/// Asks without acknowledging anything.
fn ask(session: &RawSession, request_id: u64, call: call::Call) {
    send(session, v1::Call { request_id, call: Some(call), ..Default::default() });
}

/// The next answer: to which call, what, and its fds.
fn answer(session: &RawSession) -> (u64, answer::Answer, Vec<OwnedFd>) {
    match session.receive() {
        Some((daemon_message::Message::Answer(v1::Answer { request_id, answer: Some(answer) }), fds)) => {
            (request_id, answer, fds)
        }
        other => panic!("no answer but {other:?}"),
    }
}

fn lent(session: &RawSession, request_id: u64) -> (v1::Lease, OwnedFd) {
    match answer(session) {
        (answered, answer::Answer::Lease(lease), mut fds) if answered == request_id && fds.len() == 1 => {
            (lease, fds.remove(0))
        }
        other => panic!("call {request_id} was answered {other:?}"),
    }
}

fn refused(session: &RawSession, request_id: u64) -> v1::Refused {
    match answer(session) {
        (answered, answer::Answer::Refused(refused), fds) if answered == request_id && fds.is_empty() => refused,
        other => panic!("call {request_id} was answered {other:?}"),
    }
}

fn released(session: &RawSession, request_id: u64) {
    let got = answer(session);
    assert!(matches!(got, (id, answer::Answer::Released(_), _) if id == request_id), "{got:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn lease_comes_whole_in_one_packet_and_goes_by_another() {
    let server = TestServer::start();
    let (session, welcome) = server.welcomed();
    ask(&session, 1, call::Call::Acquire(v1::AcquireRequest { label: "mine".into(), ..on_gpu("GPU0") }));
    let (lease, memory) = lent(&session, 1);
    assert_eq!((lease.size_bytes, lease.memory_kind.as_str(), lease.label.as_str()), (SIZE_BYTES, "memfd", "mine"));
    assert_ne!(lease.delivery_id, 0);
    let size = rustix::fs::fstat(&memory).expect("an fd").st_size;
    assert_eq!(u64::try_from(size), Ok(SIZE_BYTES));
    // What gRPC tells of it is the same, keys included.
    let mut buffers = BuffersClient::new(server.channel().await);
    let get = v1::GetLeaseRequest { lease_id: lease.lease_id };
    let told = buffers.get(with_token(get, &welcome)).await.expect("it is held").into_inner();
    assert!(lease.registrations.iter().all(|registration| registration.rkey != 0));
    assert_eq!(lease, v1::Lease { delivery_id: lease.delivery_id, tenant: String::new(), ..told });
    let mine = Some(release_of(lease.lease_id));
    send(&session, v1::Call { request_id: 2, ack_delivery_id: lease.delivery_id, call: mine, timeout_ms: 0 });
    released(&session, 2);
    ask(&session, 3, release_of(lease.lease_id));
    assert_eq!(refused(&session, 3).reason, "LEASE_UNKNOWN");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_exclusive_placement_leaves_out_what_others_hold_until_they_release_it() {
    let server = TestServer::start();
    let (session, _welcome) = server.welcomed();
    let mut topology = TopologyClient::new(server.channel().await);
    let mut place = async |gpus, exclusive| {
        let request = v1::PlaceRequest { gpus, exclusive, max_results: 64, ..Default::default() };
        topology.place(request).await.expect("open to all").into_inner()
    };
    let before = place(1, true).await;
    assert_eq!(before, place(1, false).await, "nobody holds anything");
    ask(&session, 1, call::Call::Acquire(on_gpu("GPU0")));
    let (lease, _memory) = lent(&session, 1);
    assert_eq!(place(1, false).await, before, "sharing is allowed unless it is not wanted");
    let alone = place(1, true).await.placements;
    let nics: Vec<&String> = lease.registrations.iter().map(|registration| &registration.hca).collect();
    assert_eq!(alone.len(), 7);
    assert!(!nics.is_empty());
    assert!(alone.iter().all(|set| !set.gpus.contains(&"GPU0".to_owned())), "{alone:?}");
    assert!(alone.iter().all(|set| !set.nics.iter().any(|nic| nics.contains(&nic))), "{alone:?}");
    let none = place(8, true).await;
    assert!(none.placements.is_empty() && none.reason.ends_with("leased: GPU0"), "{}", none.reason);
    let mine = Some(release_of(lease.lease_id));
    send(&session, v1::Call { request_id: 2, ack_delivery_id: lease.delivery_id, call: mine, timeout_ms: 0 });
    released(&session, 2);
    assert_eq!(place(1, true).await, before);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn second_holder_has_a_descriptor_of_its_own() {
    let server = TestServer::start();
    let ((first, _), (second, _)) = (server.welcomed(), server.welcomed());
    ask(&first, 1, call::Call::Acquire(on_gpu("GPU0")));
    let (lease, memory) = lent(&first, 1);
    ask(&second, 1, call::Call::Open(v1::OpenRequest { lease_id: lease.lease_id }));
    let (opened, same) = lent(&second, 1);
    assert_eq!((opened.lease_id, opened.holders), (lease.lease_id, 2));
    let inode = |fd: &OwnedFd| rustix::fs::fstat(fd).expect("an fd").st_ino;
    assert_eq!(inode(&memory), inode(&same));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_delivery_is_unacknowledged_at_a_time_and_answers_without_fds_overtake() {
    let server = TestServer::start();
    let (session, _welcome) = server.welcomed();
    ask(&session, 1, call::Call::Acquire(on_gpu("GPU0")));
    let (first, _memory) = lent(&session, 1);
    // Opening it once more is answered at once, as far as the engine goes.
    ask(&session, 2, call::Call::Open(v1::OpenRequest { lease_id: first.lease_id }));
    ask(&session, 3, release_of(99));
    assert_eq!(refused(&session, 3).reason, "LEASE_UNKNOWN");
    assert!(session.is_silent(), "the second fd waits for the acknowledgement of the first");
    let acknowledging = v1::Call { request_id: 4, ack_delivery_id: first.delivery_id, ..Default::default() };
    send(&session, v1::Call { call: Some(release_of(99)), ..acknowledging });
    let (second, _memory) = lent(&session, 2);
    assert_eq!((second.lease_id, second.delivery_id), (first.lease_id, first.delivery_id + 1));
    assert_eq!(refused(&session, 4).reason, "LEASE_UNKNOWN");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn refusals_are_those_of_grpc() {
    let server = TestServer::start();
    let (session, welcome) = server.welcomed();
    let mut buffers = BuffersClient::new(server.channel().await);
    let told = |status: Status| v1::Refused {
        code: i32::from(status.code()),
        reason: reason(&status),
        message: status.message().to_owned(),
    };
    let nowhere = v1::AcquireRequest { size_bytes: 1, ..Default::default() };
    let nothing = v1::AcquireRequest { size_bytes: 0, ..on_gpu("GPU0") };
    let long = v1::AcquireRequest { label: "x".repeat(1000), ..on_gpu("GPU0") };
    let unknown = v1::AcquireRequest { hcas: vec!["mlx5_77".into()], ..on_gpu("GPU0") };
    for request in [nowhere, nothing, long, unknown, on_gpu("GPU99"), on_gpu("")] {
        let there = buffers.acquire(with_token(request.clone(), &welcome)).await.expect_err("it makes no sense");
        ask(&session, 1, call::Call::Acquire(request));
        assert_eq!(refused(&session, 1), told(there));
    }
    let there = buffers.open(with_token(v1::OpenRequest { lease_id: 7 }, &welcome)).await.expect_err("unknown");
    ask(&session, 2, call::Call::Open(v1::OpenRequest { lease_id: 7 }));
    assert_eq!(refused(&session, 2), told(there));
    let (other, _) = server.welcomed();
    ask(&other, 1, call::Call::Acquire(on_gpu("GPU0")));
    let lease_id = lent(&other, 1).0.lease_id;
    let release = v1::ReleaseRequest { lease_id, generation: 0 };
    let there = buffers.release(with_token(release, &welcome)).await.expect_err("another session's");
    ask(&session, 3, release_of(lease_id));
    assert_eq!(refused(&session, 3), told(there));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn call_of_an_unknown_kind_is_refused_and_the_session_goes_on() {
    let server = TestServer::start();
    let (session, _welcome) = server.welcomed();
    send(&session, v1::Call { request_id: 5, ..Default::default() });
    assert_eq!(refused(&session, 5).reason, "BAD_ARGUMENT");
    ask(&session, 6, call::Call::Acquire(on_gpu("GPU0")));
    lent(&session, 6);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn call_before_hello_or_with_fds_or_a_false_acknowledgement_ends_the_session() {
    let server = TestServer::start();
    let early = server.session();
    ask(&early, 1, call::Call::Acquire(on_gpu("GPU0")));
    assert_eq!(early.goodbye().reason, "PROTOCOL_VIOLATED");
    let (false_ack, _) = server.welcomed();
    send(&false_ack, v1::Call { request_id: 1, ack_delivery_id: 9, ..Default::default() });
    assert_eq!(false_ack.goodbye().reason, "PROTOCOL_VIOLATED");
    let (with_fds, _) = server.welcomed();
    let tracer = Tracer::new();
    let call = v1::Call { request_id: 1, call: Some(release_of(1)), ..Default::default() };
    with_fds.send(&client_message::Message::Call(call), &[tracer.as_fd(); 40]);
    assert_eq!(with_fds.goodbye().reason, "FDS_UNEXPECTED");
    tracer.await_closed();
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn client_that_asks_and_takes_no_answer_ends_alone() {
    let limits = ServerLimits { max_queued_deliveries: 4, ..ServerLimits::default() };
    let server = TestServer::with_limits(limits);
    let (greedy, _) = server.welcomed();
    for request_id in 1..=6 {
        ask(&greedy, request_id, call::Call::Acquire(on_gpu("GPU0")));
    }
    assert_eq!(greedy.goodbye().reason, "SLOW_READER");
    let (deaf, _) = server.welcomed();
    let packet = v1::Call { request_id: 1, call: Some(release_of(1)), ..Default::default() };
    let packet = v1::ClientMessage { message: Some(client_message::Message::Call(packet)) };
    let packet = prost::Message::encode_to_vec(&packet);
    while deaf.send_bytes(&packet, &[]).is_ok() {}
    let (brisk, _) = server.welcomed();
    ask(&brisk, 1, call::Call::Acquire(on_gpu("GPU0")));
    lent(&brisk, 1);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn call_past_its_time_is_withdrawn() {
    let server = TestServer::with_faults("register on mlx5_1: hang");
    let (session, welcome) = server.welcomed();
    let wanted = Some(call::Call::Acquire(on_gpu("GPU0")));
    send(&session, v1::Call { request_id: 1, timeout_ms: 10, call: wanted, ..Default::default() });
    let late = refused(&session, 1);
    assert_eq!((late.code, late.reason.as_str()), (i32::from(Code::DeadlineExceeded), ""));
    server.sim.inject_text("hca mlx5_1: go-on").expect("a script");
    ask(&session, 2, call::Call::Acquire(on_gpu("GPU0")));
    let (lease, _memory) = lent(&session, 2);
    let mut buffers = BuffersClient::new(server.channel().await);
    let list = buffers.list(with_token(v1::ListLeasesRequest::default(), &welcome)).await;
    let held: Vec<u64> = list.expect("one's own").into_inner().leases.iter().map(|lease| lease.lease_id).collect();
    assert_eq!(held, [lease.lease_id]);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn session_that_ends_takes_its_waiting_calls_along() {
    let server = TestServer::with_faults("register on mlx5_1: hang");
    let (watcher, _) = server.welcomed();
    let (session, _) = server.welcomed();
    for request_id in 1..=3 {
        ask(&session, request_id, call::Call::Acquire(on_gpu("GPU0")));
    }
    drop(session);
    server.sim.inject_text("hca mlx5_1: go-on").expect("a script");
    ask(&watcher, 1, call::Call::Acquire(on_gpu("GPU0")));
    let (lease, _memory) = lent(&watcher, 1);
    assert_eq!(lease.holders, 1);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn freed_memory_is_told_again_only_after_the_client_let_go_of_the_last() {
    let own = rustix::process::geteuid().as_raw();
    let mut policy = gdrd_engine::Policy::new(own, None, None);
    policy.admins = vec![gdrd_engine::Subject::Uid(own)];
    let server = TestServer::with_policy(policy, gdrd_engine::EngineConfig::default());
    let (session, welcome) = server.welcomed();
    let id = gdrd_engine::SessionId(welcome.session_id);
    let mut acknowledged = 0;
    // Revoked memory is freed with its last holder.
    let mut freed = |request_id| {
        ask(&session, request_id, call::Call::Acquire(on_gpu("GPU0")));
        let (lease, _memory) = lent(&session, request_id);
        acknowledged = lease.delivery_id;
        let viewer = gdrd_engine::Viewer::Session(id);
        server.engine.drain_gpus(&viewer, "GPU0").expect("an administrator");
        server.engine.resume_gpus(&viewer, "GPU0").expect("an administrator");
        let released = Some(release_of(lease.lease_id));
        send(&session, v1::Call { request_id, ack_delivery_id: acknowledged, call: released, timeout_ms: 0 });
        lease.allocation_id
    };
    let gone = || match session.receive() {
        Some((daemon_message::Message::MemoryGone(gone), _)) => gone.allocation_ids,
        other => panic!("nothing of memory but {other:?}"),
    };
    let first = tokio::task::block_in_place(|| freed(1));
    released(&session, 1);
    assert_eq!(gone(), [first]);
    let second = tokio::task::block_in_place(|| freed(2));
    released(&session, 2);
    let third = tokio::task::block_in_place(|| freed(3));
    released(&session, 3);
    let (_, dropped) = (second, client_message::Message::MemoryDropped(v1::MemoryDropped {}));
    session.send(&dropped, &[]);
    let mut later = gone();
    while later.len() < 2 {
        session.send(&dropped, &[]);
        later.extend(gone());
    }
    assert_eq!(later, [second, third]);
    session.send(&dropped, &[]);
    ask(&session, 4, release_of(99));
    assert_eq!(refused(&session, 4).reason, "LEASE_UNKNOWN", "an empty confirmation means nothing");
    server.stop().await;
}

mod packets {
    use super::*;
    use proptest::prelude::*;

    /// Bytes that are nearly a call: a valid one, cut and with bytes changed.
    fn nearly_a_call() -> impl Strategy<Value = Vec<u8>> {
        let valid = (any::<u64>(), any::<u64>(), any::<u32>(), "[a-zA-Z0-9_]{0,40}", any::<u64>()).prop_map(
            |(request_id, ack_delivery_id, timeout_ms, gpu, size_bytes)| {
                let wanted = v1::AcquireRequest { size_bytes, ..on_gpu(&gpu) };
                let call = Some(call::Call::Acquire(wanted));
                let call = v1::Call { request_id, ack_delivery_id, timeout_ms, call };
                let message = v1::ClientMessage { message: Some(client_message::Message::Call(call)) };
                prost::Message::encode_to_vec(&message)
            },
        );
        let changes = proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4);
        (valid, changes, any::<prop::sample::Index>()).prop_map(|(mut packet, changes, cut)| {
            for (at, byte) in changes {
                let at = at.index(packet.len());
                packet[at] = byte;
            }
            let keep = packet.len() / 2 + cut.index(packet.len() / 2 + 1);
            packet.truncate(keep.max(1));
            packet
        })
    }

    #[test]
    fn whatever_comes_the_next_session_is_served() {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        runtime.block_on(async {
            let server = TestServer::start();
            let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(64));
            let packets = proptest::collection::vec(nearly_a_call(), 1..6);
            let served = runner.run(&packets, |packets| {
                let (session, _) = server.welcomed();
                for packet in &packets {
                    // The daemon may have ended it by then.
                    let _ = session.send_bytes(packet, &[]);
                }
                drop(session);
                let (next, _) = server.welcomed();
                ask(&next, 1, call::Call::Acquire(on_gpu("GPU0")));
                lent(&next, 1);
                Ok(())
            });
            served.unwrap();
            server.stop().await;
        });
    }
}
