//! Leases on all GPUs at once: whose the memory is, and what becomes of it when clients or the daemon are killed.

use anyhow::{Context as _, ensure};
use gdrd_client::v1::GpuMemoryUse;
use gdrd_client::{AcquireOptions, Client};
use rustix::process::{Pid, Signal, kill_process};
use tokio::runtime::Runtime;

use crate::Check;
use crate::daemon::{CONFIG, Daemon, connect, runtime, session};
use crate::host::{Host, wait_for, workers_of};
use crate::leases::Peer;

const MIB: u64 = 1 << 20;
const LEASE_BYTES: u64 = 64 * MIB;
/// Clients a GPU that are killed together.
const CLIENTS: usize = 4;
/// What the driver keeps of its own when everything is given back.
const SLACK_MIB: u64 = 8;
/// Rounding of what is shown in MiB.
const ROUNDING_MIB: u64 = 2;

pub(crate) fn checks() -> Vec<Check> {
    let check = |name: &str, check: fn(&Host) -> anyhow::Result<()>| -> Check { (name.to_owned(), Box::new(check)) };
    vec![
        check("whose the memory of each gpu is adds up to what nvidia-smi shows", memory_adds_up),
        check("clients killed on all gpus at once leave each as it was", killed_clients_leave_each_gpu_as_it_was),
        check("a daemon killed with leases on all gpus leaves content, and each gpu as it was", killed_daemon),
        check("out of memory tells what is free and who holds the rest", out_of_memory_tells_holders),
    ]
}

/// Memory in use on each GPU, MiB.
fn used(host: &Host) -> anyhow::Result<Vec<u64>> {
    host.gpus.iter().map(|gpu| host.used_mib_of(gpu)).collect()
}

fn wait_for_each(host: &Host, at_most: &[u64]) -> anyhow::Result<()> {
    host.gpus.iter().zip(at_most).try_for_each(|(gpu, at_most)| host.wait_for_used_mib_of(gpu, at_most + SLACK_MIB))
}

/// One holder of a lease for each of `per_gpu` on every GPU.
fn holders(host: &Host, daemon: &Daemon, per_gpu: usize) -> anyhow::Result<Vec<Peer>> {
    let uuids = host.gpus.iter().flat_map(|gpu| std::iter::repeat_n(&gpu.uuid, per_gpu));
    let started: Result<Vec<_>, _> =
        uuids.map(|uuid| Peer::start("holder", &daemon.runtime_dir(), uuid, LEASE_BYTES)).collect();
    let mut holders = started?;
    for holder in &mut holders {
        ensure!(holder.hear()? == "held", "a client did not get its buffer");
    }
    Ok(holders)
}

fn buffers_of(gpu: &GpuMemoryUse) -> u64 {
    gpu.leased_bytes + gpu.ready_bytes + gpu.clean_bytes + gpu.changing_bytes
}

/// Asks until what the daemon says of a GPU is what nvidia-smi shows: workers come and go in between.
fn settled(host: &Host, runtime: &Runtime, client: &Client) -> anyhow::Result<Vec<GpuMemoryUse>> {
    let mut told = Vec::new();
    wait_for("the figures to agree", || {
        told = runtime.block_on(client.gpu_memory())?;
        let shown = used(host)?;
        let agrees = |(gpu, shown): (&GpuMemoryUse, &u64)| {
            let used_mib = gpu.driver.as_ref().map_or(0, |driver| driver.used_bytes) / MIB;
            used_mib.abs_diff(*shown) <= ROUNDING_MIB && gpu.changing_bytes == 0
        };
        let of = |uuid: &String| told.iter().find(|gpu| gpu.gpu_uuid == *uuid);
        Ok(host.gpus.iter().zip(&shown).all(|(gpu, shown)| of(&gpu.uuid).is_some_and(|gpu| agrees((gpu, shown)))))
    })?;
    Ok(told)
}

fn memory_adds_up(host: &Host) -> anyhow::Result<()> {
    let daemon = Daemon::start(host, CONFIG)?;
    let runtime = runtime()?;
    let client = runtime.block_on(connect(&daemon.runtime_dir()))?;
    let empty = settled(host, &runtime, &client)?;
    let holders = holders(host, &daemon, 1)?;
    wait_for("idle workers to end", || Ok(workers_of(daemon.pid())?.is_empty()))?;
    for (gpu, before) in settled(host, &runtime, &client)?.iter().zip(&empty) {
        let driver = gpu.driver.as_ref().context("the driver tells nothing")?;
        let sum = buffers_of(gpu) + driver.context_bytes + driver.others_bytes;
        ensure!(sum == driver.used_bytes, "{sum} of {driver:?}");
        ensure!(gpu.leased_bytes == LEASE_BYTES, "{} bytes are leased", gpu.leased_bytes);
        ensure!(driver.context_bytes == 0, "no worker runs, {} bytes of contexts", driver.context_bytes);
        ensure!(driver.total_bytes > driver.used_bytes, "{driver:?}");
        let bar1 = |gpu: &GpuMemoryUse| gpu.driver.as_ref().and_then(|driver| driver.bar1_used_bytes);
        println!(
            "  {}: {} MiB used, BAR1 {:?}, {:?} before",
            gpu.name,
            driver.used_bytes / MIB,
            bar1(gpu),
            bar1(before)
        );
        ensure!(driver.bar1_used_at_start_bytes.is_some(), "BAR1 at the start is not told");
    }
    drop(holders);
    wait_for("the leases to end", || {
        let told = runtime.block_on(client.gpu_memory())?;
        Ok(told.iter().all(|gpu| buffers_of(gpu) == 0))
    })
}

fn killed_clients_leave_each_gpu_as_it_was(host: &Host) -> anyhow::Result<()> {
    let daemon = Daemon::start(host, CONFIG)?;
    let before = used(host)?;
    let holders = holders(host, &daemon, CLIENTS)?;
    let during = used(host)?;
    let least = CLIENTS as u64 * LEASE_BYTES / MIB;
    ensure!(
        during.iter().zip(&before).all(|(during, before)| *during >= before + least),
        "{before:?}, then {during:?}"
    );
    // By SIGKILL, all at once.
    drop(holders);
    wait_for("the workers' end", || Ok(workers_of(daemon.pid())?.is_empty()))?;
    wait_for_each(host, &before)
}

fn killed_daemon(host: &Host) -> anyhow::Result<()> {
    let before = used(host)?;
    let daemon = Daemon::start(host, CONFIG)?;
    let mut holders = holders(host, &daemon, 1)?;
    let pid = i32::try_from(daemon.pid()).ok().and_then(Pid::from_raw).context("no pid")?;
    kill_process(pid, Signal::KILL)?;
    drop(daemon);
    // Mappings keep the memory; only what the daemon and its workers had is given back.
    for holder in &mut holders {
        holder.say("check")?;
        let heard = holder.hear()?;
        ensure!(heard == "right", "{heard}");
    }
    let next = Daemon::start(host, CONFIG)?;
    let runtime = runtime()?;
    let session = runtime.block_on(session(&next.runtime_dir()))?;
    for gpu in &host.gpus {
        let buffer = runtime.block_on(session.acquire(AcquireOptions::on_gpu(&gpu.uuid, LEASE_BYTES)))?;
        let mut byte = [1];
        buffer.read_into(LEASE_BYTES - 1, &mut byte)?;
        ensure!(byte == [0], "the next daemon lends what is not zero");
    }
    drop((holders, session, next));
    wait_for_each(host, &before)
}

fn out_of_memory_tells_holders(host: &Host) -> anyhow::Result<()> {
    let all = host.gpu.memory.context("the driver tells no memory")?.total_bytes;
    let limits = "[limits]\nmax_lease_bytes = 1_099_511_627_776\n[[policy.lease]]\nwho = \"uid:0\"\nmax_bytes = 1_099_511_627_776\n";
    let daemon = Daemon::start(host, limits)?;
    runtime()?.block_on(async {
        let session = session(&daemon.runtime_dir()).await?;
        let _held = session.acquire(AcquireOptions::on_gpu(&host.gpu.uuid, LEASE_BYTES)).await?;
        let refused = session.acquire(AcquireOptions::on_gpu(&host.gpu.uuid, all)).await;
        let error = refused.err().context("all of the memory was lent")?;
        let told = error.to_string();
        ensure!(error.reason() == Some("GPU_OUT_OF_MEMORY"), "{told}");
        let held = format!("leases of this tenant hold {LEASE_BYTES} bytes");
        ensure!(told.contains("bytes free") && told.contains(&held), "{told}");
        Ok(())
    })
}
