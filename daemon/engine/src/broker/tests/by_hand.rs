//! The broker against an HCA driven by hand.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use gdrd_hal::{Access, Hca, Opcode, PostError, QueuePairConfig, QueuePairType, WorkCompletion, WorkStatus};
use gdrd_ring::{
    BrokerRing, ClientRing, Geometry, InlineData, LocalSpan, Operation, RefusalReason, RemoteSpan, Source, Status, Wake,
};
use rustix::event::{EventfdFlags, eventfd};

use super::fake::Fake;
use super::world::{PATIENCE, recv, request, silent, write};
use crate::broker::{
    Broker, BrokerError, BrokerEvent, Config, HcaIndex, QueuePairLimits, QueuePairSetup, Share, SlotEntry, SlotTable,
};
use crate::{QueuePairId, SlotId, Traffic};

const LOCAL: LocalSpan = LocalSpan { slot: 0, generation: 1, offset: 0, len_bytes: 8 };
const REMOTE: RemoteSpan = RemoteSpan { rkey: 1, iova: 0 };
const ID: QueuePairId = QueuePairId(1);

struct Bench {
    fake: Fake,
    broker: Broker,
    slots: Arc<SlotTable>,
    ring: ClientRing,
    doorbell: OwnedFd,
    events: Receiver<BrokerEvent>,
}

impl Bench {
    fn new() -> Self {
        Self::with_drain(PATIENCE)
    }

    fn with_drain(drain: Duration) -> Self {
        Self::interrupted(drain, |_, _| {})
    }

    /// `meanwhile` happens between the reservation and the attachment.
    fn interrupted(drain: Duration, meanwhile: impl FnOnce(&Broker, &Receiver<BrokerEvent>)) -> Self {
        let (tell, events) = channel();
        let config = Config { spin: Duration::ZERO, drain, ..Config::default() };
        let broker = Broker::start(config, move |event| drop(tell.send(event))).expect("threads start");
        let fake = Fake::default();
        let slots = Arc::new(SlotTable::new(4));
        let entry = SlotEntry { hca: HcaIndex(0), lkey: 5, iova: 4096, len_bytes: 64, access: Access::DATA };
        slots.publish(SlotId(0), entry).expect("free");
        let geometry = Geometry::new(8, 8).expect("small");
        let reservation = broker.reserve(HcaIndex(0), &fake, geometry, None).expect("room");
        let config =
            QueuePairConfig { qp_type: QueuePairType::Rc, send_depth: 8, recv_depth: 8, inline_bytes: 16, port_num: 1 };
        let pd = fake.alloc_pd().expect("a domain");
        let parts = pd.create_queue_pair(reservation.cq(), &config).expect("a queue pair");
        meanwhile(&broker, &events);
        let ring = BrokerRing::create(geometry).expect("memory");
        let client = ClientRing::open(ring.fd().try_clone_to_owned().expect("dup")).expect("our own ring");
        let doorbell = eventfd(0, EventfdFlags::CLOEXEC).expect("eventfd");
        let setup = QueuePairSetup {
            id: ID,
            ring,
            doorbell: doorbell.try_clone().expect("dup"),
            parts,
            slots: Arc::clone(&slots),
            share: Arc::new(Share::new(Traffic::default())),
            limits: QueuePairLimits::new(&fake.capabilities(), &config),
            landing: None,
        };
        broker.attach(reservation, setup).expect("attached");
        Self { fake, broker, slots, ring: client, doorbell, events }
    }

    fn post(&mut self, submissions: &[gdrd_ring::Submission]) {
        for submission in submissions {
            self.ring.submit(submission).expect("room");
        }
        if self.ring.flush() == Wake::Needed {
            rustix::io::write(&self.doorbell, &1_u64.to_ne_bytes()).expect("an eventfd takes 1");
        }
    }

    /// Waits until the HCA has `count` sends.
    fn await_posted(&self, count: usize) {
        while self.fake.posted().len() < count {
            std::thread::yield_now();
        }
    }

    fn next(&mut self) -> (u64, Status, u32) {
        let done = self.ring.wait(Some(PATIENCE)).expect("open").expect("a completion comes");
        (done.wr_id, done.status, done.vendor_error)
    }

    fn detach(&self) {
        let (tell, told) = channel();
        self.broker.detach(ID, move || tell.send(()).expect("waited for"));
        told.recv_timeout(PATIENCE).expect("detaching ends");
    }
}

#[test]
fn completions_that_come_out_of_order_are_told_in_order() {
    let mut bench = Bench::new();
    bench.post(&[request(1, write(LOCAL, REMOTE)), silent(2, write(LOCAL, REMOTE)), request(3, write(LOCAL, REMOTE))]);
    bench.await_posted(3);
    bench.fake.complete(2, WorkStatus::Success);
    bench.fake.complete(1, WorkStatus::Success);
    while bench.slots.in_flight(SlotId(0)) > 1 {
        std::thread::yield_now();
    }
    assert_eq!(bench.ring.poll(), Ok(None));
    bench.fake.complete(0, WorkStatus::Success);
    assert_eq!(bench.next(), (1, Status::Success, 0));
    assert_eq!(bench.next(), (3, Status::Success, 0));
}

#[test]
fn every_request_is_signalled_to_the_hca() {
    let mut bench = Bench::new();
    bench.post(&[silent(1, write(LOCAL, REMOTE)), silent(2, Operation::Read { local: LOCAL, remote: REMOTE })]);
    bench.await_posted(2);
    assert!(bench.fake.with(|state| state.sends.iter().all(|request| request.signaled)));
    assert!(bench.fake.with(|state| state.sends.iter().all(|request| request.local.addr == 4096)));
}

#[test]
fn what_the_provider_refuses_in_a_batch_ends_in_its_place_and_the_rest_is_posted() {
    let mut bench = Bench::new();
    bench.fake.with(|state| {
        state.refuses = vec![(Opcode::Read, PostError::Unsupported), (Opcode::Send, PostError::Full)];
    });
    let read = Operation::Read { local: LOCAL, remote: REMOTE };
    let send = Operation::Send { source: Source::Local(LOCAL), imm: None };
    bench.post(&[
        request(1, read),
        request(2, write(LOCAL, REMOTE)),
        request(3, send),
        request(4, write(LOCAL, REMOTE)),
        silent(5, read),
    ]);
    assert_eq!(bench.next(), (1, Status::Refused, RefusalReason::Unsupported.code()));
    bench.await_posted(2);
    assert_eq!(bench.slots.in_flight(SlotId(0)), 2);
    bench.fake.complete(1, WorkStatus::Success);
    bench.fake.complete(0, WorkStatus::Success);
    assert_eq!(bench.next(), (2, Status::Success, 0));
    assert_eq!(bench.next(), (3, Status::Refused, RefusalReason::Provider.code()));
    assert_eq!(bench.next(), (4, Status::Success, 0));
    assert_eq!(bench.next(), (5, Status::Refused, RefusalReason::Unsupported.code()));
}

#[test]
fn what_the_queue_pair_cannot_carry_is_refused_before_it_reaches_the_hca() {
    let mut bench = Bench::new();
    let inline = Source::Inline(InlineData::new(&[0; 17]).expect("short"));
    bench.post(&[
        request(1, Operation::Write { source: inline, remote: REMOTE, imm: None }),
        request(2, Operation::Flush { remote: REMOTE, len_bytes: 1 }),
    ]);
    assert_eq!(bench.next(), (1, Status::Refused, RefusalReason::InlineTooLong.code()));
    assert_eq!(bench.next(), (2, Status::Refused, RefusalReason::Unsupported.code()));
    assert!(bench.fake.posted().is_empty());
}

#[test]
fn completions_of_nothing_posted_are_counted_and_change_nothing() {
    let mut bench = Bench::new();
    bench.post(&[request(1, write(LOCAL, REMOTE))]);
    bench.await_posted(1);
    let wr_id = bench.fake.with(|state| state.sends[0].wr_id);
    for forged in [wr_id + 1, wr_id ^ 1 << 32, wr_id ^ 1 << 48, wr_id ^ 1 << 63, u64::MAX] {
        let completion = WorkCompletion { wr_id: forged, ..WorkCompletion::EMPTY };
        bench.fake.with(|state| state.completions.push_back(completion));
    }
    while bench.broker.stats().threads[0].unexpected < 5 {
        std::thread::yield_now();
    }
    assert_eq!((bench.slots.in_flight(SlotId(0)), bench.ring.poll()), (1, Ok(None)));
    bench.fake.with(|state| state.completions.push_back(WorkCompletion { wr_id, ..WorkCompletion::EMPTY }));
    bench.fake.with(|state| state.completions.push_back(WorkCompletion { wr_id, ..WorkCompletion::EMPTY }));
    assert_eq!(bench.next(), (1, Status::Success, 0));
}

#[test]
fn work_that_never_flushes_is_given_up_and_its_slots_are_free_only_after_destruction() {
    let mut bench = Bench::with_drain(Duration::from_millis(2));
    bench.post(&[request(1, write(LOCAL, REMOTE)), request(2, recv(LOCAL))]);
    bench.await_posted(1);
    bench.slots.retire(SlotId(0)).expect("published");
    let fake = bench.fake.clone();
    let (tell, told) = channel();
    let ask = move || tell.send(fake.with(|state| state.destroyed)).expect("waited for");
    bench.slots.quiesce(SlotId(0), ask).expect("retired");
    bench.broker.flush_users(&bench.slots, SlotId(0));
    assert_eq!(told.recv_timeout(PATIENCE), Ok(true), "the HCA could still write to the slot");
    let mut ended = [bench.next(), bench.next()];
    ended.sort_unstable_by_key(|(wr_id, ..)| *wr_id);
    assert_eq!(ended, [(1, Status::WrFlushErr, 0), (2, Status::WrFlushErr, 0)]);
    bench.post(&[request(3, write(LOCAL, REMOTE))]);
    assert_eq!(bench.next(), (3, Status::WrFlushErr, 0));
    bench.detach();
}

#[test]
fn detaching_ends_even_if_the_driver_neither_stops_nor_flushes() {
    for (stop_error, drain) in [(None, Duration::from_millis(2)), (Some(Fake::gone()), PATIENCE)] {
        let mut bench = Bench::with_drain(drain);
        bench.fake.with(|state| state.stop_error = stop_error);
        bench.post(&[request(1, write(LOCAL, REMOTE))]);
        bench.await_posted(1);
        bench.detach();
        assert!(bench.fake.with(|state| state.stopped && state.destroyed));
        assert_eq!(bench.slots.in_flight(SlotId(0)), 0);
        assert_ne!(bench.next().1, Status::Success);
    }
}

#[test]
fn a_device_that_is_gone_at_post_ends_the_queue_pair() {
    let mut bench = Bench::new();
    bench.fake.with(|state| {
        state.refuses = vec![(Opcode::Write, PostError::Gone)];
        state.stop_error = Some(Fake::gone());
    });
    bench.post(&[request(1, write(LOCAL, REMOTE)), request(2, recv(LOCAL))]);
    let mut ended = [bench.next(), bench.next()];
    ended.sort_unstable_by_key(|(wr_id, ..)| *wr_id);
    assert_eq!(ended.map(|(_, status, _)| status), [Status::FatalErr, Status::FatalErr]);
    let event = bench.events.recv_timeout(PATIENCE).expect("told");
    assert!(matches!(event, BrokerEvent::QueuePairFailed { id: ID, status: Status::FatalErr }));
    while bench.slots.in_flight(SlotId(0)) > 0 {
        std::thread::yield_now();
    }
}

#[test]
fn a_queue_pair_attached_after_its_completion_queue_failed_fails_at_once() {
    let mut bench = Bench::interrupted(PATIENCE, |broker, events| {
        broker.forget_hca(HcaIndex(0));
        let event = events.recv_timeout(PATIENCE).expect("told");
        assert!(matches!(event, BrokerEvent::CompletionQueueFailed { ref queue_pairs, .. } if queue_pairs.is_empty()));
    });
    let event = bench.events.recv_timeout(PATIENCE).expect("told");
    assert!(matches!(event, BrokerEvent::QueuePairFailed { id: ID, status: Status::FatalErr }));
    bench.post(&[request(1, write(LOCAL, REMOTE))]);
    assert_eq!(bench.next(), (1, Status::WrFlushErr, 0));
    bench.detach();
    assert!(bench.fake.with(|state| state.destroyed));
}

#[test]
fn a_failed_completion_queue_is_replaced_for_the_next_queue_pair() {
    let mut bench = Bench::new();
    bench.post(&[request(1, write(LOCAL, REMOTE))]);
    bench.await_posted(1);
    bench.fake.with(|state| state.cq_error = Some(Fake::gone()));
    assert_eq!(bench.next(), (1, Status::FatalErr, 0));
    let event = bench.events.recv_timeout(PATIENCE).expect("told");
    assert!(matches!(event, BrokerEvent::CompletionQueueFailed { ref queue_pairs, .. } if *queue_pairs == [ID]));
    bench.detach();
    bench.fake.with(|state| state.cq_error = None);
    let geometry = Geometry::new(8, 8).expect("small");
    assert!(bench.broker.reserve(HcaIndex(0), &bench.fake, geometry, None).is_ok());
}

#[test]
fn a_completion_queue_of_a_lost_hca_goes_with_its_last_user_though_the_thread_sleeps() {
    let bench = Bench::new();
    let geometry = Geometry::new(1, 0).expect("small");
    let last = bench.broker.reserve(HcaIndex(0), &bench.fake, geometry, None).expect("room");
    bench.broker.forget_hca(HcaIndex(0));
    let sleeps = || bench.broker.stats().threads[0].sleeps;
    let before = sleeps();
    bench.detach();
    while sleeps() == before {
        std::thread::yield_now();
    }
    assert!(!bench.fake.with(|state| state.cq_destroyed));
    drop(last);
    while !bench.fake.with(|state| state.cq_destroyed) {
        std::thread::yield_now();
    }
}

#[test]
fn nothing_is_reserved_on_an_hca_that_was_forgotten() {
    let broker = Broker::start(Config::default(), |_| ()).expect("threads start");
    let geometry = Geometry::new(1, 0).expect("small");
    // One that was never used, and one that was.
    drop(broker.reserve(HcaIndex(1), &Fake::default(), geometry, None).expect("room"));
    for hca in [HcaIndex(0), HcaIndex(1)] {
        broker.forget_hca(hca);
        let refused = broker.reserve(hca, &Fake::default(), geometry, None);
        assert!(matches!(refused, Err(BrokerError::Gone { .. })), "{refused:?}");
    }
    assert!(broker.reserve(HcaIndex(2), &Fake::default(), geometry, None).is_ok());
}

#[test]
fn a_completion_queue_made_while_its_hca_was_forgotten_is_destroyed() {
    let broker = Arc::new(Broker::start(Config::default(), |_| ()).expect("threads start"));
    let fake = Fake::default();
    let (forgets, geometry) = (Arc::clone(&broker), Geometry::new(1, 0).expect("small"));
    fake.at_next_call(move || forgets.forget_hca(HcaIndex(0)));
    let refused = broker.reserve(HcaIndex(0), &fake, geometry, None);
    assert!(matches!(refused, Err(BrokerError::Gone { .. })), "{refused:?}");
    while !fake.with(|state| state.cq_destroyed) {
        std::thread::yield_now();
    }
}
