//! A brokered 8-byte write, post to completion, busy-polled, against one word each way between two processes.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use gdrd_shm::{Segment, pingpong};

use super::Figure;
use super::pair::Pair;
use super::peer;
use super::sample::{Rounds, against, micros};
use crate::args::{Bench, Global};
use crate::host;

const WRITE_BYTES: u32 = 8;
const BUFFER_BYTES: u64 = 2 << 20;
const WARM_UP: u32 = 200;
const PATIENCE: Duration = Duration::from_secs(30);
const MOST: f64 = 3.0;

pub(super) async fn measure(global: &Global, options: &Bench) -> anyhow::Result<Vec<Figure>> {
    let (_client, session) = host::open_session_for_gpus(global).await?;
    // As with the lease, the floor is taken on both sides.
    let mut floor = ping_pong(options.rounds / 2)?;
    let pair = Pair::make(&session, options, BUFFER_BYTES).await?;
    let writes = time_writes(&pair, options.rounds)?;
    pair.give_back().await?;
    floor.extend(ping_pong(options.rounds - options.rounds / 2)?);
    let (floor, writes) = (Rounds::of(floor), Rounds::of(writes));
    let (value, scatter) = against(writes, floor);
    Ok(vec![Figure {
        name: "8-byte write, of a bare ping-pong",
        value,
        unit: "×",
        most: Some(MOST),
        scatter: Some(scatter),
        note: format!(
            "medians of {} rounds busy-polled, {} against {}",
            options.rounds,
            micros(writes.median),
            micros(floor.median)
        ),
    }])
}

fn time_writes(pair: &Pair, rounds: u32) -> anyhow::Result<Vec<Duration>> {
    let (local, remote) = (pair.local(WRITE_BYTES)?, pair.remote(WRITE_BYTES)?);
    let mut times = Vec::new();
    for round in 0..WARM_UP + rounds {
        let start = Instant::now();
        pair.write(local, remote)?;
        if round >= WARM_UP {
            times.push(start.elapsed());
        }
    }
    Ok(times)
}

fn ping_pong(rounds: u32) -> anyhow::Result<Vec<Duration>> {
    let rounds = rounds.max(1);
    let segment = Segment::create("gdrctl-bench", pingpong::SEGMENT_LEN_BYTES)?;
    let peer = peer::start(&segment, rounds)?;
    let times = pingpong::measure(&segment, rounds, PATIENCE)?;
    peer.join()?;
    times.context("the other process of the ping-pong did not answer")
}
