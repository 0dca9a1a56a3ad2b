//! The idle daemon: resident memory and wake-ups, as `/proc` shows them.

use std::path::Path;

use anyhow::{Context as _, ensure};

use super::Figure;
use crate::args::{Bench, Global};
use crate::host;

const MOST_RESIDENT_MIB: f64 = 25.0;
/// Time that the daemon may take to settle after whoever used it last: its threads spin for microseconds.
const SETTLE: std::time::Duration = std::time::Duration::from_secs(1);

pub(super) fn measure(global: &Global, options: &Bench) -> anyhow::Result<Vec<Figure>> {
    let client = host::block_on(async { Ok(host::connect(global).await?) })?;
    let pid = daemon_pid(client.runtime_dir().path())?;
    // Not one connection of ours is left: the daemon is as idle as it can be.
    drop(client);
    std::thread::sleep(SETTLE);
    let before = wake_ups(pid)?;
    std::thread::sleep(options.idle);
    let woken = wake_ups(pid)?.saturating_sub(before);
    let watched = options.idle.as_secs_f64();
    Ok(vec![
        Figure {
            name: "resident memory of the idle daemon",
            value: resident_mib(pid)?,
            unit: "MiB",
            most: Some(MOST_RESIDENT_MIB),
            scatter: None,
            note: format!("VmRSS of /proc/{pid}/status"),
        },
        Figure {
            name: "wake-ups of the idle daemon",
            value: f64::from(u32::try_from(woken).unwrap_or(u32::MAX)),
            unit: "",
            // A rescan every 30 s or more is allowed.
            most: Some((watched / 30.0).ceil()),
            scatter: None,
            note: format!("voluntary context switches of all threads in {watched} s"),
        },
    ])
}

/// The process that has locked the runtime folder. Who listens on the sockets may be systemd or the keeper.
fn daemon_pid(folder: &Path) -> anyhow::Result<i32> {
    let lock = folder.join("gdrd.lock");
    let text = std::fs::read_to_string(&lock).with_context(|| format!("read {}", lock.display()))?;
    let pid = text.trim().parse().with_context(|| format!("{} names no process", lock.display()))?;
    let name = read(&format!("/proc/{pid}/comm"))?;
    // In a container of its own it has another number here.
    ensure!(name.trim() == "gdrd", "process {pid} of {} is {} here, and not gdrd", lock.display(), name.trim());
    Ok(pid)
}

fn resident_mib(pid: i32) -> anyhow::Result<f64> {
    let status = read(&format!("/proc/{pid}/status"))?;
    let kib = field(&status, "VmRSS:").with_context(|| format!("/proc/{pid}/status has no VmRSS"))?;
    Ok(f64::from(u32::try_from(kib).unwrap_or(u32::MAX)) / 1024.0)
}

fn wake_ups(pid: i32) -> anyhow::Result<u64> {
    let tasks = format!("/proc/{pid}/task");
    let mut sum = 0;
    for task in std::fs::read_dir(&tasks).with_context(|| format!("list {tasks}"))? {
        let status = task?.path().join("status");
        // A thread that has ended makes no wake-ups.
        if let Ok(text) = std::fs::read_to_string(status) {
            sum += field(&text, "voluntary_ctxt_switches:").unwrap_or(0);
        }
    }
    Ok(sum)
}

fn read(path: &str) -> anyhow::Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("read {path}"))
}

fn field(status: &str, name: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_a_status_file_are_found_by_their_whole_name() {
        let status = "VmRSS:\t  2048 kB\nvoluntary_ctxt_switches:\t17\nnonvoluntary_ctxt_switches:\t5\n";
        assert_eq!(field(status, "voluntary_ctxt_switches:"), Some(17));
        assert_eq!(field(status, "VmRSS:"), Some(2048));
        assert_eq!(field(status, "RssAnon:"), None);
    }

    #[test]
    fn a_lock_that_names_another_process_or_none_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let told = |content: &str| {
            std::fs::write(folder.path().join("gdrd.lock"), content).unwrap();
            daemon_pid(folder.path()).unwrap_err().to_string()
        };
        assert!(told("").contains("names no process"));
        assert!(told(&std::process::id().to_string()).contains("not gdrd"));
    }

    #[test]
    fn this_process_has_memory_and_wake_ups_to_read() {
        let pid = i32::try_from(std::process::id()).unwrap();
        assert!(resident_mib(pid).unwrap() > 0.0);
        assert!(wake_ups(pid).is_ok());
    }
}
