//! Writes of 64 MiB, against a plain copy between the same two mappings.

use std::time::{Duration, Instant};

use super::Figure;
use super::pair::Pair;
use super::sample::{Rounds, against};
use crate::args::{Bench, Global};
use crate::host;

const TRANSFER_BYTES: u32 = 64 << 20;
const ROUNDS: u32 = 20;

pub(super) async fn measure(global: &Global, options: &Bench) -> anyhow::Result<Vec<Figure>> {
    let (_client, session) = host::open_session_for_gpus(global).await?;
    let pair = Pair::make(&session, options, TRANSFER_BYTES.into()).await?;
    let (local, remote) = (pair.local(TRANSFER_BYTES)?, pair.remote(TRANSFER_BYTES)?);
    let mut writes = Vec::new();
    for round in 0..=ROUNDS {
        let start = Instant::now();
        pair.write(local, remote)?;
        // The first touches every page for the first time.
        if round > 0 {
            writes.push(start.elapsed());
        }
    }
    let copies = time_copies(&pair).ok();
    pair.give_back().await?;
    let writes = Rounds::of(writes);
    let mut figures = vec![Figure {
        name: "bandwidth of 64 MiB writes",
        value: gib_per_second(writes.median),
        unit: "GiB/s",
        most: None,
        scatter: None,
        note: format!("median of {ROUNDS} writes, {} to {}", options.from, options.to),
    }];
    // Only memory that this process can map has this floor.
    if let Some(copies) = copies {
        let (value, scatter) = against(writes, copies);
        figures.push(Figure {
            name: "64 MiB write, of a plain copy",
            value,
            unit: "×",
            most: None,
            scatter: Some(scatter),
            note: format!("a copy in this process runs at {:.2} GiB/s", gib_per_second(copies.median)),
        });
    }
    Ok(figures)
}

fn time_copies(pair: &Pair) -> anyhow::Result<Rounds> {
    let (from, to) = pair.memories()?;
    let mut times = Vec::new();
    for round in 0..=ROUNDS {
        let start = Instant::now();
        from.copy_to(0, to, 0, TRANSFER_BYTES.into())?;
        if round > 0 {
            times.push(start.elapsed());
        }
    }
    Ok(Rounds::of(times))
}

fn gib_per_second(time: Duration) -> f64 {
    f64::from(TRANSFER_BYTES) / f64::from(1 << 30) / time.as_secs_f64()
}
