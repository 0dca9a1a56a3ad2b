//! Descriptors that came by the session socket, kept until the call that they belong to asks for them.
//! Either may come first: the delivery, or the reply that names it. What nobody will ask for is given back.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gdrd_proto::v1;
use gdrd_shm::ForkMark;
use tokio::sync::oneshot;

/// What descriptors belong to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Subject {
    Lease(u64),
    QueuePair(u64),
    /// Contexts in direct mode, all of them: there is nothing to give back.
    Contexts,
}

/// Descriptors in the order of their kinds.
#[derive(Debug)]
pub(crate) struct Delivery {
    subject: Option<Subject>,
    kinds: Vec<String>,
    fds: Vec<OwnedFd>,
}

impl Delivery {
    pub(super) fn new(message: v1::Delivery, fds: Vec<OwnedFd>) -> Self {
        let subject = message.subject.map(|subject| match subject {
            v1::delivery::Subject::LeaseId(id) => Subject::Lease(id),
            v1::delivery::Subject::QueuePairId(id) => Subject::QueuePair(id),
            v1::delivery::Subject::DirectHca(_) => Subject::Contexts,
        });
        Self { subject, kinds: message.kinds, fds }
    }

    /// Takes the descriptor of this kind out.
    pub(crate) fn take(&mut self, kind: &str) -> Option<OwnedFd> {
        let index = self.kinds.iter().position(|found| found == kind).filter(|index| *index < self.fds.len())?;
        self.kinds.remove(index);
        Some(self.fds.remove(index))
    }
}

enum Slot {
    Arrived(Delivery),
    Awaited(oneshot::Sender<Delivery>),
}

#[derive(Default)]
struct State {
    /// Calls under way whose reply may name a delivery.
    expected: usize,
    slots: HashMap<u64, Slot>,
    /// Leases that this process gave up its handle of and not its hold: they were detached.
    left: HashSet<u64>,
    /// What this process has a handle of, with how many, and why a queue pair among it failed.
    live: HashMap<Subject, (usize, Option<String>)>,
    ended: bool,
}

type GiveBack = dyn Fn(Subject) + Send + Sync;

struct Shared {
    state: Mutex<State>,
    mark: Arc<ForkMark>,
    give_back: Box<GiveBack>,
}

/// Deliveries of one session. Cheap to clone; clones share it.
#[derive(Clone)]
pub(crate) struct Deliveries(Arc<Shared>);

impl fmt::Debug for Deliveries {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Deliveries").field("waiting", &self.lock().slots.len()).finish_non_exhaustive()
    }
}

impl Deliveries {
    /// `give_back` is called with what this process has no handle of any more, or was lent to a call that nobody waits
    /// for. It must not block.
    pub(super) fn new(mark: Arc<ForkMark>, give_back: impl Fn(Subject) + Send + Sync + 'static) -> Self {
        Self(Arc::new(Shared { state: Mutex::default(), mark, give_back: Box::new(give_back) }))
    }

    /// Announces a call whose reply may name a delivery. While no call is announced, nothing is kept.
    pub(super) fn expect(&self) -> Expectation {
        self.lock().expected += 1;
        Expectation(self.clone())
    }

    /// Whether a call may wait for a delivery.
    pub(super) fn is_expected(&self) -> bool {
        self.lock().expected > 0
    }

    /// Notes that this process has a handle of this.
    pub(super) fn live(&self, subject: Subject) -> Live {
        let mut state = self.lock();
        state.live.entry(subject).or_default().0 += 1;
        if let Subject::Lease(id) = subject {
            // Opened again, it is detached no more.
            state.left.remove(&id);
        }
        Live { deliveries: self.clone(), subject, is_over: false }
    }

    /// Hands a delivery to its call, or keeps it for one that is still to ask.
    pub(super) fn arrive(&self, id: u64, delivery: Delivery) {
        let orphan = {
            let mut state = self.lock();
            match state.slots.remove(&id) {
                Some(Slot::Awaited(call)) => call.send(delivery).err(),
                _ if state.ended => None,
                _ if state.expected > 0 => state.slots.insert(id, Slot::Arrived(delivery)).and_then(arrived),
                _ => Some(delivery),
            }
        };
        self.return_orphans(orphan);
    }

    /// The session is over: who waits is told, what came is closed.
    pub(super) fn end(&self) {
        let mut state = self.lock();
        state.ended = true;
        state.slots.clear();
    }

    /// The daemon was started again and tells what it has of this session. Descriptors that it had not sent yet will not
    /// come; what it lent to calls whose answers were lost is given back.
    pub(super) fn resumed(&self, subjects: impl IntoIterator<Item = Subject>) {
        let orphans: Vec<Subject> = {
            let mut state = self.lock();
            state.slots.retain(|_, slot| matches!(slot, Slot::Arrived(_)));
            let arrived: HashSet<Subject> = state.slots.values().filter_map(Slot::subject).collect();
            let is_left = |subject: &Subject| matches!(subject, Subject::Lease(id) if state.left.contains(id));
            let known = |subject: &Subject| state.live.contains_key(subject) || arrived.contains(subject);
            subjects.into_iter().filter(|subject| !known(subject) && !is_left(subject)).collect()
        };
        orphans.into_iter().for_each(|subject| (self.0.give_back)(subject));
    }

    /// Notes why a queue pair failed, for whoever has a handle of it.
    pub(super) fn fail(&self, queue_pair_id: u64, message: String) {
        if let Some((_, failure)) = self.lock().live.get_mut(&Subject::QueuePair(queue_pair_id)) {
            failure.get_or_insert(message);
        }
    }

    /// Gives back what calls that were given up had been lent, but what another handle of this process still uses.
    fn return_orphans(&self, orphans: impl IntoIterator<Item = Delivery>) {
        for subject in orphans.into_iter().filter_map(|orphan| orphan.subject) {
            if !self.lock().live.contains_key(&subject) {
                (self.0.give_back)(subject);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No holder of this lock can panic between two changes that belong together.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Slot {
    fn subject(&self) -> Option<Subject> {
        match self {
            Self::Arrived(delivery) => delivery.subject,
            Self::Awaited(_) => None,
        }
    }
}

fn arrived(slot: Slot) -> Option<Delivery> {
    match slot {
        Slot::Arrived(delivery) => Some(delivery),
        Slot::Awaited(_) => None,
    }
}

/// One call's right to a delivery.
#[derive(Debug)]
pub(crate) struct Expectation(Deliveries);

impl Expectation {
    /// The delivery `id` for a handle of `subject`, when it has come; `None` when it will not. Given up, or without a
    /// delivery, the handle goes again.
    pub(super) async fn claim(self, id: u64, subject: Subject) -> Option<(Delivery, Live)> {
        // The daemon has lent it, whenever its descriptors come.
        let live = self.0.live(subject);
        let waiting = {
            let mut state = self.0.lock();
            match state.slots.remove(&id) {
                Some(Slot::Arrived(delivery)) => return Some((delivery, live)),
                _ if state.ended => return None,
                _ => {}
            }
            let (sender, receiver) = oneshot::channel();
            state.slots.insert(id, Slot::Awaited(sender));
            receiver
        };
        Some((waiting.await.ok()?, live))
    }
}

impl Drop for Expectation {
    fn drop(&mut self) {
        let left = {
            let mut state = self.0.lock();
            state.expected -= 1;
            if state.expected == 0 { std::mem::take(&mut state.slots) } else { HashMap::new() }
        };
        self.0.return_orphans(left.into_values().filter_map(arrived));
    }
}

/// A handle that this process has of a lease or queue pair. With the last one, what it is of goes back to the daemon.
#[derive(Debug)]
pub(crate) struct Live {
    deliveries: Deliveries,
    subject: Subject,
    is_over: bool,
}

impl Live {
    /// The lease stays when its handles go, until the session ends.
    pub(crate) fn leave(&self) {
        if let Subject::Lease(id) = self.subject {
            self.deliveries.lock().left.insert(id);
        }
    }

    /// The daemon has taken it back.
    pub(crate) fn over(&mut self) {
        self.is_over = true;
    }

    /// Whether this process has another handle of the same.
    pub(crate) fn is_shared(&self) -> bool {
        self.deliveries.lock().live.get(&self.subject).is_some_and(|(handles, _)| *handles > 1)
    }

    /// Why the queue pair failed, where the daemon said so.
    pub(crate) fn failure(&self) -> Option<String> {
        self.deliveries.lock().live.get(&self.subject).and_then(|(_, failure)| failure.clone())
    }

    /// Whether what it is of is to go back.
    fn part(&self) -> bool {
        let mut state = self.deliveries.lock();
        if let Some((handles, _)) = state.live.get_mut(&self.subject) {
            *handles -= 1;
            if *handles > 0 {
                return false;
            }
        }
        state.live.remove(&self.subject);
        let is_left = matches!(self.subject, Subject::Lease(id) if state.left.contains(&id));
        !self.is_over && !is_left && !state.ended
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        // In a forked child the lock may be held for ever, and what the handle is of is the parent's.
        if self.deliveries.0.mark.is_ours() && self.part() {
            (self.deliveries.0.give_back)(self.subject);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn delivery(lease_id: u64, kind: &str) -> Delivery {
        let fd = rustix::fs::memfd_create(kind, rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let subject = Some(v1::delivery::Subject::LeaseId(lease_id));
        Delivery::new(v1::Delivery { kinds: vec![kind.into()], subject, ..Default::default() }, vec![fd])
    }

    /// Deliveries, and what they gave back.
    fn deliveries() -> (Deliveries, Arc<Mutex<Vec<Subject>>>) {
        let given_back = Arc::new(Mutex::new(Vec::new()));
        let list = Arc::clone(&given_back);
        let mark = Arc::new(ForkMark::new().unwrap());
        (Deliveries::new(mark, move |subject| list.lock().unwrap().push(subject)), given_back)
    }

    #[tokio::test]
    async fn a_delivery_before_its_reply_is_kept_and_one_after_it_is_awaited() {
        let (deliveries, given_back) = deliveries();
        let (first, second) = (deliveries.expect(), deliveries.expect());
        deliveries.arrive(1, delivery(10, "memory"));
        let (mut kept, _live) = first.claim(1, Subject::Lease(10)).await.unwrap();
        assert!(kept.take("memory").is_some());
        let later = async { deliveries.arrive(2, delivery(20, "ring")) };
        let (got, ()) = tokio::join!(second.claim(2, Subject::Lease(20)), later);
        let (mut got, _live) = got.unwrap();
        assert!(got.take("memory").is_none());
        assert!(got.take("ring").is_some());
        assert!(given_back.lock().unwrap().is_empty());
    }

    #[tokio::test]
    async fn what_nobody_expects_is_given_back() {
        let (deliveries, given_back) = deliveries();
        deliveries.arrive(1, delivery(10, "memory"));
        let given_up = deliveries.expect();
        deliveries.arrive(2, delivery(20, "memory"));
        drop(given_up);
        assert!(deliveries.lock().slots.is_empty());
        assert_eq!(*given_back.lock().unwrap(), [Subject::Lease(10), Subject::Lease(20)]);
    }

    #[tokio::test]
    async fn what_another_handle_uses_is_not_given_back() {
        let (deliveries, given_back) = deliveries();
        let first = deliveries.expect();
        deliveries.arrive(1, delivery(10, "memory"));
        let handle = first.claim(1, Subject::Lease(10)).await.unwrap();
        deliveries.arrive(2, delivery(10, "memory"));
        assert!(given_back.lock().unwrap().is_empty());
        drop(handle);
        assert!(deliveries.lock().live.is_empty());
    }

    #[test]
    fn a_lease_goes_back_with_its_last_handle_unless_it_has_ended_or_was_detached() {
        let (deliveries, given_back) = deliveries();
        let handle = |id| deliveries.live(Subject::Lease(id));
        let (first, second) = (handle(10), handle(10));
        assert!(first.is_shared());
        drop(first);
        assert!(given_back.lock().unwrap().is_empty() && !second.is_shared());
        drop(second);
        let mut ended = handle(20);
        ended.over();
        drop(ended);
        let detached = handle(30);
        detached.leave();
        drop(detached);
        assert_eq!(*given_back.lock().unwrap(), [Subject::Lease(10)]);
        drop(handle(30));
        assert_eq!(*given_back.lock().unwrap(), [10, 30].map(Subject::Lease), "opened again, it is detached no more");
    }

    #[tokio::test]
    async fn a_claim_that_is_given_up_gives_back_whether_or_not_its_delivery_came() {
        for comes in [false, true] {
            let (deliveries, given_back) = deliveries();
            let claim = deliveries.expect().claim(1, Subject::QueuePair(10));
            tokio::select! {
                biased;
                _ = claim => unreachable!("nothing has come"),
                () = async { if comes { deliveries.arrive(1, delivery(0, "ring")) } } => {}
            }
            assert_eq!(*given_back.lock().unwrap(), [Subject::QueuePair(10)], "{comes}");
        }
    }

    #[tokio::test]
    async fn a_delivery_that_came_before_a_restart_is_still_handed_out() {
        let (deliveries, given_back) = deliveries();
        let claim = deliveries.expect().claim(1, Subject::Lease(10));
        let (claimed, ()) = tokio::join!(claim, async {
            deliveries.arrive(1, delivery(10, "memory"));
            deliveries.resumed([Subject::Lease(10)]);
        });
        assert!(claimed.is_some());
        assert!(given_back.lock().unwrap().is_empty());
    }

    #[tokio::test]
    async fn what_a_restarted_daemon_has_for_nobody_is_given_back() {
        let (deliveries, given_back) = deliveries();
        let (first, second, third) = (deliveries.expect(), deliveries.expect(), deliveries.expect());
        deliveries.arrive(1, delivery(10, "memory"));
        let (_, live) = first.claim(1, Subject::Lease(10)).await.unwrap();
        deliveries.arrive(2, delivery(20, "memory"));
        let waits = third.claim(3, Subject::Lease(30));
        let (claimed, ()) = tokio::join!(waits, async {
            deliveries.resumed([10, 20, 30, 40].map(Subject::Lease));
        });
        assert!(claimed.is_none(), "descriptors that were not sent will not come");
        assert_eq!(*given_back.lock().unwrap(), [Subject::Lease(40), Subject::Lease(30)]);
        live.leave();
        drop((live, second));
        given_back.lock().unwrap().clear();
        deliveries.resumed([Subject::Lease(10)]);
        assert!(given_back.lock().unwrap().is_empty(), "a detached lease stays with its session");
    }

    #[tokio::test]
    async fn failures_are_kept_for_queue_pairs_that_have_a_handle() {
        let (deliveries, _) = deliveries();
        let expected = deliveries.expect();
        deliveries.arrive(1, delivery(0, "ring"));
        let (_, live) = expected.claim(1, Subject::QueuePair(7)).await.unwrap();
        deliveries.fail(7, "its ring is corrupt".into());
        deliveries.fail(8, "nobody has it".into());
        assert_eq!(live.failure().as_deref(), Some("its ring is corrupt"));
        assert_eq!(deliveries.lock().live.len(), 1);
    }

    #[tokio::test]
    async fn the_end_of_the_session_ends_every_wait() {
        let (deliveries, _) = deliveries();
        let waiting = deliveries.expect();
        let (got, ()) = tokio::join!(waiting.claim(1, Subject::Lease(1)), async { deliveries.end() });
        assert!(got.is_none());
        assert!(deliveries.expect().claim(2, Subject::Lease(1)).await.is_none());
    }

    #[test]
    fn kinds_without_a_descriptor_are_not_found() {
        let mut short = delivery(1, "ring");
        short.kinds.push("doorbell".into());
        assert!(short.take("doorbell").is_none());
        assert!(short.take("ring").is_some());
    }
}
