//! Two real processes that lease on two GPUs of a simulated host and write to each other through the daemon: every
//! operation, what arrives, and in which order.

mod common;

use common::{BUFFER_BYTES, Side, connected_pair, number, rows, text, write};
use gdrd_harness::Daemon;
use gdrd_harness::script::{Command, Local, Remote, Work};

#[test]
fn random_content_arrives_whole_and_the_far_process_digests_its_own_mapping() {
    let daemon = Daemon::start();
    let (mut from, mut to) = connected_pair(&daemon, ["GPU0", "GPU5"]);
    from.puppet.run(Command::Fill { buffer: "b".into(), seed: rand::random() });
    assert_ne!(from.digest(), to.digest());
    let half = u32::try_from(BUFFER_BYTES / 2).expect("half a buffer fits a request");
    from.try_post(0, vec![write(&to.blob, 0, half), write(&to.blob, half.into(), half)]);
    for wr_id in 0..2 {
        let completion = from.completion();
        assert_eq!((number(&completion["wr_id"]), text(&completion["status"])), (wr_id, "SUCCESS".into()));
    }
    assert_eq!(from.digest(), to.digest());
}

#[test]
fn every_operation_does_what_its_verb_says() {
    let daemon = Daemon::start();
    let (mut near, mut far) = connected_pair(&daemon, ["GPU0", "GPU1"]);
    reads_and_inline_writes(&mut near, &mut far);
    sends_with_and_without_immediate(&mut near, &mut far);
    write_with_immediate_consumes_a_receive(&mut near, &mut far);
    atomics_return_the_old_value(&mut near, &mut far);
    let flush = Work::Flush { remote: Remote::new(&far.blob, 0), len: 64 };
    assert_eq!(near.status_of(90, flush), "SUCCESS");
}

fn reads_and_inline_writes(near: &mut Side, far: &mut Side) {
    far.poke(4096, "0102030405060708");
    let read = Work::Read { local: Local::new("b", 64, 8), remote: Remote::new(&far.blob, 4096) };
    assert_eq!(near.status_of(1, read), "SUCCESS");
    assert_eq!(near.peek(64, 8), "0102030405060708");
    let inline = Work::WriteInline { payload: "cafe".into(), remote: Remote::new(&far.blob, 100), imm: None };
    assert_eq!(near.status_of(2, inline), "SUCCESS");
    assert_eq!(far.peek(100, 2), "cafe");
}

fn sends_with_and_without_immediate(near: &mut Side, far: &mut Side) {
    for wr_id in [10, 11] {
        far.post(wr_id, Work::Recv { local: Local::new("b", 8192 + wr_id * 64, 64) });
    }
    near.poke(0, "aabbccdd");
    assert_eq!(near.status_of(3, Work::Send { local: Local::new("b", 0, 4), imm: None }), "SUCCESS");
    assert_eq!(near.status_of(4, Work::SendInline { payload: "ee".into(), imm: Some(77) }), "SUCCESS");
    let (first, second) = (far.completion(), far.completion());
    assert_eq!((number(&first["wr_id"]), number(&first["bytes"])), (10, 4));
    assert!(first["imm"].is_null());
    assert_eq!((number(&second["wr_id"]), number(&second["bytes"]), number(&second["imm"])), (11, 1, 77));
    assert_eq!(far.peek(8192 + 640, 4), "aabbccdd");
    assert_eq!(far.peek(8192 + 704, 1), "ee");
}

fn write_with_immediate_consumes_a_receive(near: &mut Side, far: &mut Side) {
    far.post(20, Work::Recv { local: Local::new("b", 0, 0) });
    near.poke(512, "99");
    let remote = Remote::new(&far.blob, 512);
    let work = Work::Write { local: Local::new("b", 512, 1), remote, imm: Some(5) };
    assert_eq!(near.status_of(21, work), "SUCCESS");
    let received = far.completion();
    assert_eq!((text(&received["opcode"]), number(&received["imm"])), ("RecvWriteImm".into(), 5));
    assert_eq!(far.peek(512, 1), "99");
}

fn atomics_return_the_old_value(near: &mut Side, far: &mut Side) {
    // Numbers are in host byte order, as the HCA of the simulated host is on this host.
    let bytes = |number: u64| number.to_ne_bytes().iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    far.poke(1024, &bytes(40));
    let remote = Remote::new(&far.blob, 1024);
    let add = Work::FetchAdd { local: Local::new("b", 2048, 8), remote: remote.clone(), add: 2 };
    assert_eq!(near.status_of(30, add), "SUCCESS");
    assert_eq!((near.peek(2048, 8), far.peek(1024, 8)), (bytes(40), bytes(42)));
    let swap =
        |compare| Work::CompareSwap { local: Local::new("b", 2048, 8), remote: remote.clone(), compare, swap: 7 };
    assert_eq!(near.status_of(31, swap(1)), "SUCCESS");
    assert_eq!((near.peek(2048, 8), far.peek(1024, 8)), (bytes(42), bytes(42)));
    assert_eq!(near.status_of(32, swap(42)), "SUCCESS");
    assert_eq!(far.peek(1024, 8), bytes(7));
}

#[test]
fn unsignalled_requests_make_no_completion_and_order_is_kept() {
    let daemon = Daemon::start();
    let (mut from, mut to) = connected_pair(&daemon, ["GPU2", "GPU3"]);
    from.poke(0, "0123456789");
    let work: Vec<Work> = (0..5)
        .map(|place| Work::Write { local: Local::new("b", place, 1), remote: Remote::new(&to.blob, 0), imm: None })
        .collect();
    let command = Command::Post { queue_pair: "q".into(), work, first_wr_id: 100, only_last_signaled: true };
    assert_eq!(number(&from.puppet.run(command)), 5);
    assert_eq!(number(&from.completion()["wr_id"]), 104);
    // Each overwrote the one before.
    assert_eq!(to.peek(0, 1), "89");
}

#[test]
fn a_full_queue_refuses_and_takes_again_after_polling() {
    let daemon = Daemon::start();
    let (mut from, to) = connected_pair(&daemon, ["GPU0", "GPU4"]);
    let flood = Command::Flood { queue_pair: "q".into(), work: write(&to.blob, 0, 64) };
    let posted = number(&from.puppet.run(flood.clone()));
    assert!(posted >= 128, "the default depth is 128, {posted} were taken");
    for _ in 0..posted {
        let polled = from.puppet.run(Command::CompletionBusy { queue_pair: "q".into() });
        assert_eq!(text(&polled["status"]), "SUCCESS");
    }
    assert!(number(&from.puppet.run(flood)) >= 128);
}

#[test]
fn host_buffers_move_as_gpu_buffers_do() {
    let daemon = Daemon::start();
    let (mut from, mut to) = connected_pair(&daemon, ["GPU0", "GPU1"]);
    let host = Command::Acquire { buffer: "h".into(), gpu: "GPU0".into(), size: BUFFER_BYTES, host: true };
    let lease = from.puppet.run(host);
    assert_eq!(text(&lease["gpu"]), "");
    from.puppet.run(Command::Poke { buffer: "h".into(), offset: 0, bytes: "beef".into() });
    let work = Work::Write { local: Local::new("h", 0, 2), remote: Remote::new(&to.blob, 0), imm: None };
    assert_eq!(from.status_of(1, work), "SUCCESS");
    assert_eq!(to.peek(0, 2), "beef");
}

#[test]
fn many_processes_move_at_once_and_everything_comes_back() {
    let daemon = Daemon::start();
    let mut pairs: Vec<(Side, Side)> = [["GPU0", "GPU1"], ["GPU2", "GPU3"], ["GPU4", "GPU5"], ["GPU6", "GPU7"]]
        .map(|gpus| connected_pair(&daemon, gpus))
        .into();
    for (number, (from, to)) in (0..).zip(&mut pairs) {
        from.puppet.run(Command::Fill { buffer: "b".into(), seed: number });
        from.try_post(0, vec![write(&to.blob, 0, 1 << 20), write(&to.blob, 1 << 20, 1 << 20)]);
    }
    for (from, to) in &mut pairs {
        assert_eq!(text(&from.completion()["status"]), "SUCCESS");
        assert_eq!(text(&from.completion()["status"]), "SUCCESS");
        assert_eq!(from.digest(), to.digest());
    }
    let mut observer = gdrd_harness::Puppet::connected(&daemon);
    assert_eq!(rows(&observer.run(Command::Leases)), 8);
    drop(pairs);
    gdrd_harness::wait_until("all leases come back", || match rows(&observer.run(Command::Leases)) {
        0 => Ok(()),
        left => Err(left),
    });
}
