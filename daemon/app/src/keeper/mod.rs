//! `gdrd keeper`: starts the daemon, keeps its descriptors, and starts it again with them when it dies. For containers and
//! tests, where there is no systemd. On SIGHUP it starts the daemon anew, as `systemctl restart` does. It speaks the same protocol (sd_notify(3), sd_listen_fds(3)).
//!
//! Role: owns the descriptors while there is no daemon. It listens to the daemon alone, by its credentials: workers inherit
//! the name of the socket. What it does not know it passes over, as systemd does.
//!
//! Must not know: what the descriptors are.

mod child;
mod store;

use std::ffi::OsString;
use std::process::{ExitCode, ExitStatus};
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::Interest;
use tokio::net::UnixDatagram;
use tokio::process::Child;
use tokio::signal::unix::{SignalKind, signal};
use tracing::warn;

use crate::notify;

pub(crate) use child::become_daemon;
use store::Store;

/// Descriptors kept at most, as in the service's unit.
const MOST_KEPT: u32 = 26_000;
/// Before the first restart; twice as much before each that follows soon, up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// A daemon that lived for so long starts the pauses anew.
const STABLE_AFTER: Duration = Duration::from_secs(10);
/// The daemon's exit code for wrong arguments: starting again changes nothing.
const EXIT_USAGE: i32 = 2;

/// Runs until the daemon ends by itself or is asked to.
///
/// # Errors
/// When the daemon cannot be started.
pub(crate) fn run(arguments: &[OsString]) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("start the runtime")?;
    runtime.block_on(keep(arguments))
}

async fn keep(arguments: &[OsString]) -> anyhow::Result<ExitCode> {
    let mut store = Store::bind(MOST_KEPT).context("bind the socket of the descriptor store")?;
    let mut terminate = signal(SignalKind::terminate()).context("wait for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("wait for SIGINT")?;
    let mut hangup = signal(SignalKind::hangup()).context("wait for SIGHUP")?;
    let mut pause = FIRST_PAUSE;
    loop {
        let started = Instant::now();
        store.drop_hung_up();
        let mut daemon = child::start(arguments, &store).await.context("start the daemon")?;
        let (status, asked) = tokio::select! {
            status = serve(&mut store, &mut daemon) => (status?, false),
            _ = hangup.recv() => {
                // It leaves everything to the next one, which starts at once.
                end(&mut store, &mut daemon, Signal::TERM).await?;
                continue;
            }
            // What is kept ends with the keeper, so the daemon is to give back what there is.
            _ = terminate.recv() => (end(&mut store, &mut daemon, Signal::INT).await?, true),
            _ = interrupt.recv() => (end(&mut store, &mut daemon, Signal::INT).await?, true),
        };
        if asked || status.success() || status.code() == Some(EXIT_USAGE) {
            let code = status.code().and_then(|code| u8::try_from(code).ok());
            return Ok(code.map_or(ExitCode::FAILURE, ExitCode::from));
        }
        pause = if started.elapsed() > STABLE_AFTER { FIRST_PAUSE } else { pause };
        warn!(%status, kept = store.len(), ?pause, "the daemon died; it is started again with what is kept");
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            _ = terminate.recv() => return Ok(ExitCode::SUCCESS),
            _ = interrupt.recv() => return Ok(ExitCode::SUCCESS),
        }
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Keeps what the daemon asks for until it ends; then what it asked for last.
async fn serve(store: &mut Store, daemon: &mut Child) -> anyhow::Result<ExitStatus> {
    let pid = daemon.id().and_then(|pid| i32::try_from(pid).ok()).and_then(Pid::from_raw);
    let pid = pid.context("a daemon without a pid")?;
    loop {
        tokio::select! {
            heard = store.hear() => pass_on(store.take(heard?, pid)),
            status = daemon.wait() => {
                while let Some(heard) = store.hear_now()? {
                    pass_on(store.take(heard, pid));
                }
                return status.context("wait for the daemon");
            }
        }
    }
}

/// Tells whoever started the keeper what the daemon says of itself.
fn pass_on(said: Option<String>) {
    if let Some(said) = said {
        notify::tell(&said);
    }
}

async fn end(store: &mut Store, daemon: &mut Child, signal: Signal) -> anyhow::Result<ExitStatus> {
    if let Some(pid) = daemon.id().and_then(|pid| i32::try_from(pid).ok()).and_then(Pid::from_raw) {
        // It may have ended on its own.
        let _ = kill_process(pid, signal);
    }
    serve(store, daemon).await
}
