//! What outlives the daemon: descriptors that somebody keeps for it, and the file of its journal.
//!
//! Role: the seam to whoever keeps them, systemd's descriptor store or `gdrd keeper`. Must not know: their protocol.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// Characters of a name. LISTEN_FDNAMES holds all names in one string of at most 128 KiB (MAX_ARG_STRLEN, execve(2)).
const NAME_CHARS: usize = 4;
const DIGITS: u64 = 36;
/// How many names there are.
const NAMES: u64 = DIGITS.pow(4);

/// Name of a kept descriptor: four of the characters `0` to `9` and `a` to `z`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Name(u32);

impl Name {
    /// The name of a number; numbers 1,679,616 apart have the same.
    pub(crate) fn of(number: u64) -> Self {
        Self(u32::try_from(number % NAMES).unwrap_or_default())
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut left = self.0;
        let mut text = [0_u8; NAME_CHARS];
        for place in text.iter_mut().rev() {
            // The remainder of 36 is a digit or a letter.
            let digit = u8::try_from(left % 36).unwrap_or_default();
            *place = if digit < 10 { b'0' + digit } else { b'a' + digit - 10 };
            left /= 36;
        }
        text.iter().try_for_each(|byte| fmt::Write::write_char(f, char::from(*byte)))
    }
}

/// No name of a kept descriptor.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a name of 4 characters 0-9 or a-z")]
pub struct NotAName(String);

impl FromStr for Name {
    type Err = NotAName;

    fn from_str(text: &str) -> Result<Self, NotAName> {
        let shown = || NotAName(text.chars().take(16).collect());
        let plain = |byte: u8| byte.is_ascii_digit() || byte.is_ascii_lowercase();
        if text.len() != NAME_CHARS || !text.bytes().all(plain) {
            return Err(shown());
        }
        u32::from_str_radix(text, 36).map(Self).map_err(|_| shown())
    }
}

impl TryFrom<String> for Name {
    type Error = NotAName;

    fn try_from(text: String) -> Result<Self, NotAName> {
        text.parse()
    }
}

impl From<Name> for String {
    fn from(name: Name) -> Self {
        name.to_string()
    }
}

/// Whether the keeper looks after a descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Watch {
    /// It is kept whatever its poll(2) says: memory.
    No,
    /// It is dropped once it hangs up, so that a client which died meanwhile is a missing descriptor: sockets.
    HangUp,
}

/// Keeps descriptors while there is no daemon.
pub trait Keeper: Send + Sync + fmt::Debug {
    /// Asks to keep a duplicate of `fd`. May block while the keeper is busy.
    ///
    /// # Errors
    /// When the keeper cannot be reached.
    fn store(&self, name: Name, fd: BorrowedFd<'_>, watch: Watch) -> io::Result<()>;

    /// Asks to drop what has that name; nothing when there is none.
    ///
    /// # Errors
    /// As [`Keeper::store`].
    fn remove(&self, name: Name) -> io::Result<()>;

    /// Returns once everything asked before is done.
    ///
    /// # Errors
    /// As [`Keeper::store`], and when it does not answer in time.
    fn barrier(&self) -> io::Result<()>;
}

/// A daemon's past and future: what the one before left, and who keeps what this one has.
#[derive(Debug)]
pub struct Continuity {
    /// Keeps descriptors.
    pub keeper: Arc<dyn Keeper>,
    /// File of the journal, in a folder of this daemon alone.
    pub journal: PathBuf,
    /// Descriptors that an earlier daemon had kept.
    pub kept: BTreeMap<Name, OwnedFd>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_has_a_name_that_reads_back() {
        for number in [0, 9, 10, 35, 36, 12_345, NAMES - 1] {
            let name = Name::of(number);
            assert_eq!(name.to_string().len(), NAME_CHARS);
            assert_eq!(name.to_string().parse(), Ok(name));
        }
        assert_eq!((Name::of(0).to_string(), Name::of(NAMES - 1).to_string()), ("0000".into(), "zzzz".into()));
        assert_eq!(Name::of(NAMES + 7), Name::of(7));
    }

    #[test]
    fn other_texts_are_no_names() {
        for text in ["", "abc", "abcde", "aBcD", "ab:d", "+abc", "grpc!", "äbc"] {
            assert!(text.parse::<Name>().is_err(), "{text}");
        }
    }
}
