//! From backend errors to what the state machine tells apart.

use std::error::Error;
use std::io;

use gdrd_hal::{GpuMemoryError, HcaError, text_with_causes};
use rustix::io::Errno;

use crate::broker::{BrokerError, LandingError};
use crate::core::{Failure, FailureKind, HcaIndex};

pub(super) fn of_gpu(error: &GpuMemoryError) -> Failure {
    let kind = match error {
        GpuMemoryError::OutOfMemory { .. } => FailureKind::OutOfMemory,
        GpuMemoryError::OutOfDescriptors { .. } => FailureKind::OutOfDescriptors,
        GpuMemoryError::Lost { .. } => FailureKind::Lost,
        // Lengths and UUIDs are ours, not the caller's.
        _ => FailureKind::Driver,
    };
    Failure { kind, hca: None, message: error.to_string() }
}

pub(super) fn of_hca(hca: HcaIndex, error: &HcaError) -> Failure {
    let kind = match error {
        HcaError::Unsupported { .. } => FailureKind::Unsupported,
        HcaError::Invalid { .. } => FailureKind::Invalid,
        HcaError::Exhausted { .. } => FailureKind::Exhausted,
        HcaError::Gone { .. } => FailureKind::Lost,
        HcaError::Unreachable { .. } => FailureKind::Unreachable,
        _ => FailureKind::Driver,
    };
    Failure { kind, hca: Some(hca), message: error.to_string() }
}

pub(super) fn of_broker(hca: HcaIndex, error: &BrokerError) -> Failure {
    match error {
        BrokerError::CompletionQueue { source, .. } => of_hca(hca, source),
        BrokerError::Exhausted { .. } => on(hca, FailureKind::Exhausted, error),
        BrokerError::Gone { .. } => on(hca, FailureKind::Lost, error),
        _ => on(hca, FailureKind::Driver, error),
    }
}

pub(super) fn of_landing(hca: HcaIndex, error: &LandingError) -> Failure {
    match error {
        LandingError::Registration(source) => of_hca(hca, source),
        _ => on(hca, FailureKind::Exhausted, error),
    }
}

/// The kernel had no memory for us, or no descriptor.
pub(super) fn of_kernel(what: &str, error: &(dyn Error + 'static)) -> Failure {
    let is_descriptors = |cause: &(dyn Error + 'static)| {
        let io = cause.downcast_ref::<io::Error>().and_then(Errno::from_io_error);
        let errno = io.or_else(|| cause.downcast_ref::<Errno>().copied());
        matches!(errno, Some(Errno::MFILE | Errno::NFILE))
    };
    let mut causes = std::iter::successors(Some(error), |&cause| cause.source());
    let kind = if causes.any(is_descriptors) { FailureKind::OutOfDescriptors } else { FailureKind::OutOfMemory };
    Failure { kind, hca: None, message: format!("{what}: {}", text_with_causes(error)) }
}

fn on(hca: HcaIndex, kind: FailureKind, error: &dyn std::fmt::Display) -> Failure {
    Failure { kind, hca: Some(hca), message: error.to_string() }
}

#[cfg(test)]
mod tests {
    use gdrd_shm::ShmError;

    use super::*;

    #[test]
    fn a_lack_of_descriptors_is_told_from_one_of_memory_however_deep_it_lies() {
        for (errno, kind) in [
            (Errno::MFILE, FailureKind::OutOfDescriptors),
            (Errno::NFILE, FailureKind::OutOfDescriptors),
            (Errno::NOMEM, FailureKind::OutOfMemory),
        ] {
            let deep = ShmError::Kernel { call: "memfd_create", len_bytes: 4096, source: errno };
            for error in [&deep as &(dyn Error + 'static), &errno, &io::Error::from(errno)] {
                let failure = of_kernel("ring", error);
                assert_eq!(failure.kind, kind, "{}", failure.message);
                assert!(failure.message.contains(&errno.to_string()), "{}", failure.message);
            }
        }
    }
}
