//! The ring between two real processes: both sides sleep and wake each other, and a client that is killed leaves the
//! broker with a ring that still works.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "helpers of tests, whose failures name the line")]

mod common;

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use common::{signaled, success, taken, write};
use gdrd_ring::{BrokerRing, ClientRing, Geometry, Queue, Submission, SubmissionFlags, Submitted, Wake};

/// Set in the second process: the path of the ring.
const PEER: &str = "GDRD_TEST_RING";
const PATIENCE: Option<Duration> = Some(Duration::from_secs(60));
/// What the client writes to standard error, which nothing else in these tests uses: a bell, one byte a ring.
const BELL: &[u8] = b"!";

/// The client's ring, if this is the second process.
fn client() -> Option<ClientRing> {
    let path = std::env::var_os(PEER)?;
    let fd = File::options().read(true).write(true).open(path).expect("the first process lives");
    Some(ClientRing::open(fd.into()).expect("the broker's ring is one"))
}

/// Runs the test `name` of this binary again, as the second process.
fn start_client(broker: &BrokerRing, name: &str) -> Child {
    let path = format!("/proc/{}/fd/{}", std::process::id(), broker.fd().as_raw_fd());
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(PEER, path)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn post(client: &mut ClientRing, submission: &Submission) {
    client.submit(submission).unwrap();
    if client.flush() == Wake::Needed {
        std::io::stderr().write_all(BELL).unwrap();
    }
}

/// The next request, sleeping on the bell until it is there.
fn sleep_until_taken(broker: &mut BrokerRing, bell: &mut impl Read) -> Submission {
    loop {
        match broker.take().unwrap() {
            Some(Submitted::Request(submission)) => return submission,
            Some(refused) => unreachable!("{refused:?}"),
            None => {
                if broker.prepare_sleep().unwrap() {
                    bell.read_exact(&mut [0]).expect("the client lives");
                    broker.finish_sleep();
                }
            }
        }
    }
}

#[test]
fn both_sides_sleep_and_wake_each_other_across_processes() {
    const ROUNDS: u64 = 500;
    if let Some(mut client) = client() {
        for wr_id in 0..ROUNDS {
            // Every other round an unsignalled one goes first.
            if wr_id % 2 == 0 {
                client.submit(&write(u64::MAX, SubmissionFlags::empty())).unwrap();
            }
            post(&mut client, &signaled(wr_id));
            assert_eq!(client.wait(PATIENCE).unwrap().expect("the broker lives").wr_id, wr_id);
            assert_eq!(client.outstanding(Queue::Send), 0);
        }
        return;
    }
    let mut broker = BrokerRing::create(Geometry::new(4, 0).unwrap()).unwrap();
    let mut peer = start_client(&broker, "both_sides_sleep_and_wake_each_other_across_processes");
    let mut bell = peer.stderr.take().unwrap();
    let mut served = 0;
    while served < ROUNDS {
        let submission = sleep_until_taken(&mut broker, &mut bell);
        if submission.flags.contains(SubmissionFlags::SIGNALED) {
            assert_eq!(submission, signaled(served));
            broker.complete(&success(&submission)).unwrap();
            broker.publish().unwrap();
            served += 1;
        } else {
            broker.retire(Queue::Send).unwrap();
        }
    }
    assert!(peer.wait().unwrap().success());
}

#[test]
fn what_a_killed_client_had_published_is_taken_and_ended() {
    if let Some(mut client) = client() {
        client.submit_batch(&[signaled(1), signaled(2)]).unwrap();
        let _ = client.flush();
        client.submit(&signaled(3)).unwrap();
        std::io::stderr().write_all(BELL).unwrap();
        // Until the first process kills this one.
        let _ = std::io::stdin().read(&mut [0]);
        unreachable!("nobody writes to a client that is to be killed");
    }
    let mut broker = BrokerRing::create(Geometry::new(4, 0).unwrap()).unwrap();
    let mut peer = start_client(&broker, "what_a_killed_client_had_published_is_taken_and_ended");
    peer.stderr.as_mut().unwrap().read_exact(&mut [0]).unwrap();
    peer.kill().unwrap();
    peer.wait().unwrap();
    for wr_id in [1, 2] {
        let submission = taken(&mut broker);
        assert_eq!(submission.wr_id, wr_id);
        broker.complete(&success(&submission)).unwrap();
    }
    assert_eq!(broker.take(), Ok(None), "the third was never published");
    broker.publish().unwrap();
    assert_eq!(broker.outstanding(Queue::Send), 0);
    broker.close().unwrap();
}
