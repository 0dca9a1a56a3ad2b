//! Whether the kernel bounds how much memory RDMA devices may hold pinned for this process: a registration beyond it fails as if
//! memory had run out, which nobody takes for a limit.

use rustix::process::{Resource, getrlimit};
use rustix::thread::{CapabilitySet, capabilities};

/// Map of the user ids of a user namespace (user_namespaces(7)).
const UID_MAP: &str = "/proc/self/uid_map";

/// What is to be said of the bound; `None` when there is none.
pub(crate) fn bound() -> Option<String> {
    let limit = getrlimit(Resource::Memlock).current;
    let has_capability = capabilities(None).is_ok_and(|own| own.effective.contains(CapabilitySet::IPC_LOCK));
    let uid_map = std::fs::read_to_string(UID_MAP).unwrap_or_default();
    bound_by(limit, has_capability && is_initial(&uid_map))
}

/// `ib_umem_get`, drivers/infiniband/core/umem.c: the limit holds for whoever has no CAP_IPC_LOCK in the initial user
/// namespace.
fn bound_by(limit_bytes: Option<u64>, may_pass_it: bool) -> Option<String> {
    let limit_bytes = limit_bytes.filter(|_| !may_pass_it)?;
    Some(format!(
        "registrations of more than {limit_bytes} bytes together are refused by RLIMIT_MEMLOCK; set LimitMEMLOCK=infinity in \
         the unit, or ulimit -l unlimited in what starts the daemon"
    ))
}

/// Whether a capability counts where drivers ask for it: all ids map to themselves.
fn is_initial(uid_map: &str) -> bool {
    uid_map.split_whitespace().eq(["0", "0", "4294967295"])
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt as _;
    use std::process::Command;

    use rustix::process::{Rlimit, geteuid, setrlimit};

    use super::*;

    /// Set in the process that has no rights: the limit it runs with, bytes.
    const LIMIT: &str = "GDRD_TEST_MEMLOCK";
    const UNPRIVILEGED: &str = "locked_memory::tests::a_process_without_rights_is_told_the_limit_that_it_runs_with";

    #[test]
    fn a_process_without_rights_is_told_the_limit_that_it_runs_with() {
        // rootless-containers/usernetes#373: ulimit -l 8192 as uid 1000.
        if let Ok(limit) = std::env::var(LIMIT) {
            let current = limit.parse().expect("a number");
            setrlimit(Resource::Memlock, Rlimit { current: Some(current), maximum: Some(current) }).expect("no more");
            let told = bound().expect("it holds");
            return assert!(told.contains(&format!("more than {limit} bytes together")), "{told}");
        }
        for limit in [8 << 20, 64 << 10] {
            let mut child = Command::new(std::env::current_exe().expect("a path"));
            child.args(["--exact", UNPRIVILEGED, "--nocapture"]).env(LIMIT, u64::to_string(&limit));
            if geteuid().is_root() {
                child.uid(1000).gid(1000);
            }
            let output = child.output().expect("it starts");
            let said = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success() && said.contains("1 passed"), "{said}");
        }
    }

    #[test]
    fn a_limit_is_told_with_its_value_and_what_to_do() {
        // NVIDIA/nvidia-container-toolkit#2037: a container inherits 8 MiB.
        let told = bound_by(Some(8 << 20), false).expect("there is a limit");
        assert!(told.contains("8388608 bytes") && told.contains("LimitMEMLOCK=infinity"), "{told}");
        assert_eq!(bound_by(None, false), None);
        assert_eq!(bound_by(Some(8 << 20), true), None);
    }

    #[test]
    fn a_capability_of_a_container_s_own_user_namespace_does_not_lift_it() {
        // rootless-containers/usernetes#373: CAP_IPC_LOCK is there, and inert.
        assert!(is_initial("         0          0 4294967295\n"));
        assert!(!is_initial("         0       1000          1\n"));
        assert!(!is_initial("         0     100000      65536\n"));
        assert!(!is_initial(""));
    }
}
