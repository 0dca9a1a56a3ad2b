//! Times and what is made of them.

use std::time::Duration;

/// The median; NaN of nothing.
pub(crate) fn median_of(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// The time below which `percent` of a hundred samples are; zero of nothing.
pub(crate) fn percentile(times: &mut [Duration], percent: usize) -> Duration {
    times.sort_unstable();
    let index = (times.len() * percent / 100).min(times.len().saturating_sub(1));
    times.get(index).copied().unwrap_or_default()
}

/// The median; zero of nothing.
pub(crate) fn median(mut times: Vec<Duration>) -> Duration {
    percentile(&mut times, 50)
}

/// In nanoseconds.
pub(crate) fn ns(time: Duration) -> f64 {
    time.as_secs_f64() * 1e9
}

/// In microseconds.
pub(crate) fn us(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_percentiles_are_samples() {
        assert_eq!(median_of(vec![5.0, 1.0, 9.0]), 5.0);
        assert!(median_of(Vec::new()).is_nan());
        let mut times: Vec<_> = (1..=200).map(Duration::from_micros).collect();
        assert_eq!(percentile(&mut times, 99), Duration::from_micros(199));
        assert_eq!(percentile(&mut times, 100), Duration::from_micros(200));
        assert_eq!(median(Vec::new()), Duration::ZERO);
    }
}
