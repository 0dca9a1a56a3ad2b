//! The running daemon: serve, watch the host, wait for the end, drain.

use std::num::NonZero;
use std::time::Duration;

use anyhow::Context;
use gdrd_engine::Engine;
use gdrd_server::Server;
use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::notify;
use crate::rescan::Rescan;
use crate::sockets_guard::SocketsGuard;

/// Cores up to which one thread serves. A call and its fds are two tasks that wake each other: on one thread that costs
/// nothing, on two it costs a wake-up across cores, which is more than the call itself (a third of acquire + release).
const CORES_FOR_ONE_THREAD: usize = 4;

/// Threads that may block at one time: proofs of fds and rescans.
const MAX_BLOCKING_THREADS: usize = 16;

/// How long what blocks may go on once everything else has ended.
const BLOCKING_TIMEOUT: Duration = Duration::from_secs(1);

const TERMINATE: &str = "SIGTERM";

/// The runtime; wakes for nothing while nothing happens.
///
/// # Errors
/// When its threads cannot be started.
pub(crate) fn runtime() -> anyhow::Result<Runtime> {
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    Builder::new_multi_thread()
        .worker_threads(if cores > CORES_FOR_ONE_THREAD { 2 } else { 1 })
        .max_blocking_threads(MAX_BLOCKING_THREADS)
        .thread_name("gdrd-server")
        .enable_all()
        .build()
        .context("start the runtime")
}

/// How a daemon ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ended {
    /// Sessions were told goodbye; what they had is to be given back.
    Drained,
    /// Everything is left as it is for the next daemon.
    Left,
}

/// Whether everything is left as it is for the next daemon. A daemon that failed leaves it too, where descriptors are kept: to
/// its clients that is no other than a crash.
pub(crate) fn leaves_all(served: &anyhow::Result<Ended>, keeps: bool) -> bool {
    match served {
        Ok(ended) => *ended == Ended::Left,
        Err(_) => keeps,
    }
}

/// Serves until a signal or a failure ends it. SIGINT drains. So does SIGTERM, unless descriptors are kept: whoever keeps
/// them decides whether another daemon takes them up, as in `systemctl restart`, or closes them.
///
/// # Errors
/// When a signal cannot be waited for, or the server ends by itself.
pub(crate) async fn serve(
    server: Server,
    stop: CancellationToken,
    (rescan, guard): (Rescan, &SocketsGuard),
    status: &str,
) -> anyhow::Result<Ended> {
    let mut terminate = signal(SignalKind::terminate()).context("wait for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("wait for SIGINT")?;
    let hangup = signal(SignalKind::hangup()).context("wait for SIGHUP")?;
    let user_1 = signal(SignalKind::user_defined1()).context("wait for SIGUSR1")?;
    let user_2 = signal(SignalKind::user_defined2()).context("wait for SIGUSR2")?;
    let engine = rescan.engine.clone();
    let mut serving = tokio::spawn(server.run());
    notify::ready(status);
    info!("ready: {status}");
    tokio::select! {
        ended = &mut serving => {
            notify::stopping();
            ended.context("the server task")??;
            anyhow::bail!("the server ended by itself");
        }
        name = asked_to_end(&mut terminate, &mut interrupt) => {
            if name == TERMINATE && engine.keeps() {
                info!("{name}: what there is, is left to the next daemon");
                notify::stopping();
                return Ok(Ended::Left);
            }
            info!("{name}: draining");
        }
        () = notify::watchdog(async || goes_on(&engine).await) => {}
        () = rescan.run() => {}
        () = guard.run() => {}
        () = ignore(hangup, "SIGHUP: nothing is read anew; restart the daemon for another configuration") => {}
        () = ignore(user_1, "SIGUSR1 means nothing to the daemon") => {}
        () = ignore(user_2, "SIGUSR2 means nothing to the daemon") => {}
    }
    notify::stopping();
    stop.cancel();
    tokio::select! {
        ended = serving => ended.context("the server task")??,
        name = asked_to_end(&mut terminate, &mut interrupt) => warn!("{name} again: not waiting for calls in flight"),
    }
    Ok(Ended::Drained)
}

/// Comes back once the threads that serve and the engine's have shown that they go on.
async fn goes_on(engine: &Engine) {
    let served = tokio::spawn(async {});
    engine.pulse().await;
    // A task of nothing cannot fail.
    let _ = served.await;
}

/// Ends a runtime without waiting for fds of clients that block.
pub(crate) fn end(runtime: Runtime) {
    runtime.shutdown_timeout(BLOCKING_TIMEOUT);
}

/// Its default would end the daemon with all leases where a terminal closes, or somebody means `reload`.
async fn ignore(mut signal: Signal, what: &str) {
    while signal.recv().await.is_some() {
        warn!("{what}");
    }
    std::future::pending().await
}

async fn asked_to_end(terminate: &mut Signal, interrupt: &mut Signal) -> &'static str {
    tokio::select! {
        _ = terminate.recv() => TERMINATE,
        _ = interrupt.recv() => "SIGINT",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemon_that_failed_leaves_all_to_the_next_where_anything_is_kept() {
        let failed = || Err(anyhow::anyhow!("the server ended by itself"));
        assert!(leaves_all(&failed(), true));
        assert!(!leaves_all(&failed(), false), "nobody would give it back");
        assert!(leaves_all(&Ok(Ended::Left), true));
        assert!(!leaves_all(&Ok(Ended::Drained), true), "it was asked to give back");
    }
}
