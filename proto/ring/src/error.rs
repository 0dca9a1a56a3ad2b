//! What can go wrong with a ring or a generation page, by whose fault it is.

use gdrd_shm::ShmError;

use crate::abi;
use crate::geometry::GeometryError;
use crate::submission::{Queue, Refusal};

/// The other side published an index that no honest peer can publish. The side that found it stops
/// reading this ring for good; every later call answers the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{index} index {found} is impossible: between {least} and {most} were allowed; close this ring")]
pub struct Corrupt {
    /// Which index: `submission tail`, `completion head` and so on.
    pub index: &'static str,
    /// What was read.
    pub found: u32,
    /// Least value that was allowed, modulo 2^32.
    pub least: u32,
    /// Greatest value that was allowed, modulo 2^32.
    pub most: u32,
}

/// A ring could not be made, or its peer not be woken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RingError {
    /// The segment refused.
    #[error("segment of a ring")]
    Segment(#[from] ShmError),
    /// The other side broke the protocol.
    #[error(transparent)]
    Corrupt(#[from] Corrupt),
    /// The broker has closed the ring and all that it published has been polled.
    #[error("the ring is closed, its queue pair has ended; make a new one")]
    Closed,
}

/// A descriptor that this client cannot use as a ring or a generation page.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The descriptor could not be mapped.
    #[error("segment of a {what}")]
    Segment {
        /// `ring` or `generation page`.
        what: &'static str,
        /// Why.
        #[source]
        source: ShmError,
    },
    /// The segment does not start with the magic number.
    #[error("the segment is no {what}: it starts with {found:#018x}")]
    NotOurs {
        /// `ring` or `generation page`.
        what: &'static str,
        /// First eight bytes.
        found: u64,
    },
    /// The daemon speaks another version.
    #[error("the daemon made a {what} of version {found}, this client knows {known}; upgrade the {} one", older(*found, *known))]
    Version {
        /// `ring` or `generation page`.
        what: &'static str,
        /// The daemon's.
        found: u32,
        /// Ours.
        known: u32,
    },
    /// Depths that no daemon hands out.
    #[error("header of the ring")]
    Geometry(#[from] GeometryError),
    /// The header and the segment's length disagree.
    #[error("the {what} needs {needed} bytes, its segment has {found}")]
    Size {
        /// `ring` or `generation page`.
        what: &'static str,
        /// Bytes that the header implies.
        needed: u64,
        /// Bytes that there are.
        found: u64,
    },
    /// Capacities or offsets that do not follow from the depths.
    #[error("the header's layout {found:?} does not follow from its depths")]
    Layout {
        /// What was read.
        found: abi::Header,
    },
}

fn older(found: u32, known: u32) -> &'static str {
    match found < known {
        true => "daemon, the older",
        false => "client, the older",
    }
}

/// A submission that was not taken. Nothing of it was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// As many requests are outstanding as the queue is deep. Poll; and ask for a signalled
    /// completion at least once a depth, since only those tell what has ended.
    #[error("the {queue:?} queue is full: {depth} requests are outstanding; poll first")]
    Full {
        /// Which queue.
        queue: Queue,
        /// Its depth.
        depth: u32,
    },
    /// The broker would refuse it.
    #[error("submission that the broker would refuse")]
    Invalid(#[from] Refusal),
    /// The broker has closed the ring.
    #[error("the ring is closed, its queue pair has ended; make a new one")]
    Closed,
    /// The broker's index is impossible.
    #[error(transparent)]
    Corrupt(#[from] Corrupt),
}

/// The daemon ended a request that it had not taken. A bug of the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no request of the {queue:?} queue is outstanding, yet one was to be ended")]
pub struct NotOutstanding {
    /// Which queue.
    pub queue: Queue,
}

/// A slot's generation could not be changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GenerationError {
    /// No such slot.
    #[error("slot {slot} is outside of the generation page of {slots} slots")]
    NoSuchSlot {
        /// Slot asked for.
        slot: u32,
        /// Slots there are.
        slots: u32,
    },
    /// A generation may only rise.
    #[error("slot {slot} is at generation {current}, {asked} would repeat the past")]
    NotNewer {
        /// Slot asked for.
        slot: u32,
        /// Where it is.
        current: u64,
        /// What was asked for.
        asked: u64,
    },
    /// The segment refused.
    #[error("segment of a generation page")]
    Segment(#[from] ShmError),
}
