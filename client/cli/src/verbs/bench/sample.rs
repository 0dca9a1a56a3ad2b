//! Times and their middle.

use std::time::Duration;

/// The median; zero for no samples.
pub(super) fn median(mut samples: Vec<Duration>) -> Duration {
    samples.sort_unstable();
    samples.get(samples.len() / 2).copied().unwrap_or_default()
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
    fn the_median_is_the_middle_sample() {
        let samples = [5, 1, 9].map(Duration::from_micros).to_vec();
        assert_eq!(median(samples), Duration::from_micros(5));
        assert_eq!(median(Vec::new()), Duration::ZERO);
    }
}
