//! What `/proc` shows of a process, without asking it: its descriptors by kind, and its shared memory.

use std::collections::BTreeMap;
use std::path::Path;

/// Descriptors and shared memory of a process.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Footprint {
    /// Open descriptors by kind: `socket`, `anon_inode:[eventfd]`, `/memfd:NAME`, a path.
    pub fds: BTreeMap<String, usize>,
    /// Open memfds by name: how many, and their bytes in all.
    pub memfds: BTreeMap<String, (usize, u64)>,
    /// Mappings of memfds by name: bytes in all.
    pub mapped: BTreeMap<String, u64>,
    /// Threads.
    pub threads: usize,
}

impl Footprint {
    /// Looks at a process of this user, or of any with root.
    ///
    /// # Errors
    /// When `/proc/PID` cannot be read: the process is gone, or not for this user to see.
    pub fn of(pid: u32) -> std::io::Result<Self> {
        let proc = Path::new("/proc").join(pid.to_string());
        let mut seen = Self { threads: std::fs::read_dir(proc.join("task"))?.count(), ..Self::default() };
        let mut inodes = BTreeMap::new();
        for entry in std::fs::read_dir(proc.join("fd"))? {
            let path = entry?.path();
            // Closed since the listing.
            let Ok(link) = std::fs::read_link(&path) else { continue };
            let kind = kind_of(&link.to_string_lossy());
            if let Some(name) = kind.strip_prefix("/memfd:")
                && let Ok(stat) = rustix::fs::stat(&path)
            {
                let len_bytes = u64::try_from(stat.st_size).unwrap_or(0);
                inodes.insert((stat.st_dev, stat.st_ino), (name.to_owned(), len_bytes));
            }
            *seen.fds.entry(kind).or_default() += 1;
        }
        for (name, len_bytes) in inodes.into_values() {
            let entry = seen.memfds.entry(name).or_default();
            entry.0 += 1;
            entry.1 += len_bytes;
        }
        seen.mapped = mapped_memfds(&std::fs::read_to_string(proc.join("maps"))?);
        Ok(seen)
    }

    /// Descriptors in all.
    #[must_use]
    pub fn fd_count(&self) -> usize {
        self.fds.values().sum()
    }

    /// Bytes of all memfds.
    #[must_use]
    pub fn memfd_bytes(&self) -> u64 {
        self.memfds.values().map(|(_, bytes)| bytes).sum()
    }

    /// Without what other threads of a runtime open and close by themselves: the threads' count.
    #[must_use]
    pub fn without_threads(mut self) -> Self {
        self.threads = 0;
        self
    }
}

/// Anonymous memory that a process has resident, bytes (RssAnon of proc_pid_status(5)).
///
/// # Errors
/// When `/proc/PID/status` cannot be read, or has no such line.
pub fn anonymous_bytes(pid: u32) -> std::io::Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kib: Option<u64> = line.and_then(|line| line.split_whitespace().next()).and_then(|text| text.parse().ok());
    kib.map(|kib| kib * 1024).ok_or_else(|| std::io::Error::new(std::io::ErrorKind::InvalidData, "no RssAnon"))
}

/// The kind of a descriptor: its link without the number that tells two of a kind apart.
fn kind_of(link: &str) -> String {
    match link.split_once(":[") {
        Some((kind @ ("socket" | "pipe"), _)) => kind.to_owned(),
        _ => link.trim_end_matches(" (deleted)").to_owned(),
    }
}

/// Bytes mapped of each memfd, from `/proc/PID/maps` (proc_pid_maps(5)).
fn mapped_memfds(maps: &str) -> BTreeMap<String, u64> {
    let mut mapped = BTreeMap::new();
    for line in maps.lines() {
        let Some((range, name)) = line.split_once(' ').zip(line.split_once("/memfd:")).map(|(a, b)| (a.0, b.1)) else {
            continue;
        };
        let Some((start, end)) = range.split_once('-') else { continue };
        let (start, end) = (u64::from_str_radix(start, 16), u64::from_str_radix(end, 16));
        if let (Ok(start), Ok(end)) = (start, end) {
            *mapped.entry(name.trim_end_matches(" (deleted)").to_owned()).or_default() += end.saturating_sub(start);
        }
    }
    mapped
}

#[cfg(test)]
mod tests {
    use super::*;
    use gdrd_shm::Segment;

    #[test]
    fn a_memfd_shows_as_descriptor_as_memory_and_as_mapping() {
        let before = Footprint::of(std::process::id()).unwrap();
        assert!(!before.memfds.contains_key("footprint-test"));
        let segment = Segment::create("footprint-test", 8192).unwrap();
        let again = segment.try_clone_fd().unwrap();
        let with = Footprint::of(std::process::id()).unwrap();
        assert_eq!(with.fds.get("/memfd:footprint-test"), Some(&2));
        assert_eq!(with.memfds.get("footprint-test"), Some(&(1, 8192)));
        assert_eq!(with.mapped.get("footprint-test"), Some(&8192));
        drop((segment, again));
        let after = Footprint::of(std::process::id()).unwrap();
        assert!(!after.fds.contains_key("/memfd:footprint-test") && !after.mapped.contains_key("footprint-test"));
    }

    #[test]
    fn kinds_forget_the_number_that_tells_two_apart() {
        assert_eq!(kind_of("socket:[4711]"), "socket");
        assert_eq!(kind_of("/memfd:gpu (deleted)"), "/memfd:gpu");
        assert_eq!(kind_of("anon_inode:[eventfd]"), "anon_inode:[eventfd]");
    }
}
