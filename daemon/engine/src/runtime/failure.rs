//! From backend errors to what the state machine tells apart.

use gdrd_hal::{GpuMemoryError, HcaError};

use crate::broker::{BrokerError, LandingError};
use crate::core::{Failure, FailureKind, HcaIndex};

pub(super) fn of_gpu(error: &GpuMemoryError) -> Failure {
    let kind = match error {
        GpuMemoryError::OutOfMemory { .. } => FailureKind::OutOfMemory,
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

/// The kernel had no memory or descriptors for us.
pub(super) fn of_kernel(what: &str, error: &dyn std::fmt::Display) -> Failure {
    out_of_memory(&format_args!("{what}: {error}"))
}

pub(super) fn out_of_memory(error: &dyn std::fmt::Display) -> Failure {
    Failure { kind: FailureKind::OutOfMemory, hca: None, message: error.to_string() }
}

fn on(hca: HcaIndex, kind: FailureKind, error: &dyn std::fmt::Display) -> Failure {
    Failure { kind, hca: Some(hca), message: error.to_string() }
}
