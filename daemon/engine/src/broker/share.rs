//! What one tenant may send: its weight beside others, and its rates. Shared by all broker threads, without a lock.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::policy::Traffic;

const NS_PER_S: u64 = 1_000_000_000;
/// A bucket holds what its rate gives in this time, but at least one unit.
const BURST_NS: u64 = 10_000_000;

/// A token bucket kept as one number, the time at which all that was taken is paid for (the virtual scheduling of
/// ITU-T I.371, annex A). It cannot fill beyond its burst, however long nobody takes.
#[derive(Debug, Default)]
pub(crate) struct Bucket {
    /// 0 for no limit.
    per_s: AtomicU64,
    paid_at_ns: AtomicU64,
}

impl Bucket {
    fn new(per_s: u64) -> Self {
        Self { per_s: AtomicU64::new(per_s), paid_at_ns: AtomicU64::new(0) }
    }

    fn per_s(&self) -> u64 {
        self.per_s.load(Ordering::Relaxed)
    }

    /// Units that may begin now.
    pub(crate) fn free(&self, now_ns: u64) -> u64 {
        let per_s = self.per_s();
        if per_s == 0 { u64::MAX } else { free(per_s, now_ns, self.paid_at_ns.load(Ordering::Relaxed)) }
    }

    /// Takes up to `wanted` units of those that may begin now; how many. What is not used goes back by
    /// [`Bucket::give_back`].
    pub(crate) fn take(&self, now_ns: u64, wanted: u64) -> u64 {
        let per_s = self.per_s();
        if per_s == 0 {
            return wanted;
        }
        let mut taken = 0;
        // One number is all there is to guard, so no order with other memory is needed.
        let _ = self.paid_at_ns.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |paid_at| {
            taken = free(per_s, now_ns, paid_at).min(wanted);
            (taken > 0).then(|| paid_at.max(now_ns).saturating_add(cost_ns(per_s, taken)))
        });
        taken
    }

    /// Gives back what of `taken` was not `used`.
    pub(crate) fn give_back(&self, taken: u64, used: u64) {
        let per_s = self.per_s();
        if per_s > 0 {
            let back = cost_ns(per_s, taken).saturating_sub(cost_ns(per_s, used));
            let less = |paid_at: u64| Some(paid_at.saturating_sub(back));
            let _ = self.paid_at_ns.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        }
    }

    /// Charges units that have begun, whatever is free: the bucket is in debt then.
    pub(crate) fn charge(&self, now_ns: u64, units: u64) {
        let per_s = self.per_s();
        if per_s > 0 && units > 0 {
            let more = |paid_at: u64| Some(paid_at.max(now_ns).saturating_add(cost_ns(per_s, units)));
            let _ = self.paid_at_ns.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        }
    }

    /// When a unit may begin; not after `now_ns` if one may now.
    pub(crate) fn ready_at_ns(&self, now_ns: u64) -> u64 {
        let per_s = self.per_s();
        if per_s == 0 {
            return now_ns;
        }
        let paid = self.paid_at_ns.load(Ordering::Relaxed);
        paid.saturating_add(cost_ns(per_s, 1)).saturating_sub(burst_ns(per_s))
    }
}

/// Never less than what the units take at the rate, so rounding cannot exceed it.
fn cost_ns(per_s: u64, units: u64) -> u64 {
    let cost = (u128::from(units) * u128::from(NS_PER_S)).div_ceil(u128::from(per_s.max(1)));
    u64::try_from(cost).unwrap_or(u64::MAX)
}

fn burst_ns(per_s: u64) -> u64 {
    BURST_NS.max(cost_ns(per_s, 1))
}

fn free(per_s: u64, now_ns: u64, paid_at_ns: u64) -> u64 {
    let left = now_ns.saturating_add(burst_ns(per_s)).saturating_sub(paid_at_ns.max(now_ns));
    u64::try_from(u128::from(left) * u128::from(per_s) / u128::from(NS_PER_S)).unwrap_or(u64::MAX)
}

/// One tenant's part of the broker.
#[derive(Debug)]
pub struct Share {
    weight: AtomicU32,
    pub(crate) operations: Bucket,
    pub(crate) bytes: Bucket,
}

impl Share {
    /// A share with full buckets.
    #[must_use]
    pub fn new(traffic: Traffic) -> Self {
        Self {
            weight: AtomicU32::new(traffic.weight.max(1)),
            operations: Bucket::new(traffic.operations_per_s),
            bytes: Bucket::new(traffic.bytes_per_s),
        }
    }

    /// Takes other rules from here on; what was sent before stays paid for.
    pub fn set(&self, traffic: Traffic) {
        self.weight.store(traffic.weight.max(1), Ordering::Relaxed);
        self.operations.per_s.store(traffic.operations_per_s, Ordering::Relaxed);
        self.bytes.per_s.store(traffic.bytes_per_s, Ordering::Relaxed);
    }

    pub(crate) fn weight(&self) -> u32 {
        self.weight.load(Ordering::Relaxed)
    }

    /// Whether it has a rate at all: without one, nobody looks at the clock.
    pub(crate) fn has_rate(&self) -> bool {
        self.operations.per_s() > 0 || self.bytes.per_s() > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn a_bucket_gives_its_burst_at_once_and_its_rate_from_then_on() {
        let bucket = Bucket::new(1_000_000);
        assert_eq!(bucket.take(0, 20_000), 10_000, "10 ms of it");
        assert_eq!((bucket.take(0, 1), bucket.ready_at_ns(0)), (0, 1000));
        assert_eq!(bucket.take(999, 5), 0);
        assert_eq!(bucket.take(1000, 5), 1);
        assert_eq!(bucket.take(3 * MS, 1 << 20), 2999);
    }

    #[test]
    fn time_without_use_fills_it_no_further_than_its_burst() {
        let bucket = Bucket::new(1_000_000);
        for now in [0, 3600 * NS_PER_S, 7200 * NS_PER_S] {
            assert_eq!(bucket.take(now, u64::MAX), 10_000);
        }
    }

    #[test]
    fn a_slow_rate_has_room_for_one() {
        let bucket = Bucket::new(2);
        assert_eq!(bucket.take(0, 10), 1);
        assert_eq!((bucket.take(499 * MS, 10), bucket.ready_at_ns(0)), (0, 500 * MS));
        assert_eq!(bucket.take(500 * MS, 10), 1);
    }

    #[test]
    fn what_is_given_back_can_be_taken_again_and_no_more() {
        let bucket = Bucket::new(4_000_000);
        let all = bucket.take(0, u64::MAX);
        bucket.give_back(all, 10);
        assert_eq!(bucket.take(0, u64::MAX), all - 10);
    }

    #[test]
    fn a_debt_is_paid_before_anything_else_begins() {
        let bucket = Bucket::new(NS_PER_S);
        bucket.charge(0, NS_PER_S);
        assert_eq!((bucket.free(0), bucket.free(990 * MS), bucket.free(1000 * MS)), (0, 0, 10 * MS));
        assert_eq!(bucket.ready_at_ns(0), 990 * MS + 1);
    }

    #[test]
    fn without_a_rate_nothing_is_counted() {
        let share = Share::new(Traffic::default());
        assert!(!share.has_rate());
        assert_eq!(share.operations.take(0, 7), 7);
        share.bytes.charge(0, u64::MAX);
        assert_eq!(share.bytes.free(0), u64::MAX);
    }
}
