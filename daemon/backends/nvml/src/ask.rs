//! The questions.

use std::collections::BTreeMap;
use std::ffi::OsStr;

use nvml_wrapper::bitmasks::InitFlags;
use nvml_wrapper::enum_wrappers::device::{ComputeMode as NvmlComputeMode, EccCounter, MemoryError};
use nvml_wrapper::enums::device::{SampleValue, UsedGpuMemory};
use nvml_wrapper::error::NvmlError as Told;
use nvml_wrapper::structs::device::FieldId;
use nvml_wrapper::sys_exports::field_id::NVML_FI_DEV_GET_GPU_RECOVERY_ACTION;
use nvml_wrapper::{Device, Nvml};

use crate::report::{
    Bar1, ComputeMode, FabricReport, FarEnd, GpuReport, Links, Memory, PcieLink, ProcessMemory, Report, Slice,
};
use crate::{NvmlError, raw};

/// Most NVLinks of a GPU (`NVML_NVLINK_MAX_LINKS`, nvml.h).
const MAX_LINKS: u32 = 18;
/// Most slices of a GPU that are listed; today's have seven.
const MAX_SLICES: u32 = 64;
/// Most processes of a GPU that are listed.
const MAX_PROCESSES: usize = 256;
/// `NVML_DEVICE_MIG_ENABLE`, nvml.h.
const MIG_ENABLED: u32 = 1;
/// `nvmlIntNvLinkDeviceType_t`, nvml.h.
const DEVICE_TYPE_GPU: u32 = 0;
const DEVICE_TYPE_IBMNPU: u32 = 1;
const DEVICE_TYPE_SWITCH: u32 = 2;
/// `nvmlDeviceGpuRecoveryAction_t`, nvml.h, as far as the GPU is of no use before: GPU_RESET, NODE_REBOOT, GPU_RESET_BUS.
const REMEDIES: [(u64, &str); 3] =
    [(1, "a reset of the gpu"), (2, "a reboot of the host"), (5, "a reset of the gpu by its bus")];
/// What a link of each version carries in one direction, Gbit/s (`nvmlNvlinkVersion_t`, nvml.h, from 1 on). Rates as
/// NVIDIA publishes them for P100 (160 GB/s by 4 links, both directions), V100 (300 by 6), A100 (600 by 12), H100 (900 by
/// 18) and B200 (1800 by 18). `nvidia-smi nvlink -s` prints the line rate, 26.562 GB/s for 25 GB/s of data.
const LINK_GBPS: [u32; 7] = [160, 200, 200, 200, 200, 200, 400];

/// Loads NVML, asks it about every GPU and unloads it. Blocks on the driver.
///
/// # Errors
/// Without the library, or when it does not list the GPUs.
pub fn read() -> Result<Report, NvmlError> {
    read_from(None)
}

/// The same with the library of this path instead of the one that is found by name.
///
/// # Errors
/// As [`read`].
pub fn read_from(library: Option<&OsStr>) -> Result<Report, NvmlError> {
    let nvml = start(library)?;
    let mut report = Report { driver_version: nvml.sys_driver_version().unwrap_or_default(), ..Report::default() };
    for index in 0..nvml.device_count().map_err(NvmlError::List)? {
        match nvml.device_by_index(index).and_then(|device| gpu(&device)) {
            Ok(gpu) => report.gpus.push(gpu),
            Err(error) => report.warnings.push(format!("gpu with nvml index {index}: {error}")),
        }
    }
    report.gpus.sort_by(|a, b| a.bdf.cmp(&b.bdf));
    report.tell_far_ends();
    Ok(report)
}

pub(crate) fn start(library: Option<&OsStr>) -> Result<Nvml, NvmlError> {
    let mut builder = Nvml::builder();
    builder.flags(InitFlags::empty());
    if let Some(library) = library {
        builder.lib_path(library);
    }
    builder.init().map_err(NvmlError::Start)
}

fn gpu(device: &Device<'_>) -> Result<GpuReport, Told> {
    let memory = device.memory_info();
    let lost = match &memory {
        Err(error @ (Told::GpuLost | Told::ResetRequired)) => Some(error.to_string()),
        _ => None,
    };
    let link = |generation: Result<u32, Told>, width: Result<u32, Told>| {
        Some(PcieLink { generation: generation.ok()?, width: width.ok()? })
    };
    let mig = device.mig_mode().ok().map(|mode| mode.current == MIG_ENABLED);
    Ok(GpuReport {
        uuid: device.uuid()?,
        bdf: device.pci_info()?.bus_id.to_ascii_lowercase(),
        product: device.name().unwrap_or_default(),
        minor: device.minor_number().ok(),
        memory: memory.ok().map(|memory| Memory {
            total_bytes: memory.total,
            reserved_bytes: memory.reserved,
            used_bytes: memory.used,
        }),
        processes: processes(device),
        bar1: device.bar1_memory_info().ok().map(|bar1| Bar1 { total_bytes: bar1.total, used_bytes: bar1.used }),
        mig,
        slices: if mig == Some(true) { slices(device) } else { Vec::new() },
        compute_mode: device.compute_mode().ok().map(|mode| match mode {
            NvmlComputeMode::Default => ComputeMode::Shared,
            NvmlComputeMode::Prohibited => ComputeMode::Prohibited,
            _ => ComputeMode::Exclusive,
        }),
        pcie_now: link(device.current_pcie_link_gen(), device.current_pcie_link_width()),
        pcie_best: link(device.max_pcie_link_gen(), device.max_pcie_link_width()),
        nvlinks: nvlinks(device),
        fabric: raw::fabric_info(device).map(|info| FabricReport {
            state: info.state.into(),
            status: info.status,
            cluster_uuid: info.clusterUuid,
            clique_id: info.cliqueId,
            health_mask: info.healthMask,
        }),
        uncorrected_ecc_errors: device.total_ecc_errors(MemoryError::Uncorrected, EccCounter::Volatile).ok(),
        lost,
        remedy: remedy(device).map(str::to_owned),
    })
}

/// What it takes to have the GPU work again. A GPU that merely has less to offer before its next reset works.
fn remedy(device: &Device<'_>) -> Option<&'static str> {
    let told = device.field_values_for(&[FieldId(NVML_FI_DEV_GET_GPU_RECOVERY_ACTION)]).ok()?.pop()?;
    let action = match told.ok()?.value.ok()? {
        SampleValue::U32(action) => u64::from(action),
        SampleValue::U64(action) => action,
        _ => return None,
    };
    let of_use = REMEDIES.iter().find(|(known, _)| *known == action);
    of_use.map(|(_, remedy)| *remedy)
}

/// What a far end is told as, before it is known which GPUs there are.
fn far_end(device: &Device<'_>, link: u32) -> FarEnd {
    let bdf = device.link_wrapper_for(link).remote_pci_info().ok().map(|pci| pci.bus_id.to_ascii_lowercase());
    match raw::remote_device_type(device, link) {
        Some(DEVICE_TYPE_SWITCH) => FarEnd::Switch,
        Some(DEVICE_TYPE_IBMNPU) => FarEnd::Cpu,
        Some(DEVICE_TYPE_GPU) => bdf.map_or(FarEnd::Unknown { bdf: None }, |bdf| FarEnd::Gpu { bdf }),
        _ => FarEnd::Unknown { bdf },
    }
}

fn nvlinks(device: &Device<'_>) -> Vec<Links> {
    let mut ends: BTreeMap<FarEnd, (u8, Option<u32>)> = BTreeMap::new();
    for link in 0..MAX_LINKS {
        let wrapper = device.link_wrapper_for(link);
        if !wrapper.is_active().unwrap_or(false) {
            continue;
        }
        let (links, gbps) = ends.entry(far_end(device, link)).or_default();
        *links = links.saturating_add(1);
        *gbps = gbps.or_else(|| link_gbps(wrapper.version().ok()?));
    }
    ends.into_iter().map(|(far, (links, link_gbps))| Links { far, links, link_gbps }).collect()
}

fn link_gbps(version: u32) -> Option<u32> {
    LINK_GBPS.get(usize::try_from(version.checked_sub(1)?).ok()?).copied()
}

fn slices(device: &Device<'_>) -> Vec<Slice> {
    let slice = |index: u32| {
        let slice = device.mig_device_by_index(index).ok()?;
        let (gpu_instance, compute_instance) = raw::instances(&slice)?;
        Some(Slice {
            uuid: slice.uuid().ok()?,
            gpu_instance,
            compute_instance,
            name: slice.name().unwrap_or_default(),
            memory_bytes: slice.memory_info().ok().map(|memory| memory.total),
        })
    };
    (0..device.mig_device_count().unwrap_or_default().min(MAX_SLICES)).filter_map(slice).collect()
}

fn processes(device: &Device<'_>) -> Vec<ProcessMemory> {
    let processes = device.running_compute_processes().unwrap_or_default().into_iter().take(MAX_PROCESSES);
    let process = processes.map(|process| ProcessMemory {
        pid: process.pid,
        used_bytes: match process.used_gpu_memory {
            UsedGpuMemory::Used(bytes) => Some(bytes),
            UsedGpuMemory::Unavailable => None,
        },
    });
    process.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_have_the_published_rates() {
        assert_eq!([1, 2, 6, 7].map(link_gbps), [Some(160), Some(200), Some(200), Some(400)]);
        assert_eq!([0, 8, u32::MAX].map(link_gbps), [None; 3]);
    }
}
