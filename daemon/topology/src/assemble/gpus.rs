//! Which PCI functions are GPUs.

use crate::bdf::Bdf;
use crate::model::{Gpu, GpuFacts, Host, NamedGpu, PciClass, PciFunction, Upstream};
use crate::source::{SourceKind, Sourced};

/// PCI vendor and device ids that count as GPU beside the built-in rule.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuIds(Vec<(u16, u16)>);

/// Text that is no `vendor:device` pair.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("gpu_ids: `{0}` is no vendor:device pair of four hexadecimal digits each, as in 1bcf:001c")]
pub struct BadGpuId(String);

impl GpuIds {
    /// Reads `1bcf:001c` pairs.
    ///
    /// # Errors
    /// Names the first entry that is no such pair.
    pub fn parse<'a>(entries: impl IntoIterator<Item = &'a str>) -> Result<Self, BadGpuId> {
        let id = |text: &str| {
            let is_hex = text.len() == 4 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
            is_hex.then(|| u16::from_str_radix(text, 16).ok()).flatten()
        };
        entries
            .into_iter()
            .map(|entry| {
                entry
                    .split_once(':')
                    .and_then(|(vendor, device)| id(vendor).zip(id(device)))
                    .ok_or_else(|| BadGpuId(entry.to_owned()))
            })
            .collect::<Result<_, _>>()
            .map(Self)
    }

    pub(crate) fn contains(&self, function: &PciFunction) -> bool {
        let ids = function.vendor.zip(function.device);
        ids.is_some_and(|ids| self.0.contains(&ids))
    }
}

/// NVIDIA, AMD and Intel: the vendors whose display controllers and accelerators are GPUs.
const GPU_VENDORS: [u16; 3] = [0x10de, 0x1002, 0x8086];

/// Class 0x0302 of any vendor; the display classes and accelerators only of GPU vendors and behind a
/// bridge, which leaves out BMC, emulated and CPU-internal displays.
pub(crate) fn is_gpu(function: &PciFunction, ids: &GpuIds) -> bool {
    if function.fell_off_the_bus() {
        return false;
    }
    let of_gpu_vendor = function.vendor.is_some_and(|id| GPU_VENDORS.contains(&id));
    let behind_bridge = !matches!(function.upstream, Upstream::Root(_));
    match function.subclass() {
        PciClass::CONTROLLER_3D => true,
        PciClass::VGA | PciClass::DISPLAY_OTHER | PciClass::ACCELERATOR => {
            (of_gpu_vendor && behind_bridge) || ids.contains(function)
        }
        _ => ids.contains(function),
    }
}

/// What an input says of its GPUs.
pub(super) struct Listed<'a> {
    pub(super) facts: &'a [GpuFacts],
    pub(super) stated: &'a [Bdf],
    pub(super) named: Vec<NamedGpu>,
}

/// GPUs of the host in PCI order, those without an address last.
pub(super) fn find(
    host: &Host,
    listed: Listed<'_>,
    options: &super::ReadOptions,
    source: SourceKind,
    warnings: &mut Vec<String>,
) -> Vec<Gpu> {
    let mut gpus = Vec::new();
    for function in &host.functions {
        if function.fell_off_the_bus() {
            warnings.push(format!("{}: does not answer, left out", function.bdf));
        } else if (listed.stated.contains(&function.bdf) || is_gpu(function, &options.gpu_ids))
            && !is_virtual(host, function)
        {
            let known = listed.facts.iter().find(|facts| facts.bdf == function.bdf);
            gpus.push(gpu(gpus.len(), function, known, source));
        }
    }
    for facts in listed.facts {
        if !gpus.iter().any(|gpu| gpu.bdf == Some(facts.bdf)) {
            warnings.push(format!("{}: described as a GPU, but is none", facts.bdf));
        }
    }
    gpus.extend(listed.named.into_iter().map(|gpu| named(gpu, source)));
    gpus
}

fn named(gpu: NamedGpu, source: SourceKind) -> Gpu {
    Gpu {
        name: gpu.name,
        bdf: None,
        numa: gpu.numa,
        uuid: None,
        memory_bytes: None,
        device_node: None,
        product: None,
        bar1_bytes: None,
        fabric: None,
        mig: None,
        source,
    }
}

/// Virtual functions beside their physical one belong to guests.
fn is_virtual(host: &Host, function: &PciFunction) -> bool {
    let physical = function.physical_function;
    physical.is_some_and(|bdf: Bdf| host.function(bdf).is_some())
}

fn gpu(place: usize, function: &PciFunction, facts: Option<&GpuFacts>, source: SourceKind) -> Gpu {
    let detail = facts.map(|facts| &facts.detail);
    Gpu {
        name: format!("GPU{place}"),
        bdf: Some(function.bdf),
        numa: function.numa_id(),
        uuid: sourced(facts.and_then(|facts| facts.uuid.clone()), source),
        memory_bytes: sourced(detail.and_then(|detail| detail.memory_bytes), source),
        device_node: sourced(facts.and_then(|facts| facts.device_node), source),
        product: sourced(detail.and_then(|detail| detail.product.clone()), source),
        bar1_bytes: sourced(detail.and_then(|detail| detail.bar1_bytes), source),
        fabric: sourced(detail.and_then(|detail| detail.fabric.clone()), source),
        mig: sourced(detail.and_then(|detail| detail.mig.clone()), source),
        source: function.source,
    }
}

fn sourced<T>(fact: Option<T>, source: SourceKind) -> Option<Sourced<T>> {
    fact.map(|fact| Sourced::new(fact, source))
}
