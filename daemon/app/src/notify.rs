//! What systemd is told: ready, status, watchdog, stopping (sd_notify(3)). Without NOTIFY_SOCKET nothing is said.

use std::time::Duration;

use sd_notify::NotifyState;
use tracing::warn;

/// The daemon serves.
pub(crate) fn ready(status: &str) {
    tell(&[NotifyState::Ready, NotifyState::Status(status)]);
}

/// The daemon ends.
pub(crate) fn stopping() {
    tell(&[NotifyState::Stopping, NotifyState::Status("draining")]);
}

/// Tells the watchdog that the daemon lives, as long as `alive` comes back; pending for ever where none is set.
pub(crate) async fn watchdog(alive: impl Fn()) {
    let Some(timeout) = sd_notify::watchdog_enabled() else { return std::future::pending().await };
    // Twice in each period, as sd_watchdog_enabled(3) recommends.
    let mut ticks = tokio::time::interval((timeout / 2).max(Duration::from_millis(1)));
    loop {
        ticks.tick().await;
        alive();
        tell(&[NotifyState::Watchdog]);
    }
}

fn tell(state: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        warn!(%error, "systemd could not be told");
    }
}
