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
        check("a daemon killed under a keeper takes up the leases on all gpus, content and keys", kept_on_all_gpus),
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
    // Leases that no client maps: there is no context but those of workers, which end.
    let session = runtime.block_on(session(&daemon.runtime_dir()))?;
    let mut leased = Vec::new();
    for gpu in &host.gpus {
        leased.push(runtime.block_on(session.acquire(AcquireOptions::on_gpu(&gpu.uuid, LEASE_BYTES)))?);
    }
    wait_for("idle workers to end", || Ok(workers_of(daemon.pid())?.is_empty()))?;
    let unmapped = settled(host, &runtime, &client)?;
    for (gpu, before) in unmapped.iter().zip(&empty) {
        leases_are_what_is_used_more(gpu, before)?;
    }
    drop((leased, session));
    wait_for("the leases to end", || {
        let told = runtime.block_on(client.gpu_memory())?;
        Ok(told.iter().all(|gpu| buffers_of(gpu) == 0))
    })?;
    let holders = holders(host, &daemon, 1)?;
    wait_for("idle workers to end", || Ok(workers_of(daemon.pid())?.is_empty()))?;
    for (gpu, before) in settled(host, &runtime, &client)?.iter().zip(&empty) {
        let driver = gpu.driver.as_ref().context("the driver tells nothing")?;
        let sum = buffers_of(gpu) + driver.context_bytes + driver.others_bytes;
        ensure!(sum == driver.used_bytes, "{sum} of {driver:?}");
        ensure!(gpu.leased_bytes == LEASE_BYTES, "{} bytes are leased", gpu.leased_bytes);
        ensure!(driver.context_bytes == 0, "no worker runs, {} bytes of contexts", driver.context_bytes);
        ensure!(driver.total_bytes > driver.used_bytes, "{driver:?}");
        // Contexts of clients are others' to the daemon.
        let others = |gpu: &GpuMemoryUse| gpu.driver.as_ref().map_or(0, |driver| driver.others_bytes);
        ensure!(others(gpu) > others(before), "a client's context is nobody's: {driver:?}");
        bar1_grows_as_use_does(gpu, before)?;
        ensure!(driver.bar1_used_at_start_bytes.is_some(), "BAR1 at the start is not told");
    }
    drop(holders);
    wait_for("the leases to end", || {
        let told = runtime.block_on(client.gpu_memory())?;
        Ok(told.iter().all(|gpu| buffers_of(gpu) == 0))
    })
}

/// Between two looks nothing came but one lease: use of the GPU grew by it, and what is others' is as it was.
fn leases_are_what_is_used_more(gpu: &GpuMemoryUse, before: &GpuMemoryUse) -> anyhow::Result<()> {
    let (now, then) = (gpu.driver.as_ref(), before.driver.as_ref());
    let (now, then) = (now.context("the driver tells nothing")?, then.context("the driver told nothing")?);
    let more = now.used_bytes.checked_sub(then.used_bytes).context("less is used with a lease than without")?;
    ensure!(gpu.leased_bytes == LEASE_BYTES, "{} bytes are leased", gpu.leased_bytes);
    ensure!(more.abs_diff(LEASE_BYTES) <= SLACK_MIB * MIB, "{more} bytes more are used with a lease of {LEASE_BYTES}");
    let others = now.others_bytes.abs_diff(then.others_bytes);
    ensure!(others <= SLACK_MIB * MIB, "others had {} bytes, and have {}", then.others_bytes, now.others_bytes);
    Ok(())
}

/// The driver maps what is in use there.
fn bar1_grows_as_use_does(gpu: &GpuMemoryUse, before: &GpuMemoryUse) -> anyhow::Result<()> {
    let used = |gpu: &GpuMemoryUse| gpu.driver.as_ref().map(|driver| driver.used_bytes);
    let bar1 = |gpu: &GpuMemoryUse| gpu.driver.as_ref().and_then(|driver| driver.bar1_used_bytes);
    let more = |of: &dyn Fn(&GpuMemoryUse) -> Option<u64>| of(gpu)?.checked_sub(of(before)?);
    let (used, bar1) = (more(&used).context("use shrank")?, more(&bar1).context("BAR1 use shrank, or is not told")?);
    println!("  {}: {} MiB more used, {} MiB more of BAR1", gpu.name, used / MIB, bar1 / MIB);
    ensure!(used.abs_diff(bar1) <= SLACK_MIB * MIB, "{used} bytes more are used, and {bar1} bytes more of BAR1");
    Ok(())
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

/// By a keeper's descriptors: the next daemon has the memory of each GPU, and lends it to who opens the lease.
fn kept_on_all_gpus(host: &Host) -> anyhow::Result<()> {
    let before = used(host)?;
    let daemon = Daemon::start_kept(host, CONFIG)?;
    let mut holders = holders(host, &daemon, 1)?;
    let old = daemon.daemon_pid().context("the daemon has no pid")?;
    kill_process(i32::try_from(old).ok().and_then(Pid::from_raw).context("no pid")?, Signal::KILL)?;
    for (gpu, holder) in host.gpus.iter().zip(&mut holders) {
        // Goes on with the next daemon, has new keys, and the content by its old mapping.
        for (said, wanted) in [("restarted", "new keys"), ("check", "right")] {
            holder.say(said)?;
            let heard = holder.hear()?;
            ensure!(heard == wanted, "{}: {heard}", gpu.uuid);
        }
        holder.say("lease")?;
        let mut opener = Peer::start("opener", &daemon.runtime_dir(), &gpu.uuid, LEASE_BYTES)?;
        opener.say(&holder.hear()?)?;
        let heard = opener.hear()?;
        ensure!(heard == "right", "{}: an opened lease: {heard}", gpu.uuid);
    }
    ensure!(daemon.daemon_pid() != Some(old), "the daemon is the same");
    drop((holders, daemon));
    wait_for_each(host, &before)
}

fn out_of_memory_tells_holders(host: &Host) -> anyhow::Result<()> {
    let all = host.gpu.memory.context("the driver tells no memory")?.total_bytes;
    let limits = "[limits]\nmax_lease_bytes = 1_099_511_627_776\n[[policy.lease]]\nwho = \"daemon\"\nmax_bytes = 1_099_511_627_776\n";
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
