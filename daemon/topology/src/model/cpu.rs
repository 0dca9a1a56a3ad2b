//! What kind of CPU a host has.

use serde::{Deserialize, Serialize};

/// Kind of CPU, as other software asks for it: all CPUs of a host are of one kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuKind {
    /// `x86_64`, `arm64` or `ppc64`.
    pub arch: String,
    /// Vendor as CPUID has it (`GenuineIntel`); x86 only.
    pub vendor: Option<String>,
    /// Family as Linux prints it; x86 only.
    pub family: Option<u32>,
    /// Model as Linux prints it; x86 only.
    pub model: Option<u32>,
}

impl CpuKind {
    /// Reads the first CPU of `/proc/cpuinfo`; `None` for architectures that no GPU host has.
    #[must_use]
    pub fn of_cpuinfo<'a>(lines: impl Iterator<Item = &'a str> + Clone) -> Option<Self> {
        let value = |name: &str| {
            let mut fields = lines.clone().filter_map(|line| line.split_once(':'));
            fields.find(|(key, _)| key.trim() == name).map(|(_, value)| value.trim())
        };
        let number = |name: &str| value(name).and_then(|text| text.parse().ok());
        let is_plain = |vendor: &&str| !vendor.is_empty() && vendor.bytes().all(|byte| byte.is_ascii_alphanumeric());
        let arch = |arch: &str| Self { arch: arch.to_owned(), vendor: None, family: None, model: None };
        if let Some(vendor) = value("vendor_id").filter(is_plain) {
            let vendor = Some(vendor.to_owned());
            return Some(Self { vendor, family: number("cpu family"), model: number("model"), ..arch("x86_64") });
        }
        if value("CPU implementer").is_some() {
            return Some(arch("arm64"));
        }
        value("cpu").filter(|cpu| cpu.starts_with("POWER")).map(|_| arch("ppc64"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_three_architectures_are_told_apart() {
        let of = |text: &str| CpuKind::of_cpuinfo(text.lines());
        let intel = of("processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 207\nmodel name\t: x\n");
        let intel = intel.unwrap();
        assert_eq!((intel.arch.as_str(), intel.vendor.as_deref()), ("x86_64", Some("GenuineIntel")));
        assert_eq!((intel.family, intel.model), (Some(6), Some(207)));
        assert_eq!(of("CPU implementer\t: 0x41\n").unwrap().arch, "arm64");
        assert_eq!(of("cpu\t\t: POWER9, altivec supported\n").unwrap().arch, "ppc64");
        assert_eq!(of("vendor_id : a\"b\n"), None);
        assert_eq!(of(""), None);
    }
}
