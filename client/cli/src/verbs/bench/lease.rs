//! Acquire and release of 2 MiB, deregistration, scrub and new registration included, against two empty calls.

use std::time::{Duration, Instant};

use gdrd_client::{AcquireOptions, Client, ClientError, Session};

use super::Figure;
use super::sample::{Rounds, against, micros};
use crate::args::{Bench, Global};
use crate::host;

const BUFFER_BYTES: u64 = 2 << 20;
/// Buffers that are ready when the rounds begin.
const POOL: usize = 64;
/// Rounds that are not counted, for both sides.
const WARM_UP: u32 = 50;
const MOST: f64 = 1.5;

pub(super) async fn measure(global: &Global, options: &Bench) -> anyhow::Result<Vec<Figure>> {
    let (client, session) = host::open_session_for_gpus(global).await?;
    let untouched = against_pings(&client, &session, options, false).await?;
    let written = against_pings(&client, &session, options, true).await?;
    Ok(vec![
        figure("acquire + release, of two empty calls", Some(MOST), "buffers nobody wrote to", untouched, options),
        figure("the same, every page written before", None, "each round zeroes 2 MiB", written, options),
    ])
}

fn figure(name: &'static str, most: Option<f64>, what: &str, found: (Rounds, Rounds), options: &Bench) -> Figure {
    let (rounds, pings) = found;
    let (value, scatter) = against(rounds, pings);
    Figure {
        name,
        value,
        unit: "×",
        most,
        scatter: Some(scatter),
        note: format!(
            "medians of {} rounds of 2 MiB back to back, {what}, {} against {}",
            options.rounds,
            micros(rounds.median),
            micros(pings.median)
        ),
    }
}

/// Rounds, and two empty calls. The floor is taken on both sides of the rounds, so that a machine that
/// warms up or slows down favours neither.
async fn against_pings(
    client: &Client,
    session: &Session,
    options: &Bench,
    write: bool,
) -> anyhow::Result<(Rounds, Rounds)> {
    fill_pool(session, options, write).await?;
    let mut pings = time_pings(client, options.rounds / 2).await?;
    let rounds = time_rounds(session, options).await?;
    pings.extend(time_pings(client, options.rounds - options.rounds / 2).await?);
    Ok((Rounds::of(rounds), Rounds::of(pings)))
}

/// As many buffers as the pool keeps, acquired at once and released at once. Written whole, they have pages that each
/// scrub must zero: a simulated GPU has no memory to scrub behind pages that nobody touched.
async fn fill_pool(session: &Session, options: &Bench, write: bool) -> anyhow::Result<()> {
    let content = vec![0x5a; usize::try_from(BUFFER_BYTES)?];
    let mut buffers = Vec::with_capacity(POOL);
    for _ in 0..POOL {
        let buffer = session.acquire(AcquireOptions::on_gpu(&options.from, BUFFER_BYTES)).await?;
        if write && let Ok(memory) = buffer.memory() {
            memory.write_from(0, &content)?;
        }
        buffers.push(buffer);
    }
    for buffer in buffers {
        buffer.release().await?;
    }
    Ok(())
}

async fn time_rounds(session: &Session, options: &Bench) -> Result<Vec<Duration>, ClientError> {
    let mut times = Vec::new();
    for round in 0..WARM_UP + options.rounds {
        let start = Instant::now();
        let buffer = session.acquire(AcquireOptions::on_gpu(&options.from, BUFFER_BYTES)).await?;
        buffer.release().await?;
        if round >= WARM_UP {
            times.push(start.elapsed());
        }
    }
    Ok(times)
}

async fn time_pings(client: &Client, rounds: u32) -> Result<Vec<Duration>, ClientError> {
    let mut times = Vec::new();
    for round in 0..WARM_UP + rounds {
        let start = Instant::now();
        client.ping().await?;
        client.ping().await?;
        if round >= WARM_UP {
            times.push(start.elapsed());
        }
    }
    Ok(times)
}
