//! Which RDMA devices of this machine an IOMMU translates for.

use std::collections::BTreeSet;
use std::path::Path;

use gdrd_topology::model::{HcaOrigin, Host};

/// Where the kernel lists PCI functions.
const FUNCTIONS: &str = "/sys/bus/pci/devices";

/// Names of those HCAs of the host.
pub(crate) fn translated(host: &Host) -> BTreeSet<String> {
    translated_in(Path::new(FUNCTIONS), host)
}

/// By the type of the group that its function is in: DMA and DMA-FQ translate, identity does not (Linux
/// Documentation/ABI/testing/sysfs-kernel-iommu_groups). A function without a group has no IOMMU. A software device moves by the
/// CPU, whatever it hangs on.
fn translated_in(functions: &Path, host: &Host) -> BTreeSet<String> {
    let kind = |bdf: String| std::fs::read_to_string(functions.join(bdf).join("iommu_group/type")).ok();
    let hardware = host.hcas.iter().filter(|hca| hca.origin == HcaOrigin::Hardware);
    let is_translated = |hca: &&gdrd_topology::model::Hca| {
        hca.bdf.and_then(|bdf| kind(bdf.to_string())).is_some_and(|kind| kind.trim().starts_with("DMA"))
    };
    hardware.filter(is_translated).map(|hca| hca.name.clone()).collect()
}

#[cfg(test)]
mod tests {
    use gdrd_topology::profile;

    use super::*;

    #[test]
    fn groups_that_translate_are_told_from_those_that_do_not() {
        let host = profile::builtin("dgx-a100").expect("a built-in profile").host;
        let functions = tempfile::tempdir().expect("a folder");
        for (hca, kind) in host.hcas.iter().zip(["DMA\n", "DMA-FQ\n", "identity\n", "blocked\n"]) {
            let group = functions.path().join(hca.bdf.expect("a function").to_string()).join("iommu_group");
            std::fs::create_dir_all(&group).expect("a folder");
            std::fs::write(group.join("type"), kind).expect("a file");
        }
        let names: Vec<String> = host.hcas.iter().take(2).map(|hca| hca.name.clone()).collect();
        assert_eq!(translated_in(functions.path(), &host).into_iter().collect::<Vec<_>>(), names);
    }
}
