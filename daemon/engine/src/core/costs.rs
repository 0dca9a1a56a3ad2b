//! What registrations cost, by size: how many, and how long the driver took for all of them.

/// Upper bound of each size, bytes, and its name; longer ones have the last.
const SIZES: [(u64, &str); 7] = [
    (64 << 10, "64KiB"),
    (1 << 20, "1MiB"),
    (16 << 20, "16MiB"),
    (256 << 20, "256MiB"),
    (1 << 30, "1GiB"),
    (16 << 30, "16GiB"),
    (u64::MAX, "more"),
];

/// Sums by size.
#[derive(Debug, Clone, Default)]
pub(crate) struct Costs {
    sums: [(u64, u64); SIZES.len()],
}

impl Costs {
    /// Notes a registration of `len_bytes` that took `cost_ns`.
    pub(crate) fn note(&mut self, len_bytes: u64, cost_ns: u64) {
        let sums = SIZES.iter().zip(&mut self.sums).find(|((most, _), _)| len_bytes <= *most);
        if let Some((_, (count, total_ns))) = sums {
            *count += 1;
            *total_ns += cost_ns;
        }
    }

    /// Name of each size that has any, how many, and nanoseconds of all.
    pub(crate) fn by_size(&self) -> impl Iterator<Item = (&'static str, u64, u64)> + '_ {
        let all = SIZES.iter().zip(&self.sums).map(|((_, name), (count, total_ns))| (*name, *count, *total_ns));
        all.filter(|(_, count, _)| *count > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_are_kept_apart_by_size() {
        let mut costs = Costs::default();
        costs.note(64 << 10, 5);
        costs.note(1, 7);
        costs.note(u64::MAX, 11);
        assert_eq!(costs.by_size().collect::<Vec<_>>(), [("64KiB", 2, 12), ("more", 1, 11)]);
    }
}
