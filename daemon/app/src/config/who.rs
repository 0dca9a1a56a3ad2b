//! Whom a rule is about: `uid:1000`, `user:alice`, `gid:100`, `group:gdrd`, `daemon`, `anyone`.

use std::fmt;
use std::str::FromStr;

use gdrd_engine::Subject;
use nix::unistd::{Group, User};
use serde::{Deserialize, Serialize};

/// A user or group, by number or name. Names are looked up when the daemon starts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) enum Who {
    /// A user by number.
    Uid(u32),
    /// A user by name.
    User(String),
    /// A group by number.
    Gid(u32),
    /// A group by name.
    Group(String),
    /// The user that the daemon runs as.
    Daemon,
    /// Everyone whose identity reaches the daemon.
    Anyone,
}

impl Who {
    /// The subject in numbers.
    ///
    /// # Errors
    /// Why the name has none.
    pub(super) fn subject(&self, daemon_uid: u32) -> Result<Subject, String> {
        match self {
            Self::Uid(uid) => Ok(Subject::Uid(*uid)),
            Self::Gid(gid) => Ok(Subject::Gid(*gid)),
            Self::Daemon => Ok(Subject::Uid(daemon_uid)),
            Self::Anyone => Ok(Subject::Anyone),
            Self::User(name) => match User::from_name(name) {
                Ok(Some(user)) => Ok(Subject::Uid(user.uid.as_raw())),
                Ok(None) => Err("this host has no such user".to_owned()),
                Err(errno) => Err(format!("the user cannot be looked up: {errno}")),
            },
            Self::Group(name) => match Group::from_name(name) {
                Ok(Some(group)) => Ok(Subject::Gid(group.gid.as_raw())),
                Ok(None) => Err("this host has no such group".to_owned()),
                Err(errno) => Err(format!("the group cannot be looked up: {errno}")),
            },
        }
    }
}

impl FromStr for Who {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let refused =
            || format!("{text:?} names nobody; use uid:N, user:NAME, gid:N, group:NAME, \"daemon\" or \"anyone\"");
        let (kind, name) = text.split_once(':').unwrap_or((text, ""));
        match kind {
            "daemon" if name.is_empty() => Ok(Self::Daemon),
            "anyone" if name.is_empty() => Ok(Self::Anyone),
            "uid" => name.parse().map(Self::Uid).map_err(|_| refused()),
            "gid" => name.parse().map(Self::Gid).map_err(|_| refused()),
            "user" if !name.is_empty() => Ok(Self::User(name.to_owned())),
            "group" if !name.is_empty() => Ok(Self::Group(name.to_owned())),
            _ => Err(refused()),
        }
    }
}

impl TryFrom<String> for Who {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Who> for String {
    fn from(who: Who) -> Self {
        who.to_string()
    }
}

impl fmt::Display for Who {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Uid(uid) => write!(f, "uid:{uid}"),
            Self::User(name) => write!(f, "user:{name}"),
            Self::Gid(gid) => write!(f, "gid:{gid}"),
            Self::Group(name) => write!(f, "group:{name}"),
            Self::Daemon => f.write_str("daemon"),
            Self::Anyone => f.write_str("anyone"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_prints_as_it_was_read() {
        for text in ["uid:0", "user:alice", "gid:100", "group:gdrd", "daemon", "anyone"] {
            assert_eq!(text.parse::<Who>().map(|who| who.to_string()), Ok(text.to_owned()));
        }
    }

    #[test]
    fn anything_else_is_refused_and_told_what_is_allowed() {
        for text in ["", "root", "uid:", "uid:x", "uid:-1", "user:", "daemon:x", "uid:4294967296"] {
            assert!(text.parse::<Who>().expect_err(text).contains("use uid:N"), "{text}");
        }
    }

    #[test]
    fn root_is_uid_zero_by_name_and_number() {
        assert_eq!(Who::User("root".to_owned()).subject(5), Ok(Subject::Uid(0)));
        assert_eq!(Who::Daemon.subject(5), Ok(Subject::Uid(5)));
    }
}
