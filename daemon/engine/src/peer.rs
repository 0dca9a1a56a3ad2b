//! Who is at the other end, and whose tenant that makes it.

use std::fmt;
use std::sync::Arc;

/// A client process as the kernel names it (SO_PEERCRED and its pidfd, unix(7)).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// User id, as the daemon's user namespace sees it.
    pub uid: u32,
    /// Primary group id.
    pub gid: u32,
    /// Supplementary group ids (SO_PEERGROUPS).
    pub groups: Vec<u32>,
    /// Process id as the daemon's PID namespace sees it, 0 where it has none.
    pub pid: i32,
    /// What separates it from others of the same user, as whoever looked at its cgroup names it: pod, job, login or
    /// unit. Taken as it is; empty where unknown.
    pub scope: String,
}

/// What separates one tenant from another: the user and the pod, Slurm job or login scope it runs in.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TenantKey {
    /// User id.
    pub uid: u32,
    /// Its pod, job, login or unit, as [`Peer::scope`] says.
    pub scope: Arc<str>,
}

impl fmt::Display for TenantKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "uid {} in {}", self.uid, if self.scope.is_empty() { "/" } else { &self.scope })
    }
}

impl TenantKey {
    /// The tenant of a peer.
    #[must_use]
    pub fn of(peer: &Peer) -> Self {
        Self { uid: peer.uid, scope: peer.scope.as_str().into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_scope_of_two_users_is_two_tenants() {
        let peer = |uid| Peer { uid, gid: 1, groups: vec![], pid: 1, scope: "unit/x.scope".into() };
        assert_ne!(TenantKey::of(&peer(1)), TenantKey::of(&peer(2)));
    }

    #[test]
    fn a_scope_is_taken_as_it_is() {
        let scope = "pod/0d1c/inner.scope/x".to_owned();
        let peer = Peer { uid: 1, gid: 1, groups: vec![], pid: 1, scope: scope.clone() };
        assert_eq!(*TenantKey::of(&peer).scope, *scope);
    }
}
