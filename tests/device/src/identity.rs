//! Memory of this process that is freed behind the registration cache: told apart by the driver's number for it.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context as _, ensure};
use gdrd_client::{AcquireOptions, AdoptOptions, Allocation, Client, Gpu, Mapping, buffer_id};

use crate::Check;
use crate::daemon::{CONFIG, Daemon, connect, runtime, session};
use crate::host::{Host, wait_for};
use crate::peers::say;

const MIB: u64 = 1 << 20;
const LEN_BYTES: u64 = 64 * MIB;
/// Allocations after which the driver has to have given an address again.
const ROUNDS: u32 = 64;
const SLACK_MIB: u64 = 8;
/// Allocations asked about in turn when the cost is measured, and how often each.
const TIMED: (u64, u32) = (64, 1000);

pub(crate) fn checks() -> Vec<Check> {
    let check = |name: &str, check: fn(&Host) -> anyhow::Result<()>| -> Check { (name.to_owned(), Box::new(check)) };
    vec![
        check("no two allocations have one number, at whatever address: memory of cuMemAlloc", |host| {
            numbers_are_never_used_again(|| {
                let memory = Allocation::new(&host.own, LEN_BYTES)?;
                Ok((memory.device_address(), Box::new(memory)))
            })
        }),
        check("no two allocations have one number, at whatever address: memory of cuMemCreate", |host| {
            numbers_are_never_used_again(|| {
                let memory = Mapping::create(&host.own, LEN_BYTES)?;
                Ok((memory.device_address(), Box::new(memory)))
            })
        }),
        check("adopted memory that was freed is seen to be, and comes back", freed_memory_comes_back),
        check("leased memory is found by its address, and adopted by nobody", leased_memory_is_not_adopted),
    ]
}

/// Anything that frees its memory on drop.
trait Memory {}
impl Memory for Allocation {}
impl Memory for Mapping {}

fn numbers_are_never_used_again(make: impl Fn() -> anyhow::Result<(u64, Box<dyn Memory>)>) -> anyhow::Result<()> {
    let (mut numbers, mut addresses) = (BTreeSet::new(), BTreeSet::new());
    let mut again = 0;
    for _ in 0..ROUNDS {
        let (address, memory) = make()?;
        let places = [address, address + LEN_BYTES / 2 + 1, address + LEN_BYTES - 1];
        // On a thread that has no context current, as a client's thread that looks something up.
        let asked = std::thread::spawn(move || places.map(buffer_id)).join();
        let [Ok(first), Ok(middle), Ok(last)] = asked.map_err(|_| anyhow::anyhow!("it panicked"))? else {
            anyhow::bail!("memory at {address:#x} has no number")
        };
        ensure!(first == middle && middle == last, "one allocation has the numbers {first}, {middle} and {last}");
        ensure!(numbers.insert(first), "number {first} comes again");
        again += u32::from(!addresses.insert(address));
        drop(memory);
        ensure!(buffer_id(address).is_err(), "memory that was freed has a number");
    }
    ensure!(again > 0, "no address came again in {ROUNDS} rounds, which proves nothing");
    Ok(())
}

async fn adopted_bytes(client: &Client) -> anyhow::Result<f64> {
    let stats = client.stats().await?;
    Ok(stats.iter().filter(|stat| stat.name == "gdrd_adopted_bytes").map(|stat| stat.value).sum())
}

fn freed_memory_comes_back(host: &Host) -> anyhow::Result<()> {
    // Room for one and a half of it.
    let rule = format!("[[policy.lease]]\nwho = \"daemon\"\nmax_bytes = {}\n", LEN_BYTES / 2 * 3);
    let daemon = Daemon::start(host, &(CONFIG.to_owned() + &rule))?;
    let runtime = runtime()?;
    runtime.block_on(async {
        let client = connect(&daemon.runtime_dir()).await?;
        let session = session(&daemon.runtime_dir()).await?;
        let before = host.used_mib()?;
        let memory = Allocation::new(&host.own, LEN_BYTES)?;
        let adopted = session.adopt(AdoptOptions::cuda(&host.own, memory.device_address(), LEN_BYTES)?).await?;
        ensure!(adopted.len_bytes() == LEN_BYTES, "{adopted:?}");
        ensure!(adopted_bytes(&client).await? == LEN_BYTES as f64, "it does not count as many bytes as it has");
        ensure!(session.give_up_freed_memory() == 0, "it is given up while in use");
        let more = Allocation::new(&host.own, LEN_BYTES)?;
        let refused = session.adopt(AdoptOptions::cuda(&host.own, more.device_address(), LEN_BYTES)?).await;
        let error = refused.err().context("more was adopted than the rule allows")?;
        ensure!(error.reason() == Some("QUOTA_BYTES"), "{error}");
        drop(more);
        drop(memory);
        // The daemon's dma-buf keeps it: nothing tells of a free.
        ensure!(host.used_mib()? + SLACK_MIB >= before + LEN_BYTES / MIB, "memory was freed under its dma-buf");
        ensure!(session.give_up_freed_memory() == 1, "it is not seen that the memory was freed");
        adopted.disown().await?;
        ensure!(adopted_bytes(&client).await? == 0.0, "the daemon has it still");
        wait_for("the memory to come back", || Ok(host.used_mib()? <= before + SLACK_MIB))
    })
}

fn leased_memory_is_not_adopted(host: &Host) -> anyhow::Result<()> {
    let daemon = Daemon::start(host, CONFIG)?;
    runtime()?.block_on(async {
        let client = connect(&daemon.runtime_dir()).await?;
        let session = session(&daemon.runtime_dir()).await?;
        let buffer = session.acquire(AcquireOptions::on_gpu(host.own.uuid(), 2 * MIB)).await?;
        let address = buffer.device_memory()?.device_address();
        let hit = session.registration_or_register(address + 4096, 64).await?;
        ensure!(hit.span().context("a long range")?.offset == 4096, "the range starts elsewhere");
        drop(hit);
        let export = AdoptOptions::cuda(&host.own, address, 2 * MIB)?;
        let refused = session.adopt(export).await.err().context("memory of a lease was adopted")?.to_string();
        ensure!(refused.contains(&format!("of lease {}; register", buffer.lease_id())), "{refused}");
        for _ in 0..ROUNDS {
            if adopted_bytes(&client).await? == 0.0 {
                break;
            }
        }
        ensure!(adopted_bytes(&client).await? == 0.0, "the daemon has it still");
        buffer.release().await?;
        ensure!(session.registration(address + 4096, 64).is_none(), "memory of no lease is found");
        Ok(())
    })
}

/// Registers its own memory, frees it, and has the next allocation at the same address: says what each lookup found. Needs an
/// HCA that takes memory which a client made, and so no simulated one over a real GPU.
pub(crate) async fn look_up_freed(folder: &Path, gpu: &str, bytes: u64) -> anyhow::Result<()> {
    let (session, gpu) = (session(folder).await?, Gpu::open(gpu)?);
    let client = connect(folder).await?;
    let memory = Allocation::new(&gpu, bytes)?;
    let (address, adopt) = (memory.device_address(), |at| AdoptOptions::cuda(&gpu, at, bytes));
    let first = session.adopt(adopt(address)?).await?;
    let hit = session.registration_or_register(address, bytes).await?;
    let old = (hit.slot(), hit.span().context("a long range")?.generation);
    drop(hit);
    say(if session.registration(address + 4096, 64).is_some() { "hit" } else { "miss" })?;
    drop(memory);
    say(if session.registration(address + 4096, 64).is_some() { "hit" } else { "miss" })?;
    let memory = Allocation::new(&gpu, bytes)?;
    ensure!(memory.device_address() == address, "the address did not come again");
    say(if session.registration(address, 64).is_some() { "hit" } else { "miss" })?;
    let refused = session.registration_or_register(address, 64).await.err().context("freed memory was registered")?;
    say(&refused.to_string())?;
    let second = session.adopt(adopt(address)?).await?;
    let hit = session.registration_or_register(address, bytes).await?;
    ensure!((hit.slot(), hit.span().context("a long range")?.generation) != old, "the old registration came again");
    say(if session.registration(address, 64).is_some() { "hit" } else { "miss" })?;
    first.disown().await?;
    ensure!(adopted_bytes(&client).await? == bytes as f64, "freed memory is still adopted");
    drop((hit, second));
    // What is freed between its export and its adoption is at the address no more.
    let exported = adopt(address)?;
    drop(memory);
    let memory = Allocation::new(&gpu, bytes)?;
    ensure!(memory.device_address() == address, "the address did not come again");
    say(&session.adopt(exported).await.err().context("other memory was taken for it")?.to_string())?;
    say("done")
}

/// Nanoseconds of asking for a number, the median of the rounds.
pub(crate) fn cost_ns(gpu: &Arc<Gpu>) -> anyhow::Result<f64> {
    let (count, rounds) = TIMED;
    let memories = (0..count).map(|_| Allocation::new(gpu, 2 * MIB)).collect::<Result<Vec<_>, _>>()?;
    let mut times = Vec::new();
    for _ in 0..rounds {
        let started = Instant::now();
        for memory in &memories {
            std::hint::black_box(buffer_id(memory.device_address())?);
        }
        times.push(started.elapsed());
    }
    times.sort_unstable();
    Ok(times.get(times.len() / 2).map_or(0.0, |time| time.as_secs_f64() * 1e9 / count as f64))
}
