//! What is posted to and polled: the hot path. One owner each, no allocation, no blocking.

use std::os::fd::BorrowedFd;

use crate::{HcaError, PostError, ReceiveRequest, WorkCompletion, WorkRequest};

/// Identity of a completion queue on its HCA.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CqId(pub u64);

/// Identity of a shared receive queue on its HCA.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SrqId(pub u64);

/// Posting side of a queue pair: one owner, no allocation, no blocking.
pub trait WorkQueue: Send {
    /// Queues sends in order; returns how many were taken with the error of the first refused, as
    /// ibv_post_send(3) does through `bad_wr`.
    ///
    /// # Errors
    /// The count taken and the reason of the first one refused.
    fn post_send(&mut self, requests: &[WorkRequest]) -> Result<(), (usize, PostError)>;

    /// Queues receives in order, as ibv_post_recv(3).
    ///
    /// # Errors
    /// The count taken and the reason of the first one refused.
    fn post_recv(&mut self, requests: &[ReceiveRequest]) -> Result<(), (usize, PostError)>;
}

/// A completion queue: one owner, polled without blocking.
pub trait CompletionQueue: Send {
    /// Identity on its HCA.
    fn id(&self) -> CqId;

    /// Fills `out` from its start with what has completed and returns how many.
    ///
    /// # Errors
    /// `Gone` (overrun included), `Driver`.
    fn poll(&mut self, out: &mut [WorkCompletion]) -> Result<usize, HcaError>;

    /// An fd that becomes readable once a completion arrives after [`CompletionQueue::arm`], for a thread that
    /// wants to sleep. `None`: the backend can only be polled.
    fn event_fd(&self) -> Option<BorrowedFd<'_>>;

    /// Asks for one event at the next completion (ibv_req_notify_cq(3)) and takes back the readiness that an
    /// earlier event left on the fd. Completions that are there already make none: poll once more before sleeping.
    ///
    /// # Errors
    /// `Gone`, `Driver`.
    fn arm(&mut self) -> Result<(), HcaError>;
}

/// Receives that any queue pair made on it takes, in the order of posting (ibv_create_srq(3)). A completion names the queue
/// pair that took the receive. What is left when the last of queue and queue pairs ends never completes.
pub trait SharedReceiveQueue: Send {
    /// Identity on its HCA.
    fn id(&self) -> SrqId;

    /// Queues receives in order (ibv_post_srq_recv(3)). Polling their completions makes room.
    ///
    /// # Errors
    /// The count taken and the reason of the first one refused.
    fn post_recv(&mut self, requests: &[ReceiveRequest]) -> Result<(), (usize, PostError)>;

    /// Asks for one [`crate::HcaEvent::SharedReceivesLow`] once a receive is taken and fewer than this many are left
    /// (ibv_modify_srq(3), IBV_SRQ_LIMIT); 0 for none. It must be asked for again after each. A cold call.
    ///
    /// # Errors
    /// `Invalid` (as many as the queue holds, or more), `Gone`, `Driver`.
    fn set_limit(&mut self, limit: u32) -> Result<(), HcaError>;

    /// The limit as the device has it: 0 once it was told (ibv_query_srq(3)). A cold call.
    ///
    /// # Errors
    /// `Gone`, `Driver`.
    fn limit(&self) -> Result<u32, HcaError>;
}
