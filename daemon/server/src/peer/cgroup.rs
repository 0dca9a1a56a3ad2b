//! From the text of `/proc/PID/cgroup` to the scope that makes a tenant: pod, Slurm job, container, login or unit.
//!
//! Role: pure text in, scope out. A process may make cgroups *below* the one it was put in and name them as it
//! likes, so each path is walked from its root and the first component that names a scope decides: a name
//! further down can never win. Must not know: sockets, processes, tenants.
//!
//! Format of the file: cgroups(7), `hierarchy-ID:controller-list:cgroup-path`, one line a hierarchy. With cgroup v1
//! the hierarchies may differ (Slurm moves a job in some controllers only), so the most telling line is used.

use std::fmt;

use thiserror::Error;

/// Longest text accepted: v1 has at most some 14 hierarchies, a path has at most 4096 bytes.
pub const MAX_CGROUP_TEXT_BYTES: usize = 64 * 1024;

/// Longest scope: what is longer cannot come from kubelet, Slurm or systemd.
pub const MAX_SCOPE_BYTES: usize = 512;

/// Where a process belongs. Its `Display` form is the tenant's cgroup key.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Scope {
    /// A Kubernetes pod, by its UID; every container of the pod is in it.
    Pod(String),
    /// A Slurm job, by its number; every step and task of the job is in it.
    SlurmJob(String),
    /// A container outside Kubernetes, by the runtime's id.
    Container(String),
    /// A login: a session scope or the user's service manager.
    Login(String),
    /// A systemd unit: service or scope, by its path.
    Unit(String),
    /// None of these: the path as it is.
    Path(String),
}

impl Scope {
    /// How much the scope says, for choosing between hierarchies: the higher, the more.
    fn rank(&self) -> u8 {
        match self {
            Self::Pod(_) => 5,
            Self::SlurmJob(_) => 4,
            Self::Container(_) => 3,
            Self::Login(_) => 2,
            Self::Unit(_) => 1,
            Self::Path(_) => 0,
        }
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pod(uid) => write!(f, "pod/{uid}"),
            Self::SlurmJob(job) => write!(f, "slurm/{job}"),
            Self::Container(id) => write!(f, "container/{id}"),
            Self::Login(login) => write!(f, "login/{login}"),
            Self::Unit(unit) => write!(f, "unit/{unit}"),
            Self::Path(path) => write!(f, "cgroup{path}"),
        }
    }
}

/// Why a cgroup text names no scope.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CgroupError {
    /// Longer than the kernel writes.
    #[error("cgroup text has {len_bytes} bytes, at most {MAX_CGROUP_TEXT_BYTES} are read")]
    TooLong {
        /// Its length, bytes.
        len_bytes: usize,
    },
    /// A line without its three fields.
    #[error("cgroup line {line:?} is not hierarchy:controllers:path")]
    Malformed {
        /// The line, shortened.
        line: String,
    },
    /// No line at all.
    #[error("cgroup text is empty")]
    Empty,
    /// A scope longer than any real one.
    #[error("cgroup scope has {len_bytes} bytes, at most {MAX_SCOPE_BYTES} are accepted")]
    ScopeTooLong {
        /// Its length, bytes.
        len_bytes: usize,
    },
}

/// The scope that the text of `/proc/PID/cgroup` names.
///
/// # Errors
/// `TooLong`, `Malformed`, `Empty`, `ScopeTooLong`.
pub fn scope_of(text: &str) -> Result<Scope, CgroupError> {
    if text.len() > MAX_CGROUP_TEXT_BYTES {
        return Err(CgroupError::TooLong { len_bytes: text.len() });
    }
    let mut best: Option<Scope> = None;
    for line in text.lines() {
        let scope = scope_of_path(path_of(line)?);
        if best.as_ref().is_none_or(|best| more_telling(&scope, best)) {
            best = Some(scope);
        }
    }
    let scope = best.ok_or(CgroupError::Empty)?;
    match scope.to_string().len() {
        len_bytes if len_bytes > MAX_SCOPE_BYTES => Err(CgroupError::ScopeTooLong { len_bytes }),
        _ => Ok(scope),
    }
}

/// By rank; among plain paths a named one beats the root, so that the empty v2 line of a hybrid host never hides the v1 path.
fn more_telling(scope: &Scope, best: &Scope) -> bool {
    match (scope, best) {
        (Scope::Path(path), Scope::Path(root)) => root == "/" && path != "/",
        _ => scope.rank() > best.rank(),
    }
}

fn path_of(line: &str) -> Result<&str, CgroupError> {
    let mut fields = line.splitn(3, ':').skip(2);
    // The kernel marks a removed cgroup; the process is still in it.
    let path = fields.next().map(|path| path.strip_suffix(" (deleted)").unwrap_or(path));
    path.filter(|path| path.starts_with('/'))
        .ok_or_else(|| CgroupError::Malformed { line: line.chars().take(80).collect() })
}

fn scope_of_path(path: &str) -> Scope {
    // A daemon in a cgroup namespace of its own sees its neighbours as `/../…`.
    let outside = path.starts_with("/..");
    let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty() && *part != "..").collect();
    for (index, part) in parts.iter().enumerate() {
        let before = &parts[..index];
        let found = pod(part, before, outside)
            .or_else(|| slurm_job(part, before))
            .or_else(|| container(part, before))
            .or_else(|| login(part, before))
            .or_else(|| unit(part, before, parts.get(index + 1).copied()));
        if let Some(scope) = found {
            return scope;
        }
    }
    Scope::Path(format!("/{}", parts.join("/")))
}

/// systemd driver: `…kubepods-burstable-pod0b6c_….slice`; cgroupfs driver: `kubepods/burstable/pod0b6c-…`
/// (kubernetes/kubernetes:pkg/kubelet/cm/pod_container_manager_linux.go, cgroup_manager_linux.go).
fn pod(part: &str, before: &[&str], outside: bool) -> Option<Scope> {
    let systemd = part.strip_suffix(".slice").filter(|name| name.contains("kubepods")).and_then(|name| {
        let (_, uid) = name.rsplit_once("-pod")?;
        Some(uid.replace('_', "-"))
    });
    let below_kubepods = || match before.last() {
        Some(parent) => matches!(*parent, "kubepods" | "burstable" | "besteffort"),
        None => outside,
    };
    let cgroupfs = || part.strip_prefix("pod").filter(|_| below_kubepods()).map(str::to_owned);
    systemd.or_else(cgroupfs).filter(|uid| is_pod_uid(uid)).map(Scope::Pod)
}

/// A UUID, or for a static pod the 32 hex digits of its configuration's hash.
fn is_pod_uid(uid: &str) -> bool {
    let hex = uid.bytes().filter(u8::is_ascii_hexdigit).count();
    hex == 32 && uid.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-')
}

/// v2: `[NODE_]slurmstepd.scope/job_N/…`; v1: `slurm[_NODE]/uid_U/job_N/…`
/// (SchedMD/slurm:src/plugins/cgroup/v2/cgroup_v2.c, src/plugins/cgroup/v1/cgroup_v1.c).
fn slurm_job(part: &str, before: &[&str]) -> Option<Scope> {
    let job = part.strip_prefix("job_").filter(|job| is_number(job))?;
    let v2 = before.last().is_some_and(|parent| is_step_scope(parent));
    let v1 = matches!(before, [.., top, user] if is_slurm_top(top) && user.strip_prefix("uid_").is_some_and(is_number));
    (v1 || v2).then(|| Scope::SlurmJob(job.to_owned()))
}

fn is_step_scope(part: &str) -> bool {
    part == "slurmstepd.scope" || part.ends_with("_slurmstepd.scope")
}

fn is_slurm_top(part: &str) -> bool {
    part == "slurm" || part.starts_with("slurm_")
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// cgroupfs drivers: `docker/ID`, `libpod_parent/libpod-ID`; systemd drivers: `docker-ID.scope`, `libpod-ID.scope`, …
fn container(part: &str, before: &[&str]) -> Option<Scope> {
    const RUNTIMES: [&str; 5] = ["docker-", "libpod-", "crio-", "cri-containerd-", "nerdctl-"];
    let bare = part.strip_suffix(".scope").unwrap_or(part);
    let prefixed = RUNTIMES.iter().find_map(|prefix| bare.strip_prefix(prefix));
    let below_runtime = || before.last().is_some_and(|parent| *parent == "docker").then_some(part);
    prefixed.or_else(below_runtime).filter(|id| is_container_id(id)).map(|id| Scope::Container(id.to_owned()))
}

fn is_container_id(id: &str) -> bool {
    id.len() == 64 && id.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// `user.slice/user-U.slice/session-N.scope` and `…/user@U.service` (systemd's pam_systemd(8), user@.service(5)).
fn login(part: &str, before: &[&str]) -> Option<Scope> {
    let [.., "user.slice", user] = before else { return None };
    let user = user.strip_suffix(".slice").filter(|user| user.starts_with("user-"))?;
    let session = part.strip_suffix(".scope").filter(|name| name.starts_with("session-"));
    let manager = part.strip_suffix(".service").filter(|name| name.starts_with("user@"));
    session.or(manager).map(|name| Scope::Login(format!("{user}/{name}")))
}

/// The first service or scope on the way; a step scope only when no job follows it.
fn unit(part: &str, before: &[&str], next: Option<&str>) -> Option<Scope> {
    let is_unit = part.ends_with(".service") || part.ends_with(".scope");
    let leads_to_job = is_step_scope(part) && next.is_some_and(|next| next.starts_with("job_"));
    (is_unit && !leads_to_job).then(|| {
        let mut path = before.to_vec();
        path.push(part);
        Scope::Unit(path.join("/"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "3f4b1c9e0a7d5e2f8b6c1d0e9f8a7b6c5d4e3f2a1b0c9d8e7f6a5b4c3d2e1f0a";

    fn scope(text: &str) -> String {
        scope_of(text).expect("a scope").to_string()
    }

    #[test]
    fn kubelet_with_systemd_driver_on_v2_gives_the_pod() {
        let text = format!(
            "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod0b6cba5f_74c5_4f8e_9a3b_3f2f3c1d5e6f.slice/cri-containerd-{ID}.scope\n"
        );
        assert_eq!(scope(&text), "pod/0b6cba5f-74c5-4f8e-9a3b-3f2f3c1d5e6f");
    }

    #[test]
    fn guaranteed_pod_with_crio_gives_the_pod() {
        let text = format!(
            "0::/kubepods.slice/kubepods-pod7f3e9d2a_1b2c_4d5e_8f90_a1b2c3d4e5f6.slice/crio-{ID}.scope/container\n"
        );
        assert_eq!(scope(&text), "pod/7f3e9d2a-1b2c-4d5e-8f90-a1b2c3d4e5f6");
    }

    #[test]
    fn kubelet_with_cgroupfs_driver_on_v1_gives_the_pod() {
        let text = format!(
            "12:memory:/kubepods/besteffort/pod1d2c3b4a-0000-4111-8222-333344445555/{ID}\n\
             11:cpu,cpuacct:/kubepods/besteffort/pod1d2c3b4a-0000-4111-8222-333344445555/{ID}\n\
             1:name=systemd:/kubepods/besteffort/pod1d2c3b4a-0000-4111-8222-333344445555/{ID}\n\
             0::/\n"
        );
        assert_eq!(scope(&text), "pod/1d2c3b4a-0000-4111-8222-333344445555");
    }

    #[test]
    fn guaranteed_pod_with_cgroupfs_driver_gives_the_pod() {
        let text = format!("0::/kubepods/pod1d2c3b4a-0000-4111-8222-333344445555/{ID}\n");
        assert_eq!(scope(&text), "pod/1d2c3b4a-0000-4111-8222-333344445555");
    }

    #[test]
    fn static_pod_gives_the_hash_of_its_configuration() {
        let text = format!(
            "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-poda1b2c3d4e5f60718293a4b5c6d7e8f90.slice/cri-containerd-{ID}.scope\n"
        );
        assert_eq!(scope(&text), "pod/a1b2c3d4e5f60718293a4b5c6d7e8f90");
    }

    #[test]
    fn kubelet_under_its_own_slice_gives_the_pod() {
        let text = format!(
            "0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/kubelet-kubepods-besteffort-pod9c8b7a65_4321_4fed_9cba_987654321012.slice/cri-containerd-{ID}.scope\n"
        );
        assert_eq!(scope(&text), "pod/9c8b7a65-4321-4fed-9cba-987654321012");
    }

    #[test]
    fn pods_seen_from_a_daemon_in_its_own_cgroup_namespace_are_pods() {
        let systemd = format!(
            "0::/../../kubepods-burstable.slice/kubepods-burstable-pod0b6cba5f_74c5_4f8e_9a3b_3f2f3c1d5e6f.slice/cri-containerd-{ID}.scope\n"
        );
        assert_eq!(scope(&systemd), "pod/0b6cba5f-74c5-4f8e-9a3b-3f2f3c1d5e6f");
        let cgroupfs = format!("0::/../../pod0b6cba5f-74c5-4f8e-9a3b-3f2f3c1d5e6f/{ID}\n");
        assert_eq!(scope(&cgroupfs), "pod/0b6cba5f-74c5-4f8e-9a3b-3f2f3c1d5e6f");
    }

    #[test]
    fn every_container_of_a_pod_gives_the_same_scope() {
        let of = |id: &str| {
            scope(&format!(
                "0::/kubepods.slice/kubepods-pod7f3e9d2a_1b2c_4d5e_8f90_a1b2c3d4e5f6.slice/cri-containerd-{id}.scope\n"
            ))
        };
        assert_eq!(of(ID), of(&ID.replace('3', "4")));
    }

    #[test]
    fn slurm_on_v2_gives_the_job_for_every_step() {
        let batch = "0::/system.slice/slurmstepd.scope/job_4242/step_batch/user/task_0\n";
        let step = "0::/system.slice/slurmstepd.scope/job_4242/step_3/user/task_special\n";
        assert_eq!((scope(batch).as_str(), scope(step).as_str()), ("slurm/4242", "slurm/4242"));
    }

    #[test]
    fn several_slurmd_on_one_host_give_the_job() {
        assert_eq!(scope("0::/system.slice/node7_slurmstepd.scope/job_17/step_0/user/task_1\n"), "slurm/17");
    }

    #[test]
    fn slurm_on_v1_gives_the_job_although_systemd_shows_the_daemon() {
        let text = "12:cpuset:/slurm/uid_1000/job_8/step_0\n9:freezer:/slurm/uid_1000/job_8/step_0\n\
                    8:memory:/slurm/uid_1000/job_8/step_0/task_0\n1:name=systemd:/system.slice/slurmd.service\n0::/system.slice/slurmd.service\n";
        assert_eq!(scope(text), "slurm/8");
    }

    #[test]
    fn slurm_with_the_node_in_its_folder_gives_the_job() {
        assert_eq!(scope("9:freezer:/slurm_node3/uid_1000/job_99/step_extern\n"), "slurm/99");
    }

    #[test]
    fn step_daemon_outside_a_job_is_its_unit() {
        assert_eq!(scope("0::/system.slice/slurmstepd.scope/system\n"), "unit/system.slice/slurmstepd.scope");
    }

    #[test]
    fn login_session_gives_the_session_scope() {
        assert_eq!(scope("0::/user.slice/user-1000.slice/session-3.scope\n"), "login/user-1000/session-3");
        assert_eq!(scope("0::/user.slice/user-1000.slice/session-c1.scope/made/below\n"), "login/user-1000/session-c1");
    }

    #[test]
    fn user_manager_gives_one_scope_for_all_that_runs_below_it() {
        let terminal = "0::/user.slice/user-1000.slice/user@1000.service/app.slice/vte-spawn-1.scope\n";
        let service = "0::/user.slice/user-1000.slice/user@1000.service/app.slice/jupyter.service\n";
        assert_eq!(scope(terminal), "login/user-1000/user@1000");
        assert_eq!(scope(terminal), scope(service));
    }

    #[test]
    fn docker_gives_the_container_with_either_driver() {
        assert_eq!(scope(&format!("0::/system.slice/docker-{ID}.scope\n")), format!("container/{ID}"));
        assert_eq!(scope(&format!("4:memory:/docker/{ID}\n0::/\n")), format!("container/{ID}"));
    }

    #[test]
    fn podman_as_root_gives_the_container() {
        assert_eq!(scope(&format!("0::/machine.slice/libpod-{ID}.scope/container\n")), format!("container/{ID}"));
    }

    #[test]
    fn service_gives_its_unit_whatever_is_below() {
        assert_eq!(scope("0::/system.slice/triton.service/worker/3\n"), "unit/system.slice/triton.service");
        assert_eq!(scope("0::/init.scope\n"), "unit/init.scope");
    }

    #[test]
    fn anything_else_is_its_path() {
        assert_eq!(scope("0::/\n"), "cgroup/");
        assert_eq!(scope("0::/batch/17\n"), "cgroup/batch/17");
        assert_eq!(scope("3:cpu:/batch/17\n0::/\n"), "cgroup/batch/17");
    }

    #[test]
    fn names_made_below_a_login_or_a_pod_change_nothing() {
        let login = "0::/user.slice/user-1000.slice/user@1000.service/kubepods.slice/kubepods-pod7f3e9d2a_1b2c_4d5e_8f90_a1b2c3d4e5f6.slice\n";
        assert_eq!(scope(login), "login/user-1000/user@1000");
        let pod = format!(
            "0::/kubepods.slice/kubepods-pod7f3e9d2a_1b2c_4d5e_8f90_a1b2c3d4e5f6.slice/cri-containerd-{ID}.scope/kubepods/pod1d2c3b4a-0000-4111-8222-333344445555\n"
        );
        assert_eq!(scope(&pod), "pod/7f3e9d2a-1b2c-4d5e-8f90-a1b2c3d4e5f6");
        let job = "0::/system.slice/slurmstepd.scope/job_1/step_0/user/task_0/slurmstepd.scope/job_2\n";
        assert_eq!(scope(job), "slurm/1");
    }

    #[test]
    fn names_that_only_look_like_pods_or_jobs_are_not() {
        assert_eq!(
            scope("0::/mine/pod1d2c3b4a-0000-4111-8222-333344445555\n"),
            "cgroup/mine/pod1d2c3b4a-0000-4111-8222-333344445555"
        );
        assert_eq!(scope("0::/mine/job_7\n"), "cgroup/mine/job_7");
        assert_eq!(scope("0::/slurm/uid_x/job_7\n"), "cgroup/slurm/uid_x/job_7");
    }

    #[test]
    fn removed_cgroup_still_names_its_scope() {
        assert_eq!(scope("0::/user.slice/user-1000.slice/session-3.scope (deleted)\n"), "login/user-1000/session-3");
    }

    #[test]
    fn malformed_empty_and_oversized_texts_are_refused() {
        assert_eq!(scope_of(""), Err(CgroupError::Empty));
        assert!(matches!(scope_of("nonsense\n"), Err(CgroupError::Malformed { .. })));
        assert!(matches!(scope_of("0::relative\n"), Err(CgroupError::Malformed { .. })));
        assert!(matches!(scope_of(&"0".repeat(MAX_CGROUP_TEXT_BYTES + 1)), Err(CgroupError::TooLong { .. })));
        assert!(matches!(scope_of(&format!("0::/{}\n", "a/".repeat(900))), Err(CgroupError::ScopeTooLong { .. })));
    }
}
