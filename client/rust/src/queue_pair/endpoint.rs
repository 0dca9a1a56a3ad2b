//! The address of one side of a connection, as bytes that a job sends by its own means.

use gdrd_proto::v1;
use prost::Message as _;

use crate::error::ClientError;

/// Longest endpoint blob that is read, bytes. A real one has about 60.
const MAX_BLOB_BYTES: usize = 1024;

/// An endpoint: qp_num, port, GID, LID, PSN, MTU.
#[derive(Debug, Clone, PartialEq)]
pub struct Endpoint(v1::Endpoint);

impl Endpoint {
    pub(crate) fn new(message: v1::Endpoint) -> Self {
        Self(message)
    }

    /// The fields.
    #[must_use]
    pub fn message(&self) -> &v1::Endpoint {
        &self.0
    }

    /// The blob to send to the peer.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        self.0.encode_to_vec()
    }

    /// Reads a blob of [`Endpoint::to_bytes`], made on this host or another.
    ///
    /// # Errors
    /// [`ClientError::InvalidArgument`] when the bytes are no endpoint.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, ClientError> {
        let refuse = |why: String| ClientError::InvalidArgument {
            what: format!("these {} bytes are no endpoint of a queue pair: {why}", bytes.len()),
        };
        if bytes.len() > MAX_BLOB_BYTES {
            return Err(refuse(format!("one has at most {MAX_BLOB_BYTES}")));
        }
        let message = v1::Endpoint::decode(bytes).map_err(|source| refuse(source.to_string()))?;
        if message.gid.len() != 16 {
            return Err(refuse(format!("its GID has {} bytes, not 16", message.gid.len())));
        }
        Ok(Self(message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_blob_brings_the_endpoint_back() {
        let message = v1::Endpoint { qp_num: 7, gid: vec![1; 16], psn: 3, mtu_bytes: 4096, ..Default::default() };
        let endpoint = Endpoint::new(message);
        assert_eq!(Endpoint::from_bytes(&endpoint.to_bytes()).unwrap(), endpoint);
    }

    #[test]
    fn other_bytes_are_refused() {
        for bytes in [&b""[..], &[0xff; 9], &[0; 2000]] {
            let error = Endpoint::from_bytes(bytes).unwrap_err();
            assert!(error.to_string().contains("no endpoint"), "{error}");
        }
    }
}
