//! Times and their middle.

use std::time::Duration;

/// The median; zero for no samples.
pub(super) fn median(mut samples: Vec<Duration>) -> Duration {
    samples.sort_unstable();
    samples.get(samples.len() / 2).copied().unwrap_or_default()
}

/// One side of a ratio: rounds that all do the same.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Rounds {
    pub(super) median: Duration,
    /// How many times the fastest tenth of them the slowest tenth takes, at least: what else the host does shows here.
    pub(super) scatter: f64,
}

impl Rounds {
    pub(super) fn of(mut rounds: Vec<Duration>) -> Self {
        rounds.sort_unstable();
        let tenth = |tenths: usize| rounds.get(rounds.len() * tenths / 10).copied().unwrap_or_default();
        Self { scatter: ratio(tenth(9), tenth(1)), median: median(rounds) }
    }
}

/// The median of `a` over that of `b`, and the scatter of the side that scatters more: the figure is worth no more than either.
pub(super) fn against(a: Rounds, b: Rounds) -> (f64, f64) {
    (ratio(a.median, b.median), a.scatter.max(b.scatter))
}

/// `a` over `b`; infinite for a floor of zero.
pub(super) fn ratio(a: Duration, b: Duration) -> f64 {
    a.as_secs_f64() / b.as_secs_f64()
}

/// Microseconds with two digits, for notes.
pub(super) fn micros(time: Duration) -> String {
    format!("{:.2} µs", time.as_secs_f64() * 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_scatter_as_their_tenths_differ_and_not_by_single_ones() {
        let mut rounds = vec![Duration::from_micros(10); 100];
        rounds.extend([Duration::from_millis(4); 5]);
        let quiet = Rounds::of(rounds.clone());
        assert_eq!((quiet.median, quiet.scatter), (Duration::from_micros(10), 1.0));
        rounds.extend([Duration::from_millis(4); 20]);
        assert!(Rounds::of(rounds).scatter > 100.0);
    }

    #[test]
    fn the_median_is_the_middle_sample() {
        let samples = [5, 1, 9].map(Duration::from_micros).to_vec();
        assert_eq!(median(samples), Duration::from_micros(5));
        assert_eq!(median(Vec::new()), Duration::ZERO);
    }
}
