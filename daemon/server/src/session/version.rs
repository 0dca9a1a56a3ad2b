//! The versions that client and daemon must share, and what to say where they do not.

use gdrd_proto::{API_VERSION, v1};
use gdrd_ring::{GENERATION_PAGE_VERSION, RING_VERSION};

/// What this daemon speaks.
pub(crate) const VERSIONS: v1::Versions =
    v1::Versions { api: API_VERSION, ring: RING_VERSION, generation_page: GENERATION_PAGE_VERSION };

/// Release of this daemon.
pub(crate) const DAEMON_VERSION: &str = env!("CARGO_PKG_VERSION");

/// Refuses a client that speaks another version of anything.
///
/// # Errors
/// A sentence that names both sides and which one to upgrade.
pub(super) fn check(client: &v1::Versions) -> Result<(), String> {
    let pairs = [
        ("api", client.api, VERSIONS.api),
        ("ring", client.ring, VERSIONS.ring),
        ("generation page", client.generation_page, VERSIONS.generation_page),
    ];
    let Some((what, theirs, ours)) = pairs.into_iter().find(|(_, theirs, ours)| theirs != ours) else {
        return Ok(());
    };
    let older = if theirs < ours { "the client library" } else { "the daemon" };
    Err(format!("client speaks {what} version {theirs}, gdrd {DAEMON_VERSION} speaks {ours}; upgrade {older}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_versions_pass() {
        assert_eq!(check(&VERSIONS), Ok(()));
    }

    #[test]
    fn older_client_is_told_to_upgrade_itself() {
        let message = check(&v1::Versions { ring: RING_VERSION - 1, ..VERSIONS }).expect_err("another ring");
        assert!(message.contains("client speaks ring version 0"), "{message}");
        assert!(message.ends_with("upgrade the client library"), "{message}");
    }

    #[test]
    fn newer_client_is_told_to_upgrade_the_daemon() {
        let message = check(&v1::Versions { api: API_VERSION + 1, ..VERSIONS }).expect_err("another api");
        assert!(message.ends_with("upgrade the daemon"), "{message}");
    }
}
