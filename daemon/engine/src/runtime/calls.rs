//! Driver calls on their way: which run, and a word about those that take long.

use std::time::{Duration, Instant};

use super::Runtime;
use super::executor::{Executor, Lane, Running};
use crate::core::nanos;

/// From then on a call is told of in the log. An HCA that registers slowly takes less for one buffer.
const LONG_CALL: Duration = Duration::from_secs(30);

impl Runtime {
    /// Runs a call that may block on a driver.
    pub(super) fn submit(
        &self,
        executor: &Executor,
        lane: Lane,
        what: &'static str,
        call: impl FnOnce() + Send + 'static,
    ) {
        executor.submit(lane, what, call);
        self.timer.look_for_long_calls(self.now().saturating_add(nanos(LONG_CALL)));
    }

    /// Calls that run.
    pub(super) fn running_calls(&self) -> Vec<Running> {
        [&self.executor, &self.background].into_iter().flat_map(Executor::running).collect()
    }

    /// Logs, once each, the calls that take long, and sees to it that the others are looked at in time.
    pub(super) fn tell_of_long_calls(&self) {
        for executor in [&self.executor, &self.background] {
            let (long, next) = executor.long_calls(LONG_CALL);
            for Running { lane, what, began, .. } in long {
                let seconds = began.elapsed().as_secs();
                tracing::warn!(on = %self.name_of_lane(lane), call = what, seconds, "a driver call takes long; it may hang");
            }
            if let Some(next) = next {
                let wait = next.saturating_duration_since(Instant::now());
                self.timer.look_for_long_calls(self.now().saturating_add(nanos(wait)));
            }
        }
    }

    fn name_of_lane(&self, lane: Lane) -> String {
        match lane {
            Lane::Gpu(index) => {
                let state = self.state();
                state.core.host().gpu(index).map_or_else(|| "a gpu".to_owned(), |gpu| gpu.planned.name.clone())
            }
            Lane::Hca(index) => self.hcas.get(index).map_or_else(|| "an hca".to_owned(), |hca| hca.name().to_owned()),
            Lane::Host => "host memory".to_owned(),
            Lane::Fabric => "the fabric".to_owned(),
            Lane::Unbounded => "any device".to_owned(),
        }
    }
}
