//! The floor under every exchange between two processes: one word each way, nothing else.
//! `gdrctl bench` reports the ring's round trip as a ratio to this one.

use std::hint;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::error::ShmError;
use crate::segment::Segment;

/// Least length of the segment: two words in cache lines far enough apart for any prefetcher.
pub const SEGMENT_LEN_BYTES: u64 = 4096;
const PING: u64 = 0;
const PONG: u64 = 2048;
/// Polls between two looks at the clock while the peer is silent.
const POLLS_PER_LOOK: u32 = 1 << 16;

/// Runs `rounds` round trips and returns the time of each. The peer runs [`respond`] on its own
/// mapping with the same `rounds`; `None` if it was silent for `patience`. The words must be 0, as
/// in a new segment, which serves one run.
///
/// # Errors
/// [`ShmError`] when the segment is too short or read-only.
pub fn measure(segment: &Segment, rounds: u32, patience: Duration) -> Result<Option<Vec<Duration>>, ShmError> {
    let ping = segment.atomic_u32(PING)?;
    let pong = segment.atomic_u32(PONG)?;
    let mut times = Vec::with_capacity(rounds as usize);
    for round in 1..=rounds {
        let start = Instant::now();
        // (ping) released here, acquired in `respond`.
        ping.store(round, Ordering::Release);
        // (pong) acquired here, released in `respond`.
        if !spin_until(patience, || pong.load(Ordering::Acquire) == round) {
            return Ok(None);
        }
        times.push(start.elapsed());
    }
    Ok(Some(times))
}

/// Answers `rounds` round trips of [`measure`]; false if the peer was silent for `patience`.
///
/// # Errors
/// As [`measure`].
pub fn respond(segment: &Segment, rounds: u32, patience: Duration) -> Result<bool, ShmError> {
    let ping = segment.atomic_u32(PING)?;
    let pong = segment.atomic_u32(PONG)?;
    for round in 1..=rounds {
        if !spin_until(patience, || ping.load(Ordering::Acquire) == round) {
            return Ok(false);
        }
        pong.store(round, Ordering::Release);
    }
    Ok(true)
}

fn spin_until(patience: Duration, mut done: impl FnMut() -> bool) -> bool {
    let mut since = None;
    loop {
        for _ in 0..POLLS_PER_LOOK {
            if done() {
                return true;
            }
            hint::spin_loop();
        }
        if since.get_or_insert_with(Instant::now).elapsed() > patience {
            return false;
        }
    }
}
