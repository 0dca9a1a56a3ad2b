//! Identities that cross the engine's edge. Numbers are never used again while the daemon lives, nor by the one that takes
//! up its journal.

use std::fmt;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

macro_rules! number {
    ($(#[$doc:meta])* $name:ident, $inner:ty) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

number!(
    /// One client connection.
    SessionId,
    u64
);
number!(
    /// One lease of a buffer.
    LeaseId,
    u64
);
number!(
    /// One brokered queue pair.
    QueuePairId,
    u64
);
number!(
    /// Memory that a client brought along.
    MemoryId,
    u64
);
number!(
    /// One registration of a range.
    RegistrationId,
    u64
);
number!(
    /// Makes stale use visible: of a lease, or of a registration. Only grows.
    Generation,
    u64
);
number!(
    /// The tenant's index of a registration: what ring entries name, and its place in the generation page.
    SlotId,
    u32
);

/// Device number of a character device node (`st_rdev`, stat(2)).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceNumber {
    /// Major number.
    pub major: u32,
    /// Minor number.
    pub minor: u32,
}

/// Remote key of a registration: a capability for peers, so it is never printed.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct RemoteKey(pub u32);

impl fmt::Debug for RemoteKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RemoteKey(hidden)")
    }
}

/// Proves a session on gRPC. Never printed, and never stored: the engine keeps its digest.
#[derive(Clone, Copy)]
pub struct Token([u8; Self::LEN]);

impl Token {
    /// Length in bytes.
    pub const LEN: usize = 32;

    /// A token of these bytes.
    #[must_use]
    pub fn new(bytes: [u8; Self::LEN]) -> Self {
        Self(bytes)
    }

    /// A token as it came over the wire; `None` unless it is exactly [`Token::LEN`] bytes.
    #[must_use]
    pub fn from_slice(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }

    /// Its bytes, for the wire.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; Self::LEN] {
        &self.0
    }

    pub(crate) fn digest(&self) -> TokenDigest {
        TokenDigest(Sha256::digest(self.0).into())
    }
}

impl PartialEq for Token {
    fn eq(&self, other: &Self) -> bool {
        // How long it takes tells about digests, which nobody can choose.
        self.digest() == other.digest()
    }
}

impl Eq for Token {}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(hidden)")
    }
}

/// SHA-256 of a token. A token has 256 random bits, so its digest leads nobody to it, and looking one up by its digest
/// takes a time that tells nothing about the token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct TokenDigest([u8; 32]);

#[cfg(test)]
impl TokenDigest {
    pub(crate) const ZERO: Self = Self([0; 32]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_do_not_show_in_debug_output() {
        assert!(!format!("{:?}", Token::new([0xab; 32])).contains("171"));
        assert!(!format!("{:?}", RemoteKey(0xabcd)).contains(&0xabcd_u32.to_string()));
    }

    #[test]
    fn tokens_of_another_length_are_not_taken() {
        assert!(Token::from_slice(&[1; 31]).is_none());
        assert!(Token::from_slice(&[1; 33]).is_none());
        assert_eq!(Token::from_slice(&[1; 32]), Some(Token::new([1; 32])));
    }

    #[test]
    fn tokens_differ_by_any_byte() {
        for at in 0..Token::LEN {
            let mut bytes = [7; Token::LEN];
            bytes[at] ^= 0x80;
            assert_ne!(Token::new(bytes), Token::new([7; Token::LEN]));
        }
    }
}
