//! The two lines of `/proc/PID/status` that say who a process is (proc_pid_status(5)).

/// Effective uid and supplementary groups, in the reader's user namespace.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct ProcStatus {
    /// Second number of `Uid:`; `None` where the line is missing.
    pub(super) effective_uid: Option<u32>,
    /// Numbers of `Groups:`; the kernel allows 65536.
    pub(super) groups: Vec<u32>,
}

impl ProcStatus {
    /// Takes what it understands; a missing line leaves its field empty.
    pub(super) fn parse(text: &str) -> Self {
        let mut status = Self::default();
        for line in text.lines() {
            if let Some(uids) = line.strip_prefix("Uid:") {
                status.effective_uid = uids.split_ascii_whitespace().nth(1).and_then(|uid| uid.parse().ok());
            } else if let Some(groups) = line.strip_prefix("Groups:") {
                status.groups = groups.split_ascii_whitespace().filter_map(|gid| gid.parse().ok()).collect();
            }
        }
        status
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn effective_uid_and_groups_are_taken() {
        let text = "Name:\tpython3\nUmask:\t0022\nUid:\t1000\t1001\t1000\t1000\nGid:\t1000\t1000\t1000\t1000\nFDSize:\t64\nGroups:\t27 44 1000 \n";
        assert_eq!(ProcStatus::parse(text), ProcStatus { effective_uid: Some(1001), groups: vec![27, 44, 1000] });
    }

    #[test]
    fn text_without_the_lines_says_nothing() {
        assert_eq!(ProcStatus::parse("Name:\tx\nGroups:\t\n"), ProcStatus::default());
    }
}
