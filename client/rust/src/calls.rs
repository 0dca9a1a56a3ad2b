//! One way to make a gRPC call: its deadline, the session token, and the daemon's refusal as a typed error.

use std::error::Error as _;
use std::path::PathBuf;
use std::time::Duration;

use gdrd_proto::SESSION_TOKEN_KEY;
use tonic::metadata::{BinaryMetadataKey, BinaryMetadataValue};
use tonic::{Code, Request, Status, TimeoutExpired};

use crate::error::ClientError;

/// gRPC metadata key in which the daemon puts the stable reason of a refusal.
pub(crate) const REASON_KEY: &str = "gdrd-reason";

/// The daemon's reason for refusing one connection too many; its GOAWAY has it in front of the debug data.
pub(crate) const CONNECTIONS_EXHAUSTED: &str = "CONNECTIONS_EXHAUSTED";

/// A session's token, ready for the metadata. Its Debug form hides it.
#[derive(Clone)]
pub(crate) struct Token(BinaryMetadataValue);

impl std::fmt::Debug for Token {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("Token")
    }
}

impl Token {
    pub(crate) fn new(bytes: &[u8]) -> Self {
        let mut value = BinaryMetadataValue::from_bytes(bytes);
        value.set_sensitive(true);
        Self(value)
    }
}

/// What every call of one client shares.
#[derive(Debug, Clone)]
pub(crate) struct CallContext {
    pub(crate) deadline: Duration,
    pub(crate) socket: PathBuf,
}

impl CallContext {
    /// `message` with the deadline, which both sides keep.
    pub(crate) fn request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        request.set_timeout(self.deadline);
        request
    }

    /// `message` with the deadline and the token of a session.
    pub(crate) fn session_request<T>(&self, token: &Token, message: T) -> Request<T> {
        with_token(token, self.request(message))
    }

    /// An answer that a restart of the daemon has made worthless.
    pub(crate) fn restarted(&self, what: &'static str) -> ClientError {
        ClientError::ConnectionLost { path: self.socket.clone(), source: what.into() }
    }

    /// What the failure of `call` means.
    pub(crate) fn error(&self, call: &'static str, status: Status) -> ClientError {
        let reason = status.metadata().get(REASON_KEY).and_then(|value| value.to_str().ok()).unwrap_or_default();
        if reason.is_empty() {
            match status.code() {
                // The daemon's timer answers DEADLINE_EXCEEDED, tonic's CANCELLED; so does a connection that ended under a call.
                Code::DeadlineExceeded | Code::Cancelled if is_timeout(&status) => {
                    return ClientError::Deadline { call, deadline: self.deadline };
                }
                // A GOAWAY with ENHANCE_YOUR_CALM: the daemon's word for one connection too many, where it saw no call.
                Code::ResourceExhausted if is_one_too_many(&status) => {
                    let reason = CONNECTIONS_EXHAUSTED.to_owned();
                    let message = "this user, or the daemon, has as many gRPC connections as it may".to_owned();
                    return ClientError::Refused { call, code: Code::ResourceExhausted, reason, message };
                }
                // Only a connection that failed has a source: the daemon's own answers come from the wire.
                _ if status.source().is_some() => {
                    return ClientError::of_connection(self, call, Box::new(status));
                }
                _ => {}
            }
        }
        ClientError::Refused {
            call,
            code: status.code(),
            reason: reason.to_owned(),
            message: status.message().to_owned(),
        }
    }
}

/// Whether time was up, of those who say so.
fn is_timeout(status: &Status) -> bool {
    let mut cause = status.source();
    while let Some(other) = cause.filter(|cause| !cause.is::<TimeoutExpired>()) {
        cause = other.source();
    }
    cause.is_some() || status.source().is_none()
}

/// Whether the daemon said so in its GOAWAY. HTTP/2 ends connections with that code for reasons of its own too.
fn is_one_too_many(status: &Status) -> bool {
    let causes = std::iter::successors(status.source(), |&cause| cause.source());
    causes.map(ToString::to_string).any(|cause| cause.contains(CONNECTIONS_EXHAUSTED))
}

/// Adds the session's token to a request.
pub(crate) fn with_token<T>(token: &Token, mut request: Request<T>) -> Request<T> {
    request.metadata_mut().insert_bin(BinaryMetadataKey::from_static(SESSION_TOKEN_KEY), token.0.clone());
    request
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt as _;

    use super::*;

    fn context() -> CallContext {
        CallContext { deadline: Duration::from_secs(3), socket: "/run/gdrd/gdrd.sock".into() }
    }

    #[test]
    fn a_refusal_keeps_code_reason_and_message() {
        let mut status = Status::new(Code::NotFound, "no lease 7");
        status.metadata_mut().insert(REASON_KEY, "LEASE_UNKNOWN".parse().unwrap());
        let error = context().error("Buffers.Release", status);
        assert_eq!(error.reason(), Some("LEASE_UNKNOWN"));
        assert!(matches!(error, ClientError::Refused { code: Code::NotFound, .. }), "{error}");
    }

    #[test]
    fn a_timeout_of_either_side_is_a_deadline() {
        for code in [Code::DeadlineExceeded, Code::Cancelled] {
            let error = context().error("Host.Status", Status::new(code, "Timeout expired"));
            assert!(matches!(error, ClientError::Deadline { .. }), "{error}");
        }
    }

    #[test]
    fn a_call_cancelled_by_the_end_of_its_connection_is_no_timeout() {
        let timeout = Status::from_error(Box::new(TimeoutExpired(())));
        assert_eq!(timeout.code(), Code::Cancelled);
        assert!(matches!(context().error("Host.Status", timeout), ClientError::Deadline { .. }));
        let mut ended = Status::cancelled("operation was canceled");
        ended.set_source(std::sync::Arc::new(std::io::Error::other("connection closed")));
        assert!(matches!(context().error("Host.Status", ended), ClientError::ConnectionLost { .. }));
    }

    #[test]
    fn a_broken_connection_is_lost_and_a_plain_unavailable_a_refusal() {
        let broken = Status::from_error(Box::new(std::io::Error::from(std::io::ErrorKind::ConnectionReset)));
        assert!(context().error("Host.Status", broken).is_lost_connection());
        let refused = context().error("Host.Status", Status::unavailable("draining"));
        assert!(matches!(refused, ClientError::Refused { code: Code::Unavailable, .. }), "{refused}");
    }

    /// What a client says whose every connection is ended by a GOAWAY with ENHANCE_YOUR_CALM and this debug data.
    async fn after_goaway(debug_data: &'static str) -> ClientError {
        let folder = tempfile::tempdir().unwrap();
        let dir = crate::RuntimeDir::new(folder.path());
        let listener = tokio::net::UnixListener::bind(dir.grpc_socket()).unwrap();
        let daemon = tokio::spawn(async move {
            // RFC 9113: empty SETTINGS (4.1, 6.5), then GOAWAY (6.8) with last stream 0 and code 0xb.
            let mut frames = vec![0, 0, 0, 4, 0, 0, 0, 0, 0];
            frames.extend([0, 0, u8::try_from(8 + debug_data.len()).unwrap(), 7, 0, 0, 0, 0, 0]);
            frames.extend([0, 0, 0, 0, 0, 0, 0, 0xb]);
            frames.extend(debug_data.as_bytes());
            let mut kept = Vec::new();
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                stream.write_all(&frames).await.unwrap();
                kept.push(stream);
            }
        });
        let error = crate::ClientOptions::default().runtime_dir(dir).connect().await.unwrap_err();
        daemon.abort();
        error
    }

    #[tokio::test]
    async fn only_a_goaway_that_says_so_is_one_connection_too_many() {
        let error = after_goaway("CONNECTIONS_EXHAUSTED: uid 7 has as many as it may").await;
        assert_eq!(error.reason(), Some(CONNECTIONS_EXHAUSTED), "{error}");
        let error = after_goaway("too_many_resets").await;
        assert!(error.is_lost_connection(), "{error:?}");
    }

    #[test]
    fn the_token_is_in_no_debug_output() {
        let request = context().session_request(&Token::new(&[0xab; 32]), ());
        assert!(request.metadata().get_bin(SESSION_TOKEN_KEY).is_some());
        assert_eq!(format!("{:?}", Token::new(b"secret")), "Token");
    }
}
