//! The machine that was measured, since a figure without it says nothing.

use std::fs;

/// What a reader needs to judge the figures.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Machine {
    /// As /proc/cpuinfo names it, with "virtual" where there is a hypervisor.
    pub(crate) cpu: String,
    pub(crate) cores: usize,
    pub(crate) memory_gib: u64,
    /// proc_sys_kernel(5), osrelease.
    pub(crate) kernel: String,
    /// Average of runnable threads in the last minute, proc_loadavg(5): above 2 or so, others were at work too.
    pub(crate) load: String,
}

impl Machine {
    pub(crate) fn look() -> Self {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let cpuinfo = read("/proc/cpuinfo");
        let model = field(&cpuinfo, "model name").unwrap_or("unknown CPU").to_owned();
        let is_virtual =
            field(&cpuinfo, "flags").is_some_and(|flags| flags.split(' ').any(|flag| flag == "hypervisor"));
        let memory = read("/proc/meminfo");
        let kib = field(&memory, "MemTotal").and_then(|text| text.trim_end_matches(" kB").parse::<u64>().ok());
        Self {
            cpu: if is_virtual { format!("{model}, virtual") } else { model },
            cores: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            memory_gib: kib.unwrap_or(0).div_ceil(1 << 20),
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            load: read("/proc/loadavg").split(' ').next().unwrap_or_default().to_owned(),
        }
    }
}

/// The value of the first line `name : value`.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let pairs = text.lines().filter_map(|line| line.split_once(':'));
    pairs.map(|(key, value)| (key.trim(), value.trim())).find(|(key, _)| *key == name).map(|(_, value)| value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_cores_memory_and_a_kernel() {
        let machine = Machine::look();
        assert!(machine.cores > 0 && machine.memory_gib > 0);
        assert!(!machine.kernel.is_empty() && !machine.load.is_empty());
    }

    #[test]
    fn fields_are_found_by_their_whole_name() {
        let text = "model\t\t: 1\nmodel name\t: A CPU @ 2 GHz: fast\n";
        assert_eq!(field(text, "model name"), Some("A CPU @ 2 GHz: fast"));
        assert_eq!(field(text, "flags"), None);
    }
}
