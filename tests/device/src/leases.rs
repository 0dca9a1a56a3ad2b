//! Leases of a daemon with the real GPU: transfers, scrubs, killed clients.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Instant;

use anyhow::{Context as _, ensure};
use gdrd_client::{AcquireOptions, Client, Mapping, Operation, QueuePairOptions, Source, Status};

use tokio::runtime::Runtime;

use crate::Check;
use crate::daemon::{CONFIG, Daemon, connect, runtime, session};
use crate::host::{Host, driver_files_of, name_of, wait_for, workers_of};

const MIB: u64 = 1 << 20;
const KILL_ROUNDS: usize = 200;
/// Clients that are alive and killed together: each has a context of about 0.5 GiB.
const KILLED_TOGETHER: usize = 10;
const SLACK_MIB: u64 = 8;

pub(crate) fn checks() -> Vec<Check> {
    let check = |name: &str, check: fn(&Host) -> anyhow::Result<()>| -> Check { (name.to_owned(), Box::new(check)) };
    vec![
        check("the daemon tells its backends and starts no worker by itself", backends_are_told),
        check("two client processes move 1 GiB by a queue pair, every byte right", two_processes_move_a_gib),
        check("memory lent again is the same and all zero", memory_lent_again_is_zero),
        check("a post waits for long work on a stream and sends its result", posts_wait_for_the_stream),
        check("copies wait for their end once that is asked for, and not before", memory_operations_wait),
        check("a session without proof of the gpu is refused", proof_is_asked_for),
        check("200 killed clients leave no memory behind", killed_clients_leave_nothing),
        check("gdrctl's drain frees the device and its memory", drain_frees_all),
        check("an idle daemon holds no device file but what leases need", idle_daemon_holds_no_device),
    ]
}

/// A peer process with its two ends.
pub(crate) struct Peer {
    pub(crate) child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Peer {
    pub(crate) fn start(role: &str, folder: &Path, gpu: &str, bytes: u64) -> anyhow::Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["peer", role])
            .arg(folder)
            .args([gpu, &bytes.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let to = child.stdin.take().context("no stdin")?;
        let from = BufReader::new(child.stdout.take().context("no stdout")?);
        Ok(Self { child, to, from })
    }

    pub(crate) fn hear(&mut self) -> anyhow::Result<String> {
        let mut line = String::new();
        ensure!(self.from.read_line(&mut line)? > 0, "a peer ended: {:?}", self.child.wait()?);
        Ok(line.trim().to_owned())
    }

    pub(crate) fn say(&mut self, line: &str) -> anyhow::Result<()> {
        Ok(writeln!(self.to, "{line}")?)
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn backends_are_told(host: &Host) -> anyhow::Result<()> {
    let daemon = Daemon::start(host, CONFIG)?;
    let status =
        runtime()?.block_on(async { Ok::<_, anyhow::Error>(connect(&daemon.runtime_dir()).await?.status().await?) })?;
    for name in ["cuda", "nvml", "sim"] {
        let backend = status.backends.iter().find(|backend| backend.name == name);
        let backend = backend.with_context(|| format!("no backend {name}"))?;
        ensure!(backend.present, "{name} is absent: {}", backend.reason);
    }
    ensure!(workers_of(daemon.pid())?.is_empty(), "a worker runs before the first lease");
    Ok(())
}

fn two_processes_move_a_gib(host: &Host) -> anyhow::Result<()> {
    let daemon = Daemon::start(host, CONFIG)?;
    let (folder, bytes) = (daemon.runtime_dir(), 1 << 30);
    let mut sender = Peer::start("sender", &folder, &host.gpu.uuid, bytes)?;
    let mut receiver = Peer::start("receiver", &folder, &host.gpu.uuid, bytes)?;
    // Addresses, then that both are connected.
    for _ in 0..2 {
        let (to_receiver, to_sender) = (sender.hear()?, receiver.hear()?);
        sender.say(&to_sender)?;
        receiver.say(&to_receiver)?;
    }
    let written = sender.hear()?;
    receiver.say(&written)?;
    let verdict = receiver.hear()?;
    ensure!(verdict == "every byte is right", "{verdict}");
    Ok(())
}

fn memory_lent_again_is_zero(host: &Host) -> anyhow::Result<()> {
    let daemon = Daemon::start(host, "")?;
    let len_bytes = 64 * MIB;
    runtime()?.block_on(async {
        let session = session(&daemon.runtime_dir()).await?;
        let acquire = || session.acquire(AcquireOptions::on_gpu(&host.gpu.uuid, len_bytes));
        let first = acquire().await?;
        // A mapping of our own, which outlives the lease: it shows whether the same memory comes again.
        let old = Mapping::import(&host.own, std::os::fd::AsFd::as_fd(&first.try_clone_fd()?), len_bytes)?;
        old.fill(0, len_bytes, 0xab)?;
        first.release().await?;
        let mut content = vec![1; 64 << 20];
        let mut held = Vec::new();
        // Buffers made ahead may come first.
        for round in 0..16_u8 {
            let next = acquire().await?;
            next.read_into(0, &mut content)?;
            ensure!(content.iter().all(|byte| *byte == 0), "a lent buffer is not zero");
            let marker = [round + 1; 16];
            next.write_from(len_bytes / 2, &marker)?;
            let mut seen = [0; 16];
            old.read_into(len_bytes / 2, &mut seen)?;
            if seen == marker {
                return Ok(());
            }
            held.push(next);
        }
        anyhow::bail!("the memory was not lent again in 16 leases")
    })
}

fn posts_wait_for_the_stream(host: &Host) -> anyhow::Result<()> {
    const LONG: u64 = 4 << 30;
    const FILLS: u8 = 200;
    let daemon = Daemon::start(host, CONFIG)?;
    runtime()?.block_on(async {
        let session = session(&daemon.runtime_dir()).await?;
        let from = session.acquire(AcquireOptions::on_gpu(&host.gpu.uuid, LONG)).await?;
        let to = session.acquire(AcquireOptions::on_gpu(&host.gpu.uuid, 2 * MIB)).await?;
        let queue_pair = session.create_queue_pair(QueuePairOptions::near_gpu(&host.gpu.uuid)).await?;
        queue_pair.connect(queue_pair.endpoint()).await?;
        let (source, remote) = (from.registration(queue_pair.hca())?, to.registration(queue_pair.hca())?.remote());
        let memory = from.device_memory()?;
        // Work of some hundred milliseconds, whose last value is the one to be seen.
        let started = Instant::now();
        for byte in 1..=FILLS {
            memory.queue_fill(0, LONG, byte)?;
        }
        let queued = started.elapsed();
        let len = u32::try_from(2 * MIB)?;
        let source = Source::Local(source.span(LONG - 2 * MIB, len)?);
        let write = Operation::Write { source, remote: remote.span(0, len.into())?, imm: None };
        queue_pair.post(1, write)?;
        let waited = started.elapsed() - queued;
        let completion = queue_pair.completion().await?;
        ensure!(completion.status == Status::Success, "the write ended as {}", completion.status);
        let mut content = vec![0; 2 << 20];
        to.read_into(0, &mut content)?;
        ensure!(content.iter().all(|byte| *byte == FILLS), "the far side has {:?}", content.first());
        ensure!(waited > queued, "the work was over before the post: queued {queued:?}, waited {waited:?}");
        Ok(())
    })
}

/// `CU_CTX_SYNC_MEMOPS` is off by itself. On, a memset of device memory returns when it is done.
fn memory_operations_wait(host: &Host) -> anyhow::Result<()> {
    const LONG: u64 = 8 << 30;
    let mut peer = Peer::start("memops", Path::new("-"), &host.gpu.uuid, LONG)?;
    let (before, after): (u64, u64) = (peer.hear()?.parse()?, peer.hear()?.parse()?);
    // 8 GiB take about 2 ms at the memory's bandwidth; queueing them takes some microseconds.
    ensure!(before * 10 < after, "a memset of 8 GiB returns after {before} us, and after {after} us with the flag");
    Ok(())
}

fn proof_is_asked_for(host: &Host) -> anyhow::Result<()> {
    let daemon = Daemon::start(host, CONFIG)?;
    runtime()?.block_on(async {
        let session = connect(&daemon.runtime_dir()).await?.open_session("unproven").await?;
        let refused = session.acquire(AcquireOptions::on_gpu(&host.gpu.uuid, 2 * MIB)).await;
        let error = refused.err().context("an unproven session got a buffer")?;
        ensure!(error.reason() == Some("GPU_NOT_PROVEN"), "{error}");
        Ok(())
    })
}

/// Memory in use that is neither in buffers of the daemon nor of its workers, MiB.
fn others_mib(host: &Host, runtime: &Runtime, client: &Client) -> anyhow::Result<u64> {
    let told = runtime.block_on(client.gpu_memory())?;
    let gpu = told.iter().find(|gpu| gpu.gpu_uuid == host.gpu.uuid).context("the gpu is not told")?;
    Ok(gpu.driver.as_ref().context("the driver tells nothing")?.others_bytes / MIB)
}

fn killed_clients_leave_nothing(host: &Host) -> anyhow::Result<()> {
    let daemon = Daemon::start(host, CONFIG)?;
    let runtime = runtime()?;
    let client = runtime.block_on(connect(&daemon.runtime_dir()))?;
    let before = host.used_mib()?;
    let others = || others_mib(host, &runtime, &client);
    let others_before = others()?;
    for _ in 0..KILL_ROUNDS / KILLED_TOGETHER {
        let peers: Result<Vec<_>, _> = (0..KILLED_TOGETHER)
            .map(|_| Peer::start("holder", &daemon.runtime_dir(), &host.gpu.uuid, 64 * MIB))
            .collect();
        let mut peers = peers?;
        for peer in &mut peers {
            ensure!(peer.hear()? == "held", "a client did not get its buffer");
        }
        // An answer of the driver may be half a second old.
        wait_for("contexts of clients to be seen", || Ok(others()? > others_before))?;
        // By SIGKILL, all at once.
        drop(peers);
        // What the daemon has is its pool's, and is looked at in the end.
        wait_for("what killed clients used", || Ok(others()? <= others_before + SLACK_MIB))?;
    }
    wait_for("the workers' end", || Ok(workers_of(daemon.pid())?.is_empty()))?;
    host.wait_for_used_mib(before + SLACK_MIB)
}

fn drain_frees_all(host: &Host) -> anyhow::Result<()> {
    let before = host.used_mib()?;
    let daemon = Daemon::start(host, "")?;
    let runtime = runtime()?;
    runtime.block_on(async {
        let client = connect(&daemon.runtime_dir()).await?;
        let session = session(&daemon.runtime_dir()).await?;
        let kept = session.acquire(AcquireOptions::on_gpu(&host.gpu.uuid, 64 * MIB)).await?;
        let buffer = session.acquire(AcquireOptions::on_gpu(&host.gpu.uuid, 64 * MIB)).await?;
        kept.device_memory()?;
        kept.release().await?;
        ensure!(session.kept_mappings_bytes() == 64 * MIB, "a released buffer is not kept mapped");
        let drained = client.drain(&host.gpu.uuid, false).await?;
        ensure!(drained.gpu_uuids == [host.gpu.uuid.clone()], "another gpu was drained");
        ensure!(drained.under_way.is_empty(), "the gpu is still in use: {:?}", drained.under_way);
        let refused = session.acquire(AcquireOptions::on_gpu(&host.gpu.uuid, 64 * MIB)).await;
        ensure!(refused.is_err(), "a drained gpu is lent");
        // Revoked, it has another generation, which 0 does not ask about.
        session.release_lease(buffer.lease_id(), 0).await?;
        // Its descriptor here holds the memory as well as any other.
        drop(buffer);
        ensure!(workers_of(daemon.pid())?.is_empty(), "a worker is left");
        wait_for("the daemon to let go", || Ok(driver_files_of(daemon.pid())?.is_empty()))?;
        host.wait_for_used_mib(before + SLACK_MIB)?;
        client.drain(&host.gpu.uuid, true).await?;
        let _again = session.acquire(AcquireOptions::on_gpu(&host.gpu.uuid, 64 * MIB)).await?;
        Ok(())
    })
}

fn idle_daemon_holds_no_device(host: &Host) -> anyhow::Result<()> {
    let daemon = Daemon::start(host, CONFIG)?;
    let runtime = runtime()?;
    let session = runtime.block_on(session(&daemon.runtime_dir()))?;
    let buffer = runtime.block_on(session.acquire(AcquireOptions::on_gpu(&host.gpu.uuid, 2 * MIB)))?;
    wait_for("the worker's end", || Ok(workers_of(daemon.pid())?.is_empty()))?;
    let held = driver_files_of(daemon.pid())?;
    // Exported memory is a file of the control device; a device's own file would block its reset.
    ensure!(held.iter().all(|file| name_of(file) == "nvidiactl"), "the daemon holds {held:?}");
    runtime.block_on(buffer.release())?;
    drop(session);
    wait_for("all descriptors to be closed", || Ok(driver_files_of(daemon.pid())?.is_empty()))
}
