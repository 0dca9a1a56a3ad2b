//! Who is served next: deficit round robin over tenants (Shreedhar and Varghese, SIGCOMM 1995), and within a tenant
//! round robin over its rings.
//!
//! Each lap credits every tenant in proportion to its weight; what a ring gives is paid from that. A request is known
//! only once it is taken, so the last one of a visit may put its tenant into debt, which later laps pay. Credit that
//! is not used is gone: a tenant that was idle has no more than one that was not. Looking at a ring is bounded too, so a
//! tenant with thousands of rings costs its neighbours no more than one with a few.
//!
//! Must not know: what a ring is or what is taken out of it.

use std::sync::Arc;

use super::share::Share;

/// What a request counts for beside its payload, bytes. A broker thread posts 5 to 10 million requests in the time in
/// which an adapter of 100 to 200 Gbit/s moves 12 to 25 GB: to post one takes as long as to send 2 KiB.
pub(crate) const REQUEST_BYTES: i64 = 2048;
/// What the heaviest tenant may spend in a lap: 64 small requests.
const QUANTUM_BYTES: i64 = 64 * REQUEST_BYTES;
/// Rings of one tenant looked at in a lap.
const LOOKS: usize = 64;
/// Of those, rings that turn out to have nothing. What they cost is what a busy ring waits for, once a lap.
const EMPTY_LOOKS: usize = 8;
/// Requests that one ring gives at a time, so that a busy ring does not starve its tenant's others.
pub(crate) const BATCH: u32 = 32;

/// What a ring may give now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Allowance {
    /// Requests.
    pub(crate) requests: u32,
    /// Of payload and [`REQUEST_BYTES`]: no further request once so much is spent.
    pub(crate) cost_bytes: i64,
    /// Of payload: no further request once so much is spent.
    pub(crate) payload_bytes: u64,
}

impl Allowance {
    fn is_used_up(&self, spent: Spent) -> bool {
        spent.requests >= self.requests
            || spent.cost_bytes() >= self.cost_bytes
            || spent.payload_bytes >= self.payload_bytes
    }
}

/// What a ring gave.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Spent {
    pub(crate) requests: u32,
    pub(crate) payload_bytes: u64,
}

impl Spent {
    /// What is paid for it.
    pub(crate) fn cost_bytes(self) -> i64 {
        let payload = i64::try_from(self.payload_bytes).unwrap_or(i64::MAX);
        payload.saturating_add(REQUEST_BYTES * i64::from(self.requests))
    }
}

struct Tenant {
    share: Arc<Share>,
    /// Places of its rings.
    places: Vec<usize>,
    /// Ring whose turn it is.
    next: usize,
    /// Ring that last gave something: most likely to have more, so it is looked at in every lap.
    last: Option<usize>,
    /// What it may still spend in this lap; below 0, what it owes.
    credit_bytes: i64,
    /// It waits for its rate until then, ns of the broker's clock.
    waits_until_ns: Option<u64>,
}

/// What came of a look at a ring.
struct Look {
    took: bool,
    may_have_more: bool,
}

/// What came of a lap.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Lap {
    /// Whether anything was taken.
    pub(crate) busy: bool,
    /// Tenants that began to wait for their rate.
    pub(crate) throttled: u64,
}

/// The tenants of one broker thread.
#[derive(Default)]
pub(crate) struct Schedule {
    tenants: Vec<Tenant>,
}

impl Schedule {
    /// Serves the ring at `place` for the tenant of `share` from here on. Allocates.
    pub(crate) fn enter(&mut self, share: &Arc<Share>, place: usize) {
        match self.tenants.iter_mut().find(|tenant| Arc::ptr_eq(&tenant.share, share)) {
            Some(tenant) => tenant.places.push(place),
            None => self.tenants.push(Tenant {
                share: Arc::clone(share),
                places: vec![place],
                next: 0,
                last: None,
                credit_bytes: 0,
                waits_until_ns: None,
            }),
        }
    }

    /// The ring at `place` is gone.
    pub(crate) fn leave(&mut self, place: usize) {
        for tenant in &mut self.tenants {
            tenant.places.retain(|other| *other != place);
            tenant.last = tenant.last.filter(|last| *last != place);
        }
        self.tenants.retain(|tenant| !tenant.places.is_empty());
    }

    /// One lap: every tenant gets its credit, and spends it if its rings have something. `serve` takes from the ring
    /// at a place, within an allowance.
    pub(crate) fn lap(&mut self, clock: &dyn Fn() -> u64, mut serve: impl FnMut(usize, Allowance) -> Spent) -> Lap {
        let heaviest = self.tenants.iter().map(|tenant| tenant.share.weight()).max().unwrap_or(1);
        let lap = self.laps(1, heaviest, clock, &mut serve);
        if lap.busy {
            return lap;
        }
        // Nobody could spend. Whoever owes need not wait for laps in which nothing happens.
        match self.laps_to_credit(heaviest) {
            Some(laps) => {
                let then = self.laps(laps, heaviest, clock, &mut serve);
                Lap { busy: then.busy, throttled: lap.throttled + then.throttled }
            }
            None => lap,
        }
    }

    fn laps(
        &mut self,
        count: i64,
        heaviest: u32,
        clock: &dyn Fn() -> u64,
        serve: &mut impl FnMut(usize, Allowance) -> Spent,
    ) -> Lap {
        let mut lap = Lap::default();
        for tenant in &mut self.tenants {
            // What was left is gone; what is owed stays.
            let credit = tenant.quantum(heaviest).saturating_mul(count);
            tenant.credit_bytes = tenant.credit_bytes.min(0).saturating_add(credit).min(tenant.quantum(heaviest));
            lap.busy |= tenant.visit(clock, serve, &mut lap.throttled);
        }
        lap
    }

    /// Laps until the first tenant that owes and does not wait for its rate has credit again.
    fn laps_to_credit(&self, heaviest: u32) -> Option<i64> {
        let owing = self.tenants.iter().filter(|tenant| tenant.credit_bytes < 0 && tenant.waits_until_ns.is_none());
        owing.map(|tenant| 1 - tenant.credit_bytes / tenant.quantum(heaviest)).min()
    }

    /// Places of all rings whose tenants do not wait for their rate.
    pub(crate) fn open_places(&self) -> impl Iterator<Item = usize> {
        let open = self.tenants.iter().filter(|tenant| tenant.waits_until_ns.is_none());
        open.flat_map(|tenant| tenant.places.iter().copied())
    }

    /// When the first tenant that waits for its rate may go on.
    pub(crate) fn next_refill_ns(&self) -> Option<u64> {
        self.tenants.iter().filter_map(|tenant| tenant.waits_until_ns).min()
    }
}

impl Tenant {
    fn quantum(&self, heaviest: u32) -> i64 {
        (QUANTUM_BYTES * i64::from(self.share.weight()) / i64::from(heaviest.max(1))).max(1)
    }

    /// Spends the credit; whether anything was taken.
    fn visit(
        &mut self,
        clock: &dyn Fn() -> u64,
        serve: &mut impl FnMut(usize, Allowance) -> Spent,
        throttled: &mut u64,
    ) -> bool {
        let waited = self.waits_until_ns.take().is_some();
        let mut busy = false;
        let mut empty = 0;
        let mut last = self.last;
        for _ in 0..LOOKS {
            if empty == self.places.len().min(EMPTY_LOOKS) {
                break;
            }
            self.next = if self.next < self.places.len() { self.next } else { 0 };
            let Some(place) = self.places.get(self.next).copied() else { break };
            let Some(look) = self.look(place, clock, serve) else { break };
            self.next += 1;
            busy |= look.took;
            // One that could have given more has nothing left: it is not asked again in this lap.
            empty = if look.may_have_more { 0 } else { empty + 1 };
            last = last.filter(|last| *last != place);
        }
        // After the others, which it must not keep from their turn.
        if let Some(place) = last {
            busy |= self.look(place, clock, serve).is_some_and(|look| look.took);
        }
        *throttled += u64::from(self.waits_until_ns.is_some() && !waited);
        busy
    }

    /// Takes from one ring; `None` when the tenant may spend no more, or must wait for its rate.
    fn look(
        &mut self,
        place: usize,
        clock: &dyn Fn() -> u64,
        serve: &mut impl FnMut(usize, Allowance) -> Spent,
    ) -> Option<Look> {
        if self.credit_bytes <= 0 || self.waits_until_ns.is_some() {
            return None;
        }
        let mut allowance = Allowance { requests: BATCH, cost_bytes: self.credit_bytes, payload_bytes: u64::MAX };
        let has_rate = self.share.has_rate();
        let now_ns = if has_rate { clock() } else { 0 };
        if has_rate && !self.limit(&mut allowance, now_ns) {
            return None;
        }
        let spent = serve(place, allowance);
        if has_rate {
            self.share.operations.give_back(allowance.requests.into(), spent.requests.into());
            self.share.bytes.charge(now_ns, spent.payload_bytes);
        }
        self.credit_bytes = self.credit_bytes.saturating_sub(spent.cost_bytes());
        if spent.requests > 0 {
            self.last = Some(place);
        }
        Some(Look { took: spent.requests > 0, may_have_more: allowance.is_used_up(spent) })
    }

    /// Narrows the allowance to the tenant's rates; false if it must wait.
    fn limit(&mut self, allowance: &mut Allowance, now_ns: u64) -> bool {
        let Share { operations, bytes, .. } = &*self.share;
        allowance.payload_bytes = bytes.free(now_ns);
        let taken = if allowance.payload_bytes > 0 { operations.take(now_ns, allowance.requests.into()) } else { 0 };
        allowance.requests = u32::try_from(taken).unwrap_or(allowance.requests);
        if taken > 0 {
            return true;
        }
        self.waits_until_ns = Some(operations.ready_at_ns(now_ns).max(bytes.ready_at_ns(now_ns)));
        false
    }
}
