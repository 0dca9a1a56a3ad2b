//! GOAWAY frames (RFC 9113, 6.8) that the HTTP/2 library has no call for: to a connection that is one too many, where an end
//! without a word would look like a daemon that is not there; and to one that is idle, so that no call is lost.

use std::sync::Arc;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::limits::{MAX_REFUSALS_AT_ONCE, REFUSAL_TIMEOUT};

/// Frame types and the error code, of RFC 9113, 6.5, 6.8 and 7.
const SETTINGS: u8 = 0x4;
const GOAWAY: u8 = 0x7;
/// gRPC's libraries make RESOURCE_EXHAUSTED of it.
const ENHANCE_YOUR_CALM: u32 = 0xb;
const NO_ERROR: u32 = 0x0;
/// More streams than any connection has: what was begun is still served.
const ANY_STREAM: u32 = 0x7fff_ffff;
/// What a client may have sent by then; more is not waited for.
const MAX_HEARD_BYTES: u64 = 64 * 1024;

/// Turns of being told.
#[derive(Debug, Clone)]
pub(crate) struct Refusals(Arc<Semaphore>);

impl Default for Refusals {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(MAX_REFUSALS_AT_ONCE)))
    }
}

impl Refusals {
    /// Refuses this connection. Does not wait; must be called within the runtime.
    pub(crate) fn refuse(&self, mut stream: UnixStream, uid: u32) {
        let Ok(turn) = Arc::clone(&self.0).try_acquire_owned() else { return };
        drop(tokio::spawn(async move {
            // A client that does not listen is not worth more.
            let _ = timeout(REFUSAL_TIMEOUT, async {
                stream.write_all(&frames(uid)).await?;
                stream.shutdown().await?;
                // Closed at once, it would be an error to the client, which is still writing.
                tokio::io::copy(&mut stream.take(MAX_HEARD_BYTES), &mut tokio::io::sink()).await
            })
            .await;
            drop(turn);
        }));
    }
}

/// A server's preface, and why there is no more.
fn frames(uid: u32) -> Vec<u8> {
    let why = format!("CONNECTIONS_EXHAUSTED: uid {uid}, or the daemon, has as many gRPC connections as it may");
    [frame(SETTINGS, &[]), goaway(0, ENHANCE_YOUR_CALM, &why)].concat()
}

/// Asks a client to make further calls on another connection.
pub(super) fn goodbye() -> Vec<u8> {
    goaway(ANY_STREAM, NO_ERROR, "idle")
}

fn goaway(last_stream: u32, error: u32, why: &str) -> Vec<u8> {
    frame(GOAWAY, &[&last_stream.to_be_bytes(), &error.to_be_bytes(), why.as_bytes()].concat())
}

/// A frame of the connection itself, without flags.
fn frame(kind: u8, payload: &[u8]) -> Vec<u8> {
    let len = u32::try_from(payload.len()).unwrap_or(u32::MAX).to_be_bytes();
    [&len[1..], &[kind, 0, 0, 0, 0, 0], payload].concat()
}
