//! The one table from errors to gRPC: a code for what the caller can do, a stable reason for programs, a sentence for
//! people. docs/errors.md is this table for readers.

use gdrd_engine::{EngineError, ErrorKind};
use tonic::metadata::MetadataValue;
use tonic::{Code, Status};
use tracing::error;

/// Metadata key of the stable reason.
pub const REASON_KEY: &str = "gdrd-reason";

/// The code of a kind of error. Caller's faults, missing hardware and our bugs never share one.
#[must_use]
pub fn code_of(kind: ErrorKind) -> Code {
    match kind {
        ErrorKind::InvalidArgument => Code::InvalidArgument,
        ErrorKind::NotFound => Code::NotFound,
        ErrorKind::PermissionDenied => Code::PermissionDenied,
        ErrorKind::Unauthenticated => Code::Unauthenticated,
        ErrorKind::FailedPrecondition => Code::FailedPrecondition,
        ErrorKind::ResourceExhausted => Code::ResourceExhausted,
        ErrorKind::Unavailable => Code::Unavailable,
        ErrorKind::Aborted => Code::Aborted,
        ErrorKind::DeadlineExceeded => Code::DeadlineExceeded,
        // A kind without a row here is a bug of ours.
        _ => Code::Internal,
    }
}

/// A status with its reason in the metadata.
#[must_use]
pub(crate) fn status(code: Code, reason: &'static str, message: impl Into<String>) -> Status {
    let mut status = Status::new(code, message);
    status.metadata_mut().insert(REASON_KEY, MetadataValue::from_static(reason));
    status
}

/// The reason of a status; empty where the transport made it.
#[must_use]
pub(crate) fn reason_of(status: &Status) -> &str {
    status.metadata().get(REASON_KEY).and_then(|reason| reason.to_str().ok()).unwrap_or_default()
}

/// What a call answers with when the engine refuses. Our own bugs are logged, everything else is the caller's news.
#[must_use]
pub(crate) fn of_engine(refusal: &EngineError) -> Status {
    let code = code_of(refusal.kind());
    if code == Code::Internal {
        error!(reason = refusal.reason(), "{refusal}");
    }
    status(code, refusal.reason(), refusal.to_string())
}

/// A request whose field cannot be right.
#[must_use]
pub(crate) fn bad_argument(message: impl Into<String>) -> Status {
    status(Code::InvalidArgument, "BAD_ARGUMENT", message)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const KINDS: [ErrorKind; 10] = [
        ErrorKind::InvalidArgument,
        ErrorKind::NotFound,
        ErrorKind::PermissionDenied,
        ErrorKind::Unauthenticated,
        ErrorKind::FailedPrecondition,
        ErrorKind::ResourceExhausted,
        ErrorKind::Unavailable,
        ErrorKind::Aborted,
        ErrorKind::DeadlineExceeded,
        ErrorKind::Internal,
    ];

    #[test]
    fn every_kind_has_a_code_of_its_own() {
        let codes: BTreeSet<i32> = KINDS.iter().map(|kind| i32::from(code_of(*kind))).collect();
        assert_eq!(codes.len(), KINDS.len());
    }

    #[test]
    fn refusal_carries_code_reason_and_sentence() {
        let status = of_engine(&EngineError::UnknownLease { lease: 7 });
        assert_eq!(status.code(), Code::NotFound);
        assert_eq!(status.metadata().get(REASON_KEY).and_then(|reason| reason.to_str().ok()), Some("LEASE_UNKNOWN"));
        assert!(status.message().contains("lease 7"));
    }
}
