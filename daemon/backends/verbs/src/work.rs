//! Posting: requests of gdrd-hal to work requests of verbs, in batches, without allocating.

use std::cell::Cell;
use std::ptr;
use std::sync::Arc;

use gdrd_hal::{
    AtomicScope, MAX_INLINE_BYTES, Opcode, PostError, QueuePairType, ReceiveRequest, WorkQueue, WorkRequest,
};
use rdma_sys::{ibv_post_recv, ibv_post_send, ibv_send_flags, ibv_send_wr, ibv_sge, ibv_wr_opcode, rdma_t};

use crate::error::post_error;
use crate::queue_pair::{Destination, QueuePairHandle, Stage};
use crate::receives::{BATCH, Receives, place_of, zeroed_box};
use crate::transition::UD_Q_KEY;

/// A flush reads this much behind the writes: any read pushes them (InfiniBand specification vol. 1, 9.5, ordering).
const FLUSH_BYTES: u32 = 1;

/// The posting side.
pub(crate) struct Work {
    handle: Arc<QueuePairHandle>,
    inline_bytes: usize,
    has_atomics: bool,
    destination: Option<Destination>,
    next_send: u64,
    next_receive: u64,
    sends: Box<[ibv_send_wr; BATCH]>,
    receives: Receives,
    spans: Box<[ibv_sge; BATCH]>,
}

// SAFETY: the pointers in the request arrays lead into the boxed arrays of this value and to an address handle; they
// are set anew before each use, and libibverbs is thread-safe (libibverbs README).
unsafe impl Send for Work {}

impl Work {
    pub(crate) fn new(handle: &Arc<QueuePairHandle>, inline_bytes: u32) -> Self {
        // SAFETY: integers, pointers and unions of them (struct ibv_send_wr, verbs.h); zero and null are valid.
        let sends = unsafe { zeroed_box().assume_init() };
        // SAFETY: as above (struct ibv_sge).
        let spans = unsafe { zeroed_box().assume_init() };
        Self {
            handle: Arc::clone(handle),
            inline_bytes: usize::try_from(inline_bytes).unwrap_or(0).min(MAX_INLINE_BYTES),
            has_atomics: handle.domain().context().capabilities().atomics != AtomicScope::None,
            destination: None,
            next_send: 0,
            next_receive: 0,
            sends,
            receives: Receives::new(),
            spans,
        }
    }

    /// Whether this queue pair can carry the request at all.
    fn check(&self, request: &WorkRequest) -> Result<(), PostError> {
        let is_datagram = self.handle.qp_type() == QueuePairType::Ud;
        let carries_inline = match request.opcode {
            Opcode::Send | Opcode::SendImm => true,
            Opcode::Write | Opcode::WriteImm if !is_datagram => true,
            Opcode::Read | Opcode::Flush if !is_datagram => false,
            Opcode::FetchAdd | Opcode::CompareSwap if !is_datagram && self.has_atomics => false,
            _ => return Err(PostError::Unsupported),
        };
        let inline_len = usize::from(request.inline_len);
        if inline_len > 0 && (!carries_inline || inline_len > self.inline_bytes) {
            return Err(PostError::Unsupported);
        }
        Ok(())
    }

    /// Writes the request into place `index` of the batch.
    fn prepare(&mut self, index: usize, request: &WorkRequest) -> Result<(), PostError> {
        self.check(request)?;
        let position = self.next_send.wrapping_add(u64::try_from(index).unwrap_or(0));
        if !self.handle.ledger.has_send_room(position) {
            return Err(PostError::Full);
        }
        let (Some(wr), Some(span)) = (self.sends.get_mut(index), self.spans.get_mut(index)) else {
            return Err(PostError::Full);
        };
        let len_bytes = fill_span(span, request);
        wr.wr_id = self.handle.ledger.note_send(position, request.wr_id, request.opcode);
        wr.next = ptr::null_mut();
        wr.sg_list = ptr::from_mut(span);
        // A length of 0 in an SGE stands for 2^31 with some providers (mlx5), so nothing is told by no SGE.
        wr.num_sge = i32::from(len_bytes > 0);
        wr.opcode = opcode(request.opcode);
        wr.send_flags = flags(request);
        wr.imm_data_invalidated_rkey_union.imm_data = request.imm.to_be();
        match request.opcode {
            Opcode::FetchAdd | Opcode::CompareSwap => {
                let is_add = request.opcode == Opcode::FetchAdd;
                wr.wr.atomic = rdma_sys::atomic_t {
                    remote_addr: request.remote.addr,
                    compare_add: if is_add { request.operand } else { request.compare },
                    swap: if is_add { 0 } else { request.operand },
                    rkey: request.remote.rkey,
                };
            }
            _ => match self.destination {
                Some(to) => {
                    wr.wr.ud = rdma_sys::ud_t { ah: to.ah.as_ptr(), remote_qpn: to.qp_num, remote_qkey: UD_Q_KEY };
                }
                None => wr.wr.rdma = rdma_t { remote_addr: request.remote.addr, rkey: request.remote.rkey },
            },
        }
        Ok(())
    }

    /// Links the first `count` requests of the batch and gives them to the device; how many it took on an error.
    fn ring(&mut self, count: usize) -> Result<(), (usize, PostError)> {
        for index in 1..count {
            let next = self.sends.get_mut(index).map_or(ptr::null_mut(), ptr::from_mut);
            if let Some(before) = self.sends.get_mut(index - 1) {
                before.next = next;
            }
        }
        let first = self.sends.as_mut_ptr();
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair is live; the list and what it points to (spans, inline payloads of the caller's
        // requests, the address handle) are valid during the call, which copies them.
        let errno = unsafe { ibv_post_send(self.handle.raw(), first, &raw mut bad) };
        if errno == 0 {
            self.next_send = self.next_send.wrapping_add(u64::try_from(count).unwrap_or(0));
            return Ok(());
        }
        let taken = place_of(bad, first, count);
        self.next_send = self.next_send.wrapping_add(u64::try_from(taken).unwrap_or(0));
        Err((taken, post_error(errno)))
    }

    fn ready_to_send(&mut self) -> Result<(), PostError> {
        if self.handle.domain().context().is_gone() {
            return Err(PostError::Gone);
        }
        if matches!(self.handle.stage(), Stage::Fresh | Stage::Init) {
            return Err(PostError::BadState);
        }
        if self.handle.qp_type() == QueuePairType::Ud && self.destination.is_none() {
            self.destination = self.handle.destination();
            if self.destination.is_none() {
                // In ERR without ever having been connected.
                return Err(PostError::BadState);
            }
        }
        Ok(())
    }
}

/// The local memory of a request; gives its length.
fn fill_span(span: &mut ibv_sge, request: &WorkRequest) -> u32 {
    let (addr, length, lkey) = match (request.inline_len, request.opcode) {
        (0, Opcode::Flush) => (request.local.addr, request.local.len_bytes.min(FLUSH_BYTES), request.local.lkey),
        (0, _) => (request.local.addr, request.local.len_bytes, request.local.lkey),
        (len, _) => {
            let payload = request.inline.as_ptr().expose_provenance();
            (u64::try_from(payload).unwrap_or(0), u32::from(len), 0)
        }
    };
    *span = ibv_sge { addr, length, lkey };
    length
}

fn opcode(opcode: Opcode) -> ibv_wr_opcode::Type {
    match opcode {
        Opcode::WriteImm => ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM,
        Opcode::Read | Opcode::Flush => ibv_wr_opcode::IBV_WR_RDMA_READ,
        Opcode::Send => ibv_wr_opcode::IBV_WR_SEND,
        Opcode::SendImm => ibv_wr_opcode::IBV_WR_SEND_WITH_IMM,
        Opcode::FetchAdd => ibv_wr_opcode::IBV_WR_ATOMIC_FETCH_AND_ADD,
        Opcode::CompareSwap => ibv_wr_opcode::IBV_WR_ATOMIC_CMP_AND_SWP,
        // Others than writes were refused by `check`.
        _ => ibv_wr_opcode::IBV_WR_RDMA_WRITE,
    }
}

fn flags(request: &WorkRequest) -> u32 {
    let flags = [
        (request.signaled, ibv_send_flags::IBV_SEND_SIGNALED),
        (request.fence, ibv_send_flags::IBV_SEND_FENCE),
        (request.inline_len > 0, ibv_send_flags::IBV_SEND_INLINE),
    ];
    flags.iter().filter(|(wanted, _)| *wanted).fold(0, |bits, (_, flag)| bits | flag.0)
}

impl WorkQueue for Work {
    fn post_send(&mut self, requests: &[WorkRequest]) -> Result<(), (usize, PostError)> {
        self.ready_to_send().map_err(|error| (0, error))?;
        let mut posted = 0;
        for batch in requests.chunks(BATCH) {
            let mut prepared = 0;
            let mut refused = None;
            for request in batch {
                match self.prepare(prepared, request) {
                    Ok(()) => prepared += 1,
                    Err(error) => {
                        refused = Some(error);
                        break;
                    }
                }
            }
            if prepared > 0 {
                self.ring(prepared).map_err(|(taken, error)| (posted + taken, error))?;
                posted += prepared;
            }
            if let Some(error) = refused {
                return Err((posted, error));
            }
        }
        Ok(())
    }

    fn post_recv(&mut self, requests: &[ReceiveRequest]) -> Result<(), (usize, PostError)> {
        let Self { handle, receives, next_receive, .. } = self;
        if handle.domain().context().is_gone() {
            return Err((0, PostError::Gone));
        }
        if handle.shares() {
            return Err((0, PostError::Unsupported));
        }
        if handle.stage() == Stage::Fresh {
            return Err((0, PostError::BadState));
        }
        let next = Cell::new(*next_receive);
        let posted = receives.post(
            requests,
            |place, wr_id| {
                let position = next.get().wrapping_add(u64::try_from(place).unwrap_or(0));
                handle.ledger.note_receive(position, wr_id)
            },
            // SAFETY: the queue pair is live; the list and its spans are valid during the call, which copies them.
            |first, bad| unsafe { ibv_post_recv(handle.raw(), first, bad) },
            |taken, _| next.set(next.get().wrapping_add(u64::try_from(taken).unwrap_or(0))),
        );
        *next_receive = next.get();
        posted?;
        if handle.stage() == Stage::Error || handle.ledger.has_failed() {
            handle.flush_again();
        }
        Ok(())
    }
}
