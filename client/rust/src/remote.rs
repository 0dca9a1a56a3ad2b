//! What a peer must know of a buffer to write to it: a registration as bytes that a job sends by its own means.

use std::fmt;

use gdrd_proto::v1;
use gdrd_ring::RemoteSpan;
use prost::Message as _;

use crate::error::ClientError;

/// A registration of a buffer in another process, on this host or another. Its bytes carry the rkey, a capability:
/// send them only to whom may write, and do not log them.
#[derive(Clone, PartialEq)]
pub struct RemoteBuffer(v1::Registration);

impl RemoteBuffer {
    pub(crate) fn new(registration: v1::Registration) -> Self {
        Self(registration)
    }

    /// The form to send.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        self.0.encode_to_vec()
    }

    /// Reads what [`RemoteBuffer::to_bytes`] gave at the peer.
    ///
    /// # Errors
    /// [`ClientError::InvalidArgument`] when the bytes are none of its.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, ClientError> {
        let registration = v1::Registration::decode(bytes).map_err(|source| ClientError::InvalidArgument {
            what: format!("these {} bytes are no registration of a peer: {source}", bytes.len()),
        })?;
        if registration.length_bytes == 0 || registration.iova.checked_add(registration.length_bytes).is_none() {
            return Err(ClientError::InvalidArgument { what: "a peer's registration of impossible length".into() });
        }
        Ok(Self(registration))
    }

    /// Length of the registration, bytes.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.0.length_bytes
    }

    /// Remote address of `len_bytes` at `offset`.
    ///
    /// # Errors
    /// [`ClientError::InvalidArgument`] when the range is not in the registration.
    pub fn span(&self, offset: u64, len_bytes: u64) -> Result<RemoteSpan, ClientError> {
        let end = offset.checked_add(len_bytes);
        if end.is_none_or(|end| end > self.0.length_bytes) {
            return Err(ClientError::InvalidArgument {
                what: format!(
                    "{len_bytes} bytes at offset {offset} are outside the peer's registration of {} bytes",
                    self.0.length_bytes
                ),
            });
        }
        // `from_bytes` saw that iova + length does not wrap; our own registrations come from the daemon.
        Ok(RemoteSpan { rkey: self.0.rkey, iova: self.0.iova.wrapping_add(offset) })
    }

    /// This registration's address and key, without a range check: for tests of what the far HCA refuses.
    #[must_use]
    pub fn span_unchecked(&self, offset: u64) -> RemoteSpan {
        RemoteSpan { rkey: self.0.rkey, iova: self.0.iova.wrapping_add(offset) }
    }
}

impl fmt::Debug for RemoteBuffer {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("RemoteBuffer")
            .field("hca", &self.0.hca)
            .field("iova", &self.0.iova)
            .field("length_bytes", &self.0.length_bytes)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn buffer(iova: u64, length_bytes: u64) -> RemoteBuffer {
        RemoteBuffer::new(v1::Registration { iova, length_bytes, rkey: 0xdead_beef, ..Default::default() })
    }

    #[test]
    fn the_bytes_bring_the_registration_back_and_debug_hides_the_key() {
        let sent = buffer(4096, 100);
        assert_eq!(RemoteBuffer::from_bytes(&sent.to_bytes()).unwrap(), sent);
        let text = format!("{sent:?} {:?}", sent.span(0, 1).unwrap());
        assert!(!text.contains("3735928559") && !text.contains("dead"), "{text}");
    }

    #[test]
    fn ranges_are_checked_and_iova_is_added() {
        let remote = buffer(4096, 100);
        assert_eq!(remote.span(60, 40).unwrap().iova, 4156);
        for (offset, len) in [(61, 40), (101, 0), (u64::MAX, 1)] {
            assert!(remote.span(offset, len).is_err(), "{offset} {len}");
        }
    }

    #[test]
    fn bytes_of_something_else_are_refused() {
        for bytes in [&b"\xff\xff"[..], &b""[..], &buffer(u64::MAX, 2).to_bytes()[..]] {
            assert!(RemoteBuffer::from_bytes(bytes).is_err());
        }
    }
}
