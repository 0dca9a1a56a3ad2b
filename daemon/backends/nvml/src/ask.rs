//! The questions.

use std::collections::BTreeMap;

use nvml_wrapper::enum_wrappers::device::{ComputeMode as NvmlComputeMode, EccCounter, MemoryError};
use nvml_wrapper::error::NvmlError as Told;
use nvml_wrapper::{Device, Nvml};

use crate::NvmlError;
use crate::report::{Bar1, ComputeMode, GpuReport, Links, PcieLink, Report};

/// Most NVLinks of a GPU (`NVML_NVLINK_MAX_LINKS`, nvml.h).
const MAX_LINKS: u32 = 18;
/// `NVML_VALUE_NOT_AVAILABLE` for modes: `NVML_DEVICE_MIG_DISABLE` is 0, `NVML_DEVICE_MIG_ENABLE` 1 (nvml.h).
const MIG_ENABLED: u32 = 1;

/// Loads NVML, asks it about every GPU and unloads it. Blocks on the driver.
///
/// # Errors
/// Without the library, or when it does not list the GPUs.
pub fn read() -> Result<Report, NvmlError> {
    let nvml = Nvml::init().map_err(NvmlError::Start)?;
    let mut report = Report { driver_version: nvml.sys_driver_version().unwrap_or_default(), ..Report::default() };
    for index in 0..nvml.device_count().map_err(NvmlError::List)? {
        match nvml.device_by_index(index).and_then(|device| gpu(&device)) {
            Ok(gpu) => report.gpus.push(gpu),
            Err(error) => report.warnings.push(format!("gpu with nvml index {index}: {error}")),
        }
    }
    report.gpus.sort_by(|a, b| a.bdf.cmp(&b.bdf));
    report.tell_switches();
    Ok(report)
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
    Ok(GpuReport {
        uuid: device.uuid()?,
        bdf: device.pci_info()?.bus_id.to_ascii_lowercase(),
        product: device.name().unwrap_or_default(),
        minor: device.minor_number().ok(),
        memory_bytes: memory.ok().map(|memory| memory.total),
        bar1: device.bar1_memory_info().ok().map(|bar1| Bar1 { total_bytes: bar1.total, used_bytes: bar1.used }),
        mig: device.mig_mode().ok().map(|mode| mode.current == MIG_ENABLED),
        compute_mode: device.compute_mode().ok().map(|mode| match mode {
            NvmlComputeMode::Default => ComputeMode::Shared,
            NvmlComputeMode::Prohibited => ComputeMode::Prohibited,
            _ => ComputeMode::Exclusive,
        }),
        pcie_now: link(device.current_pcie_link_gen(), device.current_pcie_link_width()),
        pcie_best: link(device.max_pcie_link_gen(), device.max_pcie_link_width()),
        nvlinks: nvlinks(device),
        uncorrected_ecc_errors: device.total_ecc_errors(MemoryError::Uncorrected, EccCounter::Volatile).ok(),
        lost,
    })
}

fn nvlinks(device: &Device<'_>) -> Vec<Links> {
    let mut ends: BTreeMap<Option<String>, u8> = BTreeMap::new();
    for index in 0..MAX_LINKS {
        let link = device.link_wrapper_for(index);
        if !link.is_active().unwrap_or(false) {
            continue;
        }
        let peer = link.remote_pci_info().ok().map(|pci| pci.bus_id.to_ascii_lowercase());
        let links = ends.entry(peer).or_default();
        *links = links.saturating_add(1);
    }
    ends.into_iter().map(|(peer, links)| Links { peer, links }).collect()
}
