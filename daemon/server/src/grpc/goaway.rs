//! HTTP/2 (RFC 9113) by hand, for two things that the library has no call for: a connection that is one too many is answered
//! with a refusal, where an end without a word would look like a daemon that is not there; and one that is idle is asked to go,
//! so that no call is lost.

use std::io;
use std::sync::Arc;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::time::timeout;

use crate::admission::{Admission, Full};
use crate::limits::{MAX_REFUSALS_AT_ONCE, MAX_REFUSALS_PER_UID, REFUSAL_TIMEOUT};
use crate::status::REASON_KEY;

/// Length of what a client begins with (3.4).
const PREFACE_BYTES: usize = 24;
/// Frame types, flags and error codes (6 and 7).
const HEADERS: u8 = 0x1;
const SETTINGS: u8 = 0x4;
const GOAWAY: u8 = 0x7;
const END_STREAM_AND_HEADERS: u8 = 0x1 | 0x4;
const ENHANCE_YOUR_CALM: u32 = 0xb;
const NO_ERROR: u32 = 0x0;
/// More streams than any connection has: what was begun is still served.
const ANY_STREAM: u32 = 0x7fff_ffff;
/// What is heard of a refused client in all.
const MAX_HEARD_BYTES: u64 = 64 * 1024;

const REASON: &str = "CONNECTIONS_EXHAUSTED";
/// RESOURCE_EXHAUSTED of gRPC.
const GRPC_STATUS: &str = "8";

/// Turns of being told.
#[derive(Debug, Clone)]
pub(crate) struct Refusals(Arc<Admission>);

impl Default for Refusals {
    fn default() -> Self {
        Self(Admission::new(MAX_REFUSALS_AT_ONCE, MAX_REFUSALS_PER_UID))
    }
}

impl Refusals {
    /// Refuses this connection. Does not wait; must be called within the runtime.
    pub(crate) fn refuse(&self, mut stream: UnixStream, uid: u32, full: Full) {
        let Ok(turn) = self.0.admit(uid, || false) else { return };
        drop(tokio::spawn(async move {
            // A client that does not listen is not worth more.
            let _ = refuse(&mut stream, full).await;
            drop(turn);
        }));
    }
}

/// Answers the first call; where none comes, the connection.
async fn refuse(stream: &mut UnixStream, full: Full) -> io::Result<()> {
    let why = full.describe("gRPC");
    let refusal = match timeout(REFUSAL_TIMEOUT, first_call(stream)).await {
        Ok(Ok(stream_id)) => frame(HEADERS, END_STREAM_AND_HEADERS, stream_id, &refusal_headers(&why)),
        _ => goaway(0, ENHANCE_YOUR_CALM, &format!("{REASON}: {why}")),
    };
    let told = async {
        stream.write_all(&[frame(SETTINGS, 0, 0, &[]), refusal].concat()).await?;
        stream.shutdown().await?;
        // Closed at once, it would be an error to the client, which may still be writing.
        tokio::io::copy(&mut stream.take(MAX_HEARD_BYTES), &mut tokio::io::sink()).await
    };
    timeout(REFUSAL_TIMEOUT, told).await??;
    Ok(())
}

/// Reads up to the first frame of headers, and gives its stream.
async fn first_call(stream: &mut UnixStream) -> io::Result<u32> {
    let mut stream = stream.take(MAX_HEARD_BYTES);
    stream.read_exact(&mut [0; PREFACE_BYTES]).await?;
    loop {
        let mut header = [0; 9];
        stream.read_exact(&mut header).await?;
        let [a, b, c, kind, _flags, stream_id @ ..] = header;
        if kind == HEADERS {
            return Ok(u32::from_be_bytes(stream_id) & ANY_STREAM);
        }
        let len = u64::from(u32::from_be_bytes([0, a, b, c]));
        tokio::io::copy(&mut (&mut stream).take(len), &mut tokio::io::sink()).await?;
    }
}

/// The headers of a gRPC refusal ("Trailers-Only"): `:status 200` of HPACK's static table, the others as literals that are
/// not indexed (RFC 7541, 6.1 and 6.2.2).
fn refusal_headers(why: &str) -> Vec<u8> {
    let mut block = vec![0x80 | 8];
    for (name, value) in [
        ("content-type", "application/grpc"),
        ("grpc-status", GRPC_STATUS),
        ("grpc-message", why),
        (REASON_KEY, REASON),
    ] {
        block.push(0);
        for text in [name, value] {
            // Of one byte up to 126, and none here is longer.
            let len = u8::try_from(text.len()).unwrap_or(u8::MAX).min(126);
            block.push(len);
            block.extend(text.bytes().take(len.into()));
        }
    }
    block
}

/// Asks a client to make further calls on another connection.
pub(super) fn goodbye() -> Vec<u8> {
    goaway(ANY_STREAM, NO_ERROR, "idle")
}

fn goaway(last_stream: u32, error: u32, why: &str) -> Vec<u8> {
    frame(GOAWAY, 0, 0, &[&last_stream.to_be_bytes(), &error.to_be_bytes(), why.as_bytes()].concat())
}

fn frame(kind: u8, flags: u8, stream_id: u32, payload: &[u8]) -> Vec<u8> {
    let [_, len @ ..] = u32::try_from(payload.len()).unwrap_or(u32::MAX).to_be_bytes();
    [&len[..], &[kind, flags], &stream_id.to_be_bytes(), payload].concat()
}
