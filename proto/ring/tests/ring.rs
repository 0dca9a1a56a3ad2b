//! What both sides of a ring may rely on, with honest peers.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "helpers of tests, whose failures name the line")]

mod common;

use std::thread;
use std::time::Duration;

use common::{QP_NUM, local, pair, recv, remote, serve_one, signaled, success, taken, write};
use gdrd_ring::{
    ClientRing, Completion, CompletionOpcode, Geometry, INLINE_MAX_BYTES, InlineData, MAX_DEPTH, OpenError, Operation,
    Queue, Refusal, RingError, Source, Status, Submission, SubmissionFlags, SubmitError, Submitted, Wake, abi,
    end_lost_ring,
};
use gdrd_shm::{Segment, WaitOutcome};
use zerocopy::{FromBytes, IntoBytes};

/// A peer that is silent for so long has died.
const PATIENCE: Option<Duration> = Some(Duration::from_secs(60));

#[test]
fn every_operation_arrives_as_it_was_submitted() {
    let inline = Source::Inline(InlineData::new(b"payload").unwrap());
    let spans = Source::Local(local(1 << 20));
    let operations = [
        Operation::Write { source: spans, remote: remote(), imm: None },
        Operation::Write { source: inline, remote: remote(), imm: Some(0) },
        Operation::Write { source: Source::Inline(InlineData::new(&[]).unwrap()), remote: remote(), imm: Some(1) },
        Operation::Read { local: local(5), remote: remote() },
        Operation::Send { source: spans, imm: None },
        Operation::Send { source: inline, imm: Some(u32::MAX) },
        Operation::Recv { local: local(0) },
        Operation::FetchAdd { local: local(8), remote: remote(), add: u64::MAX },
        Operation::CompareSwap { local: local(8), remote: remote(), compare: 1, swap: 2 },
        Operation::Flush { remote: remote(), len_bytes: 4096 },
    ];
    let (mut client, mut broker) = pair(16, 4);
    let sent: Vec<Submission> = (10..)
        .zip(operations)
        .map(|(wr_id, operation)| Submission { wr_id, flags: SubmissionFlags::SIGNALED, operation })
        .collect();
    assert_eq!(client.submit_batch(&sent), Ok(sent.len()));
    assert_eq!(client.flush(), Wake::NotNeeded);
    for submission in &sent {
        assert_eq!(taken(&mut broker), *submission);
    }
    assert_eq!(broker.take(), Ok(None));
}

#[test]
fn flags_arrive_and_those_without_meaning_are_refused_at_once() {
    let (mut client, mut broker) = pair(4, 4);
    let all = SubmissionFlags::all();
    let send =
        Submission { wr_id: 1, flags: all, operation: Operation::Send { source: Source::Local(local(1)), imm: None } };
    client.submit(&send).unwrap();
    let _ = client.flush();
    assert_eq!(taken(&mut broker).flags, all);
    let solicited_write = write(2, SubmissionFlags::SOLICITED);
    assert!(matches!(client.submit(&solicited_write), Err(SubmitError::Invalid(Refusal::Flags { .. }))));
    let fenced_recv = Submission { flags: SubmissionFlags::FENCE, ..recv(3) };
    assert!(matches!(client.submit(&fenced_recv), Err(SubmitError::Invalid(Refusal::Flags { .. }))));
    let short = Operation::FetchAdd { local: local(4), remote: remote(), add: 1 };
    let short = Submission { wr_id: 4, flags: all & SubmissionFlags::SIGNALED, operation: short };
    assert_eq!(client.submit(&short), Err(SubmitError::Invalid(Refusal::AtomicLength(4))));
    assert_eq!(client.outstanding(Queue::Send), 1, "what was refused does not count");
}

#[test]
fn a_malformed_entry_is_refused_with_its_reason() {
    let well_formed: abi::SubmissionEntry = zerocopy::transmute!(signaled(1).encode().unwrap());
    let reason_of = |change: fn(&mut abi::SubmissionEntry)| {
        let mut entry = well_formed;
        change(&mut entry);
        Submission::decode(zerocopy::transmute!(entry)).unwrap_err()
    };
    assert_eq!(reason_of(|entry| entry.reserved0 = 1), Refusal::Reserved);
    assert_eq!(reason_of(|entry| entry.reserved1 = 1), Refusal::Reserved);
    assert_eq!(reason_of(|entry| entry.opcode = 0), Refusal::Opcode(0));
    assert_eq!(reason_of(|entry| entry.opcode = 10), Refusal::Opcode(10));
    assert_eq!(reason_of(|entry| entry.flags = 0x10), Refusal::Flags { opcode: abi::OP_WRITE, flags: 0x10 });
    assert_eq!(reason_of(|entry| (entry.flags, entry.len_bytes) = (abi::FLAG_INLINE, 57)), Refusal::InlineLength(57));
    assert_eq!(
        reason_of(|entry| (entry.opcode, entry.len_bytes) = (abi::OP_COMPARE_SWAP, 9)),
        Refusal::AtomicLength(9)
    );
}

#[test]
fn inline_payload_fits_up_to_its_bound() {
    let longest = [7; INLINE_MAX_BYTES];
    assert_eq!(InlineData::new(&longest).unwrap().as_slice(), longest);
    assert!(InlineData::new(&[7; INLINE_MAX_BYTES + 1]).is_err());
}

#[test]
fn a_completion_arrives_with_all_its_fields() {
    let (mut client, mut broker) = pair(4, 4);
    client.submit(&recv(5)).unwrap();
    let _ = client.flush();
    taken(&mut broker);
    let completion = Completion {
        wr_id: 5,
        status: Status::RnrRetryExcErr,
        opcode: CompletionOpcode::RecvWriteImm,
        byte_len: 123,
        imm: Some(0),
        qp_num: QP_NUM,
        vendor_error: 0x81,
    };
    broker.complete(&completion).unwrap();
    assert_eq!(client.poll(), Ok(None), "it is not published yet");
    assert_eq!(broker.publish(), Ok(false));
    assert_eq!(client.poll(), Ok(Some(completion)));
    assert_eq!(client.poll(), Ok(None));
}

#[test]
fn statuses_keep_the_numbers_of_verbs_and_unknown_ones_survive() {
    assert_eq!(Status::RetryExcErr.code(), 12);
    assert_eq!(Status::TmRndvIncomplete.code(), 23);
    assert_eq!((Status::Stale.code(), Status::OutcomeUnknown.code(), Status::Refused.code()), (64, 65, 66));
    for code in 0..=u8::MAX {
        assert_eq!(Status::from_code(code).code(), code);
    }
    assert_eq!(Status::NAMED.len(), 27);
    assert_eq!(Status::RemAccessErr.to_string(), "REM_ACCESS_ERR");
    assert_eq!(Status::from_code(99).to_string(), "OTHER(99)");
}

#[test]
fn submissions_are_invisible_until_the_flush_and_then_all_there() {
    let (mut client, mut broker) = pair(4, 0);
    client.submit(&signaled(1)).unwrap();
    client.submit(&signaled(2)).unwrap();
    assert_eq!(broker.take(), Ok(None));
    let _ = client.flush();
    assert_eq!((taken(&mut broker).wr_id, taken(&mut broker).wr_id), (1, 2));
}

#[test]
fn each_queue_is_full_at_its_own_depth_and_free_again_after_a_poll() {
    let (mut client, mut broker) = pair(2, 1);
    assert_eq!(client.submit_batch(&[signaled(1), signaled(2), signaled(3)]), Ok(2));
    assert_eq!(client.submit(&signaled(3)), Err(SubmitError::Full { queue: Queue::Send, depth: 2 }));
    client.submit(&recv(4)).unwrap();
    assert_eq!(client.submit(&recv(5)), Err(SubmitError::Full { queue: Queue::Receive, depth: 1 }));
    let _ = client.flush();
    serve_one(&mut broker);
    assert_eq!(client.submit(&signaled(3)), Err(SubmitError::Full { queue: Queue::Send, depth: 2 }), "not polled yet");
    assert_eq!(client.poll().unwrap().unwrap().wr_id, 1);
    client.submit(&signaled(3)).unwrap();
    assert_eq!((client.outstanding(Queue::Send), client.outstanding(Queue::Receive)), (2, 1));
}

#[test]
fn a_queue_of_depth_zero_takes_nothing() {
    let (mut client, _broker) = pair(1, 0);
    assert_eq!(client.submit(&recv(1)), Err(SubmitError::Full { queue: Queue::Receive, depth: 0 }));
}

#[test]
fn unsignalled_successes_are_counted_as_ended_by_the_next_completion() {
    let (mut client, mut broker) = pair(4, 0);
    let quiet = SubmissionFlags::empty();
    client.submit_batch(&[write(1, quiet), write(2, quiet), write(3, quiet), signaled(4)]).unwrap();
    let _ = client.flush();
    for _ in 0..3 {
        taken(&mut broker);
        broker.retire(Queue::Send).unwrap();
    }
    assert_eq!(broker.outstanding(Queue::Send), 0);
    assert_eq!(client.outstanding(Queue::Send), 4);
    serve_one(&mut broker);
    assert_eq!(client.poll().unwrap().unwrap().wr_id, 4);
    assert_eq!(client.outstanding(Queue::Send), 0);
}

#[test]
fn an_unsignalled_failure_has_a_slot_however_full_the_ring_is() {
    let (mut client, mut broker) = pair(4, 4);
    for round in 0..3 {
        for wr_id in 0..4 {
            client.submit(&write(wr_id, SubmissionFlags::empty())).unwrap();
            client.submit(&recv(wr_id)).unwrap();
        }
        let _ = client.flush();
        for _ in 0..8 {
            let submission = taken(&mut broker);
            broker.complete(&Completion { status: Status::WrFlushErr, ..success(&submission) }).unwrap();
        }
        broker.publish().unwrap();
        let statuses: Vec<Status> =
            std::iter::from_fn(|| client.poll().unwrap()).map(|completion| completion.status).collect();
        assert_eq!(statuses, [Status::WrFlushErr; 8], "round {round}");
    }
}

#[test]
fn what_was_not_taken_cannot_be_ended() {
    let (mut client, mut broker) = pair(4, 4);
    let completion = success(&signaled(1));
    assert_eq!(broker.complete(&completion).unwrap_err().queue, Queue::Send);
    client.submit(&recv(1)).unwrap();
    let _ = client.flush();
    taken(&mut broker);
    assert_eq!(broker.retire(Queue::Send).unwrap_err().queue, Queue::Send);
    assert_eq!(broker.retire(Queue::Receive), Ok(()));
    assert_eq!(broker.retire(Queue::Receive).unwrap_err().queue, Queue::Receive);
    assert_eq!(client.poll(), Ok(None));
}

#[test]
fn a_sleeping_broker_is_woken_once_by_the_flush_that_finds_it() {
    let (mut client, mut broker) = pair(4, 0);
    assert_eq!(broker.prepare_sleep(), Ok(true));
    assert_eq!(client.flush(), Wake::NotNeeded, "nothing was submitted");
    client.submit(&signaled(1)).unwrap();
    assert_eq!(client.flush(), Wake::Needed);
    client.submit(&signaled(2)).unwrap();
    assert_eq!(client.flush(), Wake::NotNeeded, "the first wake is under way");
    assert_eq!(broker.prepare_sleep(), Ok(false), "there is work");
    serve_one(&mut broker);
    serve_one(&mut broker);
    assert_eq!(broker.prepare_sleep(), Ok(true));
    broker.finish_sleep();
    client.submit(&signaled(3)).unwrap();
    assert_eq!(client.flush(), Wake::NotNeeded, "the broker is awake");
}

#[test]
fn only_a_client_that_waits_is_woken() {
    let (mut client, mut broker) = pair(4, 0);
    client.submit_batch(&[signaled(1), signaled(2)]).unwrap();
    let _ = client.flush();
    let submission = taken(&mut broker);
    broker.complete(&success(&submission)).unwrap();
    assert_eq!(broker.publish(), Ok(false));
    assert_eq!(client.wait(Some(Duration::ZERO)).unwrap().unwrap().wr_id, 1, "what is there needs no sleep");
    assert_eq!(client.wait(Some(Duration::from_millis(1))), Ok(None));
    let client = thread::spawn(move || client.wait(PATIENCE));
    serve_one(&mut broker);
    assert_eq!(client.join().unwrap().unwrap().unwrap().wr_id, 2);
}

#[test]
fn a_ticket_ends_with_the_next_completion_and_when_waits_are_cancelled() {
    let (mut client, mut broker) = pair(4, 0);
    client.submit(&signaled(1)).unwrap();
    let _ = client.flush();
    let ticket = client.announce_wait().unwrap();
    assert_eq!(client.poll(), Ok(None));
    assert_eq!(ticket.wait(Some(Duration::from_millis(1))), Ok(WaitOutcome::TimedOut));
    let waiter = thread::spawn(move || ticket.wait(PATIENCE));
    serve_one(&mut broker);
    assert_eq!(waiter.join().unwrap(), Ok(WaitOutcome::Woken));
    assert_eq!(client.poll().unwrap().unwrap().wr_id, 1);
    let ticket = client.announce_wait().unwrap();
    let waiter = thread::spawn(move || ticket.wait(PATIENCE));
    client.cancel_waits();
    assert_eq!(waiter.join().unwrap(), Ok(WaitOutcome::Woken));
}

#[test]
fn closing_wakes_more_sleepers_than_a_publish_does() {
    let (mut client, broker) = pair(4, 0);
    let tickets: Vec<_> = (0..40).map(|_| client.announce_wait().unwrap()).collect();
    let waiters: Vec<_> = tickets.into_iter().map(|ticket| thread::spawn(move || ticket.wait(PATIENCE))).collect();
    broker.close().unwrap();
    for waiter in waiters {
        assert_eq!(waiter.join().unwrap(), Ok(WaitOutcome::Woken));
    }
}

#[test]
fn waits_and_wakes_survive_many_rounds_of_both_sides_sleeping() {
    const ROUNDS: u64 = 500;
    let (mut client, mut broker) = pair(4, 0);
    let (rope, bell) = std::sync::mpsc::channel();
    let daemon = thread::spawn(move || {
        let mut served = 0;
        while served < ROUNDS {
            match broker.take().unwrap() {
                Some(Submitted::Request(submission)) => {
                    broker.complete(&success(&submission)).unwrap();
                    broker.publish().unwrap();
                    served += 1;
                }
                Some(refused) => panic!("{refused:?}"),
                None if broker.prepare_sleep().unwrap() => {
                    bell.recv().expect("the client lives");
                    broker.finish_sleep();
                }
                None => {}
            }
        }
    });
    for wr_id in 0..ROUNDS {
        client.submit(&signaled(wr_id)).unwrap();
        if client.flush() == Wake::Needed {
            rope.send(()).unwrap();
        }
        assert_eq!(client.wait(PATIENCE).unwrap().expect("the broker lives").wr_id, wr_id);
    }
    daemon.join().unwrap();
}

#[test]
fn a_closed_ring_gives_what_was_published_and_then_says_so() {
    let (mut client, mut broker) = pair(4, 0);
    client.submit_batch(&[signaled(1), signaled(2)]).unwrap();
    let _ = client.flush();
    for status in [Status::Success, Status::WrFlushErr] {
        let submission = taken(&mut broker);
        broker.complete(&Completion { status, ..success(&submission) }).unwrap();
    }
    broker.close().unwrap();
    assert_eq!(client.wait(PATIENCE).unwrap().unwrap().status, Status::Success);
    assert_eq!(client.submit(&signaled(3)), Err(SubmitError::Closed));
    assert_eq!(client.wait(PATIENCE).unwrap().unwrap().status, Status::WrFlushErr);
    assert_eq!(client.wait(PATIENCE), Err(RingError::Closed));
}

#[test]
fn closing_wakes_a_client_that_waits() {
    let (mut client, broker) = pair(4, 0);
    let client = thread::spawn(move || client.wait(PATIENCE));
    broker.close().unwrap();
    assert_eq!(client.join().unwrap(), Err(RingError::Closed));
}

#[test]
fn depths_outside_the_range_are_refused() {
    assert!(Geometry::new(0, 1).is_err());
    assert!(Geometry::new(MAX_DEPTH + 1, 0).is_err());
    assert!(Geometry::new(1, MAX_DEPTH + 1).is_err());
    let largest = Geometry::new(MAX_DEPTH, MAX_DEPTH).unwrap();
    assert_eq!(largest.capacity(), 2 * MAX_DEPTH);
    assert!(largest.segment_len_bytes() < 3 << 20);
    assert_eq!(Geometry::new(3, 2).unwrap().capacity(), 8);
}

/// Opens a ring whose header was changed after the broker wrote it.
fn open_with(offset: u64, bytes: &[u8]) -> OpenError {
    let (client, broker) = pair(4, 4);
    client.segment().write_from(offset, bytes).unwrap();
    ClientRing::open(broker.fd().try_clone_to_owned().unwrap()).unwrap_err()
}

#[test]
fn a_client_opens_only_a_ring_of_its_version_and_of_a_sane_layout() {
    assert!(matches!(open_with(0, b"x"), OpenError::NotOurs { what: "ring", .. }));
    let newer = open_with(8, &2_u32.to_ne_bytes());
    assert_eq!(newer, OpenError::Version { what: "ring", found: 2, known: 1 });
    assert_eq!(
        newer.to_string(),
        "the daemon made a ring of version 2, this client knows 1; upgrade the client, the older one"
    );
    assert!(open_with(8, &0_u32.to_ne_bytes()).to_string().ends_with("upgrade the daemon, the older one"));
    assert!(matches!(open_with(12, &0_u32.to_ne_bytes()), OpenError::Geometry(_)));
    assert!(matches!(open_with(20, &64_u32.to_ne_bytes()), OpenError::Layout { .. }));
    assert!(matches!(open_with(40, &u64::MAX.to_ne_bytes()), OpenError::Layout { .. }));
    let header_only = Segment::create("gdrd-test", 4096).unwrap();
    let (client, _broker) = pair(4, 4);
    client.segment().copy_to(0, &header_only, 0, 128).unwrap();
    let short = ClientRing::open(header_only.try_clone_fd().unwrap()).unwrap_err();
    assert!(matches!(short, OpenError::Size { found: 4096, .. }));
    let empty = Segment::create("gdrd-test", 4096).unwrap();
    assert!(matches!(ClientRing::open(empty.try_clone_fd().unwrap()), Err(OpenError::NotOurs { found: 0, .. })));
}

#[test]
fn an_rkey_is_in_no_debug_output() {
    let entry = abi::SubmissionEntry::read_from_bytes(signaled(1).encode().unwrap().as_bytes()).unwrap();
    for text in [format!("{:?}", signaled(1)), format!("{entry:?}")] {
        assert!(text.contains("wr_id"));
        assert!(!text.contains(&remote().rkey.to_string()) && !text.contains("rkey"));
    }
}

#[test]
fn the_version_is_the_one_that_the_layout_test_describes() {
    assert_eq!((abi::RING_VERSION, gdrd_ring::GENERATION_PAGE_VERSION), (1, 1));
}

#[test]
fn requests_that_a_lost_daemon_left_unanswered_end_with_an_unknown_outcome() {
    let (mut client, mut broker) = pair(8, 8);
    client.submit_batch(&[signaled(1), write(2, SubmissionFlags::empty()), signaled(3), recv(4), signaled(5)]).unwrap();
    let _ = client.flush();
    let first = taken(&mut broker);
    broker.complete(&success(&first)).unwrap();
    broker.publish().unwrap();
    taken(&mut broker);
    let kept = broker.fd().try_clone_to_owned().unwrap();
    drop(broker);
    assert_eq!(client.poll().unwrap().map(|c| c.wr_id), Some(1));
    assert_eq!(client.poll(), Ok(None), "nobody has said yet that the daemon is gone");
    end_lost_ring(kept).unwrap();
    assert!(client.is_closed());
    let mut ends = Vec::new();
    while let Some(completion) = client.wait(PATIENCE).transpose() {
        match completion {
            Ok(completion) => ends.push((completion.wr_id, completion.status)),
            Err(error) => {
                assert_eq!(error, RingError::Closed);
                break;
            }
        }
    }
    assert_eq!(ends, [2, 3, 5, 4].map(|wr_id| (wr_id, Status::OutcomeUnknown)));
    assert_eq!((client.outstanding(Queue::Send), client.outstanding(Queue::Receive)), (0, 0));
    assert_eq!(client.submit(&signaled(6)), Err(SubmitError::Closed));
}

#[test]
fn a_lost_daemon_wakes_a_client_that_sleeps() {
    let (mut client, broker) = pair(4, 4);
    client.submit(&signaled(1)).unwrap();
    let _ = client.flush();
    let kept = broker.fd().try_clone_to_owned().unwrap();
    let waiting = thread::spawn(move || client.wait(PATIENCE));
    end_lost_ring(kept).unwrap();
    let completion = waiting.join().unwrap().unwrap().unwrap();
    assert_eq!((completion.wr_id, completion.status), (1, Status::OutcomeUnknown));
}

#[test]
fn what_is_no_ring_is_not_ended() {
    let short = Segment::create("gdrd-test", 64).unwrap();
    assert!(end_lost_ring(short.try_clone_fd().unwrap()).is_err());
}
