//! The suite that every backend passes, hardware or not.
//!
//! A backend implements [`Fixture`] and calls [`crate::conformance_suite!`] in a test file, with the names of
//! the cases that its capabilities rule out. The list is asserted exactly: a case that could run and
//! is listed fails, and so does one that cannot run and is not listed. Cases state what all providers have in
//! common; what may differ between them (how depths are rounded, what is left in a buffer after an error)
//! is not asserted.
//!
//! Must not know: any backend.

mod adopted;
mod cases;
mod datagram;
mod errors;
mod gpu;
mod queues;
mod registration;
mod rig;
mod shared_receive;
mod states;
mod transfer;

use std::fs::File;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

pub use cases::CASES;

use crate::{AtomicScope, GpuMemory, GpuUuid, Hca, QueuePairType, WorkStatus};

/// What a backend brings to the suite.
pub trait Fixture {
    /// Two HCAs whose first ports are active and reach each other; the same one twice where there is only one.
    fn hcas(&self) -> [Arc<dyn Hca>; 2];

    /// Zeroed host memory as a memfd with F_SEAL_SHRINK.
    fn host_memory(&self, len_bytes: u64) -> OwnedFd;

    /// GPU memory, where the backend has any, and one GPU of it with at least 64 MiB free.
    fn gpu(&self) -> Option<(Arc<dyn GpuMemory>, GpuUuid)>;

    /// Statuses that this provider gives where the specification names `specified`; none for one that keeps to it.
    /// Each is a known fault of a driver, with its source.
    fn gives_instead_of(&self, specified: WorkStatus) -> &'static [WorkStatus] {
        let _ = specified;
        &[]
    }

    /// Reads memory by its fd. Plain file reads fit memfds.
    fn read(&self, memory: BorrowedFd<'_>, offset: u64, to: &mut [u8]) {
        file(memory).read_exact_at(to, offset).expect("the fixture's memory can be read");
    }

    /// Writes memory by its fd. Plain file writes fit memfds.
    fn write(&self, memory: BorrowedFd<'_>, offset: u64, from: &[u8]) {
        file(memory).write_all_at(from, offset).expect("the fixture's memory can be written");
    }
}

fn file(memory: BorrowedFd<'_>) -> File {
    File::from(memory.try_clone_to_owned().expect("the test process has a descriptor left"))
}

/// What a case asks of the backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Need {
    /// RC queue pairs.
    Rc,
    /// No RC queue pairs.
    NoRc,
    /// UD queue pairs.
    Ud,
    /// No UD queue pairs.
    NoUd,
    /// Fetch-add and compare-swap.
    Atomics,
    /// Neither of them.
    NoAtomics,
    /// The iova asked for is honoured.
    Iova,
    /// The provider sets the iova.
    NoIova,
    /// GPU memory.
    Gpu,
    /// GPU memory as dma-buf, and HCAs that register it.
    DmaBuf,
    /// GPU memory as dma-buf, and HCAs that cannot register it.
    NoDmaBuf,
    /// Completion queues with an event fd.
    EventFd,
    /// Shared receive queues.
    SharedReceives,
    /// No shared receive queues.
    NoSharedReceives,
}

impl Need {
    fn is_met(self, fixture: &dyn Fixture) -> bool {
        let hcas = fixture.hcas();
        let capabilities = hcas[0].capabilities();
        let has = |qp_type| capabilities.queue_pair_types.contains(&qp_type);
        let gpu_dma_buf = || fixture.gpu().is_some_and(|(memory, _)| memory.capabilities().dma_buf);
        match self {
            Self::Rc => has(QueuePairType::Rc),
            Self::NoRc => !has(QueuePairType::Rc),
            Self::Ud => has(QueuePairType::Ud),
            Self::NoUd => !has(QueuePairType::Ud),
            Self::Atomics => capabilities.atomics != AtomicScope::None,
            Self::NoAtomics => capabilities.atomics == AtomicScope::None,
            Self::Iova => capabilities.iova_honoured,
            Self::NoIova => !capabilities.iova_honoured,
            Self::Gpu => fixture.gpu().is_some(),
            Self::DmaBuf => gpu_dma_buf() && capabilities.dma_buf,
            Self::NoDmaBuf => gpu_dma_buf() && !capabilities.dma_buf,
            Self::SharedReceives => capabilities.max_shared_receives > 0,
            Self::NoSharedReceives => capabilities.max_shared_receives == 0,
            Self::EventFd => hcas[0].create_cq(1).is_ok_and(|cq| cq.event_fd().is_some()),
        }
    }
}

/// One case.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// Its name: the behaviour it states.
    pub name: &'static str,
    /// What it asks of the backend.
    pub needs: &'static [Need],
    /// Panics where the backend behaves otherwise.
    pub run: fn(&dyn Fixture),
}

/// Runs the case of that name, or asserts that the backend cannot and says so.
pub fn run(name: &str, fixture: &dyn Fixture, skipped: &[&str]) {
    run_unless(skipped.contains(&name), name, fixture);
}

/// Runs the case of that name where it is one of these, or asserts that the backend cannot.
pub fn run_only(name: &str, fixture: &dyn Fixture, only: &[&str]) {
    run_unless(!only.contains(&name), name, fixture);
}

fn run_unless(is_listed: bool, name: &str, fixture: &dyn Fixture) {
    let case = CASES.iter().find(|case| case.name == name).expect("the suite's macro names its own cases");
    let unmet: Vec<_> = case.needs.iter().filter(|need| !need.is_met(fixture)).collect();
    assert_eq!(is_listed, !unmet.is_empty(), "{name}: listed as skipped {is_listed}, needs not met {unmet:?}");
    if unmet.is_empty() {
        (case.run)(fixture);
    }
}

/// Asserts that a list of cases names cases, and each once.
pub fn check_listed(listed: &[&str]) {
    for name in listed {
        assert!(CASES.iter().any(|case| case.name == *name), "{name} is no case of the suite");
        assert_eq!(listed.iter().filter(|other| *other == name).count(), 1, "{name} is listed twice");
    }
}
