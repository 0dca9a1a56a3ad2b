//! A daemon that is killed, and what its kept descriptors bring back.

use std::os::fd::AsFd as _;
use std::path::Path;

use anyhow::{Context as _, ensure};
use gdrd_client::{AcquireOptions, Mapping};
use rustix::process::{Pid, Signal, kill_process};

use crate::Check;
use crate::daemon::{Daemon, runtime, session};
use crate::host::{Host, wait_for, workers_of};
use crate::leases::Peer;

const MIB: u64 = 1 << 20;
const SLACK_MIB: u64 = 8;
/// Workers stay, so that it is the daemon's death that ends them.
const CONFIG: &str =
    "[pool]\nidle_s = 1\nheadroom_bytes = 0\n[gpu]\nworker_idle_s = 600\n[topology]\nrescan_interval_s = 0\n";

pub(crate) fn checks() -> Vec<Check> {
    let check = |name: &str, check: fn(&Host) -> anyhow::Result<()>| -> Check { (name.to_owned(), Box::new(check)) };
    vec![check("leases and their content outlive a daemon that is killed, by kept descriptors", content_outlives)]
}

fn runs(pid: u32) -> bool {
    Path::new("/proc").join(pid.to_string()).join("cmdline").exists()
        && !std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default().is_empty()
}

fn content_outlives(host: &Host) -> anyhow::Result<()> {
    let before = host.used_mib()?;
    let daemon = Daemon::start_kept(host, CONFIG)?;
    let runtime = runtime()?;
    // A second client, which maps its own and looks at it afterwards.
    let mut holder = Peer::start("holder", &daemon.runtime_dir(), &host.gpu.uuid, 64 * MIB)?;
    ensure!(holder.hear()? == "held", "the other client did not get its buffer");
    runtime.block_on(async {
        let session = session(&daemon.runtime_dir()).await?;
        let sizes = [2 * MIB, 64 * MIB, 1024 * MIB];
        let mut buffers = Vec::new();
        for (bytes, value) in sizes.into_iter().zip(0x31..) {
            let buffer = session.acquire(AcquireOptions::on_gpu(&host.gpu.uuid, bytes)).await?;
            buffer.device_memory()?.fill(0, bytes, value)?;
            buffers.push((buffer, value));
        }
        for round in 1..=2 {
            let old = daemon.daemon_pid().context("the daemon has no pid")?;
            let workers = workers_of(old)?;
            // After a restart the next one starts on need.
            ensure!(round > 1 || !workers.is_empty(), "no worker runs");
            kill_process(i32::try_from(old).ok().and_then(Pid::from_raw).context("no pid")?, Signal::KILL)?;
            ensure!(session.restarted(round - 1).await == Some(round), "the session did not go on");
            wait_for("the dead daemon's workers to end", || Ok(!workers.iter().any(|worker| runs(*worker))))?;
            for (buffer, value) in &buffers {
                ensure!(!buffer.is_current(), "old keys pass as current");
                buffer.refresh().await?;
                ensure!(buffer.is_current(), "the new keys are not current");
                // By what this process mapped before, and by the descriptor that it got then.
                let again = Mapping::import(&host.own, buffer.try_clone_fd()?.as_fd(), buffer.len_bytes())?;
                for mapping in [buffer.device_memory()?, &again] {
                    let mut content = vec![0; 2 << 20];
                    for offset in [0, buffer.len_bytes() - 2 * MIB] {
                        mapping.read_into(offset, &mut content)?;
                        ensure!(content.iter().all(|byte| byte == value), "the content changed in round {round}");
                    }
                }
            }
            holder.say("check")?;
            let seen = holder.hear()?;
            ensure!(seen == "right", "the other client: {seen}");
            // A new holder gets the memory by what the new daemon has of it.
            let (shared, value) = buffers.first().context("nothing is leased")?;
            let other = crate::daemon::session(&daemon.runtime_dir()).await?;
            let opened = other.open_lease(shared.lease_id()).await?;
            let mut byte = [0];
            opened.read_into(12_345, &mut byte)?;
            ensure!(byte == [*value], "an opened lease has other content");
            opened.release().await?;
        }
        // What was leased before is scrubbed by a worker that has imported it, and new leases are made.
        for (buffer, _) in buffers {
            buffer.release().await?;
        }
        let next = session.acquire(AcquireOptions::on_gpu(&host.gpu.uuid, 64 * MIB)).await?;
        let mut content = vec![1; 2 << 20];
        next.read_into(0, &mut content)?;
        ensure!(content.iter().all(|byte| *byte == 0), "a buffer after the restart is not zero");
        next.release().await?;
        Ok(())
    })?;
    drop(holder);
    drop(daemon);
    host.wait_for_used_mib(before + SLACK_MIB)
}
