//! The other process of a measurement: this program again, with what it shares as its standard input, and its answer,
//! if it has one, on standard output.

use std::io::{Read as _, stdin};
use std::os::fd::{AsFd as _, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use clap::Subcommand;
use gdrd_shm::{Access, Segment, pingpong};

use crate::rows;

/// Against a process that is gone; far above what any wait here takes.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// What the other process can be.
#[derive(Debug, Clone, PartialEq, Eq, Subcommand)]
#[command(hide = true)]
pub(crate) enum Other {
    /// Answers a bare ping-pong.
    Pong { rounds: u32 },
    /// The client of a bare ring.
    RingClient { requests: u32 },
    /// A bare tonic server of an empty call.
    Tonic { socket: std::path::PathBuf },
}

impl Other {
    pub(crate) fn run(self) -> anyhow::Result<()> {
        match self {
            Self::Pong { rounds } => {
                let segment = Segment::map(shared()?, Access::ReadWrite)?;
                ensure!(pingpong::respond(&segment, rounds, PATIENCE)?, "the other process is silent");
                Ok(())
            }
            Self::RingClient { requests } => rows::write_rate::bare_ring_client(shared()?, requests),
            Self::Tonic { socket } => rows::lease_round::bare_server(&socket),
        }
    }

    fn arguments(&self) -> Vec<String> {
        match self {
            Self::Pong { rounds } => vec!["pong".to_owned(), rounds.to_string()],
            Self::RingClient { requests } => vec!["ring-client".to_owned(), requests.to_string()],
            Self::Tonic { socket } => vec!["tonic".to_owned(), socket.display().to_string()],
        }
    }
}

fn shared() -> anyhow::Result<OwnedFd> {
    stdin().as_fd().try_clone_to_owned().context("what is shared comes as standard input")
}

/// A running other process, killed when dropped.
#[derive(Debug)]
pub(crate) struct Running(Child);

impl Running {
    /// Starts one that shares `fd`.
    pub(crate) fn start(other: &Other, fd: Option<OwnedFd>) -> anyhow::Result<Self> {
        let this = std::env::current_exe().context("find this program")?;
        let input = fd.map_or_else(Stdio::null, Stdio::from);
        let mut command = Command::new(this);
        command.args(other.arguments()).stdin(input).stdout(Stdio::piped());
        Ok(Self(command.spawn().context("start the other process of a measurement")?))
    }

    /// Waits for its end and returns what it said.
    pub(crate) fn join(mut self) -> anyhow::Result<String> {
        let mut said = String::new();
        if let Some(mut output) = self.0.stdout.take() {
            output.read_to_string(&mut said).context("hear the other process")?;
        }
        let status = self.0.wait().context("wait for the other process")?;
        ensure!(status.success(), "the other process of a measurement ended with {status}");
        Ok(said)
    }

    pub(crate) fn has_ended(&mut self) -> bool {
        !matches!(self.0.try_wait(), Ok(None))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It has ended by itself as a rule.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
