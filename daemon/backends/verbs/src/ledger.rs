//! What was posted on one queue pair, so that a completion can be told in the caller's words.
//!
//! Hardware gets a tag (the position in the queue) instead of the caller's id: the ledger gives back id and operation,
//! also where the device tells none (a completion in error) or another (a flush made of a read), and counts room by
//! what was polled, as every provider with hardware queues does.
//!
//! The work queue writes, the completion queue's owner reads. Orderings: a slot is written before the request is handed to
//! the device and read after its completion; its position, and [`Lane::retired`], pair release with acquire.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

use gdrd_hal::Opcode;

use crate::shared_receive::Slots;

/// Marks the tags of receives.
pub(crate) const RECEIVE: u64 = 1 << 63;

/// Longest queue that is kept books of; above every driver's limit (`max_qp_wr` of mlx5 is 32768).
const MAX_DEPTH: u32 = 1 << 20;

/// Position of a slot that no request has used; tags of neither direction name it.
const UNUSED: u64 = u64::MAX;

#[derive(Debug)]
struct Slot {
    /// Whose the slot is, so that a tag which nobody gave is found out.
    position: AtomicU64,
    wr_id: AtomicU64,
    opcode: AtomicU8,
}

impl Slot {
    fn new() -> Self {
        Self { position: AtomicU64::new(UNUSED), wr_id: AtomicU64::default(), opcode: AtomicU8::default() }
    }
}

/// One direction.
#[derive(Debug)]
pub(crate) struct Lane {
    slots: Box<[Slot]>,
    depth: u64,
    /// Requests up to here have completed and been polled.
    retired: AtomicU64,
}

impl Lane {
    fn new(depth: u32) -> Self {
        let slots = depth.clamp(1, MAX_DEPTH).next_power_of_two();
        Self {
            slots: (0..slots).map(|_| Slot::new()).collect(),
            depth: u64::from(depth.clamp(1, MAX_DEPTH)),
            retired: AtomicU64::new(0),
        }
    }

    fn slot(&self, position: u64) -> Option<&Slot> {
        let mask = u64::try_from(self.slots.len()).ok()?.checked_sub(1)?;
        self.slots.get(usize::try_from(position & mask).ok()?)
    }

    /// Notes a request. Release: pairs with the acquire in `noted`.
    fn note(&self, position: u64, wr_id: u64, opcode: u8) {
        if let Some(slot) = self.slot(position) {
            slot.wr_id.store(wr_id, Ordering::Relaxed);
            slot.opcode.store(opcode, Ordering::Relaxed);
            slot.position.store(position, Ordering::Release);
        }
    }

    /// The slot of a request that was noted.
    fn noted(&self, position: u64) -> Option<&Slot> {
        self.slot(position).filter(|slot| slot.position.load(Ordering::Acquire) == position)
    }

    fn has_room(&self, position: u64) -> bool {
        // Acquire: pairs with the release in `retire`, so that the slot's reader is done with it.
        position.saturating_sub(self.retired.load(Ordering::Acquire)) < self.depth
    }

    /// The request at `position`, which has completed; makes room.
    fn settle(&self, position: u64, opcode: impl FnOnce(&Slot) -> Option<Opcode>) -> Option<Entry> {
        let slot = self.noted(position)?;
        let entry = Entry { wr_id: slot.wr_id.load(Ordering::Relaxed), opcode: opcode(slot)? };
        self.retire(position);
        Some(entry)
    }

    fn retire(&self, position: u64) {
        self.retired.fetch_max(position.saturating_add(1), Ordering::Release);
    }
}

/// Both directions of a queue pair.
#[derive(Debug)]
pub(crate) struct Ledger {
    send: Lane,
    receive: Receives,
    failed: AtomicBool,
}

/// Where its receives come from.
#[derive(Debug)]
enum Receives {
    Own(Lane),
    Shared(Arc<Slots>),
}

/// A completion in the caller's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) wr_id: u64,
    pub(crate) opcode: Opcode,
}

impl Ledger {
    pub(crate) fn new(send_depth: u32, recv_depth: u32) -> Self {
        Self::with(send_depth, Receives::Own(Lane::new(recv_depth)))
    }

    /// Of a queue pair that takes its receives from a shared queue.
    pub(crate) fn sharing(send_depth: u32, slots: &Arc<Slots>) -> Self {
        Self::with(send_depth, Receives::Shared(Arc::clone(slots)))
    }

    fn with(send_depth: u32, receive: Receives) -> Self {
        Self { send: Lane::new(send_depth), receive, failed: AtomicBool::new(false) }
    }

    /// Whether the send at `position` has room. In ERR the device alone decides.
    pub(crate) fn has_send_room(&self, position: u64) -> bool {
        self.send.has_room(position)
    }

    /// Notes a send before it is posted; gives its tag.
    pub(crate) fn note_send(&self, position: u64, wr_id: u64, opcode: Opcode) -> u64 {
        let position = position & !RECEIVE;
        self.send.note(position, wr_id, code(opcode));
        position
    }

    /// Notes a receive before it is posted; gives its tag, if it has room.
    pub(crate) fn note_receive(&self, position: u64, wr_id: u64) -> Option<u64> {
        let Receives::Own(lane) = &self.receive else { return None };
        if !lane.has_room(position) {
            return None;
        }
        let position = position & !RECEIVE;
        lane.note(position, wr_id, 0);
        Some(position | RECEIVE)
    }

    /// What the completion with this tag is of; makes room. `None` for a tag that nobody gave. `with_imm_write`: a receive
    /// consumed by a write.
    pub(crate) fn settle(&self, tag: u64, with_imm_write: bool) -> Option<Entry> {
        let received = if with_imm_write { Opcode::RecvWriteImm } else { Opcode::Recv };
        match &self.receive {
            _ if tag & RECEIVE == 0 => self.send.settle(tag, |slot| opcode(slot.opcode.load(Ordering::Relaxed))),
            Receives::Own(lane) => lane.settle(tag & !RECEIVE, |_| Some(received)),
            Receives::Shared(slots) => Some(Entry { wr_id: slots.settle(tag & !RECEIVE)?, opcode: received }),
        }
    }

    /// A request failed: the queue pair is in ERR or on its way.
    pub(crate) fn set_failed(&self) {
        self.failed.store(true, Ordering::Release);
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }
}

const OPCODES: [Opcode; 8] = [
    Opcode::Write,
    Opcode::WriteImm,
    Opcode::Read,
    Opcode::Send,
    Opcode::SendImm,
    Opcode::FetchAdd,
    Opcode::CompareSwap,
    Opcode::Flush,
];

fn code(opcode: Opcode) -> u8 {
    OPCODES.iter().position(|known| *known == opcode).and_then(|place| u8::try_from(place).ok()).unwrap_or(u8::MAX)
}

fn opcode(code: u8) -> Option<Opcode> {
    OPCODES.get(usize::from(code)).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn completions_get_their_id_and_operation_back() {
        let ledger = Ledger::new(4, 4);
        let flush = ledger.note_send(0, u64::MAX, Opcode::Flush);
        let receive = ledger.note_receive(0, 7).expect("there is room");
        assert_ne!(flush, receive);
        assert_eq!(ledger.settle(flush, false), Some(Entry { wr_id: u64::MAX, opcode: Opcode::Flush }));
        assert_eq!(ledger.settle(receive, false), Some(Entry { wr_id: 7, opcode: Opcode::Recv }));
        assert_eq!(ledger.settle(receive, true), Some(Entry { wr_id: 7, opcode: Opcode::RecvWriteImm }));
    }

    #[test]
    fn room_comes_back_with_a_completion_and_with_all_silent_ones_before_it() {
        let ledger = Ledger::new(3, 1);
        let tags: Vec<u64> = (0..3).map(|position| ledger.note_send(position, position, Opcode::Write)).collect();
        assert!(ledger.has_send_room(2) && !ledger.has_send_room(3));
        assert!(ledger.settle(tags[1], false).is_some());
        assert!(ledger.has_send_room(4) && !ledger.has_send_room(5));
        assert!(ledger.note_receive(0, 0).is_some() && ledger.note_receive(1, 1).is_none());
    }

    #[test]
    fn tags_that_a_driver_invents_do_no_harm() {
        let ledger = Ledger::new(4, 4);
        let (send, receive) =
            (ledger.note_send(0, 7, Opcode::Write), ledger.note_receive(0, 8).expect("there is room"));
        for tag in [1, 4, 1 << 62, u64::MAX >> 1, RECEIVE | 1, RECEIVE | 4, u64::MAX] {
            assert_eq!(ledger.settle(tag, false), None, "{tag:#x}");
        }
        assert!(ledger.has_send_room(3) && !ledger.has_send_room(4), "no room comes of them, and none is lost");
        assert!(ledger.note_receive(3, 9).is_some() && ledger.note_receive(4, 9).is_none());
        assert_eq!(ledger.settle(send, false).map(|entry| entry.wr_id), Some(7));
        assert_eq!(ledger.settle(receive, false).map(|entry| entry.wr_id), Some(8));
    }
}
