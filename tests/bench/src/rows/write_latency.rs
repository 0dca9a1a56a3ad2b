//! A brokered 8-byte write on a simulated HCA, post to completion, busy-polled, against one word each way between two
//! processes.

use std::time::Instant;

use anyhow::Context as _;
use gdrd_client::{
    AcquireOptions, Buffer, ClientOptions, LocalSpan, Operation, QueuePair, QueuePairOptions, RemoteSpan, RuntimeDir,
    Session, Source, Status,
};
use gdrd_harness::Daemon;
use gdrd_shm::{Segment, pingpong};
use tokio::runtime::Runtime;

use crate::frame::{Group, Measurement, Row, Sample, Start, Target, Turn};
use crate::other::{Other, PATIENCE, Running};
use crate::sample::{median, ns};

const WRITE_BYTES: u32 = 8;
const WRITES: u32 = 20_000;
const WARM_UP: u32 = 500;

pub(crate) const GROUP: Group = Group {
    rows: &[Row {
        id: "write-latency",
        what: "brokered 8-byte write, post to completion, busy-polled, simulated HCA",
        against: "one word each way between two processes in shared memory",
        unit: "ns",
        target: Target::AtMostTimes(2.5),
    }],
    rounds: 9,
    start: |world| Ok(Start::Ready(Box::new(Latency { pair: Pair::make()?, count: world.scaled(WRITES) }))),
};

/// Idle queue pairs beside the busy one, each with a ring of its own.
const IDLE: u32 = 120;

/// What it costs that each queue pair has a ring of its own, to be looked at whether there is something in it or not.
pub(crate) const RINGS: Group = Group {
    rows: &[Row {
        id: "write-latency-rings",
        what: "the same write with 120 idle queue pairs beside it in the session",
        against: "without them",
        unit: "ns",
        target: Target::Shown,
    }],
    rounds: 5,
    start: |world| {
        let (mut among, alone) = (Pair::make()?, Pair::make()?);
        among.add_idle(IDLE)?;
        Ok(Start::Ready(Box::new(Rings { among, alone, count: world.scaled(WRITES) })))
    },
};

struct Rings {
    among: Pair,
    alone: Pair,
    count: u32,
}

impl Measurement for Rings {
    fn round(&mut self, turn: Turn) -> anyhow::Result<Vec<Sample>> {
        let count = self.count;
        let (ours, peer) =
            turn.both(self, |pairs| time_writes(&pairs.among, count), |pairs| time_writes(&pairs.alone, count))?;
        Ok(vec![Sample::against(ours, peer)])
    }
}

struct Latency {
    pair: Pair,
    count: u32,
}

impl Measurement for Latency {
    fn round(&mut self, turn: Turn) -> anyhow::Result<Vec<Sample>> {
        let count = self.count;
        let (ours, peer) = turn.both(&mut self.pair, |pair| time_writes(pair, count), |_| ping_pong(count))?;
        Ok(vec![Sample::against(ours, peer)])
    }
}

fn time_writes(pair: &Pair, count: u32) -> anyhow::Result<f64> {
    let (local, remote) = pair.spans(WRITE_BYTES)?;
    let mut times = Vec::new();
    for round in 0..WARM_UP + count {
        let start = Instant::now();
        pair.sender.post(0, Operation::Write { source: Source::Local(local), remote, imm: None })?;
        let completion = pair.sender.poll_busy(PATIENCE)?.context("a write made no completion")?;
        if round >= WARM_UP {
            times.push(start.elapsed());
        }
        anyhow::ensure!(completion.status == Status::Success, "a write ended as {}", completion.status);
    }
    Ok(ns(median(times)))
}

fn ping_pong(count: u32) -> anyhow::Result<f64> {
    let segment = Segment::create("gdrd-bench", pingpong::SEGMENT_LEN_BYTES)?;
    let rounds = WARM_UP + count;
    let other = Running::start(&Other::Pong { rounds }, Some(segment.try_clone_fd()?))?;
    let times = pingpong::measure(&segment, rounds, PATIENCE)?.context("the other process is silent")?;
    other.join()?;
    Ok(ns(median(times.into_iter().skip(WARM_UP as usize).collect())))
}

/// A daemon, and two of its buffers on two GPUs with a connected queue pair between them, both ends in this process.
pub(crate) struct Pair {
    pub(crate) sender: QueuePair,
    receiver: QueuePair,
    from: Buffer,
    to: Buffer,
    idle: Vec<QueuePair>,
    session: Session,
    runtime: Runtime,
    pub(crate) daemon: Daemon,
}

impl Pair {
    pub(crate) fn make() -> anyhow::Result<Self> {
        let daemon = Daemon::start();
        // Drives the session in the background.
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let (session, from, to, sender, receiver) = runtime.block_on(async {
            let client = ClientOptions::default().runtime_dir(RuntimeDir::new(daemon.runtime_dir())).connect().await?;
            let session = client.open_session("bench-writes").await?;
            let from = session.acquire(AcquireOptions::on_gpu("GPU0", 2 << 20)).await?;
            let to = session.acquire(AcquireOptions::on_gpu("GPU1", 2 << 20)).await?;
            let sender = session.create_queue_pair(QueuePairOptions::near_gpu("GPU0")).await?;
            let receiver = session.create_queue_pair(QueuePairOptions::near_gpu("GPU1")).await?;
            sender.connect(receiver.endpoint()).await?;
            receiver.connect(sender.endpoint()).await?;
            anyhow::Ok((session, from, to, sender, receiver))
        })?;
        Ok(Self { sender, receiver, from, to, idle: Vec::new(), session, runtime, daemon })
    }

    fn add_idle(&mut self, count: u32) -> anyhow::Result<()> {
        for _ in 0..count {
            let made = self.session.create_queue_pair(QueuePairOptions::near_gpu("GPU0"));
            self.idle.push(self.runtime.block_on(made)?);
        }
        Ok(())
    }

    pub(crate) fn spans(&self, len_bytes: u32) -> anyhow::Result<(LocalSpan, RemoteSpan)> {
        let local = self.from.registration(self.sender.hca())?.span(0, len_bytes)?;
        let remote = self.to.registration(self.receiver.hca())?.remote().span(0, len_bytes.into())?;
        Ok((local, remote))
    }
}
