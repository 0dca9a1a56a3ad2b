//! How long requests take, as their process sees it.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use gdrd_client::{Operation, QueuePair, Status};
use serde_json::{Value, json};

/// Longest wait for a completion.
const PATIENCE: Duration = Duration::from_secs(120);

/// How requests are posted.
pub(crate) struct Way {
    pub(crate) rounds: u32,
    /// Most under way at once.
    pub(crate) window: u32,
    /// Polls for completions instead of sleeping until they come.
    pub(crate) polling: bool,
}

/// Posts `operation` over and over.
pub(crate) async fn time(queue_pair: &QueuePair, operation: Operation, way: Way) -> anyhow::Result<Value> {
    let mut times = Vec::new();
    let mut under_way = VecDeque::new();
    let mut left = way.rounds;
    let began = Instant::now();
    while left > 0 || !under_way.is_empty() {
        if left > 0 && under_way.len() < way.window as usize {
            under_way.push_back(Instant::now());
            queue_pair.post(left.into(), operation)?;
            left -= 1;
            continue;
        }
        let completion = if way.polling {
            queue_pair.poll_busy(PATIENCE)?.context("no completion came")?
        } else {
            tokio::time::timeout(PATIENCE, queue_pair.completion()).await.context("no completion came")??
        };
        ensure!(completion.status == Status::Success, "a request ended as {}", completion.status);
        let posted = under_way.pop_front().context("a completion of nothing")?;
        times.push(posted.elapsed());
    }
    let total = began.elapsed();
    times.sort_unstable();
    let median = times.get(times.len() / 2).context("no rounds")?;
    Ok(json!({ "total_ns": nanoseconds(total), "median_ns": nanoseconds(*median) }))
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
