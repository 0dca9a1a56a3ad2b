//! What the broker tells the engine: refused calls, and what happened to queue pairs by themselves.

use std::io;

use gdrd_hal::HcaError;
use gdrd_ring::{Corrupt, Status};
use thiserror::Error;

use super::slots::HcaIndex;
use crate::ids::QueuePairId;

/// Why a call on the broker was refused.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BrokerError {
    /// The configuration names no thread or too many. The operator's fault.
    #[error("{asked} broker threads asked for, 1 to {most} are possible")]
    Threads {
        /// Asked for.
        asked: usize,
        /// Most possible.
        most: usize,
    },
    /// The kernel refused a thread, an eventfd or an epoll instance.
    #[error("{call} of a broker thread")]
    System {
        /// The call.
        call: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// All entries of the HCA's completion queues are promised to other queue pairs.
    #[error(
        "no room on the completion queues of {hca}: {wanted} entries wanted, {free} free; destroy queue pairs or ask for less depth"
    )]
    Exhausted {
        /// The HCA.
        hca: String,
        /// Entries wanted, the sum of both depths.
        wanted: u32,
        /// Most that one thread has free.
        free: u32,
    },
    /// The HCA was forgotten.
    #[error("hca {hca} went away")]
    Gone {
        /// The HCA.
        hca: String,
    },
    /// The HCA refused a completion queue.
    #[error("completion queue on {hca}")]
    CompletionQueue {
        /// The HCA.
        hca: String,
        /// Why.
        #[source]
        source: HcaError,
    },
    /// The ring is deeper than the reservation. A bug of the engine.
    #[error("queue pair {id} has a ring for {wanted} requests but reserved {reserved}")]
    Depth {
        /// The queue pair.
        id: QueuePairId,
        /// Depths of the ring together.
        wanted: u32,
        /// Reserved.
        reserved: u32,
    },
    /// The id is attached already. A bug of the engine.
    #[error("queue pair {id} is attached already")]
    Attached {
        /// The queue pair.
        id: QueuePairId,
    },
    /// The broker has been shut down.
    #[error("the broker is shut down")]
    ShutDown,
}

/// What happened on a broker thread without being asked for. The engine tells the session concerned.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum BrokerEvent {
    /// The client broke the ring protocol. Its ring is closed and its queue pair goes to ERR, and stays attached until the
    /// client or its session ends it.
    RingCorrupt {
        /// The queue pair.
        id: QueuePairId,
        /// What was found.
        corrupt: Corrupt,
    },
    /// The queue pair went to ERR: a request failed, or the engine asked for it. What it had posted
    /// completes in order, what comes later completes as flushed, until it is detached.
    QueuePairFailed {
        /// The queue pair.
        id: QueuePairId,
        /// The first failure.
        status: Status,
    },
    /// A completion queue failed: nothing posted through it can be known to end. Every queue pair on
    /// it has told its client so and goes to ERR; the engine detaches them.
    CompletionQueueFailed {
        /// The HCA.
        hca: HcaIndex,
        /// Why.
        reason: HcaError,
        /// Those on it.
        queue_pairs: Vec<QueuePairId>,
    },
}
