//! Sessions over real sockets: tokens, deliveries and their order, and what ends a session.

mod support;

use std::os::fd::AsFd;

use gdrd_engine::EngineConfig;
use gdrd_proto::v1::acquire_request::Memory;
use gdrd_proto::v1::buffers_client::BuffersClient;
use gdrd_proto::v1::queue_pairs_client::QueuePairsClient;
use gdrd_proto::v1::{self, client_message, daemon_message, delivery, lease_event};
use gdrd_server::ServerLimits;
use support::{TestServer, Tracer, ack, hello, reason, with_token};
use tonic::Code;
use tonic::transport::Channel;

const SIZE_BYTES: u64 = 2 << 20;

fn on_gpu(gpu: &str) -> v1::AcquireRequest {
    v1::AcquireRequest { size_bytes: SIZE_BYTES, memory: Some(Memory::Gpu(gpu.to_owned())), ..Default::default() }
}

async fn acquire(buffers: &mut BuffersClient<Channel>, welcome: &v1::Welcome) -> v1::Lease {
    let lease = buffers.acquire(with_token(on_gpu("GPU0"), welcome)).await;
    lease.expect("the rules allow it").into_inner()
}

async fn leases(buffers: &mut BuffersClient<Channel>, welcome: &v1::Welcome) -> Vec<v1::Lease> {
    let list = buffers.list(with_token(v1::ListLeasesRequest::default(), welcome)).await;
    list.expect("one's own leases").into_inner().leases
}

#[tokio::test(flavor = "multi_thread")]
async fn welcome_carries_token_versions_and_the_generation_page() {
    let server = TestServer::start();
    let (_session, welcome) = server.welcomed();
    assert_eq!(welcome.token.len(), 32);
    assert_eq!(welcome.versions, Some(support::versions()));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn buffer_comes_by_both_sockets_and_goes_by_release() {
    let server = TestServer::start();
    let (session, welcome) = server.welcomed();
    let mut buffers = BuffersClient::new(server.channel().await);
    let lease = acquire(&mut buffers, &welcome).await;
    assert_eq!((lease.size_bytes, lease.memory_kind.as_str()), (SIZE_BYTES, "memfd"));
    assert!(!lease.registrations.is_empty());
    let (delivery, fds) = session.delivery();
    assert_eq!(delivery.delivery_id, lease.delivery_id);
    assert_eq!((delivery.kinds, fds.len()), (vec!["memory".to_owned()], 1));
    assert_eq!(delivery.subject, Some(delivery::Subject::LeaseId(lease.lease_id)));
    let size = rustix::fs::fstat(&fds[0]).expect("an fd").st_size;
    assert_eq!(u64::try_from(size), Ok(SIZE_BYTES));
    session.send(&ack(delivery.delivery_id), &[]);
    let listed = leases(&mut buffers, &welcome).await;
    assert_eq!(listed.len(), 1);
    assert!(listed[0].registrations.iter().all(|registration| registration.rkey == 0), "lists show no key");
    let release = v1::ReleaseRequest { lease_id: lease.lease_id, generation: lease.generation };
    buffers.release(with_token(release, &welcome)).await.expect("it is held");
    assert!(leases(&mut buffers, &welcome).await.is_empty());
    let again = v1::ReleaseRequest { lease_id: lease.lease_id, generation: 0 };
    let refused = buffers.release(with_token(again, &welcome)).await.expect_err("released");
    assert_eq!((refused.code(), reason(&refused).as_str()), (Code::NotFound, "LEASE_UNKNOWN"));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn token_of_no_session_is_refused() {
    let server = TestServer::start();
    let (session, welcome) = server.welcomed();
    let mut buffers = BuffersClient::new(server.channel().await);
    let forged = v1::Welcome { token: vec![7; 32], ..welcome.clone() };
    let refused = buffers.acquire(with_token(on_gpu("GPU0"), &forged)).await.expect_err("no such session");
    assert_eq!((refused.code(), reason(&refused).as_str()), (Code::Unauthenticated, "SESSION_TOKEN_INVALID"));
    // A token dies with its session; the goodbye says that it has ended.
    session.send(&ack(99), &[]);
    assert_eq!(session.goodbye().reason, "PROTOCOL_VIOLATED");
    let refused = buffers.acquire(with_token(on_gpu("GPU0"), &welcome)).await.expect_err("it has ended");
    assert_eq!(refused.code(), Code::Unauthenticated);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn deliveries_wait_for_the_acknowledgement_of_the_one_before() {
    let server = TestServer::start();
    let (session, welcome) = server.welcomed();
    let mut buffers = BuffersClient::new(server.channel().await);
    let mut wanted = Vec::new();
    for _ in 0..4 {
        wanted.push(acquire(&mut buffers, &welcome).await.delivery_id);
    }
    for id in wanted {
        let (delivery, _fds) = session.delivery();
        assert_eq!(delivery.delivery_id, id, "in the order of the grants");
        assert!(session.is_silent(), "the next one waits");
        session.send(&ack(id), &[]);
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn client_that_acknowledges_nothing_ends_alone() {
    let limits = ServerLimits { max_queued_deliveries: 2, ..ServerLimits::default() };
    let server = TestServer::with_limits(limits);
    let (slow, slow_welcome) = server.welcomed();
    let (brisk, brisk_welcome) = server.welcomed();
    let mut buffers = BuffersClient::new(server.channel().await);
    for _ in 0..3 {
        acquire(&mut buffers, &slow_welcome).await;
    }
    let refused = buffers.acquire(with_token(on_gpu("GPU0"), &slow_welcome)).await.expect_err("its queue is full");
    assert_eq!((refused.code(), reason(&refused).as_str()), (Code::Unauthenticated, "SESSION_ENDED"));
    assert_eq!(slow.goodbye().reason, "SLOW_READER");
    for _ in 0..5 {
        let lease = acquire(&mut buffers, &brisk_welcome).await;
        let (delivery, _fds) = brisk.delivery();
        assert_eq!(delivery.delivery_id, lease.delivery_id);
        brisk.send(&ack(delivery.delivery_id), &[]);
    }
    let listed = leases(&mut buffers, &brisk_welcome).await;
    assert_eq!(listed.len(), 5, "those of the ended session are gone");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn client_that_reads_nothing_ends_alone() {
    let server = TestServer::start();
    let (session, _welcome) = server.welcomed();
    let null = std::fs::File::open("/dev/null").expect("it opens");
    let prove = client_message::Message::ProveGpus(v1::ProveGpus { request_id: 1 });
    let packet = prost::Message::encode_to_vec(&v1::ClientMessage { message: Some(prove) });
    // Asks and asks, and takes no answer, until the server takes no more.
    while session.send_bytes(&packet, &[null.as_fd()]).is_ok() {}
    // Its answers fill the socket, so there is no room for a goodbye.
    while session.receive().is_some() {}
    let (_other, welcome) = server.welcomed();
    let mut buffers = BuffersClient::new(server.channel().await);
    acquire(&mut buffers, &welcome).await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn acknowledgement_of_nothing_ends_the_session() {
    let server = TestServer::start();
    let (session, _welcome) = server.welcomed();
    session.send(&ack(1), &[]);
    assert_eq!(session.goodbye().reason, "PROTOCOL_VIOLATED");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn second_hello_ends_the_session() {
    let server = TestServer::start();
    let (session, _welcome) = server.welcomed();
    session.send(&hello(), &[]);
    assert_eq!(session.goodbye().reason, "PROTOCOL_VIOLATED");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn fds_on_an_acknowledgement_end_the_session_and_are_closed() {
    let server = TestServer::start();
    let (session, welcome) = server.welcomed();
    let mut buffers = BuffersClient::new(server.channel().await);
    let lease = acquire(&mut buffers, &welcome).await;
    let tracer = Tracer::new();
    session.send(&ack(lease.delivery_id), &[tracer.as_fd(); 100]);
    assert_eq!(session.goodbye().reason, "FDS_UNEXPECTED");
    tracer.await_closed();
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn proof_with_too_many_fds_ends_the_session_and_they_are_closed() {
    let server = TestServer::start();
    let (session, _welcome) = server.welcomed();
    let tracer = Tracer::new();
    let prove = client_message::Message::ProveGpus(v1::ProveGpus { request_id: 1 });
    session.send(&prove, &[tracer.as_fd(); 100]);
    assert_eq!(session.goodbye().reason, "FDS_TOO_MANY");
    tracer.await_closed();
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn proof_with_what_is_no_gpu_is_answered_and_the_session_goes_on() {
    let server = TestServer::start();
    let (session, welcome) = server.welcomed();
    let tracer = Tracer::new();
    let null = std::fs::File::open("/dev/null").expect("it opens");
    for (request_id, fds) in [(1, vec![]), (2, vec![tracer.as_fd()]), (3, vec![null.as_fd()])] {
        session.send(&client_message::Message::ProveGpus(v1::ProveGpus { request_id }), &fds);
        let Some((daemon_message::Message::GpusProven(answer), _)) = session.receive() else {
            panic!("no answer to proof {request_id}");
        };
        assert_eq!(answer.request_id, request_id);
        assert!(answer.gpu_uuids.is_empty() && !answer.error.is_empty(), "{answer:?}");
    }
    tracer.await_closed();
    let mut buffers = BuffersClient::new(server.channel().await);
    acquire(&mut buffers, &welcome).await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn gpu_is_leased_only_after_its_device_node_was_shown() {
    // /dev/null stands for the GPU's node: 1:3 on every Linux.
    let server = TestServer::with_proof(1, 3);
    let (session, welcome) = server.welcomed();
    let mut buffers = BuffersClient::new(server.channel().await);
    let refused = buffers.acquire(with_token(on_gpu("GPU0"), &welcome)).await.expect_err("nothing was shown");
    assert_eq!((refused.code(), reason(&refused).as_str()), (Code::PermissionDenied, "GPU_NOT_PROVEN"));
    let null = std::fs::File::open("/dev/null").expect("it opens");
    session.send(&client_message::Message::ProveGpus(v1::ProveGpus { request_id: 7 }), &[null.as_fd()]);
    let Some((daemon_message::Message::GpusProven(answer), _)) = session.receive() else { panic!("no answer") };
    assert_eq!((answer.request_id, answer.gpu_uuids.len(), answer.error.as_str()), (7, 1, ""));
    let lease = acquire(&mut buffers, &welcome).await;
    assert_eq!(vec![lease.gpu_uuid], answer.gpu_uuids);
    let refused = buffers.acquire(with_token(on_gpu("GPU1"), &welcome)).await.expect_err("another gpu");
    assert_eq!(reason(&refused), "GPU_NOT_PROVEN");
    let (_other, other_welcome) = server.welcomed();
    let refused = buffers.acquire(with_token(on_gpu("GPU0"), &other_welcome)).await.expect_err("another session");
    assert_eq!(reason(&refused), "GPU_NOT_PROVEN");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn leases_of_a_closed_session_come_back() {
    let server = TestServer::start();
    let (_watcher, watching) = server.welcomed();
    let mut buffers = BuffersClient::new(server.channel().await);
    let events = buffers.watch_leases(with_token(v1::WatchLeasesRequest {}, &watching)).await;
    let mut events = events.expect("one's own tenant").into_inner();
    let (session, welcome) = server.welcomed();
    let lease = acquire(&mut buffers, &welcome).await;
    drop(session);
    let mut sequence = 0;
    loop {
        let event = events.message().await.expect("a message").expect("the stream goes on");
        assert_eq!(event.sequence, sequence + 1, "numbered one by one");
        sequence = event.sequence;
        if let Some(lease_event::Event::Released(ended)) = event.event {
            assert_eq!((ended.lease_id, ended.reason.as_str()), (lease.lease_id, "SESSION_ENDED"));
            break;
        }
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn queue_pair_comes_with_ring_and_doorbell() {
    let server = TestServer::start();
    let (session, welcome) = server.welcomed();
    let mut queue_pairs = QueuePairsClient::new(server.channel().await);
    let request = v1::CreateQueuePairRequest { gpu: "GPU0".to_owned(), ..Default::default() };
    let queue_pair = queue_pairs.create(with_token(request, &welcome)).await.expect("allowed").into_inner();
    assert_eq!(queue_pair.state, "INIT");
    assert_eq!(queue_pair.endpoint.as_ref().map(|endpoint| endpoint.gid.len()), Some(16));
    let (delivery, fds) = session.delivery();
    assert_eq!(delivery.delivery_id, queue_pair.delivery_id);
    assert_eq!(delivery.kinds, ["ring", "doorbell"]);
    assert_eq!(fds.len(), 2);
    session.send(&ack(delivery.delivery_id), &[]);
    let destroy = v1::DestroyQueuePairRequest { queue_pair_id: queue_pair.queue_pair_id };
    queue_pairs.destroy(with_token(destroy, &welcome)).await.expect("one's own");
    let list = queue_pairs.list(with_token(v1::ListQueuePairsRequest::default(), &welcome)).await;
    assert!(list.expect("one's own").into_inner().queue_pairs.is_empty());
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn call_past_its_deadline_leaves_no_lease() {
    let server = TestServer::with_faults("register on mlx5_1: hang");
    let (session, welcome) = server.welcomed();
    let mut buffers = BuffersClient::new(server.channel().await);
    let mut request = with_token(on_gpu("GPU0"), &welcome);
    request.set_timeout(std::time::Duration::from_millis(10));
    let late = buffers.acquire(request).await.expect_err("registering takes longer");
    assert!(matches!(late.code(), Code::Cancelled | Code::DeadlineExceeded), "{late:?}");
    // The client may give up before the server hears of it. What comes later on the same connection is heard later.
    assert_eq!(leases(&mut buffers, &welcome).await.len(), 0);
    let waiting = || server.engine.stats().into_iter().find(|stat| stat.name == "gdrd_waiting_acquires");
    while waiting().expect("a gauge").value > 0.0 {
        tokio::task::yield_now().await;
    }
    server.sim.inject_text("hca mlx5_1: go-on").expect("a script");
    let lease = acquire(&mut buffers, &welcome).await;
    let (delivery, _fds) = session.delivery();
    assert_eq!(delivery.delivery_id, lease.delivery_id, "the late one sent no fd");
    assert_eq!(leases(&mut buffers, &welcome).await.len(), 1);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn list_comes_in_pages() {
    let server = TestServer::start();
    let (session, welcome) = server.welcomed();
    let mut buffers = BuffersClient::new(server.channel().await);
    for _ in 0..5 {
        let lease = acquire(&mut buffers, &welcome).await;
        session.send(&ack(lease.delivery_id), &[]);
    }
    let mut page_token = String::new();
    let mut seen = Vec::new();
    loop {
        let request = v1::ListLeasesRequest { page_size: 2, page_token };
        let page = buffers.list(with_token(request, &welcome)).await.expect("one's own").into_inner();
        assert!(page.leases.len() <= 2);
        seen.extend(page.leases.iter().map(|lease| lease.lease_id));
        page_token = page.next_page_token;
        if page_token.is_empty() {
            break;
        }
    }
    assert_eq!(seen.len(), 5);
    assert!(seen.is_sorted());
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn list_without_a_session_is_that_of_the_peer() {
    let server = TestServer::start();
    let (_session, welcome) = server.welcomed();
    let mut buffers = BuffersClient::new(server.channel().await);
    let lease = acquire(&mut buffers, &welcome).await;
    let list = buffers.list(v1::ListLeasesRequest::default()).await.expect("open to the same tenant").into_inner();
    assert_eq!(list.leases.iter().map(|lease| lease.lease_id).collect::<Vec<_>>(), [lease.lease_id]);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn user_without_a_rule_gets_no_session_and_keeps_topology() {
    let config = EngineConfig::default();
    let server = TestServer::with_policy(gdrd_engine::Policy::default(), config);
    let session = server.session();
    session.send(&hello(), &[]);
    let goodbye = session.goodbye();
    assert_eq!(goodbye.reason, "LEASE_NOT_ALLOWED");
    let mut topology = gdrd_proto::v1::topology_client::TopologyClient::new(server.channel().await);
    assert!(topology.get(v1::GetTopologyRequest {}).await.is_ok());
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stopping_server_says_goodbye_to_sessions() {
    let server = TestServer::start();
    let (session, _welcome) = server.welcomed();
    let stopping = tokio::spawn(server.stop());
    assert_eq!(session.goodbye().reason, "SHUTTING_DOWN");
    stopping.await.expect("it stops");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_gpu_is_placed_for_nobody() {
    let server = TestServer::with_faults("gpu GPU4: lost");
    let mut topology = gdrd_proto::v1::topology_client::TopologyClient::new(server.channel().await);
    let placed = topology.place(v1::PlaceRequest { gpus: 8, ..Default::default() }).await;
    let placed = placed.expect("open to all").into_inner();
    assert!(placed.placements.is_empty() && placed.reason.ends_with("lost: GPU4"), "{}", placed.reason);
    server.stop().await;
}
