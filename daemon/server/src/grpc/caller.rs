//! From a call to who makes it: the session that its token proves, or the peer of its connection.

use gdrd_engine::{Engine, SessionId, Token, Viewer};
use gdrd_proto::SESSION_TOKEN_KEY;
use tonic::{Code, Request, Status};

use super::connection::Caller;
use crate::status::{of_engine, status};

/// The session of a call.
///
/// # Errors
/// `Unauthenticated`: no token, no session of it, or another user's.
pub(super) fn session<T>(engine: &Engine, request: &Request<T>) -> Result<SessionId, Status> {
    let token = token(request)?.ok_or_else(|| {
        status(
            Code::Unauthenticated,
            "SESSION_TOKEN_MISSING",
            format!("this call needs the metadata key {SESSION_TOKEN_KEY}; connect to the session socket first"),
        )
    })?;
    engine.session_of_token(&token, caller(request)?.uid).map_err(|refusal| of_engine(&refusal))
}

/// Who looks at a list: the session where there is a token, else the peer of the connection.
///
/// # Errors
/// As [`session`], and `Unauthenticated` for a peer that cannot be told.
pub(super) fn viewer<T>(engine: &Engine, request: &Request<T>) -> Result<Viewer, Status> {
    if token(request)?.is_some() {
        return session(engine, request).map(Viewer::Session);
    }
    match caller(request)?.peer.as_ref() {
        Ok(peer) => Ok(Viewer::Peer(peer.clone())),
        Err(problem) => Err(status(Code::Unauthenticated, "PEER_UNKNOWN", problem.clone())),
    }
}

fn caller<T>(request: &Request<T>) -> Result<&Caller, Status> {
    request.extensions().get().ok_or_else(|| status(Code::Internal, "INTERNAL", "the connection names no peer"))
}

/// The token a call carries. Neither it nor what is wrong with it goes into any message.
fn token<T>(request: &Request<T>) -> Result<Option<Token>, Status> {
    let Some(value) = request.metadata().get_bin(SESSION_TOKEN_KEY) else { return Ok(None) };
    let bytes = value.to_bytes().ok();
    let token = bytes.and_then(|bytes| Token::from_slice(&bytes));
    token.map(Some).ok_or_else(|| {
        let message = format!("metadata key {SESSION_TOKEN_KEY} must be {} bytes", Token::LEN);
        status(Code::Unauthenticated, "SESSION_TOKEN_INVALID", message)
    })
}

#[cfg(test)]
mod tests {
    use tonic::metadata::MetadataValue;

    use super::*;

    fn request(token: Option<&[u8]>) -> Request<()> {
        let mut request = Request::new(());
        if let Some(token) = token {
            request.metadata_mut().insert_bin(SESSION_TOKEN_KEY, MetadataValue::from_bytes(token));
        }
        request
    }

    #[test]
    fn token_of_the_right_length_is_taken() {
        assert_eq!(token(&request(Some(&[7; Token::LEN]))).expect("a token"), Some(Token::new([7; Token::LEN])));
        assert_eq!(token(&request(None)).expect("no token is no error"), None);
    }

    #[test]
    fn token_of_another_length_is_refused_without_showing_it() {
        let refused = token(&request(Some(b"sesame-sesame"))).expect_err("too short");
        assert_eq!(refused.code(), Code::Unauthenticated);
        assert!(!format!("{refused:?}").contains("sesame-sesame"));
    }
}
