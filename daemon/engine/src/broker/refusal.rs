//! Why a request was refused before it reached the HCA, as its completion tells the client.

use gdrd_ring::{RefusalReason, Status};

use super::slots::SlotRefusal;

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
