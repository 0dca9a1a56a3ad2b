//! What happens to those who misuse the session socket before they have a session: a goodbye with the reason, their
//! fds closed, nobody else disturbed.

mod support;

use std::os::fd::AsFd;
use std::time::Duration;

use gdrd_proto::MAX_SESSION_PACKET_BYTES;
use gdrd_proto::v1::{self, client_message};
use gdrd_server::ServerLimits;
use support::{TestServer, Tracer, ack, hello, versions};

#[tokio::test(flavor = "multi_thread")]
async fn garbage_is_answered_with_its_reason() {
    let server = TestServer::start();
    let session = server.session();
    session.send_bytes(&[0xff; 64], &[]).expect("it is sent");
    assert_eq!(session.goodbye().reason, "PACKET_MALFORMED");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn empty_message_is_malformed() {
    let server = TestServer::start();
    let session = server.session();
    // An unknown field alone: valid protobuf, no message of this protocol.
    session.send_bytes(&[0x78, 0x01], &[]).expect("it is sent");
    assert_eq!(session.goodbye().reason, "PACKET_MALFORMED");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn oversized_packet_is_refused() {
    let server = TestServer::start();
    let session = server.session();
    session.send_bytes(&vec![0; MAX_SESSION_PACKET_BYTES + 1], &[]).expect("it is sent");
    assert_eq!(session.goodbye().reason, "PACKET_TOO_LONG");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn first_message_must_be_hello() {
    let server = TestServer::start();
    let session = server.session();
    session.send(&ack(1), &[]);
    assert_eq!(session.goodbye().reason, "PROTOCOL_VIOLATED");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn other_version_is_told_both_sides_and_whom_to_upgrade() {
    let server = TestServer::start();
    let session = server.session();
    let versions = v1::Versions { ring: 99, ..versions() };
    let newer = v1::Hello { versions: Some(versions), client_name: String::new() };
    session.send(&client_message::Message::Hello(newer), &[]);
    let goodbye = session.goodbye();
    assert_eq!(goodbye.reason, "VERSION_MISMATCH");
    assert!(goodbye.message.contains("ring version 99"), "{}", goodbye.message);
    assert!(goodbye.message.contains("upgrade the daemon"), "{}", goodbye.message);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn silent_connection_is_closed() {
    let limits = ServerLimits { hello_timeout: Duration::from_millis(20), ..ServerLimits::default() };
    let server = TestServer::with_limits(limits);
    assert_eq!(server.session().goodbye().reason, "HELLO_TIMEOUT");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn fds_on_a_message_that_takes_none_end_the_session_and_are_closed() {
    let server = TestServer::start();
    let session = server.session();
    let tracer = Tracer::new();
    session.send(&hello(), &[tracer.as_fd()]);
    assert_eq!(session.goodbye().reason, "FDS_UNEXPECTED");
    tracer.await_closed();
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn flood_of_fds_is_closed_at_once() {
    let server = TestServer::start();
    let tracer = Tracer::new();
    let session = server.session();
    // As many as a packet takes; the kernel refuses more in flight long before memory is short.
    while session.send_bytes(&[1], &[tracer.as_fd(); 253]).is_ok() {
        if session.receive().is_some() {
            break;
        }
    }
    drop(session);
    tracer.await_closed();
    let other = server.session();
    other.send_bytes(&[0xff], &[]).expect("it is sent");
    assert_eq!(other.goodbye().reason, "PACKET_MALFORMED", "others are answered as before");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn proof_before_hello_is_refused_and_its_fds_are_closed() {
    let server = TestServer::start();
    let session = server.session();
    let tracer = Tracer::new();
    let prove = client_message::Message::ProveGpus(v1::ProveGpus { request_id: 1 });
    session.send(&prove, &[tracer.as_fd(); 253]);
    assert_eq!(session.goodbye().reason, "PROTOCOL_VIOLATED");
    tracer.await_closed();
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_beyond_the_bound_are_told_so_and_the_places_come_back() {
    let limits = ServerLimits { max_session_connections_per_uid: 2, ..ServerLimits::default() };
    let server = TestServer::with_limits(limits);
    let (first, second) = (server.session(), server.session());
    assert_eq!(server.session().goodbye().reason, "CONNECTIONS_EXHAUSTED");
    // The server closes these itself, so their places are free when their goodbyes are read.
    for session in [first, second] {
        session.send_bytes(&[0xff], &[]).expect("it is sent");
        assert_eq!(session.goodbye().reason, "PACKET_MALFORMED");
    }
    let again = server.session();
    again.send_bytes(&[0xff], &[]).expect("it is sent");
    assert_eq!(again.goodbye().reason, "PACKET_MALFORMED");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stopping_server_says_goodbye_to_those_without_a_session_too() {
    let server = TestServer::start();
    let session = server.session();
    // Connections are accepted in their order: once this one is answered, the first has been accepted.
    let second = server.session();
    second.send_bytes(&[0xff], &[]).expect("it is sent");
    assert_eq!(second.goodbye().reason, "PACKET_MALFORMED");
    let stopping = tokio::spawn(server.stop());
    assert_eq!(session.goodbye().reason, "SHUTTING_DOWN");
    stopping.await.expect("it stops");
}
