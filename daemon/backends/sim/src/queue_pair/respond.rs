//! Receive side: receives, and the responder's part of every operation.
//!
//! A request that the responder must refuse breaks the connection at both ends: the requester sees
//! the remote error, the responder's queue pair goes to ERR with an event (InfiniBand
//! specification vol. 1, 9.9.3, class A and C errors).

use std::sync::Arc;
use std::sync::atomic::Ordering;

use gdrd_hal::{
    Access, GpuAtomic, HcaEvent, Opcode, PostError, QueuePairState, ReceiveRequest, WorkRequest, WorkStatus,
};

use super::attempt::{Attempt, Payload, Place};
use super::{Aftermath, QueuePairCore, Reason, ReceiveSide};
use crate::completion::Frees;
use crate::keys::KeyKind;
use crate::region::RegionCache;
use crate::sync::lock;

/// Atomics work on aligned u64s.
pub(super) const ATOMIC_BYTES: u32 = 8;

/// A request as it arrives, with the length of what it moves.
#[derive(Clone, Copy)]
pub(super) struct Asked<'a> {
    pub(super) request: &'a WorkRequest,
    pub(super) len_bytes: u32,
}

impl QueuePairCore {
    /// ibv_post_recv(3). A requester that waits for a receive goes on, on this thread.
    pub(super) fn post_receive(self: &Arc<Self>, requests: &[ReceiveRequest]) -> Result<(), (usize, PostError)> {
        let (result, waiter) = {
            let mut receive = lock(&self.receive);
            let result = self.take_receives(&mut receive, requests);
            let waiter = if receive.queue.is_empty() { None } else { receive.waiter.take() };
            (result, waiter)
        };
        if let Some(waiter) = waiter.and_then(|waiter| waiter.upgrade()) {
            waiter.progress();
        }
        result
    }

    fn take_receives(&self, receive: &mut ReceiveSide, requests: &[ReceiveRequest]) -> Result<(), (usize, PostError)> {
        for (index, request) in requests.iter().enumerate() {
            let refused = |error| Err((index, error));
            if self.hca.is_gone() {
                return refused(PostError::Gone);
            }
            let state = self.state();
            if matches!(state, None | Some(QueuePairState::Reset)) {
                return refused(PostError::BadState);
            }
            let freed = self.credits.receives.load(Ordering::Acquire);
            if receive.posted - freed >= u64::from(self.config.recv_depth) {
                return refused(PostError::Full);
            }
            receive.posted += 1;
            receive.queue.push_back(*request);
            if self.state() == Some(QueuePairState::Err) {
                self.flush_queue(receive);
            }
        }
        Ok(())
    }

    /// Completes all posted receives as flushed, in order.
    pub(super) fn flush_receives(&self) {
        self.flush_queue(&mut lock(&self.receive));
    }

    fn flush_queue(&self, receive: &mut ReceiveSide) {
        while let Some(request) = receive.queue.pop_front() {
            let completion = self.completion(request.wr_id, Opcode::Recv, WorkStatus::Flushed);
            self.complete(completion, Frees::Receive);
        }
    }

    /// Breaks the connection from the responder's end. No receive side may be held.
    fn refuse(self: &Arc<Self>, status: WorkStatus, after: &mut Aftermath) -> WorkStatus {
        if self.set_error() {
            self.hca.raise(HcaEvent::QueuePairFatal { qp_num: self.qp_num });
        }
        self.flush_receives();
        after.failed = Some(Arc::clone(self));
        status
    }

    fn remote_place(
        &self,
        asked: Asked<'_>,
        cache: &mut RegionCache,
        right: impl Fn(&Access) -> bool,
    ) -> Result<Place, WorkStatus> {
        let remote = asked.request.remote;
        let region = cache.find(&self.hca.keys, KeyKind::Remote, remote.rkey);
        let place = region.and_then(|region| self.place_in(region, remote.addr, asked.len_bytes, right));
        place.ok_or(WorkStatus::RemoteAccess)
    }

    /// Lands a write. A write of no bytes names no memory: its key is not looked at (InfiniBand specification
    /// vol. 1, C9-88).
    fn land_write(&self, asked: Asked<'_>, payload: &Payload<'_>, cache: &mut RegionCache) -> Result<(), WorkStatus> {
        if asked.len_bytes == 0 {
            return Ok(());
        }
        let to = self.remote_place(asked, cache, |access| access.remote_write)?;
        payload.land(to.bytes(), to.offset, asked.len_bytes)
    }

    pub(super) fn take_write(
        self: &Arc<Self>,
        asked: Asked<'_>,
        payload: &Payload<'_>,
        cache: &mut RegionCache,
        after: &mut Aftermath,
    ) -> Result<u32, WorkStatus> {
        let landed = self.land_write(asked, payload, cache);
        landed.map(|()| asked.len_bytes).map_err(|status| self.refuse(status, after))
    }

    pub(super) fn take_read(
        self: &Arc<Self>,
        asked: Asked<'_>,
        cache: &mut RegionCache,
        after: &mut Aftermath,
    ) -> Result<Place, WorkStatus> {
        let from = self.remote_place(asked, cache, |access| access.remote_read);
        from.map_err(|status| self.refuse(status, after))
    }

    /// The old value.
    pub(super) fn take_atomic(
        self: &Arc<Self>,
        asked: Asked<'_>,
        cache: &mut RegionCache,
        after: &mut Aftermath,
    ) -> Result<u64, WorkStatus> {
        self.land_atomic(asked, cache).map_err(|status| self.refuse(status, after))
    }

    fn land_atomic(&self, asked: Asked<'_>, cache: &mut RegionCache) -> Result<u64, WorkStatus> {
        let request = asked.request;
        if !request.remote.addr.is_multiple_of(u64::from(ATOMIC_BYTES)) {
            return Err(WorkStatus::RemoteInvalidRequest);
        }
        let at = self.remote_place(asked, cache, |access| access.remote_atomic)?;
        // Wire address and offset agree inside a page, so an aligned address is an aligned word.
        let operand = request.operand;
        let operation = match request.opcode {
            Opcode::FetchAdd => GpuAtomic::FetchAdd { operand },
            _ => GpuAtomic::CompareSwap { compare: request.compare, operand },
        };
        at.bytes().atomic(at.offset, operation).map_err(|_| WorkStatus::RemoteInvalidRequest)
    }

    /// A send or a write with immediate: consumes a receive.
    pub(super) fn take_message(
        self: &Arc<Self>,
        requester: &Arc<Self>,
        asked: Asked<'_>,
        payload: &Payload<'_>,
        cache: &mut RegionCache,
        after: &mut Aftermath,
    ) -> Attempt {
        let mut receive = lock(&self.receive);
        if !self.is_rts() {
            return Attempt::Wait(Reason::NoAnswer);
        }
        if receive.queue.is_empty() {
            receive.waiter = Some(Arc::downgrade(requester));
            return Attempt::Wait(Reason::NotReady);
        }
        let result = match asked.request.opcode {
            Opcode::WriteImm => self.land_write(asked, payload, cache),
            _ => self.land_send(&mut receive, payload, asked.len_bytes),
        };
        if result.is_ok() {
            self.complete_receive(&mut receive, asked);
        }
        drop(receive);
        Attempt::Done(result.map(|()| asked.len_bytes).map_err(|status| self.refuse(status, after)))
    }

    /// Lands a send in the receive at the head. Where that cannot take it, the receive completes with what is wrong
    /// with it, and the requester learns less.
    fn land_send(&self, receive: &mut ReceiveSide, payload: &Payload<'_>, len_bytes: u32) -> Result<(), WorkStatus> {
        let Some(posted) = receive.queue.front().copied() else { return Err(WorkStatus::RemoteOperation) };
        let (own, requesters) = match self.local_place(&mut receive.local, posted.local, true) {
            _ if len_bytes > posted.local.len_bytes => (WorkStatus::LocalLength, WorkStatus::RemoteInvalidRequest),
            Ok(to) => return payload.land(to.bytes(), to.offset, len_bytes),
            Err(_) if posted.local.len_bytes == 0 => return Ok(()),
            Err(status) => (status, WorkStatus::RemoteOperation),
        };
        receive.queue.pop_front();
        // ERR first: the completion must not be seen while the queue pair still looks alive.
        if self.set_error() {
            self.hca.raise(HcaEvent::QueuePairFatal { qp_num: self.qp_num });
        }
        let completion = self.completion(posted.wr_id, Opcode::Recv, own);
        self.complete(completion, Frees::Receive);
        Err(requesters)
    }

    fn complete_receive(&self, receive: &mut ReceiveSide, asked: Asked<'_>) {
        let Asked { request, len_bytes } = asked;
        let Some(posted) = receive.queue.pop_front() else { return };
        let opcode = if request.opcode == Opcode::WriteImm { Opcode::RecvWriteImm } else { Opcode::Recv };
        let mut completion = self.completion(posted.wr_id, opcode, WorkStatus::Success);
        completion.byte_len = len_bytes;
        completion.imm = matches!(request.opcode, Opcode::WriteImm | Opcode::SendImm).then_some(request.imm);
        self.complete(completion, Frees::Receive);
    }

    /// Forgets the receive side of a queue pair that is no more.
    pub(super) fn clear_receives(&self) {
        let mut receive = lock(&self.receive);
        receive.queue.clear();
        receive.waiter = None;
    }

    /// A datagram: dropped in silence unless it can land. It lands behind room for the route header.
    pub(super) fn take_datagram(&self, asked: Asked<'_>, header: &[u8], payload: &Payload<'_>) {
        let Asked { request, len_bytes } = asked;
        let mut receive = lock(&self.receive);
        let takes = matches!(self.state(), Some(QueuePairState::Rts | QueuePairState::Sqe));
        let Some(posted) = receive.queue.front().copied().filter(|_| takes) else { return };
        let header_bytes = gdrd_hal::GRH_BYTES;
        let landed = match self.local_place(&mut receive.local, posted.local, true) {
            _ if posted.local.len_bytes < header_bytes + len_bytes => Err(WorkStatus::LocalLength),
            Ok(to) => {
                let header_landed = to.bytes().write_from(to.offset, header);
                let landed = payload.land(to.bytes(), to.offset + u64::from(header_bytes), len_bytes);
                header_landed.map_err(|_| WorkStatus::LocalProtection).and(landed)
            }
            Err(status) => Err(status),
        };
        match landed {
            Ok(()) => {
                self.complete_receive(&mut receive, Asked { request, len_bytes: header_bytes + len_bytes });
            }
            Err(status) => {
                receive.queue.pop_front();
                self.set_error();
                let completion = self.completion(posted.wr_id, Opcode::Recv, status);
                self.complete(completion, Frees::Receive);
                self.flush_queue(&mut receive);
            }
        }
    }
}
