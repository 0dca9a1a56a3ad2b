//! Completion queues with their channels.

use std::collections::HashMap;
use std::os::fd::{BorrowedFd, RawFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use gdrd_hal::{CompletionQueue, CqId, HcaError, WorkCompletion, WorkStatus};
use rdma_sys::{ibv_comp_channel, ibv_cq, ibv_poll_cq, ibv_req_notify_cq, ibv_wc, ibv_wc_flags, ibv_wc_opcode};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use crate::context::Context;
use crate::error::{errno, status};
use crate::ledger::Ledger;
use crate::registry::CqEntry;

/// Completions taken from the device in one call at most.
const BATCH: usize = 32;

/// An `ibv_comp_channel`; destroyed after its queue.
#[derive(Debug)]
struct Channel {
    raw: NonNull<ibv_comp_channel>,
    fd: RawFd,
    context: Arc<Context>,
}

impl Channel {
    fn create(context: &Arc<Context>) -> Result<Self, HcaError> {
        let failed = context.failed("ibv_create_comp_channel", "descriptors");
        let create = context.library().ibv_create_comp_channel;
        // SAFETY: the context is open for as long as `context` lives.
        let raw = NonNull::new(unsafe { create(context.raw()) }).ok_or_else(|| failed.with(errno()))?;
        // SAFETY: the structure is initialised, and its fd never changes.
        let fd = unsafe { (*raw.as_ptr()).fd };
        let channel = Self { raw, fd, context: Arc::clone(context) };
        let flags = fcntl_getfl(channel.fd()).and_then(|flags| fcntl_setfl(channel.fd(), flags | OFlags::NONBLOCK));
        flags.map_err(|error| failed.with(error.raw_os_error()))?;
        Ok(channel)
    }

    fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel owns the fd until it is destroyed, which the borrow does not outlive.
        unsafe { BorrowedFd::borrow_raw(self.fd) }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        let destroy = self.context.library().ibv_destroy_comp_channel;
        // SAFETY: destroyed once, after the completion queue that used it (field order of `CqHandle`).
        let destroyed = unsafe { destroy(self.raw.as_ptr()) };
        debug_assert!(destroyed == 0 || self.context.is_gone(), "ibv_destroy_comp_channel: {destroyed}");
    }
}

/// An `ibv_cq`. Destroyed when its user and all queue pairs on it are gone.
#[derive(Debug)]
pub(crate) struct CqHandle {
    cq: NonNull<ibv_cq>,
    id: CqId,
    dead: Arc<AtomicBool>,
    /// Queue pairs whose completions come here, by number.
    roster: Mutex<HashMap<u32, Arc<Ledger>>>,
    /// Changes with the roster, so that the poller looks at it only then.
    roster_version: AtomicU64,
    channel: Channel,
    context: Arc<Context>,
}

// SAFETY: libibverbs is thread-safe (libibverbs README); the raw pointers are only given to it.
unsafe impl Send for CqHandle {}
// SAFETY: as for Send.
unsafe impl Sync for CqHandle {}

impl CqHandle {
    pub(crate) fn raw(&self) -> *mut ibv_cq {
        self.cq.as_ptr()
    }

    pub(crate) fn address(&self) -> usize {
        self.cq.as_ptr().expose_provenance()
    }

    pub(crate) fn enlist(&self, qp_num: u32, ledger: &Arc<Ledger>) {
        self.roster().insert(qp_num, Arc::clone(ledger));
        self.roster_version.fetch_add(1, Ordering::Release);
    }

    pub(crate) fn strike(&self, qp_num: u32) {
        self.roster().remove(&qp_num);
        self.roster_version.fetch_add(1, Ordering::Release);
    }

    fn roster(&self) -> MutexGuard<'_, HashMap<u32, Arc<Ledger>>> {
        self.roster.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for CqHandle {
    fn drop(&mut self) {
        self.context.registry().objects().cqs.remove(&self.address());
        let destroy = self.context.library().ibv_destroy_cq;
        // SAFETY: destroyed once; queue pairs on it hold an Arc of this, and every event got was acknowledged.
        let destroyed = unsafe { destroy(self.cq.as_ptr()) };
        debug_assert!(destroyed == 0 || self.context.is_gone(), "ibv_destroy_cq: {destroyed}");
    }
}

/// The polling side.
pub(crate) struct Cq {
    handle: Arc<CqHandle>,
    batch: Box<[ibv_wc; BATCH]>,
    /// Copy of the roster, of version `seen`.
    ledgers: HashMap<u32, Arc<Ledger>>,
    seen: u64,
}

/// A completion queue of at least `depth` entries.
///
/// # Errors
/// `Invalid`, `Exhausted`, `Gone`, `Driver`.
pub(crate) fn create(context: &Arc<Context>, depth: u32) -> Result<Cq, HcaError> {
    context.check_alive()?;
    let failed = context.failed("ibv_create_cq", "completion queue memory");
    let most = context.capabilities().max_completions;
    let Some(entries) = i32::try_from(depth).ok().filter(|_| depth > 0 && depth <= most) else {
        return Err(failed.invalid(format!("depth {depth} is not 1 to {most}")));
    };
    let channel = Channel::create(context)?;
    let create = context.library().ibv_create_cq;
    // SAFETY: context and channel are live and outlive the queue (fields of `CqHandle`); no user data is passed.
    let cq = unsafe { create(context.raw(), entries, ptr::null_mut(), channel.raw.as_ptr(), 0) };
    let cq = NonNull::new(cq).ok_or_else(|| failed.with(errno()))?;
    let id = CqId(context.next_id());
    let dead = Arc::new(AtomicBool::new(false));
    let handle = Arc::new(CqHandle {
        cq,
        id,
        dead: Arc::clone(&dead),
        roster: Mutex::default(),
        roster_version: AtomicU64::new(0),
        channel,
        context: Arc::clone(context),
    });
    let entry = CqEntry { id, dead, handle: Arc::downgrade(&handle) };
    context.registry().objects().cqs.insert(handle.address(), entry);
    Ok(Cq { handle, batch: empty_batch(), ledgers: HashMap::new(), seen: 0 })
}

fn empty_batch() -> Box<[ibv_wc; BATCH]> {
    let batch = Box::new(std::mem::MaybeUninit::<[ibv_wc; BATCH]>::zeroed());
    // SAFETY: integers and a union of them (struct ibv_wc, verbs.h); zero is valid.
    unsafe { batch.assume_init() }
}

// SAFETY: `ibv_wc` has no pointers, and the handle is Send.
unsafe impl Send for Cq {}

impl Cq {
    fn check(&self) -> Result<(), HcaError> {
        self.handle.context.check_alive()?;
        if !self.handle.dead.load(Ordering::Acquire) {
            return Ok(());
        }
        let reason = format!("completion queue {} overran; its queue pairs are in ERR", self.handle.id.0);
        Err(HcaError::Gone { hca: self.handle.context.name().to_owned(), reason })
    }

    fn refresh(&mut self) {
        let version = self.handle.roster_version.load(Ordering::Acquire);
        if version != self.seen {
            self.ledgers = self.handle.roster().clone();
            self.seen = version;
        }
    }

    /// Takes up to `wanted` completions from the device into the batch.
    fn fetch(&mut self, wanted: usize) -> Result<usize, HcaError> {
        let wanted = i32::try_from(wanted.min(BATCH)).unwrap_or(1);
        // SAFETY: the queue is live, and the batch has room for `wanted` entries.
        let count = unsafe { ibv_poll_cq(self.handle.raw(), wanted, self.batch.as_mut_ptr()) };
        usize::try_from(count).map_err(|_| {
            let failed = self.handle.context.failed("ibv_poll_cq", "memory");
            // A negative count is a queue in error (ibv_poll_cq(3)); there is no errno to keep.
            let reason = format!("ibv_poll_cq gave {count}");
            HcaError::Gone { hca: failed.hca.to_owned(), reason }
        })
    }
}

impl CompletionQueue for Cq {
    fn id(&self) -> CqId {
        self.handle.id
    }

    fn poll(&mut self, out: &mut [WorkCompletion]) -> Result<usize, HcaError> {
        self.check()?;
        let mut filled = 0;
        while let Some(room) = out.get_mut(filled..).filter(|room| !room.is_empty()) {
            let wanted = room.len().min(BATCH);
            let fetched = self.fetch(wanted)?;
            if fetched > 0 {
                // After the fetch: a queue pair that completes something was enlisted before it was posted to.
                self.refresh();
            }
            let taken = self.batch.iter().take(fetched).filter_map(|wc| translate(wc, &self.ledgers));
            let mut places = room.iter_mut();
            for completion in taken {
                if let Some(place) = places.next() {
                    *place = completion;
                    filled += 1;
                }
            }
            if fetched < wanted {
                break;
            }
        }
        Ok(filled)
    }

    fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.handle.channel.fd())
    }

    fn arm(&mut self) -> Result<(), HcaError> {
        self.check()?;
        let library = self.handle.context.library();
        let (get, ack) = (library.ibv_get_cq_event, library.ibv_ack_cq_events);
        let (mut cq, mut user) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the channel is live; both results are written during the call only. Its fd does not block.
        while unsafe { get(self.handle.channel.raw.as_ptr(), &raw mut cq, &raw mut user) } == 0 {
            // SAFETY: the event got just now is of this queue, the only one on the channel.
            unsafe { ack(self.handle.raw(), 1) };
        }
        let failed = self.handle.context.failed("ibv_req_notify_cq", "memory");
        // SAFETY: the queue is live.
        status(unsafe { ibv_req_notify_cq(self.handle.raw(), 0) }).map_err(|errno| failed.with(errno))
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        // From here on no queue pair can be made on it; those that are keep it until they end.
        if let Some(entry) = self.handle.context.registry().objects().cqs.get_mut(&self.handle.address()) {
            entry.handle = Weak::new();
        }
    }
}

/// `None` for a queue pair that was destroyed meanwhile, and for a tag that nobody gave.
fn translate(wc: &ibv_wc, ledgers: &HashMap<u32, Arc<Ledger>>) -> Option<WorkCompletion> {
    let ledger = ledgers.get(&wc.qp_num)?;
    let is_success = wc.status == rdma_sys::ibv_wc_status::IBV_WC_SUCCESS;
    let by_write = is_success && wc.opcode == ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM;
    let entry = ledger.settle(wc.wr_id, by_write)?;
    if !is_success {
        ledger.set_failed();
    }
    let is_receive = matches!(entry.opcode, gdrd_hal::Opcode::Recv | gdrd_hal::Opcode::RecvWriteImm);
    let has_imm = is_success && is_receive && wc.wc_flags & ibv_wc_flags::IBV_WC_WITH_IMM.0 != 0;
    // SAFETY: both members of the union are 32 plain bits; with the flag they are immediate data.
    let imm = has_imm.then(|| u32::from_be(unsafe { wc.imm_data_invalidated_rkey_union.imm_data }));
    Some(WorkCompletion {
        wr_id: entry.wr_id,
        status: work_status(wc.status),
        opcode: entry.opcode,
        byte_len: wc.byte_len,
        imm,
        qp_num: wc.qp_num,
        vendor_error: wc.vendor_err,
    })
}

fn work_status(status: rdma_sys::ibv_wc_status::Type) -> WorkStatus {
    use rdma_sys::ibv_wc_status as wc;
    match status {
        wc::IBV_WC_SUCCESS => WorkStatus::Success,
        wc::IBV_WC_LOC_LEN_ERR => WorkStatus::LocalLength,
        wc::IBV_WC_LOC_PROT_ERR => WorkStatus::LocalProtection,
        wc::IBV_WC_LOC_QP_OP_ERR => WorkStatus::LocalQueuePairOperation,
        wc::IBV_WC_WR_FLUSH_ERR => WorkStatus::Flushed,
        wc::IBV_WC_REM_INV_REQ_ERR => WorkStatus::RemoteInvalidRequest,
        wc::IBV_WC_REM_ACCESS_ERR => WorkStatus::RemoteAccess,
        wc::IBV_WC_REM_OP_ERR => WorkStatus::RemoteOperation,
        wc::IBV_WC_RETRY_EXC_ERR => WorkStatus::RetryExceeded,
        wc::IBV_WC_RNR_RETRY_EXC_ERR => WorkStatus::ReceiverNotReady,
        wc::IBV_WC_FATAL_ERR => WorkStatus::Fatal,
        other => WorkStatus::Other(other),
    }
}

#[cfg(test)]
mod tests {
    use gdrd_hal::Opcode;

    use super::*;

    fn wc(qp_num: u32, wr_id: u64, status: u32) -> ibv_wc {
        let mut wc: ibv_wc = {
            let [first, ..] = *empty_batch();
            first
        };
        (wc.qp_num, wc.wr_id, wc.status) = (qp_num, wr_id, status);
        wc
    }

    fn ledgers() -> (HashMap<u32, Arc<Ledger>>, u64) {
        let ledger = Arc::new(Ledger::new(4, 4));
        let tag = ledger.note_send(0, 99, Opcode::Flush);
        (HashMap::from([(17, ledger)]), tag)
    }

    #[test]
    fn a_completion_in_error_keeps_id_and_operation_and_vendor_code() {
        let (ledgers, tag) = ledgers();
        let bad = ibv_wc { vendor_err: 0x68, opcode: u32::MAX, ..wc(17, tag, 10) };
        let completion = translate(&bad, &ledgers).expect("its queue pair is there");
        assert_eq!((completion.wr_id, completion.opcode), (99, Opcode::Flush));
        assert_eq!((completion.status, completion.vendor_error), (WorkStatus::RemoteAccess, 0x68));
        assert!(ledgers[&17].has_failed());
    }

    #[test]
    fn statuses_newer_than_the_headers_are_told_by_number() {
        let (ledgers, tag) = ledgers();
        let completion = translate(&wc(17, tag, 4000), &ledgers).expect("its queue pair is there");
        assert_eq!(completion.status, WorkStatus::Other(4000));
    }

    #[test]
    fn completions_of_queue_pairs_that_are_gone_are_dropped() {
        let (ledgers, tag) = ledgers();
        assert_eq!(translate(&wc(18, tag, 0), &ledgers), None);
    }

    #[test]
    fn immediate_data_is_given_in_host_order_to_receives_only() {
        let ledger = Arc::new(Ledger::new(4, 4));
        let (receive, send) =
            (ledger.note_receive(0, 1).expect("there is room"), ledger.note_send(0, 2, Opcode::SendImm));
        let ledgers = HashMap::from([(17, ledger)]);
        let with_imm = |wr_id| {
            let mut wc = wc(17, wr_id, 0);
            wc.wc_flags = ibv_wc_flags::IBV_WC_WITH_IMM.0;
            wc.imm_data_invalidated_rkey_union.imm_data = 7_u32.to_be();
            translate(&wc, &ledgers).expect("its queue pair is there").imm
        };
        assert_eq!((with_imm(receive), with_imm(send)), (Some(7), None));
    }
}
