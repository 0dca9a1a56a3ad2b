//! What the GPU driver of this host tells, asked by the daemon's binary: NVML is none of gdrctl's libraries.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::channel;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use gdrd_topology::driver_file::{self, MAX_DRIVER_BYTES};
use gdrd_topology::model::DriverFacts;
use gdrd_topology::words::counted;

/// The daemon's binary: beside this one, else wherever PATH has it. No daemon needs to run.
fn program() -> PathBuf {
    let own = std::env::current_exe().ok();
    let beside = own.and_then(|own| Some(own.parent()?.join("gdrd"))).filter(|path| path.is_file());
    beside.unwrap_or_else(|| "gdrd".into())
}

/// What the driver of this host tells, or nothing on a host without one. Whether it was asked is said on stderr.
pub(crate) fn of_this_host(patience: Duration) -> Option<DriverFacts> {
    if !Path::new("/proc/driver/nvidia").exists() {
        anstream::eprintln!("note: nvml was not asked: no nvidia driver is loaded here");
        return None;
    }
    match ask(patience) {
        Ok(facts) => {
            anstream::eprintln!("note: nvml was asked, and told of {}", counted(facts.gpus.len(), "GPU"));
            Some(facts)
        }
        Err(error) => {
            anstream::eprintln!("note: nvml did not answer, so there are no nvlinks and no fabric: {error:#}");
            None
        }
    }
}

/// Asks, for at most `patience`.
///
/// # Errors
/// Why there is no answer: no daemon's binary, no NVML, or one that hangs.
pub(crate) fn ask(patience: Duration) -> anyhow::Result<DriverFacts> {
    let mut child = Command::new(program())
        .args(["worker", "facts"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("start gdrd to ask nvml")?;
    let (output, errors) = (child.stdout.take(), child.stderr.take());
    let (sender, receiver) = channel();
    // Left behind where the driver hangs.
    std::thread::spawn(move || {
        let (mut text, mut why) = (String::new(), String::new());
        let limit = u64::try_from(MAX_DRIVER_BYTES).unwrap_or(u64::MAX);
        let read = output.map(|output| output.take(limit).read_to_string(&mut text));
        // What it complains of is short, or cut off.
        let _ = errors.map(|errors| errors.take(limit).read_to_string(&mut why));
        // Refused when nobody waits any more.
        let _ = sender.send((read, text, why));
    });
    let Ok((_, text, why)) = receiver.recv_timeout(patience) else {
        let _ = child.kill();
        anyhow::bail!("nvml does not answer in {patience:?}");
    };
    let status = child.wait().context("wait for gdrd")?;
    ensure!(status.success(), "{}", why.trim());
    Ok(driver_file::from_text(&text)?)
}
