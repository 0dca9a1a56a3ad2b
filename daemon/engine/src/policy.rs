//! Who may lease, who administers, and how much each may have.

use crate::error::EngineError;
use crate::peer::Peer;

/// The uid that stands for users who have none in the daemon's user namespace (`/proc/sys/kernel/overflowuid`).
pub(crate) const OVERFLOW_UID: u32 = 65_534;

/// Whom a rule is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Subject {
    /// One user.
    Uid(u32),
    /// Members of a group, primary or supplementary.
    Gid(u32),
    /// Everyone but opaque peers (overflow uid, pid 0).
    Anyone,
}

impl Subject {
    fn covers(self, peer: &Peer) -> bool {
        match self {
            Self::Uid(uid) => peer.uid == uid,
            Self::Gid(gid) => peer.gid == gid || peer.groups.contains(&gid),
            Self::Anyone => true,
        }
    }
}

/// Most that one tenant may have at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quota {
    /// Bytes of buffers, ready ones included.
    pub max_bytes: u64,
    /// Registrations, those of ready buffers included.
    pub max_registrations: u32,
    /// Queue pairs.
    pub max_queue_pairs: u32,
    /// Sessions.
    pub max_sessions: u32,
}

impl Default for Quota {
    fn default() -> Self {
        Self { max_bytes: 64 << 30, max_registrations: 4096, max_queue_pairs: 256, max_sessions: 256 }
    }
}

/// What each tenant's brokered queue pairs may send together, whatever their number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Traffic {
    /// Its share beside other tenants that have work at the same time: one of weight 3 gets three times as much as one
    /// of weight 1. From 1 on.
    pub weight: u32,
    /// Requests a second, receives included; 0 for no limit. 10 ms of the rate, at least one, may come at once.
    pub operations_per_s: u64,
    /// Payload of writes, reads, sends and atomics a second, bytes; 0 for no limit. 10 ms of the rate may come at
    /// once; a longer message begins when there is no debt, and its debt is paid before the next.
    pub bytes_per_s: u64,
}

impl Default for Traffic {
    fn default() -> Self {
        Self { weight: 1, operations_per_s: 0, bytes_per_s: 0 }
    }
}

/// Buffers made ready as soon as a tenant opens its first session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prewarm {
    /// Name, UUID or BDF of the GPU.
    pub gpu: String,
    /// Length, bytes; rounded up to its size class.
    pub size_bytes: u64,
    /// How many.
    pub count: u32,
}

/// Lets its subject lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// Whom it is about.
    pub subject: Subject,
    /// What each tenant of it may have.
    pub quota: Quota,
    /// What each may send.
    pub traffic: Traffic,
    /// What is made ready ahead.
    pub prewarm: Vec<Prewarm>,
}

/// Rules, first match wins, and administrators. No rule: nobody leases.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Policy {
    /// Who may lease.
    pub leases: Vec<Rule>,
    /// Who sees every tenant and may drain, probe and apply plans.
    pub admins: Vec<Subject>,
}

impl Policy {
    /// Root, the daemon's own user and the given groups may lease; root and the admin group administer.
    #[must_use]
    pub fn new(daemon_uid: u32, lease_gid: Option<u32>, admin_gid: Option<u32>) -> Self {
        let rule =
            |subject| Rule { subject, quota: Quota::default(), traffic: Traffic::default(), prewarm: Vec::new() };
        let mut leases = vec![rule(Subject::Uid(0))];
        if daemon_uid != 0 {
            leases.push(rule(Subject::Uid(daemon_uid)));
        }
        leases.extend(lease_gid.into_iter().chain(admin_gid).map(|gid| rule(Subject::Gid(gid))));
        let mut admins = vec![Subject::Uid(0)];
        admins.extend(admin_gid.map(Subject::Gid));
        Self { leases, admins }
    }

    /// Whether the peer administers. Opaque peers never do.
    #[must_use]
    pub fn is_admin(&self, peer: &Peer) -> bool {
        opaque(peer).is_none() && self.admins.iter().any(|subject| subject.covers(peer))
    }

    /// The first rule that lets the peer lease.
    ///
    /// # Errors
    /// `NotAllowed` without a rule; `OpaquePeer` when the peer's identity is the overflow uid or pid 0 and no rule
    /// names that uid itself.
    pub fn rule_for(&self, peer: &Peer) -> Result<&Rule, EngineError> {
        if let Some(problem) = opaque(peer) {
            let named = |rule: &&Rule| rule.subject == Subject::Uid(peer.uid);
            return self.leases.iter().find(named).ok_or(EngineError::OpaquePeer { problem });
        }
        let covers = |rule: &&Rule| rule.subject.covers(peer);
        self.leases.iter().find(covers).ok_or(EngineError::NotAllowed { uid: peer.uid })
    }
}

/// Why a peer cannot be told from others, if so.
fn opaque(peer: &Peer) -> Option<&'static str> {
    if peer.uid == OVERFLOW_UID {
        return Some("overflow uid");
    }
    (peer.pid <= 0).then_some("pid 0")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    fn peer(uid: u32, groups: &[u32], pid: i32) -> Peer {
        Peer { uid, gid: 100, groups: groups.to_vec(), pid, scope: String::new() }
    }

    #[test]
    fn by_default_root_the_daemon_and_the_groups_lease() {
        let policy = Policy::new(990, Some(500), Some(501));
        for allowed in [peer(0, &[], 1), peer(990, &[], 1), peer(7, &[500], 1), peer(7, &[501], 1)] {
            assert!(policy.rule_for(&allowed).is_ok(), "{allowed:?}");
        }
        let refused = policy.rule_for(&peer(7, &[502], 1)).unwrap_err();
        assert_eq!((refused.kind(), refused.reason()), (ErrorKind::PermissionDenied, "LEASE_NOT_ALLOWED"));
    }

    #[test]
    fn only_root_and_the_admin_group_administer() {
        let policy = Policy::new(990, Some(500), Some(501));
        assert!(policy.is_admin(&peer(0, &[], 1)));
        assert!(policy.is_admin(&peer(7, &[501], 1)));
        assert!(!policy.is_admin(&peer(990, &[500], 1)));
    }

    #[test]
    fn opaque_peers_need_a_rule_that_names_their_uid() {
        let anyone =
            Rule { subject: Subject::Anyone, quota: Quota::default(), traffic: Traffic::default(), prewarm: vec![] };
        let mut policy = Policy { leases: vec![anyone.clone()], admins: vec![Subject::Anyone] };
        assert!(policy.rule_for(&peer(7, &[], 1)).is_ok());
        for opaque in [peer(OVERFLOW_UID, &[], 1), peer(0, &[], 0)] {
            assert_eq!(policy.rule_for(&opaque).unwrap_err().reason(), "PEER_OPAQUE");
            assert!(!policy.is_admin(&opaque));
        }
        policy.leases.push(Rule { subject: Subject::Uid(OVERFLOW_UID), ..anyone });
        assert!(policy.rule_for(&peer(OVERFLOW_UID, &[], 1)).is_ok());
    }
}
