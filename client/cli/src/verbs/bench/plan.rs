//! `gdrctl plan` on the DGX A100 profile: CPU time of the whole process, start to end.

use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use nix::sys::resource::{UsageWho, getrusage};

use super::Figure;
use super::sample::median;

const PROFILE: &str = "dgx-a100";
const ROUNDS: u32 = 21;
const MOST_MS: f64 = 10.0;

pub(super) fn measure() -> anyhow::Result<Vec<Figure>> {
    let mut times = Vec::new();
    for _ in 0..ROUNDS {
        let before = children_cpu()?;
        plan_once()?;
        times.push(children_cpu()?.saturating_sub(before));
    }
    Ok(vec![Figure {
        name: "plan of the dgx-a100 profile",
        value: median(times).as_secs_f64() * 1e3,
        unit: "ms",
        most: Some(MOST_MS),
        scatter: None,
        note: format!("median CPU time of {ROUNDS} whole processes"),
    }])
}

fn plan_once() -> anyhow::Result<()> {
    let this = std::env::current_exe().context("find this program")?;
    let mut command = Command::new(this);
    command.args(["plan", "--input", PROFILE, "--format", "json"]).stdout(Stdio::null());
    let status = command.status().context("start gdrctl plan")?;
    ensure!(status.success(), "gdrctl plan ended with {status}");
    Ok(())
}

/// CPU time of all children that have ended, getrusage(2).
fn children_cpu() -> anyhow::Result<Duration> {
    let usage = getrusage(UsageWho::RUSAGE_CHILDREN).context("getrusage of the children")?;
    let micros = |time: nix::sys::time::TimeVal| {
        let (seconds, micros) = (u64::try_from(time.tv_sec()), u64::try_from(time.tv_usec()));
        Duration::from_secs(seconds.unwrap_or(0)) + Duration::from_micros(micros.unwrap_or(0))
    };
    Ok(micros(usage.user_time()) + micros(usage.system_time()))
}
