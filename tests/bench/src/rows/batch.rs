//! 1,265 tensors of 51 GB registered as one batch and one by one, on a simulated HCA that costs what a real one was seen
//! to; and as many short host ranges as one list, against NIXL.
//!
//! The tensors lie in 40 allocations with gaps (ai-dynamo/nixl#1498). Nothing is written to them, so they take no memory.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context as _, ensure};
use gdrd_client::{
    AdoptOptions, AdoptedMemory, Client, ClientOptions, RangeOf, RegisterOptions, RegisteredRange, RuntimeDir, Session,
};
use gdrd_harness::{Daemon, DaemonOptions};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use tokio::runtime::Runtime;

use crate::frame::{Group, Measurement, Row, Sample, Start, Target, Turn};

const RANGES: u32 = 1265;
const MEMORIES: u32 = 40;
/// Length of a tensor, and of the gap behind it, bytes: 51 GB in all.
const RANGE_BYTES: u64 = 40_316_928;
const GAP_BYTES: u64 = 1 << 20;
/// What the HCA is told to cost.
const COST: &str = "register: cost 1900us and 5us a MiB";
/// Calls that the daemon makes at a time on one HCA (`executor.calls_per_device`).
const PARALLEL: f64 = 4.0;
const LIST_RANGE_BYTES: u64 = 200 << 10;

pub(crate) const GROUP: Group = Group {
    rows: &[
        Row {
            id: "register-batch",
            what: "1,265 ranges over 51 GB in 40 allocations with gaps, one batch; HCA of 1.9 ms a call and 5 us/MiB",
            against: "the same ranges one by one",
            unit: "ms",
            target: Target::FasterTimes(20.0),
        },
        Row {
            id: "register-batch-own",
            what: "the same batch, without the time that the HCA itself takes",
            against: "",
            unit: "ms",
            target: Target::AtMost(17.0),
        },
    ],
    rounds: 3,
    start: |world| Ok(Start::Ready(Box::new(Tensors::make(world.scaled(RANGES).max(MEMORIES))?))),
};

pub(crate) const LIST_GROUP: Group = Group {
    rows: &[
        Row {
            id: "register-list",
            what: "1,265 host ranges of 200 KiB registered as one list, no NIC cost, from another process",
            against: "NIXL, UCX backend, DRAM, one list, in its own process",
            unit: "ms",
            target: Target::FasterTimes(1.0),
        },
        Row {
            id: "deregister-list",
            what: "the same list deregistered",
            against: "the same of NIXL",
            unit: "ms",
            target: Target::Shown,
        },
    ],
    rounds: 9,
    start: |world| match world.peer("nixl_list") {
        Some(peer) => Ok(Start::Ready(Box::new(List::make(peer, world.scaled(RANGES))?))),
        None => Ok(Start::Absent("nixl_list is not there; see tests/bench/peers/nixl_list.py".to_owned())),
    },
};

/// A daemon and a session with adopted host memory.
struct Owner {
    runtime: Runtime,
    client: Client,
    session: Session,
    memories: Vec<AdoptedMemory>,
    _daemon: Daemon,
}

impl Owner {
    fn make(options: DaemonOptions, memories: u32, len_bytes: u64) -> anyhow::Result<Self> {
        let daemon = options.start();
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let (client, session, memories) = runtime.block_on(async {
            let client = ClientOptions::default().runtime_dir(RuntimeDir::new(daemon.runtime_dir())).connect().await?;
            let session = client.open_session("bench-registrations").await?;
            let mut adopted = Vec::new();
            for _ in 0..memories {
                adopted.push(session.adopt(AdoptOptions::memfd(memfd(len_bytes)?).near("GPU0")).await?);
            }
            anyhow::Ok((client, session, adopted))
        })?;
        Ok(Self { runtime, client, session, memories, _daemon: daemon })
    }

    /// Gives all memory up, and with it every region, and adopts as much anew.
    fn renew(&mut self) -> anyhow::Result<()> {
        let memories = std::mem::take(&mut self.memories);
        self.runtime.block_on(async {
            let lens: Vec<u64> = memories.iter().map(AdoptedMemory::len_bytes).collect();
            for memory in memories {
                memory.disown().await?;
            }
            for len_bytes in lens {
                self.memories.push(self.session.adopt(AdoptOptions::memfd(memfd(len_bytes)?).near("GPU0")).await?);
            }
            anyhow::Ok(())
        })
    }

    fn register(&self, ranges: Vec<RangeOf>) -> anyhow::Result<Vec<RegisteredRange>> {
        let registered = self.runtime.block_on(self.session.register(ranges, one_hca()))?;
        Ok(registered)
    }

    /// Seconds that registrations have taken the HCA so far, added up.
    fn hca_seconds(&self) -> anyhow::Result<f64> {
        let stats = self.runtime.block_on(self.client.stats())?;
        Ok(stats.iter().filter(|stat| stat.name == "gdrd_registration_seconds_sum").map(|stat| stat.value).sum())
    }
}

fn one_hca() -> RegisterOptions {
    RegisterOptions::new().hcas(["mlx5_0".to_owned()])
}

fn memfd(len_bytes: u64) -> anyhow::Result<OwnedFd> {
    let fd = memfd_create("bench", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&fd, len_bytes)?;
    Ok(fd)
}

struct Tensors {
    owner: Owner,
    count: u32,
}

impl Tensors {
    fn make(count: u32) -> anyhow::Result<Self> {
        let each = u64::from(count.div_ceil(MEMORIES)) * (RANGE_BYTES + GAP_BYTES);
        let options = DaemonOptions::default().fault_script(COST);
        Ok(Self { owner: Owner::make(options, MEMORIES, each)?, count })
    }

    fn ranges(&self) -> Vec<RangeOf> {
        let range = |index: u32| {
            let memory = self.owner.memories.get((index % MEMORIES) as usize)?;
            Some(RangeOf::adopted(memory, u64::from(index / MEMORIES) * (RANGE_BYTES + GAP_BYTES), RANGE_BYTES))
        };
        (0..self.count).filter_map(range).collect()
    }

    /// Milliseconds, and those that the HCA took of them.
    fn batch(&mut self) -> anyhow::Result<(f64, f64)> {
        self.owner.renew()?;
        let (ranges, before) = (self.ranges(), self.owner.hca_seconds()?);
        let start = Instant::now();
        let registered = self.owner.register(ranges)?;
        let took = start.elapsed().as_secs_f64();
        ensure!(registered.len() == self.count as usize, "{} were registered", registered.len());
        let hca = (self.owner.hca_seconds()? - before) / PARALLEL;
        Ok((took * 1e3, hca * 1e3))
    }

    fn one_by_one(&mut self) -> anyhow::Result<f64> {
        self.owner.renew()?;
        let ranges = self.ranges();
        let start = Instant::now();
        let mut registered = Vec::new();
        for range in ranges {
            registered.extend(self.owner.register(vec![range])?);
        }
        Ok(start.elapsed().as_secs_f64() * 1e3)
    }
}

impl Measurement for Tensors {
    fn round(&mut self, turn: Turn) -> anyhow::Result<Vec<Sample>> {
        let ((ours, hca), peer) = turn.both(self, Self::batch, Self::one_by_one)?;
        Ok(vec![Sample::against(ours, peer), Sample::alone(ours - hca)])
    }
}

struct List {
    owner: Owner,
    peer: PathBuf,
    count: u32,
}

impl List {
    fn make(peer: PathBuf, count: u32) -> anyhow::Result<Self> {
        let owner = Owner::make(DaemonOptions::default(), 1, u64::from(count) * LIST_RANGE_BYTES)?;
        Ok(Self { owner, peer, count })
    }

    /// Milliseconds to register and to deregister.
    fn time(&mut self) -> anyhow::Result<(f64, f64)> {
        self.owner.renew()?;
        let memory = self.owner.memories.first().context("memory")?;
        let ranges = (0..self.count)
            .map(|index| RangeOf::adopted(memory, u64::from(index) * LIST_RANGE_BYTES, LIST_RANGE_BYTES))
            .collect();
        let start = Instant::now();
        let registered = self.owner.register(ranges)?;
        let took = start.elapsed();
        let start = Instant::now();
        self.owner.runtime.block_on(self.owner.session.deregister_all(registered))?;
        Ok((took.as_secs_f64() * 1e3, start.elapsed().as_secs_f64() * 1e3))
    }

    /// The same of the peer, which prints both.
    fn ask(&self) -> anyhow::Result<(f64, f64)> {
        let arguments = [u64::from(self.count), LIST_RANGE_BYTES].map(|number| number.to_string());
        let output = Command::new(&self.peer).args(arguments).output()?;
        ensure!(output.status.success(), "{} ended with {}", self.peer.display(), output.status);
        let text = String::from_utf8(output.stdout)?;
        let mut numbers = text.lines().last().unwrap_or_default().split(' ').map(str::parse::<f64>);
        match (numbers.next(), numbers.next()) {
            (Some(Ok(register)), Some(Ok(deregister))) => Ok((register, deregister)),
            _ => anyhow::bail!("'{text}' of {} are not two numbers", self.peer.display()),
        }
    }
}

impl Measurement for List {
    fn round(&mut self, turn: Turn) -> anyhow::Result<Vec<Sample>> {
        let (ours, peer) = turn.both(self, Self::time, |list| list.ask())?;
        Ok(vec![Sample::against(ours.0, peer.0), Sample::against(ours.1, peer.1)])
    }
}
