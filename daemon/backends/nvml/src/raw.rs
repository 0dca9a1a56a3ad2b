//! Questions that nvml-wrapper 0.13 has no answer for: it does not ask about the fabric, and for the kind of a far end it
//! reads a copy that the library never wrote.

use nvml_wrapper::Device;
use nvml_wrapper_sys::bindings::{nvmlDevice_t, nvmlGpuFabricInfo_v2_t, nvmlReturn_t};

/// `NVML_SUCCESS`, nvml.h.
const SUCCESS: nvmlReturn_t = 0;
/// `nvmlGpuFabricInfo_v2`, nvml.h: the size of the structure, and version 2 in the highest byte. Version 2 is as old as the
/// function, and has all but a summary of the health mask.
const FABRIC_V2: u32 = 36 | 2 << 24;
const _: () = assert!(size_of::<nvmlGpuFabricInfo_v2_t>() == 36);

fn handle_of(device: &Device<'_>) -> nvmlDevice_t {
    // SAFETY: the handle is used for the one call after this, while the library that `device` borrows is loaded.
    unsafe { device.handle() }
}

/// `nvmlIntNvLinkDeviceType_t` of the far end of a link, where the library tells it.
pub(crate) fn remote_device_type(device: &Device<'_>, link: u32) -> Option<u32> {
    let call = *device.nvml().lib().nvmlDeviceGetNvLinkRemoteDeviceType.as_ref().ok()?;
    let mut kind = 0;
    // SAFETY: the handle is a device of the loaded library, and `kind` is valid for a write for the call (nvml.h).
    let code = unsafe { call(handle_of(device), link, &raw mut kind) };
    (code == SUCCESS).then_some(kind)
}

/// Where the GPU stands with the fabric, where the library tells it.
pub(crate) fn fabric_info(device: &Device<'_>) -> Option<nvmlGpuFabricInfo_v2_t> {
    let call = *device.nvml().lib().nvmlDeviceGetGpuFabricInfoV.as_ref().ok()?;
    let mut info = nvmlGpuFabricInfo_v2_t {
        version: FABRIC_V2,
        clusterUuid: [0; 16],
        status: 0,
        cliqueId: 0,
        state: 0,
        healthMask: 0,
    };
    // SAFETY: the handle is a device of the loaded library; the library writes as much as the version in `info` says, and
    // all versions begin alike (nvml.h), so that the pointer may be to the older one.
    let code = unsafe { call(handle_of(device), (&raw mut info).cast()) };
    (code == SUCCESS).then_some(info)
}

/// GPU instance and compute instance of a MIG slice.
pub(crate) fn instances(slice: &Device<'_>) -> Option<(u32, u32)> {
    let library = slice.nvml().lib();
    let gpu_instance = *library.nvmlDeviceGetGpuInstanceId.as_ref().ok()?;
    let compute_instance = *library.nvmlDeviceGetComputeInstanceId.as_ref().ok()?;
    let (mut gpu, mut compute) = (0, 0);
    // SAFETY: the handle is a device of the loaded library, and `gpu` is valid for a write for the call (nvml.h).
    let code = unsafe { gpu_instance(handle_of(slice), &raw mut gpu) };
    // SAFETY: as above, for `compute`.
    let codes = code | unsafe { compute_instance(handle_of(slice), &raw mut compute) };
    (codes == SUCCESS).then_some((gpu, compute))
}
