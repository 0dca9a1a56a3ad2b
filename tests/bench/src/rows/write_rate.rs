//! Brokered operations per second and core of the broker, in batches of 32, against a published figure and against a
//! bare ring: the same entries through the same shared memory, with nothing behind it.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use gdrd_client::{Completion, CompletionOpcode, LocalSpan, Operation, RemoteSpan, Source, Status};
use gdrd_ring::{BrokerRing, ClientRing, Geometry, Submission, SubmissionFlags, Submitted, Wake};

use super::write_latency::Pair;
use crate::frame::{Group, Measurement, Row, Sample, Start, Target, Turn};
use crate::other::{Other, PATIENCE, Running};

const WRITE_BYTES: u32 = 8;
const BATCH: u32 = 32;
const DEPTH: u32 = 128;
const WRITES: u32 = 400_000;

pub(crate) const GROUP: Group = Group {
    rows: &[
        Row {
            id: "write-rate",
            what: "brokered 8-byte writes a second and broker core, batches of 32, simulated HCA",
            against: "",
            unit: "/s",
            // Snap: a microkernel approach to host networking (SOSP 2019), section 5: up to 5 million a second and core.
            target: Target::AtLeast(5e6),
        },
        Row {
            id: "write-rate-of-ring",
            what: "the same writes a second",
            against: "a bare ring between two processes, same entries and batches",
            unit: "/s",
            target: Target::Shown,
        },
    ],
    rounds: 9,
    start: |world| Ok(Start::Ready(Box::new(Rate { pair: Pair::make()?, count: world.scaled(WRITES) }))),
};

struct Rate {
    pair: Pair,
    count: u32,
}

impl Measurement for Rate {
    fn round(&mut self, turn: Turn) -> anyhow::Result<Vec<Sample>> {
        let count = self.count;
        let (ours, ring) = turn.both(&mut self.pair, |pair| brokered(pair, count), |_| bare_ring(count))?;
        Ok(vec![Sample::alone(ours.by_core), Sample::against(ours.by_wall, ring)])
    }
}

struct Rates {
    by_core: f64,
    by_wall: f64,
}

fn brokered(pair: &Pair, count: u32) -> anyhow::Result<Rates> {
    let (local, remote) = pair.spans(WRITE_BYTES)?;
    let batch: Vec<_> = (0..BATCH).map(|wr_id| write(wr_id, local, remote)).collect();
    let (before, start) = (broker_cpu(pair)?, Instant::now());
    let (mut posted, mut ended) = (0, 0);
    let mut spent = Duration::ZERO;
    let mut completions = Vec::with_capacity(DEPTH as usize);
    // The kernel brings the time of a running thread up to date at its ticks: a short run goes on until it shows some.
    while spent.is_zero() {
        let goal = posted + count.next_multiple_of(BATCH);
        while ended < goal {
            while posted < goal && posted - ended <= DEPTH - BATCH {
                posted += u32::try_from(pair.sender.post_batch(&batch)?)?;
            }
            completions.clear();
            if pair.sender.poll_into(&mut completions, DEPTH as usize)? == 0 {
                completions.push(pair.sender.poll_busy(PATIENCE)?.context("a write made no completion")?);
            }
            for completion in &completions {
                ensure!(completion.status == Status::Success, "a write ended as {}", completion.status);
            }
            ended += u32::try_from(completions.len())?;
        }
        spent = broker_cpu(pair)?.saturating_sub(before);
    }
    let wall = start.elapsed();
    Ok(Rates { by_core: f64::from(ended) / spent.as_secs_f64(), by_wall: f64::from(ended) / wall.as_secs_f64() })
}

fn write(wr_id: u32, local: LocalSpan, remote: RemoteSpan) -> Submission {
    let operation = Operation::Write { source: Source::Local(local), remote, imm: None };
    Submission { wr_id: u64::from(wr_id), flags: SubmissionFlags::SIGNALED, operation }
}

/// CPU time of the daemon's broker threads, proc_pid_schedstat(5): the first number, in nanoseconds.
fn broker_cpu(pair: &Pair) -> anyhow::Result<Duration> {
    let tasks = format!("/proc/{}/task", pair.daemon.pid());
    let mut sum = 0;
    for task in std::fs::read_dir(&tasks).with_context(|| format!("list {tasks}"))? {
        let path = task?.path();
        let name = std::fs::read_to_string(path.join("comm")).unwrap_or_default();
        if name.starts_with("gdrd-broker") {
            let text = std::fs::read_to_string(path.join("schedstat")).context("read a thread's schedstat")?;
            let ns = text.split(' ').next().and_then(|ns| ns.parse::<u64>().ok());
            sum += ns.context("a schedstat without a number")?;
        }
    }
    Ok(Duration::from_nanos(sum))
}

/// This process takes the broker's part and its child is the client, whose rate is the answer.
fn bare_ring(count: u32) -> anyhow::Result<f64> {
    let mut ring = BrokerRing::create(Geometry::new(DEPTH, DEPTH)?)?;
    let other = Running::start(&Other::RingClient { requests: count }, Some(ring.fd().try_clone_to_owned()?))?;
    let start = Instant::now();
    let mut served = 0;
    while served < count {
        for _ in 0..BATCH {
            let Some(Submitted::Request(request)) = ring.take()? else { break };
            let opcode = CompletionOpcode::of(&request.operation);
            ring.complete(&Completion::new(request.wr_id, opcode, Status::Success, 1))?;
            served += 1;
        }
        if !ring.publish()? {
            std::hint::spin_loop();
        }
        ensure!(served > 0 || start.elapsed() < PATIENCE, "the other process is silent");
    }
    Ok(other.join()?.trim().parse()?)
}

/// The client of a bare ring; says its rate.
pub(crate) fn bare_ring_client(fd: OwnedFd, count: u32) -> anyhow::Result<()> {
    let mut ring = ClientRing::open(fd)?;
    let local = LocalSpan { slot: 0, generation: 1, offset: 0, len_bytes: WRITE_BYTES };
    let batch: Vec<_> = (0..BATCH).map(|wr_id| write(wr_id, local, RemoteSpan { rkey: 1, iova: 0 })).collect();
    let start = Instant::now();
    let (mut posted, mut ended) = (0, 0);
    while ended < count {
        while posted < count && posted - ended <= DEPTH - BATCH {
            let batch = batch.get(..batch.len().min((count - posted) as usize)).unwrap_or(&batch);
            posted += u32::try_from(ring.submit_batch(batch)?)?;
            ensure!(ring.flush() != Wake::Needed, "the broker of a bare ring sleeps");
        }
        match ring.poll()? {
            Some(_) => ended += 1,
            None => std::hint::spin_loop(),
        }
    }
    println!("{}", f64::from(ended) / start.elapsed().as_secs_f64());
    Ok(())
}
