//! The other process of a ping-pong: this program again, with the shared segment as its stdin.

use std::io::stdin;
use std::os::fd::AsFd as _;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use gdrd_shm::{Access, Segment, pingpong};

use crate::args::BenchPeer;
use crate::exit::Outcome;

const PATIENCE: Duration = Duration::from_secs(30);

/// The running peer.
pub(super) struct Peer(Child);

/// Starts the peer on a segment.
pub(super) fn start(segment: &Segment, rounds: u32) -> anyhow::Result<Peer> {
    let this = std::env::current_exe().context("find this program")?;
    let mut command = Command::new(this);
    command.args(["bench-peer", &rounds.to_string()]).stdin(Stdio::from(segment.try_clone_fd()?));
    Ok(Peer(command.spawn().context("start the other process of the bench")?))
}

impl Peer {
    /// Waits for its end.
    pub(super) fn join(mut self) -> anyhow::Result<()> {
        let status = self.0.wait().context("wait for the other process of the bench")?;
        ensure!(status.success(), "the other process of the bench ended with {status}");
        Ok(())
    }
}

/// The peer's side.
#[inline(never)]
pub(crate) fn run(options: &BenchPeer) -> anyhow::Result<Outcome> {
    let segment = Segment::map(stdin().as_fd().try_clone_to_owned()?, Access::ReadWrite)?;
    let answered = pingpong::respond(&segment, options.rounds, PATIENCE)?;
    Ok(if answered { Outcome::Done } else { Outcome::Failed })
}
