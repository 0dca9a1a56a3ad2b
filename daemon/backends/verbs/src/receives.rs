//! Posting receives in batches, without allocating: of a queue pair, and of a shared receive queue.

use std::mem::MaybeUninit;
use std::ptr;

use gdrd_hal::{PostError, ReceiveRequest};
use rdma_sys::{ibv_recv_wr, ibv_sge};

use crate::error::post_error;

/// Requests given to the device with one doorbell at most.
pub(crate) const BATCH: usize = 16;

/// Receives on their way to the device.
pub(crate) struct Receives {
    requests: Box<[ibv_recv_wr; BATCH]>,
    spans: Box<[ibv_sge; BATCH]>,
}

// SAFETY: the pointers in the requests lead into the boxed arrays of this value and are set anew before each use.
unsafe impl Send for Receives {}

/// Room for structures of C.
pub(crate) fn zeroed_box<T>() -> Box<MaybeUninit<T>> {
    Box::new(MaybeUninit::zeroed())
}

impl Receives {
    pub(crate) fn new() -> Self {
        // SAFETY: integers and pointers (struct ibv_recv_wr, verbs.h); zero and null are valid.
        let requests = unsafe { zeroed_box().assume_init() };
        // SAFETY: integers (struct ibv_sge); zero is valid.
        let spans = unsafe { zeroed_box().assume_init() };
        Self { requests, spans }
    }

    /// Posts the requests, a batch at a time. `tag` books the one at this place of its batch and gives its tag; `ring` hands
    /// a linked list to the device, as ibv_post_recv(3) is told; `count` is told, for each batch, the tags that the device
    /// took, and those that it did not.
    pub(crate) fn post(
        &mut self,
        requests: &[ReceiveRequest],
        mut tag: impl FnMut(usize, u64) -> Option<u64>,
        mut ring: impl FnMut(*mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> i32,
        mut count: impl FnMut(usize, &[ibv_recv_wr]),
    ) -> Result<(), (usize, PostError)> {
        let mut posted = 0;
        for batch in requests.chunks(BATCH) {
            let mut prepared = 0;
            for request in batch {
                let Some(tag) = tag(prepared, request.wr_id) else { break };
                self.prepare(prepared, tag, request);
                prepared += 1;
            }
            let errno = if prepared > 0 { self.ring(prepared, &mut ring) } else { Ok(()) };
            let taken = errno.map_or_else(|(taken, _)| taken, |()| prepared);
            count(taken, self.requests.get(taken..prepared).unwrap_or_default());
            posted += taken;
            errno.map_err(|(_, errno)| (posted, post_error(errno)))?;
            if prepared < batch.len() {
                return Err((posted, PostError::Full));
            }
        }
        Ok(())
    }

    fn prepare(&mut self, place: usize, tag: u64, request: &ReceiveRequest) {
        let (Some(wr), Some(span)) = (self.requests.get_mut(place), self.spans.get_mut(place)) else { return };
        *span = ibv_sge { addr: request.local.addr, length: request.local.len_bytes, lkey: request.local.lkey };
        // A length of 0 in an SGE stands for 2^31 with some providers (mlx5), so nothing is told by no SGE.
        let num_sge = i32::from(request.local.len_bytes > 0);
        *wr = ibv_recv_wr { wr_id: tag, next: ptr::null_mut(), sg_list: ptr::from_mut(span), num_sge };
    }

    /// Links the first `prepared` requests and gives them to the device; how many it took, and errno, where not all.
    fn ring(
        &mut self,
        prepared: usize,
        ring: &mut impl FnMut(*mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> i32,
    ) -> Result<(), (usize, i32)> {
        for place in 1..prepared {
            let next = self.requests.get_mut(place).map_or(ptr::null_mut(), ptr::from_mut);
            if let Some(before) = self.requests.get_mut(place - 1) {
                before.next = next;
            }
        }
        let first = self.requests.as_mut_ptr();
        let mut bad = ptr::null_mut();
        match ring(first, &raw mut bad) {
            0 => Ok(()),
            errno => Err((place_of(bad, first, prepared), errno)),
        }
    }
}

/// Place of the refused request in the batch. `bad` is compared, never followed.
pub(crate) fn place_of<T>(bad: *mut T, first: *mut T, count: usize) -> usize {
    (0..count).find(|place| ptr::eq(bad, first.wrapping_add(*place))).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn requests(count: u64) -> Vec<ReceiveRequest> {
        (0..count).map(|wr_id| ReceiveRequest { wr_id, local: gdrd_hal::LocalSpan::default() }).collect()
    }

    #[test]
    fn batches_go_to_the_device_in_order_and_linked() {
        let mut seen = Vec::new();
        let ring = |first: *mut ibv_recv_wr, _: *mut *mut ibv_recv_wr| {
            let mut at = first;
            while !at.is_null() {
                // SAFETY: a list of initialised requests, which ends with null.
                let request = unsafe { *at };
                seen.push(request.wr_id);
                at = request.next;
            }
            0
        };
        let posted = Receives::new().post(&requests(40), |_, wr_id| Some(wr_id + 100), ring, |_, _| {});
        assert_eq!((posted, seen), (Ok(()), (100..140).collect()));
    }

    #[test]
    fn what_the_device_refuses_is_told_with_its_tags() {
        let mut left = Vec::new();
        let mut batches = 0;
        let ring = |first: *mut ibv_recv_wr, bad: *mut *mut ibv_recv_wr| {
            batches += 1;
            if batches == 1 {
                return 0;
            }
            // SAFETY: the place is there to be written; the third of the batch.
            unsafe { *bad = first.wrapping_add(2) };
            rustix::io::Errno::NOMEM.raw_os_error()
        };
        let count = |taken: usize, not: &[ibv_recv_wr]| left.push((taken, not.iter().map(|wr| wr.wr_id).collect()));
        let posted = Receives::new().post(&requests(20), |_, wr_id| Some(wr_id), ring, count);
        assert_eq!(posted, Err((18, PostError::Full)));
        assert_eq!(left, [(16, Vec::new()), (2, vec![18, 19])]);
    }

    #[test]
    fn posting_ends_where_there_is_no_room() {
        let tag = |place, wr_id| (place < 3).then_some(wr_id);
        let posted = Receives::new().post(&requests(8), tag, |_, _| 0, |_, _| {});
        assert_eq!(posted, Err((3, PostError::Full)));
    }
}
