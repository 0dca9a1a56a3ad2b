//! What both sides of the example need: a way to exchange blobs, content, and a digest.
#![allow(dead_code, reason = "each side uses its part")]

use std::io::Read;

use anyhow::{Context as _, ensure};
use gdrd_client::Buffer;
use rand::rngs::StdRng;
use rand::{RngCore as _, SeedableRng as _};
use serde::Serialize;
use serde::de::DeserializeOwned;
use sha2::{Digest as _, Sha256};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufStream};
use tokio::net::UnixStream;

const PIECE_BYTES: usize = 64 << 10;

/// What the two sides tell each other.
#[derive(Serialize, serde::Deserialize)]
pub(crate) struct Greeting {
    pub(crate) endpoint: Vec<u8>,
    pub(crate) buffer: Vec<u8>,
}

/// The receiver takes writes from here on.
#[derive(Serialize, serde::Deserialize)]
pub(crate) struct Ready;

/// A line of JSON each way: the job's own means.
pub(crate) struct Channel(BufStream<UnixStream>);

impl Channel {
    pub(crate) fn new(stream: UnixStream) -> Self {
        Self(BufStream::new(stream))
    }

    pub(crate) async fn send(&mut self, message: &impl Serialize) -> anyhow::Result<()> {
        let line = serde_json::to_string(message)? + "\n";
        self.0.write_all(line.as_bytes()).await?;
        Ok(self.0.flush().await?)
    }

    pub(crate) async fn receive<T: DeserializeOwned>(&mut self) -> anyhow::Result<T> {
        let mut line = String::new();
        ensure!(self.0.read_line(&mut line).await? > 0, "the peer is gone");
        serde_json::from_str(&line).context("read what the peer sent")
    }
}

/// Keeps all leases until stdin ends.
pub(crate) async fn stay_until_told() -> anyhow::Result<()> {
    let wait = tokio::task::spawn_blocking(|| std::io::copy(&mut std::io::stdin(), &mut std::io::sink()));
    wait.await?.map(drop).context("wait for the end of stdin")
}

/// Fills a buffer with content drawn from a seed.
pub(crate) fn fill_from_seed(buffer: &Buffer, bytes: u64, seed: u64) -> anyhow::Result<()> {
    let mut random = StdRng::seed_from_u64(seed);
    let mut piece = vec![0; PIECE_BYTES];
    let mut offset = 0;
    while offset < bytes {
        let len = usize::try_from(bytes - offset)?.min(PIECE_BYTES);
        random.fill_bytes(&mut piece[..len]);
        buffer.write_from(offset, &piece[..len])?;
        offset += len as u64;
    }
    Ok(())
}

/// SHA-256 of all that a reader gives.
pub(crate) fn sha256_of(mut reader: impl Read) -> anyhow::Result<String> {
    let mut hasher = Sha256::new();
    let mut piece = vec![0; PIECE_BYTES];
    loop {
        match reader.read(&mut piece)? {
            0 => return Ok(hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect()),
            got => hasher.update(&piece[..got]),
        }
    }
}
