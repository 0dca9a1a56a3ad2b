//! Workers as processes: when they are there, what they hold, and what outlives them.

use std::os::fd::AsFd as _;

use anyhow::{Context as _, ensure};
use gdrd_client::Mapping;
use gdrd_hal::{GpuCopies as _, GpuMemory as _};
use rustix::process::{Pid, Signal, kill_process};

use crate::Check;
use crate::host::{Host, driver_files_of, name_of, wait_for, workers_of};

const MIB: u64 = 1 << 20;
/// What the driver keeps of its own when everything is given back: it gives memory back in pieces of 2 MiB.
const SLACK_MIB: u64 = 8;

pub(crate) fn checks() -> Vec<Check> {
    let check = |name: &str, check: fn(&Host) -> anyhow::Result<()>| -> Check { (name.to_owned(), Box::new(check)) };
    vec![
        check("nvml names the gpu that cuda opens, and its device node", nvml_names_the_gpu),
        check("a worker starts on first use and ends when idle, and memory stays", idle_workers_end),
        check("memory and content outlive a worker that is killed", killed_workers_keep_memory),
        check("a worker that is killed and the descriptors closed give all memory back", all_memory_comes_back),
        check("a drained gpu has no process and no file of ours open", drain_frees_the_device),
        check("memory grows to 90 percent of the gpu and comes back", memory_grows_and_comes_back),
        check("content moves between the gpu and the host exactly", bytes_move_exactly),
    ]
}

fn own_pid() -> u32 {
    std::process::id()
}

fn nvml_names_the_gpu(host: &Host) -> anyhow::Result<()> {
    let facts = host.report.gpus.iter().filter_map(|gpu| gpu.fact(None)).collect::<Vec<_>>();
    ensure!(facts.iter().any(|fact| fact.uuid == host.uuid()), "{facts:?}");
    ensure!(host.own.uuid() == host.gpu.uuid, "cuda opened {}", host.own.uuid());
    let minor = host.gpu.minor.context("nvml tells no minor number")?;
    ensure!(std::fs::metadata(format!("/dev/nvidia{minor}")).is_ok(), "there is no /dev/nvidia{minor}");
    ensure!(host.gpu.memory.is_some_and(|memory| memory.total_bytes > 1 << 30), "{:?}", host.gpu.memory);
    Ok(())
}

fn idle_workers_end(host: &Host) -> anyhow::Result<()> {
    ensure!(workers_of(own_pid())?.is_empty(), "a worker runs before the first call");
    let pool = host.pool(1);
    let memory = pool.allocate(&host.uuid(), 64 * MIB)?;
    let workers = workers_of(own_pid())?;
    let [worker] = workers[..] else { anyhow::bail!("workers {workers:?} after one call") };
    let held = driver_files_of(worker)?;
    ensure!(held.iter().any(|file| name_of(file) != "nvidiactl"), "the worker holds {held:?}");
    Mapping::import(&host.own, memory.memory_fd(), 64 * MIB)?.fill(0, 64 * MIB, 0x5a)?;
    wait_for("the idle worker to end", || Ok(workers_of(own_pid())?.is_empty()))?;
    let mapping = Mapping::import(&host.own, memory.memory_fd(), 64 * MIB)?;
    let mut byte = [0];
    mapping.read_into(64 * MIB - 1, &mut byte)?;
    ensure!(byte == [0x5a], "the content is {byte:x?}");
    // The next use starts another, which takes the memory over by its descriptor.
    memory.scrub()?;
    mapping.read_into(64 * MIB - 1, &mut byte)?;
    ensure!(byte == [0] && workers_of(own_pid())?.len() == 1, "{byte:x?}");
    Ok(())
}

fn killed_workers_keep_memory(host: &Host) -> anyhow::Result<()> {
    let pool = host.pool(600);
    let memory = pool.allocate(&host.uuid(), 32 * MIB)?;
    let mapping = Mapping::import(&host.own, memory.memory_fd(), 32 * MIB)?;
    mapping.fill(0, 32 * MIB, 0xa5)?;
    let [worker] = workers_of(own_pid())?[..] else { anyhow::bail!("not one worker") };
    let pid = i32::try_from(worker).ok().and_then(Pid::from_raw).context("no pid")?;
    kill_process(pid, Signal::KILL)?;
    let error = pool.usage(&host.uuid()).err().context("a killed worker answered")?;
    ensure!(error.to_string().contains("signal: 9"), "{error}");
    let dma_buf = memory.dma_buf_fd().context("there is no dma-buf")?;
    let bytes = pool.find(dma_buf).context("the dma-buf is not known")?;
    let mut read = vec![0; 32 << 20];
    bytes.read(0, &mut read)?;
    ensure!(read.iter().all(|byte| *byte == 0xa5), "the content changed");
    memory.scrub()?;
    mapping.read_into(0, &mut read)?;
    ensure!(read.iter().all(|byte| *byte == 0), "the scrub left something");
    Ok(())
}

fn all_memory_comes_back(host: &Host) -> anyhow::Result<()> {
    let before = host.used_mib()?;
    let pool = host.pool(600);
    let memory = pool.allocate(&host.uuid(), 512 * MIB)?;
    ensure!(host.used_mib()? >= before + 512, "{} MiB after {before}", host.used_mib()?);
    let [worker] = workers_of(own_pid())?[..] else { anyhow::bail!("not one worker") };
    kill_process(i32::try_from(worker).ok().and_then(Pid::from_raw).context("no pid")?, Signal::KILL)?;
    wait_for("the worker's end", || Ok(workers_of(own_pid())?.is_empty()))?;
    // The driver takes a killed process apart after the last sign of it in /proc.
    host.wait_for_used_mib(before + 512 + SLACK_MIB)?;
    let held = host.used_mib()?;
    ensure!(held >= before + 512, "{held} MiB by descriptors, {before} before");
    drop(memory);
    drop(pool);
    host.wait_for_used_mib(before + SLACK_MIB)
}

fn drain_frees_the_device(host: &Host) -> anyhow::Result<()> {
    let before = host.used_mib()?;
    let pool = host.pool(600);
    let memory = pool.allocate(&host.uuid(), 2 * MIB)?;
    pool.drain(&host.uuid())?;
    ensure!(workers_of(own_pid())?.is_empty(), "a worker is left");
    ensure!(pool.usage(&host.uuid()).is_err(), "a drained gpu serves");
    drop(memory);
    host.wait_for_used_mib(before + SLACK_MIB)?;
    pool.resume(&host.uuid())?;
    pool.usage(&host.uuid())?;
    Ok(())
}

fn memory_grows_and_comes_back(host: &Host) -> anyhow::Result<()> {
    const PIECE: u64 = 2 << 30;
    let pool = host.pool(600);
    let start = pool.usage(&host.uuid())?;
    let mut memory = Vec::new();
    loop {
        let usage = pool.usage(&host.uuid())?;
        if (usage.total_bytes - usage.free_bytes) * 10 >= usage.total_bytes * 9 || usage.free_bytes < PIECE {
            break;
        }
        memory.push(pool.allocate(&host.uuid(), PIECE)?);
    }
    ensure!(memory.len() as u64 * PIECE * 10 >= start.free_bytes * 8, "only {} pieces", memory.len());
    let error = pool.allocate(&host.uuid(), start.total_bytes & !(2 * MIB - 1)).err();
    ensure!(matches!(error, Some(gdrd_hal::GpuMemoryError::OutOfMemory { .. })), "{error:?}");
    drop(memory);
    wait_for("memory to come back", || Ok(pool.usage(&host.uuid())?.free_bytes + SLACK_MIB * MIB >= start.free_bytes))
}

fn bytes_move_exactly(host: &Host) -> anyhow::Result<()> {
    let pool = host.pool(600);
    let (a, b) = (pool.allocate(&host.uuid(), 16 * MIB)?, pool.allocate(&host.uuid(), 16 * MIB)?);
    let find = |memory: &dyn gdrd_hal::GpuAllocation| {
        memory.dma_buf_fd().and_then(|fd| pool.find(fd.as_fd())).context("the dma-buf is not known")
    };
    let (from, to) = (find(&*a)?, find(&*b)?);
    let pattern: Vec<u8> = (0..9_u32 << 20).map(|at| (at ^ (at >> 9)).to_le_bytes()[0]).collect();
    from.write(12_345, &pattern)?;
    from.copy_to(12_345, &*to, 777, pattern.len() as u64)?;
    let mut read = vec![0; pattern.len()];
    to.read(777, &mut read)?;
    ensure!(read == pattern, "the content differs");
    let mut around = [1; 777];
    to.read(0, &mut around)?;
    ensure!(around.iter().all(|byte| *byte == 0), "something landed before the range");
    Ok(())
}
