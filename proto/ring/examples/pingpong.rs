//! How much a ring's round trip costs over bare shared memory: two processes, one word each way,
//! against one submission and one completion, both busy-polled.
//!
//! `cargo run --release -p gdrd-ring --example pingpong`

#![forbid(unsafe_code)]

use std::error::Error;
use std::fs::File;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use gdrd_ring::{
    BrokerRing, ClientRing, Completion, CompletionOpcode, Geometry, LocalSpan, Operation, RemoteSpan, Source, Status,
    Submission, SubmissionFlags, Submitted, Wake,
};
use gdrd_shm::{Access, Segment, pingpong};

const ROUNDS: u32 = 200_000;
const REPEATS: usize = 5;
const PATIENCE: Duration = Duration::from_secs(10);

type Outcome<T> = Result<T, Box<dyn Error>>;

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.as_slice() {
        [_, floor, ring] => respond(floor, ring),
        _ => measure(),
    }
}

/// This process measures the floor and then takes the broker's part; its child is the client.
fn measure() -> Outcome<()> {
    for _ in 0..REPEATS {
        let floor = Segment::create("floor", pingpong::SEGMENT_LEN_BYTES)?;
        let mut broker = BrokerRing::create(Geometry::new(64, 64)?)?;
        let child = Command::new(std::env::current_exe()?)
            .args([path_of(floor.fd()), path_of(broker.fd())])
            .stdout(Stdio::piped())
            .spawn()?;
        let bare = pingpong::measure(&floor, ROUNDS, PATIENCE)?.ok_or("the peer is silent")?;
        serve(&mut broker)?;
        let output = String::from_utf8(child.wait_with_output()?.stdout)?;
        let ring: u128 = output.trim().parse()?;
        let bare = median_ns(bare);
        println!("bare {bare} ns, ring {ring} ns: {} % of bare", ring * 100 / bare.max(1));
    }
    Ok(())
}

fn serve(broker: &mut BrokerRing) -> Outcome<()> {
    let mut served = 0;
    let start = Instant::now();
    while served < ROUNDS {
        let Some(Submitted::Request(request)) = broker.take()? else {
            if start.elapsed() > PATIENCE {
                return Err("the client is silent".into());
            }
            continue;
        };
        let opcode = CompletionOpcode::of(&request.operation);
        broker.complete(&Completion::new(request.wr_id, opcode, Status::Success, 1))?;
        broker.publish()?;
        served += 1;
    }
    Ok(())
}

fn respond(floor: &str, ring: &str) -> Outcome<()> {
    let floor = Segment::map(open(floor)?, Access::ReadWrite)?;
    if !pingpong::respond(&floor, ROUNDS, PATIENCE)? {
        return Err("the peer is silent".into());
    }
    let mut client = ClientRing::open(open(ring)?)?;
    let mut times = Vec::with_capacity(ROUNDS as usize);
    for round in 0..ROUNDS {
        let start = Instant::now();
        client.submit(&write_of(u64::from(round)))?;
        if client.flush() == Wake::Needed {
            return Err("the broker sleeps".into());
        }
        let completion = loop {
            match client.poll()? {
                Some(completion) => break completion,
                None => std::hint::spin_loop(),
            }
        };
        times.push(start.elapsed());
        if completion.wr_id != u64::from(round) {
            return Err("a completion of another request".into());
        }
    }
    println!("{}", median_ns(times));
    Ok(())
}

fn write_of(wr_id: u64) -> Submission {
    let local = LocalSpan { slot: 0, generation: 1, offset: 0, len_bytes: 8 };
    let remote = RemoteSpan { rkey: 1, iova: 0 };
    Submission {
        wr_id,
        flags: SubmissionFlags::SIGNALED,
        operation: Operation::Write { source: Source::Local(local), remote, imm: None },
    }
}

fn path_of(fd: BorrowedFd<'_>) -> String {
    format!("/proc/{}/fd/{}", std::process::id(), fd.as_raw_fd())
}

fn open(path: &str) -> Outcome<OwnedFd> {
    Ok(File::options().read(true).write(true).open(path)?.into())
}

fn median_ns(mut times: Vec<Duration>) -> u128 {
    times.sort_unstable();
    times[times.len() / 2].as_nanos()
}
