//! Where a flush lands the byte that it reads, on providers that flush by a read after the writes.

use gdrd_hal::{Access, HcaError, LocalSpan, MemoryRegion, MemorySource, ProtectionDomain};
use gdrd_shm::{Segment, ShmError};
use thiserror::Error;

/// One page: registration works in pages anyway.
const LEN_BYTES: u64 = 4096;
/// A read of one byte suffices: no read passes the writes before it (PCIe base specification, ordering rules).
const READ_BYTES: u32 = 1;

/// Why there is no landing place.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LandingError {
    /// The kernel gave no memory.
    #[error("memory for flushes")]
    Memory(#[from] ShmError),
    /// The HCA did not register it.
    #[error("registration for flushes")]
    Registration(#[from] HcaError),
}

/// A few bytes of host memory in a tenant's protection domain. No client can reach them: they have no
/// slot and no remote right, and what lands there is never read.
pub struct FlushLanding {
    region: Box<dyn MemoryRegion>,
    _segment: Segment,
}

impl std::fmt::Debug for FlushLanding {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("FlushLanding")
    }
}

impl FlushLanding {
    /// Registers a page in `pd`; one serves all queue pairs of the domain. May block on the driver.
    ///
    /// # Errors
    /// [`LandingError`].
    pub fn register(pd: &dyn ProtectionDomain) -> Result<Self, LandingError> {
        let segment = Segment::create("gdrd-flush", LEN_BYTES)?;
        let source = MemorySource::Host { fd: segment.fd(), offset: 0, len_bytes: LEN_BYTES };
        let region = pd.register(source, Access { local_write: true, ..Access::default() }, 0)?;
        Ok(Self { region, _segment: segment })
    }

    pub(crate) fn span(&self) -> LocalSpan {
        LocalSpan { lkey: self.region.lkey(), addr: self.region.iova(), len_bytes: READ_BYTES }
    }
}
