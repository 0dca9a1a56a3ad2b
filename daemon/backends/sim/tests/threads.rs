//! Several threads on one fabric: nothing reaches deregistered memory, nothing hangs.
#![forbid(unsafe_code)]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use gdrd_hal::{LocalSpan, Opcode, QueuePairState, RemoteSpan, WorkCompletion, WorkStatus};
use gdrd_sim::SimHost;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use support::{End, MEMORY_BYTES, connect, ends, pair, patient_host, register, request, wait_for};

/// Long enough that a deregistration falls into the middle of a copy.
const LONG_BYTES: u32 = 60 * 1024;
const ROUNDS: u32 = 100;

/// Keeps copying from or to `remote` until that is refused; returns how often it went through.
fn copy_until_refused(mut end: End, opcode: Opcode, remote: RemoteSpan, copies: &AtomicU64) -> WorkStatus {
    loop {
        end.send(request(0, opcode, end.span(0, LONG_BYTES), remote));
        match end.next().1 {
            WorkStatus::Success => copies.fetch_add(1, Ordering::Release),
            status => return status,
        };
    }
}

#[test]
fn no_write_lands_once_a_region_is_deregistered() {
    let host = patient_host();
    for round in 0..ROUNDS {
        let (a, b) = pair(&host);
        a.fill(0, &vec![0xff; LONG_BYTES as usize]);
        let region = register(&*b.pd, &b.memory);
        let remote = RemoteSpan { rkey: region.rkey(), addr: region.iova() };
        let copies = Arc::new(AtomicU64::new(0));
        let seen = Arc::clone(&copies);
        let writer = std::thread::spawn(move || copy_until_refused(a, Opcode::Write, remote, &seen));
        wait_for("the first write", || (copies.load(Ordering::Acquire) > 0).then_some(()));
        region.deregister().unwrap();
        // From here on the memory is ours alone; a copy that was still going on would spoil the zeros.
        b.fill(0, &vec![0; LONG_BYTES as usize]);
        assert_eq!(writer.join().unwrap(), WorkStatus::RemoteAccess, "round {round}");
        assert!(b.content(0, LONG_BYTES as usize).iter().all(|byte| *byte == 0), "round {round}");
    }
}

#[test]
fn no_read_result_lands_once_the_local_region_is_deregistered() {
    let host = patient_host();
    for round in 0..ROUNDS {
        let (mut a, b) = pair(&host);
        b.fill(0, &vec![0xff; LONG_BYTES as usize]);
        let landing = support::memory();
        let region = register(&*a.pd, &landing);
        let remote = RemoteSpan { rkey: b.region.rkey(), addr: b.region.iova() };
        let local = LocalSpan { lkey: region.lkey(), addr: region.iova(), len_bytes: LONG_BYTES };
        let copies = Arc::new(AtomicU64::new(0));
        let seen = Arc::clone(&copies);
        let reader = std::thread::spawn(move || {
            loop {
                a.send(request(0, Opcode::Read, local, remote));
                match a.next().1 {
                    WorkStatus::Success => seen.fetch_add(1, Ordering::Release),
                    status => return status,
                };
            }
        });
        wait_for("the first read", || (copies.load(Ordering::Acquire) > 0).then_some(()));
        drop(region);
        let file = support::file(&landing);
        std::os::unix::fs::FileExt::write_all_at(&file, &vec![0; LONG_BYTES as usize], 0).unwrap();
        assert_eq!(reader.join().unwrap(), WorkStatus::LocalProtection, "round {round}");
        let mut content = vec![1; LONG_BYTES as usize];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut content, 0).unwrap();
        assert!(content.iter().all(|byte| *byte == 0), "round {round}");
    }
}

/// Sends numbered messages and takes the peer's, as fast as both go.
fn talk(mut end: End, messages: u64) -> End {
    let (mut sent, mut completed, mut received) = (0, 0, 0);
    let mut out = [WorkCompletion::EMPTY; 16];
    for wr_id in 0..32 {
        end.receive(wr_id);
    }
    wait_for("all messages", || {
        if sent < messages && sent - completed < 32 {
            end.send(end.message(1000 + sent));
            sent += 1;
        }
        let count = end.cq.poll(&mut out).expect("the completion queue is sound");
        for completion in &out[..count] {
            assert_eq!(completion.status, WorkStatus::Success);
            if completion.opcode == Opcode::Recv {
                assert_eq!(completion.wr_id, received % 32);
                received += 1;
                end.receive(completion.wr_id);
            } else {
                assert_eq!(completion.wr_id, 1000 + completed);
                completed += 1;
            }
        }
        (completed == messages && received == messages).then_some(())
    });
    end
}

#[test]
fn both_directions_keep_their_order_with_a_thread_at_each_end() {
    let host = patient_host();
    let (a, b) = pair(&host);
    let other = std::thread::spawn(move || talk(b, 5000));
    // Kept: a destroyed queue pair answers nobody.
    let _a = talk(a, 5000);
    other.join().unwrap();
}

#[test]
fn sleepers_at_both_ends_wake_each_other() {
    let host = patient_host();
    let (a, b) = pair(&host);
    let play = |mut end: End, serves: bool| {
        end.cq.arm().unwrap();
        for round in 0..500_u64 {
            end.receive(round);
            if serves || round > 0 {
                end.send(end.message(1000));
            }
            let mut got_ball = false;
            while !got_ball {
                end.sleep_for_event();
                end.cq.arm().unwrap();
                got_ball = end.completed().iter().any(|(wr_id, _)| *wr_id < 1000);
            }
        }
        if !serves {
            end.send(end.message(1000));
        }
        end
    };
    let other = std::thread::spawn(move || play(b, false));
    let _a = play(a, true);
    other.join().unwrap();
}

/// One thread that makes, connects, uses and breaks ends at random, with one partner.
fn vandal(host: &SimHost, seed: u64, stop: &AtomicBool, completions: &AtomicU64) {
    let mut random = SmallRng::seed_from_u64(seed);
    let (mut a, mut b) = pair(host);
    while !stop.load(Ordering::Acquire) {
        let wr_id = random.random();
        let (one, other) = if random.random() { (&mut a, &mut b) } else { (&mut b, &mut a) };
        let offset = random.random_range(0..MEMORY_BYTES + 64);
        let write = one.write(wr_id, other, offset, random.random_range(0..4096));
        // Refused posts are part of the game.
        match random.random_range(0..40) {
            0 => drop(one.control.to_error()),
            1 => (a, b) = pair(host),
            2 => one.region = register(&*one.pd, &one.memory),
            3..10 => drop(one.work.post_recv(&[gdrd_hal::ReceiveRequest { wr_id, local: one.span(0, 4096) }])),
            10..20 => drop(one.work.post_send(&[one.message(wr_id)])),
            _ => drop(one.work.post_send(&[write])),
        }
        if a.control.state().is_ok_and(|state| state == QueuePairState::Err) {
            (a, b) = pair(host);
        }
        completions.fetch_add((a.completed().len() + b.completed().len()) as u64, Ordering::Relaxed);
    }
}

#[test]
fn threads_that_break_their_own_connections_and_links_never_hang() {
    let host = support::host_with(gdrd_sim::Timing {
        retry_exceeded: std::time::Duration::from_micros(200),
        receiver_not_ready: Some(std::time::Duration::from_micros(300)),
    });
    let (stop, completions) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let vandals: Vec<_> = (0..3)
        .map(|seed| {
            let (host, stop, completions) = (host.clone(), Arc::clone(&stop), Arc::clone(&completions));
            std::thread::spawn(move || vandal(&host, seed, &stop, &completions))
        })
        .collect();
    for round in 0..300 {
        let port = if round % 4 < 2 { "mlx5_0" } else { "mlx5_1" };
        let event = if round % 2 == 0 { "link-down" } else { "link-up" };
        host.inject_text(&format!("hca {port}: {event} port 1")).unwrap();
        drop(ends(&host));
        std::thread::yield_now();
    }
    wait_for("something to complete", || (completions.load(Ordering::Relaxed) > 0).then_some(()));
    stop.store(true, Ordering::Release);
    vandals.into_iter().for_each(|vandal| vandal.join().unwrap());
    // The fabric is whole afterwards.
    let (mut a, b) = ends(&host);
    connect(&a, &b);
    connect(&b, &a);
    let write = a.write(1, &b, 0, 64);
    a.send(write);
    assert_eq!(a.next(), (1, WorkStatus::Success));
}
