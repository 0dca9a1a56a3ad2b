//! What the NVIDIA driver tells of its GPUs in `/proc`, which everyone may read and no library is needed for.

use crate::bdf::Bdf;
use crate::driver_file::{self, DRIVER_FILE, MAX_DRIVER_BYTES};
use crate::model::{DeviceNode, DriverFacts, GpuDetail, GpuFacts};
use crate::sysfs::tree::Tree;

/// A folder for each GPU, named by its address, with a file `information` of `Key: value` lines
/// (open-gpu-kernel-modules:kernel-open/nvidia/nv-procfs.c).
pub(super) const GPUS: &str = "proc/driver/nvidia/gpus";
/// Major number of `/dev/nvidiaN` (open-gpu-kernel-modules:kernel-open/common/inc/nv-linux.h, NV_MAJOR_DEVICE_NUMBER).
const MAJOR: u32 = 195;

/// Reads all GPUs that the driver has.
pub(super) fn gpus(tree: &Tree) -> Vec<GpuFacts> {
    let folders = tree.list_or_warn(GPUS);
    folders.iter().filter_map(|name| gpu(&tree.table(&format!("{GPUS}/{name}/information")), name)).collect()
}

fn gpu(lines: &[String], folder: &str) -> Option<GpuFacts> {
    let value = |key: &str| {
        let fields = lines.iter().filter_map(|line| line.split_once(':'));
        fields.filter(|(name, _)| name.trim() == key).map(|(_, value)| value.trim()).find(|value| !value.is_empty())
    };
    let bdf: Bdf = value("Bus Location").and_then(|text| text.parse().ok()).or_else(|| folder.parse().ok())?;
    // Before its first use the driver does not know, and prints question marks.
    let uuid = value("GPU UUID").filter(|uuid| uuid.starts_with("GPU-") && !uuid.contains('?'));
    let minor = value("Device Minor").and_then(|minor| minor.parse().ok());
    Some(GpuFacts {
        bdf,
        uuid: uuid.map(str::to_owned),
        device_node: minor.map(|minor| DeviceNode { major: MAJOR, minor }),
        detail: GpuDetail { product: value("Model").map(str::to_owned), ..GpuDetail::default() },
    })
}

/// What NVML told when a tree was captured.
pub(super) fn captured(tree: &Tree) -> Option<DriverFacts> {
    let bytes = tree.bytes(DRIVER_FILE, MAX_DRIVER_BYTES).ok()?;
    match driver_file::from_text(&String::from_utf8_lossy(&bytes)) {
        Ok(facts) => Some(facts),
        Err(error) => {
            tree.warn(DRIVER_FILE, error);
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str, folder: &str) -> Option<GpuFacts> {
        gpu(&text.lines().map(str::to_owned).collect::<Vec<_>>(), folder)
    }

    #[test]
    fn a_gpu_is_told_by_its_address_uuid_and_minor() {
        let text = "Model: \t\t NVIDIA H200\nIRQ:   \t\t 171\nGPU UUID: \t GPU-4f5e6a7b-0000-0000-0000-000000000001\n\
                    Bus Type: \t PCIe\nBus Location: \t 0000:18:00.0\nDevice Minor: \t 3\nGPU Excluded:\t No\n";
        let facts = read(text, "0000:18:00.0").unwrap();
        assert_eq!(facts.bdf.to_string(), "0000:18:00.0");
        assert_eq!(facts.uuid.as_deref(), Some("GPU-4f5e6a7b-0000-0000-0000-000000000001"));
        assert_eq!(facts.device_node.map(|node| node.to_string()).as_deref(), Some("char:195:3"));
        assert_eq!(facts.detail.product.as_deref(), Some("NVIDIA H200"));
    }

    #[test]
    fn what_the_driver_does_not_know_yet_is_unknown() {
        let facts = read("GPU UUID: \t GPU-????????-????-????-????-????????????\nDevice Minor: \t x\n", "0000:18:00.0")
            .unwrap();
        assert_eq!((facts.uuid, facts.device_node), (None, None));
        assert_eq!(read("GPU UUID: GPU-1\n", "not-an-address"), None);
    }
}
