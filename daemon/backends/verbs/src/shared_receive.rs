//! Shared receive queues.

use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use gdrd_hal::{HcaError, PostError, ReceiveRequest, SharedReceiveQueue, SrqId};
use rdma_sys::{ibv_post_srq_recv, ibv_srq, ibv_srq_attr, ibv_srq_attr_mask, ibv_srq_init_attr};

use crate::domain::DomainHandle;
use crate::error::{Failed, errno, status};
use crate::ledger::RECEIVE;
use crate::receives::Receives;
use crate::registry::SrqEntry;

/// Longest queue that is kept books of, as of a queue pair's.
const MAX_DEPTH: u32 = 1 << 20;

#[derive(Debug, Default)]
struct Slot {
    taken: AtomicBool,
    wr_id: AtomicU64,
}

/// The receives that the device has. They complete in any order, on the completion queues of all that share; the device gets
/// the number of a slot, with the mark of receives, for its tag.
///
/// One owner posts, any number of pollers settle. Orderings: the release of `taken` by each side pairs with the acquire of
/// the other, so that a slot's id is read before it is written anew.
#[derive(Debug)]
pub(crate) struct Slots {
    slots: Box<[Slot]>,
    free: AtomicU32,
}

impl Slots {
    fn new(depth: u32) -> Self {
        let depth = depth.clamp(1, MAX_DEPTH);
        Self { slots: (0..depth).map(|_| Slot::default()).collect(), free: AtomicU32::new(depth) }
    }

    fn depth(&self) -> u32 {
        u32::try_from(self.slots.len()).unwrap_or(MAX_DEPTH)
    }

    /// Books a receive; the number of its slot. `cursor` is where the search begins: receives complete nearly in order, so it is short.
    fn take(&self, cursor: &mut usize, wr_id: u64) -> Option<u64> {
        if self.free.load(Ordering::Acquire) == 0 {
            return None;
        }
        let (behind, ahead) = self.slots.split_at_checked(*cursor)?;
        let mut slots = ahead.iter().chain(behind);
        let steps = slots.position(|slot| !slot.taken.load(Ordering::Acquire))?;
        let place = (*cursor + steps) % self.slots.len();
        let slot = self.slots.get(place)?;
        slot.wr_id.store(wr_id, Ordering::Relaxed);
        slot.taken.store(true, Ordering::Release);
        self.free.fetch_sub(1, Ordering::AcqRel);
        *cursor = (place + 1) % self.slots.len();
        u64::try_from(place).ok()
    }

    /// The caller's id of the receive in this slot, which has completed; makes room. `None` where nothing was booked.
    pub(crate) fn settle(&self, place: u64) -> Option<u64> {
        let slot = self.slots.get(usize::try_from(place).ok()?)?;
        if !slot.taken.load(Ordering::Acquire) {
            return None;
        }
        let wr_id = slot.wr_id.load(Ordering::Relaxed);
        // Of two completions of one receive, which only a broken driver gives, one counts.
        if !slot.taken.swap(false, Ordering::AcqRel) {
            return None;
        }
        self.free.fetch_add(1, Ordering::Release);
        Some(wr_id)
    }
}

/// An `ibv_srq`. Destroyed when its owner and all queue pairs on it are gone.
#[derive(Debug)]
pub(crate) struct SrqHandle {
    srq: NonNull<ibv_srq>,
    id: SrqId,
    pub(crate) slots: Arc<Slots>,
    domain: Arc<DomainHandle>,
}

// SAFETY: libibverbs is thread-safe (libibverbs README); the raw pointer is only given to it.
unsafe impl Send for SrqHandle {}
// SAFETY: as for Send.
unsafe impl Sync for SrqHandle {}

impl SrqHandle {
    pub(crate) fn raw(&self) -> *mut ibv_srq {
        self.srq.as_ptr()
    }

    pub(crate) fn domain(&self) -> &Arc<DomainHandle> {
        &self.domain
    }

    fn address(&self) -> usize {
        self.srq.as_ptr().expose_provenance()
    }

    fn failed(&self, call: &'static str) -> Failed<'_> {
        self.domain.context().failed(call, "memory")
    }
}

impl Drop for SrqHandle {
    fn drop(&mut self) {
        let context = self.domain.context();
        context.registry().objects().srqs.remove(&self.address());
        let destroy = context.library().ibv_destroy_srq;
        // SAFETY: destroyed once; queue pairs on it hold an Arc of this, and its events were acknowledged.
        let destroyed = unsafe { destroy(self.srq.as_ptr()) };
        debug_assert!(destroyed == 0 || context.is_gone(), "ibv_destroy_srq: {destroyed}");
    }
}

/// The posting side.
pub(crate) struct Srq {
    handle: Arc<SrqHandle>,
    receives: Receives,
    cursor: usize,
}

/// # Errors
/// As [`gdrd_hal::ProtectionDomain::create_shared_receive_queue`].
pub(crate) fn create(domain: &Arc<DomainHandle>, depth: u32) -> Result<Srq, HcaError> {
    let context = domain.context();
    context.check_alive()?;
    let failed = context.failed("ibv_create_srq", "shared receive queues or their memory");
    let most = context.capabilities().max_shared_receives;
    if most == 0 {
        let what = "share receives among queue pairs".to_owned();
        return Err(HcaError::Unsupported { hca: context.name().to_owned(), what });
    }
    if depth == 0 || depth > most {
        return Err(failed.invalid(format!("depth {depth} is not 1 to {most}")));
    }
    // SAFETY: integers and a pointer (struct ibv_srq_init_attr, verbs.h); zero and null are valid.
    let mut init: ibv_srq_init_attr = unsafe { MaybeUninit::zeroed().assume_init() };
    init.attr.max_wr = depth;
    init.attr.max_sge = 1;
    let create = context.library().ibv_create_srq;
    // SAFETY: the domain is live and outlives the queue (a field of the handle); the structure is read and written during
    // the call only.
    let srq = NonNull::new(unsafe { create(domain.raw(), &raw mut init) }).ok_or_else(|| failed.with(errno()))?;
    let id = SrqId(context.next_id());
    // The library has written how many the device made of it.
    let slots = Arc::new(Slots::new(init.attr.max_wr.max(depth)));
    let handle = Arc::new(SrqHandle { srq, id, slots, domain: Arc::clone(domain) });
    let entry = SrqEntry { id, handle: Arc::downgrade(&handle) };
    context.registry().objects().srqs.insert(handle.address(), entry);
    Ok(Srq { handle, receives: Receives::new(), cursor: 0 })
}

impl SharedReceiveQueue for Srq {
    fn id(&self) -> SrqId {
        self.handle.id
    }

    fn post_recv(&mut self, requests: &[ReceiveRequest]) -> Result<(), (usize, PostError)> {
        let Self { handle, receives, cursor } = self;
        if handle.domain.context().is_gone() {
            return Err((0, PostError::Gone));
        }
        let slots = &handle.slots;
        receives.post(
            requests,
            |_, wr_id| slots.take(cursor, wr_id).map(|place| place | RECEIVE),
            // SAFETY: the queue is live; the list and its spans are valid during the call, which copies them.
            |first, bad| unsafe { ibv_post_srq_recv(handle.raw(), first, bad) },
            |_, refused| {
                for request in refused {
                    let _given_back = slots.settle(request.wr_id & !RECEIVE);
                }
            },
        )
    }

    fn set_limit(&mut self, limit: u32) -> Result<(), HcaError> {
        self.handle.domain.context().check_alive()?;
        let failed = self.handle.failed("ibv_modify_srq");
        let depth = self.handle.slots.depth();
        if limit >= depth {
            return Err(failed.invalid(format!("limit {limit} is not 0 to {}", depth - 1)));
        }
        let mut attr = ibv_srq_attr { max_wr: 0, max_sge: 0, srq_limit: limit };
        let modify = self.handle.domain.context().library().ibv_modify_srq;
        let mask = ibv_srq_attr_mask::IBV_SRQ_LIMIT.0.cast_signed();
        // SAFETY: the queue is live; the structure is read during the call only.
        status(unsafe { modify(self.handle.raw(), &raw mut attr, mask) }).map_err(|errno| failed.with(errno))
    }

    fn limit(&self) -> Result<u32, HcaError> {
        self.handle.domain.context().check_alive()?;
        let mut attr = ibv_srq_attr { max_wr: 0, max_sge: 0, srq_limit: 0 };
        let query = self.handle.domain.context().library().ibv_query_srq;
        // SAFETY: the queue is live; the structure is written during the call only.
        let asked = status(unsafe { query(self.handle.raw(), &raw mut attr) });
        asked.map_err(|errno| self.handle.failed("ibv_query_srq").with(errno))?;
        Ok(attr.srq_limit)
    }
}

impl Drop for Srq {
    fn drop(&mut self) {
        // From here on no queue pair can be made on it; those that are keep it until they end.
        if let Some(entry) = self.handle.domain.context().registry().objects().srqs.get_mut(&self.handle.address()) {
            entry.handle = Weak::new();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn receives_that_complete_in_any_order_give_their_ids_back_and_make_room() {
        let slots = Slots::new(3);
        let mut cursor = 0;
        let mut take = |wr_id| slots.take(&mut cursor, wr_id);
        let tags: Vec<u64> = [7, 8, 9].into_iter().map_while(&mut take).collect();
        assert_eq!((tags.len(), take(10)), (3, None));
        assert_eq!((slots.settle(tags[1]), slots.settle(tags[1])), (Some(8), None));
        let again = take(10).expect("there is room");
        assert_eq!(again, tags[1], "the only free one");
        assert_eq!(take(11), None);
        assert_eq!([tags[2], again, tags[0]].map(|tag| slots.settle(tag)), [Some(9), Some(10), Some(7)]);
        assert_eq!((11..14).filter_map(&mut take).count(), 3);
    }

    #[test]
    fn tags_that_a_driver_invents_make_no_room() {
        let slots = Slots::new(2);
        let mut cursor = 0;
        assert!(slots.take(&mut cursor, 1).is_some());
        for tag in [1, 2, u64::MAX, 1 << 32] {
            assert_eq!(slots.settle(tag), None, "{tag}");
        }
        assert!(slots.take(&mut cursor, 2).is_some());
        assert_eq!(slots.take(&mut cursor, 3), None);
    }
}
