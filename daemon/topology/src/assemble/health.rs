//! What is wrong with a host as such, whatever its pairs.

use crate::acs::Acs;
use crate::model::{Host, PciFunction};

/// First kernel whose SMMU driver gives a device a PASID in an identity domain.
const PASID_IN_IDENTITY_DOMAIN: (u32, u32) = (6, 11);
const NVIDIA: u16 = 0x10de;

/// Adds what a host's facts say against it.
pub(super) fn judge(host: &Host, warnings: &mut Vec<String>) {
    warnings.extend(no_pasid(host));
}

/// arm64 before Linux 6.11 with untranslated DMA and ACS: the driver's bind of a process to the GPU fails, so that no
/// CUDA context can be made (NVIDIA/nodewright-packages#121, NVIDIA/NV-Kernels#20).
fn no_pasid(host: &Host) -> Option<String> {
    let kernel = host.kernel.as_ref().filter(|kernel| kernel.iommu_passthrough == Some(true))?;
    if host.cpu.as_ref()?.arch != "arm64" || kernel.version()? >= PASID_IN_IDENTITY_DOMAIN {
        return None;
    }
    let is_nvidia = |function: &&PciFunction| function.vendor == Some(NVIDIA);
    let gpus = host.gpus.iter().filter_map(|gpu| host.function(gpu.bdf?)).filter(is_nvidia);
    let above: Vec<Option<Acs>> = gpus.flat_map(|gpu| host.bridges_above(gpu.bdf)).map(|bridge| bridge.acs).collect();
    let is_on = |acs: &Option<Acs>| matches!(acs, Some(Acs::Control(control)) if control.0 != 0);
    let when = match (above.is_empty(), above.iter().any(is_on), above.iter().any(Option::is_none)) {
        (true, ..) | (_, false, false) => return None,
        (_, true, _) => "and ACS on",
        (_, false, true) => "and, if it is, ACS on",
    };
    Some(format!(
        "kernel {} on arm64 with IOMMU passthrough {when}: no CUDA context can be made, unless the distribution has \
         mended it; boot with iommu.passthrough=0, or Linux 6.11 or later",
        kernel.release
    ))
}
