//! One try of one send: the requester's checks, then the responder's part, as both HCAs would do them.

use std::sync::Arc;

use gdrd_hal::{Access, LocalSpan, Opcode, QueuePairType, WorkRequest, WorkStatus};

use super::respond::{ATOMIC_BYTES, Asked};
use super::{Aftermath, Connection, QueuePairCore, Reason, SendSide};
use crate::bytes::Bytes;
use crate::keys::KeyKind;
use crate::region::{Region, RegionCache};

/// What came of a try.
pub(super) enum Attempt {
    /// Executed: bytes moved, or the status it failed with.
    Done(Result<u32, WorkStatus>),
    /// Not executed; try again later.
    Wait(Reason),
}

impl Attempt {
    pub(super) fn failed(status: WorkStatus) -> Self {
        Self::Done(Err(status))
    }
}

/// A range of a region that passed all checks. The region cannot go while this lives.
pub(super) struct Place {
    region: Arc<Region>,
    pub(super) offset: u64,
}

impl Place {
    pub(super) fn bytes(&self) -> &Bytes {
        &self.region.bytes
    }
}

/// What a send or write carries.
pub(super) enum Payload<'a> {
    Nothing,
    Inline(&'a [u8]),
    Memory(Place),
}

impl Payload<'_> {
    /// Lands `len_bytes` at an offset of memory. The range was checked and is writable.
    pub(super) fn land(&self, to: &Bytes, offset: u64, len_bytes: u32) -> Result<(), WorkStatus> {
        let copied = match self {
            Self::Nothing => Ok(()),
            Self::Inline(bytes) => to.write_from(offset, bytes),
            Self::Memory(from) => from.bytes().copy_to(from.offset, to, offset, u64::from(len_bytes)),
        };
        copied.map_err(|_| WorkStatus::RemoteOperation)
    }
}

impl QueuePairCore {
    /// Local memory of a request. Local keys need no right to be read and `local_write` to be written.
    pub(super) fn local_place(
        &self,
        cache: &mut RegionCache,
        span: LocalSpan,
        writes: bool,
    ) -> Result<Place, WorkStatus> {
        let right = |access: &Access| !writes || access.local_write;
        let region = cache.find(&self.hca.keys, KeyKind::Local, span.lkey);
        let place = region.and_then(|region| self.place_in(region, span.addr, span.len_bytes, right));
        place.ok_or(WorkStatus::LocalProtection)
    }

    /// A range of a region, if our domain, the range and the right allow it.
    pub(super) fn place_in(
        &self,
        region: Arc<Region>,
        addr: u64,
        len_bytes: u32,
        right: impl Fn(&Access) -> bool,
    ) -> Option<Place> {
        if region.pd_id != self.pd_id || !right(&region.access) {
            return None;
        }
        let offset = region.locate(addr, u64::from(len_bytes))?;
        Some(Place { region, offset })
    }

    pub(super) fn payload<'a>(
        &self,
        cache: &mut RegionCache,
        request: &'a WorkRequest,
    ) -> Result<(Payload<'a>, u32), WorkStatus> {
        let inline = usize::from(request.inline_len);
        if inline > 0 {
            return Ok((Payload::Inline(&request.inline[..inline]), u32::from(request.inline_len)));
        }
        let len_bytes = request.local.len_bytes;
        if u64::from(len_bytes) > self.hca.capabilities.max_message_bytes {
            return Err(WorkStatus::LocalLength);
        }
        match len_bytes {
            0 => Ok((Payload::Nothing, 0)),
            _ => Ok((Payload::Memory(self.local_place(cache, request.local, false)?), len_bytes)),
        }
    }

    /// Tries one send.
    pub(super) fn attempt(
        self: &Arc<Self>,
        send: &mut SendSide,
        request: &WorkRequest,
        after: &mut Aftermath,
    ) -> Attempt {
        after.kick |= self.hca.fire_due_faults();
        let Some(connection) = self.connection.get() else { return Attempt::Wait(Reason::NoAnswer) };
        if self.config.qp_type == QueuePairType::Ud {
            return self.attempt_datagram(send, connection, request);
        }
        match request.opcode {
            Opcode::Read | Opcode::Flush => self.attempt_read(send, connection, request, after),
            Opcode::FetchAdd | Opcode::CompareSwap => self.attempt_atomic(send, connection, request, after),
            _ => self.attempt_message(send, connection, request, after),
        }
    }

    /// The other end, while packets pass both ways and it takes ours. Taken out of the cache, to be put back.
    fn reach(self: &Arc<Self>, send: &mut SendSide, connection: &Connection) -> Option<Arc<Self>> {
        let hca = connection.hca.as_ref()?;
        let local_port = self.hca.port(self.config.port_num)?;
        let remote_port = hca.port(connection.remote.port_num)?;
        if self.hca.is_gone()
            || hca.is_gone()
            || !local_port.passes(connection.local_epoch)
            || !remote_port.passes(connection.remote_epoch)
        {
            return None;
        }
        let cached = send.peer.take().filter(|peer| peer.state().is_some());
        let peer = cached.or_else(|| hca.find_queue_pair(connection.remote.qp_num))?;
        peer.takes_from(self, connection).then_some(peer)
    }

    /// Whether we, as responder, are connected to `requester` and agree on its sequence numbers.
    fn takes_from(&self, requester: &Self, connection: &Connection) -> bool {
        let Some(own) = self.connection.get().filter(|_| self.is_rts()) else { return false };
        self.config.qp_type == QueuePairType::Rc
            && own.remote.qp_num == requester.qp_num
            && own.remote.psn == requester.psn
            && own.remote.port_num == requester.config.port_num
            && own.hca.as_ref().is_some_and(|hca| Arc::ptr_eq(hca, &requester.hca))
            && connection.remote.psn == self.psn
    }

    fn attempt_message(
        self: &Arc<Self>,
        send: &mut SendSide,
        connection: &Connection,
        request: &WorkRequest,
        after: &mut Aftermath,
    ) -> Attempt {
        let (payload, len_bytes) = match self.payload(&mut send.local, request) {
            Ok(payload) => payload,
            Err(status) => return Attempt::failed(status),
        };
        let Some(peer) = self.reach(send, connection) else { return Attempt::Wait(Reason::NoAnswer) };
        let asked = Asked { request, len_bytes };
        let attempt = match request.opcode {
            Opcode::Write => Attempt::Done(peer.take_write(asked, &payload, &mut send.remote, after)),
            _ => peer.take_message(self, asked, &payload, &mut send.remote, after),
        };
        send.peer = Some(peer);
        attempt
    }

    fn attempt_read(
        self: &Arc<Self>,
        send: &mut SendSide,
        connection: &Connection,
        request: &WorkRequest,
        after: &mut Aftermath,
    ) -> Attempt {
        let len_bytes = request.local.len_bytes;
        if u64::from(len_bytes) > self.hca.capabilities.max_message_bytes {
            return Attempt::failed(WorkStatus::LocalLength);
        }
        let Some(peer) = self.reach(send, connection) else { return Attempt::Wait(Reason::NoAnswer) };
        let result = match (len_bytes, request.opcode) {
            (0, Opcode::Read) => Ok(0),
            // A flush of no bytes would read nothing and so prove nothing.
            (0, _) => Err(WorkStatus::LocalLength),
            _ => peer.take_read(Asked { request, len_bytes }, &mut send.remote, after).and_then(|from| {
                let to = self.local_place(&mut send.local, request.local, true)?;
                let copied = from.bytes().copy_to(from.offset, to.bytes(), to.offset, u64::from(len_bytes));
                copied.map(|()| len_bytes).map_err(|_| WorkStatus::LocalProtection)
            }),
        };
        send.peer = Some(peer);
        Attempt::Done(result)
    }

    fn attempt_atomic(
        self: &Arc<Self>,
        send: &mut SendSide,
        connection: &Connection,
        request: &WorkRequest,
        after: &mut Aftermath,
    ) -> Attempt {
        let len_bytes = ATOMIC_BYTES;
        if request.local.len_bytes != len_bytes {
            return Attempt::failed(WorkStatus::LocalLength);
        }
        let Some(peer) = self.reach(send, connection) else { return Attempt::Wait(Reason::NoAnswer) };
        // The peer's memory changes even if the old value finds no place here: the answer comes after the deed.
        let old = peer.take_atomic(Asked { request, len_bytes }, &mut send.remote, after);
        let result = old.and_then(|old| {
            let to = self.local_place(&mut send.local, request.local, true)?;
            let stored = to.bytes().write_from(to.offset, &old.to_ne_bytes());
            stored.map(|()| len_bytes).map_err(|_| WorkStatus::LocalProtection)
        });
        send.peer = Some(peer);
        Attempt::Done(result)
    }
}
