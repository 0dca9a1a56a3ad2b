//! A hit in the client's registration cache, found and let go of, against the registration cache of UCX: the same regions,
//! asked for in the same order.

use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context as _, ensure};
use gdrd_client::{Allocation, Gpu, HitCache, Region, buffer_id};
use gdrd_ring::{GenerationReader, GenerationWriter};

use crate::frame::{Group, Measurement, Row, Sample, Start, Target, Turn};

const REGION_BYTES: u64 = 64 << 10;
/// Any address does: nothing is reached through it.
const BASE: u64 = 0x7f00_0000_0000;
const HITS: u32 = 2_000_000;
const SIZES: [u32; 3] = [16, 1024, 65_536];

const fn row(id: &'static str, what: &'static str, target: Target) -> Row {
    Row { id, what, against: "ucs_rcache_get and put of UCX, a registration that does nothing", unit: "ns", target }
}

/// Two threads against one, in hits a second.
const fn scaling(id: &'static str, what: &'static str) -> Row {
    Row { id, what, against: "one thread's", unit: "M/s", target: Target::AtLeastTimes(1.8) }
}

pub(crate) const GROUP: Group = Group {
    rows: &[
        row("cache-hit-16", "cache hit, 16 regions, 1 thread", Target::FasterTimes(1.5)),
        row("cache-hit-16-two", "cache hit, 16 regions, 2 threads", Target::FasterTimes(8.0)),
        scaling("cache-hit-16-scaling", "hits a second of 2 threads, 16 regions"),
        row("cache-hit-1024", "cache hit, 1,024 regions, 1 thread", Target::FasterTimes(1.5)),
        row("cache-hit-1024-two", "cache hit, 1,024 regions, 2 threads", Target::FasterTimes(8.0)),
        scaling("cache-hit-1024-scaling", "hits a second of 2 threads, 1,024 regions"),
        row("cache-hit-65536", "cache hit, 65,536 regions, 1 thread", Target::FasterTimes(1.5)),
        row("cache-hit-65536-two", "cache hit, 65,536 regions, 2 threads", Target::FasterTimes(2.5)),
        scaling("cache-hit-65536-scaling", "hits a second of 2 threads, 65,536 regions"),
    ],
    rounds: 9,
    start: |world| match world.peer("ucx_rcache_hit") {
        Some(peer) => Ok(Start::Ready(Box::new(Hits::make(peer, world.scaled(HITS))?))),
        None => Ok(Start::Absent("ucx_rcache_hit was not built; install libucx-dev".to_owned())),
    },
};

/// Hits on memory that a client's CUDA calls may free: each asks the driver whose the address is.
pub(crate) const IDENTIFIED: Group = Group {
    rows: &[Row {
        id: "cache-hit-1024-buffer-id",
        what: "cache hit, 1,024 regions of CUDA memory, which ask for BUFFER_ID",
        against: "a hit that asks nothing",
        unit: "ns",
        target: Target::Shown,
    }],
    rounds: 9,
    start: |world| match gpu_uuid() {
        Some(uuid) => Ok(Start::Ready(Box::new(Identified::make(&uuid, world.scaled(HITS / 20))?))),
        None => Ok(Start::Absent("this machine has no GPU of an NVIDIA driver".to_owned())),
    },
};

/// UUID of the first GPU that the driver tells of.
fn gpu_uuid() -> Option<String> {
    let folder = std::fs::read_dir("/proc/driver/nvidia/gpus").ok()?;
    let texts = folder.filter_map(|entry| std::fs::read_to_string(entry.ok()?.path().join("information")).ok());
    texts
        .filter_map(|text| Some(text.lines().find_map(|line| line.strip_prefix("GPU UUID:"))?.trim().to_owned()))
        .next()
}

/// The same regions twice: of memory that is asked about, and of memory that is not.
struct Identified {
    count: u32,
    base: u64,
    asked: HitCache<()>,
    plain: HitCache<()>,
    _page: GenerationWriter,
    _memory: Allocation,
}

impl Identified {
    const REGIONS: u32 = 1024;

    fn make(uuid: &str, count: u32) -> anyhow::Result<Self> {
        let memory = Allocation::new(&Gpu::open(uuid)?, 2 * REGION_BYTES * u64::from(Self::REGIONS))?;
        let base = memory.device_address();
        let (page, identity) = (GenerationWriter::create(1 << 16)?, buffer_id(base)?.get());
        let reader = Arc::new(GenerationReader::open(page.fd().try_clone_to_owned()?)?);
        let asked = filled(&reader, base, Self::REGIONS, identity)?;
        let asked = asked.identified_by(|address| buffer_id(address).ok().map(NonZeroU64::get));
        let plain = filled(&reader, base, Self::REGIONS, 0)?;
        Ok(Self { count, base, asked, plain, _page: page, _memory: memory })
    }
}

impl Measurement for Identified {
    fn round(&mut self, turn: Turn) -> anyhow::Result<Vec<Sample>> {
        let (base, count) = (self.base, self.count);
        let time = |cache: &HitCache<()>| time_hits(cache, base, Self::REGIONS, 1, count);
        let (asked, plain) = turn.both(self, |of| time(&of.asked), |of| time(&of.plain))?;
        Ok(vec![Sample::against(asked, plain)])
    }
}

struct Hits {
    peer: PathBuf,
    count: u32,
    caches: Vec<(u32, HitCache<()>)>,
    _page: GenerationWriter,
}

impl Hits {
    fn make(peer: PathBuf, count: u32) -> anyhow::Result<Self> {
        let page = GenerationWriter::create(1 << 16)?;
        let reader = Arc::new(GenerationReader::open(page.fd().try_clone_to_owned()?)?);
        let caches = SIZES.iter().map(|regions| Ok((*regions, filled(&reader, BASE, *regions, 0)?)));
        Ok(Self { peer, count, caches: caches.collect::<anyhow::Result<_>>()?, _page: page })
    }
}

fn filled(page: &Arc<GenerationReader>, base: u64, regions: u32, identity: u64) -> anyhow::Result<HitCache<()>> {
    let cache = HitCache::new(Arc::clone(page), regions)?;
    for slot in 0..regions {
        let address = base + u64::from(slot) * 2 * REGION_BYTES;
        let region = Region { address, len_bytes: REGION_BYTES, slot, generation: 0, slot_offset: 0, identity };
        let inserted = cache.insert(region, ());
        ensure!(inserted.is_ok(), "region {slot} was not taken");
    }
    Ok(cache)
}

impl Measurement for Hits {
    fn round(&mut self, turn: Turn) -> anyhow::Result<Vec<Sample>> {
        let mut samples = Vec::new();
        for (regions, cache) in &self.caches {
            let (mut cache, count) = (cache, self.count);
            let mut times = Vec::new();
            for threads in [1, 2] {
                let ours = |cache: &mut &HitCache<()>| time_hits(cache, BASE, *regions, threads, count);
                let peers = |_: &mut &HitCache<()>| ask_peer(&self.peer, *regions, threads, count);
                let (ours, peers) = turn.both(&mut cache, ours, peers)?;
                samples.push(Sample::against(ours, peers));
                times.push(ours);
            }
            if let [one, two] = times[..] {
                samples.push(Sample::against(2e3 / two, 1e3 / one));
            }
        }
        Ok(samples)
    }
}

/// Nanoseconds of a hit as each thread sees them.
fn time_hits(cache: &HitCache<()>, base: u64, regions: u32, threads: u64, count: u32) -> anyhow::Result<f64> {
    let start = Instant::now();
    let missed: u64 = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads)
            .map(|thread| scope.spawn(move || look_up(cache, base, u64::from(regions), thread * 7919, count)))
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or(1)).sum()
    });
    ensure!(missed == 0, "{missed} regions were not found");
    Ok(start.elapsed().as_secs_f64() * 1e9 / f64::from(count))
}

/// Looks regions up in the order in which the peer does, and gives how many were not found.
fn look_up(cache: &HitCache<()>, base: u64, regions: u64, seed: u64, count: u32) -> u64 {
    let mut x = 88_172_645_463_325_252 + seed;
    let mut missed = 0;
    for _ in 0..count {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        match cache.get(base + x % regions * 2 * REGION_BYTES, REGION_BYTES) {
            Some(hit) => {
                std::hint::black_box(hit.offset());
            }
            None => missed += 1,
        }
    }
    missed
}

fn ask_peer(peer: &Path, regions: u32, threads: u64, count: u32) -> anyhow::Result<f64> {
    let arguments = [u64::from(regions), threads, u64::from(count)].map(|number| number.to_string());
    let output = Command::new(peer).args(arguments).output()?;
    ensure!(output.status.success(), "{} ended with {}", peer.display(), output.status);
    let text = String::from_utf8(output.stdout)?;
    text.trim().parse().with_context(|| format!("'{text}' of {}", peer.display()))
}
