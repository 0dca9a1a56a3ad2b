//! Who gets how much, on a broker whose turns and clock the test drives: every figure here is a count.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use gdrd_hal::{Access, Hca, ProtectionDomain, QueuePairConfig, QueuePairType};
use gdrd_ring::{BrokerRing, ClientRing, Geometry, LocalSpan, RemoteSpan, Status};
use rustix::event::{EventfdFlags, eventfd};
use rustix::process::{Resource, getrlimit, setrlimit};

use super::fake::Fake;
use super::world::{request, write};
use crate::broker::schedule::REQUEST_BYTES;
use crate::broker::worker::Worker;
use crate::broker::{Broker, Config, HcaIndex, QueuePairLimits, QueuePairSetup, Share, SlotEntry, SlotTable};
use crate::{QueuePairId, SlotId, Traffic};

const MAX_MESSAGE: u32 = 1 << 20;
const MS: u64 = 1_000_000;
const S: u64 = 1000 * MS;

/// Of a tenant's rings, by their number: the simulated completion queue holds 65,536.
fn depth_of(rings: u32) -> u32 {
    if rings < 10 { 512 } else { 8 }
}

/// One broker thread that runs when it is told to, on a clock that stands still in between.
struct Stage {
    fake: Fake,
    broker: Broker,
    worker: Worker,
    now_ns: Arc<AtomicU64>,
    last_id: u64,
}

impl Stage {
    fn new() -> Self {
        // Thousands of rings are more descriptors than a shell's soft limit of 1024; the daemon asks for as many too.
        let mut limit = getrlimit(Resource::Nofile);
        limit.current = limit.maximum;
        setrlimit(Resource::Nofile, limit).expect("up to the hard limit");
        let now_ns = Arc::new(AtomicU64::new(0));
        let clock = Arc::clone(&now_ns);
        let clock = Arc::new(move || clock.load(Ordering::Relaxed));
        let (broker, mut workers) = Broker::by_hand(Config::default(), clock, drop).expect("an eventfd");
        let fake = Fake::default();
        fake.with(|state| state.completes = true);
        let worker = workers.pop().expect("one thread");
        Self { fake, broker, worker, now_ns, last_id: 0 }
    }

    fn tenant(&mut self, traffic: Traffic, rings: u32, len_bytes: u32) -> Tenant {
        let slots = Arc::new(SlotTable::new(4));
        let len = u64::from(MAX_MESSAGE);
        let entry = SlotEntry { hca: HcaIndex(0), lkey: 5, iova: 0, len_bytes: len, access: Access::DATA };
        slots.publish(SlotId(0), entry).expect("free");
        let share = Arc::new(Share::new(traffic));
        let rings = (0..rings).map(|_| self.ring(&slots, &share, depth_of(rings))).collect();
        // Takes them in.
        self.worker.turn();
        Tenant { rings, len_bytes, posted: 0, ended: 0 }
    }

    fn ring(&mut self, slots: &Arc<SlotTable>, share: &Arc<Share>, depth: u32) -> (ClientRing, OwnedFd) {
        self.last_id += 1;
        let geometry = Geometry::new(depth, 1).expect("small");
        let reservation = self.broker.reserve(HcaIndex(0), &self.fake, geometry, None).expect("room");
        let config = QueuePairConfig {
            qp_type: QueuePairType::Rc,
            send_depth: depth,
            recv_depth: 1,
            inline_bytes: 16,
            port_num: 1,
        };
        let parts = self.fake.create_queue_pair(reservation.cq(), &config).expect("a queue pair");
        let ring = BrokerRing::create(geometry).expect("memory");
        let client = ClientRing::open(ring.fd().try_clone_to_owned().expect("dup")).expect("our own ring");
        let doorbell = eventfd(0, EventfdFlags::CLOEXEC).expect("eventfd");
        let setup = QueuePairSetup {
            id: QueuePairId(self.last_id),
            ring,
            doorbell: doorbell.try_clone().expect("dup"),
            parts,
            slots: Arc::clone(slots),
            share: Arc::clone(share),
            limits: QueuePairLimits::new(&self.fake.capabilities(), &config),
            landing: None,
        };
        self.broker.attach(reservation, setup).expect("attached");
        (client, doorbell)
    }

    /// Turns in which the tenants keep all their rings full.
    fn saturate(&mut self, tenants: &mut [&mut Tenant], turns: u32) {
        for _ in 0..turns {
            tenants.iter_mut().for_each(|tenant| tenant.fill());
            self.worker.turn();
            tenants.iter_mut().for_each(|tenant| tenant.drain());
        }
    }

    fn pass(&self, ns: u64) {
        self.now_ns.fetch_add(ns, Ordering::Relaxed);
    }
}

struct Tenant {
    rings: Vec<(ClientRing, OwnedFd)>,
    len_bytes: u32,
    posted: u64,
    /// Requests that have succeeded.
    ended: u64,
}

impl Tenant {
    fn fill(&mut self) {
        for index in 0..self.rings.len() {
            while self.post(index) {}
        }
    }

    /// One request; false if the ring is full.
    fn post(&mut self, index: usize) -> bool {
        let local = LocalSpan { slot: 0, generation: 1, offset: 0, len_bytes: self.len_bytes };
        let (ring, _) = &mut self.rings[index];
        let posted = ring.submit(&request(self.posted, write(local, RemoteSpan { rkey: 1, iova: 0 }))).is_ok();
        self.posted += u64::from(posted);
        let _ = ring.flush();
        posted
    }

    fn drain(&mut self) {
        for (ring, _) in &mut self.rings {
            while let Some(done) = ring.poll().expect("sound") {
                assert_eq!(done.status, Status::Success);
                self.ended += 1;
            }
        }
    }
}

fn weight(weight: u32) -> Traffic {
    Traffic { weight, ..Traffic::default() }
}

/// `a` is `times` `b`, within two in a hundred.
fn assert_ratio(a: u64, b: u64, times: u64) {
    let (least, most) = (98 * times * b / 100, 102 * times * b / 100);
    assert!((least..=most).contains(&a), "{a} is not {times} times {b}");
}

#[test]
fn nothing_is_allocated_between_a_request_and_its_completion() {
    let mut stage = Stage::new();
    let (mut free, mut limited) =
        (stage.tenant(weight(1), 3, 8), stage.tenant(Traffic { operations_per_s: 1000, ..weight(2) }, 1, 8));
    // What the stand-in for an HCA keeps has its size by then.
    stage.saturate(&mut [&mut free, &mut limited], 100);
    let before = free.ended;
    let found = allocation_counter::measure(|| stage.saturate(&mut [&mut free, &mut limited], 500));
    assert_eq!(found.count_total, 0, "{} bytes", found.bytes_total);
    assert!(free.ended - before > 10_000);
}

#[test]
fn tenants_of_weight_one_and_three_get_requests_in_that_ratio() {
    let mut stage = Stage::new();
    let (mut light, mut heavy) = (stage.tenant(weight(1), 1, 8), stage.tenant(weight(3), 1, 8));
    stage.saturate(&mut [&mut light, &mut heavy], 1000);
    assert_ratio(heavy.ended, light.ended, 3);
    assert!(light.ended > 10_000, "{} requests prove nothing", light.ended);
}

#[test]
fn the_ratio_is_of_bytes_where_messages_differ() {
    let mut stage = Stage::new();
    let (mut small, mut large) = (stage.tenant(weight(1), 1, 8), stage.tenant(weight(1), 1, MAX_MESSAGE));
    stage.saturate(&mut [&mut small, &mut large], 5000);
    let cost = |tenant: &Tenant| tenant.ended * (u64::from(tenant.len_bytes) + REQUEST_BYTES.unsigned_abs());
    assert_ratio(cost(&large), cost(&small), 1);
}

#[test]
fn many_rings_make_no_greater_share() {
    let mut stage = Stage::new();
    let (mut one, mut many) = (stage.tenant(weight(1), 1, 8), stage.tenant(weight(1), 500, 8));
    stage.saturate(&mut [&mut one, &mut many], 300);
    assert_ratio(one.ended, many.ended, 1);
}

#[test]
fn thousands_of_rings_with_nothing_in_them_keep_nobody_waiting() {
    let mut stage = Stage::new();
    let _idle = stage.tenant(weight(100), 3000, 8);
    let mut busy = stage.tenant(weight(1), 1, 8);
    for round in 1..=100 {
        assert!(busy.post(0));
        // Taken and posted in the first turn, polled in the second.
        stage.worker.turn();
        stage.worker.turn();
        busy.drain();
        assert_eq!(busy.ended, round);
    }
}

#[test]
fn idle_rings_of_a_tenant_hardly_hold_up_its_busy_one() {
    let mut stage = Stage::new();
    let mut tenant = stage.tenant(weight(1), 500, 8);
    // Found once, wherever it stands; from then on it is looked at in every lap.
    assert!(tenant.post(250));
    while tenant.ended == 0 {
        stage.worker.turn();
        tenant.drain();
    }
    for round in 2..100 {
        assert!(tenant.post(250));
        stage.worker.turn();
        stage.worker.turn();
        tenant.drain();
        assert_eq!(tenant.ended, round);
    }
}

#[test]
fn a_busy_ring_does_not_keep_its_tenants_others_from_their_turn() {
    let mut stage = Stage::new();
    // So light that one ring could spend all of the tenant's credit.
    let (mut light, mut heavy) = (stage.tenant(weight(1), 2, 8), stage.tenant(weight(100), 1, 8));
    for _ in 0..2000 {
        while light.post(0) {}
        heavy.fill();
        stage.worker.turn();
        light.drain();
        heavy.drain();
    }
    let before = light.ended;
    assert!(light.post(1));
    let number = light.posted - 1;
    let mut turns = 0;
    let mut seen = false;
    while !seen {
        heavy.fill();
        while light.post(0) {}
        stage.worker.turn();
        turns += 1;
        while let Some(done) = light.rings[1].0.poll().expect("sound") {
            seen |= done.wr_id == number;
        }
        light.drain();
        heavy.drain();
    }
    assert!(light.ended > before && turns < 500, "it took {turns} turns");
}

#[test]
fn each_of_thousands_of_rings_is_served_in_its_turn() {
    let mut stage = Stage::new();
    let mut many = stage.tenant(weight(1), 1000, 8);
    for index in 0..1000 {
        assert!(many.post(index));
    }
    while many.ended < 1000 {
        stage.worker.turn();
        many.drain();
    }
}

#[test]
fn who_was_idle_has_no_more_credit_than_who_was_not() {
    let mut stage = Stage::new();
    let (mut idle, mut busy) = (stage.tenant(weight(1), 1, 8), stage.tenant(weight(1), 1, 8));
    stage.saturate(&mut [&mut busy], 10_000);
    let before = busy.ended;
    stage.saturate(&mut [&mut idle, &mut busy], 100);
    assert_ratio(idle.ended, busy.ended - before, 1);
}

#[test]
fn nobody_waits_for_laps_in_which_the_others_have_nothing() {
    let mut stage = Stage::new();
    let _idle = stage.tenant(weight(1000), 1, 8);
    // 1 MiB is some 8,000 laps of a tenant this light.
    let mut large = stage.tenant(weight(1), 1, MAX_MESSAGE);
    stage.saturate(&mut [&mut large], 100);
    assert!(large.ended >= 98, "{} of 100", large.ended);
}

#[test]
fn a_limit_on_requests_is_never_exceeded_and_loses_nothing() {
    let per_s = 50_000;
    let mut stage = Stage::new();
    let mut limited = stage.tenant(Traffic { operations_per_s: per_s, ..weight(1) }, 3, 8);
    let mut free = stage.tenant(weight(1), 1, 8);
    let mut at_ns = 0;
    for _ in 0..4000 {
        stage.saturate(&mut [&mut limited, &mut free], 3);
        let most = per_s / 100 + per_s * at_ns / S;
        assert!(limited.ended <= most, "{} of at most {most} after {at_ns} ns", limited.ended);
        stage.pass(77_777);
        at_ns += 77_777;
    }
    let due = per_s * at_ns / S;
    assert!(limited.ended >= due, "{} of {due}", limited.ended);
    assert!(free.ended > 10 * limited.ended, "the other tenant has no limit");
    let (posted, throttled) = (limited.posted, stage.broker.stats().threads[0].throttled);
    assert!(throttled > 0);
    // What waits in the rings comes in its time.
    while limited.ended < posted {
        stage.pass(MS);
        stage.worker.turn();
        limited.drain();
    }
}

#[test]
fn a_limit_on_bytes_is_exceeded_by_no_more_than_the_message_that_meets_it() {
    let (per_s, len) = (100 << 20, 300_000);
    let mut stage = Stage::new();
    let mut limited = stage.tenant(Traffic { bytes_per_s: per_s, ..weight(1) }, 2, len);
    let mut at_ns = 0;
    for _ in 0..2000 {
        stage.saturate(&mut [&mut limited], 3);
        let (sent, most) = (limited.ended * u64::from(len), per_s / 100 + per_s * at_ns / S + u64::from(len));
        assert!(sent <= most, "{sent} of at most {most} bytes after {at_ns} ns");
        stage.pass(MS);
        at_ns += MS;
    }
    assert!(limited.ended * u64::from(len) >= per_s * at_ns / S, "the rate is also reached");
}

#[test]
fn a_limit_holds_for_all_rings_and_threads_of_a_tenant_together() {
    let share = Share::new(Traffic { operations_per_s: 1000, ..weight(1) });
    let taken: u64 = std::thread::scope(|scope| {
        let take = || (0..1000).map(|_| share.operations.take(0, 3)).sum::<u64>();
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(take)).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).sum()
    });
    assert_eq!(taken, 10);
}
