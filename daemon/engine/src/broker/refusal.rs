//! Why a request was refused before it reached the HCA, as its completion tells the client.

use gdrd_ring::Status;

use super::slots::SlotRefusal;

/// Detail of status REFUSED, in the completion's `vendor_error`. The queue pair goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
pub enum RefusalReason {
    /// The entry is malformed: unknown opcode or flag, reserved field, inline or atomic length.
    Malformed = 1,
    /// No such registration slot.
    NoSuchSlot = 2,
    /// The slot's registration is on another HCA than the queue pair.
    OtherHca = 3,
    /// The range does not lie in the registration.
    Range = 4,
    /// The registration may not be written by the HCA, as a read, an atomic or a receive would.
    Access = 5,
    /// More inline payload than the queue pair carries.
    InlineTooLong = 6,
    /// Longer than a message of this HCA may be, or past the end of the peer's address space.
    MessageTooLong = 7,
    /// The queue pair's type or its HCA cannot do this.
    Unsupported = 8,
    /// The remote address of an atomic is not a multiple of 8.
    Misaligned = 9,
    /// The queue pair is not connected.
    NotConnected = 10,
    /// The provider would not take it.
    Provider = 11,
}

impl RefusalReason {
    /// The number in the completion.
    #[must_use]
    pub const fn code(self) -> u32 {
        self as u32
    }
}

/// How a request ends that never reaches the HCA.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refused {
    /// Another generation.
    Stale,
    /// Anything else.
    Because(RefusalReason),
}

impl Refused {
    pub(crate) fn status(self) -> Status {
        match self {
            Self::Stale => Status::Stale,
            Self::Because(_) => Status::Refused,
        }
    }

    pub(crate) fn detail(self) -> u32 {
        match self {
            Self::Stale => 0,
            Self::Because(reason) => reason.code(),
        }
    }
}

impl From<RefusalReason> for Refused {
    fn from(reason: RefusalReason) -> Self {
        Self::Because(reason)
    }
}

impl From<SlotRefusal> for Refused {
    fn from(refusal: SlotRefusal) -> Self {
        match refusal {
            SlotRefusal::Stale => Self::Stale,
            SlotRefusal::NoSuchSlot => RefusalReason::NoSuchSlot.into(),
            SlotRefusal::OtherHca => RefusalReason::OtherHca.into(),
            SlotRefusal::Range => RefusalReason::Range.into(),
            SlotRefusal::Access => RefusalReason::Access.into(),
        }
    }
}
