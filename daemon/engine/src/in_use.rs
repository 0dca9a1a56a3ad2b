//! Devices that clients hold something on, for schedulers that want some to themselves. Whose it is is not told.

use crate::engine::Engine;

/// Names in the plan of devices in use, in order of the plan.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct InUse {
    /// GPUs with memory that is leased, detached leases included, or adopted.
    pub gpus: Vec<String>,
    /// HCAs with registrations of such memory, or with queue pairs.
    pub hcas: Vec<String>,
}

impl Engine {
    /// Devices that clients hold something on now. Pools are nobody's and do not count.
    #[must_use]
    pub fn in_use(&self) -> InUse {
        self.runtime().in_use()
    }
}
