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
    /// Path of its cgroup (v2), as `/proc/PID/cgroup` prints it; empty where unknown.
    pub cgroup: String,
}

/// What separates one tenant from another: the user and the pod, Slurm job or login scope it runs in.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TenantKey {
    /// User id.
    pub uid: u32,
    /// The cgroup path, cut after the component that names the pod, job, login scope or service.
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
        Self { uid: peer.uid, scope: scope_of(&peer.cgroup).into() }
    }
}

/// Cuts a cgroup path after the component that names the unit of isolation: what lies below it is one tenant's own
/// business (containers of a pod, steps of a job, processes of a service). Paths of no known shape stay whole.
///
/// Below `user.slice` users make cgroups of any name themselves, so a job or pod there is none: else anyone could be
/// as many tenants as they like, each with a quota of its own.
fn scope_of(path: &str) -> &str {
    let path = path.trim_end_matches('/');
    let mut first_unit = None;
    let mut next = 0;
    let mut of_a_user = false;
    for part in path.split('/') {
        let end = next + part.len();
        of_a_user |= part == "user.slice" || part.starts_with("user@");
        if is_job_or_pod(part) && !of_a_user {
            return &path[..end];
        }
        if first_unit.is_none() && is_unit(part) {
            first_unit = Some(end);
        }
        next = end + 1;
    }
    first_unit.map_or(path, |end| &path[..end])
}

/// A Kubernetes pod (systemd and cgroupfs drivers) or a Slurm job: these count wherever they stand in the path.
fn is_job_or_pod(part: &str) -> bool {
    let pod = part.strip_prefix("pod").is_some_and(|uid| uid.len() >= 32)
        || (part.starts_with("kubepods") && part.contains("-pod") && part.ends_with(".slice"));
    let job = part.strip_prefix("job_").is_some_and(|id| !id.is_empty() && id.bytes().all(|b| b.is_ascii_digit()));
    pod || job
}

/// A systemd scope or service (login session, user manager, container, system service), or a container by its id.
fn is_unit(part: &str) -> bool {
    // slurmstepd.scope holds every job of a host, so it separates nobody.
    (part.ends_with(".scope") || part.ends_with(".service")) && part != "slurmstepd.scope"
        || (part.len() == 64 && part.bytes().all(|b| b.is_ascii_hexdigit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn containers_of_one_pod_are_one_tenant() {
        let pod = "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod0d1c.slice";
        assert_eq!(scope_of(&format!("{pod}/cri-containerd-aa.scope")), pod);
        assert_eq!(scope_of(&format!("{pod}/cri-containerd-bb.scope")), pod);
        let pod = "/kubepods/besteffort/pod2f9f0f5e-5a1b-4c3e-9c41-1f2e3d4c5b6a";
        assert_eq!(scope_of(&format!("{pod}/0123")), pod);
    }

    #[test]
    fn steps_of_one_slurm_job_are_one_tenant_and_jobs_are_not() {
        let step = "/system.slice/slurmstepd.scope/job_71/step_0/user/task_0";
        assert_eq!(scope_of(step), "/system.slice/slurmstepd.scope/job_71");
        assert_ne!(scope_of(step), scope_of("/system.slice/slurmstepd.scope/job_72/step_0"));
    }

    #[test]
    fn login_scopes_and_services_are_cut_at_their_unit() {
        assert_eq!(scope_of("/user.slice/user-7.slice/session-3.scope"), "/user.slice/user-7.slice/session-3.scope");
        assert_eq!(
            scope_of("/user.slice/user-7.slice/user@7.service/app.slice/app-x.scope"),
            "/user.slice/user-7.slice/user@7.service"
        );
        assert_eq!(scope_of("/system.slice/train.service/worker"), "/system.slice/train.service");
        let id = "a".repeat(64);
        assert_eq!(scope_of(&format!("/docker/{id}/inner")), format!("/docker/{id}"));
    }

    #[test]
    fn a_user_cannot_be_several_tenants_by_making_cgroups() {
        let manager = "/user.slice/user-7.slice/user@7.service";
        for made in ["job_1", "job_2", "pod2f9f0f5e-5a1b-4c3e-9c41-1f2e3d4c5b6a", "x.scope", "kubepods-pod1.slice"] {
            assert_eq!(scope_of(&format!("{manager}/{made}/inner")), manager);
        }
    }

    #[test]
    fn odd_paths_stay_whole() {
        for path in ["", "/", "/..", "/a/b", "//", "job_", "/pod1/x", "relative/é"] {
            assert_eq!(scope_of(path), path.trim_end_matches('/'));
        }
    }

    #[test]
    fn the_same_scope_of_two_users_is_two_tenants() {
        let peer = |uid| Peer { uid, gid: 1, groups: vec![], pid: 1, cgroup: "/x.scope".into() };
        assert_ne!(TenantKey::of(&peer(1)), TenantKey::of(&peer(2)));
    }
}
